"""Decode: a generated token after 17, 511 and 4,000 rows of context."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.decode import filled
from engine.kernels.runs import Run

STEPS = 24


@pytest.mark.benchmark(group="decode")
@pytest.mark.parametrize("rows", [17, 511, 4000])
def test_decode(measure, llm, rows):
    """Steps of one token, the context growing under them.

    A step reads every weight and every row: bytes are those, and memory's speed is the limit,
    except where a model is so small that it stays in cache, as the built-in one does.
    """
    if rows + STEPS > llm.context:
        pytest.skip(f"the model's context is {llm.context}")
    cache, logits = filled(llm.new_cache(), rows), llm._model.new_logits(1)
    rng = np.random.default_rng(rows)

    def step(token):
        llm._model.forward([Run(token, cache, False, 1)], logits)

    measure(
        step,
        rounds=STEPS,
        setup=lambda: ((rng.integers(0, llm.config.vocab_size, 1),), {}),
        tokens=1,
        moved=llm._model.bytes_per_token(rows + STEPS // 2),
        rows=rows,
    )
