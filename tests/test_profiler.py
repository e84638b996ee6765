"""Profiles: nothing changes under them, every moment is somebody's, and the counts are right."""

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_checkpoint

from engine import LLM, SamplingParams
from engine.kernels.clock import OPERATIONS, new_clock, ticks
from engine.kernels.forward import step
from engine.kernels.runs import Run
from engine.profiler import Part, Profile, Step, arrays
from engine.trace import trace, write_steps, write_trace

KV_CACHES = "basic", "paged", "concat"
PROMPT = list(range(20, 30))  # 10 ids: chunks of 4, 4 and 2
MATMULS = [name for name in OPERATIONS if name.startswith("matmul")]
RESERVE, COMMIT = {"concat": ("materialize", "concat_dim0")}, ("reserve", "commit")
LATE = -20e-6  # seconds: how far the two clocks may disagree
BOUNDS = {
    "bytes_per_second": 20e9,
    "operations_per_second": 100e9,
    "f32_operations_per_second": 50e9,
}


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)


@cache
def built_in(**settings) -> LLM:
    return LLM(**settings)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Opens tiny checkpoints of a number of layers, each once."""

    @cache
    def opened(n_layers: int = 2, **settings) -> LLM:
        path = tmp_path_factory.mktemp("tiny")
        return LLM(write_checkpoint(path, num_hidden_layers=n_layers), prefill_chunk=4, **settings)

    return opened


def profile_of(llm: LLM, n: int, prompt=PROMPT) -> Profile:
    return llm.generate(prompt, greedy(n), profile=True).profile


def own_parts(s: Step) -> list[Part]:
    """Python's parts of a step, without the compiled one, which the ranks' parts fill."""
    return [part for i, part in enumerate(s.python) if i != s.kernel or not s.clocks]


def shares_of_rest(profile: Profile) -> np.ndarray:
    """For every step and rank: what is nobody's, as a share of the step's time."""
    found = []
    for s in profile.steps:
        own = sum(part.seconds for part in own_parts(s))
        for parts in profile.rank_parts(s) or [[]]:
            found.append(1 - (own + sum(part.seconds for part in parts)) / s.seconds)
    return np.array(found)


def interrupt(monkeypatch, at_step: int) -> None:
    """From now on, the compiled step is interrupted the `at_step`-th time that rank 0 begins it."""
    begun = []

    def interrupted(me, *args):
        if me.rank == 0:
            begun.append(me)
            if len(begun) == at_step:
                raise KeyboardInterrupt
        step(me, *args)

    monkeypatch.setattr("engine.model.step", interrupted)


def run_until_interrupted(llm: LLM, n: int) -> Profile:
    generation = llm._start(PROMPT, greedy(n), profile=True)
    with pytest.raises(KeyboardInterrupt):
        list(generation.tokens())
    return generation.completion.profile


# ---------------------------------------------------------------- nothing changes


def all_logits(llm: LLM, profile: Profile | None) -> np.ndarray:
    """Logits of three chunks of a prompt and of five tokens that follow, one by one."""
    cache, found = llm.new_cache(), []
    ids = np.random.default_rng(0).integers(0, llm.config.vocab_size, 17)
    for is_prompt, chunk in [*((True, ids[i : i + 4]) for i in (0, 4, 8))] + [
        (False, ids[i : i + 1]) for i in range(12, 17)
    ]:
        logits = llm._model.new_logits(len(chunk))
        if profile:
            profile.begin(is_prompt, len(chunk), len(chunk), cache)
        llm._model.forward([Run(chunk, cache, is_prompt, len(chunk))], logits, profile)
        found.append(logits)
    return np.concatenate(found)


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("weights", ["q8_0", "f32"])
@pytest.mark.parametrize("threads", [1, 2])
def test_no_bit_changes(threads, weights, kv_cache):
    """A mark written over a result, or a second form of the step for profiles: other logits, and
    a text that cannot be had again without the profile."""
    llm = built_in(threads=threads, weights=weights, kv_cache=kv_cache)
    logits, profile = all_logits(llm, None), Profile(llm._model)
    np.testing.assert_array_equal(all_logits(llm, profile), logits)
    assert all(len(s.clocks) == threads for s in profile.steps), "no marks were taken"
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    without, profiled = (llm.generate("Good morrow", params, profile=p) for p in (False, True))
    assert profiled.token_ids == without.token_ids and profiled.text == without.text


def test_a_profile_is_there_when_asked_for(tiny):
    """A profile that is taken unasked, is lost on its way to the completion, or is one for all."""
    llm = tiny()
    assert llm.generate(PROMPT, greedy(1)).profile is None
    assert isinstance(profile_of(llm, 1), Profile)
    one, other = llm.generate([PROMPT, PROMPT[:3]], greedy(2), profile=True)
    counts = [[s.tokens for s in done.profile.steps] for done in (one, other)]
    assert counts == [[4, 4, 2, 1], [3, 1]]
    stream = built_in().stream("To be", greedy(3), profile=True)
    list(stream)
    assert len(stream.completion.profile.steps) == 3
    assert built_in().stream("To be", greedy(3)).completion.profile is None


def test_it_costs_little():
    """Marks that allocate, print or copy the cache: the profile measures itself."""
    llm, ratios = built_in(threads=1), []
    for _ in range(3):  # the best: others use this machine
        runs = [llm.stream("To be", greedy(80), profile=on).tokens() for on in (False, True)]
        took = [[], []]
        for _ in range(80):
            for times, tokens in zip(took, runs, strict=True):
                start = time.perf_counter()
                next(tokens)
                times.append(time.perf_counter() - start)
        without, profiled = np.median(took, axis=1)
        ratios.append(profiled / without)
    assert min(ratios) < 1.25, ratios


# ---------------------------------------------------------------- the sum of the parts


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("threads", [1, 2])
def test_parts_add_up(threads, kv_cache):
    """An operation without a mark, or counted twice: time that no row of the table explains."""
    profile = profile_of(built_in(threads=threads, kv_cache=kv_cache), 60, "To be, or not to be")
    rest = shares_of_rest(profile)
    assert len(rest) == 60 * threads
    assert -0.03 < np.median(rest) < 0.5, np.median(
        rest
    )  # 0.15 where steps take half a millisecond
    for phase in ("prefill", "decode"):
        rows = profile.rows(phase).values()
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert min(row["share"] for row in rows) > -0.03
        steps = [s.seconds for s in profile.steps if s.phase == phase]
        assert sum(row["ms"] for row in rows) == pytest.approx(1e3 * np.mean(steps))


def test_numpy_parts_add_up():
    """The NumPy backend's forward, which has no marks, left out or taken for a compiled step."""
    profile = profile_of(built_in(backend="numpy"), 6, "To be")
    assert not any(s.clocks for s in profile.steps)
    assert -0.03 < np.median(shares_of_rest(profile)) < 0.2
    rows = profile.rows("decode")
    assert set(rows) == {"forward", "sample", "text", "python"}
    assert list(rows)[0] == "forward" and rows["forward"]["share"] > 0.5


