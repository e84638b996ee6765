"""This engine beside others, on one checkpoint, in turn: python -m benchmarks.compare [--model DIR]

Every engine gets the same ids, token counts and threads, in a process of its own, one after the
other and round after round, so that a noisy machine moves all of them alike; how fast the machine
reads memory is measured before each round. Figures are medians: prefill is the prompt's tokens over
the time to the first, decode is 1 over the median step after it. Only their ratios are worth
quoting.

transformers reads the checkpoint DIR as it is; llama.cpp, DIR.q8_0.gguf, and OpenVINO GenAI,
DIR.openvino, which its user has converted. An engine whose package or file is not there is left
out, and a line says so. The table is followed by one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks import one, readme
from engine.config import ModelConfig
from engine.llm import BUILT_IN
from engine.loading.hub import resolve
from engine.machine import ReadBandwidth, describe
from engine.threads import default_threads

REPO = Path(__file__).resolve().parent.parent
PACKAGES = {"llama.cpp": "llama_cpp", "openvino": "openvino_genai", "transformers": "transformers"}
CONVERTED = {"llama.cpp": one.GGUF, "openvino": one.OPENVINO}  # a suffix of the checkpoint's name
MARK = "compare"  # of the table in a text (see readme.py)
HEAD = (
    "prompt", "engine", "prefill tok/s", "decode tok/s", "peak MB",
    "prefill, to the best other", "decode, to the best other", "decode, of the memory's limit",
)  # fmt: skip


def main(argv: list[str] | None = None) -> dict:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", help="a checkpoint directory or a hub name (default: built-in)")
    ap.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="that has the others")
    ap.add_argument("--engines", default=",".join(one.ENGINES), help="default: %(default)s")
    ap.add_argument("--prompts", default="17,511,4000", help="tokens, one or more")
    ap.add_argument("--new", type=one.at_least(2), default=48, help="tokens after each")
    ap.add_argument("--threads", type=int, default=default_threads())
    ap.add_argument("--rounds", type=one.at_least(1), default=3)
    ap.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="for LLM")
    ap.add_argument("--write", type=Path, metavar="FILE", help="replace the table there")
    args = ap.parse_args(argv)
    if args.write and not readme.is_marked(args.write, MARK):
        ap.error(f"{args.write} has no {' ... '.join(readme.marks(MARK))}")
    checkpoint = BUILT_IN if args.model is None else Path(resolve(args.model))
    names = present(args.engines.split(","), args.peers, checkpoint)
    prompts = fitting(map(int, args.prompts.split(",")), args.new, checkpoint)

    warn_if_busy()
    memory, bandwidth, seen = ReadBandwidth(args.threads), [], defaultdict(list)
    for seed in range(args.rounds):
        bandwidth += [memory.measure() for _ in range(3)]
        for prompt in prompts:
            for name in list(names):
                try:
                    seen[prompt, name].append(measured(name, checkpoint, prompt, seed, args))
                except RuntimeError as e:
                    if name == "engine":
                        raise SystemExit(str(e)) from None
                    names.remove(name)
                    print(f"left out: {e}", file=sys.stderr)
    read = statistics.median(bandwidth)
    results = {p: medians({n: seen[p, n] for n in names}, p, read) for p in prompts}
    versions = {n: seen[prompts[0], n][0]["version"] for n in names}
    about = {
        "machine": describe(),
        "threads": args.threads,
        "model": args.model and checkpoint.name or "built-in",
        "rounds": args.rounds,
        "new": args.new,
        "read_bytes_per_second": read,
        "versions": versions,
    }
    text = markdown(results, about)
    print(text)
    print(json.dumps(about | {"prompts": results}))
    if args.write:
        readme.write(args.write, MARK, text)
    return results


def present(names: list[str], peers: str, checkpoint: Path) -> list[str]:
    """Those of `names` whose package and file are there; a line for each that is not."""
    found = []
    for name in names:
        why = None
        if name not in one.ENGINES:
            raise SystemExit(f"{name!r} is no engine; {', '.join(one.ENGINES)} are")
        if name in CONVERTED and not (file := Path(f"{checkpoint}{CONVERTED[name]}")).exists():
            why = f"there is no {file.name} beside the checkpoint"
        elif name in PACKAGES and not has_package(peers, PACKAGES[name]):
            why = f"the interpreter of --peers has no {PACKAGES[name]}"
        if why:
            print(f"left out: {name}: {why}", file=sys.stderr)
        else:
            found.append(name)
    return found


def warn_if_busy() -> None:
    """Say if others are at work: ranks that meet at a barrier wait for the one that was put off.

    With as many threads as cores, llama.cpp's decode was seen to take a thousand times its time.
    """
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > 0.5:
        print(f"this machine is busy (load {load:.1f}): its figures say little", file=sys.stderr)


def has_package(python: str, package: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-c", code, package]).returncode == 0


def fitting(prompts, new: int, checkpoint: Path) -> list[int]:
    """The prompts that leave room for `new` tokens in the model's context."""
    context = ModelConfig.from_dir(checkpoint).max_context
    found = []
    for prompt in prompts:
        if prompt + new <= context:
            found.append(prompt)
        else:
            print(f"left out: {prompt} tokens: the model's context is {context}", file=sys.stderr)
    if not found:
        raise SystemExit("no prompt is left")
    return found


