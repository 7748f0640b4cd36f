"""The small kernels around the cross-entropy: what the mean divides by, the sum of the rows, and a factor from upstream."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import divide
from ....primitives.gpu.sync import arrives_last, load_partials, store_partial
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype

SHARES = 32  # programs among which the labels or losses are divided: what one warp adds up again
SHARE_COUNT = tl.constexpr(SHARES)
SUM_WORDS = (
    2 + SHARES
)  # of 64 bits: a counter, a box for each program, and one more for the alignment of what stands behind
SMALL = (
    2**16
)  # elements up to which a factor is multiplied in by PyTorch: launching a kernel of ours would take longer than it saves


@triton.jit
def labels_at(target_ptr, place, inside, ignore_index):
    """Labels of rows, ignored outside of them: as the value outside of a narrow type, `ignore_index` would wrap."""
    return tl.where(
        inside, tl.load(target_ptr + place, mask=inside, other=0).to(tl.int64), ignore_index
    )


@triton.jit
def label_share(
    target_ptr,
    weight_ptr,
    rows,
    classes,
    ignore_index,
    splits,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of this program's rows: the class weights of the labels that count, and their number."""
    count, weights = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], WIDE)
    for first in range(tl.program_id(0) * BLOCK, rows, splits * BLOCK):
        place = first + tl.arange(0, BLOCK).to(tl.int64)
        label = labels_at(target_ptr, place, place < rows, ignore_index)
        count += (label != ignore_index).to(tl.int32)
        if weight_ptr is not None:
            inside = (label != ignore_index) & (label >= 0) & (label < classes)
            weights += tl.load(weight_ptr + label, mask=inside, other=0.0).to(WIDE)
    counted = tl.sum(count, axis=0).to(WIDE)
    return tl.sum(weights, axis=0) if weight_ptr is not None else counted, counted


