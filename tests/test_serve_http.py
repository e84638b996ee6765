"""The server on the wire: bodies that are none, keys, origins, limits, clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from urllib.parse import urlsplit

import httpx
import pytest
from serving import Scripted, chat_model, served, sse, until

from engine.llm import LLM
from engine.serve.server import EventStream, Limits, create_app
from engine.serve.service import Service

HI = {"messages": [{"role": "user", "content": "Hi"}]}
POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    return LLM(chat_model(tmp_path_factory.mktemp("serve") / "tiny"), kv_cache="paged")


@pytest.fixture
def script() -> Scripted:
    return Scripted("Once upon a time")


@pytest.fixture
def open_server(llm, script):
    """A server without a key."""
    with served(llm, script) as address, httpx.Client(base_url=address, timeout=20) as client:
        yield client


def refusal(response: httpx.Response, status: int) -> dict:
    """The error object of a response."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"] and "Traceback" not in error["message"]
    return error


# ---------------------------------------------------------------- bodies


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a": ' * 50_000 + b"1" + b"}" * 50_000,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bodies_that_are_none(open_server, path, body):
    """A body that brings the server down, or is taken for a request."""
    error = refusal(open_server.post(path, content=body), 400)
    assert error["message"].startswith("the body is") and len(error["message"]) < 300


def test_numbers_that_overflow(open_server):
    """1e999 is read as infinity."""
    raw = json.dumps(HI)[:-1] + ', "temperature": 1e999}'
    assert refusal(open_server.post(POSTS[0], content=raw), 400)["param"] == "temperature"


def test_deep_arguments(open_server):
    """JSON that can be read, and then sends what walks through it too deep."""
    deep = "[" * 400 + "]" * 400
    raw = json.dumps(HI)[:-1] + ', "chat_template_kwargs": {"a": ' + deep + "}}"
    assert open_server.post(POSTS[0], content=raw).status_code in (200, 400)


def test_unknown_paths_and_methods(open_server):
    """An HTML page, or nothing, where a client expects an error object."""
    assert refusal(open_server.get("/v2/chat"), 404)["code"] == "unknown_url"
    refusal(open_server.get("/v1/chat/completions"), 405)
    refusal(open_server.post("/v1/chat/completions/", json=HI), 404)
    refusal(open_server.get("/docs"), 404)


def test_a_body_that_is_too_large(llm, script):
    """Memory for whatever is sent, whether its length was told or not."""
    with served(llm, script, limits=Limits(body_bytes=1000)) as address:
        url = f"{address}/v1/chat/completions"
        for content in (b"x" * 1001, iter([b"x" * 600, b"x" * 600])):
            error = refusal(httpx.post(url, content=content), 413)
            assert "1000 bytes" in error["message"]
        body = json.dumps(HI).encode().ljust(1000)
        assert httpx.post(url, content=body).status_code == 200


def test_a_body_that_does_not_come(llm, script):
    """A connection held open for ever by a client that never finishes its request."""
    with served(llm, script, limits=Limits(seconds=0.1)) as address:
        with socket.create_connection(("127.0.0.1", urlsplit(address).port)) as sock:
            sock.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert sock.recv(1000).startswith(b"HTTP/1.1 408 ")


# ---------------------------------------------------------------- the stream on the wire


def test_events_as_openai_sends_them(open_server):
    """Another framing, no [DONE], or an answer that a proxy keeps back."""
    body = HI | {"stream": True}
    with open_server.stream("POST", POSTS[0], json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        *chunks, done = sse(response.iter_lines())
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)


def test_an_error_ends_a_stream(open_server, script):
    """A stream that breaks off with [DONE], as if all had been said."""
    script.ends, script.error = "error", RuntimeError("inside")
    with open_server.stream("POST", POSTS[0], json=HI | {"stream": True}) as response:
        *_, last = sse(response.iter_lines())
    assert last["error"]["type"] == "server_error" and "inside" not in last["error"]["message"]


