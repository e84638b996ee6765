"""engine/config.py: what a checkpoint's config.json says, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import ModelConfig, show

# Qwen/Qwen3-0.6B as published.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# The same model as newer versions of transformers write it.
NEWER = {k: v for k, v in QWEN3.items() if k not in ("rope_theta", "rope_scaling")} | {
    "dtype": "bfloat16",
    "layer_types": ["full_attention"] * 28,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}
SIZES = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
]
NUMBERS = ["rms_norm_eps", "rope_theta"]
NAN, INF = float("nan"), float("inf")


def read(**changes: object) -> ModelConfig:
    return ModelConfig.from_dict(QWEN3 | changes)


def refused(raw: dict, *words: str) -> None:
    """`raw` gives one ValueError of one line that holds `words`."""
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dict(raw)
    check(error, words)


def refused_dir(path: Path, *words: str) -> None:
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dir(path)
    check(error, words)


def check(error: pytest.ExceptionInfo[ValueError], words: tuple[str, ...]) -> None:
    assert type(error.value) is ValueError  # and not json's or Unicode's own kind
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def write(path: Path, config: object, generation: object = None) -> Path:
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return path


# --- what is read ---


@pytest.mark.parametrize("raw", [QWEN3, NEWER], ids=["published", "newer"])
def test_qwen3_0_6b(raw):
    """head_dim is taken for hidden_size / heads (64), which happens to be right for other sizes."""
    config = ModelConfig.from_dict(raw)
    assert config == ModelConfig(
        dim=1024,
        hidden_dim=3072,
        n_layers=28,
        n_heads=16,
        n_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_context=40960,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=True,
        eos_ids=frozenset({151645}),
    )
    assert (config.q_dim, config.kv_dim, config.group) == (2048, 1024, 2)


def test_built_in_model():
    """The config that ships inside the package is not what the package can read."""
    config = ModelConfig.from_dir(Path(__file__).resolve().parent.parent / "engine" / "assets")
    assert (config.dim, config.head_dim, config.rope_theta, config.tied) == (256, 64, 1e4, True)
    assert config.eos_ids == {2045}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 10000}, 1e4),
        ({"rope_theta": 5e6, "rope_parameters": None}, 5e6),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e6}}, 5e6),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e6}}, 5e6),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default"}}, 1e4),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": None}}, 1e4),
    ],
)
def test_rope_theta_in_either_place(changes, expected):
    """A newer file's base is missed, and every position past the first is turned wrongly."""
    theta = read(**changes).rope_theta
    assert theta == expected and isinstance(theta, float)


def test_unknown_keys_are_ignored():
    """A key that a later version of transformers adds makes a good checkpoint unreadable."""
    assert read(a_new_key={"deep": [1, None]}, torch_dtype=7) == read()


def test_tied_defaults_to_false():
    """transformers leaves out a value that equals its default: a file without it is refused."""
    raw = {k: v for k, v in QWEN3.items() if k != "tie_word_embeddings"}
    assert ModelConfig.from_dict(raw).tied is False


