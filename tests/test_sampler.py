"""engine/sampler.py and engine/params.py: which token, how often, and what is refused.

What is done to logits before the filters has a file of its own, test_penalties.py. Draws are held
against `twin`, transformers' filters in plain NumPy with a whole sort.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import FrozenInstanceError, fields, replace

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.config import show
from engine.kernels.jit import kernel
from engine.kernels.sampling import are_finite, sample
from engine.sampler import Sampler, SamplingParams

NAN, INF = float("nan"), float("inf")
VOCAB = 151_936  # Qwen3's


@kernel
def draw_many(logits, n, temperature, top_k, top_p, min_p, rng, out):
    for i in range(len(out)):
        out[i] = sample(logits, n, temperature, top_k, top_p, min_p, rng)


def padded(logits, padding: float = 1e30) -> np.ndarray:
    """As the model writes them: float32, with room for whole vectors, and anything in that room."""
    logits = np.asarray(logits, np.float32)
    out = np.full((len(logits) + 15) // 16 * 16, padding, np.float32)
    out[: len(logits)] = logits
    return out


def one_by_one(logits, count: int, seed: int | None = 0, **params) -> list[int]:
    sampler = Sampler(SamplingParams(seed=seed, **params), len(logits))
    logits = padded(logits)
    return [sampler(logits) for _ in range(count)]


def draws(logits, count: int, seed: int = 0, **params) -> np.ndarray:
    """The tokens of `one_by_one`, drawn by one call of a kernel."""
    p = SamplingParams(seed=seed, **params)
    out = np.empty(count, np.int64)
    temperature, rng = np.float32(p.temperature), np.random.default_rng(seed)
    top_k = min(p.top_k, len(logits))
    top_p, min_p = float(p.top_p), float(p.min_p)
    draw_many(padded(logits), len(logits), temperature, top_k, top_p, min_p, rng, out)
    return out


def twin(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The probability of each token in transformers' order: temperature, top_k, top_p, min_p."""
    logits = np.asarray(logits, np.float32).astype(np.float64)
    p = np.exp((logits - logits.max()) / temperature)
    if 0 < top_k < len(p):
        p[logits < np.sort(logits)[-top_k]] = 0
    p /= p.sum()
    order = np.argsort(-logits, kind="stable")  # of equal ones the lowest id first
    mass_before = np.cumsum(p[order]) - p[order]
    if top_p < 1:
        p[order[mass_before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def assert_drawn_from(p: np.ndarray, tokens: np.ndarray) -> None:
    """Pearson's chi-square: chance alone gives one as large less often than once in 10,000."""
    assert tokens.min() >= 0 and tokens.max() < len(p)
    counts = np.bincount(tokens, minlength=len(p))
    assert not counts[p == 0].any(), f"filtered out, but drawn: {np.flatnonzero(counts * (p == 0))}"
    expected = p * len(tokens)
    often = expected >= 10
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    chi2, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    assert not freedom or chi2_tail(chi2, freedom) > 1e-4, (chi2, freedom)


def chi2_tail(x: float, freedom: int) -> float:
    """The probability that chi-square of so many degrees of freedom is above x."""
    half, odd = max(x / 2, 1e-300), freedom % 2
    powers = [k / 2 for k in range(odd, freedom, 2)]  # of half, each over its factorial
    terms = (math.exp(p * math.log(half) - half - math.lgamma(p + 1)) for p in powers)
    return sum(terms) + (math.erfc(half**0.5) if odd else 0.0)


# --- distributions worked out by hand ---

NICE = np.log([0.2, 0.4, 0.1, 0.3])
THREE_SQUARED = [4 / 29, 16 / 29, 0, 9 / 29]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.2, 0.4, 0.1, 0.3]),
        ({"temperature": 0.5}, [4 / 30, 16 / 30, 1 / 30, 9 / 30]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 3}, [2 / 9, 4 / 9, 0, 3 / 9]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.41}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [2 / 9, 4 / 9, 0, 3 / 9]),
        ({"top_p": 0.91}, [0.2, 0.4, 0.1, 0.3]),
        ({"min_p": 0.8}, [0, 1, 0, 0]),
        ({"min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 0.4}, [2 / 9, 4 / 9, 0, 3 / 9]),
        ({"min_p": 0.2}, [0.2, 0.4, 0.1, 0.3]),
        # Temperature first: at 0.5 the mass before the third is 25/30, at 1 it is 0.7.
        ({"temperature": 0.5, "top_p": 0.8}, [0, 16 / 25, 0, 9 / 25]),
        ({"temperature": 0.5, "min_p": 0.3}, [0, 16 / 25, 0, 9 / 25]),
        # top_p of what top_k left: the mass before the third is 7/9, of all four it is 0.7.
        ({"top_k": 3, "top_p": 0.75}, [0, 4 / 7, 0, 3 / 7]),
        # min_p behind top_p: before it, top_p would see 4/7 and keep only the first.
        ({"top_p": 0.5, "min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.95, "min_p": 0.4}, [2 / 9, 4 / 9, 0, 3 / 9]),
        ({"top_k": 3, "min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        (
            {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.2},
            [4 / 29, 16 / 29, 0, 9 / 29],
        ),
    ],
)
def test_by_hand(params, expected):
    """A filter keeps a token too many or too few, or filters come in another order."""
    assert twin(NICE, **params) == pytest.approx(np.array(expected), abs=1e-6)
    assert_drawn_from(np.array(expected), draws(NICE, 20_000, **params))


def test_temperature_comes_before_top_p():
    """The order of llama.cpp: of logits 3, 2, 1 it keeps two with top_p 0.8, T 0.5; ours is one.

    e^0 : e^-2 : e^-4 puts 0.867 on the first, which is more than 0.8. At T 1 it would be 0.665.
    """
    assert set(one_by_one([3, 2, 1], 1000, temperature=0.5, top_p=0.8)) == {0}
    assert set(one_by_one([3, 2, 1], 1000, temperature=1.0, top_p=0.8)) == {0, 1}
    assert set(one_by_one([3, 2, 1], 1000, temperature=0.5, top_p=0.87)) == {0, 1}


# --- distributions by the twin ---


def normal(n: int, scale: float = 2.0) -> np.ndarray:
    return np.random.default_rng(n).normal(size=n) * scale


def with_holes(logits: np.ndarray) -> np.ndarray:
    """-inf in a whole vector, at the ends and here and there."""
    logits[[0, 1, 7, -1]] = logits[16:32] = logits[40::9] = -INF
    return logits


TIED = np.round(normal(60))  # whole numbers from -4 to 5


@pytest.mark.parametrize(
    ("logits", "params"),
    [
        (normal(50), {}),
        (normal(300), {"temperature": 0.7}),
        (normal(300), {"temperature": 3.0}),
        (normal(300), {"top_k": 20}),
        (normal(100), {"top_p": 0.9}),
        (normal(300), {"top_p": 0.99, "temperature": 1.5}),
        (normal(100), {"min_p": 0.05}),
        (normal(300), {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        (normal(300), {"temperature": 1.5, "top_k": 50, "top_p": 0.8, "min_p": 0.1}),
        (normal(300), {"temperature": 2.0, "top_p": 0.7, "min_p": 0.02}),
        (with_holes(normal(200)), {}),
        (with_holes(normal(200)), {"top_k": 40, "top_p": 0.9}),
        (with_holes(normal(200)), {"temperature": 2.0, "top_p": 0.9}),
        (with_holes(normal(200)), {"top_k": 199, "min_p": 1e-3}),
        (TIED, {"top_k": 7}),
        (TIED, {"top_p": 0.5}),
        (TIED, {"top_k": 7, "top_p": 0.6}),
        (TIED, {"temperature": 3.0, "min_p": 0.3}),
        (np.zeros(33), {}),
        (np.zeros(33), {"top_p": 0.5}),
        (np.zeros(33), {"top_k": 5, "min_p": 1.0}),
        (np.append(np.full(60, -1e4), [1e4, 1e4 - 1, 0.0]), {}),
        (np.linspace(-1e4, 1e4, 77), {"temperature": 1e3, "top_p": 0.9}),
    ],
)
def test_frequencies(logits, params):
    """Tokens come at other rates than asked for, a little or a lot, under any mix of filters."""
    assert_drawn_from(twin(logits, **params), draws(logits, 100_000, **params))


def test_top_k_keeps_ties():
    """The k-th token's equals are cut off, so that what is kept depends on ids."""
    logits = [1.0, 3.0, 2.0, 2.0, 0.0, 2.0]
    assert set(draws(logits, 3000, top_k=1)) == {1}
    assert set(draws(logits, 3000, top_k=2)) == {1, 2, 3, 5}
    assert set(draws(logits, 3000, top_k=4)) == {1, 2, 3, 5}
    assert set(draws(logits, 3000, top_k=5)) == {0, 1, 2, 3, 5}


def test_top_p_takes_the_lowest_ids_of_equals():
    """Of equal tokens all are kept, or others from one draw to the next."""
    assert set(draws(np.zeros(40), 5000, top_p=0.26)) == set(range(11))
    logits = np.zeros(40)
    logits[[5, 20, 36]] = 9.0
    assert set(draws(logits, 5000, top_p=0.5)) == {5, 20}
    assert set(draws(logits, 5000, top_p=0.5, top_k=2)) == {5, 20}


@pytest.mark.parametrize("params", [{"top_p": 1e-9}, {"top_p": 1e-300}, {"top_p": 5e-324}])
def test_tiny_top_p_is_the_argmax(params):
    """No token has so little mass before it, and none is left; or equals are left."""
    assert set(draws(normal(300), 500, **params)) == {int(normal(300).argmax())}
    assert set(draws(np.zeros(300), 500, **params)) == {0}
    assert set(draws(-TIED, 500, **params)) == {int((-TIED).argmax())}


def test_min_p_of_one_is_the_argmaxes():
    """The largest token is not as probable as itself, by rounding, and none is left."""
    for temperature in (0.01, 0.3, 1.0, 7.0):
        params = {"min_p": 1.0, "temperature": temperature}
        assert set(draws(normal(300), 300, **params)) == {int(normal(300).argmax())}
        assert set(draws([1, 5, 5, 2, -INF, 5], 300, **params)) == {1, 2, 5}


@pytest.mark.parametrize("top_k", [0, -1, 50, 51, 10**6, 2**62, 10**30])
def test_top_k_that_keeps_all(top_k):
    """top_k at or past the vocabulary reads beyond the logits; 0 or -1 keeps nothing, or one."""
    plain = one_by_one(normal(50), 300)
    assert one_by_one(normal(50), 300, top_k=top_k) == plain
    assert len(set(plain)) > 10


# --- temperatures and logits at the ends ---


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 1e-8, 1e-45, 1e-320, np.float32(0)])
@pytest.mark.parametrize("others", [{}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}])
def test_temperature_zero_is_the_argmax(temperature, others):
    """Dividing by (almost) zero gives NaN and one id for ever; ties fall to any id."""
    params = {"temperature": temperature, **others}
    assert set(one_by_one([1, 5, 5, 2], 20, **params)) == {1}
    assert set(one_by_one([-INF, -3, -INF, -3], 20, **params)) == {1}
    assert set(one_by_one(normal(300), 20, **params)) == {int(normal(300).argmax())}
    assert set(one_by_one(np.zeros(17), 20, **params)) == {0}


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_small_temperatures(temperature):
    """Just above where the argmax takes over, logits over T overflow to NaN."""
    logits = np.array([-1e30, 3.0, 80.0, 79.0, -INF, 80.0])
    assert_drawn_from(twin(logits, temperature), draws(logits, 2000, temperature=temperature))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [1e6, 1e30, 3e38, 1e39, 1e300, 10**39])
def test_large_temperatures_are_uniform(temperature):
    """The temperature overflows float32: a warning a token, or NaN and one id for ever."""
    logits = np.append(normal(32), -INF)
    refusable = temperature > 3.4e38  # what float32 holds
    with contextlib.suppress(ValueError) if refusable else contextlib.nullcontext():
        tokens = np.array(one_by_one(logits, 5000, temperature=temperature))
        assert_drawn_from(np.append(np.full(32, 1 / 32), 0), tokens)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_spread_logits(params):
    """Differences past exp's range turn into NaN, or into zero mass for all."""
    logits = np.array([-1e4, 1e4, 0, 1e4 - 1, -3e38, -INF, 9.9e3] + [-1e4] * 30)
    assert_drawn_from(twin(logits, **params), draws(logits, 5000, **params))
    assert set(draws([-3e38, 3e38, 0.0], 500, **params)) == {1}
    assert set(draws(-np.arange(40) * 1e4, 500, **params)) == {0}


def rng_that_gives(bits: int) -> np.random.Generator:
    """A generator whose next 64 bits are these: PCG64's output and step, backwards."""
    source = np.random.PCG64(0)
    state = source.state
    high = 0  # its top bits are the rotation of the output
    after = high << 64 | (high ^ bits)
    multiplier, modulus = 0x2360ED051FC65DA44385DF649FCCF645, 1 << 128
    before = (after - state["state"]["inc"]) * pow(multiplier, -1, modulus)
    state["state"]["state"] = before % modulus
    source.state = state
    return np.random.Generator(source)


@pytest.mark.parametrize("bits", [0, 1 << 11, 2**64 - 1], ids=["0", "2^-53", "1 - 2^-53"])
@pytest.mark.parametrize("n", [1, 16, 17, 48, 200])
@pytest.mark.parametrize("hole", ["none", "first", "last", "both"])
def test_ends_of_the_random_numbers(bits, n, hole):
    """A draw of exactly 0, or of almost 1, gives a token that has no mass, or runs off the end."""
    assert rng_that_gives(bits).random() == (bits >> 11) * 2.0**-53
    logits = normal(n)
    if hole in ("first", "both"):
        logits[: n // 3] = -INF
    if hole in ("last", "both"):
        logits[n - n // 3 :] = -INF
    for k, p, m in [(0, 1.0, 0.0), (n // 2, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.9, 0.1), (9, 0.9, 0.1)]:
        kept = np.flatnonzero(twin(logits, 1.0, k, p, m))
        assert sample(padded(logits), n, np.float32(1), k, p, m, rng_that_gives(bits)) in kept


@pytest.mark.parametrize("value", [-INF, INF, NAN])
@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("others", [0, 1, 20])
def test_broken_logits_give_an_id(value, params, others):
    """Logits that are all NaN or infinite, or nearly all, give an id from stray memory.

    Which may look like any id: that it was read at all is certain only with NUMBA_BOUNDSCHECK=1.
    """
    logits = np.full(100, value)
    logits[50 : 50 + others] = 1.0
    for seed in range(10):
        with contextlib.suppress(ValueError):  # a refusal would be as good
            assert 0 <= one_by_one(logits, 1, seed=seed, **params)[0] < 100


# --- vocabularies and their padding ---


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("padding", [1e30, INF, NAN, -INF])
@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {}, {"top_k": 2}, {"top_k": 16}, {"top_p": 0.5}, {"min_p": 0.3}],
)
def test_padding_is_never_chosen(n, padding, params):
    """What happens to stand behind the last logit is an id, or counts as mass or as the largest."""
    logits = normal(n, 1.0)
    sampler = Sampler(SamplingParams(seed=0, **params), n)
    tokens = np.array([sampler(padded(logits, padding)) for _ in range(200)])
    if params.get("temperature") == 0:
        assert set(tokens) == {int(logits.argmax())}
    else:
        assert_drawn_from(twin(logits, **params), tokens)


# --- any logits, any parameters ---

VALUES = st.one_of(
    st.integers(-3, 3).map(float),  # ties
    st.floats(-30, 30, width=32),
    st.just(-INF),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
SHARE = st.floats(0, 1) | st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0])


@settings(max_examples=400, deadline=None)
@given(
    logits=st.lists(VALUES, min_size=1, max_size=70).filter(lambda x: max(x) > -INF),
    temperature=st.floats(1e-5, 1e3) | st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(-1, 80),
    top_p=SHARE.filter(lambda x: x > 0),
    min_p=SHARE,
    seed=st.integers(0, 2**64),
)
@example(logits=[0.0] * 70, temperature=1.0, top_k=0, top_p=5e-324, min_p=1.0, seed=0)
def test_only_what_is_kept_is_drawn(logits, temperature, top_k, top_p, min_p, seed):
    """A token outside the filters comes up, a likely one within them never, or the loop hangs.

    At a filter's very edge float32 may round either way, so edges are widened by 1e-4 for what
    may come up and narrowed for what must.
    """
    params = {"temperature": temperature, "top_k": top_k}
    tokens = draws(logits, 100, seed=seed, top_p=top_p, min_p=min_p, **params)
    wide = twin(logits, top_p=top_p * 1.0001, min_p=min_p / 1.0001, **params)
    narrow = twin(logits, top_p=top_p / 1.0001, min_p=min(min_p * 1.0001, 1.0), **params)
    assert set(tokens) <= set(np.flatnonzero(wide))
    assert set(np.flatnonzero((wide > 0.3) & (narrow > 0))) <= set(tokens)


# --- seeds ---


def test_batch_of_draws_is_the_samplers():
    """The draws that these tests count are not the ones that a request gets."""
    for params in ({}, {"top_k": 5}, {"top_k": 99, "top_p": 0.9}, {"top_p": 0.5, "min_p": 0.1}):
        for seed in (0, 7):
            expected = one_by_one(normal(50), 100, seed, **params)
            assert draws(normal(50), 100, seed, **params).tolist() == expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [13, 18, 13, 6, 6, 18, 2, 13, 13, 11, 6, 6, 6, 11, 12, 12]),
        (
            {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
            [13, 19, 13, 6, 6, 18, 18, 13, 11, 6, 6, 6, 11, 12, 12, 19],
        ),
    ],
)
def test_draws_of_a_seed(params, expected):
    """A seed gives another text than it gave with an earlier version."""
    assert one_by_one(np.arange(20) % 7, 16, 7, **params) == expected


