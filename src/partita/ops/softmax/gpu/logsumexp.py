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
    input_ptr,  # [batches, rows, classes]
    logsumexp_ptr,  # [batches, rows]
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    slots_ptr,  # [batches, rows, 1 + splits] int64, zero: a counter, then a slot for each program
    rows,
    classes,
    splits,
    classes_per_split,
    batch_stride,
    row_stride,
    class_stride,
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
    EXACT: tl.constexpr = LANES == 1 and input_ptr.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 1 if LANES == 1 else 128 // input_ptr.dtype.element_ty.primitive_bitwidth
    split, batch, row, start, head, body = program_rows(
        rows, splits, batch_stride, row_stride, classes, VEC, ROWS
    )
    row_ptrs = row_pointers(input_ptr, start, row_stride, VEC, ROWS)  # [ROWS, 1]
    maximum, total = (
        tl.full([ROWS, LANES], -float("inf"), ACC_DTYPE),
        tl.zeros([ROWS, LANES], tl.float64),
    )
    last = tl.minimum((split + 1) * span, classes)
    whole = unmasked_end(split * span, last, body, BLOCK_V, LANES)
    for first in range(split * span, whole, BLOCK_V):
        x = tl.load(source + (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :] * in_class).to(
            ACC_DTYPE
        )
        maximum, total = online_softmax(maximum, total, by_lane(x, LANES, VECTOR), EXACT)
    for first in range(unmasked, last, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        inside = (row < rows)[:, None] & (column // VEC * VEC < body)
        x = tl.load(source + column * in_class, mask=inside, other=-float("inf")).to(ACC_DTYPE)
        maximum, total = online_softmax(maximum, total, by_lane(x, LANES, VECTOR), EXACT)
    if VEC > 1:
        edge, edge_mask = edge_columns(head, body, classes, VEC, LANES)  # [LANES]
        edge_x = tl.load(
            input_ptr + start + edge[None, :],
            mask=(edge_mask & (split == 0))[None, :],
            other=-float("inf"),
        ).to(ACC_DTYPE)
        maximum, total = online_softmax(maximum, total, by_lane(edge_x, LANES, 1), EXACT)
    maximum, total, _ = merge_lanes(maximum, total)
    written = row < rows
    total = total.to(ACC_DTYPE)
    if SHARED:
        box = slot_base(boxes_ptr, tl.sum(batch * rows + row, axis=0), splits)
        store_partial(box, split, tl.sum(maximum, axis=0), tl.sum(total, axis=0))
        written &= arrives_last(box, splits)
        maxima, sums, held = load_partials(box, splits, BLOCK_SPLITS)
        most, all_sums = merge_normalizers(maxima, sums, held)
        maximum, total = tl.zeros([ROWS], ACC_DTYPE) + most, tl.zeros([ROWS], ACC_DTYPE) + all_sums
    place = batch * rows + row
    result = tl.where(maximum == float("inf"), maximum, maximum + log_exact(total))
    tl.store(logsumexp_ptr + index, result.to(logsumexp_ptr.dtype.element_ty), mask=write_mask)
    tl.store(maximum_ptr + index, maximum, mask=write_mask)
    tl.store(sumexp_ptr + index, total, mask=write_mask)


@triton.jit
def logsumexp_backward_kernel(
    grad_ptr,  # [batches, rows]
    input_ptr,  # [batches, rows, classes]
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    result_ptr,  # [batches, rows, classes]
    rows,
    classes,
    in_batch,
    in_row,
    in_class,
    result_batch,
    result_row,
    result_class,
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
        tl.load(grad_ptr + place, mask=row < rows, other=0.0).to(ACC_DTYPE),
        tl.load(sumexp_ptr + place, mask=row < rows, other=1.0),
    )
    shift = finite_shift(tl.load(maximum_ptr + place, mask=row < rows, other=0.0))
    column = ((tl.program_id(0) % spans).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V))[
        None, :
    ]  # [1, BLOCK_V]
    inside = (row < rows)[:, None] & (column < classes)
    x = tl.load(
        input_ptr + batch * in_batch + row[:, None] * in_row + column * in_class,
        mask=inside,
        other=-float("inf"),
    ).to(ACC_DTYPE)
    result = exp_for_dtype(x - shift[:, None], result_ptr.dtype.element_ty) * scale[:, None]
    result_ptrs = (
        result_ptr
        + batch * result_batch_stride
        + row[:, None] * result_row_stride
        + column * result_class_stride
    )
    tl.store(result_ptrs, result.to(result_ptr.dtype.element_ty), mask=mask)
