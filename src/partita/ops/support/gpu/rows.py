"""Kernels of the sets of supports, of their statistics and the gradient, and their launches.

A program has one row. It reads the logits of the row's entries, or all of them in a row without
ids. Logits `[M, C]` are those of all classes; logits `[E]`, which linear heads compute, are those
of the entries, and rows without ids have no statistics then.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import (
    LN2,
    LOG2E,
    finite_shift,
    log_exact,
    reciprocal,
    through_softcap,
)
from ....primitives.gpu.reduce import add_block, empty_state, load_capped, merge_lanes
from ....primitives.gpu.row_plan import StridedRows, flat_rows, matrix_rows
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import launch, tl_acc_dtype
from ...cross_entropy.gpu.row_math import load_row_gradient
from ..common import EVERY_CLASS, IGNORED, INVALID, RECORDED, Support, SupportRows, sorted_entries

KIND_RECORDED, KIND_EVERY_CLASS = tl.constexpr(RECORDED), tl.constexpr(EVERY_CLASS)
KIND_IGNORED, KIND_INVALID = tl.constexpr(IGNORED), tl.constexpr(INVALID)
ID_BLOCK = 64  # ids of a row that its program reads together; the usual row has eight
ROW_BLOCK, ENTRY_BLOCK = 1024, 32  # logits that a program reads together, of classes or entries


@triton.jit(do_not_specialize=["M", "K", "num_classes"])
def support_entries_kernel(
    target_ptr,  # [M] int64
    ids_ptr,  # [K] int64
    offsets_ptr,  # [M + 1] int64
    decreases_ptr,  # [] bool, whether the offsets do
    kinds_ptr,  # [M]
    numbers_ptr,  # [M]
    in_set_ptr,  # [M] bool
    keys_ptr,  # [E] int32, the number of all classes
    rows_ptr,  # [E], 0
    M,
    K,
    num_classes,
    ignore_index: tl.int64,
    BLOCK: tl.constexpr,
):
    """Write key and row of each entry of one row, and say what is known of the row."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)
    is_bad = tl.load(offsets_ptr) != 0
    is_bad = is_bad | (tl.load(offsets_ptr + M) != K) | (tl.load(decreases_ptr) != 0)
    number = tl.where(is_bad, 0, end - begin)
    label = tl.load(target_ptr + row)
    is_ignored = label == ignore_index
    is_class = (label >= 0) & (label < num_classes)
    is_listed = (is_ignored == 0) & (number > 0)
    tl.store(rows_ptr + row, row)
    tl.store(keys_ptr + row, tl.where(is_class & is_listed, label, num_classes).to(tl.int32))
    has_target = tl.zeros([BLOCK], tl.int32)
    has_invalid = tl.zeros([BLOCK], tl.int32)
    for start in range(0, number, BLOCK):
        place = start + tl.arange(0, BLOCK)
        mask = place < number
        id = tl.load(ids_ptr + begin + place, mask=mask, other=0)
        is_id, is_target = (id >= 0) & (id < num_classes), id == label
        key = tl.where(is_id & (is_target == 0) & is_listed, id, num_classes)
        tl.store(rows_ptr + M + begin + place, tl.full([BLOCK], row, tl.int64), mask=mask)
        tl.store(keys_ptr + M + begin + place, key.to(tl.int32), mask=mask)
        has_target = has_target | (mask & is_target).to(tl.int32)
        has_invalid = has_invalid | (mask & (is_id == 0)).to(tl.int32)
    kind = tl.where(number > 0, KIND_RECORDED, KIND_EVERY_CLASS)
    kind = tl.where((is_class == 0) | (tl.max(has_invalid, axis=0) > 0), KIND_INVALID, kind)
    kind = tl.where(is_ignored, KIND_IGNORED, kind)
    kind = tl.where(is_bad, KIND_INVALID, kind)
    is_recorded = (kind == KIND_RECORDED) & (tl.max(has_target, axis=0) > 0)
    tl.store(kinds_ptr + row, kind)
    tl.store(numbers_ptr + row, tl.where(is_listed, number, 0))
    tl.store(in_set_ptr + row, is_recorded | (kind == KIND_EVERY_CLASS))


