"""Vectors and register tiles as values of `@njit` code.

LLVM does not find the fast form of a matrix product by itself, so kernels say it: `f32x16` is a
Numba type whose value is an LLVM vector of 16 floats (one register with AVX-512, two with AVX2,
four with NEON: the lanes and so the results are the same), and a `Tile` is an array of such
vectors, the accumulators of a matrix product. The unrolling is done inside the intrinsics, so that
a kernel with 12 accumulators is still a short loop.

Arrays are flat. `at` is an index into one; loads and stores need no alignment. A float32 array
loads as it is, a uint16 array holds bfloat16 and is widened.
"""

from __future__ import annotations

import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic, models, overload, register_model

from engine.kernels.jit import cpu, inlined

LANES = 16
F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
V_F32, V_I16, V_I32 = (ir.VectorType(t, LANES) for t in (F32, I16, I32))

# Row groups of a tile that holds many tokens: 12 accumulators fill 12 of AVX-512's 32 registers,
# and 6 of them, each two registers wide, fill 12 of AVX2's 16.
TILE_TOKENS = 6
TILE_GROUPS = 2 if "+avx512f" in cpu()[1].split(",") else 1


class F32x16(types.Type):
    def __init__(self):
        super().__init__(name="f32x16")


class Tile(types.Type):
    """`groups` x `tokens` accumulators, each f32x16: 16 rows of a matrix for one token."""

    def __init__(self, groups: int, tokens: int):
        self.groups, self.tokens = groups, tokens
        super().__init__(name=f"tile({groups}x{tokens})")

    @property
    def key(self):
        return self.groups, self.tokens


@register_model(F32x16)
class F32x16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, V_F32)


@register_model(Tile)
class TileModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.ArrayType(V_F32, fe_type.groups * fe_type.tokens))


f32x16 = F32x16()


def is_floats(t) -> bool:
    return isinstance(t, types.Array) and t.dtype == types.float32 and t.ndim == 1


def is_loadable(t) -> bool:
    return is_floats(t) or (isinstance(t, types.Array) and t.dtype == types.uint16)


def call(b, name, result, *args):
    """Call the LLVM intrinsic `name`."""
    signature = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), args)


def splatted(b, scalar, vector=V_F32):
    first = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(first, first, ir.Constant(V_I32, None))


def address(ctx, b, array_type, array, at, count=LANES):
    """Where array[at] lies; `count` elements from there are read or written."""
    view = ctx.make_array(array_type)(ctx, b, array)
    if config.BOUNDSCHECK:
        end = b.add(at, ir.Constant(at.type, count))
        outside = b.or_(
            b.icmp_signed("<", at, ir.Constant(at.type, 0)), b.icmp_signed(">", end, view.nitems)
        )
        with b.if_then(outside, likely=False):
            ctx.call_conv.return_user_exc(b, IndexError, ("vector access is out of bounds",))
    return b.gep(view.data, [at])


def load_lanes(ctx, b, array_type, array, at):
    pointer = address(ctx, b, array_type, array, at)
    if array_type.dtype == types.float32:
        return b.load(b.bitcast(pointer, V_F32.as_pointer()), align=4)
    bits = b.zext(b.load(b.bitcast(pointer, V_I16.as_pointer()), align=2), V_I32)
    return b.bitcast(b.shl(bits, ir.Constant(V_I32, [16] * LANES)), V_F32)


@intrinsic
def load(tc, array, at):
    """array[at : at + 16] as f32x16."""
    if is_loadable(array) and isinstance(at, types.Integer):
        return f32x16(array, types.intp), lambda ctx, b, sig, args: load_lanes(
            ctx, b, sig.args[0], *args
        )


@intrinsic
def widen(tc, value):
    """One weight as float32: itself, or the bfloat16 whose bits a uint16 holds."""

    def build(ctx, b, sig, args):
        if sig.args[0] == types.float32:
            return args[0]
        return b.bitcast(b.shl(b.zext(args[0], I32), I32(16)), F32)

    return types.float32(value), build


