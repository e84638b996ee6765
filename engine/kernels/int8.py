"""Products of 8-bit integers, exact on every processor.

Weights are stored as q + 128, unsigned, and a column is never alone: `STEP` columns of 16 rows are
consecutive bytes and meet the same `STEP` activations of a token. `tile_step` adds the 16 sums of
their products to a tile of int32, in the form that suits the processor:

- "vnni" and "avxvnni": vpdpbusd of AVX-512 and of AVX, unsigned by signed.
- "avx2": vpmaddubsw and vpmaddwd, unsigned by signed. The first adds two products in 16 bits, where
  activations are kept so small that no pair of them can pass it (`IN_PAIRS`).
- "neon": sdot, on weights made signed.
- "portable": widened to 32 bits and multiplied.

All but "neon" sum (q + 128) x, so a block starts at -128 times the sum of its activations.

On Zen 3, whose integers are multiplied in two of four pipes, vpmaddwd on weights widened to 16 bits
has 0.8 times the speed; with the signs moved by vpsignb instead it was slower than that.
"""

from __future__ import annotations

import os

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.jit import has
from engine.kernels.simd import (
    F16,
    I8,
    I16,
    I32,
    I64,
    LANES,
    V_F32,
    V_I32,
    address,
    call,
    f32x16,
    load_lanes,
    splatted,
)
from engine.kernels.tile import Tile, token_addresses

# LLVM ends the process on an instruction that the processor lacks: only what it has is offered.
NEEDS = {
    "vnni": has("avx512vnni"),
    "avxvnni": has("avxvnni"),
    "avx2": has("avx2"),
    "neon": has("dotprod"),
    "portable": True,
}
FORMS = [form for form, there in NEEDS.items() if there]  # the best first
FORM = os.environ.get("ENGINE_INT8") or FORMS[0]
if FORM not in FORMS:
    raise ValueError(f"ENGINE_INT8 is {FORM!r}; this processor has {', '.join(FORMS)}")
STEP = 4  # columns of a step
IN_PAIRS = FORM == "avx2"  # two neighbouring products are added in 16 bits
# Lanes of an instruction, row groups and tokens of a tile. AVX-512: 12 of 32 registers. AVX: 10 of
# 16, which leaves room for weights, activations and products.
WIDTHS = {"vnni": LANES, "avxvnni": 8, "avx2": 8, "neon": 4, "portable": LANES}
STEP_GROUPS, STEP_TOKENS = {"vnni": (2, 6), "neon": (1, 6), "portable": (1, 2)}.get(FORM, (1, 5))
BYTES = ir.VectorType(I8, STEP * LANES)


def lanes(start, n):
    """A shuffle's choice of n elements from `start` on."""
    return ir.Constant(ir.VectorType(I32, n), [*range(start, start + n)])


def part(b, v, start, n):
    """Elements start to start + n of a vector."""
    return b.shuffle_vector(v, v, lanes(start, n))


def joined(b, parts):
    """Vectors of one size, 1, 2 or 4 of them, as one."""
    while len(parts) > 1:
        both = lanes(0, 2 * parts[0].type.count)
        parts = [b.shuffle_vector(*parts[i : i + 2], both) for i in range(0, len(parts), 2)]
    return parts[0]


def factors(b, biased):
    """What a form multiplies: STEP x 16 weights as bytes, made ready once for all tokens."""
    return b.xor(biased, ir.Constant(BYTES, [128] * BYTES.count)) if FORM == "neon" else biased


def dots(b, acc, weights, x):
    """acc + 16 sums of STEP products; x, an int32, holds the activations."""
    width = WIDTHS[FORM]
    x = b.bitcast(splatted(b, x, ir.VectorType(I32, width)), ir.VectorType(I8, STEP * width))
    sums = [
        dot(b, part(b, acc, i, width), part(b, weights, STEP * i, STEP * width), x)
        for i in range(0, LANES, width)
    ]
    return joined(b, sums)


