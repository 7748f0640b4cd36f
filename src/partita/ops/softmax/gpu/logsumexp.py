"""Log-sum-exp and its backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from ....primitives.gpu.row_plan import (
    RowView,
    classes_per_program,
    elementwise_plan,
    merge_slots,
    reduce_options,
    reduce_plan_for,
    row_view_or_copy,
    tile_options,
    with_output,
)
from ....primitives.gpu.sync import (
    arrives_last,
    load_partials,
    merge_normalizers,
    slot_base,
    store_partial,
)
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch
from ..reference import LogSumExp


@triton.jit
def logsumexp_kernel(
    input_ptr,  # [batches, rows, classes]
    result_ptr,  # [batches, rows]
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    boxes_ptr,  # [batches, rows, 1 + splits] int64, zero: the counter, then a box for each program
    rows,
    classes,
    splits,
    span,
    in_batch,
    in_row,
    in_class,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Rows, or shares of a row, read once in blocks; the last program of a row merges the shares."""
    EXACT: tl.constexpr = LANES == 1 and input_ptr.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 1 if LANES == 1 else 128 // input_ptr.dtype.element_ty.primitive_bitwidth
    split, batch, row, start, head, body = program_rows(
        rows, splits, in_batch, in_row, classes, VEC, ROWS
    )
    source = row_pointers(input_ptr, start, in_row, VEC, ROWS)
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
    for first in range(whole, last, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        inside = (row < rows)[:, None] & (column // VEC * VEC < body)
        x = tl.load(source + column * in_class, mask=inside, other=-float("inf")).to(ACC_DTYPE)
        maximum, total = online_softmax(maximum, total, by_lane(x, LANES, VECTOR), EXACT)
    if VEC > 1:
        edge, at_edge = edge_columns(head, body, classes, VEC, LANES)  # [LANES]
        edge_x = tl.load(
            input_ptr + start + edge[None, :],
            mask=(at_edge & (split == 0))[None, :],
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
    tl.store(result_ptr + place, result.to(result_ptr.dtype.element_ty), mask=written)
    tl.store(maximum_ptr + place, maximum, mask=written)
    tl.store(sumexp_ptr + place, total, mask=written)


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
    """A tile of the softmax, scaled by the gradient of its row: one read, one write."""
    spans = tl.cdiv(classes, BLOCK_V)
    block = tl.program_id(0) // spans
    batch = (block // tl.cdiv(rows, ROWS)).to(tl.int64)
    row = (block % tl.cdiv(rows, ROWS)).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    place = batch * rows + row
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
    target = result_ptr + batch * result_batch + row[:, None] * result_row + column * result_class
    tl.store(target, result.to(result_ptr.dtype.element_ty), mask=inside)


def logsumexp(input: Tensor, dtype: torch.dtype) -> LogSumExp:
    view = row_view_or_copy(-1, input)
    wide = input.new_empty(input.shape[:-1], dtype=acc_dtype(input.dtype))
    outputs = LogSumExp(
        input.new_empty(input.shape[:-1], dtype=dtype), wide, torch.empty_like(wide)
    )
    chosen = reduce_plan_for(view)
    args = (
        view.tensors[0],
        *outputs,
        merge_slots(view, chosen.splits),
        view.rows,
        view.classes,
        chosen.splits,
        classes_per_program(view, chosen),
        *view.strides[0],
    )
    launch(
        logsumexp_kernel,
        view.batches * cdiv(view.rows, chosen.rows) * chosen.splits,
        *args,
        **reduce_options(chosen, view),
    )
    return outputs


def logsumexp_backward(grad: Tensor, input: Tensor, maximum: Tensor, sumexp: Tensor) -> Tensor:
    grad = grad.contiguous()
    return with_output(
        lambda view: _logsumexp_backward(view, grad, maximum, sumexp), -1, input, dtype=input.dtype
    )


def _logsumexp_backward(view: RowView, grad: Tensor, maximum: Tensor, sumexp: Tensor) -> None:
    chosen = elementwise_plan(view)
    input, result = view.tensors
    programs = view.batches * cdiv(view.rows, chosen.rows) * cdiv(view.classes, chosen.block)
    args = (
        grad,
        input,
        maximum.contiguous(),
        sumexp.contiguous(),
        result,
        view.rows,
        view.classes,
        *view.strides[0],
        *view.strides[1],
    )
    launch(logsumexp_backward_kernel, programs, *args, **tile_options(chosen, input.dtype))