@intrinsic
def store(tc, array, at, value):
    """array[at : at + 16] = value."""

    def build(ctx, b, sig, args):
        pointer = address(ctx, b, sig.args[0], args[0], args[1])
        b.store(args[2], b.bitcast(pointer, V_F32.as_pointer()), align=4)
        return ctx.get_dummy_value()

    if is_floats(array) and value == f32x16:
        return types.void(array, types.intp, f32x16), build


@intrinsic
def splat(tc, value):
    """16 times the same float32."""
    return f32x16(types.float32), lambda ctx, b, sig, args: splatted(b, args[0])


def lanewise(build, arguments: int):
    """An intrinsic of `arguments` vectors, or floats that stand for 16 equal lanes."""

    def typing(tc, *given):
        if len(given) == arguments and any(t == f32x16 for t in given):
            wanted = [t if t == f32x16 else types.float32 for t in given]

            def code(ctx, b, sig, args):
                pairs = zip(args, sig.args, strict=True)
                return build(b, *(a if t == f32x16 else splatted(b, a) for a, t in pairs))

            return f32x16(*wanted), code

    return typing


@intrinsic
def fma(tc, a, b, c):
    """a * b + c, rounded once."""
    return lanewise(lambda b, *v: call(b, "llvm.fma.v16f32", V_F32, *v), 3)(tc, a, b, c)


@intrinsic
def largest(tc, a, b):
    """The larger, lane by lane."""
    return lanewise(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y), 2)(tc, a, b)


@intrinsic
def smallest(tc, a, b):
    """The smaller, lane by lane."""
    return lanewise(lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y), 2)(tc, a, b)


@intrinsic
def nearest(tc, a):
    """Rounded to whole numbers, halves to even."""
    return lanewise(lambda b, x: call(b, "llvm.rint.v16f32", V_F32, x), 1)(tc, a)


def scaled_by_power(b, x, n):
    exponent = b.add(b.fptosi(n, V_I32), ir.Constant(V_I32, [127] * LANES))
    return b.fmul(x, b.bitcast(b.shl(exponent, ir.Constant(V_I32, [23] * LANES)), V_F32))


@intrinsic
def times_power_of_two(tc, x, n):
    """x * 2**n for whole n from -126 to 127."""
    return lanewise(scaled_by_power, 2)(tc, x, n)


def lane_index_below(b, n):
    """A mask of the lanes whose index is below n (of any sign)."""
    return b.icmp_signed("<", V_I32(list(range(LANES))), splatted(b, b.trunc(n, I32), V_I32))


@intrinsic
def first_lanes(tc, value, n, other):
    """`value` in lanes below n, `other` in the rest."""

    def build(ctx, b, sig, args):
        value, n, other = args
        return b.select(lane_index_below(b, n), value, splatted(b, other))

    return f32x16(f32x16, types.intp, types.float32), build


def folded(b, value, join):
    """All lanes joined into one: halves onto halves, the same tree on every processor."""
    half = LANES // 2
    while half:
        take = [ir.Constant(ir.VectorType(I32, half), [*range(s, s + half)]) for s in (0, half)]
        value = join(*(b.shuffle_vector(value, value, mask) for mask in take))
        half //= 2
    return b.extract_element(value, I32(0))


@intrinsic
def lane_sum(tc, value):
    """The sum of 16 lanes."""
    return types.float32(f32x16), lambda ctx, b, sig, args: folded(b, args[0], b.fadd)


@intrinsic
def lane_max(tc, value):
    """The largest of 16 lanes."""

    def build(ctx, b, sig, args):
        return folded(b, args[0], lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))

    return types.float32(f32x16), build


def define(operation, method: str) -> None:
    """Make Python's operator work on f32x16, with floats on either side."""

    @intrinsic
    def lanes(tc, a, b):
        return lanewise(lambda b, x, y: getattr(b, method)(x, y), 2)(tc, a, b)

    @overload(operation, inline="always")
    def choose(a, b):
        if f32x16 in (a, b):
            return lambda a, b: lanes(a, b)


for operation, method in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    define(operation, method)

