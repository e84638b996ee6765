"""The files of a batch: requests, a line each; and results, a file that grows and is not rewritten.

Both are read a line at a time: of a row there stay 33 bytes in memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from array import array
from collections import Counter
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from engine.files import check_output
from engine.serve.body import field, needed, parsed
from engine.serve.errors import ApiError, wrong

MAX_LINE = 16 << 20  # bytes of a request: what no context holds
BEGINS = b'{"id": "batch_req_'  # each result that is written here
ID_TYPE = "S32"  # of digests


def digest(custom_id: str) -> bytes:
    """What stands for a custom_id: 32 bytes in memory, however long it is."""
    return blake2b(custom_id.encode(), digest_size=16).hexdigest().encode()


def rows_of(path: Path) -> Iterator[tuple[int, dict]]:
    """(number of its line, row) for each row of a file, read as it is asked for; ValueError names a
    line that is none."""
    if not os.path.isfile(path):  # nor a pipe: it is read twice
        raise ValueError(f"{path}: is not a file")
    try:
        with open(path, "rb") as file:
            read = partial(file.readline, MAX_LINE + 1)
            for number, line in enumerate(iter(read, b""), 1):
                if len(line) > MAX_LINE:
                    raise wrong(f"line {number} is longer than {MAX_LINE} bytes")
                if line.strip():
                    row = parsed(line, f"line {number}")
                    needed(row, "custom_id", str, f"line {number}: ")
                    yield number, row
    except ApiError as e:
        raise ValueError(f"{path}: {e}") from None
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror or e}") from None


def checked_ids(path: Path) -> np.ndarray:
    """Digests of the custom_ids of a file's rows; ValueError where two are the same."""
    listed, numbers = bytearray(), array("Q")
    for number, row in rows_of(path):
        listed += digest(row["custom_id"])
        numbers.append(number)
    ids = np.frombuffer(listed, ID_TYPE)
    order = np.argsort(ids, kind="stable")  # equal ones stay in the order of their lines
    again = order[1:][ids[order[1:]] == ids[order[:-1]]]
    if len(again):
        at = again.min()
        first = np.flatnonzero(ids == ids[at])[0]
        both = f"line {numbers[at]} has the custom_id of line {numbers[first]}"
        raise ValueError(f"{path}: {both}; each needs one of its own")
    return ids


def rows_left(path: Path, ids: np.ndarray, is_done: np.ndarray) -> Iterator[dict]:
    """The rows of a file that are not done; ValueError if it is not the one that was checked."""
    changed, n = f"{path}: has changed since it was looked at", 0
    for _, row in rows_of(path):
        if n == len(ids) or digest(row["custom_id"]) != ids[n]:
            raise ValueError(changed)
        if not is_done[n]:
            yield row
        n += 1
    if n < len(ids):
        raise ValueError(changed)


def kind_of(status: int) -> str:
    return "answered" if status == 200 else "refused" if 400 <= status < 500 else "failed"


class Results:
    """Which rows of a batch have a result, and a place for those that follow.

    Nobody else can have the file meanwhile. What a process that was killed left of its last line
    is cut off.
    """

    def __init__(self, path: Path, ids: np.ndarray):
        """`ids`: digests of the batch's rows. ValueError, and the file stays as it is, where a line
        of it is no result; OSError, with the path, for what the system refuses."""
        check_output(path)
        self.path = path
        self.counts: Counter[str] = Counter()  # rows that have a result, by what it is
        try:
            self._file = open(path, "ab", buffering=0)
        except OSError as e:
            raise self._refused(e) from None
        try:
            self._lock()
            found, end = self._read()
            if end < os.fstat(self._file.fileno()).st_size:
                self._file.truncate(end)
        except BaseException:
            self._file.close()
            raise
        self.is_done = np.zeros(len(ids), bool)  # of each row, when the file was opened
        for kind, listed in found.items():
            known = np.isin(ids, np.frombuffer(listed, ID_TYPE)) & ~self.is_done
            self.counts[kind] = int(known.sum())
            self.is_done |= known

    @property
    def n_done(self) -> int:
        return self.counts.total()

    def append(self, custom_id: str, status: int, body: dict) -> None:
        """Add a row's result, whole: a line in OpenAI's form. OSError, with the path."""
        about = {"status_code": status, "request_id": secrets.token_hex(16), "body": body}
        result = {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": custom_id,
            "response": about,
            "error": None,
        }
        # ASCII: a line is one whatever its reader takes for the end of a line
        left = memoryview(json.dumps(result).encode() + b"\n")
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as e:
            raise self._refused(e) from None
        self.counts[kind_of(status)] += 1

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    def _refused(self, error: OSError) -> OSError:
        return OSError(f"{self.path}: cannot be written: {error.strerror or error}")

    def _lock(self) -> None:
        """Until the file is closed, or the process has ended, however."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"{self.path}: another process is writing to it") from None
        except OSError as e:
            raise OSError(f"{self.path}: cannot be locked: {e.strerror or e}") from None

    def _read(self) -> tuple[dict[str, bytearray], int]:
        """Digests of the rows in the file by the kind of their results, and where they end."""
        found = {"answered": bytearray(), "refused": bytearray(), "failed": bytearray()}
        end = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if not (line.startswith(BEGINS) or BEGINS.startswith(line)):
                        raise ValueError(f"{self.path}: line {number} is no result of a batch")
                    break
                end += len(line)
                if line.strip():
                    kind, custom_id = self._result_of(line, number)
                    found[kind] += digest(custom_id)
        return found, end

    def _result_of(self, line: bytes, number: int) -> tuple[str, str]:
        try:
            result = parsed(line, f"line {number}")
            where = f"line {number}: "
            custom_id = needed(result, "custom_id", str, where)
            response = field(result, "response", dict, {}, where)
            status = response.get("status_code")
            if result.get("error") is None and type(status) is not int:
                raise wrong(f"{where}neither a status_code nor an error is there")
        except ApiError as e:
            raise ValueError(f"{self.path}: is no file of results: {e}") from None
        return kind_of(status if type(status) is int else 500), custom_id