@pytest.mark.parametrize("n", [1, 100])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_compiled_part_has_no_gaps(threads, n):
    """Ticks turned into seconds at a wrong rate, or from a wrong origin: steps that begin before
    they are called or return before they end, the more the longer the run."""
    profile = profile_of(built_in(threads=threads), n, "To be")
    for s in profile.steps:
        whole, ranks = s.python[s.kernel], profile.rank_parts(s)
        assert len(ranks) == threads
        for parts in ranks:
            assert parts[0].name == "call" and parts[-1].name == "return"
            assert parts[0].start == whole.start
            for part, following in pairwise(parts):
                assert following.start == pytest.approx(part.start + part.seconds, abs=1e-9)
            end = parts[-1].start + parts[-1].seconds
            assert end == pytest.approx(whole.start + whole.seconds, abs=1e-9)
            assert min(part.seconds for part in parts[1:-1]) >= 0
            assert parts[0].seconds > LATE and parts[-1].seconds > LATE


def test_steps_take_the_time_that_passes():
    """Seconds in another unit, or a step that lasts into the next one."""
    llm, start = built_in(threads=1), time.perf_counter()
    done = llm.generate("To be", greedy(60), profile=True)
    wall, steps = time.perf_counter() - start, done.profile.steps
    ends = [s.start + s.seconds for s in steps]
    assert all(end <= s.start for end, s in zip(ends, steps[1:], strict=False))
    assert steps[0].start >= 0 and ends[-1] <= wall
    assert sum(s.seconds for s in steps) > 0.5 * wall
    forwards = [(s.python[s.kernel].seconds, s.seconds) for s in steps]
    for ms, (least, most) in zip(done.metrics.per_forward_ms, forwards, strict=True):
        assert least <= ms / 1e3 and least < most


