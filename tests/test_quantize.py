"""Q8_0: the NumPy definition against ggml's own, and the kernel that packs it against NumPy."""

from pathlib import Path

import numpy as np
import pytest

from engine import LLM
from engine.kernels.int8 import STEP
from engine.kernels.pack import pack_rows, quantize_rows
from engine.loading.quantize import BLOCK, as_kept, dequantize, quantize
from engine.perplexity import perplexity


def weights(n: int, k: int, seed: int = 0) -> np.ndarray:
    """Blocks of very different sizes, one of zeros, one with exact halves after scaling."""
    rng = np.random.default_rng((n, k, seed))
    w = rng.standard_normal((n, k), dtype=np.float32)
    w *= np.float32(10.0) ** rng.integers(-6, 4, (n, 1)).astype(np.float32)
    w[0, :BLOCK] = 0
    if n > 1 and k >= BLOCK:
        w[1, :BLOCK] = np.arange(-16, 16) * np.float32(0.5)
        w[1, 0] = 127  # so that d is 1 and the rest are halves
    return w


def test_quantize_is_ggml_s():
    """A scale rounded before it divides, or halves rounded to even, is another format."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is the definition")
    w = weights(40, 96)
    raw = gguf.quants.quantize(w, gguf.GGMLQuantizationType.Q8_0)
    blocks = raw.reshape(40, 3, 2 + BLOCK)  # a float16, then 32 bytes
    q, scales = quantize(w)
    np.testing.assert_array_equal(
        scales.view(np.uint16), blocks[..., :2].copy().view(np.uint16)[..., 0]
    )
    np.testing.assert_array_equal(q.reshape(40, 3, BLOCK), blocks[..., 2:].view(np.int8))
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(dequantize(q, scales), wanted)


def test_halves_round_away_from_zero():
    """NumPy's rint, and the processor's, round halves to even."""
    q, scales = quantize(weights(2, 32))
    assert scales[1, 0] == 1
    expected = [127, *(int(np.sign(x) * np.floor(abs(x) + 0.5)) for x in np.arange(-15, 16) * 0.5)]
    assert q[1].tolist() == expected


def test_a_block_of_zeros():
    """1 / d of a block whose largest weight is 0 is infinite, and 0 times that is NaN."""
    q, scales = quantize(np.zeros((1, 32), np.float32))
    assert not q.any() and not scales.any() and not dequantize(q, scales).any()


@pytest.mark.parametrize(
    "shape", [(1, 32), (16, 32), (17, 64), (50, 96), (33, 40), (5, 7), (64, 31)]
)
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_packed_as_defined(shape, kind):
    """A weight in another row's lane, a scale in another block's, a padding that is not zero."""
    n, k = shape
    w = weights(n, k)
    stored = w
    if kind == "bf16":
        stored = (w.view(np.uint32) >> 16).astype(np.uint16)
        w = (stored.astype(np.uint32) << 16).view(np.float32)
    stored.flags.writeable = False
    width, height = -(-k // 32) * 32, -(-n // 16) * 16
    before = 64 * BLOCK  # what stands there stays
    data = np.full(before + height * width, 77, np.uint8)
    scales = np.full(len(data) // BLOCK, 77, np.int16)
    assert quantize_rows(data, scales, before, stored)
    assert (data[:before] == 77).all() and (scales[: before // BLOCK] == 77).all()

    q, d = quantize(np.pad(w, ((0, height - n), (0, width - k))))
    r, c = np.indices((height, width))
    at = before + (r // 16 * width + c // STEP * STEP) * 16 + r % 16 * STEP + c % STEP
    np.testing.assert_array_equal(data[at].astype(int) - 128, q)
    r, b = np.indices(d.shape)
    at = before // BLOCK + (r // 16 * (width // BLOCK) + b) * 16 + r % 16
    np.testing.assert_array_equal(scales[at], d.view(np.int16))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e37])
def test_what_has_no_scale_is_found(value):
    """NaN and infinity, and a block whose scale float16 cannot hold, would be kept as garbage."""
    w = np.ones((3, 64), np.float32)
    w[2, 40] = value
    w.flags.writeable = False
    assert not quantize_rows(np.zeros(1024, np.uint8), np.zeros(32, np.int16), 0, w)


@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_as_kept_is_what_the_kernel_keeps(kind):
    """The NumPy backend would be an oracle of other weights."""
    w = weights(32, 33)
    out = np.zeros(32 * 33, np.uint16 if kind == "bf16" else np.float32)
    read_only = w.copy()
    read_only.flags.writeable = False
    pack_rows(out, 0, read_only)
    kept = out.reshape(2, 33, 16).transpose(0, 2, 1).reshape(32, 33)
    if kind == "bf16":
        kept = (kept.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(as_kept(w, kind), kept)


def test_error_of_q8_0():
    """Half a step of 1/127 of the block's largest, and the rounding of the scale."""
    w = np.random.default_rng(0).standard_normal((20, 320), dtype=np.float32)
    peak = np.abs(w).reshape(20, -1, BLOCK).max(-1).repeat(BLOCK, 1)
    assert (np.abs(as_kept(w, "q8_0") - w) <= peak * (0.5 / 127 + 2.0**-10)).all()


def test_what_it_costs():
    """Weights or activations that are kept worse than they could be: nothing else is slower."""
    text = (Path(__file__).parent / "golden" / "held_out.txt").read_text()
    exact, kept = LLM(weights="f32"), LLM(weights="q8_0")
    ids = exact.tokenizer.encode(text)[:4000]
    assert abs(perplexity(kept, ids) / perplexity(exact, ids) - 1) < 0.001
    ids = ids[:256]
    logits = exact.logits(ids)
    assert np.square(kept.logits(ids) - logits).mean() < 0.012**2 * logits.var()