@pytest.mark.parametrize("value", [None, 0, 1, "true", [True]])
def test_tied_of_a_wrong_kind(value):
    """A string counts as true, "false" included, and the model's own head is never read."""
    refused(QWEN3 | {"tie_word_embeddings": value}, "tie_word_embeddings", repr(value))


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128, 256])
def test_head_dims(head_dim):
    """A head size that the kernels can do is refused."""
    assert read(head_dim=head_dim).q_dim == 16 * head_dim


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4, 8, 16])
def test_groups(n_kv_heads):
    """Heads that are shared by all, or by none, are refused or grouped upside down."""
    config = read(num_key_value_heads=n_kv_heads)
    assert (config.group, config.kv_dim) == (16 // n_kv_heads, n_kv_heads * 128)


# --- missing values and wrong kinds ---


@pytest.mark.parametrize("key", SIZES + NUMBERS)
def test_missing_field(key):
    """A missing size gets a default, and a checkpoint of another shape gives fluent nonsense."""
    refused({k: v for k, v in QWEN3.items() if k != key}, "config.json", f"{key} is missing")
    refused(QWEN3 | {key: None}, "config.json", f"{key} is missing")


def test_rope_theta_missing_in_a_newer_file():
    """A default of 10,000 stands in for the base of a file that has none."""
    for rope in ({}, {"rope_type": "default"}, {"rope_theta": None}):
        refused(NEWER | {"rope_parameters": rope}, "rope_theta is missing")
    # Newer files may hold an object for each kind of layer; one that is not read has no base.
    nested = {"full_attention": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}
    refused(NEWER | {"rope_parameters": nested}, "rope_theta is missing")


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize(
    "value",
    [True, False, "16", 16.0, 16.5, 0, -16, NAN, INF, [16], {"16": 16}, 1 << 25],
    ids=lambda value: repr(value)[:12],
)
def test_sizes_of_a_wrong_kind(key, value):
    """A size that is no positive whole number comes up as an error in NumPy, or as a huge array."""
    refused(QWEN3 | {key: value}, "config.json", key, repr(value))


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize(
    "value",
    [True, False, "1e-6", 0, 0.0, -1e-6, NAN, INF, -INF, [1e-6], {}],
    ids=lambda value: repr(value)[:12],
)
def test_numbers_of_a_wrong_kind(key, value):
    """NaN or infinity in a file turns all logits into NaN."""
    refused(QWEN3 | {key: value}, "config.json", key, repr(value))


@pytest.mark.parametrize("key", SIZES + NUMBERS)
@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["huge", "-huge"])
def test_numbers_beyond_a_float(key, value):
    """A whole number of 400 digits, which is valid JSON, is an OverflowError."""
    refused(QWEN3 | {key: value}, "config.json", key)


@pytest.mark.parametrize("digits", [38, 40, 1200, 5000])
def test_a_number_is_shown_short(digits):
    """An error of a thousand digits, or one that Python refuses to print."""
    shown = show(10**digits)
    assert len(shown) <= 40 and (shown == f"{10**digits}" if digits < 39 else "bits" in shown)


def test_rope_theta_of_a_wrong_kind_in_a_newer_file():
    """The base inside rope_parameters is taken unseen."""
    for value in (True, "1e6", 0, -1.0, NAN, [1e6]):
        refused(NEWER | {"rope_parameters": {"rope_theta": value}}, "rope_theta", repr(value))


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 3), (16, 32), (7, 2)])
def test_heads_that_cannot_be_shared(heads, kv_heads):
    """A remainder of query heads reads past the last key head."""
    raw = QWEN3 | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    refused(raw, f"num_attention_heads ({heads})", f"num_key_value_heads ({kv_heads})")


@pytest.mark.parametrize("head_dim", [1, 8, 15, 17, 72, 100, 129, 257, 272, 4096])
def test_head_dims_not_implemented(head_dim):
    """A head size that is no whole number of vectors reads into the next head."""
    refused(QWEN3 | {"head_dim": head_dim}, f"head_dim is {head_dim}", "16", "256")


# --- what is not implemented ---


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "llama", "Qwen3", "", None, ["qwen3"], 3])
def test_other_model_types(kind):
    """Another architecture with the same field names is run as if it were Qwen3."""
    refused(QWEN3 | {"model_type": kind}, "model_type", repr(kind), "qwen3")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["Qwen3ForSequenceClassification"]),
        ("architectures", ["Qwen3ForCausalLM", "Other"]),
        ("architectures", "Qwen3ForCausalLM"),
        ("hidden_act", "gelu"),
        ("hidden_act", None),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ],
)
def test_parts_not_implemented(key, value):
    """A bias, a window or a quantisation that the forward pass lacks is left out in silence."""
    refused(QWEN3 | {key: value}, "config.json", key, repr(value), "not implemented")