@pytest.fixture
def two_ranks_apart():
    """A model of two ranks, each on a processor of its own: on a busy machine both may be given
    the same, and then take turns."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(cpus) < 2:
        pytest.skip("two ranks need two processors, and a system that assigns them")
    llm, (mine, other, *_) = LLM(threads=2), sorted(cpus)
    llm._model.team._pool.submit(os.sched_setaffinity, 0, {other}).result()  # of that thread
    os.sched_setaffinity(0, {mine})
    yield llm
    os.sched_setaffinity(0, cpus)


def test_ranks_work_at_the_same_time(two_ranks_apart):
    """Ranks that run one after the other, or whose clocks do not agree; a slice of a rank that
    overlaps its next one."""
    profile, shared = profile_of(two_ranks_apart, 40, list(range(200))), []
    for s in profile.steps:
        spans = []
        for parts in profile.rank_parts(s):
            for part, following in pairwise(parts):
                assert following.start - part.start - part.seconds > -1e-9
            spans.append([part for part in parts if part.name in MATMULS])
        together = sum(
            max(0.0, min(a.start + a.seconds, b.start + b.seconds) - max(a.start, b.start))
            for a, b in zip(*spans, strict=True)
        )
        shared.append(together / sum(part.seconds for part in spans[0]))
    assert max(shared) > 0.5, shared  # the best step: others use this machine


# ---------------------------------------------------------------- what is counted


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("n_layers", [1, 2, 5])
@pytest.mark.parametrize("threads", [1, 2])
def test_calls_a_step(tiny, threads, n_layers, kv_cache):
    """A lap left out, given another operation's name or left twice; a copy of the cache that is
    not counted."""
    profile = profile_of(tiny(n_layers, threads=threads, kv_cache=kv_cache), 5)
    reserve, commit = RESERVE.get(kv_cache, COMMIT)
    copies = 2 * n_layers if kv_cache == "concat" else None
    for s in profile.steps:
        parts = [part.name for part in s.python]
        assert parts == [reserve, "step", commit] + ["sample"] * (s.token_id is not None)
    for phase in ("prefill", "decode"):
        calls = {name: row["calls"] for name, row in profile.rows(phase).items()}
        wanted = dict.fromkeys(MATMULS, n_layers)
        wanted |= dict.fromkeys(
            ["attention", "merge", "append", "norm and rope", "swiglu"], n_layers
        )
        wanted |= {"rmsnorm": 2 * n_layers + 1, "quantize": 4 * n_layers + 1}
        wanted |= dict.fromkeys(["call", "embed", "head", "return", "python"], 1)
        wanted["sample"] = 1 if phase == "decode" else 1 / 3  # of three chunks, the last
        if threads > 1:
            wanted["barrier"] = calls.get("barrier")
            assert n_layers <= wanted["barrier"]
        wanted |= {reserve: copies or calls[reserve], commit: copies or calls[commit]}
        assert calls == pytest.approx(wanted)


def test_phases(tiny):
    """Chunks of a prompt taken for tokens, a context counted after the step, the first token given
    to the first step of decode."""
    done = tiny().generate(PROMPT, greedy(4), profile=True)
    steps = done.profile.steps
    assert [s.phase for s in steps] == ["prefill"] * 3 + ["decode"] * 3
    assert [s.tokens for s in steps] == [4, 4, 2, 1, 1, 1]
    assert [s.context for s in steps] == [0, 4, 8, 10, 11, 12]
    assert [s.n_logits for s in steps] == [0, 0, 1, 1, 1, 1]
    assert [s.token_id for s in steps] == [None, None, *done.token_ids]
    assert {s.row_bytes for s in steps} == {2 * 2 * 32 * 4}  # K and V of 2 layers, 32 float32


def test_a_session_that_goes_on(tiny):
    """Rows that were there already counted as computed; another request's steps in a profile."""
    llm = tiny(kv_cache="paged")
    session = llm.new_session()
    llm.generate(PROMPT, greedy(3), session, profile=True)
    profile = llm.generate([*session.ids, 7, 8], greedy(2), session, profile=True).profile
    assert [(s.phase, s.tokens, s.context) for s in profile.steps] == [
        ("prefill", 3, 12),  # the last token of the answer, and two new ones
        ("decode", 1, 15),
    ]
    profile = llm.generate(None, greedy(1), session, profile=True).profile
    assert [(s.phase, s.tokens, s.context) for s in profile.steps] == [
        ("decode", 1, 16),  # the last token of the answer, which nothing has followed
    ]


