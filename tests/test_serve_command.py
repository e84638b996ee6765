"""python -m engine.serve as an operator uses it: starts, refuses, drains, ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading

import httpx
import pytest
from processes import end, server

from engine.serve.__main__ import listening, main

LONG = {"prompt": "To be", "ignore_eos": True, "stream": True}


def test_serves_the_built_in_model():
    """The first command of a newcomer fails."""
    with server("--alias", "bard") as (process, address):
        assert httpx.get(f"{address}/health").json() == {"status": "ok"}
        assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == "bard"
        answer = httpx.post(f"{address}/v1/completions", json={"prompt": "To be"}).json()
        assert answer["choices"][0]["text"] and answer["model"] == "bard"
        assert "<!doctype html>" in httpx.get(address).text
        process.send_signal(signal.SIGTERM)
        assert end(process) == "" and process.returncode == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_drains(number, status):
    """Answers cut off because the server is to end, or a server that still takes new requests."""
    with server() as (process, address):
        with httpx.stream("POST", f"{address}/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(number)
            *_, last, done = filter(None, lines)
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert end(process) == "" and process.returncode == status
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health")


def test_a_drain_that_takes_too_long():
    """A server that never ends because a request does not, or whose clients are told nothing."""
    with server("--drain-timeout", "0") as (process, address):
        body = LONG | {"max_tokens": 2000}
        with httpx.stream("POST", f"{address}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            *_, last = filter(None, lines)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert end(process) == "" and process.returncode == 0


def test_many_at_once():
    """Requests from many threads that get each other's answers, or end the process."""
    # Numba's own threads abort the process in this layer when two of ours meet in them
    with server("--max-queued", "64", NUMBA_THREADING_LAYER="workqueue") as (process, address):
        asked = {"max_tokens": 8, "temperature": 0}
        prompts = [f"To be, or not to be {i}" for i in range(8)]

        def ask(prompt: str) -> str:
            body = asked | {"prompt": prompt}
            return httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"][
                0
            ]["text"]

        alone = {prompt: ask(prompt) for prompt in prompts}
        found: dict[str, str] = {}
        threads = [
            threading.Thread(target=lambda p=p: found.__setitem__(p, ask(p))) for p in prompts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == alone and process.poll() is None


def test_a_key_from_the_environment():
    """A key that has to stand in the list of processes."""
    with server(ENGINE_API_KEY="k") as (_, address):
        assert httpx.get(f"{address}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer k"}
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--port", "65536"], "--port is 65536; a whole number at least 0 and at most 65535"),
        (["--port", "x"], "invalid int value: 'x'"),
        (["--max-running", "0"], "--max-running is 0"),
        (["--max-queued", "-1"], "--max-queued is -1"),
        (["--max-body-bytes", "0"], "--max-body-bytes is 0"),
        (["--request-timeout", "0"], "--request-timeout is 0"),
        (["--request-timeout", "nan"], "--request-timeout is nan"),
        (["--drain-timeout", "-1"], "--drain-timeout is -1"),
        (["--cors-origin", "a.org"], "--cors-origin is 'a.org'"),
        (["--cors-origin", "https://a.org/"], "--cors-origin is 'https://a.org/'"),
        (["--cors-origin", "http://["], "--cors-origin is 'http://['"),
        (["--api-key", " "], "the API key is empty"),
        (["--alias", "\udcff"], "--alias is '\\udcff'"),
        (["--alias", "a\nb"], "--alias is 'a\\nb'"),
        (["--port", "0", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--port", "0", "--context", "0"], "context is 0"),
    ],
    ids=str,
)
def test_bad_arguments(args, said, capsys):
    """A traceback, or a server that starts with something else than was asked for."""
    try:
        status = main(args)
    except SystemExit as e:  # argparse's own
        status = e.code
    err = capsys.readouterr().err
    assert status == 2 and said in err
    assert err.startswith("error: ") and err.count("\n") == 1


def test_an_address_that_cannot_be_had(capsys):
    """A model loaded for a minute, only to find the port taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--port", port, "--model", "/nowhere"]) == 1
    assert f"cannot listen at 127.0.0.1 port {port}: " in capsys.readouterr().err
    assert main(["--host", "256.0.0.1", "--port", "0"]) == 1
    assert "cannot listen at 256.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_small_writes_go_out_at_once(host):
    """Each chunk of a stream waits for the client's system to acknowledge the one before: 40 ms."""

    async def no_delay() -> int:
        found = asyncio.get_running_loop().create_future()

        async def connected(reader, writer):
            sock = writer.get_extra_info("socket")
            found.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listening(host, 0) as sock:
            async with await asyncio.start_server(connected, sock=sock):
                _, writer = await asyncio.open_connection(*sock.getsockname()[:2])
                try:
                    return await found
                finally:
                    writer.close()

    assert asyncio.run(no_delay())
