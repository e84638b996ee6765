"""python -m engine.batch: a file of requests answered together, and gone on with after an end."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pexpect
import pytest
from serving import chat_model

import engine.batch
from engine.batch import AHEAD, MOST_SAMPLES, main
from engine.batch_files import Results, checked_ids, digest
from engine.decoding import Decoding
from engine.llm import LLM
from engine.sampler import SamplingParams

URL = "/v1/completions"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def row(custom_id: str, url: str = URL, **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def text_row(i: int, **more) -> dict:
    prompt = "To be, or not to be, that is the question"[: 4 + 5 * (i % 8)]
    body = {"prompt": prompt, "max_tokens": 5 + i % 20, "temperature": 0.8, "seed": i}
    return row(f"row-{i}", **body | more)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def read(path: Path) -> list[dict]:
    raw = path.read_bytes()
    assert raw == b"" or raw.endswith(b"\n")
    return [json.loads(line) for line in raw.splitlines()]


def by_id(path: Path) -> dict[str, dict]:
    """custom_id -> response; each is there once."""
    results = read(path)
    found = {result["custom_id"]: result["response"] for result in results}
    assert len(found) == len(results)
    assert all(result["error"] is None for result in results)
    return found


def texts(path: Path) -> dict[str, list[str]]:
    """custom_id -> the texts of its choices; all are answered."""
    found = by_id(path)
    assert {response["status_code"] for response in found.values()} <= {200}
    return {i: [c["text"] for c in response["body"]["choices"]] for i, response in found.items()}


def alone(llm: LLM, rows: list[dict]) -> dict[str, list[str]]:
    """What each row gives by itself."""
    found = {}
    for one in rows:
        body = dict(one["body"])
        done = llm.generate(body.pop("prompt"), SamplingParams(**body))
        found[one["custom_id"]] = [c.text for c in (done if isinstance(done, list) else [done])]
    return found


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "engine.batch", "--threads", "1", *map(str, args)]


def run(*args: object, **more) -> subprocess.CompletedProcess:
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=120, **more)


def begun(*args: object) -> subprocess.Popen:
    return subprocess.Popen(command(*args), stderr=subprocess.PIPE, text=True)


def wait_for_size(process: subprocess.Popen, path: Path, size: int) -> None:
    """Until a file has grown to `size`, or the process has ended."""
    deadline = time.monotonic() + 120
    while process.poll() is None and (path.stat().st_size if path.exists() else 0) < size:
        assert time.monotonic() < deadline, "nothing is written"
        time.sleep(0.002)


# ---------------------------------------------------------------- answers


def test_each_row_is_answered_as_alone_in_any_order(tmp_path, llm, capsys):
    """Answers that depend on the rows beside them, or come under another row's custom_id."""
    rows = [text_row(i) for i in range(60)] + [text_row(60, n=3), text_row(61, stop=[" "])]
    expected = alone(llm, rows)
    for seed in (0, 1):
        random.Random(seed).shuffle(rows)
        out = tmp_path / f"out{seed}.jsonl"
        assert main([str(write(tmp_path / "in.jsonl", rows)), str(out)]) == 0
        assert texts(out) == expected
    told = "62 rows: 62 answered, 0 refused\n"
    assert capsys.readouterr() == ("", told * 2)  # no bar where there is no terminal


