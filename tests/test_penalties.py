"""engine/sampler.py, its steps before the filters: min_tokens, mask, penalties and bias; logprobs.

Held against definitions in plain float64 NumPy; draws are counted as in test_sampler.py.
"""

from __future__ import annotations

import json
import math
import threading

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_sampler import INF, NAN, VALUES, VOCAB, assert_drawn_from, draw_many, normal, padded, twin

from engine.kernels import sampling
from engine.sampler import Sampler, SamplingParams

LN2, LN3, LN5 = np.log([2, 3, 5])


def bits_of(ids, n: int) -> np.ndarray:
    """The packed mask that allows just `ids`."""
    allowed = np.zeros(-(-n // 32) * 32, bool)
    allowed[list(ids)] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


def primed(params: dict, n: int, prompt=(), output=(), **more) -> Sampler:
    """A sampler that has chosen `output`: each was the only token allowed."""
    sampler = Sampler(SamplingParams(**{"seed": 0, **params}), n, prompt, **more)
    for token in output:
        sampler.mask(bits_of([token], n))
        assert sampler(padded(np.zeros(n))) == token
    sampler.mask(None)
    return sampler


def draws(sampler: Sampler, logits, count: int) -> np.ndarray:
    """So many tokens as the next could be: what was chosen before stays the same for all."""
    p, out = sampler.params, np.empty(count, np.int64)
    filters = np.float32(p.temperature), min(p.top_k, len(logits)), float(p.top_p), float(p.min_p)
    left, rng = sampler.adjusted(padded(logits)), np.random.default_rng(p.seed)
    draw_many(left, len(logits), *filters, rng, out)
    return out


def adjusted_twin(
    logits, prompt, output, repetition_penalty=1, presence_penalty=0, frequency_penalty=0, bias=None
) -> np.ndarray:
    """Penalties and bias by their definitions, in float64."""
    x = np.asarray(logits, np.float32).astype(np.float64)
    for i in set(prompt) | set(output):
        x[i] = x[i] / repetition_penalty if x[i] > 0 else x[i] * repetition_penalty
    for i in set(output):
        x[i] -= presence_penalty + frequency_penalty * list(output).count(i)
    for i, b in (bias or {}).items():
        x[i] += b
    return x


def filters_of(params: dict) -> dict:
    return {k: v for k, v in params.items() if k in ("temperature", "top_k", "top_p", "min_p")}


# --- worked out by hand: masses of which the sum need not be 1 ---

MASSES = [4, 1 / 2, 1, 2, 8]
REPEAT, PRESENCE, FREQUENCY = (
    {"repetition_penalty": 2},
    {"presence_penalty": LN2},
    {"frequency_penalty": LN2},
)
BY_HAND = [
    (REPEAT, [0, 1], [], [2, 1 / 4, 1, 2, 8]),
    (REPEAT, [], [0, 1], [2, 1 / 4, 1, 2, 8]),
    (REPEAT, [0, 0, 4], [0, 0], [2, 1 / 2, 1, 2, 8**0.5]),  # once, however often it came
    (REPEAT, [2], [2], MASSES),  # a logit of 0
    ({"repetition_penalty": 0.5}, [0, 1], [], [16, 0.5**0.5, 1, 2, 8]),
    (PRESENCE, [], [0, 0, 4], [2, 1 / 2, 1, 2, 4]),
    (PRESENCE, [0, 1], [], MASSES),  # of the output only
    ({"presence_penalty": -LN2}, [], [0, 0, 4], [8, 1 / 2, 1, 2, 16]),
    (FREQUENCY, [], [0, 0, 4], [1, 1 / 2, 1, 2, 4]),
    (FREQUENCY, [0, 1], [1], [4, 1 / 4, 1, 2, 8]),
    ({"frequency_penalty": -LN2}, [], [1, 1, 1], [4, 4, 1, 2, 8]),
    (PRESENCE | FREQUENCY, [3], [0, 0, 4], [1 / 2, 1 / 2, 1, 2, 2]),
    ({"logit_bias": {2: LN3, 4: -LN2}}, [], [], [4, 1 / 2, 3, 2, 4]),
    ({"logit_bias": {2: LN3}}, [2], [2, 2], [4, 1 / 2, 3, 2, 8]),  # whether it came or not
    ({"logit_bias": {4: -100, 0: -100}}, [], [], [0, 1 / 2, 1, 2, 0]),
    # ln 4 / 2 - ln 2. The other way round, (ln 4 - ln 2) / 2, is the square root of 2.
    (REPEAT | PRESENCE, [], [0], [1, 1 / 2, 1, 2, 8]),
    (REPEAT | FREQUENCY, [], [0, 0], [1 / 2, 1 / 2, 1, 2, 8]),
    # ln 4 / 2 + ln 4 is 8, not 4, and ln(1 / 2) * 2 + ln 2 is 1 / 2, not 1.
    (REPEAT | {"logit_bias": {0: 2 * LN2, 1: LN2}}, [0, 1], [], [8, 1 / 2, 1, 2, 8]),
    (
        REPEAT | PRESENCE | FREQUENCY | {"logit_bias": {0: LN3, 2: LN5}},
        [1, 0],
        [0, 4, 4],
        [3 / 2, 1 / 4, 5, 2, 8**0.5 / 8],
    ),
    # Before temperature and filters: at T 1/2 masses are squared, and of the rest two are kept.
    (PRESENCE | {"temperature": 0.5}, [], [0, 4], [4, 1 / 4, 1, 4, 16]),
    (PRESENCE | {"top_k": 2}, [], [4, 4], [4, 0, 0, 0, 4]),
    ({"logit_bias": {1: 2 * LN3}, "min_p": 0.55}, [], [], [0, 4.5, 0, 0, 8]),
    # Masses 4, 3 and 2 of 10.5 are kept, for they have less than 7.5 before them.
    ({"logit_bias": {2: LN3, 4: -3 * LN2}, "top_p": 7.5 / 10.5}, [], [], [4, 0, 3, 2, 0]),
]


@pytest.mark.parametrize(("params", "prompt", "output", "masses"), BY_HAND)
def test_by_hand(params, prompt, output, masses):
    """A penalty of the wrong sign or ids, counted wrongly, or at another place in the order."""
    expected = np.array(masses) / np.sum(masses)
    sampler = primed(params, 5, prompt, output)
    left = sampler.adjusted(padded(np.log(MASSES)))[:5]
    assert twin(left, **filters_of(params)) == pytest.approx(expected, abs=1e-6)
    rare = expected < 1e-9  # a bias of -100: no draw, but not forbidden either
    assert_drawn_from(np.where(rare, 0, expected), draws(sampler, np.log(MASSES), 20_000))


@pytest.mark.parametrize(
    ("params", "logits", "expected"),
    [
        ({"frequency_penalty": 1}, [3, 2.5, 0], [0, 1, 0, 1, 0, 1, 0]),
        ({"presence_penalty": 1}, [3, 2.5, 2.2], [0, 1, 2, 0, 0, 0]),
        ({"repetition_penalty": 2}, [3, 2, 1.6, -1], [0, 1, 2, 0, 0, 0]),
        ({"frequency_penalty": 1, "logit_bias": {2: 2.75}}, [3, 2.5, 0], [0, 2, 1, 0, 2, 1]),
        ({"frequency_penalty": -1, "presence_penalty": 2}, [3, 2.5], [0, 1, 0, 0, 0]),
    ],
)
def test_greedy_by_hand(params, logits, expected):
    """Tokens of the output are not counted, or are one token late."""
    sampler = Sampler(SamplingParams(temperature=0, **params), len(logits))
    assert [sampler(padded(logits)) for _ in expected] == expected


# --- the order of steps ---

ORDER = ("mask", "repetition", "presence", "bias", "temperature", "top_k", "top_p", "min_p")
CASES = [  # logits; top_k, top_p, min_p
    ([0.8, 2.1, 0.4, -1.0, 1.1, -0.2, 0.1, 2.4], (5, 0.7, 0.25)),
    ([2.5, 1.8, 1.6, 0.2, 0.5, -0.5, 0.4, -0.8], (5, 0.8, 0.3)),
]


def pipeline(order, logits, filters) -> np.ndarray:
    """The probabilities that steps in this order give; -inf is what a step takes out."""
    x, i = np.array(logits), np.arange(8)
    top_k, top_p, min_p = filters
    steps = {
        "mask": lambda x: np.where(i == 7, -INF, x),
        "repetition": lambda x: np.where(i < 3, np.where(x > 0, x / 1.5, x * 1.5), x),
        "presence": lambda x: x - 1.25 * (i < 2),
        "bias": lambda x: x + 1.0 * (i == 0) + 0.5 * (i == 3),
        "temperature": lambda x: x / 0.7,
        "top_k": lambda x: np.where(x < np.sort(x)[-top_k], -INF, x),
        "top_p": lambda x: np.where(twin(x, top_p=top_p) > 0, x, -INF),
        "min_p": lambda x: np.where(twin(x, min_p=min_p) > 0, x, -INF),
    }
    for step in order:
        x = steps[step](x)
    return twin(x)


@pytest.mark.parametrize(("logits", "filters"), CASES)
def test_order(logits, filters):
    """Two steps change places."""
    params = {"temperature": 0.7, **dict(zip(("top_k", "top_p", "min_p"), filters, strict=True))}
    params |= {"repetition_penalty": 1.5, "presence_penalty": 1.25, "logit_bias": {0: 1, 3: 0.5}}
    sampler = primed(params, 8, prompt=[2], output=[1, 0])
    sampler.mask(bits_of(range(7), 8))
    assert_drawn_from(pipeline(ORDER, logits, filters), draws(sampler, logits, 100_000))


@pytest.mark.parametrize(
    ("step", "before"),
    [
        ("presence", "repetition"),
        ("bias", "repetition"),
        ("temperature", "presence"),
        ("temperature", "bias"),
        ("top_k", "mask"),
        ("top_k", "repetition"),
        ("top_k", "bias"),
        ("top_p", "mask"),
        ("top_p", "temperature"),
        ("top_p", "top_k"),
        ("min_p", "mask"),
        ("min_p", "temperature"),
        ("min_p", "top_p"),
    ],
)
def test_order_is_seen(step, before):
    """The cases above come out the same in another order. (Mask, penalties and bias, temperature
    and top_k may change places: nothing comes out otherwise.)"""
    wrong = [name for name in ORDER if name != step]
    wrong.insert(wrong.index(before), step)
    differences = [pipeline(wrong, *case) - pipeline(ORDER, *case) for case in CASES]
    assert np.abs(differences).max() > 0.02


# --- how often ---

SHAPE, PROMPT, OUTPUT = normal(60), [3, 3, 7, 40, 59], [0, 7, 7, 12, 33, 33, 33, 58]
BIAS = {0: 2.0, 5: -100, 9: 100 / 3 - 32, 40: 0.5}
ALL = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": BIAS,
}
EVERY = [
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"top_k": 11},
    {"top_p": 0.8},
    {"min_p": 0.06},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.4},
    {"presence_penalty": 1.1},
    {"presence_penalty": -2},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -0.6},
    {"logit_bias": BIAS},
    ALL,
    ALL | {"temperature": 1.3, "top_k": 30, "top_p": 0.93, "min_p": 0.01},
]


