"""Saved sequences: the same bits after loading, and files that are anything else are refused."""

import json
import os
import struct
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from checkpoints import write_checkpoint
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from engine import LLM, SamplingParams, memory
from engine.cache import BasicKvCache, BlockPool, ConcatKvCache, PagedKvCache, snapshot
from engine.kernels.runs import Run
from engine.run import main

KINDS = ("basic", "paged", "concat")
PAIRS = [("f32", a, b) for a in KINDS for b in KINDS]
PAIRS += [("f16", a, b) for a in KINDS[:2] for b in KINDS[:2]]
WHOLE = {"vocab_size": 320, "intermediate_size": 64}  # sizes that need no padding
PROMPT = np.random.default_rng(0).integers(0, 300, 20).tolist()
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
ABOUT = {"model": "m", "weights": "f32"}
LAYERS, DIM = 2, 8


def new_cache(kind: str, dtype: str = "f32", layers: int = LAYERS, dim: int = DIM):
    if kind == "concat":
        return ConcatKvCache(layers, dim)
    if kind == "paged":
        return PagedKvCache(BlockPool(layers, dim, 4, max_blocks=20, dtype=dtype))
    return BasicKvCache(layers, dim, dtype)


def filled(kind: str, n: int, dtype: str = "f32"):
    cache, rng = new_cache(kind, dtype), np.random.default_rng(n)
    for layer in range(LAYERS):
        cache.set_prefill(layer, *rng.standard_normal((2, n, DIM), dtype=np.float32))
    return cache


def assert_same_rows(found, wanted) -> None:
    for layer in range(wanted.num_layers()):
        for a, b in zip(found.materialize(layer), wanted.materialize(layer), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def refused(path, cache=None, max_ids: int = 100) -> str:
    """The one line with which a file is refused, before any row of it has come into the cache."""
    cache = new_cache("paged") if cache is None else cache
    with pytest.raises(ValueError) as e:
        snapshot.load(path, cache, ABOUT, max_ids)
    told = str(e.value)
    assert told.startswith(f"{path}: ") and "\n" not in told
    assert {cache.seq_len(layer) for layer in range(cache.num_layers())} == {0}
    assert cache.capacity == 0 and cache.counts.allocations == 0
    return told


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), **WHOLE)


@pytest.fixture
def saved(tmp_path):
    """A file of 6 ids, 4 of them a prompt's, and 5 rows."""
    snapshot.save(tmp_path / "saved", filled("basic", 5), range(10, 16), 4, ABOUT)
    return tmp_path / "saved"


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("n", [0, 1, 4, 13])
@pytest.mark.parametrize(("dtype", "kind", "other"), PAIRS)
def test_rows_come_back_in_every_kind(dtype, kind, other, n, tmp_path):
    """Rows that a file holds in another order, type or number than the cache they came from."""
    cache, loaded = filled(kind, n, dtype), new_cache(other, dtype)
    snapshot.save(tmp_path / "f", cache, range(20), 7, ABOUT)
    ids, n_prompt = snapshot.load(tmp_path / "f", loaded, ABOUT, 20)
    assert (ids, n_prompt) == (list(range(20)), 7)
    assert all(type(i) is int for i in ids)
    assert_same_rows(loaded, cache)


def test_every_bit_of_a_number_comes_back(tmp_path):
    """Values that go through a float of another kind: -0, the smallest numbers, NaN."""
    odd = np.array([-0.0, 1e-45, -1e-38, np.inf, -np.inf, 3e38, np.nan, 1], np.float32)
    cache, loaded = BasicKvCache(1, DIM), BasicKvCache(1, DIM)
    cache.push_row(0, odd, -odd)
    snapshot.save(tmp_path / "f", cache, [1], 1, ABOUT)
    snapshot.load(tmp_path / "f", loaded, ABOUT, 1)
    for found, wanted in zip(loaded.kv_view(0), cache.kv_view(0), strict=True):
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_cache_is_not_the_file(kind, saved):
    """Rows that are still mapped change, or crash the process, when the file is written anew."""
    cache = new_cache(kind)
    snapshot.load(saved, cache, ABOUT, 6)
    os.truncate(saved, 0)
    assert_same_rows(cache, filled("basic", 5))


