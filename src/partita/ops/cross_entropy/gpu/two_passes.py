"""Kernels of the rows' losses and statistics, and of the gradient from these statistics."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    LOG2E,
    apply_softcap,
    divide,
    exp_for_dtype,
    finite_shift,
    log_exact,
)
from ....primitives.gpu.reduce import locate_tile, program_rows, scan_rows
from .reduction import clear_words
from .row_math import (
    GradientTerms,
    LossOptions,
    class_gradient,
    exact_smoothing_weight,
    load_label,
    load_row_gradient,
    smoothing_weights,
    store_label_gradient,
    store_valid_rows,
)


@triton.jit
def cross_entropy_forward_kernel(
    logits,  # StridedRows
    targets,  # Targets
    results,  # RowLosses, [batches, rows]
    segments,  # Segments
    workspace,  # Words, cleared for a later kernel, or None
    rows,
    smoothing: tl.float64,
    softcap: tl.float64,
    SMOOTHING_MODE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Compute the loss and the statistics of rows, each read once in blocks.

    Where several programs share a row, the last one of them merges their results.
    """
    smoothing = tl.full([], smoothing, ACC_DTYPE)
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    slope = tl.full([], LOG2E, ACC_DTYPE)
    spread = smoothing if SMOOTHING_MODE else None
    options = LossOptions(targets, smoothing, softcap, None, spread)
    at = program_rows(logits, rows, targets.classes, segments, TILE.rows)
    # The labels are loaded before anything waits for the rows.
    label = load_label(at.index, at.mask, at.ptrs, logits.column, None, TILE.block, options)
    if workspace is not None:
        clear_words(workspace, 64)
    weigh: tl.constexpr = smoothing_weights if SMOOTHING_MODE else None
    state, mask = scan_rows(logits, at, segments, slope, softcap, options, weigh, False, TILE)
    index, maximum, total = at.index, state.maximum, state.total.to(ACC_DTYPE)
    shift, log_total = finite_shift(maximum), log_exact(total)
    smoothing_weight = exact_smoothing_weight(state.weight.to(ACC_DTYPE), options)
    loss = label.weight * (log_total + (shift - label.x)) if SMOOTHING_MODE != 2 else 0.0
    loss += smoothing_weight * log_total + state.loss.to(ACC_DTYPE) if SMOOTHING_MODE else 0.0
    counts = label.not_ignored
    tl.store(results.loss + index, tl.where(counts, loss, 0.0), mask=mask)
    tl.store(results.logsumexp + index, tl.where(counts, shift + log_total, 0.0), mask=mask)
    tl.store(results.maximum + index, maximum, mask=mask)
    tl.store(results.sumexp + index, total, mask=mask)
    total_weight = tl.where(counts, label.weight + smoothing_weight, 0.0)
    tl.store(results.total_weight + index, total_weight, mask=mask)


@triton.jit
def cross_entropy_backward_kernel(
    grad_loss,  # RowNumbers
    grad_logsumexp,  # RowNumbers, with None for zeros
    logits,  # StridedRows
    targets,  # Targets
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    total_weight_ptr,  # [batches, rows]
    dlogits,  # StridedRows, which may be the logits
    rows,
    smoothing: tl.float64,
    softcap: tl.float64,
    SMOOTHING_MODE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute a tile of the gradient from the rows' statistics with one read and one write."""
    smoothing = tl.full([], smoothing, ACC_DTYPE)
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    spread = smoothing if SMOOTHING_MODE else None
    options = LossOptions(targets, smoothing, softcap, None, spread)
    spans = tl.cdiv(targets.classes, BLOCK_V)
    tile = locate_tile(rows, targets.classes, spans, ROWS, BLOCK_V)
    batch, row, column, mask = tile.batch, tile.row, tile.column, tile.mask
    index = tile.index
    x_rows = logits.ptr + batch * logits.batch + row * logits.row  # [ROWS]
    x_ptrs = x_rows[:, None] + column * logits.column
    x = tl.load(x_ptrs, mask=mask, other=-float("inf")).to(ACC_DTYPE)
    x = apply_softcap(x, softcap)
    on_loss = load_row_gradient(grad_loss, index, tile.row_mask, ACC_DTYPE)
    on_logsumexp = load_row_gradient(grad_logsumexp, index, tile.row_mask, ACC_DTYPE)
    shift = finite_shift(tl.load(maximum_ptr + index, mask=tile.row_mask, other=0.0))
    total = tl.load(sumexp_ptr + index, mask=tile.row_mask, other=1.0)
    total_weight = tl.load(total_weight_ptr + index, mask=tile.row_mask, other=0.0)
    terms = GradientTerms(shift, divide(on_loss * total_weight + on_logsumexp, total), on_loss)
    label = load_label(index, tile.row_mask, x_rows, logits.column, tile.span, BLOCK_V, options)
    q = x
    if SMOOTHING_MODE:
        q = smoothing_weights(options, tile, column, mask)
    e = exp_for_dtype(x - terms.shift[:, None], dlogits.ptr.dtype.element_ty)
    scaled_q = terms.scale[:, None] * q
    grad = class_gradient(e, x, terms.factor[:, None], scaled_q, options)
    d_rows = dlogits.ptr + batch * dlogits.batch + row * dlogits.row  # [ROWS]
    # The gradient may replace the logits, so every warp must have read the logit at the label.
    tl.debug_barrier()
    d_ptrs = d_rows[:, None] + column * dlogits.column
    store_valid_rows(d_ptrs, grad, mask, label.not_ignored[:, None])
    store_label_gradient(d_rows, dlogits.column, label, label.in_range, terms, options)
