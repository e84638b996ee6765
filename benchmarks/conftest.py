"""Options and fixtures of the benchmarks: python -m pytest benchmarks [--model DIR] [--threads N]

Without a model they take the built-in one and a slice of Qwen3-0.6B with random weights, and half a
minute. Every figure stands beside what the machine can do, measured around it: both are kept in
pytest-benchmark's `extra_info`, and a table at the end shows them. What is small enough to stay in
the processor's cache can be read faster than memory.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.shapes import LAYERS, VOCABULARY, write_checkpoint
from engine import LLM
from engine.loading.hub import resolve
from engine.machine import Arithmetic, ReadBandwidth, describe
from engine.model import Team
from engine.threads import check_threads, default_threads

BUILT_IN, SLICE = "built-in", "slice"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engine")
    group.addoption("--model", metavar="DIR", help="a checkpoint (default: the two small ones)")
    group.addoption("--threads", type=int, default=default_threads(), help="default: one a core")
    group.addoption("--cold", action="store_true", help="time a start that compiles all kernels")
    group.addoption(
        "--toy", action="store_true", help="sizes that run every line and whose figures say nothing"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError('pytest-benchmark is missing: pip install ".[benchmarks]"')
    try:
        check_threads(config.getoption("--threads"))
    except ValueError as e:
        raise pytest.UsageError(str(e)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every benchmark of a model runs for each model there is."""
    if "model" in metafunc.fixturenames:
        given = metafunc.config.getoption("--model")
        names = [Path(given).name] if given else [BUILT_IN, SLICE]
        metafunc.parametrize("model", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def toy(pytestconfig: pytest.Config) -> bool:
    return pytestconfig.getoption("--toy")


@pytest.fixture(scope="session")
def threads(pytestconfig: pytest.Config) -> int:
    return pytestconfig.getoption("--threads")


@pytest.fixture(scope="session")
def slice_dir(toy: bool) -> Iterator[Path]:
    """A few layers of Qwen3-0.6B with random weights, on disk for as long as the run takes."""
    with tempfile.TemporaryDirectory() as folder:
        yield write_checkpoint(Path(folder), *((1, 256) if toy else (LAYERS, VOCABULARY)))


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest) -> Path | None:
    """What LLM opens: a checkpoint's directory, or None for the built-in model."""
    if given := request.config.getoption("--model"):
        return resolve(given)
    return None if request.param == BUILT_IN else request.getfixturevalue("slice_dir")


@pytest.fixture(scope="session")
def llm(model: Path | None, threads: int) -> LLM:
    return LLM(model, threads=threads)


@pytest.fixture(scope="session")
def team(threads: int) -> Team:
    return Team(threads)


@pytest.fixture(scope="session")
def memory(threads: int) -> ReadBandwidth:
    return ReadBandwidth(threads)


@pytest.fixture(scope="session")
def arithmetic(threads: int) -> Arithmetic:
    return Arithmetic(threads)


@dataclass
class Measure:
    """Runs a benchmark between two looks at the machine, and keeps what they say beside it."""

    benchmark: object  # pytest-benchmark's fixture
    memory: ReadBandwidth
    arithmetic: Arithmetic
    threads: int
    toy: bool

    def __call__(
        self,
        run: Callable,
        rounds: int,
        setup: Callable | None = None,
        teardown: Callable | None = None,
        tokens: int = 0,
        moved: int = 0,
        operations: int = 0,
        kind: str = "f32",
        warm_up: int = 1,
        **also,
    ) -> None:
        """Time `run`, after `warm_up` calls that do not count.

        A call makes `tokens`, moves `moved` bytes and takes `operations` of `kind` (of
        Arithmetic): what is 0 is not reported. `setup` gives the arguments of each call. `also` is
        kept as it is.
        """
        read, peak = [self.memory.measure()], [self.arithmetic.measure(kind)]
        self.benchmark.pedantic(
            run,
            setup=setup,
            teardown=teardown,
            rounds=min(rounds, 2) if self.toy else rounds,
            warmup_rounds=warm_up,
        )
        if self.benchmark.stats is None:  # --benchmark-disable
            return
        read.append(self.memory.measure())
        peak.append(self.arithmetic.measure(kind))
        seconds = self.benchmark.stats.stats.median
        info = self.benchmark.extra_info
        info.update(also, machine=describe(), threads=self.threads)
        if tokens:
            info["tokens_per_second"] = tokens / seconds
        if moved:
            info["gb_per_second"] = moved / seconds / 1e9
            info["read_gb_per_second"] = statistics.mean(read) / 1e9
        if operations:
            unit = {"f32": "gflop", "int8": "gop"}[kind]
            info[f"{unit}_per_second"] = operations / seconds / 1e9
            info[f"peak_{unit}_per_second"] = max(peak) / 1e9


@pytest.fixture
def measure(benchmark, memory, arithmetic, threads, toy) -> Measure:
    return Measure(benchmark, memory, arithmetic, threads, toy)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """What was done a second, beside the machine's own: pytest-benchmark shows only times."""
    session = getattr(config, "_benchmarksession", None)
    found = [b for b in getattr(session, "benchmarks", ()) if "threads" in b.extra_info]
    if not found:
        return
    first = found[0].extra_info
    terminalreporter.section(f"{first['machine']}, threads: {first['threads']}")
    width = max(len(b.name) for b in found)
    for b in found:
        terminalreporter.write_line(f"{b.name:<{width}}  {summary(b.extra_info)}".rstrip())


def summary(info: dict) -> str:
    """The line of one benchmark: each figure it has, and its share of the machine's."""
    words = []
    if "tokens_per_second" in info:
        words.append(f"{info['tokens_per_second']:.1f} tok/s")
    for key, unit, limit in (
        ("gb_per_second", "GB/s", "read_gb_per_second"),
        ("gflop_per_second", "GFLOP/s", "peak_gflop_per_second"),
        ("gop_per_second", "G op/s", "peak_gop_per_second"),
    ):
        if key in info:
            share = info[key] / info[limit]
            words.append(f"{info[key]:.1f} {unit} ({share:.0%} of {info[limit]:.1f})")
    return "  ".join(words)
