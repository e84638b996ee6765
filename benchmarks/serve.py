"""Many requests at once: python -m benchmarks.serve [--model M] [--streams 1,2,4,8]

Three things, each beside what it is measured against, in turn in one run; medians, then one line
of JSON:
- tokens a second of several requests that generate together, against one alone;
- time to first token of a short request while a long prompt is read, against idle;
- time to first token of the second request with a long prompt in common, against the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks import readme
from engine import LLM, SamplingParams
from engine.cache import KV_DTYPES
from engine.loading.weights import KINDS
from engine.machine import describe
from engine.serve.service import Service
from engine.threads import default_threads

MARK = "serve"


class Ends:
    """Waits for requests, and tells when their first tokens came."""

    def __init__(self, n: int):
        self.first: list[float | None] = [None] * n
        self._left, self._all = n, threading.Event()
        self.errors: list[Exception] = []

    def listener(self, i: int):
        def listen(event) -> None:
            if event.token_ids and self.first[i] is None:
                self.first[i] = time.perf_counter()
            if event.error:
                self.errors.append(event.error)
            if event.finish_reason:
                self._left -= 1
                if not self._left:
                    self._all.set()

        return listen

    def wait(self) -> None:
        self._all.wait()
        if self.errors:
            raise self.errors[0]


def main(argv: list[str] | None = None) -> dict:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", help="default: the built-in model")
    ap.add_argument("--weights", choices=list(KINDS), default="q8_0")
    ap.add_argument("--kv-dtype", choices=list(KV_DTYPES), default="f32")
    ap.add_argument("--threads", type=int, default=default_threads())
    ap.add_argument("--streams", default="1,2,4,8", help="requests at once, one or more numbers")
    ap.add_argument("--context", type=int, default=128, help="tokens of a stream's prompt")
    ap.add_argument("--new", type=int, default=32, help="tokens that a stream generates")
    ap.add_argument("--long", type=int, default=2000, help="tokens of a long prompt")
    ap.add_argument("--short", type=int, default=17, help="tokens of a short one")
    ap.add_argument("--shared", type=int, default=1000, help="tokens of a prompt in common")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--write", type=Path, metavar="F", help="put the table between marks in F")
    args = ap.parse_args(argv)
    llm = LLM(args.model, weights=args.weights, kv_dtype=args.kv_dtype, threads=args.threads)
    rng = np.random.default_rng(0)

    def prompt(n: int) -> list[int]:
        return rng.integers(0, min(llm.config.vocab_size, 1000), n).tolist()

    counts = [int(n) for n in args.streams.split(",")]
    rates: dict[int, list[float]] = {n: [] for n in counts}
    times: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for n in counts:
            rates[n].append(rate(llm, [prompt(args.context) for _ in range(n)], args.new))
        for name, seconds in first_tokens(llm, prompt, args).items():
            times.setdefault(name, []).append(seconds)
    found = {
        "tokens_per_second": {n: statistics.median(some) for n, some in rates.items()},
        "seconds": {name: statistics.median(some) for name, some in times.items()},
    }
    text = table(found, args)
    print(text)
    print(json.dumps(found))
    if args.write:
        readme.write(args.write, MARK, text)
    return found


def rate(llm: LLM, prompts: list[list[int]], new: int) -> float:
    """Tokens a second that requests generate together, first tokens and prompts left out."""
    service, ends = Service(llm, max_running=len(prompts)), Ends(len(prompts))
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    try:
        for i, ids in enumerate(prompts):
            service.submit(ids, params, ends.listener(i))
        ends.wait()
        return (new - 1) * len(prompts) / (time.perf_counter() - max(ends.first))
    finally:
        service.close()


def first_tokens(llm: LLM, prompt, args) -> dict[str, float]:
    """Seconds to first tokens, and of one chunk of the long prompt."""
    service, one = Service(llm), SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)

    def first(ids: list[int]) -> float:
        ends, start = Ends(1), time.perf_counter()
        service.submit(ids, one, ends.listener(0))
        ends.wait()
        return ends.first[0] - start

    try:
        found = {"idle": first(prompt(args.short)), "chunk": first(prompt(512))}
        long, start = Ends(1), time.perf_counter()
        service.submit(prompt(args.long), one, long.listener(0))
        time.sleep(found["chunk"] / 2)  # amid its first chunk, which the short one has to await
        found["meanwhile"] = first(prompt(args.short))
        long.wait()
        found["long"] = long.first[0] - start
        common = prompt(args.shared)
        found["shared, first"] = first(common + prompt(args.short))
        found["shared, second"] = first(common + prompt(args.short))
        return found
    finally:
        service.close()


def table(found: dict, args) -> str:
    rates, s = found["tokens_per_second"], found["seconds"]
    alone = rates.get(1)
    model = Path(args.model).name if args.model else "built-in"
    lines = [
        f"{describe()}, {args.threads} threads; {model}, {args.weights}, K and V {args.kv_dtype}.",
        "",
        f"| requests at once, {args.context} tokens of context | tokens/s, all | to one alone |",
        "|---|---|---|",
    ]
    for n, tokens in rates.items():
        ratio = f"{tokens / alone:.2f}" if alone else ""
        lines.append(f"| {n} | {tokens:.1f} | {ratio} |")
    lines += [
        "",
        "| time to first token | ms |",
        "|---|---|",
        f"| {args.short} tokens, idle | {1e3 * s['idle']:.0f} |",
        f"| a chunk of 512 tokens, idle | {1e3 * s['chunk']:.0f} |",
        f"| {args.short} that come while {args.long} are read | {1e3 * s['meanwhile']:.0f} |",
        f"| {args.long} tokens, with those between | {1e3 * s['long']:.0f} |",
        f"| {args.shared} tokens and {args.short} | {1e3 * s['shared, first']:.0f} |",
        f"| the same {args.shared} and {args.short} others | {1e3 * s['shared, second']:.0f} |",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
