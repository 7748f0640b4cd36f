"""Rows of values of the nodes in kernels, read one after another by programs of one warp.

A program has some neighboring values of u at one step of one sequence. A row is read in blocks of
columns. A gradient reads and writes aligned vectors where rows start at any address, and the few
columns around these vectors separately, one per lane. The order of a row's sum does not depend on
where the row starts.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E, UNFUSED, finite_shift, rounded_product
from ....primitives.gpu.memory import row_span
from .plan import NODES_PER_PROGRAM

ROWS = tl.constexpr(NODES_PER_PROGRAM)
HUGE = tl.constexpr(2.0**30)  # of logits; their products with log2(e) are too far apart in fp32


class Logits(NamedTuple):
    """The logits of nodes, `[B, T, U1, V]`, whose other strides are arguments of kernels.

    Fields:
        ptr: the logits.
        stride_v: the stride over the classes.
        lse_ptr: the log-sum-exps of the nodes, `[B, T, U1]`, or None.
    """

    ptr: tl.tensor
    stride_v: tl.tensor
    lse_ptr: tl.tensor


class NodeRows(NamedTuple):
    """The nodes of a program.

    Fields:
        b: the sequence.
        t: the step.
        first_u: the first value of u.
        index: the index of the first node in arrays `[B, T, U1]`.
    """

    b: tl.tensor
    t: tl.tensor
    first_u: tl.tensor
    index: tl.tensor


class Row(NamedTuple):
    """One row of values.

    Fields:
        ptr, start: the address of all rows, and the offset of this one.
        stride_v: the stride over the columns.
        head: the columns before its aligned part.
        columns: the columns of its aligned part.
    """

    ptr: tl.tensor
    start: tl.tensor
    stride_v: tl.tensor
    head: tl.tensor
    columns: tl.tensor


@triton.jit
def program_nodes(first_step, T, U1):
    """Return the nodes of this program; the steps of all sequences are counted from first_step."""
    blocks = tl.cdiv(U1, ROWS)
    step = first_step + tl.program_id(0) // blocks
    first_u = tl.program_id(0) % blocks * ROWS
    return NodeRows(step // T, step % T, first_u, step.to(tl.int64) * U1 + first_u)


@triton.jit
def step_offset(node, first_step, stride_b, stride_t):
    """Return the offset of a program's step in a tensor that begins with step first_step.

    That step is 0, or sequences follow each other without a gap.
    """
    offset = node.b.to(tl.int64) * stride_b + node.t.to(tl.int64) * stride_t
    return offset - tl.cast(first_step, tl.int64) * stride_t


@triton.jit
def locate_row(ptr, start, stride_v, V, TILE: tl.constexpr):
    """Return the row at an offset; all of it is aligned without edges."""
    head, columns = 0, V
    if TILE.edges:
        head, columns = row_span(start, V, TILE.vector)
    return Row(ptr, start, stride_v, head, columns)


@triton.jit
def aligned_ptr(row, TILE: tl.constexpr):
    """Return the address of a row's aligned part."""
    if TILE.edges:
        return row.ptr + (row.start + TILE.vector - 1) // TILE.vector * TILE.vector
    else:
        # Triton forgets `tl.multiple_of` of a scalar before it decides about the width of loads.
        return row.ptr + row.start // TILE.vector * TILE.vector


@triton.jit
def column_offset(column, stride_v):
    """Return the offsets of columns, in 64 bits unless columns are neighbors in memory."""
    if isinstance(stride_v, tl.tensor):
        return column.to(tl.int64) * stride_v
    else:  # the stride is 1, which the kernel is compiled for
        return column * stride_v


@triton.jit
def load_piece(ptr, stride_v, column, columns, VECTOR: tl.constexpr, DTYPE: tl.constexpr):
    """Load a block of columns, of which VECTOR are aligned together, -inf after the last one."""
    mask = column // VECTOR * VECTOR < columns
    ptr += column_offset(column, stride_v)
    return tl.load(ptr, mask=mask, other=-float("inf")).to(DTYPE)


@triton.jit
def interleaved(even, odd):
    """Return the elements of two blocks by turns."""
    return tl.reshape(tl.join(even, odd), [2 * even.shape[0]])


