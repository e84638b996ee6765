"""The forward pass of Qwen3 (Yang et al. 2025), one step for prefill, decode and any mix."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.kernels import clock
from engine.kernels.activations import BLOCK, Inputs, Rows, from_row, padded
from engine.kernels.attention import Heads
from engine.kernels.clock import lap
from engine.kernels.decode_attention import decode_attention, merge_parts
from engine.kernels.embed import embed
from engine.kernels.jit import inlined, kernel
from engine.kernels.kv import of_side, write_row
from engine.kernels.matmul import Q8, Floats, matmul, of_layer, prepare
from engine.kernels.prompt_attention import prompt_attention
from engine.kernels.rmsnorm import rmsnorm, rmsnorm_rows
from engine.kernels.rope import rotate
from engine.kernels.simd import LANES, exp, load, store
from engine.kernels.team import barrier, share


class Sizes(NamedTuple):
    """The sizes of a model that kernels read (see config.py)."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float


class Weights(NamedTuple):
    """A model's weights, layers one after the other; matrices packed (see matmul.py)."""

    embedding: Floats | Q8  # (vocab_size, dim)
    head: Floats | Q8  # (vocab_size, dim); the embedding itself where they are tied
    wq: Floats | Q8  # (n_layers, q_dim, dim)
    wk: Floats | Q8  # (n_layers, kv_dim, dim)
    wv: Floats | Q8  # (n_layers, kv_dim, dim)
    wo: Floats | Q8  # (n_layers, dim, q_dim)
    w_gate: Floats | Q8  # (n_layers, hidden_dim, dim)
    w_up: Floats | Q8  # (n_layers, hidden_dim, dim)
    w_down: Floats | Q8  # (n_layers, dim, hidden_dim)
    attention_norm: np.ndarray  # (n_layers, padded dim) float32, as all norms
    mlp_norm: np.ndarray  # (n_layers, padded dim)
    final_norm: np.ndarray  # (padded dim,)
    q_norm: np.ndarray  # (n_layers, padded head_dim)
    k_norm: np.ndarray  # (n_layers, padded head_dim)


class Scratch(NamedTuple):
    """What a step works in, for up to T tokens, row by row."""

    x: Rows  # (T, dim) the residual stream
    h: Inputs  # (T, dim) normed
    q: Rows  # (T, n_heads, head_dim)
    k: Rows  # (T, n_kv_heads, head_dim)
    v: Rows  # (T, n_kv_heads, head_dim)
    attended: Inputs  # (T, n_heads, head_dim)
    gate: Inputs  # (T, hidden_dim)
    up: Rows  # (T, hidden_dim)
    parts: np.ndarray  # what generated tokens' chunks gather (see decode_attention.py)
    work: np.ndarray  # (ranks, work_size) float32, each rank's own


