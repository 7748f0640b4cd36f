"""Kernels that compute the loss and the gradient of a row in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    apply_softcap,
    exp,
    exp_for_dtype,
    finite_shift,
    sum_for_dtype,
)
from ....primitives.gpu.memory import (
    aligned_start,
    load_streaming,
    opaque,
    row_span,
    store_streaming,
)
from ....primitives.gpu.sync import exchange_normalizer, exchange_pairs
from .reduction import load_labels, loss_scales, reduce_in_last_program
from .row_math import (
    acc_logits,
    class_gradient,
    exact_smoothing_weight,
    label_gradient,
    label_weights,
    row_factor,
    row_loss,
    row_part,
    smoothing_terms,
    smoothing_weights,
    store_valid_rows,
)


@triton.jit
def cross_entropy_tile_kernel(
    logits_ptr,  # [batches, rows, classes]
    target_ptr,  # [batches, rows] labels, or [batches, rows, classes] probabilities
    weight_ptr,  # [classes] or None
    shares_ptr,  # [2, SHARES] partial sums of the mean's denominators, or None
    loss_ptr,  # [batches, rows], or [] with FUSED_BLOCK
    slots_ptr,  # [1 + programs] int64, zero, with FUSED_BLOCK; None for a single program
    dlogits_ptr,  # [batches, rows, classes], which may be the logits
    rows,
    classes,
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
    z_loss: tl.float64,
    SMOOTHING_MODE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    MEAN: tl.constexpr,
    FUSED_BLOCK: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute loss and gradient of whole rows in one tile with one read and one write.

    With FUSED_BLOCK it also computes the denominators of the mean and reduces the loss.
    """
    smoothing = tl.full([], smoothing, ACC_DTYPE)
    softcap = tl.full([], softcap, ACC_DTYPE)
    z_loss = tl.full([], z_loss, ACC_DTYPE)
    blocks = tl.cdiv(rows, ROWS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK_V).to(tl.int64)[None, :]  # [1, BLOCK_V]
    mask = (row < rows)[:, None] & (column < classes)  # [ROWS, BLOCK_V]
    start = logits_ptr + batch * x_batch + row * x_row  # [ROWS]
    x = tl.load(start[:, None] + column * x_class, mask=mask, other=-float("inf")).to(ACC_DTYPE)
    index = batch * rows + row
    if SMOOTHING_MODE != 2:  # These loads start before anything waits for the row.
        label = load_labels(target_ptr, index, row < rows, ignore_index)
        not_ignored, in_range, on_label = label_weights(
            label, ignore_index, classes, weight_ptr, smoothing, ACC_DTYPE
        )
        label_x = tl.load(start + label * x_class, mask=in_range, other=0.0).to(ACC_DTYPE)
        label_x = apply_softcap(label_x, softcap, HAS_SOFTCAP)
    all_rows = tl.num_programs(0) // blocks * rows
    mean_scale, z_scale, denominator = loss_scales(
        shares_ptr,
        target_ptr,
        weight_ptr,
        all_rows,
        classes,
        ignore_index,
        SMOOTHING_MODE,
        MEAN,
        FUSED_BLOCK,
        ACC_DTYPE,
    )
    if HAS_SOFTCAP:
        x = tl.where(mask, apply_softcap(x, softcap, HAS_SOFTCAP), -float("inf"))
    dtype: tl.constexpr = dlogits_ptr.dtype.element_ty
    shift = finite_shift(tl.max(x, axis=1))
    e = exp_for_dtype(x - shift[:, None], dtype)
    total = sum_for_dtype(e, 1, dtype)
    probability = x
    if SMOOTHING_MODE == 2:
        not_ignored, on_label, label_x = row < rows, tl.zeros([ROWS], ACC_DTYPE), shift
        probability = tl.load(
            target_ptr + batch * t_batch + row[:, None] * t_row + column * t_class,
            mask=mask,
            other=0.0,
        ).to(ACC_DTYPE)
    q = x
    smoothing_weight, smoothing_loss = tl.zeros([ROWS], ACC_DTYPE), tl.zeros([ROWS], ACC_DTYPE)
    if SMOOTHING_MODE:
        q = smoothing_weights(
            probability, mask, weight_ptr, column, classes, smoothing, SMOOTHING_MODE, ACC_DTYPE
        )
        smoothing_weight = sum_for_dtype(q, 1, dtype)
        smoothing_loss = sum_for_dtype(smoothing_terms(q, shift[:, None], x), 1, dtype)
        smoothing_weight = exact_smoothing_weight(
            smoothing_weight, smoothing, weight_ptr, SMOOTHING_MODE
        )
    factor = row_factor(
        on_label, smoothing_weight, shift, total, mean_scale, z_scale, z_loss, HAS_Z_LOSS
    )
    grad = class_gradient(
        e, x, factor[:, None], mean_scale * q, softcap, SMOOTHING_MODE, HAS_SOFTCAP
    )
    d_start = dlogits_ptr + batch * d_batch + row * d_row  # [ROWS]
    # The gradient may replace the logits, so every warp must have read the logit at the label
    # before any warp writes over it.
    tl.debug_barrier()
    store_valid_rows(d_start[:, None] + column * d_class, grad, mask, not_ignored[:, None], False)
    loss = row_loss(
        not_ignored,
        on_label,
        label_x,
        smoothing_weight,
        smoothing_loss,
        shift,
        total,
        mean_scale,
        z_scale,
        z_loss,
        SMOOTHING_MODE,
        HAS_Z_LOSS,
    )
    if FUSED_BLOCK:
        loss = tl.sum(tl.where(row < rows, loss, 0.0), axis=0)
        reduce_in_last_program(
            loss, tl.program_id(0), slots_ptr, loss_ptr, denominator, MEAN, FUSED_BLOCK
        )
    else:
        tl.store(loss_ptr + index, loss, mask=row < rows)
    if SMOOTHING_MODE != 2:
        at_label = label_gradient(
            label,
            label_x,
            in_range,
            on_label,
            shift,
            factor,
            mean_scale,
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
        label_mask = in_range & (row < rows)
        tl.store(d_start + label * d_class, at_label.to(dtype), mask=label_mask)


@triton.jit
def cross_entropy_row_kernel(
    logits_ptr,  # [rows, classes]
    target_ptr,  # [rows] labels
    weight_ptr,  # [classes] or None
    shares_ptr,  # [2, SHARES] partial sums of the mean's denominators, or None
    slots_ptr,  # [1 + 2 * rows * splits] int64, zero: the counter, then two slots for each program
    loss_ptr,  # [rows], or [] with FUSED_BLOCK
    loss_slots_ptr,  # [1 + programs] int64, zero, with FUSED_BLOCK; None for a single program
    dlogits_ptr,  # [rows, classes], which may be the logits
    classes,
    splits,  # programs that share a row
    x_row,  # stride of the logits
    d_row,  # stride of dlogits
    ignore_index,
    smoothing: tl.float64,
    softcap: tl.float64,
    z_loss: tl.float64,
    zero,  # 0.0, which the compiler does not know
    SMOOTHING_MODE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    MEAN: tl.constexpr,
    FUSED_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute loss and gradient of one row with one read and one write.

    The row may have any width and alignment. Where it is SHARED, `splits` programs have a part of
    it each, and exchange their maxima and sums through the slots. With FUSED_BLOCK it also computes
    the denominators of the mean and reduces the loss.
    """
    smoothing = tl.full([], smoothing, tl.float32)
    softcap = tl.full([], softcap, tl.float32)
    z_loss = tl.full([], z_loss, tl.float32)
    # The counter hands out parts in the order in which programs start, so that every part that a
    # waiting program depends on is under way.
    if SHARED:
        index = tl.atomic_add(slots_ptr, 1, sem="relaxed")
    else:
        index = tl.program_id(0).to(tl.int64)
    row, split = index // splits, (index % splits).to(tl.int32)
    head, body = row_span(row * x_row, classes, VEC)
    column = split * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    mask = column // VEC * VEC < body  # [BLOCK_V]
    logits = load_streaming(
        logits_ptr + aligned_start(row * x_row, VEC) + column, mask, -float("inf"), STREAM
    )
    mean_scale, z_scale, denominator = loss_scales(
        shares_ptr,
        target_ptr,
        weight_ptr,
        tl.num_programs(0) // splits,
        classes,
        ignore_index,
        SMOOTHING_MODE,
        MEAN,
        FUSED_BLOCK,
        tl.float32,
    )
    label = tl.load(target_ptr + row).to(tl.int64)
    not_ignored, in_range, on_label = label_weights(
        label, ignore_index, classes, weight_ptr, smoothing, tl.float32
    )
    in_body = in_range & (label >= head) & (label < head + body)
    owns_label = tl.where(in_body, (label - head) // BLOCK_V, 0) == split
    label_x = tl.load(logits_ptr + row * x_row + label, mask=in_range & owns_label, other=0.0)
    label_x = apply_softcap(label_x.to(tl.float32), softcap, HAS_SOFTCAP)
    dtype: tl.constexpr = dlogits_ptr.dtype.element_ty
    logits, x, e, maximum, part_shift, total, edge, at_edge, edge_x = row_part(
        logits,
        logits_ptr + row * x_row,
        mask,
        head,
        body,
        classes,
        split,
        softcap,
        zero,
        dtype,
        HAS_SOFTCAP,
        HALF,
        VEC,
    )
    q, edge_q, smoothing_weight, smoothing_loss = x, 0.0, 0.0, 0.0
    shift = part_shift
    if SHARED:
        slot = slots_ptr + 1 + row * splits
        shift, total = exchange_normalizer(slot, split, splits, maximum, total, BLOCK_SPLITS)
    if SMOOTHING_MODE:
        q = smoothing_weights(
            0.0, mask, weight_ptr, head + column, classes, smoothing, SMOOTHING_MODE, tl.float32
        )
        smoothing_weight = tl.sum(q, axis=0)
        smoothing_loss = tl.sum(smoothing_terms(q, shift, x), axis=0)
        if VEC > 1:
            edge_q = smoothing_weights(
                0.0, at_edge, weight_ptr, edge, classes, smoothing, SMOOTHING_MODE, tl.float32
            )
            smoothing_weight += tl.sum(edge_q, axis=0)
            smoothing_loss += tl.sum(smoothing_terms(edge_q, shift, edge_x), axis=0)
        if SHARED:
            lane = tl.arange(0, BLOCK_SPLITS)
            all_weights, all_losses = exchange_pairs(
                slot + tl.num_programs(0),
                split,
                splits,
                smoothing_weight,
                smoothing_loss,
                BLOCK_SPLITS,
            )
            smoothing_weight = tl.sum(tl.where(lane < splits, all_weights, 0.0), axis=0)
            smoothing_loss = tl.sum(tl.where(lane < splits, all_losses, 0.0), axis=0)
    smoothing_weight = exact_smoothing_weight(
        smoothing_weight, smoothing, weight_ptr, SMOOTHING_MODE
    )
    factor = row_factor(
        on_label, smoothing_weight, shift, total, mean_scale, z_scale, z_loss, HAS_Z_LOSS
    )
    if HALF:
        logits = opaque(logits, tl.full([BLOCK_V], zero, tl.float32).to(logits.dtype))
        x = acc_logits(logits, mask, softcap, HAS_SOFTCAP)
        e, part_factor = exp(x - shift), factor
    else:
        part_factor = factor * exp_for_dtype(part_shift - shift, dtype)
    grad = class_gradient(e, x, part_factor, mean_scale * q, softcap, SMOOTHING_MODE, HAS_SOFTCAP)
    if not_ignored:  # One branch for the row costs less than a select for each class.
        d_ptrs = dlogits_ptr + aligned_start(row * d_row, VEC) + column
        store_streaming(d_ptrs, grad, mask, STREAM)
    else:
        d_ptrs = dlogits_ptr + aligned_start(row * d_row, VEC) + column
        store_streaming(d_ptrs, tl.zeros_like(grad), mask, STREAM)
    if VEC > 1:
        edge_grad = class_gradient(
            exp_for_dtype(edge_x - shift, dtype),
            edge_x,
            factor,
            mean_scale * edge_q,
            softcap,
            SMOOTHING_MODE,
            HAS_SOFTCAP,
        )
        edge_ptrs = dlogits_ptr + row * d_row + edge
        store_valid_rows(edge_ptrs, edge_grad, at_edge, not_ignored, False)
    loss = row_loss(
        not_ignored,
        on_label,
        label_x,
        smoothing_weight,
        smoothing_loss,
        shift,
        total,
        mean_scale,
        z_scale,
        z_loss,
        SMOOTHING_MODE,
        HAS_Z_LOSS,
    )
    if FUSED_BLOCK:
        loss = tl.where(owns_label, loss, 0.0)
        reduce_in_last_program(
            loss, index, loss_slots_ptr, loss_ptr, denominator, MEAN, FUSED_BLOCK
        )
    else:
        tl.store(loss_ptr + row, loss, mask=owns_label)
    at_label = label_gradient(
        label,
        label_x,
        in_range,
        on_label,
        shift,
        factor,
        mean_scale,
        weight_ptr,
        classes,
        smoothing,
        softcap,
        SMOOTHING_MODE,
        HAS_SOFTCAP,
        tl.float32,
    )
    # The label's gradient replaces the value that another warp may have stored there.
    tl.debug_barrier()
    label_ptr = dlogits_ptr + row * d_row + label
    tl.store(label_ptr, at_label.to(dtype), mask=in_range & owns_label)
