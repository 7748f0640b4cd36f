"""The kernel that computes divergence and gradient with one read of both rows and one write.

A program has a part of both rows. It reads the part for the statistics, exchanges these with the
other programs of the row, and reads it again from the cache for the gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E, finite_shift, log_exact, reciprocal
from ....primitives.gpu.memory import aligned_start
from ....primitives.gpu.sync import next_part
from .pair_part import (
    NOTHING,
    READ_AGAIN,
    READ_LAST,
    PairPart,
    exchange_shares,
    exchange_sums,
    exponent,
    load_both,
    part_statistics,
    sum_of_both,
    unmasked_end,
)
from .rows import MIXTURE, REVERSE

SMALLEST = tl.constexpr(2.0**-126)
NO_LOG = tl.constexpr(-1000.0)  # the base-2 logarithm of a probability of 0


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
def at_least(x, bound):
    """Return the greater of x and a bound, and NaN for NaN."""
    return tl.maximum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log2_of_mixture(m, FAST: tl.constexpr):
    """Return the base-2 logarithm of probabilities, with FAST by one instruction.

    The smallest normal number stands for all below it.
    """
    m = at_least(m, SMALLEST)
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [m], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(m)


@triton.jit
def mixture_of_block(x, t, part, share, FAST: tl.constexpr):
    """Return p, q, log2(p / m) and log2(q / m), where m is the mixture; finite if p or q is 0."""
    log_p = exponent(x, finite_shift(share.shift), part) - log_exact(share.total) * LOG2E
    log_q = exponent(t, finite_shift(share.t_shift), part) - log_exact(share.t_total) * LOG2E
    p, q = tl.exp2(log_p), tl.exp2(log_q)
    log_m = log2_of_mixture(part.weight * q + (1.0 - part.weight) * p, FAST)
    return p, q, at_least(log_p, NO_LOG) - log_m, at_least(log_q, NO_LOG) - log_m


@triton.jit
def add_mixture(
    student,
    teacher,
    part,
    share,
    start,
    UNMASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one block of classes to the divergences of both rows from their mixture."""
    _, x, t = load_both(part, start, UNMASKED, NOTHING, HAS_SOFTCAP, FAST, READ_AGAIN, VEC, BLOCK)
    p, q, ratio, t_ratio = mixture_of_block(x, t, part, share, FAST)
    return student + p * ratio, teacher + q * t_ratio


