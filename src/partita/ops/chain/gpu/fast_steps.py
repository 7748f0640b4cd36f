"""The step of a scan over a small table in Gluon: pairs of fp32 numbers, the way of states and scores through shared memory, and their sum."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.math import LOG2E, log1p_pair
from ....primitives.gpu.sync import unpack_pair


@gluon.jit
def two_sum(a, b):
    """a + b, rounded, and what that lost; NaN where it is infinite."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@gluon.jit
def finite(low, high):
    """The lower part of a number, nothing where it is infinite."""
    return gl.where(gl.abs(high) < float("inf"), low, 0.0)


@gluon.jit
def word_of(high, low):
    """A pair of fp32 numbers as one 64-bit word."""
    return (high.to(gl.int32, bitcast=True).to(gl.int64) << 32) | (
        low.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    )


@gluon.jit
def less(word, high, low):
    """A state less a number, as a pair."""
    first, second = unpack_pair(word)
    difference, lost = two_sum(first, -high)
    return difference, finite(lost + (second - low), difference)


@gluon.jit
def parted(x, BLOCK: gl.constexpr, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """`[PARTS * BLOCK]` as PARTS tensors `[BLOCK]`, without moving anything: a thread holds the same place of each."""
    if PARTS == 1:
        return (x,)
    else:
        half: gl.constexpr = PARTS // 2 * BLOCK
        a, b = gl.split(gl.permute(gl.reshape(x, [2, half]), (1, 0)))
        a, b = gl.convert_layout(a, LAYOUT), gl.convert_layout(b, LAYOUT)
        return parted(a, BLOCK, PARTS // 2, LAYOUT) + parted(b, BLOCK, PARTS // 2, LAYOUT)


@gluon.jit
def joined(xs, BLOCK: gl.constexpr, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """The inverse of `parted`."""
    if PARTS == 1:
        return xs[0]
    else:
        a, b = (
            joined(xs[: PARTS // 2], BLOCK, PARTS // 2, LAYOUT),
            joined(xs[PARTS // 2 :], BLOCK, PARTS // 2, LAYOUT),
        )
        return gl.convert_layout(
            gl.reshape(gl.permute(gl.join(a, b), (1, 0)), [PARTS * BLOCK]), LAYOUT
        )


@gluon.jit
def together(index, size, TIMES: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Places in TIMES blocks that stand one behind another, of places in each."""
    every = ()
    for u in gl.static_range(TIMES):
        every = every + (index + u * size,)
    return joined(every, BLOCK, TIMES, LAYOUT)


@gluon.jit
def edges_of(
    others_ptr,
    edges_ptr,
    direction,
    TIMES: gl.constexpr,
    BLOCK: gl.constexpr,
    ROW_BLOCK: gl.constexpr,
    PARTS: gl.constexpr,
    WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Of the edges that a direction takes into each state, `[PARTS * BLOCK]`: where the states at their other ends stand (-1: none), and, for so many
    rows one behind another, where their scores stand."""
    flat = gl.arange(0, PARTS * BLOCK, LAYOUT)
    at, held = direction * (WIDTH * BLOCK) + flat, flat < WIDTH * BLOCK
    others, edges = (
        gl.load(others_ptr + at, mask=held, other=-1),
        gl.load(edges_ptr + at, mask=held, other=0),
    )
    return others, together(edges, ROW_BLOCK, TIMES, PARTS * BLOCK, LAYOUT)


@gluon.jit
def offsets_of(edge, slots, stride_c, stride_k, PLAIN: gl.constexpr):
    """Where the scores of edges stand in a step."""
    if PLAIN:
        return edge
    else:
        return edge // slots * stride_c + edge % slots * stride_k


@gluon.jit
def rows_ahead(step_ptr, offsets, held, jump, left, AHEAD: gl.constexpr):
    """Scores, or states, of some steps as they lie, a jump apart, as far as there are steps left."""
    rows = ()
    for u in gl.static_range(AHEAD):
        rows = rows + (gl.load(step_ptr + u * jump + offsets, mask=held & (u < left), other=0),)
    return rows


@gluon.jit
def scores_of(
    rows,
    edges,
    TIMES: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK: gl.constexpr,
    ROW_BLOCK: gl.constexpr,
    STATE: gl.constexpr,
    ROW: gl.constexpr,
):
    """The scores of some steps in the order of the direction's edges: step by step, the edges of each."""
    return parted(
        gl.gather(joined(rows, ROW_BLOCK, TIMES, ROW), edges, 0), BLOCK, TIMES * PARTS, STATE
    )


@gluon.jit
def most_of(values, COUNT: gl.constexpr):
    """The greatest of some tensors, or NaN, by a tree: it waits for fewer of them in turn than a chain does."""
    if COUNT == 1:
        return values[0]
    else:
        half: gl.constexpr = COUNT // 2
        return gl.maximum(
            most_of(values[:half], half),
            most_of(values[half:], COUNT - half),
            propagate_nan=tl.PropagateNan.ALL,
        )


@gluon.jit
def sum_of(values, COUNT: gl.constexpr):
    """The sum of some tensors, likewise."""
    if COUNT == 1:
        return values[0]
    else:
        half: gl.constexpr = COUNT // 2
        return sum_of(values[:half], half) + sum_of(values[half:], COUNT - half)


@gluon.jit
def advanced(
    word,
    scores,
    others,
    u: gl.constexpr,
    BLOCK: gl.constexpr,
    PARTS: gl.constexpr,
    WIDTH: gl.constexpr,
    WHOLE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """States after a step, the exponentials of their terms less the greatest, and the inverses of the sums of these.

    The greatest term is left out of the sum, and the logarithm is that of 1 + the others, as a pair: where one term outweighs the others, a sum
    rounded to fp32 would lose in each step what makes the difference.
    """
    words = parted(gl.gather(word, gl.maximum(others, 0), 0), BLOCK, PARTS, LAYOUT)
    held = parted(others, BLOCK, PARTS, LAYOUT)
    highs, lows, nears, exponentials = (), (), (), ()
    for k in gl.static_range(WIDTH):
        high, low = unpack_pair(words[k])
        high, lost = two_sum(high, scores[u * PARTS + k].to(gl.float32))
        if not WHOLE:
            high = gl.where(held[k] >= 0, high, -float("inf"))
        highs, lows = highs + (high,), lows + (low + lost,)
    most = most_of(highs, WIDTH)
    pivot = gl.full([BLOCK], 0.0, gl.float32, LAYOUT)
    for k in gl.static_range(WIDTH):
        nears = nears + (highs[k] - most,)
        pivot = gl.where(nears[k] == 0.0, lows[k], pivot)
    smaller, equals = (), ()
    for k in gl.static_range(WIDTH):
        near = gl.maximum(
            nears[k] + (lows[k] - pivot), -150.0
        )  # the greater of NaN, where a term is -inf, and a number is the number
        e = gl.exp2(near * LOG2E)
        one = gl.where(nears[k] == 0.0, 1.0, 0.0)
        exponentials = exponentials + (e,)
        smaller, equals = smaller + (e - one,), equals + (one,)
    rest = gl.maximum(sum_of(smaller, WIDTH) + (sum_of(equals, WIDTH) - 1.0), 0.0)
    log, log_low = log1p_pair(rest)
    rough, lost = two_sum(most, log)
    low = finite(pivot + (lost + log_low), rough)
    high = rough + low  # else the lower part would grow from step to step
    return word_of(high, finite(low - (high - rough), high)), exponentials, 1.0 / (1.0 + rest)


@gluon.jit
def pair_of(value):
    """A number in fp64 as a pair of fp32."""
    high = value.to(gl.float32)
    return high, finite((value - high.to(gl.float64)).to(gl.float32), high)


@gluon.jit
def ends_word(ends_ptr, c, stride_c, wrong):
    """Initial or final scores as words."""
    high, low = pair_of(
        gl.load(ends_ptr + c * stride_c, mask=c >= 0, other=-float("inf")).to(gl.float64) + wrong
    )
    return word_of(high, low)


@gluon.jit
def posterior_of(word, other, high, low):
    """exp(α + β - log Z), of α, β and the pair log Z."""
    a, a_low = unpack_pair(word)
    b, b_low = less(other, high, low)
    return gl.exp2(((a + b) + (a_low + b_low)) * LOG2E)
