"""Profiles as files, by the format that viewers read, and from the command line."""

import csv
import json
import subprocess
import sys
from functools import cache

import pytest
from checkpoints import write_checkpoint

from engine import LLM, SamplingParams
from engine.kernels.forward import step
from engine.profiler import Profile
from engine.run import main
from engine.trace import STEPS, trace, write_steps, write_trace

PROMPT = list(range(20, 30))
SLACK = 20  # microseconds: how far the processor's counter and Python's clock may disagree
COLUMNS = ["index", "phase", "tokens", "context", "ms", "token_id"]


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)


@cache
def built_in(**settings) -> LLM:
    return LLM(prefill_chunk=4, **settings)


def profile_of(llm: LLM, n: int, prompt=PROMPT) -> Profile:
    return llm.generate(prompt, greedy(n), profile=True).profile


def interrupted_profile(monkeypatch, at_step: int) -> Profile:
    """Of a generation whose compiled step was interrupted when it began the `at_step`-th time."""
    llm, begun = LLM(threads=1, prefill_chunk=4), []

    def interrupted(*args):
        begun.append(args)
        if len(begun) == at_step:
            raise KeyboardInterrupt
        step(*args)

    monkeypatch.setattr("engine.model.step", interrupted)
    generation = llm._start(PROMPT, greedy(9), profile=True)
    with pytest.raises(KeyboardInterrupt):
        list(generation.tokens())
    return generation.completion.profile


# ---------------------------------------------------------------- the format


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_event(event: dict) -> None:
    """One event, as the trace event format has it."""
    assert event["ph"] in ("X", "M", "C"), event
    assert isinstance(event["name"], str) and event["name"]
    assert type(event["pid"]) is int and isinstance(event["args"], dict), event
    assert is_number(event["ts"]) and event["ts"] >= 0, event
    if event["ph"] == "X":
        assert type(event["tid"]) is int and event["tid"] >= 0
        assert is_number(event["dur"]) and event["dur"] >= 0, event
        assert isinstance(event["cat"], str)
    elif event["ph"] == "M":
        assert event["name"] in ("process_name", "thread_name")
        assert list(event["args"]) == ["name"] and isinstance(event["args"]["name"], str)
    else:
        assert event["args"] and all(is_number(value) for value in event["args"].values())


def check_trace(found: dict) -> None:
    """The whole: every thread that has slices is named, once; slices of a thread nest."""
    assert found["displayTimeUnit"] in ("ms", "ns")
    for event in found["traceEvents"]:
        check_event(event)
    assert len({event["pid"] for event in found["traceEvents"]}) == 1
    named = [e["tid"] for e in found["traceEvents"] if e["name"] == "thread_name"]
    assert len(set(named)) == len(named)
    assert [e["name"] for e in found["traceEvents"]].count("process_name") == 1
    slices = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in slices} <= set(named)
    for thread in named:
        ends = 0.0
        for event in sorted((e for e in slices if e["tid"] == thread), key=lambda e: e["ts"]):
            assert event["ts"] > ends - SLACK, event
            ends = event["ts"] + event["dur"]


MADE = {
    "one": lambda _: profile_of(built_in(threads=1), 6),
    "two": lambda _: profile_of(built_in(threads=2), 6),
    "concat": lambda _: profile_of(built_in(threads=2, kv_cache="concat"), 6),
    "numpy": lambda _: profile_of(built_in(backend="numpy"), 4),
    "text": lambda _: profile_of(built_in(threads=2), 4, "To be, or not to be"),
    "nothing": lambda _: profile_of(built_in(threads=2), 0),
    "interrupted at once": lambda patch: interrupted_profile(patch, 1),
    "interrupted": lambda patch: interrupted_profile(patch, 5),
}


