"""Vectors of eight numbers agree with NumPy, and touch no other memory."""

import numpy as np
import pytest

pytest.importorskip("numba")
import numba

from partita.primitives.cpu import vectors
from partita.primitives.cpu.math import exp
from partita.primitives.cpu.vectors import WIDTH, copy_numbers, load, pointer_to, store

rng = np.random.default_rng(0)


@numba.njit
def exponentials(x, vector, scalar):
    for i in range(0, len(x), WIDTH):
        store(pointer_to(vector), i, vectors.exp_of(load(pointer_to(x), i)))
    for i in range(len(x)):
        scalar[i] = exp(x[i])


@numba.njit
def arithmetic(x, y, z, result):
    a, b, c = load(pointer_to(x), 0), load(pointer_to(y), 0), load(pointer_to(z), 0)
    into = pointer_to(result)
    store(into, 0, vectors.add(a, b))
    store(into, 8, vectors.multiply(a, b))
    store(into, 16, vectors.multiply_add(a, b, c))
    store(into, 24, vectors.larger(a, b))
    store(into, 32, vectors.load_one(pointer_to(x), 3))
    store(into, 40, vectors.fill(x[5]))
    return vectors.sum_of(a), vectors.maximum_of(a)


@numba.njit
def copy(source, first, target, start, size):
    copy_numbers(pointer_to(source), first, pointer_to(target), start, size)


def test_exp_agrees_with_the_scalar_one_and_with_numpy() -> None:
    x = np.concatenate([rng.uniform(-720, 0, 5000), rng.normal(size=2991), [0.0]])
    x = np.append(x, [-np.inf, np.nan, -700.0, -700.1, -1e300, 1.0, 700.0, -0.0])
    vector, scalar = np.empty_like(x), np.empty_like(x)
    exponentials(x, vector, scalar)
    np.testing.assert_allclose(vector, np.where(x < -700, 0, np.exp(x)), rtol=3e-13)
    # The two may differ in whether a product and a sum are rounded once.
    np.testing.assert_allclose(vector, scalar, rtol=1e-13)


def test_arithmetic() -> None:
    x, y, z = rng.normal(size=(3, WIDTH))
    result = np.empty(6 * WIDTH)
    total, highest = arithmetic(x, y, z, result)
    expected = (x + y, x * y, x * y + z, np.maximum(x, y), np.full(8, x[3]), np.full(8, x[5]))
    np.testing.assert_allclose(result.reshape(6, 8), np.stack(expected), rtol=1e-14, atol=1e-15)
    assert total == pytest.approx(x.sum(), rel=1e-14) and highest == x.max()
    x[2], y[4] = np.nan, np.nan
    arithmetic(x, y, z, result)
    assert result[26] == y[2] and np.isnan(result[28])


@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("target", ["float32", "float64"])
def test_copies_touch_nothing_else(source: str, target: str) -> None:
    numbers = rng.normal(size=64).astype(source)
    for size in (0, 1, 7, 8, 9, 15, 16, 17, 40):
        result = np.full(64, 7.0, target)
        copy(numbers, 5, result, 3, size)
        expected = np.full(64, 7.0, target)
        expected[3 : 3 + size] = numbers[5 : 5 + size]
        np.testing.assert_array_equal(result, expected)


def test_other_arrays_are_refused() -> None:
    with pytest.raises(numba.TypingError, match="contiguous array of float32 or float64"):
        copy(np.zeros((4, 4))[:, 1], 0, np.zeros(4), 0, 1)
    with pytest.raises(numba.TypingError, match="contiguous array of float32 or float64"):
        copy(np.zeros(4, np.int64), 0, np.zeros(4), 0, 1)
