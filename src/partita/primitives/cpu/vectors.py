"""Vectors of eight fp64 numbers, for loops that Numba does not turn into good vector code.

Without them, LLVM keeps the running sums of a product in memory, and compares the addresses of the
arrays before each row. A processor with shorter registers works on a vector in two or four parts.
An index counts the numbers of a contiguous array of any rank. It may not be negative.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic, models, register_model
from numba.np.arrayobj import make_array

WIDTH = 8
VECTOR = ir.VectorType(ir.DoubleType(), WIDTH)
ANY = ir.Constant(VECTOR, ir.Undefined)


class VectorType(types.Type):  # type: ignore[misc]
    """The type of a vector in Numba."""

    def __init__(self) -> None:
        super().__init__(name=f"float64x{WIDTH}")


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    """A vector is one value of LLVM."""

    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, VECTOR)


vector = VectorType()


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(make_array(array_type)(context, builder, array).data, [index])


def _check(array: Any) -> None:
    if array.layout != "C" or array.dtype != types.float64:
        raise TypingError(f"expected a contiguous array of float64, got {array}")


def _filled(builder: Any, number: Any) -> Any:
    index = ir.IntType(32)
    first = builder.insert_element(ANY, number, ir.Constant(index, 0))
    return builder.shuffle_vector(
        first, ANY, ir.Constant(ir.VectorType(index, WIDTH), [0] * WIDTH)
    )


@intrinsic
def load(context: Any, array: Any, index: Any) -> Any:
    """Return the vector of the eight numbers from an index on."""
    _check(array)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], *args)
        return builder.load(builder.bitcast(address, ir.PointerType(VECTOR)), align=8)

    return vector(array, types.intp), generate


@intrinsic
def store(context: Any, array: Any, index: Any, value: Any) -> Any:
    """Write a vector to the eight numbers from an index on."""
    _check(array)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], *args[:2])
        builder.store(args[2], builder.bitcast(address, ir.PointerType(VECTOR)), align=8)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@intrinsic
def fill(context: Any, number: Any) -> Any:
    """Return a vector that has a number in all places."""
    return vector(types.float64), lambda _, builder, __, args: _filled(builder, args[0])


@intrinsic
def load_one(context: Any, array: Any, index: Any) -> Any:
    """Return a vector that has the number at an index in all places."""
    _check(array)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], *args)
        return _filled(builder, builder.load(address))

    return vector(array, types.intp), generate


@intrinsic
def add(context: Any, x: Any, y: Any) -> Any:
    """Return x + y."""
    return vector(vector, vector), lambda _, builder, __, args: builder.fadd(*args)


@intrinsic
def multiply_add(context: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z, rounded once where the processor has such an instruction."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = builder.fmul(args[0], args[1], flags=("contract",))
        return builder.fadd(product, args[2], flags=("contract",))

    return vector(vector, vector, vector), generate


@intrinsic
def larger(context: Any, x: Any, y: Any) -> Any:
    """Return the larger number in each place, and y where x is NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), generate


@intrinsic
def maximum_of(context: Any, x: Any) -> Any:
    """Return the maximum of the eight numbers, none of which is NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, index = args[0], ir.IntType(32)
        for half in (4, 2, 1):
            order = [min(place + half, WIDTH - 1) for place in range(WIDTH)]
            moved = builder.shuffle_vector(
                value, ANY, ir.Constant(ir.VectorType(index, WIDTH), order)
            )
            value = builder.select(builder.fcmp_ordered(">", moved, value), moved, value)
        return builder.extract_element(value, ir.Constant(index, 0))

    return types.float64(vector), generate