def test_requests_at_once_have_profiles_of_their_own():
    """Steps or marks of two threads' requests in one profile."""
    llm = built_in(threads=2)
    prompts = ["To be", "Good morrow, cousin", "O for a muse of fire"]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda p: llm.generate(p, greedy(15), profile=True), prompts))
    for prompt, done in zip(prompts, found, strict=True):
        n, steps = len(llm.tokenizer.encode(prompt)), done.profile.steps
        assert [s.context for s in steps] == [0, *range(n, n + 14)]
        assert [s.token_id for s in steps] == done.token_ids
        marks = [[clock[0] for clock in s.clocks] for s in steps[1:]]
        assert marks == marks[:1] * 14


@pytest.mark.parametrize("weights", ["f32", "q8_0"])
@pytest.mark.parametrize("chunk", [3, 512])
def test_work(weights, chunk):
    """Bytes or operations counted for one layer, by chunk and not by token, for logits nobody
    wanted, or for scores above the diagonal: speeds that no machine has."""
    llm = built_in(weights=weights, prefill_chunk=chunk, kv_dtype="f16")
    profile, c = profile_of(llm, 3, list(range(10))), llm.config
    size = 4 if weights == "f32" else 34 / 32  # with a scale of 2 bytes for 32 values
    elements = {
        "matmul q": c.n_layers * c.q_dim * c.dim,
        "matmul k": c.n_layers * c.kv_dim * c.dim,
        "matmul v": c.n_layers * c.kv_dim * c.dim,
        "matmul out": c.n_layers * c.q_dim * c.dim,
        "matmul gate": c.n_layers * c.hidden_dim * c.dim,
        "matmul up": c.n_layers * c.hidden_dim * c.dim,
        "matmul down": c.n_layers * c.hidden_dim * c.dim,
        "head": c.vocab_size * c.dim,
    }
    row_bytes = 2 * 2 * c.n_layers * c.kv_dim
    for phase, positions in (("prefill", range(10)), ("decode", range(10, 12))):
        steps = [s for s in profile.steps if s.phase == phase]
        wanted = {
            name: (size * n * len(steps), 2 * n * len(positions)) for name, n in elements.items()
        }
        logits = len(steps) if phase == "decode" else 1
        wanted["head"] = size * elements["head"] * logits, 2 * elements["head"] * logits
        rows_read = sum(s.context + s.tokens for s in steps)
        products = sum(position + 1 for position in positions) * c.q_dim * c.n_layers
        wanted["attention"] = rows_read * row_bytes, 2 * 2 * products
        rows, found = profile.rows(phase), {}
        for name, row in rows.items():
            if "bytes_per_second" in row:
                took = row["ms"] / 1e3 * len(steps)
                speeds = row["bytes_per_second"], row["operations_per_second"]
                found[name] = tuple(speed * took for speed in speeds)
        assert set(found) == set(wanted)
        for name, amounts in wanted.items():
            assert found[name] == pytest.approx(amounts), name


