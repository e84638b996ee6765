"""The command line: python -m engine.run "To be, or not to be" """

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from engine.llm import BACKENDS, KV_CACHES, LLM
from engine.loading.weights import KINDS
from engine.sampler import SamplingParams

INTERRUPTED, BAD_INPUT = 130, 2  # exit statuses


def parser() -> argparse.ArgumentParser:
    defaults = SamplingParams()
    ap = argparse.ArgumentParser(
        prog="python -m engine.run",
        description="Continue a text with a Qwen3 model. The text streams to stdout; "
        "a report of the run goes to stderr.",
        allow_abbrev=False,
    )
    ap.add_argument("prompt", nargs="?", metavar="PROMPT")
    ap.add_argument("--prompt-file", metavar="F", help="read the prompt from F; - is stdin")
    ap.add_argument(
        "--model", metavar="M", help="a checkpoint directory or a hub name (default: built-in)"
    )
    ap.add_argument(
        "--max-tokens",
        type=int,
        default=defaults.max_tokens,
        metavar="N",
        help="stop after N tokens (default: %(default)s)",
    )
    ap.add_argument(
        "--temperature",
        type=float,
        default=defaults.temperature,
        metavar="T",
        help="0 always takes the likeliest token (default: %(default)s)",
    )
    ap.add_argument("--top-k", type=int, default=defaults.top_k, metavar="K", help="0: all")
    ap.add_argument("--top-p", type=float, default=defaults.top_p, metavar="P", help="1: all")
    ap.add_argument("--min-p", type=float, default=defaults.min_p, metavar="P", help="0: all")
    ap.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    ap.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    ap.add_argument(
        "--weights", choices=list(KINDS), default="q8_0", help="how matrices are kept in memory"
    )
    ap.add_argument("--kv-cache", choices=list(KV_CACHES), default="basic")
    ap.add_argument("--backend", choices=BACKENDS, default="simd")
    ap.add_argument("--threads", type=int, metavar="N", help="default: one a core")
    ap.add_argument(
        "--context", type=int, metavar="N", help="most positions (default: the model's)"
    )
    ap.add_argument("--json", action="store_true", help="print one JSON object instead")
    return ap


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return run(args)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    prompt = prompt_of(args)
    llm = LLM(
        args.model,
        weights=args.weights,
        kv_cache=args.kv_cache,
        backend=args.backend,
        threads=args.threads,
        context=args.context,
    )
    generation = llm.stream(prompt, params)
    status = 0
    try:
        for piece in generation:
            if not args.json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        status = INTERRUPTED
    done = generation.completion
    if args.json:
        settings = llm.settings | vars(params)
        result = {
            "text": done.text,
            "token_ids": done.token_ids,
            "finish_reason": done.finish_reason,
            "metrics": done.metrics.as_dict(),
            "settings": settings,
        }
        print(json.dumps(result))
    else:
        print(flush=True)
        print(done.metrics.report(args.backend, args.kv_cache), file=sys.stderr)
    return status


def prompt_of(args: argparse.Namespace) -> str:
    """The prompt from the command line, a file or stdin; ValueError if there is not exactly one."""
    if (args.prompt is None) == (args.prompt_file is None):
        raise ValueError("give a PROMPT or --prompt-file, one of the two")
    if args.prompt is not None:
        return args.prompt
    try:
        if args.prompt_file == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(args.prompt_file).read_bytes().decode("utf-8")
    except OSError as e:
        raise ValueError(f"{args.prompt_file}: {e.strerror or e}") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"{args.prompt_file}: is not UTF-8 text (byte {e.start})") from None


if __name__ == "__main__":
    sys.exit(main())
