"""benchmarks/: every script at toy size, so that none can rot. The figures here say nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import (
    caches,
    compare,
    decode,
    gate,
    lookup,
    one,
    operations,
    perplexity,
    runs,
    shapes,
)
from engine import LLM
from engine.llm import BUILT_IN
from engine.machine import Arithmetic

REPO = Path(__file__).resolve().parent.parent


def last_json(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


# ---------------------------------------------------------------- the machine, and what it is given


def test_peaks():
    """A loop that the compiler found to do nothing, or a miscount: a rate no processor has."""
    peak = Arithmetic(threads=1)
    for kind in Arithmetic.KINDS:
        assert 1e7 < peak.measure(kind) < 1e13


def test_a_random_checkpoint_is_served(tmp_path):
    """A writer whose names, shapes or offsets the loader refuses."""
    path = shapes.write_checkpoint(tmp_path / "m", layers=1, vocabulary=64)
    logits = LLM(path, weights="bf16", threads=1, context=8).logits([1, 2, 63])
    assert logits.shape == (3, 64) and np.isfinite(logits).all() and logits.std() > 0.01


def test_lookup(tmp_path):
    """A checkpoint that does not repeat, so that lookup's speed is measured without its guesses;
    a temperature at which texts with edits have none."""
    path = shapes.write_checkpoint(tmp_path / "m", layers=1, vocabulary=2048, repeats=True)
    found = lookup.main(["--model", str(path), "--new", "64", "--rounds", "1", "--edits", "1.8"])
    copies, edits, nothing, few = found.values()
    assert copies["accepted"] == copies["guessed"] > 48
    assert 0 < edits["accepted"] < edits["guessed"]
    assert nothing["accepted"] < 8 and few["accepted"] < few["guessed"]


# ---------------------------------------------------------------- scripts


def test_decode(capsys):
    decode.main(["--rows", "3", "--steps", "2", "--rounds", "1", "--threads", "1"])
    assert last_json(capsys.readouterr().out)["3"]["tokens_per_second"] > 0


def test_caches(tmp_path, capsys):
    """Copies estimated instead of counted; a cache left out of the table; a picture of nothing."""
    file, picture = tmp_path / "README.md", tmp_path / "steps.png"
    file.write_text("before\n<!-- caches -->\nold\n<!-- /caches -->\nafter\n")
    command = ["--prompts", "5", "--caches", "concat,basic,paged,basic-f16", "--write", str(file)]
    if importlib.util.find_spec("matplotlib"):
        command += ["--picture", str(picture)]
    caches.main([*command, "--new", "4", "--rounds", "1", "--threads", "1"])
    out = capsys.readouterr().out
    found, row = last_json(out)["prompts"]["5"], 4 * 2 * 256 * 4  # layers, K and V, kv_dim, bytes
    assert found["concat"]["read"] == found["concat"]["grow"] == row * (5 + 6 + 7) / 3
    assert found["basic"]["read"] == found["basic"]["grow"] == found["paged"]["read"] == 0
    assert found["basic"]["append"] == row and found["basic-f16"]["append"] == row / 2
    assert found["basic"]["to_concat"] > 0 and out.count("per_forward_ms: min") == 4
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "| 5 | paged |" in text
    if "--picture" in command:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_operations(tmp_path, capsys):
    """A table whose shares do not add up, or that names operations the step does not have."""
    file = tmp_path / "README.md"
    file.write_text("<!-- operations -->\n<!-- /operations -->\n")
    operations.main(["--prompt", "9", "--new", "3", "--threads", "1", "--write", str(file)])
    found = last_json(capsys.readouterr().out)
    for phase in ("prefill", "decode"):
        assert sum(row["share"] for row in found[phase]["rows"].values()) == pytest.approx(1)
    assert found["decode"]["rows"]["matmul q"]["bytes_per_second"] > 0
    assert "| matmul down | 4 |" in file.read_text()


def test_perplexity(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.")
    perplexity.main([str(text), "--window", "8", "--weights", "f32", "--kv-dtypes", "f32,f16"])
    found = last_json(capsys.readouterr().out)
    assert list(found) == ["f32, f32", "f32, f16"] and all(1 < x < 3000 for x in found.values())
    assert 0 < abs(found["f32, f32"] - found["f32, f16"]) < 0.1, "f16 rounds, and a little"


TOY = ["--new", "3", "--rounds", "1", "--threads", "1"]


def test_compare(tmp_path, capsys):
    """The table, the JSON, and what of a file is replaced: the rest of it must stay."""
    file = tmp_path / "README.md"
    file.write_text("before\n<!-- compare -->\nold\n<!-- /compare -->\nafter\n")
    compare.main(["--engines", "engine", "--prompts", "5,9000", *TOY, "--write", str(file)])
    out, err = capsys.readouterr()
    assert "left out: 9000 tokens: the model's context is 2048" in err
    found = last_json(out)
    own = found["prompts"]["5"]["engine"]
    assert found["model"] == "built-in" and found["read_bytes_per_second"] > 0
    assert own["prefill"] > 0 and own["decode"] > 0 and own["share_of_limit"] > 0
    assert 20 < own["peak_mb"] < 1000
    text = file.read_text()
    assert text.startswith("before\n<!-- compare -->\n") and "old" not in text
    assert text.endswith("|\n<!-- /compare -->\nafter\n") and "| 5 | engine |" in text


def test_compare_says_what_is_not_there(tmp_path, capsys):
    """An engine that vanishes from the table without a word."""
    assert compare.present(["engine", "llama.cpp"], sys.executable, BUILT_IN) == ["engine"]
    assert "llama.cpp: there is no assets.q8_0.gguf" in capsys.readouterr().err
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    assert compare.present(["transformers"], str(tmp_path / "python"), BUILT_IN) == []
    assert "has no transformers" in capsys.readouterr().err


def test_compare_with_a_file_without_marks(tmp_path):
    """A table measured for minutes that then has no place."""
    (tmp_path / "f").write_text("<!-- /compare --> <!-- compare -->")
    with pytest.raises(SystemExit):
        compare.main(["--write", str(tmp_path / "f")])


def test_ratios_are_to_the_best_other():
    """A ratio to the worst, or to itself; a limit of other bytes."""

    def one_run(first: float, step: float) -> list[dict]:
        found = {"first": first, "steps": [step, step, 9.0], "peak_bytes": 2e6}
        return [found | {"bytes_per_token": 100}]

    runs = {"engine": one_run(2, 0.1), "a": one_run(4, 0.05), "b": one_run(8, 0.2)}
    own = compare.medians(runs, prompt=16, read=2000.0)["engine"]
    assert own["prefill"] == 8 and own["prefill_to_best"] == 2
    assert own["decode"] == 10 and own["decode_to_best"] == 0.5
    assert own["share_of_limit"] == 0.5 and own["peak_mb"] == 2


def test_a_process_that_fails_says_why(tmp_path):
    """An engine that crashed taken for one that is fast, or waited for."""
    flags = "--prompt", 3, "--new", 2, "--threads", 1
    process = one.Process(sys.executable, "engine", tmp_path, *flags, PYTHONPATH=str(REPO))
    with pytest.raises(RuntimeError, match="engine ended with status 1: (.|\n)*config.json"):
        with process:
            pass


@pytest.mark.parametrize(
    ("text", "value"), [("a=bf16", "bf16"), ("a=2", 2), ("a=null", None), ("a=", "")]
)
def test_options_for_the_engine(text, value):
    assert one.option(text) == ("a", value)


# ---------------------------------------------------------------- gate


def run_gate(base, head, folder: Path, *flags: str) -> int:
    short = ["--model", "built-in", "--prompt", "8", "--turns", "2", *TOY]
    return gate.main([str(base), str(head), *short, "--save", str(folder), *flags])


def test_gate_on_this_checkout(tmp_path, capsys):
    """Two directories, in processes of their own; times this short are no reason to stop."""
    assert run_gate(REPO, REPO, tmp_path, "--tripwire", "1e6") == 0
    found = last_json(capsys.readouterr().out)
    assert found["slower"] == [] and found["decode"]["base"] > 0
    (saved,) = runs.load(tmp_path)
    assert {b["group"]: b["stats"]["rounds"] for b in saved["benchmarks"]} == {
        "prefill": 2,
        "decode": 4,
    }
    assert all(b["extra_info"]["tokens_per_second"] > 0 for b in saved["benchmarks"])


def fake_process(monkeypatch, steps) -> list[str]:
    """Processes whose steps take `steps(side, turn)`; returns the list of requests to come."""
    requests = []

    class Process:
        def __init__(self, python, name, checkpoint, *flags, **environment):
            self._path = Path(environment["PYTHONPATH"])
            if environment.get("NUMBA_CACHE_DIR"):
                assert environment["NUMBA_CACHE_DIR"].endswith("-compiled")
            self.about = {"package": str(self._path / "engine")}

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def request(self):
            side = self._path.name
            found = steps(side, requests.count(side))
            requests.append(side)
            return {"first": 3.0, "steps": found}

    monkeypatch.setattr(one, "Process", Process)
    return requests


def fake_checkouts(tmp_path: Path) -> list[Path]:
    for side in gate.SIDES:
        (tmp_path / side / "engine").mkdir(parents=True)
        (tmp_path / side / "engine" / "__init__.py").touch()
    return [tmp_path / side for side in gate.SIDES]


@pytest.mark.parametrize(
    ("head", "rounds", "status"),
    [
        ([1.05, 1.05], 1, 0),
        ([1.2, 1.2], 2, 1),
        ([0.9, 3.0], 1, 0),  # a disturbed turn
        ([1.2, 1.0, 1.2, 0.9], 1, 0),
    ],
)
def test_gate_trips(monkeypatch, tmp_path, head, rounds, status):
    """A gate that lets all pass, or that judges by noise: steps here have outliers."""

    def steps(side, turn):
        return [7.0, head[turn % len(head)] if side == "head" else 1.0, 99.0]

    requests = fake_process(monkeypatch, steps)
    assert run_gate(*fake_checkouts(tmp_path), tmp_path / "saved") == status
    assert requests == ["base", "head"] * 2 * rounds


def test_gate_forgives_a_quiet_moment(monkeypatch, tmp_path):
    """On a busy machine, base's one undisturbed turn is no reason to stop head."""

    def steps(side, turn):
        return [1.0 if (side, turn) == ("base", 2) else 1.5]

    fake_process(monkeypatch, steps)
    assert run_gate(*fake_checkouts(tmp_path), tmp_path / "saved", "--turns", "5") == 0