# ---------------------------------------------------------------- interrupted


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("at_step", [1, 2, 4, 6])
def test_an_interrupted_one_is_left(tiny, monkeypatch, tmp_path, threads, at_step):
    """Ctrl-C in the first chunk, a later one, or decode: the report of all that went before it is
    lost to a traceback."""
    llm = tiny(threads=threads)
    interrupt(monkeypatch, at_step)
    profile = run_until_interrupted(llm, 8)
    check_that_it_can_be_told(profile, at_step, tmp_path)
    assert all(s.clocks for s in profile.steps[:-1]) and not profile.steps[-1].clocks
    assert profile.steps[-1].token_id is None


@pytest.mark.parametrize("at_step", [1, 4])
def test_an_interrupted_one_of_numpy_is_left(monkeypatch, tmp_path, at_step):
    """As above, where a step has no part yet at all: shares of no time."""
    from engine import reference

    forward, begun = reference.forward, []

    def interrupted(*args):
        begun.append(args)
        if len(begun) == at_step:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr("engine.reference.forward", interrupted)
    profile = run_until_interrupted(built_in(backend="numpy"), 8)
    check_that_it_can_be_told(profile, at_step, tmp_path)


def check_that_it_can_be_told(profile: Profile, n_steps: int, folder: Path) -> None:
    """In every form there is: printed, as JSON, as arrays, traced and written."""
    profile.bounds = BOUNDS
    assert len(profile.steps) == n_steps
    json.dumps(profile.as_dict(), allow_nan=False)
    assert "prefill" in profile.table() or n_steps == 1
    assert len(arrays(profile)["ms"]) == n_steps
    json.dumps(trace(profile), allow_nan=False)
    write_trace(profile, folder / "trace.json")
    write_steps(profile, folder / "steps.csv")
    assert len((folder / "steps.csv").read_text().splitlines()) == 1 + n_steps


def test_an_interrupted_step_adds_no_work(tiny, monkeypatch):
    """A step that did not end counted as work done, in the time of those that did: of two chunks
    one interrupted, twice the speed."""
    llm = tiny(threads=1)
    interrupt(monkeypatch, 2)
    profile = run_until_interrupted(llm, 8)
    first = profile.steps[0]
    (parts,) = profile.rank_parts(first)
    took = sum(part.seconds for part in parts if part.name == "matmul up")
    _, n_operations = llm._model.work(first.tokens, 0, 0, first.row_bytes)["matmul up"]
    found = profile.rows("prefill")["matmul up"]["operations_per_second"]
    assert found == pytest.approx(n_operations / took)


def test_an_interrupted_step_is_in_no_mean(tiny, monkeypatch):
    """Time and calls of the steps that ended shared out among one more that did not: a mean below
    every step there was."""
    llm = tiny(threads=1)
    interrupt(monkeypatch, 2)
    profile = run_until_interrupted(llm, 8)
    ended, _ = profile.steps
    assert profile.rows("prefill")["matmul up"]["calls"] == llm.config.n_layers
    assert profile.as_dict()["prefill"]["ms"] >= 1e3 * ended.seconds


def test_a_profile_while_it_is_filled(tiny):
    """Figures that are there only at the end: a run cannot be watched."""
    generation = tiny()._start(PROMPT, greedy(8), profile=True)
    profile = generation.completion.profile
    assert profile.table() == "" and trace(profile)["traceEvents"]
    tokens = generation.tokens()
    for n_steps in (0, 1, 2):
        next(tokens)
        assert profile.as_dict().get("decode", {"steps": 0})["steps"] == n_steps
        assert ("decode: " in profile.table()) == (n_steps > 0)


