"""The K and V rows of sequences, wherever they lie: read in place, appended in place.

A row holds one token's keys or values of all heads. Rows lie in blocks of `block_rows`, and a
block's rows one behind the other: a cache that grows is one large block, a paged one many small
ones. Kernels ask for the `stretch` of rows from some row to the end of its block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from engine.kernels.jit import inlined
from engine.kernels.simd import LANES, load, prefetch, store

LINE = 64  # bytes of a cache line
ELEMENTS = {"f32": np.float32, "f16": np.int16}  # the elements of rows, as kernels see them


class Kv(NamedTuple):
    """Where K and V of every layer lie. Row r of a sequence starts at the address
    blocks[table + r // block_rows] + places[layer, side] + r % block_rows * (bytes of a row), where
    `table` is the number of the sequence's first block: tables lie one behind the other."""

    blocks: np.ndarray  # (n_blocks,) uint64
    places: np.ndarray  # (n_layers, 2) uint64, of K and of V
    block_rows: int
    element: np.ndarray  # (0,) of a type of ELEMENTS, which is all that it says


class KvRows(NamedTuple):
    """K or V of one layer of one sequence."""

    blocks: np.ndarray  # (n_blocks,) uint64
    table: int  # its first block among them
    place: np.uint64
    block_rows: int
    width: int  # elements of a row
    element: np.ndarray


@intrinsic
def pointer_to(tc, element, address):
    """An address as a pointer to what the array `element` would hold."""
    result = types.CPointer(element.dtype)

    def build(ctx, b, sig, args):
        return b.inttoptr(args[1], ctx.get_value_type(result))

    return result(element, types.uint64), build


@inlined
def of_side(kv, table, layer, side, width):
    """K (side 0) or V (side 1) of a layer of the sequence at `table`, rows of `width`."""
    return KvRows(kv.blocks, table, kv.places[layer, side], kv.block_rows, width, kv.element)


@inlined
def stretch(rows, row):
    """The rows from `row` to the end of its block, flat, lent."""
    block = row // rows.block_rows
    inside = row - block * rows.block_rows
    size = rows.element.itemsize
    address = rows.blocks[rows.table + block] + rows.place + np.uint64(inside * rows.width * size)
    n = (rows.block_rows - inside) * rows.width
    return carray(pointer_to(rows.element, address), (n,))


@inlined
def prefetch_range(some, start, stop):
    """Prefetch elements start to stop of a stretch, as far as it goes."""
    for i in range(start, min(stop, len(some)), LINE // some.itemsize):
        prefetch(some, i)


@inlined
def rows_left(rows, row):
    """How many rows there are from `row` to the end of its block."""
    return rows.block_rows - row % rows.block_rows


@inlined
def write_row(rows, row, at, x, x_at, n):
    """Elements at to at + n of a row = x[x_at : x_at + n], n a multiple of 16."""
    to = stretch(rows, row)
    for i in range(0, n, LANES):
        store(to, at + i, load(x, x_at + i))