@contextmanager
def recorded(llm):
    """Every step that runs inside: (its ids, whether they were a prompt's, the last logits)."""
    steps, forward = [], llm._model.forward

    def record(runs, logits, *more):
        forward(runs, logits, *more)
        ((ids, _, is_prompt, _),) = runs
        steps.append((ids.tolist(), is_prompt, logits.copy()))

    llm._model.forward = record
    try:
        yield steps
    finally:
        del llm._model.forward


@pytest.mark.parametrize("stop_after", [1, 17, 39])
@pytest.mark.parametrize(("dtype", "kind", "other"), PAIRS)
def test_a_generation_goes_on_as_if_never_interrupted(
    dtype, kind, other, stop_after, model, tmp_path
):
    """A row lost, doubled or computed in another way at the seam shows in the logits' last bits."""
    first, second = (LLM(model, kv_cache=k, kv_dtype=dtype) for k in (kind, other))
    with recorded(second) as whole:
        wanted = second.generate(PROMPT, GREEDY).token_ids
    session = first.new_session()
    tokens = first._start(PROMPT, GREEDY, session).tokens()
    head = [next(tokens) for _ in range(stop_after)]
    first.save_cache(session, tmp_path / "f")
    loaded = second.load_cache(tmp_path / "f")
    assert loaded.ids == session.ids == [*PROMPT, *head] and loaded.n_prompt == len(PROMPT)
    assert_same_rows(loaded.cache, session.cache)
    with recorded(second) as rest:
        done = second.generate(None, SamplingParams(40 - stop_after, 0, ignore_eos=True), loaded)
    assert [*head, *done.token_ids] == wanted
    assert done.metrics.cached_tokens == len(PROMPT) + stop_after - 1
    for found, expected in zip(rest, whole[stop_after:], strict=True):
        assert found[:2] == expected[:2]
        np.testing.assert_array_equal(found[2], expected[2])


@pytest.mark.parametrize("backend", ["simd", "numpy"])
def test_an_interrupted_prompt_goes_on(backend, model, tmp_path):
    """The rest of a prompt taken up as if it had been generated, or begun anew."""
    llm = LLM(model, backend=backend, prefill_chunk=6)
    wanted, session = llm.generate(PROMPT, GREEDY).token_ids, llm.new_session()
    llm.generate(PROMPT[:7], SamplingParams(1, 0), session)
    session.turn_to(PROMPT)
    llm.save_cache(session, tmp_path / "f")
    loaded = llm.load_cache(tmp_path / "f")
    with recorded(llm) as steps:
        assert llm.generate(None, GREEDY, loaded).token_ids == wanted
    parts = [PROMPT[7:13], PROMPT[13:19], PROMPT[19:]]
    assert [step[:2] for step in steps[:3]] == [(part, True) for part in parts]


# ---------------------------------------------------------------- what is reused


@pytest.fixture(scope="module")
def conversation(model, tmp_path_factory):
    """An LLM, a file of a prompt and 40 tokens behind it, and these 60 ids; 59 have rows."""
    llm, path = LLM(model), tmp_path_factory.mktemp("saved") / "f"
    session = llm.new_session()
    llm.generate(PROMPT, GREEDY, session)
    llm.save_cache(session, path)
    return llm, path, session.ids


@pytest.mark.parametrize(
    ("n_shared", "more", "n_cached"),
    [
        (60, [7, 8, 9], 59),  # an extended prompt
        (60, [], 59),  # the same tokens
        (59, [], 58),  # all of it is cached: the last is run again
        (20, [], 19),
        (30, [301, 2], 30),  # a prompt that diverges
        (0, [301, 1], 0),
    ],
)
def test_only_what_is_not_cached_is_computed(n_shared, more, n_cached, conversation):
    """Rows of other tokens than the prompt's, or a prompt computed again as a whole."""
    llm, path, ids = conversation
    prompt, loaded = [*ids[:n_shared], *more], llm.load_cache(path)
    with recorded(llm) as steps:
        done = llm.generate(prompt, SamplingParams(3, 0, ignore_eos=True), loaded)
    assert steps[0][:2] == (prompt[n_cached:], True)
    assert (done.metrics.cached_tokens, done.metrics.prompt_tokens) == (n_cached, len(prompt))
    assert loaded.ids == [*prompt, *done.token_ids]
    cache, logits = llm.load_cache(path).cache, llm._model.new_logits(1)
    cache.truncate(n_cached)
    llm._model.forward([Run(np.array(prompt[n_cached:]), cache, True, len(logits))], logits)
    np.testing.assert_array_equal(steps[0][2], logits)


