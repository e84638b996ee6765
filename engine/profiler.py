"""See where every millisecond goes: each operation of each step, on each rank, and Python's part.

A Profile is filled while a request runs: the compiled step leaves marks (kernels/clock.py), and
Python's parts are timed around it. `rows` sums them up, `table` prints them, `arrays` is for
notebooks; trace.py writes them to files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from engine.kernels.clock import OPERATIONS, new_clock, ticks

PHASES = "prefill", "decode"
OPERATIONS_RATE = "operations_per_second"
NOTHING = nullcontext()


@dataclass
class Part:
    """A stretch of time on one thread. `start` counts from the profile's beginning, in seconds."""

    name: str
    start: float
    seconds: float
    calls: int = 1


@dataclass
class Step:
    """One forward, and what followed it until its token was text."""

    phase: str  # of PHASES
    tokens: int
    context: int  # rows in the cache before it
    n_logits: int  # tokens whose logits were wanted
    start: float  # seconds
    row_bytes: int  # of K and V of one row in all layers
    token_id: int | None = None
    python: list[Part] = field(default_factory=list)
    clocks: list[np.ndarray] = field(default_factory=list)  # each rank's, of kernels/clock.py
    kernel: int | None = None  # which of `python` is the compiled step

    @property
    def is_whole(self) -> bool:
        """Whether it was done to its end, not interrupted."""
        return bool(self.python) and (self.kernel is None or bool(self.clocks))

    @property
    def seconds(self) -> float:
        """From its beginning to the end of its last part; 0 for one that was interrupted."""
        return max((p.start + p.seconds for p in self.python), default=self.start) - self.start