def test_seeds():
    """A seed does not repeat, or is ignored; requests without one all say the same."""
    assert one_by_one(np.zeros(50), 20, 1) == one_by_one(np.zeros(50), 20, 1)
    by_seed = {tuple(one_by_one(np.zeros(50), 20, seed)) for seed in (0, 1, 2, 2**32, 2**70)}
    assert len(by_seed) == 5
    assert len({tuple(one_by_one(np.zeros(50), 20, None)) for _ in range(5)}) == 5


def test_requests_do_not_share_a_generator():
    """A seeded request answers otherwise when another, seeded or not, runs beside it."""
    logits = padded(np.zeros(50))
    alone = one_by_one(np.zeros(50), 20, 1)
    np.random.seed(0)
    seeded, other, unseeded = (Sampler(SamplingParams(seed=s), 50) for s in (1, 1, None))
    beside = [(seeded(logits), unseeded(logits), other(logits)) for _ in range(20)]
    assert [a for a, _, _ in beside] == [c for _, _, c in beside] == alone


def test_logits_are_not_changed():
    """A filter writes into the logits, which the model or a log still needs."""
    logits = padded(normal(50))
    before = logits.copy()
    for params in ({"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.5, "min_p": 0.1}):
        Sampler(SamplingParams(seed=0, **params), 50)(logits)
        assert np.array_equal(logits, before)


# --- parameters ---

REFUSED = {
    "max_tokens": [-1, NAN, INF, -INF, 1.5, 10.0, True, "5", [5]],
    "temperature": [-0.1, -1e-320, NAN, INF, -INF, True, "1", None, [1.0], 1j, -1],
    "top_k": [-2, NAN, INF, 1.5, 20.0, True, "5", None],
    "top_p": [0, 0.0, -0.1, 1.0001, 2, NAN, INF, True, ".9", None],
    "min_p": [-0.1, 1.0001, 2, NAN, INF, -INF, True, "0", None],
    "seed": [-1, NAN, INF, 1.5, 0.0, True, False, "0", np.random.default_rng(0)],
    "ignore_eos": [0, 1, "yes", None, NAN],
    "repetition_penalty": [0, -1, -1e-9, 10.01, NAN, INF, True, "1", None, [1.0]],
    "presence_penalty": [-2.01, 2.01, 100, NAN, INF, -INF, True, "0", None],
    "frequency_penalty": [-2.01, 2.01, 100, NAN, INF, -INF, True, "0", None],
    "logprobs": [-1, 21, 5.0, NAN, INF, True, False, "5", [5]],
    "min_tokens": [-1, 129, 1.0, NAN, INF, True, "5", None],
    "n": [0, -1, 129, 1.0, NAN, INF, True, "2", None],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k in REFUSED for v in REFUSED[k]])
def test_parameters_out_of_range(name, value):
    """A parameter out of range collapses the text to low ids instead of being refused."""
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert message.startswith(f"{name} is {show(value)}; ") and "\n" not in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logit_bias": {5: 100.5}}, "logit_bias[5] is 100.5; a number at least -100 and at most"),
        ({"logit_bias": {5: -101}}, "logit_bias[5] is -101; "),
        ({"logit_bias": {5: NAN}}, "logit_bias[5] is nan; "),
        ({"logit_bias": {5: None}}, "logit_bias[5] is None; "),
        ({"logit_bias": {5: True}}, "logit_bias[5] is True; "),
        ({"logit_bias": {1: 0, -1: 0}}, "logit_bias's id is -1; a whole number at least 0"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias's id is '5'; "),
        ({"logit_bias": {5.0: 1.0}}, "logit_bias's id is 5.0; "),
        ({"logit_bias": {True: 1.0}}, "logit_bias's id is True; "),
        ({"logit_bias": [(5, 1.0), (5, 2.0)]}, "logit_bias's id is 5 twice; "),
        ({"logit_bias": [5, 1.0]}, "logit_bias is [5, 1.0]; "),
        ({"logit_bias": [(5, 1.0, 2.0)]}, "logit_bias is [(5, 1.0, 2.0)]; "),
        ({"logit_bias": ["51"]}, "logit_bias is ['51']; "),
        ({"logit_bias": "51"}, "logit_bias is '51'; "),
        ({"logit_bias": 5}, "logit_bias is 5; "),
        ({"stop": ""}, "stop is ''; "),
        ({"stop": ["a", ""]}, "stop is ''; "),
        ({"stop": ["a", 5]}, "stop is 5; "),
        ({"stop": [["a"]]}, "stop is ['a']; "),
        ({"stop": b"a"}, "stop is b'a'; "),
        ({"stop": None}, "stop is None; "),
        ({"stop": {"a"}}, "stop is {'a'}; "),
        ({"stop": ["a"] * 17}, "stop is ['a', 'a', 'a', 'a', 'a', 'a', ...]; "),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; "),
        ({"stop_token_ids": None}, "stop_token_ids is None; "),
        ({"stop_token_ids": "5"}, "stop_token_ids is '5'; "),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids is -1; a whole number at least 0 is needed"),
        ({"stop_token_ids": [5.0]}, "stop_token_ids is 5.0; "),
        ({"stop_token_ids": np.zeros(2)}, "stop_token_ids is 0.0; "),
        ({"stop_token_ids": [True]}, "stop_token_ids is True; "),
        ({"stop_token_ids": ["5"]}, "stop_token_ids is '5'; "),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; at most max_tokens, which is 4"),
    ],
)
def test_lists_out_of_range(values, message):
    """One wrong value among many is kept, to fail amid the request, or is not named."""
    with pytest.raises(ValueError) as error:
        SamplingParams(**values)
    assert str(error.value).startswith(message) and str(error.value).endswith("needed")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_numpy_nan_is_refused(name, kind):
    """NaN passes in NumPy's clothes."""
    with pytest.raises(ValueError, match=f"^{name} is "):
        SamplingParams(**{name: kind(NAN)})


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"])
@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["huge", "-huge"])
def test_whole_numbers_beyond_a_float(name, value):
    """A whole number of 400 digits, which is valid JSON, is an OverflowError."""
    if value > 0 and name in ("max_tokens", "top_k", "seed"):
        with contextlib.suppress(ValueError):  # both are right: no limit, or one that is named
            params = SamplingParams(**{name: value})
            assert 0 <= Sampler(params, 4)(padded(np.zeros(4))) < 4
    else:
        with pytest.raises(ValueError, match=f"^{name} is "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0, "temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0, "seed": 0},
        {"max_tokens": None, "seed": None, "min_p": 1, "top_p": 1.0, "ignore_eos": True},
    ],
)
def test_parameters_at_their_limits(params):
    """A limit that is allowed is refused; a whole number where a fraction may stand."""
    assert 0 <= Sampler(SamplingParams(**params), 50)(padded(normal(50))) < 50


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 10, "presence_penalty": -2, "frequency_penalty": 2, "n": 1},
        {"repetition_penalty": 1e-300, "presence_penalty": 2, "frequency_penalty": -2, "n": 128},
        {"logit_bias": {0: 100, 49: -100.0}, "logprobs": 0, "min_tokens": 0, "stop": ["a"] * 16},
        {"logit_bias": {}, "logprobs": 20, "min_tokens": 128, "stop": (), "stop_token_ids": []},
        {"logit_bias": None, "logprobs": None, "min_tokens": 10**9, "max_tokens": None},
        {"stop": "a" * 1000, "stop_token_ids": range(49), "min_tokens": 1, "max_tokens": 1},
    ],
)
def test_new_parameters_at_their_limits(params):
    """A limit that is allowed is refused, or breaks what it limits."""
    sampler = Sampler(SamplingParams(**params), 50, [1, 2], [3])
    assert all(0 <= sampler(padded(normal(50))) < 50 for _ in range(20))