@triton.jit
def mixture_divergences(
    part,
    share,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the terms of a part in the divergences of both rows from their mixture.

    They are in units of log 2.
    """
    student, teacher = tl.zeros([1, BLOCK], tl.float32), tl.zeros([1, BLOCK], tl.float32)
    last = unmasked_end(part, BLOCK)
    for start in range(part.first, last, BLOCK):
        student, teacher = add_mixture(
            student, teacher, part, share, start, True, HAS_SOFTCAP, FAST, VEC, BLOCK
        )
    for start in range(last, part.last, BLOCK):
        student, teacher = add_mixture(
            student, teacher, part, share, start, False, HAS_SOFTCAP, FAST, VEC, BLOCK
        )
    return sum_of_both(student, teacher)


@triton.jit
def store_block(
    part,
    share,
    student,
    start,
    UNMASKED: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the gradient of a block of the student's logits.

    `student` is its divergence from the mixture in units of log 2.
    """
    v, x, t = load_both(part, start, UNMASKED, NOTHING, HAS_SOFTCAP, FAST, READ_LAST, VEC, BLOCK)
    if KIND == MIXTURE:
        p, _, ratio, _ = mixture_of_block(x, t, part, share, FAST)
        grad = (part.on_row * (1.0 - part.weight) * LN2) * p * (ratio - student)
    else:
        a = exponent(x, finite_shift(share.shift), part)
        b = exponent(t, finite_shift(share.t_shift), part)
        e = tl.exp2(a)
        on_student = part.on_row * reciprocal(share.total)
        if KIND == REVERSE:
            # The logarithms of the sums cancel between the ratio of a class and its mean.
            terms = e * (a - b - share.weighted * reciprocal(share.total))
            grad = (on_student * LN2) * tl.where(e == 0.0, 0.0, terms)
        else:
            grad = e * on_student - tl.exp2(b) * (part.on_row * reciprocal(share.t_total))
    if HAS_SOFTCAP:
        grad *= (1.0 - x / part.cap) * (1.0 + x / part.cap)
    grad = grad.to(part.d_ptr.dtype.element_ty)
    if UNMASKED:
        tl.store(part.d_ptr + v, grad, cache_modifier=".cs")
    else:
        tl.store(part.d_ptr + v, grad, mask=v // VEC * VEC < part.last, cache_modifier=".cs")


@triton.jit
def store_gradients(
    part,
    share,
    student,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the gradient of a part of the student's logits."""
    last = unmasked_end(part, BLOCK)
    for start in range(part.first, last, BLOCK):
        store_block(part, share, student, start, True, KIND, HAS_SOFTCAP, FAST, VEC, BLOCK)
    for start in range(last, part.last, BLOCK):
        store_block(part, share, student, start, False, KIND, HAS_SOFTCAP, FAST, VEC, BLOCK)


@triton.jit
def store_zeros(part, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Store the gradient of a part of a row that does not count."""
    for start in range(part.first, part.last, BLOCK):
        v = start + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], part.d_ptr.dtype.element_ty)
        tl.store(part.d_ptr + v, zeros, mask=v // VEC * VEC < part.last)


@triton.jit
def divergence_of_part(
    part,
    slots_ptr,
    split,
    splits,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the divergence of a row, and store the gradient of this program's part of it."""
    share = part_statistics(part, KIND, HAS_SOFTCAP, FAST, VEC, LANES, BLOCK)
    if SHARED:
        share = exchange_shares(share, slots_ptr, split, splits, KIND, BLOCK_SPLITS)
    student, teacher, loss = 0.0, 0.0, 0.0
    if KIND == MIXTURE:
        student, teacher = mixture_divergences(part, share, HAS_SOFTCAP, FAST, VEC, BLOCK)
        if SHARED:
            slots_ptr += 2 * splits
            student, teacher = exchange_sums(
                slots_ptr, split, splits, student, teacher, BLOCK_SPLITS
            )
        loss = (part.weight * teacher + (1.0 - part.weight) * student) * LN2
    store_gradients(part, share, student, KIND, HAS_SOFTCAP, FAST, VEC, BLOCK)
    if KIND != MIXTURE:
        if split == 0:
            loss = kl_of_row(share, KIND)
    return loss


@triton.jit
def divergence_row_kernel(
    logits_ptr,  # [M, C]
    teacher_ptr,  # [M, C]
    row_factor_ptr,  # [M] the derivative of the result in each row's loss, or None for `factor`
    slots_ptr,  # [1 + 3 * M * splits] int64, zero: the counter, then three slots for each program
    loss_ptr,  # [M]
    dlogits_ptr,  # [M, C]
    classes,
    splits,  # programs that share a row
    classes_per_program,
    logits_row,  # strides
    teacher_row,
    dlogits_row,
    factor: tl.float64,
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute divergence and gradient of one row with one read of both logits and one write.

    Where the row is SHARED, `splits` programs have a part of it each. A row whose factor is 0 is
    not read, and its loss and gradient are 0.
    """
    index, slots = next_part(slots_ptr, SHARED), slots_ptr
    if SHARED:
        slots = slots_ptr + 1 + index // splits * 3 * splits
    row, split = index // splits, (index % splits).to(tl.int32)
    on_row = tl.full([], factor, tl.float32)
    if row_factor_ptr is not None:
        on_row = tl.load(row_factor_ptr + row).to(tl.float32)
    inverse = reciprocal(tl.full([], temperature, tl.float32))
    first = split * classes_per_program
    part = PairPart(
        logits_ptr + aligned_start(row * logits_row, VEC),
        teacher_ptr + aligned_start(row * teacher_row, VEC),
        dlogits_ptr + aligned_start(row * dlogits_row, VEC),
        first,
        tl.minimum(first + classes_per_program, classes),
        tl.full([], softcap, tl.float32),
        tl.full([], beta, tl.float32),
        LOG2E * inverse,
        on_row * inverse,
    )
    loss = 0.0
    if on_row == 0.0:
        store_zeros(part, VEC, BLOCK)
    else:
        loss = divergence_of_part(
            part,
            slots,
            split,
            splits,
            KIND,
            HAS_SOFTCAP,
            FAST,
            SHARED,
            BLOCK_SPLITS,
            VEC,
            LANES,
            BLOCK,
        )
    tl.store(loss_ptr + row, loss, mask=split == 0)
