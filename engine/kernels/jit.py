"""How kernels are compiled and where the machine code is kept.

Numba's own cache reuses a compiled file even after a function that it calls in *another* file has
changed. So the cache directory here is named by a hash of all kernel sources, Numba's version and
the processor. A damaged file in it costs a recompilation and a warning, and so does a directory
that cannot be written; neither ends the program.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numba
from llvmlite import binding
from numba.core import caching, config
from numba.core.codegen import get_host_cpu_features
from numba.misc.appdirs import AppDirs

# No fastmath: a sum's order is written out by the kernel, in vector types, so that its bits depend
# neither on how a loop was inlined nor on the width of the processor's registers.
FLAGS = {"nogil": True, "error_model": "numpy"}


def cpu() -> tuple[str, str]:
    """The processor that kernels are compiled for: its name and its features, as LLVM says them."""
    name = config.CPU_NAME or binding.get_host_cpu_name()
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return name, features


def has(feature: str) -> bool:
    """Whether the processor that kernels are compiled for has `feature`."""
    return f"+{feature}" in cpu()[1].split(",")


@functools.cache
def cache_dir() -> Path:
    """Where compiled kernels of exactly these sources, on this processor, are kept."""
    key = hashlib.sha256(repr((numba.__version__, sys.version_info[:3], cpu())).encode())
    key.update(repr((config.BOUNDSCHECK, config.OPT, os.environ.get("ENGINE_INT8"))).encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        key.update(file.name.encode() + file.read_bytes())
    base = config.CACHE_DIR or AppDirs(appname="engine", appauthor=False).user_cache_dir
    return Path(base) / f"kernels-{key.hexdigest()[:16]}"


class Locator(caching.UserProvidedCacheLocator):
    """Tells Numba to use `cache_dir()`."""

    def __init__(self, py_func, py_file):
        super().__init__(py_func, py_file)
        self._cache_path = str(cache_dir())

    @classmethod
    def from_function(cls, py_func, py_file):
        found = cls(py_func, py_file)
        found.ensure_cache_path()  # OSError where it cannot be written
        return found


class CacheImpl(caching.CompileResultCacheImpl):
    _locator_classes = [Locator]


class CheckedFiles(caching.IndexDataCacheFile):
    """Numba's files of one kernel, each with a checksum behind its pickle.

    Damage inside machine code does not show when it is loaded: it crashes the process, or worse.
    """

    @contextmanager
    def _open_for_write(self, filepath):
        with super()._open_for_write(filepath) as file:
            content = io.BytesIO()
            yield content
            file.write(content.getvalue() + hashlib.sha256(content.getvalue()).digest())

    def load(self, key):
        check_sum(self._index_path)
        return super().load(key)

    def _load_data(self, name):
        check_sum(self._data_path(name))
        return super()._load_data(name)


def check_sum(path: str) -> None:
    """ValueError if the file is not as it was written."""
    if Path(path).exists():
        data = Path(path).read_bytes()
        if hashlib.sha256(data[:-32]).digest() != data[-32:]:
            raise ValueError("its checksum is wrong")


class KernelCache(caching.FunctionCache):
    """Numba's cache for one kernel, where no state of the disk can end the program."""

    _impl_class = CacheImpl

    def __init__(self, py_func):
        super().__init__(py_func)
        base, stamp = self._impl.filename_base, self._impl.locator.get_source_stamp()
        self._cache_file = CheckedFiles(self._cache_path, base, stamp)

    def load_overload(self, sig, target_context):
        try:
            with uninterrupted():  # LLVM calls back, and what is raised in there is lost
                found = super().load_overload(sig, target_context)
            if found is not None and found.signature.args != tuple(sig):
                raise ValueError(f"it is for {found.signature}")
        except Exception as e:  # a truncated pickle can raise anything
            fault = f"{type(e).__name__} in {self.cache_path}"
            warn(f"a compiled kernel is damaged, and compiled anew ({fault})")
            Path(self._cache_file._index_path).unlink(missing_ok=True)
            found = None
        if found is None:
            compilation.start()
        return found

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except OSError as e:
            warn(f"compiled kernels cannot be kept in {self.cache_path} ({e})")


class NoCache(caching.NullCache):
    def load_overload(self, sig, target_context):
        compilation.start()


class Compilation:
    """Says on stderr that kernels are being compiled, once, and how long it took."""

    def __init__(self):
        self.started = None
        self.said = False

    def start(self) -> None:
        if self.started is None:
            self.started = time.perf_counter()
            if self.said and sys.stderr:
                name = cpu()[0]
                print(f"compiling kernels for {name}, kept for later starts ...", file=sys.stderr)

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Compilation inside the block is announced; loading from the cache is not."""
        self.started, self.said = None, True
        try:
            yield
        finally:
            self.said = False
        if self.started is not None and sys.stderr:
            print(f"compiled in {time.perf_counter() - self.started:.1f} s", file=sys.stderr)


compilation = Compilation()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C inside the block is raised at its end: LLVM does not survive an exception in it.

    A second one ends the process at once; the cache's files are written whole or not at all.
    """
    if threading.current_thread() is not threading.main_thread():  # which never sees Ctrl-C
        yield
        return
    came = []

    def note(number, frame):
        came.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if compilation.said and compilation.started is not None and sys.stderr:
            print("interrupted: compilation ends first (again: at once)", file=sys.stderr)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
        if came:
            signal.raise_signal(signal.SIGINT)


@functools.cache
def warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def kernel(function):
    """The decorator of every compiled function: no GIL, no Python exceptions, kept on disk.

    Its callers guarantee shapes; with NUMBA_BOUNDSCHECK=1 an index out of range raises.
    """
    compiled = numba.njit(**FLAGS)(function)
    try:
        compiled._cache = KernelCache(function)
    except OSError as e:
        warn(f"compiled kernels cannot be kept in {cache_dir()} ({e.strerror or e})")
        compiled._cache = NoCache()
    return compiled


def inlined(function):
    """A piece of a kernel: compiled into each of its callers, so that vectors stay in registers."""
    return numba.njit(forceinline=True, **FLAGS)(function)
