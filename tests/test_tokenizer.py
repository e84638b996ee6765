"""engine/tokenizer.py: ids and text, whole and streamed, and files that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokenizer import BYTE_OF, Tokenizer

REPO = Path(__file__).resolve().parent.parent
ASSETS = REPO / "engine" / "assets"
GOLDEN = json.loads((REPO / "tests" / "golden" / "golden.json").read_text(encoding="utf-8"))
MIXED = "😸é漢 naïve\n\tDef f(x):  return x**2  # Ωмега 한국어 مرحبا 👩‍👩‍👧\r\n"

# Opened once: hypothesis runs a test's body many times, and a fixture would not be reset for it.
TINY = Tokenizer.from_dir(ASSETS)
TINY_RUST = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
# Ids as a model may give them: any row of a padded embedding, and often a lone byte of a character.
TINY_IDS = st.lists(st.integers(0, 2175) | st.sampled_from(TINY_RUST.encode("😸é漢ÿ").ids))

BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}


def added(token_id: int, content: str, special: bool = False) -> dict:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special, **flags}


def write_tokenizer(path: Path, config: dict | None = None, **changes: object) -> Path:
    """A directory with a byte-level tokenizer: one token a byte, ids 0 to 255, no merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    parts = {
        "version": "1.0",
        "added_tokens": [added(256, "<eos>", special=True)],
        "pre_tokenizer": BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (path / "tokenizer.json").write_text(json.dumps(parts | changes), encoding="utf-8")
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The pieces of a stream, the last of them the flush's."""
    stream = tokenizer.stream()
    return [stream.push(i) for i in ids] + [stream.flush()]


def refusal(path: Path) -> str:
    """The message of the ValueError that opening `path` gives."""
    with pytest.raises(ValueError) as e:
        Tokenizer.from_dir(path)
    assert "\n" not in str(e.value)
    return str(e.value)


# --- text to ids and back ---


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["prompt"][:12])
def test_golden_prompts(case):
    """Ids differ from transformers', so the model reads another prompt than it was trained on."""
    assert TINY.encode(case["prompt"]) == case["prompt_ids"]
    assert TINY.decode(case["greedy_ids"]) == case["text"]


@pytest.mark.parametrize("text", ["", " ", MIXED, "\0\x7f\x80ÿ", "a\u0301", "\ufffd"])
def test_round_trip(tmp_path, text):
    """A byte of the alphabet is mapped wrongly, or U+FFFD in the text is taken for damage."""
    tokenizer = Tokenizer.from_dir(write_tokenizer(tmp_path))
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_alphabet_is_the_packages():
    """A byte without a character, or two with the same, that no text in these tests happens on."""
    assert set(BYTE_OF) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF.values()) == list(range(256))


def test_special_tokens_in_the_text():
    """`<|im_end|>` in a prompt is split into letters, or its text is shown when decoded."""
    ids = TINY.encode("a<|im_end|>b")
    assert len(ids) == 3 and ids[1] == 2047
    assert TINY.decode(ids) == "ab"


def test_lone_surrogates_are_refused():
    """A command line that is no UTF-8 ends in the package's TypeError about something else."""
    with pytest.raises(ValueError, match=r"character 2 is '\\udcff', a lone surrogate$"):
        TINY.encode("ab\udcff")


def test_truncation_and_padding_are_off(tmp_path):
    """A tokenizer.json saved during training cuts a long prompt, or pads a short one, silently."""
    truncation = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    padding = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    write_tokenizer(tmp_path, truncation=truncation, padding=padding)
    assert len(tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("ab")) == 8
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert [len(tokenizer.encode("x" * n)) for n in (2, 6, 60)] == [2, 6, 60]


# --- ids to text ---


def test_stream_gives_whole_characters():
    """An emoji split over tokens is shown as one U+FFFD a token."""
    text = "😸é漢 naïve"
    ids = TINY.encode(text)
    pieces = streamed(TINY, ids)
    assert len(ids) > len(text)  # characters are split, or the test tests nothing
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_stream_is_never_late(tmp_path):
    """A complete character is held back until the next token, or until the end."""
    tokenizer = Tokenizer.from_dir(write_tokenizer(tmp_path))
    expected = ["a", "", "é", "", "", "漢", "", "", "", "😸", ""]
    assert streamed(tokenizer, tokenizer.encode("aé漢😸")) == expected


def test_unfinished_character_is_flushed():
    """max_tokens falls inside a character, and its bytes are lost: pieces join to less text."""
    ids = TINY.encode("a😸")[:-1]
    assert streamed(TINY, ids)[-1] == "\ufffd"
    assert "".join(streamed(TINY, ids)) == TINY.decode(ids) == "a\ufffd"


