"""Kernels that read and write the logits of given classes, and one that reads all others.

Rows may be all logits or those of a chunk of classes. Between these kernels stands one that reads
or writes every logit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    LOG2E,
    apply_softcap,
    capped_logits,
    divide,
    exp_exact,
    finite_shift,
    log_exact,
    reciprocal,
)
from ....primitives.gpu.memory import load_vectors
from ....primitives.gpu.reduce import add_block, empty_state, rescaled

NO_ID = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # follows the last id of a row


class Ids(NamedTuple):
    """The ids of rows.

    Fields:
        ptr: the ids, [M, K] int64.
        K: the ids of a row.
        classes: the number of all classes.
        ignore_index: the ignored id.
    """

    ptr: Any
    K: Any
    classes: Any
    ignore_index: Any


class LogitChunk(NamedTuple):
    """The logits of a chunk of the classes, or their gradient.

    Fields:
        logits: `StridedRows` [batches, rows, width].
        rows: the rows of a batch.
        first: the first class of the chunk.
        width: its number of classes.
    """

    logits: Any
    rows: Any
    first: Any
    width: Any


class Entry(NamedTuple):
    """Entries of ids: which row they belong to, and which class they name.

    Fields:
        row: the row.
        id: the class.
        is_ignored: whether the id is the ignored one.
        is_class: whether the id is a class, and not ignored.
    """

    row: Any
    id: Any
    is_ignored: Any
    is_class: Any


@triton.jit
def load_entries(ids, entry, mask):
    """Return the `Entry` of flat indices into the ids, of which those in the mask exist."""
    row = entry // ids.K
    id = tl.load(ids.ptr + entry, mask=mask, other=0)
    is_ignored = mask & (id == ids.ignore_index)
    is_class = mask & (id >= 0) & (id < ids.classes) & (id != ids.ignore_index)
    return Entry(row, id, is_ignored, is_class)


@triton.jit
def locate_in_chunk(at, chunk):
    """Return the offsets of the logits of entries in a chunk, and which entries it has."""
    x = chunk.logits
    in_chunk = at.is_class & (at.id >= chunk.first) & (at.id < chunk.first + chunk.width)
    column = tl.where(in_chunk, at.id - chunk.first, 0)
    offset = (at.row // chunk.rows) * x.batch + (at.row % chunk.rows) * x.row + column * x.column
    return offset, in_chunk


@triton.jit
def logprobs_gather_kernel(
    chunk,  # LogitChunk
    ids,  # Ids
    entries_ptr,  # [M, K]
    entries,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the soft-capped logits of the ids whose class is in the chunk, and 0 for no class."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < entries
    at = load_entries(ids, entry, mask)
    offset, in_chunk = locate_in_chunk(at, chunk)
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    x = tl.load(chunk.logits.ptr + offset, mask=in_chunk, other=0.0).to(ACC_DTYPE)
    x = apply_softcap(x, softcap)
    tl.store(entries_ptr + entry, x, mask=in_chunk | (mask & ~at.is_class))


@triton.jit
def logprobs_kernel(
    entries_ptr,  # [M, K]
    ids,  # Ids
    maximum_ptr,  # [M]
    sumexp_ptr,  # [M]
    logprobs_ptr,  # [M, K]
    entries,
    temperature: tl.float64,
    BLOCK: tl.constexpr,
):
    """Compute log-probabilities from the soft-capped logits of the ids; no others are read."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < entries
    at = load_entries(ids, entry, mask)
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
    ids,  # Ids
    totals_ptr,  # [M]
    labels_ptr,  # [M]
    M,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the gradients of a row's ids, and name one of its classes, 0 if it has none.

    The sum is NaN if an id is neither a class nor ignored.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], dtype=grad_ptr.dtype.element_ty)
    label = tl.zeros([ROWS], dtype=tl.int64)
    for start in range(0, ids.K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = (row < M)[:, None] & (k < ids.K)
        at = load_entries(ids, row[:, None] * ids.K + k, mask)
        grad = tl.load(grad_ptr + row[:, None] * ids.K + k, mask=at.is_class, other=0.0)
        grad = tl.where(mask & ~at.is_class & ~at.is_ignored, float("nan"), grad)
        total += tl.sum(grad, axis=1)
        label = tl.maximum(label, tl.max(tl.where(at.is_class, at.id, 0), axis=1))
    tl.store(totals_ptr + row, total, mask=row < M)
    tl.store(labels_ptr + row, label, mask=row < M)


@triton.jit
def logprobs_gradient_kernel(
    grad_ptr,  # [M, K]
    ids,  # Ids
    entries_ptr,  # [M, K]
    totals_ptr,  # [M]
    maximum_ptr,  # [M]
    sumexp_ptr,  # [M]
    chunk,  # LogitChunk of the gradient
    entries,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of the logits of the ids whose class is in the chunk.

    Ids that name the same class write the same number, which has the gradients of all of them.
    """
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < entries
    at = load_entries(ids, entry, mask)
    offset, in_chunk = locate_in_chunk(at, chunk)
    x = tl.load(entries_ptr + entry, mask=in_chunk, other=0.0)
    shift = finite_shift(tl.load(maximum_ptr + at.row, mask=mask, other=0.0))
    total = tl.load(sumexp_ptr + at.row, mask=mask, other=1.0)
    inverse = reciprocal(tl.full([], temperature, x.dtype))
    p = divide(exp_exact((x - shift) * inverse), total)
    on_class = tl.zeros_like(x)
    for k in range(0, ids.K):
        other = at.row * ids.K + k
        is_same = tl.load(ids.ptr + other, mask=mask, other=-1) == at.id
        grad = tl.load(grad_ptr + other, mask=mask & is_same, other=0.0)
        on_class += grad
    # A row without a gradient has the gradient 0, whatever its logits are.
    on_row = tl.load(totals_ptr + at.row, mask=mask, other=0.0)
    dlogit = (on_class - tl.where(on_row == 0.0, 0.0, p * on_row)) * inverse
    if HAS_SOFTCAP:
        t = x / tl.full([], softcap, x.dtype)
        dlogit = tl.where(dlogit == 0.0, 0.0, dlogit * ((1.0 - t) * (1.0 + t)))
    tl.store(chunk.logits.ptr + offset, dlogit, mask=in_chunk)


class RestRow(NamedTuple):
    """A row of logits and its ids.

    Fields:
        ptrs: the address of the first logit, [1].
        class_stride: the stride over classes.
        first, classes: the first class, and the number of classes.
        ids_ptr: the ids of the row in ascending order.
        K: the number of ids.
        softcap: the bound of the logits, or None.
        slope: the factor of logits in exponents of 2.
    """

    ptrs: Any
    class_stride: Any
    first: Any
    classes: Any
    ids_ptr: Any
    K: Any
    softcap: Any
    slope: Any


@triton.jit
def add_rest_block(state, k, id, row, start, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Add the classes of a block that are no ids to the statistics of the lanes.

    `k` is the index of the first id that is not reached yet, and `id` the id, or NO_ID.
    """
    exists = tl.full([1], True, tl.int1)
    x, v, mask = load_vectors(
        row.ptrs, row.class_stride, start, row.classes, exists, MASKED, "", TILE.block, TILE
    )
    x = capped_logits(x, mask, row.softcap, state.maximum.dtype)
    while id < row.first + start + TILE.block:
        x = tl.where(v == id - row.first, -float("inf"), x)
        k += 1
        id = tl.load(row.ids_ptr + k, mask=k < row.K, other=NO_ID)
    return add_block(state, x, 0, None, row.slope, False), k, id


@triton.jit(do_not_specialize=["K", "classes", "first"])
def logprobs_rest_kernel(
    logits,  # StridedRows, the classes from `first` on
    ids_ptr,  # [M, K] int64, ascending in each row
    rest_ptr,  # [M, 2] maximum and sum, updated in place
    K,
    classes,
    first,
    rows,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Update the statistics of the classes of one row that are no ids, with one read of them.

    The ids of a row are met in their order, so each of them is compared with one block of classes.
    """
    index = tl.program_id(0).to(tl.int64)
    slope = tl.full([], LOG2E, ACC_DTYPE) / tl.full([], temperature, ACC_DTYPE)
    row = RestRow(
        logits.ptr + (index // rows) * logits.batch + (index % rows) * logits.row + tl.arange(0, 1),
        logits.column,
        first,
        classes,
        ids_ptr + index * K,
        K,
        tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None,
        slope,
    )
    state, k = empty_state(1, TILE.lanes, ACC_DTYPE, tl.float64), index * 0
    id = tl.load(row.ids_ptr, mask=K > 0, other=NO_ID)
    unmasked_end = classes // TILE.block * TILE.block
    for start in range(0, unmasked_end, TILE.block):
        state, k, id = add_rest_block(state, k, id, row, start, False, TILE)
    if unmasked_end < classes:
        state, k, id = add_rest_block(state, k, id, row, unmasked_end, True, TILE)
    before = tl.load(rest_ptr + 2 * index)
    maximum = tl.maximum(before, tl.max(state.maximum))
    total = tl.load(rest_ptr + 2 * index + 1).to(tl.float64)
    total *= tl.exp2((before - finite_shift(maximum)) * slope).to(tl.float64)
    total += tl.sum(rescaled(state, maximum, slope).total)
    tl.store(rest_ptr + 2 * index, maximum)
    tl.store(rest_ptr + 2 * index + 1, total.to(ACC_DTYPE))
