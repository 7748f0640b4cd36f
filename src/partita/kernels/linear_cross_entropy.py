"""Chunks of logits between matrix products: what is known of their rows, and their gradient in their place."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import linear_cross_entropy as reference
from ..reference.linear_cross_entropy import Coefficients, State
from .cross_entropy import one_pass_of_part
from .cross_entropy_scalars import SUM_WORDS, denominators
from .launch import cdiv, launch, power_of_2, triton_dtype
from .math import LN2, LOG2E, capped, finite_shift, log_of, reciprocal


@triton.jit(do_not_specialize=["classes", "first"])
def linear_absorb_kernel(
    logits_ptr,  # [rows, classes], of the classes from `first` on
    target_ptr,  # [rows]
    weight_ptr,  # [classes] or None
    maximum_ptr,  # [rows]
    sumexp_ptr,  # [rows]
    label_ptr,  # [rows]
    origin_ptr,  # [rows] or None
    spread_ptr,  # [rows] or None
    surprise_ptr,  # [rows] or None
    argmax_ptr,  # [rows] int64 or None
    classes,
    first,
    stride,
    temperature: tl.float64,
    softcap: tl.float64,
    CAP: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The state of a row, carried over further classes."""
    softcap, slope = tl.full([], softcap, WIDE), tl.full([], LOG2E, WIDE) / tl.full([], temperature, WIDE)
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * stride
    maximum, total = tl.load(maximum_ptr + row), tl.load(sumexp_ptr + row)
    label = tl.load(target_ptr + row).to(tl.int64) - first
    here = (label >= 0) & (label < classes)
    label_x = capped(tl.load(start + label, mask=here, other=0.0).to(WIDE), softcap, CAP)
    if surprise_ptr is not None:
        surprise, best = tl.load(surprise_ptr + row), tl.load(argmax_ptr + row)
    if spread_ptr is not None:
        spread, origin = tl.load(spread_ptr + row), tl.load(origin_ptr + row)
    for block in range(0, classes, BLOCK_V):
        v = block + tl.arange(0, BLOCK_V)
        inside = v < classes
        x = tl.load(start + v, mask=inside, other=-float("inf")).to(WIDE)
        if CAP:
            x = tl.where(inside, capped(x, softcap, CAP), -float("inf"))
        highest = tl.max(x, axis=0)
        higher = tl.maximum(maximum, highest)
        shift = finite_shift(higher)
        if spread_ptr is not None:
            origin = tl.where(first + block == 0, shift, origin)
            weight = tl.full([BLOCK_V], 1.0, WIDE)
            if weight_ptr is not None:
                weight = tl.load(weight_ptr + v, mask=inside, other=0.0).to(WIDE)
            spread += tl.sum(tl.where(inside & (weight != 0.0), weight * (origin - x), 0.0), axis=0)
        exponent = (x - shift) * slope
        e, scale = tl.exp2(exponent), tl.exp2((maximum - shift) * slope)
        if surprise_ptr is not None:
            moved = surprise - total * (shift - finite_shift(maximum)) * slope
            surprise = scale * moved + tl.sum(e * tl.maximum(exponent, -10000.0), axis=0)
            at = tl.min(tl.where(x == highest, v, 0x7FFFFFFF), axis=0).to(tl.int64)
            best = tl.where(highest > maximum, first + at, best)
        total = total * scale + tl.sum(e, axis=0)
        maximum = higher
    tl.store(maximum_ptr + row, maximum)
    tl.store(sumexp_ptr + row, total)
    tl.store(label_ptr + row, label_x, mask=here)
    if surprise_ptr is not None:
        tl.store(surprise_ptr + row, surprise)
        tl.store(argmax_ptr + row, best)
    if spread_ptr is not None:
        tl.store(spread_ptr + row, spread)
        tl.store(origin_ptr + row, origin)