def test_streams_are_independent():
    """Two sequences of a batch share the held-back bytes and mix their characters."""
    one, other = TINY.stream(), TINY.stream()
    pieces = [(one.push(i), other.push(i)) for i in TINY.encode("漢")]
    assert pieces[-1] == ("漢", "漢")


@settings(max_examples=300, deadline=None)
@given(TINY_IDS)
def test_any_ids_stream_as_they_decode(ids):
    """Streamed and whole text differ: on invalid UTF-8, on specials, on ids without a token.

    The package's own decoding is a third opinion, on every input: Rust and Python put the same
    number of U+FFFD in place of the same invalid bytes.
    """
    text = TINY.decode(ids)
    assert "".join(streamed(TINY, ids)) == text
    assert text == TINY_RUST.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_streams_as_itself(text):
    """A character at an edge of UTF-8's ranges is lost or changed on its way through a stream."""
    text = TINY_RUST.normalizer.normalize_str(text)
    assert "".join(streamed(TINY, TINY.encode(text))) == TINY.decode(TINY.encode(text)) == text


@pytest.mark.parametrize("token_id", [-1, 2048, 2175, 2**31, 2**40])
def test_ids_without_a_token(token_id):
    """A sampled padding row of the embedding ends the run with an error, or shows as 'None'."""
    assert TINY.decode([token_id]) == ""
    assert streamed(TINY, [token_id]) == ["", ""]


def test_tokens_that_are_no_bytes(tmp_path):
    """An added token's text is taken for byte spelling, or a token outside the alphabet fails.

    The package does the first: there the added token `ćé` decodes to two bytes, shown as U+FFFD.
    """
    write_tokenizer(
        tmp_path,
        added_tokens=[added(2, "<|漢 end|>"), added(3, "ćé"), added(4, "<eos>", special=True)],
        model={"type": "BPE", "vocab": {"a漢": 0, "Ġb": 1}, "merges": []},
    )
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert [tokenizer.decode([i]) for i in range(5)] == ["a漢", " b", "<|漢 end|>", "ćé", ""]


def test_n_ids_counts_from_the_highest_id(tmp_path):
    """A vocabulary with holes passes for smaller than the embedding: its last ids do not fit."""
    assert TINY.n_ids == 2048
    model = {"type": "BPE", "vocab": {"a": 0, "b": 900}, "merges": []}
    tokenizer = Tokenizer.from_dir(write_tokenizer(tmp_path, model=model, added_tokens=[]))
    assert tokenizer.n_ids == 901
    assert tokenizer.decode([0, 500, 900]) == "ab"


# --- end of text ---


def test_eos_of_the_built_in_model():
    """Generation does not stop at the end of a text."""
    assert TINY.eos_ids == {2045}


@pytest.mark.parametrize(
    ("config", "eos_ids"),
    [
        ({"eos_token": "<eos>"}, {256}),
        ({"eos_token": {"content": "<eos>", "lstrip": False}}, {256}),
        ({"eos_token": None}, set()),
        ({}, set()),
        (None, set()),  # no tokenizer_config.json
    ],
)
def test_eos_forms(tmp_path, config, eos_ids):
    """One of the forms eos_token takes in real checkpoints is not understood."""
    assert Tokenizer.from_dir(write_tokenizer(tmp_path, config)).eos_ids == eos_ids


# --- files that cannot be used ---


def test_no_tokenizer(tmp_path):
    """A checkpoint without tokenizer files is refused, though it can serve token ids."""
    assert Tokenizer.from_dir(tmp_path) is None


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"\xff\xfe", b'{"version', b"[" * 9999])
def test_malformed_tokenizer(tmp_path, raw):
    """A damaged file ends in the package's bare Exception and a traceback."""
    (tmp_path / "tokenizer.json").write_bytes(raw)
    assert refusal(tmp_path).startswith(f"{tmp_path / 'tokenizer.json'}: cannot be read")


def test_malformed_parts(tmp_path):
    """The reason breaks over lines, or the package's panic, no Exception, ends the process."""
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b\nc"]]}
    assert "out of vocabulary" in refusal(write_tokenizer(tmp_path, model=model))
    panicking = {"type": "Precompiled", "precompiled_charsmap": ""}
    assert "tokenizer.json: cannot" in refusal(write_tokenizer(tmp_path, normalizer=panicking))


