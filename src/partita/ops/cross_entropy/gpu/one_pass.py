"""Kernels that compute the loss and the gradient of a row in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import exp_for_dtype, finite_shift, sum_for_dtype
from ....primitives.gpu.sync import next_part
from .reduction import loss_scales, store_losses
from .row_math import (
    Label,
    LossOptions,
    Smoothing,
    acc_logits,
    class_gradient,
    exact_smoothing_weight,
    gradient_terms,
    label_weights,
    load_label,
    load_label_logits,
    locate_tile,
    row_loss,
    smoothing_terms,
    smoothing_weights,
    store_label_gradient,
    store_valid_rows,
)
from .row_part import (
    has_class,
    load_part,
    locate_part,
    part_logits,
    part_smoothing,
    row_normalizer,
    store_part_gradient,
)


@triton.jit
def tile_smoothing(
    x,
    shift,
    mask,
    probability_ptr,
    column,
    options,
    SMOOTHING_MODE: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return the target weights q of a tile, and their sums over its rows."""
    if SMOOTHING_MODE == 0:
        zeros = tl.zeros(shift.shape, options.smoothing.dtype)
        return x, Smoothing(zeros, zeros)
    else:
        q = smoothing_weights(probability_ptr, mask, column, options, SMOOTHING_MODE)
        weight = sum_for_dtype(q, 1, dtype)
        loss = sum_for_dtype(smoothing_terms(q, shift[:, None], x), 1, dtype)
        return q, Smoothing(exact_smoothing_weight(weight, options, SMOOTHING_MODE), loss)


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
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    z_loss = tl.full([], z_loss, ACC_DTYPE) if HAS_Z_LOSS else None
    options = LossOptions(weight_ptr, classes, ignore_index, smoothing, softcap, z_loss)
    tile = locate_tile(rows, classes, 1, ROWS, BLOCK_V)
    batch, row, column, mask = tile.batch, tile.row, tile.column, tile.mask
    start = logits_ptr + batch * x_batch + row * x_row  # [ROWS]
    logits = tl.load(start[:, None] + column * x_class, mask=mask, other=-float("inf"))
    index = batch * rows + row
    # The labels are loaded before anything waits for the rows.
    row_mask = tile.row_mask
    label = load_label(
        target_ptr, index, row_mask, start, x_class, None, BLOCK_V, options, SMOOTHING_MODE
    )
    M = tl.num_programs(0) // tl.cdiv(rows, ROWS) * rows
    scales = loss_scales(shares_ptr, target_ptr, M, options, SMOOTHING_MODE, MEAN, FUSED_BLOCK)
    x = acc_logits(logits, mask, options)
    dtype: tl.constexpr = dlogits_ptr.dtype.element_ty
    shift = finite_shift(tl.max(x, axis=1))
    e = exp_for_dtype(x - shift[:, None], dtype)
    total = sum_for_dtype(e, 1, dtype)
    t_ptrs = target_ptr + batch * t_batch + row[:, None] * t_row + column * t_class
    q, smoothing = tile_smoothing(x, shift, mask, t_ptrs, column, options, SMOOTHING_MODE, dtype)
    terms = gradient_terms(label, smoothing, shift, total, scales, options)
    grad = class_gradient(e, x, terms.factor[:, None], terms.scale * q, options, SMOOTHING_MODE)
    d_start = dlogits_ptr + batch * d_batch + row * d_row  # [ROWS]
    # The gradient may replace the logits, so every warp must have read the logit at the label
    # before any warp writes over it.
    tl.debug_barrier()
    d_ptrs = d_start[:, None] + column * d_class
    store_valid_rows(d_ptrs, grad, mask, label.not_ignored[:, None], False)
    loss = row_loss(label, smoothing, shift, total, scales, options, SMOOTHING_MODE)
    program = tl.program_id(0)
    store_losses(loss_ptr, index, loss, row_mask, slots_ptr, program, scales, MEAN, FUSED_BLOCK)
    label_mask = label.in_range & row_mask
    store_label_gradient(d_start, d_class, label, label_mask, terms, options, SMOOTHING_MODE)


@triton.jit
def load_part_label(target_ptr, row_ptr, part, BLOCK_V: tl.constexpr, options):
    """Load the label of a row, and return whether it belongs to this program's part.

    Its logit is 0 in the other programs.
    """
    label = tl.load(target_ptr).to(tl.int64)
    not_ignored, in_range, weight = label_weights(label, options)
    is_owner = has_class(part, label, in_range, BLOCK_V)
    x = load_label_logits(row_ptr + label, in_range & is_owner, options)
    return Label(label, not_ignored, in_range, weight, x), is_owner


