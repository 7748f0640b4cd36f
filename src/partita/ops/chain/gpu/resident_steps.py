"""One step of a register-resident scan in Gluon: compensated pairs, gathers in shared memory.

Each thread keeps one state, as a compensated pair of fp32 numbers (high, low) with the value high
+ low: about 48 bits, at a fraction of the cost of fp64. A pair is packed into one 64-bit word, so
that one gather through shared memory brings both parts.

A lane is a position in the block of states. `ResidentEdges` lists, for the direction of a scan, the
neighbors that each lane reads and the edges to them. A step

1. gathers the states of the neighbors and the scores of the edges,
2. adds them as pairs: `two_sum` gives the rounded sum and its rounding error,
3. reduces the terms of each lane to maximum + log(1 + rest), where `rest` is the sum of the
   exponentials of all terms except the greatest.

Sources: Knuth, The Art of Computer Programming, volume 2, section 4.2.2 (two_sum); Dekker, A
floating-point technique for extending the available precision, 1971 (compensated pairs).
"""

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.math import LOG2E, log1p_pair
from ....primitives.gpu.sync import unpack_pair
from ....runtime.caches import register_cache
from ....runtime.sizes import next_power_of_2


class ResidentShape(NamedTuple):
    """The compile-time shape of a scan.

    Fields:
        DEGREE: edges into a lane.
        PADDED_DEGREE: the power of two above it.
        REGULAR: whether each lane has that many edges.
        CONTIGUOUS: whether the scores of a step are contiguous.
        PREFETCH: steps whose scores are loaded together.
        BLOCK_C: lanes, one for each state.
        BLOCK_E: scores of a step in memory order.
        STATE: the layout of the lanes.
        ROW: the layout of the scores in memory order.
    """

    DEGREE: Any
    PADDED_DEGREE: Any
    REGULAR: Any
    CONTIGUOUS: Any
    PREFETCH: Any
    BLOCK_C: Any
    BLOCK_E: Any
    STATE: Any
    ROW: Any


