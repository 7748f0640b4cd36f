"""The denominators of the loss, the sum of the losses, and the scaling of the gradient.

The denominators of the mean travel as `shares`, a tensor `[2, SHARES]` of partial sums: the class
weights of the labels that are not ignored, and the number of these labels.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import divide
from ....primitives.gpu.sync import arrives_last, load_pairs, store_pair
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype
from .plan import FUSED_ROWS, SHARES

NUM_SHARES = tl.constexpr(SHARES)
SCALE_BLOCK = 4096  # elements of a gradient that a program scales at a time
MAX_SCALE_PROGRAMS = 1024


class Targets(NamedTuple):
    """The targets of the rows of a loss.

    Fields:
        labels: the labels, [batches, rows], or None for probabilities.
        probabilities: StridedRows of the probabilities; with labels they are not read.
        weight: class weights, [classes], or None.
        classes: the number of classes.
        ignore_index: the ignored label.
    """

    labels: Any
    probabilities: Any
    weight: Any
    classes: Any
    ignore_index: Any


NO_LABELS = Targets(None, None, None, 0, 0)


class LossSum(NamedTuple):
    """The memory of the rows' losses, and the divisors of their sum.

    Fields:
        loss: memory for the rows' losses, [batches, rows], or for their sum or mean, [].
        shares: the shares of the mean's denominators, or None.
        slots: [1 + programs] int64, zero, if several programs add up the losses, or None.
    """

    loss: Any
    shares: Any
    slots: Any


class Words(NamedTuple):
    """Words of int64 in which a kernel counts programs and exchanges partial results."""

    ptr: Any
    size: Any


@triton.jit
def load_labels(target_ptr, index, mask, ignore_index):
    """Load labels as int64, with `ignore_index` outside of the mask.

    The load itself cannot fill in `ignore_index`, which would wrap in a narrow dtype.
    """
    labels = tl.load(target_ptr + index, mask=mask, other=0).to(tl.int64)
    return tl.where(mask, labels, ignore_index)


@triton.jit
def sum_label_weights(targets, rows, split, splits, ACC_DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of the class weights, and the number, of the labels that are not ignored.

    They are those of part `split` of `splits` parts of the labels.
    """
    lane_labels = tl.zeros([BLOCK], tl.int32)
    lane_weights = tl.zeros([BLOCK], ACC_DTYPE)
    for first in range(split * BLOCK, rows, splits * BLOCK):
        index = first + tl.arange(0, BLOCK).to(tl.int64)
        label = load_labels(targets.labels, index, index < rows, targets.ignore_index)
        not_ignored = label != targets.ignore_index
        lane_labels += not_ignored.to(tl.int32)
        if targets.weight is not None:
            in_range = not_ignored & (label >= 0) & (label < targets.classes)
            lane_weights += tl.load(targets.weight + label, mask=in_range, other=0.0).to(ACC_DTYPE)
    num_labels = tl.sum(lane_labels, axis=0).to(ACC_DTYPE)
    return tl.sum(lane_weights, axis=0) if targets.weight is not None else num_labels, num_labels


@triton.jit
def clear_words(words, BLOCK: tl.constexpr):
    """Zero words for later kernels."""
    for first in range(tl.program_id(0) * BLOCK, words.size, tl.num_programs(0) * BLOCK):
        index = first + tl.arange(0, BLOCK)
        tl.store(words.ptr + index, tl.zeros([BLOCK], tl.int64), mask=index < words.size)