LOG2_E, LN2_HIGH, LN2_LOW = (
    np.float32(1.44269504),
    np.float32(0.693359375),
    np.float32(-2.12194440e-4),
)
EXP_MIN, EXP_MAX = np.float32(-87.0), np.float32(88.0)
# Minimax coefficients of (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2, as in Cephes' expf.
P0, P1, P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
P3, P4, P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@inlined
def exp(x):
    """e**x for f32x16, within 2 ulp from -87 to 88; the ends' values beyond them."""
    x = smallest(largest(x, EXP_MIN), EXP_MAX)
    n = nearest(x * LOG2_E)
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    p = fma(fma(fma(fma(fma(P0, r, P1), r, P2), r, P3), r, P4), r, P5)
    return times_power_of_two(fma(p, r * r, r) + np.float32(1.0), n)


# ---------------------------------------------------------------- tiles


def corner(ctx, b, tile: Tile, array_type, array, at, stride, valid, count):
    """Addresses array[at + t * stride] of a tile's tokens; those past `valid` repeat the last."""
    found = []
    last = b.sub(valid, ir.Constant(valid.type, 1))
    for t in range(tile.tokens):
        token = ir.Constant(valid.type, t)
        token = b.select(b.icmp_signed("<", token, last), token, last) if t else token
        index = b.add(at, b.mul(stride, token))
        found.append(address(ctx, b, array_type, array, index, count))
    return found


@intrinsic(prefer_literal=True)
def tile_zero(tc, groups, tokens):
    """A tile of `groups` x `tokens` accumulators, both written as literals or constants."""
    tile = Tile(groups.literal_value, tokens.literal_value)
    return tile(groups, tokens), lambda ctx, b, sig, args: ir.Constant(
        ctx.get_value_type(sig.return_type), None
    )


@intrinsic
def tile_fma(tc, total, w, w_at, w_stride, x, x_at, x_stride, valid):
    """total[g, t] += w[w_at + g * w_stride : + 16] * x[x_at + t * x_stride]."""

    def build(ctx, b, sig, args):
        total, w, w_at, w_stride, x, x_at, x_stride, valid = args
        tile = sig.args[0]
        scalars = corner(ctx, b, tile, sig.args[4], x, x_at, x_stride, valid, 1)
        tokens = [splatted(b, b.load(p)) for p in scalars]
        for g in range(tile.groups):
            at = b.add(w_at, b.mul(w_stride, ir.Constant(w_at.type, g)))
            rows = load_lanes(ctx, b, sig.args[1], w, at)
            for t, token in enumerate(tokens):
                i = g * tile.tokens + t
                part = call(b, "llvm.fma.v16f32", V_F32, rows, token, b.extract_value(total, i))
                total = b.insert_value(total, part, i)
        return total

    if isinstance(total, Tile) and is_loadable(w) and is_floats(x):
        size = types.intp
        return total(total, w, size, size, x, size, size, size), build


@intrinsic
def tile_store(tc, out, at, stride, valid, total, add):
    """out[at + t * stride + 16 g : + 16] = total[g, t] for tokens t below `valid`.

    With `add`, the tile is added to what stands there.
    """

    def build(ctx, b, sig, args):
        out, at, stride, valid, total, add = args
        tile = sig.args[4]
        for t in range(tile.tokens):
            with b.if_then(b.icmp_signed("<", ir.Constant(valid.type, t), valid)):
                index = b.add(at, b.mul(stride, ir.Constant(at.type, t)))
                start = address(ctx, b, sig.args[0], out, index, LANES * tile.groups)
                for g in range(tile.groups):
                    p = b.bitcast(b.gep(start, [I64(LANES * g)]), V_F32.as_pointer())
                    value = b.extract_value(total, g * tile.tokens + t)
                    old = b.select(add, b.load(p, align=4), ir.Constant(V_F32, None))
                    b.store(b.fadd(old, value), p, align=4)
        return ctx.get_dummy_value()

    if is_floats(out) and isinstance(total, Tile):
        size = types.intp
        return types.void(out, size, size, size, total, types.boolean), build


@inlined
def tile_dot(total, w, w_at, w_step, w_stride, x, x_at, x_stride, valid, n):
    """total[g, t] += sum over c < n of w[w_at + g * w_stride + c * w_step : + 16] * x[t, c].

    Sums run over c in order whatever the tile's shape: a token alone gets the bits it gets among
    others.
    """
    for c in range(n):
        total = tile_fma(total, w, w_at + c * w_step, w_stride, x, x_at + c, x_stride, valid)
    return total