@triton.jit
def cross_entropy_of_part(
    index,
    logits_ptr,
    target_ptr,
    shares_ptr,
    slots_ptr,
    loss_ptr,
    loss_slots_ptr,
    dlogits_ptr,
    parts,
    splits,
    x_row,
    d_row,
    options,
    zero,
    SMOOTHING_MODE: tl.constexpr,
    MEAN: tl.constexpr,
    FUSED_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute loss and gradient of a part of a row.

    It returns the index of the program's next part, if the program takes several.
    """
    program, classes = index, options.classes
    STREAM: tl.constexpr = SHARED and VEC == 1
    row = index // splits
    part = locate_part((index % splits).to(tl.int32), row * x_row, classes, VEC, BLOCK_V)
    row_ptr = logits_ptr + row * x_row
    logits = load_part(logits_ptr, row * x_row, part, STREAM, VEC)
    M = parts // splits
    scales = loss_scales(shares_ptr, target_ptr, M, options, SMOOTHING_MODE, MEAN, FUSED_BLOCK)
    label, is_owner = load_part_label(target_ptr + row, row_ptr, part, BLOCK_V, options)
    dtype: tl.constexpr = dlogits_ptr.dtype.element_ty
    loaded = part_logits(logits, row_ptr, part, classes, options, zero, dtype, HALF, VEC)
    shift, total = row_normalizer(loaded, slots_ptr, row, splits, SHARED, BLOCK_SPLITS)
    weights, smoothing = part_smoothing(
        loaded,
        shift,
        slots_ptr,
        row,
        splits,
        parts,
        options,
        SMOOTHING_MODE,
        SHARED,
        BLOCK_SPLITS,
        VEC,
    )
    if HALF and SHARED and VEC > 1:
        index = next_part(slots_ptr, SHARED)
    terms = gradient_terms(label, smoothing, shift, total, scales, options)
    store_part_gradient(
        dlogits_ptr,
        row * d_row,
        loaded,
        weights,
        label,
        terms,
        options,
        SMOOTHING_MODE,
        HALF,
        STREAM,
        VEC,
    )
    loss = row_loss(label, smoothing, shift, total, scales, options, SMOOTHING_MODE)
    store_losses(loss_ptr, row, loss, is_owner, loss_slots_ptr, program, scales, MEAN, FUSED_BLOCK)
    d_start, mask = dlogits_ptr + row * d_row, label.in_range & is_owner
    store_label_gradient(d_start, 1, label, mask, terms, options, SMOOTHING_MODE)
    return index


@triton.jit
def cross_entropy_row_kernel(
    logits_ptr,  # [rows, classes]
    target_ptr,  # [rows] labels
    weight_ptr,  # [classes] or None
    shares_ptr,  # [2, SHARES] partial sums of the mean's denominators, or None
    slots_ptr,  # [1 + 2 * parts] int64, zero: the counter, then two slots for each part
    loss_ptr,  # [rows], or [] with FUSED_BLOCK
    loss_slots_ptr,  # [1 + programs] int64, zero, with FUSED_BLOCK; None for a single program
    dlogits_ptr,  # [rows, classes], which may be the logits
    parts,  # of all rows
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
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute loss and gradient of rows of any width and alignment with one read and one write.

    Programs of a SHARED row exchange maxima and sums of their parts through the slots. Those of a
    HALF type whose rows start anywhere take one part after the other. With FUSED_BLOCK the kernel
    also reduces the loss.
    """
    smoothing = tl.full([], smoothing, tl.float32)
    softcap = tl.full([], softcap, tl.float32) if HAS_SOFTCAP else None
    z_loss = tl.full([], z_loss, tl.float32) if HAS_Z_LOSS else None
    options = LossOptions(weight_ptr, classes, ignore_index, smoothing, softcap, z_loss)
    index = next_part(slots_ptr, SHARED)
    pointers = (logits_ptr, target_ptr, shares_ptr, slots_ptr, loss_ptr, loss_slots_ptr)
    args = (dlogits_ptr, parts, splits, x_row, d_row, options, zero)
    if HALF and SHARED and VEC > 1:  # A loop around parts in fp32 would spill registers.
        while index < parts:
            index = cross_entropy_of_part(
                index,
                *pointers,
                *args,
                SMOOTHING_MODE,
                MEAN,
                FUSED_BLOCK,
                HALF,
                SHARED,
                BLOCK_SPLITS,
                VEC,
                BLOCK_V,
            )
    else:
        cross_entropy_of_part(
            index,
            *pointers,
            *args,
            SMOOTHING_MODE,
            MEAN,
            FUSED_BLOCK,
            HALF,
            SHARED,
            BLOCK_SPLITS,
            VEC,
            BLOCK_V,
        )
