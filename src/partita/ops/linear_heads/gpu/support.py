"""Logits of the entries of recorded supports, and their gradients: kernels and launches.

Neither pass forms a product as wide as the vocabulary. Entries that are sorted by class read the
same row of the matrix one after another, from the cache.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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

# Entries and hidden dimensions of the tile that a program has in registers.
DOT_ENTRIES, DOT_BLOCK = 8, 512
INPUT_ENTRIES, INPUT_BLOCK = 4, 1024
WEIGHT_ENTRIES, WEIGHT_BLOCK = 4, 1024
# A common class has entries in most rows. Its sum is cut at places in the order that are multiples
# of this, so that no program adds up more entries.
SPLIT = 512


class PartSums(NamedTuple):
    """The sums of classes with entries in several parts of the order, each `[parts, H + 1]`.

    The last column has the sum of the gradient of the bias.

    Fields:
        heads: the sum of the class that was begun before a part.
        tails: the sum of the class that is begun in a part and goes on after it.
    """

    heads: Any
    tails: Any


@triton.jit(do_not_specialize=["E", "num_classes"])
def support_dots_kernel(
    input,  # StridedRows [M, H]
    weight,  # StridedRows [C, H]
    bias_ptr,  # [C] or None
    support,  # Support
    x_ptr,  # [E], written for the entries that have a class
    E,
    num_classes,
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
    label = tl.load(support.keys + place, mask=place < E, other=num_classes).to(tl.int64)
    row = tl.load(support.rows + place, mask=place < E, other=0).to(tl.int64)
    counts = label < num_classes
    label = tl.where(counts, label, 0)
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


@triton.jit
def store_class(
    dweight, dbias_ptr, label, h, hidden, total, total_bias, is_first_span, HAS_OTHERS: tl.constexpr
):
    """Store a part of the gradient of a class; with HAS_OTHERS add it to what is there."""
    if dweight is not None:
        ptrs = dweight.ptr + label * dweight.row + h * dweight.column
        mask = h < hidden
        if HAS_OTHERS:
            total += tl.load(ptrs, mask=mask, other=0.0).to(total.dtype)
        tl.store(ptrs, total.to(dweight.ptr.dtype.element_ty), mask=mask)
    if dbias_ptr is not None:
        ptr = dbias_ptr + label
        if HAS_OTHERS:
            total_bias += tl.load(ptr).to(total_bias.dtype)
        tl.store(ptr, total_bias.to(dbias_ptr.dtype.element_ty), mask=is_first_span)


@triton.jit(do_not_specialize=["E", "num_classes"])
def support_weight_gradient_kernel(
    coefficients_ptr,  # [E]
    input,  # StridedRows [M, H]
    support,  # Support
    dweight,  # StridedRows [C, H], updated; or None
    dbias_ptr,  # [C], updated; or None
    sums,  # PartSums
    E,
    num_classes,
    hidden,  # 0 without a gradient of the matrix
    HAS_OTHERS: tl.constexpr,  # whether the gradients of other rows are there
    SPLIT: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add up a part of one class's gradient over its entries in one part of the order.

    There are programs for each place. The first place of a class in a part has all the work. A
    class with all of its entries in one part is finished here.
    """
    ACC_DTYPE: tl.constexpr = coefficients_ptr.dtype.element_ty
    spans = tl.maximum(tl.cdiv(hidden, BLOCK_H), 1)
    first = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    part = first // SPLIT
    end = tl.minimum((part + 1) * SPLIT, E)
    place = first + tl.arange(0, ENTRIES)
    key = tl.load(support.keys + first)
    before = tl.load(support.keys + first - 1, mask=first > 0, other=-1)
    after = tl.load(support.keys + end, mask=end < E, other=-1)
    is_class = tl.load(support.keys + place, mask=place < end, other=-1) == key
    if ((before != key) | (first % SPLIT == 0)) & (key < num_classes):
        h = span.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
        totals = tl.zeros([ENTRIES, BLOCK_H], ACC_DTYPE)
        bias_totals = tl.zeros([ENTRIES], ACC_DTYPE)
        while tl.max(is_class.to(tl.int32), axis=0) > 0:
            entry = tl.load(support.order + place, mask=is_class, other=0)
            row = tl.load(support.rows + place, mask=is_class, other=0).to(tl.int64)
            factor = tl.load(coefficients_ptr + entry, mask=is_class, other=0.0)
            bias_totals += factor
            if dweight is not None:
                mask = is_class[:, None] & (h < hidden)
                ptrs = input.ptr + row[:, None] * input.row + h * input.column
                states = tl.load(ptrs, mask=mask, other=0.0).to(ACC_DTYPE)
                # What has no gradient does not count, whatever it holds.
                has_gradient = (factor != 0.0)[:, None]
                totals += factor[:, None] * tl.where(has_gradient, states, 0.0)
            is_full = tl.min(is_class.to(tl.int32), axis=0) > 0
            place += ENTRIES
            is_class = tl.load(support.keys + place, mask=is_full & (place < end), other=-1) == key
        total, total_bias = tl.sum(totals, axis=0)[None, :], tl.sum(bias_totals, axis=0)
        if (before != key) & (after != key):
            of_class = (key.to(tl.int64), h, hidden, total, total_bias, span == 0)
            store_class(dweight, dbias_ptr, *of_class, HAS_OTHERS)
        else:
            slots = tl.where(before != key, sums.tails, sums.heads)
            slots += part * (hidden + 1)
            tl.store(slots + h, total, mask=h < hidden)
            tl.store(slots + hidden, total_bias, mask=span == 0)


