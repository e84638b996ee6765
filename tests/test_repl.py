"""--chat without a PROMPT: turns of one session, commands, interrupts, a real terminal."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pexpect
import pytest
from checkpoints import write_checkpoint

from engine import LLM, SamplingParams
from engine.conversation import MAX_FILE, Conversation
from engine.llm import BUILT_IN
from engine.repl import Lines, Repl, parsed
from engine.run import main

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKS = CHATML + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
OPENED = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
README = Path(__file__).resolve().parent.parent / "README.md"
LONG = "To be, or not to be, that is the question: " * 5


def checkpoint(path: Path, template: str) -> Path:
    """The built-in model with a chat template."""
    shutil.copytree(BUILT_IN, path, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("chat") / "m", CHATML)


@pytest.fixture(scope="module")
def llm(model) -> LLM:
    return LLM(model, prefill_chunk=16)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("thinks") / "m", THINKS)


def talk(llm: LLM, params: SamplingParams = GREEDY, **arguments) -> Conversation:
    return Conversation(llm, params, llm.new_session(), arguments=arguments)


def say(conversation: Conversation, text: str | None, show=lambda kind, piece: None):
    return conversation.answer(conversation.asked(text), show)


class Typed:
    """A person whose messages are known beforehand; KeyboardInterrupt stands for Ctrl-C."""

    def __init__(self, *messages):
        self.messages, self.drafts = list(messages), []

    def read(self, draft: str) -> str:
        self.drafts.append(draft)
        if not self.messages:
            raise EOFError
        message = self.messages.pop(0)
        if isinstance(message, BaseException):
            raise message
        return message


def repl(conversation: Conversation, *messages, **options) -> Typed:
    """The person, after the end of a conversation."""
    person = Typed(*messages)
    options = {"interactive": True} | options
    Repl(conversation, person.read, **options).run()
    return person


class Forwards:
    """Every step a model runs: ids, whether they are a prompt's, and the logits of the last."""

    def __init__(self, llm: LLM, monkeypatch, fails_at: int | None = None, error=None):
        self.steps: list[tuple[list[int], bool, np.ndarray]] = []
        self._forward, self._fails_at, self._error = llm._model.forward, fails_at, error
        monkeypatch.setattr(llm._model, "forward", self)

    def __call__(self, runs, logits, profile=None):
        if len(self.steps) == self._fails_at:
            self._fails_at = None
            raise self._error
        self._forward(runs, logits, profile)
        ((ids, _, is_prompt, _),) = runs
        self.steps.append((ids.tolist(), is_prompt, logits.copy()))

    def prefilled(self) -> list[int]:
        return [i for ids, is_prompt, _ in self.steps if is_prompt for i in ids]

    def first_logits(self, llm: LLM) -> np.ndarray:
        """Those that a turn chose its first token from."""
        last = [logits for _, is_prompt, logits in self.steps if is_prompt][-1]
        return last[0, : llm.config.vocab_size]


def prompt_ids(conversation: Conversation, asked: list[dict]) -> list[int]:
    llm = conversation.llm
    return llm.chat_template.encode(llm.tokenizer, asked, **conversation.arguments)


def common(conversation: Conversation, ids: list[int]) -> int:
    """How many of `ids` the session has rows for, the last left out."""
    session = conversation.session
    held = session.ids[: session.cache.seq_len(0)]
    return len(os.path.commonprefix([held, ids[:-1]]))


# ---------------------------------------------------------------- what a turn computes


