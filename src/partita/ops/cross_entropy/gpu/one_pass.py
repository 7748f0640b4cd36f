"""Kernels that compute the loss and the gradient of a row in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import capped_logits, exp_for_dtype, finite_shift, row_sum
from ....primitives.gpu.reduce import load_capped, locate_tile
from ....primitives.gpu.row_part import load_part, locate_part, row_offset
from ....primitives.gpu.sync import exchange_normalizer, exchange_sums, next_part
from .reduction import store_losses
from .row_math import (
    Label,
    LossOptions,
    Smoothing,
    class_gradient,
    exact_smoothing_weight,
    gradient_terms,
    label_weights,
    load_label,
    loss_scales,
    row_loss,
    smoothing_loss,
    store_label_gradient,
    store_valid_rows,
)
from .row_part import has_class, part_logits, store_part_gradient


@triton.jit
def cross_entropy_tile_kernel(
    logits,  # StridedRows
    targets,  # Targets
    losses,  # LossSum
    dlogits,  # StridedRows, which may be the logits
    rows,
    smoothing: tl.float64,
    softcap: tl.float64,
    z_loss: tl.float64,
    SMOOTHING_MODE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    MEAN: tl.constexpr,
    FUSED_BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
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
    spread = smoothing if SMOOTHING_MODE else None
    options = LossOptions(targets, smoothing, softcap, z_loss, spread)
    tile = locate_tile(rows, targets.classes, 1, ROWS, BLOCK_V)
    batch, row, column, mask = tile.batch, tile.row, tile.column, tile.mask
    x_rows = logits.ptr + batch * logits.batch + row * logits.row  # [ROWS]
    x_ptrs = x_rows[:, None] + column * logits.column
    packed = tl.load(x_ptrs, mask=mask, other=-float("inf"))
    # The labels are loaded before anything waits for the rows.
    label = load_label(tile.index, tile.row_mask, x_rows, logits.column, None, BLOCK_V, options)
    M = tl.num_programs(0) // tl.cdiv(rows, ROWS) * rows
    scales = loss_scales(losses, M, options, MEAN, FUSED_BLOCK)
    x = capped_logits(packed, mask, softcap, ACC_DTYPE)
    dtype: tl.constexpr = dlogits.ptr.dtype.element_ty
    shift = finite_shift(tl.max(x, axis=1))
    e = exp_for_dtype(x - shift[:, None], dtype)
    total = row_sum(e, PARTIALS)
    if SMOOTHING_MODE:
        q, factor, q_terms = smoothing_loss(options, tile, x, shift[:, None], column, mask)
        q_loss = factor * row_sum(q_terms, PARTIALS)
        q_sum = row_sum(tl.zeros_like(x) + q, PARTIALS)
        if HAS_SOFTCAP and packed.dtype.primitive_bitwidth == 16:
            # A gather has any layout. That of the sums would move above the conversion to fp32, so
            # that each thread soft-caps a whole tile, in code that takes minutes to compile.
            q_loss = tl.gather(q_loss, tl.arange(0, ROWS), 0)
            q_sum = tl.gather(q_sum, tl.arange(0, ROWS), 0)
        sums = Smoothing(exact_smoothing_weight(q_sum, options), q_loss)
    else:
        q, zeros = x, tl.zeros(shift.shape, ACC_DTYPE)
        sums = Smoothing(zeros, zeros)
    terms = gradient_terms(label, sums, shift, total, scales, options)
    grad = class_gradient(e, x, terms.factor[:, None], terms.scale * q, options)
    d_rows = dlogits.ptr + batch * dlogits.batch + row * dlogits.row  # [ROWS]
    # The gradient may replace the logits, so every warp must have read the logit at the label
    # before any warp writes over it.
    tl.debug_barrier()
    d_ptrs = d_rows[:, None] + column * dlogits.column
    store_valid_rows(d_ptrs, grad, mask, label.not_ignored[:, None])
    loss = row_loss(label, sums, shift, total, scales, options)
    program = tl.program_id(0)
    store_losses(losses, tile.index, loss, tile.row_mask, program, scales, MEAN, FUSED_BLOCK)
    label_mask = label.in_range & tile.row_mask
    store_label_gradient(d_rows, dlogits.column, label, label_mask, terms, options)


@triton.jit
def cross_entropy_row_kernel(
    logits,  # StridedRows
    targets,  # Targets that are labels
    losses,  # LossSum
    slots_ptr,  # [1 + 2 * parts] int64, zero: the counter, then two slots for each part
    dlogits,  # StridedRows, which may be the logits
    rows,
    parts,  # of all rows
    splits,  # programs that share a row
    size,  # classes of a part
    smoothing: tl.float64,
    z_loss: tl.float64,
    zero,  # 0.0, which the compiler does not know
    SMOOTHING_MODE: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    MEAN: tl.constexpr,
    FUSED_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
    FULL: tl.constexpr,
    VEC: tl.constexpr,
):
    """Compute loss and gradient of rows of any width and alignment with one read and one write.

    Programs of a shared row exchange maxima and sums of their parts through the slots. With
    FUSED_BLOCK the kernel also reduces the loss.
    """
    smoothing = tl.full([], smoothing, tl.float32)
    z_loss = tl.full([], z_loss, tl.float32) if HAS_Z_LOSS else None
    spread = smoothing if SMOOTHING_MODE else None
    options = LossOptions(targets, smoothing, None, z_loss, spread)
    SHARED: tl.constexpr = BLOCK_SPLITS > 1
    STREAM: tl.constexpr = SHARED and VEC == 1
    dtype: tl.constexpr = dlogits.ptr.dtype.element_ty
    index = next_part(slots_ptr, SHARED).to(tl.int32)
    part = locate_part(logits, index, rows, targets.classes, splits, size, LANES, SLICES, FULL, VEC)
    row, split = part.row, part.split
    packed = load_part(logits, part, -float("inf"), zero, HALF, STREAM, FULL, VEC)
    label = tl.load(targets.labels + row).to(tl.int64)
    scales = loss_scales(losses, parts // splits, options, MEAN, FUSED_BLOCK)
    not_ignored, in_range, weight = label_weights(label, options)
    is_owner = has_class(part, label, in_range, size)
    mask = in_range & is_owner
    x_ptr = logits.ptr + row_offset(logits, row, rows) + label
    label_x = load_capped(x_ptr, mask, options.softcap, tl.float32)
    label = Label(label, not_ignored, in_range, weight, label_x)
    loaded, sums = part_logits(packed, part, options, zero, dtype, HALF, VEC)
    shift, total = loaded.shift, loaded.total
    if SHARED:
        slot_ptr = slots_ptr + 1 + row * splits
        shift, total = exchange_normalizer(
            slot_ptr, split, splits, loaded.maximum, total, BLOCK_SPLITS
        )
    if options.spread is not None:
        q_sum, q_loss = sums.weight, sums.loss
        if SHARED:  # The slots follow those of the normalizers.
            q_loss += q_sum * (shift - loaded.shift)
            q_sum, q_loss = exchange_sums(
                slot_ptr + parts, split, splits, q_sum, q_loss, BLOCK_SPLITS
            )
        sums = Smoothing(exact_smoothing_weight(q_sum, options), q_loss)
    terms = gradient_terms(label, sums, shift, total, scales, options)
    store_part_gradient(dlogits, part, loaded, label, terms, options, zero, HALF, STREAM, VEC)
    loss = row_loss(label, sums, shift, total, scales, options)
    store_losses(losses, row, loss, is_owner, index, scales, MEAN, FUSED_BLOCK)
    d_ptr = dlogits.ptr + row_offset(dlogits, row, rows)
    store_label_gradient(d_ptr, 1, label, mask, terms, options)