def dot(b, acc, weights, x):
    """As `dots`, for the rows of one instruction; x holds the activations for each of them."""
    if FORM in ("vnni", "avxvnni"):
        name = f"llvm.x86.avx512.vpdpbusd.{32 * WIDTHS[FORM]}"
        return call(b, name, acc.type, acc, weights, x)
    if FORM == "neon":
        return call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, acc, weights, x)
    if FORM == "avx2":
        words = ir.VectorType(I16, LANES)
        pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", words, weights, x)
        ones = ir.Constant(words, [1] * LANES)
        return b.add(acc, call(b, "llvm.x86.avx2.pmadd.wd", acc.type, pairs, ones))
    for c in range(STEP):
        pick = ir.Constant(ir.VectorType(I32, LANES), [*range(c, STEP * LANES, STEP)])
        w, factor = (b.shuffle_vector(v, v, pick) for v in (weights, x))
        acc = b.add(acc, b.mul(b.zext(w, acc.type), b.sext(factor, acc.type)))
    return acc


@intrinsic
def tile_start(tc, total, starts, at):
    """A tile of int32 of the shape of `total`, before a block: all lanes of token t are its start,
    starts[at + t].

    A start is -128 times the sum of the block's activations, which undoes the weights' bias.
    """
    tile = Tile("i32", total.groups, total.tokens)

    def build(ctx, b, sig, args):
        out = ir.Constant(ctx.get_value_type(tile), None)
        if FORM != "neon":
            places = token_addresses(ctx, b, tile, sig.args[1], *args[1:], I64(1), 1)
            for t, p in enumerate(places):
                start = splatted(b, b.load(p), V_I32)
                for g in range(tile.groups):
                    out = b.insert_value(out, start, g * tile.tokens + t)
        return out

    return tile(total, starts, types.intp), build


@intrinsic
def tile_step(tc, acc, w, w_at, w_stride, x, x_at, x_stride):
    """acc[g, t] += sum over c < STEP of w[w_at + g * w_stride + STEP * r + c] * x[t, c], rows r."""

    def build(ctx, b, sig, args):
        acc, w, w_at, w_stride, x, x_at, x_stride = args
        tile = sig.args[0]
        places = token_addresses(ctx, b, tile, sig.args[4], x, x_at, x_stride, STEP)
        tokens = [b.load(b.bitcast(p, I32.as_pointer()), align=1) for p in places]
        for g in range(tile.groups):
            at = b.add(w_at, b.mul(w_stride, ir.Constant(w_at.type, g)))
            p = address(ctx, b, sig.args[1], w, at, STEP * LANES)
            weights = factors(b, b.load(b.bitcast(p, BYTES.as_pointer()), align=1))
            for t, token in enumerate(tokens):
                i = g * tile.tokens + t
                acc = b.insert_value(acc, dots(b, b.extract_value(acc, i), weights, token), i)
        return acc

    size = types.intp
    return acc(acc, w, size, size, x, size, size), build


@intrinsic
def tile_scaled(tc, total, acc, scales, at, stride, x_scales, x_at):
    """total[g, t] += float(acc[g, t]) * (scales[at + g * stride : + 16] * x_scales[x_at + t])."""

    def build(ctx, b, sig, args):
        total, acc, scales, at, stride, x_scales, x_at = args
        tile = sig.args[0]
        places = token_addresses(ctx, b, tile, sig.args[5], x_scales, x_at, I64(1), 1)
        tokens = [splatted(b, b.load(p)) for p in places]
        for g in range(tile.groups):
            group = b.add(at, b.mul(stride, ir.Constant(at.type, g)))
            rows = load_lanes(ctx, b, sig.args[2], scales, group)
            for t, token in enumerate(tokens):
                i = g * tile.tokens + t
                value = b.sitofp(b.extract_value(acc, i), V_F32)
                value = call(
                    b,
                    "llvm.fma.v16f32",
                    V_F32,
                    value,
                    b.fmul(rows, token),
                    b.extract_value(total, i),
                )
                total = b.insert_value(total, value, i)
        return total

    size = types.intp
    return total(total, acc, scales, size, size, x_scales, size), build


@intrinsic
def half(tc, value):
    """The float16 nearest to a float32, as the int16 of its bits."""

    def build(ctx, b, sig, args):
        return b.bitcast(b.fptrunc(args[0], F16), I16)

    return types.int16(types.float32), build


@intrinsic
def store_whole(tc, array, at, value):
    """array[at : at + 16] = 16 whole numbers from -127 to 127, as int8."""

    def build(ctx, b, sig, args):
        whole = b.trunc(b.fptosi(args[2], V_I32), ir.VectorType(I8, LANES))
        p = address(ctx, b, sig.args[0], args[0], args[1])
        b.store(whole, b.bitcast(p, whole.type.as_pointer()), align=1)
        return ctx.get_dummy_value()

    if array.dtype == types.int8:
        return types.void(array, types.intp, f32x16), build
