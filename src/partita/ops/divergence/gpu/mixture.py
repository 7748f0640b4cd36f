"""The divergences of both rows from their mixture, and their gradient, over a part of the rows.

The logits of a part stay in registers, as they are in memory, from which they are read once. After
the exchange of the sums of exponentials, the probabilities of the student and their ratios to the
mixture take their registers, until the exchange of the divergences allows for the gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E, apply_softcap, finite_shift, log_exact
from ....primitives.gpu.reduce import by_lane
from .pair_part import (
    LARGEST,
    NOTHING,
    PairShare,
    exponent,
    in_fp32,
    merged_shares,
    scan_part,
    store_gradient,
    sum_by_lane,
    sum_of_both,
)
from .rows import MIXTURE

SMALLEST = tl.constexpr(2.0**-126)
NO_LOG = tl.constexpr(-1000.0)  # the base-2 logarithm of a probability of 0


class MixtureRow(NamedTuple):
    """What turns the logits of both rows into probabilities.

    A class has the exponent a = x * log2_scale - shift, and p = exp2(a - rest) is its probability.
    The scans compute exp2(a) only; `rest` is what rounding takes from the shift.

    Fields:
        shift, rest: the base-2 logarithm of the sum of the student's row, in two parts.
        t_shift, t_rest: those of the teacher.
        weight, t_weight: the factors of exp2(a) of student and teacher in the mixture.
    """

    shift: Any
    rest: Any
    t_shift: Any
    t_rest: Any
    weight: Any
    t_weight: Any


@triton.jit
def first_exponent(row_ptr, part, HAS_SOFTCAP: tl.constexpr):
    """Return the exponent of a part's first class, to which its plain sum is relative."""
    x = tl.load(row_ptr + part.first).to(tl.float32)
    return apply_softcap(x, part.cap, HAS_SOFTCAP) * part.log2_scale


