"""Kernel of the rows' losses and statistics, from one read of the logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift, log_exact
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
from .reduction import clear_workspace
from .row_math import (
    LossOptions,
    acc_logits,
    exact_smoothing_weight,
    load_label,
    smoothing_terms,
    smoothing_weights,
)


class LossState(NamedTuple):
    """The statistics of the lanes of rows, [ROWS, LANES], or of whole rows, [ROWS].

    Fields:
        maximum: the maximum of x.
        total: the sum of exp(x - maximum).
        smoothing_weight: the sum of q.
        smoothing_loss: the sum of q (maximum - x).
    """

    maximum: Any
    total: Any
    smoothing_weight: Any
    smoothing_loss: Any


class RowSource(NamedTuple):
    """Where the logits and the target probabilities of rows are.

    Fields:
        x_ptr: the aligned vectors of the logits, [ROWS, 1].
        edge_ptr: the first logit of the row, if a program has one row.
        t_ptr: the probabilities, [ROWS, 1].
        x_class: the stride of the logits between classes.
        t_class: the stride of the probabilities.
    """

    x_ptr: Any
    edge_ptr: Any
    t_ptr: Any
    x_class: Any
    t_class: Any


class ClassSpan(NamedTuple):
    """Which classes of a row a program reads, counted from the aligned vectors.

    Fields:
        first: the first class.
        end: the class after the last one.
        head: the number of classes before the aligned vectors.
        body: the number of classes in them.
    """

    first: Any
    end: Any
    head: Any
    body: Any


@triton.jit
def accumulate_loss(
    state,
    x_ptr,
    probability_ptr,
    column,
    mask,
    options,
    SMOOTHING_MODE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Update the statistics of the lanes with one more block of classes."""
    EXACT: tl.constexpr = LANES == 1 and x_ptr.dtype.element_ty == tl.float32
    maximum, total, smoothing_weight, smoothing_loss = state
    x = acc_logits(tl.load(x_ptr, mask=mask, other=-float("inf")), mask, options)
    old_shift = finite_shift(maximum)
    maximum, total = online_softmax(maximum, total, by_lane(x, LANES, VECTOR), EXACT)
    if SMOOTHING_MODE:
        q = smoothing_weights(probability_ptr, mask, column, options, SMOOTHING_MODE)
        q = by_lane(q, LANES, VECTOR)
        shift = finite_shift(maximum)
        moved_loss = smoothing_weight * (shift - old_shift).to(tl.float64)
        terms = smoothing_terms(q, broadcast_lanes(shift), by_lane(x, LANES, VECTOR))
        smoothing_loss += moved_loss + lane_sum(terms, EXACT)
        smoothing_weight += lane_sum(q, EXACT)
    return LossState(maximum, total, smoothing_weight, smoothing_loss)