def test_a_turn_prefills_only_what_is_new(model, monkeypatch):
    """Every turn computes the whole conversation anew, or reuses rows of other tokens.

    By float32: a generated row differs from a prompt's in the last bits, and a byte that rounds the
    other way for that is as far off as any that was rounded.
    """
    llm = LLM(model, weights="f32", prefill_chunk=16)
    c = talk(llm)
    say(c, "To be?")
    for text in ("Why?", "What is thy name?"):
        ids = prompt_ids(c, c.asked(text))
        reused = common(c, ids)
        assert reused > len(ids) // 2
        with monkeypatch.context() as patch:
            forwards = Forwards(llm, patch)
            done = say(c, text)
        assert done.metrics.cached_tokens == reused
        assert forwards.prefilled() == ids[reused:]
        assert len(forwards.steps) == -(-(len(ids) - reused) // 16) + 7  # chunks, and 8 tokens
        np.testing.assert_allclose(forwards.first_logits(llm), llm.logits(ids)[-1], atol=1e-4)


def test_a_retry_computes_one_token_and_the_same_bits(llm, monkeypatch):
    """The old answer is still seen, or the whole prompt is run again."""
    c = talk(llm)
    first = say(c, LONG)
    ids = prompt_ids(c, c.asked(None))
    forwards = Forwards(llm, monkeypatch)
    again = say(c, None)
    assert forwards.prefilled() == ids[-1:]
    assert again.metrics.cached_tokens == len(ids) - 1
    np.testing.assert_array_equal(forwards.first_logits(llm), llm.logits(ids)[-1])
    assert again.token_ids == first.token_ids and len(c.messages) == 2


def test_qwen3_drops_thoughts_of_earlier_turns(qwen3_tokenizer_dir, tmp_path):
    """More is reused than the template writes again, or what it does write again is not."""
    path = write_checkpoint(tmp_path / "m", vocab_size=151_936, eos_token_id=151_645)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(qwen3_tokenizer_dir / name, path)
    for arguments in ({}, {"enable_thinking": False}):
        c = talk(LLM(path), **arguments)
        first = say(c, "Why is the sky blue?")
        ids = prompt_ids(c, c.asked("And at night?"))
        reused = common(c, ids)
        assert say(c, "And at night?").metrics.cached_tokens == reused
        n = first.metrics.prompt_tokens
        assert reused >= n if not arguments else reused == n - 4  # <think> \n\n </think> \n\n


# ---------------------------------------------------------------- turns that end early


def test_an_interrupted_answer_stays(llm, capsys):
    """Ctrl-C that loses the answer so far, or the conversation."""
    c, pieces = talk(llm, SamplingParams(temperature=0, ignore_eos=True, max_tokens=400)), []

    def show(kind, piece):
        pieces.append(piece)
        if len(pieces) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        say(c, "To be?", show)
    assert c.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    reused = common(c, prompt_ids(c, c.asked("Why?")))
    assert reused > c.last.metrics.prompt_tokens
    c.params = GREEDY
    assert say(c, "Why?").metrics.cached_tokens == reused
    assert len(c.messages) == 4


@pytest.mark.skipif(os.name == "nt", reason="needs signals as POSIX has them")
def test_ctrl_c_held_down(llm, capsys):
    """A second Ctrl-C takes away what the first was about to keep, or ends the conversation."""
    c = talk(llm)
    answer, before = c.answer, signal.getsignal(signal.SIGINT)

    def interrupted(asked, show):
        try:
            answer(asked, show)
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    def lost(asked, show):  # as an exception in a destructor is
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        answer(asked, show)
        raise AssertionError("not stopped")

    c.answer = interrupted
    repl(c, "To be?")
    c.answer = lost
    person = repl(c, "Why?", "/stats")
    assert len(c.messages) == 4 and person.drafts == ["", "", ""]
    assert signal.getsignal(signal.SIGINT) is before
    assert "context: " in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="needs signals as POSIX has them")
def test_ctrl_c_anywhere_in_a_first_turn(llm, capsys):
    """An interrupt between two lines that ends the program, and with it the conversation."""

    class Interrupt:
        """Ctrl-C before the n-th line that is run of an answer's bookkeeping."""

        def __init__(self, n: int):
            self.left = n

        def __call__(self, frame, event, arg):
            ours = frame.f_code.co_filename.endswith(("conversation.py", "repl.py", "reply.py"))
            handler = signal.getsignal(signal.SIGINT)
            if ours and event == "line" and getattr(handler, "__name__", "") == "interrupt":
                self.left -= 1
                if self.left == 0:
                    handler(signal.SIGINT, frame)
            return self if ours else None

    n, left = 0, 0
    while left <= 0:
        n += 1
        c, tracer = talk(llm, replace(GREEDY, max_tokens=2)), Interrupt(n)
        sys.settrace(tracer)
        try:
            repl(c, "To be?")
        finally:
            sys.settrace(None)
        left = tracer.left
        assert [m["role"] for m in c.messages] in ([], ["user", "assistant"])
        assert say(c, "Why?").text is not None
    assert n > 50 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupted_prefill_gives_the_message_back(llm, monkeypatch, capsys):
    """A long message to type again, its chunks computed again, or half a turn in the history."""
    c, ids = talk(llm), prompt_ids(talk(llm), [{"role": "user", "content": LONG}])
    assert len(ids) > 48
    forwards = Forwards(llm, monkeypatch, 2, KeyboardInterrupt())
    person = repl(c, LONG, "/stats", LONG)
    assert person.drafts == ["", LONG, "", ""]
    assert c.last.metrics.cached_tokens == 32
    assert forwards.prefilled() == ids
    np.testing.assert_array_equal(forwards.first_logits(llm), llm.logits(ids)[-1])
    assert [m["role"] for m in c.messages] == ["user", "assistant"]
    err = capsys.readouterr().err
    assert "stopped before an answer" in err and "context: 0 of 2048" in err


