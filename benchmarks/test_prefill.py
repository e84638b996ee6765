"""Prefill: from a prompt to its first token, as a request sees it."""

from __future__ import annotations

import numpy as np
import pytest

from engine import SamplingParams

FIRST = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@pytest.mark.benchmark(group="prefill")
@pytest.mark.parametrize("n", [17, 511, 4000])
def test_prefill(measure, pytestconfig, llm, n):
    """Fresh random ids each time, so that nothing kept from one prompt can serve the next."""
    if n == 4000 and not pytestconfig.getoption("--model"):
        pytest.skip("4,000 tokens are for --model")
    if n >= llm.context:
        pytest.skip(f"the model's context is {llm.context}")
    rng = np.random.default_rng(n)
    measure(
        lambda ids: llm.generate(ids, FIRST),
        rounds=3 if n == 4000 else 5,
        setup=lambda: ((rng.integers(0, llm.config.vocab_size, n).tolist(),), {}),
        tokens=n,
        rows=n,
    )
