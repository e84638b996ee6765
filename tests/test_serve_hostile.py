"""Requests that nobody sends by mistake: values of any size, bytes that are no text, odd paths."""

from __future__ import annotations

import json

import httpx
import pytest
from serving import chat_model, served

from engine.llm import LLM
from engine.serve.service import Service

CONTEXT = 16
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}}
BODIES[TEXT] = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    path = chat_model(tmp_path_factory.mktemp("serve") / "tiny")
    return LLM(path, kv_cache="paged", context=CONTEXT, threads=1)


@pytest.fixture(scope="module")
def client(llm):
    service = Service(llm)
    with served(llm, service) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client
    service.close()


def refusal(response: httpx.Response, status: int = 400) -> dict:
    """The error object of a response: one short line."""
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert len(error["message"]) < 500 and error["message"].isprintable()
    return error


# ---------------------------------------------------------------- values


def deep(n: int) -> str:
    return '{"a":' * n + "1" + "}" * n


HUGE = {
    "digits": "9" * 4000,
    "minus": "-" + "9" * 4000,
    "infinity": "1e400",
    "text": json.dumps("x" * 100_000),
    "half a character": r'"\ud800"',
    "list": json.dumps(["abc"] * 10_000),
    "object": json.dumps(dict.fromkeys(map(str, range(5000)), 1)),
    "deep": deep(700),
    "deeper": deep(100_000),
}
NUMBERS = (
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
)
LISTS = ("stop_token_ids", "logit_bias")
OBJECTS = ("messages", "tools", "tool_choice", "response_format", "stream_options", "model")


@pytest.mark.parametrize("value", HUGE)
def test_values_of_any_size(value, client):
    """An error that sends all of it back, 500 for it, or a number that is taken for another."""
    for path in (CHAT, TEXT):
        for name in NUMBERS:
            body = {k: v for k, v in BODIES[path].items() if k != name}
            raw = f'{json.dumps(body)[:-1]},"{name}":{HUGE[value]}}}'
            error = refusal(client.post(path, content=raw))
            assert error["param"] in (name, None)
            assert name in error["message"] or error["param"] is None
    for name in (*LISTS, *OBJECTS):
        raw = f'{json.dumps(BODIES[CHAT])[:-1]},"{name}":{HUGE[value]}}}'
        response = client.post(CHAT, content=raw)
        if (name, value) != ("model", "text"):  # whatever it is called, and however long
            refusal(response)


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": int("9" * 4000)},
        {"allOf": [{"multipleOf": 10**40 + i} for i in range(200)]},
        {"multipleOf": 1e-300},
        json.loads(deep(150)),
        {"enum": [str(i) for i in range(5000)]},
        {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$ref": "http://localhost/schema"},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"enum": []},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_schemas_of_any_kind(schema, client):
    """500, or no answer, for a schema that is too much, or that no text satisfies."""
    about = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    response = client.post(TEXT, json=BODIES[TEXT] | {"response_format": about})
    if response.status_code != 200:
        refusal(response)


def test_as_many_prompts_as_fit_in_a_body(client, llm, monkeypatch):
    """Minutes of work with each of them, only to find that they are too many."""
    monkeypatch.setattr(llm.tokenizer, "encode", None)
    error = refusal(client.post(TEXT, json={"prompt": ["a"] * 100_000}))
    assert error["param"] == "n" and "100000 samples" in error["message"]


# ---------------------------------------------------------------- the context's end


@pytest.mark.parametrize("n_prompt", [CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, None])
def test_prompts_as_long_as_the_context(n_prompt, max_tokens, client):
    """An empty text, one token too many, or words that do not say which limit it was."""
    body = {"prompt": [1] * n_prompt, "max_tokens": max_tokens, "ignore_eos": True}
    response = client.post(TEXT, json=body)
    if max_tokens == 0:
        assert refusal(response)["param"] == "max_tokens"
    elif n_prompt >= CONTEXT:
        error = refusal(response)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert f"{n_prompt} tokens" in error["message"] and str(CONTEXT) in error["message"]
    else:
        answer = response.json()
        room = CONTEXT - n_prompt
        assert answer["usage"]["completion_tokens"] == min(max_tokens or room, room)
        assert answer["choices"][0]["finish_reason"] == "length"


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "a\xed\xa0\x80"}',  # half a character in UTF-8, which has none
        b'{"prompt": "a", "stop": ["\xed\xa0\x80"]}',
        b'{"prompt": "a", "model": "\xed\xa0\x80"}',
        '{"prompt": "a"}'.encode("utf-16"),
        '{"prompt": "a"}'.encode("utf-32-le"),
        b"\x00" * 100,
        b"\xff\xfe",
    ],
    ids=str,
)
def test_bytes_that_are_no_text(raw, client):
    """Bytes that are read in an encoding nobody named, or as half a character."""
    error = refusal(client.post(TEXT, content=raw))
    assert "UTF-8" in error["message"] or "JSON" in error["message"]


def test_a_byte_order_mark(client):
    """A body that an editor has saved with one."""
    raw = b"\xef\xbb\xbf" + json.dumps(BODIES[TEXT]).encode()
    assert client.post(TEXT, content=raw).status_code == 200


# ---------------------------------------------------------------- headers and paths


@pytest.mark.parametrize("origin", ["http://[", "http://a:b:c]", "null", "x" * 10_000, "\xff\xfe"])
def test_origins_that_are_none(origin, client):
    """500, and a traceback in the log, for a header that anyone can send."""
    headers = {"Origin": origin.encode("latin-1")}
    error = refusal(client.post(TEXT, json=BODIES[TEXT], headers=headers), 403)
    assert error["code"] == "foreign_origin"


@pytest.mark.parametrize("path", ["/a%0Ab%00%ff", "/%5B", "/" + "a" * 20_000, "/v1/models/%0A"])
@pytest.mark.parametrize("host", ["a", "[", "", "\xff:99999999"])
def test_paths_and_hosts_that_are_none(path, host, client):
    """An error of several lines, of any length, or of another kind, for a path that is not here."""
    response = client.get(path, headers={"Host": host.encode("latin-1")})
    assert refusal(response, 404)["code"] in ("unknown_url", "model_not_found")


def test_head(client):
    """A load balancer that looks in with HEAD, and takes the server for a broken one."""
    for path in ("/", "/health", "/metrics", "/v1/models"):
        response = client.head(path)
        assert response.status_code == 200 and response.content == b""
        assert response.headers["content-length"] == client.get(path).headers["content-length"]
