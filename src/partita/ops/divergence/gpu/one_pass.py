"""The kernel that computes divergence and gradient with one read of both rows and one write.

A program holds a part of both rows in registers. The programs of a row exchange their statistics
through memory; see primitives/gpu/sync.py. All exponents are of base 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E, apply_softcap, finite_shift, log_exact, reciprocal
from ....primitives.gpu.memory import (
    aligned_start,
    fp32_of_half,
    load_streaming,
    store_streaming,
)
from ....primitives.gpu.sync import collect_pairs, exchange_pairs, store_pair
from ....runtime.backend import interpreting
from .rows import MIXTURE, REVERSE

SMALLEST = tl.constexpr(2.0**-126)
# The interpreter calls a function of a reduction for each element, which takes it minutes.
INTERPRETED = tl.constexpr(interpreting())


class PairPart(NamedTuple):
    """A part of both rows as loaded, and the options of the call.

    Fields:
        x, t: the logits of student and teacher, `[BLOCK]`.
        mask: which classes the part has, `[BLOCK]`.
        zero: 0.0, which the compiler does not know.
        cap: the soft-cap.
        weight: beta.
        log2_scale: the factor of logits in exponents.
    """

    x: Any
    t: Any
    mask: Any
    zero: Any
    cap: Any
    weight: Any
    log2_scale: Any


class PairShare(NamedTuple):
    """The statistics of both rows over a part, or over all classes.

    A class has the exponent a = x * log2_scale - shift, where the shift is a rounded number. It
    stands in each exponent of the row, so the rounding cancels in probabilities.

    Fields:
        shift, total: the maximum of x * log2_scale, and the sum of the exponentials of a.
        t_shift, t_total: those of the teacher.
        weighted: for the forward KL, the sum of exp2(b) * (b - a) with the teacher's exponents b;
            for the reverse KL, of exp2(a) * (a - b); otherwise 0.
    """

    shift: Any
    total: Any
    t_shift: Any
    t_total: Any
    weighted: Any


@triton.jit
def fp32_logits(logits, part, AGAIN: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Return soft-capped logits in fp32; with AGAIN, converted again from those of a half type."""
    if AGAIN:
        x = fp32_of_half(logits, part.zero)
    else:
        x = logits.to(tl.float32)
    if HAS_SOFTCAP:
        x = tl.where(part.mask, apply_softcap(x, part.cap, HAS_SOFTCAP), -float("inf"))
    return x