@triton.jit
def load_part(row_ptr, part, VEC: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the logits of a part as a tuple of blocks, -inf past the last class."""
    lane = tl.arange(0, BLOCK)[None, :]
    nothing = tl.full([1, BLOCK], NOTHING, tl.float32).to(row_ptr.dtype.element_ty)
    blocks = ()
    for _ in tl.static_range(BLOCKS):
        blocks = blocks + (nothing,)
    if part.last - part.first == BLOCKS * BLOCK:
        whole = ()
        for i in tl.static_range(BLOCKS):
            whole = whole + (tl.load(row_ptr + (part.first + i * BLOCK + lane)),)
        blocks = whole
    else:
        cut = ()
        for i in tl.static_range(BLOCKS):
            v = part.first + i * BLOCK + lane
            x = tl.load(row_ptr + v, mask=v // VEC * VEC < part.last, other=0.0)
            cut = cut + (tl.where(v < part.last, x, nothing),)
        blocks = cut
    return blocks


@triton.jit
def capped(x, part, HAS_SOFTCAP: tl.constexpr, FAST: tl.constexpr):
    """Return a block of logits in fp32, soft-capped; a class that there is not has -inf."""
    x = in_fp32(x, FAST)
    if HAS_SOFTCAP:
        return tl.where(x == NOTHING, x, apply_softcap(x, part.cap, HAS_SOFTCAP))
    else:
        return x


@triton.jit
def mixture_share(
    x,
    t,
    part,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the `PairShare` of a part, from a careful scan if the plain sums are not sound.

    Plain sums are relative to the first class, whose term is 1, so they are never 0.
    """
    shift = first_exponent(part.x_ptr, part, HAS_SOFTCAP)
    t_shift = first_exponent(part.t_ptr, part, HAS_SOFTCAP)
    total, t_total = tl.zeros([1, LANES], tl.float32), tl.zeros([1, LANES], tl.float32)
    VECTOR: tl.constexpr = 1 if LANES == 1 else VEC
    for i in tl.static_range(len(x)):
        e = tl.exp2(exponent(capped(x[i], part, HAS_SOFTCAP, FAST), shift, part))
        t_e = tl.exp2(exponent(capped(t[i], part, HAS_SOFTCAP, FAST), t_shift, part))
        total += sum_by_lane(by_lane(e, LANES, VECTOR))
        t_total += sum_by_lane(by_lane(t_e, LANES, VECTOR))
    total, t_total = sum_of_both(total, t_total)
    is_sound = (total < LARGEST) & (t_total < LARGEST)
    is_sound &= (shift > -float("inf")) & (t_shift > -float("inf"))
    if not is_sound:
        zero, lowest = tl.zeros([1, LANES], tl.float32), tl.full([1, LANES], NOTHING, tl.float32)
        careful = PairShare(lowest, zero, lowest, zero, zero)
        careful = scan_part(careful, part, True, MIXTURE, HAS_SOFTCAP, FAST, VEC, LANES, BLOCK)
        merged = merged_shares(careful, MIXTURE)
        shift, total = merged.shift, merged.total
        t_shift, t_total = merged.t_shift, merged.t_total
    return PairShare(shift, total, t_shift, t_total, 0.0)


@triton.jit
def exact_sum(a, b):
    """Return a + b rounded, and what rounding took from it."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@triton.jit
def log2_of_sum(shift, total):
    """Return shift + log2(total), and what rounding took from it.

    The exponent of the sum, which may be large, is added without its rounding error.
    """
    power = (total.to(tl.int32, bitcast=True) >> 23) - 127
    power = tl.where(total < float("inf"), power, 0)
    fraction = total * tl.exp2(-power.to(tl.float32))
    whole, first_rest = exact_sum(finite_shift(shift), power.to(tl.float32))
    result, rest = exact_sum(whole, log_exact(fraction) * LOG2E)
    return result, rest + first_rest


@triton.jit
def mixture_row(share, part):
    """Return the `MixtureRow` of the statistics of both rows."""
    shift, rest = log2_of_sum(share.shift, share.total)
    t_shift, t_rest = log2_of_sum(share.t_shift, share.t_total)
    weight = (1.0 - part.weight) * tl.exp2(-rest)
    return MixtureRow(shift, rest, t_shift, t_rest, weight, part.weight * tl.exp2(-t_rest))


@triton.jit
def at_least(x, bound):
    """Return the greater of x and a bound, and NaN for NaN."""
    return tl.maximum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log2_of_mixture(m, FAST: tl.constexpr):
    """Return the base-2 logarithm of probabilities, with FAST by one instruction."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [m], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(m)


@triton.jit
def mixture_of_block(x, t, part, row, FAST: tl.constexpr):
    """Return exp2(a), exp2(b), and the differences of a and b to the logarithm of the mixture.

    The differences are finite if p or q is 0.
    """
    a, b = exponent(x, row.shift, part), exponent(t, row.t_shift, part)
    p, q = tl.exp2(a), tl.exp2(b)
    # The smallest normal number stands for all below it.
    log_m = log2_of_mixture(at_least(p * row.weight + q * row.t_weight, SMALLEST), FAST)
    return p, q, at_least(a, NO_LOG) - log_m, at_least(b, NO_LOG) - log_m


@triton.jit
def mixture_divergences(x, t, part, row, HAS_SOFTCAP: tl.constexpr, FAST: tl.constexpr):
    """Return the terms of a part in the divergences of both rows from their mixture.

    They are in units of log 2, and those of `rest` are missing. The other results are exp2(a) of
    the student and its ratio to the mixture, as tuples of blocks.
    """
    student = tl.zeros(x[0].shape, tl.float32)
    teacher = tl.zeros(x[0].shape, tl.float32)
    probabilities, ratios = (), ()
    for i in tl.static_range(len(x)):
        x_i, t_i = capped(x[i], part, HAS_SOFTCAP, FAST), capped(t[i], part, HAS_SOFTCAP, FAST)
        p, q, ratio, t_ratio = mixture_of_block(x_i, t_i, part, row, FAST)
        student += p * ratio
        teacher += q * t_ratio
        probabilities, ratios = probabilities + (p,), ratios + (ratio,)
    student, teacher = sum_of_both(student, teacher)
    return student, teacher, probabilities, ratios


@triton.jit
def store_mixture_gradients(
    x,
    probabilities,
    ratios,
    part,
    row,
    student,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the gradient of a part of the student's logits.

    `student` is the divergence of its row from the mixture in units of log 2.
    """
    factor, mean = part.on_row * LN2 * row.weight, student + row.rest
    is_whole = part.last - part.first == len(x) * BLOCK
    for i in tl.static_range(len(x)):
        v = (part.first + i * BLOCK + tl.arange(0, BLOCK))[None, :]
        x_i = capped(x[i], part, HAS_SOFTCAP, FAST)
        grad = (probabilities[i] * factor) * (ratios[i] - mean)
        store_gradient(part, v, x_i, grad, is_whole, HAS_SOFTCAP, VEC)