def expected_of(params: dict, logits, prompt=(), output=(), allowed=None) -> np.ndarray:
    own = {k: v for k, v in params.items() if k.endswith("_penalty")}
    x = adjusted_twin(logits, prompt, output, bias=params.get("logit_bias"), **own)
    if allowed is not None:
        x[[i for i in range(len(x)) if i not in allowed]] = -INF
    return twin(x, **filters_of(params))


@pytest.mark.parametrize("params", EVERY)
@pytest.mark.parametrize("allowed", [None, range(0, 60, 2)], ids=["", "masked"])
def test_frequencies(params, allowed):
    """Tokens come at other rates than the definitions say, under any setting or all of them."""
    sampler = primed(params, 60, PROMPT, OUTPUT)
    sampler.mask(None if allowed is None else bits_of(allowed, 60))
    expected = expected_of(params, SHAPE, PROMPT, OUTPUT, allowed)
    assert_drawn_from(expected, draws(sampler, SHAPE, 100_000))


def test_frequencies_of_streams():
    """Samples of one seed lean on one another, or a sampler's call draws from something else."""
    logits, params = padded(normal(12, 1.0)), SamplingParams(**EVERY[-1] | {"seed": 5})
    params = SamplingParams(**vars(params) | {"logit_bias": {0: 1, 9: -1}})
    tokens, only_7 = [], bits_of([7], 12)
    for stream in range(6000):
        sampler = Sampler(params, 12, [1, 2, 3], stream=stream)
        sampler.mask(only_7)
        sampler(logits)
        sampler.mask(None)
        tokens.append(sampler(logits))
    own = vars(params) | {"logit_bias": dict(params.logit_bias)}
    assert_drawn_from(expected_of(own, logits[:12], [1, 2, 3], [7]), np.array(tokens))


