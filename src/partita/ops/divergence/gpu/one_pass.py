"""The kernel that computes divergence and gradient with one read of both rows and one write.

A program has a part of both rows. It reads the part for the statistics, exchanges these with the
other programs of the row (see primitives/gpu/sync.py), and reads it again from the cache for the
gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, reciprocal
from ....primitives.gpu.memory import aligned_start
from ....primitives.gpu.sync import collect_pairs, exchange_sums, next_part, store_pair
from .rows import (
    MIXTURE,
    NOTHING,
    READ_LAST,
    REVERSE,
    PairPart,
    PairShare,
    divergence_of_share,
    gradient_of_block,
    load_both,
    locate_pair,
    merged_shares,
    mixture_of_part,
    scan_part,
    unmasked_end,
)

LARGEST = tl.constexpr(2.0**100)  # sums of exponentials below it overflow in no product


@triton.jit
def store_block(
    d_ptr,
    on_row,
    part,
    share,
    student,
    start,
    UNMASKED: tl.constexpr,
    KIND: tl.constexpr,
    FAST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the gradient of a block of the student's logits; see `gradient_of_block`."""
    v, x, t = load_both(part, start, UNMASKED, NOTHING, READ_LAST, TILE.block, TILE)
    grad = gradient_of_block(x, t, on_row, part, share, student, KIND, FAST)
    grad = grad.to(d_ptr.dtype.element_ty)
    if UNMASKED:
        tl.store(d_ptr + v, grad, cache_modifier=".cs")
    else:
        is_stored = v // TILE.vector * TILE.vector < part.last
        tl.store(d_ptr + v, grad, mask=is_stored, cache_modifier=".cs")


@triton.jit
def divergence_row_kernel(
    logits,  # StridedRows of one batch with adjacent classes, like the next two
    teacher,  # StridedRows
    dlogits,  # StridedRows
    row_factor_ptr,  # [M] the derivative of the result in each row's loss, or None for `factor`
    slots_ptr,  # [1 + 3 * M * splits] int64, zero: the counter, then three slots for each program
    loss_ptr,  # [M]
    row_split,  # RowSplit
    factor: tl.float64,
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    KIND: tl.constexpr,
    SCAN: tl.constexpr,  # Scan
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,  # at least `splits`, or 0 where a program has the whole row
    TILE: tl.constexpr,  # LaneTile of the scans
    STORED: tl.constexpr,  # LaneTile of the gradient
):
    """Compute divergence and gradient of one row with one read of both logits and one write.

    Where there are slots, programs share the row. A row whose factor is 0 is not read, and its loss
    and gradient are 0.
    """
    SHARED: tl.constexpr = slots_ptr is not None
    classes, splits, classes_per_program = row_split
    index = next_part(slots_ptr, SHARED)
    if SHARED:
        slots_ptr = slots_ptr + 1 + index // splits * 3 * splits
    row, split = index // splits, (index % splits).to(tl.int32)
    on_row = tl.full([], factor, tl.float32)
    if row_factor_ptr is not None:
        on_row = tl.load(row_factor_ptr + row).to(tl.float32)
    first = split * classes_per_program
    last = tl.minimum(first + classes_per_program, classes)
    cap = tl.full([], softcap, tl.float32) if HAS_SOFTCAP else None
    pair = locate_pair(logits, teacher, row, first, last, beta, temperature, tl.float32)
    part = PairPart(*pair, logits.column, teacher.column, cap)  # type: ignore[call-arg]
    d_ptr = dlogits.ptr + aligned_start(row * dlogits.row, STORED.vector)
    grad = on_row * reciprocal(tl.full([], temperature, tl.float32))
    loss = 0.0
    if on_row == 0.0:
        for start in range(part.first, part.last, TILE.block):
            v = start + tl.arange(0, TILE.block)
            zeros = tl.full([TILE.block], 0.0, d_ptr.dtype.element_ty)
            tl.store(d_ptr + v, zeros, mask=v // STORED.vector * STORED.vector < part.last)
    else:
        # The first scan takes the shifts from the first vector of each lane, and assumes that no
        # logit is infinite. A careful one follows where a lane has no shift, or where sums are NaN
        # or might overflow.
        share = scan_part(part, False, SCAN, TILE, tl.float32)
        is_plain = (share.total < LARGEST) & (share.t_total < LARGEST)
        is_plain &= (share.maximum > -float("inf")) & (share.t_maximum > -float("inf"))
        weighted = share.reverse if KIND == REVERSE else share.forward
        is_plain &= weighted == weighted
        if tl.min(is_plain.to(tl.int32)) == 0:
            share = scan_part(part, True, SCAN, TILE, tl.float32)
        share = merged_shares(share, part, SCAN)
        if SHARED:
            valid = tl.arange(0, BLOCK_SPLITS) < splits
            store_pair(slots_ptr, split, share.maximum, share.total)
            store_pair(slots_ptr + splits, split, share.t_maximum, share.t_total)
            if KIND != MIXTURE:
                weighted = share.reverse if KIND == REVERSE else share.forward
                store_pair(slots_ptr + 2 * splits, split, weighted, weighted)
            maxima, totals = collect_pairs(slots_ptr, splits, BLOCK_SPLITS)
            t_maxima, t_totals = collect_pairs(slots_ptr + splits, splits, BLOCK_SPLITS)
            sums = tl.zeros([BLOCK_SPLITS], tl.float32)
            if KIND != MIXTURE:
                sums, _ = collect_pairs(slots_ptr + 2 * splits, splits, BLOCK_SPLITS)
            parts = PairShare(
                tl.where(valid, maxima, -float("inf")),
                tl.where(valid, totals, 0.0),
                tl.where(valid, t_maxima, -float("inf")),
                tl.where(valid, t_totals, 0.0),
                tl.where(valid, sums, 0.0),
                tl.where(valid, sums, 0.0),
                0.0,
                0,
            )
            share = merged_shares(parts, part, SCAN)
        of_student = 0.0
        unmasked = unmasked_end(part, TILE.block)
        if KIND == MIXTURE:
            of_student, of_teacher = mixture_of_part(part, share, FAST, False, TILE)
            of_student, of_teacher = tl.sum(of_student), tl.sum(of_teacher)
            if SHARED:
                sums_ptr = slots_ptr + 2 * splits
                of_student, of_teacher = exchange_sums(
                    sums_ptr, split, splits, of_student, of_teacher, BLOCK_SPLITS
                )
            loss = (part.weight * of_teacher + (1.0 - part.weight) * of_student) * LN2
        for start in range(part.first, unmasked, TILE.block):
            store_block(d_ptr, grad, part, share, of_student, start, True, KIND, FAST, STORED)
        for start in range(unmasked, part.last, TILE.block):
            store_block(d_ptr, grad, part, share, of_student, start, False, KIND, FAST, STORED)
        if KIND != MIXTURE:
            if split == 0:
                loss = divergence_of_share(share, KIND).to(tl.float32)
    tl.store(loss_ptr + row, loss, mask=split == 0)
