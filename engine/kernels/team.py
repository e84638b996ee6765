"""Ranks and the barrier where they meet.

A step is one compiled call that N threads run at once, each as a rank with its own share of every
operation, or with as much of it as it gets to. `flags` is an int64 array: in cache lines of their
own stand how often ranks arrived, whether the team is broken, how many tickets were drawn, and, of
each rank, how many barriers it passed, which ticket is the first of its operation, and which it
holds.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.clock import BARRIER, lap
from engine.kernels.jit import inlined, kernel

NO_CLOCK = np.zeros(0, np.int64)


class Rank(NamedTuple):
    """Which rank of how many, the flags over which they meet, and where it leaves its times."""

    rank: int
    ranks: int
    flags: np.ndarray
    clock: np.ndarray = NO_CLOCK  # of clock.py; empty: no times are taken


LINE = 16  # int64 in two cache lines: NumPy's arrays begin anywhere in one
ARRIVED, BROKEN, DRAWN, OWN = 0, LINE, 2 * LINE, 3 * LINE
PASSED, FIRST, HELD = 0, 1, 2  # in the line of a rank
SPINS = 20_000  # 13 us and more; then the processor is given to whoever else needs it
I64 = ir.IntType(64)


def new_flags(ranks: int) -> np.ndarray:
    """Flags of a team of `ranks` that has not met yet."""
    return np.zeros(OWN + ranks * LINE, np.int64)


def slot(ctx, b, array_type, array, at):
    return b.gep(ctx.make_array(array_type)(ctx, b, array).data, [at])


@intrinsic
def counted(tc, flags, at):
    """flags[at] += 1 for all ranks to see; returns what it was."""

    def build(ctx, b, sig, args):
        return b.atomic_rmw("add", slot(ctx, b, sig.args[0], *args), I64(1), "acq_rel")

    return types.int64(flags, types.intp), build


@intrinsic
def read(tc, flags, at):
    def build(ctx, b, sig, args):
        return b.load_atomic(slot(ctx, b, sig.args[0], *args), "acquire", 8)

    return types.int64(flags, types.intp), build


def calls(symbol: str, result):
    """Code that calls a C function without arguments."""

    def build(ctx, b, sig, args):
        function = ir.FunctionType(result, [])
        b.call(cgutils.get_or_insert_function(b.module, function, symbol), [])
        return ctx.get_dummy_value()

    return build


@intrinsic
def give_way(tc):
    """Let another thread have this processor."""
    symbol = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
    return types.void(), calls(symbol, ir.IntType(32))


@kernel
def barrier(me):
    """Wait until every rank has come this far: a bounded spin, then yielding.

    A rank that failed breaks the team (`break_team`), so that no other waits for it for ever.
    """
    if me.ranks == 1:
        return
    mine = OWN + me.rank * LINE + PASSED
    me.flags[mine] += 1
    wanted = me.flags[mine] * me.ranks
    counted(me.flags, ARRIVED)
    spins = 0
    while read(me.flags, ARRIVED) < wanted and read(me.flags, BROKEN) == 0:
        spins += 1
        if spins > SPINS:
            give_way()
    lap(me, BARRIER)


@inlined
def share(n, me):
    """The half-open range of `n` things that is this rank's."""
    return n * me.rank // me.ranks, n * (me.rank + 1) // me.ranks


@inlined
def draw(n, me):
    """Which of an operation's n things this rank does next, or n: none is left, ask no more.

    Who is done with one draws the next, so that a rank whose processor is slower, or has other work
    as well, holds nobody up. A ticket has a number among those of all operations ever, which every
    rank runs in one order: one drawn too many is the rank's first of the next operation.
    """
    mine = OWN + me.rank * LINE
    if me.flags[mine + HELD] == 0:
        me.flags[mine + HELD] = counted(me.flags, DRAWN) + 1
    i = me.flags[mine + HELD] - 1 - me.flags[mine + FIRST]
    if i >= n:
        me.flags[mine + FIRST] += n
        return n
    me.flags[mine + HELD] = 0
    return i


def break_team(flags: np.ndarray) -> None:
    """Release every rank that waits, now and from now on."""
    flags[BROKEN] = 1