# --- any logits, any history ---

PENALTIES = {
    "repetition_penalty": st.floats(0.1, 10) | st.just(1.0),
    "presence_penalty": st.floats(-2, 2) | st.just(0.0),
    "frequency_penalty": st.floats(-2, 2) | st.just(0.0),
}
LOGITS = st.lists(VALUES, min_size=1, max_size=70).filter(lambda x: max(x) > -INF)


@st.composite
def histories(draw):
    """Logits, ids that came in prompt and output, and a bias of some."""
    logits = draw(LOGITS)
    ids = st.lists(st.integers(0, len(logits) - 1), max_size=12)
    bias = draw(st.dictionaries(st.integers(0, len(logits) - 1), st.floats(-100, 100), max_size=5))
    return logits, draw(ids), draw(ids), bias


@settings(max_examples=300, deadline=None)
@given(history=histories(), own=st.fixed_dictionaries(PENALTIES))
@example(([3e38], [0], [], {}), {"repetition_penalty": 0.1})
@example(([-3e38, 0.0], [0, 1], [], {}), {"repetition_penalty": 10.0})
def test_any_history(history, own):
    """An id is missed or counted as another, others are touched, or finite logits are no more."""
    logits, prompt, output, bias = history
    sampler = primed(own | {"logit_bias": bias}, len(logits), prompt, output)
    left = sampler.adjusted(padded(logits))[: len(logits)]
    expected = adjusted_twin(logits, prompt, output, bias=bias, **own)
    highest = np.finfo(np.float32).max
    held = np.where(np.isfinite(logits), np.clip(expected, -highest, highest), expected)
    np.testing.assert_allclose(left, held.astype(np.float32), rtol=3e-7, atol=1e-30)


