"""Logits -> a token id, without sorting the vocabulary.

Order the tokens by logit, the largest first (of equal ones the lowest id), and lay their masses
e^((logit - largest) / temperature) on a line. top_p and min_p each keep a first stretch of that
line. So draw a point of the whole line: a token that lies in both stretches is the answer. If it
does not, all that comes behind it is out as well: draw again from the line before it. That is a
uniform draw from what the filters keep, and needs no order, only the mass before one token.

Before that, whether they are logits at all (`are_finite`), and what a request forbids, takes off or
adds (`masked`, `adjust`); beside it, what its logprobs need (`largest_first`, `log_sum`).
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from engine.kernels.jit import inlined, kernel
from engine.kernels.simd import (
    I32,
    LANES,
    V_F32,
    V_I32,
    exp,
    f32x16,
    first_lanes,
    lane_index_below,
    lane_max,
    lane_sum,
    load,
    splat,
    splatted,
    store,
)

LOWEST = np.float32(-np.inf)
HIGHEST = np.float64(np.finfo(np.float32).max)
LEAST = np.float32(np.exp(-87.0))  # where exp ends: taken off, so that a logit of -inf weighs 0


@intrinsic
def lanes_before(tc, mass, logit, bound, n):
    """`mass` in lanes of a logit above `bound`, and in lanes below n of just that logit; else 0."""

    def build(ctx, b, sig, args):
        mass, logit, bound, n = args
        bound = splatted(b, bound)
        tie = b.and_(b.fcmp_ordered("==", logit, bound), lane_index_below(b, n))
        keep = b.or_(b.fcmp_ordered(">", logit, bound), tie)
        return b.select(keep, mass, V_F32(None))

    return f32x16(f32x16, f32x16, types.float32, types.intp), build


@intrinsic
def lanes_allowed(tc, value, bits, other):
    """`value` in lanes whose bit is set, lane 0's the lowest; `other` in the rest."""

    def build(ctx, b, sig, args):
        value, bits, other = args
        own = b.and_(splatted(b, b.trunc(bits, I32), V_I32), V_I32([1 << i for i in range(LANES)]))
        is_set = b.icmp_signed("!=", own, V_I32(None))
        return b.select(is_set, value, splatted(b, other))

    return f32x16(f32x16, types.intp, types.float32), build


@kernel
def are_finite(logits, n):
    """Whether none of logits[: n] is NaN or infinite, whose difference to itself is not 0."""
    total = splat(np.float32(0.0))
    for i in range(0, n, LANES):
        x = first_lanes(load(logits, i), n - i, np.float32(0.0))
        total = total + (x - x)
    return lane_sum(total) == np.float32(0.0)


