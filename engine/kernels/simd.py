"""Vectors as values of `@njit` code.

LLVM does not find the fast form of a matrix product by itself, so kernels say it: `f32x16` is a
Numba type whose value is an LLVM vector of 16 floats: one register with AVX-512, two with AVX2,
four with NEON. The lanes, and so the results, are the same.

Arrays are flat. `at` is an index into one; loads and stores need no alignment. A float32 array
loads as it is; Numba has no narrower floats, so a uint16 array holds bfloat16 and an int16 array
float16, and both are widened.
"""

from __future__ import annotations

import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic, models, overload, register_model

from engine.kernels.jit import inlined

LANES = 16
F16, F32, I8, I16, I32, I64 = ir.HalfType(), ir.FloatType(), *map(ir.IntType, (8, 16, 32, 64))
V_F16, V_F32, V_I16, V_I32 = (ir.VectorType(t, LANES) for t in (F16, F32, I16, I32))


class F32x16(types.Type):
    def __init__(self):
        super().__init__(name="f32x16")


@register_model(F32x16)
class F32x16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, V_F32)


f32x16 = F32x16()


def is_floats(t) -> bool:
    return isinstance(t, types.Array) and t.dtype == types.float32 and t.ndim == 1


def is_loadable(t) -> bool:
    return is_floats(t) or (
        isinstance(t, types.Array) and t.dtype in (types.uint16, types.int16) and t.ndim == 1
    )


def call(b, name, result, *args):
    """Call the LLVM intrinsic `name`."""
    signature = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), args)


def splatted(b, scalar, vector=V_F32):
    first = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, vector.count), None))


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
    if array_type.dtype == types.int16:
        return b.fpext(b.load(b.bitcast(pointer, V_F16.as_pointer()), align=2), V_F32)
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
    """One element as float32: itself, a uint16's bits as bfloat16, or an int16's as float16."""

    def build(ctx, b, sig, args):
        if sig.args[0] == types.float32:
            return args[0]
        if sig.args[0] == types.int16:
            return b.fpext(b.bitcast(args[0], F16), F32)
        return b.bitcast(b.shl(b.zext(args[0], I32), I32(16)), F32)

    return types.float32(value), build


@intrinsic
def store(tc, array, at, value):
    """array[at : at + 16] = value, rounded to nearest, halves to even, where it holds float16."""

    def build(ctx, b, sig, args):
        array, at, value = args
        if sig.args[0].dtype == types.int16:
            value = b.fptrunc(value, V_F16)
        pointer = address(ctx, b, sig.args[0], array, at)
        b.store(value, b.bitcast(pointer, value.type.as_pointer()), align=2)
        return ctx.get_dummy_value()

    if is_loadable(array) and array.dtype != types.uint16 and value == f32x16:
        return types.void(array, types.intp, f32x16), build


@intrinsic
def prefetch(tc, array, at):
    """Ask for the cache line of array[at], which need not be inside: nothing is read."""

    def build(ctx, b, sig, args):
        view = ctx.make_array(sig.args[0])(ctx, b, args[0])
        pointer = b.bitcast(b.gep(view.data, [args[1]]), I8.as_pointer())
        call(b, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(3), I32(1))
        return ctx.get_dummy_value()

    return types.void(array, types.intp), build


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
def magnitude(tc, a):
    """|a|, lane by lane."""
    return lanewise(lambda b, x: call(b, "llvm.fabs.v16f32", V_F32, x), 1)(tc, a)


@intrinsic
def nearest(tc, a):
    """Rounded to whole numbers, halves to even."""
    return lanewise(lambda b, x: call(b, "llvm.rint.v16f32", V_F32, x), 1)(tc, a)


@intrinsic
def neighbours(tc, a):
    """The other lane of each pair: a[1], a[0], a[3], a[2] and so on."""
    order = ir.Constant(ir.VectorType(I32, LANES), [i ^ 1 for i in range(LANES)])
    return lanewise(lambda b, x: b.shuffle_vector(x, x, order), 1)(tc, a)


@intrinsic
def nan_or(tc, a, b):
    """a where it is NaN, else b, lane by lane."""
    return lanewise(lambda b, x, y: b.select(b.fcmp_unordered("uno", x, x), x, y), 2)(tc, a, b)


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


@intrinsic
def transpose(tc, out, to, array, at, stride):
    """out[to + 16 c + r] = array[at + r * stride + c], for 16 rows r and 16 columns c."""

    def build(ctx, b, sig, args):
        out, to, array, at, stride = args
        rows = [
            load_lanes(
                ctx, b, sig.args[2], array, b.add(at, b.mul(stride, ir.Constant(at.type, r)))
            )
            for r in range(LANES)
        ]
        for step in (8, 4, 2, 1):  # swap the off-diagonal squares of every block of 2 step x 2 step
            for r in (r for r in range(LANES) if not r & step):
                low = [i if not i & step else LANES + i - step for i in range(LANES)]
                high = [i + step if not i & step else LANES + i for i in range(LANES)]
                rows[r], rows[r + step] = (
                    b.shuffle_vector(rows[r], rows[r + step], V_I32(mask)) for mask in (low, high)
                )
        for c, column in enumerate(rows):
            p = address(ctx, b, sig.args[0], out, b.add(to, ir.Constant(to.type, c * LANES)))
            b.store(column, b.bitcast(p, V_F32.as_pointer()), align=4)
        return ctx.get_dummy_value()

    size = types.intp
    return types.void(out, size, array, size, size), build


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
    """e**x for f32x16, within 2 ulp from -87 to 88; the ends' values beyond them; NaN for NaN."""
    near = smallest(largest(x, EXP_MIN), EXP_MAX)
    n = nearest(near * LOG2_E)
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, near))
    p = fma(fma(fma(fma(fma(P0, r, P1), r, P2), r, P3), r, P4), r, P5)
    return nan_or(x, times_power_of_two(fma(p, r * r, r) + np.float32(1.0), n))
