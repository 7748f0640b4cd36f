"""Exponential and logarithm in fp64 without branches, so that loops become vector code."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...runtime.private_names import numba_make_array
from .jit import jit

# 1.5 * 2**52: a number that is added to it loses its fraction, and its integer is in the low bits.
ROUND = 6755399441055744.0
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LEAST = -700.0  # the least exponent that is computed
# The best polynomial of its degree for the relative error of e**x on ±ln 2 / 2, which is 3e-16.
EXP_POLYNOMIAL = (
    2.747682443074559e-07,
    2.7634990545218676e-06,
    2.4801931642523332e-05,
    0.00019841185236791858,
    0.001388888851629659,
    0.008333333370869665,
    0.04166666666813624,
    0.16666666666611557,
    0.49999999999998324,
    1.0,
    1.0,
)


@intrinsic
def bits_of(context: Any, x: Any) -> Any:
    """Return the bits of an fp64 number as int64."""
    return types.int64(types.float64), lambda _, builder, __, args: builder.bitcast(
        args[0], ir.IntType(64)
    )


@intrinsic
def from_bits(context: Any, x: Any) -> Any:
    """Return the fp64 number that has these bits."""
    return types.float64(types.int64), lambda _, builder, __, args: builder.bitcast(
        args[0], ir.DoubleType()
    )


@intrinsic
def prefetch(context: Any, array: Any, index: Any) -> Any:
    """Prefetch the element at an index of a one-dimensional array.

    The index may lie beyond the end of the array.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = numba_make_array()(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), ir.PointerType(ir.IntType(8)))
        word = ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [address.type],
            ir.FunctionType(ir.VoidType(), [address.type, word, word, word]),
        )
        builder.call(function, [address, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@jit(forceinline=True)
def exp_floor(x: float) -> float:
    """Return e**x for x <= 700, and e**-700 for x below -700; NaN stays NaN.

    The error is about 1 ulp near 0, and 1e-13 of the result at -700.
    """
    y = LEAST if x < LEAST else x
    shifted = y * LOG2E + ROUND
    power = shifted - ROUND
    r = y - power * LN2
    c, p = EXP_POLYNOMIAL, EXP_POLYNOMIAL[0]
    p = p * r + c[1]
    p = p * r + c[2]
    p = p * r + c[3]
    p = p * r + c[4]
    p = p * r + c[5]
    p = p * r + c[6]
    p = p * r + c[7]
    p = p * r + c[8]
    p = p * r + c[9]
    p = p * r + c[10]
    return p * from_bits((bits_of(shifted) << 52) + 0x3FF0000000000000)


@jit(forceinline=True)
def exp(x: float) -> float:
    """Return e**x for x <= 700, and 0 for x below -700; NaN stays NaN."""
    e = exp_floor(x)
    return 0.0 if x < LEAST else e


@jit(forceinline=True)
def log(x: float) -> float:
    """Return the logarithm of a positive normal number to about 2 ulp; NaN stays NaN."""
    bits = bits_of(x)
    # The mantissa m lies between sqrt(1/2) and sqrt(2).
    exponent = (bits - 0x3FE6A09E667F3BCD) & -0x10000000000000
    m = from_bits(bits - exponent)
    power = float(exponent >> 52)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = 0.0844828947360414  # the polynomial is the best of its degree for atanh
    p = p * z + 0.09058299255327008
    p = p * z + 0.1111180798010361
    p = p * z + 0.1428570659619816
    p = p * z + 0.20000000040529906
    p = p * z + 0.33333333333256926
    # The bits of a NaN mean nothing here, and x - x makes the result NaN.
    return power * LN2 + (2.0 * s + 2.0 * s * z * p) + (x - x)