@pytest.mark.parametrize("fails", [False, True])
def test_gate_removes_its_worktrees(monkeypatch, tmp_path, fails):
    """A worktree left behind, after a failure above all."""
    words = []

    def git(*said):
        words.append(said)
        if said[:2] == ("worktree", "add"):
            (Path(said[3]) / "engine").mkdir(parents=True)
        return "c0ffee"

    def steps(side, turn):
        if fails and side == "head":
            raise RuntimeError("engine ended with status 1")
        return [1.0]

    monkeypatch.setattr(gate, "git", git)
    fake_process(monkeypatch, steps)
    assert run_gate("v1", "main", tmp_path) == (2 if fails else 0)
    added = [said[3] for said in words if said[:2] == ("worktree", "add")]
    removed = [said[-1] for said in words if said[:2] == ("worktree", "remove")]
    assert [Path(folder).name for folder in added] == ["base", "head"]
    assert removed == added[::-1] and not any(map(os.path.exists, added))


def test_gate_on_what_is_no_revision(monkeypatch, tmp_path, capsys):
    """A traceback for a name that was mistyped."""

    def git(*said):
        raise RuntimeError("git rev-parse: unknown revision")

    monkeypatch.setattr(gate, "git", git)
    assert run_gate("no-such", REPO, tmp_path) == 2
    assert capsys.readouterr().err.startswith("error: 'no-such' is no revision")