@triton.jit(do_not_specialize=["classes", "first"])
def linear_descend_kernel(
    logits_ptr,  # [rows, classes], of the classes from `first` on
    target_ptr,  # [rows]
    weight_ptr,  # [classes] or None
    pull_ptr,  # [rows]
    at_label_ptr,  # [rows]
    log_pull_ptr,  # [rows] or None
    by_class_ptr,  # [rows] or None
    maximum_ptr,  # [rows]
    sumexp_ptr,  # [rows]
    classes,
    first,
    stride,
    temperature: tl.float64,
    softcap: tl.float64,
    CAP: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A part of a row becomes its gradient."""
    softcap, slope = tl.full([], softcap, WIDE), tl.full([], LOG2E, WIDE) / tl.full([], temperature, WIDE)
    blocks = tl.cdiv(classes, BLOCK_V)
    row, v = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    inside, at = v < classes, logits_ptr + row * stride + v
    x = capped(tl.load(at, mask=inside, other=0.0).to(WIDE), softcap, CAP)
    label = tl.load(target_ptr + row).to(tl.int64) - first
    pull, at_label, total = tl.load(pull_ptr + row), tl.load(at_label_ptr + row), tl.load(sumexp_ptr + row)
    exponent = (x - finite_shift(tl.load(maximum_ptr + row))) * slope
    p = tl.exp2(exponent) * reciprocal(total)
    grad, active = pull * p, tl.abs(pull) + tl.abs(at_label)
    if log_pull_ptr is not None:
        log_pull = tl.load(log_pull_ptr + row)
        grad += log_pull * p * (LN2 * tl.maximum(exponent, -10000.0) - log_of(total))  # where p is 0, so is the product
        active += tl.abs(log_pull)
    if by_class_ptr is not None:
        by_class = tl.load(by_class_ptr + row)
        if weight_ptr is not None:
            grad += by_class * tl.load(weight_ptr + v, mask=inside, other=0.0).to(WIDE)
        else:
            grad += by_class
        active += tl.abs(by_class)
    grad += tl.where(v == label, at_label, 0.0)
    if CAP:
        grad *= 1.0 - (x / softcap) * (x / softcap)
    tl.store(at, tl.where(active == 0.0, 0.0, grad).to(logits_ptr.dtype.element_ty), mask=inside)


def absorb(logits: Tensor, first: int, target: Tensor, class_weight: Tensor | None, state: State, temperature: float, softcap: float) -> None:
    rows, classes = logits.shape
    known = (state.maximum, state.sumexp, state.label, state.origin, state.spread, state.surprise, state.argmax)
    block = min(power_of_2(classes), 4096)
    options = {"CAP": softcap != 0, "WIDE": triton_dtype(logits.dtype), "BLOCK_V": block, "num_warps": 4 if block > 1024 else 1}
    launch(linear_absorb_kernel, rows, logits, target, class_weight, *known, classes, first, logits.stride(0), temperature, softcap, **options)


def descend(
    logits: Tensor, first: int, target: Tensor, class_weight: Tensor | None, c: Coefficients, maximum: Tensor, sumexp: Tensor,
    temperature: float, softcap: float,
) -> None:  # fmt: skip
    rows, classes = logits.shape
    block = min(power_of_2(classes), 4096)
    options = {"CAP": softcap != 0, "WIDE": triton_dtype(logits.dtype), "BLOCK_V": block, "num_warps": 4 if block > 1024 else 1}
    tensors = (logits, target, class_weight, c.pull, c.at_label, c.log_pull, c.by_class, maximum, sumexp)
    launch(linear_descend_kernel, rows * cdiv(classes, block), *tensors, classes, first, logits.stride(0), temperature, softcap, **options)


def scales(target: Tensor, class_weight: Tensor | None, ignore_index: int, classes: int, mean: bool, wide: torch.dtype) -> Tensor | None:
    """Shares of what the mean divides by; None for a sum."""
    if not mean:
        return None
    return denominators(target, class_weight, ignore_index, classes, torch.empty(SUM_WORDS, dtype=torch.int64, device=target.device))


linear_rows = functools.partial(reference.linear_rows, absorb=absorb)
linear_rows_backward = functools.partial(reference.linear_rows_backward, descend=descend)
linear_one_pass = functools.partial(reference.linear_one_pass, one_pass=one_pass_of_part, scales=scales)
