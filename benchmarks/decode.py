"""Decode speed beside the memory's: python -m benchmarks.decode [--model M] [--weights q8_0]

A token reads every weight once, and every row of K and V: the speed at which the machine reads
memory is the limit. Both are measured in turn in one run; medians are printed, then one line of
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from engine import LLM
from engine.cache import KV_DTYPES, KvCache
from engine.kernels.runs import Run
from engine.loading.weights import KINDS
from engine.machine import ReadBandwidth, describe
from engine.threads import default_threads


def main(argv: list[str] | None = None) -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", help="default: the built-in model")
    ap.add_argument("--weights", choices=list(KINDS), default="q8_0")
    ap.add_argument("--kv-dtype", choices=list(KV_DTYPES), default="f32")
    ap.add_argument("--threads", type=int, default=default_threads())
    ap.add_argument("--rows", default="17,511", help="rows of context, one or more")
    ap.add_argument("--steps", type=int, default=24, help="steps in a round")
    ap.add_argument("--rounds", type=int, default=5)
    args = ap.parse_args(argv)
    llm = LLM(args.model, weights=args.weights, kv_dtype=args.kv_dtype, threads=args.threads)
    memory = ReadBandwidth(args.threads)
    result = {}
    print(f"{describe()}, {args.threads} threads, weights {args.weights}, K and V {args.kv_dtype}")
    print(f"{'rows':>6} {'tok/s':>8} {'GB/s':>7} {'of the read bandwidth':>22}")
    for rows in map(int, args.rows.split(",")):
        steps, bandwidth = [], []
        for _ in range(args.rounds):
            bandwidth.append(memory.measure())
            steps += time_steps(llm, rows, args.steps)
            bandwidth.append(memory.measure())
        step, limit = statistics.median(steps), statistics.median(bandwidth)
        rate = llm._model.bytes_per_token(rows + args.steps // 2) / step
        result[rows] = {"tokens_per_second": 1 / step, "bytes_per_second": rate, "read": limit}
        share = f"{rate / limit:.1%} of {limit / 1e9:.2f}"
        print(f"{rows:>6} {1 / step:>8.2f} {rate / 1e9:>7.2f} {share:>22}")
    print(json.dumps(result))


def time_steps(llm: LLM, rows: int, n: int) -> list[float]:
    """Seconds of `n` decode steps after `rows` rows that hold data."""
    model, cache, rng = llm._model, filled(llm.new_cache(), rows), np.random.default_rng(rows)
    logits, took = model.new_logits(1), []
    for token in rng.integers(0, llm.config.vocab_size, n):
        start = time.perf_counter()
        model.forward([Run(np.array([token]), cache, False, 1)], logits)
        took.append(time.perf_counter() - start)
    return took


def filled(cache: KvCache, rows: int) -> KvCache:
    """`cache` with `rows` rows that hold data: pages never written would be read from cache."""
    rng = np.random.default_rng(rows)
    for layer in range(cache.num_layers()):
        k = rng.standard_normal((rows, cache.kv_dim), dtype=np.float32)
        cache.set_prefill(layer, k, k)
    return cache


if __name__ == "__main__":
    main()
