"""LLM: a checkpoint opened, ready to generate."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from engine.cache import (
    KV_CACHES,
    KV_DTYPES,
    CacheMaker,
    KvCache,
    snapshot,
)
from engine.chat import ChatTemplate
from engine.checks import check_kv, check_size, is_many, one_of
from engine.config import ModelConfig, show
from engine.defaults import default_params
from engine.generate import Generation
from engine.kernels.int8 import FORM
from engine.kernels.jit import compilation, uninterrupted
from engine.kernels.runs import Run
from engine.loading.checkpoint import Checkpoint
from engine.loading.hub import resolve
from engine.loading.weights import KINDS, load_float32, load_weights
from engine.metrics import Metrics
from engine.model import SimdModel
from engine.profiler import Profile
from engine.reference import NumpyModel
from engine.reply import Completion
from engine.request import Prompt, Requests
from engine.sampler import Sampler, SamplingParams
from engine.serve.scheduler import Request, Scheduler, run_all
from engine.session import Session
from engine.thinking import OPEN, ThinkingSplitter
from engine.threads import check_threads, default_threads
from engine.tokenizer import Tokenizer

BUILT_IN = Path(__file__).parent / "assets"
BACKENDS = ("simd", "numpy")
BLOCK_ROWS = 16  # of a paged block
MOST_GUESSES = 64  # of `lookup`


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
        kv_dtype: str = "f32",
        kv_block_rows: int | None = None,
        kv_max_blocks: int | None = None,
        backend: str = "simd",
        threads: int | None = None,
        context: int | None = None,
        prefill_chunk: int = 512,
        lookup: int = 0,
    ):
        """Open `model`: a directory, a hub name (`owner/name`, `owner/name@revision`), or None.

        None is the small model built into the package. weights: how matrices are kept in memory,
        "q8_0" (8 bits and a scale for 32), "bf16" or "f32". kv_cache: how K and V are, "basic" (one
        array that grows), "paged" (blocks of a pool) or "concat" (the baseline, for comparison);
        kv_dtype: as "f32", or as "f16" in half the bytes. kv_block_rows and kv_max_blocks: rows of
        a paged block, None for 16, and blocks of the pool that all requests share, None for as many
        as one request of the whole context needs. threads: None for one a core. context: the most
        positions, prompt and generated text together; None for what the model was trained for.
        prefill_chunk: how many tokens of a prompt are computed in one step. lookup: how many tokens
        are guessed at a time where a text repeats itself (lookup.py); what comes out is the same,
        to the bit. ValueError says what cannot be used and why.
        """
        one_of("weights", weights, KINDS)
        one_of("kv_cache", kv_cache, KV_CACHES)
        one_of("kv_dtype", kv_dtype, KV_DTYPES)
        check_kv(kv_cache, kv_dtype, kv_block_rows, kv_max_blocks)
        one_of("backend", backend, BACKENDS)
        threads = default_threads() if threads is None else check_threads(threads)
        check_size("prefill_chunk", prefill_chunk, 1 << 16)
        lookup = check_size("lookup", lookup, MOST_GUESSES, least=0)
        path = BUILT_IN if model is None else resolve(model)
        self.config = ModelConfig.from_dir(path)
        self.context = self.config.max_context
        if context is not None:
            self.context = check_size("context", context, self.config.max_context)
        self.tokenizer = Tokenizer.from_dir(path)
        self.chat_template = ChatTemplate.from_dir(path)
        self.eos_ids = self.config.eos_ids
        if self.tokenizer is not None:
            if self.tokenizer.n_ids > self.config.vocab_size:
                raise ValueError(
                    f"{path}: the tokenizer has {self.tokenizer.n_ids} ids, "
                    f"the model's embedding {self.config.vocab_size} rows"
                )
            self.eos_ids |= self.tokenizer.eos_ids
        self.default_params = default_params(path)
        self.requests = Requests(
            self.config, self.tokenizer, self.eos_ids, self.default_params, self.context, lookup
        )
        kv_block_rows = int(kv_block_rows or BLOCK_ROWS)
        blocks = int(kv_max_blocks or -(-self.context // kv_block_rows))
        sizes = self.config.n_layers, self.config.kv_dim
        self._caches = CacheMaker(kv_cache, *sizes, kv_dtype, kv_block_rows, blocks)
        self.settings = {
            "model": str(path) if model else "built-in",
            "backend": backend,
            "weights": weights,
            "int8": FORM if (backend, weights) == ("simd", "q8_0") else None,
            "kv_cache": kv_cache,
            "kv_dtype": kv_dtype,
            "threads": threads,
            "context": self.context,
            "prefill_chunk": prefill_chunk,
            "lookup": lookup,
        }
        if kv_cache == "paged":
            self.settings |= {"kv_block_rows": kv_block_rows, "kv_max_blocks": blocks}
        with Checkpoint(path) as checkpoint, compilation.announced():
            if backend == "numpy":
                tensors = load_float32(checkpoint, self.config, weights)
                self._model = NumpyModel(self.config, tensors, prefill_chunk)
            else:
                packed = load_weights(checkpoint, self.config, weights, threads)
                self._model = SimdModel(self.config, packed, threads, prefill_chunk, kv_dtype)
            with uninterrupted():
                self._model.compile()
                Sampler.compile()

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt] | None,
        params: SamplingParams | None = None,
        session: Session | None = None,
        profile: bool = False,
    ) -> Completion | list[Completion]:
        """Continue a prompt (text or token ids), or each of a list of them, together.

        params: None for the model's own (`default_params`); where its `n` is above 1 there is a
        list of n completions in place of one. With a `session`, only what it does not hold of the
        prompt is computed, and it holds prompt and answer afterwards (tokens that were generated
        keep their rows, which differ from a prompt's in the last bits); without a prompt its own
        tokens are continued. With `profile`, the completion's `profile` says what each step spent
        its time on (profiler.py), and several prompts run one after another.
        """
        n, many = self.requests.params_of(params).n, prompt is not None and is_many(prompt)
        prompts = [self.requests.ids_of(one) for one in prompt] if many else [prompt]
        if not many and n == 1:
            return self._finish(self._start(prompt, params, session, profile), session is None)
        if session is not None:
            samples = f"{len(prompts) * n} completions"
            raise ValueError(f"{samples} cannot share a session; ask for them singly")
        if profile and n > 1:
            raise ValueError(f"profile is of one completion; n is {n}")
        if profile:
            return [self._finish(self._start(one, params, None, True), True) for one in prompts]
        found = self._together([(self.requests.ids_of(one), None) for one in prompts], params)
        return found if many else found[0]

    def stream(
        self,
        prompt: Prompt | None,
        params: SamplingParams | None = None,
        session: Session | None = None,
        profile: bool = False,
    ) -> Generation:
        """As `generate`, one prompt: iterate over pieces of text, whole characters only."""
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json: text needs one, ids do not")
        return self._start(prompt, params, session, profile)

    def chat(
        self,
        messages: Sequence[Mapping],
        params: SamplingParams | None = None,
        session: Session | None = None,
        profile: bool = False,
        **arguments,
    ) -> Completion | list[Completion]:
        """The model's answer to a conversation, as its chat template writes it.

        messages: OpenAI's, each with a `role` and `content`. arguments: for the template, such as
        `tools` or `enable_thinking`. Thoughts are in the completion's `reasoning`. With a `session`
        that holds an earlier part of the conversation only what is new is computed. Where the `n`
        of params is above 1, a list of n.
        """
        ids, splitter = self.chat_prompt(messages, **arguments)
        params = self.requests.params_of(params)
        if params.n > 1:
            return self._together([(ids, splitter)], params)[0]
        return self._finish(self._start(ids, params, session, profile, splitter), session is None)

    def stream_chat(
        self,
        messages: Sequence[Mapping],
        params: SamplingParams | None = None,
        session: Session | None = None,
        profile: bool = False,
        **arguments,
    ) -> Generation:
        """As `chat`: iterate over pieces of the answer, or over `parts()` for thoughts too."""
        ids, splitter = self.chat_prompt(messages, **arguments)
        return self._start(ids, params, session, profile, splitter)

    def chat_prompt(
        self, messages: Sequence[Mapping], **arguments
    ) -> tuple[list[int], ThinkingSplitter]:
        """The ids of a conversation, as its template writes it, and what splits its answer."""
        if self.chat_template is None or self.tokenizer is None:
            what = "chat template" if self.tokenizer else "tokenizer.json"
            raise ValueError(f"the checkpoint has no {what}: it continues text, and does not chat")
        ids = self.chat_template.encode(self.tokenizer, messages, **arguments)
        opened = self.chat_template.render(messages, **arguments).rstrip().endswith(OPEN)
        return ids, ThinkingSplitter(opened)

    def new_session(self) -> Session:
        """An empty one, for `generate` or `stream` to fill."""
        return Session(self.new_cache(), owner=self._model)

    def save_cache(self, session: Session, path: str | os.PathLike) -> None:
        """Write a session to a file, whole or not at all; OSError says why it cannot be."""
        self._check_session(session)
        if session is None or not session.ids:
            raise ValueError("the session is empty: there is nothing to save")
        snapshot.save(path, session.cache, session.ids, session.n_prompt, self._fingerprint)

    def load_cache(self, path: str | os.PathLike) -> Session:
        """The session that `save_cache` wrote; ValueError says what is wrong with the file.

        Its cache may have been of another kind: the rows are the same.
        """
        cache = self.new_cache()
        room = self._caches.pool.max_rows + 1 if self._caches.pool else self.context
        limit = min(room, self.context)
        ids, n_prompt = snapshot.load(path, cache, self._fingerprint, limit)
        try:
            return Session(cache, self.requests.ids_of(ids), n_prompt, self._model)
        except ValueError as e:  # an id that no embedding has
            raise ValueError(f"{path}: {e}") from None

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits at every position of `token_ids`: (T, vocab_size) float32."""
        ids = np.array(self.requests.ids_of(token_ids), np.int64)
        if self._caches.pool:
            self._caches.pool.check_room(len(ids), 1)
        cache, size = self.new_cache(), self._model.max_tokens
        cache.reserve(len(ids))
        out = np.empty((len(ids), self.config.vocab_size), np.float32)
        for start in range(0, len(ids), size):
            chunk = ids[start : start + size]
            logits = self._model.new_logits(len(chunk))
            self._model.forward([Run(chunk, cache, True, len(chunk))], logits)
            out[start : start + size] = logits[:, : self.config.vocab_size]
        if not np.isfinite([out.min(), out.max()]).all():
            raise ValueError("the logits are not finite: the model overflows float32")
        return out

    def __repr__(self) -> str:
        about = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"LLM({about})"

    def _finish(self, generation: Generation, own: bool) -> Completion:
        """Run a request to its end; with a session of its `own`, which nobody else sees."""
        try:
            for _ in generation if self.tokenizer else generation.tokens():
                pass
        except Exception:
            if own:  # the error may be kept for long, and all that its frames hold
                generation.session.cache.truncate(0)
            raise
        return generation.completion

    def new_cache(self) -> KvCache:
        """An empty cache of the kind that was asked for."""
        return self._caches.new()

    @cached_property
    def _fingerprint(self) -> dict[str, str]:
        """What rows of K and V depend on, processors aside: snapshots of another are refused."""
        found = hashlib.sha256(repr(self.config).encode())
        for array in self._model.arrays():
            found.update(array)
        about = {name: self.settings[name] for name in ("weights", "backend", "kv_dtype")}
        return about | {"model": found.hexdigest()}

    def _start(
        self,
        prompt: Prompt | None,
        params: SamplingParams | None,
        session: Session | None = None,
        profile: bool = False,
        splitter: ThinkingSplitter | None = None,
    ) -> Generation:
        metrics = Metrics()
        params = self.requests.params_of(params)
        if params.n > 1:
            raise ValueError(f"n is {params.n}; a stream or a session is of one completion")
        self._check_session(session)
        if prompt is None and (session is None or not session.ids):
            raise ValueError("there is neither a prompt nor a session to continue")
        ids = session.ids if prompt is None else self.requests.ids_of(prompt)
        limit = self.requests.limit(len(ids), params, self._caches.pool)
        session = self.new_session() if session is None else session
        if prompt is not None:
            session.turn_to(ids)
        recorder = Profile(self._model) if profile else None
        more = {"profile": recorder, "splitter": splitter}
        return Generation(
            self._model, *self.requests.begin(session, params, limit, metrics, **more)
        )

    def _together(
        self,
        prompts: Sequence[tuple[list[int], ThinkingSplitter | None]],
        params: SamplingParams | None,
    ) -> list[Completion] | list[list[Completion]]:
        """All prompts as one batch: for each its completion, or a list of params.n."""
        each = [(ids, splitter, self.requests.params_of(params)) for ids, splitter in prompts]
        n, room = each[0][2].n, self._caches.pool
        longest = [len(ids) + self.requests.limit(len(ids), own, room) for ids, _, own in each]
        pool = self._caches.new_pool([rows for rows in longest for _ in range(n)])
        requests = [
            self.requests.in_pool(pool, ids, own, splitter and splitter.copy(), sample)
            for ids, splitter, own in each  # where no seed is set, each has its own
            for sample in range(n)
        ]
        done = run_all(Scheduler(self._model, pool), [Request(*one) for one in requests])
        return done if n == 1 else [done[i : i + n] for i in range(0, len(done), n)]

    def new_scheduler(self, max_running: int = 16) -> Scheduler:
        """One for requests that come one by one, at most `max_running` of them in a step."""
        return Scheduler(self._model, self._caches.new_pool(), max_running)

    def _check_session(self, session: Session | None) -> None:
        """ValueError unless a session's rows are this model's."""
        if session is not None and not isinstance(session, Session):
            raise ValueError(f"session is {show(session)}; new_session or load_cache makes one")
        if session is not None and session.owner is not self._model:
            raise ValueError("the session is another LLM's; a saved cache can be carried over")