def test_a_result_is_in_openais_form(tmp_path, llm):
    """Results that programs written for OpenAI's cannot read; wrong counts of tokens."""
    body = {"prompt": "To be", "max_tokens": 3, "temperature": 0, "logprobs": 2, "model": "any"}
    rows = [row("a", **body), row("b", **body | {"n": 2})]
    out = tmp_path / "out.jsonl"
    assert main([str(write(tmp_path / "in.jsonl", rows)), str(out)]) == 0
    (a, b) = sorted(read(out), key=lambda result: result["custom_id"])
    assert a.keys() == {"id", "custom_id", "response", "error"}
    assert a["id"].startswith("batch_req_") and a["id"] != b["id"]
    response = a["response"]
    assert response.keys() == {"status_code", "request_id", "body"}
    assert (
        response["body"]["object"] == "text_completion" and response["body"]["model"] == "built-in"
    )
    done = llm.generate("To be", SamplingParams(max_tokens=3, temperature=0, logprobs=2))
    n_prompt = len(llm.tokenizer.encode("To be"))
    usage = response["body"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (n_prompt, 3)
    logprobs = response["body"]["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [own for own, _ in done.logprobs]
    assert b["response"]["body"]["usage"]["completion_tokens"] == 6
    assert [c["index"] for c in b["response"]["body"]["choices"]] == [0, 1]


def test_chats(tmp_path):
    """Chat rows answered as if they were texts, or with thoughts in the answer."""
    path = chat_model(tmp_path / "tiny")
    llm = LLM(path)
    asked = [[{"role": "user", "content": f"Who is {name}?"}] for name in ("Romeo", "Hamlet")]
    body = {"max_tokens": 12, "temperature": 0}
    rows = [
        row(str(i), "/v1/chat/completions", messages=messages, **body)
        for i, messages in enumerate(asked)
    ]
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    rows.append(row("2", "/v1/chat/completions", messages=asked[0], **body, **thinking))
    out = tmp_path / "out.jsonl"
    assert main([str(write(tmp_path / "in.jsonl", rows)), str(out), "--model", str(path)]) == 0
    found = by_id(out)
    for i, messages in enumerate(asked):
        message = found[str(i)]["body"]["choices"][0]["message"]
        done = llm.chat(messages, SamplingParams(max_tokens=12, temperature=0))
        assert (message["role"], message["content"]) == ("assistant", done.text)
        assert found[str(i)]["body"]["object"] == "chat.completion"
    message = found["2"]["body"]["choices"][0]["message"]
    assert message["content"] == "" and message["reasoning_content"]


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"url": "/v1/embeddings"}, "url"),
        ({"url": ["/v1/completions"]}, "url"),
        ({"url": None}, "url"),
        ({"method": "GET"}, "method"),
        ({"body": None}, "body"),
        ({"body": "To be"}, "body"),
        ({"body": {}}, "prompt"),
        ({"body": {"prompt": "a", "stream": True}}, "stream"),
        ({"body": {"prompt": "a", "temperature": -1}}, "temperature"),
        ({"body": {"prompt": "a", "n": 10**30}}, "n"),
        ({"body": {"prompt": [[1]] * (MOST_SAMPLES + 1)}}, "n"),
        ({"body": {"prompt": "a" * 100_000}}, "prompt"),
        ({"body": {"prompt": [-1]}}, "prompt"),
        ({"body": {"prompt": "a", "model": 3}}, "model"),
        ({"url": "/v1/chat/completions", "body": {"messages": []}}, None),  # it has no template
    ],
)
def test_a_bad_row_is_refused_and_the_run_goes_on(tmp_path, bad, param, capsys):
    """One bad row of a million that ends the run, or has no answer."""
    rows = [text_row(0), text_row(1) | bad, text_row(2)]
    out = tmp_path / "out.jsonl"
    assert main([str(write(tmp_path / "in.jsonl", rows)), str(out)]) == 0
    found = by_id(out)
    assert [found[f"row-{i}"]["status_code"] for i in range(3)] == [200, 400, 200]
    error = found["row-1"]["body"]["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert error["param"] == param
    assert capsys.readouterr().err == "3 rows: 2 answered, 1 refused\n"


def test_a_row_that_the_engine_fails_on(tmp_path, monkeypatch, capsys):
    """A failure inside that ends the run, hangs it, or passes for success."""
    take = Decoding.take

    def failing(self, logits):
        if self.params.seed == 1 and len(self.token_ids) == 2:
            raise ValueError("the logits are not finite")
        return take(self, logits)

    monkeypatch.setattr(Decoding, "take", failing)
    rows, out = [text_row(0), text_row(1, n=2), text_row(2)], tmp_path / "out.jsonl"
    args = [str(write(tmp_path / "in.jsonl", rows)), str(out)]
    for earlier in ("", "; 3 of them in an earlier run"):  # which still says that one failed
        assert main(args) == 1
        assert capsys.readouterr().err == f"3 rows: 2 answered, 0 refused, 1 failed{earlier}\n"
    assert [by_id(out)[f"row-{i}"]["status_code"] for i in range(3)] == [200, 500, 200]
    assert "not finite" in by_id(out)["row-1"]["body"]["error"]["message"]


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"custom_id": "a"}\n\n{"custom_id": "a"}\n', "line 3 has the custom_id of line 1;"),
        (b'{"custom_id": "a"}\n{"custom_id": "b"\n', "line 2 is not valid JSON"),
        (b'{"custom_id": "a"}\n[1]\n', "line 2 is [1]; a JSON object is needed"),
        (b'{"method": "POST"}\n', "line 1: custom_id is missing"),
        (b'{"custom_id": 7}\n', "line 1: custom_id is 7; a text is needed"),
        (b'{"custom_id": "\\ud800"}\n', "line 1 is not valid Unicode"),
        (b'{"custom_id": "a", "x": NaN}\n', "line 1 is not valid JSON: NaN"),
        (b"[" * 100_000 + b"\n", "line 1 is nested too deeply"),
        (b'{"custom_id": "\xff"}\n', "line 1 is not UTF-8"),
        (b" " * (17 << 20), "line 1 is longer than"),
    ],
)
def test_a_file_with_rows_that_cannot_be_named_is_refused(tmp_path, raw, said, capsys):
    """Rows that are answered under one name, or under none; work done before it is said."""
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(raw)
    assert main([str(path), str(out)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {path}: {said}") and told.count("\n") == 1
    assert not out.exists()


def test_blank_lines_and_an_empty_file(tmp_path, capsys):
    """A file that another program ended with a blank line, or that has no rows, is no error."""
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(text_row(0)).encode() + b"\r\n\r\n \n")
    assert main([str(path), str(out)]) == 0
    assert list(by_id(out)) == ["row-0"]
    path.write_bytes(b"")
    assert main([str(path), str(tmp_path / "none.jsonl")]) == 0
    assert capsys.readouterr().err.endswith("0 rows: 0 answered, 0 refused\n")


def test_places_where_nothing_can_be_written(tmp_path, capsys):
    """A traceback, or an input that is overwritten."""
    path = write(tmp_path / "in.jsonl", [text_row(0)])
    (tmp_path / "link.jsonl").symlink_to(path)
    before = path.read_bytes()
    for out, status in (
        (path, 2),
        (tmp_path / "link.jsonl", 2),
        (tmp_path, 2),
        (tmp_path / "no" / "out.jsonl", 2),
        ("/dev/full", 2),
    ):
        assert main([str(path), str(out)]) == status
        told = capsys.readouterr().err
        assert told.startswith("error: ") and told.count("\n") == 1, told
    assert main([str(tmp_path / "none.jsonl"), str(tmp_path / "out.jsonl")]) == 2
    assert path.read_bytes() == before and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("raw", [b"notes", b"notes\n", b'{"id": "x"}', b'{"custom_id": "a"}\n'])
def test_another_file_is_not_written_to(tmp_path, raw, capsys):
    """Somebody's file, taken for a torn result and cut off."""
    out = tmp_path / "out.jsonl"
    out.write_bytes(raw)
    assert main([str(write(tmp_path / "in.jsonl", [text_row(0)])), str(out)]) == 2
    assert f"{out}: " in capsys.readouterr().err
    assert out.read_bytes() == raw


def test_a_second_process_is_refused(tmp_path, capsys):
    """Two processes that write one file: rows twice, lines within lines."""
    path, out = write(tmp_path / "in.jsonl", [text_row(0)]), tmp_path / "out.jsonl"
    with Results(out, checked_ids(path)):
        assert main([str(path), str(out)]) == 1
        assert capsys.readouterr().err == f"error: {out}: another process is writing to it\n"
    assert main([str(path), str(out)]) == 0


def test_an_input_that_changes_meanwhile(tmp_path, monkeypatch, capsys):
    """Rows that are skipped because those of another file were done."""
    path, out = write(tmp_path / "in.jsonl", [text_row(0), text_row(1)]), tmp_path / "out.jsonl"
    assert main([str(path), str(out)]) == 0
    write(path, [text_row(i) for i in range(3)])
    real = engine.batch.open_model

    def changing(args):
        write(path, [text_row(i) for i in (7, 8, 9)])
        return real(args)

    monkeypatch.setattr(engine.batch, "open_model", changing)
    assert main([str(path), str(out)]) == 2
    assert "has changed" in capsys.readouterr().err


def test_a_model_without_a_chance(tmp_path, capsys):
    """A model that cannot be opened is a traceback for each row."""
    path = write(tmp_path / "in.jsonl", [text_row(0)])
    args = [str(path), str(tmp_path / "out.jsonl")]
    assert main([*args, "--model", str(tmp_path / "none")]) == 2
    assert main([*args, "--max-running", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


# ---------------------------------------------------------------- bounds


def test_rows_are_begun_a_few_ahead(tmp_path, monkeypatch):
    """A file of a million rows that is begun as a whole; a place that stays empty."""
    begun, most, real = 0, 0, engine.batch.rows_left
    results: list[Results] = []

    def counted(path, ids, is_done):
        nonlocal begun, most
        for one in real(path, ids, is_done):
            most = max(most, begun - results[0].n_done)
            begun += 1
            yield one

    class Noted(Results):
        def __init__(self, *args):
            super().__init__(*args)
            results.append(self)

    monkeypatch.setattr(engine.batch, "rows_left", counted)
    monkeypatch.setattr(engine.batch, "Results", Noted)
    rows = [text_row(i, max_tokens=2) for i in range(200)]
    args = [str(write(tmp_path / "in.jsonl", rows)), str(tmp_path / "out.jsonl")]
    assert main([*args, "--max-running", "4"]) == 0
    assert begun == 200
    assert 4 < most <= 4 + AHEAD


def test_memory_of_a_long_file(tmp_path):
    """Bodies, or custom_ids of any length, that are kept in memory while a file is looked at."""
    rows = [row(f"{'long' * 50}-{i}", prompt="x" * 1000) for i in range(5000)]
    path = write(tmp_path / "in.jsonl", rows)
    tracemalloc.start()
    try:
        ids = checked_ids(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(ids) == 5000 and ids[7] == digest(rows[7]["custom_id"])
    assert peak < 5000 * 200 + (1 << 18)  # bytes; the file is 6 MB long


# ---------------------------------------------------------------- ends, and going on


def test_torn_lines_are_cut_and_run_again(tmp_path):
    """A result lost, or there twice, after a process was killed within its last line."""
    rows = [text_row(i, max_tokens=2) for i in range(3)]
    path, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    ids = checked_ids(path)
    assert main([str(path), str(out)]) == 0
    whole = out.read_bytes()
    expected, second = texts(out), whole.index(b"\n", whole.index(b"\n") + 1) + 1
    for size in range(second, len(whole)):
        out.write_bytes(whole[:size])
        with Results(out, ids) as results:
            assert results.n_done == 2
        assert out.read_bytes() == whole[:second]
    out.write_bytes(whole[:-1])
    assert main([str(path), str(out)]) == 0
    assert texts(out) == expected


def test_killed_at_any_moment_no_row_is_lost_or_there_twice(tmp_path, llm):
    """Rows lost, repeated or changed where a run was killed and gone on with."""
    rows, rng = [text_row(i, max_tokens=40) for i in range(60)], random.Random(0)
    path, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    n_killed = 0
    while True:
        process = begun("--max-running", 3, path, out)
        held = out.stat().st_size if out.exists() else 0
        wait_for_size(process, out, held + rng.randrange(1, 8000))
        process.kill()
        told = process.communicate(timeout=60)[1]
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, told
        n_killed += 1
        if n_killed % 2:  # killed within a write
            os.truncate(out, out.stat().st_size - rng.randrange(1, 200))
    assert n_killed >= 3
    assert texts(out) == alone(llm, rows)


def test_ctrl_c_keeps_what_is_done(tmp_path, llm):
    """Ctrl-C with a traceback, a torn line, or results that are thrown away."""
    rows = [text_row(i, max_tokens=60, ignore_eos=True) for i in range(80)]
    path, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    process = begun("--max-running", 2, path, out)
    wait_for_size(process, out, 1)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    n = len(by_id(out))
    assert 0 < n < 80
    assert told == f"{n} of 80 rows done; run again to go on\n"
    done = run(path, out)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"80 rows: 80 answered, 0 refused; {n} of them in an earlier run\n"
    assert texts(out) == alone(llm, rows)


def test_a_full_disk(tmp_path):
    """A full disk that is a traceback, a hang, or a file that cannot be gone on with."""
    rows = [text_row(i, max_tokens=2) for i in range(20)]
    path, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))

    done = run(path, out, preexec_fn=full)
    assert done.returncode == 1
    assert done.stderr == f"error: {out}: cannot be written: File too large\n"
    assert out.stat().st_size == 1500
    assert run(path, out).returncode == 0
    assert len(texts(out)) == 20


def test_a_terminal_shows_how_far_it_is(tmp_path):
    """No sign of life for hours; a bar that forgets what was done before."""
    rows = [text_row(i, max_tokens=2) for i in range(5)]
    path, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert run(write(tmp_path / "some.jsonl", rows[:2]), out).returncode == 0
    name, *args = command(path, out)
    shown = pexpect.run(" ".join([name, *args]), timeout=60, encoding="utf-8")
    assert re.search(r"2/5 .*5/5 ", shown, re.DOTALL)
    assert shown.endswith("5 rows: 5 answered, 0 refused; 2 of them in an earlier run\r\n")


def test_rows_done_are_counted_once(tmp_path):
    """Rows of other files in OUT, or one that is there twice, that count as this one's."""
    path, out = write(tmp_path / "in.jsonl", [text_row(0), text_row(1)]), tmp_path / "out.jsonl"
    with Results(out, np.array([], "S32")) as results:
        for custom_id, status in (("row-0", 200), ("row-0", 200), ("row-0", 500), ("other", 200)):
            results.append(custom_id, status, {})
    with Results(out, checked_ids(path)) as results:
        assert results.n_done == 1 and results.is_done.tolist() == [True, False]