@triton.jit
def load_words(ptr, first, columns, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Load a block of 16-bit columns of a row, which may start on 2 bytes, by words of 4 bytes.

    A lane reads the five words around its 16 bytes: single columns would take more requests. No
    word is read that has none of the row's columns. Columns after the last one are -inf. With WHOLE
    there are none in the last block.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    MINUS_INF: tl.constexpr = 0xFC00FC00 if dtype == tl.float16 else 0xFF80FF80
    address, column = ptr.to(tl.int64), first + tl.arange(0, BLOCK)
    shift = (address % 4 * 8).to(tl.uint32)
    word_ptr = (address // 4 * 4).to(tl.pointer_type(tl.uint32))
    lane_word, words = first // 2 + tl.arange(0, BLOCK // 8) * 4, ()
    for i in tl.static_range(5):
        last = columns if i < 4 else columns * (shift > 0)
        mask = (lane_word + i) * 2 - (shift > 0) < last
        word = tl.load(word_ptr + lane_word + i, mask=mask, other=MINUS_INF)
        words = words + (word.to(tl.uint64),)
    shifted = ()
    for i in tl.static_range(4):
        word = (words[i] | (words[i + 1] << 32)) >> shift.to(tl.uint64)
        shifted = shifted + (word.to(tl.uint32),)
    even, odd = interleaved(shifted[0], shifted[2]), interleaved(shifted[1], shifted[3])  # type: ignore[misc]
    word = interleaved(even, odd)
    low, high = word.to(tl.uint16), (word >> 16).to(tl.uint16)
    x = interleaved(low, high).to(dtype, bitcast=True).to(tl.float32)
    return x if WHOLE else tl.where(column < columns, x, -float("inf"))


@triton.jit
def is_huge(maximum):
    """Return whether the greatest logit of a row is finite and beyond ±2**30."""
    return (tl.abs(maximum) >= HUGE) & (tl.abs(maximum) < float("inf"))


@triton.jit
def row_factor(maximum, DTYPE: tl.constexpr):
    """Return the factor of a row's exponents: log2(e), or 1 if its greatest logit is huge.

    The shift of a huge row has not the digits of exact products. Unequal logits are at least 64
    apart in fp32 there, so the factor does not matter, and 1 makes the shift exact.
    """
    if DTYPE == tl.float64:
        return tl.full([], LOG2E, tl.float64)  # Triton returns a constant in fp32.
    else:
        return tl.where(is_huge(maximum), 1.0, LOG2E).to(DTYPE)


@triton.jit
def row_exp2(x, factor, shift, DTYPE: tl.constexpr):
    """Return 2**(factor x - shift)."""
    if DTYPE == tl.float64:
        return tl.exp2(x * factor - shift)
    elif UNFUSED:
        return tl.exp2(x.to(tl.float64) * factor - shift).to(DTYPE)
    else:
        # The product inside is exact, so logits may be far from 0.
        return tl.exp2(tl.fma(x, factor, -shift))


@triton.jit
def sum_of_neighbors(x, N: tl.constexpr):
    """Return the sum of each N columns, by pairs of columns, whichever threads have them."""
    if N == 1:
        return x
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
        return sum_of_neighbors(even + odd, N // 2)


@triton.jit
def shift_to(maximum, shift, columns, DTYPE: tl.constexpr):
    """Return the maximum with more columns, its factor and shift, and what rescales the sums."""
    new_maximum = tl.maximum(maximum, tl.max(columns, axis=0))
    factor = row_factor(new_maximum, DTYPE)
    new_shift = rounded_product(finite_shift(new_maximum), factor)
    rescale = tl.exp2(tl.where(maximum == -float("inf"), 0.0, shift - new_shift))
    return new_maximum, factor, new_shift, rescale


@triton.jit
def row_normalizer(
    ptr,
    start,
    stride_v,
    V,
    excluded,
    HAT: tl.constexpr,
    TILE: tl.constexpr,  # RowTile
    DTYPE: tl.constexpr,
):
    """Return the maximum of the row at `start`, and the sum of 2**(factor x - shift) in fp64.

    See `row_factor` for the factor. The shift is the product of factor and maximum.
    With HAT, the column `excluded` does not count. A lane adds up its columns in DTYPE. They follow
    from V and the size of a logit, and so do the columns that share a maximum before the last one.
    """
    BLOCK_V: tl.constexpr = TILE.block
    PIECES: tl.constexpr = TILE.pieces
    lane, columns = tl.arange(0, BLOCK_V), V
    # Triton forgets `tl.multiple_of` of a scalar before it decides about the width of loads.
    row_ptr = ptr + start // TILE.vector * TILE.vector
    shift, partial = tl.full([], 0.0, DTYPE), tl.zeros([BLOCK_V], DTYPE)
    maximum = tl.full([], -float("inf"), DTYPE)
    if TILE.edges:
        columns = V // BLOCK_V * BLOCK_V
        edge_column = columns + tl.arange(0, 32)
        edge = load_piece(row_ptr, stride_v, edge_column, V, 1, DTYPE)
        if HAT:
            edge = tl.where(edge_column == excluded, -float("inf"), edge)
    for first in range(0, columns, PIECES * BLOCK_V):
        pieces = ()
        for i in tl.static_range(PIECES):
            column = first + i * BLOCK_V + lane
            if TILE.words:
                x = load_words(row_ptr, first + i * BLOCK_V, columns, BLOCK_V, TILE.edges)
            else:
                x = load_piece(row_ptr, stride_v, column, columns, TILE.vector, DTYPE)
            if HAT:
                x = tl.where(column == excluded, -float("inf"), x)
            pieces = pieces + (x,)
        greatest = pieces[0]  # type: ignore[misc]
        for i in tl.static_range(1, PIECES):
            greatest = tl.maximum(greatest, pieces[i])
        maximum, factor, shift, rescale = shift_to(maximum, shift, greatest, DTYPE)
        partial *= rescale
        for i in tl.static_range(PIECES):
            partial += row_exp2(pieces[i], factor, shift, DTYPE)
    sums = sum_of_neighbors(partial, BLOCK_V // 32 if BLOCK_V > 32 else 1)
    if TILE.edges:
        maximum, factor, shift, rescale = shift_to(maximum, shift, edge, DTYPE)
        sums = sums * rescale + row_exp2(edge, factor, shift, DTYPE)
    return maximum, tl.sum(sums.to(tl.float64), axis=0)