def test_absent_parts_are_not_refused():
    """A file that leaves out what it does not use is refused."""
    absent = ("architectures", "attention_bias", "use_sliding_window", "rope_scaling")
    assert ModelConfig.from_dict({k: v for k, v in QWEN3.items() if k not in absent}) == read()
    # A window's size alone says nothing: Qwen3 files carry it with the window switched off.
    assert read(sliding_window=4096, quantization_config=None, layer_types=None) == read()


def test_layer_types():
    """One windowed layer among full ones attends to everything."""
    full, windowed = "full_attention", "sliding_attention"
    assert read(layer_types=[full] * 28) == read(layer_types=[]) == read()
    refused(QWEN3 | {"layer_types": [full] * 27 + [windowed]}, repr(windowed))
    refused(QWEN3 | {"layer_types": [full, ["x"]]}, "['x']")
    refused(QWEN3 | {"layer_types": {full: 28}}, "layer_types")
    refused(QWEN3 | {"layer_types": full}, "layer_types")
    refused(QWEN3 | {"layer_types": [full] * 27}, "27 layers", "28")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "llama3", "longrope", "", 7, ["x"]])
def test_rope_scaling_is_refused(key, spelling, kind):
    """A scaling is ignored: the text is right up to the native length and falls apart behind it."""
    rope = {spelling: kind, "factor": 4.0, "original_max_position_embeddings": 32768}
    refused(QWEN3 | {key: rope}, f"{key} of type {kind!r}")
    refused(NEWER | {key: rope | {"rope_theta": 1e6}}, f"{key} of type {kind!r}")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_of_a_part_of_a_head(key):
    """Every element of a head is turned, where the model was trained to turn a quarter."""
    assert read(**{key: {"partial_rotary_factor": 1.0}}) == read(partial_rotary_factor=1.0)
    refused(QWEN3 | {key: {"partial_rotary_factor": 0.25}}, key, "part of a head")


def test_rope_scaling_behind_a_null():
    """One spelling of the key is null, and the other, which names a scaling, is not looked at."""
    rope = {"rope_type": None, "type": "yarn", "factor": 4.0}
    refused(QWEN3 | {"rope_scaling": rope}, "yarn")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "rope", [None, {}, {"type": "default"}, {"rope_type": "default"}, {"rope_type": None}]
)
def test_no_rope_scaling(key, rope):
    """The name "default", or none, is taken for that of a scaling."""
    assert read(**{key: rope}) == read()


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("rope", ["yarn", 4.0, ["yarn"], True])
def test_rope_that_is_no_object(key, rope):
    """A string where an object belongs is an AttributeError."""
    refused(QWEN3 | {key: rope}, key, repr(rope))


# --- end of text ---


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (1, None, {1}),
        (1, {}, {1}),
        (1, {"eos_token_id": None}, {1}),
        (1, {"eos_token_id": 2}, {1, 2}),
        (1, {"eos_token_id": [1, 2]}, {1, 2}),
        ([1, 3], {"eos_token_id": [2, 3]}, {1, 2, 3}),
        (None, {"eos_token_id": [2]}, {2}),
        ([], {"eos_token_id": 0}, {0}),
        (151935, {"eos_token_id": []}, {151935}),
        (None, None, set()),
    ],
)
def test_eos_ids_are_united(tmp_path, config, generation, expected):
    """One of two files wins, and a chat never stops at the other's id."""
    write(tmp_path, QWEN3 | {"eos_token_id": config}, generation)
    assert ModelConfig.from_dir(tmp_path).eos_ids == expected


def test_eos_id_absent(tmp_path):
    """A base model without an end of text is refused."""
    raw = {k: v for k, v in QWEN3.items() if k != "eos_token_id"}
    assert ModelConfig.from_dir(write(tmp_path, raw)).eos_ids == frozenset()


