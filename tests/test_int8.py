"""Integer products: exact in every form, and the same bits from each of them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from llvmlite import ir

from engine.kernels import int8
from engine.kernels.activations import Inputs, Rows, block_of, padded, quantize, rows_for, tile_for
from engine.kernels.int8 import FORM, IN_PAIRS
from engine.kernels.matmul import Q8, matmul, of_layer
from engine.kernels.pack import quantize_rows
from engine.kernels.team import Rank, new_flags
from engine.loading import quantize as definition

HEIGHTS = (1, 15, 16, 17, 31, 33, 50, 64, 127)
DEPTHS = (1, 7, 31, 32, 33, 64, 100)
TOKENS = (1, 2, 5, 6, 7, 13, 33)


@numba.njit
def first_of(store, n, k):
    return of_layer(store, 0, n, k)


def inputs_of(x: np.ndarray) -> Inputs:
    """x (n_tokens, k) as matrices read it, quantised."""
    n_tokens, k = x.shape
    wide = np.pad(x, ((0, 0), (0, padded(k) - k)))
    wide = np.pad(wide, ((0, rows_for(n_tokens) - n_tokens), (0, 0)), constant_values=np.nan)
    rows = Rows(wide.ravel().copy(), 0, padded(k))
    size = wide.size
    inputs = Inputs(
        rows, np.zeros(size, np.int8), np.zeros(size // 32, "f4"), np.zeros(size // 32, "i4")
    )
    quantize(inputs, n_tokens, 0, n_tokens, 0, padded(k))
    return inputs


def quantised(inputs: Inputs, n_tokens: int) -> tuple[np.ndarray, ...]:
    """q (n_tokens, blocks, 32), and scales and starts (n_tokens, blocks) of inputs."""
    n_blocks = inputs.rows.stride // 32
    t, b = np.indices((n_tokens, n_blocks))
    at = block_of.py_func(t, b * 32, n_blocks, tile_for.py_func(n_tokens))
    return inputs.q.reshape(-1, 32)[at], inputs.scales[at], inputs.starts[at]


def product(w: np.ndarray, inputs: Inputs, n_tokens: int, ranks: int = 1) -> np.ndarray:
    n, k = w.shape
    size = padded(n) * padded(k)
    store = Q8(np.zeros(size, np.uint8), np.zeros(size // 32, np.int16))
    w = w.copy()
    w.flags.writeable = False
    assert quantize_rows(store.data, store.scales, 0, w)
    out = np.full(n_tokens * padded(n), np.nan, np.float32)
    flags = new_flags(ranks)
    for rank in range(ranks):
        me = Rank(rank, ranks, flags)
        matmul(Rows(out, 0, padded(n)), first_of(store, n, k), inputs, n_tokens, False, me)
    return out.reshape(n_tokens, -1)[:, :n]


def twin(w: np.ndarray, inputs: Inputs, n_tokens: int) -> np.ndarray:
    """Integer sums of each block, scaled in float64."""
    n, k = w.shape
    q, d = definition.quantize(np.pad(w, ((0, 0), (0, padded(k) - k))))
    blocks = padded(k) // 32
    x, scales, _ = quantised(inputs, n_tokens)
    sums = np.einsum("tbi,nbi->tnb", x.astype(np.int64), q.reshape(n, blocks, 32).astype(np.int64))
    return np.einsum("tnb,nb,tb->tn", sums, d.astype("f8"), scales)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("k", DEPTHS)
@pytest.mark.parametrize("n_tokens", TOKENS)
def test_against_integers(k, n_tokens):
    """A pair sum that saturates, a bias not undone, a scale of another block or row."""
    for n in HEIGHTS:
        w, inputs = random(n, k), inputs_of(random(n_tokens, k))
        wanted = twin(w, inputs, n_tokens)
        np.testing.assert_allclose(product(w, inputs, n_tokens), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "pair", [(1, 1), (1, -1), (1, 0), (0, 1), (0.9, 0.1), (0.7, 0.6), (1, 1.01)]
)
def test_largest_values(sign, pair):
    """255 x 127, two or four times, is past what 16 bits hold if they are summed in them."""
    w, x = np.full((32, 64), sign, np.float32), np.tile(np.float32(pair), (3, 32))
    x[1] *= -1
    inputs = inputs_of(x)
    q, _, _ = quantised(inputs, 3)
    assert np.abs(q).max() == 127 or IN_PAIRS
    np.testing.assert_allclose(product(w, inputs, 3), twin(w, inputs, 3), rtol=1e-5)


def test_no_pair_passes_16_bits():
    """A pair of 129 times a weight of 255 would be cut off at 32,767, in silence."""
    for scale in (1e-30, 1, 1e30):
        x = random(500, 96) * np.float32(scale)
        x[::3] = np.abs(x[::3])
        x[1::7, 4:9] = 3 * x[1::7, 4:5]  # equal neighbours, at the peak
        q, _, _ = quantised(inputs_of(x), len(x))
        pairs = q.astype(int).reshape(-1, 2).sum(-1)
        assert q.min() >= -127
        if IN_PAIRS:
            assert 127 <= np.abs(pairs).max() <= 128


def test_a_token_has_the_same_bits_alone_and_among_others():
    """Another order of sums in another tile makes a batch differ from its requests."""
    for n in (13, 33):
        w, x = random(127, 160), random(n, 160)
        together = product(w, inputs_of(x), n)
        for ranks in (2, 3, 5):
            np.testing.assert_array_equal(product(w, inputs_of(x), n, ranks), together)
        for t in range(n):
            np.testing.assert_array_equal(product(w, inputs_of(x[t : t + 1]), 1)[0], together[t])


def test_quantised_activations():
    """q is x / scale to the nearest, a start -128 times the sum of q; a scale is 1 / 127 of the
    largest |x|, or of the largest |x + its neighbour|, where pairs are added in 16 bits."""
    x = random(4, 96)
    x[1] = 0
    x[2, :32] = np.tile([1, -1], 16)
    blocks = x.reshape(4, 3, 32)
    peak = np.abs(blocks).max(-1)
    if IN_PAIRS:
        peak = np.maximum(peak, np.abs(blocks[..., ::2] + blocks[..., 1::2]).max(-1))
    q, scales, starts = quantised(inputs_of(x), 4)
    np.testing.assert_allclose(scales, peak / np.float32(127), rtol=1e-7)
    assert (np.abs(q * scales[..., None] - blocks) <= scales[..., None] * 0.5001).all()
    np.testing.assert_array_equal(starts, -128 * q.sum(-1, dtype=int))
    assert not q[1].any() and np.abs(q[2, 0]).min() == 127


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(value):
    """A NaN that becomes 0, or anything else: of V that overflowed, fluent nonsense."""
    w = random(16, 64)
    for at in range(64):
        x = random(2, 64)
        x[0, at] = value
        found = product(w, inputs_of(x), 2)
        assert not np.isfinite(found[0]).any() and np.isfinite(found[1]).all(), at


@pytest.mark.parametrize("scale", [1e-36, 1e-37, 1e-38, 1e-44])
def test_smallest_values(scale):
    """127 / peak is infinite: a block of 1e-37 adds up to 1e-31."""
    w, x = random(16, 64), random(2, 64) * np.float32(scale)
    np.testing.assert_allclose(product(w, inputs_of(x), 2), x @ w.T, rtol=0, atol=1e-34)


SCRIPT = """
import hashlib, json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from test_int8 import FORM, inputs_of, product, random
signs = np.float32([1, -1] * 48)  # so that no pair's sum sets a scale, which only one form minds
found = [product(random(50, 96), inputs_of(signs * abs(random(t, 96))), t) for t in (1, 13)]
print(json.dumps([FORM, *(hashlib.sha256(part.tobytes()).hexdigest() for part in found)]))
"""


def test_every_form_gives_the_same_bits():
    """A form that is only nearly exact gives another text on another machine."""
    found = {}
    for form in int8.FORMS:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)],
            env=os.environ | {"ENGINE_INT8": form},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said, *found[form] = json.loads(done.stdout)
        assert said == form
    assert len(set(map(tuple, found.values()))) == 1, found


def test_a_form_that_does_not_exist():
    """A misspelt form must not fall back to another in silence."""
    done = subprocess.run(
        [sys.executable, "-c", "import engine.llm"],
        env=os.environ | {"ENGINE_INT8": "vvni"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "ENGINE_INT8" in done.stderr and "vvni" in done.stderr


@pytest.mark.parametrize(
    ("form", "triple", "cpu", "features", "instruction"),
    [
        ("neon", "aarch64-unknown-linux-gnu", "neoverse-n1", "+dotprod", r"\bsdot\b"),
        ("vnni", "x86_64-unknown-linux-gnu", "znver4", "+avx512vnni,+avx512f", r"\bvpdpbusd\b"),
        (
            "avxvnni",
            "x86_64-unknown-linux-gnu",
            "alderlake",
            "+avxvnni,+avx2",
            r"\{vex\}\s+vpdpbusd\b",
        ),
        ("avx2", "x86_64-unknown-linux-gnu", "haswell", "+avx2", r"\bvpmaddubsw\b"),
    ],
)
def test_forms_of_other_processors_compile_to_their_instruction(
    form, triple, cpu, features, instruction, monkeypatch
):
    """A form for a processor that is not here would be found broken by its first user."""
    monkeypatch.setattr(int8, "FORM", form)
    module = ir.Module()
    module.triple = triple
    kind = ir.FunctionType(int8.V_I32, [int8.V_I32, int8.BYTES, int8.I32])
    function = ir.Function(module, kind, "f")
    b = ir.IRBuilder(function.append_basic_block())
    acc, weights, x = function.args
    b.ret(int8.dots(b, acc, int8.factors(b, weights), x))
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip(f"this llvmlite has no target {triple}")
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3)
    assembly = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert re.search(instruction, assembly), assembly


def test_the_form_here_is_the_best_of_this_processor():
    """A feature misread as absent costs most of the speed and nothing else tells."""
    if "ENGINE_INT8" not in os.environ:
        assert FORM == int8.FORMS[0]