# ---------------------------------------------------------------- how it is told


def test_table():
    """Columns that shift, rows out of order, a phase left out, shares that do not add up."""
    profile = profile_of(built_in(threads=2, prefill_chunk=8), 6, "To be, or not to be, that is")
    lines = profile.table().splitlines()
    heads = [i for i, line in enumerate(lines) if not line.startswith(" ") and line]
    assert re.fullmatch(r"prefill: 2 steps, \d+ tokens, \d+\.\d{3} ms a step", lines[heads[0]])
    assert re.fullmatch(r"decode: 5 steps, \d+\.\d{3} ms a step", lines[heads[1]])
    assert len(heads) == 2 and lines[heads[1] - 1] == ""
    for phase, body in (("prefill", lines[: heads[1] - 1]), ("decode", lines[heads[1] :])):
        assert body[1].split() == ["operation", "calls", "ms", "share", "speed"]
        told = [
            re.fullmatch(r"  (\D+?) +(\d+) +(\d+\.\d{3}) +(\d+\.\d)%", line) for line in body[2:]
        ]
        assert all(told), body
        assert [line[1] for line in told] == list(profile.rows(phase))
        ms = [float(line[3]) for line in told]
        assert ms == sorted(ms, reverse=True)
        assert sum(ms) == pytest.approx(float(body[0].split(", ")[-1].split()[0]), abs=0.02)
        assert sum(float(line[4]) for line in told) == pytest.approx(100, abs=1.5)


@pytest.mark.parametrize("unit", ["bytes_per_second", "operations_per_second"])
def test_speeds_beside_their_bounds(unit):
    """The bound that is far away shown and not the near one; bytes shown as operations; a speed
    given to an operation that has none; attention, in float32, beside the peak of 8 bits."""
    profile = profile_of(built_in(threads=1), 6, "To be")
    near = {"bytes_per_second": {unit: 1e8}}.get(unit, {unit: 1e8, f"f32_{unit}": 2e8})
    profile.bounds = BOUNDS | near  # far below the others: what is nearest to its bound
    short = {"bytes_per_second": "GB/s", "operations_per_second": "G op/s"}[unit]
    rows, told = profile.as_dict()["decode"]["rows"], set()
    for line in profile.table().split("decode:")[1].splitlines()[2:]:
        name, _, speed = re.fullmatch(r"  (\D+?) +(\d+) +\S+ +\S+%(?:  (.*))?", line).groups()
        if speed:
            bound = near.get(f"f32_{unit}", 1e8) if name == "attention" else 1e8
            found = re.fullmatch(rf"([\d.]+) {short}, (\d+)% of {bound / 1e9:.1f}", speed)
            assert float(found[1]) == pytest.approx(rows[name][unit] / 1e9, abs=0.051)
            assert float(found[2]) == pytest.approx(rows[name][unit] / bound * 100, abs=0.51)
            told.add(name)
    assert told == {*MATMULS, "attention", "head"}


@pytest.mark.parametrize("backend", ["simd", "numpy"])
@pytest.mark.parametrize("bounds", [{}, BOUNDS], ids=["alone", "bounds"])
def test_as_json(backend, bounds):
    """NumPy's numbers, which JSON does not know, or NaN, which it does not allow."""
    profile = profile_of(built_in(backend=backend), 4, "To be")
    profile.bounds = bounds
    found = json.loads(json.dumps(profile.as_dict(), allow_nan=False))
    assert found == profile.as_dict() and found["bounds"] == bounds
    assert set(found) == {"bounds", "prefill", "decode"}
    for phase, n_steps, n_tokens in (("prefill", 1, 2), ("decode", 3, 3)):
        about = found[phase]
        assert (about["steps"], about["tokens"]) == (n_steps, n_tokens)
        assert about["rows"] == profile.rows(phase) and about["ms"] > 0
    assert ("GB/s" in profile.table()) == (bool(bounds) and backend == "simd")


