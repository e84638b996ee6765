"""ModelConfig: the sizes of a model, read from a checkpoint's config.json.

The one vocabulary of the engine. Hugging Face's words (`hidden_size`, ...) appear in this file
and nowhere else.
"""

from __future__ import annotations

import json
import os
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path

# Larger than any model this engine is for; a config.json beyond them is damaged or hostile.
MAX_LAYERS, MAX_SIZE, MAX_CONTEXT = 1_024, 1 << 24, 1 << 22


class Brief(reprlib.Repr):
    """What a file or a caller claims may be of any length and depth; an error is one line."""

    def repr_int(self, x: int, level: int) -> str:
        # hundreds of digits are no short line, and some thousands Python refuses to print
        return f"a number of {x.bit_length()} bits" if x.bit_length() > 128 else f"{x!r}"


brief = Brief()
brief.maxstring = 100
show = brief.repr


@dataclass(frozen=True)
class ModelConfig:
    """A dense Qwen3 model's sizes. Every field is read, none has a default."""

    dim: int  # width of the residual stream
    hidden_dim: int  # width of the gated MLP
    n_layers: int
    n_heads: int  # query heads
    n_kv_heads: int  # key and value heads; n_heads / n_kv_heads query heads share one
    head_dim: int  # its own field: n_heads * head_dim need not be dim
    vocab_size: int  # rows of the embedding; the tokenizer may have fewer ids
    max_context: int  # positions the model was trained for
    norm_eps: float
    rope_theta: float
    tied: bool  # the head is the embedding
    eos_ids: frozenset[int]  # ids that end a text

    @property
    def q_dim(self) -> int:
        """Width of all query heads of a token."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of a row of K or V: all key heads of a token."""
        return self.n_kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads that share one key and value head."""
        return self.n_heads // self.n_kv_heads

    @classmethod
    def from_dir(cls, path: Path) -> ModelConfig:
        """The config of the checkpoint directory `path`; ValueError names what cannot be used.

        End-of-text ids are the union over config.json and generation_config.json: models
        disagree with themselves about them.
        """
        raw = read_json(path / "config.json")
        extra = path / "generation_config.json"
        generation = read_json(extra) if os.path.exists(extra) else {}
        return cls.from_dict(raw, eos_of(generation, "generation_config.json"))

    @classmethod
    def from_dict(cls, raw: dict, more_eos_ids: frozenset[int] = frozenset()) -> ModelConfig:
        """From config.json's object. Unknown keys are ignored; a missing size is an error."""
        refuse_other_architectures(raw)
        config = cls(
            dim=size(raw, "hidden_size"),
            hidden_dim=size(raw, "intermediate_size"),
            n_layers=size(raw, "num_hidden_layers", MAX_LAYERS),
            n_heads=size(raw, "num_attention_heads"),
            n_kv_heads=size(raw, "num_key_value_heads"),
            head_dim=size(raw, "head_dim"),
            vocab_size=size(raw, "vocab_size"),
            max_context=size(raw, "max_position_embeddings", MAX_CONTEXT),
            norm_eps=positive(raw.get("rms_norm_eps"), "rms_norm_eps"),
            rope_theta=rope_theta(raw),
            tied=flag(raw, "tie_word_embeddings"),
            eos_ids=eos_of(raw, "config.json") | more_eos_ids,
        )
        if config.n_heads % config.n_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads ({config.n_heads}) is no multiple of "
                f"num_key_value_heads ({config.n_kv_heads})"
            )
        if config.head_dim % 16 or config.head_dim > 256:
            raise ValueError(
                f"config.json: head_dim is {config.head_dim}; "
                "multiples of 16 up to 256 are implemented"
            )
        if wrong := sorted(i for i in config.eos_ids if not 0 <= i < config.vocab_size):
            raise ValueError(
                f"end-of-text id {wrong[0]} is outside the vocabulary of {config.vocab_size} ids"
            )
        return config


def read_json(path: Path) -> dict:
    """The JSON object in `path`; ValueError if it is missing, no JSON or no object."""
    if not os.path.isfile(path):
        raise ValueError(f"{path}: no such file")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{path}: cannot be read as JSON ({e})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: holds a {type(raw).__name__} where an object is needed")
    return raw


def refuse_other_architectures(raw: dict) -> None:
    """ValueError, by name, for what the forward pass does not implement."""
    kind = raw.get("model_type")
    if kind != "qwen3":
        raise ValueError(f"config.json: model_type {show(kind)} is not implemented; 'qwen3' is")
    implemented = {
        "architectures": (None, ["Qwen3ForCausalLM"]),
        "hidden_act": ("silu",),
        "attention_bias": (None, False),
        "use_sliding_window": (None, False),
        "quantization_config": (None,),
        "partial_rotary_factor": (None, 1),
    }
    for key, values in implemented.items():
        if raw.get(key) not in values:
            raise ValueError(f"config.json: {key} {show(raw.get(key))} is not implemented")
    layers = raw.get("layer_types") or []
    if not isinstance(layers, list):
        raise ValueError(f"config.json: layer_types is {show(layers)}, not a list")
    if other := [kind for kind in layers if kind != "full_attention"]:
        raise ValueError(f"config.json: layer type {show(other[0])} is not implemented")
    if layers and len(layers) != raw.get("num_hidden_layers"):
        raise ValueError(
            f"config.json: layer_types names {len(layers)} layers, num_hidden_layers is "
            f"{show(raw.get('num_hidden_layers'))}"
        )


def rope_theta(raw: dict) -> float:
    """RoPE's base: `rope_theta` in older files, inside `rope_parameters` in newer ones."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key) or {}
        if not isinstance(rope, dict):
            raise ValueError(f"config.json: {key} is {show(rope)}, not an object")
        kinds = rope.get("rope_type"), rope.get("type")
        if "factor" in rope and kinds == (None, None):
            raise ValueError(f"config.json: {key} has a factor and no type")
        if rope.get("partial_rotary_factor") not in (None, 1):
            raise ValueError(f"config.json: {key} for a part of a head is not implemented")
        for kind in kinds:
            if kind not in (None, "none", "default"):
                raise ValueError(f"config.json: {key} of type {show(kind)} is not implemented")
    inner = (raw.get("rope_parameters") or {}).get("rope_theta")
    return positive(raw.get("rope_theta") if inner is None else inner, "rope_theta")


def size(raw: dict, key: str, most: int = MAX_SIZE) -> int:
    value = raw.get(key)
    if value is None:
        raise ValueError(f"config.json: {key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"config.json: {key} is {show(value)}; 1 to {most:,} is possible")
    return value


def positive(value: object, key: str) -> float:
    if value is None:
        raise ValueError(f"config.json: {key} is missing")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        raise ValueError(f"config.json: {key} is {show(value)}, not a number above 0")
    return float(value)


def flag(raw: dict, key: str) -> bool:
    # Files that transformers writes leave out a value that equals its default, which is False.
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} is {show(value)}, not true or false")
    return value


def eos_of(raw: dict, file: str) -> frozenset[int]:
    """`eos_token_id` of a config file: an id, a list of ids, null or absent."""
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if wrong := [i for i in ids if not isinstance(i, int) or isinstance(i, bool)]:
        raise ValueError(f"{file}: eos_token_id holds {show(wrong[0])}, not a token id")
    return frozenset(ids)
