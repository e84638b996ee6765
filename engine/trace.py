"""A profile as files: a Chrome trace (chrome://tracing, ui.perfetto.dev) and a table of steps."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

from engine.files import write_whole
from engine.profiler import Part, Profile

# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
STEPS = "steps"  # a thread of its own


def trace(profile: Profile) -> dict:
    """Trace events: ranks are threads, operations slices, steps frames, KV rows a counter."""
    n_ranks = max((len(step.clocks) for step in profile.steps), default=1) or 1
    events = [named("process_name", 0, "engine")]
    events += [named("thread_name", rank, f"rank {rank}") for rank in range(n_ranks)]
    events.append(named("thread_name", n_ranks, STEPS))
    for i, step in enumerate(profile.steps):
        about = {"tokens": step.tokens, "context": step.context, "token_id": step.token_id}
        frame = Part(f"{step.phase} {i}", step.start, step.seconds)
        events.append(event(frame, n_ranks, step.phase, about))
        events += [event(part, rank, step.phase) for part, _, rank in profile.parts(step)]
        rows = step.context + (step.tokens if step.is_whole else 0)
        for name, value in (("KV rows", rows), ("KV bytes", rows * step.row_bytes)):
            at = 1e6 * (step.start + step.seconds)
            events.append({"name": name, "ph": "C", "pid": 1, "ts": at, "args": {name: value}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def event(part: Part, thread: int, category: str, about: dict | None = None) -> dict:
    """A complete slice; times in microseconds."""
    times = {"ts": 1e6 * part.start, "dur": 1e6 * max(part.seconds, 0.0)}
    place = {"name": part.name, "cat": category, "ph": "X", "pid": 1, "tid": thread}
    return place | times | {"args": about or {}}


def named(what: str, thread: int, name: str) -> dict:
    return {"name": what, "ph": "M", "pid": 1, "tid": thread, "ts": 0, "args": {"name": name}}


def write_trace(profile: Profile, path: str | os.PathLike) -> None:
    """The trace as JSON, whole or not at all."""
    text = json.dumps(trace(profile))
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_steps(profile: Profile, path: str | os.PathLike) -> None:
    """One row a step as CSV, whole or not at all."""
    rows = [["index", "phase", "tokens", "context", "ms", "token_id"]]
    for i, s in enumerate(profile.steps):
        ms, token = f"{1e3 * s.seconds:.3f}", "" if s.token_id is None else s.token_id
        rows.append([i, s.phase, s.tokens, s.context, ms, token])

    def write(part: Path) -> None:
        with open(part, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)

    write_whole(path, write)
