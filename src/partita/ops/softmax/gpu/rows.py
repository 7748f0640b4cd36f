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
    sum_for_dtype,
)
from ....primitives.gpu.memory import (
    aligned_start,
    edge_columns,
    load_streaming,
    opaque,
    row_span,
    store_streaming,
)
from ....primitives.gpu.reduce import by_lane, lane_sum, locate_tile, tile_ptrs
from ....primitives.gpu.sync import exchange_normalizer, exchange_sums, next_part


@triton.jit
def softmax_tile_kernel(
    input,  # StridedRows
    output,  # StridedRows
    rows,
    classes,
    LOG: tl.constexpr,
    LANES: tl.constexpr,
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
    # Sums for fp32 are in fp64, after those of each thread if it has a part of the row. Larger
    # blocks have enough terms for the rounding errors to average out.
    if DTYPE == tl.float32 and BLOCK_V <= 4096 and LANES > 1:
        sums = lane_sum(by_lane(sums, LANES, 128 // DTYPE.primitive_bitwidth), False)
        total = tl.sum(sums, axis=1).to(tl.float32)[:, None]
    else:
        total = sum_for_dtype(sums, 1, DTYPE)[:, None]
    scale = log_exact(total) if LOG else reciprocal(total)
    for i in tl.static_range(PARTS):
        ptrs = tile_ptrs(output, tile) + i * BLOCK_V * output.column
        y = x[i] - shift - scale if LOG else terms[i] * scale
        tl.store(ptrs, y.to(DTYPE), mask=tile.mask if i == PARTS - 1 else row_mask)


@triton.jit
def softmax_row_kernel(
    input,  # StridedRows of one batch
    output,  # StridedRows of one batch
    slots_ptr,  # [1 + rows * splits] int64, zero: the tile counter, then a slot for each program
    classes,
    splits,
    zero,  # 0.0
    LOG: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the softmax of a row, or of one program's part of a row that several programs share.

    The row is read once and written once, at any width and alignment.
    """
    STREAM: tl.constexpr = SHARED and VEC == 1
    index = next_part(slots_ptr, SHARED)
    row, split = index // splits, (index % splits).to(tl.int32)
    head, body = row_span(row * input.row, classes, VEC)
    input_row = input.ptr + aligned_start(row * input.row, VEC)
    output_row = output.ptr + aligned_start(row * output.row, VEC)
    column = split * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    mask = column // VEC * VEC < body
    packed = load_streaming(input_row + column, mask, -float("inf"), STREAM)
    x = packed.to(tl.float32)
    maximum = tl.max(x, axis=0)
    if VEC > 1:
        edge, edge_mask = edge_columns(head, body, classes, VEC, 2 * VEC)  # [2 * VEC]
        edge_mask &= split == 0
        edge_ptrs = input.ptr + row * input.row + edge
        edge_x = tl.load(edge_ptrs, mask=edge_mask, other=-float("inf")).to(tl.float32)
        maximum = tl.maximum(maximum, tl.max(edge_x, axis=0))
    if HALF:
        packed = opaque(packed, zero)
        x = packed.to(tl.float32)
    DTYPE: tl.constexpr = output.ptr.dtype.element_ty
    part_shift = finite_shift(maximum)
    e = exp(x - part_shift) if LOG else exp_for_dtype(x - part_shift, DTYPE)
    total = sum_for_dtype(e, 0, DTYPE)
    shift = part_shift
    if VEC > 1:
        total += tl.sum(exp(edge_x - part_shift), axis=0)
    if SHARED:
        shift, total = exchange_normalizer(
            slots_ptr + 1 + row * splits, split, splits, maximum, total, BLOCK_SPLITS
        )
    if HALF:
        x = opaque(packed, zero).to(tl.float32)
    if LOG:
        y = x - shift - log_exact(total)
    elif HALF:
        y = exp_for_dtype(x - shift, DTYPE) * reciprocal(total)
    else:
        y = e * divide(exp_exact(part_shift - shift), total)
    store_streaming(output_row + column, y, mask, STREAM)
    if VEC > 1:
        if LOG:
            edge_y = edge_x - shift - log_exact(total)
        else:
            edge_y = exp_for_dtype(edge_x - shift, DTYPE) * reciprocal(total)
        edge_ptrs = output.ptr + row * output.row + edge
        tl.store(edge_ptrs, edge_y.to(DTYPE), mask=edge_mask)


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
def load_output_gradient(
    rows_ptr, column, class_stride, row_mask, mask, STREAM: tl.constexpr, BROADCAST: tl.constexpr
):
    """Return the gradient of the output in a block of classes, 0 outside of the mask.

    With BROADCAST, all classes of a row share one number, as in the gradient of a sum.
    """
    if BROADCAST:
        return tl.where(mask, tl.load(rows_ptr, mask=row_mask, other=0.0), 0.0)
    else:
        return load_streaming(rows_ptr + column * class_stride, mask, 0.0, STREAM)


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
            grad_rows, tile.column, grad.column, row_mask, tile.mask, False, BROADCAST
        ).to(ACC_DTYPE)
        y = tl.load(tile_ptrs(output, tile), mask=tile.mask, other=0.0).to(ACC_DTYPE)
        total = tl.sum(dy if LOG else dy * y, axis=1)[:, None]
        dx = input_gradient(dy, y, total, LOG, DTYPE)
        tl.store(tile_ptrs(result, tile), dx.to(DTYPE), mask=tile.mask)
    else:
        output_rows = output.ptr + tile.batch * output.batch + tile.row[:, None] * output.row
        result_rows = result.ptr + tile.batch * result.batch + tile.row[:, None] * result.row
        total = tl.zeros([ROWS], tl.float64)
        for start in range(0, classes, BLOCK_V):
            column = start + tile.column  # [1, BLOCK_V]
            mask = row_mask & (column < classes)
            dy = load_output_gradient(
                grad_rows, column, grad.column, row_mask, mask, False, BROADCAST
            ).to(ACC_DTYPE)
            if not LOG:
                y = tl.load(output_rows + column * output.column, mask=mask, other=0.0)
                dy *= y.to(ACC_DTYPE)
            total += tl.sum(dy, axis=1).to(tl.float64)
        for start in range(0, classes, BLOCK_V):
            column = start + tile.column  # [1, BLOCK_V]
            mask = row_mask & (column < classes)
            dy = load_output_gradient(
                grad_rows, column, grad.column, row_mask, mask, False, BROADCAST
            ).to(ACC_DTYPE)
            y = tl.load(output_rows + column * output.column, mask=mask, other=0.0).to(ACC_DTYPE)
            dx = input_gradient(dy, y, total.to(ACC_DTYPE)[:, None], LOG, DTYPE)
            tl.store(result_rows + column * result.column, dx.to(DTYPE), mask=mask)


@triton.jit
def softmax_backward_row_kernel(
    grad,  # StridedRows of one batch
    output,  # StridedRows of one batch
    result,  # StridedRows of one batch
    slots_ptr,  # [1 + rows * splits] int64, zero: the tile counter, then a slot for each program
    classes,
    splits,
    zero,  # 0.0
    LOG: tl.constexpr,
    BROADCAST: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the gradient of a row, or of one program's part of a row that programs share.

    Both tensors are read once and the gradient is written once, at any width and alignment.
    """
    STREAM: tl.constexpr = SHARED and VEC == 1
    index = next_part(slots_ptr, SHARED)
    row, split = index // splits, (index % splits).to(tl.int32)
    head, body = row_span(row * output.row, classes, VEC)
    column = split * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    mask = column // VEC * VEC < body
    grad_start = row * grad.row
    if not BROADCAST:
        grad_start = aligned_start(grad_start, VEC)
    packed_dy = load_output_gradient(
        grad.ptr + grad_start, column, 1, True, mask, STREAM, BROADCAST
    )
    output_row = output.ptr + aligned_start(row * output.row, VEC)
    packed_y = load_streaming(output_row + column, mask, 0.0, STREAM)
    dy, y = packed_dy.to(tl.float32), packed_y.to(tl.float32)
    total = tl.sum(dy if LOG else dy * y, axis=0)
    if VEC > 1:
        edge, edge_mask = edge_columns(head, body, classes, VEC, 2 * VEC)  # [2 * VEC]
        edge_mask &= split == 0
        edge_dy = load_output_gradient(
            grad.ptr + row * grad.row, edge, 1, True, edge_mask, False, BROADCAST
        ).to(tl.float32)
        edge_y = tl.load(output.ptr + row * output.row + edge, mask=edge_mask, other=0.0)
        edge_y = edge_y.to(tl.float32)
        total += tl.sum(edge_dy if LOG else edge_dy * edge_y, axis=0)
    if SHARED:
        slot_ptr = slots_ptr + 1 + row * splits
        total, _ = exchange_sums(slot_ptr, split, splits, total, total, BLOCK_SPLITS)
    if HALF:
        dy, y = opaque(packed_dy, zero).to(tl.float32), opaque(packed_y, zero).to(tl.float32)
    DTYPE: tl.constexpr = result.ptr.dtype.element_ty
    dx = input_gradient(dy, y, total, LOG, DTYPE)
    store_streaming(result.ptr + aligned_start(row * result.row, VEC) + column, dx, mask, STREAM)
    if VEC > 1:
        edge_dx = input_gradient(edge_dy, edge_y, total, LOG, DTYPE)
        tl.store(result.ptr + row * result.row + edge, edge_dx.to(DTYPE), mask=edge_mask)