def test_memory_that_runs_out_ends_the_turn(llm, monkeypatch, capsys):
    """The conversation is lost with the turn; what was said of the answer is not."""
    c = talk(llm)
    Forwards(llm, monkeypatch, 4, MemoryError("the KV cache is full"))
    repl(c, "To be?", "Why?")
    out, err = capsys.readouterr()
    assert "error: the KV cache is full\n" in err and "; stopped]" in err
    assert [m["role"] for m in c.messages] == ["user", "assistant"] * 2
    assert out.startswith(c.messages[1]["content"] + "\n") and c.messages[1]["content"]


@pytest.mark.parametrize("options", [{}, {"kv_cache": "paged", "kv_max_blocks": 4}], ids=str)
def test_a_conversation_that_outgrows_the_context(options, model, capsys):
    """The message that no longer fits is lost, or the conversation with it."""
    c = talk(LLM(model, context=64, **options), SamplingParams(temperature=0, max_tokens=None))
    repl(c, "To be?")
    n, before = len(prompt_ids(c, c.asked(LONG))), c.messages
    capsys.readouterr()
    assert repl(c, LONG).drafts == ["", LONG]
    err = capsys.readouterr().err
    assert err.startswith("error: ") and str(n) in err and "64" in err and err.count("\n") == 1
    assert c.messages is before
    repl(c, "/clear", "Why?")
    assert [m["content"] for m in c.messages[:1]] == ["Why?"] and len(c.messages) == 2


def test_an_answer_up_to_the_context(model, capsys):
    """An answer cut off in the middle of a word, and nothing says why."""
    c = talk(
        LLM(model, context=64), SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
    )
    repl(c, "To be?", "/stats")
    err = capsys.readouterr().err
    assert err.count("; no room for more") == 2 and len(c.session.ids) == 64


def test_a_retry_that_gives_nothing_keeps_the_old_answer(llm, monkeypatch, capsys):
    """The last answer is dropped before there is another."""
    c = talk(llm)
    say(c, "To be?")
    before = c.messages
    Forwards(llm, monkeypatch, 0, KeyboardInterrupt())
    person = repl(c, "/retry")
    assert c.messages == before and person.drafts == ["", ""]


def test_a_retry_has_a_fresh_seed(llm):
    """The same answer again, or another one although a seed was given."""
    answers = {}
    for seed in (None, 3):
        params = SamplingParams(max_tokens=30, temperature=2.0, seed=seed)
        c = talk(llm, params)
        answers[seed] = [tuple(say(c, text).token_ids) for text in ("To be?", None, None)]
    assert len(set(answers[None])) == 3 and len(set(answers[3])) == 1


# ---------------------------------------------------------------- commands


def test_messages_and_commands(llm, capsys):
    """A command sent to the model, a message taken for one, or an unknown one ignored."""
    c = talk(llm)
    repl(c, "/nope a", "//etc/hosts", "", " ", "/clear x", "/save", "/retry\n", "/think maybe")
    err = capsys.readouterr().err
    assert [m["content"] for m in c.messages[:1]] == ["/etc/hosts"] and len(c.messages) == 2
    told = [line for line in err.splitlines() if line.startswith("error: ")]
    assert [line[:25] for line in told] == [
        "error: there is no comman",
        "error: /clear takes nothi",
        "error: /save takes F",
        "error: /think takes on or",
    ]
    assert c.totals["turns"] == 2  # with the retry


