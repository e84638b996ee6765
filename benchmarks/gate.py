"""Whether a change made the engine slower: python -m benchmarks.gate BASE HEAD

BASE and HEAD are revisions of this repository, checked out for as long as the run takes, or
directories that hold one. Each has a process of its own with its own package, fresh ones every
round, and they make the same requests in turn: base, head, base, head, ... What is compared is the
least time of a step and of a prompt, since other work on a machine only adds to it. One side alone
can catch a quiet moment, though, so turn by turn, too, head must be the slower one: it has to be
over the tripwire by both ratios, and still be so after as many rounds again. Then the exit status
is 1; it is 2 where a side cannot run.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import one, runs
from benchmarks.shapes import write_checkpoint
from engine.llm import BUILT_IN
from engine.loading.hub import resolve
from engine.machine import describe
from engine.threads import default_threads

REPO = Path(__file__).resolve().parent.parent
SIDES = "base", "head"
# One commit against itself, ten runs on a busy machine of two cores: turn by turn within 2.5%, by
# least times mostly within 4%, once 2.9 times. Wide, since machines that gates run on are shared.
TRIPWIRE = 1.10
BAD_INPUT = 2  # exit status

# "prefill" and "decode": in each turn, the seconds of its prompt and of its steps
Times = dict[str, list[list[float]]]


def main(argv: list[str] | None = None) -> int:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("base", help="a revision or a directory")
    ap.add_argument("head", help="a revision or a directory")
    ap.add_argument(
        "--model",
        default="slice",
        help="a checkpoint directory, a hub name, or built-in "
        "(default: four layers of Qwen3-0.6B with random weights)",
    )
    ap.add_argument("--prompt", type=one.at_least(1), default=511, help="tokens")
    ap.add_argument("--new", type=one.at_least(2), default=32, help="tokens after it")
    ap.add_argument("--turns", type=one.at_least(1), default=6, help="of each process")
    ap.add_argument("--rounds", type=one.at_least(1), default=4, help="of fresh processes")
    ap.add_argument("--threads", type=int, default=default_threads())
    ap.add_argument("--tripwire", type=float, default=TRIPWIRE, help="default: %(default)s times")
    ap.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="for LLM")
    ap.add_argument(
        "--save", type=Path, default=runs.FOLDER, metavar="DIR", help="append head's run there"
    )
    args = ap.parse_args(argv)
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            sides = {
                side: stack.enter_context(checkout(getattr(args, side), folder / side))
                for side in SIDES
            }
            times, found = race(sides, model(args.model, folder), folder, args)
    except (RuntimeError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return BAD_INPUT
    report(found, args.tripwire)
    save(args, times["head"])
    return 1 if slower(found, args.tripwire) else 0


@contextmanager
def checkout(what: str, folder: Path) -> Iterator[Path]:
    """A directory of the engine: `what` itself, or that revision in `folder`, removed afterwards.

    ValueError if `what` is neither.
    """
    if is_directory(what):
        yield Path(what).resolve()
        return
    try:
        commit = commit_of(what)
    except RuntimeError:
        raise ValueError(f"{what!r} is no revision, and no directory with the engine") from None
    try:
        git("worktree", "add", "--detach", str(folder), commit)
        yield folder
    finally:
        if folder.exists():  # twice forced: one that git was stopped in the middle of is locked
            git("worktree", "remove", "--force", "--force", str(folder))


def is_directory(what: str) -> bool:
    """Whether `what` is a directory of the engine; else it is a revision's name."""
    return (Path(what) / "engine" / "__init__.py").is_file()


def commit_of(revision: str) -> str:
    return git("rev-parse", "--verify", f"{revision}^{{commit}}")