# ---------------------------------------------------------------- files that are refused


def test_files_that_are_not_there_or_not_files(tmp_path):
    """A traceback, or a message without the name, for a mistake in typing."""
    assert "does not exist" in refused(tmp_path / "none")
    assert "does not exist" in refused(tmp_path / "none" / "f")
    refused(tmp_path)
    for content in (b"", b"KING RICHARD.\nA horse!\n" * 10):
        (tmp_path / "f").write_bytes(content)
        refused(tmp_path / "f")


def test_a_file_cut_short_anywhere(saved):
    """A copy that was interrupted, used as far as it goes."""
    whole = saved.read_bytes()
    for length in range(0, len(whole), 7):
        saved.write_bytes(whole[:length])
        refused(saved)
    saved.write_bytes(whole + b"\0")
    refused(saved)


@pytest.mark.parametrize("flip", [0x01, 0xA0])
def test_one_wrong_byte_anywhere(flip, saved):
    """Damage that gives rows slightly wrong, or a crash while the header is read."""
    whole = saved.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= flip
        saved.write_bytes(damaged)
        refused(saved)


@pytest.mark.parametrize("size", [0, 1 << 20, 1 << 62, (1 << 64) - 1])
def test_a_header_of_any_length(size, tmp_path):
    """A length that is believed asks for as much memory as it says."""
    (tmp_path / "f").write_bytes(struct.pack("<Q", size) + b"{}" + b" " * 100)
    refused(tmp_path / "f")


def forge(path, changes=(), about=None) -> None:
    """Rewrite a saved file with other tensors (None: without), or other metadata; the checksum is
    right."""
    tensors, metadata = load_file(path) | dict(changes), safe_open(path, "numpy").metadata()
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    metadata["about"] = metadata["about"] if about is None else about
    metadata["sha256"] = snapshot.digest(metadata["about"], tensors)
    save_file(tensors, path, metadata)


def test_a_forged_file_with_nothing_wrong(saved):
    """The tests below would pass for a wrong checksum alone."""
    forge(saved)
    cache = new_cache("paged")
    assert snapshot.load(saved, cache, ABOUT, 6) == (list(range(10, 16)), 4)
    assert_same_rows(cache, filled("basic", 5))


K = "layers.1.k"


def zeros(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def of_all(tensor: np.ndarray) -> dict[str, np.ndarray]:
    return {f"layers.{layer}.{side}": tensor for layer in range(LAYERS) for side in "kv"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({K: None}, "2 layers"),
        ({"ids": None}, "2 layers"),
        ({"layers.2.k": zeros(5, DIM)}, "2 layers"),
        ({"more": zeros(1)}, "2 layers"),
        ({K: zeros(4, DIM)}, K),
        ({K: zeros(6, DIM)}, K),
        ({K: zeros(0, DIM)}, K),
        ({K: zeros(5, DIM + 1)}, K),
        ({K: zeros(5, DIM, 1)}, K),
        ({K: zeros(5 * DIM)}, K),
        ({K: zeros()}, K),
        (of_all(zeros(7, DIM)), "[7, 8]"),  # more rows than ids
        (of_all(zeros(5, 2 * DIM)), "[5, 16]"),
        ({K: zeros(5, DIM, dtype=np.float64)}, "F64"),
        ({K: zeros(5, DIM, dtype=np.int32)}, "I32"),
        (of_all(zeros(5, DIM, dtype=np.float16)), "F16"),
        ({"ids": zeros(6, dtype=np.int32)}, "ids are I32"),
        ({"ids": zeros(6, dtype=np.uint64)}, "ids are U64"),
        ({"ids": zeros(6, 1, dtype=np.int64)}, "ids"),
        ({"ids": zeros(dtype=np.int64)}, "ids"),
        ({"ids": zeros(0, dtype=np.int64)}, "ids"),
        ({"ids": zeros(3, dtype=np.int64)}, "ids"),  # fewer than the prompt's
    ],
    ids=lambda case: str(case)[:40],
)
def test_tensors_of_other_names_shapes_and_types(changes, told, saved):
    """Rows that are broadcast, cut or reinterpreted, or a crash inside NumPy."""
    forge(saved, changes)
    assert told in refused(saved)