def test_the_system_message(llm, capsys):
    """It is forgotten with the conversation, or stands there twice."""
    c = talk(llm)
    repl(
        c, "/system", "To be?", "/system Rhyme.\nAlways.", "/system", "/system In prose.", "/clear"
    )
    assert c.messages == [{"role": "system", "content": "In prose."}]
    err = capsys.readouterr().err
    assert "no system message" in err and "Rhyme.\nAlways." in err
    say(c, "Why?")
    assert [m["role"] for m in c.messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set temperature hot", "temperature is 'hot'"),
        ("/set temperature NaN", "temperature is nan"),
        ("/set top_p 2", "top_p is 2"),
        ("/set max_tokens -1", "max_tokens is -1"),
        ("/set max_tokens 1.5", "max_tokens is 1.5"),
        ("/set seed " + "[" * 100_000, "seed is '[[["),
        ("/set min_tokens 9", "min_tokens is 9"),
        ("/set stop []x", None),
        ("/set stop [1]", "stop is 1"),
        ("/set n 2", "n cannot be set"),
        ("/set __class__ 2", "__class__ cannot be set"),
        ("/set seed", "/set seed needs a value"),
    ],
)
def test_set_refuses(line, told, llm, capsys):
    """A bad value ends the conversation, or is taken."""
    c = talk(llm)
    repl(c, line)
    err = capsys.readouterr().err
    if told is None:
        assert c.params.stop == ("[]x",)
    else:
        assert err.startswith(f"error: {told}") and err.count("\n") == 1 and c.params == GREEDY


def test_set(llm, capsys):
    """Values that are taken and do nothing."""
    c = talk(llm)
    lines = ["temperature 0.5", "max_tokens none", "seed 7", 'stop ["a b", "\\n"]', "top_k  5"]
    repl(c, *(f"/set {line}" for line in lines), "/set")
    p = c.params
    assert (p.temperature, p.max_tokens, p.seed, p.top_k) == (0.5, None, 7, 5)
    assert p.stop == ("a b", "\n") and p.ignore_eos
    assert 'stop ["a b", "\\n"]\n' in capsys.readouterr().err
    assert [parsed("stop", v) for v in ("5", "none", "a b")] == ["5", (), "a b"]


def test_stats(llm, capsys):
    """Numbers of another turn, or of none."""
    c = talk(llm)
    repl(c, "/stats", "To be?", "Why?", "/stats")
    last, m = c.last, c.last.metrics
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("in all: 0 turns, 0 tokens") and err[1] == "context: 0 of 2048 tokens"
    line = f"last turn: {len(last.token_ids)} tokens, {m.decode_tokens_per_second:.1f} tok/s; "
    line += f"reused {m.cached_tokens} of {m.prompt_tokens} prompt tokens; max_tokens reached; "
    assert err[-3].startswith(line + f"first token after {m.time_to_first_token_ms:.0f} ms")
    assert err[-2].startswith(f"in all: 2 turns, 16 tokens; reused {m.cached_tokens} of ")
    used = llm.chat_template.encode(llm.tokenizer, c.messages, add_generation_prompt=False)
    assert err[-1] == f"context: {len(used)} of 2048 tokens"


# ---------------------------------------------------------------- files