@triton.jit
def clear(words_ptr, words, BLOCK: tl.constexpr):
    """Zero the words that later kernels count and exchange in."""
    for first in range(tl.program_id(0) * BLOCK, words, tl.num_programs(0) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(words_ptr + place, tl.zeros([BLOCK], tl.int64), mask=place < words)


@triton.jit
def denominators_kernel(
    target_ptr,  # [rows] labels
    weight_ptr,  # [classes] or None
    shares_ptr,  # [2, SHARES]: class weights of the labels that count, and their number, each as shares that add up to it
    words_ptr,  # [words] int64, to be zeroed
    rows,
    classes,
    ignore_index,
    words,
    splits,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the mean divides by. Who needs it adds the shares: that takes less time than a program that comes last would."""
    weights, count = label_share(
        target_ptr, weight_ptr, rows, classes, ignore_index, splits, WIDE, BLOCK
    )
    lane = tl.arange(0, SHARE_COUNT)
    mine = lane % splits == tl.program_id(0)
    tl.store(shares_ptr + lane, tl.where(lane < splits, weights, 0.0), mask=mine)
    tl.store(shares_ptr + SHARE_COUNT + lane, tl.where(lane < splits, count, 0.0), mask=mine)
    clear(words_ptr, words, BLOCK)


@triton.jit
def whole_of(shares_ptr, which: tl.constexpr, WIDE: tl.constexpr):
    """What the shares add up to: class weights (0), or the number of labels that count (1)."""
    return tl.sum(
        tl.load(shares_ptr + which * SHARE_COUNT + tl.arange(0, SHARE_COUNT)).to(WIDE), axis=0
    )


@triton.jit
def total_kernel(
    loss_ptr,  # [rows]
    shares_ptr,  # [2, SHARES] or None
    target_ptr,  # [rows] labels, where the mean divides by theirs, or None
    weight_ptr,  # [classes] or None
    result_ptr,  # []
    words_ptr,  # [1 + programs] int64, zero: a counter, then a box for each program
    rows,
    classes,
    ignore_index,
    splits,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Sum or mean of the rows' losses; the last of several programs adds their shares in order."""
    sums = tl.zeros([BLOCK], WIDE)
    for first in range(tl.program_id(0) * BLOCK, rows, splits * BLOCK):
        place = first + tl.arange(0, BLOCK).to(tl.int64)
        sums += tl.load(loss_ptr + place, mask=place < rows, other=0.0)
    total, weights, last = tl.sum(sums, axis=0), tl.full([], 1.0, WIDE), tl.full([], True, tl.int1)
    if target_ptr is not None:
        weights, _ = label_share(
            target_ptr, weight_ptr, rows, classes, ignore_index, splits, WIDE, BLOCK
        )
    if SHARED:
        store_partial(words_ptr, tl.program_id(0), total, weights)
        last = arrives_last(words_ptr, splits)
        totals, all_weights, held = load_partials(words_ptr, splits, SHARE_COUNT)
        total, weights = (
            tl.sum(tl.where(held, totals, 0.0), axis=0),
            tl.sum(tl.where(held, all_weights, 0.0), axis=0),
        )
    if shares_ptr is not None:
        total = divide(total, whole_of(shares_ptr, 0, WIDE))
    if target_ptr is not None:
        total = divide(total, weights)
    tl.store(result_ptr, total.to(result_ptr.dtype.element_ty), mask=last)


@triton.jit
def scale_kernel(
    grad_ptr,  # [elements]
    factor_ptr,  # []
    elements,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply by a factor that the host does not know; nothing is read or written where it is 1."""
    factor = tl.load(factor_ptr).to(WIDE)
    if factor != 1.0:
        for first in range(
            tl.program_id(0).to(tl.int64) * BLOCK, elements, tl.num_programs(0) * BLOCK
        ):
            place = first + tl.arange(0, BLOCK)
            grad = tl.load(grad_ptr + place, mask=place < elements).to(WIDE)
            tl.store(
                grad_ptr + place,
                (grad * factor).to(grad_ptr.dtype.element_ty),
                mask=place < elements,
            )


def share_options(elements: int, dtype: torch.dtype) -> tuple[int, dict[str, Any]]:
    """Programs that share a sum, and their options."""
    block = min(2048, max(128, next_power_of_2(cdiv(elements, SHARES))))
    return max(1, min(SHARES, cdiv(elements, block))), {
        "WIDE": tl_acc_dtype(dtype),
        "BLOCK": block,
        "num_warps": 4,
    }


def mean_denominators(
    target: Tensor, weight: Tensor | None, ignore_index: int, classes: int, words: Tensor
) -> Tensor:
    """The shares of what the mean divides by; `words` are zeroed on the way."""
    wide = torch.float32 if weight is None else acc_dtype(weight.dtype)
    shares = target.new_empty((2, SHARES), dtype=wide)
    splits, options = share_options(target.numel(), wide)
    launch(
        denominators_kernel,
        splits,
        target.contiguous(),
        weight,
        shares,
        words,
        target.numel(),
        classes,
        ignore_index,
        words.numel(),
        splits,
        **options,
    )
    return shares


def reduce_losses(
    loss: Tensor,
    words: Tensor,
    dtype: torch.dtype,
    *,
    shares: Tensor | None = None,
    target: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = 0,
    classes: int = 0,
) -> Tensor:
    """The sum of the losses; their mean where there are shares of what it divides by, or targets from which that is found."""
    result = loss.new_empty((), dtype=dtype)
    splits, options = share_options(loss.numel(), loss.dtype)
    splits = 1 if loss.dtype == torch.float64 else splits  # a box holds fp32
    labels = None if target is None else target.contiguous()
    sizes = (loss.numel(), classes, ignore_index, splits)
    launch(
        total_kernel,
        splits,
        loss,
        shares,
        labels,
        weight,
        result,
        words,
        *sizes,
        SHARED=splits > 1,
        **options,
    )
    return result


def scale_(grad: Tensor, factor: Tensor) -> None:
    elements = grad.numel()
    if elements <= SMALL and grad.dtype == factor.dtype:
        grad.mul_(factor)
        return
    if not (
        grad.is_contiguous()
        or elements
        == 1
        + sum((size - 1) * stride for size, stride in zip(grad.shape, grad.stride(), strict=True))
    ):
        grad.mul_(factor.to(acc_dtype(grad.dtype)))
        return
    launch(
        scale_kernel,
        min(cdiv(elements, 4096), 1024),
        grad,
        factor,
        elements,
        WIDE=tl_acc_dtype(grad.dtype),
        BLOCK=4096,
        num_warps=8,
    )
