"""Options that the command lines share: which model, and how it is opened."""

from __future__ import annotations

import argparse
from difflib import get_close_matches

from engine.cache import KV_CACHES, KV_DTYPES
from engine.llm import BACKENDS, LLM
from engine.loading.weights import KINDS

BAD_INPUT = 2  # exit status
ELSEWHERE = {  # our name for what llama.cpp and vLLM call these
    "PROMPT": "-p --prompt",
    "IN.jsonl": "-i --input-file",
    "OUT.jsonl": "-o --output-file",
    "--prompt-file": "-f --file",
    "--chat": "-cnv --conversation",
    "--system": "-sys --system-prompt",
    "--max-tokens": "-n --predict --n-predict",
    "--temperature": "--temp",
    "--repetition-penalty": "--repeat-penalty",
    "--seed": "-s",
    "--model": "-m",
    "--kv-dtype": "-ctk --cache-type-k --kv-cache-dtype",
    "--threads": "-t",
    "--context": "-c --ctx-size --max-model-len",
    "--alias": "--served-model-name",
    "--max-running": "-np --parallel --max-num-seqs",
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """One line, as for every other mistake."""
        self.exit(BAD_INPUT, f"error: {message}; --help lists the options\n")

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return parsed

    def _hint(self, unknown: list[str]) -> str:
        """What the first of them that looks like an option may have been meant to be."""
        name = next((word.split("=")[0] for word in unknown if word.startswith("-")), "")
        options = [option for action in self._actions for option in action.option_strings]
        places = [action.metavar for action in self._actions if not action.option_strings]
        spelled = name.replace("_", "-")
        ours = next((ours for ours, theirs in ELSEWHERE.items() if spelled in theirs.split()), None)
        if ours in options or ours in places:
            return f" ({name} is {ours} here)"
        if spelled.startswith("--") and (close := closest(spelled, options)):
            return f" (is {close} meant?)"
        dashed = name and "PROMPT" in places
        return " (a prompt that begins with a dash goes behind --)" if dashed else ""


def closest(spelled: str, options: list[str]) -> str | None:
    """The one that is most likely meant: one that begins so, else one that looks alike."""
    words = {option.lstrip("-"): option for option in options}  # dashes make all of them alike
    word = spelled.lstrip("-")
    begun = [known for known in words if len(word) > 1 and known.startswith(word)]
    return next((words[known] for known in begun or get_close_matches(word, words, 1, 0.8)), None)


def add_model_options(ap: Parser, blocks_only: bool = False) -> None:
    """What `open_model` looks at. `blocks_only`: requests run together, in blocks of one pool, and
    there is no --kv-cache to choose."""
    group = ap.add_argument_group("the model")

    def option(name: str, kind: type, letter: str, value, text: str) -> None:
        group.add_argument(name, type=kind, metavar=letter, default=value, help=text)

    option("--model", str, "M", None, "a checkpoint directory or a hub name (default: built-in)")
    kinds = "how K and V are kept: in place, in blocks, or as the baseline"
    kept = "" if blocks_only else ", if basic or paged"
    for name, values, text in (
        ("--weights", list(KINDS), "how matrices are kept in memory"),
        *([] if blocks_only else [("--kv-cache", KV_CACHES, kinds)]),
        ("--kv-dtype", list(KV_DTYPES), f"f16: K and V in half the bytes{kept}"),
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
