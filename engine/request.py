"""What a caller asks for, looked at once, at the door: prompts -> ids, parameters -> a request."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.cache import BlockPool, PagedKvCache
from engine.checks import is_id
from engine.config import ModelConfig, show
from engine.decoding import Decoding
from engine.grammar import Grammar
from engine.metrics import Metrics
from engine.profiler import Profile
from engine.reply import Reply
from engine.sampler import SamplingParams
from engine.session import Session
from engine.thinking import CLOSE, ThinkingBudget, ThinkingSplitter, opening_id, tag_ids
from engine.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Requests:
    """Makes requests of one model. ValueError, in one line, says what cannot be one and why."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    default_params: SamplingParams
    context: int  # the most positions
    lookup: int  # guesses at a time

    def ids_of(self, prompt: Prompt) -> list[int]:
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
        if any(isinstance(i, str) for i in ids):
            raise ValueError(
                f"the prompt is {show(ids)}; one text or a list of token ids is needed"
            )
        if not ids:
            raise ValueError("the prompt is empty")
        for i in ids:
            if not is_id(i) or not 0 <= i < self.config.vocab_size:
                raise ValueError(f"token id {show(i)} is outside 0 to {self.config.vocab_size - 1}")
        if len(ids) > self.context:
            raise ValueError(f"{len(ids)} tokens do not fit in a context of {self.context}")
        return ids

    def params_of(self, params: SamplingParams | None) -> SamplingParams:
        """`params`, or the model's, with a seed."""
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is {show(params)}; one SamplingParams is needed")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer.json; stop_token_ids do not")
        if params.seed is None:  # drawn here, so that every run can be told and repeated
            params = replace(params, seed=secrets.randbits(63))
        return params

    def limit(self, n_prompt: int, params: SamplingParams, pool: BlockPool | None = None) -> int:
        """The most tokens that can follow, with K and V in `pool`, if there is one; ValueError if
        there is no room for what is asked."""
        room, wanted = self.context - n_prompt, params.max_tokens
        if room < 1:
            raise ValueError(
                f"the prompt is {n_prompt} tokens long, the context {self.context}: "
                "there is no room for a token to follow"
            )
        if pool is not None:
            pool.check_room(n_prompt, 1 if wanted is None else min(wanted, room))
            room = min(room, pool.max_rows + 1 - n_prompt)
        return room if wanted is None else min(wanted, room)

    def begin(
        self,
        session: Session,
        params: SamplingParams,
        limit: int,
        metrics: Metrics,
        *,
        profile: Profile | None = None,
        splitter: ThinkingSplitter | None = None,
        sample: int = 0,
    ) -> tuple[Decoding, Reply]:
        """A request that goes on behind the ids of `session`, and its text.

        splitter: of a chat, whose thoughts stand apart. sample: which of those of one seed.
        """
        size, eos_ids = self.config.vocab_size, self.eos_ids
        budget, after, opens = None, None, None
        if splitter is not None:
            if params.thinking_budget is not None:
                budget = ThinkingBudget(params.thinking_budget, self.tokenizer, splitter.opened)
            # What is constrained is the answer. Thoughts may come first, where they are told from
            # it by the tag's own id.
            opens = None if splitter.opened else opening_id(self.tokenizer, session.ids)
            if splitter.opened or opens is not None:
                after = tuple(tag_ids(self.tokenizer, CLOSE))
        decoding = Decoding(
            size,
            session,
            params,
            limit,
            eos_ids,
            metrics,
            profile,
            sample=sample,
            lookup=self.lookup,
            budget=budget,
            grammar=Grammar.of(params, self.tokenizer, size, eos_ids, after, opens),
        )
        stream = self.tokenizer.stream() if self.tokenizer else None
        return decoding, Reply(decoding, stream, splitter)

    def in_pool(
        self,
        pool: BlockPool,
        ids: list[int],
        params: SamplingParams,
        splitter: ThinkingSplitter | None = None,
        sample: int = 0,
    ) -> tuple[Decoding, Reply]:
        """A request with a session of its own, in blocks of a pool."""
        limit = self.limit(len(ids), params, pool)
        session = Session(PagedKvCache(pool), ids, len(ids))
        return self.begin(session, params, limit, Metrics(), splitter=splitter, sample=sample)
