"""Logits of the entries of recorded supports, and their gradients: kernels and launches.

Neither pass forms a product as wide as the vocabulary. Entries that are sorted by class read the
same row of the matrix one after another, from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.row_plan import matrix_rows
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype
from ...support.common import Support
from ...support.gpu.rows import KIND_INVALID
from ..chunked import empty_gradients
from ..common import Head, HeadGradients, Wanted

# Entries and hidden dimensions of the tile that a program has in registers.
LOGIT_ENTRIES, LOGIT_BLOCK = 8, 512
INPUT_ENTRIES, INPUT_BLOCK = 4, 1024
WEIGHT_ENTRIES, WEIGHT_BLOCK = 4, 1024
# Many rows name a common class. Its sum is cut at places in the order that are multiples of this,
# so that no program adds up more entries. Without cuts, Zipf's ids take 1.63 ms on an H100.
SPLIT = 512


@triton.jit(do_not_specialize=["E", "first_class"])
def support_logits_kernel(
    input,  # StridedRows [M, H]
    weight,  # StridedRows [C, H]
    bias_ptr,  # [C] or None
    support,  # Support
    x_ptr,  # [E], written for the entries whose classes the matrix has
    E,
    C,
    hidden,
    first_class,
    ACC_DTYPE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Compute the logits of entries that are next to each other in the order."""
    place = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    entry = tl.load(support.order + place, mask=place < E, other=0)
    row = tl.load(support.ordered_rows + place, mask=place < E, other=0)
    label = tl.load(support.keys + place, mask=place < E, other=0).to(tl.int64) - first_class
    counts = (place < E) & (label >= 0) & (label < C)
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
    tl.store(x_ptr + entry, x, mask=counts)


