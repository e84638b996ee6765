"""LLM: a checkpoint opened, ready to generate."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.cache import BasicKvCache
from engine.config import ModelConfig, show
from engine.generate import Completion, Generation
from engine.kernels.int8 import FORM
from engine.kernels.jit import compilation, uninterrupted
from engine.loading.checkpoint import Checkpoint
from engine.loading.hub import resolve
from engine.loading.weights import KINDS, load_float32, load_weights
from engine.metrics import Metrics
from engine.model import SimdModel
from engine.reference import NumpyModel
from engine.sampler import Sampler, SamplingParams
from engine.threads import check_threads, default_threads
from engine.tokenizer import Tokenizer

BUILT_IN = Path(__file__).parent / "assets"
KV_CACHES = {"basic": BasicKvCache}
BACKENDS = ("simd", "numpy")

Prompt = str | Sequence[int]


class LLM:
    """A Qwen3 checkpoint, loaded and compiled.

    Safe to use from several threads: steps of the model take turns.
    """

    def __init__(
        self,
        model: str | os.PathLike | None = None,
        *,
        weights: str = "q8_0",
        kv_cache: str = "basic",
        backend: str = "simd",
        threads: int | None = None,
        context: int | None = None,
        prefill_chunk: int = 512,
    ):
        """Open `model`: a directory, a hub name (`owner/name`, `owner/name@revision`), or None.

        None is the small model built into the package. weights: how matrices are kept in memory,
        "q8_0" (8 bits and a scale for 32), "bf16" or "f32". threads: None for one a core. context:
        the most positions, prompt and generated text together; None for what the model was trained
        for. prefill_chunk: how many tokens of a prompt are computed in one step. ValueError says
        what cannot be used and why.
        """
        one_of("weights", weights, KINDS)
        one_of("kv_cache", kv_cache, KV_CACHES)
        one_of("backend", backend, BACKENDS)
        threads = default_threads() if threads is None else check_threads(threads)
        check_size("prefill_chunk", prefill_chunk, 1 << 16)
        path = BUILT_IN if model is None else resolve(model)
        self.config = ModelConfig.from_dir(path)
        self.context = self.config.max_context
        if context is not None:
            self.context = check_size("context", context, self.config.max_context)
        self.tokenizer = Tokenizer.from_dir(path)
        self.eos_ids = self.config.eos_ids
        if self.tokenizer is not None:
            if self.tokenizer.n_ids > self.config.vocab_size:
                raise ValueError(
                    f"{path}: the tokenizer has {self.tokenizer.n_ids} ids, "
                    f"the model's embedding {self.config.vocab_size} rows"
                )
            self.eos_ids |= self.tokenizer.eos_ids
        self._new_cache = KV_CACHES[kv_cache]
        self.settings = {
            "model": str(path) if model else "built-in",
            "backend": backend,
            "weights": weights,
            "int8": FORM if (backend, weights) == ("simd", "q8_0") else None,
            "kv_cache": kv_cache,
            "threads": threads,
            "context": self.context,
            "prefill_chunk": prefill_chunk,
        }
        with Checkpoint(path) as checkpoint, compilation.announced():
            if backend == "numpy":
                tensors = load_float32(checkpoint, self.config, weights)
                self._model = NumpyModel(self.config, tensors, prefill_chunk)
            else:
                packed = load_weights(checkpoint, self.config, weights, threads)
                self._model = SimdModel(self.config, packed, threads, prefill_chunk)
            with uninterrupted():
                self._model.compile()
                Sampler.compile()

    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Continue a prompt (text or token ids), or each of a list of them."""
        if is_many(prompt):
            prompts = [self._ids_of(one) for one in prompt]  # all of them before any work
            return [self._finish(self._start(one, params)) for one in prompts]
        return self._finish(self._start(prompt, params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """Continue a prompt: iterate over pieces of text, whole characters only."""
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json: text needs one, ids do not")
        return self._start(prompt, params)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits at every position of `token_ids`: (T, vocab_size) float32."""
        ids = np.array(self._ids_of(token_ids), np.int64)
        cache, size = self._cache(), self._model.max_tokens
        cache.reserve(len(ids))
        out = np.empty((len(ids), self.config.vocab_size), np.float32)
        for start in range(0, len(ids), size):
            chunk = ids[start : start + size]
            logits = self._model.new_logits(len(chunk))
            self._model.forward(chunk, cache, True, logits)
            out[start : start + size] = logits[:, : self.config.vocab_size]
        return out

    def _finish(self, generation: Generation) -> Completion:
        for _ in generation if self.tokenizer else generation.tokens():
            pass
        return generation.completion

    def _start(self, prompt: Prompt, params: SamplingParams | None) -> Generation:
        metrics = Metrics()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is {params!r}; SamplingParams are needed")
        if params.seed is None:  # drawn here, so that every run can be told and repeated
            params = replace(params, seed=secrets.randbits(63))
        ids = self._ids_of(prompt)
        if len(ids) >= self.context:
            raise ValueError(
                f"the prompt is {len(ids)} tokens long, the context {self.context}: "
                "there is no room for a token to follow"
            )
        stream = self.tokenizer.stream() if self.tokenizer else None
        return Generation(
            self._model, self._cache(), ids, params, self.eos_ids, self.context, stream, metrics
        )

    def _cache(self) -> BasicKvCache:
        return self._new_cache(n_layers=self.config.n_layers, kv_dim=self.config.kv_dim)

    def _ids_of(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ValueError if there are none, too many or unknown ones."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the checkpoint has no tokenizer.json: give token ids")
            prompt = self.tokenizer.encode(prompt)
        listed = isinstance(prompt, Sequence) or (
            isinstance(prompt, np.ndarray) and prompt.ndim == 1
        )
        if not listed or isinstance(prompt, bytes | bytearray | memoryview):
            raise ValueError(f"the prompt is {show(prompt)}; text or token ids are needed")
        ids = list(prompt)
        if not ids:
            raise ValueError("the prompt is empty")
        for i in ids:
            if not is_id(i) or not 0 <= i < self.config.vocab_size:
                raise ValueError(f"token id {show(i)} is outside 0 to {self.config.vocab_size - 1}")
        if len(ids) > self.context:
            raise ValueError(f"{len(ids)} tokens do not fit in a context of {self.context}")
        return ids


def is_many(prompt: object) -> bool:
    """Whether these are several prompts: a list of texts or of lists of ids."""
    listed = isinstance(prompt, list | tuple) and len(prompt) > 0
    return listed and all(isinstance(item, str | Sequence | np.ndarray) for item in prompt)


def is_id(item: object) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def one_of(name: str, value: object, known) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {value!r}; one of {', '.join(known)} is needed")


def check_size(name: str, value: object, most: int) -> int:
    if not is_id(value) or not 1 <= value <= most:
        raise ValueError(f"{name} is {value!r}; a whole number from 1 to {most} is needed")
    return int(value)
