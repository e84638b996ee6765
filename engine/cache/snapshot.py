"""A sequence's rows on disk: a safetensors file that is whole and of this model, or refused.

Tensors: `ids`, (n,) int64; `layers.{i}.k` and `layers.{i}.v`, (rows, kv_dim) as the cache holds
them, the rows of the first ids. Metadata: `about`, JSON, with the format's name, `n_prompt` (how
many of the ids came as a prompt) and the `fingerprint` of what computed the rows; and the `sha256`
of all that.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from engine.files import write_whole

FORMAT = "engine-kv-cache-1"
STORED = {"F32": np.float32, "F16": np.float16}  # safetensors' names


def save(
    path: str | os.PathLike, cache, ids: Sequence[int], n_prompt: int, fingerprint: Mapping
) -> None:
    """Write `ids` and the rows that `cache` holds for the first of them.

    The file appears whole or not at all, and what stood there before stays until then. OSError says
    what the system refused.
    """
    tensors = {"ids": np.array(ids, np.int64)}
    for layer in range(cache.num_layers()):
        k, v = cache.kv_view(layer) or cache.materialize(layer)
        tensors |= {f"layers.{layer}.k": k, f"layers.{layer}.v": v}
    about = {"format": FORMAT, "n_prompt": n_prompt, "fingerprint": dict(fingerprint)}
    metadata = {"about": json.dumps(about)}
    metadata["sha256"] = digest(metadata["about"], tensors)

    def write(part: Path) -> None:
        try:
            save_file(tensors, part, metadata)
        except SafetensorError as e:
            raise OSError(str(e)) from None

    write_whole(path, write)


def load(
    path: str | os.PathLike, cache, fingerprint: Mapping, max_ids: int
) -> tuple[list[int], int]:
    """Fill the empty `cache` with the rows of a file; returns its ids, `max_ids` at most, and
    n_prompt.

    ValueError gives the reason why a file is refused, and then the cache is untouched.
    """
    if not Path(path).is_file():  # a pipe would be waited for
        what = "is not a file" if Path(path).exists() else "does not exist"
        raise ValueError(f"{path}: {what}")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            n_prompt = check_about(metadata, fingerprint)
            check_tensors(file, cache, n_prompt, max_ids)
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if digest(metadata["about"], tensors) != metadata.get("sha256"):
            raise ValueError("is corrupted: its checksum is not that of what it holds")
    except (OSError, SafetensorError) as e:
        raise ValueError(f"{path}: is not a whole safetensors file: {e}") from None
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None
    for layer in range(cache.num_layers()):
        cache.set_prefill(layer, *(tensors.pop(f"layers.{layer}.{side}") for side in "kv"))
    return tensors["ids"].tolist(), n_prompt


def check_about(metadata: Mapping[str, str], fingerprint: Mapping) -> int:
    """n_prompt; ValueError unless a file's metadata say that it is of this engine and model."""
    try:
        about = json.loads(metadata.get("about", "null"))
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"is no saved cache: its metadata do not say {FORMAT}")
    was, n_prompt = about.get("fingerprint"), about.get("n_prompt")
    if not isinstance(was, dict) or type(n_prompt) is not int or n_prompt < 0:
        raise ValueError("is corrupted: its metadata lack a fingerprint or n_prompt")
    for name, value in fingerprint.items():
        if was.get(name) != value and name == "model":  # its digest tells nobody anything
            raise ValueError("was saved with model weights or sizes other than these")
        if was.get(name) != value:
            raise ValueError(f"was saved with {name} {was.get(name)!r}, and here it is {value!r}")
    return n_prompt


def check_tensors(file, cache, n_prompt: int, max_ids: int) -> None:
    """ValueError unless an open file holds ids and as many rows or fewer for every layer."""
    layers = range(cache.num_layers())
    wanted = {"ids"} | {f"layers.{layer}.{side}" for layer in layers for side in "kv"}
    if set(file.keys()) != wanted:
        raise ValueError(f"is corrupted: it does not hold ids and K and V of {len(layers)} layers")
    stored = {name: file.get_slice(name) for name in wanted}
    ids = stored.pop("ids")
    n = ids.get_shape()
    if ids.get_dtype() != "I64" or len(n) != 1 or not max(n_prompt, 1) <= n[0]:
        raise ValueError(f"is corrupted: its ids are {ids.get_dtype()} of {n}")
    if n[0] > max_ids:
        raise ValueError(f"holds {n[0]} tokens; there is room for {max_ids}")
    rows = (stored["layers.0.k"].get_shape() or [-1])[0]
    for name, side in stored.items():
        shape, dtype = side.get_shape(), STORED.get(side.get_dtype())
        if shape != [rows, cache.kv_dim] or rows > n[0] or dtype != cache.dtype:
            raise ValueError(f"is corrupted: {name} is {side.get_dtype()} of {shape}")


def digest(about: str, tensors: Mapping[str, np.ndarray]) -> str:
    """sha256 of the metadata and of every tensor: its name, shape, type and bytes."""
    found = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        held = tensors[name]
        found.update(f"\n{name} {held.shape} {held.dtype}\n".encode())
        found.update(held)
    return found.hexdigest()