MANY = {
    "logit_bias": {7: np.float32(0.5), np.int64(3): -1},
    "stop": ["\n\n", np.str_("Q:")],
    "stop_token_ids": np.array([9, 4]),
    "temperature": np.float64(0.7),
    "top_k": np.int32(5),
    "logprobs": np.uint8(3),
    "seed": 2**70,
}


def test_parameters_are_plain():
    """A request cannot be written as JSON or read again; or a list in it may still change."""
    params = SamplingParams(**MANY)
    assert params.logit_bias == ((3, -1), (7, 0.5)) and params.stop == ("\n\n", "Q:")
    assert params.stop_token_ids == (9, 4) and SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(**json.loads(json.dumps(vars(params)))) == params
    assert replace(params, seed=1) == SamplingParams(**MANY | {"seed": 1})
    assert set(vars(params)) == {f.name for f in fields(params)}
    with pytest.raises(FrozenInstanceError):
        params.stop = ()
    bias, stop = {1: 1.0}, ["a"]
    kept = SamplingParams(logit_bias=bias, stop=stop)
    bias[2], stop[0] = 5.0, "b"
    assert kept == SamplingParams(logit_bias=[(1, 1.0)], stop="a")


def test_parameters_as_keys():
    """Equal requests are told apart, or one cannot be a key at all."""
    turned = {"logit_bias": dict(reversed(MANY["logit_bias"].items()))}
    known = {SamplingParams(): "plain", SamplingParams(**MANY): "many"}
    assert known[SamplingParams(**MANY | turned)] == "many"
    assert known[SamplingParams(logit_bias={}, stop=[], temperature=1)] == "plain"
    assert SamplingParams(logit_bias={1: 1}) not in known


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 130),
    st.floats(),
    st.floats(-3, 11),
    st.text(max_size=3),
    st.binary(max_size=2),
    st.sampled_from([np.float32(NAN), np.float16(1), np.int8(-1), np.int64(3), np.str_("a"), 1j]),
)
ANYTHING = SCALARS | st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.lists(st.tuples(st.integers(0, 9), inner), max_size=3),
        st.dictionaries(SCALARS, inner, max_size=3),
        st.sets(SCALARS, max_size=2),
    ),
    max_leaves=6,
)