@pytest.mark.parametrize("value", [True, "151645", 1.0, NAN, [1, "2"], [[1]], {"id": 1}, [None]])
def test_eos_ids_of_a_wrong_kind(tmp_path, value):
    """An id that no token can equal is kept, and the text never ends."""
    refused(QWEN3 | {"eos_token_id": value}, "config.json: eos_token_id")
    write(tmp_path, QWEN3, {"eos_token_id": value})
    refused_dir(tmp_path, "generation_config.json: eos_token_id")


@pytest.mark.parametrize("value", [-1, 151936, [0, 151936], 10**400])
def test_eos_ids_outside_the_vocabulary(tmp_path, value):
    """A config of another model's tokenizer passes, and the text never ends."""
    refused(QWEN3 | {"eos_token_id": value}, "outside the vocabulary of 151936")
    refused_dir(write(tmp_path, QWEN3, {"eos_token_id": value}), "outside the vocabulary")


# --- files ---


BROKEN = {
    "empty": b"",
    "no JSON": b"hidden_size: 1024\nvocab_size: 300\n",
    "cut": json.dumps(QWEN3).encode()[:-20],
    "binary": bytes(range(256)),
    "UTF-16": json.dumps(QWEN3).encode("utf-16"),
    "safetensors": b"\x40\x00\x00\x00\x00\x00\x00\x00" + b'{"a":{}}'.ljust(64),
    "deeply nested": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "a number of 5,000 digits": b'{"vocab_size": ' + b"1" * 5_000 + b"}",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_files_that_are_no_json(tmp_path, file, content):
    """A damaged file is a traceback, of the kind that depends on the damage."""
    write(tmp_path, QWEN3)
    (tmp_path / file).write_bytes(content)
    refused_dir(tmp_path, f"{tmp_path / file}: cannot be read as JSON")


@pytest.mark.parametrize("content", [[], [QWEN3], "qwen3", 7, None, True])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_files_that_hold_no_object(tmp_path, file, content):
    """Valid JSON that is no object is an AttributeError."""
    write(tmp_path, QWEN3)
    (tmp_path / file).write_text(json.dumps(content), encoding="utf-8")
    refused_dir(tmp_path, f"{tmp_path / file}: holds a ", type(content).__name__)


def test_missing_files(tmp_path):
    """The message does not say which file is missing."""
    refused_dir(tmp_path, f"{tmp_path / 'config.json'}: no such file")
    refused_dir(tmp_path / "absent", "config.json: no such file")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("make", [os.mkdir, getattr(os, "mkfifo", os.mkdir)])
def test_what_is_no_file(tmp_path, file, make):
    """A directory of that name is a traceback; at a pipe, reading waits for ever."""
    write(tmp_path, QWEN3)
    (tmp_path / file).unlink(missing_ok=True)
    make(tmp_path / file)
    refused_dir(tmp_path, f"{tmp_path / file}: ")


def test_empty_object(tmp_path):
    """A config of another program passes for an empty one and fails at the first size."""
    refused_dir(write(tmp_path, {}), "model_type None")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "rope_type", "rope_theta", "a"]), inner)
    ),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(NEWER | QWEN3)), JSON)
def test_any_value_of_any_key(key, value):
    """Some JSON value of some key ends in another error than a ValueError of one line."""
    try:
        config = read(**{key: value})
    except ValueError as e:
        assert "\n" not in str(e)
    else:
        assert config.n_heads % config.n_kv_heads == 0 and config.head_dim % 16 == 0


def test_a_scaling_without_a_type():
    """A factor that nobody says how to apply is not the same as no scaling."""
    with pytest.raises(ValueError, match="factor"):
        ModelConfig.from_dict(QWEN3 | {"rope_scaling": {"factor": 4.0}})


def test_what_a_file_claims_is_cut_short_in_messages():
    """An error of three megabytes is not a line."""
    with pytest.raises(ValueError) as e:
        ModelConfig.from_dict(QWEN3 | {"hidden_size": "9" * 1_000_000})
    assert len(str(e.value)) < 500