class Profile:
    """The steps of one request."""

    def __init__(self, model):
        """`model`: whose steps they are (SimdModel, or NumpyModel, of which only Python's times
        are known)."""
        self.model, self.steps = model, []
        self.bounds: dict[str, float] = {}  # bytes and operations a second, of machine.py
        ticks()  # the first call loads it
        self._began = time.perf_counter(), ticks()

    # ------------------------------------------------------------ while the request runs

    def begin(self, is_prompt: bool, n_tokens: int, n_logits: int, cache) -> None:
        """A forward of `n_tokens` begins."""
        row_bytes = 2 * cache.num_layers() * cache.kv_dim * np.dtype(cache.dtype).itemsize
        phase = PHASES[0 if is_prompt else 1]
        self.steps.append(Step(phase, n_tokens, cache.seq_len(0), n_logits, self._now(), row_bytes))

    @contextmanager
    def part(self, name: str, cache=None) -> Iterator[None]:
        """Time what happens inside; `cache`: its allocations are the calls."""
        start, made = self._now(), cache.counts.allocations if cache else 0
        yield
        calls = cache.counts.allocations - made if cache else 0
        self.steps[-1].python.append(Part(name, start, self._now() - start, calls or 1))

    @contextmanager
    def kernel(self, ranks: int) -> Iterator[list[np.ndarray]]:
        """Time the compiled step; gives a clock for each rank."""
        step = self.steps[-1]
        clocks = [new_clock(self.model.config.n_layers) for _ in range(ranks)]
        step.kernel = len(step.python)
        with self.part("step"):
            yield clocks
        step.clocks = [clock[: 1 + 2 * clock[0]].copy() for clock in clocks]
        self._ended = time.perf_counter(), ticks()

    def _now(self) -> float:
        return time.perf_counter() - self._began[0]

    # ------------------------------------------------------------ afterwards

    def rank_parts(self, step: Step) -> list[list[Part]]:
        """For each rank, what it did in a compiled step, in order and without gaps.

        The first is the call, until the rank has begun; the last, from its end to Python's return.
        """
        if not step.clocks:
            return []
        (seconds, count), (seconds_after, count_after) = self._began, self._ended
        per_tick = (seconds_after - seconds) / (count_after - count)
        whole, found = step.python[step.kernel], []
        for clock in step.clocks:
            operations, marks = clock[1::2], (clock[2::2] - count) * per_tick
            edges = np.concatenate([[whole.start], marks, [whole.start + whole.seconds]])
            names = ["call", *(OPERATIONS[i] for i in operations[1:]), "return"]
            times = zip(names, edges[:-1].tolist(), np.diff(edges).tolist(), strict=True)
            found.append([Part(*part) for part in times])
        return found

    def whole_steps(self, phase: str) -> list[Step]:
        """The steps of a phase, but for one that was interrupted."""
        return [step for step in self.steps if step.phase == phase and step.is_whole]

    def parts(self, step: Step) -> Iterator[tuple[Part, float, int]]:
        """All parts of a step: each with its weight, 1 / ranks for a rank's, and its rank."""
        ranks = self.rank_parts(step)
        for rank, some in enumerate(ranks):
            for part in some:
                yield part, 1 / len(ranks), rank
        for i, part in enumerate(step.python):
            if i != step.kernel or not ranks:
                yield part, 1.0, 0

    def rows(self, phase: str) -> dict[str, dict[str, float]]:
        """For each operation of a phase: calls and ms a step, share of the step's time, and where
        they are known the bytes and operations a second. The mean of steps and ranks; the rest of
        Python is the row "python", so that the shares add up to 1."""
        steps = self.whole_steps(phase)
        if not steps:
            return {}
        seconds, calls = {}, {}
        for step in steps:
            for p, weight, _ in self.parts(step):
                seconds[p.name] = seconds.get(p.name, 0.0) + p.seconds * weight
                calls[p.name] = calls.get(p.name, 0) + p.calls * weight
        whole = sum(step.seconds for step in steps)
        seconds["python"], calls["python"] = whole - sum(seconds.values()), len(steps)
        work = self._work(steps)
        found = {}
        for name in sorted(seconds, key=seconds.get, reverse=True):
            found[name] = {
                "calls": calls[name] / len(steps),
                "ms": 1e3 * seconds[name] / len(steps),
                "share": seconds[name] / whole,
            }
            for unit, amount in work.get(name, {}).items():
                found[name][f"{unit}_per_second"] = amount / seconds[name]
        return found

    def _work(self, steps: list[Step]) -> dict[str, dict[str, float]]:
        """Bytes that operations read from memory, and arithmetic operations, in all `steps`."""
        if not hasattr(self.model, "work"):
            return {}
        total: dict[str, dict[str, float]] = {}
        for step in steps:
            shape = step.tokens, step.context, step.n_logits
            for name, (n_bytes, n_operations) in self.model.work(*shape, step.row_bytes).items():
                amounts = total.setdefault(name, {"bytes": 0, "operations": 0})
                amounts["bytes"] += n_bytes
                amounts["operations"] += n_operations
        return total

    def as_dict(self) -> dict:
        """What the table says, for JSON."""
        found = {"bounds": self.bounds}
        for phase in PHASES:
            if steps := self.whole_steps(phase):
                found[phase] = {
                    "steps": len(steps),
                    "tokens": sum(step.tokens for step in steps),
                    "ms": 1e3 * sum(step.seconds for step in steps) / len(steps),
                    "rows": self.rows(phase),
                }
        return found

    def table(self) -> str:
        """Both phases: an operation a line, the longest first."""
        lines = []
        for phase, found in self.as_dict().items():
            if phase == "bounds":
                continue
            tokens = f", {found['tokens']} tokens" if phase == "prefill" else ""
            steps = f"{found['steps']} step{'s' if found['steps'] > 1 else ''}"
            lines.append(f"{phase}: {steps}{tokens}, {found['ms']:.3f} ms a step")
            lines.append(f"  {'operation':<14}{'calls':>7}{'ms':>10}{'share':>8}  speed")
            for name, row in found["rows"].items():
                speed = self.speed(name, row)
                line = f"  {name:<14}{row['calls']:>7.0f}{row['ms']:>10.3f}{row['share']:>8.1%}"
                lines.append(f"{line}  {speed}".rstrip())
            lines.append("")
        return "\n".join(lines).rstrip()

    def speed(self, name: str, row: dict[str, float]) -> str:
        """Bytes or operations a second of an operation, whichever is nearer to its bound.

        Attention multiplies float32 numbers, whatever the weights are.
        """
        limits = {unit: self.bounds.get(unit) for unit in ("bytes_per_second", OPERATIONS_RATE)}
        if name == "attention":
            limits[OPERATIONS_RATE] = self.bounds.get(f"f32_{OPERATIONS_RATE}")
        shares = {u: row[u] / most for u, most in limits.items() if most and row.get(u)}
        if not shares:
            return ""
        unit = max(shares, key=shares.get)
        short = "G op/s" if unit == OPERATIONS_RATE else "GB/s"
        return f"{row[unit] / 1e9:.1f} {short}, {shares[unit]:.0%} of {limits[unit] / 1e9:.1f}"


def timed(profile: Profile | None, name: str, cache=None):
    """`profile.part`, or nothing where there is no profile."""
    return NOTHING if profile is None else profile.part(name, cache)


def arrays(profile: Profile) -> dict[str, np.ndarray]:
    """A row a step: phase, tokens, context, ms, token_id (-1: none), and ms of every operation by
    its name, the mean of the ranks."""
    steps = profile.steps
    found = {
        "phase": np.array([step.phase for step in steps]),
        "tokens": np.array([step.tokens for step in steps]),
        "context": np.array([step.context for step in steps]),
        "ms": np.array([1e3 * step.seconds for step in steps]),
        "token_id": np.array([-1 if s.token_id is None else s.token_id for s in steps]),
    }
    for i, step in enumerate(steps):
        for p, weight, _ in profile.parts(step):
            found.setdefault(p.name, np.zeros(len(steps)))[i] += 1e3 * p.seconds * weight
    return found
