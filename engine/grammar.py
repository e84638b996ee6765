"""A JSON schema or a regex -> which tokens may come next.

llguidance (guidance-ai/llguidance) does the work: an Earley parser over derivatives of regexes,
which walks a trie of all tokens. What it is given here is limited, so that no schema or regex
takes more than seconds or some 100 MB, and what it says is told in one line.

Object keys come in the order in which the schema names them. oneOf is taken only where it is
plainly anyOf; of regexes, neither look-around nor back references. A regex is of the whole text,
one that is a "pattern" in a schema is found somewhere in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from decimal import Decimal
from threading import Lock
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import numpy as np

from engine.params import SamplingParams
from engine.tokenizer import Tokenizer, rust_errors

# White space between the parts of a JSON text: a space, or a line's end and an indent. Small models
# that may write more of it write nothing else.
JSON_SPACE = r" |\n[ \t]{0,24}"
# Any way to spell a text in tokens is allowed, not only the tokenizer's own.
HEAD = '%llguidance {"no_forcing": true}\nstart: '
ASCII = "d"  # of a regex's classes, those that are ASCII alone: \d, but not \w and \s
MAX_MULTIPLE = 100_000  # multipleOf is a regex of so many states
MAX_STATES = 50_000  # of all regexes together, 2 kB each
MAX_NEWLINES = 2  # between a close tag and what is constrained
NO_EXTENSION = "NoExtensionBias"  # llguidance's word for a text that no token continues


class Grammar:
    """The tokens that may come next in one output. For one thread at a time."""

    def __init__(self, name: str, matcher, vocabulary: Vocabulary, eos_ids, after, opens) -> None:
        """Made by `of`. name: the parameter that errors are about."""
        self._name, self._matcher, self._vocabulary = name, matcher, vocabulary
        self._eos_ids: frozenset[int] = eos_ids
        self._eos_bits = bits_of(eos_ids, vocabulary.size)
        self._after: tuple[int, ...] = after
        self._opens: int | None = opens  # what may come now, and with it thoughts
        free = after and opens is None
        self._tail: tuple[int, ...] | None = () if free else None  # None: it is constrained now
        self._newlines = MAX_NEWLINES if free else 0  # that may still come before the text
        self._ended = False
        self._look()

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_ids: Collection[int],
        after: tuple[int, ...] | None = None,
        opens: int | None = None,
    ) -> Grammar | None:
        """What `params` asks for; None where that is nothing.

        vocab_size: the model's; ids that the tokenizer does not have, and its added tokens, are
        never allowed. eos_ids: what may end a complete text, and may not come before; with
        params.ignore_eos they may never. after: the ids of a tag such as </think>: until they
        have come everything but an end is allowed; then newlines, two at most, and the text that
        is constrained. opens: the id of a tag such as <think>, which may come first in place of the
        text, and only then is anything allowed before `after`. ValueError, in one line, for what
        llguidance cannot take, for what no text satisfies, and where the package is not installed.
        The first for a tokenizer takes a second.
        """
        if params.json_schema is None and params.regex is None:
            return None
        name = "regex" if params.json_schema is None else "json_schema"
        if tokenizer is None:
            raise ValueError(f"{name} needs a tokenizer.json: it is about text")
        llguidance = imported()
        # An end token that has a text of its own only ever ends.
        spelled = frozenset(i for i in eos_ids if tokenizer.bytes_of(i))
        vocabulary = Vocabulary.of(tokenizer, vocab_size, spelled)
        with rust_errors(f"{name} cannot be used"):
            if params.json_schema is not None:
                rule = json_rule(json.loads(params.json_schema))
            else:
                rule = f"/{llguidance.regex_to_lark(params.regex, ASCII)}/"
            matcher = llguidance.LLMatcher(
                vocabulary.tokens,
                llguidance.LLMatcher.grammar_from_lark(HEAD + rule),
                log_level=0,
                limits=llguidance.LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False),
            )
        ends = frozenset() if params.ignore_eos else frozenset(eos_ids)
        return cls(name, matcher, vocabulary, ends, after or (), opens)

    def allowed(self) -> np.ndarray:
        """(ceil(vocab_size / 32),) int32 for the next token: bit i % 32 of word i // 32 is id i's.

        The end ids are among them where the text is complete; they alone are where nothing can
        follow. So with no end ids, ask `is_finished` first. Not to be written to.
        """
        return ~self._eos_bits if self.is_free else self._mask

    @property
    def is_free(self) -> bool:
        """Whether it is before `after`: anything may come but an end, which would leave no text."""
        return self._tail is not None

    def take(self, token_id: int) -> None:
        """A token was chosen.

        ValueError if it was not allowed, or the text has become too complex or cannot be completed.
        """
        if self._tail is not None:
            tail = (*self._tail, token_id)[-len(self._after) :]
            self._tail = None if tail == self._after else tail
            return
        opens, self._opens = self._opens, None
        if opens is not None and token_id == opens:
            self._tail, self._newlines = (), MAX_NEWLINES
            self._look()
            return
        if not is_set(self._mask, token_id):
            raise ValueError(f"{self._name} does not allow token id {token_id} here")
        if token_id in self._eos_ids:
            self._ended = True
        elif token_id in self._skipped:
            self._newlines -= self._vocabulary.newlines[token_id]
        else:
            self._newlines = 0
            if not self._matcher.consume_token(token_id):
                raise self._error()
        self._look()

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow, but an end id."""
        return self._tail is None and not self._goes_on

    def copy(self) -> Grammar:
        """One in the same state that goes its own way."""
        other = object.__new__(Grammar)
        vars(other).update(vars(self))
        other._matcher = self._matcher.deep_copy()
        return other

    @property
    def _skipped(self) -> list[int]:
        """The newlines that may still come before the text, and are no part of it."""
        return [i for i, n in self._vocabulary.newlines.items() if n <= self._newlines]

    def _look(self) -> None:
        """Find what may come next."""
        size, end = self._vocabulary.size, self._vocabulary.end
        if self._ended:
            bits, may_end = np.zeros_like(self._eos_bits), True
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
            if self._matcher.is_error():
                raise self._error()
            may_end = is_set(bits, end)
            words = -(-size // 32)
            bits = bits[:words] & ~bits_of([end], size + 1)[:words]
        self._goes_on = bool(bits.any())
        if not self._goes_on and not may_end:
            raise self._error()
        if self._newlines:
            bits = bits | bits_of(self._skipped, size)
        if self._opens is not None:
            self._goes_on, bits = True, bits | bits_of([self._opens], size)
        self._mask = bits | self._eos_bits if may_end else bits & ~self._eos_bits
        self._mask.flags.writeable = False  # copies share it

    def _error(self) -> ValueError:
        why = reason(self._matcher.get_error())
        if why == NO_EXTENSION:
            why = "no text satisfies it, or the tokenizer cannot spell one"
        return ValueError(f"{self._name} cannot be used: {why}")


class Vocabulary:
    """Ids and their bytes as llguidance wants them, with an end token of our own behind them."""

    _made: WeakKeyDictionary[Tokenizer, dict[tuple, Vocabulary]] = WeakKeyDictionary()
    _making = Lock()

    def __init__(self, tokenizer: Tokenizer, size: int, without: frozenset[int]) -> None:
        """size: the model's ids, with a text or not. without: those that no text may use."""
        self.size, self.end = size, size
        silent = without | set(tokenizer.added_ids.values())
        spelled = [b"" if i in silent else tokenizer.bytes_of(i) for i in range(size)]
        # 0xff is in no UTF-8; llguidance marks special tokens with it.
        spelled = [b"" if b"\xff" in token else token for token in spelled]
        self.newlines = {  # id -> how many it is
            i: len(token) for i, token in enumerate(spelled) if token in (b"\n", b"\n\n")
        }
        about = {"eos_token_id": self.end, "bos_token_id": None, "special_token_ids": []}
        wrapped = SimpleNamespace(tokens=[*spelled, b""], is_tokenizer_wrapper=True, **about)
        with rust_errors("the tokenizer cannot be used with llguidance"):
            self.tokens = imported().LLTokenizer(wrapped)

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, without: frozenset[int]) -> Vocabulary:
        """The one of a tokenizer, made at its first use."""
        with cls._making:
            made = cls._made.setdefault(tokenizer, {})
            if (size, without) not in made:
                made[size, without] = cls(tokenizer, size, without)
            return made[size, without]


