"""Logits -> a token id, without sorting the vocabulary.

A cut ("the k largest", "the fewest that hold a share p") is found from a histogram of the logits:
whole buckets are taken from the largest down, and only the bucket where the cut falls is sorted.
"""

from __future__ import annotations

import numpy as np

from engine.kernels.jit import inlined, kernel
from engine.kernels.simd import LANES, exp, first_lanes, lane_max, largest, load, splat, store

BUCKETS = 4096
LOWEST = np.float32(-np.inf)


@inlined
def largest_of(x, n):
    """The largest of x[:n]; x has room for whole vectors."""
    top = splat(LOWEST)
    for i in range(0, n, LANES):
        top = largest(top, first_lanes(load(x, i), n - i, LOWEST))
    return lane_max(top)


@kernel
def cut(logits, masses, n, peak, target):
    """Keep the tokens of largest logit until their masses reach `target`; the rest get mass 0.

    Ties at the cut are kept from the lowest id on. Masses are 0 for tokens already cut.
    """
    low = peak
    for i in range(n):
        if masses[i] > 0:
            low = min(low, logits[i])
    scale = np.float32(BUCKETS - 1) / max(peak - low, np.float32(1e-30))
    in_bucket = np.zeros(BUCKETS)
    for i in range(n):
        if masses[i] > 0:
            in_bucket[int((peak - logits[i]) * scale)] += masses[i]
    last, above = 0, 0.0  # the bucket of the cut, and the mass before it
    while last < BUCKETS - 1 and above + in_bucket[last] < target:
        above += in_bucket[last]
        last += 1
    count = 0
    for i in range(n):
        if masses[i] > 0:
            bucket = int((peak - logits[i]) * scale)
            if bucket > last:
                masses[i] = 0
            count += bucket == last
    ids = np.empty(count, np.int64)
    count = 0
    for i in range(n):
        if masses[i] > 0 and int((peak - logits[i]) * scale) == last:
            ids[count] = i
            count += 1
    by_logit = np.argsort(-logits[ids], kind="mergesort")  # stable: ties stay in order of ids
    for i in ids[by_logit]:
        if above >= target:
            masses[i] = 0
        above += masses[i]


@kernel
def filtered(logits, masses, n, temperature, top_k, top_p, min_p):
    """masses[i] = exp((logits[i] - largest) / temperature), 0 for what a filter takes out.

    The order is transformers': temperature, then top_k, top_p, min_p, each on what the one before
    left. `masses` has room for n padded to 16. Returns their sum.
    """
    peak = largest_of(logits, n)
    for i in range(0, n, LANES):
        store(masses, i, exp((load(logits, i) - peak) / temperature))
    if 0 < top_k < n:
        kept = np.zeros(n, np.float32)
        for i in range(n):
            kept[i] = 1
        cut(logits, kept, n, peak, np.float64(top_k))
        for i in range(n):
            masses[i] *= kept[i]
    if top_p < 1:
        total = 0.0
        for i in range(n):
            total += masses[i]
        cut(logits, masses, n, peak, top_p * total)
    total = 0.0
    for i in range(n):
        if masses[i] < min_p:  # the largest mass is 1
            masses[i] = 0
        total += masses[i]
    return total


@kernel
def draw(masses, n, target):
    """The first id at which the running sum of masses[:n] exceeds `target`."""
    total, chosen = 0.0, 0
    for i in range(n):
        if masses[i] > 0:
            chosen = i
            total += masses[i]
            if total > target:
                break
    return chosen
