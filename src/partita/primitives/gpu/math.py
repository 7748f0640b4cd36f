"""Arithmetic that the kernels share: guarded exponentials, soft-capping, aligned access to rows that start anywhere, and the
exchange between programs that share a row."""

import triton
import triton.language as tl

from ...runtime.backend import interpreting

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.925963033500e-8)  # what fp32 drops of log2(e)
UNFUSED = tl.constexpr(
    interpreting()
)  # the interpreter rounds within a multiply-add, but its exponential is exact
LN2 = tl.constexpr(0.6931471805599453)
LN2_HIGH = tl.constexpr(
    0.693145751953125
)  # so few bits that its products with small integers are exact
LN2_LOW = tl.constexpr(1.4286068203e-6)


@triton.jit
def finite_shift(maximum):
    """The maximum that is subtracted before an exponential: 0 where all is -inf, so that -inf - -inf never arises."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def exp(x):
    """e**x; in fp32 by exp2, with an error of |x| half-ulps: enough for what is summed, or rounded to a half type."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        return tl.exp2(x * LOG2E)


@triton.jit
def exp_exact(x):
    """e**x to about 2 ulp in fp32 for every x <= 0: the product with log2(e) is carried in two parts."""
    if x.dtype == tl.float64 or UNFUSED:
        return tl.exp(x)
    else:
        x = tl.where(x < -150.0, -150.0, x)
        high = x * LOG2E
        low = tl.fma(x, LOG2E, -high) + x * LOG2E_LOW
        e = tl.exp2(high)
        return tl.fma(e, low * LN2, e)


@triton.jit
def divide(a, b):
    """a / b, corrected once: Triton's own division of fp32 is off by 2 ulp, and its exact one costs registers."""
    if b.dtype == tl.float64:
        return a / b
    else:
        inverse = 1.0 / b
        quotient = a * inverse
        corrected = tl.fma(tl.fma(-b, quotient, a), inverse, quotient)
        return tl.where(
            corrected == corrected, corrected, quotient
        )  # infinities have no correction


@triton.jit
def reciprocal(b):
    """1 / b, likewise."""
    inverse = 1.0 / b
    if b.dtype == tl.float64:
        return inverse
    else:
        corrected = tl.fma(tl.fma(-b, inverse, 1.0), inverse, inverse)
        return tl.where(corrected == corrected, corrected, inverse)


@triton.jit
def log_exact(total):
    """Logarithm of a row's sum, 0 or at least a normal number, to 1 ulp: fp32's own is off by several, and fp64's takes five times as long."""
    if total.dtype == tl.float64 or UNFUSED:
        return tl.log(total)
    else:
        bits = total.to(tl.int32, bitcast=True)
        exponent = (
            bits - 0x3F2AAAAB
        ) & -0x800000  # such that what is left lies between 2/3 and 4/3
        f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
        power = (exponent >> 23).to(tl.float32)
        high = tl.fma(power, LN2_HIGH, f)
        low = f - (high - power * LN2_HIGH)  # what that sum lost
        y = high + tl.fma(power, LN2_LOW, tl.fma(log1p_tail(f), f * f, low))
        return tl.where(
            (total > 0.0) & (total < float("inf")), y, tl.where(total == 0.0, -float("inf"), total)
        )


@triton.jit
def log1p_pair(rest):
    """log(1 + rest) for rest >= 0 in two parts: what rounding 1 + rest and the logarithm itself to fp32 loses is in the second."""
    if rest.dtype == tl.float64 or UNFUSED:
        exact = tl.log(1.0 + rest.to(tl.float64))
        high = exact.to(rest.dtype)
        return high, tl.where(exact < float("inf"), exact - high.to(tl.float64), 0.0).to(rest.dtype)
    else:
        total = 1.0 + rest
        lost = (rest - (total - 1.0)) / total
        bits = total.to(tl.int32, bitcast=True)
        exponent = (bits - 0x3F2AAAAB) & -0x800000
        f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
        power = (exponent >> 23).to(tl.float32)
        high = tl.fma(power, LN2_HIGH, f)
        low = f - (high - power * LN2_HIGH)
        tail = tl.fma(power, LN2_LOW, tl.fma(log1p_tail(f), f * f, low + lost))
        result = high + tail
        return result, tail - (result - high)


@triton.jit
def log1p_tail(f):
    """(log(1 + f) - f) / f**2 for |f| <= 1/3: a polynomial fitted at Chebyshev's points, which puts log(1 + f) within 6e-9 of itself."""
    p = tl.fma(f, -0.12767342, 0.13891176)
    p = tl.fma(f, p, -0.12213734)
    p = tl.fma(f, p, 0.14025914)
    p = tl.fma(f, p, -0.16678282)
    p = tl.fma(f, p, 0.20009103)
    p = tl.fma(f, p, -0.24999849)
    p = tl.fma(f, p, 0.3333324)
    return tl.fma(f, p, -0.5)


@triton.jit
def exp_for_dtype(x, dtype: tl.constexpr):
    """The exponential of x <= 0 that a result of `dtype` is worth."""
    if dtype == tl.float32:
        return exp_exact(x)
    else:
        return exp(x)


@triton.jit
def sum_for_dtype(terms, axis: tl.constexpr, dtype: tl.constexpr):
    """The sum along an axis that a result of `dtype` is worth: for fp32 in fp64, where a row has few terms and bandwidth hides it."""
    if dtype == tl.float32 and terms.shape[axis] <= 4096:
        return tl.sum(terms.to(tl.float64), axis=axis).to(tl.float32)
    else:
        return tl.sum(terms, axis=axis)


@triton.jit
def tanh(x):
    """tanh in the precision of x; a series near 0, where the quotient of exponentials cancels."""
    decay = exp(-2.0 * tl.abs(x))
    outer = (1.0 - decay) / (1.0 + decay)
    outer = tl.where(x < 0.0, -outer, outer)
    if x.dtype == tl.float64:
        return outer
    else:
        s = x * x
        inner = x + x * s * (
            -0.33333333333 + s * (0.13333333333 + s * (-0.05396825397 + s * 0.02186948854))
        )
        return tl.where(tl.abs(x) < 0.25, inner, outer)


@triton.jit
def apply_softcap(x, softcap, CAP: tl.constexpr):
    """Soft-capped logits; -inf that stands outside of the row must be put back by the caller."""
    if CAP:
        return softcap * tanh(x / softcap)
    else:
        return x
