"""The kernel that computes divergence and gradient with one read of both rows and one write.

A program has a part of both rows. It reads the part for the statistics, exchanges these with the
other programs of the row, and reads it again from the cache for the gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E, finite_shift, reciprocal
from ....primitives.gpu.memory import aligned_start
from .mixture import (
    load_part,
    mixture_divergences,
    mixture_row,
    mixture_share,
    store_mixture_gradients,
)
from .pair_part import (
    NOTHING,
    PairPart,
    exchange_shares,
    exchange_sums,
    exponent,
    load_both,
    part_statistics,
    store_gradient,
    unmasked_end,
)
from .rows import MIXTURE, REVERSE


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
def store_block(
    part,
    share,
    start,
    UNMASKED: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the gradient of a block of the student's logits in the forward or the reverse KL."""
    v, x, t = load_both(part, start, UNMASKED, NOTHING, HAS_SOFTCAP, FAST, VEC, BLOCK)
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
    store_gradient(part, v, x, grad, UNMASKED, HAS_SOFTCAP, VEC)


@triton.jit
def store_gradients(
    part,
    share,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the gradient of a part of the student's logits in the forward or the reverse KL."""
    last = unmasked_end(part, BLOCK)
    for start in range(part.first, last, BLOCK):
        store_block(part, share, start, True, KIND, HAS_SOFTCAP, FAST, VEC, BLOCK)
    for start in range(last, part.last, BLOCK):
        store_block(part, share, start, False, KIND, HAS_SOFTCAP, FAST, VEC, BLOCK)


@triton.jit
def store_zeros(part, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Store the gradient of a part of a row that does not count."""
    for start in range(part.first, part.last, BLOCK):
        v = start + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], part.d_ptr.dtype.element_ty)
        tl.store(part.d_ptr + v, zeros, mask=v // VEC * VEC < part.last)


@triton.jit
def kl_of_part(
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
    """Return the forward or the reverse KL of a row, and store the gradient of a part of it."""
    share = part_statistics(part, KIND, HAS_SOFTCAP, FAST, VEC, LANES, BLOCK)
    if SHARED:
        share = exchange_shares(share, slots_ptr, split, splits, KIND, BLOCK_SPLITS)
    store_gradients(part, share, KIND, HAS_SOFTCAP, FAST, VEC, BLOCK)
    loss = 0.0
    if split == 0:
        loss = kl_of_row(share, KIND)
    return loss


@triton.jit
def mixture_of_part(
    part,
    slots_ptr,
    split,
    splits,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the divergence of a row from its mixture, and store the gradient of a part of it."""
    x = load_part(part.x_ptr, part, VEC, BLOCKS, BLOCK)
    t = load_part(part.t_ptr, part, VEC, BLOCKS, BLOCK)
    share = mixture_share(x, t, part, HAS_SOFTCAP, FAST, VEC, LANES, BLOCK)
    if SHARED:
        share = exchange_shares(share, slots_ptr, split, splits, MIXTURE, BLOCK_SPLITS)
    row = mixture_row(share, part)
    student, teacher, probabilities, ratios = mixture_divergences(
        x, t, part, row, HAS_SOFTCAP, FAST
    )
    if SHARED:
        slots_ptr += 2 * splits
        student, teacher = exchange_sums(slots_ptr, split, splits, student, teacher, BLOCK_SPLITS)
    student = (student - row.rest) * tl.exp2(-row.rest)
    teacher = (teacher - row.t_rest) * tl.exp2(-row.t_rest)
    store_mixture_gradients(
        x, probabilities, ratios, part, row, student, HAS_SOFTCAP, FAST, VEC, BLOCK
    )
    return (part.weight * teacher + (1.0 - part.weight) * student) * LN2


@triton.jit
def divergence_of_row(
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
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the divergence of a row, and store the gradient of this program's part of it.

    A row whose factor is 0 is not read, and its divergence and gradient are 0.
    """
    loss = 0.0
    share = (part, slots_ptr, split, splits)
    if part.on_row == 0.0:
        store_zeros(part, VEC, BLOCK)
    elif KIND == MIXTURE:
        loss = mixture_of_part(
            *share, HAS_SOFTCAP, FAST, SHARED, BLOCK_SPLITS, VEC, LANES, BLOCKS, BLOCK
        )
    else:
        loss = kl_of_part(*share, KIND, HAS_SOFTCAP, FAST, SHARED, BLOCK_SPLITS, VEC, LANES, BLOCK)
    return loss


@triton.jit
def divergence_row_kernel(
    logits_ptr,  # [M, C]
    teacher_ptr,  # [M, C]
    row_factor_ptr,  # [M] the derivative of the result in each row's loss, or None for `factor`
    slots_ptr,  # [1 + 3 * M * splits] int64, zero: the counter, then three slots for each program
    loss_ptr,  # [M]
    dlogits_ptr,  # [M, C]
    rows,
    classes,
    splits,  # programs that share a row
    rows_per_program,
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
    BLOCKS: tl.constexpr,  # of a part that stays in registers
    BLOCK: tl.constexpr,
):
    """Compute divergence and gradient of some rows with one read of both logits and one write.

    Where rows are SHARED, `splits` programs have a part of each of them.
    """
    index = tl.program_id(0).to(tl.int64)
    if SHARED:  # In the order of the counter, parts that a program waits for are under way.
        index = tl.atomic_add(slots_ptr, 1, sem="relaxed")
    split = (index % splits).to(tl.int32)
    inverse = reciprocal(tl.full([], temperature, tl.float32))
    cap, weight = tl.full([], softcap, tl.float32), tl.full([], beta, tl.float32)
    on_row, first = tl.full([], factor, tl.float32), split * classes_per_program
    last = tl.minimum(first + classes_per_program, classes)
    start = index // splits * rows_per_program
    for row in range(start, tl.minimum(start + rows_per_program, rows)):
        if row_factor_ptr is not None:
            on_row = tl.load(row_factor_ptr + row).to(tl.float32)
        part = PairPart(
            logits_ptr + aligned_start(row * logits_row, VEC),
            teacher_ptr + aligned_start(row * teacher_row, VEC),
            dlogits_ptr + aligned_start(row * dlogits_row, VEC),
            first,
            last,
            cap,
            weight,
            LOG2E * inverse,
            on_row * inverse,
        )
        slots = slots_ptr
        if SHARED:
            slots = slots_ptr + 1 + row * 3 * splits
        loss = divergence_of_row(
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
            BLOCKS,
            BLOCK,
        )
        tl.store(loss_ptr + row, loss, mask=split == 0)
