"""Start: opening a model, and from a new process to its first token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import LLM

REPO = Path(__file__).resolve().parent.parent
FIRST_TOKEN = """\
import sys
from engine import LLM, SamplingParams
llm = LLM(sys.argv[1] or None, threads=int(sys.argv[2]))
print(llm.generate([1, 2, 3], SamplingParams(max_tokens=1)).token_ids, flush=True)
"""


@pytest.mark.benchmark(group="start")
def test_load(measure, model, threads):
    """Seconds to open a checkpoint whose file and compiled kernels were read before."""
    measure(lambda: LLM(model, threads=threads), rounds=3)


def first_token(model: Path | None, threads: int, **environment: str) -> subprocess.Popen:
    """A new process, once it has printed its first token."""
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST_TOKEN, str(model or ""), str(threads)],
        env=os.environ | {"PYTHONPATH": str(REPO)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    line = process.stdout.readline()
    assert line.startswith("["), f"no token came; exit status {ended(process)}"
    return process


def ended(process: subprocess.Popen) -> int:
    """The exit status of a process, waited for."""
    process.communicate()
    return process.returncode


@pytest.mark.benchmark(group="start")
def test_first_token(measure, model, threads):
    """Seconds from a new process to its first token, compiled kernels at hand."""
    running = []

    def finish():  # before the next one starts, and not timed
        assert ended(running.pop()) == 0

    measure(lambda: running.append(first_token(model, threads)), rounds=3, teardown=finish)
    while running:  # under --benchmark-disable
        finish()


@pytest.mark.benchmark(group="start")
def test_first_token_cold(measure, pytestconfig, tmp_path, threads):
    """The same with nothing compiled yet, for the built-in model."""
    if not pytestconfig.getoption("--cold"):
        pytest.skip("compiling takes up to a minute: --cold")

    def start():
        assert ended(first_token(None, threads, NUMBA_CACHE_DIR=str(tmp_path))) == 0

    measure(start, rounds=1, warm_up=0)
