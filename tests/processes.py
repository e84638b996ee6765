"""A server process, and what it has of the machine, for tests that look at it from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest


@contextmanager
def server(*args: str, **env: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """The process, which leads a group of its own, and its address, once it serves."""
    command = [sys.executable, "-m", "engine.serve", "--port", "0", *args]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
        start_new_session=True,
    )
    try:
        for line in process.stderr:  # kernels may be compiled, which is said
            if found := re.fullmatch(r"serving at (http://\S+)\n", line):
                break
        else:
            pytest.fail(f"it has ended with status {process.wait()}")
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def end(process: subprocess.Popen) -> str:
    """What it says on stderr until its end."""
    return process.communicate(timeout=60)[1]


def figures(address: str) -> dict[str, float]:
    """What /metrics tells, by name."""
    lines = httpx.get(f"{address}/metrics", timeout=60).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


@dataclass(frozen=True)
class Footprint:
    """What a process has: kB of memory in use, files that are not mapped among it; threads; fds."""

    rss: int
    threads: int
    fds: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        rss = int(status["RssAnon"].split()[0])
        return cls(rss, int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd")))
