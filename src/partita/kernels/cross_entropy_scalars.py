"""The small kernels around the cross-entropy: what the mean divides by, the sum of the rows, and a factor from upstream."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.softmax import accumulator
from .launch import launch, triton_dtype
from .math import divide


@triton.jit
def denominators_kernel(
    target_ptr,  # [rows] labels
    weight_ptr,  # [classes] or None
    result_ptr,  # [2]: class weights of the labels that count, and their number
    rows,
    classes,
    ignore_index,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the mean divides by, in one program, so that the order of the sum is fixed."""
    count, weights = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], WIDE)
    for first in range(0, rows, BLOCK):
        place = first + tl.arange(0, BLOCK).to(tl.int64)
        label = tl.load(target_ptr + place, mask=place < rows, other=ignore_index).to(tl.int64)
        count += (label != ignore_index).to(tl.int32)
        if weight_ptr is not None:
            inside = (label != ignore_index) & (label >= 0) & (label < classes)
            weights += tl.load(weight_ptr + label, mask=inside, other=0.0).to(WIDE)
    counted = tl.sum(count.to(WIDE), axis=0)
    tl.store(result_ptr, tl.sum(weights, axis=0) if weight_ptr is not None else counted)
    tl.store(result_ptr + 1, counted)


@triton.jit
def total_kernel(
    loss_ptr,  # [rows]
    denominators_ptr,  # [2] or None
    result_ptr,  # []
    rows,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum or mean of the rows' losses, in one program, so that the order of the sum is fixed."""
    sums = tl.zeros([BLOCK], WIDE)
    for first in range(0, rows, BLOCK):
        place = first + tl.arange(0, BLOCK).to(tl.int64)
        sums += tl.load(loss_ptr + place, mask=place < rows, other=0.0)
    total = tl.sum(sums, axis=0)
    if denominators_ptr is not None:
        total = divide(total, tl.load(denominators_ptr).to(WIDE))
    tl.store(result_ptr, total.to(result_ptr.dtype.element_ty))


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


def cross_entropy_denominators(target: Tensor, weight: Tensor | None, ignore_index: int, classes: int) -> Tensor:
    wide = torch.float32 if weight is None else accumulator(weight.dtype)
    result = target.new_empty(2, dtype=wide)
    args = (target.contiguous(), weight, result, target.numel(), classes, ignore_index)
    launch(denominators_kernel, 1, *args, **single_program(target.numel(), wide))
    return result


def single_program(elements: int, dtype: torch.dtype) -> dict[str, Any]:
    """Options of a kernel whose one program reads all."""
    block = min(32768, max(128, triton.next_power_of_2(elements)))
    return {"WIDE": triton_dtype(dtype), "BLOCK": block, "num_warps": max(1, min(32, block // 512))}


def cross_entropy_total(loss: Tensor, denominators: Tensor | None, dtype: torch.dtype) -> Tensor:
    if loss.numel() > 65536:
        total = loss.sum()
        return (total if denominators is None else total / denominators[0]).to(dtype)
    result = loss.new_empty((), dtype=dtype)
    launch(total_kernel, 1, loss, denominators, result, loss.numel(), **single_program(loss.numel(), loss.dtype))
    return result


def scale_(grad: Tensor, factor: Tensor) -> None:
    elements = grad.numel()
    if not (grad.is_contiguous() or elements == 1 + sum((size - 1) * stride for size, stride in zip(grad.shape, grad.stride(), strict=True))):
        grad.mul_(factor.to(accumulator(grad.dtype)))
        return
    launch(scale_kernel, min(triton.cdiv(elements, 4096), 1024), grad, factor, elements, WIDE=triton_dtype(grad.dtype), BLOCK=4096, num_warps=8)