@pytest.mark.parametrize("settings", [{"threads": 2}, {"backend": "numpy"}], ids=str)
def test_arrays(settings):
    """A column a row short, or of the sum of ranks and not their mean: a picture that misleads."""
    llm = built_in(prefill_chunk=8, **settings)
    done = llm.generate("To be, or not to be, that is", greedy(6), profile=True)
    profile, found = done.profile, arrays(done.profile)
    assert {len(column) for column in found.values()} == {len(profile.steps)} == {7}
    about = ["phase", "tokens", "context", "ms", "token_id"]
    assert list(found)[:5] == about
    assert found["phase"].tolist() == ["prefill"] * 2 + ["decode"] * 5
    assert found["token_id"].tolist() == [-1, *done.token_ids]
    assert found["tokens"].tolist() == [s.tokens for s in profile.steps]
    assert found["context"].tolist() == [s.context for s in profile.steps]
    operations = {name: column for name, column in found.items() if name not in about}
    assert (sum(operations.values()) <= found["ms"] + 1e-6).all()
    for phase in ("prefill", "decode"):
        these, rows = found["phase"] == phase, profile.rows(phase)
        assert found["ms"][these].mean() == pytest.approx(profile.as_dict()[phase]["ms"])
        rest = rows.pop("python")["ms"]
        means = {name: column[these].mean() for name, column in operations.items()}
        assert {n: ms for n, ms in means.items() if ms} == pytest.approx(
            {name: row["ms"] for name, row in rows.items()}
        )
        assert rest == pytest.approx(found["ms"][these].mean() - sum(means.values()))


def test_nothing_to_tell(tiny):
    """No token wanted, no step made: means of nothing."""
    profile = profile_of(tiny(), 0)
    assert profile.steps == [] and profile.table() == ""
    assert profile.as_dict() == {"bounds": {}} and profile.rows("decode") == {}
    assert {len(column) for column in arrays(profile).values()} == {0}


# ---------------------------------------------------------------- the clock


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_clock_has_room(tiny, phase):
    """Marks past the end of the clock, perhaps of a model with many layers only: memory of
    something else overwritten."""
    marks = {}
    for n_layers in (1, 2, 5):
        profile = profile_of(tiny(n_layers, threads=2), 3)
        clocks = [clock for s in profile.steps if s.phase == phase for clock in s.clocks]
        assert all(len(clock) == 1 + 2 * clock[0] for clock in clocks)
        marks[n_layers] = max(clock[0] for clock in clocks)
    of_a_layer = marks[2] - marks[1]
    assert of_a_layer > 7 and marks[5] == marks[2] + 3 * of_a_layer
    for n_layers in (1, 2, 5, 28, 1000):
        room = (len(new_clock(n_layers)) - 1) // 2
        assert marks[1] + (n_layers - 1) * of_a_layer < room


def test_the_counter_runs_evenly():
    """A counter of cycles, which slows down with the processor, or one that counts something else:
    its rate over two stretches of time is not the same."""
    rates = []
    for _ in range(4):
        seconds, count = time.perf_counter(), ticks()
        while time.perf_counter() < seconds + 0.05:
            pass
        seconds, count = time.perf_counter() - seconds, ticks() - count
        rates.append(count / seconds)
    assert max(rates) < 1.05 * min(rates) and min(rates) > 1e6, rates


def test_the_counter_is_the_same_on_every_processor():
    """A counter that each processor starts for itself: ranks that cannot be compared."""
    cpus = sorted(os.sched_getaffinity(0))[:4] if hasattr(os, "sched_getaffinity") else [None]
    for cpu in cpus:
        with ThreadPoolExecutor(1) as other:
            if cpu is not None:  # of that thread alone
                other.submit(os.sched_setaffinity, 0, {cpu}).result()
            for _ in range(50):
                before, there, after = ticks(), other.submit(ticks).result(), ticks()
                assert before < there < after
