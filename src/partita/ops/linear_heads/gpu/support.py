"""Logits of the entries of recorded supports, and their gradients: kernels and launches.

Neither pass forms a product as wide as the vocabulary. Entries that are sorted by class read the
same row of the matrix one after another, from the cache.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import apply_softcap
from ....primitives.gpu.row_plan import matrix_rows
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype
from ...support.common import Support, SupportKernels, SupportRows
from ...support.gpu.launch import gradient, statistics
from ...support.gpu.sets import KIND_INVALID
from .. import chunked_support
from ..chunked import empty_gradients
from ..common import Head, HeadGradients, Wanted
from .launch import CHUNK_KERNELS

# A program has a tile of entries and hidden dimensions in registers, 32 sums a thread.
DOT_ENTRIES, DOT_BLOCK = 16, 256
SUM_ENTRIES, SUM_BLOCK = 8, 512


@triton.jit(do_not_specialize=["E"])
def support_dots_kernel(
    input,  # StridedRows [M, H]
    weight,  # StridedRows [C, H]
    bias_ptr,  # [C] or None
    support,  # Support
    x_ptr,  # [E], written for the entries that count
    E,
    hidden,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Compute the soft-capped logits of entries that are next to each other in the order."""
    place = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    entry = tl.load(support.order + place, mask=place < E, other=0)
    label = tl.load(support.classes + entry, mask=place < E, other=-1).to(tl.int64)
    counts = label >= 0
    label = tl.where(counts, label, 0)
    row = tl.load(support.rows + entry, mask=counts, other=0).to(tl.int64)
    states = input.ptr + row[:, None] * input.row  # [ENTRIES, 1]
    weights = weight.ptr + label[:, None] * weight.row
    sums = tl.zeros([ENTRIES, BLOCK_H], ACC_DTYPE)
    for start in range(0, hidden, BLOCK_H):
        h = (start + tl.arange(0, BLOCK_H).to(tl.int64))[None, :]
        mask = counts[:, None] & (h < hidden)
        a = tl.load(states + h * input.column, mask=mask, other=0.0).to(ACC_DTYPE)
        b = tl.load(weights + h * weight.column, mask=mask, other=0.0).to(ACC_DTYPE)
        sums += a * b
    x = tl.sum(sums, axis=1)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + label, mask=counts, other=0.0).to(ACC_DTYPE)
    x = apply_softcap(x, tl.full([], softcap, ACC_DTYPE), HAS_SOFTCAP)
    tl.store(x_ptr + entry, x, mask=counts)