@settings(max_examples=250, deadline=None)
@given(values=st.dictionaries(st.sampled_from(fields(SamplingParams)), ANYTHING, max_size=2))
def test_any_parameters(values):
    """A value of another type ends in a TypeError, or is kept, to fail amid the request."""
    values = {field.name: value for field, value in values.items()}
    try:
        params = SamplingParams(**values)
    except ValueError as e:
        assert str(e).split("[")[0].split("'")[0].split()[0] in values or "min_tokens" in str(e)
        assert "\n" not in str(e)
        return
    assert SamplingParams(**json.loads(json.dumps(vars(params)))) == params
    assert hash(params) == hash(replace(params))
    with contextlib.suppress(ValueError):  # ids outside the vocabulary
        assert 0 <= Sampler(params, 300)(padded(normal(300))) < 300


@pytest.mark.parametrize("whole", [np.int64, np.int32, np.uint8, np.uint64])
@pytest.mark.parametrize("real", [np.float64, np.float32, np.float16])
def test_numpy_parameters(monkeypatch, whole, real):
    """Numbers out of an array are refused, or compile the kernel anew amid the first request."""
    numbers = {"top_k": whole(5), "seed": whole(3), "max_tokens": whole(9)}
    numbers |= {"temperature": real(0.5), "top_p": real(0.75), "min_p": real(0.125)}
    plain = {k: v.item() for k, v in numbers.items()}
    types = set()

    def spy(*args):
        types.add(tuple(numba.typeof(a) for a in args))
        return 0

    monkeypatch.setattr("engine.sampler.sample", spy)
    one_by_one(normal(50), 1, **plain)
    one_by_one(normal(50), 1, **numbers)
    assert len(types) == 1, types
    monkeypatch.undo()
    assert one_by_one(normal(50), 50, **numbers) == one_by_one(normal(50), 50, **plain)


