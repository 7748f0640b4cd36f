"""Kernels that read and write the logits of given classes.

Rows may be all logits or those of a chunk of classes. Between these kernels stands one that reads
or writes every logit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    apply_softcap,
    divide,
    exp_exact,
    finite_shift,
    log_exact,
    reciprocal,
)


class Entry(NamedTuple):
    """Entries of ids: which row they belong to, which class they name, and where its logit is.

    Fields:
        row: the row.
        id: the class.
        is_ignored: whether the id is the ignored one.
        is_class: whether the id is a class, and not ignored.
        offset: the offset of the logit, which exists where `in_chunk` holds.
        in_chunk: whether the class is among those of the logits.
    """

    row: Any
    id: Any
    is_ignored: Any
    is_class: Any
    offset: Any
    in_chunk: Any


@triton.jit
def locate_entries(ids_ptr, entry, mask, K, span, strides, ignore_index):
    """Return the `Entry` of flat indices into ids, `[M, K]`.

    Args:
        ids_ptr: `[M, K]` int64.
        entry: the indices.
        mask: which of them exist.
        K: the ids of a row.
        span: the number of all classes, the first class of the chunk and its number of classes.
        strides: the rows of a batch, and the strides of batches, rows and classes of the logits.
        ignore_index: the ignored id.
    """
    classes, first, width = span
    rows, batch_stride, row_stride, class_stride = strides
    row = entry // K
    id = tl.load(ids_ptr + entry, mask=mask, other=0)
    is_ignored = mask & (id == ignore_index)
    is_class = mask & (id >= 0) & (id < classes) & (id != ignore_index)
    in_chunk = is_class & (id >= first) & (id < first + width)
    column = tl.where(in_chunk, id - first, 0)
    offset = (row // rows) * batch_stride + (row % rows) * row_stride + column * class_stride
    return Entry(row, id, is_ignored, is_class, offset, in_chunk)


@triton.jit
def logprobs_gather_kernel(
    logits_ptr,
    ids_ptr,  # [M, K]
    entries_ptr,  # [M, K]
    entries,
    K,
    classes,
    first,
    width,
    rows,
    batch_stride,
    row_stride,
    class_stride,
    softcap: tl.float64,
    ignore_index,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the soft-capped logits of the ids whose class is in the chunk, and 0 for no class."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < entries
    at = locate_entries(
        ids_ptr,
        entry,
        mask,
        K,
        (classes, first, width),
        (rows, batch_stride, row_stride, class_stride),
        ignore_index,
    )
    x = tl.load(logits_ptr + at.offset, mask=at.in_chunk, other=0.0).to(ACC_DTYPE)
    x = apply_softcap(x, tl.full([], softcap, ACC_DTYPE), HAS_SOFTCAP)
    tl.store(entries_ptr + entry, x, mask=at.in_chunk | (mask & ~at.is_class))


@triton.jit
def logprobs_kernel(
    entries_ptr,  # [M, K]
    ids_ptr,  # [M, K]
    maximum_ptr,  # [M]
    sumexp_ptr,  # [M]
    logprobs_ptr,  # [M, K]
    entries,
    K,
    classes,
    temperature: tl.float64,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """Compute log-probabilities from the soft-capped logits of the ids; no others are read."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < entries
    at = locate_entries(ids_ptr, entry, mask, K, (classes, 0, 0), (1, 0, 0, 0), ignore_index)
    x = tl.load(entries_ptr + entry, mask=at.is_class, other=0.0)
    maximum = tl.load(maximum_ptr + at.row, mask=mask, other=0.0)
    total = tl.load(sumexp_ptr + at.row, mask=mask, other=1.0)
    logprob = divide(x - finite_shift(maximum), tl.full([], temperature, x.dtype))
    logprob -= log_exact(total)
    logprob = tl.where(at.is_class, logprob, tl.where(at.is_ignored, 0.0, float("nan")))
    tl.store(logprobs_ptr + entry, logprob, mask=mask)


@triton.jit
def logprobs_totals_kernel(
    grad_ptr,  # [M, K]
    ids_ptr,  # [M, K]
    totals_ptr,  # [M]
    labels_ptr,  # [M]
    M,
    K,
    classes,
    ignore_index,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the gradients of a row's ids, and name one of its classes, 0 if it has none.

    The sum is NaN if an id is neither a class nor ignored.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], dtype=grad_ptr.dtype.element_ty)
    label = tl.zeros([ROWS], dtype=tl.int64)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = (row < M)[:, None] & (k < K)
        at = locate_entries(
            ids_ptr, row[:, None] * K + k, mask, K, (classes, 0, 0), (1, 0, 0, 0), ignore_index
        )
        grad = tl.load(grad_ptr + row[:, None] * K + k, mask=at.is_class, other=0.0)
        grad = tl.where(mask & ~at.is_class & ~at.is_ignored, float("nan"), grad)
        total += tl.sum(grad, axis=1)
        label = tl.maximum(label, tl.max(tl.where(at.is_class, at.id, 0), axis=1))
    tl.store(totals_ptr + row, total, mask=row < M)
    tl.store(labels_ptr + row, label, mask=row < M)


@triton.jit
def logprobs_gradient_kernel(
    grad_ptr,  # [M, K]
    ids_ptr,  # [M, K]
    entries_ptr,  # [M, K]
    totals_ptr,  # [M]
    maximum_ptr,  # [M]
    sumexp_ptr,  # [M]
    dlogits_ptr,
    entries,
    K,
    classes,
    first,
    width,
    rows,
    batch_stride,
    row_stride,
    class_stride,
    temperature: tl.float64,
    softcap: tl.float64,
    ignore_index,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of the logits of the ids whose class is in the chunk.

    Ids that name the same class write the same number, which has the gradients of all of them.
    """
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < entries
    at = locate_entries(
        ids_ptr,
        entry,
        mask,
        K,
        (classes, first, width),
        (rows, batch_stride, row_stride, class_stride),
        ignore_index,
    )
    x = tl.load(entries_ptr + entry, mask=at.in_chunk, other=0.0)
    shift = finite_shift(tl.load(maximum_ptr + at.row, mask=mask, other=0.0))
    total = tl.load(sumexp_ptr + at.row, mask=mask, other=1.0)
    inverse = reciprocal(tl.full([], temperature, x.dtype))
    p = divide(exp_exact((x - shift) * inverse), total)
    on_class = tl.zeros_like(x)
    for k in range(0, K):
        other = at.row * K + k
        is_same = tl.load(ids_ptr + other, mask=mask, other=-1) == at.id
        grad = tl.load(grad_ptr + other, mask=mask & is_same, other=0.0)
        on_class += grad
    # A row without a gradient has the gradient 0, whatever its logits are.
    on_row = tl.load(totals_ptr + at.row, mask=mask, other=0.0)
    dlogit = (on_class - tl.where(on_row == 0.0, 0.0, p * on_row)) * inverse
    if HAS_SOFTCAP:
        t = x / tl.full([], softcap, x.dtype)
        dlogit = tl.where(dlogit == 0.0, 0.0, dlogit * ((1.0 - t) * (1.0 + t)))
    tl.store(dlogits_ptr + at.offset, dlogit, mask=at.in_chunk)
