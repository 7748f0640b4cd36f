"""Arithmetic of the kernels: exponentials, logarithms and divisions of chosen precision; tanh."""

import triton
import triton.language as tl

from ...runtime.backend import interpreting

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.925963033500e-8)  # the part of log2(e) that fp32 drops
# The interpreter rounds inside a multiply-add, but its exponential and logarithm are exact.
UNFUSED = tl.constexpr(interpreting())
LN2 = tl.constexpr(0.6931471805599453)
# ln(2) in two parts. The first has so few bits that its products with small integers are exact.
LN2_HIGH = tl.constexpr(0.693145751953125)
LN2_LOW = tl.constexpr(1.4286068203e-6)


@triton.jit
def finite_shift(maximum):
    """Return the maximum to subtract before an exponential: 0 for -inf, to avoid -inf - -inf."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def weighted(weight, value):
    """Return weight * value in fp64, with 0 for a weight of 0 and any value."""
    return tl.where(weight == 0.0, 0.0, weight.to(tl.float64) * value)


@triton.jit
def exp(x):
    """Return e**x.

    In fp32 it is computed by exp2, and the error is |x| / 2 ulp. That is enough for terms of a sum,
    and for results that are rounded to a half type.
    """
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        return tl.exp2(x * LOG2E)


@triton.jit
def exp_exact(x):
    """Return e**x for x <= 0, in fp32 to about 2 ulp.

    The product with log2(e) is carried in two parts.
    """
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
    """Return a / b with one correction step.

    Triton's own division in fp32 has an error of 2 ulp, and its exact one costs registers.
    """
    if b.dtype == tl.float64:
        return a / b
    else:
        inverse = 1.0 / b
        quotient = a * inverse
        corrected = tl.fma(tl.fma(-b, quotient, a), inverse, quotient)
        # The correction of an infinite quotient is NaN.
        return tl.where(corrected == corrected, corrected, quotient)


@triton.jit
def reciprocal(b):
    """Return 1 / b with one correction step."""
    return divide(1.0, b)


@triton.jit
def log_exact(total):
    """Return the logarithm of a row's sum, in fp32 to 1 ulp.

    The sum is 0 or at least a normal number. Triton's logarithm in fp32 has an error of several
    ulp, and that in fp64 takes five times as long.
    """
    if total.dtype == tl.float64 or UNFUSED:
        return tl.log(total)
    else:
        bits = total.to(tl.int32, bitcast=True)
        # The exponent is chosen so that the significand 1 + f lies between 2/3 and 4/3.
        exponent = (bits - 0x3F2AAAAB) & -0x800000
        f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
        power = (exponent >> 23).to(tl.float32)
        high = tl.fma(power, LN2_HIGH, f)
        low = f - (high - power * LN2_HIGH)  # the rounding error of that sum
        y = high + tl.fma(power, LN2_LOW, tl.fma(log1p_tail(f), f * f, low))
        return tl.where(
            (total > 0.0) & (total < float("inf")), y, tl.where(total == 0.0, -float("inf"), total)
        )


@triton.jit
def log1p_pair(rest):
    """Return log(1 + rest) for rest >= 0 as the sum of two numbers.

    The second has what is lost when 1 + rest and the logarithm itself are rounded to fp32.
    """
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
    """Return (log(1 + f) - f) / f**2 for |f| <= 1/3.

    The polynomial is fitted at Chebyshev points; with it log(1 + f) has an error below 6e-9.
    """
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
    """Return e**x for x <= 0 in the precision that a result of `dtype` needs."""
    if dtype == tl.float32:
        return exp_exact(x)
    else:
        return exp(x)


@triton.jit
def rounded_product(x, y):
    """Return x * y, rounded before it is added to anything.

    The compiler may put one product of two into a multiply-add with their sum, which one is not
    said, so that the sum has an order.
    """
    return tl.fma(x, y, 0.0)


@triton.jit
def row_sum(terms, PARTIALS: tl.constexpr):
    """Return the sums [ROWS] of terms [ROWS, N], whose bits do not depend on the block's layout.

    Terms are added in halves until PARTIALS are left, and then as in `tree_sum`. In the usual
    layout a thread has all terms of a partial sum.
    """
    ROWS: tl.constexpr = terms.shape[0]
    for _ in tl.static_range(16):
        if terms.shape[1] > PARTIALS:
            terms = tl.sum(tl.reshape(terms, [ROWS, 2, terms.shape[1] // 2]), axis=1)
    return tree_sum(tl.reshape(terms, [ROWS * PARTIALS]), ROWS)


@triton.jit
def tree_sum(terms, ROWS: tl.constexpr = 1):
    """Return the sums [ROWS] of rows of terms [ROWS * N], added in pairs of neighbours.

    A sum of two numbers has no order, so the bits do not follow from the layout of the terms. The
    numbers of a thread come first, then those of a warp. Those of several warps are at last in the
    lanes of each.
    """
    SEVERAL_WARPS: tl.constexpr = ROWS == 1 and terms.shape[0] > 256
    for _ in tl.static_range(13):
        if terms.shape[0] > ROWS:
            if SEVERAL_WARPS and terms.shape[0] == 16:
                terms = tl.gather(terms, tl.arange(0, 16), 0)
            terms = tl.sum(tl.reshape(terms, [terms.shape[0] // 2, 2]), axis=1)
    return terms + 0.0  # The sum of zeros is not negative.


@triton.jit
def tanh(x):
    """Return tanh in the precision of x; near 0, where the quotient cancels, by its series."""
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
def apply_softcap(x, softcap):
    """Return logits with a soft-cap or None. The caller restores the -inf of masked classes."""
    if softcap is not None:
        return softcap * tanh(x / softcap)
    else:
        return x


@triton.jit
def capped_logits(logits, mask, softcap, ACC_DTYPE: tl.constexpr):
    """Return logits in the dtype of the arithmetic, soft-capped, and -inf outside of the mask.

    Those outside of the mask were loaded as -inf.
    """
    x = logits.to(ACC_DTYPE)
    if softcap is not None:
        x = tl.where(mask, apply_softcap(x, softcap), -float("inf"))
    return x


@triton.jit
def through_softcap(grad, x, softcap):
    """Return the gradient of logits, given that of their soft-capped values x."""
    if softcap is not None:
        return grad * (1.0 - (x / softcap) * (x / softcap))
    else:
        return grad
