"""A request's fields -> SamplingParams: OpenAI's names, and vLLM's for what OpenAI has not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.config import show
from engine.llm import LLM
from engine.params import check
from engine.sampler import SamplingParams
from engine.serve.body import field
from engine.serve.errors import wrong

# Fields of both, with the same meaning; max_tokens before min_tokens, which it bounds.
SAME = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "n",
    "thinking_budget",
)


def sampling_of(llm: LLM, body: dict, max_tokens: int | None) -> SamplingParams:
    """The model's own params with what the request sets; logprobs are not among it.

    max_tokens: what holds where the request does not say. 400 names the field that is wrong.
    """
    for limit in ("max_completion_tokens", "max_tokens"):  # the newer name first
        if body.get(limit) is not None:
            body = body | {"max_tokens": checked(limit, body[limit], 1, llm.context)}
            break
    given = {name: body[name] for name in SAME if body.get(name) is not None}
    if body.get("logit_bias") is not None:
        given["logit_bias"] = bias_of(llm, body)
    params = replace(llm.default_params, max_tokens=max_tokens)
    for name, value in given.items():
        params = changed(params, name, value)
    for token in params.stop_token_ids:
        checked("stop_token_ids", token, 0, llm.config.vocab_size - 1)
    return params


def changed(params: SamplingParams, name: str, value: Any, param: str | None = None):
    """`params` with another value of a field; 400 says what is wrong with it."""
    try:
        return replace(params, **{name: value})
    except ValueError as e:
        raise wrong(str(e), param or name) from None


def checked(name: str, value: object, low: int, high: int) -> int:
    """A whole number from low to high, or 400."""
    try:
        return check(name, value, int, low, high)
    except ValueError as e:
        raise wrong(str(e), name) from None


def bias_of(llm: LLM, body: dict) -> dict[int, Any]:
    """logit_bias: JSON spells its token ids as texts."""
    found = {}
    for key, value in field(body, "logit_bias", dict).items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise wrong(f"logit_bias has the key {show(key)}; token ids are needed", "logit_bias")
        found[checked("logit_bias", int(key), 0, llm.config.vocab_size - 1)] = value
    return found


def constrained(params: SamplingParams, schema: dict, what: str) -> SamplingParams:
    """`params` for a text that is JSON of this schema; 400 where it is none."""
    return changed(params, "json_schema", schema, what)
