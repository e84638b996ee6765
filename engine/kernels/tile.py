"""Register tiles: the accumulators of a matrix product as one value.

A `Tile` is an array of vectors, 16 rows of a matrix for each of some tokens. The unrolling is done
inside the intrinsics, so that a kernel with 12 accumulators is still a short loop. The order of a
sum is that of the columns, whatever the tile's shape.

A tile always reads all its tokens: arrays of a row a token have rows for whole tiles. What it
computes of rows that are no tokens is not stored.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from engine.kernels.jit import has, inlined
from engine.kernels.simd import (
    I32,
    I64,
    LANES,
    V_F32,
    V_I32,
    address,
    call,
    folded,
    is_floats,
    is_loadable,
    load_lanes,
    splatted,
)

# 12 accumulators fill 12 of AVX-512's 32 registers; 6 of them, each two registers wide, fill 12
# of AVX2's 16.
TILE_TOKENS = 6
TILE_GROUPS = 2 if has("avx512f") else 1


class Tile(types.Type):
    """`groups` x `tokens` accumulators, each 16 lanes of "f32" or "i32"."""

    def __init__(self, lanes: str, groups: int, tokens: int):
        self.lanes, self.groups, self.tokens = lanes, groups, tokens
        super().__init__(name=f"tile({groups}x{tokens} {lanes})")

    @property
    def key(self):
        return self.lanes, self.groups, self.tokens

    @property
    def vector(self) -> ir.VectorType:
        return V_F32 if self.lanes == "f32" else V_I32


@register_model(Tile)
class TileModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        size = fe_type.groups * fe_type.tokens
        super().__init__(dmm, fe_type, ir.ArrayType(fe_type.vector, size))


def token_addresses(ctx, b, tile: Tile, array_type, array, at, stride, count):
    """Where array[at + t * stride] lies for each token t of a tile; `count` elements are read."""
    steps = (b.mul(stride, ir.Constant(stride.type, t)) for t in range(tile.tokens))
    return [address(ctx, b, array_type, array, b.add(at, step), count) for step in steps]


def vectors_at(ctx, b, array_type, array, at, stride, n):
    """array[at + i * stride : + 16] for i below n, each loaded when it is asked for."""
    for i in range(n):
        start = b.add(at, b.mul(stride, ir.Constant(at.type, i)))
        yield load_lanes(ctx, b, array_type, array, start)


def with_products(b, tile: Tile, total, rows, tokens):
    """total[g, t] + rows[g] * tokens[t], a vector for each group and each token."""
    for g, row in enumerate(rows):
        for t, token in enumerate(tokens):
            i = g * tile.tokens + t
            part = call(b, "llvm.fma.v16f32", V_F32, row, token, b.extract_value(total, i))
            total = b.insert_value(total, part, i)
    return total


@intrinsic(prefer_literal=True)
def tile_zero(tc, groups, tokens):
    """A tile of `groups` x `tokens` accumulators, both written as literals or constants."""
    tile = Tile("f32", groups.literal_value, tokens.literal_value)
    return tile(groups, tokens), lambda ctx, b, sig, args: ir.Constant(
        ctx.get_value_type(sig.return_type), None
    )


@intrinsic
def tile_load(tc, zero, array, at, stride, valid):
    """A tile of the shape of `zero`: array[at + t * stride + 16 g : + 16] for tokens t below
    `valid`, and for the rest what the last of those has."""

    def build(ctx, b, sig, args):
        total, array, at, stride, valid = args
        tile, last = sig.args[0], b.sub(valid, ir.Constant(valid.type, 1))
        for t in range(tile.tokens):
            token = ir.Constant(valid.type, t)
            token = b.select(b.icmp_signed("<", token, last), token, last)
            start = b.add(at, b.mul(stride, token))
            for g in range(tile.groups):
                index = b.add(start, ir.Constant(at.type, LANES * g))
                value = load_lanes(ctx, b, sig.args[1], array, index)
                total = b.insert_value(total, value, g * tile.tokens + t)
        return total

    if isinstance(zero, Tile) and is_floats(array):
        size = types.intp
        return zero(zero, array, size, size, size), build


@intrinsic
def tile_fma(tc, total, w, w_at, w_stride, x, x_at, x_stride):
    """total[g, t] += w[w_at + g * w_stride : + 16] * x[x_at + t * x_stride]."""

    def build(ctx, b, sig, args):
        total, w, w_at, w_stride, x, x_at, x_stride = args
        tile = sig.args[0]
        scalars = token_addresses(ctx, b, tile, sig.args[4], x, x_at, x_stride, 1)
        tokens = [splatted(b, b.load(p)) for p in scalars]
        rows = vectors_at(ctx, b, sig.args[1], w, w_at, w_stride, tile.groups)
        return with_products(b, tile, total, rows, tokens)

    if isinstance(total, Tile) and is_loadable(w) and is_floats(x):
        size = types.intp
        return total(total, w, size, size, x, size, size), build


@intrinsic
def tile_fma_lanes(tc, total, w, w_at, w_stride, x, x_at, x_stride):
    """total[g, t] += w[w_at + g * w_stride : + 16] * x[x_at + t * x_stride : + 16], by lanes."""

    def build(ctx, b, sig, args):
        total, w, w_at, w_stride, x, x_at, x_stride = args
        tile = sig.args[0]
        tokens = list(vectors_at(ctx, b, sig.args[4], x, x_at, x_stride, tile.tokens))
        rows = vectors_at(ctx, b, sig.args[1], w, w_at, w_stride, tile.groups)
        return with_products(b, tile, total, rows, tokens)

    if isinstance(total, Tile) and is_loadable(w) and is_floats(x):
        size = types.intp
        return total(total, w, size, size, x, size, size), build


@intrinsic
def tile_store_sums(tc, out, at, stride, total):
    """out[at + t * stride + g] = the sum of the lanes of total[g, t]."""

    def build(ctx, b, sig, args):
        out, at, stride, total = args
        tile = sig.args[3]
        lanes = [
            [b.extract_value(total, g * tile.tokens + t) for g in range(tile.groups)]
            for t in range(tile.tokens)
        ]
        if tile.groups == tile.tokens == 2:
            sums = four_folded(b, *lanes[0], *lanes[1])
        else:
            sums = [[folded(b, vector, b.fadd) for vector in some] for some in lanes]
        for t, some in enumerate(sums):
            index = b.add(at, b.mul(stride, ir.Constant(at.type, t)))
            start = address(ctx, b, sig.args[0], out, index, tile.groups)
            for g, value in enumerate(some):
                b.store(value, b.gep(start, [I64(g)]))
        return ctx.get_dummy_value()

    if is_floats(out) and isinstance(total, Tile):
        size = types.intp
        return types.void(out, size, size, total), build


def four_folded(b, a0, a1, b0, b1):
    """((sum a0, sum a1), (sum b0, sum b1)), each the tree of `folded`, all four in half the steps.

    A step adds the halves of two vectors and puts the results side by side.
    """

    def halves(x, y, low, high):
        low, high = (ir.Constant(ir.VectorType(I32, len(m)), m) for m in (low, high))
        return b.fadd(b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high))

    first, second = [*range(8)], [*range(8, 16)]
    a0, a1, b0, b1 = (halves(x, x, first, second) for x in (a0, a1, b0, b1))
    quads = [*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)]
    x, y = halves(a0, b0, *quads), halves(a1, b1, *quads)  # 4 lanes of a, then of b
    z = halves(x, y, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
    z = halves(z, z, [0, 2, 4, 6], [1, 3, 5, 7])
    found = [b.extract_element(z, I32(i)) for i in range(4)]
    return found[:2], found[2:]


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
def tile_dot(total, w, w_at, w_step, w_stride, x, x_at, x_stride, n):
    """total[g, t] += sum over c < n of w[w_at + g * w_stride + c * w_step : + 16] * x[t, c].

    Sums run over c in order whatever the tile's shape: a token alone gets the bits it gets among
    others.
    """
    for c in range(n):
        total = tile_fma(total, w, w_at + c * w_step, w_stride, x, x_at + c, x_stride)
    return total


@intrinsic
def tile_groups(tc, total):
    """How many groups of 16 rows a tile holds, a constant of the compiler's."""
    return types.intp(total), lambda ctx, b, sig, args: I64(sig.args[0].groups)


@intrinsic
def tile_tokens(tc, total):
    """How many tokens a tile holds, a constant of the compiler's."""
    return types.intp(total), lambda ctx, b, sig, args: I64(sig.args[0].tokens)