@pytest.mark.parametrize("kind", MADE)
def test_the_format(kind, monkeypatch, tmp_path):
    """An event that a viewer does not read, and with it the whole file: a negative duration, a
    slice that overlaps the next, NumPy's numbers, a thread without a name."""
    profile = MADE[kind](monkeypatch)
    found = trace(profile)
    check_trace(found)
    write_trace(profile, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")) == found
    json.dumps(found, allow_nan=False)


def test_clocks_that_disagree():
    """A slice that ends before it begins, which viewers refuse, where the processor's counter is a
    little behind Python's clock."""
    profile = profile_of(built_in(threads=1), 4)
    last = profile.steps[-1]
    (clock,), ((call, *parts, _),) = last.clocks, profile.rank_parts(last)
    rate = (clock[-1] - clock[2]) / sum(part.seconds for part in parts)
    clock[2::2] -= int(rate * (call.seconds + 10e-6))
    assert profile.rank_parts(last)[0][0].seconds == pytest.approx(-10e-6, abs=1e-6)
    for event in trace(profile)["traceEvents"]:
        check_event(event)


@pytest.mark.parametrize("threads", [1, 2])
def test_ranks_are_threads(threads):
    """Ranks drawn on one line, or a line without a name."""
    found = trace(profile_of(built_in(threads=threads), 3))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert list(names.values()) == [*(f"rank {rank}" for rank in range(threads)), STEPS]
    busy = {e["tid"] for e in found if e["ph"] == "X" and e["name"] == "matmul up"}
    assert busy == set(range(threads))


@pytest.mark.parametrize("kind", ["one", "two", "concat", "numpy", "text"])
def test_steps_are_frames(kind, monkeypatch):
    """Frames that overlap, are out of order, or end before what they hold."""
    profile = MADE[kind](monkeypatch)
    events = trace(profile)["traceEvents"]
    (thread,) = (e["tid"] for e in events if e["ph"] == "M" and e["args"]["name"] == STEPS)
    frames = [e for e in events if e["ph"] == "X" and e["tid"] == thread]
    assert [e["name"] for e in frames] == [f"{s.phase} {i}" for i, s in enumerate(profile.steps)]
    assert [e["args"] for e in frames] == [
        {"tokens": s.tokens, "context": s.context, "token_id": s.token_id} for s in profile.steps
    ]
    ends = [e["ts"] + e["dur"] for e in frames]
    assert all(end <= e["ts"] for end, e in zip(ends, frames[1:], strict=False))
    inside = [0] * len(frames)
    for e in events:
        if e["ph"] == "X" and e["tid"] != thread:
            (frame,) = (
                i
                for i, (f, end) in enumerate(zip(frames, ends, strict=True))
                if f["ts"] - 1e-3 < e["ts"] and e["ts"] + e["dur"] < end + 1e-3
            )
            inside[frame] += 1
    parts = [
        sum(map(len, profile.rank_parts(s))) + len(s.python) - bool(s.clocks) for s in profile.steps
    ]
    assert inside == parts and min(parts) > 0


def counted(profile: Profile, name: str) -> list[float]:
    events = [e for e in trace(profile)["traceEvents"] if e["ph"] == "C" and e["name"] == name]
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    return [e["args"][name] for e in events]


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_rows_of_the_cache(kv_dtype):
    """Rows counted before their step, or bytes of one side, one layer or another type."""
    llm = built_in(threads=1, kv_dtype=kv_dtype)
    profile, c = profile_of(llm, 4), llm.config
    assert counted(profile, "KV rows") == [4, 8, 10, 11, 12, 13]
    row = 2 * c.n_layers * c.kv_dim * {"f32": 4, "f16": 2}[kv_dtype]
    assert counted(profile, "KV bytes") == [row * n for n in (4, 8, 10, 11, 12, 13)]


def test_rows_of_an_interrupted_step(monkeypatch):
    """Rows that were never committed: the cache is as it was before such a step."""
    assert counted(interrupted_profile(monkeypatch, 5), "KV rows")[-1] == 11


@pytest.mark.parametrize(
    ("wide", "longest"),
    [
        ({"vocab_size": 20_000}, {"head"}),
        ({"intermediate_size": 20_000}, {"matmul gate", "matmul up", "matmul down"}),
    ],
    ids=str,
)
def test_the_longest_operation_is_what_is_largest(tmp_path, wide, longest):
    """Marks given the name of the operation before or after: what takes the time is somewhere
    else than the trace says."""
    llm = LLM(write_checkpoint(tmp_path, hidden_size=128, **wide), weights="f32", threads=1)
    profile = profile_of(llm, 25)
    found = []
    for s in profile.steps:
        if s.phase == "decode":
            (parts,) = profile.rank_parts(s)
            found.append(max(parts[1:-1], key=lambda part: part.seconds).name in longest)
    slices = [e for e in trace(profile)["traceEvents"] if e["ph"] == "X" and e["cat"] == "decode"]
    assert longest <= {e["name"] for e in slices}
    assert sum(found) > len(found) / 2, found  # in the median step: others use this machine


# ---------------------------------------------------------------- the table of steps


@pytest.mark.parametrize("kind", ["two", "numpy", "nothing", "interrupted"])
def test_table_of_steps(kind, monkeypatch, tmp_path):
    """A row a step, as CSV readers have it: a missing token is empty and not None."""
    profile = MADE[kind](monkeypatch)
    write_steps(profile, tmp_path / "steps.csv")
    with open(tmp_path / "steps.csv", newline="", encoding="utf-8") as file:
        first, *rows = csv.reader(file)
    assert first == COLUMNS and len(rows) == len(profile.steps)
    for i, (row, s) in enumerate(zip(rows, profile.steps, strict=True)):
        token = "" if s.token_id is None else str(s.token_id)
        assert row[:4] + row[5:] == [str(i), s.phase, str(s.tokens), str(s.context), token]
        assert float(row[4]) == pytest.approx(1e3 * s.seconds, abs=6e-4)
    assert b"\r\r" not in (tmp_path / "steps.csv").read_bytes()


# ---------------------------------------------------------------- the command line

FLAGS = "To be, or not to be", "--max-tokens", "6", "--seed", "5", "--ignore-eos"


def run(*args: object) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "engine.run", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, encoding="utf-8")


