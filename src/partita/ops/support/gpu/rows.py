"""Kernels of the statistics of supports, and of their gradient.

A program has one row. It reads the logits at the classes of the row's entries, or all of them in a
row without ids; or it reads numbers that were computed for the entries, as linear heads do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    LN2,
    LOG2E,
    apply_softcap,
    finite_shift,
    log_exact,
    reciprocal,
)
from ....primitives.gpu.reduce import add_block, empty_state, merge_lanes
from ...cross_entropy.gpu.row_math import load_row_gradient
from .sets import KIND_EVERY_CLASS, KIND_INVALID, KIND_RECORDED


class SupportRow(NamedTuple):
    """What a program reads of its row.

    Fields:
        row: the row.
        base: its first entry, which is its target.
        number: how many classes or entries the program reads.
        has_all: whether these are all classes.
    """

    row: Any
    base: Any
    number: Any
    has_all: Any


@triton.jit
def support_row(support, has_all, K, classes):
    """Return the row of this program, with all of its entries or, if `has_all`, all classes.

    Offsets that are out of range give a row without entries.
    """
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(support.offsets + row), tl.load(support.offsets + row + 1)
    is_good = (begin >= 0) & (begin <= end) & (end <= K)
    base = tl.where(is_good, begin, 0) + row
    number = tl.where(has_all, classes, tl.where(is_good, end - begin + 1, 0))
    return SupportRow(row, base, number, has_all)


@triton.jit
def load_support(
    logits, x_ptr, support, at, start, softcap, ACC_DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """Return soft-capped logits of a block of a row's support, their classes, and which count.

    Those that do not count are -inf.
    """
    place = start + tl.arange(0, BLOCK)
    mask = place < at.number
    listed = tl.load(support.classes + at.base + place, mask=mask & (at.has_all == 0), other=-1)
    column = tl.where(at.has_all & mask, place, listed.to(tl.int64))
    counts = column >= 0
    if logits is None:
        x = tl.load(x_ptr + at.base + place, mask=counts, other=-float("inf"))
    else:
        ptrs = logits.ptr + at.row * logits.row + column * logits.column
        x = tl.load(ptrs, mask=counts, other=-float("inf")).to(ACC_DTYPE)
        if softcap is not None:
            x = tl.where(counts, apply_softcap(x, softcap, True), -float("inf"))
    return x, column, counts


@triton.jit
def support_rows_kernel(
    logits,  # StridedRows [M, classes], or None where the entries have numbers
    x_ptr,  # [E] soft-capped logits of the entries, or None
    target_ptr,  # [M]
    support,  # Support
    results,  # SupportRows [M]
    K,
    classes,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the statistics of one row. Without logits, rows without ids get no meaning."""
    temperature = tl.full([], temperature, ACC_DTYPE)
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    slope = tl.full([], LOG2E, ACC_DTYPE) / temperature
    kind = tl.load(support.kinds + tl.program_id(0))
    counts = (kind == KIND_RECORDED) | (kind == KIND_EVERY_CLASS)
    has_all = kind == KIND_EVERY_CLASS if logits is not None else kind < 0
    at = support_row(support, has_all, K, classes)
    row = at.row
    if logits is None:
        label_x = tl.load(x_ptr + at.base, mask=kind == KIND_RECORDED, other=0.0)
    else:
        label = tl.load(target_ptr + row, mask=counts, other=0)
        label_ptr = logits.ptr + row * logits.row + label * logits.column
        label_x = tl.load(label_ptr, mask=counts, other=0.0).to(ACC_DTYPE)
        label_x = apply_softcap(label_x, softcap, HAS_SOFTCAP)
    state = empty_state(1, 1, ACC_DTYPE)
    for start in range(0, tl.where(counts, at.number, 0), BLOCK):
        x, _, _ = load_support(logits, x_ptr, support, at, start, softcap, ACC_DTYPE, BLOCK)
        state = add_block(state, x[None, :], 0, None, slope, True, True, 1)
    found = merge_lanes(state, slope)
    maximum = tl.sum(found.maximum, axis=0)
    total = tl.sum(found.total, axis=0).to(ACC_DTYPE)
    shift, log_total = finite_shift(maximum), log_exact(total)
    nan_or_zero = tl.where(kind == KIND_INVALID, float("nan"), 0.0).to(ACC_DTYPE)
    logprob = (label_x - shift) / temperature - log_total
    entropy = log_total - LN2 * tl.sum(found.sum_x_exp, axis=0).to(ACC_DTYPE) / total
    tl.store(results.logprob + row, tl.where(counts, logprob, nan_or_zero))
    tl.store(results.entropy + row, tl.where(counts, entropy, nan_or_zero))
    tl.store(results.maximum + row, maximum)
    tl.store(results.sumexp + row, total)


