"""Kernels of the engine as a Team calls them: the rank first, and what there is for it to share.

Those that wait for memory go through `layers` of the same shape in one call, as a step does: one
layer alone would stay in the processor's cache and show the cache's speed.
"""

from __future__ import annotations

from engine.kernels.activations import quantize
from engine.kernels.decode_attention import decode_attention, merge_parts
from engine.kernels.forward import norm_and_rotate
from engine.kernels.jit import kernel
from engine.kernels.matmul import matmul, of_layer
from engine.kernels.prompt_attention import prompt_attention
from engine.kernels.rmsnorm import rmsnorm_rows
from engine.kernels.team import barrier, share


@kernel
def matmuls(me, out, store, layers, n, k, x, n_tokens):
    """out = w x for each matrix w, (n, k), of `layers` in `store`. out: Rows; x: Inputs."""
    for layer in range(layers):
        matmul(out, of_layer(store, layer, n, k), x, n_tokens, False, me)
        barrier(me)


@kernel
def decode_attentions(me, out, parts, q, kv, runs, heads, work):
    """out = softmax(q k^T) v for the generated tokens of Runs, in each layer of Kv."""
    work_at = me.rank * (len(work) // me.ranks)
    for layer in range(len(kv.places)):
        decode_attention(parts, q, kv, layer, runs, heads, work, work_at, me)
        barrier(me)
        merge_parts(out, parts, runs, heads, me)
        barrier(me)


@kernel
def prompt_attentions(me, out, q, kv, runs, heads, work):
    """out[t] = softmax(q[t] k^T) v for the tokens of prompts among Runs. out, q: Rows."""
    work_at = me.rank * (len(work) // me.ranks)
    prompt_attention(out, q, kv, 0, runs, heads, work, work_at, me)


@kernel
def rmsnorms(me, out, x, weight, n_tokens, dim, eps):
    """out[t] = RMSNorm(x[t]) for n_tokens rows of `dim`; both are Rows of one stride."""
    first, last = share(n_tokens, me)
    rmsnorm_rows(out, x, weight, 0, dim, eps, first, last)


@kernel
def norms_and_rotations(me, x, weight, n_heads, heads, eps, rope, runs, n_tokens):
    """Every head of x, Rows of (n_tokens, n_heads, head_dim), normed and turned, in place."""
    norm_and_rotate(x, weight, 0, n_heads, heads, eps, rope, runs, n_tokens, me)


@kernel
def quantizations(me, x, n_tokens):
    """Inputs x, n_tokens rows of whole blocks of 32, as Q8_0."""
    first, last = share(n_tokens, me)
    quantize(x, n_tokens, first, last, 0, x.rows.stride)
