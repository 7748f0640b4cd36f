"""Kernel of the rows' gradient from their saved statistics."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import apply_softcap, divide, exp_for_dtype, finite_shift
from .reduction import load_labels
from .row_math import (
    class_gradient,
    label_gradient,
    label_weights,
    load_row_gradient,
    smoothing_weights,
    store_valid_rows,
)


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
    softcap = tl.full([], softcap, ACC_DTYPE)
    spans = tl.cdiv(classes, BLOCK_V)
    block = tl.program_id(0) // spans
    batch = (block // tl.cdiv(rows, ROWS)).to(tl.int64)
    row = (block % tl.cdiv(rows, ROWS)).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    row_mask = row < rows
    index = batch * rows + row
    column = (tl.program_id(0) % spans).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    column = column[None, :]  # [1, BLOCK_V]
    mask = row_mask[:, None] & (column < classes)  # [ROWS, BLOCK_V]
    x = tl.load(
        logits_ptr + batch * x_batch + row[:, None] * x_row + column * x_class,
        mask=mask,
        other=-float("inf"),
    ).to(ACC_DTYPE)
    x = apply_softcap(x, softcap, HAS_SOFTCAP)
    grad_loss = load_row_gradient(grad_loss_ptr, index, loss_step, row_mask, ACC_DTYPE)
    grad_logsumexp = load_row_gradient(
        grad_logsumexp_ptr, index, logsumexp_step, row_mask, ACC_DTYPE
    )
    shift = finite_shift(tl.load(maximum_ptr + index, mask=row_mask, other=0.0))
    total = tl.load(sumexp_ptr + index, mask=row_mask, other=1.0)
    total_weight = tl.load(total_weight_ptr + index, mask=row_mask, other=0.0)
    softmax_coef = grad_loss * total_weight + grad_logsumexp
    probability = x
    if SMOOTHING_MODE == 2:
        not_ignored = row_mask
        probability = tl.load(
            target_ptr + batch * t_batch + row[:, None] * t_row + column * t_class,
            mask=mask,
            other=0.0,
        ).to(ACC_DTYPE)
    else:
        label = load_labels(target_ptr, index, row_mask, ignore_index)
        not_ignored, in_range, on_label = label_weights(
            label, ignore_index, classes, weight_ptr, smoothing, ACC_DTYPE
        )
        label_mask = in_range & row_mask & (label // BLOCK_V == tl.program_id(0) % spans)
        label_x = tl.load(
            logits_ptr + batch * x_batch + row * x_row + label * x_class,
            mask=label_mask,
            other=0.0,
        ).to(ACC_DTYPE)
        label_x = apply_softcap(label_x, softcap, HAS_SOFTCAP)
    factor = divide(softmax_coef, total)
    q = x
    if SMOOTHING_MODE:
        q = smoothing_weights(
            probability, mask, weight_ptr, column, classes, smoothing, SMOOTHING_MODE, ACC_DTYPE
        )
    grad = class_gradient(
        exp_for_dtype(x - shift[:, None], dlogits_ptr.dtype.element_ty),
        x,
        factor[:, None],
        grad_loss[:, None] * q,
        softcap,
        SMOOTHING_MODE,
        HAS_SOFTCAP,
    )
    d_start = dlogits_ptr + batch * d_batch + row * d_row  # [ROWS]
    # The gradient may replace the logits, so every warp must have read the logit at the label
    # before any warp writes over it.
    tl.debug_barrier()
    store_valid_rows(d_start[:, None] + column * d_class, grad, mask, not_ignored[:, None], False)
    if SMOOTHING_MODE != 2:
        at_label = label_gradient(
            label,
            label_x,
            label_mask,
            on_label,
            shift,
            factor,
            grad_loss,
            weight_ptr,
            classes,
            smoothing,
            softcap,
            SMOOTHING_MODE,
            HAS_SOFTCAP,
            ACC_DTYPE,
        )
        # The label's gradient replaces the value that another warp may have stored there.
        tl.debug_barrier()
        dtype: tl.constexpr = dlogits_ptr.dtype.element_ty
        tl.store(d_start + label * d_class, at_label.to(dtype), mask=label_mask)