@kernel
def masked(out, logits, n, bits):
    """out[i] = logits[i] if bit i % 32 of bits[i // 32] is set, else -inf: i < n padded to 16."""
    for i in range(0, n, LANES):
        word = bits[i // 32] >> (i % 32)
        store(out, i, lanes_allowed(load(logits, i), word, LOWEST))


@kernel
def adjust(logits, ids, counts, bias, size, repetition, presence, frequency):
    """x = logits[ids[r]] becomes, for each row r < size and rounded once,

    (x / repetition if x > 0 else x * repetition) - presence - frequency * counts[r] + bias[r].

    A count of 0 (in the prompt only) has neither presence nor frequency, one below 0 no repetition
    either. What is finite stays finite, since NaN comes of infinity.
    """
    for row in range(size):
        x = np.float64(logits[ids[row]])
        if x > -np.inf:
            if counts[row] >= 0:
                x = x / repetition if x > 0 else x * repetition
            if counts[row] > 0:
                x -= presence + frequency * counts[row]
            logits[ids[row]] = min(max(x + bias[row], -HIGHEST), HIGHEST)


@kernel
def largest_first(logits, n, ids, values):
    """values: the len(ids) <= n largest of logits[:n], descending; ids: whose, the lowest first."""
    k = len(ids)
    values[:] = LOWEST
    for j in range(k):
        insert(ids, values, j, j, logits[j])
    for i in range(0, n, LANES):
        if lane_max(first_lanes(load(logits, i), n - i, LOWEST)) > values[k - 1]:
            for j in range(max(i, k), min(i + LANES, n)):
                if logits[j] > values[k - 1]:
                    insert(ids, values, k - 1, j, logits[j])


@inlined
def insert(ids, values, last, new, value):
    """Put a value where it belongs in the descending values[:last + 1], the last of which goes."""
    at = last
    while at > 0 and value > values[at - 1]:
        ids[at], values[at] = ids[at - 1], values[at - 1]
        at -= 1
    ids[at], values[at] = new, value


@kernel
def log_sum(logits, n, peak):
    """sum(e^(logits[i] - peak)) over i < n; its logarithm is within 1e-7 of float64's."""
    total = 0.0
    for i in range(0, n, LANES):
        total += lane_sum(first_lanes(exp(load(logits, i) - peak), n - i, np.float32(0.0)))
    return total


@kernel
def sample(logits, n, temperature, top_k, top_p, min_p, rng):
    """A token of logits[:n], which has room for n padded to 16.

    The order is transformers': temperature, then top_k, top_p, min_p, each on what the one before
    left. top_k keeps all tokens that tie with the k-th.
    """
    if 0 < top_k < n:
        kept = largest_ids(logits, n, top_k)
        few = np.zeros((len(kept) + LANES - 1) // LANES * LANES, np.float32)
        for i in range(len(kept)):
            few[i] = logits[kept[i]]
        return kept[sample_all(few, len(kept), temperature, top_p, min_p, rng)]
    return sample_all(logits, n, temperature, top_p, min_p, rng)


@kernel
def largest_ids(logits, n, k):
    """The ids of the k largest of logits[:n] and of what ties with the k-th, ascending."""
    tops = np.empty((n + LANES - 1) // LANES, np.float32)  # the largest of each vector
    for i in range(0, n, LANES):
        tops[i // LANES] = lane_max(first_lanes(load(logits, i), n - i, LOWEST))
    # Whatever the k-th largest of `tops` is, k logits at least are as large.
    least = np.partition(tops, len(tops) - k)[len(tops) - k] if k <= len(tops) else LOWEST
    ids, count = np.empty(n, np.int64), 0
    for i in range(0, n, LANES):
        if tops[i // LANES] >= least:
            for j in range(i, min(i + LANES, n)):
                ids[count] = j
                count += logits[j] >= least
    ids = ids[:count]
    if count < k:  # only where logits are NaN, which compare with nothing
        return np.arange(n)
    least = np.partition(logits[ids], count - k)[count - k]
    return ids[logits[ids] >= least]


@kernel
def sample_all(logits, n, temperature, top_p, min_p, rng):
    """`sample` without top_k."""
    masses = np.empty((n + LANES - 1) // LANES * LANES, np.float32)
    sums = np.empty(len(masses) // LANES, np.float32)  # of each vector of masses
    peak = LOWEST
    for i in range(0, n, LANES):
        peak = max(peak, lane_max(first_lanes(load(logits, i), n - i, LOWEST)))
    total = 0.0
    for i in range(0, n, LANES):
        mass = exp((load(logits, i) - peak) / temperature) - LEAST
        mass = first_lanes(mass, n - i, np.float32(0.0))
        store(masses, i, mass)
        sums[i // LANES] = lane_sum(mass)
        total += sums[i // LANES]
    token = find(masses, sums, logits, LOWEST, 0, rng.random() * total)
    before = total  # the mass that the line holds now
    while top_p < 1 or min_p > 0:
        bound = logits[token]
        before = 0.0
        for i in range(0, n, LANES):
            mass = lane_sum(lanes_before(load(masses, i), load(logits, i), bound, token - i))
            sums[i // LANES] = mass
            before += mass
        if before == 0 or (before < top_p * total and masses[token] >= min_p):
            return token
        token = find(masses, sums, logits, bound, token, rng.random() * before)
    return token


@inlined
def find(masses, sums, logits, bound, last, target):
    """The first id, in order of ids, at which the running sum of masses exceeds `target`.

    Only tokens before `last`, whose logit is `bound`, count: `sums` holds their masses by vector.
    """
    total, i = 0.0, 0
    chosen = 0
    for vector in range(len(sums)):
        if sums[vector] > 0:
            i = vector
            if total + sums[vector] > target:
                break
            total += sums[vector]
    for j in range(i * LANES, (i + 1) * LANES):
        if masses[j] > 0 and (logits[j] > bound or (logits[j] == bound and j < last)):
            chosen = j
            total += masses[j]
            if total > target:
                break
    return chosen
