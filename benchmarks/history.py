"""Tokens a second over saved runs, as a picture: python -m benchmarks.history [--out FILE.png]

The runs are those of `python -m pytest benchmarks --benchmark-autosave` and of gate.py. Runs of
different processors are lines of their own: they are not to be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks import runs

try:
    from matplotlib.figure import Figure
except ImportError:
    sys.exit('matplotlib is missing: pip install ".[benchmarks]"')

Line = list[tuple[int, float]]  # (number of the run, tokens a second)


def main(argv: list[str] | None = None) -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--runs", type=Path, default=runs.FOLDER, help="default: %(default)s")
    ap.add_argument("--out", type=Path, default=Path("history.png"), help="default: %(default)s")
    args = ap.parse_args(argv)
    saved = runs.load(args.runs)
    panels = lines_of(saved)
    if not panels:
        raise SystemExit(f"{args.runs} holds no run with tokens a second")
    draw(panels, [label(run) for run in saved]).savefig(args.out, dpi=120)
    print(args.out)


def lines_of(saved: list[dict]) -> dict[str, dict[str, Line]]:
    """For each group of benchmarks, each benchmark's speed in the runs that have it."""
    cpus = {cpu(b) for run in saved for b in run["benchmarks"]}
    panels = defaultdict(lambda: defaultdict(list))
    for number, run in enumerate(saved):
        for b in run["benchmarks"]:
            speed = b["extra_info"].get("tokens_per_second")
            if speed and b["group"] in ("decode", "prefill"):
                name = b["name"] + (f", {cpu(b)}" if len(cpus) > 1 else "")
                panels[b["group"]][name].append((number, speed))
    return panels


def cpu(benchmark: dict) -> str:
    return benchmark["extra_info"].get("machine", "unknown processor")


def label(run: dict) -> str:
    """The commit where it is known, with a + if files were changed since; else the day."""
    commit = run.get("commit_info") or {}
    known = commit.get("id") not in (None, "unversioned")
    name = commit["id"][:8] if known else run["datetime"][:10]
    return name + ("+" if commit.get("dirty") else "")


def draw(panels: dict[str, dict[str, Line]], labels: list[str]) -> Figure:
    """A panel a group, runs from left to right; logarithmic, as models differ by hundreds."""
    height = 4 * len(panels)
    figure = Figure(figsize=(max(8, 4 + 0.3 * len(labels)), height), layout="constrained")
    for axes, (group, lines) in zip(
        figure.subplots(len(panels), squeeze=False)[:, 0], sorted(panels.items()), strict=True
    ):
        for name, line in sorted(lines.items()):
            axes.plot(*zip(*line, strict=True), marker="o", markersize=3, label=name)
        axes.set(title=group, ylabel="tokens / s", yscale="log")
        axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


if __name__ == "__main__":
    main()
