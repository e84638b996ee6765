"""How kernels are compiled and where the machine code is kept.

Numba's own cache reuses a compiled file even after a function that it calls in *another* file has
changed. So the cache directory here is named by a hash of all kernel sources, Numba's version and
the processor. A damaged file in it costs a recompilation and a warning, and so does a directory
that cannot be written; neither ends the program.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numba
from llvmlite import binding
from numba.core import caching, config
from numba.misc.appdirs import AppDirs

# No fastmath: a sum's order is written out by the kernel, in vector types, so that its bits depend
# neither on how a loop was inlined nor on the width of the processor's registers.
FLAGS = {"nogil": True, "error_model": "numpy"}


def cpu() -> tuple[str, str]:
    """The processor that kernels are compiled for: its name and its features, as LLVM says them."""
    name = config.CPU_NAME or binding.get_host_cpu_name()
    features = config.CPU_FEATURES
    if features is None:
        features = binding.get_host_cpu_features().flatten() if not config.CPU_NAME else ""
    return name, features


@functools.cache
def cache_dir() -> Path:
    """Where compiled kernels of exactly these sources, on this processor, are kept."""
    key = hashlib.sha256(repr((numba.__version__, sys.version_info[:3], cpu())).encode())
    key.update(repr((config.BOUNDSCHECK, config.OPT, config.DEBUGINFO_DEFAULT)).encode())
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


class KernelCache(caching.FunctionCache):
    """Numba's cache for one kernel, where no state of the disk can end the program."""

    _impl_class = CacheImpl

    def load_overload(self, sig, target_context):
        try:
            found = super().load_overload(sig, target_context)
        except Exception as e:  # a truncated pickle can raise anything
            warn(f"a compiled kernel in {self.cache_path} is damaged ({e!r}); compiling it anew")
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
            if self.said:
                name = cpu()[0]
                print(f"compiling kernels for {name} (once, some 30 s) ...", file=sys.stderr)

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Compilation inside the block is announced; loading from the cache is not."""
        self.started, self.said = None, True
        try:
            yield
        finally:
            self.said = False
        if self.started is not None:
            print(f"compiled in {time.perf_counter() - self.started:.1f} s", file=sys.stderr)


compilation = Compilation()


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
