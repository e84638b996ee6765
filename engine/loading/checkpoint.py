"""Named tensors of a checkpoint directory: mapped, strict, never trusted.

The format is safetensors (https://github.com/huggingface/safetensors#format): 8 bytes, the
header's length as a little-endian integer; the header, a JSON object of
`name: {"dtype", "shape", "data_offsets"}`; then the tensors' bytes, without gaps, in any order.
Every header is checked in full before a byte of a tensor is read. This file knows no model: which
tensors there must be, the caller says to `Checkpoint.check`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from engine.config import read_json, show

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[\w.-]+\.safetensors")  # a plain name: it cannot leave the directory
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
MAX_HEADER = 100_000_000  # bytes, the format's own limit
MAX_RANK = 8  # a header of 100 MB can claim a shape whose product takes hours


@dataclass(frozen=True)
class Tensor:
    """A tensor's place in a checkpoint, as its file's header states it."""

    name: str
    dtype: str  # "F32", "F16" or "BF16"
    shape: tuple[int, ...]
    file: Path
    start: int  # of its bytes in the file, and their end
    stop: int


class Checkpoint:
    """The tensors of a directory: `model.safetensors` or, without one, the shards of its index.

    ValueError, with the file and the tensor, for whatever is missing, malformed or contradictory.
    """

    def __init__(self, path: Path):
        self.source = source_of(Path(path))  # the file that says which tensors there are
        self.tensors: dict[str, Tensor] = {}
        self._files: dict[Path, BinaryIO] = {}
        placed = read_index(self.source) if self.source.name == INDEX else None
        with ExitStack() as opened:
            for name in [SINGLE] if placed is None else sorted(set(placed.values())):
                file = self.source.parent / name
                self._files[file] = opened.enter_context(open_file(file))
                for tensor in read_tensors(file, self._files[file]):
                    other = self.tensors.setdefault(tensor.name, tensor)
                    if other is not tensor:
                        raise ValueError(f"{file}: {show(tensor.name)} is in {other.file.name} too")
            if placed is not None:
                compare(self.source, placed, self.tensors)
            self._opened = opened.pop_all()

    def check(
        self, expected: dict[str, tuple[int, ...]], optional: dict[str, tuple[int, ...]]
    ) -> None:
        """ValueError unless the tensors are those of `expected`, and of `optional` any or none."""
        known = optional | expected
        faults = {
            "missing": [show(name) for name in expected if name not in self.tensors],
            "left over": [show(name) for name in self.tensors if name not in known],
            "of another shape": [
                f"{show(name)} is {show(tensor.shape)}, not {known[name]}"
                for name, tensor in self.tensors.items()
                if name in known and tensor.shape != known[name]
            ],
        }
        if any(faults.values()):
            told = "; ".join(f"{kind}: {first(few)}" for kind, few in faults.items() if few)
            raise ValueError(f"{self.source}: tensors {told}")

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor, read-only: float32, float16, or uint16 for BF16's bits.

        Just these bytes are mapped, and unmapped with the array: a loader that goes piece by
        piece never holds the checkpoint. A file that shrank since it was opened is a ValueError;
        one that shrinks while the array is in use cannot be told.
        """
        tensor = self.tensors[name]
        assert tensor.shape and 0 <= start <= stop <= tensor.shape[0], (tensor, start, stop)
        dtype = DTYPES[tensor.dtype]
        shape = (stop - start, *tensor.shape[1:])
        row = math.prod(tensor.shape[1:]) * dtype.itemsize  # bytes
        begin, end = tensor.start + start * row, tensor.start + stop * row
        if begin == end:
            return np.zeros(shape, dtype)
        file = self._files[tensor.file]
        page = begin - begin % mmap.ALLOCATIONGRANULARITY
        try:
            if (
                size := os.fstat(file.fileno()).st_size
            ) < tensor.stop:  # reading on would be SIGBUS
                raise ValueError(f"it ends at byte {tensor.stop:,}, the file now at {size:,}")
            pages = mmap.mmap(file.fileno(), end - page, access=mmap.ACCESS_READ, offset=page)
        except (OSError, ValueError) as e:
            raise ValueError(f"{tensor.file}: cannot map {show(name)}: {e}") from None
        array = np.frombuffer(pages, dtype, math.prod(shape), offset=begin - page).reshape(shape)
        array = np.require(array, requirements="A")  # a copy, if the header's length is odd
        array.flags.writeable = False
        return array

    def close(self) -> None:
        """Close the files. Arrays that `rows` returned stay valid."""
        self._opened.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def source_of(path: Path) -> Path:
    """The file to start from: `model.safetensors` or, without one, the index."""
    if not os.path.isdir(path):
        raise ValueError(f"{path}: no such directory")
    for file in (path / SINGLE, path / INDEX):
        if os.path.lexists(file):  # a dangling link too: it is named when it is opened
            return file
    others = sorted(file.name for file in path.glob("*") if file.suffix in (".bin", ".gguf"))
    hint = f" (only safetensors is read, not {others[0]})" if others else ""
    raise ValueError(f"{path}: holds neither {SINGLE} nor {INDEX}{hint}")


