"""Vectors of eight fp64 numbers, for loops that Numba does not turn into good vector code.

Without them, LLVM keeps the running sums of a product in memory, and compares the addresses of the
arrays before each row. A processor with shorter registers works on a vector in two or four parts.

Vectors are loaded from pointers, and an index counts numbers from there. A function that gets an
array counts a reference and copies the array's shape and strides, which takes as long as a step of
few states; a pointer is one register. It holds no reference: the caller keeps the array alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import TypingError, types
from numba.extending import intrinsic, models, register_model

from ...runtime.private_names import numba_make_array
from .jit import jit
from .math import EXP_POLYNOMIAL, LEAST, LN2, LOG2E, ROUND

WIDTH = 8
VECTOR = ir.VectorType(ir.DoubleType(), WIDTH)
ANY = ir.Constant(VECTOR, ir.Undefined)
INDEX = ir.IntType(32)


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


def _vectors_at(context: Any, builder: Any, pointer_type: Any, pointer: Any, index: Any) -> Any:
    """Return the address of eight numbers from an index on, and their type."""
    kind = ir.VectorType(context.get_value_type(pointer_type.dtype), WIDTH)
    address = builder.gep(pointer, [index])
    return builder.bitcast(address, ir.PointerType(kind)), kind


@intrinsic
def pointer_to(context: Any, array: Any) -> Any:
    """Return a pointer to the first number of a contiguous array."""
    if array.layout != "C" or array.dtype not in (types.float32, types.float64):
        raise TypingError(f"expected a contiguous array of float32 or float64, got {array}")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return numba_make_array()(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), generate


def _filled(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ANY, number, ir.Constant(INDEX, 0))
    return _shuffled(builder, first, [0] * WIDTH)


def _shuffled(builder: Any, value: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(value, ANY, ir.Constant(ir.VectorType(INDEX, WIDTH), order))


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _folded(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the eight numbers in pairs: 0 and 4, 1 and 5, and so on."""
    for half in (4, 2, 1):
        order = [min(i + half, WIDTH - 1) for i in range(WIDTH)]
        value = combine(value, _shuffled(builder, value, order))
    return builder.extract_element(value, ir.Constant(INDEX, 0))


def _fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z, for which LLVM may choose one instruction."""
    return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))


@intrinsic
def load(context: Any, pointer: Any, index: Any) -> Any:
    """Return the vector of the eight numbers from an index on; fp32 becomes fp64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, kind = _vectors_at(context, builder, signature.args[0], *args)
        value = builder.load(address, align=4)
        return value if kind == VECTOR else builder.fpext(value, VECTOR)

    return vector(pointer, types.intp), generate


@intrinsic
def store(context: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Write a vector to the eight numbers from an index on, rounded if these are fp32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, kind = _vectors_at(context, builder, signature.args[0], *args[:2])
        value = args[2] if kind == VECTOR else builder.fptrunc(args[2], kind)
        builder.store(value, address, align=4)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, vector), generate


@intrinsic
def fill(context: Any, number: Any) -> Any:
    """Return a vector that has a number in all places."""
    return vector(types.float64), lambda _, builder, __, args: _filled(builder, args[0])


@intrinsic
def load_one(context: Any, pointer: Any, index: Any) -> Any:
    """Return a vector that has the fp64 number at an index in all places."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _filled(builder, builder.load(builder.gep(args[0], [args[1]])))

    return vector(pointer, types.intp), generate


@intrinsic
def add(context: Any, x: Any, y: Any) -> Any:
    """Return x + y."""
    return vector(vector, vector), lambda _, builder, __, args: builder.fadd(*args)


@intrinsic
def multiply(context: Any, x: Any, y: Any) -> Any:
    """Return x * y."""
    return vector(vector, vector), lambda _, builder, __, args: builder.fmul(*args)


@intrinsic
def multiply_add(context: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z, rounded once where the processor has such an instruction."""
    return vector(vector, vector, vector), lambda _, builder, __, args: _fused(builder, *args)


@intrinsic
def times_rows(context: Any, x: Any, pointer: Any, first: Any, stride: Any) -> Any:
    """Return the product of a vector and eight rows of a matrix, by four partial sums.

    Args:
        x: the vector; it stays in its register.
        pointer: to the matrix.
        first: the index of the first number of the first row that counts.
        stride: the numbers from a row to the next.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, pointer, index, stride = args
        sums: list[Any] = []
        for i in range(WIDTH):
            row = builder.load(
                _vectors_at(context, builder, signature.args[1], pointer, index)[0], align=4
            )
            number = _shuffled(builder, x, [i] * WIDTH)
            if i < 4:
                sums.append(builder.fmul(number, row))
            else:
                sums[i - 4] = _fused(builder, number, row, sums[i - 4])
            index = builder.add(index, stride)
        a, b, c, d = sums
        return builder.fadd(builder.fadd(a, b), builder.fadd(c, d))

    return vector(vector, pointer, types.intp, types.intp), generate


@intrinsic
def larger(context: Any, x: Any, y: Any) -> Any:
    """Return the larger number in each place, and y where x is NaN."""
    return vector(vector, vector), lambda _, builder, __, args: _larger(builder, *args)


@intrinsic
def maximum_of(context: Any, x: Any) -> Any:
    """Return the maximum of the eight numbers, none of which is NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _folded(builder, args[0], lambda value, moved: _larger(builder, moved, value))

    return types.float64(vector), generate


@intrinsic
def sum_of(context: Any, x: Any) -> Any:
    """Return the sum of the eight numbers, in pairs: 0 + 4, 1 + 5, and so on."""
    return types.float64(vector), lambda _, builder, __, args: _folded(
        builder, args[0], builder.fadd
    )


@intrinsic
def exp_of(context: Any, x: Any) -> Any:
    """Return e**x as `math.exp` does: for x <= 700, and 0 for x below -700; NaN stays NaN."""
    words = ir.VectorType(ir.IntType(64), WIDTH)

    def number(value: float) -> Any:
        return ir.Constant(VECTOR, [value] * WIDTH)

    def word(value: int) -> Any:
        return ir.Constant(words, [value] * WIDTH)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        below = builder.fcmp_ordered("<", args[0], number(LEAST))
        y = builder.select(below, number(LEAST), args[0])
        shifted = _fused(builder, y, number(LOG2E), number(ROUND))
        power = builder.fsub(shifted, number(ROUND))
        r, result = _fused(builder, power, number(-LN2), y), number(EXP_POLYNOMIAL[0])
        for coefficient in EXP_POLYNOMIAL[1:]:
            result = _fused(builder, result, r, number(coefficient))
        bits = builder.shl(builder.bitcast(shifted, words), word(52))
        scale = builder.bitcast(builder.add(bits, word(0x3FF0000000000000)), VECTOR)
        return builder.select(below, number(0.0), builder.fmul(result, scale))

    return vector(vector), generate


@jit
def copy_numbers(source: Any, first: int, target: Any, start: int, size: int) -> None:
    """Copy contiguous numbers from an index of a pointer to an index of another.

    The last vector may overlap the one before it.
    """
    if size < WIDTH:
        for i in range(size):
            target[start + i] = source[first + i]
        return
    for i in range(0, size - WIDTH + 1, WIDTH):
        store(target, start + i, load(source, first + i))
    if size % WIDTH:
        store(target, start + size - WIDTH, load(source, first + size - WIDTH))
