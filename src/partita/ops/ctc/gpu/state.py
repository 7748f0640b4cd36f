"""The states of a CTC lattice in kernels, their arithmetic, and a step through them.

A state is a number m · 2**e, of an fp32 mantissa in [1, 2) and an integer exponent of its own: however far below the others it lies, it keeps
24 bits, and neither a logarithm nor an exponential is taken of it. `WIDE` states, for what no such exponent holds and for fp64, are logarithms
to base 2 in fp64. Position i of a target is the blank before its label i and that label; a lane holds one position.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E, LOG2E_LOW, UNFUSED

NOTHING = tl.constexpr(-(2**29))  # exponent of 0; sums of two do not wrap
POSSIBLE = tl.constexpr(-(2**28))  # exponents of other numbers are above it, up to 2**27 either way
NOTHING_WORD = tl.constexpr((0x3F800000 << 32) | (2**32 - 2**29))
WIDE_NOTHING_WORD = tl.constexpr(-(2**52))  # -inf
MAGIC = tl.constexpr(
    12582912.0
)  # 1.5 · 2**23: a sum with it is rounded to an integer, which stands in its low bits
MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def state(number: tl.constexpr, like, WIDE: tl.constexpr):
    """0 or 1 as states, of the shape of the lanes."""
    if WIDE:
        return ((like * 0).to(tl.float64) + (0.0 if number == 1 else -float("inf")),)
    else:
        return ((like * 0).to(tl.float32) + 1.0, like * 0 + (0 if number == 1 else NOTHING))


@triton.jit
def power(exponent):
    """2**exponent for exponents up to 127; 0 below fp32's normal range."""
    return ((tl.maximum(exponent, -127) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def plus(a, b, WIDE: tl.constexpr):
    """The sum of two states; its mantissa is in [1, 4)."""
    if WIDE:
        apart = tl.where(a[0] == b[0], 0.0, -tl.abs(a[0] - b[0]))
        return (tl.where(a[0] > b[0], a[0], b[0]) + tl.log2(1.0 + tl.exp2(apart)),)
    else:
        most = tl.maximum(a[1], b[1])
        return (tl.fma(a[0], power(a[1] - most), b[0] * power(b[1] - most)), most)


@triton.jit
def times(a, emission, WIDE: tl.constexpr):
    """A sum of states times an emission, normalised."""
    if WIDE:
        return (a[0] + emission[0],)
    else:
        product = (a[0] * emission[0]).to(tl.int32, bitcast=True)
        mantissa = ((product & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        return (mantissa, tl.maximum(a[1] + (emission[1] + (product >> 23)), NOTHING))


@triton.jit
def factor_of(x, limit):
    """e**x as a factor: a mantissa, NaN where the exponent would pass a limit, and the exponent less 127; 0 is a mantissa too, with NOTHING."""
    x = x.to(tl.float32)
    if UNFUSED:
        wide = x.to(tl.float64) * LOG2E
        whole = tl.floor(wide + 0.5)
        mantissa, exponent = tl.exp2(wide - whole).to(tl.float32), whole.to(tl.int32)
    else:
        rounded = tl.fma(x, LOG2E, MAGIC)
        part = tl.fma(
            x, LOG2E, MAGIC - rounded
        )  # of the exact product: one that was rounded would cost digits where x is large
        mantissa = tl.exp2(tl.fma(x, LOG2E_LOW, part))
        exponent = rounded.to(tl.int32, bitcast=True) - MAGIC_BITS
    inside = tl.abs(x) <= limit
    mantissa = tl.where(inside, mantissa, tl.where(x == -float("inf"), 1.0, float("nan")))
    return mantissa, tl.where(inside, exponent, NOTHING) - 127


@triton.jit
def wide_factor_of(x):
    return (x.to(tl.float64) * LOG2E,)


@triton.jit
def word_of(a, WIDE: tl.constexpr):
    """A state as one 64-bit word, which is never 0."""
    if WIDE:
        word = a[0].to(tl.int64, bitcast=True)
        return tl.where(word == 0, -0x8000000000000000, word)
    else:
        return (a[0].to(tl.int32, bitcast=True).to(tl.int64) << 32) | (
            a[1].to(tl.int64) & 0xFFFFFFFF
        )


@triton.jit
def state_of(word, WIDE: tl.constexpr):
    if WIDE:
        return (word.to(tl.float64, bitcast=True),)
    else:
        return ((word >> 32).to(tl.int32).to(tl.float32, bitcast=True), word.to(tl.int32))


@triton.jit
def share_of(a, b, exponent, WIDE: tl.constexpr):
    """a · b · 2**-exponent, of a sum of states and a state that make no more than a few times that."""
    if WIDE:
        return tl.exp2((a[0] + b[0]) - exponent)
    else:
        return (a[0] * b[0]) * power(a[1] + b[1] - exponent)


@triton.jit
def at_lane(a, lane, u, WIDE: tl.constexpr):
    """What lane u holds, in every lane."""
    at = lane * 0 + u
    if WIDE:
        return (tl.gather(a[0], at, 0),)
    else:
        return (tl.gather(a[0], at, 0), tl.gather(a[1], at, 0))


@triton.jit
def over_lanes(values, lane, BIT: tl.constexpr = 16):
    """Sums over the lanes of a power of two of tensors: lane i of 32 has that of the tensor i · len(values) // 32."""
    if BIT == 0:
        return values[0]
    elif len(values) == 1:
        return over_lanes((values[0] + tl.gather(values[0], lane ^ BIT, 0),), lane, BIT // 2)
    else:
        folded = ()
        for i in tl.static_range(len(values) // 2):
            first, second = values[i], values[i + len(values) // 2]
            sent = tl.gather(tl.where((lane & BIT) != 0, first, second), lane ^ BIT, 0)
            folded = folded + (tl.where((lane & BIT) != 0, second, first) + sent,)
        return over_lanes(folded, lane, BIT // 2)


@triton.jit
def chosen(condition, a, b, WIDE: tl.constexpr):
    if WIDE:
        return (tl.where(condition, a[0], b[0]),)
    else:
        return (tl.where(condition, a[0], b[0]), tl.where(condition, a[1], b[1]))


@triton.jit
def neighbour(a, edge, lane, STEP: tl.constexpr, WIDE: tl.constexpr):
    """The state that the lane before (STEP -1) or behind (1) holds; where there is none, the one at the edge."""
    sent = chosen(
        lane == (31 if STEP < 0 else 0), edge, a, WIDE
    )  # what that lane holds is for nobody here
    if WIDE:
        return (tl.gather(sent[0], (lane + STEP) & 31, 0),)
    else:
        return tl.gather(sent[0], (lane + STEP) & 31, 0), tl.gather(sent[1], (lane + STEP) & 31, 0)


@triton.jit
def entered(blank, label, skips, edge, lane, FORWARD: tl.constexpr, WIDE: tl.constexpr):
    """What α sums into each blank and label from the states before a step, or β from those behind it.

    The edge of the positions held is the label before them, or what the last label takes from the position behind it.
    """
    if FORWARD:
        into_blank = plus(blank, neighbour(label, edge, lane, -1, WIDE), WIDE)
        return into_blank, plus(label, chosen(skips, into_blank, blank, WIDE), WIDE)
    else:
        into_blank = plus(blank, label, WIDE)
        return into_blank, plus(
            label, neighbour(chosen(skips, into_blank, blank, WIDE), edge, lane, 1, WIDE), WIDE
        )


@triton.jit
def offered(blank, label, skips, FORWARD: tl.constexpr, WIDE: tl.constexpr):
    """What the last lane (α) or the first (β) has for the edge of its neighbour, as a word."""
    if FORWARD:
        return word_of(label, WIDE)
    else:
        return word_of(chosen(skips, plus(blank, label, WIDE), blank, WIDE), WIDE)


@triton.jit
def classes_of(label, held, lane, GROUPS: tl.constexpr):
    """The lanes in the order of their labels, those without one last; and where each class begins and ends in it, for GROUPS of 32 classes."""
    rank, order, mine, bounds = lane * 0, lane * 0, tl.where(held, label, 2147483647), ()
    for j in range(32):
        other = tl.gather(mine, lane * 0 + j, 0)
        rank += ((other < mine) | ((other == mine) & (j < lane))).to(tl.int32)
    for j in range(32):
        order = tl.where(tl.gather(rank, lane * 0 + j, 0) == lane, j, order)
    for g in tl.static_range(GROUPS):
        begin, end = lane * 0, lane * 0
        for j in range(32):
            other = tl.gather(mine, lane * 0 + j, 0)
            begin += (other < g * 32 + lane).to(tl.int32)
            end += (other <= g * 32 + lane).to(tl.int32)
        bounds = bounds + ((begin, end),)
    return order, bounds


@triton.jit
def running_sums(xs, lane, BIT: tl.constexpr = 1):
    """Inclusive sums over the lanes of each of some tensors."""
    if BIT == 32:
        return xs
    else:
        sums, before, there = (), tl.maximum(lane - BIT, 0), (lane >= BIT).to(tl.float32)
        for i in tl.static_range(len(xs)):
            sums = sums + (xs[i] + tl.gather(xs[i], before, 0) * there,)
        return running_sums(sums, lane, 2 * BIT)


@triton.jit
def between(sums, begin, end):
    """Sums from one place up to before another, of inclusive ones."""
    below = tl.gather(sums, tl.maximum(begin - 1, 0), 0) * (begin > 0).to(tl.float32)
    return tl.gather(sums, tl.maximum(end - 1, 0), 0) * (end > 0).to(tl.float32) - below