def read_index(index: Path) -> dict[str, str]:
    """Of an index file: the name of the shard that holds each tensor."""
    open_file(index).close()
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict):
        raise ValueError(f"{index}: weight_map is {show(placed)}, not an object")
    for name, file in placed.items():
        if not isinstance(file, str) or not SHARD_NAME.fullmatch(file):
            raise ValueError(
                f"{index}: places {show(name)} in {show(file)}; plain names *.safetensors are read"
            )
    return placed


def compare(index: Path, placed: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """ValueError unless each shard holds what the index places in it, and no more."""
    held = {name: tensor.file.name for name, tensor in tensors.items()}
    for name in sorted(placed | held):
        said, found = placed.get(name, "no file"), held.get(name, "no file")
        if said != found:
            raise ValueError(f"{index}: places {show(name)} in {said}, but {found} holds it")


def open_file(file: Path) -> BinaryIO:
    if os.path.exists(file) and not os.path.isfile(file):  # opening a pipe would wait for a writer
        raise ValueError(f"{file}: not a regular file")
    try:
        return open(file, "rb")
    except OSError as e:
        raise ValueError(f"{file}: cannot be opened: {e.strerror}") from None


def read_tensors(file: Path, opened: BinaryIO) -> list[Tensor]:
    """The tensors of one file, in the order of their bytes, which they fill without a gap."""
    size = os.fstat(opened.fileno()).st_size
    header, start = read_header(file, opened, size)
    tensors = [tensor_of(file, *item, start, size) for item in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    for tensor in tensors:
        if tensor.start != start:
            fault = "overlaps the one before" if tensor.start < start else "follows a hole"
            raise ValueError(f"{file}: tensor {show(tensor.name)} {fault}")
        start = tensor.stop
    if start != size:
        raise ValueError(f"{file}: {size - start:,} bytes are left over after the last tensor")
    return tensors


def read_header(file: Path, opened: BinaryIO, size: int) -> tuple[dict, int]:
    """The header's object, its `__metadata__` dropped, and where the data starts."""
    try:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            limits = f"in a file of {size:,}, and {MAX_HEADER:,} at most are read"
            raise ValueError(f"it claims {length:,} bytes {limits}: truncated, or not safetensors")
        header = json.loads(opened.read(length).decode(), object_pairs_hook=without_duplicates)
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{file}: header cannot be read: {e}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: header is {show(header)}, not an object")
    header.pop("__metadata__", None)
    return header, 8 + length


def without_duplicates(pairs: list[tuple[str, object]]) -> dict:
    unique = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"{show(key)} is in it twice")
        unique[key] = value
    return unique


def tensor_of(file: Path, name: str, entry: object, data: int, size: int) -> Tensor:
    """The tensor that a header's entry describes; `data` is where the file's data starts."""

    def wrong(what: str) -> ValueError:
        return ValueError(f"{file}: tensor {show(name)}: {what}")

    if not isinstance(entry, dict):
        raise wrong(f"described by {show(entry)}, not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise wrong(f"dtype {show(dtype)} is not read; {', '.join(DTYPES)} are")
    if not naturals(shape) or len(shape) > MAX_RANK:
        raise wrong(f"shape {show(shape)} is no list of at most {MAX_RANK} sizes")
    if not naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"data_offsets {show(offsets)} are not a start and an end")
    if offsets[1] > size - data:
        raise wrong(f"ends at byte {show(offsets[1])} of {size - data:,}: the file is truncated")
    if math.prod(shape) * DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
        raise wrong(f"{dtype} {show(shape)} does not take {offsets[1] - offsets[0]:,} bytes")
    return Tensor(name, dtype, tuple(shape), file, data + offsets[0], data + offsets[1])


def naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def first(texts: list[str]) -> str:
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
