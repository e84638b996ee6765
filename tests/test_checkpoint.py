"""Checkpoints as the hub ships them, and files that lie."""

from __future__ import annotations

import json
import mmap
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from engine.loading.checkpoint import INDEX, MAX_HEADER, SINGLE, Checkpoint

A = np.arange(24, dtype=np.float32).reshape(6, 4)
B = np.arange(5, dtype=np.float16)


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A file's bytes from a header (an object, or bytes as they are)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: object, shape: object, *offsets: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def single(folder: Path, content: bytes) -> Path:
    (folder / SINGLE).write_bytes(content)
    return folder


def sharded(folder: Path, shards: dict[str, dict], weight_map: object = None) -> Path:
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    if weight_map is None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refused(folder: Path, *words: str) -> None:
    """Opening `folder` is one ValueError of one line that holds `words`."""
    with pytest.raises(ValueError) as error:
        Checkpoint(folder)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_rows_of_a_single_file(tmp_path):
    """A slice taken from the wrong place or in the wrong type; metadata taken for a tensor."""
    save_file({"a": A, "b": B}, tmp_path / SINGLE, metadata={"format": "pt"})
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b"}
        a = checkpoint.tensors["a"]
        assert (a.name, a.dtype, a.shape) == ("a", "F32", (6, 4))
        assert checkpoint.tensors["b"].dtype == "F16"
        for start, stop in [(0, 6), (0, 1), (5, 6), (2, 5), (3, 3)]:
            got = checkpoint.rows("a", start, stop)
            assert got.dtype == np.float32 and np.array_equal(got, A[start:stop])
            assert got.shape == (stop - start, 4)
        got = checkpoint.rows("b", 1, 4)
        assert got.dtype == np.float16 and np.array_equal(got, B[1:4])


