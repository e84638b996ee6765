"""Load for a server: good requests, bad ones, and clients that go away, from a fixed seed."""

from __future__ import annotations

import http.client
import itertools
import json
import random
import select
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from serving import sse

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = "to be or not that is the question whether tis nobler in mind suffer my lord".split()
OPENINGS = [" ".join(random.Random(i).choices(WORDS, k=40)) for i in range(3)]
PATIENCE = 300.0  # seconds
BAD = (
    (400, CHAT, b"{"),
    (400, TEXT, b""),
    (400, TEXT, b"\xff" * 100),
    (400, CHAT, b'{"messages": 3}'),
    (400, CHAT, b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}'),
    (400, CHAT, b'{"messages": ' + b"[" * 9000),
    (400, TEXT, b'{"prompt": "To be", "max_tokens": -1}'),
    (400, TEXT, b'{"prompt": ' + b"1" * 5000 + b"}"),
    (400, TEXT, json.dumps({"prompt": [1] * 3000}).encode()),
    (400, TEXT, b'{"prompt": "To be", "n": 129}'),
    (413, CHAT, b" " * 20_001),  # behind --max-body-bytes 20000
    (404, "/v1/nowhere", b"{}"),
    (405, "/metrics", b"{}"),
)


@dataclass(frozen=True)
class Answer:
    """What is the same however a request is answered: whole or in a stream, alone or not."""

    choices: dict[int, tuple[str, str, list]]  # text, finish reason, logprobs
    n_tokens: tuple[int, int]  # of the prompt, of the text

    @classmethod
    def of(cls, objects: Iterable[dict]) -> Answer:
        """A whole answer, or the chunks of a stream."""
        texts, ends, logprobs, usage = defaultdict(str), {}, defaultdict(list), None
        for part in objects:
            usage = part.get("usage") or usage
            for choice in part["choices"]:
                i, said = choice["index"], choice.get("delta", choice.get("message", choice))
                assert i not in ends, "a choice goes on behind its end"
                texts[i] += said.get("content") or said.get("text") or ""
                if told := choice["logprobs"]:
                    columns = told.get("content") or zip(*map(told.get, COLUMNS), strict=True)
                    logprobs[i] += columns
                if choice["finish_reason"]:
                    ends[i] = choice["finish_reason"]
        assert texts.keys() == ends.keys(), "a choice without an end"
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        return cls({i: (texts[i], ends[i], logprobs[i]) for i in sorted(ends)}, counts)


COLUMNS = "tokens", "token_logprobs", "top_logprobs", "text_offset"


def good_request(rng: random.Random, opening: str | None = None) -> tuple[str, dict]:
    """(path, body) of a request that can be answered, and in one way only."""
    opening = rng.choice(["", *OPENINGS]) if opening is None else opening
    text = " ".join([opening, *rng.choices(WORDS, k=rng.randrange(2, 60))])
    body = {"max_tokens": rng.randrange(1, 40), "seed": rng.randrange(1000), "ignore_eos": True}
    body |= rng.choice([{}, {"temperature": 0}, {"top_p": 0.9}, {"stop": ["e ", "th"]}, {"n": 2}])
    if rng.random() < 0.5:
        shown = {"logprobs": rng.randrange(3)}
        path, body = TEXT, body | {"prompt": [text, text[:30]][: rng.randrange(1, 3)]}
    else:
        shown = {"logprobs": True, "top_logprobs": rng.randrange(3)}
        path, body = CHAT, body | {"messages": [{"role": "user", "content": text}]}
    body |= rng.choice([{}, shown])
    if rng.random() < 0.1:
        digits = {"type": "integer", "maximum": rng.randrange(9, 999)}
        own = {"type": "json_schema", "json_schema": {"name": "x", "schema": digits}}
        body |= {"response_format": own}
    return path, body


