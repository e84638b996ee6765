"""The command line as a person uses it: streams, report, statuses, interrupts."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from checkpoints import write_checkpoint

from engine.llm import BUILT_IN
from engine.run import main

REPORT = """\
backend: {backend}
kv cache: basic

metrics:
  time_to_first_token_ms: \\d+\\.\\d{{3}}
  decode_tokens_per_second: {rate}
  per_forward_ms: min \\d+\\.\\d{{3}}  max \\d+\\.\\d{{3}}  mean \\d+\\.\\d{{3}}  \\(n={n}\\)
"""


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "engine.run", *args]


def run(*args: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*args), capture_output=True, text=True, timeout=120, encoding="utf-8", **kwargs
    )


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compilation is announced on stderr, where these tests expect the report alone."""
    assert run("To be", "--max-tokens", "1").returncode == 0


@pytest.mark.parametrize("backend", ["simd", "numpy"])
def test_text_on_stdout_and_report_on_stderr(backend):
    """A report mixed into the text spoils every pipe."""
    done = run(
        "To be, or not to be", "--max-tokens", "5", "--temperature", "0", "--backend", backend
    )
    assert done.returncode == 0
    assert done.stdout == " done, and not a\n"
    rate = r"\d+\.\d{3}"
    assert re.fullmatch(REPORT.format(backend=backend, rate=rate, n=5), done.stderr)


@pytest.mark.parametrize(("n", "rate"), [(1, "n/a"), (2, r"\d+\.\d{3}")])
def test_report_of_short_runs(n, rate):
    """One token has no decode speed; dividing by its time gives infinity or a crash."""
    done = run("To be", "--max-tokens", str(n), "--ignore-eos")
    assert re.fullmatch(REPORT.format(backend="simd", rate=rate, n=n), done.stderr)


def test_json_is_one_object():
    """A progress bar or a text piece beside the object breaks whoever parses it."""
    done = run("To be", "--json", "--max-tokens", "4", "--seed", "7", "--top-k", "3")
    result = json.loads(done.stdout)
    assert set(result) == {"text", "token_ids", "finish_reason", "metrics", "settings"}
    assert len(result["token_ids"]) == 4 and result["finish_reason"] == "length"
    assert len(result["metrics"]["per_forward_ms"]) == 4
    assert result["settings"]["seed"] == 7 and result["settings"]["top_k"] == 3
    assert result["settings"]["weights"] and result["settings"]["threads"] >= 1
    assert done.stderr == ""


def test_no_tokens_wanted(capsys):
    """max_tokens=0 has no times to print."""
    assert main(["To be", "--max-tokens", "0"]) == 0
    assert "per_forward_ms: n/a  (n=0)" in capsys.readouterr().err


def test_prompt_from_a_file_and_from_stdin(tmp_path):
    """A prompt of several lines does not fit on a command line, and stays as it is to the byte."""
    text = "KING RICHARD.\nA horse! é\n"
    (tmp_path / "p.txt").write_bytes(text.encode())
    flags = "--temperature", "0", "--max-tokens", "9"
    by_file = run("--prompt-file", str(tmp_path / "p.txt"), *flags)
    by_stdin = run("--prompt-file", "-", *flags, input=text)
    by_argument = run(text, *flags)
    assert by_file.stdout == by_stdin.stdout == by_argument.stdout != ""


BAD = [
    ([], "PROMPT"),
    (["a", "--prompt-file", "b"], "PROMPT"),
    ([""], "empty"),
    (["--prompt-file", "/no/such/file"], "/no/such/file"),
    (["a", "--model", "./no-such-directory"], "no-such-directory"),
    (["a", "--temperature", "nan"], "temperature is nan"),
    (["a", "--temperature", "-1"], "temperature is -1.0"),
    (["a", "--temperature", "inf"], "temperature is inf"),
    (["a", "--top-p", "0"], "top_p is 0.0"),
    (["a", "--top-p", "1.5"], "top_p is 1.5"),
    (["a", "--top-k", "-2"], "top_k is -2"),
    (["a", "--min-p", "2"], "min_p is 2.0"),
    (["a", "--max-tokens", "-1"], "max_tokens is -1"),
    (["a", "--seed", "-5"], "seed is -5"),
    (["a", "--threads", "0"], "threads is 0"),
    (["a", "--context", "0"], "context is 0"),
    (["a b c d", "--context", "2"], "context"),
    (["a", "--logprobs", "2"], "--logprobs is for --json"),
    (["a", "--hide-thinking"], "--hide-thinking is for --chat"),
    (["--prompt-file", ""], "the name of a file to read is empty"),
    (["a", "--json-schema", ""], "the name of a file to read is empty"),
    (["a", "--stop", "\udcff"], "stop is '\\udcff', which has a lone surrogate"),
    (["a", "--temperature", "9" * 300], "temperature is "),
    (
        ["a", "--max-tokens", "1" + "0" * 4000],
        "max_tokens is a number of 13288 bits; a whole number at least 0 and at most 2**4096",
    ),
]


