"""What every cache shares: the types of rows, a look at what is given, counts of what is moved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

KV_DTYPES = {"f32": np.float32, "f16": np.float16}  # how keys and values are kept


@dataclass
class Counts:
    """What a cache has done so far. Copies are in bytes of rows, K and V together."""

    append: int = 0  # new rows written, each once
    grow: int = 0  # rows in use copied, since an append or a shared block needed other memory
    read: int = 0  # rows in use copied to be read
    allocations: int = 0  # arrays made

    def __sub__(self, other: Counts) -> Counts:
        """What was done since `other`, an earlier copy."""
        return Counts(*(a - b for a, b in zip(vars(self).values(), vars(other).values(), strict=1)))


def kv_dtype_of(name: str) -> type:
    """The NumPy type of "f32" or "f16"; ValueError for another."""
    if name not in KV_DTYPES:
        raise ValueError(f"dtype is {name!r}; one of {', '.join(KV_DTYPES)} is needed")
    return KV_DTYPES[name]


def check_prefill(k: np.ndarray, v: np.ndarray, kv_dim: int) -> None:
    """ValueError unless k and v are (n, kv_dim) for one n."""
    if k.shape != (len(k), kv_dim) or v.shape != k.shape:
        raise ValueError(f"set_prefill: k is {k.shape}, v {v.shape}; (rows, {kv_dim}) is needed")


def check_row(k_row: np.ndarray, v_row: np.ndarray, kv_dim: int) -> None:
    """ValueError unless both are (kv_dim,): NumPy would broadcast another without a word."""
    if k_row.shape != (kv_dim,) or v_row.shape != (kv_dim,):
        raise ValueError(
            f"push_row: rows of {k_row.shape} and {v_row.shape}; ({kv_dim},) is needed"
        )


def check_truncate(rows: int, held: list[int]) -> None:
    """ValueError unless every layer holds at least `rows` rows."""
    if not 0 <= rows <= min(held, default=0):
        raise ValueError(f"truncate: {rows} rows of {min(held, default=0)} cannot be kept")