@triton.jit(do_not_specialize=["K"])
def support_input_gradient_kernel(
    coefficients_ptr,  # [E]
    weight,  # StridedRows [C, H]
    support,  # Support
    dinput,  # StridedRows [M, H]
    K,
    hidden,
    ENTRIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Compute a part of the gradient of one row's hidden state, NaN in an invalid row."""
    ACC_DTYPE: tl.constexpr = coefficients_ptr.dtype.element_ty
    spans = tl.cdiv(hidden, BLOCK_H)
    row = (tl.program_id(0) // spans).to(tl.int64)
    h = (tl.program_id(0) % spans).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    begin, end = tl.load(support.offsets + row), tl.load(support.offsets + row + 1)
    is_good = (begin >= 0) & (begin <= end) & (end <= K)
    base = tl.where(is_good, begin, 0) + row
    number = tl.where(is_good, end - begin + 1, 0)
    sums = tl.zeros([ENTRIES, BLOCK_H], ACC_DTYPE)
    for start in range(0, number, ENTRIES):
        place = start + tl.arange(0, ENTRIES)
        mask = place < number
        label = tl.load(support.classes + base + place, mask=mask, other=-1).to(tl.int64)
        counts = label >= 0
        factor = tl.load(coefficients_ptr + base + place, mask=counts, other=0.0)
        # What has no gradient does not count, whatever it holds.
        mask = (factor != 0.0)[:, None] & (h < hidden)
        ptrs = weight.ptr + tl.where(counts, label, 0)[:, None] * weight.row + h * weight.column
        sums += factor[:, None] * tl.load(ptrs, mask=mask, other=0.0).to(ACC_DTYPE)
    total = tl.sum(sums, axis=0)[None, :]
    is_invalid = tl.load(support.kinds + row) == KIND_INVALID
    total = tl.where(is_invalid, float("nan"), total)
    ptrs = dinput.ptr + row * dinput.row + h * dinput.column
    tl.store(ptrs, total.to(dinput.ptr.dtype.element_ty), mask=h < hidden)


@triton.jit(do_not_specialize=["E", "num_classes"])
def support_weight_gradient_kernel(
    coefficients_ptr,  # [E]
    input,  # StridedRows [M, H]
    support,  # Support
    dweight,  # StridedRows [C, H], updated; or None
    dbias_ptr,  # [C], updated; or None
    E,
    num_classes,
    hidden,
    HAS_OTHERS: tl.constexpr,  # whether the gradients of other rows are there
    ENTRIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add up a part of one class's gradient over its entries, in their order.

    There are programs for each entry. The first entry of a class has all the work.
    """
    ACC_DTYPE: tl.constexpr = coefficients_ptr.dtype.element_ty
    spans = tl.cdiv(hidden, BLOCK_H)
    first = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    key = tl.load(support.keys + first)
    is_first = tl.load(support.keys + first - 1, mask=first > 0, other=-1) != key
    if is_first & (key >= 0) & (key < num_classes):
        h = span.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
        sums = tl.zeros([ENTRIES, BLOCK_H], ACC_DTYPE)
        bias_sums = tl.zeros([ENTRIES], ACC_DTYPE)
        place = first + tl.arange(0, ENTRIES)
        is_class = tl.load(support.keys + place, mask=place < E, other=-1) == key
        while tl.max(is_class.to(tl.int32), axis=0) > 0:
            entry = tl.load(support.order + place, mask=is_class, other=0)
            counts = tl.load(support.classes + entry, mask=is_class, other=-1) == key
            row = tl.load(support.rows + entry, mask=counts, other=0).to(tl.int64)
            factor = tl.load(coefficients_ptr + entry, mask=counts, other=0.0)
            bias_sums += factor
            if dweight is not None:
                # What has no gradient does not count, whatever it holds.
                mask = (factor != 0.0)[:, None] & (h < hidden)
                ptrs = input.ptr + row[:, None] * input.row + h * input.column
                sums += factor[:, None] * tl.load(ptrs, mask=mask, other=0.0).to(ACC_DTYPE)
            place += ENTRIES
            is_class = tl.load(support.keys + place, mask=place < E, other=-1) == key
        label = key.to(tl.int64)
        if dweight is not None:
            total = tl.sum(sums, axis=0)[None, :]
            ptrs = dweight.ptr + label * dweight.row + h * dweight.column
            if HAS_OTHERS:
                total += tl.load(ptrs, mask=h < hidden, other=0.0).to(ACC_DTYPE)
            tl.store(ptrs, total.to(dweight.ptr.dtype.element_ty), mask=h < hidden)
        if dbias_ptr is not None:
            total_bias = tl.sum(bias_sums, axis=0)
            if HAS_OTHERS:
                total_bias += tl.load(dbias_ptr + label).to(ACC_DTYPE)
            tl.store(dbias_ptr + label, total_bias, mask=span == 0)


def entry_dots(head: Head, support: Support, softcap: float) -> Tensor:
    """Return the soft-capped logits of the entries that count, 0 for others, `[E]`."""
    input, weight, bias = head
    E, hidden, accumulator = len(support.rows), input.shape[1], tl_acc_dtype(input.dtype)
    x = input.new_zeros(E, dtype=acc_dtype(input.dtype))
    launch(
        support_dots_kernel,
        cdiv(E, DOT_ENTRIES),
        input=matrix_rows(input),
        weight=matrix_rows(weight),
        bias_ptr=None if bias is None else bias.contiguous(),
        support=support,
        x_ptr=x,
        E=E,
        hidden=hidden,
        softcap=softcap,
        HAS_SOFTCAP=softcap != 0,
        ACC_DTYPE=accumulator,
        ENTRIES=DOT_ENTRIES,
        BLOCK_H=min(DOT_BLOCK, next_power_of_2(max(hidden, 1))),
        num_warps=4,
    )
    return x


def entry_statistics(
    x: Tensor, target: Tensor, support: Support, temperature: float
) -> SupportRows:
    """Return the statistics of rows with ids from the logits of their entries."""
    return statistics(None, x, x, 0, target, support, temperature, 0.0)


def entry_coefficients(
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    x: Tensor,
    target: Tensor,
    support: Support,
    results: SupportRows,
    temperature: float,
    softcap: float,
) -> Tensor:
    """Return the gradients of the logits of the entries that count, `[E]`."""
    dx, numbers = torch.empty_like(x), (temperature, softcap)
    grads = (grad_logprob, grad_entropy)
    gradient(*grads, None, x, x, 0, target, support, results, None, dx, *numbers)
    return dx


def entry_gradients(
    coefficients: Tensor,
    head: Head,
    support: Support,
    others: HeadGradients | None,
    wanted: Wanted,
    partial_input: bool = False,
) -> HeadGradients:
    """Return the gradients of the head from those of the entries' logits.

    `others` are the gradients of matrix and bias by other rows, to which these are added. A partial
    gradient of the hidden states is in the accumulator's dtype.
    """
    input, weight, _ = head
    (M, hidden), E = input.shape, len(support.rows)
    result = empty_gradients(*head, *wanted)
    block = min(SUM_BLOCK, next_power_of_2(max(hidden, 1)))
    spans = cdiv(hidden, block)
    if partial_input:
        dinput = torch.empty_like(result.input, dtype=coefficients.dtype)
        result = HeadGradients(dinput, result.weight, result.bias)
    if wanted.input_grad:
        launch(
            support_input_gradient_kernel,
            M * spans,
            coefficients_ptr=coefficients,
            weight=matrix_rows(weight),
            support=support,
            dinput=matrix_rows(result.input),
            K=E - M,
            hidden=hidden,
            ENTRIES=SUM_ENTRIES,
            BLOCK_H=block,
            num_warps=4,
        )
    if others is None:
        result.weight.zero_()
        result.bias.zero_()
    else:
        result = result._replace(weight=others.weight, bias=others.bias)
    if wanted.weight_grad or wanted.bias_grad:
        launch(
            support_weight_gradient_kernel,
            E * (spans if wanted.weight_grad else 1),
            coefficients_ptr=coefficients,
            input=matrix_rows(input),
            support=support,
            dweight=matrix_rows(result.weight) if wanted.weight_grad else None,
            dbias_ptr=result.bias if wanted.bias_grad else None,
            E=E,
            num_classes=len(weight),
            hidden=hidden if wanted.weight_grad else 1,
            HAS_OTHERS=others is not None,
            ENTRIES=SUM_ENTRIES,
            BLOCK_H=block,
            num_warps=4,
        )
    return result


SUPPORT_KERNELS = SupportKernels(entry_dots, entry_statistics, entry_coefficients, entry_gradients)

linear_support = functools.partial(chunked_support.linear_support, CHUNK_KERNELS, SUPPORT_KERNELS)
linear_support_backward = functools.partial(
    chunked_support.linear_support_backward, CHUNK_KERNELS, SUPPORT_KERNELS
)
