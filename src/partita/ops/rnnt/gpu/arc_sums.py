"""Sums over the arcs of a row in scans over a lattice with several kinds of arcs; see `arcs.py`."""

from __future__ import annotations

import sys

import triton
import triton.language as tl

from .lattice import exp2_of, log2_1p

LEAST = tl.constexpr(-sys.float_info.max)
POWER = tl.constexpr(2.0**52)
POWER_BITS = tl.constexpr(0x4330000000000000)  # the bits of POWER, whose low half is 0


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
def scaled_sum(terms, shift, FP64: tl.constexpr):
    """Return the sum of 2**(term - shift), given a shift that is at least the greatest term.

    Differences are taken in fp64, and exponentials in fp32 unless FP64.
    """
    total = exp2_of(terms[0] - shift, FP64)
    for i in tl.static_range(1, len(terms)):
        total += exp2_of(terms[i] - shift, FP64)
    return total


@triton.jit
def log2_of_scaled(total, shift, FP64: tl.constexpr):
    """Return the shift plus log2 of a sum, which is 0, NaN, or at least 1 up to rounding."""
    if FP64:
        return shift + tl.log2(total)
    else:
        bits = total.to(tl.int32, bitcast=True)
        fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
        # The biased exponent is the low half of 2**52 + exponent, which converts it to fp64.
        word = (bits >> 23).to(tl.int64) | POWER_BITS
        exponent = word.to(tl.float64, bitcast=True) - (POWER + 127.0)
        # The exponent comes first, because it is known before the logarithm of the fraction.
        special = tl.where(total == 0.0, -float("inf"), total)
        log2_fraction = tl.where(total > 0.5, log2_1p(fraction), special)
        return (shift + exponent) + log2_fraction.to(tl.float64)


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

    These are a shift, the sum of 2**(term - shift) over the terms that do not depend on that row,
    and the scores of the others; or all scores with MAX. The first states of `own` and `other` are
    not read.
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
            shift = greatest(terms)
            # A least shift stands for -inf, so that no difference is one of infinities.
            shift = tl.where(shift == -float("inf"), LEAST, shift)
            return (shift, scaled_sum(terms, shift, FP64)) + late
        else:
            return empty_sum(lane, FP64) + late


@triton.jit
def empty_sum(lane, FP64: tl.constexpr):
    """Return the shift and the sum of `next_row` for no terms."""
    shift = lane.to(tl.float64) * 0.0 + LEAST
    return (shift, lane.to(tl.float64 if FP64 else tl.float32) * 0.0)


@triton.jit
def first_turn(lane, CODE: tl.constexpr, ARCS: tl.constexpr, MAX: tl.constexpr, FP64: tl.constexpr):
    """Return what `next_row` does for a row without arcs."""
    nothing = lane.to(tl.float64) * 0.0 - float("inf")
    row = () if MAX else empty_sum(lane, FP64)
    for i in tl.static_range(ARCS):
        if MAX and ((CODE >> (8 * i)) & 255) == 0:
            row = row + (lane,)
        elif MAX or ((CODE >> (8 * i)) & 255) == 1 or ((CODE >> (8 * i)) & 255) == 128:
            row = row + (nothing,)
    return row


@triton.jit
def add_late(row, own, other, CODE: tl.constexpr, ARCS: tl.constexpr, FP64: tl.constexpr):
    """Return log2 of the sum of 2**term over all terms of a row; see `next_row`."""
    terms, shift = (), row[0]
    # Labels come last, because they come from the neighbor.
    for i in tl.static_range(ARCS):
        if ((CODE >> (8 * i)) & 255) == 1 or ((CODE >> (8 * i)) & 255) == 128:
            term = arc_term(row[2 + len(terms)], own, other, i, CODE)
            shift = tl.where(term > shift, term, shift)
            terms = terms + (term,)
    total = row[1] * exp2_of(row[0] - shift, FP64)
    if len(terms):
        total += scaled_sum(terms, shift, FP64)
    return log2_of_scaled(total, shift, FP64)


@triton.jit
def best_term(terms, lane, ARCS: tl.constexpr):
    """Return the greatest term and its index, the first of equals; NaN counts as the greatest."""
    best, index = terms[0], lane * 0
    for i in tl.static_range(1, ARCS):
        is_better = (terms[i] > best) | (terms[i] != terms[i])
        best, index = tl.where(is_better, terms[i], best), tl.where(is_better, i, index)
    return best, index
