"""Steps of dense linear chains in linear arithmetic, in vectors of eight states.

Rows are padded to a multiple of eight. The weights and the states of the padding are 0, so that it
adds nothing. Functions of rows get pointers, and the index of the first number of a row.
"""

from __future__ import annotations

from typing import Any

from ....primitives.cpu.batch import LOWEST
from ....primitives.cpu.jit import ZERO, jit
from ....primitives.cpu.math import bits_of, from_bits
from ....primitives.cpu.vectors import (
    WIDTH,
    add,
    exp_of,
    fill,
    larger,
    load,
    load_one,
    maximum_of,
    multiply,
    multiply_add,
    pointer_to,
    store,
    sum_of,
)

MOST_IN_COLUMNS = 64  # states whose matrix stays in the cache that is nearest to the processor
# A state is scaled only when its maximum leaves this range. Until then no step waits for it.
SMALL, LARGE = 2.0**-60, 2.0**60


@jit
def exp_row(rows: Any, first: int, width: int, highest: float) -> None:
    """Replace the numbers of a row by their exponentials relative to the highest one."""
    shift = fill(-highest)
    for i in range(first, first + width, WIDTH):
        store(rows, i, exp_of(add(load(rows, i), shift)))


@jit
def dot_of_rows(x: Any, y: Any, first: int, width: int) -> float:
    """Return the sum of products of two rows."""
    total = fill(0.0)
    for i in range(first, first + width, WIDTH):
        total = multiply_add(load(x, i), load(y, i), total)
    return sum_of(total)


@jit
def multiply_rows(x: Any, y: Any, first: int, width: int, factor: float, result: Any) -> None:
    """Write the products of two rows and a factor."""
    scale = fill(factor)
    for i in range(first, first + width, WIDTH):
        store(result, i, multiply(multiply(load(x, i), load(y, i)), scale))


@jit
def scale_row(rows: Any, first: int, width: int, factor: float) -> None:
    """Multiply a row by a factor."""
    scale = fill(factor)
    for i in range(first, first + width, WIDTH):
        store(rows, i, multiply(load(rows, i), scale))


@jit
def product(states: Any, first: int, weights: Any, C: int, width: int, result: Any) -> None:
    """Write the product of a row of the states and a matrix `[C, W]` to that row of the result."""
    if C > MOST_IN_COLUMNS:
        product_by_rows(states, first, weights, C, width, result)
        return
    j = ZERO
    while width - j >= 4 * WIDTH:
        four_columns_of_product(states, first, weights, C, width, j, result)
        j += 4 * WIDTH
    while j < width:
        column_of_product(states, first, weights, C, width, j, result)
        j += WIDTH


@jit
def four_columns_of_product(
    states: Any, first: int, weights: Any, C: int, width: int, j: int, result: Any
) -> None:
    """Write four vectors of a product from column j on, by two partial sums of each."""
    a, b, c, d = fill(0.0), fill(0.0), fill(0.0), fill(0.0)
    e, f, g, h = fill(0.0), fill(0.0), fill(0.0), fill(0.0)
    at = j
    for i in range(first, first + C - C % 2, 2):
        x, y, then = load_one(states, i), load_one(states, i + 1), at + width
        a = multiply_add(x, load(weights, at), a)
        b = multiply_add(x, load(weights, at + WIDTH), b)
        c = multiply_add(x, load(weights, at + 2 * WIDTH), c)
        d = multiply_add(x, load(weights, at + 3 * WIDTH), d)
        e = multiply_add(y, load(weights, then), e)
        f = multiply_add(y, load(weights, then + WIDTH), f)
        g = multiply_add(y, load(weights, then + 2 * WIDTH), g)
        h = multiply_add(y, load(weights, then + 3 * WIDTH), h)
        at += 2 * width
    if C % 2:
        x = load_one(states, first + C - 1)
        a = multiply_add(x, load(weights, at), a)
        b = multiply_add(x, load(weights, at + WIDTH), b)
        c = multiply_add(x, load(weights, at + 2 * WIDTH), c)
        d = multiply_add(x, load(weights, at + 3 * WIDTH), d)
    store(result, first + j, add(a, e))
    store(result, first + j + WIDTH, add(b, f))
    store(result, first + j + 2 * WIDTH, add(c, g))
    store(result, first + j + 3 * WIDTH, add(d, h))


@jit
def column_of_product(
    states: Any, first: int, weights: Any, C: int, width: int, j: int, result: Any
) -> None:
    """Write one vector of a product from column j on, by four partial sums."""
    a, b, c, d = fill(0.0), fill(0.0), fill(0.0), fill(0.0)
    at, whole = j, first + C - C % 4
    for i in range(first, whole, 4):
        a = multiply_add(load_one(states, i), load(weights, at), a)
        b = multiply_add(load_one(states, i + 1), load(weights, at + width), b)
        c = multiply_add(load_one(states, i + 2), load(weights, at + 2 * width), c)
        d = multiply_add(load_one(states, i + 3), load(weights, at + 3 * width), d)
        at += 4 * width
    for i in range(whole, first + C):
        a = multiply_add(load_one(states, i), load(weights, at), a)
        at += width
    store(result, first + j, add(add(a, b), add(c, d)))


