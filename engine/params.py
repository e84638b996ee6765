"""SamplingParams: what a request asks of its tokens, checked where it comes in."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.config import show

HOTTEST = float(np.finfo(np.float32).max)
LARGEST = 1 << 4096  # of a whole number without a limit of its own: as long as JSON may well be
MAX_STOPS = 16  # strings that may end a text
MAX_GRAMMAR = 1 << 16  # bytes of a JSON schema or a regex

Bias = Mapping[int, float] | Sequence[tuple[int, float]]


@dataclass(frozen=True)
class SamplingParams:
    """How a request chooses its tokens. ValueError names a value out of range and the range.

    The order of steps, from logits to a token: the model's logits, of which logprobs are; mask and
    min_tokens; repetition_penalty; presence_penalty and frequency_penalty; logit_bias; then at
    temperature 0 the largest, else temperature, top_k, top_p, min_p, each on what the one before
    left, and a draw.

    Can be a key, and json.dumps(vars(params)) and back gives an equal one: numbers become plain
    Python's, stop and stop_token_ids tuples, logit_bias a tuple of (id, bias) in order of ids,
    json_schema a text without spaces (keys stay in their order, which is that of the output).
    """

    max_tokens: int | None = 128  # None: until the context is full
    temperature: float = 1.0  # 0: always the likeliest token; of equal ones the lowest id
    top_k: int = 0  # keep the k likeliest; 0 or -1: all
    top_p: float = 1.0  # keep the fewest likeliest tokens that hold this share; 1: all
    min_p: float = 0.0  # keep tokens at least this share of the likeliest's probability; 0: all
    seed: int | None = None  # None: a fresh one for each request
    ignore_eos: bool = False  # go on after an end-of-text token
    repetition_penalty: float = 1.0  # divides logits above 0, multiplies others: prompt and output
    presence_penalty: float = 0.0  # taken off the logits of ids in the output
    frequency_penalty: float = 0.0  # taken off them for each time that they are there
    logit_bias: Bias | None = None  # added to the logits of these ids
    logprobs: int | None = None  # so many likeliest are told with each token; None: nothing is
    min_tokens: int = 0  # no end-of-text or stop id before so many tokens
    stop: str | Sequence[str] = ()  # strings that end the text
    stop_token_ids: Sequence[int] = ()  # ids that end it, beside end-of-text ids
    json_schema: str | Mapping | bool | None = None  # the text is JSON of this; True: any
    regex: str | None = None  # the whole text matches it
    n: int = 1  # samples of one prompt, each with draws of its own
    thinking_budget: int | None = None  # in a chat, thoughts are closed after so many tokens

    def __post_init__(self):
        self._number("max_tokens", int, 0, None, optional=True)
        self._number("temperature", float, 0, HOTTEST)
        self._number("top_k", int, -1, None)
        self._number("top_p", float, 0, 1, above=True)
        self._number("min_p", float, 0, 1)
        self._number("seed", int, 0, None, optional=True)
        self._number("repetition_penalty", float, 0, 10, above=True)
        self._number("presence_penalty", float, -2, 2)
        self._number("frequency_penalty", float, -2, 2)
        self._number("logprobs", int, 0, 20, optional=True)
        self._number("min_tokens", int, 0, None)
        self._number("n", int, 1, 128)
        self._number("thinking_budget", int, 0, None, optional=True)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is {show(self.ignore_eos)}; True or False is needed")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            most = f"at most max_tokens, which is {self.max_tokens}, is needed"
            raise ValueError(f"min_tokens is {show(self.min_tokens)}; {most}")
        self._set("logit_bias", bias_pairs(self.logit_bias))
        self._set("stop", stop_strings(self.stop))
        self._set("stop_token_ids", plain_ids("stop_token_ids", self.stop_token_ids))
        self._set("json_schema", schema_text(self.json_schema))
        check_regex(self.regex)
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("json_schema and regex are both given; one of the two is needed")

    def _number(self, name: str, *limits, **more) -> None:
        self._set(name, check(name, getattr(self, name), *limits, **more))

    def _set(self, name: str, value) -> None:
        object.__setattr__(self, name, value)


def check(name: str, value, kind: type, low, high, optional=False, above=False):
    """`value` as a plain number of `kind` from (with `above`: above) low to high, or ValueError."""
    if optional and value is None:
        return None
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, np.number) and not isinstance(value, np.timedelta64):
        value = value.item()
    high = LARGEST if high is None else high
    if isinstance(value, kinds) and not isinstance(value, bool) and value < math.inf:
        if (value > low if above else value >= low) and value <= high:
            return value
    least = f"above {low}" if above else f"at least {low}"
    most = "" if high == LARGEST else f" and at most {high:g}"
    if isinstance(value, int) and value > LARGEST:
        most = most or f" and at most 2**{LARGEST.bit_length() - 1}"
    number = "a whole number" if kind is int else "a number"
    raise ValueError(f"{name} is {show(value)}; {number} {least}{most} is needed")


def is_sequence(value) -> bool:
    """Whether this is a list of something, and not text or bytes."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def bias_pairs(bias: Bias | None) -> tuple[tuple[int, float], ...] | None:
    """(id, bias) in order of ids; None where there is none. ValueError for anything else."""
    if bias is None:
        return None
    pairs = list(bias.items()) if isinstance(bias, Mapping) else bias
    if not is_sequence(pairs) or not all(is_sequence(pair) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"logit_bias is {show(bias)}; token ids and their biases are needed")
    found = {}
    for key, value in pairs:
        token = check("logit_bias's id", key, int, 0, None)
        if token in found:
            raise ValueError(f"logit_bias's id is {token} twice; once is needed")
        found[token] = check(f"logit_bias[{token}]", value, float, -100, 100)
    return tuple(sorted(found.items())) or None


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One string, or a few, as a tuple; ValueError for anything else."""
    strings = (stop,) if isinstance(stop, str) else stop
    if not is_sequence(strings) or len(strings) > MAX_STOPS:
        raise ValueError(f"stop is {show(stop)}; a string or at most {MAX_STOPS} are needed")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop is {show(string)}; a string of some length is needed")
        refuse_half_characters("stop", string)
    return tuple(strings)


def plain_ids(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    if not is_sequence(ids):
        raise ValueError(f"{name} is {show(ids)}; a sequence of token ids is needed")
    return tuple(check(name, token, int, 0, None) for token in ids)


def schema_text(schema: str | Mapping | bool | None) -> str | None:
    """A JSON schema as JSON. ValueError for what is not one; what is in it is not looked at."""
    if schema is None:
        return None
    if isinstance(schema, str):
        check_bytes("json_schema", schema)
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        found = dict(found) if isinstance(found, Mapping) else found
        text = json.dumps(found, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        why = "nested too deeply" if isinstance(e, RecursionError) else " ".join(str(e).split())
        raise ValueError(f"json_schema is {show(schema)}, not JSON ({why})") from None
    if not isinstance(found, dict | bool):
        raise ValueError(f"json_schema is {show(schema)}; an object, True or False is needed")
    check_bytes("json_schema", text)
    return text


def check_regex(regex: str | None) -> None:
    """ValueError for what is no text; its syntax is looked at when a request starts."""
    if regex is not None and not isinstance(regex, str):
        raise ValueError(f"regex is {show(regex)}; a text is needed")
    check_bytes("regex", regex or "")


def check_bytes(name: str, text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR:
        raise ValueError(f"{name} is {size} bytes long; at most {MAX_GRAMMAR} are needed")
    refuse_half_characters(name, text)


def refuse_half_characters(name: str, text: str) -> None:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{name} is {show(text)}, which has a lone surrogate and is no text")
