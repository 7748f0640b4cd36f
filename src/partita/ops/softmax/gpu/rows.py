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
    row_sum,
)
from ....primitives.gpu.memory import opaque
from ....primitives.gpu.reduce import locate_tile, tile_ptrs
from ....primitives.gpu.row_part import (
    edge_of_part,
    load_logits,
    load_part,
    locate_part,
    part_ptr,
    part_sum,
    row_offset,
    store_part,
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
    PARTS: tl.constexpr,
):
    """Compute the softmax of whole rows in PARTS tiles, with one read and one write.

    Only the last tile of a row reaches beyond its end.
    """
    DTYPE: tl.constexpr = output.ptr.dtype.element_ty
    tile = locate_tile(rows, classes - (PARTS - 1) * BLOCK_V, 1, ROWS, BLOCK_V)
    row_mask = tile.row_mask[:, None]
    x = ()
    for i in tl.static_range(PARTS):
        ptrs = tile_ptrs(input, tile) + i * BLOCK_V * input.column
        mask = tile.mask if i == PARTS - 1 else row_mask
        x += (tl.load(ptrs, mask=mask, other=-float("inf")).to(ACC_DTYPE),)
    maxima = x[0]  # type: ignore[misc]
    for i in tl.static_range(1, PARTS):
        maxima = tl.maximum(maxima, x[i])
    shift = finite_shift(tl.max(maxima, axis=1))[:, None]
    terms = ()
    for i in tl.static_range(PARTS):
        terms += (exp(x[i] - shift) if LOG else exp_for_dtype(x[i] - shift, DTYPE),)
    sums = terms[0]  # type: ignore[misc]
    for i in tl.static_range(1, PARTS):
        sums += terms[i]
    total = row_sum(sums, PARTIALS, 8 if PARTS > 1 else 1)[:, None]
    scale = log_exact(total) if LOG else reciprocal(total)
    for i in tl.static_range(PARTS):
        ptrs = tile_ptrs(output, tile) + i * BLOCK_V * output.column
        y = x[i] - shift - scale if LOG else terms[i] * scale
        tl.store(ptrs, y.to(DTYPE), mask=tile.mask if i == PARTS - 1 else row_mask)


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
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    PARTIALS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the softmax of a row, or of one program's part of a row that several programs share.

    The row is read once and written once, at any width and alignment.
    """
    STREAM: tl.constexpr = SHARED and VEC == 1
    index = next_part(slots_ptr, SHARED).to(tl.int32)
    part = locate_part(input, index, rows, classes, splits, size, PARTIALS, VEC, BLOCK_V)
    packed = load_logits(input, part, zero, HALF, STREAM, VEC)
    x = packed.to(tl.float32)
    maximum = tl.max(x)
    if HALF:
        packed = opaque(packed, zero)
        x = packed.to(tl.float32)
    DTYPE: tl.constexpr = output.ptr.dtype.element_ty
    part_shift = finite_shift(maximum)
    e = exp(x - part_shift) if LOG else exp_for_dtype(x - part_shift, DTYPE)
    total = part_sum(e, 1)
    shift = part_shift
    if SHARED:
        shift, total = exchange_normalizer(
            slots_ptr + 1 + part.row * splits, part.split, splits, maximum, total, BLOCK_SPLITS
        )
    if VEC > 1:
        edge, edge_mask = edge_of_part(part, VEC)  # [2 * VEC]
        edge_ptrs = part_ptr(input, part, VEC) + edge
        edge_x = tl.load(edge_ptrs, mask=edge_mask, other=-float("inf")).to(tl.float32)
    if HALF:
        x = opaque(packed, zero).to(tl.float32)
    if LOG:
        y = x - shift - log_exact(total)
    elif HALF:
        y = exp_for_dtype(x - shift, DTYPE) * reciprocal(total)
    else:
        y = e * divide(exp_exact(part_shift - shift), total)
    store_part(output, part, y, STREAM, VEC)
    if VEC > 1:
        if LOG:
            edge_y = edge_x - shift - log_exact(total)
        else:
            edge_y = exp_for_dtype(edge_x - shift, DTYPE) * reciprocal(total)
        tl.store(part_ptr(output, part, VEC) + edge, edge_y.to(DTYPE), mask=edge_mask)


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
def load_output_gradient(rows_ptr, column, class_stride, row_mask, mask, BROADCAST: tl.constexpr):
    """Return the gradient of the output in a block of classes, 0 outside of the mask.

    With BROADCAST, all classes of a row share one number, as in the gradient of a sum.
    """
    if BROADCAST:
        return tl.where(mask, tl.load(rows_ptr, mask=row_mask, other=0.0), 0.0)
    else:
        return tl.load(rows_ptr + column * class_stride, mask=mask, other=0.0)


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
    tile = locate_tile(rows, classes, 1, ROWS, BLOCK_V)
    row_mask = tile.row_mask[:, None]
    grad_rows = grad.ptr + tile.batch * grad.batch + tile.row[:, None] * grad.row  # [ROWS, 1]
    if WHOLE:
        dy = load_output_gradient(
            grad_rows, tile.column, grad.column, row_mask, tile.mask, BROADCAST
        ).to(ACC_DTYPE)
        y = tl.load(tile_ptrs(output, tile), mask=tile.mask, other=0.0).to(ACC_DTYPE)
        total = row_sum(dy if LOG else dy * y, PARTIALS)[:, None]
        dx = input_gradient(dy, y, total, LOG, DTYPE)
        tl.store(tile_ptrs(result, tile), dx.to(DTYPE), mask=tile.mask)
    else:
        output_rows = output.ptr + tile.batch * output.batch + tile.row[:, None] * output.row
        result_rows = result.ptr + tile.batch * result.batch + tile.row[:, None] * result.row
        total = tl.zeros([ROWS], tl.float64)
        for start in range(0, classes, BLOCK_V):
            column = start + tile.column  # [1, BLOCK_V]
            mask = row_mask & (column < classes)
            dy = load_output_gradient(grad_rows, column, grad.column, row_mask, mask, BROADCAST).to(
                ACC_DTYPE
            )
            if not LOG:
                y = tl.load(output_rows + column * output.column, mask=mask, other=0.0)
                dy *= y.to(ACC_DTYPE)
            total += row_sum(dy, PARTIALS).to(tl.float64)
        for start in range(0, classes, BLOCK_V):
            column = start + tile.column  # [1, BLOCK_V]
            mask = row_mask & (column < classes)
            dy = load_output_gradient(grad_rows, column, grad.column, row_mask, mask, BROADCAST).to(
                ACC_DTYPE
            )
            y = tl.load(output_rows + column * output.column, mask=mask, other=0.0).to(ACC_DTYPE)
            dx = input_gradient(dy, y, total.to(ACC_DTYPE)[:, None], LOG, DTYPE)
            tl.store(result_rows + column * result.column, dx.to(DTYPE), mask=mask)


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
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    PARTIALS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the gradient of a row, or of one program's part of a row that programs share.

    Both tensors are read once and the gradient is written once, at any width and alignment.
    """
    STREAM: tl.constexpr = SHARED and VEC == 1
    index = next_part(slots_ptr, SHARED).to(tl.int32)
    part = locate_part(output, index, rows, classes, splits, size, PARTIALS, VEC, BLOCK_V)
    if BROADCAST:
        packed_dy = tl.load(grad.ptr + row_offset(grad, part.row, rows))
    else:
        packed_dy = load_part(grad, part, 0.0, STREAM, VEC)
    packed_y = load_part(output, part, 0.0, STREAM, VEC)
    dy, y = packed_dy.to(tl.float32), packed_y.to(tl.float32)
    terms = dy if LOG else dy * y
    if BROADCAST or VEC > 1:
        terms = tl.where(part.mask, terms, 0.0)
    total = part_sum(terms)
    if SHARED:
        slot_ptr = slots_ptr + 1 + part.row * splits
        total, _ = exchange_sums(slot_ptr, part.split, splits, total, total, BLOCK_SPLITS)
    if VEC > 1:
        edge, edge_mask = edge_of_part(part, VEC)  # [2 * VEC]
        edge_dy = packed_dy.to(tl.float32)
        if not BROADCAST:
            edge_ptrs = part_ptr(grad, part, VEC) + edge
            edge_dy = tl.load(edge_ptrs, mask=edge_mask, other=0.0).to(tl.float32)
        edge_ptrs = part_ptr(output, part, VEC) + edge
        edge_y = tl.load(edge_ptrs, mask=edge_mask, other=0.0).to(tl.float32)
    if HALF:
        y = opaque(packed_y, zero).to(tl.float32)
        if not BROADCAST:
            dy = opaque(packed_dy, zero).to(tl.float32)
    DTYPE: tl.constexpr = result.ptr.dtype.element_ty
    dx = input_gradient(dy, y, total, LOG, DTYPE)
    store_part(result, part, dx, STREAM, VEC)
    if VEC > 1:
        edge_dx = input_gradient(edge_dy, edge_y, total, LOG, DTYPE)
        tl.store(part_ptr(result, part, VEC) + edge, edge_dx.to(DTYPE), mask=edge_mask)
