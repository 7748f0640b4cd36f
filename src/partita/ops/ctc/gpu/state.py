"""The arithmetic of lattice states in CTC kernels.

A state is a probability, and the constexpr `FP64` chooses between two representations:

- `(mantissa, exponent)` stands for mantissa · 2**exponent, with an fp32 mantissa in [1, 2) and an
  int32 exponent. Each state has its own exponent, so it keeps 24 bits however small it is next to
  the others, and a step takes neither a logarithm nor an exponential of it.
- `(log2,)` is the logarithm to base 2 in fp64. It serves logits in fp64, and logits so large that
  an int32 exponent would overflow.

An emission (the probability of a class at a step, up to normalization) has the same representation.
In memory, a state is one 64-bit word that is never 0, so a word of 0 means "not written yet".
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E, LOG2E_LOW, UNFUSED

# The exponent of a zero. The sum of two such exponents does not wrap.
ZERO_EXPONENT = tl.constexpr(-(2**29))
# Exponents of other numbers lie above this one; they stay within 2**27 in absolute value.
MIN_EXPONENT = tl.constexpr(-(2**28))
ZERO_WORD = tl.constexpr((0x3F800000 << 32) | (2**32 - 2**29))
ZERO_WORD_FP64 = tl.constexpr(-(2**52))  # the bits of -inf
# 1.5 · 2**23: adding it rounds to an integer, which appears in the low bits of the sum.
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def constant_state(number: tl.constexpr, like, FP64: tl.constexpr):
    """Return the states 0 or 1 in the shape of `like`."""
    if FP64:
        return ((like * 0).to(tl.float64) + (0.0 if number == 1 else -float("inf")),)
    else:
        return ((like * 0).to(tl.float32) + 1.0, like * 0 + (0 if number == 1 else ZERO_EXPONENT))


@triton.jit
def exp2_int(exponent):
    """Return 2**exponent for exponents up to 127, and 0 below the normal range of fp32."""
    return ((tl.maximum(exponent, -127) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def add(a, b, FP64: tl.constexpr):
    """Return the sum of two states. Its mantissa is in [1, 4)."""
    if FP64:
        difference = tl.where(a[0] == b[0], 0.0, -tl.abs(a[0] - b[0]))
        return (tl.where(a[0] > b[0], a[0], b[0]) + tl.log2(1.0 + tl.exp2(difference)),)
    else:
        exponent = tl.maximum(a[1], b[1])
        mantissa = tl.fma(a[0], exp2_int(a[1] - exponent), b[0] * exp2_int(b[1] - exponent))
        return (mantissa, exponent)


@triton.jit
def multiply_emission(a, emission, FP64: tl.constexpr):
    """Return a sum of states times an emission, with the mantissa brought back to [1, 2)."""
    if FP64:
        return (a[0] + emission[0],)
    else:
        product = (a[0] * emission[0]).to(tl.int32, bitcast=True)
        mantissa = ((product & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        return (mantissa, tl.maximum(a[1] + (emission[1] + (product >> 23)), ZERO_EXPONENT))


@triton.jit
def emission_of(x, limit):
    """Return e**x as an emission: a mantissa and the exponent minus 127.

    The offset of 127 cancels the bias that `multiply_emission` leaves in the exponent. The mantissa
    is NaN where |x| exceeds the limit, and -inf becomes a zero.
    """
    x = x.to(tl.float32)
    if UNFUSED:
        log2 = x.to(tl.float64) * LOG2E
        integer = tl.floor(log2 + 0.5)
        mantissa, exponent = tl.exp2(log2 - integer).to(tl.float32), integer.to(tl.int32)
    else:
        rounded = tl.fma(x, LOG2E, MAGIC)
        # The fused product is exact; a rounded product would lose digits where x is large.
        fraction = tl.fma(x, LOG2E, MAGIC - rounded)
        mantissa = tl.exp2(tl.fma(x, LOG2E_LOW, fraction))
        exponent = rounded.to(tl.int32, bitcast=True) - MAGIC_BITS
    in_range = tl.abs(x) <= limit
    mantissa = tl.where(in_range, mantissa, tl.where(x == -float("inf"), 1.0, float("nan")))
    return mantissa, tl.where(in_range, exponent, ZERO_EXPONENT) - 127


@triton.jit
def multiply_emissions(a, b, FP64: tl.constexpr):
    """Return the product of two emissions."""
    if FP64:
        return (a[0] + b[0],)
    else:
        return (a[0] * b[0], a[1] + b[1] + 127)


@triton.jit
def pack_state(a, FP64: tl.constexpr):
    """Return a state as one 64-bit word, which is never 0."""
    if FP64:
        word = a[0].to(tl.int64, bitcast=True)
        return tl.where(word == 0, -0x8000000000000000, word)
    else:
        return (a[0].to(tl.int32, bitcast=True).to(tl.int64) << 32) | (
            a[1].to(tl.int64) & 0xFFFFFFFF
        )


@triton.jit
def unpack_state(word, FP64: tl.constexpr):
    """Return the state that `pack_state` packed."""
    if FP64:
        return (word.to(tl.float64, bitcast=True),)
    else:
        return ((word >> 32).to(tl.int32).to(tl.float32, bitcast=True), word.to(tl.int32))


@triton.jit
def posterior_of(a, b, exponent, FP64: tl.constexpr):
    """Return a · b · 2**-exponent for a sum of states and a state.

    The exponent is that of the partition function, so the result is at most a small multiple of 1.
    In fp64 it is bounded, because logarithms beyond 2**50 have lost so many digits that it would be
    infinite otherwise.
    """
    if FP64:
        return tl.exp2(tl.minimum((a[0] + b[0]) - exponent, 64.0))
    else:
        return (a[0] * b[0]) * exp2_int(a[1] + b[1] - exponent)


@triton.jit
def select(condition, a, b, FP64: tl.constexpr):
    """Return state a where the condition holds, and state b elsewhere."""
    if FP64:
        return (tl.where(condition, a[0], b[0]),)
    else:
        return (tl.where(condition, a[0], b[0]), tl.where(condition, a[1], b[1]))


@triton.jit
def broadcast_lane(a, index, FP64: tl.constexpr):
    """Return in each lane the state of the lane `index`, `[32]`."""
    if FP64:
        return (tl.gather(a[0], index, 0),)
    else:
        return (tl.gather(a[0], index, 0), tl.gather(a[1], index, 0))


@triton.jit
def shift_lanes(a, carry, lane, STEP: tl.constexpr, FP64: tl.constexpr):
    """Return the state of the lane before (STEP = -1) or after (STEP = 1) each lane.

    The boundary lane, which has no such neighbor, gets the carry. The carry takes the place of the
    state at the other end of the warp, which no lane needs, and one rotation moves both.
    """
    sent = select(lane == (31 if STEP < 0 else 0), carry, a, FP64)
    if FP64:
        return (tl.gather(sent[0], (lane + STEP) & 31, 0),)
    else:
        return tl.gather(sent[0], (lane + STEP) & 31, 0), tl.gather(sent[1], (lane + STEP) & 31, 0)