def git(*words: str) -> str:
    """What git prints; RuntimeError has what it says on stderr, if it fails."""
    done = subprocess.run(["git", "-C", str(REPO), *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def model(name: str, folder: Path) -> Path:
    """The checkpoint that both sides open."""
    if name == "built-in":
        return BUILT_IN
    return write_checkpoint(folder / "slice") if name == "slice" else resolve(name)


def race(
    sides: dict[str, Path], checkpoint: Path, folder: Path, args: argparse.Namespace
) -> tuple[dict[str, Times], dict]:
    """Both sides in turn, as often as it takes: all their times, and what they come to."""
    times = {side: {"prefill": [], "decode": []} for side in SIDES}
    found = {}
    for last in (args.rounds, 2 * args.rounds):
        for seed in range(last - args.rounds, last):
            for side, took in turns(sides, checkpoint, folder, seed, args):
                times[side]["prefill"].append([took["first"]])
                times[side]["decode"].append(took["steps"])
        found = compare(times, args.prompt)
        if not slower(found, args.tripwire):
            break
    return times, found


def turns(
    sides: dict[str, Path], checkpoint: Path, folder: Path, seed: int, args: argparse.Namespace
) -> Iterator[tuple[str, dict]]:
    """A fresh process for each side, and a request of each: base, head, base, head, ..."""
    numbers = {"--prompt": args.prompt, "--new": args.new, "--threads": args.threads}
    flags = [word for pair in (numbers | {"--seed": seed}).items() for word in pair]
    flags += [word for text in args.set for word in ("--set", text)]
    with ExitStack() as stack:
        processes = {}
        for side, path in sides.items():
            own = {"PYTHONPATH": str(path)}
            if sides["base"] != sides["head"]:
                # Numba looks at the sources' dates: in a common cache, each would find what the
                # other left to be out of date, and compile it anew.
                own["NUMBA_CACHE_DIR"] = str(folder / f"{side}-compiled")
            process = one.Process(sys.executable, "engine", checkpoint, *flags, **own)
            processes[side] = stack.enter_context(process)
            package = Path(process.about["package"])
            assert package == (path / "engine").resolve(), f"{package} was run in place of {path}"
        for _ in range(args.turns):
            for side, process in processes.items():
                yield side, process.request()


def compare(times: dict[str, Times], prompt: int) -> dict[str, dict[str, float]]:
    """For each kind of work: tokens a second, and head's time over base's, of the least times.

    `in_turn` is the same ratio turn by turn, the median of them.
    """
    found = {}
    for kind, tokens in (("prefill", prompt), ("decode", 1)):
        base, head = ([min(turn) for turn in times[side][kind]] for side in SIDES)
        found[kind] = {
            "base": tokens / min(base),
            "head": tokens / min(head),
            "ratio": min(head) / min(base),
            "in_turn": statistics.median(h / b for b, h in zip(base, head, strict=True)),
        }
    return found


def slower(found: dict[str, dict[str, float]], tripwire: float) -> list[str]:
    """The kinds of work that take head too long by both ratios."""
    return [kind for kind, v in found.items() if min(v["ratio"], v["in_turn"]) > tripwire]


def report(found: dict[str, dict[str, float]], tripwire: float) -> None:
    """A table, then one line of JSON."""
    tripped = slower(found, tripwire)
    print(f"{'tok/s':<8} {'base':>10} {'head':>10} {'head / base, time':>18} {'in turn':>8}")
    for kind, v in found.items():
        mark = f"  SLOWER: over {tripwire:.2f}" if kind in tripped else ""
        print(
            f"{kind:<8} {v['base']:>10.1f} {v['head']:>10.1f} {v['ratio']:>18.3f} "
            f"{v['in_turn']:>8.3f}{mark}"
        )
    print(json.dumps(found | {"tripwire": tripwire, "slower": tripped}))


def save(args: argparse.Namespace, head: Times) -> None:
    """Append head's times to the saved runs."""
    name = Path(args.model).name
    tokens = {"prefill": args.prompt, "decode": 1}
    found = [
        runs.benchmark(
            kind,
            f"gate_{kind}[{name}-{args.prompt}]",
            [second for turn in turns for second in turn],
            tokens_per_second=tokens[kind] / min(map(min, turns)),
            machine=describe(),
            threads=args.threads,
        )
        for kind, turns in head.items()
    ]
    commit = None if is_directory(args.head) else commit_of(args.head)
    runs.save(args.save, "gate", commit, found)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaving nothing temporary behind
    sys.exit(main())