def test_a_first_tensor_without_a_shape(tmp_path):
    """Rows are counted in the first layer's K, and a single number has no first axis."""
    layers = 16  # looked at in an order that is another in each process
    tensors = {f"layers.{i}.{side}": zeros(DIM) for i in range(layers) for side in "kv"}
    tensors |= {"layers.0.k": zeros(), "ids": zeros(6, dtype=np.int64)}
    about = with_about()
    metadata = {"about": about, "sha256": snapshot.digest(about, tensors)}
    save_file(tensors, tmp_path / "f", metadata)
    refused(tmp_path / "f", BasicKvCache(layers, DIM))


def with_about(**changes) -> str:
    about = {"format": snapshot.FORMAT, "n_prompt": 4, "fingerprint": ABOUT} | changes
    return json.dumps(about)


NO_METADATA = ["", "null", "[]", "{}", "7", '"engine-kv-cache-1"', "{" * 10, "9" * 100_000]
NO_METADATA += [
    "[" * 100_000,
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 100_000 + "1" + "}" * 100_000,
]
WRONG = {
    "format": [None, "engine-kv-cache-0", [snapshot.FORMAT]],
    "n_prompt": [None, -1, "4", 4.5, 7, 10**30],  # there are 6 ids
    "fingerprint": [None, [], "m", {}, {"model": "m"}],
}
STRANGE = [None, 1, ["m"], "m\nm", "\ud800", {"m": "m"}]  # where a model's name should be


@pytest.mark.parametrize(
    "about",
    [
        *NO_METADATA,
        *(with_about(**{name: value}) for name, values in WRONG.items() for value in values),
        *(with_about(fingerprint=ABOUT | {"model": value}) for value in STRANGE),
        *(with_about().replace('"m"', "[" * n + "]" * n) for n in (100, 500, 900, 960)),
    ],
    ids=lambda about: f"{len(about)}: {about[:20]}...{about[-40:]}",
)
def test_metadata_of_any_kind(about, saved):
    """A crash, or a file of something else taken for ours, for whatever stands there."""
    forge(saved, about=about)
    refused(saved)


@pytest.mark.parametrize("metadata", [None, {}, {"about": "x"}, {"format": "pt"}, {"sha256": "0"}])
def test_a_safetensors_file_of_something_else(metadata, saved):
    """A model's weights taken for a cache, or a crash for metadata that are not there."""
    save_file(load_file(saved), saved, metadata)
    assert snapshot.FORMAT in refused(saved)


def test_no_checksum(saved):
    """A file that leaves its checksum out must not pass for one that has the right one."""
    save_file(load_file(saved), saved, {"about": safe_open(saved, "numpy").metadata()["about"]})
    assert "checksum" in refused(saved)


def test_a_file_for_another_cache(saved):
    """Layers left out, rows of another width, or ids that find no room in the context."""
    assert "3 layers" in refused(saved, new_cache("basic", layers=3))
    assert f"F32 of [5, {DIM}]" in refused(saved, new_cache("basic", dim=2 * DIM))
    assert f"F32 of [5, {DIM}]" in refused(saved, new_cache("basic", "f16"))
    assert "6 tokens" in refused(saved, max_ids=5)


@pytest.mark.parametrize(
    ("settings", "changes", "told"),
    [
        ({"weights": "f32"}, {}, "weights"),
        ({"weights": "bf16"}, {}, "weights"),
        ({"kv_dtype": "f16"}, {}, "kv_dtype"),
        ({"backend": "numpy"}, {}, "backend"),
        ({}, {"seed": 1}, "model"),
        ({}, {"rope_theta": 1e6}, "model"),
        ({}, {"num_hidden_layers": 3}, "model"),
    ],
    ids=str,
)
def test_another_model_or_other_settings(settings, changes, told, conversation, tmp_path):
    """Rows of another model go unnoticed: the text is fluent and means nothing."""
    _, path, _ = conversation
    other = LLM(write_checkpoint(tmp_path, **(WHOLE | changes)), **settings)
    with pytest.raises(ValueError, match=f"{path}: was saved with {told} "):
        other.load_cache(path)


def test_settings_that_rows_do_not_depend_on(conversation, model, tmp_path):
    """A file refused for the number of threads, or for where the same model lies."""
    _, path, ids = conversation
    other = LLM(write_checkpoint(tmp_path, **WHOLE), threads=1, prefill_chunk=5, context=100)
    assert other.load_cache(path).ids == ids
    with pytest.raises(ValueError, match="60 tokens.*59"):
        LLM(model, context=59).load_cache(path)