def test_long_outputs():
    """Counts are lost where their arrays grow, or a new id takes another's bias or row."""
    output = np.random.default_rng(0).integers(0, 700, 2000).tolist()
    params = {k: v for k, v in ALL.items() if k != "logit_bias"}
    logits = normal(700)
    for bias in ({}, BIAS):
        sampler = primed(params | {"logit_bias": bias}, 700, range(50), output)
        expected = adjusted_twin(logits, range(50), output, bias=bias, **params)
        assert sampler.adjusted(padded(logits))[:700] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_prompt_may_be_any_list_of_ids():
    """An array, a range or a set of ids is refused, or read as something else."""
    logits, params = padded(np.ones(40)), {"repetition_penalty": 2}
    expected = primed(params, 40, [3, 4, 5, 3]).adjusted(logits)[:40].tolist()
    assert expected == [0.5 if i in (3, 4, 5) else 1 for i in range(40)]
    for ids in (
        (3, 4, 5),
        range(3, 6),
        {3, 4, 5},
        np.array([5, 4, 3, 3], np.int32),
        iter([3, 4, 5]),
    ):
        assert primed(params, 40, ids).adjusted(logits)[:40].tolist() == expected


GREEDY_WITH = [
    {},
    ALL,
    ALL | {"top_k": 3, "top_p": 0.5, "min_p": 0.3},
    {"repetition_penalty": 3, "min_tokens": 50, "stop_token_ids": [1, 2]},
    {"logit_bias": {17: 30}, "logprobs": 3},
]


@pytest.mark.parametrize("temperature", [0, 1e-8])
@pytest.mark.parametrize("params", GREEDY_WITH)
def test_greedy_with_everything(temperature, params):
    """Temperature 0 looks at the logits as they were; of equal ones a later id is chosen."""
    for seed in range(30):
        logits = np.round(np.random.default_rng(seed).normal(size=60) * 3) / 2
        sampler = primed(params | {"temperature": temperature}, 60, PROMPT, OUTPUT)
        allowed = [i for i in range(60) if seed % 2 or i % 3]
        sampler.mask(bits_of(allowed, 60))
        banned = params.get("stop_token_ids", ())
        wanted = dict.fromkeys(k for k in params if k.endswith("_penalty"))
        own = {k: params[k] for k in wanted}
        x = adjusted_twin(logits, PROMPT, OUTPUT, bias=params.get("logit_bias"), **own)
        x = np.float32(x)
        x[[i for i in range(60) if i not in allowed or i in banned]] = -INF
        assert sampler(padded(logits)) == int(x.argmax())


