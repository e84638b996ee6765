"""Text <-> token ids, and ids -> text piece by piece while they are still being made.

Decoding is one mechanism: an id stands for bytes, and the joined bytes are read as UTF-8. Those of
a byte-level token are spelled in GPT-2's alphabet, which shows each byte as one printable
character; those of an added token are its own text. Whole texts and streams differ only in when
the bytes are read, so they always agree.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from engine.config import read_json


class Tokenizer:
    """A checkpoint's tokenizer.json, in the `tokenizers` package's hands.

    It does not know the model: ids beyond its own are allowed, and have no text.
    """

    def __init__(self, rust: tokenizers.Tokenizer, eos_ids: frozenset[int], n_ids: int) -> None:
        self.n_ids = n_ids  # highest id + 1, added tokens included
        self.eos_ids = eos_ids  # of tokenizer_config.json's eos_token
        self._rust = rust
        self._bytes = {  # id -> its bytes: added tokens at once, others when they first appear
            token_id: b"" if token.special else token.content.encode()
            for token_id, token in rust.get_added_tokens_decoder().items()
        }

    @classmethod
    def from_dir(cls, path: Path) -> Tokenizer | None:
        """The tokenizer of checkpoint directory `path`, None if it has none.

        ValueError, in one line, names the file that cannot be used.
        """
        file, config_file = path / "tokenizer.json", path / "tokenizer_config.json"
        if not os.path.exists(file):
            return None
        rust = open_rust(file)
        config = read_json(config_file) if os.path.exists(config_file) else {}
        vocab = rust.get_vocab()
        eos_ids = eos_of(config, vocab, config_file)
        return cls(rust, eos_ids, n_ids=max(vocab.values(), default=-1) + 1)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, never cut; a special token spelled out in it becomes that token."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise ValueError(
                f"the text is not valid Unicode: character {e.start} is {text[e.start]!r}, "
                "a lone surrogate"
            ) from None
        with rust_errors("the text cannot be turned into tokens"):
            return self._rust.encode(text, add_special_tokens=True).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        return TextStream(self)

    def bytes_of(self, token_id: int) -> bytes:
        """What an id adds to the text: nothing if it is special or no token has it."""
        if not 0 <= token_id < self.n_ids:
            return b""
        if token_id not in self._bytes:
            self._bytes[token_id] = spelled_bytes(self._rust.id_to_token(token_id) or "")
        return self._bytes[token_id]


class TextStream:
    """Ids in, text out. The pieces, the flush's included, join to `decode` of all the ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters this id completes; an unfinished one is held back."""
        return self._utf8.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """The end of the text: U+FFFD if a character was left unfinished."""
        return self._utf8.decode(b"", final=True)


@contextmanager
def rust_errors(what: str) -> Iterator[None]:
    """ValueError, in one line, for whatever the package raises inside the block."""
    try:
        yield
    except BaseException as e:
        # The package raises bare Exceptions, and its panics derive from BaseException alone.
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise ValueError(f"{what} ({' '.join(str(e).split())})") from None


def open_rust(file: Path) -> tokenizers.Tokenizer:
    """The package's tokenizer, with truncation and padding off and a decoder known to be bytes."""
    if not os.path.isfile(file):
        raise ValueError(f"{file}: is not a file")
    with rust_errors(f"{file}: cannot be read as a tokenizer"):
        rust = tokenizers.Tokenizer.from_file(str(file))
    rust.no_truncation()
    rust.no_padding()
    state = json.loads(rust.decoder.__getstate__()) if rust.decoder else {"type": "none"}
    kinds = [step["type"] for step in state.get("decoders", [state])]  # a Sequence has decoders
    if kinds != ["ByteLevel"]:
        raise ValueError(f"{file}: decoder {'+'.join(kinds)} is not implemented; ByteLevel is")
    return rust


def eos_of(config: dict, vocab: dict[str, int], file: Path) -> frozenset[int]:
    """The id of `eos_token`: a string, an object with its content, or null or absent for none."""
    token = config.get("eos_token")
    if token is None:
        return frozenset()
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ValueError(f"{file}: eos_token is {token!r}, not a token's text")
    if content not in vocab:
        raise ValueError(f"{file}: eos_token {content!r} is not a token of tokenizer.json")
    return frozenset({vocab[content]})


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet (openai/gpt-2, encoder.py: bytes_to_unicode), character -> byte.

    A byte that prints in Latin-1 is itself; the others are numbered from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF = byte_alphabet()


def spelled_bytes(token: str) -> bytes:
    """The bytes a byte-level token spells; one with any other character is its own text."""
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()
