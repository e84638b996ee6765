"""The server under load: good requests, bad ones, and clients that go away, all at once."""

from __future__ import annotations

import gc
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from load import CHAT, PATIENCE, TEXT, WORDS, Client, Load, good_requests
from processes import Footprint, end, figures, server
from serving import chat_model, served, until

from engine.cache import PagedKvCache
from engine.decoding import Decoding
from engine.llm import LLM
from engine.sampler import SamplingParams
from engine.serve.job import Job
from engine.serve.protocol import Call
from engine.serve.replies import Reply
from engine.serve.scheduler import Request
from engine.serve.server import Limits
from engine.serve.service import Service, Ticket
from engine.session import Session

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs /proc to look at a process"
)

N_REQUESTS, N_CLIENTS = 200, 32
SETTINGS = {  # so few blocks that those who run take them from each other
    "--kv-max-blocks": "64",
    "--max-body-bytes": "20000",
    "--max-queued": "1000",
}
WORKERS = min(32, (os.cpu_count() or 1) + 4)  # threads of asyncio's own pool, which stay

ENDED = 'engine:requests_total{reason="'
# kB in two thirds of 10 minutes: 150 bytes for each of some 27,000 requests. 1 to 2 MB of it is
# what malloc keeps free: bytes in use, and Python's blocks, stay the same.
LEAK = 4000
WARMING = 16000  # kB, while free lists and the allocator's pools fill yet