@pytest.fixture(scope="module")
def plain() -> str:
    """What a run without any of the options prints."""
    done = run(*FLAGS)
    assert done.returncode == 0 and len(done.stdout) > 6
    return done.stdout


@pytest.fixture
def measured(monkeypatch) -> None:
    """Limits of a machine, at once."""
    found = {"bytes_per_second": 20e9, "operations_per_second": 100e9}
    monkeypatch.setattr("engine.run.bounds", lambda *_: found)


def test_profile_on_the_command_line(plain):
    """A table in the text, which spoils every pipe, or before the report, which is looked for at
    the beginning."""
    done = run(*FLAGS, "--profile")
    assert done.returncode == 0 and done.stdout == plain
    report = done.stderr[done.stderr.index("backend: simd\n") :]
    _, metrics, prefill, decode = report.split("\n\n")
    assert metrics.startswith("metrics:") and prefill.startswith("prefill: ")
    assert decode.startswith("decode: 5 steps, ") and "GB/s" in decode


def test_profile_in_json(plain, measured, capsys):
    """A table beside the object, which breaks whoever parses it, or no figures inside."""
    found = {}
    for name, options in (("without", []), ("with", ["--profile"])):
        assert main([*FLAGS, "--json", *options]) == 0
        out, err = capsys.readouterr()
        found[name] = json.loads(out)
        assert err == "" and found[name].pop("metrics")
    profile = found["with"].pop("profile")
    assert found["with"] == found["without"]
    assert found["with"]["text"] == plain.removesuffix("\n")
    assert list(profile) == ["bounds", "prefill", "decode"]
    assert profile["decode"]["steps"] == 5 and "matmul up" in profile["decode"]["rows"]
    assert set(profile["bounds"]) == {"bytes_per_second", "operations_per_second"}


@pytest.mark.parametrize("option", ["--trace", "--steps"])
def test_one_file_alone(option, plain, tmp_path, capsys):
    """A file that needs another option beside it."""
    assert main([*FLAGS, option, str(tmp_path / "file")]) == 0
    assert capsys.readouterr().out == plain and (tmp_path / "file").stat().st_size > 100


def test_files_on_the_command_line(plain, tmp_path):
    """A table of the profile nobody asked for; a file that another one overwrites."""
    done = run(*FLAGS, "--trace", tmp_path / "t.json", "--steps", tmp_path / "s.csv")
    assert done.returncode == 0 and done.stdout == plain and "prefill:" not in done.stderr
    check_trace(json.loads((tmp_path / "t.json").read_text(encoding="utf-8")))
    lines = (tmp_path / "s.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0].split(",") == COLUMNS and len(lines) == 7
    assert [line.split(",")[:2] for line in lines[1:3]] == [["0", "prefill"], ["1", "decode"]]


@pytest.mark.parametrize("option", ["--trace", "--steps"])
@pytest.mark.parametrize("where", ["none/file", "."])
def test_a_place_that_cannot_be(option, where, tmp_path, capsys, monkeypatch):
    """A run of an hour whose trace cannot be written, which is said at its end."""
    monkeypatch.setattr("engine.run.LLM", None)  # any work begins with it
    assert main([*FLAGS, option, str(tmp_path / where)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert str(tmp_path) in err


def test_an_interrupted_run_leaves_its_profile(measured, tmp_path, capsys, monkeypatch):
    """Ctrl-C in a long run, after which the profile is what one wants to see."""
    begun = []

    def interrupted(me, *args):
        if me.rank == 0:
            begun.append(me)
            if len(begun) == 4:
                raise KeyboardInterrupt
        step(me, *args)

    interrupted.compile = step.compile
    monkeypatch.setattr("engine.model.step", interrupted)
    files = tmp_path / "t.json", tmp_path / "s.csv"
    options = "--profile", "--trace", str(files[0]), "--steps", str(files[1])
    assert main([*FLAGS, *options]) == 130
    out, err = capsys.readouterr()
    assert out.strip() and "metrics:" in err and "\nprefill: " in err and "\ndecode: " in err
    check_trace(json.loads(files[0].read_text(encoding="utf-8")))
    assert len(files[1].read_text(encoding="utf-8").splitlines()) == 5


DRIVER = """
import sys, engine.run

def fail(*_):
    raise {fault}

engine.run.bounds = fail
sys.exit(engine.run.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("fault", ["KeyboardInterrupt", "MemoryError"])
def test_a_machine_that_cannot_be_measured(fault, plain, tmp_path):
    """The machine's limits, measured last and with half a gigabyte: Ctrl-C or too little memory
    there must not cost the report, the trace and the cache of the run that went before."""
    files = {name: tmp_path / name for name in ("trace", "steps", "save-cache")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    line = [sys.executable, "-c", DRIVER.format(fault=fault), *FLAGS, "--profile", *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, encoding="utf-8")
    assert "Traceback" not in done.stderr and done.stdout == plain
    assert "metrics:" in done.stderr, done.stderr
    assert [name for name, path in files.items() if not path.exists()] == []
