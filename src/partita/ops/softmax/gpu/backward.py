"""The backward kernels of softmax and log-softmax, one for each kind of `RowPlan`."""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp_for_dtype
from ....primitives.gpu.memory import (
    aligned_start,
    edge_columns,
    load_streaming,
    opaque,
    row_span,
    store_streaming,
)
from ....primitives.gpu.sync import exchange_sum, next_part


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
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the gradient of whole rows in one tile, with two reads and one write."""
    blocks = tl.cdiv(rows, ROWS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    block = (tl.program_id(0) % blocks).to(tl.int64)
    row = (block * ROWS + tl.arange(0, ROWS))[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK_V).to(tl.int64)[None, :]  # [1, BLOCK_V]
    mask = (row < rows) & (column < classes)
    grad_rows = grad.ptr + batch * grad.batch + row * grad.row  # [ROWS, 1]
    dy = load_output_gradient(grad_rows, column, grad.column, row < rows, mask, False, BROADCAST)
    dy = dy.to(ACC_DTYPE)
    output_ptrs = output.ptr + batch * output.batch + row * output.row + column * output.column
    y = tl.load(output_ptrs, mask=mask, other=0.0).to(ACC_DTYPE)
    total = tl.sum(dy if LOG else dy * y, axis=1)[:, None]
    dx = input_gradient(dy, y, total, LOG, result.ptr.dtype.element_ty)
    result_ptrs = result.ptr + batch * result.batch + row * result.row + column * result.column
    tl.store(result_ptrs, dx.to(result.ptr.dtype.element_ty), mask=mask)


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
        total = exchange_sum(slots_ptr + 1 + row * splits, split, splits, total, BLOCK_SPLITS)
    if HALF:
        dy, y = opaque(packed_dy, zero).to(tl.float32), opaque(packed_y, zero).to(tl.float32)
    DTYPE: tl.constexpr = result.ptr.dtype.element_ty
    dx = input_gradient(dy, y, total, LOG, DTYPE)
    store_streaming(result.ptr + aligned_start(row * result.row, VEC) + column, dx, mask, STREAM)
    if VEC > 1:
        edge_dx = input_gradient(edge_dy, edge_y, total, LOG, DTYPE)
        tl.store(result.ptr + row * result.row + edge, edge_dx.to(DTYPE), mask=edge_mask)


@triton.jit
def softmax_backward_loop_kernel(
    grad,  # StridedRows
    output,  # StridedRows
    result,  # StridedRows
    rows,
    classes,
    LOG: tl.constexpr,
    BROADCAST: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the gradient of rows that are too long to hold.

    The first pass reads a row for its sum, and the second for the result.
    """
    blocks = tl.cdiv(rows, ROWS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    block = (tl.program_id(0) % blocks).to(tl.int64)
    row = (block * ROWS + tl.arange(0, ROWS))[:, None]  # [ROWS, 1]
    grad_rows = grad.ptr + batch * grad.batch + row * grad.row  # [ROWS, 1]
    output_rows = output.ptr + batch * output.batch + row * output.row
    result_rows = result.ptr + batch * result.batch + row * result.row
    total = tl.zeros([ROWS], tl.float64)
    for start in range(0, classes, BLOCK_V):
        column = (start + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        mask = (row < rows) & (column < classes)
        dy = load_output_gradient(
            grad_rows, column, grad.column, row < rows, mask, False, BROADCAST
        ).to(ACC_DTYPE)
        if not LOG:
            y = tl.load(output_rows + column * output.column, mask=mask, other=0.0)
            dy *= y.to(ACC_DTYPE)
        total += tl.sum(dy, axis=1).to(tl.float64)
    for start in range(0, classes, BLOCK_V):
        column = (start + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        mask = (row < rows) & (column < classes)
        dy = load_output_gradient(
            grad_rows, column, grad.column, row < rows, mask, False, BROADCAST
        ).to(ACC_DTYPE)
        y = tl.load(output_rows + column * output.column, mask=mask, other=0.0).to(ACC_DTYPE)
        dx = input_gradient(dy, y, total.to(ACC_DTYPE)[:, None], LOG, result.ptr.dtype.element_ty)
        tl.store(
            result_rows + column * result.column, dx.to(result.ptr.dtype.element_ty), mask=mask
        )