class Client:
    """Asks one request after the other, over one connection where it can."""

    def __init__(self, address: str):
        self._connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_) -> None:
        self._connection.close()

    def ask(self, path: str, body: dict | bytes) -> tuple[int, list]:
        """(status, the answer's objects): one if it comes whole, or chunks and maybe an error."""
        response = self._response(path, body)
        if response.getheader("content-type").startswith("text/event-stream"):
            *objects, last = sse(line.decode().rstrip("\n") for line in response)
            if last != "[DONE]":  # an error
                objects.append(last)
            return response.status, objects
        return response.status, [json.loads(response.read())]

    def leave(self, path: str, body: dict, n_events: int, *, reset: bool) -> None:
        """Ask, and be gone after so many events of a stream, or at any moment of a whole answer."""
        if body["stream"] and n_events:
            response = self._response(path, body)
            for _ in itertools.islice(response, 2 * n_events):  # an empty line behind each
                pass
        else:
            response = None
            self._send(path, body)
            select.select([self._connection.sock], [], [], n_events / 100)
        self._go(reset)
        if response:
            response.close()

    def cut(self, path: str, body: dict, *, reset: bool) -> None:
        """Be gone in the middle of the body."""
        raw = json.dumps(body).encode()
        self._send(path, raw[: len(raw) // 2], length=len(raw))
        self._go(reset)

    def _go(self, reset: bool) -> None:
        if reset:
            linger = struct.pack("ii", 1, 0)
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._connection.close()

    def _response(self, path: str, body: dict | bytes) -> http.client.HTTPResponse:
        self._send(path, body)
        return self._connection.getresponse()

    def _send(self, path: str, body: dict | bytes, length: int | None = None) -> None:
        sock = self._connection.sock
        if sock and select.select([sock], [], [], 0)[0]:  # it was idle for long: it is closed
            self._connection.close()
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Length": str(len(raw) if length is None else length)}
        self._connection.request("POST", path, raw, headers)


def good_requests(n: int) -> list[tuple[str, dict]]:
    return [good_request(random.Random(i)) for i in range(n)]


@dataclass(frozen=True)
class Load:
    """Requests to a server: what each is depends on its number only."""

    address: str
    asked: list[tuple[str, dict]]  # the good ones
    expected: list[Answer]

    @classmethod
    def alone(cls, address: str, asked: list[tuple[str, dict]]) -> Load:
        """Asks each good request by itself, to know its answer."""
        expected = []
        with Client(address) as client:
            for path, body in asked:
                status, objects = client.ask(path, body)
                assert status == 200, objects
                expected.append(Answer.of(objects))
        choices = [answer.choices for answer in expected]
        assert all(choices.count(c) == 1 for c in choices), "mixed up, they would look right"
        return cls(address, asked, expected)

    def run(self, n_clients: int, more: Callable[[int], bool]) -> Counter[str]:
        """Requests 0, 1, ... while `more` says so: how many there were of each kind.

        AssertionError for an answer that is not right.
        """
        numbers, counts = itertools.count(), Counter()

        def work() -> Counter[str]:
            mine = Counter()
            with Client(self.address) as client:
                while more(i := next(numbers)):
                    mine[self.one(client, i)] += 1
            return mine

        with ThreadPoolExecutor(n_clients) as clients:
            for found in [clients.submit(work) for _ in range(n_clients)]:
                counts += found.result()
        return counts

    def one(self, client: Client, number: int) -> str:
        """Ask request `number` and check its answer: what kind it was."""
        rng = random.Random(-1 - number)
        (kind,) = rng.choices(("whole", "stream", "left", "cut", "bad"), (4, 4, 4, 1, 3))
        if kind in ("whole", "stream"):
            self.check(client, rng.randrange(len(self.asked)), stream=kind == "stream")
        elif kind == "bad":
            status, path, raw = rng.choice(BAD)
            found, (answer,) = client.ask(path, raw)
            assert found == status and answer["error"]["message"], answer
        else:
            path, body = good_request(rng, opening=rng.choice(["", *OPENINGS]))
            if kind == "cut":
                client.cut(path, body, reset=rng.random() < 0.5)
            else:
                body |= {"max_tokens": 300, "stream": rng.random() < 0.7}
                client.leave(path, body, rng.randrange(12), reset=rng.random() < 0.5)
        return kind

    def check(self, client: Client, which: int, *, stream: bool) -> None:
        """AssertionError unless a good request is answered as it was alone."""
        error = self.error(client, which, stream=stream)
        assert error is None, error

    def error(self, client: Client, which: int, *, stream: bool) -> dict | None:
        """Ask a good request: the error that it got; AssertionError for an answer not right."""
        path, body = self.asked[which]
        if stream:
            body = body | {"stream": True, "stream_options": {"include_usage": True}}
        status, objects = client.ask(path, body)
        if "error" in objects[-1]:
            return objects[-1]["error"]
        assert status == 200 and Answer.of(objects) == self.expected[which]
        return None
