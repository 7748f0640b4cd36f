"""Exponential and logarithm in fp64 without branches, so that loops over states become vector code."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

ROUND = 6755399441055744.0  # 1.5 * 2**52: what is added to it loses its fraction, and stands in its low bits
LOG2E = 1.4426950408889634
LN2_HIGH = 0.6931471803691238  # so few bits that its products with exponents are exact
LN2_LOW = 1.9082149292705877e-10
LEAST = -700.0  # below, the exponential counts as 0


@intrinsic
def bits_of(context: Any, x: Any) -> Any:
    """The bits of an fp64 number, as int64."""
    return types.int64(types.float64), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(64))


@intrinsic
def from_bits(context: Any, x: Any) -> Any:
    """The fp64 number of these bits."""
    return types.float64(types.int64), lambda _, builder, __, args: builder.bitcast(args[0], ir.DoubleType())


@njit(inline="always", fastmath={"contract"})
def exp(x: float) -> float:
    """e**x for x <= 700, to 1 ulp or so; NaN stays NaN."""
    y = LEAST if x < LEAST else x
    shifted = y * LOG2E + ROUND
    power = shifted - ROUND
    r = (y - power * LN2_HIGH) - power * LN2_LOW
    p = 1.0 / 6227020800.0
    p = p * r + 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = (p * r) * r + r + 1.0
    e = p * from_bits((bits_of(shifted) << 52) + 0x3FF0000000000000)
    return 0.0 if x < LEAST else e


@njit(inline="always", fastmath={"contract"})
def log(x: float) -> float:
    """The logarithm of a positive normal number, to 1 ulp or so."""
    bits = bits_of(x)
    exponent = (bits - 0x3FE5555555555555) & -0x10000000000000  # what is left lies between 2/3 and 4/3
    m = from_bits(bits - exponent)
    power = float(exponent >> 52)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = 1.0 / 21.0
    p = p * z + 1.0 / 19.0
    p = p * z + 1.0 / 17.0
    p = p * z + 1.0 / 15.0
    p = p * z + 1.0 / 13.0
    p = p * z + 1.0 / 11.0
    p = p * z + 1.0 / 9.0
    p = p * z + 1.0 / 7.0
    p = p * z + 0.2
    p = p * z + 1.0 / 3.0
    return power * LN2_HIGH + (2.0 * s + (2.0 * s * z * p + power * LN2_LOW))
