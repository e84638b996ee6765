"""KV caches side by side: python -m benchmarks.caches [--model M] [--prompts 17,511]

Every cache continues the same prompt of random ids with the same model, greedily: concat, which
copies on every append and read; basic, which does not; paged; and their float16 forms. The
generations run in one process and take turns step by step, so that a noisy machine moves all of
them alike; each has a clock that runs while it does. Those with float32 rows have to give the same
tokens. What a cache copied and allocated is counted by the cache itself.

A report of each, then a table, then one line of JSON. --picture draws the steps' times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from copy import copy
from pathlib import Path

import numpy as np

from benchmarks import one, readme
from engine import LLM, SamplingParams
from engine.cache import BasicKvCache, BlockPool, ConcatKvCache, Counts, KvCache, PagedKvCache
from engine.generate import Generation
from engine.loading.weights import KINDS
from engine.machine import describe
from engine.metrics import Metrics
from engine.session import Session
from engine.threads import default_threads

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None

MARK = "caches"  # of the table in a text (see readme.py)
KINDS_OF_CACHE = ("concat", "basic", "paged", "basic-f16", "paged-f16")
BLOCK_ROWS = 16
HEAD = (
    "prompt", "cache", "first token ms", "decode tok/s", "to concat", "to f32", "p95 / median step",
    "copied to read, a step", "copied to grow, a step", "appended, a step", "allocations a step",
)  # fmt: skip


class Stopwatch:
    """A clock that stands still but inside `with`."""

    def __init__(self):
        self._ran, self._since = 0.0, None

    def __enter__(self):
        self._since = time.perf_counter()

    def __exit__(self, *_):
        self._ran += time.perf_counter() - self._since
        self._since = None

    def __call__(self) -> float:
        return self._ran + (time.perf_counter() - self._since if self._since else 0.0)


def main(argv: list[str] | None = None) -> dict:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", help="a checkpoint directory or a hub name (default: built-in)")
    ap.add_argument("--weights", choices=list(KINDS), default="q8_0")
    ap.add_argument("--prompts", default="17,511", help="tokens, one or more")
    ap.add_argument("--new", type=one.at_least(3), default=64, help="tokens after each")
    ap.add_argument("--caches", default="concat,basic,paged,basic-f16", help="default: %(default)s")
    ap.add_argument("--threads", type=int, default=default_threads())
    ap.add_argument("--rounds", type=one.at_least(1), default=3)
    ap.add_argument("--picture", type=Path, metavar="FILE", help="steps' times, PNG or SVG")
    ap.add_argument("--write", type=Path, metavar="FILE", help="replace the table there")
    args = ap.parse_args(argv)
    names = args.caches.split(",")
    if strange := set(names) - set(KINDS_OF_CACHE):
        ap.error(f"{', '.join(sorted(strange))}: no cache; {', '.join(KINDS_OF_CACHE)} are")
    if args.write and not readme.is_marked(args.write, MARK):
        ap.error(f"{args.write} has no {' ... '.join(readme.marks(MARK))}")
    if args.picture and not args.picture.parent.is_dir():
        ap.error(f"{args.picture.parent} is not a directory")
    if args.picture and Figure is None:
        ap.error('matplotlib is missing: pip install ".[benchmarks]"')

    llm = LLM(args.model, weights=args.weights, threads=args.threads)
    prompts = [int(n) for n in args.prompts.split(",")]
    if max(prompts) + args.new > llm.context:
        ap.error(f"{max(prompts)} and {args.new} tokens: the model's context is {llm.context}")
    together(llm, names, [1, 2, 3], 2)  # the first step with float16 rows compiles
    results, steps = {}, {}
    for n in prompts:
        rng, rounds = np.random.default_rng(n), []
        for _ in range(args.rounds):
            ids = rng.integers(0, llm.config.vocab_size, n).tolist()
            rounds.append(together(llm, names, ids, args.new))
        for name in names:
            print(f"-- {n} tokens\n{rounds[-1][name][0].report('simd', name)}\n")
        steps[n] = {name: step_times([r[name][0] for r in rounds]) for name in names}
        results[n] = {name: figures([r[name] for r in rounds], steps[n][name]) for name in names}
        add_ratios(results[n])
    about = {
        "machine": describe(),
        "threads": args.threads,
        "model": args.model and Path(args.model).name or "built-in",
        "weights": args.weights,
        "rounds": args.rounds,
        "new": args.new,
    }
    text = markdown(results, about)
    print(text)
    print(json.dumps(about | {"prompts": results}))
    if args.write:
        readme.write(args.write, MARK, text)
    if args.picture:
        draw(steps).savefig(args.picture, dpi=100)
    return results


def new_cache(llm: LLM, name: str, rows: int) -> KvCache:
    """An empty cache of the kind `name`; a paged one has a pool of its own for `rows`."""
    sizes, (kind, _, dtype) = (llm.config.n_layers, llm.config.kv_dim), name.partition("-")
    if kind == "concat":
        return ConcatKvCache(*sizes)
    if kind == "basic":
        return BasicKvCache(*sizes, dtype or "f32")
    blocks = -(-rows // BLOCK_ROWS)
    return PagedKvCache(BlockPool(*sizes, BLOCK_ROWS, max_blocks=blocks, dtype=dtype or "f32"))


def together(
    llm: LLM, names: list[str], ids: list[int], new: int
) -> dict[str, tuple[Metrics, list[Counts]]]:
    """`new` tokens behind `ids` with each cache, one step of each in turn.

    For each, its metrics, and what its cache did in each decode step.
    """
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    runs, found = {}, {}
    for name in names:
        watch, session = Stopwatch(), Session(new_cache(llm, name, len(ids) + new), ids, len(ids))
        metrics = Metrics(watch)
        generation = Generation(llm._model, *llm.requests.begin(session, params, new, metrics))
        runs[name], found[name] = (watch, session.cache, generation), (metrics, [])
    for step in range(new):
        turn = step % len(names)
        for name in names[turn:] + names[:turn]:
            watch, cache, generation = runs[name]
            before = copy(cache.counts)
            with watch:
                next(generation.tokens())
            if step:
                found[name][1].append(cache.counts - before)
    same = {tuple(runs[n][2].completion.token_ids) for n in names if not n.endswith("-f16")}
    assert len(same) <= 1, "caches gave different tokens"
    return found


def step_times(rounds: list[Metrics]) -> list[float]:
    """Milliseconds of each decode step: the median of the rounds."""
    times = (m.per_forward_ms[1:] for m in rounds)
    return [statistics.median(some) for some in zip(*times, strict=True)]


def figures(rounds: list[tuple[Metrics, list[Counts]]], steps: list[float]) -> dict:
    """What the table shows of one cache. Copies are the mean of a decode step's, in bytes."""
    every = [ms for metrics, _ in rounds for ms in metrics.per_forward_ms[1:]]
    counts = [count for _, some in rounds for count in some]
    means = {key: statistics.mean(vars(c)[key] for c in counts) for key in vars(counts[0])}
    ordered = sorted(steps)
    return {
        "first_token_ms": statistics.median(m.time_to_first_token_ms for m, _ in rounds),
        "decode": 1e3 / statistics.median(every),
        "spread": ordered[int(0.95 * (len(ordered) - 1))] / statistics.median(ordered),
    } | means


