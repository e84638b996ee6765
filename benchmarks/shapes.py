"""A checkpoint of a published shape with random weights: python -m benchmarks.shapes DIR

Speed does not depend on what the weights are, so random ones serve where the real ones are not at
hand. The default is light: four layers of Qwen3-0.6B and a small vocabulary, 160 MB, which is still
several times what a processor's cache holds. There is no tokenizer: it serves token ids.

With --repeats layers add nothing to what they are given (o_proj and down_proj are zeros), at the
same cost: the likeliest next token is the last one again, and temperature says how often another
comes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.config import ModelConfig
from engine.loading.weights import EMBEDDING, FINAL_NORM, LAYER, MATRICES, NORMS, layer_shapes

# Sizes as its config.json publishes them.
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LAYERS, VOCABULARY = 4, 16_384  # of the light one
ONE = 0x3F80  # 1.0 in bf16
ADDED = "wo", "w_down"  # what a layer adds comes through these


def write_checkpoint(
    path: Path, layers: int = LAYERS, vocabulary: int = VOCABULARY, repeats: bool = False
) -> Path:
    """Write config.json and model.safetensors (bf16) into the directory `path`; returns it.

    The same sizes give the same weights. Tensors are made and written one at a time.
    """
    raw = QWEN3_0_6B | {"num_hidden_layers": layers, "vocab_size": vocabulary}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw, indent=2))
    shapes = dict(tensor_shapes(ModelConfig.from_dict(raw)))
    header, at = {}, 0
    for name, shape in shapes.items():
        stop = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with (path / "model.safetensors").open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            silent = repeats and any(MATRICES[field] in name for field in ADDED)
            bits = np.zeros(shape, np.uint16) if silent else random_bf16(shape, rng)
            bits.tofile(f)
    return path


def tensor_shapes(c: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a checkpoint with tied embeddings: its name and shape."""
    yield EMBEDDING, (c.vocab_size, c.dim)
    for layer in range(c.n_layers):
        for field, shape in layer_shapes(c).items():
            yield LAYER.format(layer, (MATRICES | NORMS)[field]), shape
    yield FINAL_NORM, (c.dim,)


def random_bf16(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Bits of bf16: a norm's weights are ones, a matrix's as lively as a trained one's."""
    if len(shape) == 1:
        return np.full(shape, ONE, np.uint16)
    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def main(argv: list[str] | None = None) -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("path", type=Path, metavar="DIR")
    ap.add_argument("--layers", type=int, default=LAYERS, help="Qwen3-0.6B has 28")
    ap.add_argument("--vocabulary", type=int, default=VOCABULARY, help="Qwen3-0.6B has 151936")
    ap.add_argument("--repeats", action="store_true", help="the last token is the likeliest next")
    args = ap.parse_args(argv)
    write_checkpoint(args.path, args.layers, args.vocabulary, args.repeats)


if __name__ == "__main__":
    main()
