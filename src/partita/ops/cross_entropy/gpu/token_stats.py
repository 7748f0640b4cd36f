"""Kernels of token statistics and of their gradient, and their launches.

With `slope` = log2(e) / temperature, the exponentials are 2**u, u = slope (x - maximum).
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class LogitRows(NamedTuple):
    """The rows of logits that a program reads.

    Fields:
        ptrs: the addresses of their aligned vectors, [ROWS, 1].
        stride: the stride over the classes.
        mask: which of the rows exist, [ROWS].
        body: the number of classes in the aligned vectors.
        softcap: the bound of the logits.
    """

    ptrs: Any
    stride: Any
    mask: Any
    body: Any
    softcap: Any


class RunningStats(NamedTuple):
    """The statistics of what was read, [ROWS, LANES] or merged [ROWS].

    Fields:
        maximum: the maximum of x.
        total: the sum of 2**u, fp64.
        sum_x_exp: the sum of u 2**u, fp64.
        argmax: the first block with the maximum; of merged rows, the lowest class with it.
    """

    maximum: Any
    total: Any
    sum_x_exp: Any
    argmax: Any


@triton.jit
def load_capped(pointers, mask, softcap, HAS_SOFTCAP: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Load soft-capped logits, -inf outside of the mask."""
    x = tl.load(pointers, mask=mask, other=-float("inf")).to(ACC_DTYPE)
    if HAS_SOFTCAP:
        x = tl.where(mask, apply_softcap(x, softcap, HAS_SOFTCAP), -float("inf"))
    return x


@triton.jit
def accumulate_stats(stats, x, block, slope, VECTOR: tl.constexpr):
    """Update the statistics of the lanes, `[ROWS, LANES]` each, with a block x, `[ROWS, BLOCK]`."""
    maximum, total, sum_x_exp, argmax_block = stats
    x = by_lane(x, maximum.shape[1], VECTOR)
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
    total = total * scale + lane_sum(e, False)
    return RunningStats(new_maximum, total, sum_x_exp, argmax_block)


