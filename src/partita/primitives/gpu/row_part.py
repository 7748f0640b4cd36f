"""The part of a row that a program holds in registers, wherever the row starts in memory.

With VEC > 1, rows may start between two vectors of 16 bytes. A program then loads all vectors that
have a class of its part, and stores the vectors that lie in it. The classes at its two ends, fewer
than VEC each, are its edges, which are loaded and stored one by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .math import row_sum
from .memory import load_streaming, opaque, store_streaming


class RowPart(NamedTuple):
    """The classes of a row that a program has.

    Fields:
        row, rows: the row among those of all batches, and the number of rows of a batch.
        split: the index of the program among those that share the row.
        start: the class of column `begin`.
        begin, end: the columns of the first class, below VEC, and after the last one.
        column: the columns of the block, [BLOCK_V / PARTIALS, PARTIALS].
        mask: which of them are in the part.
    """

    row: Any
    rows: Any
    split: Any
    start: Any
    begin: Any
    end: Any
    column: Any
    mask: Any


@triton.jit
def locate_part(
    x,
    index,
    rows,
    classes,
    splits,
    size,
    PARTIALS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Return part `index` of the rows of x, `StridedRows`, which have `splits` parts each.

    All but the last part of a row have `size` classes, which is a multiple of VEC.
    """
    row, split = index // splits, index % splits
    begin = row_offset(x, row, rows).to(tl.int32) & (VEC - 1)
    end = begin + tl.minimum(classes - split * size, size)
    first = (tl.arange(0, BLOCK_V // PARTIALS) * PARTIALS)[:, None]
    lane = tl.arange(0, PARTIALS)[None, :]
    mask = lane < end - first  # A thread has few lanes, so this is one comparison a class.
    if VEC > 1:
        mask &= first + lane >= begin
    return RowPart(row, rows, split, split * size, begin, end, first + lane, mask)


@triton.jit
def row_offset(x, row, rows):
    """Return where a row of `StridedRows` starts, given its index among those of all batches."""
    return (row // rows).to(tl.int64) * x.batch + (row % rows).to(tl.int64) * x.row


@triton.jit
def part_ptr(x, part, VEC: tl.constexpr):
    """Return the address of column 0 of a part."""
    return x.ptr + (row_offset(x, part.row, part.rows) // VEC * VEC + part.start)


@triton.jit
def load_part(x, part, other, STREAM: tl.constexpr, VEC: tl.constexpr):
    """Load the vectors of a part, and `other` outside of them."""
    mask = part.column // VEC * VEC < part.end if VEC > 1 else part.mask
    return load_streaming(part_ptr(x, part, VEC) + part.column, mask, other, STREAM)


@triton.jit
def load_logits(x, part, zero, HALF: tl.constexpr, STREAM: tl.constexpr, VEC: tl.constexpr):
    """Load the classes of a part, and -inf outside of it."""
    packed = load_part(x, part, -float("inf"), STREAM, VEC)
    if VEC > 1:
        # The interpreter has no constants of type bf16, only conversions.
        lowest = tl.full([], -float("inf"), tl.float32).to(packed.dtype)
        packed = tl.where(part.mask, packed, lowest)
        if HALF:  # Selected numbers of a half type occupy a register each until they are packed.
            packed = opaque(packed, zero)
    return packed


@triton.jit
def store_part(x, part, value, STREAM: tl.constexpr, VEC: tl.constexpr):
    """Store the classes of a part, but for its edges."""
    mask = part.mask
    if VEC > 1:
        vector = part.column // VEC * VEC
        mask = (vector >= part.begin) & (vector + VEC <= part.end)
    store_streaming(part_ptr(x, part, VEC) + part.column, value, mask, STREAM)


@triton.jit
def edge_of_part(part, VEC: tl.constexpr):
    """Return the columns of the edges of a part, and which exist, [2 * VEC]."""
    lane, tail = tl.arange(0, 2 * VEC), part.end // VEC * VEC
    column = tl.where(lane < VEC, lane, tail + lane - VEC)
    at_head = (part.begin > 0) & (column >= part.begin)
    mask = tl.where(lane < VEC, at_head, (part.begin == 0) | (tail > 0))
    return column, mask & (column < part.end)


@triton.jit
def part_sum(terms, LARGEST: tl.constexpr = None):
    """Return the sum of the terms of a part, [N, PARTIALS]; see `row_sum`."""
    row = tl.reshape(terms, [1, terms.shape[0] * terms.shape[1]])
    return tl.sum(row_sum(row, terms.shape[1], LARGEST))
