"""Loads of lengths and small matrices; the aligned vectors of rows that start at any address."""

import triton
import triton.language as tl


@triton.jit
def checked_length(lengths_ptr, n, T, LEAST: tl.constexpr, otherwise):
    """Return the length of sequence n, and whether it is out of range.

    A length that is not from LEAST to T is returned as `otherwise`, so no kernel reads or writes
    out of bounds.
    """
    length = tl.load(lengths_ptr + n).to(tl.int64)
    invalid = (length < LEAST) | (length > T)
    return tl.where(invalid, otherwise, length).to(tl.int32), invalid


@triton.jit
def load_length(lengths_ptr, n, T, LEAST: tl.constexpr = 0, otherwise=0):
    """Return the length of sequence n and 0.0; for one out of range, `otherwise` and NaN.

    Without lengths it is T. A kernel adds the second value to its results, so that an invalid
    length makes them NaN.
    """
    if lengths_ptr is None:
        return T, 0.0
    else:
        length, invalid = checked_length(lengths_ptr, n, T, LEAST, otherwise)
        return length, tl.where(invalid, float("nan"), 0.0)


@triton.jit
def row_span(start, classes, VEC: tl.constexpr):
    """Return the number of classes before the aligned vectors of a row, and inside them."""
    if VEC == 1:
        return 0, classes
    else:
        head = (aligned_start(start, VEC) - start).to(tl.int32)
        return head, (classes - head) // VEC * VEC


@triton.jit
def aligned_start(start, VEC: tl.constexpr):
    """Return the offset of the aligned vectors of a row.

    The compiler sees from the expression that the offset is a multiple of VEC.
    """
    if VEC == 1:
        return start
    else:
        return (start + VEC - 1) // VEC * VEC


@triton.jit
def edge_columns(head, body, classes, VEC: tl.constexpr, LANES: tl.constexpr):
    """Return the columns of the classes around the aligned vectors, and the mask of their lanes."""
    lane = tl.arange(0, LANES)
    column = tl.where(lane < VEC, lane, head + body + lane - VEC)
    return column, tl.where(lane < VEC, lane < head, (lane < 2 * VEC) & (column < classes))


@triton.jit
def load_matrix(ptr, C, stride_k, stride_c, BLOCK_C: tl.constexpr, OTHER: tl.constexpr):
    """Load a matrix `[BLOCK_C, BLOCK_C]`."""
    k, c = tl.arange(0, BLOCK_C).to(tl.int64)[:, None], tl.arange(0, BLOCK_C).to(tl.int64)[None, :]
    return tl.load(ptr + k * stride_k + c * stride_c, mask=(k < C) & (c < C), other=OTHER)


@triton.jit
def prefetch_line(ptr):
    """Ask for the cache lines at some addresses."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