def test_bf16_bits(tmp_path):
    """BF16 rounded, swapped or read as float16: every bit pattern, NaN included, comes back."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    single(tmp_path, raw({"w": entry("BF16", [256, 256], 0, bits.nbytes)}, bits.tobytes()))
    with Checkpoint(tmp_path) as checkpoint:
        got = checkpoint.rows("w", 100, 200)
    assert got.dtype == np.uint16 and np.array_equal(got, bits[100:200])


@pytest.mark.parametrize("shift", range(8))
def test_unaligned_data(tmp_path, shift):
    """A header of odd length: arrays that compiled code would read with aligned loads."""
    text = json.dumps({"a": entry("F32", [6, 4], 0, 96)}).encode()
    text += b" " * (-len(text) % 8 + shift)
    single(tmp_path, raw(text, A.tobytes()))
    with Checkpoint(tmp_path) as checkpoint:
        got = checkpoint.rows("a", 1, 5)
        assert got.flags.aligned and not got.flags.writeable
        assert np.array_equal(got, A[1:5])


def test_rows_across_pages(tmp_path):
    """An offset past the first page, not aligned down or aligned down twice."""
    big = np.random.default_rng(0).standard_normal((100_000, 8), dtype=np.float32)  # 3.2 MB
    save_file({"a": A, "big": big}, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint:
        for start, stop in [(0, 3), (2047, 2050), (50_001, 70_003), (99_999, 100_000)]:
            assert np.array_equal(checkpoint.rows("big", start, stop), big[start:stop])


def test_zero_sized_tensors(tmp_path):
    """mmap of no bytes fails, and of a whole file is what length 0 means to it."""
    header = {
        "none": entry("F32", [0], 0, 0),
        "flat": entry("F16", [3, 0], 4, 4),
        "one": entry("F32", [1], 0, 4),
    }
    single(tmp_path, raw(header, np.float32(7).tobytes()))
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.rows("none", 0, 0).shape == (0,)
        assert checkpoint.rows("flat", 1, 3).shape == (2, 0)
        assert checkpoint.rows("one", 0, 1).tolist() == [7]
    text = json.dumps({"none": entry("F32", [0], 0, 0)}).encode()
    text += b" " * (mmap.ALLOCATIONGRANULARITY - 8 - len(text))  # the file ends with a page
    with Checkpoint(single(tmp_path, raw(text))) as checkpoint:
        assert checkpoint.rows("none", 0, 0).shape == (0,)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux's own account")
def test_pages_go_with_the_array(tmp_path):
    """A loader that keeps the whole checkpoint mapped, or maps all of it for a few rows."""
    big = np.ones((1 << 20, 4), np.float32)  # 16 MB
    save_file({"big": big}, tmp_path / SINGLE)

    def mapped() -> int:
        """Bytes of the file that are mapped."""
        spans = [
            line.split()[0].split("-")
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.endswith(f"{tmp_path.name}/{SINGLE}")
        ]
        return sum(int(stop, 16) - int(start, 16) for start, stop in spans)

    with Checkpoint(tmp_path) as checkpoint:
        assert mapped() == 0
        rows = checkpoint.rows("big", 1 << 19, (1 << 19) + 1024)  # 16 kB
        assert 0 < mapped() < 1 << 17
        assert rows.sum() == 4096
        del rows
        assert mapped() == 0


def test_arrays_outlive_the_checkpoint(tmp_path):
    """Memory unmapped under an array that is still in use."""
    save_file({"a": A}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    got = checkpoint.rows("a", 0, 6)
    checkpoint.close()
    assert np.array_equal(got, A)
    with pytest.raises(ValueError, match=SINGLE):
        checkpoint.rows("a", 0, 6)


@pytest.mark.skipif(os.name == "nt", reason="Windows does not shorten an open file")
def test_a_file_that_shrinks(tmp_path):
    """SIGBUS, which ends the process, for a file that was replaced while it was open."""
    save_file({"a": A}, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint:
        os.truncate(tmp_path / SINGLE, 100)
        with pytest.raises(ValueError, match=f"{SINGLE}.*'a'"):
            checkpoint.rows("a", 0, 1)


GOOD = {"a": entry("F32", [2], 0, 8)}
EIGHT = bytes(8)
LIES = {
    "empty": (b"", ["truncated", "0 bytes"]),
    "seven bytes": (b"\x10" + bytes(6), ["truncated"]),
    "header past the end": (raw(GOOD, EIGHT, length=1000), ["truncated", "1,000"]),
    "huge length": (raw(GOOD, EIGHT, length=2**64 - 1), ["truncated", f"{MAX_HEADER:,}"]),
    "no JSON": (raw(b'{"a": ', EIGHT), ["JSON"]),
    "no UTF-8": (raw(b'{"\xff": 1}', EIGHT), ["utf-8"]),
    "UTF-16": (raw(json.dumps(GOOD).encode("utf-16"), EIGHT), []),
    "no object": (raw([1], EIGHT), ["[1]", "object"]),
    "too deep": (raw(b"[" * 100_000), []),
    "a name twice": (
        raw(b'{"a": {"x": 1}, "a": {"y": 1}}', EIGHT),
        ["'a'", "twice"],
    ),
    "entry is a list": (raw({"a": [1]}, EIGHT), ["'a'", "[1]"]),
    "unknown dtype": (raw({"a": entry("F64", [1], 0, 8)}, EIGHT), ["'a'", "'F64'", "BF16"]),
    "dtype is a list": (raw({"a": entry(["F32"], [2], 0, 8)}, EIGHT), ["'a'", "['F32']"]),
    "no dtype": (raw({"a": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT), ["'a'", "None"]),
    "shape is a number": (raw({"a": entry("F32", 2, 0, 8)}, EIGHT), ["'a'", "shape 2"]),
    "negative shape": (raw({"a": entry("F32", [-1, -2], 0, 8)}, EIGHT), ["'a'", "[-1, -2]"]),
    "shape of true": (raw({"a": entry("F32", [True, 2], 0, 8)}, EIGHT), ["'a'", "[True, 2]"]),
    "fractional shape": (raw({"a": entry("F32", [2.0], 0, 8)}, EIGHT), ["'a'", "[2.0]"]),
    "overflowing shape": (
        raw({"a": entry("F32", [2**62 + 1, 2], 0, 8)}, EIGHT),
        ["'a'", "8 bytes"],
    ),
    "endless product": (raw({"a": entry("F32", [9] * 300_000, 0, 8)}, EIGHT), ["'a'", "at most 8"]),
    "three offsets": (raw({"a": entry("F32", [2], 0, 8, 8)}, EIGHT), ["'a'", "[0, 8, 8]"]),
    "offsets backwards": (raw({"a": entry("F32", [2], 8, 0)}, EIGHT), ["'a'", "[8, 0]"]),
    "negative offset": (raw({"a": entry("F32", [2], -8, 0)}, EIGHT), ["'a'", "[-8, 0]"]),
    "offset past the end": (raw(GOOD, EIGHT[:7]), ["'a'", "8 of 7", "truncated"]),
    "wrong size": (raw({"a": entry("F32", [3], 0, 8)}, EIGHT), ["'a'", "[3]", "8 bytes"]),
    "left over": (raw(GOOD, bytes(11)), ["3 bytes", "left over"]),
    "a hole at the start": (raw({"a": entry("F16", [2], 4, 8)}, EIGHT), ["'a'", "hole"]),
    "a hole": (
        raw({"a": entry("F16", [1], 0, 2), "b": entry("F16", [2], 4, 8)}, EIGHT),
        ["'b'", "hole"],
    ),
    "overlapping": (
        raw({"a": entry("F16", [3], 0, 6), "b": entry("F16", [2], 4, 8)}, EIGHT),
        ["'b'", "overlaps"],
    ),
    "the same bytes twice": (
        raw({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)}, EIGHT),
        ["'b'", "overlaps"],
    ),
    "a name of two lines": (raw({"a\nb": 1}), [r"'a\nb'"]),
    "a name of a megabyte": (raw({"a" * 1_000_000: 1}), ["aaa"]),
}


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie(tmp_path, lie):
    """Each would be a read outside of the file, a traceback, a hang or a wrong tensor."""
    content, words = LIES[lie]
    refused(single(tmp_path, content), str(tmp_path / SINGLE), *words)
    with pytest.raises(ValueError) as error:
        Checkpoint(tmp_path)
    assert len(str(error.value)) < 400 + len(str(tmp_path))


def test_a_header_over_the_limit(tmp_path):
    """A sparse file that claims a header as large as itself: read whole, it fills the memory."""
    with open(tmp_path / SINGLE, "wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER + 1))
        file.truncate(MAX_HEADER + 100)
    refused(tmp_path, f"{MAX_HEADER + 1:,}", f"{MAX_HEADER:,}")


PLAIN = raw(
    {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [6, 4], 0, 96),
        "b": entry("F16", [5], 96, 106),
    },
    A.tobytes() + B.tobytes(),
)
HEADER_BYTES = len(PLAIN) - 106


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(flips=st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), max_size=4))
@example(flips=[])
def test_any_flipped_bytes(tmp_path, flips):
    """Any damage to a header is a ValueError, or harmless: never a crash or bytes from outside."""
    damaged = bytearray(PLAIN)
    for at, value in flips:
        damaged[at] = value
    single(tmp_path, damaged)
    try:
        checkpoint = Checkpoint(tmp_path)
    except ValueError as e:
        assert "\n" not in str(e)
        return
    with checkpoint:
        data = {"F32": A.tobytes(), "F16": B.tobytes(), "BF16": B.tobytes()}
        for tensor in checkpoint.tensors.values():
            got = checkpoint.rows(tensor.name, 0, tensor.shape[0])
            assert got.tobytes() == data[tensor.dtype]


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(length=st.integers(0, len(PLAIN) - 1))
def test_any_truncation(tmp_path, length):
    """A download cut short anywhere is refused when it is opened, not when it is used."""
    refused(single(tmp_path, PLAIN[:length]), SINGLE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(dtype=JSON | st.just("F32"), shape=JSON | st.just([2]), offsets=JSON | st.just([0, 8]))
def test_any_values(tmp_path, dtype, shape, offsets):
    """A value of any JSON type where another is expected: TypeError, KeyError, OverflowError."""
    header = {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}
    single(tmp_path, raw(header, EIGHT))
    try:
        Checkpoint(tmp_path).close()
    except ValueError as e:
        assert "\n" not in str(e)


def test_shards(tmp_path):
    """A tensor read from the wrong shard, or a shard that is never opened."""
    shards = {"m-1.safetensors": {"a": A, "b": B}, "m-2.safetensors": {"c": A + 1}}
    with Checkpoint(sharded(tmp_path, shards)) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b", "c"}
        assert np.array_equal(checkpoint.rows("c", 2, 4), A[2:4] + 1)
        assert np.array_equal(checkpoint.rows("a", 2, 4), A[2:4])


def test_the_single_file_wins(tmp_path):
    """A stale index beside a single file: transformers reads the file, and so must we."""
    sharded(tmp_path, {}, {"a": "gone.safetensors"})
    save_file({"a": A}, tmp_path / SINGLE)
    Checkpoint(tmp_path).close()


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "..", ""]
    + ["C:x.safetensors", "x.bin", "x.safetensors\n", "x\0.safetensors", 3, None, ["x"]],
)
def test_shard_names_stay_in_the_directory(tmp_path, file):
    """A hostile index that has a file from elsewhere opened, or fetched."""
    refused(sharded(tmp_path, {}, {"a": file}), INDEX, "'a'", repr(file))


@pytest.mark.parametrize("weight_map", [[], "x", 3, ["a"]])
def test_weight_map_of_another_type(tmp_path, weight_map):
    """AttributeError where an object is expected."""
    refused(sharded(tmp_path, {}, weight_map), INDEX, "weight_map", repr(weight_map))


def test_no_weight_map(tmp_path):
    """KeyError for an index without a map, a traceback for one that is not JSON."""
    (tmp_path / INDEX).write_text("{}")
    refused(tmp_path, INDEX, "weight_map")
    (tmp_path / INDEX).write_text("{")
    refused(tmp_path, INDEX)


def test_absent_shard(tmp_path):
    """One of the shards not downloaded: the message must say which."""
    placed = {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    refused(sharded(tmp_path, {"m-1.safetensors": {"a": A}}, placed), "m-2.safetensors", "No such")


def test_index_and_shards_disagree(tmp_path):
    """A tensor in another shard than the index says, in none, in two, or in no list."""
    one, two = "m-1.safetensors", "m-2.safetensors"
    sharded(tmp_path, {one: {"a": A}, two: {"b": B}}, {"a": one, "b": two, "c": two})
    refused(tmp_path, INDEX, "'c'", two)
    sharded(tmp_path, {one: {"a": A, "c": A}, two: {"b": B}}, {"a": one, "b": two, "c": two})
    refused(tmp_path, INDEX, "'c'", one, two)
    sharded(tmp_path, {one: {"a": A, "c": A}, two: {"b": B}}, {"a": one, "b": two})
    refused(tmp_path, INDEX, "'c'", one)
    sharded(tmp_path, {one: {"a": A}, two: {"a": A, "b": B}}, {"a": one, "b": two})
    refused(tmp_path, "'a'", one, two)


def test_no_safetensors(tmp_path):
    """A directory of another format, or of nothing: what is read must be named."""
    refused(tmp_path / "gone", "gone", "no such directory")
    refused(tmp_path, str(tmp_path), SINGLE)
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, SINGLE, "only safetensors is read, not pytorch_model.bin")
    (tmp_path / "a.gguf").touch()
    refused(tmp_path, "a.gguf")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes and links")
def test_what_is_no_regular_file(tmp_path):
    """A pipe is waited for without end; a directory or a dangling link is a traceback."""
    (tmp_path / SINGLE).mkdir()
    refused(tmp_path, SINGLE, "not a regular file")
    (tmp_path / SINGLE).rmdir()
    os.mkfifo(tmp_path / SINGLE)
    refused(tmp_path, SINGLE, "not a regular file")
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).symlink_to(tmp_path / "blob")
    refused(tmp_path, SINGLE, "No such file")
    (tmp_path / SINGLE).unlink()
    os.mkfifo(tmp_path / INDEX)
    refused(tmp_path, INDEX, "not a regular file")
    (tmp_path / INDEX).unlink()
    os.mkfifo(tmp_path / "m.safetensors")
    refused(sharded(tmp_path, {}, {"a": "m.safetensors"}), "m.safetensors", "not a regular file")


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_links_are_followed(tmp_path):
    """The hub's cache is links to blobs: refusing links refuses it."""
    save_file({"a": A}, tmp_path / "blob")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / SINGLE).symlink_to(Path("..") / "blob")
    with Checkpoint(tmp_path / "snapshot") as checkpoint:
        assert np.array_equal(checkpoint.rows("a", 0, 6), A)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's list of files")