@jit
def product_by_rows(states: Any, first: int, weights: Any, C: int, width: int, result: Any) -> None:
    """Write a product four rows of the matrix at a time, so that it is read in its order."""
    for j in range(first, first + width, WIDTH):
        store(result, j, fill(0.0))
    at, whole = 0, first + C - C % 4
    for i in range(first, whole, 4):
        a, b = load_one(states, i), load_one(states, i + 1)
        c, d = load_one(states, i + 2), load_one(states, i + 3)
        for j in range(0, width, WIDTH):
            x = multiply_add(a, load(weights, at + j), load(result, first + j))
            y = multiply(b, load(weights, at + width + j))
            x = multiply_add(c, load(weights, at + 2 * width + j), x)
            y = multiply_add(d, load(weights, at + 3 * width + j), y)
            store(result, first + j, add(x, y))
        at += 4 * width
    for i in range(whole, first + C):
        a = load_one(states, i)
        for j in range(0, width, WIDTH):
            store(
                result, first + j, multiply_add(a, load(weights, at + j), load(result, first + j))
            )
        at += width


@jit
def enter_token(sums: Any, scores: Any, first: int, width: int, states: Any) -> float:
    """Write the state of a token to the row after its own, and return its maximum."""
    highest = fill(LOWEST)
    for i in range(first, first + width, WIDTH):
        state = multiply(load(sums, i), load(scores, i))
        store(states, i + width, state)
        highest = larger(state, highest)
    return maximum_of(highest)


@jit
def scan_linear(weights: Any, scores: Any, sums: Any, states: Any, is_first: bool) -> int:
    """Scan K tokens in linear arithmetic.

    Args:
        weights: the weights of all steps, `[C, W]`.
        scores: exponentials of the scores of the tokens, `[K, W]`.
        sums: the result before the emission of each token, `[K, W]`.
        states: the state before the tokens and the result for each, `[K + 1, W]`.
        is_first: whether the first token starts the scan.

    Return the sum of the exponents of 2 that the states were divided by.
    """
    C, width = weights.shape
    matrix, token = pointer_to(weights), pointer_to(scores)
    entered, state, total = pointer_to(sums), pointer_to(states), 0
    for first in range(0, scores.size, width):
        if is_first and first == 0:
            for i in range(0, width, WIDTH):
                store(entered, i, fill(1.0))
        else:
            product(state, first, matrix, C, width, entered)
        highest = enter_token(entered, token, first, width, state)
        if (highest < SMALL or highest > LARGE) and highest > 0.0:
            exponent = (bits_of(highest) >> 52) - 1023
            scale_row(state, first + width, width, from_bits((1023 - exponent) << 52))
            total += exponent
    return total


@jit
def add_outer_products(left: Any, right: Any, first: int, last: int, counts: Any) -> None:
    """Add the outer products of the rows first, ..., last - 1 of two arrays to `[W, W]`."""
    width = counts.shape[1]
    x, y, sums = pointer_to(left), pointer_to(right), pointer_to(counts)
    for i in range(0, width, 4):
        j = ZERO
        while j + 2 * WIDTH <= width:
            add_wide_block(x, y, first * width, last * width, width, i, j, sums)
            j += 2 * WIDTH
        if j < width:
            add_narrow_block(x, y, first * width, last * width, width, i, j, sums)


@jit
def add_wide_block(
    left: Any, right: Any, first: int, last: int, width: int, i: int, j: int, counts: Any
) -> None:
    """Add outer products to four rows and two vectors of the counts."""
    at = i * width + j
    a, b = load(counts, at), load(counts, at + WIDTH)
    c, d = load(counts, at + width), load(counts, at + width + WIDTH)
    e, f = load(counts, at + 2 * width), load(counts, at + 2 * width + WIDTH)
    g, h = load(counts, at + 3 * width), load(counts, at + 3 * width + WIDTH)
    for k in range(first, last, width):
        x, y = load(right, k + j), load(right, k + j + WIDTH)
        w = load_one(left, k + i)
        a, b = multiply_add(w, x, a), multiply_add(w, y, b)
        w = load_one(left, k + i + 1)
        c, d = multiply_add(w, x, c), multiply_add(w, y, d)
        w = load_one(left, k + i + 2)
        e, f = multiply_add(w, x, e), multiply_add(w, y, f)
        w = load_one(left, k + i + 3)
        g, h = multiply_add(w, x, g), multiply_add(w, y, h)
    store(counts, at, a)
    store(counts, at + WIDTH, b)
    store(counts, at + width, c)
    store(counts, at + width + WIDTH, d)
    store(counts, at + 2 * width, e)
    store(counts, at + 2 * width + WIDTH, f)
    store(counts, at + 3 * width, g)
    store(counts, at + 3 * width + WIDTH, h)


@jit
def add_narrow_block(
    left: Any, right: Any, first: int, last: int, width: int, i: int, j: int, counts: Any
) -> None:
    """Add outer products to four rows and one vector of the counts."""
    at = i * width + j
    a, b = load(counts, at), load(counts, at + width)
    c, d = load(counts, at + 2 * width), load(counts, at + 3 * width)
    for k in range(first, last, width):
        x = load(right, k + j)
        a = multiply_add(load_one(left, k + i), x, a)
        b = multiply_add(load_one(left, k + i + 1), x, b)
        c = multiply_add(load_one(left, k + i + 2), x, c)
        d = multiply_add(load_one(left, k + i + 3), x, d)
    store(counts, at, a)
    store(counts, at + width, b)
    store(counts, at + 2 * width, c)
    store(counts, at + 3 * width, d)