def test_save_and_load(llm, tmp_path, capsys):
    """A conversation that does not go on where it was saved."""
    c, other, file = talk(llm), talk(llm), tmp_path / "a b.json"
    repl(c, "/system Rhyme, é.", "To be?", f"/save {file}", "Why?")
    repl(other, f"/load {file}", "Why?")
    assert other.messages == c.messages and other.system == "Rhyme, é."
    assert json.loads(file.read_bytes()) == c.messages[:3]
    repl(other, "/clear", "/system x", f"/load {file}", "/retry")
    assert other.messages == c.messages[:3]


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (None, "is not a file"),
        (b"", "JSON"),
        (b"\xff", "JSON"),
        (DEEP.encode(), "JSON"),
        (b"9" * 5000, "JSON"),
        (b"{}", "a dict, not a list"),
        (b"[1]", "messages[0] is 1"),
        (b'[{"role": "user"}]', "no content"),
        (b'[{"role": "tool", "content": "x"}]', "role is 'tool'"),
        (b'[{"role": ["user"], "content": "x"}]', "role is ['user']"),
        (b'[{"content": "x"}]', "role is None"),
        (b'[{"role": "user", "content": 5}]', "content is 5"),
        (b'[{"role": "user", "content": "\\ud800"}]', "surrogate"),
        (b'[{"role": "user", "content": "x", "tool_calls": []}]', "tool_calls"),
        (b'[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]', "[1]: role"),
        (b" " * (MAX_FILE + 1), "longer than"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_malformed_files(raw, told, llm, tmp_path, capsys):
    """A traceback, or a conversation lost to a file that is none."""
    c = talk(llm)
    say(c, "To be?")
    before, file = c.messages, tmp_path / "c.json"
    if raw is not None:
        file.write_bytes(raw)
    repl(c, f"/load {file}")
    err = capsys.readouterr().err
    assert err.startswith("error: ") and told in err and err.count("\n") == 1 and len(err) < 500
    assert c.messages is before


def test_a_file_that_cannot_be_written(llm, tmp_path, capsys):
    """A failure to save that ends the conversation, or is not told."""
    c = talk(llm)
    repl(c, f"/save {tmp_path}/no/such/c.json", f"/save {tmp_path}", "To be?")
    err = capsys.readouterr().err
    assert err.count("error: ") == 2 and len(c.messages) == 2 and os.listdir(tmp_path) == []


def test_a_file_that_the_template_refuses(tmp_path, capsys):
    """A conversation that no turn can go on with takes the place of one that could."""
    no_lists = CHATML + "{% if messages[0].content == 'x' %}{{ raise_exception('no') }}{% endif %}"
    c = talk(LLM(checkpoint(tmp_path / "m", no_lists)))
    (tmp_path / "c").write_text('[{"role": "user", "content": "x"}]')
    repl(c, f"/load {tmp_path}/c")
    assert "cannot render this: no" in capsys.readouterr().err and c.messages == []


# ---------------------------------------------------------------- thoughts


def test_thoughts_are_dimmed_or_hidden(tmp_path, capsys, monkeypatch):
    """Thoughts among the answers, or in the history as what was said."""
    llm = LLM(checkpoint(tmp_path / "m", OPENED))
    for hidden in (False, True):
        c = talk(llm, SamplingParams(max_tokens=8, seed=1))
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        repl(c, "To be?", hide_thinking=hidden)
        out, err = capsys.readouterr()
        thoughts = c.messages[1]["reasoning_content"]
        shown = "".join(part.partition("\x1b[0m")[0] for part in err.split("\x1b[2m"))
        assert thoughts and out == "\n" and c.messages[1]["content"] == ""
        assert shown.startswith(thoughts) != hidden


def test_think_reaches_the_template(thinker, capsys):
    """A switch that is taken and does nothing."""
    c = talk(LLM(thinker))
    repl(c, "/think", "/think off", "To be?", "/think on")
    assert c.last.metrics.prompt_tokens > len(prompt_ids(c, c.messages[:1]))
    assert c.arguments == {"enable_thinking": True}
    assert "thinking: as the model does" in capsys.readouterr().err


def test_greedy_thoughts_warn_once(thinker, llm, capsys):
    """A model that repeats itself for minutes, unexplained; or a warning at every turn."""
    c = talk(LLM(thinker))
    repl(c, "/think off", "To be?", "/think on", "/set temperature 1", "a")
    assert "warning" not in capsys.readouterr().err
    repl(c, "/set temperature 0", "b", "c", "/retry")
    assert capsys.readouterr().err.count("warning: ") == 1
    repl(talk(llm), "To be?")  # its template knows of no thoughts
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "n"), [(["0"], 1), (["0", "--no-thinking"], 0), (["0.5"], 0)], ids=str
)
def test_one_answer_warns_too(flags, n, thinker, capsys):
    """A warning for those who talk only, or for those who have done what it says."""
    flags = ["--model", str(thinker), "--max-tokens", "1", "--temperature", *flags]
    assert main(["--chat", "To be?", *flags]) == 0
    assert capsys.readouterr().err.count("warning: ") == n


# ---------------------------------------------------------------- the command line


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "engine.run", "--chat", *args]


