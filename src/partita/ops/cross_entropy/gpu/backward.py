"""Kernel of the rows' gradient from their saved statistics."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import apply_softcap, divide, exp_for_dtype, finite_shift
from .row_math import (
    GradientTerms,
    LossOptions,
    class_gradient,
    load_label,
    load_row_gradient,
    locate_tile,
    smoothing_weights,
    store_label_gradient,
    store_valid_rows,
)


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
    index = batch * rows + row
    x_rows = logits.ptr + batch * logits.batch + row * logits.row  # [ROWS]
    x_ptrs = x_rows[:, None] + column * logits.column
    x = tl.load(x_ptrs, mask=mask, other=-float("inf")).to(ACC_DTYPE)
    x = apply_softcap(x, softcap, HAS_SOFTCAP)
    on_loss = load_row_gradient(grad_loss, index, tile.row_mask, ACC_DTYPE)
    on_logsumexp = load_row_gradient(grad_logsumexp, index, tile.row_mask, ACC_DTYPE)
    shift = finite_shift(tl.load(maximum_ptr + index, mask=tile.row_mask, other=0.0))
    total = tl.load(sumexp_ptr + index, mask=tile.row_mask, other=1.0)
    total_weight = tl.load(total_weight_ptr + index, mask=tile.row_mask, other=0.0)
    terms = GradientTerms(shift, divide(on_loss * total_weight + on_logsumexp, total), on_loss)
    label = load_label(index, tile.row_mask, x_rows, logits.column, tile.span, BLOCK_V, options)
    q = x
    if SMOOTHING_MODE:
        t = targets.probabilities
        t_ptrs = t.ptr + batch * t.batch + row[:, None] * t.row + column * t.column
        q = smoothing_weights(t_ptrs, mask, column, options)
    e = exp_for_dtype(x - terms.shift[:, None], dlogits.ptr.dtype.element_ty)
    scaled_q = terms.scale[:, None] * q
    grad = class_gradient(e, x, terms.factor[:, None], scaled_q, options)
    d_rows = dlogits.ptr + batch * dlogits.batch + row * dlogits.row  # [ROWS]
    # The gradient may replace the logits, so every warp must have read the logit at the label.
    tl.debug_barrier()
    d_ptrs = d_rows[:, None] + column * dlogits.column
    store_valid_rows(d_ptrs, grad, mask, label.not_ignored[:, None], False)
    store_label_gradient(d_rows, dlogits.column, label, label.in_range, terms, options)
