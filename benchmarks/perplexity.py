"""Perplexity on a text: python -m benchmarks.perplexity TEXT [--model M] [--weights f32,q8_0]

A line for each way of keeping weights and each of keeping K and V.
Windows of 512 tokens, each scored from scratch, the first token of a window not scored. Logits are
made and scored a piece of a window at a time: none are kept.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

from engine import LLM
from engine.cache import KV_DTYPES
from engine.loading.weights import KINDS
from engine.perplexity import PIECE, perplexity


def main(argv: list[str] | None = None) -> dict[str, float]:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("text", type=Path)
    ap.add_argument("--model", help="default: the built-in model")
    ap.add_argument("--weights", default="f32,q8_0", help=f"of {', '.join(KINDS)}")
    ap.add_argument("--kv-dtypes", default="f32", help=f"of {', '.join(KV_DTYPES)}")
    ap.add_argument("--window", type=int, default=512)
    ap.add_argument("--tokens", type=int, help="only the first TOKENS of the text")
    args = ap.parse_args(argv)
    if not args.text.is_file():
        ap.error(f"{args.text} is not a file")
    result, first = {}, None
    for kind, kv in product(args.weights.split(","), args.kv_dtypes.split(",")):
        llm, name = LLM(args.model, weights=kind, kv_dtype=kv, prefill_chunk=PIECE), f"{kind}, {kv}"
        ids = llm.tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
        result[name] = perplexity(llm, ids, args.window)
        first = first or result[name]
        print(f"{name:>9} {result[name]:.6f} {result[name] / first - 1:+.4%}")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
