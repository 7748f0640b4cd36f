"""The small kernels around the cross-entropy: what the mean divides by, the sum of the rows, and a factor from upstream."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.softmax import accumulator
from .launch import MOST_SPLITS, launch, triton_dtype
from .math import comes_last, deposit, deposits, divide


@triton.jit
def denominators_kernel(
    target_ptr,  # [rows] labels
    weight_ptr,  # [classes] or None
    result_ptr,  # [2]: class weights of the labels that count, and their number
    boxes_ptr,  # [1 + programs] int64, zero: a counter, then a box for each program
    rows,
    classes,
    ignore_index,
    splits,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """What the mean divides by; the last of several programs adds their shares in order."""
    count, weights = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], WIDE)
    for first in range(tl.program_id(0) * BLOCK, rows, splits * BLOCK):
        place = first + tl.arange(0, BLOCK).to(tl.int64)
        label = tl.load(target_ptr + place, mask=place < rows, other=ignore_index).to(tl.int64)
        count += (label != ignore_index).to(tl.int32)
        if weight_ptr is not None:
            inside = (label != ignore_index) & (label >= 0) & (label < classes)
            weights += tl.load(weight_ptr + label, mask=inside, other=0.0).to(WIDE)
    counted, weighed, last = add_shares(
        boxes_ptr, splits, tl.sum(count.to(WIDE), axis=0), tl.sum(weights, axis=0), SHARED, BLOCK_SPLITS
    )
    tl.store(result_ptr, weighed if weight_ptr is not None else counted, mask=last)
    tl.store(result_ptr + 1, counted, mask=last)


@triton.jit
def add_shares(boxes_ptr, splits, first, second, SHARED: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """Two sums over all programs, and whether this is the last of them, which alone knows."""
    if SHARED:
        deposit(boxes_ptr, tl.program_id(0), first, second)
        last = comes_last(boxes_ptr, splits)
        firsts, seconds, held = deposits(boxes_ptr, splits, BLOCK_SPLITS)
        return tl.sum(tl.where(held, firsts, 0.0), axis=0), tl.sum(tl.where(held, seconds, 0.0), axis=0), last
    else:
        return first, second, tl.full([], True, tl.int1)


@triton.jit
def total_kernel(
    loss_ptr,  # [rows]
    denominators_ptr,  # [2] or None
    result_ptr,  # []
    boxes_ptr,  # [1 + programs] int64, zero: a counter, then a box for each program
    rows,
    splits,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Sum or mean of the rows' losses; the last of several programs adds their shares in order."""
    sums = tl.zeros([BLOCK], WIDE)
    for first in range(tl.program_id(0) * BLOCK, rows, splits * BLOCK):
        place = first + tl.arange(0, BLOCK).to(tl.int64)
        sums += tl.load(loss_ptr + place, mask=place < rows, other=0.0)
    share = tl.sum(sums, axis=0)
    total, _, last = add_shares(boxes_ptr, splits, share, share, SHARED, BLOCK_SPLITS)
    if denominators_ptr is not None:
        total = divide(total, tl.load(denominators_ptr).to(WIDE))
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
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, elements, tl.num_programs(0) * BLOCK):
            place = first + tl.arange(0, BLOCK)
            grad = tl.load(grad_ptr + place, mask=place < elements).to(WIDE)
            tl.store(grad_ptr + place, (grad * factor).to(grad_ptr.dtype.element_ty), mask=place < elements)


def sharing(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[int, Tensor | None, dict[str, Any]]:
    """Programs that share a sum, their boxes, and their options; a box holds fp32, so fp64 sums have one program."""
    block = min(2048, max(128, triton.next_power_of_2(elements)))
    splits = 1 if dtype == torch.float64 else max(1, min(MOST_SPLITS, triton.cdiv(elements, block)))
    boxes = None if splits == 1 else torch.zeros(1 + splits, dtype=torch.int64, device=device)
    options = {"WIDE": triton_dtype(dtype), "BLOCK": block, "SHARED": splits > 1, "BLOCK_SPLITS": max(2, triton.next_power_of_2(splits)), "num_warps": 4}
    return splits, boxes, options


def cross_entropy_denominators(target: Tensor, weight: Tensor | None, ignore_index: int, classes: int) -> Tensor:
    wide = torch.float32 if weight is None else accumulator(weight.dtype)
    result = target.new_empty(2, dtype=wide)
    splits, boxes, options = sharing(target.numel(), wide, target.device)
    launch(denominators_kernel, splits, target.contiguous(), weight, result, boxes, target.numel(), classes, ignore_index, splits, **options)
    return result


def cross_entropy_total(loss: Tensor, denominators: Tensor | None, dtype: torch.dtype) -> Tensor:
    result = loss.new_empty((), dtype=dtype)
    splits, boxes, options = sharing(loss.numel(), loss.dtype, loss.device)
    launch(total_kernel, splits, loss, denominators, result, boxes, loss.numel(), splits, **options)
    return result


def scale_(grad: Tensor, factor: Tensor) -> None:
    elements = grad.numel()
    if not (grad.is_contiguous() or elements == 1 + sum((size - 1) * stride for size, stride in zip(grad.shape, grad.stride(), strict=True))):
        grad.mul_(factor.to(accumulator(grad.dtype)))
        return
    launch(scale_kernel, min(triton.cdiv(elements, 4096), 1024), grad, factor, elements, WIDE=triton_dtype(grad.dtype), BLOCK=4096, num_warps=8)
