"""Kernel of the rows' losses and statistics, from one read of the logits."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import apply_softcap, finite_shift, log_exact
from ....primitives.gpu.memory import edge_columns
from ....primitives.gpu.reduce import (
    broadcast_lanes,
    by_lane,
    lane_sum,
    merge_lanes,
    online_softmax,
    program_rows,
    row_pointers,
    unmasked_end,
)
from ....primitives.gpu.sync import (
    arrives_last,
    load_partials,
    merge_normalizers,
    slot_base,
    store_partial,
)
from .reduction import clear_workspace, load_labels
from .row_math import exact_smoothing_weight, label_weights, smoothing_terms, smoothing_weights


@triton.jit
def accumulate_loss(
    maximum,
    total,
    smoothing_weight,
    smoothing_loss,
    x_ptr,
    probability_ptr,
    column,
    mask,
    weight_ptr,
    classes,
    smoothing,
    softcap,
    SMOOTHING_MODE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Update the statistics of the lanes, `[ROWS, LANES]` each, with one more block of classes.

    They are the maximum, the sum of exponentials, the sum of q and the sum of q (maximum - x).
    """
    EXACT: tl.constexpr = LANES == 1 and x_ptr.dtype.element_ty == tl.float32
    x = tl.load(x_ptr, mask=mask, other=-float("inf")).to(ACC_DTYPE)
    if HAS_SOFTCAP:
        x = tl.where(mask, apply_softcap(x, softcap, HAS_SOFTCAP), -float("inf"))
    old_shift = finite_shift(maximum)
    maximum, total = online_softmax(maximum, total, by_lane(x, LANES, VECTOR), EXACT)
    if SMOOTHING_MODE:
        probability = x
        if SMOOTHING_MODE == 2:
            probability = tl.load(probability_ptr, mask=mask, other=0.0).to(ACC_DTYPE)
        q = smoothing_weights(
            probability, mask, weight_ptr, column, classes, smoothing, SMOOTHING_MODE, ACC_DTYPE
        )
        q = by_lane(q, LANES, VECTOR)
        shift = finite_shift(maximum)
        moved_loss = smoothing_weight * (shift - old_shift).to(tl.float64)
        terms = smoothing_terms(q, broadcast_lanes(shift), by_lane(x, LANES, VECTOR))
        smoothing_loss += moved_loss + lane_sum(terms, EXACT)
        smoothing_weight += lane_sum(q, EXACT)
    return maximum, total, smoothing_weight, smoothing_loss


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr,  # [batches, rows, classes]
    target_ptr,  # [batches, rows] labels, or [batches, rows, classes] probabilities
    weight_ptr,  # [classes] or None
    loss_ptr,  # [batches, rows]
    logsumexp_ptr,  # [batches, rows]
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    total_weight_ptr,  # [batches, rows]
    slots_ptr,  # [batches, rows, 2, 1 + splits] int64, zero: a counter, then a slot per program
    workspace_ptr,  # [workspace_size] int64, cleared for a later kernel, or None
    rows,
    classes,
    splits,  # programs that share a row
    span,  # classes that each of them reads
    workspace_size,
    x_batch,  # strides of the logits
    x_row,
    x_class,
    t_batch,  # strides of the probabilities
    t_row,
    t_class,
    ignore_index,
    smoothing: tl.float64,
    softcap: tl.float64,
    SMOOTHING_MODE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the loss and the statistics of rows, each read once in blocks.

    Where several programs share a row, the last one of them merges their results.
    """
    smoothing = tl.full([], smoothing, ACC_DTYPE)
    softcap = tl.full([], softcap, ACC_DTYPE)
    VECTOR: tl.constexpr = (
        1 if LANES == 1 else 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    )
    split, batch, row, start, head, body = program_rows(
        rows, splits, x_batch, x_row, classes, VEC, ROWS
    )
    source = row_pointers(logits_ptr, start, x_row, VEC, ROWS)
    maximum = tl.full([ROWS, LANES], -float("inf"), ACC_DTYPE)
    total = tl.zeros([ROWS, LANES], tl.float64)
    smoothing_weight = tl.zeros([ROWS, LANES], tl.float64)
    smoothing_loss = tl.zeros([ROWS, LANES], tl.float64)
    index = batch * rows + row
    if SMOOTHING_MODE == 2:
        not_ignored = row < rows
        on_label, label_x = tl.zeros([ROWS], ACC_DTYPE), tl.zeros([ROWS], ACC_DTYPE)
    else:  # These loads start before anything waits for the row.
        label = load_labels(target_ptr, index, row < rows, ignore_index)
        not_ignored, in_range, on_label = label_weights(
            label, ignore_index, classes, weight_ptr, smoothing, ACC_DTYPE
        )
        label_x = tl.load(
            logits_ptr + batch * x_batch + row * x_row + label * x_class,
            mask=in_range & (row < rows),
            other=0.0,
        ).to(ACC_DTYPE)
        label_x = apply_softcap(label_x, softcap, HAS_SOFTCAP)
    if workspace_ptr is not None:
        clear_workspace(workspace_ptr, workspace_size, 64)
    t_start = target_ptr + batch * t_batch + row[:, None] * t_row
    end = tl.minimum((split + 1) * span, classes)
    unmasked = unmasked_end(split * span, end, body, BLOCK_V, LANES)
    for first in range(split * span, unmasked, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        maximum, total, smoothing_weight, smoothing_loss = accumulate_loss(
            maximum,
            total,
            smoothing_weight,
            smoothing_loss,
            source + column * x_class,
            t_start + (head + column) * t_class,
            head + column,
            tl.full([ROWS, BLOCK_V], True, tl.int1),
            weight_ptr,
            classes,
            smoothing,
            softcap,
            SMOOTHING_MODE,
            HAS_SOFTCAP,
            ACC_DTYPE,
            LANES,
            VECTOR,
        )
    for first in range(unmasked, end, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        mask = (row < rows)[:, None] & (column // VEC * VEC < body)
        maximum, total, smoothing_weight, smoothing_loss = accumulate_loss(
            maximum,
            total,
            smoothing_weight,
            smoothing_loss,
            source + column * x_class,
            t_start + (head + column) * t_class,
            head + column,
            mask,
            weight_ptr,
            classes,
            smoothing,
            softcap,
            SMOOTHING_MODE,
            HAS_SOFTCAP,
            ACC_DTYPE,
            LANES,
            VECTOR,
        )
    if VEC > 1:
        edge, at_edge = edge_columns(head, body, classes, VEC, LANES)  # [LANES]
        maximum, total, smoothing_weight, smoothing_loss = accumulate_loss(
            maximum,
            total,
            smoothing_weight,
            smoothing_loss,
            logits_ptr + start + edge[None, :],
            t_start + edge[None, :] * t_class,
            edge[None, :],
            (at_edge & (split == 0))[None, :],
            weight_ptr,
            classes,
            smoothing,
            softcap,
            SMOOTHING_MODE,
            HAS_SOFTCAP,
            ACC_DTYPE,
            LANES,
            1,
        )
    lane_shift = finite_shift(maximum)
    maximum, total, _ = merge_lanes(maximum, total)
    moved_by = (finite_shift(maximum)[:, None] - lane_shift).to(tl.float64)
    smoothing_loss = tl.sum(smoothing_loss + smoothing_weight * moved_by, axis=1)
    smoothing_weight = tl.sum(smoothing_weight, axis=1)
    is_written = row < rows
    total = total.to(ACC_DTYPE)
    smoothing_weight, smoothing_loss = smoothing_weight.to(ACC_DTYPE), smoothing_loss.to(ACC_DTYPE)
    if SHARED:
        slot = slot_base(slots_ptr, 2 * tl.sum(index, axis=0), splits)
        maximum, total, smoothing_weight, smoothing_loss, is_written = merge_shared_rows(
            slot,
            split,
            splits,
            maximum,
            total,
            smoothing_weight,
            smoothing_loss,
            is_written,
            BLOCK_SPLITS,
        )
    shift = finite_shift(maximum)
    smoothing_weight = exact_smoothing_weight(
        smoothing_weight, smoothing, weight_ptr, SMOOTHING_MODE
    )
    log_total = log_exact(total)
    label_loss = on_label * (log_total + (shift - label_x)) if SMOOTHING_MODE != 2 else 0.0
    loss = label_loss + (smoothing_weight * log_total + smoothing_loss if SMOOTHING_MODE else 0.0)
    tl.store(loss_ptr + index, tl.where(not_ignored, loss, 0.0), mask=is_written)
    tl.store(logsumexp_ptr + index, tl.where(not_ignored, shift + log_total, 0.0), mask=is_written)
    tl.store(maximum_ptr + index, maximum, mask=is_written)
    tl.store(sumexp_ptr + index, total, mask=is_written)
    tl.store(
        total_weight_ptr + index,
        tl.where(not_ignored, on_label + smoothing_weight, 0.0),
        mask=is_written,
    )


@triton.jit
def merge_shared_rows(
    slot_ptr,
    split,
    splits,
    maximum,
    total,
    smoothing_weight,
    smoothing_loss,
    is_written,
    BLOCK_SPLITS: tl.constexpr,
):
    """Exchange the statistics of a row's programs, and return those of the row.

    They are complete only in the last program, which alone writes: `is_written` is false in others.
    """
    smoothing_slot = slot_ptr + splits + 1
    store_partial(
        smoothing_slot, split, tl.sum(smoothing_weight, axis=0), tl.sum(smoothing_loss, axis=0)
    )
    store_partial(slot_ptr, split, tl.sum(maximum, axis=0), tl.sum(total, axis=0))
    is_written &= arrives_last(slot_ptr, splits)
    maxima, totals, mask = load_partials(slot_ptr, splits, BLOCK_SPLITS)
    row_maximum, row_total = merge_normalizers(maxima, totals, mask)
    weights, losses, _ = load_partials(smoothing_slot, splits, BLOCK_SPLITS)
    losses += weights * (finite_shift(row_maximum) - finite_shift(maxima))
    zero = tl.zeros_like(maximum)
    smoothing_weight = zero + tl.sum(tl.where(mask, weights, 0.0), axis=0)
    smoothing_loss = zero + tl.sum(tl.where(mask, losses, 0.0), axis=0)
    return zero + row_maximum, zero + row_total, smoothing_weight, smoothing_loss, is_written
