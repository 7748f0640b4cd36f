"""Kernels of token statistics and of their gradient, and their launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import (
    LN2,
    LOG2E,
    apply_softcap,
    finite_shift,
    log_exact,
    reciprocal,
)
from ....primitives.gpu.memory import edge_columns
from ....primitives.gpu.reduce import (
    broadcast_lanes,
    by_lane,
    lane_max,
    lane_sum,
    program_rows,
    row_pointers,
    unmasked_end,
)
from ....primitives.gpu.row_plan import (
    RowView,
    classes_per_program,
    elementwise_plan,
    flat_rows,
    merge_slots,
    reduce_options,
    reduce_plan_for,
    row_view_or_copy,
    tile_options,
    with_output,
)
from ....primitives.gpu.sync import arrives_last, load_partials, slot_base, store_partial
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch
from ..common import TokenStatsRows
from .reduction import load_labels
from .row_math import load_row_gradient

EDGE_BLOCK = tl.constexpr(0x3FFFFFFF)  # stands for the classes outside of a row's aligned vectors
NO_COLUMN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def accumulate_stats(
    maximum,
    total,
    sum_x_exp,
    argmax_block,
    x,
    block,
    slope,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Update the statistics of the lanes, `[ROWS, LANES]` each, with a block x, `[ROWS, BLOCK]`.

    With u = slope (x - maximum), they are the maximum, the sum of 2**u, the sum of u 2**u, and the
    first block in which the maximum occurs.
    """
    x = by_lane(x, LANES, VECTOR)
    block_maximum = lane_max(x)
    argmax_block = tl.where(block_maximum > maximum, block, argmax_block).to(tl.int32)
    new_maximum = tl.maximum(maximum, block_maximum)
    shift = finite_shift(new_maximum)
    scale = tl.exp2((maximum - shift) * slope).to(tl.float64)
    moved_by = ((shift - finite_shift(maximum)) * slope).to(tl.float64)
    sum_x_exp = scale * (sum_x_exp - total * moved_by)
    exponent = (x - broadcast_lanes(shift)) * slope
    e = tl.exp2(exponent)
    # A class of probability 0 adds 0, even if its exponent is -inf.
    sum_x_exp += lane_sum(e * tl.maximum(exponent, -10000.0), False)
    return new_maximum, total * scale + lane_sum(e, False), sum_x_exp, argmax_block


