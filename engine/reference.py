"""The forward pass of Qwen3 in plain NumPy, float32: the oracle of the tests, and --backend numpy.

Written for the eye. `forward` is the paper from top to bottom, one function a formula.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.cache import KvCache
from engine.config import ModelConfig
from engine.kernels.runs import Run
from engine.profiler import Profile, timed


class NumpyModel:
    """A model whose forward pass is the NumPy below, with the face of SimdModel."""

    def __init__(self, config: ModelConfig, tensors: dict[str, np.ndarray], max_tokens: int):
        """`tensors` by their names in a checkpoint, float32."""
        self.config, self.tensors, self.max_tokens = config, tensors, max_tokens

    def new_logits(self, n: int) -> np.ndarray:
        """Room for the logits of `n` tokens, (n, vocab_size padded to whole vectors of 16)."""
        return np.zeros((n, -(-self.config.vocab_size // 16) * 16), np.float32)

    def compile(self) -> None:
        """There is nothing to compile."""

    def arrays(self) -> list[np.ndarray]:
        """Every array of the weights."""
        return [np.ascontiguousarray(self.tensors[name]) for name in sorted(self.tensors)]

    def forward(
        self, runs: Sequence[Run], logits: np.ndarray, profile: Profile | None = None
    ) -> None:
        """Run tokens of some sequences, each behind the rows of its cache, and append their rows.

        `logits` receives those of each run's last n_logits tokens, in order. Generated tokens are
        run one by one: the bits of NumPy's products depend on how many there are.
        """
        given = 0
        for run in runs:
            n = len(run.ids)
            each = n if run.is_prompt else 1
            for start in range(0, n, each):
                ids = run.ids[start : start + each]
                n_logits = run.n_logits if run.is_prompt else int(start >= n - run.n_logits)
                part = run._replace(ids=ids, n_logits=n_logits)
                self._forward(part, logits[given : given + n_logits], profile)
                given += n_logits

    def _forward(self, run: Run, logits: np.ndarray, profile: Profile | None) -> None:
        ids, cache, start = run.ids, run.cache, run.cache.seq_len(0)
        with timed(profile, "forward"):
            all_logits, rows = forward(self.config, self.tensors, ids, cache, len(logits))
        try:
            for layer, (k, v) in enumerate(rows):
                if start == 0:
                    cache.set_prefill(layer, k, v)
                else:
                    for k_row, v_row in zip(k, v, strict=True):
                        cache.push_row(layer, k_row, v_row)
        except BaseException:
            cache.truncate(start)
            raise
        logits[:, : self.config.vocab_size] = all_logits


def forward(
    config: ModelConfig, w: dict[str, np.ndarray], ids: np.ndarray, cache: KvCache, last: int
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Logits (last, vocab_size) of the last tokens, and each layer's new rows of K and V."""
    start, rows = cache.seq_len(0), []
    positions = np.arange(start, start + len(ids))
    x = w["model.embed_tokens.weight"][ids]  # (T, dim)
    for layer in range(config.n_layers):
        p = f"model.layers.{layer}."
        h = rmsnorm(x, w[p + "input_layernorm.weight"], config.norm_eps)
        q = heads(h @ w[p + "self_attn.q_proj.weight"].T, config)  # (n_heads, T, head_dim)
        k = heads(h @ w[p + "self_attn.k_proj.weight"].T, config)  # (n_kv_heads, T, head_dim)
        v = h @ w[p + "self_attn.v_proj.weight"].T  # (T, kv_dim)
        q = rope(rmsnorm(q, w[p + "self_attn.q_norm.weight"], config.norm_eps), positions, config)
        k = rope(rmsnorm(k, w[p + "self_attn.k_norm.weight"], config.norm_eps), positions, config)
        k = k.swapaxes(0, 1).reshape(v.shape)
        k, v = k.astype(cache.dtype), v.astype(cache.dtype)  # as it will hold them
        rows.append((k, v))
        old_k, old_v = cache.materialize(layer)
        all_k, all_v = np.concatenate([old_k, k]), np.concatenate([old_v, v])
        x = x + attention(q, all_k, all_v, positions, config) @ w[p + "self_attn.o_proj.weight"].T
        h = rmsnorm(x, w[p + "post_attention_layernorm.weight"], config.norm_eps)
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        x = x + (silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    x = rmsnorm(x[len(ids) - last :], w["model.norm.weight"], config.norm_eps)
    return x @ w["lm_head.weight"].T, rows


def heads(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """(T, n * head_dim) -> (n, T, head_dim)."""
    return x.reshape(len(x), -1, config.head_dim).swapaxes(0, 1)


def rmsnorm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(eps)) * weight


def rope(x: np.ndarray, positions: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Turn pairs (i, i + head_dim / 2) of every head by pos * theta^(-2i / head_dim)."""
    half = config.head_dim // 2
    frequencies = np.float32(config.rope_theta) ** (-np.arange(half, dtype=np.float32) / half)
    angles = positions[:, None].astype(np.float32) * frequencies  # (T, head_dim / 2)
    cos, sin, a, b = np.cos(angles), np.sin(angles), x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, config: ModelConfig
) -> np.ndarray:
    """softmax(q k^T / sqrt(d)) v, causal: (n_heads, T, d), (rows, kv_dim) x 2 -> (T, q_dim)."""
    k, v = heads(k, config), heads(v, config)  # (n_kv_heads, rows, head_dim)
    hidden = np.arange(k.shape[1]) > positions[:, None]  # (T, rows): later than the token
    out = np.empty((len(positions), config.n_heads, config.head_dim), np.float32)
    for head in range(config.n_heads):
        kv_head = head // config.group
        scores = q[head] @ k[kv_head].T / np.float32(np.sqrt(config.head_dim))
        scores = np.where(hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights @ v[kv_head] / weights.sum(axis=-1, keepdims=True)
    return out.reshape(len(out), -1)


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right 0
        return x / (1 + np.exp(-x))
