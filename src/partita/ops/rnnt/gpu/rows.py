"""Rows of values of the nodes in kernels: which nodes a program has, and loads of their rows.

A program has some neighboring values of u at one step of one sequence. The rows of their values are
read in blocks of columns. Where rows start at any address, aligned vectors of them are read, and
the few columns around these vectors separately.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, exp_exact, finite_shift
from ....primitives.gpu.memory import aligned_start, edge_columns


class NodeRows(NamedTuple):
    """The nodes of a program.

    Fields:
        b: the sequence.
        t: the step.
        u: the values of u, `[ROWS]`.
        index: the indices of the nodes in arrays `[B, T, U1]`, `[ROWS]`.
    """

    b: tl.tensor
    t: tl.tensor
    u: tl.tensor
    index: tl.tensor


class RowValues(NamedTuple):
    """Where the rows of a program lie.

    Fields:
        start: the offsets of the rows, `[ROWS]`.
        body: the offsets of their aligned parts, `[ROWS]`.
        head: the columns before the aligned part, `[ROWS]`.
        columns: the columns of the aligned part, `[ROWS]`, or all V of them.
    """

    start: tl.tensor
    body: tl.tensor
    head: tl.tensor
    columns: tl.tensor


@triton.jit
def program_nodes(first_step, T, U1, ROWS: tl.constexpr):
    """Return the nodes of this program; the steps of all sequences are counted from first_step."""
    blocks = tl.cdiv(U1, ROWS)
    step = first_step + tl.program_id(0) // blocks
    u = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    return NodeRows(step // T, step % T, u, step.to(tl.int64) * U1 + u)


@triton.jit
def locate_rows(
    nodes, first_step, T, V, stride_b, stride_t, stride_u, VEC: tl.constexpr, EDGES: tl.constexpr
):
    """Return where the rows of a program lie in a tensor that begins with step first_step.

    That step is 0, or sequences follow each other without a gap.
    """
    step_offset = nodes.b.to(tl.int64) * stride_b + nodes.t.to(tl.int64) * stride_t
    first_offset = first_step.to(tl.int64) * stride_t
    start = (step_offset - first_offset) + nodes.u.to(tl.int64) * stride_u
    if EDGES:
        body = aligned_start(start, VEC)
        head = (body - start).to(tl.int32)
        return RowValues(start, body, head, (V - head) // VEC * VEC)
    else:
        start = tl.multiple_of(start, VEC)
        return RowValues(start, start, nodes.u * 0, nodes.u * 0 + V)


@triton.jit
def load_piece(ptr, rows, column, row_mask, stride_v, VEC: tl.constexpr, DTYPE: tl.constexpr):
    """Load a block of columns of the rows' aligned parts, -inf outside of them and of the mask."""
    mask = row_mask[:, None] & (column[None, :] // VEC * VEC < rows.columns[:, None])
    offset = rows.body[:, None] + column[None, :].to(tl.int64) * stride_v
    return tl.load(ptr + offset, mask=mask, other=-float("inf")).to(DTYPE)


@triton.jit
def edge_mask(rows, row_mask, V, VEC: tl.constexpr):
    """Return the columns around the rows' aligned parts, `[ROWS, 2 * VEC]`, and their mask."""
    lane = tl.arange(0, 2 * VEC)[None, :]
    head = rows.head[:, None]
    column = tl.where(lane < VEC, lane, head + rows.columns[:, None] + lane - VEC)
    mask = tl.where(lane < VEC, (lane < head) & (column < V), column < V)
    return column, mask & row_mask[:, None]


@triton.jit
def load_edges(ptr, rows, row_mask, V, VEC: tl.constexpr, DTYPE: tl.constexpr):
    """Return the values and the columns around the rows' aligned parts; see `load_piece`."""
    column, mask = edge_mask(rows, row_mask, V, VEC)
    x = tl.load(ptr + rows.start[:, None] + column, mask=mask, other=-float("inf"))
    return x.to(DTYPE), column, mask


@triton.jit
def sum_rows(values, VEC: tl.constexpr):
    """Return the sum of each row in fp64; only neighboring columns are added in fp32."""
    if values.dtype == tl.float64 or VEC == 1:
        return tl.sum(values.to(tl.float64), axis=1)
    else:
        groups = tl.reshape(values, [values.shape[0], values.shape[1] // VEC, VEC])
        return tl.sum(tl.sum(groups, axis=2).to(tl.float64), axis=1)


@triton.jit
def row_normalizers(
    ptr,
    rows,
    row_mask,
    V,
    stride_v,
    excluded,
    HAT: tl.constexpr,
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the finite maximum of each row and the sum of exponentials relative to it, in fp64.

    With HAT, the column `excluded` does not count. A lane adds up its columns in fp32.
    """
    lane = tl.arange(0, BLOCK_V)
    maximum = tl.full([rows.start.shape[0]], -float("inf"), DTYPE)
    partial = tl.zeros([rows.start.shape[0], BLOCK_V], DTYPE)
    edge_sum = tl.zeros([rows.start.shape[0]], tl.float64)
    if EDGES:
        edge, edge_column, _ = load_edges(ptr, rows, row_mask, V, VEC, DTYPE)
        if HAT:
            edge = tl.where(edge_column == excluded, -float("inf"), edge)
        maximum = tl.max(edge, axis=1)
    for first in range(0, V, PIECES * BLOCK_V):
        pieces = ()
        for i in tl.static_range(PIECES):
            column = first + i * BLOCK_V + lane
            x = load_piece(ptr, rows, column, row_mask, stride_v, VEC, DTYPE)
            if HAT:
                x = tl.where(
                    rows.head[:, None] + column[None, :] == excluded, -float("inf"), x
                )
            pieces = pieces + (x,)
        greatest = pieces[0]
        for i in tl.static_range(1, PIECES):
            greatest = tl.maximum(greatest, pieces[i])
        new_maximum = tl.maximum(maximum, tl.max(greatest, axis=1))
        shift = finite_shift(new_maximum)
        partial *= exp(maximum - shift)[:, None]
        for i in tl.static_range(PIECES):
            partial += exp(pieces[i] - shift[:, None])
        maximum = new_maximum
    shift = finite_shift(maximum)
    if EDGES:
        edge_sum = tl.sum(exp(edge - shift[:, None]).to(tl.float64), axis=1)
    return shift, sum_rows(partial, VEC) + edge_sum


@triton.jit
def exp_of_row(x, dtype: tl.constexpr):
    """Return e**x in the precision that a gradient of `dtype` needs."""
    if dtype == tl.float32:
        return exp_exact(x)
    else:
        return exp(x)