def test_interrupt_is_no_malformed_file(tmp_path, monkeypatch):
    """Ctrl-C while a tokenizer opens is reported as a damaged file, and the program goes on."""

    class Interrupted:
        @staticmethod
        def from_file(path):
            raise KeyboardInterrupt

    monkeypatch.setattr(tokenizers, "Tokenizer", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.from_dir(write_tokenizer(tmp_path))


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (None, "none"),
        ({"type": "ByteFallback"}, "ByteFallback"),
        ({"type": "Sequence", "decoders": [BYTE_LEVEL, {"type": "Fuse"}]}, "ByteLevel+Fuse"),
    ],
)
def test_other_decoders_are_refused(tmp_path, decoder, named):
    """Another kind of tokenizer is decoded as if it were byte-level: silently wrong text."""
    assert f"decoder {named} is not implemented" in refusal(
        write_tokenizer(tmp_path, decoder=decoder)
    )


def test_byte_level_within_a_sequence(tmp_path):
    """The same decoder, wrapped, is refused."""
    sequence = {"type": "Sequence", "decoders": [BYTE_LEVEL]}
    tokenizer = Tokenizer.from_dir(write_tokenizer(tmp_path, decoder=sequence))
    assert tokenizer.decode(tokenizer.encode(MIXED)) == MIXED


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list"),
        ('{"eos_token": 7}', "eos_token is 7"),
        ('{"eos_token": {"text": "<eos>"}}', "eos_token is {'text'"),
        ('{"eos_token": "<end>"}', "eos_token '<end>' is not a token"),
        ('{"eos_token": "\\ud800\\n"}', r"eos_token '\ud800\n' is not a token"),
    ],
)
def test_malformed_tokenizer_config(tmp_path, raw, reason):
    """A damaged tokenizer_config.json is a traceback, or leaves the model without an end."""
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(raw, encoding="utf-8")
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / 'tokenizer_config.json'}: ")
    assert reason in message


# --- the real Qwen3 tokenizer ---


@pytest.fixture(scope="module")
def qwen3(qwen3_tokenizer_dir) -> Tokenizer:
    return Tokenizer.from_dir(qwen3_tokenizer_dir)


def test_qwen3_opens_quickly(qwen3_tokenizer_dir):
    """Opening walks all 151,669 tokens in Python, and every start of the program waits for it."""
    start = time.perf_counter()
    Tokenizer.from_dir(qwen3_tokenizer_dir)
    assert time.perf_counter() - start < 1.5


def test_qwen3_ids(qwen3):
    """The embedding's padding rows, a special or a thinking token are shown or hidden wrongly."""
    assert (qwen3.n_ids, qwen3.eos_ids) == (151_669, {151_645})
    assert qwen3.decode(range(151_669, 151_936)) == ""
    assert qwen3.encode("<|im_end|>") == [151_645]
    assert qwen3.decode([151_645]) == ""
    assert qwen3.encode("<think>") == [151_667]
    assert qwen3.decode([151_667, 151_668]) == "<think></think>"


def test_qwen3_round_trip(qwen3):
    """Text is changed between the user and the model, or cut, or given a token too many."""
    assert qwen3.encode("Hello world") == [9707, 1879]  # no token is added at either end
    for text in (MIXED, MIXED * 200, "", " leading and trailing "):
        ids = qwen3.encode(text)
        assert "".join(streamed(qwen3, ids)) == qwen3.decode(ids) == text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_tokenizer_file_that_is_a_pipe(tmp_path):
    """Opening it waits for a writer that never comes."""
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="not a file"):
        Tokenizer.from_dir(tmp_path)


def test_text_that_the_package_cannot_encode(tmp_path):
    """The package's bare Exception passes every handler of ValueError."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    raw = {"version": "1.0", "model": model, "decoder": {"type": "ByteLevel"}}
    flags = {"add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    raw["decoder"] |= flags
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="tokens") as e:
        Tokenizer.from_dir(tmp_path).encode("zzz")
    assert "\n" not in str(e.value)


def test_reasons_are_short(tmp_path):
    """A part of a file, of any length, as one line of an error."""
    raw = json.loads((ASSETS / "tokenizer.json").read_text())
    raw["model"]["vocab"]["a"] = "x" * 10_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError) as error:
        Tokenizer.from_dir(tmp_path)
    assert len(str(error.value)) < 500 + len(str(tmp_path))
    shutil.copy(ASSETS / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "x" * 10_000}))
    with pytest.raises(ValueError, match="eos_token 'x+") as error:
        Tokenizer.from_dir(tmp_path)
    assert len(str(error.value)) < 300 + len(str(tmp_path))


def test_others_run_while_a_long_text_is_encoded():
    """One long prompt for which a server with many clients, and the engine itself, stand still."""
    text, turns, ended = "To be, or not to be " * 50_000, [], threading.Event()

    def take_turns() -> None:
        while not ended.wait(0.001):
            turns.append(None)

    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        for encode in (TINY.encode, TINY.encode_plain):
            turns.clear()
            encode(text)
            assert len(turns) > 10  # of some 100 to 1000; where it has to wait, 1 or 2
    finally:
        ended.set()
        thread.join()