@triton.jit
def cross_entropy_denominators_kernel(
    denominator_ptr,  # [], or None for those of the mean over the targets
    targets,  # Targets that are labels, [rows]
    shares_ptr,  # [2, SHARES]
    workspace,  # Words, cleared for later kernels
    rows,
    splits,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the denominators of the loss and of the z-loss as partial sums.

    Every kernel that needs a denominator adds the partial sums itself, which takes less time than
    letting the last program add them here.
    """
    if denominator_ptr is not None:
        weights = tl.load(denominator_ptr).to(ACC_DTYPE)
        num_labels = weights
    else:
        weights, num_labels = sum_label_weights(
            targets, rows, tl.program_id(0), splits, ACC_DTYPE, BLOCK
        )
    lane = tl.arange(0, NUM_SHARES)
    mask = lane % splits == tl.program_id(0)
    tl.store(shares_ptr + lane, tl.where(lane < splits, weights, 0.0), mask=mask)
    tl.store(shares_ptr + NUM_SHARES + lane, tl.where(lane < splits, num_labels, 0.0), mask=mask)
    clear_words(workspace, BLOCK)


@triton.jit
def sum_of_shares(shares_ptr, row: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Return the sum of the class weights (row 0 of the shares) or the number of labels (row 1)."""
    shares = tl.load(shares_ptr + row * NUM_SHARES + tl.arange(0, NUM_SHARES)).to(ACC_DTYPE)
    return tl.sum(shares, axis=0)


@triton.jit
def store_losses(
    losses, offset, loss, mask, index, scales, MEAN: tl.constexpr, FUSED_BLOCK: tl.constexpr
):
    """Store the losses of the rows in the mask, or with FUSED_BLOCK reduce them over all programs.

    `offset` is that of the rows in the losses, and `index` the index of the program. The last
    program to arrive adds the losses of all programs in the order of their indices, so two runs
    give the same bits. A single program has no slots.
    """
    if FUSED_BLOCK:
        loss = tl.where(mask, loss, 0.0)
        if len(loss.shape) == 1:
            loss = tl.sum(loss, axis=0)
        dtype: tl.constexpr = losses.loss.dtype.element_ty
        if losses.slots is None:
            total = divide(loss, scales.denominator) if MEAN else loss
            tl.store(losses.loss, total.to(dtype))
        else:
            word = loss.to(tl.float64).to(tl.int64, bitcast=True)
            tl.atomic_xchg(losses.slots + 1 + index, word, sem="relaxed")
            programs = tl.num_programs(0)
            if arrives_last(losses.slots, programs):
                lane = tl.arange(0, FUSED_BLOCK)
                words = tl.load(
                    losses.slots + 1 + lane, mask=lane < programs, other=0, volatile=True
                )
                total = tl.sum(words.to(tl.float64, bitcast=True), axis=0).to(loss.dtype)
                if MEAN:
                    total = divide(total, scales.denominator)
                tl.store(losses.loss, total.to(dtype))
    else:
        tl.store(losses.loss + offset, loss, mask=mask)


@triton.jit
def cross_entropy_reduce_kernel(
    loss_ptr,  # [rows]
    shares_ptr,  # [2, SHARES] or None
    targets,  # Targets with the labels whose class weights the mean divides by, or NO_LABELS
    result_ptr,  # []
    workspace_ptr,  # [1 + splits] int64, zero: a counter, then a slot for each program
    rows,
    splits,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Compute the sum or the mean of the rows' losses.

    Where several programs share the sum, the last one adds their partial sums in a fixed order.
    """
    sums = tl.zeros([BLOCK], ACC_DTYPE)
    for first in range(tl.program_id(0) * BLOCK, rows, splits * BLOCK):
        index = first + tl.arange(0, BLOCK).to(tl.int64)
        sums += tl.load(loss_ptr + index, mask=index < rows, other=0.0)
    total = tl.sum(sums, axis=0)
    weights = tl.full([], 1.0, ACC_DTYPE)
    is_last = tl.full([], True, tl.int1)
    if targets.labels is not None:
        weights, _ = sum_label_weights(targets, rows, tl.program_id(0), splits, ACC_DTYPE, BLOCK)
    if SHARED:
        store_pair(workspace_ptr + 1, tl.program_id(0), total, weights)
        is_last = arrives_last(workspace_ptr, splits)
        all_totals, all_weights = load_pairs(workspace_ptr + 1, splits, NUM_SHARES)
        mask = tl.arange(0, NUM_SHARES) < splits
        total = tl.sum(tl.where(mask, all_totals, 0.0), axis=0)
        weights = tl.sum(tl.where(mask, all_weights, 0.0), axis=0)
    if shares_ptr is not None:
        total = divide(total, sum_of_shares(shares_ptr, 0, ACC_DTYPE))
    if targets.labels is not None:
        total = divide(total, weights)
    tl.store(result_ptr, total.to(result_ptr.dtype.element_ty), mask=is_last)


def reduction_options(elements: int, dtype: torch.dtype) -> tuple[int, dict[str, Any]]:
    """Return the number of programs that share a sum, and the compile-time arguments."""
    block = min(2048, max(128, next_power_of_2(cdiv(elements, SHARES))))
    options = {"ACC_DTYPE": tl_acc_dtype(dtype), "BLOCK": block, "num_warps": 4}
    return max(1, min(SHARES, cdiv(elements, block))), options


def row_shape(logits: Tensor) -> list[int]:
    """Return the shape of one number for each row."""
    return [logits.shape[0], *logits.shape[2:]]


def equal_shares(logits: Tensor) -> Tensor:
    """Return shares of the number of rows, which divides a mean over target probabilities."""
    return torch.full(
        (2, SHARES),
        math.prod(row_shape(logits)) / SHARES,
        dtype=acc_dtype(logits.dtype),
        device=logits.device,
    )


def shares_of_denominators(
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    classes: int,
    dtype: torch.dtype,
    workspace: Tensor,
) -> Tensor:
    """Return the shares of the mean's denominators, and clear the workspace for later kernels.

    They are shares of the denominator, in the dtype, if the caller gives one.
    """
    elements = workspace.numel()
    if denominator is None:
        dtype = torch.float32 if weight is None else acc_dtype(weight.dtype)
        elements = target.numel()
    programs, options = reduction_options(elements, dtype)
    shares = workspace.new_empty((2, SHARES), dtype=dtype)
    launch(
        cross_entropy_denominators_kernel,
        programs,
        denominator_ptr=denominator,
        targets=Targets(target.contiguous(), None, weight, classes, ignore_index),
        shares_ptr=shares,
        workspace=Words(workspace, workspace.numel()),
        rows=target.numel(),
        splits=programs if denominator is None else 1,
        **options,
    )
    return shares


def reduce_losses(
    loss: Tensor,
    workspace: Tensor,
    dtype: torch.dtype,
    *,
    shares: Tensor | None = None,
    targets: Targets = NO_LABELS,
) -> Tensor:
    """Return the sum of the losses, or their mean.

    Args:
        loss: the loss of each row.
        workspace: zeroed int64 words, at least `SUM_WORDS`.
        dtype: the dtype of the result.
        shares: shares of the mean's denominators; the result is a mean.
        targets: labels, from which the kernel itself computes the denominator; the result is a
            mean.
    """
    result = loss.new_empty((), dtype=dtype)
    programs, options = reduction_options(loss.numel(), loss.dtype)
    if loss.dtype == torch.float64:
        programs = 1  # a slot has room for two fp32 numbers
    launch(
        cross_entropy_reduce_kernel,
        programs,
        loss_ptr=loss,
        shares_ptr=shares,
        targets=targets,
        result_ptr=result,
        workspace_ptr=workspace,
        rows=loss.numel(),
        splits=programs,
        SHARED=programs > 1,
        **options,
    )
    return result


@triton.jit
def cross_entropy_scale_kernel(
    grad_ptr,  # [rows, width]
    factor_ptr,  # []
    rows,
    width,  # the elements of a row
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply a gradient by a factor that only the device knows.

    A factor of 1 reads and writes none of the gradient.
    """
    factor = tl.load(factor_ptr).to(ACC_DTYPE)
    if factor != 1.0:
        elements = tl.full([], rows, tl.int64) * width
        start = tl.program_id(0).to(tl.int64) * BLOCK
        for first in range(start, elements, tl.num_programs(0) * BLOCK):
            index = first + tl.arange(0, BLOCK)
            mask = index < elements
            grad = tl.load(grad_ptr + index, mask=mask).to(ACC_DTYPE)
            tl.store(grad_ptr + index, (grad * factor).to(grad_ptr.dtype.element_ty), mask=mask)


def scale_(grad: Tensor, factor: Tensor) -> None:
    """Multiply a gradient in place by a scalar tensor."""
    if not _fills_its_memory(grad):
        grad.mul_(factor.to(acc_dtype(grad.dtype)))
        return
    rows = grad.shape[0] if grad.ndim else 1
    width = grad.numel() // max(rows, 1)
    # A program for each row lets the number of programs grow evenly with the rows.
    has_row_programs = rows <= FUSED_ROWS and 0 < width <= SCALE_BLOCK
    launch(
        cross_entropy_scale_kernel,
        rows if has_row_programs else min(cdiv(rows * width, SCALE_BLOCK), MAX_SCALE_PROGRAMS),
        grad_ptr=grad,
        factor_ptr=factor,
        rows=rows,
        width=width,
        ACC_DTYPE=tl_acc_dtype(grad.dtype),
        BLOCK=SCALE_BLOCK,
        num_warps=8,
    )


def _fills_its_memory(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are one gapless piece of memory, in any order."""
    if tensor.is_contiguous():
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() == 1 + sum((size - 1) * stride for size, stride in steps)
