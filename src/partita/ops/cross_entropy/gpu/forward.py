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
from .reduction import clear_words
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


@triton.jit
def accumulate_loss(
    state,
    x_ptr,
    probability_ptr,
    column,
    mask,
    options,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Update the statistics of the lanes with one more block of classes."""
    EXACT: tl.constexpr = LANES == 1 and x_ptr.dtype.element_ty == tl.float32
    maximum, total, smoothing_weight, smoothing_loss = state
    x = acc_logits(tl.load(x_ptr, mask=mask, other=-float("inf")), mask, options)
    old_shift = finite_shift(maximum)
    maximum, total = online_softmax(maximum, total, by_lane(x, LANES, VECTOR), EXACT)
    if options.spread is not None:
        q = smoothing_weights(probability_ptr, mask, column, options)
        q = by_lane(q, LANES, VECTOR)
        shift = finite_shift(maximum)
        moved_loss = smoothing_weight * (shift - old_shift).to(tl.float64)
        terms = smoothing_terms(q, broadcast_lanes(shift), by_lane(x, LANES, VECTOR))
        smoothing_loss += moved_loss + lane_sum(terms, EXACT)
        smoothing_weight += lane_sum(q, EXACT)
    return LossState(maximum, total, smoothing_weight, smoothing_loss)


@triton.jit
def cross_entropy_forward_kernel(
    logits,  # StridedRows
    targets,  # Targets
    results,  # RowLosses, [batches, rows]
    slots_ptr,  # [batches, rows, 2, 1 + splits] int64, zero: a counter, then a slot per program
    workspace,  # Words, cleared for a later kernel, or None
    rows,
    splits,  # programs that share a row
    span,  # classes that each of them reads
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

    The program of the first span of a row also reads the classes around the aligned vectors. Where
    several programs share a row, the last one of them merges their results.
    """
    BITS: tl.constexpr = logits.ptr.dtype.element_ty.primitive_bitwidth
    VECTOR: tl.constexpr = 1 if LANES == 1 else 128 // BITS
    smoothing = tl.full([], smoothing, ACC_DTYPE)
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    spread = smoothing if SMOOTHING_MODE else None
    options = LossOptions(targets, smoothing, softcap, None, spread)
    classes, t = targets.classes, targets.probabilities
    split, batch, row, start, head, body = program_rows(
        rows, splits, logits.batch, logits.row, classes, VEC, ROWS
    )
    x_vectors = row_pointers(logits.ptr, start, logits.row, VEC, ROWS)  # [ROWS, 1]
    index, row_mask = batch * rows + row, row < rows
    x_rows = logits.ptr + batch * logits.batch + row * logits.row  # [ROWS]
    # The labels are loaded before anything waits for the rows.
    label = load_label(index, row_mask, x_rows, logits.column, None, BLOCK_V, options)
    if workspace is not None:
        clear_words(workspace, 64)
    t_rows = t.ptr + batch * t.batch + row[:, None] * t.row  # [ROWS, 1]
    edge_ptr = logits.ptr + start
    first, end = split * span, tl.minimum((split + 1) * span, classes)
    state = LossState(
        tl.full([ROWS, LANES], -float("inf"), ACC_DTYPE),
        tl.zeros([ROWS, LANES], tl.float64),
        tl.zeros([ROWS, LANES], tl.float64),
        tl.zeros([ROWS, LANES], tl.float64),
    )
    unmasked = unmasked_end(first, end, body, BLOCK_V, LANES)
    for begin in range(first, unmasked, BLOCK_V):
        column = (begin + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        mask = tl.full([ROWS, BLOCK_V], True, tl.int1)
        x_ptrs, t_ptrs = x_vectors + column * logits.column, t_rows + (head + column) * t.column
        state = accumulate_loss(state, x_ptrs, t_ptrs, head + column, mask, options, LANES, VECTOR)
    for begin in range(unmasked, end, BLOCK_V):
        column = (begin + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        mask = row_mask[:, None] & (column // VEC * VEC < body)
        x_ptrs, t_ptrs = x_vectors + column * logits.column, t_rows + (head + column) * t.column
        state = accumulate_loss(state, x_ptrs, t_ptrs, head + column, mask, options, LANES, VECTOR)
    if VEC > 1:
        edge, at_edge = edge_columns(head, body, classes, VEC, LANES)  # [LANES]
        edge, mask = edge[None, :], (at_edge & (first == 0))[None, :]
        x_ptrs, t_ptrs = edge_ptr + edge, t_rows + edge * t.column
        state = accumulate_loss(state, x_ptrs, t_ptrs, edge, mask, options, LANES, 1)
    # The lanes of a row are merged.
    lane_shift = finite_shift(state.maximum)
    maximum, total, _ = merge_lanes(state.maximum, state.total)
    moved_by = (finite_shift(maximum)[:, None] - lane_shift).to(tl.float64)
    smoothing_loss = tl.sum(state.smoothing_loss + state.smoothing_weight * moved_by, axis=1)
    smoothing_weight = tl.sum(state.smoothing_weight, axis=1)
    total, smoothing_weight = total.to(ACC_DTYPE), smoothing_weight.to(ACC_DTYPE)
    smoothing_loss = smoothing_loss.to(ACC_DTYPE)
    if SHARED:
        slots_ptr = slot_base(slots_ptr, 2 * tl.sum(index, axis=0), splits)
        smoothing_slots_ptr = slots_ptr + splits + 1
        store_partial(
            smoothing_slots_ptr,
            split,
            tl.sum(smoothing_weight, axis=0),
            tl.sum(smoothing_loss, axis=0),
        )
        store_partial(slots_ptr, split, tl.sum(maximum, axis=0), tl.sum(total, axis=0))
        row_mask &= arrives_last(slots_ptr, splits)
        maxima, totals, valid = load_partials(slots_ptr, splits, BLOCK_SPLITS)
        row_maximum, row_total = merge_normalizers(maxima, totals, valid)
        weights, losses, _ = load_partials(smoothing_slots_ptr, splits, BLOCK_SPLITS)
        losses += weights * (finite_shift(row_maximum) - finite_shift(maxima))
        zero = tl.zeros_like(maximum)
        smoothing_weight = zero + tl.sum(tl.where(valid, weights, 0.0), axis=0)
        smoothing_loss = zero + tl.sum(tl.where(valid, losses, 0.0), axis=0)
        maximum, total = zero + row_maximum, zero + row_total
    shift = finite_shift(maximum)
    smoothing_weight = exact_smoothing_weight(smoothing_weight, options)
    log_total = log_exact(total)
    loss = label.weight * (log_total + (shift - label.x)) if SMOOTHING_MODE != 2 else 0.0
    loss += smoothing_weight * log_total + smoothing_loss if SMOOTHING_MODE else 0.0
    counts = label.not_ignored
    tl.store(results.loss + index, tl.where(counts, loss, 0.0), mask=row_mask)
    tl.store(results.logsumexp + index, tl.where(counts, shift + log_total, 0.0), mask=row_mask)
    tl.store(results.maximum + index, maximum, mask=row_mask)
    tl.store(results.sumexp + index, total, mask=row_mask)
    total_weight = tl.where(counts, label.weight + smoothing_weight, 0.0)
    tl.store(results.total_weight + index, total_weight, mask=row_mask)
