"""Sums over the arcs of a row in scans over a lattice with several kinds of arcs; see `arcs.py`."""

from __future__ import annotations

import sys

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .lattice import log2_1p

LEAST = tl.constexpr(-sys.float_info.max)


@triton.jit
def arc_term(score, own, other, i: tl.constexpr, CODE: tl.constexpr):
    """Return the term of an arc of kind i, its score plus the state at its other end.

    `own` has the lane's states of the last rows, latest first, and `other` those of its neighbor.
    """
    if (CODE >> (8 * i)) & 128:
        return score + other[(CODE >> (8 * i)) & 127]
    else:
        return score + own[((CODE >> (8 * i)) & 127) - 1]


@triton.jit
def arc_terms(scores, own, other, lane, CODE: tl.constexpr, ARCS: tl.constexpr):
    """Return the terms of a state, one for each kind of arcs."""
    terms = ()
    for i in tl.static_range(ARCS):
        if (CODE >> (8 * i)) & 255:
            terms = terms + (arc_term(scores[i], own, other, i, CODE),)
        else:
            terms = terms + (lane.to(tl.float64) * 0.0 - float("inf"),)
    return terms


@triton.jit
def greatest(terms):
    """Return the greatest of some terms, which are compared in pairs."""
    if len(terms) == 1:
        return terms[0]
    else:
        winners = ()
        for i in tl.static_range(len(terms) // 2):
            first, second = terms[2 * i], terms[2 * i + 1]
            winners = winners + (tl.where(first > second, first, second),)
        if len(terms) % 2:
            winners = winners + (terms[len(terms) - 1],)
        return greatest(winners)


@triton.jit
def log2_total(terms, shift, FP64: tl.constexpr):
    """Return log2 of the sum of 2**term, given a shift that is at least the greatest term.

    Exponentials and logarithm are fp32 unless FP64.
    """
    if FP64:
        total = tl.exp2(terms[0] - shift)
        for i in tl.static_range(1, len(terms)):
            total += tl.exp2(terms[i] - shift)
        return shift + tl.log2(total)
    else:
        total = tl.exp2((terms[0] - shift).to(tl.float32))
        for i in tl.static_range(1, len(terms)):
            total += tl.exp2((terms[i] - shift).to(tl.float32))
        # The sum is NaN, 0 or at least 1, up to rounding; its exponent is split off.
        bits = total.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 127
        fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
        # The exponent comes first, because it is known before the logarithm of the fraction.
        result = (shift + exponent.to(tl.float64)) + log2_1p(fraction).to(tl.float64)
        return tl.where(total > 0.5, result, tl.where(total == 0.0, -float("inf"), total))


@triton.jit
def next_row(
    scores,
    own,
    other,
    lane,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
    MAX: tl.constexpr,
    FP64: tl.constexpr,
):
    """Return what a row needs once the row before it is known.

    These are the logarithm of the sum of the terms that do not depend on that row, and the scores
    of the others; or all scores with MAX. The first states of `own` and `other` are not read.
    """
    if MAX:
        return scores
    else:
        terms, late = (), ()
        for i in tl.static_range(ARCS):
            if ((CODE >> (8 * i)) & 255) == 1 or ((CODE >> (8 * i)) & 255) == 128:
                late = late + (scores[i],)
            elif (CODE >> (8 * i)) & 255:
                terms = terms + (arc_term(scores[i], own, other, i, CODE),)
        if len(terms):
            return (log2_total(terms, finite_shift(greatest(terms)), FP64),) + late
        else:
            return (lane.to(tl.float64) * 0.0 - float("inf"),) + late


@triton.jit
def first_turn(lane, CODE: tl.constexpr, ARCS: tl.constexpr, MAX: tl.constexpr):
    """Return what `next_row` does for a row without arcs."""
    nothing = lane.to(tl.float64) * 0.0 - float("inf")
    row = () if MAX else (nothing,)
    for i in tl.static_range(ARCS):
        if MAX and ((CODE >> (8 * i)) & 255) == 0:
            row = row + (lane,)
        elif MAX or ((CODE >> (8 * i)) & 255) == 1 or ((CODE >> (8 * i)) & 255) == 128:
            row = row + (nothing,)
    return row


@triton.jit
def add_late(row, own, other, CODE: tl.constexpr, ARCS: tl.constexpr, FP64: tl.constexpr):
    """Return log2 of the sum of 2**term over all terms of a row; see `next_row`."""
    terms = (row[0],)
    # A least shift stands for -inf. Labels come last, because they come from the neighbor.
    shift = tl.where(row[0] > LEAST, row[0], LEAST)
    for i in tl.static_range(ARCS):
        if ((CODE >> (8 * i)) & 255) == 1 or ((CODE >> (8 * i)) & 255) == 128:
            term = arc_term(row[len(terms)], own, other, i, CODE)
            shift = tl.where(term > shift, term, shift)
            terms = terms + (term,)
    return log2_total(terms, shift, FP64)


@triton.jit
def best_term(terms, lane, ARCS: tl.constexpr):
    """Return the greatest term and its index, the first of equals; NaN counts as the greatest."""
    best, index = terms[0], lane * 0
    for i in tl.static_range(1, ARCS):
        is_better = (terms[i] > best) | (terms[i] != terms[i])
        best, index = tl.where(is_better, terms[i], best), tl.where(is_better, i, index)
    return best, index
