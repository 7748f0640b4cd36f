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
def load_gradient_terms(grads, statistics, index, mask, ACC_DTYPE: tl.constexpr):
    """Return the terms of the rows' gradient, from saved statistics and upstream gradients.

    The upstream gradients are those of the losses and of the log-sum-exps, each with its stride.
    The statistics are the maxima, the sums of exponentials and the total target weights.
    """
    grad_loss_ptr, loss_step, grad_logsumexp_ptr, logsumexp_step = grads
    maximum_ptr, sumexp_ptr, total_weight_ptr = statistics
    grad_loss = load_row_gradient(grad_loss_ptr, index, loss_step, mask, ACC_DTYPE)
    grad_logsumexp = load_row_gradient(grad_logsumexp_ptr, index, logsumexp_step, mask, ACC_DTYPE)
    shift = finite_shift(tl.load(maximum_ptr + index, mask=mask, other=0.0))
    total = tl.load(sumexp_ptr + index, mask=mask, other=1.0)
    total_weight = tl.load(total_weight_ptr + index, mask=mask, other=0.0)
    factor = divide(grad_loss * total_weight + grad_logsumexp, total)
    return GradientTerms(shift, factor, grad_loss)


@triton.jit
def cross_entropy_backward_kernel(
    grad_loss_ptr,  # [batches, rows]
    grad_logsumexp_ptr,  # [batches, rows], or None for zeros
    logits_ptr,  # [batches, rows, classes]
    target_ptr,  # [batches, rows] labels, or [batches, rows, classes] probabilities
    weight_ptr,  # [classes] or None
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    total_weight_ptr,  # [batches, rows]
    dlogits_ptr,  # [batches, rows, classes], which may be the logits
    rows,
    classes,
    loss_step,  # between the rows of grad_loss: 0 if they share one number
    logsumexp_step,  # between the rows of grad_logsumexp
    x_batch,  # strides of the logits
    x_row,
    x_class,
    t_batch,  # strides of the probabilities
    t_row,
    t_class,
    d_batch,  # strides of dlogits
    d_row,
    d_class,
    ignore_index,
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
    options = LossOptions(weight_ptr, classes, ignore_index, smoothing, softcap, None)
    spans = tl.cdiv(classes, BLOCK_V)
    tile = locate_tile(rows, classes, spans, ROWS, BLOCK_V)
    batch, row, column, mask = tile.batch, tile.row, tile.column, tile.mask
    index = batch * rows + row
    start = logits_ptr + batch * x_batch + row * x_row  # [ROWS]
    x = tl.load(start[:, None] + column * x_class, mask=mask, other=-float("inf")).to(ACC_DTYPE)
    x = apply_softcap(x, softcap, HAS_SOFTCAP)
    grads = (grad_loss_ptr, loss_step, grad_logsumexp_ptr, logsumexp_step)
    statistics = (maximum_ptr, sumexp_ptr, total_weight_ptr)
    terms = load_gradient_terms(grads, statistics, index, tile.row_mask, ACC_DTYPE)
    label = load_label(
        target_ptr,
        index,
        tile.row_mask,
        start,
        x_class,
        tile.span,
        BLOCK_V,
        options,
        SMOOTHING_MODE,
    )
    q = x
    if SMOOTHING_MODE:
        t_ptrs = target_ptr + batch * t_batch + row[:, None] * t_row + column * t_class
        q = smoothing_weights(t_ptrs, mask, column, options, SMOOTHING_MODE)
    e = exp_for_dtype(x - terms.shift[:, None], dlogits_ptr.dtype.element_ty)
    scaled_q = terms.scale[:, None] * q
    grad = class_gradient(e, x, terms.factor[:, None], scaled_q, options, SMOOTHING_MODE)
    d_start = dlogits_ptr + batch * d_batch + row * d_row  # [ROWS]
    # The gradient may replace the logits, so every warp must have read the logit at the label.
    tl.debug_barrier()
    d_ptrs = d_start[:, None] + column * d_class
    store_valid_rows(d_ptrs, grad, mask, label.not_ignored[:, None], False)
    store_label_gradient(d_start, d_class, label, label.in_range, terms, options, SMOOTHING_MODE)