def imported():
    """The llguidance package: only requests with a grammar need it."""
    try:
        import llguidance
    except ImportError:
        raise ValueError(
            'json_schema and regex need the package llguidance: pip install ".[grammar]"'
        ) from None
    return llguidance


def json_rule(schema: dict | bool) -> str:
    """A schema in llguidance's grammar language. ValueError for one that takes too long."""
    if schema is False:
        raise ValueError("no text satisfies False")
    schema = {} if schema is True else schema
    multiple = math.lcm(*multiples(schema))
    if multiple > MAX_MULTIPLE:
        most = f"above {MAX_MULTIPLE}, the most that is possible"
        raise ValueError(f"the least common multiple of its multipleOf is {most}")
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": JSON_SPACE}} | schema)


def multiples(schema) -> Iterator[int]:
    """The digits of each multipleOf in a schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from multiples(item)
    elif isinstance(schema, dict):
        for key, item in schema.items():
            if key == "multipleOf" and type(item) in (int, float):
                value = abs(Decimal(repr(item)))
                yield int(value.scaleb(max(0, -value.as_tuple().exponent)))
            yield from multiples(item)


def bits_of(ids: Collection[int], size: int) -> np.ndarray:
    """(ceil(size / 32),) int32 in which the bits of those ids that are below `size` are set."""
    bits = np.zeros(-(-size // 32), np.uint32)
    for i in ids:
        if i < size:
            bits[i // 32] |= np.uint32(1 << i % 32)
    return bits.view(np.int32)


def is_set(bits: np.ndarray, i: int) -> bool:
    return 0 <= i < 32 * len(bits) and bool(bits[i // 32] >> i % 32 & 1)


def reason(error: str) -> str:
    """What is wrong, in one line, of a message that shows where in many."""
    lines = [line.strip() for line in error.partition("\n<")[0].splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    told = told or lines[:1] or ["llguidance gives no reason"]
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", told[0])[:200]