def test_a_stream_lets_others_go_between():
    """One that has much to send at once, and keeps all others waiting; and that goes on sending to
    a client whose connection has failed, which the loop cannot say meanwhile."""

    class Unwatched:
        @contextlib.asynccontextmanager
        async def watched(self, receive):
            yield

    async def turns_at_sends() -> list[int]:
        turns, seen = 0, []

        async def chunks():
            for i in range(5):
                yield {"i": i}

        async def others():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def send(message):
            seen.append(turns)

        running = asyncio.create_task(others())
        await EventStream(Unwatched(), chunks())({}, None, send)
        running.cancel()
        return seen

    seen = asyncio.run(turns_at_sends())
    assert len(seen) == 7 and all(a < b for a, b in zip(seen[1:], seen[2:], strict=False))


# ---------------------------------------------------------------- who may ask


def test_keys(llm, script):
    """A server that answers without its key, or not with it."""
    with served(llm, script, api_key="sécret") as address:
        with httpx.Client(base_url=address) as client:
            for path in ("/", "/health"):
                assert client.get(path).status_code == 200
            for given in (None, "Bearer", "Bearer wrong", "Basic sécret", "sécret"):
                headers = {} if given is None else {"Authorization": given.encode()}
                for path in ("/v1/models", "/metrics", "/nowhere"):
                    error = refusal(client.get(path, headers=headers), 401)
                    assert error["code"] == "invalid_api_key"
                for path in POSTS:
                    refusal(client.post(path, headers=headers, json=HI), 401)
            headers = {"Authorization": "bearer sécret".encode()}
            assert client.get("/v1/models", headers=headers).status_code == 200
            assert client.post(POSTS[0], headers=headers, json=HI).status_code == 200
    assert len(script.requests) == 1


def test_pages_of_other_sites(open_server, script):
    """A page that somebody visits and that uses the model on their loopback."""
    own = str(open_server.base_url).rstrip("/")
    for origin in ("https://evil.org", "null", own + "1"):
        error = refusal(open_server.post(POSTS[0], json=HI, headers={"Origin": origin}), 403)
        assert error["code"] == "foreign_origin"
    preflight = {"Origin": "https://a.org", "Access-Control-Request-Method": "POST"}
    response = open_server.options(POSTS[0], headers=preflight)
    assert response.status_code >= 400 and "access-control-allow-origin" not in response.headers
    assert script.requests == []
    response = open_server.post(POSTS[0], json=HI, headers={"Origin": own})
    assert response.status_code == 200


def test_cors(llm, script):
    """A site that was let in, and is not; another that was not, and is."""
    with served(llm, script, api_key="k", cors_origins=["https://a.org"]) as address:
        asks = {"Access-Control-Request-Method": "POST"}
        asks["Access-Control-Request-Headers"] = "authorization,content-type"
        origin = {"Origin": "https://a.org"}
        response = httpx.options(address + POSTS[0], headers=asks | origin)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://a.org"
        response = httpx.post(address + POSTS[0], json=HI, headers=origin)
        assert response.headers["access-control-allow-origin"] == "https://a.org"
        refusal(response, 401)  # and the page can read why
        refusal(httpx.get(address + "/health", headers={"Origin": "https://b.org"}), 403)


# ---------------------------------------------------------------- clients that go away


def post(address: str, body: dict) -> socket.socket:
    """A connection on which a chat has been asked for."""
    raw = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", urlsplit(address).port))
    head = f"POST {POSTS[0]} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold", [0, 2])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_closed_connection_cancels(llm, script, stream, hold, how):
    """Work for nobody: while it waits, while it is prefilled, and once text has come."""
    script.hold = hold
    with served(llm, script) as address:
        with contextlib.closing(post(address, HI | {"stream": stream, "n": 2})) as sock:
            until(lambda: len(script.requests) == 2)
            until(lambda: all(len(request.told) == hold for request in script.requests))
            assert not any(request.cancelled.is_set() for request in script.requests)
            if how == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if how == "half":
                sock.shutdown(socket.SHUT_WR)
            else:
                sock.close()
            until(lambda: all(request.cancelled.is_set() for request in script.requests))
        assert httpx.get(f"{address}/health").status_code == 200