def test_lines_through_a_pipe(model):
    """Escape codes or prompts in a file of answers; lines joined, or one that ends the rest."""
    flags = ["--model", str(model), "--temperature", "0", "--max-tokens", "6"]
    text = b"To be?\n/system\nOne\\\r\ntwo\r\n\n/save /dev/null/x\n\xff\nWhy?"
    done = subprocess.run(command(*flags), input=text, capture_output=True, timeout=60)
    assert done.returncode == 2 and b"\x1b" not in done.stdout + done.stderr
    c = talk(LLM(model), SamplingParams(temperature=0, max_tokens=6))
    answers = [say(c, text).text for text in ("To be?", "One\ntwo", "Why?")]
    assert done.stdout.decode() == "".join(f"{answer}\n" for answer in answers)
    assert done.stderr.count(b"error: ") == 2 and b"line 7 is not UTF-8" in done.stderr
    done = subprocess.run(command(*flags), input=b"To be?\n", capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stdout.decode() == answers[0] + "\n"


def test_lines():
    """A backslash at the end of the input waits for a line that never comes."""
    lines = Lines(io.BytesIO(b"a\\\nb\\"))
    assert lines.read("") == "a\nb"
    with pytest.raises(EOFError):
        lines.read("")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
def test_an_interrupt_ends_a_script(model):
    """Ctrl-C answers line after line of a long file, one interrupt each."""
    flags = ["--model", str(model), "--ignore-eos", "--backend", "numpy"]
    child = subprocess.Popen(
        command(*flags), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    child.stdin.write(b"To be?\nWhy?\n")
    child.stdin.flush()
    child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130 and b"Traceback" not in err and err.count(b"stopped") == 1


@pytest.mark.parametrize(
    "flags", [["--json"], ["--logprobs", "0"], ["--profile"], ["--trace", "t"], ["--steps", "s"]]
)
def test_options_for_one_answer_are_refused(flags, capsys):
    """Flags that are taken and do nothing."""
    assert main(["--chat", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {flags[0]} ") and err.count("\n") == 1


def test_a_model_without_a_template(capsys):
    """The first message is what finds out that this model does not chat."""
    assert main(["--chat"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the model has no chat template") and err.count("\n") == 1


def test_rows_are_saved_and_loaded(model, tmp_path):
    """--save-cache and --load-cache are forgotten where there is no PROMPT."""
    flags = ["--model", str(model), "--temperature", "0", "--max-tokens", "6"]
    kinds = ["--save-cache", "--load-cache"]
    done = [
        subprocess.run(
            command(*flags, kind, str(tmp_path / "kv")),
            input=f"{LONG}\n",
            capture_output=True,
            text=True,
            timeout=60,
        )
        for kind in kinds
    ]
    assert done[0].stdout == done[1].stdout and "reused 0 of" in done[0].stderr
    n = int(done[0].stderr.split("reused 0 of ")[1].split()[0])
    assert f"reused {n - 1} of {n} " in done[1].stderr


def test_only_a_person_waits_for_the_editor(model):
    """prompt_toolkit imported by every run: a tenth of a second each."""
    code = "import sys, engine.run; sys.exit('prompt_toolkit' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.skipif(not README.exists(), reason="needs the repository")
def test_the_readme_shows_what_is_printed(model, monkeypatch):
    """A transcript of another version, in which the first reader finds the first mistake."""
    block = README.read_text(encoding="utf-8").split("<!-- conversation -->")[1].split("```")[1]
    shown = block.split("\n", 2)[2]  # behind the name of the language, and the command
    monkeypatch.chdir(model.parent)
    os.symlink(model, "chat")
    screen = io.StringIO()
    typed = [line[2:] for line in shown.splitlines() if line.startswith("> ")]
    person = Typed(*typed)

    def read(draft: str) -> str:
        message = person.read(draft)
        screen.write(f"> {message}\n")
        return message

    with redirect_stdout(screen), redirect_stderr(screen):
        params = SamplingParams(temperature=0, max_tokens=12)
        repl = Repl(talk(LLM("./chat"), params), read, True)
        repl.greet()
        repl.run()
    a_rate = re.compile(r"[\d.]+ tok/s")
    assert a_rate.sub("", screen.getvalue()) == a_rate.sub("", shown)


# ---------------------------------------------------------------- a real terminal

READY, ENTERED = "\x1b[?2004h", "\x1b[?2004l"  # what the editor begins and ends with
INTERRUPT, LEAVE, UP = "\x03", "\x04", "\x1b[A"


class Screen:
    """A REPL in a pseudo-terminal."""

    def __init__(self, *flags: str):
        env = os.environ | {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
        size = {"dimensions": (24, 100)}
        child, *args = command("--temperature", "0", *flags)
        self.child = pexpect.spawn(child, args, env=env, encoding="utf-8", timeout=60, **size)
        self.child.expect_exact(READY)
        self.banner = self.child.before

    def enter(self, keys: str, until: str | None = None) -> str:
        """What is printed after `keys`: until the editor is there again, or until a text comes."""
        self.child.send(keys)
        self.child.expect_exact(ENTERED)
        self.child.expect_exact(until or READY)
        return self.child.before

    def interrupt(self) -> str:
        self.child.send(INTERRUPT)
        self.child.expect_exact(READY)
        return self.child.before

    def leave(self) -> int:
        self.child.send(LEAVE)
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


needs_pty = pytest.mark.skipif(not hasattr(pexpect, "spawn"), reason="needs a pseudo-terminal")


@needs_pty
def test_at_a_terminal(model, tmp_path):
    """Keys that do something else than they say, in the editor or while an answer is made."""
    file = tmp_path / "c.json"

    def saved() -> list[str]:
        screen.enter(f"/save {file}\r")
        return [message["content"] for message in json.loads(file.read_text("utf-8"))]

    # NumPy, which is slow enough to be interrupted
    screen = Screen("--model", str(model), "--backend", "numpy", "--ignore-eos")
    assert "a context of 2048 tokens" in screen.banner and "/help" in screen.banner
    screen.enter("To be?\r", until="PORTIA")
    assert "; stopped]" in screen.interrupt()
    question, answer = saved()
    assert question == "To be?" and "PORTIA" in answer
    assert "error: top_k is 'x'" in screen.enter("/set top_k x\r")
    assert "max_tokens 5" in screen.enter("/set max_tokens 5\r")
    told = screen.enter("\x1b[200~one\ntwo\x1b[201~\r")  # a paste
    assert "\x1b[2m[5 tokens, " in told and "; max_tokens reached]" in told
    assert saved()[2] == "one\ntwo"
    assert "reused" in screen.enter("a\x1b\rb\\\rc\r")  # Alt-Enter, a backslash
    before = saved()
    assert before[4] == "a\nb\nc" and len(before) == 6
    assert "5 tokens" in screen.enter("/retry\r")
    assert saved()[:5] == before[:5] and len(saved()) == 6
    assert "in all: 4 turns" in screen.enter("/stats\r")
    screen.enter("/clear\r")
    screen.enter("/system Rhyme.\r")
    assert "Rhyme." in screen.enter("/system\r")
    assert "loaded 6 messages" in screen.enter(f"/load {file}\r")
    screen.interrupt()
    screen.child.send("half a mess")
    screen.interrupt()
    assert "no system message" in screen.enter("/system\r")
    assert "no system message" in screen.enter(f"{UP}\r")
    assert screen.leave() == 0


@needs_pty
def test_a_message_comes_back_to_the_editor(model, tmp_path):
    """A long message that did not fit is to be typed again."""
    file = tmp_path / "c.json"
    screen = Screen("--model", str(model), "--context", "40", "--max-tokens", "3")
    assert "error: " in screen.enter(f"\x1b[200~{LONG}\x1b[201~\r")
    screen.child.send("\x7f" * (len(LONG) - len("To be")))
    assert "3 tokens" in screen.enter("\r")
    screen.enter(f"/save {file}\r")
    assert json.loads(file.read_text())[0]["content"] == "To be"
    assert screen.leave() == 0


@needs_pty
def test_ctrl_c_outside_of_the_keyboard(model):
    """The signal, which comes as one where keys are not read yet, meets an editor that does not
    run: a traceback, and a key to press."""
    screen = Screen("--model", str(model), "--max-tokens", "3")
    screen.child.logfile_read = io.StringIO()
    for _ in range(5):
        for _ in range(20):
            os.kill(screen.child.pid, signal.SIGINT)
        assert "3 tokens" in screen.enter("To be?\r")
    assert screen.leave() == 0
    assert "Traceback" not in screen.child.logfile_read.getvalue()
