"""A generated token with each KV cache, and what the cache copies for it."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest

from benchmarks.caches import KINDS_OF_CACHE, new_cache
from benchmarks.decode import filled
from engine.kernels.runs import Run

STEPS = 24


@pytest.mark.benchmark(group="caches")
@pytest.mark.parametrize("rows", [17, 511, 2048, 4000])
@pytest.mark.parametrize("kind", KINDS_OF_CACHE)
def test_cache(measure, llm, kind, rows, request):
    """Steps of one token. `read`, `grow`, `append`: bytes that the cache copied in the last one."""
    if rows + STEPS > llm.context:
        pytest.skip(f"the model's context is {llm.context}")
    if rows > 511 and request.config.getoption("--model") is None:
        pytest.skip("long contexts are for a whole model: --model")
    cache, logits = filled(new_cache(llm, kind, rows + STEPS + 1), rows), llm._model.new_logits(1)
    rng, counts = np.random.default_rng(rows), [copy(cache.counts)]

    def step(token):
        llm._model.forward([Run(token, cache, False, 1)], logits)

    def count(token):
        counts.append(copy(cache.counts))

    measure(
        step,
        rounds=STEPS,
        setup=lambda: ((rng.integers(0, llm.config.vocab_size, 1),), {}),
        teardown=count,
        tokens=1,
        rows=rows,
    )
    if not request.config.getoption("--benchmark-disable"):
        request.getfixturevalue("benchmark").extra_info.update(vars(counts[-1] - counts[-2]))
