"""The forward pass against transformers' golden files, and against itself: the same bits always."""

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import random_tensors, write_checkpoint

from engine import LLM, SamplingParams
from engine.cache import BasicKvCache
from engine.kernels.forward import step
from engine.kernels.runs import Run
from engine.kernels.sampling import sample

GOLDEN = Path(__file__).parent / "golden"
PROMPTS = json.loads((GOLDEN / "golden.json").read_text())
LOGITS = np.load(GOLDEN / "golden.npz")
GREEDY = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)


def decoded(llm: LLM, ids: list[int]) -> np.ndarray:
    """Logits at every position when every token but the first comes as a generated one."""
    cache = BasicKvCache(n_layers=llm.config.n_layers, kv_dim=llm.config.kv_dim)
    logits, out = llm._model.new_logits(1), []
    for i, token in enumerate(ids):
        llm._model.forward([Run(np.array([token]), cache, i == 0, len(logits))], logits)
        out.append(logits[0, : llm.config.vocab_size].copy())
    return np.array(out)


@pytest.mark.parametrize("weights", ["f32", "bf16"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_greedy_ids_are_those_of_transformers(weights, threads, chunk):
    """Any fault of the forward pass turns a token within 64 steps of 13 prompts."""
    llm = LLM(weights=weights, threads=threads, prefill_chunk=chunk)
    for case in PROMPTS:
        assert llm.tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        done = llm.generate(case["prompt_ids"], GREEDY)
        assert done.token_ids == case["greedy_ids"], case["prompt"]


@pytest.mark.parametrize("backend", ["simd", "numpy"])
@pytest.mark.parametrize("name", ["200", "17"])
def test_logits_are_those_of_transformers(backend, name):
    """Errors that grow with the position (rope, masks) stay hidden in the first tokens."""
    llm = LLM(weights="f32", backend=backend)
    logits = llm.logits(LOGITS[f"ids_{name}"])
    assert np.abs(logits - LOGITS[f"logits_{name}"]).max() < 1e-3


@pytest.mark.parametrize("weights", ["f32", "bf16", "q8_0"])
def test_logits_have_the_same_bits_for_any_threads_and_chunks(weights):
    """A sum cut by rank or chunk gives other bits on another machine."""
    ids = LOGITS["ids_200"]
    wanted = LLM(weights=weights, threads=1).logits(ids)
    for threads, chunk in ((2, 512), (3, 64), (2, 5), (1, 1), (5, 13)):
        found = LLM(weights=weights, threads=threads, prefill_chunk=chunk).logits(ids)
        np.testing.assert_array_equal(found, wanted, err_msg=f"{threads=} {chunk=}")


def test_generated_tokens_have_the_same_bits_for_any_threads():
    """Chunks of rows merged in the order that ranks finish would give other bits each time."""
    ids = LOGITS["ids_200"].tolist()
    wanted = decoded(LLM(threads=1), ids)
    for threads in (2, 3, 5):
        np.testing.assert_array_equal(decoded(LLM(threads=threads), ids), wanted)


SHAPES = [
    {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1},
    {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 5},
    {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
    {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128},
    {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64},
    {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 40},
    {"hidden_size": 50, "intermediate_size": 71, "vocab_size": 301, "eos_token_id": None},
    {"hidden_size": 7, "intermediate_size": 5, "vocab_size": 3, "eos_token_id": 2},
    {"tie_word_embeddings": False, "hidden_size": 33},
    {"head_dim": 80, "rope_theta": 1e6},
]


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_simd_agrees_with_numpy(changes, tmp_path):
    """A kernel that is right only for multiples of 16, or for one group size, passes on Qwen3."""
    path = write_checkpoint(tmp_path, **changes)
    numpy = LLM(path, weights="f32", backend="numpy", prefill_chunk=50)
    ids = np.random.default_rng(0).integers(0, numpy.config.vocab_size, 150)
    wanted = numpy.logits(ids)
    for threads in (1, 2, 3):
        simd = LLM(path, weights="f32", threads=threads, prefill_chunk=70)
        np.testing.assert_allclose(simd.logits(ids), wanted, atol=1e-4)
        np.testing.assert_allclose(decoded(simd, ids), wanted, atol=1e-4)


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_q8_0_is_near_its_exact_products(changes, tmp_path):
    """Blocks of another row or head give fluent nonsense, far from what 8 bits can cost.

    The oracle multiplies the dequantised weights; only the activations' 8 bits differ.
    """
    path = write_checkpoint(tmp_path, **changes)
    numpy = LLM(path, weights="q8_0", backend="numpy")
    ids = np.random.default_rng(0).integers(0, numpy.config.vocab_size, 80)
    wanted = numpy.logits(ids)
    simd = LLM(path, weights="q8_0", threads=2, prefill_chunk=70)
    for found in (simd.logits(ids), decoded(simd, ids)):
        error = np.sqrt(((found - wanted) ** 2).mean())
        assert error < 0.06 * wanted.std()


def test_bf16_weights_are_exact_products_of_the_stored_values(tmp_path):
    """Rounding a bf16 weight again, or a product to bf16, would cost accuracy for nothing."""
    raw = random_tensors(json.loads((write_checkpoint(tmp_path / "a") / "config.json").read_text()))
    rounded = {n: (a.view(np.uint32) & 0xFFFF0000).view(np.float32) for n, a in raw.items()}
    path = write_checkpoint(tmp_path / "b", tensors=rounded)
    ids = np.arange(40)
    f32, bf16 = (LLM(path, weights=kind).logits(ids) for kind in ("f32", "bf16"))
    np.testing.assert_array_equal(f32, bf16)


def test_a_failed_step_leaves_the_cache_as_it_was(tmp_path, monkeypatch):
    """Rows of a step that died would shift every later position."""
    llm = LLM(write_checkpoint(tmp_path), threads=2)
    cache = BasicKvCache(n_layers=2, kv_dim=32)
    model, logits, ids = llm._model, llm._model.new_logits(1), np.arange(5)
    model.forward([Run(ids, cache, True, len(logits))], logits)
    before = cache.materialize(1)

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("engine.model.step", fail)
        model.forward([Run(ids, cache, True, len(logits))], logits)
    assert cache.seq_len(0) == cache.seq_len(1) == 5
    for held, was in zip(cache.kv_view(1), before, strict=True):
        np.testing.assert_array_equal(held, was)
    model.forward([Run(ids, cache, True, len(logits))], logits)  # and the team still works
    np.testing.assert_array_equal(logits[0, :300], llm.logits([*ids, *ids])[-1])


def test_rows_behind_the_last_are_never_read(tmp_path):
    """Stale memory beyond the rows in use must not reach a result, NaN least of all."""
    llm = LLM(write_checkpoint(tmp_path))
    ids, found = np.arange(20), []
    for filling in (0.0, np.nan):
        cache = BasicKvCache(n_layers=2, kv_dim=32)
        cache.reserve(20)
        for layer in range(2):
            cache._k[layer][:] = cache._v[layer][:] = filling
        logits = llm._model.new_logits(1)
        llm._model.forward([Run(ids, cache, True, len(logits))], logits)
        llm._model.forward([Run(ids[:1], cache, False, len(logits))], logits)
        found.append(logits[0, :300].copy())
    np.testing.assert_array_equal(*found)


def test_cost_of_a_step_depends_on_rows_not_on_capacity(tmp_path):
    """Whole-cache copies make a bigger cache slower for the same short prompt."""
    import time

    llm = LLM(write_checkpoint(tmp_path, num_hidden_layers=8), threads=1)
    took = {64: [], 64_000: []}
    caches = {}
    for rows in took:
        caches[rows] = BasicKvCache(n_layers=8, kv_dim=32)
        caches[rows].reserve(rows)
    logits, ids = llm._model.new_logits(1), np.array([1])
    for _ in range(100):
        for rows, cache in caches.items():
            start = time.perf_counter()
            llm._model.forward([Run(ids, cache, False, len(logits))], logits)
            took[rows].append(time.perf_counter() - start)
    small, big = (np.median(times) for times in took.values())
    assert big < 2 * small


def test_no_request_compiles_anything(tmp_path):
    """Compilation inside the first request would be counted as its time to first token."""
    llm = LLM(write_checkpoint(tmp_path, seed=3), threads=2)
    before = len(step.signatures), len(sample.signatures)
    for params in (GREEDY, SamplingParams(max_tokens=3, top_k=5, top_p=0.5, min_p=0.1, seed=1)):
        llm.generate([1, 2, 3], params)
        llm.generate(np.array([4, 5], np.int32), params)
    llm.logits(range(30))
    assert (len(step.signatures), len(sample.signatures)) == before
