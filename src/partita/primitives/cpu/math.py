"""Exponential and logarithm in fp64 without branches, so that loops over states become vector code."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

# A division that may raise is a branch, and no sum may be reordered.
FLAGS: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy"}

ROUND = 6755399441055744.0  # 1.5 * 2**52: what is added to it loses its fraction, and stands in its low bits
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LEAST = -700.0  # the least exponent that is looked at


@intrinsic
def bits_of(context: Any, x: Any) -> Any:
    """The bits of an fp64 number, as int64."""
    return types.int64(types.float64), lambda _, builder, __, args: builder.bitcast(
        args[0], ir.IntType(64)
    )


@intrinsic
def from_bits(context: Any, x: Any) -> Any:
    """The fp64 number of these bits."""
    return types.float64(types.int64), lambda _, builder, __, args: builder.bitcast(
        args[0], ir.DoubleType()
    )


@intrinsic
def prefetch(context: Any, array: Any, index: Any) -> Any:
    """Asks for what lies at an index of a one-dimensional array to be brought near; an index beyond its end does no harm."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), ir.PointerType(ir.IntType(8)))
        word = ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [place.type],
            ir.FunctionType(ir.VoidType(), [place.type, word, word, word]),
        )
        builder.call(function, [place, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@njit(inline="always", **FLAGS)
def exp_floor(x: float) -> float:
    """e**x for x <= 700, but e**-700 for what lies below -700; NaN stays NaN. The error is 1 ulp or so near 0, and 1e-13 of the result at -700."""
    y = LEAST if x < LEAST else x
    shifted = y * LOG2E + ROUND
    power = shifted - ROUND
    r = y - power * LN2
    p = 2.747682443074559e-07  # the best of its degree for the relative error on ±ln 2 / 2: 3e-16
    p = p * r + 2.7634990545218676e-06
    p = p * r + 2.4801931642523332e-05
    p = p * r + 0.00019841185236791858
    p = p * r + 0.001388888851629659
    p = p * r + 0.008333333370869665
    p = p * r + 0.04166666666813624
    p = p * r + 0.16666666666611557
    p = p * r + 0.49999999999998324
    p = p * r + 1.0
    p = p * r + 1.0
    return p * from_bits((bits_of(shifted) << 52) + 0x3FF0000000000000)


@njit(inline="always", **FLAGS)
def exp(x: float) -> float:
    """The same, but 0 for what lies below -700."""
    e = exp_floor(x)
    return 0.0 if x < LEAST else e


@njit(inline="always", **FLAGS)
def log(x: float) -> float:
    """The logarithm of a positive normal number, to 2 ulp or so; NaN stays NaN."""
    bits = bits_of(x)
    exponent = (
        bits - 0x3FE6A09E667F3BCD
    ) & -0x10000000000000  # what is left lies between sqrt(1/2) and sqrt(2)
    m = from_bits(bits - exponent)
    power = float(exponent >> 52)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = 0.0844828947360414  # the best of its degree for atanh
    p = p * z + 0.09058299255327008
    p = p * z + 0.1111180798010361
    p = p * z + 0.1428570659619816
    p = p * z + 0.20000000040529906
    p = p * z + 0.33333333333256926
    return (
        power * LN2 + (2.0 * s + 2.0 * s * z * p) + (x - x)
    )  # the difference is NaN for NaN, whose bits mean nothing here
