"""Kernels of token statistics and of their gradient, and their launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import LN2, LOG2E, finite_shift, log_exact, reciprocal
from ....primitives.gpu.reduce import program_rows, row_pointers
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
from ....primitives.gpu.sync import slot_base
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch
from ..common import TokenStatsRows
from .reduction import load_labels
from .row_math import load_row_gradient
from .running_stats import (
    LogitRows,
    add_edges,
    find_argmax,
    load_capped,
    load_stats_label,
    merge_lane_stats,
    merge_shared_stats,
    scan_blocks,
)


@triton.jit
def token_results(stats, label, temperature, OF_ARGMAX: tl.constexpr):
    """Return log-probability of the label or the arg-max, log-sum-exp and entropy of the rows.

    They are NaN where the label is no class. An ignored label has log-probability 0.
    """
    dtype: tl.constexpr = stats.maximum.dtype
    x = stats.maximum if OF_ARGMAX else label.x
    shift, log_total = finite_shift(stats.maximum), log_exact(stats.total)
    is_invalid = label.not_ignored & (label.in_range == 0)
    nan_or_zero = tl.where(is_invalid, float("nan"), 0.0).to(dtype)
    logprob = tl.where(label.not_ignored, (x - shift) / temperature - log_total, 0.0) + nan_or_zero
    logsumexp = shift / temperature + log_total + nan_or_zero
    entropy = log_total - LN2 * stats.sum_x_exp / stats.total + nan_or_zero
    return logprob, logsumexp, entropy


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
    split, batch, row, start, head, body = program_rows(
        rows, splits, x_batch, x_row, classes, VEC, ROWS
    )
    ptrs = row_pointers(logits_ptr, start, x_row, VEC, ROWS)
    source = LogitRows(ptrs, x_class, row < rows, head, body, softcap)
    index = batch * rows + row
    # The label and its logit are loaded before anything waits for the row.
    row_ptrs = logits_ptr + batch * x_batch + row * x_row
    label = load_stats_label(
        target_ptr, index, row_ptrs, source, classes, ignore_index, HAS_SOFTCAP, ACC_DTYPE
    )
    begin, end = split * span, tl.minimum((split + 1) * span, classes)
    running = scan_blocks(
        source, begin, end, slope, HAS_SOFTCAP, VEC, LANES, ACC_DTYPE, ROWS, BLOCK_V
    )
    running, edges = add_edges(
        running, source, logits_ptr + start, split, classes, slope, HAS_SOFTCAP, VEC
    )
    running = merge_lane_stats(running, slope)
    stats = find_argmax(running, source, edges, HAS_SOFTCAP, VEC, BLOCK_V)
    mask = row < rows
    if SHARED:
        slot_ptr = slot_base(slots_ptr, 2 * tl.sum(index, axis=0), splits)
        stats, is_last = merge_shared_stats(stats, slot_ptr, split, splits, slope, BLOCK_SPLITS)
        mask &= is_last
    logprob, logsumexp, entropy = token_results(stats, label, temperature, target_ptr is None)
    tl.store(logprob_ptr + index, logprob, mask=mask)
    tl.store(logsumexp_ptr + index, logsumexp, mask=mask)
    tl.store(entropy_ptr + index, entropy, mask=mask)
    # The bound makes the result a class even if all logits are NaN.
    tl.store(argmax_ptr + index, tl.minimum(stats.argmax, classes - 1).to(tl.int64), mask=mask)
    tl.store(maximum_ptr + index, stats.maximum, mask=mask)
    tl.store(sumexp_ptr + index, stats.total, mask=mask)


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
    # A row without an upstream gradient has none, even if its logits are NaN.
    active = tl.abs(on_label) + tl.abs(softmax_coef) + tl.abs(grad_entropy)  # [ROWS]
    grad = tl.where((active == 0.0)[:, None] & (out_of_range == 0)[:, None], 0.0, grad)
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
