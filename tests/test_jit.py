"""engine/kernels/jit.py: the cache of compiled kernels, good and damaged, in processes of its own.

Each case works on a small package that holds a copy of jit.py, two files beside it, and a cache.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

JIT = Path(__file__).parent.parent / "engine" / "kernels" / "jit.py"
N_KERNELS = 4

HELPER = """
from mini.jit import inlined

FACTOR = 2


@inlined
def scaled(x):
    return x * FACTOR
"""

KERNEL = """
@kernel
def scaled_and_more{i}(x):
    return scaled(x) + {i}
"""

MAIN = """
import json

from mini.helper import scaled
from mini.jit import compilation, kernel

{kernels}
kernels = [{names}]
with compilation.announced():
    results = [k(2.5) for k in kernels] + [kernels[0](3)]
hits, misses = (
    sum(sum(getattr(k.stats, of).values()) for k in kernels)
    for of in ("cache_hits", "cache_misses")
)
print(json.dumps({{"results": results, "hits": hits, "misses": misses}}))
"""

RESULTS = [*(5.0 + i for i in range(N_KERNELS)), 6]
N_COMPILED = len(RESULTS)  # the first kernel for floats and for whole numbers


@dataclass
class Run:
    """What a process printed and how it ended."""

    status: int
    out: str
    err: str

    @property
    def answer(self) -> dict:
        assert self.status == 0, f"status {self.status}\n{self.err}"
        return json.loads(self.out)

    @property
    def counts(self) -> tuple[int, int]:
        """(kernels loaded, kernels compiled), the results being right."""
        assert self.answer["results"] == RESULTS, self.err
        return self.answer["hits"], self.answer["misses"]


class Mini:
    """The package, and a directory for caches."""

    def __init__(self, root: Path):
        self.root, package = root, root / "mini"
        package.mkdir()
        kernels = "".join(KERNEL.format(i=i) for i in range(N_KERNELS))
        names = ", ".join(f"scaled_and_more{i}" for i in range(N_KERNELS))
        (package / "__init__.py").touch()
        (package / "helper.py").write_text(HELPER)
        (package / "main.py").write_text(MAIN.format(kernels=kernels, names=names))
        shutil.copy(JIT, package / "jit.py")

    def start(self, cache: Path | None, **how) -> subprocess.Popen:
        env = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
        env |= {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"} | how.pop("env", {})
        if cache:
            env["NUMBA_CACHE_DIR"] = str(cache)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-m", "mini.main"], env=env, **pipes, **how)

    def run(self, cache: Path | None, **how) -> Run:
        return ended(self.start(cache, **how))


def ended(process: subprocess.Popen) -> Run:
    out, err = process.communicate(timeout=120)
    return Run(process.returncode, out, err)


@pytest.fixture(scope="module")
def mini(tmp_path_factory) -> Mini:
    return Mini(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def full(mini, tmp_path_factory) -> tuple[Path, Run]:
    """A cache with all kernels of `mini`, and the run that filled it."""
    cache = tmp_path_factory.mktemp("full")
    return cache, mini.run(cache)


@pytest.fixture
def cache(full, tmp_path) -> Path:
    """A copy of the full cache."""
    return shutil.copytree(full[0], tmp_path / "cache")


def files(cache: Path, suffix: str) -> list[Path]:
    found = sorted(cache.glob(f"kernels-*/*{suffix}"))
    assert len(found) == (N_KERNELS if suffix == ".nbi" else N_COMPILED)
    return found


def overwrite(file: Path, at: float, data: bytes) -> None:
    """Put `data` into the file, so far in as the fraction `at` says."""
    old = file.read_bytes()
    start = int(at * (len(old) - len(data)))
    file.write_bytes(old[:start] + data + old[start + len(data) :])


# ---------------------------------------------------------------- loaded or compiled


def test_first_run_compiles_and_says_so(full):
    """Half a minute of silence at the first start."""
    run = full[1]
    assert run.counts == (0, N_COMPILED)
    first, last = run.err.splitlines()
    assert first.startswith("compiling kernels for ") and last.startswith("compiled in ")


def test_second_run_compiles_nothing(mini, cache):
    """Kernels that are compiled at every start, or an announcement of what is not done."""
    run = mini.run(cache)
    assert run.counts == (N_COMPILED, 0)
    assert run.err == ""


def test_an_edit_elsewhere_counts(mini, full, tmp_path):
    """The old machine code, run on after a constant in another file has changed."""
    other = Mini(tmp_path)
    helper = tmp_path / "mini" / "helper.py"
    assert other.run(tmp_path / "cache").counts == (0, N_COMPILED)
    helper.write_text(HELPER.replace("FACTOR = 2", "FACTOR = 3"))
    edited = other.run(tmp_path / "cache").answer
    assert edited["results"][0] == 7.5 and edited["results"][-1] == 9
    assert edited["hits"] == 0


def test_another_processor_compiles_anew(mini, cache):
    """Machine code of a processor that this one is not, from a home directory that two share."""
    assert mini.run(cache, env={"NUMBA_CPU_NAME": "generic"}).counts == (0, N_COMPILED)


def test_checked_kernels_are_others(mini, cache):
    """Kernels without bounds checks, loaded by the run that is there to check bounds."""
    assert mini.run(cache, env={"NUMBA_BOUNDSCHECK": "1"}).counts == (0, N_COMPILED)


@pytest.mark.skipif(sys.platform != "linux", reason="XDG's directories")
def test_the_users_cache_directory(mini, tmp_path):
    """Compiled files strewn among the sources, or lost with the working directory."""
    run = mini.run(None, env={"XDG_CACHE_HOME": str(tmp_path)}, cwd=tmp_path)
    assert run.counts == (0, N_COMPILED)
    assert files(tmp_path / "engine", ".nbi") and files(tmp_path / "engine", ".nbc")
    assert not (mini.root / "mini" / "__pycache__").exists()


def test_two_at_once(mini, tmp_path):
    """A process that fails on what another one is writing at that moment."""
    both = [mini.start(tmp_path) for _ in range(2)]
    for process in both:
        hits, misses = ended(process).counts
        assert hits + misses == N_COMPILED
    assert mini.run(tmp_path).counts[0] > 0


# ---------------------------------------------------------------- damage


def check_repaired(mini: Mini, cache: Path) -> None:
    """Damage to every kernel costs a compilation and a line on stderr, once."""
    run = mini.run(cache)
    assert run.counts == (0, N_COMPILED)
    assert "RuntimeWarning" in run.err and "damaged" in run.err
    assert max(map(len, run.err.splitlines())) < 500
    assert mini.run(cache).counts == (N_COMPILED, 0)


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_truncated(mini, cache, suffix):
    """A traceback from a file that a full disk or a power cut has shortened."""
    for file, kept in zip(files(cache, suffix), (0.0, 0.25, 0.5, 0.99, 0.1), strict=False):
        os.truncate(file, int(kept * file.stat().st_size))
    check_repaired(mini, cache)


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_overwritten(mini, cache, suffix):
    """Damage inside: a pickle that is none, machine code that crashes or computes something else;
    a block of zeros, as a power cut leaves where data had not been written yet."""
    rng = random.Random(0)
    for i, file in enumerate(files(cache, suffix)):
        overwrite(file, (i + rng.random()) / N_COMPILED, rng.randbytes(8) if i % 2 else bytes(256))
    check_repaired(mini, cache)


def test_one_bit(mini, cache):
    """A flipped bit in machine code: a wrong result, with nothing to show for it."""
    for i, file in enumerate(files(cache, ".nbc")):
        data = bytearray(file.read_bytes())
        data[110 + 5 * i] ^= 1  # the code begins near the front
        file.write_bytes(data)
    check_repaired(mini, cache)


def test_code_of_another_signature(mini, cache):
    """Code for whole numbers under the name of that for floats: two processes that compile one
    kernel for two types at once may number their files alike, and one index wins."""
    first, second = files(cache, ".nbc")[:2]
    assert first.name.split(".")[:2] == second.name.split(".")[:2]
    first_data, second_data = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_data)
    second.write_bytes(first_data)
    assert mini.run(cache).counts[1] > 0
    assert mini.run(cache).counts == (N_COMPILED, 0)


def test_missing_files(mini, cache):
    """A traceback after someone has cleaned up half of the cache."""
    for file in files(cache, ".nbc")[1::2] + files(cache, ".nbi")[-1:]:
        file.unlink()
    assert mini.run(cache).counts[1] > 0
    assert mini.run(cache).counts == (N_COMPILED, 0)


# ---------------------------------------------------------------- nowhere to write


def test_unwritable(mini, tmp_path):
    """A read-only home: a traceback, or silence about why every start takes so long.

    A directory below a file cannot be made by anyone, root included.
    """
    (tmp_path / "file").touch()
    run = mini.run(tmp_path / "file" / "x")
    assert run.answer["results"] == RESULTS
    assert "RuntimeWarning" in run.err and "cannot be kept" in run.err
    assert "compiling kernels for" in run.err


@pytest.mark.skipif(sys.platform == "win32", reason="needs setrlimit")
def test_a_full_disk(mini, tmp_path):
    """A traceback when the directory is there, but a file cannot be written to its end."""
    import resource  # not everywhere

    def no_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    run = mini.run(tmp_path, preexec_fn=no_files)
    assert run.counts == (0, N_COMPILED)
    assert "RuntimeWarning" in run.err and "cannot be kept" in run.err
    assert mini.run(tmp_path).answer["results"] == RESULTS


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for another process there")
def test_interrupts_wait_for_the_compiler(tmp_path):
    """LLVM does not survive an exception in the middle: a crash, or a library half made."""
    script = """
import os, signal, threading, time
from engine.kernels.jit import uninterrupted
before = signal.default_int_handler
signal.signal(signal.SIGINT, before)  # a job in the background starts with it ignored
steps = []
try:
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        steps.append("ended")
except KeyboardInterrupt:
    steps.append("interrupted")
assert signal.getsignal(signal.SIGINT) is before
print(steps)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "['ended', 'interrupted']", done.stderr


STARTS = """
from numba.core import event
from engine import LLM, SamplingParams

compiled = event.RecordingListener()
event.register("numba:compile", compiled)
LLM(threads=1).generate("To be", SamplingParams(max_tokens=2))
print(sorted({str(e.data["dispatcher"]) for _, e in compiled.buffer}))
"""


def test_a_warm_start_compiles_nothing():
    """A helper of kernels that Python calls as well: it is compiled at every start, and Ctrl-C in
    the middle of it is lost."""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
