"""Perplexity: how well a model foresees a text; what a way of keeping weights or rows costs."""

from __future__ import annotations

import math

import numpy as np
from tqdm import tqdm

from engine.kernels.runs import Run
from engine.llm import LLM

PIECE = 64  # tokens whose logits are held at a time


def perplexity(llm: LLM, ids: list[int], window: int = 512) -> float:
    """e to the mean negative log-likelihood of `ids`, in windows that are scored from scratch.

    The first token of a window is not scored.
    """
    total, count = 0.0, 0
    starts = range(0, len(ids) - 1, window)
    for start in tqdm(starts, desc="windows", disable=None, leave=False):
        piece = np.array(ids[start : start + window])
        if len(piece) > 1:
            total += negative_log_likelihood(llm, piece)
            count += len(piece) - 1
    return math.exp(total / count)


def negative_log_likelihood(llm: LLM, ids: np.ndarray) -> float:
    """Of ids[1:], each given those before it."""
    cache, size, total = llm.new_cache(), min(PIECE, llm._model.max_tokens), 0.0
    for start in range(0, len(ids), size):
        piece = ids[start : start + size]
        logits = llm._model.new_logits(len(piece))
        llm._model.forward([Run(piece, cache, True, len(logits))], logits)
        logits = logits[:, : llm.config.vocab_size].astype(np.float64)
        after = ids[start + 1 : start + size + 1]
        peak = logits.max(axis=1, keepdims=True)
        norm = np.log(np.exp(logits - peak).sum(axis=1)) + peak[:, 0]
        total += (norm[: len(after)] - logits[np.arange(len(after)), after]).sum()
    return total