@pytest.mark.parametrize(("args", "told"), BAD)
def test_bad_input_is_one_line_and_status_2(args, told, capsys):
    """A traceback tells a user nothing."""
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and told in err


@pytest.mark.parametrize("args", [["a", "--top-k", "x"], ["a", "--weights", "q1"], ["a", "--no"]])
def test_unknown_flags_are_status_2(args, capsys):
    """argparse's own errors have the same status as ours, and are one line as well."""
    with pytest.raises(SystemExit) as e:
        main(args)
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["a", "-n", "5"], "-n 5 (-n is --max-tokens here)"),
        (["a", "--n_predict", "5"], "--n_predict 5 (--n_predict is --max-tokens here)"),
        (["-p", "a"], "-p (-p is PROMPT here)"),
        (["a", "--max_tokens=5"], "--max_tokens=5 (is --max-tokens meant?)"),
        (["a", "--tempe", "5"], "--tempe 5 (is --temperature meant?)"),
        (["a", "--max-num-seqs", "5"], "--max-num-seqs 5 (a prompt"),  # not --max-tokens
        (["a", "--n", "5"], "--n 5 (a prompt that begins with a dash goes behind --)"),
        (["a", "--served-model-name", "b"], "--served-model-name b (a prompt"),  # the server's
        (["-Hello"], "-Hello (a prompt that begins with a dash goes behind --)"),
        (["a", "b"], "b; --help"),
    ],
)
def test_an_option_of_another_engine(args, told, capsys):
    """Somebody who comes from there searches all of --help for a name."""
    with pytest.raises(SystemExit, match="^2$"):
        main(args)
    assert capsys.readouterr().err.startswith(f"error: unrecognized arguments: {told}")