KILLED = """\
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1])
connection.request("POST", "/v1/completions", sys.argv[2])
response = connection.getresponse()
print(response.readline(), flush=True)
while sys.argv[3] == "reads" and response.readline() or sys.stdin.read():
    pass
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return chat_model(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="module")
def running(path):
    """A server that has done everything once: (process, what it has at rest, load for it)."""
    settings = [part for pair in SETTINGS.items() for part in pair]
    with server("--model", str(path), *settings) as (process, address):
        n_files = Footprint.of(process.pid).fds
        load = Load.alone(address, good_requests(32))
        yield process, replace(Footprint.of(process.pid), fds=n_files), load
        process.send_signal(signal.SIGTERM)
        assert end(process) == "" and process.returncode == 0


def n_left(told: dict[str, float]) -> float:
    """Requests that run or wait."""
    return told["llamacpp:requests_processing"] + told["llamacpp:requests_deferred"]


def n_ended(told: dict[str, float], reason: str = "") -> float:
    return sum(n for name, n in told.items() if name.startswith(ENDED + reason))


def settle(process: subprocess.Popen, address: str, first: Footprint) -> None:
    """Wait until a server has no requests, and no more blocks and connections than at rest."""

    def at_rest() -> bool:
        told = figures(address)
        used, cached = told["engine:kv_blocks_used"], told["engine:kv_blocks_cached"]
        return n_left(told) == 0 and used == cached

    until(at_rest, PATIENCE)
    until(lambda: Footprint.of(process.pid).fds <= first.fds, PATIENCE)


def threads_end(process: subprocess.Popen, address: str, first: Footprint) -> None:
    """Wait until those are gone that only a crowd needs: they may idle for some seconds."""

    def few_threads() -> bool:
        with Client(address) as client:  # it is when there is work that they look at the time
            client.ask("/tokenize", {"content": "To be"})
        return Footprint.of(process.pid).threads <= first.threads + WORKERS

    until(few_threads, PATIENCE, every=0.25)


def test_every_good_request_is_answered_right(running):
    """Answers mixed up, requests lost, or blocks, threads and connections left behind by clients
    that went."""
    process, first, load = running
    before = figures(load.address)
    counts = load.run(N_CLIENTS, lambda i: i < N_REQUESTS)
    assert counts.total() == N_REQUESTS and min(counts.values()) > 5, counts
    settle(process, load.address, first)
    threads_end(process, load.address, first)
    after = figures(load.address)
    assert after["engine:preemptions_total"] > before["engine:preemptions_total"]
    assert after["engine:prefix_hit_tokens_total"] > before["engine:prefix_hit_tokens_total"]
    assert n_ended(after, "cancelled") > 0 and n_ended(after, "error") == 0
    with Client(load.address) as client:
        load.check(client, 0, stream=False)


def test_clients_that_are_killed(running):
    """Requests that run on for processes that are no more, or stop all others: nobody has closed
    their connections but the system, and some had stopped to read."""
    process, first, load = running
    n, samples = 6, 4  # more than run at once
    body = {"prompt": "To be", "n": samples, "max_tokens": 900, "ignore_eos": True, "stream": True}
    command = [sys.executable, "-c", KILLED, urlsplit(load.address).netloc, json.dumps(body)]
    before = figures(load.address)

    def taken() -> bool:
        told = figures(load.address)
        return n_left(told) + n_ended(told) - n_ended(before) == n * samples

    clients = [
        subprocess.Popen([*command, way], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for way in ("reads", "stops") * (n // 2)
    ]
    until(taken, PATIENCE)
    assert select.select([client.stdout for client in clients], [], [], PATIENCE)[0]
    for client in clients:
        client.kill()
        client.communicate()
    settle(process, load.address, first)
    until(taken, PATIENCE)
    after = figures(load.address)
    assert n_ended(after, "cancelled") - n_ended(before, "cancelled") > 0
    with Client(load.address) as client:
        load.check(client, 1, stream=True)


@pytest.fixture(scope="module")
def long(running) -> Load:
    """Requests that take their time."""
    asked = []
    for i in range(4):
        text, body = " ".join(WORDS[: i + 2]), {"max_tokens": 200, "seed": i, "ignore_eos": True}
        asked.append((TEXT, body | {"prompt": text}))
        asked.append((CHAT, body | {"messages": [{"role": "user", "content": text}]}))
    return Load.alone(running[2].address, asked)


@pytest.mark.parametrize("drain", [PATIENCE, 0])
def test_sigterm_under_load(path, long, drain):
    """Answers cut off though there was time for them, new ones begun, a server that does not end
    or leaves a process behind."""
    options = "--max-running", "3", "--drain-timeout", str(drain)
    with server("--model", str(path), *options) as (process, address):
        load, n = replace(long, address=address), len(long.asked)

        def ask(which: int) -> str | None:
            with Client(address) as client:
                error = load.error(client, which, stream=which % 4 < 2)
            return error and error["code"]

        def taken() -> bool:
            told = figures(address)
            return n_left(told) + n_ended(told) == n and n_left(told) > 0

        with ThreadPoolExecutor(n) as clients:
            asked = [clients.submit(ask, which) for which in range(n)]
            until(taken, PATIENCE)
            process.send_signal(signal.SIGTERM)
            refused = new_is_refused(address)
            in_time = not all(one.done() for one in asked)
            errors = [one.result() for one in asked]
        assert refused
        if drain:
            assert in_time and errors == [None] * n
        else:
            assert set(errors) <= {None, "shutting_down"} and errors != [None] * n
        assert end(process) == "" and process.returncode == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


def new_is_refused(address: str) -> bool:
    """Whether new requests are refused soon, and then for good."""
    deadline, n_refused = time.monotonic() + PATIENCE, 0
    while n_refused < 5 and time.monotonic() < deadline:
        try:
            with Client(address) as client:
                status, _ = client.ask(TEXT, {"prompt": "To be", "max_tokens": 1})
        except (OSError, http.client.HTTPException):
            status = 503
        assert status == 503 or (status == 200 and n_refused == 0)
        n_refused += status == 503
    return n_refused == 5


def test_memory_is_steady(running, minutes, capsys):
    """Something that each request leaves behind, until the machine has no more."""
    process, first, load = running
    began = time.monotonic()
    stop, samples = began + 60 * minutes, []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(min(1, minutes)):
            samples.append((time.monotonic() - began, Footprint.of(process.pid).rss))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        counts = load.run(N_CLIENTS, lambda i: time.monotonic() < stop)
    finally:
        over.set()
        watcher.join()
    took = time.monotonic() - began
    settle(process, load.address, first)
    if minutes >= 1:
        threads_end(process, load.address, first)
    last = Footprint.of(process.pid)
    at, rss = np.array([sample for sample in samples if sample[0] > 20 * minutes]).T
    slope = np.polyfit(at, rss, 1)[0]  # kB a second, over the last two thirds
    grown = slope * (at[-1] - at[0])
    along = " ".join(f"{part.mean() / 1e3:.1f}" for part in np.array_split(rss, 8))
    with capsys.disabled():
        print(
            f"\n{counts.total()} requests in {took:.0f} s, {counts.total() / took:.1f} a second: "
            f"{dict(counts)}\nmemory in eighths of the last two thirds, MB: {along}; "
            f"{slope * 60:+.0f} kB a minute\nat first {first}, at last {last}"
        )
    assert grown < (LEAK if minutes > 4 else WARMING), f"{grown:.0f} kB more, and still growing"


def test_nothing_of_a_request_is_kept(path):
    """An object of each request that something holds for ever: too small to be seen in the memory
    of some minutes."""
    kinds = Request, Ticket, Job, Reply, Call, Session, Decoding, PagedKvCache, SamplingParams

    def n_alive() -> Counter[str]:
        gc.collect()
        return Counter(type(o).__name__ for o in gc.get_objects() if isinstance(o, kinds))

    llm = LLM(path, kv_cache="paged", kv_max_blocks=64, threads=1)
    service, limits = Service(llm, max_queued=1000), Limits(body_bytes=20_000)
    before = n_alive()
    with served(llm, service, limits=limits) as address:
        load = Load.alone(address, good_requests(10))
        counts = load.run(N_CLIENTS, lambda i: i < 60)
        assert min(counts["whole"], counts["stream"]) > 8
        until(lambda: n_alive() <= before, PATIENCE, every=0.1)
    service.close()