@triton.jit
def support_gradient_kernel(
    grad_logprob,  # RowNumbers
    grad_entropy,  # RowNumbers, with None for zeros
    logits,  # StridedRows [M, classes], or None where the entries have numbers
    x_ptr,  # [E] soft-capped logits of the entries, or None
    target_ptr,  # [M]
    support,  # Support
    results,  # SupportRows [M]
    dlogits,  # StridedRows [M, classes], 0; or None
    dx_ptr,  # [E], 0 for entries that do not count; or None
    K,
    classes,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of the logits of one row's support.

    That of an invalid row is NaN, for all of its logits. Without logits, entries of rows without
    ids do not count.
    """
    temperature = tl.full([], temperature, ACC_DTYPE)
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    kind = tl.load(support.kinds + tl.program_id(0))
    is_invalid = kind == KIND_INVALID
    counts = (kind == KIND_RECORDED) | (kind == KIND_EVERY_CLASS)
    if logits is not None:
        has_all = (kind == KIND_EVERY_CLASS) | is_invalid
    else:
        has_all = kind < 0
    at = support_row(support, has_all, K, classes)
    row = at.row
    label = tl.load(target_ptr + row)
    on_label = load_row_gradient(grad_logprob, row, counts, ACC_DTYPE)
    on_entropy = load_row_gradient(grad_entropy, row, counts, ACC_DTYPE)
    is_active = (tl.abs(on_label) + tl.abs(on_entropy)) != 0.0
    shift = finite_shift(tl.load(results.maximum + row))
    total = tl.load(results.sumexp + row)
    inverse = reciprocal(total)
    offset = tl.load(results.entropy + row) - log_exact(total)
    slope = tl.full([], LOG2E, ACC_DTYPE) / temperature
    for start in range(0, tl.where(counts | is_invalid, at.number, 0), BLOCK):
        x, column, is_counted = load_support(
            logits, x_ptr, support, at, start, softcap, ACC_DTYPE, BLOCK
        )
        exponent = (x - shift) * slope
        p = tl.exp2(exponent) * inverse
        # This is log p + entropy, which stays finite where p is 0.
        logp_plus_entropy = LN2 * tl.maximum(exponent, -10000.0) + offset
        grad = -p * (on_label + on_entropy * logp_plus_entropy)
        grad = (grad + tl.where(column == label, on_label, 0.0)) / temperature
        if HAS_SOFTCAP:
            t = x / softcap
            grad *= (1.0 - t) * (1.0 + t)
        # A row without an upstream gradient has none, even if its logits are NaN.
        grad = tl.where(is_active, grad, 0.0)
        grad = tl.where(is_invalid, float("nan"), grad)
        if dlogits is None:
            place = start + tl.arange(0, BLOCK)
            grad = tl.where(is_counted, grad, 0.0)
            tl.store(dx_ptr + at.base + place, grad, mask=place < at.number)
        else:
            ptrs = dlogits.ptr + row * dlogits.row + column * dlogits.column
            tl.store(ptrs, grad.to(dlogits.ptr.dtype.element_ty), mask=is_counted)