@triton.jit
def load_block(
    source, column, HAS_SOFTCAP: tl.constexpr, VEC: tl.constexpr, ACC_DTYPE: tl.constexpr
):
    """Load a block of the aligned vectors, -inf past them, for columns counted from `head`."""
    mask = source.mask[:, None] & (column // VEC * VEC < source.body)
    ptrs = source.ptrs + column * source.stride
    return load_capped(ptrs, mask, source.softcap, HAS_SOFTCAP, ACC_DTYPE)


@triton.jit
def first_column_of(x, column, maximum):
    """Return the lowest column at which x, `[ROWS, BLOCK]`, is its row's maximum, or NO_COLUMN."""
    return tl.min(tl.where(x == maximum[:, None], column, NO_COLUMN), axis=1)


@triton.jit
def token_stats_kernel(
    logits,  # StridedRows
    target_ptr,  # [batches, rows], or None for the arg-max
    results,  # TokenStatsRows, [batches, rows]
    slots_ptr,  # [batches, rows, 2, 1 + splits] int64, zero: a counter, then a slot per program
    rows,
    classes,
    splits,  # programs that share a row
    span,  # classes that each of them reads
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

    Each lane accumulates the blocks of the aligned vectors, then the classes around them. Where
    several programs share a row, the last one of them merges their results.
    """
    BITS: tl.constexpr = logits.ptr.dtype.element_ty.primitive_bitwidth
    VECTOR: tl.constexpr = 1 if LANES == 1 else 128 // BITS
    temperature, softcap = tl.full([], temperature, ACC_DTYPE), tl.full([], softcap, ACC_DTYPE)
    slope = tl.full([], LOG2E, ACC_DTYPE) / temperature
    split, batch, row, ptrs, start, head, body = program_rows(
        logits, rows, splits, classes, VEC, ROWS
    )
    source = LogitRows(ptrs, logits.column, row < rows, body, softcap)
    index = batch * rows + row
    # The label and its logit are loaded before anything waits for the row.
    x_rows = logits.ptr + batch * logits.batch + row * logits.row  # [ROWS]
    if target_ptr is not None:
        label = load_labels(target_ptr, index, source.mask, ignore_index)
    else:
        label = index * 0  # any class; the maximum replaces its logit
    not_ignored = label != ignore_index
    in_range = not_ignored & (label >= 0) & (label < classes)
    label_ptrs = x_rows + label * logits.column
    label_x = tl.load(label_ptrs, mask=in_range & source.mask, other=0.0).to(ACC_DTYPE)
    label_x = apply_softcap(label_x, softcap, HAS_SOFTCAP)
    begin, end = split * span, tl.minimum((split + 1) * span, classes)
    stats = RunningStats(
        tl.full([ROWS, LANES], -float("inf"), ACC_DTYPE),
        tl.zeros([ROWS, LANES], tl.float64),
        tl.zeros([ROWS, LANES], tl.float64),
        tl.zeros([ROWS, LANES], tl.int32),
    )
    unmasked = unmasked_end(begin, end, body, BLOCK_V, LANES)
    for first in range(begin, unmasked, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        x = tl.load(ptrs + column * logits.column).to(ACC_DTYPE)
        x = apply_softcap(x, softcap, HAS_SOFTCAP)
        stats = accumulate_stats(stats, x, first // BLOCK_V, slope, VECTOR)
    for first in range(unmasked, end, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        x = load_block(source, column, HAS_SOFTCAP, VEC, ACC_DTYPE)
        stats = accumulate_stats(stats, x, first // BLOCK_V, slope, VECTOR)
    edge_ptr = logits.ptr + start
    if VEC > 1:  # The classes around the aligned vectors belong to the first program.
        edge, is_edge = edge_columns(head, body, classes, VEC, LANES)  # [LANES]
        at_edge = (is_edge & (split == 0))[None, :]
        edge_x = load_capped(edge_ptr + edge[None, :], at_edge, softcap, HAS_SOFTCAP, ACC_DTYPE)
        stats = accumulate_stats(stats, edge_x, EDGE_BLOCK, slope, 1)
    # The lanes of a row are merged.
    maximum = tl.max(stats.maximum, axis=1)
    shift = finite_shift(maximum)
    scale = tl.exp2((stats.maximum - shift[:, None]) * slope).to(tl.float64)
    moved_by = ((shift[:, None] - finite_shift(stats.maximum)) * slope).to(tl.float64)
    sum_x_exp = tl.sum(scale * (stats.sum_x_exp - stats.total * moved_by), axis=1)
    total = tl.sum(stats.total * scale, axis=1)
    is_maximum = stats.maximum == maximum[:, None]
    block = tl.min(tl.where(is_maximum, stats.argmax, EDGE_BLOCK), axis=1)
    # The first block that has the maximum is read once more, to find the column in it.
    block = tl.sum(block, axis=0) if ROWS == 1 else block[:, None]
    argmax_column = block.to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]  # [ROWS, BLOCK_V]
    block_x = load_block(source, argmax_column, HAS_SOFTCAP, VEC, ACC_DTYPE)
    sought = maximum
    if HAS_SOFTCAP:  # Another copy of the code may round a hyperbolic tangent in another way.
        sought = tl.max(block_x, axis=1)
        if VEC > 1:
            sought = tl.maximum(sought, tl.max(edge_x, axis=1))
    argmax = first_column_of(block_x, (head + argmax_column).to(tl.int32), sought)
    if VEC > 1:
        edge = tl.where(is_edge, edge, NO_COLUMN).to(tl.int32)[None, :]
        argmax = tl.minimum(argmax, first_column_of(edge_x, edge, sought))
    found = RunningStats(maximum, total.to(ACC_DTYPE), sum_x_exp.to(ACC_DTYPE), argmax)
    mask = row < rows
    if SHARED:
        slot_ptr = slot_base(slots_ptr, 2 * tl.sum(index, axis=0), splits)
        second_slot = slot_ptr + splits + 1
        store_partial(
            second_slot,
            split,
            tl.sum(found.sum_x_exp, axis=0),
            tl.sum(found.argmax, axis=0).to(tl.float32, bitcast=True),
        )
        store_partial(slot_ptr, split, tl.sum(found.maximum, axis=0), tl.sum(found.total, axis=0))
        mask &= arrives_last(slot_ptr, splits)
        maxima, totals, valid = load_partials(slot_ptr, splits, BLOCK_SPLITS)
        sums_x_exp, columns, _ = load_partials(second_slot, splits, BLOCK_SPLITS)
        maximum = tl.max(tl.where(valid, maxima, -float("inf")), axis=0)
        shift = finite_shift(maximum)
        scales = tl.where(valid, tl.exp2((maxima - shift) * slope), 0.0)
        moved = scales * (sums_x_exp - totals * (shift - finite_shift(maxima)) * slope)
        is_maximum = valid & (maxima == maximum)
        columns = tl.where(is_maximum, columns.to(tl.int32, bitcast=True), NO_COLUMN)
        zero = tl.zeros_like(found.maximum)  # [1], as a program has one row that is shared
        found = RunningStats(
            zero + maximum,
            zero + tl.sum(tl.where(valid, scales * totals, 0.0), axis=0),
            zero + tl.sum(tl.where(valid, moved, 0.0), axis=0),
            tl.zeros_like(found.argmax) + tl.min(columns, axis=0),
        )
    # The results are NaN where the label is no class. An ignored label has log-probability 0.
    x = found.maximum if target_ptr is None else label_x
    shift, log_total = finite_shift(found.maximum), log_exact(found.total)
    is_invalid = not_ignored & (in_range == 0)
    nan_or_zero = tl.where(is_invalid, float("nan"), 0.0).to(ACC_DTYPE)
    logprob = tl.where(not_ignored, (x - shift) / temperature - log_total, 0.0) + nan_or_zero
    logsumexp = shift / temperature + log_total + nan_or_zero
    entropy = log_total - LN2 * found.sum_x_exp / found.total + nan_or_zero
    tl.store(results.logprob + index, logprob, mask=mask)
    tl.store(results.logsumexp + index, logsumexp, mask=mask)
    tl.store(results.entropy + index, entropy, mask=mask)
    # The bound makes the result a class even if all logits are NaN.
    tl.store(results.argmax + index, tl.minimum(found.argmax, classes - 1).to(tl.int64), mask=mask)
    tl.store(results.maximum + index, found.maximum, mask=mask)
    tl.store(results.sumexp + index, found.total, mask=mask)


@triton.jit
def token_stats_backward_kernel(
    grad_logprob,  # RowNumbers
    grad_logsumexp,  # RowNumbers, with None for zeros
    grad_entropy,  # RowNumbers, with None for zeros
    logits,  # StridedRows
    target_ptr,  # [batches, rows]
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    entropy_ptr,  # [batches, rows]
    dlogits,  # StridedRows
    rows,
    classes,
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
    on_label = load_row_gradient(grad_logprob, index, row_mask, ACC_DTYPE)
    on_label = tl.where(not_ignored, on_label, 0.0)
    softmax_coef = -on_label + load_row_gradient(grad_logsumexp, index, row_mask, ACC_DTYPE)
    on_entropy = load_row_gradient(grad_entropy, index, row_mask, ACC_DTYPE)
    shift = finite_shift(tl.load(maximum_ptr + index, mask=row_mask, other=0.0))
    total = tl.load(sumexp_ptr + index, mask=row_mask, other=1.0)
    offset = tl.load(entropy_ptr + index, mask=row_mask, other=0.0) - log_exact(total)
    column = (tl.program_id(0) % spans).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    column = column[None, :]  # [1, BLOCK_V]
    mask = row_mask[:, None] & (column < classes)  # [ROWS, BLOCK_V]
    x_rows = logits.ptr + batch * logits.batch + row[:, None] * logits.row  # [ROWS, 1]
    x_ptrs = x_rows + column * logits.column
    x = load_capped(x_ptrs, mask, softcap, HAS_SOFTCAP, ACC_DTYPE)
    exponent = (x - shift[:, None]) * (tl.full([], LOG2E, ACC_DTYPE) / temperature)
    p = tl.exp2(exponent) * reciprocal(total)[:, None]
    # This is log p + entropy, which stays finite where p is 0.
    logp_plus_entropy = LN2 * tl.maximum(exponent, -10000.0) + offset[:, None]
    grad = p * (softmax_coef[:, None] - on_entropy[:, None] * logp_plus_entropy)
    grad += tl.where(column == label[:, None], on_label[:, None], 0.0)
    grad = tl.where(out_of_range[:, None], float("nan"), grad / temperature)
    if HAS_SOFTCAP:
        grad *= 1.0 - (x / softcap) * (x / softcap)
    # A row without an upstream gradient has none, even if its logits are NaN.
    active = tl.abs(on_label) + tl.abs(softmax_coef) + tl.abs(on_entropy)  # [ROWS]
    grad = tl.where((active == 0.0)[:, None] & (out_of_range == 0)[:, None], 0.0, grad)
    d_rows = dlogits.ptr + batch * dlogits.batch + row[:, None] * dlogits.row
    d_ptrs = d_rows + column * dlogits.column
    tl.store(d_ptrs, grad.to(dlogits.ptr.dtype.element_ty), mask=mask)


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
        logits=view.strided[0],
        target_ptr=None if target is None else target.contiguous(),
        results=rows,
        slots_ptr=merge_slots(view, plan.splits, 2),
        rows=view.rows,
        classes=view.classes,
        splits=plan.splits,
        span=classes_per_program(view, plan),
        temperature=temperature,
        softcap=softcap,
        ignore_index=ignore_index,
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

    def run(view: RowView) -> None:
        plan = elementwise_plan(view)
        launch(
            token_stats_backward_kernel,
            view.batches * cdiv(view.rows, plan.rows) * cdiv(view.classes, plan.block),
            grad_logprob=flat_rows(grad_logprob),
            grad_logsumexp=flat_rows(grad_logsumexp),
            grad_entropy=flat_rows(grad_entropy),
            logits=view.strided[0],
            target_ptr=target.contiguous(),
            maximum_ptr=maximum.contiguous(),
            sumexp_ptr=sumexp.contiguous(),
            entropy_ptr=entropy.contiguous(),
            dlogits=view.strided[1],
            rows=view.rows,
            classes=view.classes,
            temperature=temperature,
            softcap=softcap,
            ignore_index=ignore_index,
            HAS_SOFTCAP=softcap != 0,
            **tile_options(plan, logits.dtype),
        )

    return with_output(run, -1, logits, dtype=logits.dtype)
