"""The server under load: good requests, bad ones, and clients that go away, all at once."""

from __future__ import annotations

import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
from serving import chat_model, served, sse, until

from engine.llm import LLM
from engine.sampler import SamplingParams
from engine.serve.service import Service

N_REQUESTS, N_CLIENTS = 60, 12
BAD = (b"{", b'{"messages": 3}', b'{"messages": [], "temperature": NaN}')


def test_every_good_request_is_answered_right(tmp_path):
    """Answers mixed up, requests lost, or work and threads left behind by clients that went."""
    llm = LLM(chat_model(tmp_path / "tiny"), kv_cache="paged", threads=1)
    threads = threading.active_count()
    words, rng = "to be or not that is the question whether".split(), random.Random(0)
    prompts = [" ".join(rng.choices(words, k=rng.randrange(2, 60))) for _ in range(N_REQUESTS)]
    lengths = [rng.randrange(1, 24) for _ in prompts]
    ways = [rng.choice(("whole", "stream", "leave", "bad")) for _ in prompts]

    def params(i: int) -> dict:
        return {"max_tokens": lengths[i], "seed": i, "ignore_eos": True}

    expected = [llm.generate(p, SamplingParams(**params(i))).text for i, p in enumerate(prompts)]
    service = Service(llm, max_queued=N_REQUESTS)
    with served(llm, service) as address:
        url = f"{address}/v1/completions"

        def ask(i: int) -> None:
            body = params(i) | {"prompt": prompts[i]}
            if ways[i] == "whole":
                answer = httpx.post(url, json=body, timeout=60).json()
                assert answer["choices"][0]["text"] == expected[i]
                assert answer["usage"]["completion_tokens"] == lengths[i]
            elif ways[i] == "bad":
                path = "/v1/chat/completions"
                response = httpx.post(address + path, content=BAD[i % len(BAD)], timeout=60)
                assert response.status_code == 400
            elif ways[i] == "leave":
                leave(url, body | {"max_tokens": 1500, "stream": bool(i % 2)}, i % 5 / 50)
            else:
                raw = httpx.post(url, json=body | {"stream": True}, timeout=60).text
                *chunks, done = sse(raw.splitlines())
                parts = [chunk["choices"][0] for chunk in chunks]
                assert "".join(part["text"] for part in parts) == expected[i]
                assert done == "[DONE]" and parts[-1]["finish_reason"] == "length"

        with ThreadPoolExecutor(N_CLIENTS) as clients:
            list(clients.map(ask, range(N_REQUESTS)))  # an assertion that fails is raised here
        until(lambda: service.stats().running == service.stats().queued == 0)
        assert service.stats().finished["length"] == ways.count("whole") + ways.count("stream")
    service.close()
    until(lambda: threading.active_count() <= threads)


def leave(url: str, body: dict, after: float) -> None:
    """Ask, and go away."""
    request = httpx.Request("POST", url, json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as sock:
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        time.sleep(after)  # any moment will do