# --- speed ---


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {},
        {"top_p": 0.9},
        {"top_p": 1e-9},
        {"min_p": 0.05},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 0, "repetition_penalty": 1.1, "logit_bias": {5: 1}, "logprobs": 20},
    ],
)
@pytest.mark.parametrize("shape", ["normal", "almost flat", "masked"])
def test_a_draw_of_qwen3s_vocabulary_is_quick(params, shape):
    """A whole sort of 151,936 logits, or a pass over them a token, costs as much as a layer."""
    logits = normal(VOCAB, 1e-3 if shape == "almost flat" else 3.0).astype(np.float32)
    if shape == "masked":
        logits[np.arange(VOCAB) % 1000 != 0] = -INF
    sampler, took = Sampler(SamplingParams(seed=0, **params), VOCAB), []
    for _ in range(15):
        start = time.perf_counter()
        sampler(logits)
        took.append(time.perf_counter() - start)
    assert np.median(took) < 5e-3, f"{np.median(took) * 1e3:.2f} ms"


@pytest.mark.parametrize(
    "name", ["max_tokens", "seed", "top_k", "temperature", "ignore_eos", "stop"]
)
@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["large", "small"])
def test_numbers_that_python_does_not_print(name, value):
    """Python's complaint about its own limit of digits, which names neither parameter nor range;
    or parameters that cannot be written as JSON."""
    with pytest.raises(ValueError, match=f"^{name} is a number of 16610 bits; "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("n", [1, 15, 16, 17, 100])
def test_are_finite(n):
    """One bad logit among the last, or in any lane, that is missed; one behind them that counts."""
    logits = np.random.default_rng(n).standard_normal(n + 16).astype(np.float32)
    logits[0] = 3e38
    logits[n:] = np.nan
    assert are_finite(logits, n)
    for i in {0, n // 2, n - 1}:
        for bad in (np.nan, np.inf, -np.inf):
            spoiled = logits.copy()
            spoiled[i] = bad
            assert not are_finite(spoiled, n), (i, bad)
