"""Logits of some pairs of a row and a class, and the sums of their gradients.

The first is a product of two dense matrices at a few places, and the others are products of a
sparse matrix, the gradient of the logits, with a dense one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.row_plan import matrix_rows
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype

# Entries and hidden dimensions of the tile that a program has in registers.
LOGIT_ENTRIES, LOGIT_BLOCK = 8, 512
ROW_ENTRIES, PART_ENTRIES, CLASS_ENTRIES, SUM_BLOCK = 2, 8, 1, 1024
# Many rows name a common class. Its sum is cut at places in the order that are multiples of this,
# so that no program adds up more entries. Without cuts, Zipf's ids took 1.63 ms on an H100.
SPLIT = 128


@triton.jit(do_not_specialize=["E"])
def linear_entries_kernel(
    input,  # StridedRows [M, H]
    weight,  # StridedRows [C, H]
    rows_ptr,  # [E]
    classes_ptr,  # [E]
    x_ptr,  # [E], written for the entries whose classes the matrix has
    E,
    C,
    hidden,
    ACC_DTYPE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Compute the logits of some entries. Most belong to one row, which comes from the cache."""
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    row = tl.load(rows_ptr + entry, mask=entry < E, other=0)
    label = tl.load(classes_ptr + entry, mask=entry < E, other=-1)
    counts = (label >= 0) & (label < C)
    states = input.ptr + row[:, None] * input.row  # [ENTRIES, 1]
    weights = weight.ptr + label[:, None] * weight.row
    sums = tl.zeros([ENTRIES, BLOCK_H], ACC_DTYPE)
    for start in range(0, hidden, BLOCK_H):
        h = (start + tl.arange(0, BLOCK_H).to(tl.int64))[None, :]
        mask = counts[:, None] & (h < hidden)
        a = tl.load(states + h * input.column, mask=mask, other=0.0).to(ACC_DTYPE)
        b = tl.load(weights + h * weight.column, mask=mask, other=0.0).to(ACC_DTYPE)
        sums += a * b
    tl.store(x_ptr + entry, tl.sum(sums, axis=1), mask=counts)


@triton.jit(do_not_specialize=["M", "S"])
def linear_entries_sums_kernel(
    grad_ptr,  # [E]
    names_ptr,  # [E], the sum that each entry belongs to
    columns_ptr,  # [E], the row of the table of each entry
    order_ptr,  # [E], the entry at each place; or None, where sums are rows
    starts_ptr,  # [S + 1], the first place of each sum
    table,  # StridedRows [N, H]
    parts_ptr,  # [E / SPLIT, H], or None
    sums,  # StridedRows [S, H], or the parts
    M,
    N,
    S,
    hidden,
    SPLIT: tl.constexpr,
    OF_PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add up a part of rows of the table, each times the gradient of an entry, over some places.

    The places are those of a sum up to the first multiple of SPLIT, where there are parts, which
    are added then. With OF_PARTS they are those from a multiple on that belong to the same sum. The
    sum of a row has no parts, and its target stands before its ids.
    """
    ACC_DTYPE: tl.constexpr = grad_ptr.dtype.element_ty
    spans = tl.cdiv(hidden, BLOCK_H)
    name = (tl.program_id(0) // spans).to(tl.int64)
    h = (tl.program_id(0) % spans).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    if OF_PARTS:
        begin = name * SPLIT
        of_sum = tl.load(names_ptr + tl.load(order_ptr + begin))
        exists = (of_sum >= 0) & (of_sum < S)
        end = tl.minimum(tl.load(starts_ptr + of_sum + 1, mask=exists, other=0), begin + SPLIT)
    else:
        begin, end = tl.load(starts_ptr + name), tl.load(starts_ptr + name + 1)
    stop = end + 1 if order_ptr is None else end
    if parts_ptr is not None:
        stop = tl.minimum(end, tl.cdiv(begin, SPLIT) * SPLIT)
    totals = tl.zeros([ENTRIES, BLOCK_H], ACC_DTYPE)
    for start in range(0, stop - begin, ENTRIES):
        place = begin + start + tl.arange(0, ENTRIES)
        if order_ptr is None:
            entry = tl.where(place == begin, name, M + place - 1)
        else:
            entry = tl.load(order_ptr + place, mask=place < stop, other=0)
        factor = tl.load(grad_ptr + entry, mask=place < stop, other=0.0)
        column = tl.load(columns_ptr + entry, mask=place < stop, other=-1)
        # What has no gradient does not count, whatever it holds.
        counts = (factor != 0.0) & (column >= 0) & (column < N)
        ptrs = table.ptr + column[:, None] * table.row + h * table.column
        x = tl.load(ptrs, mask=counts[:, None] & (h < hidden), other=0.0)
        totals += factor[:, None] * x.to(ACC_DTYPE)
    total = tl.sum(totals, axis=0)[None, :]
    if parts_ptr is not None:
        for part in range(tl.cdiv(begin, SPLIT), tl.cdiv(end, SPLIT)):
            total += tl.load(parts_ptr + part * hidden + h, mask=h < hidden, other=0.0)
    ptrs = sums.ptr + name * sums.row + h * sums.column
    tl.store(ptrs, total.to(sums.ptr.dtype.element_ty), mask=h < hidden)


def linear_entries(input: Tensor, weight: Tensor, rows: Tensor, classes: Tensor) -> Tensor:
    """Return the dot products of some entries; see the reference."""
    x = input.new_zeros(len(rows), dtype=acc_dtype(input.dtype))
    launch(
        linear_entries_kernel,
        cdiv(len(rows), LOGIT_ENTRIES),
        input=matrix_rows(input),
        weight=matrix_rows(weight),
        rows_ptr=rows,
        classes_ptr=classes,
        x_ptr=x,
        E=len(rows),
        C=len(weight),
        hidden=input.shape[1],
        ACC_DTYPE=tl_acc_dtype(input.dtype),
        ENTRIES=LOGIT_ENTRIES,
        BLOCK_H=min(LOGIT_BLOCK, next_power_of_2(max(input.shape[1], 1))),
        num_warps=4,
    )
    return x


def linear_entries_sums(
    grad: Tensor,
    names: Tensor,
    columns: Tensor,
    order: Tensor | None,
    starts: Tensor,
    table: Tensor,
    like: Tensor,
) -> Tensor:
    """Return sums of rows of the table times gradients of entries; see the reference."""
    grad, hidden, result = grad.contiguous(), table.shape[1], like.new_empty(like.shape)
    block = min(SUM_BLOCK, next_power_of_2(max(hidden, 1)))

    def add(parts: Tensor | None, sums: Tensor, entries: int) -> None:
        launch(
            linear_entries_sums_kernel,
            len(sums) * cdiv(hidden, block),
            grad_ptr=grad,
            names_ptr=names,
            columns_ptr=columns,
            order_ptr=order,
            starts_ptr=starts,
            table=matrix_rows(table),
            parts_ptr=parts,
            sums=matrix_rows(sums),
            M=len(like),
            N=len(table),
            S=len(like),
            hidden=hidden,
            SPLIT=SPLIT,
            OF_PARTS=sums is not result,
            ENTRIES=entries,
            BLOCK_H=block,
            num_warps=4,
        )

    if order is None:
        add(None, result, ROW_ENTRIES)
    else:
        parts = grad.new_empty(cdiv(len(order), SPLIT), hidden)
        add(None, parts, PART_ENTRIES)
        add(parts, result, CLASS_ENTRIES)
    return result
