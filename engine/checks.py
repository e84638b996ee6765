"""What a caller gave, looked at once, at the door: ValueError with the value and the limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.config import show


def is_many(prompt: object) -> bool:
    """Whether these are several prompts: a list of texts or of lists of ids."""
    listed = isinstance(prompt, list | tuple) and len(prompt) > 0
    return listed and all(isinstance(item, str | Sequence | np.ndarray) for item in prompt)


def is_id(item: object) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def one_of(name: str, value: object, known) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {show(value)}; one of {', '.join(known)} is needed")


def check_size(name: str, value: object, most: int, least: int = 1) -> int:
    if not is_id(value) or not least <= value <= most:
        needed = f"a whole number from {least} to {most} is needed"
        raise ValueError(f"{name} is {show(value)}; {needed}")
    return int(value)


def check_kv(kind: str, dtype: str, block_rows: object, max_blocks: object) -> None:
    """The settings of a KV cache, of which some are for some kinds only."""
    if kind == "concat" and dtype != "f32":
        raise ValueError(f"kv_dtype is {dtype!r}; kv_cache 'concat' keeps f32 only")
    for name, value, most in (
        ("kv_block_rows", block_rows, 1 << 16),
        ("kv_max_blocks", max_blocks, 1 << 32),
    ):
        if value is not None:
            check_size(name, value, most)
            if kind != "paged":
                raise ValueError(f"{name} is {value}; it is for kv_cache 'paged', not {kind!r}")
