"""The kernels of log-sum-exp and of its gradient."""

import triton
import triton.language as tl

from ....primitives.gpu.math import divide, exp_for_dtype, finite_shift, log_exact
from ....primitives.gpu.memory import edge_columns
from ....primitives.gpu.reduce import (
    by_lane,
    merge_lanes,
    online_softmax,
    program_rows,
    row_pointers,
    unmasked_end,
)
from ....primitives.gpu.sync import (
    arrives_last,
    load_partials,
    merge_normalizers,
    slot_base,
    store_partial,
)


@triton.jit
def logsumexp_kernel(
    input,  # StridedRows
    results,  # LogSumExp, [batches, rows]
    slots_ptr,  # [batches, rows, 1 + splits] int64, zero: a counter, then a slot for each program
    rows,
    classes,
    splits,
    classes_per_split,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the log-sum-exp of rows, or of parts of a row, with one read in blocks.

    The last program of a row merges the parts.
    """
    EXACT: tl.constexpr = LANES == 1 and input.ptr.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 1 if LANES == 1 else 128 // input.ptr.dtype.element_ty.primitive_bitwidth
    split, batch, row, start, head, body = program_rows(
        rows, splits, input.batch, input.row, classes, VEC, ROWS
    )
    row_ptrs = row_pointers(input.ptr, start, input.row, VEC, ROWS)  # [ROWS, 1]
    maximum = tl.full([ROWS, LANES], -float("inf"), ACC_DTYPE)
    total = tl.zeros([ROWS, LANES], tl.float64)
    last = tl.minimum((split + 1) * classes_per_split, classes)
    unmasked = unmasked_end(split * classes_per_split, last, body, BLOCK_V, LANES)
    for first in range(split * classes_per_split, unmasked, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        x = tl.load(row_ptrs + column * input.column).to(ACC_DTYPE)
        maximum, total = online_softmax(maximum, total, by_lane(x, LANES, VECTOR), EXACT)
    for first in range(unmasked, last, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        mask = (row < rows)[:, None] & (column // VEC * VEC < body)
        x = tl.load(row_ptrs + column * input.column, mask=mask, other=-float("inf")).to(ACC_DTYPE)
        maximum, total = online_softmax(maximum, total, by_lane(x, LANES, VECTOR), EXACT)
    if VEC > 1:
        edge, edge_mask = edge_columns(head, body, classes, VEC, LANES)  # [LANES]
        edge_mask = (edge_mask & (split == 0))[None, :]
        edge_x = tl.load(input.ptr + start + edge[None, :], mask=edge_mask, other=-float("inf"))
        edge_x = edge_x.to(ACC_DTYPE)
        maximum, total = online_softmax(maximum, total, by_lane(edge_x, LANES, 1), EXACT)
    maximum, total, _ = merge_lanes(maximum, total)
    write_mask = row < rows
    total = total.to(ACC_DTYPE)
    if SHARED:
        row_slots_ptr = slot_base(slots_ptr, tl.sum(batch * rows + row, axis=0), splits)
        store_partial(row_slots_ptr, split, tl.sum(maximum, axis=0), tl.sum(total, axis=0))
        write_mask &= arrives_last(row_slots_ptr, splits)
        maxima, sums, valid = load_partials(row_slots_ptr, splits, BLOCK_SPLITS)
        row_max, row_total = merge_normalizers(maxima, sums, valid)
        maximum = tl.zeros([ROWS], ACC_DTYPE) + row_max
        total = tl.zeros([ROWS], ACC_DTYPE) + row_total
    index = batch * rows + row
    result = tl.where(maximum == float("inf"), maximum, maximum + log_exact(total))
    result_ptrs = results.logsumexp + index
    tl.store(result_ptrs, result.to(result_ptrs.dtype.element_ty), mask=write_mask)
    tl.store(results.maximum + index, maximum, mask=write_mask)
    tl.store(results.sumexp + index, total, mask=write_mask)


@triton.jit
def logsumexp_backward_kernel(
    grad,  # RowNumbers
    input,  # StridedRows
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    result,  # StridedRows
    rows,
    classes,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute a tile of the softmax times the row's gradient, with one read and one write."""
    column_blocks = tl.cdiv(classes, BLOCK_V)
    block = tl.program_id(0) // column_blocks
    batch = (block // tl.cdiv(rows, ROWS)).to(tl.int64)
    row = (block % tl.cdiv(rows, ROWS)).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    index = batch * rows + row
    scale = divide(
        tl.load(grad.ptr + index * grad.step, mask=row < rows, other=0.0).to(ACC_DTYPE),
        tl.load(sumexp_ptr + index, mask=row < rows, other=1.0),
    )
    shift = finite_shift(tl.load(maximum_ptr + index, mask=row < rows, other=0.0))
    column_block = (tl.program_id(0) % column_blocks).to(tl.int64)
    column = (column_block * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]  # [1, BLOCK_V]
    mask = (row < rows)[:, None] & (column < classes)
    input_ptrs = input.ptr + batch * input.batch + row[:, None] * input.row + column * input.column
    x = tl.load(input_ptrs, mask=mask, other=-float("inf")).to(ACC_DTYPE)
    dtype: tl.constexpr = result.ptr.dtype.element_ty
    dx = exp_for_dtype(x - shift[:, None], dtype) * scale[:, None]
    result_rows = result.ptr + batch * result.batch + row[:, None] * result.row  # [ROWS, 1]
    tl.store(result_rows + column * result.column, dx.to(dtype), mask=mask)
