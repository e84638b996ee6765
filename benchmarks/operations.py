"""What the operations of a request take: python -m benchmarks.operations [--model M] [--prompt 511]

A prompt of random ids and the tokens after it under the profiler, beside the machine's own limits,
measured before and after; then what profiling itself costs, steps with and without it in turn. A
table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks import one, readme
from benchmarks.decode import filled
from engine import LLM, SamplingParams
from engine.kernels.runs import Run
from engine.loading.weights import KINDS
from engine.machine import bounds, describe
from engine.profiler import PHASES, Profile
from engine.threads import default_threads

MARK = "operations"  # of the table in a text (see readme.py)
LEAST = 0.0005  # of a step's time: operations below are left out of the table


def main(argv: list[str] | None = None) -> dict:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", help="a checkpoint directory or a hub name (default: built-in)")
    ap.add_argument("--weights", choices=list(KINDS), default="q8_0")
    ap.add_argument("--prompt", type=one.at_least(1), default=511, help="tokens")
    ap.add_argument("--new", type=one.at_least(2), default=64, help="tokens after it")
    ap.add_argument("--threads", type=int, default=default_threads())
    ap.add_argument("--write", type=Path, metavar="FILE", help="replace the table there")
    args = ap.parse_args(argv)
    if args.write and not readme.is_marked(args.write, MARK):
        ap.error(f"{args.write} has no {' ... '.join(readme.marks(MARK))}")
    llm = LLM(args.model, weights=args.weights, threads=args.threads)
    ids = np.random.default_rng(0).integers(0, llm.config.vocab_size, args.prompt).tolist()
    params = SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True)
    llm.generate(ids[:8], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    kind = "int8" if llm.settings["int8"] else "f32"
    before = bounds(args.threads, kind)
    profile = llm.generate(ids, params, profile=True).profile
    after = bounds(args.threads, kind)
    profile.bounds = {unit: statistics.mean([before[unit], after[unit]]) for unit in before}
    cost = cost_of_profiling(llm, args.prompt, args.new)
    about = {
        "machine": describe(),
        "threads": args.threads,
        "model": args.model and Path(args.model).name or "built-in",
        "weights": args.weights,
        "prompt": args.prompt,
        "new": args.new,
        "cost_of_profiling": cost,
    }
    text = markdown(profile, about)
    print(text)
    print(json.dumps(about | profile.as_dict()))
    if args.write:
        readme.write(args.write, MARK, text)
    return about | profile.as_dict()


def cost_of_profiling(llm: LLM, rows: int, n: int) -> float:
    """How much longer a decode step is under the profiler: the ratio of medians, less 1."""
    cache, model, took = filled(llm.new_cache(), rows), llm._model, ([], [])
    profile, logits = Profile(model), model.new_logits(1)
    for i in range(2 * n):
        start = time.perf_counter()
        if i % 2:
            profile.begin(False, 1, 1, cache)
        run = Run(np.array([1]), cache, False, 1)
        model.forward([run], logits, profile if i % 2 else None)
        took[i % 2].append(time.perf_counter() - start)
    off, on = map(statistics.median, took)
    return on / off - 1


def markdown(profile: Profile, about: dict) -> str:
    """A table a phase: an operation a line, the longest first."""
    limits = profile.bounds
    lines = [
        f"{about['machine']}, {about['threads']} threads, reads "
        f"{limits['bytes_per_second'] / 1e9:.1f} GB/s, multiplies "
        f"{limits['operations_per_second'] / 1e9:.0f} G op/s; {about['model']}, "
        f"{about['weights']}, {about['prompt']} tokens and {about['new']} after them. Times are "
        f"the mean of steps and ranks; a step took {1 + about['cost_of_profiling']:.3f} times as "
        "long with the profiler as without.",
    ]
    found = profile.as_dict()
    for phase in PHASES:
        what = found[phase]
        lines += [
            "",
            f"| {phase}: {what['ms']:.2f} ms a step | calls | ms | share | speed |",
            "|:--|--:|--:|--:|:--|",
        ]
        for name, row in what["rows"].items():
            if abs(row["share"]) >= LEAST:
                figures = f"{row['calls']:.0f} | {row['ms']:.3f} | {row['share']:.1%}"
                lines.append(f"| {name} | {figures} | {profile.speed(name, row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