@kernel
def step(me, sizes, weights, rope, kv, runs, ids, s, logits):
    """One forward of the tokens `ids` of several sequences, as rank `me` of a team.

    rope: the table of rope.py. kv: Kv, where every sequence has room for the rows of its run behind
    those that it holds; the step appends them. s: Scratch.
    logits: (m, padded vocab_size), receives those of the tokens runs.wanted.
    """
    n, dim, hidden_dim, eps = len(ids), sizes.dim, sizes.hidden_dim, sizes.norm_eps
    heads = Heads(sizes.n_heads, sizes.n_kv_heads, sizes.head_dim)
    q_dim, kv_dim = heads.n_heads * heads.head_dim, heads.n_kv_heads * heads.head_dim
    x, h, q, k, v, attended, gate, up = s.x, s.h, s.q, s.k, s.v, s.attended, s.gate, s.up
    row, q_row, hidden_row = x.stride, attended.rows.stride, up.stride
    first, last = share(n, me)  # this rank's tokens, where an operation is shared by tokens
    work_at = me.rank * (len(s.work) // me.ranks)

    lap(me, clock.START)
    for t in range(first, last):
        embed(weights.embedding, x.data, t * row, ids[t], dim)
    lap(me, clock.EMBED)

    for layer in range(sizes.n_layers):
        # h = norm(x); q, k, v = wq h, wk h, wv h
        rmsnorm_rows(h.rows, x, weights.attention_norm, layer * row, dim, eps, first, last)
        lap(me, clock.RMSNORM)
        prepare(weights.wq, h, n, first, last, 0, row)
        lap(me, clock.QUANTIZE)
        barrier(me)
        matmul(q, of_layer(weights.wq, layer, q_dim, dim), h, n, False, me)
        lap(me, clock.MATMUL_Q)
        matmul(k, of_layer(weights.wk, layer, kv_dim, dim), h, n, False, me)
        lap(me, clock.MATMUL_K)
        matmul(v, of_layer(weights.wv, layer, kv_dim, dim), h, n, False, me)
        lap(me, clock.MATMUL_V)
        barrier(me)

        # every head of q and k normed and turned to its position, q divided by sqrt(head_dim), and
        # k and v appended to the cache
        norm_and_rotate(q, weights.q_norm, layer, heads.n_heads, heads, eps, rope, runs, n, me)
        norm_and_rotate(k, weights.k_norm, layer, heads.n_kv_heads, heads, eps, rope, runs, n, me)
        divide(q, heads, n, me)
        lap(me, clock.NORM_AND_ROPE)
        append(kv, layer, k, v, heads, runs, n, me)
        lap(me, clock.APPEND)
        barrier(me)

        # x += wo attention(q, all keys and values of its sequence so far, its own included)
        prompt_attention(attended.rows, q, kv, layer, runs, heads, s.work, work_at, me)
        decode_attention(s.parts, q, kv, layer, runs, heads, s.work, work_at, me)
        lap(me, clock.ATTENTION)
        barrier(me)
        merge_parts(attended.rows, s.parts, runs, heads, me)
        lap(me, clock.MERGE)
        barrier(me)
        prepare(weights.wo, attended, n, first, last, 0, q_row)
        lap(me, clock.QUANTIZE)
        barrier(me)
        matmul(x, of_layer(weights.wo, layer, dim, q_dim), attended, n, True, me)
        lap(me, clock.MATMUL_OUT)
        barrier(me)

        # x += w_down (silu(w_gate h) * w_up h), h = norm(x)
        rmsnorm_rows(h.rows, x, weights.mlp_norm, layer * row, dim, eps, first, last)
        lap(me, clock.RMSNORM)
        prepare(weights.w_gate, h, n, first, last, 0, row)
        lap(me, clock.QUANTIZE)
        barrier(me)
        matmul(gate.rows, of_layer(weights.w_gate, layer, hidden_dim, dim), h, n, False, me)
        lap(me, clock.MATMUL_GATE)
        matmul(up, of_layer(weights.w_up, layer, hidden_dim, dim), h, n, False, me)
        lap(me, clock.MATMUL_UP)
        if n > 1:  # one token's columns are those that this rank computed
            barrier(me)
        a, z = share(hidden_row // BLOCK, me)
        swiglu(gate.rows, up, n, a * BLOCK, z * BLOCK)
        lap(me, clock.SWIGLU)
        prepare(weights.w_down, gate, n, 0, n, a * BLOCK, z * BLOCK)
        lap(me, clock.QUANTIZE)
        barrier(me)
        matmul(x, of_layer(weights.w_down, layer, dim, hidden_dim), gate, n, True, me)
        lap(me, clock.MATMUL_DOWN)
        barrier(me)

    # logits = head norm(x), of the tokens that are wanted
    n_logits = len(logits)
    first, last = share(n_logits, me)
    for i in range(first, last):
        one = from_row(x, runs.wanted[i])
        rmsnorm_rows(from_row(h.rows, i), one, weights.final_norm, 0, dim, eps, 0, 1)
    lap(me, clock.RMSNORM)
    prepare(weights.head, h, n_logits, first, last, 0, row)
    lap(me, clock.QUANTIZE)
    barrier(me)
    head = of_layer(weights.head, 0, sizes.vocab_size, dim)
    out = Rows(logits.reshape(logits.size), 0, logits.shape[1])
    matmul(out, head, h, n_logits, False, me)
    lap(me, clock.HEAD)
    barrier(me)


@inlined
def norm_and_rotate(x, weight, layer, n_heads, heads, eps, rope, runs, n, me):
    """RMSNorm of each head of x, (n, n_heads, head_dim), then its rotary position."""
    head_dim, norm = heads.head_dim, layer * padded(heads.head_dim)
    first, last = share(n * n_heads, me)
    for i in range(first, last):
        at = x.at + i * head_dim
        rmsnorm(x.data, at, x.data, at, weight, norm, head_dim, head_dim, eps)
        rotate(x.data, at, head_dim, rope, position(runs, i // n_heads))


@inlined
def position(runs, token):
    """Where a token stands in its sequence: the row it has in the cache."""
    run = runs.owner[token]
    return runs.start[run] + token - runs.first[run]


@inlined
def divide(q, heads, n, me):
    """q = q / sqrt(head_dim), which attention leaves to its caller; shared as the heads are."""
    scale = np.float32(1.0 / np.sqrt(heads.head_dim))
    first, last = share(n * heads.n_heads, me)
    for i in range(first * heads.head_dim, last * heads.head_dim):
        q.data[i] *= scale


@inlined
def append(kv, layer, k, v, heads, runs, n, me):
    """Each token's row of the cache = its k and v, shared as the heads of k are."""
    head_dim, kv_dim = heads.head_dim, heads.n_kv_heads * heads.head_dim
    first, last = share(n * heads.n_kv_heads, me)
    for i in range(first, last):
        token, at = i // heads.n_kv_heads, i % heads.n_kv_heads * head_dim
        row, table = position(runs, token), runs.table[runs.owner[token]]
        keys = of_side(kv, table, layer, 0, kv_dim)
        write_row(keys, row, at, k.data, k.at + i * head_dim, head_dim)
        values = of_side(kv, table, layer, 1, kv_dim)
        write_row(values, row, at, v.data, v.at + i * head_dim, head_dim)


@inlined
def swiglu(gate, up, n, start, stop):
    """gate = gate / (1 + exp(-gate)) * up, in columns start to stop of n rows."""
    one = np.float32(1.0)
    for t in range(n):
        for i in range(t * gate.stride + start, t * gate.stride + stop, LANES):
            g = load(gate.data, i)
            store(gate.data, i, g / (exp(np.float32(0.0) - g) + one) * load(up.data, i))
