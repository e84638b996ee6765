"""Tiny random Qwen3 checkpoints in the hub's layout, for tests."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.config import ModelConfig

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 299,
}


def random_tensors(raw: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of a model of config.json's sizes, float32, of a scale that keeps it lively."""
    c, rng = ModelConfig.from_dict(raw), np.random.default_rng(seed)

    def matrix(n: int, k: int) -> np.ndarray:
        return rng.standard_normal((n, k), dtype=np.float32) / np.float32(np.sqrt(k))

    def norm(n: int) -> np.ndarray:
        return 1 + rng.standard_normal(n, dtype=np.float32) / 10

    tensors = {
        "model.embed_tokens.weight": matrix(c.vocab_size, c.dim),
        "model.norm.weight": norm(c.dim),
    }
    if not c.tied:
        tensors["lm_head.weight"] = matrix(c.vocab_size, c.dim)
    for layer in range(c.n_layers):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": values
            for name, values in {
                "input_layernorm": norm(c.dim),
                "self_attn.q_proj": matrix(c.q_dim, c.dim),
                "self_attn.k_proj": matrix(c.kv_dim, c.dim),
                "self_attn.v_proj": matrix(c.kv_dim, c.dim),
                "self_attn.o_proj": matrix(c.dim, c.q_dim),
                "self_attn.q_norm": norm(c.head_dim),
                "self_attn.k_norm": norm(c.head_dim),
                "post_attention_layernorm": norm(c.dim),
                "mlp.gate_proj": matrix(c.hidden_dim, c.dim),
                "mlp.up_proj": matrix(c.hidden_dim, c.dim),
                "mlp.down_proj": matrix(c.dim, c.hidden_dim),
            }.items()
        }
    return tensors


def write_checkpoint(
    path: Path, tensors: dict[str, np.ndarray] | None = None, seed: int = 0, **changes
) -> Path:
    """A checkpoint directory of TINY's config with `changes`; None removes a key."""
    raw = {key: value for key, value in (TINY | changes).items() if value is not None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    save_file(random_tensors(raw, seed) if tensors is None else tensors, path / "model.safetensors")
    return path


def save_bf16(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Float32 arrays, truncated to bf16; safetensors' NumPy writer knows no such type."""
    header, at = {}, 0
    for name, array in tensors.items():
        size = 2 * array.size
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            f.write((np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16).tobytes())