@triton.jit(do_not_specialize=["M", "first_class"])
def support_input_gradient_kernel(
    grad_ptr,  # [E]
    weight,  # StridedRows [C, H]
    support,  # Support
    dinput,  # StridedRows [M, H]
    M,
    C,
    hidden,
    first_class,
    ENTRIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Compute a part of the gradient of one row's hidden state, NaN in an invalid row."""
    ACC_DTYPE: tl.constexpr = grad_ptr.dtype.element_ty
    spans = tl.cdiv(hidden, BLOCK_H)
    row = (tl.program_id(0) // spans).to(tl.int64)
    h = (tl.program_id(0) % spans).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    ids = M + tl.load(support.starts + row)
    number = tl.load(support.numbers + row) + 1
    sums = tl.zeros([ENTRIES, BLOCK_H], ACC_DTYPE)
    for start in range(0, number, ENTRIES):
        place = start + tl.arange(0, ENTRIES)
        entry = tl.where(place == 0, row, ids + place - 1)
        label = tl.load(support.classes + entry, mask=place < number, other=-1) - first_class
        factor = tl.load(grad_ptr + entry, mask=(label >= 0) & (label < C), other=0.0)
        # What has no gradient does not count, whatever it holds.
        mask = (factor != 0.0)[:, None] & (h < hidden)
        ptrs = weight.ptr + label[:, None] * weight.row + h * weight.column
        sums += factor[:, None] * tl.load(ptrs, mask=mask, other=0.0).to(ACC_DTYPE)
    total = tl.sum(sums, axis=0)[None, :]
    is_invalid = tl.load(support.kinds + row) == KIND_INVALID
    total = tl.where(is_invalid, float("nan"), total)
    ptrs = dinput.ptr + row * dinput.row + h * dinput.column
    tl.store(ptrs, total.to(dinput.ptr.dtype.element_ty), mask=h < hidden)


@triton.jit
def store_class(dweight, dbias_ptr, label, h, hidden, total, total_bias, is_first_span):
    """Store a part of the gradient of a class."""
    if dweight is not None:
        ptrs = dweight.ptr + label * dweight.row + h * dweight.column
        tl.store(ptrs, total.to(dweight.ptr.dtype.element_ty), mask=h < hidden)
    if dbias_ptr is not None:
        total_bias = total_bias.to(dbias_ptr.dtype.element_ty)
        tl.store(dbias_ptr + label, total_bias, mask=is_first_span)


@triton.jit(do_not_specialize=["E", "first_class"])
def support_weight_gradient_kernel(
    grad_ptr,  # [E]
    input,  # StridedRows [M, H]
    support,  # Support
    dweight,  # StridedRows [C, H], 0; or None
    dbias_ptr,  # [C], 0; or None
    sums_ptr,  # [parts, 2, H + 1], of a class that began before each part, or goes on after it
    E,
    C,
    hidden,  # 0 without a gradient of the matrix
    first_class,
    SPLIT: tl.constexpr,  # entries of each part of the order
    ENTRIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add up a part of one class's gradient over its entries in one part of the order.

    There are programs for each place. Those of the first place of a class in a part have all the
    work. A class with all of its entries in one part is finished here; the sums of others are
    stored, with the bias in the last column.
    """
    ACC_DTYPE: tl.constexpr = grad_ptr.dtype.element_ty
    spans = tl.maximum(tl.cdiv(hidden, BLOCK_H), 1)
    first = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    end = tl.minimum((first // SPLIT + 1) * SPLIT, E)
    key = tl.load(support.keys + first)
    begins = tl.load(support.keys + first - 1, mask=first > 0, other=-1) != key
    label = key.to(tl.int64) - first_class
    if (begins | (first % SPLIT == 0)) & (label >= 0) & (label < C):
        ends = tl.load(support.keys + end, mask=end < E, other=-1) != key
        h = span.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
        totals = tl.zeros([ENTRIES, BLOCK_H], ACC_DTYPE)
        bias_totals = tl.zeros([ENTRIES], ACC_DTYPE)
        place = first + tl.arange(0, ENTRIES)
        counts = tl.load(support.keys + place, mask=place < end, other=-1) == key
        while tl.max(counts.to(tl.int32), axis=0) > 0:
            entry = tl.load(support.order + place, mask=counts, other=0)
            row = tl.load(support.ordered_rows + place, mask=counts, other=0)
            factor = tl.load(grad_ptr + entry, mask=counts, other=0.0)
            bias_totals += factor
            if dweight is not None:
                # What has no gradient does not count, whatever it holds.
                mask = (factor != 0.0)[:, None] & (h < hidden)
                ptrs = input.ptr + row[:, None] * input.row + h * input.column
                totals += factor[:, None] * tl.load(ptrs, mask=mask, other=0.0).to(ACC_DTYPE)
            place += ENTRIES
            counts = tl.load(support.keys + place, mask=place < end, other=-1) == key
        total, total_bias = tl.sum(totals, axis=0)[None, :], tl.sum(bias_totals, axis=0)
        if begins & ends:
            store_class(dweight, dbias_ptr, label, h, hidden, total, total_bias, span == 0)
        else:
            slot = sums_ptr + (first // SPLIT * 2 + begins.to(tl.int64)) * (hidden + 1)
            tl.store(slot + h, total, mask=h < hidden)
            tl.store(slot + hidden, total_bias, mask=span == 0)


@triton.jit(do_not_specialize=["E", "first_class"])
def support_class_sums_kernel(
    support,  # Support
    dweight,  # StridedRows [C, H], updated; or None
    dbias_ptr,  # [C], updated; or None
    sums_ptr,  # [parts, 2, H + 1]
    E,
    C,
    hidden,  # 0 without a gradient of the matrix
    first_class,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add up, part by part, the sums of a class that begins in one part and goes on after it."""
    spans = tl.maximum(tl.cdiv(hidden, BLOCK_H), 1)
    part = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    before = tl.load(support.keys + part * SPLIT - 1, mask=part > 0, other=-1)
    end = (part + 1) * SPLIT
    key = tl.load(support.keys + end - 1, mask=end < E, other=-1)
    after = tl.load(support.keys + end, mask=end < E, other=-1)
    label = key.to(tl.int64) - first_class
    if (key == after) & (key != before) & (label >= 0) & (label < C):
        h = span.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
        slot = sums_ptr + (2 * part + 1) * (hidden + 1)
        total = tl.load(slot + h, mask=h < hidden, other=0.0)
        total_bias = tl.load(slot + hidden)
        while after == key:
            part += 1
            slot = sums_ptr + 2 * part * (hidden + 1)
            total += tl.load(slot + h, mask=h < hidden, other=0.0)
            total_bias += tl.load(slot + hidden)
            end += SPLIT
            after = tl.load(support.keys + end, mask=end < E, other=-1)
        store_class(dweight, dbias_ptr, label, h, hidden, total, total_bias, span == 0)


def linear_support_logits(head: Head, support: Support, first_class: int) -> Tensor:
    """Return the logits of the entries of the head's classes; see the reference."""
    (input, weight, bias), E = head, len(support.order)
    x = input.new_zeros(E, dtype=acc_dtype(input.dtype))
    launch(
        support_logits_kernel,
        cdiv(E, LOGIT_ENTRIES),
        input=matrix_rows(input),
        weight=matrix_rows(weight),
        bias_ptr=None if bias is None else bias.contiguous(),
        support=support,
        x_ptr=x,
        E=E,
        C=len(weight),
        hidden=input.shape[1],
        first_class=first_class,
        ACC_DTYPE=tl_acc_dtype(input.dtype),
        ENTRIES=LOGIT_ENTRIES,
        BLOCK_H=min(LOGIT_BLOCK, next_power_of_2(max(input.shape[1], 1))),
        num_warps=4,
    )
    return x


def linear_support_logits_backward(
    grad: Tensor, head: Head, support: Support, first_class: int, wanted: Wanted
) -> HeadGradients:
    """Compute the `HeadGradients` from those of the logits of entries; see the reference."""
    input, weight, _ = head
    (M, hidden), E, grad = input.shape, len(support.order), grad.contiguous()
    result = empty_gradients(*head, *wanted)
    sizes = {"C": len(weight), "first_class": first_class, "num_warps": 4}
    if wanted.input_grad:
        block = min(INPUT_BLOCK, next_power_of_2(max(hidden, 1)))
        launch(
            support_input_gradient_kernel,
            M * cdiv(hidden, block),
            grad_ptr=grad,
            weight=matrix_rows(weight),
            support=support,
            dinput=matrix_rows(result.input),
            M=M,
            hidden=hidden,
            ENTRIES=INPUT_ENTRIES,
            BLOCK_H=block,
            **sizes,
        )
    if wanted.weight_grad or wanted.bias_grad:
        result.weight.zero_()
        result.bias.zero_()
        width = hidden if wanted.weight_grad else 0
        block = min(WEIGHT_BLOCK, next_power_of_2(max(width, 1)))
        spans, parts = max(cdiv(width, block), 1), cdiv(E, SPLIT)
        of_classes = {
            "support": support,
            "dweight": matrix_rows(result.weight) if wanted.weight_grad else None,
            "dbias_ptr": result.bias if wanted.bias_grad else None,
            "sums_ptr": grad.new_empty(parts, 2, width + 1),
            "E": E,
            "hidden": width,
            "SPLIT": SPLIT,
            "BLOCK_H": block,
            **sizes,
        }
        launch(
            support_weight_gradient_kernel,
            E * spans,
            grad_ptr=grad,
            input=matrix_rows(input),
            ENTRIES=WEIGHT_ENTRIES,
            **of_classes,
        )
        launch(support_class_sums_kernel, parts * spans, **of_classes)
    return result