@triton.jit
def both_logits(part, AGAIN: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Return the soft-capped logits of student and teacher in fp32."""
    return (
        fp32_logits(part.x, part, AGAIN, HAS_SOFTCAP),
        fp32_logits(part.t, part, AGAIN, HAS_SOFTCAP),
    )


@triton.jit
def max_of_pairs(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def sum_of_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_of_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def max_of_both(x, t):
    """Return two maxima by one exchange between the threads."""
    if INTERPRETED:
        return tl.max(x), tl.max(t)
    else:
        return tl.reduce((x, t), 0, max_of_pairs)


@triton.jit
def sum_of_both(x, t):
    """Return two sums by one exchange between the threads."""
    if INTERPRETED:
        return tl.sum(x), tl.sum(t)
    else:
        return tl.reduce((x, t), 0, sum_of_pairs)


@triton.jit
def sum_of_three(x, t, terms):
    """Return three sums by one exchange between the threads."""
    if INTERPRETED:
        return tl.sum(x), tl.sum(t), tl.sum(terms)
    else:
        return tl.reduce((x, t, terms), 0, sum_of_triples)


@triton.jit
def exponent(x, shift, part):
    """Return the exponents of classes, from their logits and the shift of their row."""
    return tl.fma(x, part.log2_scale, -finite_shift(shift))


@triton.jit
def part_statistics(part, KIND: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HALF: tl.constexpr):
    """Return the `PairShare` of a part."""
    x, t = both_logits(part, False, HAS_SOFTCAP)
    maximum, t_maximum = max_of_both(x, t)
    shift, t_shift = maximum * part.log2_scale, t_maximum * part.log2_scale
    x, t = both_logits(part, HALF, HAS_SOFTCAP)
    a, b = exponent(x, shift, part), exponent(t, t_shift, part)
    e, t_e = tl.exp2(a), tl.exp2(b)
    if KIND == MIXTURE:
        total, t_total = sum_of_both(e, t_e)
        return PairShare(shift, total, t_shift, t_total, 0.0)
    else:
        if KIND == REVERSE:  # A class of probability 0 counts as 0, even with infinite logits.
            terms = tl.where(e == 0.0, 0.0, e * (a - b))
        else:
            terms = tl.where(t_e == 0.0, 0.0, t_e * (b - a))
        total, t_total, weighted = sum_of_three(e, t_e, terms)
        return PairShare(shift, total, t_shift, t_total, weighted)


@triton.jit
def merge_parts(share, slots_ptr, split, splits, KIND: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """Return the `PairShare` of a row from those of its parts, which programs exchange."""
    store_pair(slots_ptr, split, share.shift, share.total)
    store_pair(slots_ptr + splits, split, share.t_shift, share.t_total)
    if KIND != MIXTURE:
        store_pair(slots_ptr + 2 * splits, split, share.weighted, share.weighted)
    shifts, totals = collect_pairs(slots_ptr, splits, BLOCK_SPLITS)
    t_shifts, t_totals = collect_pairs(slots_ptr + splits, splits, BLOCK_SPLITS)
    valid = tl.arange(0, BLOCK_SPLITS) < splits
    shifts = tl.where(valid, shifts, -float("inf"))
    t_shifts = tl.where(valid, t_shifts, -float("inf"))
    shift, t_shift = max_of_both(shifts, t_shifts)
    moved, t_moved = shifts - finite_shift(shift), t_shifts - finite_shift(t_shift)
    scale, t_scale = tl.exp2(moved), tl.exp2(t_moved)
    total = tl.where(valid, totals * scale, 0.0)
    t_total = tl.where(valid, t_totals * t_scale, 0.0)
    if KIND == MIXTURE:
        total, t_total = sum_of_both(total, t_total)
        return PairShare(shift, total, t_shift, t_total, 0.0)
    else:
        weighted, _ = collect_pairs(slots_ptr + 2 * splits, splits, BLOCK_SPLITS)
        # A part of which one row has no class has no shift there.
        moved, t_moved = finite_shift(moved), finite_shift(t_moved)
        if KIND == REVERSE:
            weighted = scale * (weighted + totals * (moved - t_moved))
            vanishes = (scale == 0.0) | ~valid
        else:
            weighted = t_scale * (weighted + t_totals * (t_moved - moved))
            vanishes = (t_scale == 0.0) | ~valid
        weighted = tl.where(vanishes, 0.0, weighted)
        total, t_total, weighted = sum_of_three(total, t_total, weighted)
        return PairShare(shift, total, t_shift, t_total, weighted)


@triton.jit
def kl_of_row(share, KIND: tl.constexpr):
    """Return the forward or the reverse KL of a row in nats, in fp64 before it is rounded."""
    total, t_total = share.total.to(tl.float64), share.t_total.to(tl.float64)
    weighted = share.weighted.to(tl.float64) * 0.6931471805599453
    if KIND == REVERSE:
        return (weighted / total + tl.log(t_total / total)).to(tl.float32)
    else:
        return (weighted / t_total + tl.log(total / t_total)).to(tl.float32)


@triton.jit
def log2_of_mixture(m, HALF: tl.constexpr):
    """Return the base-2 logarithm of probabilities, for results of a half type by one instruction.

    The smallest normal number stands for all below it, because the instruction knows none of them.
    """
    if HALF:
        m = tl.maximum(m, SMALLEST, propagate_nan=tl.PropagateNan.ALL)
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [m], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(m)


@triton.jit
def mixture_of_part(
    part, share, AGAIN: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HALF: tl.constexpr
):
    """Return p, q, log2(p / m) and log2(q / m), where m is the mixture; 0 where p or q is 0."""
    x, t = both_logits(part, AGAIN, HAS_SOFTCAP)
    log_p = exponent(x, share.shift, part) - log_exact(share.total) * LOG2E
    log_q = exponent(t, share.t_shift, part) - log_exact(share.t_total) * LOG2E
    p, q = tl.exp2(log_p), tl.exp2(log_q)
    log_m = log2_of_mixture(part.weight * q + (1.0 - part.weight) * p, HALF)
    ratio = tl.where(p == 0.0, 0.0, log_p - log_m)
    return p, q, ratio, tl.where(q == 0.0, 0.0, log_q - log_m)


@triton.jit
def mixture_divergences(
    part,
    share,
    slots_ptr,
    split,
    splits,
    HAS_SOFTCAP: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Return the divergences of student and teacher from their mixture, in units of log 2."""
    p, q, ratio, t_ratio = mixture_of_part(part, share, HALF, HAS_SOFTCAP, HALF)
    student, teacher = sum_of_both(p * ratio, q * t_ratio)
    if SHARED:
        students, teachers = exchange_pairs(
            slots_ptr + 2 * splits, split, splits, student, teacher, BLOCK_SPLITS
        )
        valid = tl.arange(0, BLOCK_SPLITS) < splits
        students, teachers = tl.where(valid, students, 0.0), tl.where(valid, teachers, 0.0)
        student, teacher = sum_of_both(students, teachers)
    return student, teacher


@triton.jit
def part_gradient(
    part,
    share,
    student,
    on_row,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HALF: tl.constexpr,
):
    """Return the gradient of the student's logits of a part, `[BLOCK]`.

    `on_row` is the gradient of the loss over the temperature, and `student` the divergence from the
    mixture in units of log 2.
    """
    x, t = both_logits(part, HALF, HAS_SOFTCAP)
    if KIND == MIXTURE:
        p, _, ratio, _ = mixture_of_part(part, share, HALF, HAS_SOFTCAP, HALF)
        grad = (on_row * (1.0 - part.weight) * LN2) * p * (ratio - student)
    else:
        a, b = exponent(x, share.shift, part), exponent(t, share.t_shift, part)
        e = tl.exp2(a)
        on_student = on_row * reciprocal(share.total)
        if KIND == REVERSE:
            # The logarithms of the sums cancel between the ratio of a class and its mean.
            terms = e * (a - b - share.weighted * reciprocal(share.total))
            grad = (on_student * LN2) * tl.where(e == 0.0, 0.0, terms)
        else:
            grad = e * on_student - tl.exp2(b) * (on_row * reciprocal(share.t_total))
    if HAS_SOFTCAP:
        grad *= (1.0 - x / part.cap) * (1.0 + x / part.cap)
    return grad


@triton.jit
def divergence_row_kernel(
    logits_ptr,  # [M, C]
    teacher_ptr,  # [M, C]
    row_factor_ptr,  # [M] the derivative of the result in the loss of each row, or None for `factor`
    slots_ptr,  # [1 + 3 * M * splits] int64, zero: the counter, then three slots for each program
    loss_ptr,  # [M]
    dlogits_ptr,  # [M, C]
    classes,
    splits,  # programs that share a row
    logits_row,  # strides
    teacher_row,
    dlogits_row,
    factor: tl.float64,
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    zero,  # 0.0, which the compiler does not know
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute divergence and gradient of one row with one read of both logits and one write.

    Where the row is SHARED, `splits` programs have a part of it each. A row whose factor is 0 is
    not read, and its loss and gradient are 0.
    """
    index = tl.program_id(0).to(tl.int64)
    if SHARED:  # In the order of the counter, parts that a program waits for are under way.
        index = tl.atomic_add(slots_ptr, 1, sem="relaxed")
    row, split = index // splits, (index % splits).to(tl.int32)
    on_row = tl.full([], factor, tl.float32)
    if row_factor_ptr is not None:
        on_row = tl.load(row_factor_ptr + row).to(tl.float32)
    v = split * BLOCK + tl.arange(0, BLOCK)
    in_row = v // VEC * VEC < classes
    mask = v // VEC * VEC < tl.where(on_row == 0.0, 0, classes)
    x_ptrs = logits_ptr + aligned_start(row * logits_row, VEC) + v
    t_ptrs = teacher_ptr + aligned_start(row * teacher_row, VEC) + v
    inverse = reciprocal(tl.full([], temperature, tl.float32))
    part = PairPart(
        load_streaming(x_ptrs, mask, -float("inf"), SHARED),
        load_streaming(t_ptrs, mask, -float("inf"), SHARED),
        mask,
        zero,
        tl.full([], softcap, tl.float32),
        tl.full([], beta, tl.float32),
        LOG2E * inverse,
    )
    share = part_statistics(part, KIND, HAS_SOFTCAP, HALF)
    slots = slots_ptr
    if SHARED:
        slots = slots_ptr + 1 + row * 3 * splits
        share = merge_parts(share, slots, split, splits, KIND, BLOCK_SPLITS)
    student, teacher = 0.0, 0.0
    if KIND == MIXTURE:
        student, teacher = mixture_divergences(
            part, share, slots, split, splits, HAS_SOFTCAP, HALF, SHARED, BLOCK_SPLITS
        )
    grad = part_gradient(part, share, student, on_row * inverse, KIND, HAS_SOFTCAP, HALF)
    d_ptrs = dlogits_ptr + aligned_start(row * dlogits_row, VEC) + v
    if on_row != 0.0:  # One branch for the row costs less than a select for each class.
        store_streaming(d_ptrs, grad, in_row, SHARED)
    else:
        store_streaming(d_ptrs, tl.zeros_like(grad), in_row, SHARED)
    if split == 0:
        if KIND == MIXTURE:
            loss = (part.weight * teacher + (1.0 - part.weight) * student) * LN2
        else:
            loss = kl_of_row(share, KIND)
        tl.store(loss_ptr + row, tl.where(on_row == 0.0, 0.0, loss))
