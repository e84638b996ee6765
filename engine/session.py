"""Session: token ids, and the cache that holds the K and V rows of the first of them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache import KvCache


class Session:
    """What generation continues from, and leaves behind.

    The cache holds rows of the first `cache.seq_len(0)` ids; the rest wait for the next step. The
    last token of a generation always waits: it was chosen, and nothing has followed it.
    """

    def __init__(
        self, cache: KvCache, ids: Sequence[int] = (), n_prompt: int = 0, owner: object = None
    ):
        """`ids[:n_prompt]` came as a prompt; those behind it were generated. `owner`: the model
        whose rows they are."""
        self.cache, self.ids, self.n_prompt, self.owner = cache, list(ids), n_prompt, owner
        assert cache.seq_len(0) <= len(self.ids) and n_prompt <= len(self.ids)

    def turn_to(self, prompt: Sequence[int]) -> None:
        """Hold `prompt` instead, with the rows of the longest prefix that the two have in common.

        The rows of the last token are left out: it is run again, for its logits.
        """
        held = self.ids[: min(self.cache.seq_len(0), len(prompt) - 1)]
        common = next((i for i, token in enumerate(held) if token != prompt[i]), len(held))
        self.cache.truncate(common)
        self.ids, self.n_prompt = list(prompt), len(prompt)

    def go_on(self) -> None:
        """Hold the same ids, of which the last is to be run, for its logits."""
        self.cache.truncate(min(self.cache.seq_len(0), len(self.ids) - 1))