@triton.jit
def load_capped(pointers, mask, softcap, HAS_SOFTCAP: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Load soft-capped logits, -inf outside of the mask."""
    x = tl.load(pointers, mask=mask, other=-float("inf")).to(ACC_DTYPE)
    if HAS_SOFTCAP:
        x = tl.where(mask, apply_softcap(x, softcap, HAS_SOFTCAP), -float("inf"))
    return x


@triton.jit
def first_column_of(x, column, maximum):
    """Return the lowest column at which x, `[ROWS, BLOCK]`, is its row's maximum, or NO_COLUMN."""
    return tl.min(tl.where(x == maximum[:, None], column, NO_COLUMN), axis=1)


@triton.jit
def token_stats_kernel(
    logits_ptr,  # [batches, rows, classes]
    target_ptr,  # [batches, rows], or None for the arg-max
    logprob_ptr,  # [batches, rows]
    logsumexp_ptr,  # [batches, rows]
    entropy_ptr,  # [batches, rows]
    argmax_ptr,  # [batches, rows]
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    slots_ptr,  # [batches, rows, 2, 1 + splits] int64, zero: a counter, then a slot per program
    rows,
    classes,
    splits,  # programs that share a row
    span,  # classes that each of them reads
    x_batch,  # strides of the logits
    x_row,
    x_class,
    temperature: tl.float64,
    softcap: tl.float64,
    ignore_index,
    HAS_SOFTCAP: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the statistics of rows, each read once in blocks.

    Where several programs share a row, the last one of them merges their results.
    """
    temperature, softcap = tl.full([], temperature, ACC_DTYPE), tl.full([], softcap, ACC_DTYPE)
    slope = tl.full([], LOG2E, ACC_DTYPE) / temperature
    VECTOR: tl.constexpr = (
        1 if LANES == 1 else 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    )
    split, batch, row, start, head, body = program_rows(
        rows, splits, x_batch, x_row, classes, VEC, ROWS
    )
    source = row_pointers(logits_ptr, start, x_row, VEC, ROWS)
    maximum = tl.full([ROWS, LANES], -float("inf"), ACC_DTYPE)
    argmax_block = tl.zeros([ROWS, LANES], tl.int32)
    total, sum_x_exp = tl.zeros([ROWS, LANES], tl.float64), tl.zeros([ROWS, LANES], tl.float64)
    index = batch * rows + row
    # These loads start before anything waits for the row.
    if target_ptr is not None:
        label = load_labels(target_ptr, index, row < rows, ignore_index)
    else:
        label = index * 0  # any class; `maximum` replaces its logit
    not_ignored = label != ignore_index
    in_range = not_ignored & (label >= 0) & (label < classes)
    label_ptrs = logits_ptr + batch * x_batch + row * x_row + label * x_class
    label_x = tl.load(label_ptrs, mask=in_range & (row < rows), other=0.0).to(ACC_DTYPE)
    label_x = apply_softcap(label_x, softcap, HAS_SOFTCAP)
    end = tl.minimum((split + 1) * span, classes)
    unmasked = unmasked_end(split * span, end, body, BLOCK_V, LANES)
    for first in range(split * span, unmasked, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        x = apply_softcap(tl.load(source + column * x_class).to(ACC_DTYPE), softcap, HAS_SOFTCAP)
        maximum, total, sum_x_exp, argmax_block = accumulate_stats(
            maximum, total, sum_x_exp, argmax_block, x, first // BLOCK_V, slope, LANES, VECTOR
        )
    for first in range(unmasked, end, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        mask = (row < rows)[:, None] & (column // VEC * VEC < body)
        x = load_capped(source + column * x_class, mask, softcap, HAS_SOFTCAP, ACC_DTYPE)
        maximum, total, sum_x_exp, argmax_block = accumulate_stats(
            maximum, total, sum_x_exp, argmax_block, x, first // BLOCK_V, slope, LANES, VECTOR
        )
    if VEC > 1:
        edge, at_edge = edge_columns(head, body, classes, VEC, LANES)  # [LANES]
        edge_mask = (at_edge & (split == 0))[None, :]
        edge_ptrs = logits_ptr + start + edge[None, :]
        edge_x = load_capped(edge_ptrs, edge_mask, softcap, HAS_SOFTCAP, ACC_DTYPE)
        maximum, total, sum_x_exp, argmax_block = accumulate_stats(
            maximum, total, sum_x_exp, argmax_block, edge_x, EDGE_BLOCK, slope, LANES, 1
        )
    lane_maximum = maximum
    maximum = tl.max(lane_maximum, axis=1)
    shift = finite_shift(maximum)
    scale = tl.exp2((lane_maximum - shift[:, None]) * slope).to(tl.float64)
    moved_by = ((shift[:, None] - finite_shift(lane_maximum)) * slope).to(tl.float64)
    sum_x_exp = tl.sum(scale * (sum_x_exp - total * moved_by), axis=1)
    total = tl.sum(total * scale, axis=1)
    # The first block that has the maximum is read once more, to find the column in it.
    is_maximum = lane_maximum == maximum[:, None]
    argmax_block = tl.min(tl.where(is_maximum, argmax_block, EDGE_BLOCK), axis=1)
    first_block = tl.sum(argmax_block, axis=0) if ROWS == 1 else argmax_block[:, None]
    column = first_block.to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]  # [ROWS, BLOCK_V]
    mask = (row < rows)[:, None] & (column // VEC * VEC < body)
    x = load_capped(source + column * x_class, mask, softcap, HAS_SOFTCAP, ACC_DTYPE)
    sought = maximum
    if HAS_SOFTCAP:  # Another copy of the code may round a hyperbolic tangent in another way.
        sought = tl.max(x, axis=1)
        if VEC > 1:
            sought = tl.maximum(sought, tl.max(edge_x, axis=1))
    argmax = first_column_of(x, (head + column).to(tl.int32), sought)
    if VEC > 1:
        edge = tl.where(at_edge, edge, NO_COLUMN).to(tl.int32)[None, :]
        argmax = tl.minimum(argmax, first_column_of(edge_x, edge, sought))
    is_written = row < rows
    total, sum_x_exp = total.to(ACC_DTYPE), sum_x_exp.to(ACC_DTYPE)
    if SHARED:
        slot = slot_base(slots_ptr, 2 * tl.sum(index, axis=0), splits)
        maximum, total, sum_x_exp, argmax, is_written = merge_shared_stats(
            slot, split, splits, maximum, total, sum_x_exp, argmax, slope, is_written, BLOCK_SPLITS
        )
    if target_ptr is None:
        label_x = maximum
    nan_or_zero = tl.where(not_ignored & (in_range == 0), float("nan"), 0.0).to(ACC_DTYPE)
    shift, log_total = finite_shift(maximum), log_exact(total)
    tl.store(
        logprob_ptr + index,
        tl.where(not_ignored, (label_x - shift) / temperature - log_total, 0.0) + nan_or_zero,
        mask=is_written,
    )
    tl.store(logsumexp_ptr + index, shift / temperature + log_total + nan_or_zero, mask=is_written)
    tl.store(
        entropy_ptr + index, log_total - LN2 * sum_x_exp / total + nan_or_zero, mask=is_written
    )
    # The bound makes the result a class even if all logits are NaN.
    tl.store(argmax_ptr + index, tl.minimum(argmax, classes - 1).to(tl.int64), mask=is_written)
    tl.store(maximum_ptr + index, maximum, mask=is_written)
    tl.store(sumexp_ptr + index, total, mask=is_written)


@triton.jit
def merge_shared_stats(
    slot_ptr,
    split,
    splits,
    maximum,
    total,
    sum_x_exp,
    argmax,
    slope,
    is_written,
    BLOCK_SPLITS: tl.constexpr,
):
    """Exchange the statistics of a row's programs, and return those of the row.

    They are complete only in the last program, which alone writes: `is_written` is false in others.
    """
    second_slot = slot_ptr + splits + 1
    store_partial(
        second_slot,
        split,
        tl.sum(sum_x_exp, axis=0),
        tl.sum(argmax, axis=0).to(tl.float32, bitcast=True),
    )
    store_partial(slot_ptr, split, tl.sum(maximum, axis=0), tl.sum(total, axis=0))
    is_written &= arrives_last(slot_ptr, splits)
    maxima, totals, mask = load_partials(slot_ptr, splits, BLOCK_SPLITS)
    sums_x_exp, columns, _ = load_partials(second_slot, splits, BLOCK_SPLITS)
    row_maximum = tl.max(tl.where(mask, maxima, -float("inf")), axis=0)
    shift = finite_shift(row_maximum)
    scales = tl.where(mask, tl.exp2((maxima - shift) * slope), 0.0)
    moved = scales * (sums_x_exp - totals * (shift - finite_shift(maxima)) * slope)
    moved = tl.where(mask, moved, 0.0)
    is_maximum = mask & (maxima == row_maximum)
    columns = tl.where(is_maximum, columns.to(tl.int32, bitcast=True), NO_COLUMN)
    row_argmax = tl.min(columns, axis=0)
    zero = tl.zeros_like(maximum)
    maximum = zero + row_maximum
    sum_x_exp = zero + tl.sum(moved, axis=0)
    total = zero + tl.sum(tl.where(mask, scales * totals, 0.0), axis=0)
    argmax = tl.zeros_like(argmax) + row_argmax
    return maximum, total, sum_x_exp, argmax, is_written


@triton.jit
def token_stats_backward_kernel(
    grad_logprob_ptr,  # [batches, rows]
    grad_logsumexp_ptr,  # [batches, rows], or None for zeros
    grad_entropy_ptr,  # [batches, rows], or None for zeros
    logits_ptr,  # [batches, rows, classes]
    target_ptr,  # [batches, rows]
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    entropy_ptr,  # [batches, rows]
    dlogits_ptr,  # [batches, rows, classes]
    rows,
    classes,
    logprob_step,  # between the rows of a gradient: 0 if they share one number
    logsumexp_step,
    entropy_step,
    x_batch,  # strides of the logits
    x_row,
    x_class,
    d_batch,  # strides of dlogits
    d_row,
    d_class,
    temperature: tl.float64,
    softcap: tl.float64,
    ignore_index,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute a tile of the gradient from the rows' statistics with one read and one write."""
    temperature, softcap = tl.full([], temperature, ACC_DTYPE), tl.full([], softcap, ACC_DTYPE)
    spans = tl.cdiv(classes, BLOCK_V)
    block = tl.program_id(0) // spans
    batch = (block // tl.cdiv(rows, ROWS)).to(tl.int64)
    row = (block % tl.cdiv(rows, ROWS)).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    row_mask = row < rows
    index = batch * rows + row
    label = load_labels(target_ptr, index, row_mask, ignore_index)
    not_ignored = label != ignore_index
    out_of_range = not_ignored & ((label < 0) | (label >= classes))
    on_label = load_row_gradient(grad_logprob_ptr, index, logprob_step, row_mask, ACC_DTYPE)
    on_label = tl.where(not_ignored, on_label, 0.0)
    softmax_coef = -on_label + load_row_gradient(
        grad_logsumexp_ptr, index, logsumexp_step, row_mask, ACC_DTYPE
    )
    grad_entropy = load_row_gradient(grad_entropy_ptr, index, entropy_step, row_mask, ACC_DTYPE)
    shift = finite_shift(tl.load(maximum_ptr + index, mask=row_mask, other=0.0))
    total = tl.load(sumexp_ptr + index, mask=row_mask, other=1.0)
    offset = tl.load(entropy_ptr + index, mask=row_mask, other=0.0) - log_exact(total)
    column = (tl.program_id(0) % spans).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    column = column[None, :]  # [1, BLOCK_V]
    mask = row_mask[:, None] & (column < classes)  # [ROWS, BLOCK_V]
    x_ptrs = logits_ptr + batch * x_batch + row[:, None] * x_row + column * x_class
    x = load_capped(x_ptrs, mask, softcap, HAS_SOFTCAP, ACC_DTYPE)
    exponent = (x - shift[:, None]) * (tl.full([], LOG2E, ACC_DTYPE) / temperature)
    p = tl.exp2(exponent) * reciprocal(total)[:, None]
    # This is log p + entropy, which stays finite where p is 0.
    logp_plus_entropy = LN2 * tl.maximum(exponent, -10000.0) + offset[:, None]
    grad = p * (softmax_coef[:, None] - grad_entropy[:, None] * logp_plus_entropy)
    grad += tl.where(column == label[:, None], on_label[:, None], 0.0)
    grad = tl.where(out_of_range[:, None], float("nan"), grad / temperature)
    if HAS_SOFTCAP:
        grad *= 1.0 - (x / softcap) * (x / softcap)
    d_ptrs = dlogits_ptr + batch * d_batch + row[:, None] * d_row + column * d_class
    tl.store(d_ptrs, grad.to(dlogits_ptr.dtype.element_ty), mask=mask)


def token_stats(
    logits: Tensor, target: Tensor | None, temperature: float, softcap: float, ignore_index: int
) -> TokenStatsRows:
    """Compute the statistics of the rows; without a target, the label of a row is its arg-max."""
    view = row_view_or_copy(-1, logits)
    dtype = acc_dtype(logits.dtype)
    rows = TokenStatsRows(
        *(
            logits.new_empty(logits.shape[:-1], dtype=torch.int64 if name == "argmax" else dtype)
            for name in TokenStatsRows._fields
        )
    )
    plan = reduce_plan_for(view, carried=4)
    launch(
        token_stats_kernel,
        view.batches * cdiv(view.rows, plan.rows) * plan.splits,
        view.tensors[0],
        None if target is None else target.contiguous(),
        *rows,
        merge_slots(view, plan.splits, 2),
        view.rows,
        view.classes,
        plan.splits,
        classes_per_program(view, plan),
        *view.strides[0],
        temperature,
        softcap,
        ignore_index,
        HAS_SOFTCAP=softcap != 0,
        **reduce_options(plan, view),
    )
    return rows


def token_stats_backward(
    grad_logprob: Tensor,
    grad_logsumexp: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    entropy: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Compute the gradient of the logits from the rows' statistics; a gradient of None is zero."""
    grads, steps = zip(*map(flat_rows, (grad_logprob, grad_logsumexp, grad_entropy)), strict=True)
    statistics = [row.contiguous() for row in (maximum, sumexp, entropy)]

    def run(view: RowView) -> None:
        plan = elementwise_plan(view)
        launch(
            token_stats_backward_kernel,
            view.batches * cdiv(view.rows, plan.rows) * cdiv(view.classes, plan.block),
            *grads,
            view.tensors[0],
            target.contiguous(),
            *statistics,
            view.tensors[1],
            view.rows,
            view.classes,
            *steps,
            *view.strides[0],
            *view.strides[1],
            temperature,
            softcap,
            ignore_index,
            HAS_SOFTCAP=softcap != 0,
            **tile_options(plan, logits.dtype),
        )

    return with_output(run, -1, logits, dtype=logits.dtype)