@pytest.mark.parametrize("flags", [["--prompt-file"], ["a", "--json-schema"]])
def test_a_file_that_never_ends(flags, capsys):
    """A device, or a file of many gigabytes, read until memory runs out."""
    if not os.path.exists("/dev/zero"):
        pytest.skip("this system has no /dev/zero")
    assert main([*flags, "/dev/zero"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: /dev/zero: is longer than 16,777,216 bytes")


@pytest.mark.parametrize(
    ("args", "hinted"), [(["-To"], True), (["a", "--top-k", "x"], False)], ids=str
)
def test_a_hint_where_it_helps(args, hinted, capsys):
    """A hint about prompts that begin with a dash, beside every wrong number."""
    with pytest.raises(SystemExit):
        main(args)
    assert ("goes behind --" in capsys.readouterr().err) == hinted


def test_output_that_cannot_be_written():
    """A full disk is no traceback, and not a success."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("To be"), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert "No space left" in done.stderr and "Traceback" not in done.stderr


def test_a_fresh_seed_is_told():
    """A text that cannot be had again, because nobody knows its seed."""
    flags = ["To be", "--json", "--max-tokens", "8"]
    first = json.loads(run(*flags).stdout)
    again = json.loads(run(*flags, "--seed", str(first["settings"]["seed"])).stdout)
    assert first["token_ids"] == again["token_ids"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
@pytest.mark.parametrize("after", [0.15, 0.3, 0.5, 0.7])
def test_interrupt_while_starting(after):
    """Ctrl-C while libraries are imported or weights are loaded prints no traceback."""
    child = subprocess.Popen(
        command("To be", "--ignore-eos", "--max-tokens", "2000", "--kv-cache", "concat"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(after)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode in (130, -signal.SIGINT)
    # A traceback of Python's own start, before a line of ours has run, is not ours to prevent.
    assert "Traceback" not in err or "engine" not in err, err


def test_prompt_that_is_not_utf8(tmp_path):
    """Bytes that are no text must not be replaced silently."""
    (tmp_path / "p").write_bytes(b"abc\xff")
    done = run("--prompt-file", str(tmp_path / "p"))
    assert done.returncode == 2 and "UTF-8" in done.stderr and done.stderr.count("\n") == 1
    done = subprocess.run([*command(), b"abc\xff"], capture_output=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1


def test_checkpoint_without_tokenizer(tmp_path, capsys):
    """Text needs a tokenizer, and the message says that it is what is missing."""
    assert main(["a", "--model", str(write_checkpoint(tmp_path))]) == 2
    assert "tokenizer" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
@pytest.mark.parametrize("json_too", [False, True])
def test_interrupt_keeps_the_text_and_prints_the_report(json_too):
    """Ctrl-C that loses what was made, or hangs in a barrier, makes a person wait in vain."""
    flags = ["--max-tokens", "2000", "--ignore-eos", *(["--json"] if json_too else [])]
    flags += ["--backend", "numpy"] if json_too else ["--kv-cache", "concat"]  # which take longer
    child = subprocess.Popen(
        command("To be", *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    first = "" if json_too else child.stdout.read(1)
    time.sleep(5 if json_too else 0.2)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=20)
    if child.returncode == 0:
        pytest.fail("the run was over before the interrupt came")
    assert child.returncode == 130
    assert "Traceback" not in err
    if json_too:
        result = json.loads(out)
        assert result["text"] and result["finish_reason"] is None
    else:
        assert len(first + out) > 1 and "metrics:" in err


@pytest.mark.skipif(os.name == "nt", reason="needs a pipe as POSIX has it")
def test_a_closed_pipe_ends_quietly():
    """`| head` must not print a traceback."""
    child = subprocess.Popen(
        command("To be", "--max-tokens", "400", "--ignore-eos"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read()
    assert child.wait(timeout=30) == 0 and "Traceback" not in err and "Broken" not in err


def test_warm_start():
    """Import, load and the first token of the built-in model, once kernels are compiled."""
    run("To be", "--max-tokens", "1")
    took = []
    for _ in range(3):
        start = time.perf_counter()
        assert run("To be", "--max-tokens", "1").returncode == 0
        took.append(time.perf_counter() - start)
    assert min(took) < 3.0, took  # 1.5 s on an idle machine; others may use this one


@pytest.mark.skipif(os.name == "nt", reason="needs a shell as POSIX has it")
def test_without_stderr():
    """Started by a program that closed it, as windowed ones do."""
    line = f"{sys.executable} -m engine.run 'To be' --max-tokens 3 --temperature 0 2>&-"
    done = subprocess.run(line, shell=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip()


@pytest.mark.skipif(os.name == "nt", reason="needs file descriptors as POSIX has them")
@pytest.mark.parametrize(
    ("redirect", "args", "status", "told"),
    [
        ("<&-", "--prompt-file -", 2, "error: -: stdin is closed\n"),
        (">&-", "'To be' --max-tokens 1 --trace {dir}/gone", 1, "error: "),
        (">&-", "'To be' --max-tokens 1 --json", 0, ""),
    ],
)
def test_what_is_closed(redirect, args, status, told, tmp_path):
    """A traceback of a stream that is not there."""
    (tmp_path / "gone").symlink_to("/proc/none" if os.path.exists("/proc") else "/dev/none")
    argv = f"{shlex.quote(sys.executable)} -m engine.run {args.format(dir=tmp_path)} {redirect}"
    done = subprocess.run(argv, shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == status and told in done.stderr and "Traceback" not in done.stderr


def test_an_environment_that_asks_for_the_impossible():
    """A traceback out of an import, for a misspelt variable."""
    done = run("To be", env={**os.environ, "ENGINE_INT8": "fast"})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ENGINE_INT8 is 'fast'") and done.stderr.count("\n") == 1


def test_chat(tmp_path, capsys):
    """A message continued as text instead of answered; flags of a chat ignored without one."""
    ignore = shutil.ignore_patterns("*.py", "__pycache__")
    model = shutil.copytree(BUILT_IN, tmp_path / "m", ignore=ignore)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (model / "chat_template.jinja").write_text(template)
    flags = ["--model", str(model), "--temperature", "0", "--max-tokens", "5"]
    assert main(["--chat", "To be?", "--system", "Rhyme.", *flags]) == 0
    answer = capsys.readouterr().out
    assert main(["system: Rhyme.\nuser: To be?\nassistant:", *flags]) == 0
    assert capsys.readouterr().out == answer
    assert main(["--chat", "To be?", "--no-thinking", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["reasoning"] is None
    for wrong in (["--chat"], ["x", "--system", "y"], ["x", "--no-thinking"], ["--chat", "x"]):
        assert main(wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_stops_penalties_and_logprobs(capsys):
    """Flags that are taken and do nothing."""
    flags = ["To be, or not to be", "--temperature", "0", "--max-tokens", "12"]
    assert main([*flags, "--stop", "zebra", "--stop", " man"]) == 0
    assert capsys.readouterr().out == " done, and not a\n"
    assert main([*flags, "--json", "--logprobs", "2", "--repetition-penalty", "1.5"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["logprobs"]) == len(result["token_ids"]) == 12
    assert result["settings"]["repetition_penalty"] == 1.5
    assert main([*flags, "--json", "--presence-penalty", "2", "--frequency-penalty", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] != result["token_ids"]
