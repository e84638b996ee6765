"""engine/metrics.py: times of a run, by a clock that tests turn."""

from __future__ import annotations

import json

import pytest

from engine.metrics import Metrics


class Clock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(clock: Clock, forwards_ms: list[float]) -> Metrics:
    """A request of one forward a token, each of which takes as given."""
    metrics = Metrics(clock)
    for took in forwards_ms:
        since = metrics.now()
        clock.now += took / 1e3
        metrics.forward_took(since)
        metrics.token_came()
    return metrics


def test_report_has_exactly_this_form():
    """A label, a space or a digit changes under those who read the report by program."""
    steps = [263.060, 20.569] + [(63e3 / 46.071 - 20.569) / 62] * 62
    assert run(Clock(), steps).report(backend="simd", kv_cache="basic") == (
        "backend: simd\n"
        "kv cache: basic\n"
        "\n"
        "metrics:\n"
        "  time_to_first_token_ms: 263.060\n"
        "  decode_tokens_per_second: 46.071\n"
        "  per_forward_ms: min 20.569  max 263.060  mean 25.477  (n=64)"
    )


def test_report_of_nothing():
    """A run without a token divides by zero, or takes the least of an empty list."""
    assert Metrics(Clock()).report(backend="numpy", kv_cache="concat") == (
        "backend: numpy\n"
        "kv cache: concat\n"
        "\n"
        "metrics:\n"
        "  time_to_first_token_ms: n/a\n"
        "  decode_tokens_per_second: n/a\n"
        "  per_forward_ms: n/a  (n=0)"
    )


def test_report_of_one_token():
    """One token has a first but no rate: both are reported, or neither."""
    assert run(Clock(), [12.5]).report("simd", "basic").splitlines()[-3:] == [
        "  time_to_first_token_ms: 12.500",
        "  decode_tokens_per_second: n/a",
        "  per_forward_ms: min 12.500  max 12.500  mean 12.500  (n=1)",
    ]


@pytest.mark.parametrize("n", [0, 1, 2, 10])
def test_decode_leaves_out_the_prefill(n):
    """The prefill, or the first token that comes with it, is counted: 2.5 a second shown for 25."""
    metrics = run(Clock(), [2000.0, *[40.0] * 9][:n])
    assert metrics.per_forward_ms == pytest.approx([2000.0, *[40.0] * 9][:n])
    if n == 0:
        assert metrics.time_to_first_token_ms is None
    else:
        assert metrics.time_to_first_token_ms == pytest.approx(2000.0)
    if n < 2:
        assert metrics.decode_tokens_per_second is None
    else:
        assert metrics.decode_tokens_per_second == pytest.approx(25.0)


def test_first_token_is_counted_from_the_request():
    """Time that passes before the first forward, as in a queue, is left out of the wait."""
    clock = Clock()
    metrics = Metrics(clock)
    clock.now += 0.5
    since = metrics.now()
    clock.now += 0.25
    metrics.forward_took(since)
    clock.now += 0.125  # sampling, behind the forward
    metrics.token_came()
    assert metrics.time_to_first_token_ms == pytest.approx(875.0)
    assert metrics.per_forward_ms == pytest.approx([250.0])


def test_forward_without_a_token():
    """An interrupted prefill, a forward but no token, is reported as if a token had come."""
    clock = Clock()
    metrics = Metrics(clock)
    metrics.forward_took(metrics.now())
    assert metrics.time_to_first_token_ms is None and metrics.decode_tokens_per_second is None
    assert "min 0.000  max 0.000  mean 0.000  (n=1)" in metrics.report("simd", "basic")


@pytest.mark.parametrize("n", [2, 10])
def test_clock_that_stands_still(n):
    """Two tokens within a tick of a coarse clock divide by zero."""
    metrics = run(Clock(), [0.0] * n)
    assert metrics.decode_tokens_per_second is None
    assert metrics.time_to_first_token_ms == 0.0
    assert "decode_tokens_per_second: n/a" in metrics.report("simd", "basic")


@pytest.mark.parametrize("n", [0, 1, 2])
def test_as_dict_is_json(n):
    """A missing figure becomes NaN, which is no JSON, or a NumPy number, which json refuses."""
    metrics = run(Clock(), [2000.0, 40.0][:n])
    text = json.dumps(metrics.as_dict(), allow_nan=False)
    assert json.loads(text) == {
        "time_to_first_token_ms": metrics.time_to_first_token_ms,
        "decode_tokens_per_second": metrics.decode_tokens_per_second,
        "per_forward_ms": metrics.per_forward_ms,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "guessed_tokens": 0,
        "accepted_tokens": 0,
    }
    assert text.count("null") == [2, 1, 0][n]


def test_real_clock():
    """The default clock counts something else than seconds, or goes backwards."""
    metrics = Metrics()
    metrics.forward_took(metrics.now())
    metrics.token_came()
    assert 0 <= metrics.per_forward_ms[0] <= metrics.time_to_first_token_ms < 10_000
