"""Named tensors of a checkpoint -> the arrays that kernels read.

Matrices are packed once, in parallel, from pieces of the mapped files that are let go as soon as
they are packed: the checkpoint is never held twice.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from engine import memory
from engine.config import ModelConfig
from engine.kernels.activations import BLOCK, padded
from engine.kernels.forward import Weights
from engine.kernels.matmul import Q8, Floats
from engine.kernels.pack import pack_rows, quantize_rows
from engine.loading.checkpoint import Checkpoint
from engine.loading.quantize import as_kept

KINDS = {"q8_0": np.uint8, "bf16": np.uint16, "f32": np.float32}  # how matrices are kept
PIECE = 8 << 20  # bytes of a checkpoint that a thread maps at a time

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LAYER = "model.layers.{}.{}.weight"
MATRICES = {
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "w_gate": "mlp.gate_proj",
    "w_up": "mlp.up_proj",
    "w_down": "mlp.down_proj",
}
NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


def layer_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a layer, by its field in Weights."""
    return {
        "wq": (c.q_dim, c.dim),
        "wk": (c.kv_dim, c.dim),
        "wv": (c.kv_dim, c.dim),
        "wo": (c.dim, c.q_dim),
        "w_gate": (c.hidden_dim, c.dim),
        "w_up": (c.hidden_dim, c.dim),
        "w_down": (c.dim, c.hidden_dim),
        "attention_norm": (c.dim,),
        "mlp_norm": (c.dim,),
        "q_norm": (c.head_dim,),
        "k_norm": (c.head_dim,),
    }


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """ValueError unless the checkpoint holds exactly the tensors of `config`, in their shapes."""
    shapes, names = layer_shapes(config), MATRICES | NORMS
    table = (config.vocab_size, config.dim)
    expected = {EMBEDDING: table, FINAL_NORM: (config.dim,)}
    for layer in range(config.n_layers):
        expected |= {LAYER.format(layer, name): shapes[field] for field, name in names.items()}
    if config.tied:  # such a checkpoint may carry the head or leave it out
        checkpoint.check(expected, optional={HEAD: table})
    else:
        checkpoint.check(expected | {HEAD: table}, optional={})


def load_weights(checkpoint: Checkpoint, config: ModelConfig, kind: str, threads: int) -> Weights:
    """All weights, matrices packed as `kind` (of KINDS), norms as float32.

    ValueError names what is missing, left over, mis-shaped or not finite. A float32 or float16
    checkpoint is rounded to the nearest bf16 where that is asked for.
    """
    check_tensors(checkpoint, config)
    shapes, n_layers, dtype = layer_shapes(config), config.n_layers, KINDS[kind]
    matrices = []  # (tensor's name, store it is packed into, where in it)

    def room(n: int, k: int, names: list[str]) -> Floats | Q8:
        size = padded(n) * (padded(k) if kind == "q8_0" else k)
        data = memory.empty(len(names) * size, dtype)
        store = Floats(data)
        if kind == "q8_0":
            store = Q8(data, memory.empty(len(data) // BLOCK, np.int16))
        for array in store:  # the last rows of a matrix are padding, which packing leaves as it is
            last = array.reshape(len(names), padded(n) // BLOCK, -1)[:, -1]
            last[:] = 0
        matrices.extend((name, store, i * size) for i, name in enumerate(names))
        return store

    def layers(name: str) -> list[str]:
        return [LAYER.format(layer, name) for layer in range(n_layers)]

    fields = {"embedding": room(config.vocab_size, config.dim, [EMBEDDING])}
    fields["head"] = fields["embedding"]
    if not config.tied:
        fields["head"] = room(config.vocab_size, config.dim, [HEAD])
    for field, name in MATRICES.items():
        fields[field] = room(*shapes[field], layers(name))
    for field, name in NORMS.items():
        fields[field] = load_norms(checkpoint, layers(name), *shapes[field])
    fields["final_norm"] = load_norms(checkpoint, [FINAL_NORM], config.dim)
    pack_all(checkpoint, matrices, threads)
    return Weights(**fields)


def load_norms(checkpoint: Checkpoint, names: list[str], width: int) -> np.ndarray:
    """(len(names), width padded with zeros) float32, flat."""
    norms = np.zeros((len(names), padded(width)), np.float32)
    for row, name in zip(norms, names, strict=True):
        row[:width] = as_float32(checkpoint.rows(name, 0, width))
        if not np.isfinite(row).all():
            raise ValueError(f"{name}: holds a value that is not finite")
    return norms.ravel()


def pack_all(checkpoint: Checkpoint, matrices: list, threads: int) -> None:
    """Pack every (name, store, at), a piece a task; a bar on a terminal shows the bytes done."""

    def pack(name: str, store: Floats | Q8, at: int, start: int, stop: int) -> int:
        rows = packable(checkpoint.rows(name, start, stop))
        if isinstance(store, Q8):
            at += start * padded(rows.shape[1])
            finite = quantize_rows(store.data, store.scales, at, rows)
        else:
            finite = pack_rows(store.data, at + start * rows.shape[1], rows)
        if not finite:
            raise ValueError(f"{name}: rows {start} to {stop} hold a weight that is not finite")
        return rows.nbytes

    tasks = []
    for name, store, at in matrices:
        n, k = checkpoint.tensors[name].shape
        height = max(PIECE // (4 * k) // BLOCK, 1) * BLOCK
        tasks += [(name, store, at, i, min(i + height, n)) for i in range(0, n, height)]
    tensors = [checkpoint.tensors[name] for name, _, _ in matrices]
    total = sum(t.stop - t.start for t in tensors)
    shown = None if sys.stderr else True  # None: on a terminal alone; there may be no stderr at all
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=shown, leave=False)
    with bar, ThreadPoolExecutor(threads) as pool:
        try:
            for done in pool.map(lambda task: pack(*task), tasks):
                bar.update(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def packable(rows: np.ndarray) -> np.ndarray:
    """Rows as pack_rows reads them: float32 or bfloat16, and read-only, a type of its own."""
    if rows.dtype == np.float16:
        rows = rows.astype(np.float32)
        rows.flags.writeable = False
    return rows


def as_float32(stored: np.ndarray) -> np.ndarray:
    """A stored tensor's values, bfloat16 (as uint16), float16 or float32, as float32."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def load_float32(checkpoint: Checkpoint, config: ModelConfig, kind: str) -> dict[str, np.ndarray]:
    """Every tensor by its name, float32 and unpacked: what reference.py reads.

    Matrices have the values that they have once they are kept as `kind`.
    """
    check_tensors(checkpoint, config)
    found = {}
    for name, tensor in checkpoint.tensors.items():
        if not (config.tied and name == HEAD):
            array = as_float32(checkpoint.rows(name, 0, tensor.shape[0]))
            found[name] = as_kept(array, kind) if array.ndim == 2 else array
            if not np.isfinite(found[name]).all():
                raise ValueError(f"{name}: holds a value that is not finite")
    return found | ({HEAD: found[EMBEDDING]} if config.tied else {})