@triton.jit
def scan_losses(
    source,
    span,
    row_mask,
    options,
    SMOOTHING_MODE: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Return the statistics of the lanes over a span of classes.

    The program of the first span also reads the classes around the aligned vectors.
    """
    x_ptr, edge_ptr, t_start, x_class, t_class = source
    first, end, head, body = span
    ROWS: tl.constexpr = row_mask.shape[0]
    BITS: tl.constexpr = edge_ptr.dtype.element_ty.primitive_bitwidth
    VECTOR: tl.constexpr = 1 if LANES == 1 else 128 // BITS
    state = LossState(
        tl.full([ROWS, LANES], -float("inf"), options.smoothing.dtype),
        tl.zeros([ROWS, LANES], tl.float64),
        tl.zeros([ROWS, LANES], tl.float64),
        tl.zeros([ROWS, LANES], tl.float64),
    )
    unmasked = unmasked_end(first, end, body, BLOCK_V, LANES)
    for start in range(first, unmasked, BLOCK_V):
        column = (start + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        mask = tl.full([ROWS, BLOCK_V], True, tl.int1)
        x_ptrs, t_ptrs = x_ptr + column * x_class, t_start + (head + column) * t_class
        state = accumulate_loss(
            state, x_ptrs, t_ptrs, head + column, mask, options, SMOOTHING_MODE, LANES, VECTOR
        )
    for start in range(unmasked, end, BLOCK_V):
        column = (start + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        mask = row_mask[:, None] & (column // VEC * VEC < body)
        x_ptrs, t_ptrs = x_ptr + column * x_class, t_start + (head + column) * t_class
        state = accumulate_loss(
            state, x_ptrs, t_ptrs, head + column, mask, options, SMOOTHING_MODE, LANES, VECTOR
        )
    if VEC > 1:
        edge, at_edge = edge_columns(head, body, options.classes, VEC, LANES)  # [LANES]
        edge, mask = edge[None, :], (at_edge & (first == 0))[None, :]
        x_ptrs, t_ptrs = edge_ptr + edge, t_start + edge * t_class
        state = accumulate_loss(
            state, x_ptrs, t_ptrs, edge, mask, options, SMOOTHING_MODE, LANES, 1
        )
    return state


@triton.jit
def merge_lane_states(state, ACC_DTYPE: tl.constexpr):
    """Return the statistics of rows, given those of their lanes."""
    lane_shift = finite_shift(state.maximum)
    maximum, total, _ = merge_lanes(state.maximum, state.total)
    moved_by = (finite_shift(maximum)[:, None] - lane_shift).to(tl.float64)
    smoothing_loss = tl.sum(state.smoothing_loss + state.smoothing_weight * moved_by, axis=1)
    smoothing_weight = tl.sum(state.smoothing_weight, axis=1)
    return LossState(
        maximum,
        total.to(ACC_DTYPE),
        smoothing_weight.to(ACC_DTYPE),
        smoothing_loss.to(ACC_DTYPE),
    )


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
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    options = LossOptions(weight_ptr, classes, ignore_index, smoothing, softcap, None)
    split, batch, row, start, head, body = program_rows(
        rows, splits, x_batch, x_row, classes, VEC, ROWS
    )
    x_ptr = row_pointers(logits_ptr, start, x_row, VEC, ROWS)
    index, mask = batch * rows + row, row < rows
    x_start = logits_ptr + batch * x_batch + row * x_row  # [ROWS]
    # The labels are loaded before anything waits for the rows.
    label = load_label(
        target_ptr, index, mask, x_start, x_class, None, BLOCK_V, options, SMOOTHING_MODE
    )
    if workspace_ptr is not None:
        clear_workspace(workspace_ptr, workspace_size, 64)
    t_start = target_ptr + batch * t_batch + row[:, None] * t_row
    source = RowSource(x_ptr, logits_ptr + start, t_start, x_class, t_class)
    classes_read = ClassSpan(split * span, tl.minimum((split + 1) * span, classes), head, body)
    lanes = scan_losses(source, classes_read, mask, options, SMOOTHING_MODE, VEC, LANES, BLOCK_V)
    state = merge_lane_states(lanes, ACC_DTYPE)
    if SHARED:
        slot = slot_base(slots_ptr, 2 * tl.sum(index, axis=0), splits)
        state, mask = merge_shared_rows(slot, split, splits, state, mask, BLOCK_SPLITS)
    ptrs = (loss_ptr, logsumexp_ptr, maximum_ptr, sumexp_ptr, total_weight_ptr)
    store_statistics(*ptrs, index, state, label, mask, options, SMOOTHING_MODE)


@triton.jit
def store_statistics(
    loss_ptr,
    logsumexp_ptr,
    maximum_ptr,
    sumexp_ptr,
    total_weight_ptr,
    index,
    state,
    label,
    mask,
    options,
    SMOOTHING_MODE: tl.constexpr,
):
    """Store the losses of rows and what their gradients need."""
    shift = finite_shift(state.maximum)
    smoothing_weight = exact_smoothing_weight(state.smoothing_weight, options, SMOOTHING_MODE)
    log_total = log_exact(state.total)
    loss = label.weight * (log_total + (shift - label.x)) if SMOOTHING_MODE != 2 else 0.0
    loss += smoothing_weight * log_total + state.smoothing_loss if SMOOTHING_MODE else 0.0
    tl.store(loss_ptr + index, tl.where(label.not_ignored, loss, 0.0), mask=mask)
    tl.store(logsumexp_ptr + index, tl.where(label.not_ignored, shift + log_total, 0.0), mask=mask)
    tl.store(maximum_ptr + index, state.maximum, mask=mask)
    tl.store(sumexp_ptr + index, state.total, mask=mask)
    weight = tl.where(label.not_ignored, label.weight + smoothing_weight, 0.0)
    tl.store(total_weight_ptr + index, weight, mask=mask)


@triton.jit
def merge_shared_rows(
    slot_ptr,
    split,
    splits,
    state,
    is_written,
    BLOCK_SPLITS: tl.constexpr,
):
    """Exchange the statistics of a row's programs, and return those of the row.

    They are complete only in the last program, which alone writes: `is_written` is false in others.
    """
    maximum, total, smoothing_weight, smoothing_loss = state
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
    state = LossState(zero + row_maximum, zero + row_total, smoothing_weight, smoothing_loss)
    return state, is_written