def measured(name: str, checkpoint: Path, prompt: int, seed: int, args: argparse.Namespace) -> dict:
    """One request of `name` in a fresh process (see one.py)."""
    flags = ["--prompt", prompt, "--new", args.new, "--threads", args.threads, "--seed", seed]
    python, own = args.peers, {}
    if name == "engine":
        python, own = sys.executable, {"PYTHONPATH": str(REPO)}
        flags += [word for text in args.set for word in ("--set", text)]
    with one.Process(python, name, checkpoint, *flags, **own) as process:
        return process.about | process.request()


def medians(runs: dict[str, list[dict]], prompt: int, read: float) -> dict[str, dict]:
    """For each engine: tokens a second, peak memory, and for this one what they are to others."""
    found = {}
    for name, some in runs.items():
        found[name] = {
            "prefill": prompt / statistics.median(r["first"] for r in some),
            "decode": 1 / statistics.median(statistics.median(r["steps"]) for r in some),
            "peak_mb": statistics.median(r["peak_bytes"] for r in some) / 1e6,
        }
    others = [values for name, values in found.items() if name != "engine"]
    if "engine" in found:
        own = found["engine"]
        if others:
            for key in ("prefill", "decode"):
                own[f"{key}_to_best"] = own[key] / max(other[key] for other in others)
        if "bytes_per_token" in runs["engine"][0]:
            own["share_of_limit"] = own["decode"] * runs["engine"][0]["bytes_per_token"] / read
    return found


def markdown(results: dict[int, dict], about: dict) -> str:
    """The machine, then a row for each prompt and engine."""
    read = about["read_bytes_per_second"] / 1e9
    lines = [
        f"{about['machine']}, {about['threads']} threads, reads {read:.1f} GB/s; {about['model']}, "
        f"{about['new']} new tokens, medians of {about['rounds']} rounds in turn.",
        "; ".join(f"{name}: {version}" for name, version in about["versions"].items()) + ".",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "--:|:--|" + "--:|" * (len(HEAD) - 2),
    ]
    for prompt, engines in results.items():
        for name, v in engines.items():
            ratios = [
                f"{v[k]:.2f}" if k in v else "" for k in ("prefill_to_best", "decode_to_best")
            ]
            share = f"{v['share_of_limit']:.0%}" if "share_of_limit" in v else ""
            figures = [f"{v['prefill']:.1f}", f"{v['decode']:.1f}", f"{v['peak_mb']:.0f}"]
            lines.append("| " + " | ".join([f"{prompt:,}", name, *figures, *ratios, share]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