def test_files_are_closed(tmp_path):
    """Handles left open by a checkpoint that was closed, or refused half-way."""
    before = len(os.listdir("/proc/self/fd"))
    shards = {"m-1.safetensors": {"a": A, "b": B}, "m-2.safetensors": {"a": B}}
    refused(sharded(tmp_path, shards), "'a'")
    shards = {"m-1.safetensors": {"a": A}, "m-2.safetensors": {"b": B}}
    with Checkpoint(sharded(tmp_path, shards)):
        assert len(os.listdir("/proc/self/fd")) == before + 2
    assert len(os.listdir("/proc/self/fd")) == before


def test_check(tmp_path):
    """A missing tensor that surfaces as a KeyError later; a left-over one that nobody noticed."""
    save_file({"a": A, "b": B}, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.check({"a": (6, 4), "b": (5,)}, {})
        checkpoint.check({"a": (6, 4)}, {"b": (5,), "head": (6, 4)})
        for expected, optional, words in [
            ({"a": (6, 4), "b": (5,), "c": (1,)}, {}, ["missing: 'c'"]),
            ({"a": (6, 4)}, {}, ["left over: 'b'"]),
            ({"a": (4, 6), "b": (5,)}, {}, ["'a' is (6, 4), not (4, 6)"]),
            ({"a": (6, 4)}, {"b": (5, 1)}, ["'b' is (5,), not (5, 1)"]),
            ({"c": (1,), "a": (1,)}, {}, ["'c'", "'b'", "'a' is (6, 4), not (1,)"]),
            ({f"c{i}": (1,) for i in range(5)}, {}, ["'c0', 'c1', 'c2' and 2 more; left over"]),
        ]:
            with pytest.raises(ValueError) as error:
                checkpoint.check(expected, optional)
            message = str(error.value)
            assert str(tmp_path / SINGLE) in message and "\n" not in message
            assert all(word in message for word in words), message
            assert "c3" not in message


def test_check_names_the_index(tmp_path):
    """An untied head absent from all shards: the reader must learn which list it is not in."""
    with Checkpoint(sharded(tmp_path, {"m-1.safetensors": {"a": A}})) as checkpoint:
        with pytest.raises(ValueError, match=f"{INDEX}: .*missing: 'lm_head.weight'"):
            checkpoint.check({"a": (6, 4), "lm_head.weight": (6, 4)}, {})
