"""Probabilities of arcs and sums over paths as 64-bit words, for the scan of a transducer's loss.

Such a number is m · 2**e, with m in [1, 2) in fp64 and an integer e. Sums of products of these
numbers need no logarithm, and their error is that of fp64, whatever their range is.

The lower half of a word has the first 32 bits of the fraction of m. So the upper half of m in fp64
is an exponent of fp64 and the lower half of the word, shifted by 12 together. The upper half of an
arc's word is e with a bias. It lies between 2**21 and 2**23 for a possible arc, and is -2**30 for
one of probability 0. So all terms of a sum are scaled by the greatest, and no upper half is 0, by
which a scan knows that a word has been written.

This is enough for logits of at most 32 bits: the error of a product is 2**-33. With PRECISE, for
fp64, an arc has 8 more bits of the fraction, above an exponent of 24 bits. The upper bits of that
exponent become the last of m, which is noise below 2**-40, for which the fraction is chosen.

The upper half of the word of a state, a sum over paths, has 4 bits of the fraction and an exponent
of 28 bits. Its bias makes it about 1 for a state that no path reaches, and greater for any other.

Scores that are no log-probabilities, or have a delay penalty, may be above 0: those of arcs up to
2**21 (greater ones count as NaN), and those of paths up to 2**25. Sums of probabilities below
2**-83,000,000 count as 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E, finite_shift
from .lattice import log_sum

ARC_BIAS = tl.constexpr(2**23 - 2**21 - 2**11)
# In both forms, and with equal halves, so that memory is filled with it in units of 32 bits.
IMPOSSIBLE_ARC = tl.constexpr(0xC0C00000C0C00000 - 2**64)
LEAST_EXPONENT = tl.constexpr(-(2**22) + 2**11)  # the least of a possible arc
LEAST_SCORE = tl.constexpr(-(2.0**21) + 2.0**11)  # of a token or a duration; below, it is -inf
GREATEST_SCORE = tl.constexpr(2.0**21)  # of a token; above, it is NaN
IMPOSSIBLE = tl.constexpr(-(2**24))  # the exponent of such a factor

STATE_BIAS = tl.constexpr(2**27 - 2**25)
UNREACHED = tl.constexpr(1)  # the least biased exponent of a state, so that no word is 0
LEAST_STATE = tl.constexpr(2**24)  # the least biased exponent of a state that a path reaches
NO_TERM = tl.constexpr(-(2**30) - 2**24)  # the exponent of no terms, below that of any other

FRACTION = tl.constexpr(0xFFFFF)  # the bits of the fraction in the upper half of an fp64 number
ONE = tl.constexpr(1023 << 20)  # the upper half of 1.0
TERM_BITS = tl.constexpr(50)  # those of a term of a sum, at most 1, as an integer
TERM_UNIT = tl.constexpr(2.0**-50)
NAN_TERM = tl.constexpr(-(2.0**57))  # which outweighs up to 64 others
ROUNDER = tl.constexpr(1.5 * 2.0**52)  # a sum with it is rounded to an integer, in its low bits


@triton.jit
def line(x, SLOPE: tl.constexpr, OFFSET: tl.constexpr):
    """Return SLOPE * x + OFFSET in fp64; as arguments of an fma these would become fp32."""
    slope = tl.full(x.shape, SLOPE, tl.float64)
    return tl.fma(x, slope, tl.full(x.shape, OFFSET, tl.float64))


@triton.jit
def exp2_parts(x):
    """Return f between 0.7 and 1.5 and an integer e with 2**x = f * 2**e.

    For x below LEAST_SCORE e is IMPOSSIBLE, and for NaN or x above GREATEST_SCORE f is NaN.
    """
    clamped = tl.where(x < LEAST_SCORE, LEAST_SCORE, tl.where(x > GREATEST_SCORE, float("nan"), x))
    rounded = clamped + ROUNDER
    exponent = rounded.to(tl.int64, bitcast=True).to(tl.int32)
    y = clamped - (rounded - ROUNDER)
    # The polynomial is fitted to 2**y at Chebyshev points, to 4e-16. Its terms are paired.
    s = y * y
    p01 = line(y, 0.69314718055995, 1.0)
    p23 = line(y, 0.05550410866444772, 0.24022650695910097)
    p45 = line(y, 0.0013333558230164974, 0.009618129107606888)
    p67 = line(y, 1.5252657260200837e-05, 0.0001540353044173605)
    p89 = line(y, 1.0208690299958306e-07, 1.321544258792169e-06)
    p89 = tl.fma(s, tl.full(s.shape, 7.072585949269223e-09, tl.float64), p89)
    high = tl.fma(tl.fma(p89, s, p67), s, p45)
    factor = tl.fma(tl.fma(high, s, p23), s, p01)
    return factor, tl.where(x < LEAST_SCORE, IMPOSSIBLE, exponent)


@triton.jit
def halves(word):
    """Return the lower and the upper half of 64-bit numbers, as uint32."""
    bits = word.to(tl.uint64, bitcast=True)
    return bits.to(tl.uint32), (bits >> 32).to(tl.uint32)


@triton.jit
def joined(lower, upper):
    """Return the int64 of two halves."""
    return ((upper.to(tl.uint64) << 32) | lower.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def add_exponent(x, exponent):
    """Return x * 2**exponent, where x and the result are normal numbers."""
    lower, upper = halves(x)
    upper += exponent.to(tl.uint32, bitcast=True) << 20
    return joined(lower, upper).to(tl.float64, bitcast=True)


@triton.jit
def exp_parts(x):
    """Return e**x for x <= 0 as a factor and an exponent of 2, and as a term of a sum.

    A term is an integer: sums are the same in any order, so all kernels have the same bits. NaN is
    so negative that a sum with it is.
    """
    factor, exponent = exp2_parts(x * LOG2E)
    term = add_exponent(factor, tl.maximum(exponent, -1000) + TERM_BITS)
    return factor, exponent, tl.where(factor == factor, term, NAN_TERM).to(tl.int64)


@triton.jit
def sum_of_terms(total):
    """Return the sum of terms of `exp_parts` in fp64."""
    return tl.where(total < 0, float("nan"), total.to(tl.float64) * TERM_UNIT)


@triton.jit
def probability_block(logits, DTYPE: tl.constexpr):
    """Return the softmax of each row, `[N, K]`, and the log-sum-exps, `[N]`.

    A probability is a factor and an exponent of 2. The factors of a row are NaN if a logit is, or
    all are -inf.
    """
    values = logits.to(tl.float64)
    maximum = finite_shift(tl.max(values, axis=1))
    factor, exponent, term = exp_parts(values - maximum[:, None])
    total = sum_of_terms(tl.sum(term, axis=1))
    return factor * (1.0 / total)[:, None], exponent, maximum + log_sum(total, DTYPE)


@triton.jit
def arc_word(token, duration, valid, PRECISE: tl.constexpr):
    """Return the word of an arc, and whether it is valid and its probability is NaN.

    The probability is the product of those of its token and its duration, each a factor and an
    exponent of 2. Where the arc is not valid, it is 0.
    """
    product, exponent = token[0] * duration[0], token[1] + duration[1] + (ARC_BIAS - 1023)
    bits = product.to(tl.int64, bitcast=True)
    if PRECISE:
        bits += (1 << 11) - ((exponent + 1023) >> 12)
        exponent += (bits >> 52).to(tl.int32)
        upper = ((bits.to(tl.uint32) << 12) & 0xFF000000) | exponent.to(tl.uint32, bitcast=True)
    else:
        bits += 1 << 19
        exponent += (bits >> 52).to(tl.int32)
        upper = exponent.to(tl.uint32, bitcast=True)
    word = joined((bits >> 20).to(tl.uint32), upper)
    # A product of probabilities is at most about 1, and its factor below 4.
    is_number = product < 4.0
    is_possible = valid & is_number & (exponent >= ARC_BIAS + LEAST_EXPONENT)
    return tl.where(is_possible, word, IMPOSSIBLE_ARC), valid & (is_number == 0)


@triton.jit
def arc_exponent(upper, PRECISE: tl.constexpr):
    """Return the biased exponent of an arc; that of a probability of 0 is below -2**29."""
    if PRECISE:
        shifted = (upper << 8).to(tl.int32, bitcast=True)
        return tl.minimum(shifted, shifted >> 8)
    else:
        return upper.to(tl.int32, bitcast=True)


@triton.jit
def add_product(total, lower, upper, significand, field, PRECISE: tl.constexpr):
    """Return the total plus the product of m of an arc, a significand and 2**(field - 1023).

    A field below 0 counts as 0, by which the product is below 2**-1020.
    """
    power = tl.maximum(field, 0).to(tl.uint32, bitcast=True) << 20
    rest = lower << 20
    if PRECISE:
        rest = rest | (upper >> 12)
    bits = joined(rest, power | (lower >> 12))
    return tl.fma(bits.to(tl.float64, bitcast=True), significand, total)


@triton.jit
def normalized(total, exponent):
    """Return the state of a sum of terms, which is total * 2**exponent with the biases of both."""
    lower, upper = halves(total)
    shift = (upper >> 20).to(tl.int32, bitcast=True) - (1023 + ARC_BIAS)
    significand = joined(lower, (upper & FRACTION) | ONE).to(tl.float64, bitcast=True)
    return significand, tl.maximum(exponent + shift, UNREACHED)


@triton.jit
def state_word(significand, exponent):
    """Return the word of a state."""
    bits = significand.to(tl.uint64, bitcast=True)
    upper = ((bits.to(tl.uint32) << 12) & 0xF0000000) | exponent.to(tl.uint32, bitcast=True)
    return joined((bits >> 20).to(tl.uint32), upper)


@triton.jit
def state_of_word(word):
    """Return the significand and the biased exponent of a state.

    The bits of -inf, which `arc_rows.load_turn_carries` returns where there is no carry, become
    a state that no path reaches.
    """
    lower, upper = halves(word)
    bits = joined((lower << 20) | (upper >> 12), (lower >> 12) | ONE)
    return bits.to(tl.float64, bitcast=True), (upper << 4).to(tl.int32, bitcast=True) >> 4