def add_ratios(caches: dict[str, dict]) -> None:
    """Decode speed to that of concat, and of float16 rows to that of float32 ones."""
    for name, values in caches.items():
        if "concat" in caches and name != "concat":
            values["to_concat"] = values["decode"] / caches["concat"]["decode"]
        if (kind := name.removesuffix("-f16")) != name and kind in caches:
            values["to_f32"] = values["decode"] / caches[kind]["decode"]


def markdown(results: dict[int, dict], about: dict) -> str:
    """The machine, then a row for each prompt and cache."""
    lines = [
        f"{about['machine']}, {about['threads']} threads; {about['model']}, {about['weights']}, "
        f"{about['new']} new tokens, medians of {about['rounds']} rounds, step by step in turn.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|--:|:--|" + "--:|" * (len(HEAD) - 2),
    ]
    for prompt, caches in results.items():
        for name, v in caches.items():
            ratios = [f"{v[k]:.2f}" if k in v else "" for k in ("to_concat", "to_f32")]
            bytes_ = [size(v[key]) for key in ("read", "grow", "append")]
            row = [f"{prompt:,}", name, f"{v['first_token_ms']:.0f}", f"{v['decode']:.1f}", *ratios]
            row += [f"{v['spread']:.2f}", *bytes_, f"{v['allocations']:.3g}"]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def size(n: float) -> str:
    """Bytes in words: kB or MB, decimal."""
    return "0" if n == 0 else f"{n / 1e3:.0f} kB" if n < 1e6 else f"{n / 1e6:.0f} MB"


def draw(steps: dict[int, dict[str, list[float]]]) -> Figure:
    """A panel a prompt: every decode step's time, a line a cache."""
    figure = Figure(figsize=(9, 2.6 * len(steps)), layout="constrained")
    panels = figure.subplots(len(steps), squeeze=False, sharex=True)[:, 0]
    for axes, (prompt, lines) in zip(panels, steps.items(), strict=True):
        for name, line in lines.items():
            axes.plot(line, label=name, linewidth=1)
        axes.set(title=f"after {prompt:,} tokens", ylabel="ms a step", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    panels[-1].set_xlabel("token")
    return figure


if __name__ == "__main__":
    main()