# --- what may not come ---


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_min_tokens(temperature):
    """The text ends a token too early, or no stop id comes ever again."""
    logits = padded([-100, 90, 45, 0])  # 1 is an end-of-text id, 2 a stop id
    params = {"temperature": temperature, "min_tokens": 3, "stop_token_ids": [2], "seed": 0}
    params |= {"logit_bias": {1: 100, 2: 100}}
    for _ in range(20):
        sampler = Sampler(SamplingParams(**params), 4, prompt_ids=[1, 2, 3], stop_ids={1})
        assert [sampler(logits) for _ in range(5)] == [3, 3, 3, 1, 1]
    own = Sampler(SamplingParams(**params), 4)  # stop_token_ids without any end-of-text id
    assert [own(logits) for _ in range(5)] == [1, 1, 1, 1, 1]
    none = Sampler(SamplingParams(**params | {"min_tokens": 0}), 4, stop_ids=[1])
    assert none(logits) == 1


def test_min_tokens_leave_nothing():
    """Where only stop ids could come, one comes, or id 0."""
    sampler = Sampler(SamplingParams(min_tokens=1, stop_token_ids=[0, 2]), 3, stop_ids=[1])
    with pytest.raises(ValueError, match="no token can be chosen"):
        sampler(padded(np.zeros(3)))
    sampler = Sampler(SamplingParams(min_tokens=1), 40, stop_ids=[7])
    sampler.mask(bits_of([7], 40))  # as a grammar does at its end
    with pytest.raises(ValueError, match="no token can be chosen"):
        sampler(padded(np.zeros(40)))
    sampler.mask(bits_of([7, 8], 40))  # the one that was refused has not been counted
    assert [sampler(padded(-np.arange(40) * 9)) for _ in range(2)] == [8, 7]