@pytest.mark.parametrize("weights", ["q8_0", "bf16", "f32"])
@pytest.mark.parametrize("changes", [WHOLE, {"vocab_size": 301, "intermediate_size": 50}], ids=str)
def test_a_model_is_known_again(changes, weights, tmp_path, monkeypatch):
    """Padding that holds whatever the memory held: the same model is another one each time."""
    path, empty = write_checkpoint(tmp_path / "m", **changes), memory.empty

    def llm_in_memory_full_of(value: int) -> LLM:
        def full(n, dtype=np.float32):
            found = empty(n, dtype)
            found.view(np.uint8)[:] = value
            return found

        monkeypatch.setattr(memory, "empty", full)
        return LLM(path, weights=weights)

    llm = llm_in_memory_full_of(0)
    session = llm.new_session()
    llm.generate(PROMPT, GREEDY, session)
    llm.save_cache(session, tmp_path / "f")
    assert llm_in_memory_full_of(1).load_cache(tmp_path / "f").ids == session.ids


@pytest.mark.parametrize("token", [-1, 320, 2**40, -(2**63)])
def test_ids_outside_the_vocabulary(token, conversation, tmp_path):
    """An id that is no row of the embedding is read from outside of it."""
    llm, path, ids = conversation
    (tmp_path / "f").write_bytes(path.read_bytes())
    forge(tmp_path / "f", {"ids": np.array([*ids[:30], token, *ids[31:]])})
    with pytest.raises(ValueError, match=f"{token}") as e:
        llm.load_cache(tmp_path / "f")
    assert str(tmp_path / "f") in str(e.value), "which file it is"


def test_loading_again_and_again(conversation, model):
    """Blocks of a cache that was refused, or dropped, and that stay taken: 59 rows are 4 blocks."""
    for max_blocks in (3, 4):
        llm = LLM(model, kv_cache="paged", kv_max_blocks=max_blocks)
        for _ in range(5):
            if max_blocks == 4:
                assert llm.load_cache(conversation[1]).cache.seq_len(0) == 59
            else:
                with pytest.raises(ValueError, match="60 tokens"):
                    llm.load_cache(conversation[1])
        assert llm.new_cache().pool.n_used == 0


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("fails", ["engine.cache.snapshot.save_file", "os.fsync", "os.replace"])
def test_a_failed_write_leaves_the_old_file(fails, error, saved, monkeypatch):
    """The only copy of a long conversation lost because the disk was full."""
    before = saved.read_bytes()

    def fail(*args, **kwargs):
        if fails.endswith("save_file"):
            args[1].write_bytes(b"half of it")
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(fails, fail)
        snapshot.save(saved, filled("basic", 9), range(9), 9, ABOUT)
    assert saved.read_bytes() == before
    assert [entry.name for entry in saved.parent.iterdir()] == ["saved"]


