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
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import tokenizers

from engine.config import read_json, show

# Characters that hardly any text has, which print, so that a list shown in a text shows them.
RARE = range(0x20000, 0x2A6DE)  # CJK Unified Ideographs Extension B
MAX_WHY = 300  # characters of another package's reason


class Tokenizer:
    """A checkpoint's tokenizer.json, in the `tokenizers` package's hands.

    It does not know the model: ids beyond its own are allowed, and have no text.
    """

    def __init__(self, rust: tokenizers.Tokenizer, eos_ids: frozenset[int], n_ids: int) -> None:
        self.n_ids = n_ids  # highest id + 1, added tokens included
        self.eos_ids = eos_ids  # of tokenizer_config.json's eos_token
        self._rust, self._plain = rust, without_added_tokens(rust)
        self._added = rust.get_added_tokens_decoder()  # id -> tokenizers.AddedToken
        self.added_ids = {token.content: i for i, token in self._added.items() if token.content}
        self.every = Spelling([*self.added_ids])
        self.special = Spelling([c for c, i in self.added_ids.items() if self._added[i].special])
        self._bytes = {  # id -> its bytes: added tokens at once, others when they first appear
            token_id: b"" if token.special else token.content.encode()
            for token_id, token in self._added.items()
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
        return ids_of(self._rust, text, add_special_tokens=True)

    def split(self, text: str) -> Iterator[tuple[str, list[int]]]:
        """`text` cut at added tokens, as `encode` cuts it: what stands before each, and [its id].

        Last comes what follows them all, and []. ValueError for a token that is not found by its
        content alone.
        """
        for token in self._added.values():
            if token.single_word or token.lstrip or token.rstrip:
                raise ValueError(
                    f"added token {token.content!r} has flags that are not implemented"
                )
        end = 0
        for match in self.every.whole.finditer(text):
            yield text[end : match.start()], [self.added_ids[match[0]]]
            end = match.end()
        yield text[end:], []

    def encode_plain(self, text: str) -> list[int]:
        """The ids of `text` in which every added token spelled out is text; none is added.

        ValueError where the vocabulary itself makes a special token of a text.
        """
        ids = ids_of(self._plain, text, add_special_tokens=False)
        for token in (self._added[i] for i in self._added.keys() & ids):
            if token.special:
                raise ValueError(f"this tokenizer cannot write {token.content!r} as text")
        return ids

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


def ids_of(rust: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    refuse_surrogates(text)
    with rust_errors("the text cannot be turned into tokens"):
        # of a batch, since `encode` lets no other thread run meanwhile: 2 seconds a megabyte
        (encoding,) = rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding.ids


def refuse_surrogates(text: str) -> None:
    """ValueError for a text that has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(
            f"the text is not valid Unicode: character {e.start} is {text[e.start]!r}, "
            "a lone surrogate"
        ) from None


class StandIns:
    """Rare characters in place of added tokens that are only text where they are spelled.

    `by_model`: a model wrote the text, and only tokens marked special are no more than text in it.
    """

    def __init__(self, tokenizer: Tokenizer, used: str) -> None:
        """`used`: a text with every character that no stand-in may be."""
        contents, used = tokenizer.added_ids, set(used)
        unused = (c for c in map(chr, RARE) if c not in used)
        free = list(islice(unused, len(contents) + 1))
        if len(free) <= len(contents):
            raise ValueError("the text has nearly all characters from U+20000 on")
        self._cut, *stand_ins = free  # the first stands for nothing
        self._of = dict(zip(contents, stand_ins, strict=True))
        self._shown = {ord(self._cut): ""} | {ord(c): content for content, c in self._of.items()}
        self._every, self._special = tokenizer.every, tokenizer.special

    def hide(self, text: str, by_model: bool) -> str:
        """`text` with a stand-in for each token in it; nor can one form across its ends."""
        return self._replaced(text, by_model, lambda match: self._of[match[0]])

    def mark(self, text: str, by_model: bool) -> str:
        """`hide`, but each token stays, beside its stand-in, and with it what `text` begins with
        and what it ends with."""

        def marked(match: re.Match) -> str:
            at_end = match.end() == len(text) and match.start() > 0
            stand_in = self._of[match[0]]
            return self._cut + stand_in + match[0] if at_end else match[0] + stand_in

        return self._replaced(text, by_model, marked)

    def hide_marked(self, text: str) -> str:
        """What `hide` would have made of what `mark` has made."""
        for token, stand_in in self._of.items():
            text = text.replace(self._cut + stand_in + token, stand_in)
            text = text.replace(token + stand_in, stand_in)
        return text

    def count(self, text: str) -> int:
        return sum(map(text.count, self._of.values()))

    def shown(self, text: str) -> str:
        """`text` with the tokens themselves."""
        return text.translate(self._shown)

    def _replaced(self, text: str, by_model: bool, replacement) -> str:
        spelled = self._special if by_model else self._every
        name = text.isidentifier()  # "user", "function": what templates look up and compare
        before = self._cut if not name and text.startswith(spelled.tails) else ""
        after = self._cut if not name and text.endswith(spelled.heads) else ""
        return before + spelled.whole.sub(replacement, text) + after


class Spelling:
    """How some tokens appear in a text: whole, or cut off where it begins or ends."""

    def __init__(self, contents: list[str]) -> None:
        longest_first = sorted(contents, key=len, reverse=True)
        self.whole = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.heads = tuple({content[:n] for content in contents for n in range(1, len(content))})
        self.tails = tuple({content[n:] for content in contents for n in range(1, len(content))})


@contextmanager
def rust_errors(what: str) -> Iterator[None]:
    """ValueError, in one line, for whatever the package raises inside the block."""
    try:
        yield
    except BaseException as e:
        # The package raises bare Exceptions, and its panics derive from BaseException alone.
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        why = " ".join(str(e).split())  # it may quote a file of any length
        raise ValueError(
            f"{what} ({why if len(why) <= MAX_WHY else why[:MAX_WHY] + '...'})"
        ) from None


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


def without_added_tokens(rust: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer of the same model (not a copy) that knows no added token."""
    plain = tokenizers.Tokenizer(rust.model)
    if rust.normalizer:
        plain.normalizer = rust.normalizer
    if rust.pre_tokenizer:
        plain.pre_tokenizer = rust.pre_tokenizer
    return plain


def eos_of(config: dict, vocab: dict[str, int], file: Path) -> frozenset[int]:
    """The id of `eos_token`: a string, an object with its content, or null or absent for none."""
    token = config.get("eos_token")
    if token is None:
        return frozenset()
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ValueError(f"{file}: eos_token is {show(token)}, not a token's text")
    if content not in vocab:
        raise ValueError(f"{file}: eos_token {show(content)} is not a token of tokenizer.json")
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
