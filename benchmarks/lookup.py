"""Decoding with prompt lookup beside plain decoding: python -m benchmarks.lookup [--model M]

Without --model a checkpoint is made whose likeliest next token is the last one (see shapes.py), so
that temperature makes texts from pure copies to pure noise, at a real model's cost for each token.
Requests run in turn, plain and with lookup, with the same seed: they have to give the same tokens.
Medians of the rounds are printed, then one line of JSON.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import readme
from benchmarks.shapes import write_checkpoint
from engine import LLM, SamplingParams
from engine.loading.weights import KINDS
from engine.machine import describe
from engine.threads import default_threads

MARK = "lookup"
NOISE = 8.0  # a temperature at which any token is about as likely
FEW = 30  # tokens, of which every pair soon has been seen, and tells nothing


def main(argv: list[str] | None = None) -> dict:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", help="one made by benchmarks.shapes --repeats; default: a light one")
    ap.add_argument("--weights", choices=list(KINDS), default="q8_0")
    ap.add_argument("--threads", type=int, default=default_threads())
    ap.add_argument("--lookup", type=int, default=8, metavar="N", help="guesses a step, at most")
    ap.add_argument("--edits", type=float, default=1.37, help="temperature of a text with edits")
    ap.add_argument("--prompt", type=int, default=100, help="tokens")
    ap.add_argument("--new", type=int, default=64, help="tokens to generate")
    ap.add_argument("--rounds", type=int, default=15)
    ap.add_argument("--write", type=Path, metavar="F", help="put the table between marks in F")
    args = ap.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_checkpoint(Path(folder), repeats=True)
        guessing = LLM(model, weights=args.weights, threads=args.threads, lookup=args.lookup)
        plain = copy.copy(guessing)  # the same weights in the same memory
        plain.requests = dataclasses.replace(plain.requests, lookup=0)
        found = {name: compare(plain, guessing, some, args) for name, some in texts(args).items()}
    print(text := table(found, args))
    print(json.dumps(found))
    if args.write:
        readme.write(args.write, MARK, text)
    return found


def texts(args) -> dict[str, dict]:
    """Settings of the sampler, by what text they make."""
    return {
        "copies": {"temperature": 0.0},
        "copies, with edits": {"temperature": args.edits},
        "nothing comes twice": {"temperature": NOISE},
        f"{FEW} tokens in random order": {
            "temperature": NOISE,
            "logit_bias": dict.fromkeys(range(FEW), 100.0),
        },
    }


def compare(plain: LLM, guessing: LLM, settings: dict, args) -> dict[str, float]:
    """Tokens a second of both, in turn, and what came of the guesses."""
    rates, counts = [], []
    for seed in range(args.rounds):
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, plain.config.vocab_size, args.prompt).tolist()
        params = SamplingParams(max_tokens=args.new, seed=seed, ignore_eos=True, **settings)
        order = (plain, guessing) if seed % 2 else (guessing, plain)
        done = {llm: llm.generate(ids, params) for llm in order}
        if done[plain].token_ids != done[guessing].token_ids:
            raise RuntimeError(f"seed {seed}: lookup changed the tokens")
        rates.append([done[llm].metrics.decode_tokens_per_second for llm in (plain, guessing)])
        metrics = done[guessing].metrics
        counts.append([metrics.guessed_tokens, metrics.accepted_tokens])
    before, after = np.median(rates, axis=0).tolist()
    guessed, accepted = np.mean(counts, axis=0).tolist()
    return {
        "plain_tokens_per_second": before,
        "lookup_tokens_per_second": after,
        "ratio": statistics.median(fast / slow for slow, fast in rates),
        "guessed": guessed,
        "accepted": accepted,
    }


def table(found: dict[str, dict[str, float]], args) -> str:
    model = Path(args.model).name if args.model else "a light checkpoint"
    lines = [
        f"{describe()}, {args.threads} threads; {model}, {args.weights}, `--lookup {args.lookup}`,"
        f" {args.new} tokens.",
        "",
        "| text | guessed | of which came | tokens/s | plain | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        lines.append(
            f"| {name} | {row['guessed']:.0f} | {row['accepted']:.0f} "
            f"| {row['lookup_tokens_per_second']:.1f} | {row['plain_tokens_per_second']:.1f} "
            f"| {row['ratio']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