@triton.jit
def support_block(
    support, row, ids, number, has_all, start, LISTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the columns of a block of the row's `number` logits, and which of them count.

    They are the classes of the row's entries, which are `row` and those from `ids` on, or all
    classes. With LISTED the columns are entries.
    """
    place = start + tl.arange(0, BLOCK)
    mask = place < number
    entry = tl.where(place == 0, row, ids + place - 1)
    label = tl.load(support.classes + entry, mask=mask & (has_all == 0), other=-1)
    column = tl.where(has_all & mask, place, label)
    counts = column >= 0
    return entry if LISTED else column, counts


@triton.jit(do_not_specialize=["M"])
def support_rows_kernel(
    logits,  # StridedRows [M, C]; or [E] with LISTED, with a row stride of 0
    target_ptr,  # [M]
    support,  # Support
    results,  # SupportRows [M]
    M,
    C,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    LISTED: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the statistics of one row."""
    temperature = tl.full([], temperature, ACC_DTYPE)
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    slope = tl.full([], LOG2E, ACC_DTYPE) / temperature
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(support.kinds + row)
    has_all = kind == KIND_EVERY_CLASS if not LISTED else kind < 0
    counts = (kind == KIND_RECORDED) | has_all
    ids = M + tl.load(support.starts + row)
    number = tl.where(has_all, C, tl.load(support.numbers + row) + 1)
    label = row if LISTED else tl.load(target_ptr + row, mask=counts, other=0)
    ptrs = logits.ptr + row * logits.row
    label_x = load_capped(ptrs + label * logits.column, counts, softcap, ACC_DTYPE)
    state = empty_state(1, 1, ACC_DTYPE)
    for start in range(0, tl.where(counts, number, 0), BLOCK):
        column, mask = support_block(support, row, ids, number, has_all, start, LISTED, BLOCK)
        x = load_capped(ptrs + column * logits.column, mask, softcap, ACC_DTYPE)
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


@triton.jit(do_not_specialize=["M"])
def support_gradient_kernel(
    grad_logprob,  # RowNumbers
    grad_entropy,  # RowNumbers, with None for zeros
    logits,  # StridedRows [M, C]; or [E] with LISTED, with a row stride of 0
    target_ptr,  # [M]
    support,  # Support
    results,  # SupportRows [M]
    dlogits,  # StridedRows as of the logits, 0
    M,
    C,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    LISTED: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of the logits of one row. In an invalid row all of them are NaN."""
    temperature = tl.full([], temperature, ACC_DTYPE)
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(support.kinds + row)
    is_invalid = kind == KIND_INVALID
    has_all = (kind == KIND_EVERY_CLASS) | is_invalid if not LISTED else kind < 0
    counts = (kind == KIND_RECORDED) | is_invalid | has_all
    ids = M + tl.load(support.starts + row)
    number = tl.where(has_all, C, tl.load(support.numbers + row) + 1)
    label = row if LISTED else tl.load(target_ptr + row)
    on_label = load_row_gradient(grad_logprob, row, counts, ACC_DTYPE)
    on_entropy = load_row_gradient(grad_entropy, row, counts, ACC_DTYPE)
    is_active = (tl.abs(on_label) + tl.abs(on_entropy)) != 0.0
    shift = finite_shift(tl.load(results.maximum + row))
    total = tl.load(results.sumexp + row)
    inverse = reciprocal(total)
    offset = tl.load(results.entropy + row) - log_exact(total)
    slope = tl.full([], LOG2E, ACC_DTYPE) / temperature
    for start in range(0, tl.where(counts, number, 0), BLOCK):
        column, mask = support_block(support, row, ids, number, has_all, start, LISTED, BLOCK)
        ptrs = logits.ptr + row * logits.row + column * logits.column
        x = load_capped(ptrs, mask, softcap, ACC_DTYPE)
        exponent = (x - shift) * slope
        p = tl.exp2(exponent) * inverse
        # This is log p + entropy, which stays finite where p is 0.
        logp_plus_entropy = LN2 * tl.maximum(exponent, -10000.0) + offset
        grad = -p * (on_label + on_entropy * logp_plus_entropy)
        grad = (grad + tl.where(column == label, on_label, 0.0)) / temperature
        grad = through_softcap(grad, x, softcap)
        # A row without an upstream gradient has none, even if its logits are NaN.
        grad = tl.where(is_active, grad, 0.0)
        grad = tl.where(is_invalid, float("nan"), grad)
        ptrs = dlogits.ptr + row * dlogits.row + column * dlogits.column
        tl.store(ptrs, grad.to(dlogits.ptr.dtype.element_ty), mask=mask)


def support_sets(
    target: Tensor, ids: Tensor, offsets: Tensor, num_classes: int, ignore_index: int
) -> tuple[Tensor, ...]:
    """Find which entries of each row count, and sort them by class; see the reference."""
    M = len(target)
    ids = ids if M else ids[:0]
    kinds, numbers = target.new_empty(M), target.new_empty(M)
    in_set, rows = target.new_empty(M, dtype=torch.bool), target.new_zeros(M + len(ids))
    keys = torch.full_like(rows, num_classes, dtype=torch.int32)
    launch(
        support_entries_kernel,
        M,
        target_ptr=target,
        ids_ptr=ids,
        offsets_ptr=offsets,
        decreases_ptr=(offsets[1:] < offsets[:-1]).any(),
        kinds_ptr=kinds,
        numbers_ptr=numbers,
        in_set_ptr=in_set,
        keys_ptr=keys,
        rows_ptr=rows,
        M=M,
        K=len(ids),
        num_classes=num_classes,
        ignore_index=ignore_index,
        BLOCK=ID_BLOCK,
        num_warps=1,
    )
    entries = sorted_entries(keys, rows, num_classes)
    return kinds, offsets[:-1].clone(), numbers, *entries, in_set


def strided(logits: Tensor) -> StridedRows:
    """Return logits `[M, C]` as rows, or the entries `[E]` as the columns of each row."""
    return matrix_rows(logits) if logits.ndim == 2 else StridedRows(logits, 0, 0, 1)


def options(logits: Tensor, target: Tensor, temperature: float, softcap: float) -> dict[str, Any]:
    """Return the arguments that both kernels have."""
    is_listed = logits.ndim == 1
    return {
        "M": len(target),
        "C": logits.shape[-1],
        "temperature": temperature,
        "softcap": softcap,
        "HAS_SOFTCAP": softcap != 0,
        "LISTED": is_listed,
        "ACC_DTYPE": tl_acc_dtype(logits.dtype),
        "BLOCK": ENTRY_BLOCK if is_listed else ROW_BLOCK,
        "num_warps": 1 if is_listed else 4,
    }


def support_stats(
    logits: Tensor, target: Tensor, support: Support, temperature: float, softcap: float
) -> SupportRows:
    """Compute log-probability and entropy of each row over its support; see the reference."""
    M, dtype = len(target), acc_dtype(logits.dtype)
    results = SupportRows(*(logits.new_empty(M, dtype=dtype) for _ in SupportRows._fields))
    launch(
        support_rows_kernel,
        M,
        logits=strided(logits),
        target_ptr=target,
        support=support,
        results=results,
        **options(logits, target, temperature, softcap),
    )
    return results


def support_stats_backward(
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    support: Support,
    entropy: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
) -> Tensor:
    """Compute the gradient of the logits, 0 outside of the supports."""
    dlogits = torch.zeros_like(logits)
    launch(
        support_gradient_kernel,
        len(target),
        grad_logprob=flat_rows(grad_logprob),
        grad_entropy=flat_rows(grad_entropy),
        logits=strided(logits),
        target_ptr=target,
        support=support,
        results=SupportRows(entropy, entropy, maximum, sumexp),  # the first one is not read
        dlogits=strided(dlogits),
        **options(logits, target, temperature, softcap),
    )
    return dlogits
