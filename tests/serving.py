"""A server in a thread, and a service that says what a test wants, for tests of engine/serve."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from engine.llm import BUILT_IN, LLM
from engine.metrics import Metrics
from engine.reply import Completion
from engine.serve.scheduler import Event
from engine.serve.server import create_app
from engine.serve.service import QueueFull, Stats

TEMPLATE = """\
{% if tools %}tools: {{ tools | tojson }}
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}assistant:{% if enable_thinking is true %}<think>
{% elif enable_thinking is false %}<think></think>{% endif %}"""


def chat_model(path: Path) -> Path:
    """The built-in model with a chat template."""
    ignored = shutil.ignore_patterns("*.py", "__pycache__")
    shutil.copytree(BUILT_IN, path, ignore=ignored)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@contextmanager
def served(llm: LLM, service, *, within=lambda app: app, **options) -> Iterator[str]:
    """The server's address, while it runs in a thread. within: an app around its own."""
    app = within(create_app(llm, service, name="tiny", **options))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        config = uvicorn.Config(app, log_level="critical", ws="none", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive(), "the server does not end: a request hangs"


def until(condition, seconds: float = 20.0, every: float = 0.005) -> None:
    """Wait for something to become true; AssertionError if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(every)


class Scripted:
    """A service of one text, sent a few characters an event, for every sample.

    `hold`: events that come before it waits for `go`, or for its request to be cancelled.
    """

    def __init__(self, text: str = "", size: int = 3, ends: str = "stop", hold: int | None = None):
        self.text, self.size, self.ends, self.hold = text, size, ends, hold
        self.error: Exception | None = None
        self.go = threading.Event()
        self.full = False
        self.requests: list[ScriptedRequest] = []

    def submit(self, ids, params, listener, *, splitter=None, deadline=None, sample=0):
        if self.full:
            raise QueueFull("3 requests wait already")
        request = ScriptedRequest(self, ids, params, listener, splitter, deadline, sample)
        self.requests.append(request)
        return request

    def stats(self) -> Stats:
        running = sum(request.thread.is_alive() for request in self.requests)
        return Stats(running=running, kv_blocks_used=3, kv_blocks_total=12, finished={"stop": 2})


class ScriptedRequest:
    def __init__(self, script, ids, params, listener, splitter, deadline, sample):
        self.script, self.ids, self.params, self.listener = script, ids, params, listener
        self.splitter, self.deadline, self.sample = splitter, deadline, sample
        self.told: list[str] = []
        self.cancelled = threading.Event()
        self.metrics = Metrics()
        self.metrics.prompt_tokens, self.metrics.cached_tokens = len(ids), 1
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def completion(self) -> Completion:
        return Completion("".join(self.told), [], None, self.metrics)

    def cancel(self) -> None:
        self.cancelled.set()

    def _run(self) -> None:
        text, size = self.script.text, self.script.size
        for n, at in enumerate(range(0, len(text), size)):
            if n == self.script.hold and (reason := self._held()):
                return self.listener(Event([], [], [], reason))
            self._tell(text[at : at + size], None)
        if self.script.hold is not None and self.script.hold * size >= len(text):
            if reason := self._held():
                return self.listener(Event([], [], [], reason))
        self._tell("", self.script.ends)

    def _held(self) -> str | None:
        """Wait; why the request is over, None if it goes on."""
        while not self.script.go.wait(0.002):
            if self.cancelled.is_set():
                return "cancelled"
            if time.monotonic() > self.deadline:
                return "deadline"
        return None

    def _tell(self, piece: str, ends: str | None) -> None:
        self.told.append(piece)
        pieces = [("answer", piece)] if piece else []
        if self.splitter:
            pieces = self.splitter.push(piece, ended=ends is not None)
        self.metrics.token_came()
        logprobs = [] if self.params.logprobs is None else [(-0.5, [(65, -0.5)])]
        error = self.script.error if ends == "error" else None
        self.listener(Event(pieces, [65], logprobs, ends, error))


def sse(lines: Iterable[str]) -> Iterator[dict | str]:
    """The data of server-sent events: objects, and "[DONE]"."""
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