def test_places_that_cannot_be_written(tmp_path):
    """A refusal of the system that comes out as an error of a library nobody has heard of."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for path in ("none/f", "folder", "file/f"):
        with pytest.raises(OSError) as e:
            snapshot.save(tmp_path / path, filled("basic", 5), range(6), 4, ABOUT)
        assert "\n" not in str(e.value)
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["file", "folder"]


def test_an_old_file_is_replaced(saved):
    """A shorter sequence that leaves the tail of the longer one behind it."""
    snapshot.save(saved, filled("basic", 1), [3, 4], 2, ABOUT)
    cache = new_cache("basic")
    assert snapshot.load(saved, cache, ABOUT, 2) == ([3, 4], 2)
    assert_same_rows(cache, filled("basic", 1))


def test_a_session_without_tokens(model, tmp_path):
    """A file that was written without complaint, and is called corrupted when it is read."""
    llm = LLM(model)
    try:
        llm.save_cache(llm.new_session(), tmp_path / "f")
    except ValueError:
        return  # there is nothing to save
    assert llm.load_cache(tmp_path / "f").ids == []


# ---------------------------------------------------------------- the command line


TEXT = "To be, or not to be"
FLAGS = "--temperature", "0", "--ignore-eos", "--max-tokens"


def run(*args) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "engine.run", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, encoding="utf-8")


@pytest.fixture(scope="module")
def by_command(tmp_path_factory) -> tuple:
    """A file that the command line saved, and what it printed."""
    path = tmp_path_factory.mktemp("saved") / "f"
    done = run(TEXT, *FLAGS, 10, "--save-cache", path)
    assert done.returncode == 0, done.stderr
    return path, done.stdout.removesuffix("\n")


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_cache_is_continued(kind, by_command, capsys):
    """Two runs of ten tokens that give another text than one of twenty."""
    path, head = by_command
    assert main(["--load-cache", str(path), *FLAGS, "10", "--kv-cache", kind]) == 0
    out, err = capsys.readouterr()
    assert main([TEXT, *FLAGS, "20"]) == 0
    assert head + out == capsys.readouterr().out
    n = len(LLM().tokenizer.encode(TEXT)) + 10
    assert err.endswith(f"reused {n - 1} of {n} tokens\n")


def test_an_extended_prompt_says_what_it_reused(by_command, capsys):
    """A cache that is loaded and then not used, which only the time would tell."""
    path, head = by_command
    longer = TEXT + head + ", and so to bed"
    done = run(longer, "--load-cache", path, *FLAGS, 5)
    assert done.returncode == 0
    llm = LLM()
    held, wanted = llm.load_cache(path).ids[:-1], llm.tokenizer.encode(longer)  # the last waits
    common = len(os.path.commonprefix([held, wanted]))
    assert common > len(llm.tokenizer.encode(TEXT))
    assert done.stderr.splitlines()[-1] == f"reused {common} of {len(wanted)} tokens"
    assert main([longer, *FLAGS, "5"]) == 0
    assert done.stdout == capsys.readouterr().out


def test_loading_and_saving_the_same_file(by_command, tmp_path, capsys):
    """A conversation of many runs, each of which goes on from the last, in one file."""
    path, text = by_command
    (tmp_path / "f").write_bytes(path.read_bytes())
    for _ in range(2):
        flags = ["--load-cache", str(tmp_path / "f"), "--save-cache", str(tmp_path / "f")]
        assert main([*flags, *FLAGS, "10"]) == 0
        text += capsys.readouterr().out.removesuffix("\n")
    assert main([TEXT, *FLAGS, "30"]) == 0
    assert text == capsys.readouterr().out.removesuffix("\n")


def test_json_says_what_was_reused(by_command, capsys):
    """A line of text beside the object breaks whoever parses it."""
    assert main(["--load-cache", str(by_command[0]), *FLAGS, "3", "--json"]) == 0
    out, err = capsys.readouterr()
    metrics = json.loads(out)["metrics"]
    assert metrics["cached_tokens"] == metrics["prompt_tokens"] - 1 > 10
    assert err == ""


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "a directory", "another model's"])
def test_a_bad_file_is_one_line_and_status_2(damage, by_command, saved, capsys):
    """A traceback tells a user nothing."""
    whole = by_command[0].read_bytes()
    if damage == "missing":
        saved.unlink()
    elif damage == "cut":
        saved.write_bytes(whole[:-100])
    elif damage == "changed":
        saved.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    elif damage == "a directory":
        saved = saved.parent
    assert main(["--load-cache", str(saved), *FLAGS, "3"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {saved}: ") and err.count("\n") == 1


def test_a_bad_file_in_a_process_of_its_own(saved):
    """An error that is raised outside of what turns errors into lines."""
    saved.write_bytes(saved.read_bytes()[:-1])
    done = run("--load-cache", saved)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {saved}: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("place", ["none/f", "."])
def test_a_place_that_cannot_be_written_is_said_before_any_work(place, tmp_path, capsys):
    """An answer of an hour that cannot be kept in the end."""
    assert main([TEXT, *FLAGS, "3", "--save-cache", str(tmp_path / place)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and str(tmp_path) in err


@pytest.mark.parametrize(
    ("flags", "clash"),
    [
        (["--prompt-file", "prompt", "--save-cache", "prompt"], True),
        (["--prompt-file", "prompt", "--trace", "prompt"], True),
        (["--prompt-file", "prompt", "--save-cache", "new", "--trace", "./new"], True),
        (["--load-cache", "saved", "--trace", "saved"], True),
        (["--load-cache", "saved", "--save-cache", "./saved"], False),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_files_that_would_replace_each_other(flags, clash, by_command, tmp_path, monkeypatch):
    """A prompt, or a saved conversation, overwritten by what was made of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt").write_text(TEXT)
    (tmp_path / "saved").write_bytes(by_command[0].read_bytes())
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    assert main([*flags, *FLAGS, "3"]) == (2 if clash else 0)
    after = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    assert (after == before) == clash
