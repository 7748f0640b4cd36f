"""What a program computes of its part of both rows in registers; see mixture.py.

All exponents are of base 2. A probability is exp2(-lost) * exp2(x * log2_scale - offset), where the
offset is the base-2 log-sum-exp of the row in fp32, and `lost` is what its rounding lost. So no
logarithm of a sum is subtracted from each class.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.math import LN2, LOG2E, finite_shift, log_exact
from .one_pass import SMALLEST, at_least
from .pair_part import exponent, max_of_pairs, sum_of_pairs
from .words import first_words, greatest_word, logits_of, store_block, words_of

LOWEST = gl.constexpr(-1000.0)  # the least exponent that enters a ratio; exp2 of it is 0


class Normalizer(NamedTuple):
    """The base-2 log-sum-exp of a row, the sum of two numbers.

    Fields:
        offset: the log-sum-exp in fp32.
        lost: what its rounding lost.
    """

    offset: tl.tensor
    lost: tl.tensor


@gluon.jit
def normalizer(shift, total):
    """Return the `Normalizer` of the sum of exponentials below a shift."""
    shift, log_total = finite_shift(shift), log_exact(total) * LOG2E
    offset = shift + log_total
    part = offset - shift
    return Normalizer(offset, (shift - (offset - part)) + (log_total - part))


@gluon.jit
def normalizers(shift, total, t_shift, t_total):
    """Return the normalizers of both rows, given shifts and totals of some parts, `[PARTS]`."""
    of_row, t_of_row = gl.reduce((shift, t_shift), 0, max_of_pairs)
    total *= gl.exp2(shift - finite_shift(of_row))
    t_total *= gl.exp2(t_shift - finite_shift(t_of_row))
    total, t_total = gl.reduce((total, t_total), 0, sum_of_pairs)
    return (of_row, total), (t_of_row, t_total)


@gluon.jit
def lane_shift(
    part,
    numbers,
    DTYPE: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    BLOCKS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Return the greatest exponent of each thread, -inf for a thread without classes."""
    shift = gl.full([32 * gl.num_warps()], -float("inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    for k in gl.static_range(BLOCKS):
        words = greatest_word(part[k], DTYPE)
        low, high = logits_of(words, numbers.cap, DTYPE, HAS_SOFTCAP)
        greatest = gl.maximum(low, high)
        if k == BLOCKS - 1:
            greatest = gl.where(first_words(k, LAYOUT) < numbers.words, greatest, -float("inf"))
        shift = gl.maximum(shift, greatest)
    # The shift stands in each exponent as a rounded number, so no difference of shifts may have the
    # product before it is rounded, which the compiler puts there for a plain product.
    return gl.fma(shift, numbers.log2_scale, 0.0)


@gluon.jit
def lane_sum(terms, k: gl.constexpr, numbers, BLOCKS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return each thread's sum of the terms of block k, without those past the last class."""
    total = gl.sum(terms, axis=1)
    if k == BLOCKS - 1:
        total = gl.where(first_words(k, LAYOUT) < numbers.words, total, 0.0)
    return total


@gluon.jit
def shift_and_total(
    part,
    numbers,
    DTYPE: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    BLOCKS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Return the greatest exponent of each thread, and its sum of exponentials below that."""
    shift = lane_shift(part, numbers, DTYPE, HAS_SOFTCAP, BLOCKS, LAYOUT)
    total = gl.zeros([32 * gl.num_warps()], gl.float32, gl.SliceLayout(1, LAYOUT))
    of_lane = gl.expand_dims(finite_shift(shift), 1)
    for k in gl.static_range(BLOCKS):
        low, high = logits_of(part[k], numbers.cap, DTYPE, HAS_SOFTCAP)
        terms = gl.exp2(exponent(low, of_lane, numbers)) + gl.exp2(exponent(high, of_lane, numbers))
        total += lane_sum(terms, k, numbers, BLOCKS, LAYOUT)
    return shift, total


@gluon.jit
def log2_of_positive(x):
    """Return the base-2 logarithm of normal numbers by one instruction."""
    asm: gl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def ratios_of_classes(x, t, of_row, t_of_row, scales, numbers):
    """Return log2(p / m) of classes, and their terms in both divergences from the mixture m.

    p and q are without what the offsets lost; m is not, as `scales` makes up for that.
    """
    log_p = at_least(exponent(x, of_row.offset, numbers), LOWEST)
    log_q = at_least(exponent(t, t_of_row.offset, numbers), LOWEST)
    p, q = gl.exp2(log_p), gl.exp2(log_q)
    # The smallest normal number is added because the logarithm of 0 is infinite.
    log_m = log2_of_positive(gl.fma(scales[1], q, gl.fma(scales[0], p, SMALLEST)))
    ratio = log_p - log_m
    return ratio, p * ratio, q * (log_q - log_m)


@gluon.jit
def mix_part(
    student,
    teacher,
    ratios,
    of_row,
    t_of_row,
    numbers,
    DTYPE: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    BLOCKS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Store log2(p / m) of a part in shared memory, and return its terms in both divergences."""
    total = gl.zeros([32 * gl.num_warps()], gl.float32, gl.SliceLayout(1, LAYOUT))
    t_total, weight = total, numbers.weight
    scales = ((1.0 - weight) * gl.exp2(-of_row.lost), weight * gl.exp2(-t_of_row.lost))
    for k in gl.static_range(BLOCKS):
        x = logits_of(student[k], numbers.cap, DTYPE, HAS_SOFTCAP)
        t = logits_of(teacher[k], numbers.cap, DTYPE, HAS_SOFTCAP)
        low = ratios_of_classes(x[0], t[0], of_row, t_of_row, scales, numbers)
        high = ratios_of_classes(x[1], t[1], of_row, t_of_row, scales, numbers)
        ratios[2 * k].store(low[0])
        ratios[2 * k + 1].store(high[0])
        total += lane_sum(low[1] + high[1], k, numbers, BLOCKS, LAYOUT)
        t_total += lane_sum(low[2] + high[2], k, numbers, BLOCKS, LAYOUT)
    return gl.reduce((total, t_total), 0, sum_of_pairs)


@gluon.jit
def divergence_of_sum(total, of_row):
    """Return a row's divergence from the mixture in units of log 2, given the sum of its terms."""
    return gl.exp2(-of_row.lost) * total - of_row.lost


@gluon.jit
def gradient_of_classes(x, ratio, factors, of_row, numbers, HAS_SOFTCAP: gl.constexpr):
    """Return the gradient in the student's logits x, given log2(p / m) and two factors of it."""
    p = gl.exp2(exponent(x, of_row.offset, numbers))
    grad = p * gl.fma(ratio, factors[0], factors[1])
    if HAS_SOFTCAP:
        grad *= (1.0 - x / numbers.cap) * (1.0 + x / numbers.cap)
    return grad


@gluon.jit
def store_gradient(
    student,
    ratios,
    d_ptr,
    on_row,
    divergence,
    of_row,
    numbers,
    DTYPE: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    BLOCKS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Store the gradient of a part of the student's logits.

    `divergence` is that of its row from the mixture in units of log 2.
    """
    scale = on_row * (1.0 - numbers.weight) * LN2 * gl.exp2(-of_row.lost)
    factors = (scale, -scale * (of_row.lost + divergence))
    for k in gl.static_range(BLOCKS):
        x = logits_of(student[k], numbers.cap, DTYPE, HAS_SOFTCAP)
        ratio, next_ratio = ratios[2 * k].load(LAYOUT), ratios[2 * k + 1].load(LAYOUT)
        low = gradient_of_classes(x[0], ratio, factors, of_row, numbers, HAS_SOFTCAP)
        high = gradient_of_classes(x[1], next_ratio, factors, of_row, numbers, HAS_SOFTCAP)
        store_block(d_ptr, words_of(low, high, DTYPE), numbers.words, k, LAYOUT)


@gluon.jit
def store_zeros(d_ptr, numbers, BLOCKS: gl.constexpr, LAYOUT: gl.constexpr):
    """Store the gradient of a part of a row that does not count."""
    SHAPE: gl.constexpr = [32 * gl.num_warps(), 4]
    for k in gl.static_range(BLOCKS):
        store_block(d_ptr, gl.zeros(SHAPE, gl.int32, LAYOUT), numbers.words, k, LAYOUT)