@pytest.mark.parametrize("n", [1, 15, 16, 31, 32, 33, 48, 64, 65, 200])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 3, "top_p": 0.9}])
def test_a_mask_of_one(n, params):
    """A bit stands for another token: the words' order, the sign bit, the last of them."""
    logits = padded(normal(n))
    sampler = Sampler(SamplingParams(seed=0, **params), n)
    for token in range(n):
        sampler.mask(bits_of([token], n))
        assert sampler(logits) == token
    sampler.mask(np.full(-(-n // 32), -1, np.int32))  # bits beyond the vocabulary
    assert all(sampler(logits) < n for _ in range(50))


@pytest.mark.parametrize("params", [*EVERY, {"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}])
def test_masked_tokens_never_come(params):
    """A forbidden token comes: revived by a bias, or as one of equals, or since none was likely."""
    rng = np.random.default_rng(1)
    for seed in range(8):
        logits = np.round(rng.normal(size=90) * 3)
        logits[rng.random(90) < 0.2] = -INF
        allowed = np.flatnonzero(rng.random(90) < rng.choice([0.03, 0.3, 0.9]))
        allowed = allowed if np.isfinite(logits[allowed]).any() else np.arange(90)
        forbidden = {int(i): 100 for i in range(90) if i not in allowed}
        own = params | {"logit_bias": forbidden, "seed": seed}
        sampler = primed(own, 90, PROMPT, OUTPUT)
        sampler.mask(bits_of(allowed, 90))
        possible = allowed[np.isfinite(logits[allowed])]
        assert {sampler(padded(logits)) for _ in range(100)} <= set(possible)


def test_masks_follow_one_another():
    """A mask stays for ever, only for one token, or changes with the caller's array."""
    logits = padded(-np.arange(70) * 5)
    sampler = Sampler(SamplingParams(temperature=0), 70)
    bits = bits_of([33, 60], 70)
    sampler.mask(bits)
    bits[:] = -1
    assert [sampler(logits), sampler(logits)] == [33, 33]
    sampler.mask(bits_of([69], 70)[None][0])  # a row of several
    assert sampler(logits) == 69
    sampler.mask(np.repeat(bits_of([40], 70), 2)[::2])  # not contiguous
    assert sampler(logits) == 40
    sampler.mask(None)
    assert sampler(logits) == 0


def test_masks_that_allow_nothing():
    """All tokens forbidden, or all that are left impossible: id 0 comes, forbidden as it is."""
    sampler = Sampler(SamplingParams(seed=0), 40)
    with pytest.raises(ValueError, match="allows none of 40 tokens"):
        sampler.mask(np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="allows none of 40 tokens"):
        sampler.mask(np.array([0, -1 << 8], np.int32))  # ids 40 and up
    logits = np.zeros(40)
    logits[5:9] = -INF
    for params in ({"temperature": 0}, {}, {"top_k": 2, "logit_bias": {5: 100}}):
        sampler = Sampler(SamplingParams(seed=0, **params), 40)
        sampler.mask(bits_of(range(5, 9), 40))
        for value in (-INF, INF, NAN):
            logits[5:9] = value
            with pytest.raises(ValueError, match="no token can be chosen"):
                sampler(padded(logits))
        logits[5:9] = -INF
        sampler.mask(bits_of(range(5, 10), 40))
        assert sampler(padded(logits)) == 9


@pytest.mark.parametrize(
    "bits",
    [
        np.full(3, -1, np.int64),
        np.full(3, 1, np.uint32),
        np.full(3, -1, ">i4"),
        np.full(2, -1, np.int32),
        np.full(4, -1, np.int32),
        np.full((1, 3), -1, np.int32),
        np.ones(70, bool),
        [-1, -1, -1],
        5,
    ],
    ids=repr,
)
def test_masks_of_another_form(bits):
    """Bits of another width or number are read as if they were right, or past their end."""
    sampler = Sampler(SamplingParams(temperature=0), 70)
    sampler.mask(bits_of([3], 70))
    with pytest.raises(ValueError, match=r"the mask is .*int32 \(3,\) is needed"):
        sampler.mask(bits)
    assert sampler(padded(np.arange(70))) == 3  # the one before stays


# --- logprobs ---


def log_softmax(logits) -> np.ndarray:
    x = np.asarray(logits, np.float32).astype(np.float64)
    return x - x.max() - math.log(np.exp(x - x.max()).sum())


def assert_logprobs(sampler: Sampler, logits, token: int) -> None:
    own, top = sampler.logprobs
    expected = log_softmax(logits)
    best = np.argsort(-np.float32(logits), kind="stable")[: sampler.params.logprobs]
    assert [i for i, _ in top] == best.tolist()
    assert [x for _, x in top] == pytest.approx(expected[best], abs=5e-7, rel=1e-9)
    assert own == pytest.approx(expected[token], abs=5e-7, rel=1e-9)
    assert dict(top).get(token, own) == own


@settings(max_examples=300, deadline=None)
@given(logits=LOGITS, k=st.integers(0, 20), seed=st.integers(0, 9))
@example([0.0] * 70, 20, 0)
@example([float(i // 3) for i in range(70)], 20, 0)
@example([-INF] * 33 + [1.0], 5, 0)
def test_logprobs(logits, k, seed):
    """Another base or base's peak; ties in another order; fewer tokens, or padding among them."""
    sampler = Sampler(SamplingParams(logprobs=k, seed=seed), len(logits))
    for padding in (1e30, NAN):
        assert_logprobs(sampler, logits, sampler(padded(logits, padding)))


@pytest.mark.parametrize("scale", [0, 0.1, 3.0])
@pytest.mark.parametrize("order", ["random", "rising", "falling"])
def test_logprobs_of_qwen3s_vocabulary(scale, order):
    """A sum of 151,936 float32 loses its last digits."""
    logits = normal(VOCAB, scale).astype(np.float32)
    if order != "random":
        logits = np.sort(logits)[:: 1 if order == "rising" else -1].copy()
    sampler = Sampler(SamplingParams(logprobs=20, seed=0), VOCAB)
    assert_logprobs(sampler, logits, sampler(logits))


def test_logprobs_are_of_all_tokens():
    """Probabilities do not add up to 1, or the list has one too few."""
    for n in (1, 5, 20):
        sampler = Sampler(SamplingParams(logprobs=20, seed=0), n)
        sampler(padded(normal(n)))
        own, top = sampler.logprobs
        assert len(top) == n and sum(math.exp(x) for _, x in top) == pytest.approx(1, abs=1e-6)
        assert own in [x for _, x in top]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.1, "top_k": 2, "top_p": 0.5, "min_p": 0.1},
        ALL,
        ALL | {"temperature": 0},
        {"logit_bias": {11: 100}},
    ],
)
def test_logprobs_are_raw(params):
    """Those of tempered, penalised or masked logits, which say nothing of the model."""
    sampler = primed(params | {"logprobs": 4}, 60, PROMPT, OUTPUT)
    for allowed in (None, [11, 30], [59]):
        sampler.mask(None if allowed is None else bits_of(allowed, 60))
        assert_logprobs(sampler, SHAPE, sampler(padded(SHAPE)))


def test_the_chosen_token_has_its_logprob():
    """A token that is not among the likeliest has none, or the last one's."""
    sampler = Sampler(SamplingParams(logprobs=2, logit_bias={3: 100}, temperature=0), 4)
    assert sampler(padded(np.log([0.5, 0.3, 0.15, 0.05]))) == 3
    own, top = sampler.logprobs
    assert own == pytest.approx(math.log(0.05), abs=1e-6)
    assert [i for i, _ in top] == [0, 1]
    assert [x for _, x in top] == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-6)
    none = Sampler(SamplingParams(logprobs=0, temperature=0), 4)
    none(padded(np.log([0.5, 0.3, 0.15, 0.05])))
    assert none.logprobs == (pytest.approx(math.log(0.5), abs=1e-6), [])


def test_logprobs_are_plain_numbers():
    """A server cannot write them as JSON; or they are made though nobody asked."""
    sampler = Sampler(SamplingParams(logprobs=3, seed=0), 50)
    assert sampler.logprobs is None
    sampler(padded(normal(50)))
    assert json.loads(json.dumps(sampler.logprobs))[1][0][0] == int(normal(50).argmax())
    assert {type(i) for i, _ in sampler.logprobs[1]} == {int}
    silent = Sampler(SamplingParams(seed=0), 50)
    assert silent(padded(normal(50))) == primed({"logprobs": 3}, 50)(padded(normal(50)))
    assert silent.logprobs is None


def test_tokens_without_a_chance_have_a_logprob():
    """A logit of -inf gives NaN, or stands before others; so does one far below the rest."""
    sampler = Sampler(SamplingParams(logprobs=4, seed=0), 4)
    sampler(padded([-INF, 3e38, -3e38, 3e38]))
    half = pytest.approx(math.log(0.5), abs=1e-6)
    top = sampler.logprobs[1]
    assert top[:2] == [(1, half), (3, half)] and top[3] == (0, -INF)
    assert top[2] == (2, pytest.approx(-6e38))


# --- what stays as it is ---


def test_logits_are_not_changed():
    """A penalty is written into the logits, of which the next sample of the same prompt draws."""
    logits, sampler = padded(SHAPE), primed(ALL | {"logprobs": 5}, 60, PROMPT, OUTPUT)
    sampler.mask(bits_of(range(9), 60))
    before = logits.copy()
    sampler(logits)
    sampler.mask(None)
    sampler(logits)
    Sampler(SamplingParams(min_tokens=3), 60, stop_ids=[3])(logits)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize(
    ("params", "more"),
    [
        ({}, {"prompt_ids": [1, 2], "stop_ids": [3]}),
        ({"presence_penalty": 1, "repetition_penalty": 2}, {}),
        ({"presence_penalty": 1, "frequency_penalty": 1}, {"prompt_ids": [1, 2]}),
        ({"min_tokens": 5}, {}),
        ({"stop_token_ids": [3], "logprobs": 5}, {}),
        ({"logit_bias": {}}, {}),
    ],
)
def test_nothing_is_copied_without_need(params, more):
    """Requests that ask for nothing, or for nothing yet, pay for a copy of the logits."""
    logits = padded(SHAPE)
    assert Sampler(SamplingParams(**params), 60, **more).adjusted(logits) is logits


def test_only_numbers_in_use_are_counted():
    """A plain request keeps a table that grows with its text."""
    for params in ({}, {"logit_bias": {5: 1.0}}):
        sampler = primed(params, 500, output=range(300))
        assert sampler._table.size == len(params)


def test_no_request_compiles_anything(monkeypatch):
    """The first request with a penalty, a mask or logprobs waits a second for its kernel."""
    forms = set()

    def spied(name: str):
        def spy(*args):
            forms.add((name, *(numba.typeof(a) for a in args)))
            return getattr(sampling, name)(*args)

        return spy

    for name in ("adjust", "masked", "largest_first", "log_sum", "sample"):
        monkeypatch.setattr(f"engine.sampler.{name}", spied(name))
    Sampler.compile()
    compiled = forms.copy()
    assert len(compiled) == 5
    more = {"logprobs": np.int64(20), "min_tokens": 90}
    whole = {"repetition_penalty": 2, "presence_penalty": 1, "logit_bias": {5: 1}, "top_p": 1}
    for params in (ALL, ALL | {"temperature": 0}, whole | more):
        for prompt in ((), [1, 2], np.array([1, 2], np.int32)):
            sampler = primed(params, 60, prompt, range(4, 60), stop_ids=[3])
            sampler.mask(bits_of(range(9), 60))
            sampler(padded(SHAPE))
    assert forms == compiled


@pytest.mark.parametrize("value", [-INF, INF, NAN])
@pytest.mark.parametrize("others", [0, 1, 20])
def test_broken_logits_give_an_id(value, others):
    """Logits that are all NaN or infinite, or nearly all, give a forbidden id or a stray one."""
    logits = np.full(100, value)
    logits[50 : 50 + others] = 1.0
    for seed in range(10):
        sampler = primed(ALL | {"logprobs": 20, "seed": seed}, 100, PROMPT, OUTPUT)
        assert 0 <= sampler(padded(logits)) < 100
        assert all(0 <= i < 100 for i, _ in sampler.logprobs[1])


# --- samples of one request ---


def story(params: dict, stream: int, count: int = 30) -> list[int]:
    sampler = Sampler(SamplingParams(**params), 60, PROMPT, [3], stream)
    return [sampler(padded(SHAPE)) for _ in range(count)]


@pytest.mark.parametrize("params", [{}, ALL | {"min_tokens": 9}, {"top_k": 9, "top_p": 0.9}])
def test_streams(params):
    """The samples of a prompt all say the same, or another thing when asked again."""
    params = params | {"seed": 11}
    stories = [story(params, stream) for stream in range(8)]
    assert len({tuple(one) for one in stories}) == 8
    assert [story(params, stream) for stream in reversed(range(8))] == stories[::-1]
    assert story(params | {"seed": 12}, 0) not in stories  # as it would be if both were added
    assert story(params | {"n": 8}, 3) == stories[3]
    unseeded = [story(params | {"seed": None}, stream) for stream in (0, 0, 1)]
    assert len({tuple(one) for one in unseeded}) == 3


def test_draws_do_not_depend_on_what_runs_beside():
    """Samplers share a scratch, a table or a generator."""
    params = ALL | {"seed": 3, "logprobs": 5}
    alone = [story(params, stream, 300) for stream in range(4)]
    beside: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda s=stream: beside.update({s: story(params, s, 300)}))
        for stream in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [beside[stream] for stream in range(4)] == alone


# --- what is refused ---


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("prompt_ids", {"prompt_ids": [3, 60]}),
        ("prompt_ids", {"prompt_ids": [3, -1]}),
        ("prompt_ids", {"prompt_ids": [3, 1.0]}),
        ("prompt_ids", {"prompt_ids": ["3"]}),
        ("prompt_ids", {"prompt_ids": [2**70]}),
        ("prompt_ids", {"prompt_ids": np.zeros((2, 2), int)}),
        ("stop_ids", {"stop_ids": {60}}),
        ("stop_ids", {"stop_ids": [None]}),
        ("stop_token_ids", {"stop_token_ids": [0, 60]}),
        ("logit_bias", {"logit_bias": {60: 1}}),
        ("logit_bias", {"logit_bias": {2**70: 1}}),
        ("stream", {"stream": -1}),
        ("stream", {"stream": 1.0}),
        ("stream", {"stream": True}),
    ],
)
def test_ids_outside_the_vocabulary(name, arguments):
    """A kernel writes at an id that is not there, into somebody else's memory."""
    own = {k: v for k, v in arguments.items() if k in ("stop_token_ids", "logit_bias")}
    more = {k: v for k, v in arguments.items() if k not in own}
    with pytest.raises(ValueError, match=f"^{name} ") as error:
        Sampler(SamplingParams(repetition_penalty=2, **own), 60, **more)
    assert "needed" in str(error.value)
    Sampler(SamplingParams(logit_bias={59: 1}, stop_token_ids=[59]), 60, [59], [59], np.int64(2))
