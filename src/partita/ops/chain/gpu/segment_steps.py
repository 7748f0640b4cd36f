"""One step of several scans over a chain of few states, in the registers of one warp.

A program scans ROWS vectors of states at once, `[ROWS, BLOCK_C]`. They may belong to different
chains, or to different segments of a chain. The vectors do not depend on each other, so that
shuffles inside of a warp exchange all states, and a step needs no barrier.

A slot of a state is one of the edges that a direction of the scan takes into it: for alpha an edge
that enters the state, for beta one that leaves it. It is a tuple of three blocks `[1, BLOCK_C]`:
the state at the other end of the edge, or -1 for no edge; the state c that the edge enters; and
the number k of the edge among those that enter it. See `steps.py` for the recursions.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, finite_shift
from .steps import edge_score, load_source, lse_add, lse_value, max_add, out_degree


@triton.jit
def load_slot(edges, c, j, REVERSE: tl.constexpr):
    """Load the j-th slot of the states c: an edge into them, or with REVERSE out of them."""
    if REVERSE:
        start, degree = out_degree(edges, c)
        edge = tl.load(edges.out_edges_ptr + start + j, mask=j < degree, other=0)
        return tl.where(j < degree, edge // edges.K, -1), edge // edges.K, edge % edges.K
    else:
        source, valid = load_source(edges, c, j)
        return tl.where(valid, source, -1), c, c * 0 + j


@triton.jit
def load_slots(edges, c, DEGREE: tl.constexpr, REVERSE: tl.constexpr):
    """Load DEGREE slots, which stay in registers for all steps; none if DEGREE is 0."""
    slots = ()
    for j in tl.static_range(DEGREE):
        slots = slots + (load_slot(edges, c, j, REVERSE),)
    return slots


@triton.jit
def slot_score(scores, slot, active):
    """Return the scores of the edges of a slot, `[ROWS, BLOCK_C]`; -inf for none and if inactive.

    The first step of `scores` is a pointer for each row.
    """
    neighbor, c, k = slot
    return edge_score(scores, c, k, (neighbor >= 0) & active)


@triton.jit
def slot_value(x, slot):
    """Return the value of the neighbor of each state, `[ROWS, BLOCK_C]`; -inf for none."""
    neighbor = slot[0]
    index = tl.broadcast_to(tl.maximum(neighbor, 0), x.shape)
    return tl.where(neighbor >= 0, tl.gather(x, index, 1), -float("inf"))


@triton.jit
def weight_in_sum(term, maximum, ACC_DTYPE: tl.constexpr):
    """Return exp(term - maximum), fp64; exactly 1 for a term that is the maximum, also infinite."""
    difference = tl.where(term == maximum, 0.0, term - maximum)
    return exp(difference.to(ACC_DTYPE)).to(tl.float64)


@triton.jit
def log_of_weights(maximum, total, ACC_DTYPE: tl.constexpr):
    """Return the log-sum-exp of terms from their maximum and the sum of their weights, fp64.

    The 1 of the greatest term is subtracted before the sum is rounded to ACC_DTYPE, see `lse_add`.
    """
    return lse_value(maximum, (total - 1.0).to(ACC_DTYPE))


@triton.jit
def log_sum_of_terms(terms, DEGREE: tl.constexpr, ACC_DTYPE: tl.constexpr, IS_MAX: tl.constexpr):
    """Return the log-sum-exp of DEGREE terms, or their maximum; NaN if a term is NaN."""
    maximum = terms[0]
    for j in tl.static_range(1, DEGREE):
        if IS_MAX:
            maximum = max_add(maximum, terms[j])
        else:
            maximum = tl.maximum(maximum, terms[j])
    if IS_MAX:
        return maximum
    else:
        total = tl.zeros(maximum.shape, tl.float64)
        for j in tl.static_range(DEGREE):
            total += weight_in_sum(terms[j], maximum, ACC_DTYPE)
        return log_of_weights(maximum, total, ACC_DTYPE)


@triton.jit
def rows_step(
    x,
    scores,
    edges,
    c,
    slots,
    active,
    DEGREE: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    IS_MAX: tl.constexpr = False,
    REVERSE: tl.constexpr = False,
):
    """Return the states after a step of all rows; those of inactive rows stay as they are.

    The slots are in registers, or are loaded one after the other if DEGREE is 0.
    """
    if DEGREE > 0:
        terms = ()
        for j in tl.static_range(DEGREE):
            terms = terms + (slot_value(x, slots[j]) + slot_score(scores, slots[j], active),)
        value = log_sum_of_terms(terms, DEGREE, ACC_DTYPE, IS_MAX)
    else:
        maximum, rest = tl.full(x.shape, -float("inf"), tl.float64), tl.zeros(x.shape, ACC_DTYPE)
        number = edges.K
        if REVERSE:
            number = tl.max(tl.max(out_degree(edges, c)[1], axis=1), axis=0)
        for j in range(number):
            slot = load_slot(edges, c, j, REVERSE)
            term = slot_value(x, slot) + slot_score(scores, slot, active)
            if IS_MAX:
                maximum = max_add(maximum, term)
            else:
                maximum, rest = lse_add(maximum, rest, term)
        value = maximum if IS_MAX else lse_value(maximum, rest)
    return tl.where(active, value, x)


@triton.jit
def without_offset(x, axis: tl.constexpr):
    """Subtract the greatest state of each row, so that long chains lose no digits."""
    return x - finite_shift(tl.expand_dims(tl.max(x, axis=axis), axis))