@triton.jit(do_not_specialize=["E", "num_classes"])
def support_class_sums_kernel(
    support,  # Support
    dweight,  # StridedRows [C, H], updated; or None
    dbias_ptr,  # [C], updated; or None
    sums,  # PartSums
    E,
    num_classes,
    hidden,  # 0 without a gradient of the matrix
    HAS_OTHERS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add up the sums of a class that is begun in one part of the order and goes on after it."""
    spans = tl.maximum(tl.cdiv(hidden, BLOCK_H), 1)
    part = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    begin, end = part * SPLIT, (part + 1) * SPLIT
    before = tl.load(support.keys + begin - 1, mask=part > 0, other=-1)
    key = tl.load(support.keys + end - 1, mask=end < E, other=-1)
    after = tl.load(support.keys + end, mask=end < E, other=-1)
    if (end < E) & (key == after) & (key != before) & (key < num_classes):
        h = span.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
        slots = sums.tails + part * (hidden + 1)
        total = tl.load(slots + h, mask=h < hidden, other=0.0)
        total_bias = tl.load(slots + hidden)
        while after == key:
            part += 1
            slots = sums.heads + part * (hidden + 1)
            total += tl.load(slots + h, mask=h < hidden, other=0.0)
            total_bias += tl.load(slots + hidden)
            end += SPLIT
            after = tl.load(support.keys + end, mask=end < E, other=-1)
        of_class = (key.to(tl.int64), h, hidden, total, total_bias, span == 0)
        store_class(dweight, dbias_ptr, *of_class, HAS_OTHERS)


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
        num_classes=len(weight),
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
    # Wrong offsets leave entries out, whose gradients are NaN then.
    dx, numbers = torch.full_like(x, torch.nan), (temperature, softcap)
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
    if partial_input:
        dinput = torch.empty_like(result.input, dtype=coefficients.dtype)
        result = HeadGradients(dinput, result.weight, result.bias)
    if wanted.input_grad:
        block = min(INPUT_BLOCK, next_power_of_2(max(hidden, 1)))
        launch(
            support_input_gradient_kernel,
            M * cdiv(hidden, block),
            coefficients_ptr=coefficients,
            weight=matrix_rows(weight),
            support=support,
            dinput=matrix_rows(result.input),
            K=E - M,
            hidden=hidden,
            ENTRIES=INPUT_ENTRIES,
            BLOCK_H=block,
            num_warps=4,
        )
    if others is None:
        result.weight.zero_()
        result.bias.zero_()
    else:
        result = HeadGradients(result.input, others.weight, others.bias)
    if wanted.weight_grad or wanted.bias_grad:
        add_to_classes(coefficients, input, support, result, others is not None, wanted)
    return result


def add_to_classes(
    coefficients: Tensor,
    input: Tensor,
    support: Support,
    result: HeadGradients,
    has_others: bool,
    wanted: Wanted,
) -> None:
    """Write the gradients of matrix and bias, or add them to those of other rows."""
    E, parts = len(support.rows), cdiv(len(support.rows), SPLIT)
    hidden = input.shape[1] if wanted.weight_grad else 0
    num_classes = len(result.weight if wanted.weight_grad else result.bias)
    block = min(WEIGHT_BLOCK, next_power_of_2(max(hidden, 1)))
    spans = max(cdiv(hidden, block), 1)
    sums = PartSums(*coefficients.new_empty(2, parts, hidden + 1).unbind())
    options = {
        "dweight": matrix_rows(result.weight) if wanted.weight_grad else None,
        "dbias_ptr": result.bias if wanted.bias_grad else None,
        "sums": sums,
        "E": E,
        "num_classes": num_classes,
        "hidden": hidden,
        "HAS_OTHERS": has_others,
        "SPLIT": SPLIT,
        "BLOCK_H": block,
        "num_warps": 4,
    }
    launch(
        support_weight_gradient_kernel,
        E * spans,
        coefficients_ptr=coefficients,
        input=matrix_rows(input),
        support=support,
        ENTRIES=WEIGHT_ENTRIES,
        **options,
    )
    launch(
        support_class_sums_kernel,
        parts * spans,
        support=support,
        **options,
    )


SUPPORT_KERNELS = SupportKernels(entry_dots, entry_statistics, entry_coefficients, entry_gradients)

linear_support = functools.partial(chunked_support.linear_support, CHUNK_KERNELS, SUPPORT_KERNELS)
linear_support_backward = functools.partial(
    chunked_support.linear_support_backward, CHUNK_KERNELS, SUPPORT_KERNELS
)
