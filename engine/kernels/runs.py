"""What one step runs: tokens of several sequences, in runs.

A run is some tokens of one sequence, one behind the other, that follow the rows its cache holds: a
piece of a prompt, or what was generated, which is one token, or a few where some are guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.kernels.attention import CHUNK


class Runs(NamedTuple):
    """Runs in the order of their tokens, those of prompts first. All arrays are int64.

    Every generated token leaves a part for each chunk of the rows it sees (decode_attention.py);
    those of a run are numbered from parts[run], all its tokens' of one chunk before the next.
    """

    n_prompts: int  # so many of the runs are of prompts
    first: np.ndarray  # (n_runs + 1,) its first token; behind the last run, the number of tokens
    start: np.ndarray  # (n_runs,) rows before it: its first token's position
    table: np.ndarray  # (n_runs,) where its sequence's blocks begin among Kv.blocks
    parts: np.ndarray  # (n_runs + 1,) where its parts begin; behind the last, their number
    owner: np.ndarray  # (n_tokens,) the run of each token
    wanted: np.ndarray  # (m,) the tokens whose logits are wanted


class Run(NamedTuple):
    """Tokens of one sequence that a step takes, as Python hands them over."""

    ids: np.ndarray  # (n,) int64
    cache: object  # of the sequence, which holds the rows before them
    is_prompt: bool  # a prompt's tokens; otherwise they were generated, or guessed
    n_logits: int  # of so many of the last tokens the logits are wanted


def runs_of(runs: Sequence[Run], tables: Sequence[int]) -> Runs:
    """The same for kernels; `tables` is where each sequence's blocks begin."""
    first, starts, parts, owner, wanted = [0], [], [0], [], []
    for i, run in enumerate(runs):
        start, n = run.cache.seq_len(0), len(run.ids)
        starts.append(start)
        owner += [i] * n
        first.append(first[-1] + n)
        parts.append(parts[-1] + (0 if run.is_prompt else -(-(start + n) // CHUNK) * n))
        wanted += range(first[-1] - run.n_logits, first[-1])
    n_prompts = sum(run.is_prompt for run in runs)
    numbers = first, starts, tables, parts, owner, wanted
    return Runs(n_prompts, *(np.array(x, np.int64) for x in numbers))
