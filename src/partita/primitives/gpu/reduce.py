"""Reductions of rows that are read in blocks, with one running statistic for each lane.

A lane is a thread, if `RowPlan.lanes` says that each thread reads its own vectors of a row. Then no
thread waits for another inside the loop, and the lanes are merged once after it. If there is one
lane, it stands for the whole row.
"""

import triton
import triton.language as tl

from .math import exp, finite_shift
from .memory import aligned_start, row_span


@triton.jit
def program_rows(x, rows, splits, classes, VEC: tl.constexpr, ROWS: tl.constexpr):
    """Return which part of `StridedRows` this program reads.

    The results are its split, its batch, its rows [ROWS], the addresses of their aligned vectors
    [ROWS, 1], the offset of the first row, and the number of classes before and inside the aligned
    vectors of that row.
    """
    split = (tl.program_id(0) % splits).to(tl.int64)
    block = tl.program_id(0) // splits
    batch = (block // tl.cdiv(rows, ROWS)).to(tl.int64)
    first = (block % tl.cdiv(rows, ROWS)).to(tl.int64) * ROWS
    start = batch * x.batch + first * x.row
    head, body = row_span(start, classes, VEC)
    row = first + tl.arange(0, ROWS)
    ptrs = x.ptr + aligned_start(start, VEC) + tl.arange(0, ROWS).to(tl.int64)[:, None] * x.row
    return split, batch, row, ptrs, start, head, body


@triton.jit
def unmasked_end(first, last, body, BLOCK_V: tl.constexpr, LANES: tl.constexpr):
    """Return the end of the blocks that lie inside the row and so need no mask.

    Blocks of several rows always need a mask.
    """
    if LANES == 1:
        return first
    else:
        return first + tl.maximum(tl.minimum(last, body) - first, 0) // BLOCK_V * BLOCK_V


@triton.jit
def by_lane(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Reshape a block [ROWS, BLOCK] to [ROWS, ., LANES, VECTOR].

    Axes 1 and 3 then have what one thread loads of a row. If there is one lane, the block stays as
    it is.
    """
    if LANES == 1:
        return x
    else:
        return tl.reshape(x, [x.shape[0], x.shape[1] // (LANES * VECTOR), LANES, VECTOR])


@triton.jit
def broadcast_lanes(value):
    """Reshape a value of each lane, [ROWS, LANES], to broadcast with a block of `by_lane`."""
    if value.shape[1] == 1:
        return value
    else:
        return value[:, None, :, None]


@triton.jit
def lane_max(x):
    """Return the maximum of each lane, [ROWS, LANES], of a block of `by_lane`."""
    if len(x.shape) == 2:
        return tl.max(x, axis=1)[:, None]
    else:
        return tl.max(tl.max(x, axis=3), axis=1)


@triton.jit
def lane_sum(x, EXACT: tl.constexpr):
    """Return the sum of each lane in fp64, [ROWS, LANES], of a block of `by_lane`.

    EXACT adds all terms in fp64. A result in fp32 needs that if one lane has the whole row.
    """
    if EXACT:
        x = x.to(tl.float64)
    if len(x.shape) == 2:
        return tl.sum(x, axis=1)[:, None].to(tl.float64)
    else:
        return tl.sum(tl.sum(x, axis=3), axis=1).to(tl.float64)


@triton.jit
def online_softmax(maximum, total, x, EXACT: tl.constexpr):
    """Update each lane's maximum and sum of exponentials, [ROWS, LANES], with a block of `by_lane`.

    No thread waits for another here, so the loads follow one another. The sum is in fp64, since
    thousands of blocks would accumulate the rounding errors of fp32.
    """
    higher = tl.maximum(maximum, lane_max(x))
    shift = finite_shift(higher)
    return higher, total * exp(maximum - shift).to(tl.float64) + lane_sum(
        exp(x - broadcast_lanes(shift)), EXACT
    )


@triton.jit
def merge_lanes(maximum, total):
    """Return the maximum and the sum of each row, [ROWS]."""
    row_max = tl.max(maximum, axis=1)
    scale = exp(maximum - finite_shift(row_max)[:, None]).to(tl.float64)
    return row_max, tl.sum(total * scale, axis=1)
