"""The arguments of kernels of semi-Markov chains, and their arithmetic: log-sum-exps and loads.

All scores are logarithms in fp64. Posteriors of states are sums along a sequence of differences, so
each log-sum-exp has an error near 1e-12, which fp32 cannot give. Exponentials in fp64 with 1e-12
take half the time of those that are right to the last bit.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift

LOG2E_FP64 = tl.constexpr(1.4426950408889634)
LN2_FP64 = tl.constexpr(0.6931471805599453)
# 1.5 * 2**52: a number that is added to it loses its fraction, and its integer is in the low bits.
ROUND = tl.constexpr(6755399441055744.0)
LOG_SMALL = tl.constexpr(-346.5735902799726)  # of 2**-500
ONE_BITS = tl.constexpr(0x3FF0000000000000)  # of 1.0 in fp64


class Emissions(NamedTuple):
    """A score for each state at each step, `[T, N, C]` with the strides `t, n, c`."""

    ptr: tl.tensor
    t: tl.tensor
    n: tl.tensor
    c: tl.tensor


class Matrix(NamedTuple):
    """Scores of ends `[N, C]`, transitions `[C, C]` or durations `[D, C]`, with both strides."""

    ptr: tl.tensor
    row: tl.tensor
    column: tl.tensor


class Chains(NamedTuple):
    """A batch of chains, without the transitions and durations, which the scans read from tables.

    Fields:
        emissions: `[T, N, C]`.
        start, end: `[N, C]`.
        lengths: `[N]`, or None for T.
        T, N, C, D: the sizes.
    """

    emissions: Emissions
    start: Matrix
    end: Matrix
    lengths: tl.tensor
    T: tl.tensor
    N: tl.tensor
    C: tl.tensor
    D: tl.tensor


class Scans(NamedTuple):
    """The results of the scans of a batch.

    Fields:
        lengths: `[N]`, or None for T.
        logz: `[N]` fp64.
        saved: `[4, T, N, C]` fp64: opened and closed of alpha, closed and opened of beta.
        T, N, C: the sizes.
    """

    lengths: tl.tensor
    logz: tl.tensor
    saved: tl.tensor
    T: tl.tensor
    N: tl.tensor
    C: tl.tensor


@triton.jit
def exp_term(x, EXACT: tl.constexpr):
    """Return e**x in fp64 for x <= 700, with a relative error of 8e-13 unless EXACT."""
    if EXACT:
        return tl.exp(x)
    else:
        bounded = tl.where(x < -700.0, -700.0, x)
        shifted = bounded * LOG2E_FP64 + ROUND
        r = bounded - (shifted - ROUND) * LN2_FP64
        # The polynomial is the best of its degree for the relative error on ±ln 2 / 2.
        p = 2.4727243494957377e-05 * r + 0.00019915423198561192
        p = p * r + 0.0013889178578237397
        p = p * r + 0.008333267029535716
        p = p * r + 0.041666664220531106
        p = p * r + 0.16666666885460354
        p = p * r + 0.5000000000618131
        p = p * r + 0.9999999999806218
        p = p * r + 0.9999999999997624
        bits = (shifted.to(tl.int64, bitcast=True) << 52) + ONE_BITS
        return tl.where(x < -700.0, 0.0, p * bits.to(tl.float64, bitcast=True))


@triton.jit
def weight_term(x, EXACT: tl.constexpr):
    """Return e**x, which is 0 for -inf alone and at least 2**-500 for all other x."""
    bounded = tl.where(x < LOG_SMALL, LOG_SMALL, x)
    return tl.where(x == -float("inf"), 0.0, exp_term(bounded, EXACT))


@triton.jit
def log_of_sum(total, EXACT: tl.constexpr):
    """Return the logarithm of a sum that is 0 or at least 1, by a Newton step unless EXACT."""
    if EXACT:
        return tl.log(total)
    else:
        number = tl.where(total == 0.0, 1.0, total)
        y = tl.log(number.to(tl.float32)).to(tl.float64)
        z = number * exp_term(-y, EXACT) - 1.0
        return tl.where(total == 0.0, -float("inf"), y + (z - 0.5 * z * z))


@triton.jit
def exponent_bits(x):
    """Return the biased exponents of numbers that are not negative, 0 to 2047."""
    return (x.to(tl.int64, bitcast=True) >> 52).to(tl.int32)


@triton.jit
def scores_of(numbers, EXACT: tl.constexpr):
    """Return the logarithms of numbers plus their offset, with an absolute error of 1e-12.

    A number is 0 or normal. That of NaN is NaN, and so is that of infinity.
    """
    x, offset = numbers
    if EXACT:
        return tl.log(x) + offset
    else:
        bits = x.to(tl.int64, bitcast=True)
        power = ((bits >> 52) - 1023).to(tl.float64)
        significand = ((bits & 0xFFFFFFFFFFFFF) | ONE_BITS).to(tl.float64, bitcast=True)
        logarithm = power * LN2_FP64 + log_of_sum(significand, EXACT)
        return tl.where((x > 0.0) & (x < float("inf")), logarithm, x - float("inf")) + offset


@triton.jit
def load_end(ends, n, c, C):
    """Return the scores of start or end in fp64, -inf past the states."""
    at = n * ends.row + c.to(tl.int64) * ends.column
    return tl.load(ends.ptr + at, mask=c < C, other=-float("inf")).to(tl.float64)


@triton.jit
def store_logz(scores, n, invalid, logz_ptr, rounded_ptr):
    """Store log Z, the log-sum-exp of the scores of the states in which the paths end."""
    maximum = finite_shift(tl.max(scores, axis=0))
    logz = tl.log(tl.sum(tl.exp(scores - maximum), axis=0)) + maximum + invalid
    tl.store(logz_ptr + n, logz)
    tl.store(rounded_ptr + n, logz.to(rounded_ptr.dtype.element_ty))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Return numbers in fp64 in the dtype of a result; half types are rounded by way of fp32."""
    if dtype.primitive_bitwidth < 32:
        return x.to(tl.float32).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def load_total(logz_ptr, n):
    """Return log Z to divide by; +inf for a sequence without a path, whose posteriors are 0."""
    logz = tl.load(logz_ptr + n)
    return tl.where(logz == -float("inf"), float("inf"), logz)