# ---------------------------------------------------------------- history


def save_run(folder: Path, commit: str | None, speed: float) -> None:
    info = {"tokens_per_second": speed, "machine": "M"}
    found = [
        runs.benchmark(group, f"test_{group}[slice-17]", [1 / speed], **info)
        for group in ("decode", "prefill")
    ]
    start = runs.benchmark("start", "test_load[slice]", [0.1], machine="M")
    runs.save(folder, "x", commit, [*found, start])


def test_saved_runs(tmp_path):
    """Numbers that start anew and overwrite a run; a file of another kind drawn as one."""
    for speed in (10.0, 20.0):
        save_run(tmp_path, "c0ffee", speed)
    assert sorted(file.name for file in tmp_path.rglob("*.json")) == ["0001_x.json", "0002_x.json"]
    speeds = [
        run["benchmarks"][0]["extra_info"]["tokens_per_second"] for run in runs.load(tmp_path)
    ]
    assert speeds == [10, 20]
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="other.json: is no saved run"):
        runs.load(tmp_path)


def test_history(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="history.py draws with matplotlib: extra benchmarks")
    from benchmarks import history

    for commit, speed in (("c0ffee", 10.0), (None, 20.0)):
        save_run(tmp_path, commit, speed)
    picture = tmp_path / "history.png"
    history.main(["--runs", str(tmp_path), "--out", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = history.lines_of(runs.load(tmp_path))
    assert lines["decode"] == {"test_decode[slice-17]": [(0, 10.0), (1, 20.0)]}
    assert set(lines) == {"decode", "prefill"}
    with pytest.raises(SystemExit):
        history.main(["--runs", str(tmp_path / "none")])


# ---------------------------------------------------------------- pytest benchmarks


@pytest.mark.skipif(
    importlib.util.find_spec("pytest_benchmark") is None,
    reason="the suites need pytest-benchmark: extra benchmarks",
)
def test_suites(tmp_path):
    """Every benchmark through the code that measures, at the smallest sizes."""
    out = tmp_path / "run.json"
    command = [sys.executable, "-m", "pytest", "benchmarks", "--toy", "-p", "no:cacheprovider"]
    command += ["--threads", "2", f"--benchmark-json={out}", f"--basetemp={tmp_path / 'temp'}"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = {b["name"]: b["extra_info"] for b in json.loads(out.read_text())["benchmarks"]}
    assert found["test_decode[slice-4000]"]["tokens_per_second"] > 0
    assert found["test_matmul[wq-q8_0-511]"]["peak_gop_per_second"] > 0
    assert found["test_prompt_attention[basic-f32]"]["gflop_per_second"] > 0
    assert found["test_first_token[built-in]"]["threads"] == 2
    for name in ("prefill[built-in-511]", "sampling[top_p]", "decode_attention[paged-f16-4000]"):
        assert f"test_{name}" in found
    assert "test_decode[slice-17]" in done.stdout and " tok/s " in done.stdout
