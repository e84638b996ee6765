"""What a step spends its time on: marks that every rank leaves inside the compiled step.

`lap(me, operation)` says that an operation has ended now, by the processor's own counter; it took
the time since the rank's mark before. A rank whose clock is empty leaves no marks: one comparison.
"""

from __future__ import annotations

import platform

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.jit import inlined, kernel

OPERATIONS = (
    "start", "embed", "rmsnorm", "quantize", "matmul q", "matmul k", "matmul v", "norm and rope",
    "append", "attention", "merge", "matmul out", "matmul gate", "matmul up", "swiglu",
    "matmul down", "head", "barrier",
)  # fmt: skip
(
    START, EMBED, RMSNORM, QUANTIZE, MATMUL_Q, MATMUL_K, MATMUL_V, NORM_AND_ROPE,
    APPEND, ATTENTION, MERGE, MATMUL_OUT, MATMUL_GATE, MATMUL_UP, SWIGLU,
    MATMUL_DOWN, HEAD, BARRIER,
) = range(len(OPERATIONS))  # fmt: skip
LAPS_A_LAYER = 32  # at least as many marks as a layer leaves, and as the rest of a step does
ARM = platform.machine() in ("aarch64", "arm64")


def new_clock(n_layers: int) -> np.ndarray:
    """Room for one rank's marks of a step: how many there are, then (operation, ticks) pairs."""
    return np.zeros(1 + 2 * LAPS_A_LAYER * (n_layers + 1), np.int64)


@intrinsic
def counter(tc):
    """The processor's counter, which runs evenly and is the same on every core."""

    def build(ctx, b, sig, args):
        i64 = ir.IntType(64)
        if ARM:  # the cycle counter is not for programs there, the timer's is
            read = ir.InlineAsm(ir.FunctionType(i64, []), "mrs $0, cntvct_el0", "=r", True)
            return b.call(read, [])
        name = "llvm.readcyclecounter"
        function = b.module.globals.get(name) or ir.Function(
            b.module, ir.FunctionType(i64, []), name
        )
        return b.call(function, [])

    return types.int64(), build


@inlined
def lap(me, operation):
    """Mark the end of an operation."""
    clock = me.clock
    if len(clock) > 0:
        n = clock[0]
        clock[1 + 2 * n] = operation
        clock[2 + 2 * n] = counter()
        clock[0] = n + 1


@kernel
def ticks():
    """The counter now."""
    return counter()
