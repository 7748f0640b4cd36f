"""Softmax, log-softmax and their backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from ....primitives.gpu.reduce import by_lane, merge_lanes, online_softmax, row_sum
from ....primitives.gpu.row_plan import (
    RowView,
    exchange_slots,
    row_options,
    row_plan_for,
    tile_options,
    with_output,
)
from ....primitives.gpu.sync import exchange_normalizer, exchange_sum
from ....runtime.launch import cdiv, launch
from .logsumexp import logsumexp, logsumexp_backward

__all__ = ["logsumexp", "logsumexp_backward", "softmax", "softmax_backward"]


@triton.jit
def softmax_tile_kernel(
    input_ptr,  # [batches, rows, classes]
    output_ptr,  # [batches, rows, classes]
    rows,
    classes,
    in_batch,
    in_row,
    in_class,
    out_batch,
    out_row,
    out_class,
    LOG: tl.constexpr,
    LANES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Whole rows in one tile: one read, one write."""
    blocks = tl.cdiv(rows, ROWS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    inside = (row < rows)[:, None] & (column < classes)[None, :]  # [ROWS, BLOCK_V]
    source = (
        input_ptr
        + batch * in_batch
        + row[:, None] * in_row
        + column.to(tl.int64)[None, :] * in_class
    )
    x = tl.load(source, mask=inside, other=-float("inf")).to(ACC_DTYPE)
    x -= finite_shift(tl.max(x, axis=1))[:, None]
    if LOG:
        y = x - log_exact(row_sum(exp(x), LANES, output_ptr.dtype.element_ty))[:, None]
    else:
        e = exp_for_dtype(x, output_ptr.dtype.element_ty)
        y = e * reciprocal(row_sum(e, LANES, output_ptr.dtype.element_ty))[:, None]
    target = (
        output_ptr
        + batch * out_batch
        + row[:, None] * out_row
        + column.to(tl.int64)[None, :] * out_class
    )
    tl.store(target, y.to(output_ptr.dtype.element_ty), mask=inside)


@triton.jit
def normalised(x, shift, total, LOG: tl.constexpr, EXACT: tl.constexpr):
    """Softmax or log-softmax of fp32 logits, from the finite maximum and the sum of exponentials of their row."""
    if LOG:
        return x - shift - log_exact(total)
    elif EXACT:
        return exp_exact(x - shift) * reciprocal(total)
    else:
        return exp(x - shift) * reciprocal(total)


@triton.jit
def softmax_row_kernel(
    input_ptr,  # [rows, classes]
    output_ptr,  # [rows, classes]
    boxes_ptr,  # [1 + rows * splits] int64, zero: the ticket, then a box for each program
    classes,
    splits,
    in_row,
    out_row,
    zero,  # 0.0
    LOG: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A row, or the part of a row that one of several programs holds: one read and one write at any width and alignment."""
    place = tl.atomic_add(boxes_ptr, 1, sem="relaxed") if SHARED else tl.program_id(0).to(tl.int64)
    row, split = place // splits, (place % splits).to(tl.int32)
    head, body = row_span(row * in_row, classes, VEC)
    source = input_ptr + aligned_start(row * in_row, VEC)
    target = output_ptr + aligned_start(row * out_row, VEC)
    column = split * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    inside = column // VEC * VEC < body
    held = load_streaming(source + column, inside, -float("inf"), STREAM)
    x = held.to(tl.float32)
    maximum = tl.max(x, axis=0)
    if VEC > 1:
        edge, at_edge = edge_columns(head, body, classes, VEC, 2 * VEC)  # [2 * VEC]
        at_edge &= split == 0
        edge_x = tl.load(input_ptr + row * in_row + edge, mask=at_edge, other=-float("inf")).to(
            tl.float32
        )
        maximum = tl.maximum(maximum, tl.max(edge_x, axis=0))
    if HALF:
        held = opaque(held, tl.full([BLOCK_V], zero, tl.float32).to(held.dtype))
        x = held.to(tl.float32)
    EXACT: tl.constexpr = output_ptr.dtype.element_ty == tl.float32 and not LOG
    part = finite_shift(maximum)
    e = exp_exact(x - part) if EXACT else exp(x - part)
    total = sum_for_dtype(e, 0, output_ptr.dtype.element_ty)
    shift = part
    if VEC > 1:
        total += tl.sum(exp(edge_x - part), axis=0)
    if SHARED:
        shift, total = exchange_normalizer(
            boxes_ptr + 1 + row * splits, split, splits, maximum, total, BLOCK_SPLITS
        )
    if HALF:
        x = opaque(held, tl.full([BLOCK_V], zero, tl.float32).to(held.dtype)).to(tl.float32)
    y = (
        normalised(x, shift, total, LOG, EXACT)
        if LOG or HALF
        else e * divide(exp_exact(part - shift), total)
    )
    store_streaming(target + column, y, inside, STREAM)
    if VEC > 1:
        edge_y = normalised(edge_x, shift, total, LOG, EXACT)
        tl.store(
            output_ptr + row * out_row + edge, edge_y.to(output_ptr.dtype.element_ty), mask=at_edge
        )


@triton.jit
def softmax_loop_kernel(
    input_ptr,  # [batches, rows, classes]
    output_ptr,  # [batches, rows, classes]
    rows,
    classes,
    in_batch,
    in_row,
    in_class,
    out_batch,
    out_row,
    out_class,
    LOG: tl.constexpr,
    LANES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Rows too wide to hold: a first pass for maximum and sum, a second for the result."""
    EXACT: tl.constexpr = output_ptr.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = 1 if LANES == 1 else 128 // input_ptr.dtype.element_ty.primitive_bitwidth
    blocks = tl.cdiv(rows, ROWS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    source = input_ptr + batch * in_batch + row[:, None] * in_row
    target = output_ptr + batch * out_batch + row[:, None] * out_row
    maximum, total = (
        tl.full([ROWS, LANES], -float("inf"), ACC_DTYPE),
        tl.zeros([ROWS, LANES], tl.float64),
    )
    for start in range(0, classes, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V).to(tl.int64)  # [BLOCK_V]
        inside = (row < rows)[:, None] & (column < classes)[None, :]
        x = tl.load(source + column[None, :] * in_class, mask=inside, other=-float("inf")).to(
            ACC_DTYPE
        )
        maximum, total = online_softmax(
            maximum, total, by_lane(x, LANES, VECTOR), LANES == 1 and EXACT
        )
    maximum, total, _ = merge_lanes(maximum, total)
    shift, total = finite_shift(maximum), total.to(ACC_DTYPE)
    for start in range(0, classes, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V).to(tl.int64)  # [BLOCK_V]
        inside = (row < rows)[:, None] & (column < classes)[None, :]
        x = tl.load(source + column[None, :] * in_class, mask=inside, other=-float("inf")).to(
            ACC_DTYPE
        )
        y = normalised(x, shift[:, None], total[:, None], LOG, EXACT)
        tl.store(
            target + column[None, :] * out_class, y.to(output_ptr.dtype.element_ty), mask=inside
        )


def softmax(input: Tensor, dim: int, log: bool, dtype: torch.dtype) -> Tensor:
    return with_output(lambda view: _softmax(view, log), dim, input, dtype=dtype)


def _softmax(view: RowView, log: bool) -> None:
    chosen = row_plan_for(view)
    (_, in_row, _), (_, out_row, _) = view.strides
    args: tuple[Any, ...]
    if chosen.kind == "row":
        args = (
            *view.tensors,
            exchange_slots(view, chosen.splits),
            view.classes,
            chosen.splits,
            in_row,
            out_row,
            0.0,
        )
        launch(
            softmax_row_kernel,
            view.rows * chosen.splits,
            *args,
            LOG=log,
            **row_options(chosen, view.tensors[0].dtype),
        )
    else:
        kernel, lanes = (
            softmax_tile_kernel if chosen.kind == "tile" else softmax_loop_kernel,
            chosen.lanes(view.tensors[0].element_size()),
        )
        args = (*view.tensors, view.rows, view.classes, *view.strides[0], *view.strides[1])
        programs = view.batches * cdiv(view.rows, chosen.rows)
        launch(
            kernel,
            programs,
            *args,
            LOG=log,
            LANES=lanes,
            **tile_options(chosen, view.tensors[0].dtype),
        )


@triton.jit
def pulled_back(grad, y, total, LOG: tl.constexpr, dtype: tl.constexpr):
    """Gradient of the logits from that of the result y and the row's sum: of grad for log-softmax, of grad * y for softmax."""
    if LOG:
        return grad - exp_for_dtype(y, dtype) * total
    else:
        return y * (grad - total)


@triton.jit
def softmax_backward_tile_kernel(
    grad_ptr,  # [batches, rows, classes]
    output_ptr,  # [batches, rows, classes]
    result_ptr,  # [batches, rows, classes]
    rows,
    classes,
    grad_batch,
    grad_row,
    grad_class,
    out_batch,
    out_row,
    out_class,
    result_batch,
    result_row,
    result_class,
    LOG: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Whole rows in one tile: two reads, one write."""
    blocks = tl.cdiv(rows, ROWS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    row = ((tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS))[
        :, None
    ]  # [ROWS, 1]
    column = tl.arange(0, BLOCK_V).to(tl.int64)[None, :]  # [1, BLOCK_V]
    inside = (row < rows) & (column < classes)
    grad = tl.load(
        grad_ptr + batch * grad_batch + row * grad_row + column * grad_class, mask=inside, other=0.0
    ).to(ACC_DTYPE)
    y = tl.load(
        output_ptr + batch * out_batch + row * out_row + column * out_class, mask=inside, other=0.0
    ).to(ACC_DTYPE)
    total = tl.sum(grad if LOG else grad * y, axis=1)[:, None]
    result = pulled_back(grad, y, total, LOG, result_ptr.dtype.element_ty)
    target = result_ptr + batch * result_batch + row * result_row + column * result_class
    tl.store(target, result.to(result_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_row_kernel(
    grad_ptr,  # [rows, classes]
    output_ptr,  # [rows, classes]
    result_ptr,  # [rows, classes]
    boxes_ptr,  # [1 + rows * splits] int64, zero: the ticket, then a box for each program
    classes,
    splits,
    grad_row,
    out_row,
    result_row,
    zero,  # 0.0
    LOG: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A row, or the part of a row that one of several programs holds: two reads and one write at any width and alignment."""
    place = tl.atomic_add(boxes_ptr, 1, sem="relaxed") if SHARED else tl.program_id(0).to(tl.int64)
    row, split = place // splits, (place % splits).to(tl.int32)
    head, body = row_span(row * grad_row, classes, VEC)
    column = split * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    inside = column // VEC * VEC < body
    held_grad = load_streaming(
        grad_ptr + aligned_start(row * grad_row, VEC) + column, inside, 0.0, STREAM
    )
    held = load_streaming(
        output_ptr + aligned_start(row * out_row, VEC) + column, inside, 0.0, STREAM
    )
    grad, y = held_grad.to(tl.float32), held.to(tl.float32)
    total = tl.sum(grad if LOG else grad * y, axis=0)
    if VEC > 1:
        edge, at_edge = edge_columns(head, body, classes, VEC, 2 * VEC)  # [2 * VEC]
        at_edge &= split == 0
        edge_grad = tl.load(grad_ptr + row * grad_row + edge, mask=at_edge, other=0.0).to(
            tl.float32
        )
        edge_y = tl.load(output_ptr + row * out_row + edge, mask=at_edge, other=0.0).to(tl.float32)
        total += tl.sum(edge_grad if LOG else edge_grad * edge_y, axis=0)
    if SHARED:
        total = exchange_sum(boxes_ptr + 1 + row * splits, split, splits, total, BLOCK_SPLITS)
    if HALF:
        nothing = tl.full([BLOCK_V], zero, tl.float32)
        grad = opaque(held_grad, nothing.to(held_grad.dtype)).to(tl.float32)
        y = opaque(held, nothing.to(held.dtype)).to(tl.float32)
    result = pulled_back(grad, y, total, LOG, result_ptr.dtype.element_ty)
    store_streaming(
        result_ptr + aligned_start(row * result_row, VEC) + column, result, inside, STREAM
    )
    if VEC > 1:
        edge_result = pulled_back(edge_grad, edge_y, total, LOG, result_ptr.dtype.element_ty)
        tl.store(
            result_ptr + row * result_row + edge,
            edge_result.to(result_ptr.dtype.element_ty),
            mask=at_edge,
        )


@triton.jit
def softmax_backward_loop_kernel(
    grad_ptr,  # [batches, rows, classes]
    output_ptr,  # [batches, rows, classes]
    result_ptr,  # [batches, rows, classes]
    rows,
    classes,
    grad_batch,
    grad_row,
    grad_class,
    out_batch,
    out_row,
    out_class,
    result_batch,
    result_row,
    result_class,
    LOG: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Rows too wide to hold: a first pass for the sum, a second for the result."""
    blocks = tl.cdiv(rows, ROWS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    row = ((tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS))[
        :, None
    ]  # [ROWS, 1]
    grad_start = grad_ptr + batch * grad_batch + row * grad_row
    out_start = output_ptr + batch * out_batch + row * out_row
    result_start = result_ptr + batch * result_batch + row * result_row
    total = tl.zeros([ROWS], tl.float64)
    for start in range(0, classes, BLOCK_V):
        column = (start + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        inside = (row < rows) & (column < classes)
        grad = tl.load(grad_start + column * grad_class, mask=inside, other=0.0).to(ACC_DTYPE)
        if not LOG:
            grad *= tl.load(out_start + column * out_class, mask=inside, other=0.0).to(ACC_DTYPE)
        total += tl.sum(grad, axis=1).to(tl.float64)
    for start in range(0, classes, BLOCK_V):
        column = (start + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        inside = (row < rows) & (column < classes)
        grad = tl.load(grad_start + column * grad_class, mask=inside, other=0.0).to(ACC_DTYPE)
        y = tl.load(out_start + column * out_class, mask=inside, other=0.0).to(ACC_DTYPE)
        result = pulled_back(
            grad, y, total.to(ACC_DTYPE)[:, None], LOG, result_ptr.dtype.element_ty
        )
        tl.store(
            result_start + column * result_class,
            result.to(result_ptr.dtype.element_ty),
            mask=inside,
        )


def softmax_backward(
    grad: Tensor, output: Tensor, dim: int, log: bool, dtype: torch.dtype
) -> Tensor:
    return with_output(lambda view: _softmax_backward(view, log), dim, output, grad, dtype=dtype)


def _softmax_backward(view: RowView, log: bool) -> None:
    output, grad, result = view.tensors
    out_strides, grad_strides, result_strides = view.strides
    chosen = row_plan_for(view, operands=2)
    args: tuple[Any, ...]
    if chosen.kind == "row":
        args = (
            grad,
            output,
            result,
            exchange_slots(view, chosen.splits),
            view.classes,
            chosen.splits,
            grad_strides[1],
            out_strides[1],
            result_strides[1],
        )
        launch(
            softmax_backward_row_kernel,
            view.rows * chosen.splits,
            *args,
            0.0,
            LOG=log,
            **row_options(chosen, output.dtype),
        )
    else:
        kernel = (
            softmax_backward_tile_kernel if chosen.kind == "tile" else softmax_backward_loop_kernel
        )
        args = (
            grad,
            output,
            result,
            view.rows,
            view.classes,
            *grad_strides,
            *out_strides,
            *result_strides,
        )
        launch(
            kernel,
            view.batches * cdiv(view.rows, chosen.rows),
            *args,
            LOG=log,
            **tile_options(chosen, output.dtype),
        )
