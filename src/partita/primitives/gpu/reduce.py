"""Reading rows in blocks without writing them: statistics that every thread carries for itself, and what programs that share a row
leave for the last of them."""

import triton
import triton.language as tl

from .math import exp, finite_shift, sum_for_dtype
from .memory import aligned_start, row_span


@triton.jit
def program_rows(
    rows, splits, batch_stride, row_stride, classes, VEC: tl.constexpr, ROWS: tl.constexpr
):
    """What this program reads: its split, batch, rows [ROWS], where their first starts, its classes before the vectors and in them."""
    split = (tl.program_id(0) % splits).to(tl.int64)
    block = tl.program_id(0) // splits
    batch = (block // tl.cdiv(rows, ROWS)).to(tl.int64)
    first = (block % tl.cdiv(rows, ROWS)).to(tl.int64) * ROWS
    start = batch * batch_stride + first * row_stride
    head, body = row_span(start, classes, VEC)
    return split, batch, first + tl.arange(0, ROWS), start, head, body


@triton.jit
def row_pointers(input_ptr, start, row_stride, VEC: tl.constexpr, ROWS: tl.constexpr):
    """Where the aligned vectors of the rows start, [ROWS, 1]."""
    return (
        input_ptr
        + aligned_start(start, VEC)
        + tl.arange(0, ROWS).to(tl.int64)[:, None] * row_stride
    )


@triton.jit
def unmasked_end(first, last, body, BLOCK_V: tl.constexpr, LANES: tl.constexpr):
    """Where the blocks end that need no mask: those of lanes within the row; blocks of several rows have one each."""
    if LANES == 1:
        return first
    else:
        return first + tl.maximum(tl.minimum(last, body) - first, 0) // BLOCK_V * BLOCK_V


@triton.jit
def by_lane(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """A block, [ROWS, BLOCK], so that what one thread loads of a row lies along axes 1 and 3: [ROWS, ., LANES, VECTOR]; as it is where a
    lane has a whole row."""
    if LANES == 1:
        return x
    else:
        return tl.reshape(x, [x.shape[0], x.shape[1] // (LANES * VECTOR), LANES, VECTOR])


@triton.jit
def broadcast_lanes(value):
    """What the lanes carry, [ROWS, LANES], beside a block `by_lane`."""
    if value.shape[1] == 1:
        return value
    else:
        return value[:, None, :, None]


@triton.jit
def lane_max(x):
    """The maximum of each lane, [ROWS, LANES], of a block `by_lane`."""
    if len(x.shape) == 2:
        return tl.max(x, axis=1)[:, None]
    else:
        return tl.max(tl.max(x, axis=3), axis=1)


@triton.jit
def lane_sum(x, EXACT: tl.constexpr):
    """The sum of each lane in fp64, [ROWS, LANES], of a block `by_lane`; where a lane has a whole row, a result in fp32 needs all of it EXACT."""
    if EXACT:
        x = x.to(tl.float64)
    if len(x.shape) == 2:
        return tl.sum(x, axis=1)[:, None].to(tl.float64)
    else:
        return tl.sum(tl.sum(x, axis=3), axis=1).to(tl.float64)


@triton.jit
def row_sum(terms, LANES: tl.constexpr, dtype: tl.constexpr):
    """The sum of each row, [ROWS], of a block, [ROWS, BLOCK], that a result of `dtype` is worth: for fp32 in fp64, from each thread's sum on
    where a thread has its own part of the row. Wider blocks have so many terms that the roundings average out."""
    EXACT: tl.constexpr = dtype == tl.float32 and terms.shape[1] <= 4096
    if EXACT and LANES > 1:
        return tl.sum(
            lane_sum(by_lane(terms, LANES, 128 // dtype.primitive_bitwidth), False), axis=1
        ).to(tl.float32)
    else:
        return sum_for_dtype(terms, 1, dtype)


@triton.jit
def online_softmax(maximum, total, x, EXACT: tl.constexpr):
    """Maximum and sum of exponentials of each lane, [ROWS, LANES], carried over a further block x, `by_lane`.

    No thread waits for another in here, so loads follow one another. The sum is in fp64: thousands of blocks would add up the rounding
    of fp32.
    """
    higher = tl.maximum(maximum, lane_max(x))
    shift = finite_shift(higher)
    return higher, total * exp(maximum - shift).to(tl.float64) + lane_sum(
        exp(x - broadcast_lanes(shift)), EXACT
    )


@triton.jit
def merge_lanes(maximum, total):
    """Maximum and sum of rows, [ROWS], and the factor of what each lane carries, [ROWS, LANES]."""
    most = tl.max(maximum, axis=1)
    factor = exp(maximum - finite_shift(most)[:, None]).to(tl.float64)
    return most, tl.sum(total * factor, axis=1), factor