# A launch knows a shape by its identity.
@functools.lru_cache(maxsize=256)
def resident_shape(
    DEGREE: int,
    REGULAR: bool,
    CONTIGUOUS: bool,
    VEC: int,
    PREFETCH: int,
    BLOCK_C: int,
    BLOCK_E: int,
) -> ResidentShape:
    """Return the shape of a scan whose threads load VEC scores at a time."""
    state, row = (gl.BlockedLayout([vec], [32], [BLOCK_C // 32], [0]) for vec in (1, VEC))
    padded = next_power_of_2(DEGREE)
    fields = (DEGREE, padded, REGULAR, CONTIGUOUS, PREFETCH, BLOCK_C, BLOCK_E, state, row)
    return ResidentShape(*map(gl.constexpr, fields))


register_cache("chain.gpu.resident_steps.shapes", resident_shape.cache_clear)


@triton.constexpr_function
def without_prefetch(shape: ResidentShape) -> ResidentShape:
    """Return the shape of a scan that loads the scores of one step."""
    edges = (shape.DEGREE, shape.PADDED_DEGREE, shape.REGULAR, shape.CONTIGUOUS)
    blocks = (shape.BLOCK_C, shape.BLOCK_E, shape.STATE, shape.ROW)
    return ResidentShape(*edges, gl.constexpr(1), *blocks)


class StepRows(NamedTuple):
    """The scores, the states or the marginals of a chain's steps, in the order of a direction.

    Fields:
        ptr: the first step.
        stride: the stride over the steps.
        offsets: what is read or written of a step, in memory order.
        mask: which of it exists.
    """

    ptr: Any
    stride: Any
    offsets: Any
    mask: Any


@gluon.jit
def two_sum(a, b):
    """Return a + b rounded, and the rounding error; NaN as the error of an infinite sum."""
    total = a + b
    rounded_b = total - a
    return total, (a - (total - rounded_b)) + (b - rounded_b)


@gluon.jit
def zero_if_infinite(low, high):
    """Return the low part of a pair, 0 where the high part is infinite."""
    return gl.where(gl.abs(high) < float("inf"), low, 0.0)


@gluon.jit
def pack_compensated(high, low):
    """Pack a pair of fp32 numbers into one 64-bit word."""
    return (high.to(gl.int32, bitcast=True).to(gl.int64) << 32) | (
        low.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    )


@gluon.jit
def split_blocks(x, BLOCK: gl.constexpr, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Split `[PARTS * BLOCK]` into PARTS tensors `[BLOCK]`.

    Nothing moves between threads: a thread owns the same position of each part.
    """
    if PARTS == 1:
        return (x,)
    else:
        half: gl.constexpr = PARTS // 2 * BLOCK
        a, b = gl.split(gl.permute(gl.reshape(x, [2, half]), (1, 0)))
        a, b = gl.convert_layout(a, LAYOUT), gl.convert_layout(b, LAYOUT)
        if PARTS == 2:
            return a, b
        else:
            return split_blocks(a, BLOCK, PARTS // 2, LAYOUT) + split_blocks(
                b, BLOCK, PARTS // 2, LAYOUT
            )


@gluon.jit
def concat_blocks(xs, BLOCK: gl.constexpr, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Concatenate PARTS tensors `[BLOCK]` to `[PARTS * BLOCK]`, the inverse of `split_blocks`."""
    if PARTS == 1:
        return xs[0]
    else:
        if PARTS == 2:
            a, b = xs
        else:
            a = concat_blocks(xs[: PARTS // 2], BLOCK, PARTS // 2, LAYOUT)
            b = concat_blocks(xs[PARTS // 2 :], BLOCK, PARTS // 2, LAYOUT)
        return gl.convert_layout(
            gl.reshape(gl.permute(gl.join(a, b), (1, 0)), [PARTS * BLOCK]), LAYOUT
        )


@gluon.jit
def tile_index(index, size, STEPS: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Tile an index over STEPS consecutive blocks of `size` elements, and concatenate the tiles.

    Tile u is index + u * size.
    """
    tiles = ()
    for u in gl.static_range(STEPS):
        tiles = tiles + (index + u * size,)
    return concat_blocks(tiles, BLOCK, STEPS, LAYOUT)


@gluon.jit
def load_edge_table(edges, direction, shape):
    """Load the edges that a direction takes into each lane, `[PADDED_DEGREE * BLOCK_C]`.

    Returns:
        The lanes of the neighbors (-1 for no edge), and the positions of the edges' scores in
        PREFETCH consecutive rows of BLOCK_E scores.
    """
    SIZE: gl.constexpr = shape.DEGREE * shape.BLOCK_C
    PADDED_SIZE: gl.constexpr = shape.PADDED_DEGREE * shape.BLOCK_C
    flat = gl.arange(0, PADDED_SIZE, shape.STATE)
    offset, valid = direction * SIZE + flat, flat < SIZE
    neighbors = gl.load(edges.neighbors_ptr + offset, mask=valid, other=-1)
    positions = gl.load(edges.edges_ptr + offset, mask=valid, other=0)
    return neighbors, tile_index(positions, shape.BLOCK_E, shape.PREFETCH, PADDED_SIZE, shape.STATE)


@gluon.jit
def load_lanes(scores, table, n, shape):
    """Return the state of each lane, -1 for none, and the scores of chain n from its first step."""
    c = gl.load(table.state_of_lane_ptr + gl.arange(0, shape.BLOCK_C, shape.STATE))
    e = gl.arange(0, shape.BLOCK_E, shape.ROW)
    offsets = e
    if not shape.CONTIGUOUS:
        offsets = e // table.K * scores.c + e % table.K * scores.k
    return c, StepRows(scores.ptr + n * scores.n, scores.t, offsets, e < table.C * table.K)


@gluon.jit
def rows_from(rows, step, sign=1):
    """Return the rows from a step on, backwards if the sign is -1."""
    return StepRows(rows.ptr + step * rows.stride, sign * rows.stride, rows.offsets, rows.mask)


@gluon.jit
def load_rows(rows, remaining, PREFETCH: gl.constexpr):
    """Load the scores, or the states, of PREFETCH steps in memory order.

    Only the first `remaining` steps are loaded.
    """
    loaded = ()
    for u in gl.static_range(PREFETCH):
        mask = rows.mask & (u < remaining)
        loaded = loaded + (gl.load(rows.ptr + u * rows.stride + rows.offsets, mask=mask, other=0),)
    return loaded


@gluon.jit
def store_row(rows, values, mask):
    """Store the first of some rows, and return those that follow."""
    ptrs = rows.ptr + rows.offsets
    gl.store(ptrs, values.to(ptrs.dtype.element_ty), mask=rows.mask & mask)
    return rows_from(rows, 1)


@gluon.jit
def gather_scores(rows, edges, shape):
    """Gather the scores of PREFETCH steps in the order of the direction's edges.

    Returns PADDED_DEGREE tensors for each step, one for each edge of a lane.
    """
    scores = gl.gather(concat_blocks(rows, shape.BLOCK_E, shape.PREFETCH, shape.ROW), edges, 0)
    DEGREE: gl.constexpr = shape.PADDED_DEGREE
    parts = split_blocks(scores, shape.BLOCK_C, shape.PREFETCH * DEGREE, shape.STATE)
    steps = ()
    for u in gl.static_range(shape.PREFETCH):
        steps = steps + (parts[u * DEGREE : (u + 1) * DEGREE],)
    return steps


@gluon.jit
def gather_neighbors(state, neighbors, shape):
    """Return the states of each lane's neighbors and the lanes of these, PADDED_DEGREE each."""
    neighbor_states = gl.gather(state, gl.maximum(neighbors, 0), 0)
    return (
        split_blocks(neighbor_states, shape.BLOCK_C, shape.PADDED_DEGREE, shape.STATE),
        split_blocks(neighbors, shape.BLOCK_C, shape.PADDED_DEGREE, shape.STATE),
    )


@gluon.jit
def tree_max(values, TERMS: gl.constexpr):
    """Return the greatest of some tensors, or NaN where one is NaN.

    A tree has a shorter chain of dependent operations than a loop.
    """
    if TERMS == 1:
        return values[0]
    else:
        half: gl.constexpr = TERMS // 2
        return gl.maximum(
            tree_max(values[:half], half),
            tree_max(values[half:], TERMS - half),
            propagate_nan=tl.PropagateNan.ALL,
        )


@gluon.jit
def tree_sum(values, TERMS: gl.constexpr):
    """Return the sum of some tensors, by a tree."""
    if TERMS == 1:
        return values[0]
    else:
        half: gl.constexpr = TERMS // 2
        return tree_sum(values[:half], half) + tree_sum(values[half:], TERMS - half)


@gluon.jit
def log_step(state, scores, neighbors, shape):
    """Compute the states after a step under Log, given the scores of each lane's edges.

    The sum omits the greatest term, and the logarithm is log(1 + rest) as a pair: if one term
    outweighs the others, a sum rounded to fp32 would lose the others at each step.

    Returns:
        The packed states, the exponentials of the terms minus the greatest, and 1 / (1 + rest).
    """
    DEGREE: gl.constexpr = shape.DEGREE
    neighbor_states, neighbor_lanes = gather_neighbors(state, neighbors, shape)
    highs, lows, differences, exponentials = (), (), (), ()
    for k in gl.static_range(DEGREE):
        high, low = unpack_pair(neighbor_states[k])
        high, error = two_sum(high, scores[k].to(gl.float32))
        if not shape.REGULAR:
            high = gl.where(neighbor_lanes[k] >= 0, high, -float("inf"))
        highs, lows = highs + (high,), lows + (low + error,)
    maximum = tree_max(highs, DEGREE)
    maximum_low = gl.full([shape.BLOCK_C], 0.0, gl.float32, shape.STATE)
    for k in gl.static_range(DEGREE):
        differences = differences + (highs[k] - maximum,)
        maximum_low = gl.where(differences[k] == 0.0, lows[k], maximum_low)
    smaller, ones = (), ()
    for k in gl.static_range(DEGREE):
        # A term of -inf gives NaN here; the maximum of NaN and a number is the number.
        difference = gl.maximum(differences[k] + (lows[k] - maximum_low), -150.0)
        e = gl.exp2(difference * LOG2E)
        one = gl.where(differences[k] == 0.0, 1.0, 0.0)
        exponentials = exponentials + (e,)
        smaller, ones = smaller + (e - one,), ones + (one,)
    rest = gl.maximum(tree_sum(smaller, DEGREE) + (tree_sum(ones, DEGREE) - 1.0), 0.0)
    log, log_low = log1p_pair(rest)
    rounded, error = two_sum(maximum, log)
    low = zero_if_infinite(maximum_low + (error + log_low), rounded)
    # Renormalize the pair: otherwise the low part would grow from step to step.
    high = rounded + low
    return (
        pack_compensated(high, zero_if_infinite(low - (high - rounded), high)),
        exponentials,
        1.0 / (1.0 + rest),
    )


@gluon.jit
def split_fp64(value):
    """Split an fp64 number into a pair of fp32 numbers."""
    high = value.to(gl.float32)
    return high, zero_if_infinite((value - high.to(gl.float64)).to(gl.float32), high)


@gluon.jit
def load_boundary(boundary_ptr, c, stride_c, invalid):
    """Load initial or final scores plus `invalid` as the first states of a scan, fp64."""
    value = gl.load(boundary_ptr + c * stride_c, mask=c >= 0, other=-float("inf"))
    return value.to(gl.float64) + invalid


@gluon.jit
def load_boundary_pair(boundary_ptr, c, stride_c, invalid):
    """Load a chain's initial or final scores plus `invalid` as packed states."""
    return pack_compensated(*split_fp64(load_boundary(boundary_ptr, c, stride_c, invalid)))


@gluon.jit
def load_logz_pair(logz_ptr):
    """Load log Z as a pair of fp32 numbers; a chain without a path has no marginals."""
    logz = gl.load(logz_ptr)
    return split_fp64(gl.where(logz == -float("inf"), float("inf"), logz))


@gluon.jit
def state_posterior(state, opposite, logz_high, logz_low):
    """Return exp(alpha + beta - log Z) of packed alpha, packed beta and the pair log Z."""
    alpha, alpha_low = unpack_pair(state)
    beta, beta_low = unpack_pair(opposite)
    difference, error = two_sum(beta, -logz_high)
    low = zero_if_infinite(error + (beta_low - logz_low), difference)
    return gl.exp2(((alpha + difference) + (alpha_low + low)) * LOG2E)
