"""Options that the command lines share: which model, and how it is opened."""

from __future__ import annotations

import argparse

from engine.cache import KV_CACHES, KV_DTYPES
from engine.llm import BACKENDS, LLM
from engine.loading.weights import KINDS

BAD_INPUT = 2  # exit status


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """One line, as for every other mistake."""
        hint = " (a prompt that begins with a dash goes behind --)" if " -" in message else ""
        self.exit(BAD_INPUT, f"error: {message}{hint}; --help lists the options\n")


def add_model_options(ap: Parser, blocks_only: bool = False) -> None:
    """What `open_model` looks at. `blocks_only`: requests run together, in blocks of one pool, and
    there is no --kv-cache to choose."""
    group = ap.add_argument_group("the model")

    def option(name: str, kind: type, letter: str, value, text: str) -> None:
        group.add_argument(name, type=kind, metavar=letter, default=value, help=text)

    option("--model", str, "M", None, "a checkpoint directory or a hub name (default: built-in)")
    kinds = "how K and V are kept: in place, in blocks, or as the baseline"
    for name, values, text in (
        ("--weights", list(KINDS), "how matrices are kept in memory"),
        *([] if blocks_only else [("--kv-cache", KV_CACHES, kinds)]),
        ("--kv-dtype", list(KV_DTYPES), "f16: K and V in half the bytes, if basic or paged"),
        ("--backend", BACKENDS, "compiled kernels, or the reference in plain NumPy"),
    ):
        group.add_argument(
            name, choices=values, default=values[0], help=f"{text} (default: %(default)s)"
        )
    if blocks_only:
        ap.set_defaults(kv_cache="paged")
    option("--kv-block-rows", int, "N", None, "rows of a paged block (default: 16)")
    option("--kv-max-blocks", int, "N", None, "paged blocks (default: what the context needs)")
    option(
        "--lookup",
        int,
        "N",
        0,
        "guess up to N tokens where the text repeats itself: the same text, sooner (default: 0)",
    )
    option("--threads", int, "N", None, "threads to compute with (default: one a core)")
    option("--context", int, "N", None, "most tokens, prompt and text (default: the model's)")


def open_model(args: argparse.Namespace) -> LLM:
    """The model that the options name; ValueError says what cannot be opened and why."""
    return LLM(
        args.model,
        weights=args.weights,
        kv_cache=args.kv_cache,
        kv_dtype=args.kv_dtype,
        kv_block_rows=args.kv_block_rows,
        kv_max_blocks=args.kv_max_blocks,
        backend=args.backend,
        threads=args.threads,
        context=args.context,
        lookup=args.lookup,
    )
