"""The kernels of softmax and log-softmax of rows that programs hold, and of their gradients."""

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    divide,
    exp,
    exp_exact,
    exp_for_dtype,
    finite_shift,
    log_exact,
    reciprocal,
    rounded_product,
    row_sum,
)
from ....primitives.gpu.reduce import RowTile, locate_tile, tile_ptrs
from ....primitives.gpu.row_part import (
    in_fp32,
    load_part,
    locate_part,
    part_maximum,
    part_sum,
    renewed,
    row_offset,
    store_slice,
)
from ....primitives.gpu.sync import exchange_normalizer, exchange_sums, next_part


@triton.jit
def softmax_tile_kernel(
    input,  # StridedRows
    output,  # StridedRows
    rows,
    classes,
    LOG: tl.constexpr,
    PARTIALS: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the softmax of whole rows in one tile, with one read and one write."""
    DTYPE: tl.constexpr = output.ptr.dtype.element_ty
    tile = locate_tile(rows, classes, 1, ROWS, BLOCK_V)
    x = tl.load(tile_ptrs(input, tile), mask=tile.mask, other=-float("inf")).to(ACC_DTYPE)
    x -= finite_shift(tl.max(x, axis=1))[:, None]
    e = exp(x) if LOG else exp_for_dtype(x, DTYPE)
    total = row_sum(e, PARTIALS)[:, None]
    y = x - log_exact(total) if LOG else e * reciprocal(total)
    tl.store(tile_ptrs(output, tile), y.to(DTYPE), mask=tile.mask)


@triton.jit
def softmax_row_kernel(
    input,  # StridedRows
    output,  # StridedRows
    slots_ptr,  # [1 + rows * splits] int64, zero: the tile counter, then a slot for each program
    rows,
    classes,
    splits,
    size,  # classes of a part
    zero,  # 0.0
    LOG: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
    FULL: tl.constexpr,
    VEC: tl.constexpr,
):
    """Compute the softmax of a row, or of one program's part of a row that several programs share.

    The row is read once and written once, at any width and alignment.
    """
    SHARED: tl.constexpr = BLOCK_SPLITS > 1
    STREAM: tl.constexpr = SHARED and VEC == 1
    DTYPE: tl.constexpr = output.ptr.dtype.element_ty
    index = next_part(slots_ptr, SHARED).to(tl.int32)
    part = locate_part(input, index, rows, classes, splits, size, LANES, SLICES, FULL, VEC)
    packed = load_part(input, part, -float("inf"), zero, HALF, STREAM, FULL, VEC)
    maximum = part_maximum(in_fp32(packed, part))
    part_shift = finite_shift(maximum)
    packed = renewed(packed, zero, HALF)
    x, e = in_fp32(packed, part), ()
    for i in tl.static_range(SLICES):
        e += (exp(x[i] - part_shift) if LOG else exp_for_dtype(x[i] - part_shift, DTYPE),)
    total = part_sum(e, None, part, VEC)
    shift = part_shift
    if SHARED:
        shift, total = exchange_normalizer(
            slots_ptr + 1 + part.row * splits, part.split, splits, maximum, total, BLOCK_SPLITS
        )
    x = in_fp32(renewed(packed, zero, HALF), part)
    if LOG:
        scale = log_exact(total)
    elif HALF:
        scale = reciprocal(total)
    else:
        scale = divide(exp_exact(part_shift - shift), total)
    for i in tl.static_range(SLICES):
        if LOG:
            y = x[i] - shift - scale
        elif HALF:
            y = exp_for_dtype(x[i] - shift, DTYPE) * scale
        else:
            y = e[i] * scale
        store_slice(output, part, i, y, STREAM, VEC)


@triton.jit
def input_gradient(grad, y, total, LOG: tl.constexpr, dtype: tl.constexpr):
    """Return the gradient of the input from that of the output y.

    `total` is the row's sum of grad for log-softmax, and of grad * y for softmax.
    """
    if LOG:
        return grad - exp_for_dtype(y, dtype) * total
    else:
        return y * (grad - total)


@triton.jit
def load_gradient_tile(grad, output, tile, BROADCAST: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Return the gradient of the output and the output in a tile, 0 outside of its mask.

    With BROADCAST, all classes of a row share one number, as in the gradient of a sum.
    """
    y = tl.load(tile_ptrs(output, tile), mask=tile.mask, other=0.0)
    if BROADCAST:
        ptrs = grad.ptr + tile.batch * grad.batch + tile.row * grad.row
        dy = tl.load(ptrs, mask=tile.row_mask, other=0.0)[:, None]
        dy = tl.where(tile.mask, dy, 0.0)
    else:
        dy = tl.load(tile_ptrs(grad, tile), mask=tile.mask, other=0.0)
    return dy.to(ACC_DTYPE), y.to(ACC_DTYPE)


@triton.jit
def tile_from(tile, start, classes):
    """Return a tile of the first classes moved to those from `start` on."""
    column = start + tile.column
    mask = tile.row_mask[:, None] & (column < classes)
    return RowTile(tile.batch, tile.span, tile.row, column, tile.index, tile.row_mask, mask)


@triton.jit
def softmax_backward_tile_kernel(
    grad,  # StridedRows
    output,  # StridedRows
    result,  # StridedRows
    rows,
    classes,
    LOG: tl.constexpr,
    BROADCAST: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTIALS: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the gradient of rows with two reads, if a tile is WHOLE rows, and one write.

    Rows that are too long to hold are read for their sums first, and then for the result.
    """
    DTYPE: tl.constexpr = result.ptr.dtype.element_ty
    first = locate_tile(rows, classes, 1, ROWS, BLOCK_V)
    if WHOLE:
        dy, y = load_gradient_tile(grad, output, first, BROADCAST, ACC_DTYPE)
        total = row_sum(dy if LOG else rounded_product(dy, y), PARTIALS)[:, None]
        dx = input_gradient(dy, y, total, LOG, DTYPE)
        tl.store(tile_ptrs(result, first), dx.to(DTYPE), mask=first.mask)
    else:
        total = tl.zeros([ROWS], tl.float64)
        for start in range(0, classes, BLOCK_V):
            tile = tile_from(first, start, classes)
            dy, y = load_gradient_tile(grad, output, tile, BROADCAST, ACC_DTYPE)
            total += row_sum(dy if LOG else rounded_product(dy, y), PARTIALS).to(tl.float64)
        for start in range(0, classes, BLOCK_V):
            tile = tile_from(first, start, classes)
            dy, y = load_gradient_tile(grad, output, tile, BROADCAST, ACC_DTYPE)
            dx = input_gradient(dy, y, total.to(ACC_DTYPE)[:, None], LOG, DTYPE)
            tl.store(tile_ptrs(result, tile), dx.to(DTYPE), mask=tile.mask)


@triton.jit
def softmax_backward_row_kernel(
    grad,  # StridedRows
    output,  # StridedRows
    result,  # StridedRows
    slots_ptr,  # [1 + rows * splits] int64, zero: the tile counter, then a slot for each program
    rows,
    classes,
    splits,
    size,  # classes of a part
    zero,  # 0.0
    LOG: tl.constexpr,
    BROADCAST: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
    FULL: tl.constexpr,
    VEC: tl.constexpr,
):
    """Compute the gradient of a row, or of one program's part of a row that programs share.

    Both tensors are read once and the gradient is written once, at any width and alignment.
    """
    SHARED: tl.constexpr = BLOCK_SPLITS > 1
    STREAM: tl.constexpr = SHARED and VEC == 1
    DTYPE: tl.constexpr = result.ptr.dtype.element_ty
    index = next_part(slots_ptr, SHARED).to(tl.int32)
    part = locate_part(output, index, rows, classes, splits, size, LANES, SLICES, FULL, VEC)
    if BROADCAST:
        number = tl.load(grad.ptr + row_offset(grad, part.row, rows)).to(tl.float32)
        packed_dy = ()
        for i in tl.static_range(SLICES):
            packed_dy += (tl.where(part.masks[i], number, 0.0),)
    else:
        packed_dy = load_part(grad, part, 0.0, zero, HALF, STREAM, FULL, VEC)
    packed_y = load_part(output, part, 0.0, zero, HALF, STREAM, FULL, VEC)
    dy, y = in_fp32(packed_dy, part), in_fp32(packed_y, part)
    total = part_sum(dy, None if LOG else y, part, VEC)
    if SHARED:
        slot_ptr = slots_ptr + 1 + part.row * splits
        total, _ = exchange_sums(slot_ptr, part.split, splits, total, total, BLOCK_SPLITS)
    dy = in_fp32(renewed(packed_dy, zero, HALF and not BROADCAST), part)
    y = in_fp32(renewed(packed_y, zero, HALF), part)
    for i in tl.static_range(SLICES):
        dx = input_gradient(dy[i], y[i], total, LOG, DTYPE)
        store_slice(result, part, i, dx, STREAM, VEC)