def test_a_closed_connection_frees_the_model(llm):
    """The same with the model itself: a request that goes on, or one that waits behind it."""
    service = Service(llm, max_running=1)
    body = HI | {"stream": True, "ignore_eos": True}
    with served(llm, service) as address:
        running, waiting = post(address, body), post(address, body)
        until(lambda: service.stats().running == 1 and service.stats().queued == 1)
        waiting.close()
        running.close()
        until(lambda: service.stats().finished.get("cancelled") == 2)
        stats = service.stats()
        assert stats.running == stats.queued == 0
        assert stats.kv_blocks_used == stats.kv_blocks_cached  # of known prompts, and no others
        assert httpx.post(address + POSTS[0], json=HI | {"max_tokens": 2}).status_code == 200
    service.close()


# ---------------------------------------------------------------- the rest


def test_tokenize(llm, open_server):
    """Ids that are not those of a prompt; pieces that are no characters; special tokens lost."""
    text = "Zürich <|endoftext|>"
    ids = open_server.post("/tokenize", json={"content": text}).json()["tokens"]
    assert ids == llm.tokenizer.encode(text)
    assert open_server.post("/detokenize", json={"tokens": ids}).json() == {"content": text}
    asked = {"content": text, "with_pieces": True}
    pieces = open_server.post("/tokenize", json=asked).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    spelled = [
        p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces
    ]
    assert b"".join(spelled).decode() == text and any(len(s) == 1 and s[0] > 127 for s in spelled)
    plain = open_server.post("/tokenize", json={"content": text, "parse_special": False})
    assert plain.json()["tokens"] == llm.tokenizer.encode_plain(text)
    for body in ({}, {"content": 3}, {"content": "x", "with_pieces": 1}):
        refusal(open_server.post("/tokenize", json=body), 400)
    for tokens in (None, "x", ["x"], [-1], [2176], [True], [1.0]):
        refusal(open_server.post("/detokenize", json={"tokens": tokens}), 400)


def test_metrics(llm, open_server, script):
    """Figures that a dashboard for llama-server does not find, or that count nothing."""
    open_server.post(POSTS[0], json=HI)
    response = open_server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    figures = dict(
        line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#")
    )
    for name in (
        "llamacpp:prompt_tokens_total",
        "llamacpp:tokens_predicted_total",
        "llamacpp:prompt_tokens_seconds",
        "llamacpp:predicted_tokens_seconds",
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        "engine:prefix_hit_tokens_total",
        "engine:preemptions_total",
    ):
        assert float(figures[name]) >= 0
    assert float(figures["llamacpp:kv_cache_usage_ratio"]) == 0.25
    assert float(figures["engine:kv_blocks_used"]) == 3
    assert float(figures["engine:kv_blocks_total"]) == 12
    assert float(figures['engine:requests_total{reason="stop"}']) == 2


def test_metrics_of_the_model(llm):
    """Totals that stay zero, or rates without a time."""
    service = Service(llm)
    with served(llm, service) as address:
        httpx.post(address + POSTS[0], json=HI | {"max_tokens": 5, "ignore_eos": True})
        figures = httpx.get(f"{address}/metrics").text
    service.close()
    assert "llamacpp:tokens_predicted_total 5.0" in figures
    for name in ("prompt_tokens_seconds", "predicted_tokens_seconds", "prompt_tokens_total"):
        (line,) = [x for x in figures.splitlines() if x.startswith(f"llamacpp:{name} ")]
        assert float(line.split()[1]) > 0


def test_a_model_without_a_template(script):
    """A chat made up for a model that knows none."""
    with served(LLM(), script) as address:
        error = refusal(httpx.post(address + POSTS[0], json=HI), 400)
        assert "no chat template" in error["message"]
        (model,) = httpx.get(f"{address}/v1/models").json()["data"]
        assert model["meta"]["chat"] is False


def test_a_model_without_a_tokenizer(llm, script, monkeypatch):
    """A server that fails at its first request instead of at its start."""
    monkeypatch.setattr(llm, "tokenizer", None)
    with pytest.raises(ValueError, match="tokenizer.json"):
        create_app(llm, script, name="x")
