"""SimdModel: weights, scratch and a team of threads, and one step of them at a time.

It speaks token ids and rows of a cache; it knows no text, no sampling and no request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import numba
import numpy as np

from engine import memory
from engine.cache import KV_DTYPES, BasicKvCache
from engine.config import ModelConfig
from engine.kernels.activations import BLOCK, Inputs, Rows, padded, rows_for
from engine.kernels.attention import CHUNK
from engine.kernels.decode_attention import decode_work_size, part_size
from engine.kernels.forward import Scratch, Sizes, Weights, step
from engine.kernels.kv import Kv
from engine.kernels.matmul import Q8
from engine.kernels.prompt_attention import prompt_work_size
from engine.kernels.rope import rope_table
from engine.kernels.runs import Run, Runs, runs_of
from engine.kernels.team import NO_CLOCK, Rank, break_team, new_flags
from engine.profiler import NOTHING, Profile, timed


class SimdModel:
    """A model whose forward pass is the compiled step of kernels/forward.py."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        threads: int,
        max_tokens: int,
        kv_dtype: str = "f32",
    ):
        """`max_tokens` is the most that one step takes; `kv_dtype`, what its caches hold."""
        c, self.kv_dtype = config, kv_dtype
        self.config, self.weights, self.threads = c, weights, threads
        self.max_tokens = max_tokens
        self.sizes = Sizes(
            c.dim,
            c.hidden_dim,
            c.n_layers,
            c.n_heads,
            c.n_kv_heads,
            c.head_dim,
            c.vocab_size,
            c.norm_eps,
        )
        per_rank = max(prompt_work_size(c.head_dim), decode_work_size(c.n_heads))
        quantized = isinstance(weights.wq, Q8)

        n_rows = rows_for(max_tokens)

        def rows(width: int) -> Rows:
            return Rows(memory.zeros(n_rows * padded(width)), 0, padded(width))

        def inputs(width: int) -> Inputs:
            size = n_rows * padded(width) if quantized else 0
            kinds = {"q": np.int8, "scales": np.float32, "starts": np.int32}
            sizes = {"q": size, "scales": size // BLOCK, "starts": size // BLOCK}
            return Inputs(rows(width), **{n: memory.zeros(sizes[n], t) for n, t in kinds.items()})

        self.scratch = Scratch(
            x=rows(c.dim),
            h=inputs(c.dim),
            q=Rows(memory.zeros(max_tokens * c.q_dim), 0, c.q_dim),
            k=Rows(memory.zeros(max_tokens * c.kv_dim), 0, c.kv_dim),
            v=Rows(memory.zeros(max_tokens * c.kv_dim), 0, c.kv_dim),
            attended=inputs(c.q_dim),
            gate=inputs(c.hidden_dim),
            up=rows(c.hidden_dim),
            parts=memory.zeros(0),
            work=memory.zeros(threads * per_rank),
        )
        self.rope = np.zeros(0, np.float32)
        self.team = Team(threads)
        self._lock = threading.Lock()  # scratch and team serve one step at a time
        self._pid = os.getpid()

    def new_logits(self, n: int) -> np.ndarray:
        """Room for the logits of `n` tokens: (n, padded vocab_size) float32."""
        width = padded(self.config.vocab_size)
        return memory.zeros(n * width).reshape(n, width)

    def forward(
        self, runs: Sequence[Run], logits: np.ndarray, profile: Profile | None = None
    ) -> None:
        """Run tokens of some sequences, each behind the rows of its cache, and append their rows.

        Runs of prompts come first, and several sequences have caches of one pool. `logits`, of
        `new_logits`, receives those of each run's last n_logits tokens, in order; `profile`, what
        the step spent its time on. If the step fails, the caches are as they were.
        """
        n_tokens, n_logits = sum(len(r.ids) for r in runs), sum(r.n_logits for r in runs)
        assert 0 < n_tokens <= self.max_tokens and n_logits == len(logits), (n_tokens, n_logits)
        assert all(0 < len(r.ids) and r.n_logits <= len(r.ids) for r in runs), "an empty run"
        prompts_first = sorted((run.is_prompt for run in runs), reverse=True)
        assert [run.is_prompt for run in runs] == prompts_first, "runs of prompts come first"
        ids = np.concatenate([run.ids for run in runs]).astype(np.int64, copy=False)
        assert 0 <= ids.min() and ids.max() < self.config.vocab_size, "id outside the vocabulary"
        if os.getpid() != self._pid:  # a fork copies the lock, held or not, and no threads
            self._lock, self.team, self._pid = threading.Lock(), Team(self.threads), os.getpid()
        with self._lock:
            for run in runs:
                with timed(profile, run.cache.parts[0], run.cache):
                    run.cache.reserve(len(run.ids))
            with profile.kernel(self.threads) if profile else NOTHING as clocks:
                arguments = self._arguments(ids, runs, logits)
                self.team.run(step, *arguments, clocks=clocks)
            for run in runs:
                with timed(profile, run.cache.parts[1], run.cache):
                    run.cache.commit(len(run.ids))

    def bytes_per_token(self, n_rows: int) -> int:
        """Bytes that a decode step reads with `n_rows` rows in the cache: its lower bound."""
        size = np.dtype(KV_DTYPES[self.kv_dtype]).itemsize
        rows = 2 * size * self.config.n_layers * self.config.kv_dim * n_rows
        weights = sum(a.nbytes for a in self.arrays())
        if (
            not self.config.tied
        ):  # then the embedding is not read as the head, and one row is not much
            weights -= sum(a.nbytes for a in self.weights.embedding)
        return weights + rows

    def work(
        self, n_tokens: int, start: int, n_logits: int, row_bytes: int
    ) -> dict[str, tuple[int, int]]:
        """For operations of a step: bytes it has to read from memory, arithmetic operations.

        `row_bytes`: of K and V of one row in all layers.
        """
        c, w = self.config, self.weights
        matrices = {
            "matmul q": (w.wq, c.q_dim * c.dim),
            "matmul k": (w.wk, c.kv_dim * c.dim),
            "matmul v": (w.wv, c.kv_dim * c.dim),
            "matmul out": (w.wo, c.dim * c.q_dim),
            "matmul gate": (w.w_gate, c.hidden_dim * c.dim),
            "matmul up": (w.w_up, c.hidden_dim * c.dim),
            "matmul down": (w.w_down, c.dim * c.hidden_dim),
        }
        found = {
            name: (sum(a.nbytes for a in store), 2 * c.n_layers * size * n_tokens)
            for name, (store, size) in matrices.items()
        }
        if n_logits:
            head = sum(a.nbytes for a in w.head)
            found["head"] = head, 2 * c.vocab_size * c.dim * n_logits
        seen = n_tokens * start + n_tokens * (n_tokens + 1) // 2  # rows, summed over the tokens
        found["attention"] = (
            (start + n_tokens) * row_bytes,
            4 * c.n_layers * c.q_dim * seen,
        )
        return found

    def arrays(self) -> list[np.ndarray]:
        """Every array of the weights, once."""
        parts = (part if isinstance(part, tuple) else (part,) for part in self.weights)
        return list({id(a): a for part in parts for a in part}.values())

    def compile(self) -> None:
        """Load or compile the step, prefill and decode alike, without running it."""
        cache = BasicKvCache(self.config.n_layers, self.config.kv_dim, self.kv_dtype)
        runs = [Run(np.zeros(1, np.int64), cache, True, 1)]
        arguments = self._arguments(runs[0].ids, runs, self.new_logits(1))
        types = map(numba.typeof, (Rank(0, 1, self.team.flags), *arguments))
        step.compile(tuple(types))

    def _arguments(self, ids: np.ndarray, runs: Sequence[Run], logits: np.ndarray) -> tuple:
        kv, tables = joined([run.cache.kv() for run in runs])
        numbers = runs_of(runs, tables)
        self._make_room(max(run.cache.capacity for run in runs), numbers)
        return self.sizes, self.weights, self.rope, kv, numbers, ids, self.scratch, logits

    def _make_room(self, n_rows: int, runs: Runs) -> None:
        """Tables and scratch for sequences of up to `n_rows`, at least doubled where they do not
        do."""
        c = self.config
        held = len(self.rope) // c.head_dim
        if held < n_rows:
            n_rows = max(n_rows, 2 * held)
            self.rope = rope_table(c.head_dim, c.rope_theta, n_rows).ravel()
        size = part_size(c.n_heads, c.head_dim)
        held, needed = len(self.scratch.parts) // size, max(runs.parts[-1], -(-n_rows // CHUNK))
        if held < needed:
            parts = memory.zeros(max(needed, 2 * held) * size)
            self.scratch = self.scratch._replace(parts=parts)


def joined(kvs: Sequence[Kv]) -> tuple[Kv, list[int]]:
    """One Kv of all sequences' blocks, and where those of each begin."""
    first = kvs[0]
    if len(kvs) == 1:
        return first, [0]
    assert all(kv.places is first.places for kv in kvs), "sequences of different pools"
    ends = np.cumsum([len(kv.blocks) for kv in kvs])
    return first._replace(blocks=np.concatenate([kv.blocks for kv in kvs])), [0, *ends[:-1]]


class Team:
    """Threads that run one compiled function together, each as a rank. The caller is rank 0."""

    def __init__(self, ranks: int):
        self.ranks, self.flags = ranks, new_flags(ranks)
        self._pool = self._new_pool()

    def run(self, function, *args, clocks: Sequence[np.ndarray] | None = None) -> None:
        """function(rank, *args) on every rank; returns when all are done, raises what one raised.

        `clocks`: a rank each, which then leaves its times there (kernels/clock.py). Whatever
        happens to one rank, an interrupt included, no other is left waiting for it.
        """
        others: list[Future] = []
        clocks = clocks or [NO_CLOCK] * self.ranks
        try:
            for rank in range(1, self.ranks):
                # the flags are those of now: a task left in a broken pool cannot join a later step
                me = Rank(rank, self.ranks, self.flags, clocks[rank])
                others.append(self._submit(me, function, args))
            function(Rank(0, self.ranks, self.flags, clocks[0]), *args)
            for other in others:
                other.result()
        except BaseException:
            break_team(self.flags)
            while any(not other.done() for other in others):
                with suppress(KeyboardInterrupt):  # a second one must not leave a rank at work
                    wait(others)
            if len(others) < self.ranks - 1:  # the system refused a thread, or we were interrupted
                self._end_pool()
                self._pool = self._new_pool()
            self.flags = new_flags(self.ranks)
            raise

    def _submit(self, me: Rank, function, args) -> Future:
        try:
            return self._pool.submit(self._run_rank, me, function, args)
        except RuntimeError as e:
            raise OSError(f"the system refused one of {self.ranks} threads ({e})") from None

    def _end_pool(self) -> None:
        """Wait for its threads: a rank whose future we never got may be at work in our arrays."""
        ended = False
        while not ended:
            with suppress(KeyboardInterrupt):
                self._pool.shutdown(cancel_futures=True)
                ended = True

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max(self.ranks - 1, 1), thread_name_prefix="rank")

    @staticmethod
    def _run_rank(me: Rank, function, args) -> None:
        try:
            function(me, *args)
        except BaseException:
            break_team(me.flags)
            raise
