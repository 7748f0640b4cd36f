"""Log Z of dense linear chains and its gradient in linear arithmetic, parallel in time.

Each sequence is cut in the middle. Alpha runs over the first half and beta over the second, on two
threads, and log Z is formed where they meet. Like alpha, beta includes the emission of its token.
For the gradient each continues through the other half. The posteriors of each token are divided by
their sum, so no error adds up over the tokens.

A step is a product with exp(transitions) in fp64, and a state is scaled by powers of two. Rows are
padded with zeros to a multiple of `WIDTH`. Functions of rows get pointers, and the index of the
first number of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF, LOWEST, as_array, as_steps
from ....primitives.cpu.half import load_row
from ....primitives.cpu.jit import ZERO, jit
from ....primitives.cpu.math import LN2, bits_of, from_bits
from ....primitives.cpu.vectors import (
    WIDTH,
    add,
    copy_numbers,
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
    times_rows,
)
from ...chain.cpu.steps import sequences_of, zero_rows
from ..common import LinearChainPotentials

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
def scan_vectors(
    matrix: Any, scores: Any, sums: Any, states: Any, size: int, width: int, is_first: bool
) -> int:
    """Scan tokens as `scan_linear` does, where one or two vectors hold the states of a token.

    They stay in registers: a step that loads its state waits until that is written. With one
    vector, the second is the same.
    """
    second = width - WIDTH
    total, low, high = 0, load(states, 0), load(states, second)
    for first in range(0, size, width):
        if is_first and first == 0:
            low, high = fill(1.0), fill(1.0)
        elif second:
            x, y, half = low, high, WIDTH * width
            low = add(times_rows(x, matrix, 0, width), times_rows(y, matrix, half, width))
            high = times_rows(x, matrix, WIDTH, width)
            high = add(high, times_rows(y, matrix, half + WIDTH, width))
        else:
            low = times_rows(low, matrix, 0, width)
            high = low
        store(sums, first, low)
        store(sums, first + second, high)
        low = multiply(low, load(scores, first))
        high = multiply(high, load(scores, first + second))
        highest = maximum_of(larger(low, high))
        if (highest < SMALL or highest > LARGE) and highest > 0.0:
            exponent = (bits_of(highest) >> 52) - 1023
            factor = fill(from_bits((1023 - exponent) << 52))
            low, high = multiply(low, factor), multiply(high, factor)
            total += exponent
        store(states, first + width, low)
        store(states, first + width + second, high)
    return total


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
    if width <= 2 * WIDTH:
        return scan_vectors(matrix, token, entered, state, scores.size, width, is_first)
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


BLOCK = 32  # tokens; a call of a function with many arrays takes as long as a step


class DenseArrays(NamedTuple):
    """A batch of dense linear chains with constant transitions as arrays.

    Fields:
        lengths: `[N]` int64, in range even where a length is invalid.
        middle: the number of tokens of which alpha is saved, `[N]`; beta is saved of the others.
        emissions: `Steps` `[T, N, C]`; not read where there are symbols.
        symbols: the row of the table that has the emissions of a token, `[N, T]`; or empty.
        table: exp(emissions - their maximum) of each symbol, `[K, W]` fp64.
        maxima: `[K]` fp64.
        start, end: `[N, C]` fp64; with symbols start is an exponential, and end is not read.
        weights: exp(transitions - shift), then their transpose, `[2, C, W]` fp64; `[2, W, W]`
            if at most two vectors hold a row.
        shift: the maximum of the transitions.
    """

    lengths: Any
    middle: Any
    emissions: Any
    symbols: Any
    table: Any
    maxima: Any
    start: Any
    end: Any
    weights: Any
    shift: float


def dense_arrays(chain: LinearChainPotentials, tokens: Tensor) -> DenseArrays:
    """Return the arrays of a batch of sequences with `tokens` `[N]` tokens."""
    emissions, transitions, start, end, _ = chain
    N, C = emissions.shape[1:]
    zeros = torch.zeros(N, C, dtype=torch.float64, device="cpu")
    width = -(-max(C, 1) // WIDTH) * WIDTH
    rows = width if width <= 2 * WIDTH else C  # `scan_vectors` reads all rows of a square
    weights = torch.zeros((2, rows, width), dtype=torch.float64, device="cpu")
    shift = float(transitions.max()) if C else 0.0
    matrix = (transitions.detach().double() - shift).exp()
    weights[:, :C, :C] = torch.stack([matrix, matrix.T])
    return DenseArrays(
        tokens.contiguous().numpy(),
        ((tokens + 1) // 2).numpy(),
        as_steps(emissions),
        np.empty((0, 0), np.int64),
        np.empty((0, width)),
        np.empty(0),
        as_array(zeros if start is None else start),
        as_array(zeros if end is None else end),
        weights.numpy(),  # PyTorch's memory starts on a cache line
        shift,
    )


@jit
def copy_row(source: Any, target: Any) -> None:
    """Copy a row; an assignment of slices takes seconds to compile."""
    for c in range(len(target)):
        target[c] = source[c]


@jit
def look_up_tokens(chain: Any, first: int, by: int, n: int, scores: Any) -> float:
    """Write the rows of the symbols of tokens as `load_tokens` does."""
    width, total = scores.shape[1], 0.0
    table, rows = pointer_to(chain.table), pointer_to(scores)
    for k in range(len(scores)):
        t = first + k * by
        symbol = chain.symbols[n, t]
        copy_numbers(table, symbol * width, rows, k * width, width)
        total += chain.maxima[symbol]
        if t == 0:
            for c in range(chain.start.shape[1]):
                scores[k, c] *= chain.start[n, c]
    return total


@jit
def load_tokens(chain: Any, first: int, by: int, n: int, scores: Any) -> float:
    """Write exp(score - maximum) of tokens first, first + by, ..., `[K, W]`, with zeros as padding.

    The scores include those of the ends. Return the sum of the maxima.
    """
    emissions, C, width, total = chain.emissions, chain.start.shape[1], scores.shape[1], 0.0
    strides, rows = emissions.strides, pointer_to(scores)
    if len(chain.symbols):
        return look_up_tokens(chain, first, by, n, scores)
    for k in range(len(scores)):
        t = first + k * by
        base = t * strides[0] + n * strides[1]
        store(rows, (k + 1) * width - WIDTH, fill(-INF))
        if strides[2] == 1 and not len(emissions.words):
            copy_numbers(pointer_to(emissions.numbers), base, rows, k * width, C)
        else:
            load_row(emissions, base, strides[2], scores[k, :C])
        if t == 0:
            for c in range(C):
                scores[k, c] += chain.start[n, c]
        if t == chain.lengths[n] - 1:
            for c in range(C):
                scores[k, c] += chain.end[n, c]
        found = fill(LOWEST)
        for i in range(k * width, (k + 1) * width, WIDTH):
            found = larger(load(rows, i), found)
        highest = maximum_of(found)
        total += highest if highest > LOWEST else -INF
        exp_row(rows, k * width, width, highest)
    return total


@jit
def load_states(source: Any, row: int, by: int, states: Any) -> None:
    """Copy rows row, row + by, ... of an array `[A, B, C]` to the states, and leave the padding."""
    C, width = source.shape[2], states.shape[1]
    numbers, target = pointer_to(source), pointer_to(states)
    for k in range(len(states)):
        copy_numbers(numbers, (row + k * by) * C, target, k * width, C)


@jit
def store_states(states: Any, row: int, by: int, target: Any) -> None:
    """Write the states to rows row, row + by, ... of an array `[A, B, C]`."""
    C, width = target.shape[2], states.shape[1]
    source, numbers = pointer_to(states), pointer_to(target)
    for k in range(len(states)):
        copy_numbers(source, k * width, numbers, (row + k * by) * C, C)


@jit(nogil=True)
def forward_kernel(halves: Any, chain: Any, saved: Any, meeting: Any, log_scale: Any) -> None:
    """Scan half h % 2 of sequence h // 2: alpha forwards over the first, beta backwards.

    Write the state at the middle, `meeting` `[2N, W]`, the log of its scale, `[2N]`, and to `saved`
    all states, `[N, T, C]`, unless it is empty: those of a sequence are next to each other.
    """
    width = chain.weights.shape[2]
    scores, sums = np.empty((BLOCK, width)), np.empty((BLOCK, width))
    states = np.zeros((BLOCK + 1, width))
    for half in halves:
        n, backward = half // 2, half % 2
        length, middle, offset = chain.lengths[n], chain.middle[n], 0.0
        first, by = (length - 1, -1) if backward else (0, 1)
        tokens = length - middle if backward else middle
        for k in range(0, tokens, BLOCK):
            t, K = first + k * by, min(BLOCK, tokens - k)
            offset += load_tokens(chain, t, by, n, scores[:K])
            weights = chain.weights[backward]
            exponent = scan_linear(weights, scores[:K], sums[:K], states[: K + 1], k == 0)
            offset += exponent * LN2
            if len(saved):
                store_states(states[1 : K + 1], n * saved.shape[1] + t, by, saved)
            copy_row(states[K], states[0])
        log_scale[half] = offset + chain.shift * max(tokens - 1, 0)
        copy_row(states[0], meeting[half])


@jit(nogil=True)
def join_kernel(sequences: Any, chain: Any, meeting: Any, log_scale: Any, logz: Any) -> None:
    """Compute log Z where alpha and beta meet."""
    C, width = chain.weights.shape[1:]
    rows, entered = pointer_to(meeting), np.ones(meeting.shape)
    for n in sequences:
        alpha, beta, offset, total = 2 * n, 2 * n + 1, log_scale[2 * n], 0.0
        if chain.middle[n] < chain.lengths[n]:
            offset += log_scale[beta] + chain.shift
            weights = pointer_to(chain.weights[1])
            product(rows, beta * width, weights, C, width, pointer_to(entered))
        for c in range(C):
            total += meeting[alpha, c] * entered[beta, c]
        logz[n] = offset + (-INF if total == 0.0 else np.log(total))


@jit
def write_gradient(
    weighted: Any, t: int, by: int, n: int, length: int, d_emissions: Any, d_ends: Any
) -> None:
    """Write the posteriors of tokens t, t + by, ... to the gradients."""
    N = d_emissions.shape[1]
    store_states(weighted, t * N + n, by * N, d_emissions)
    for k in range(len(weighted)):
        if t + k * by == 0:
            copy_row(weighted[k], d_ends[0, n])
        if t + k * by == length - 1:
            copy_row(weighted[k], d_ends[1, n])


@jit
def count_symbols(
    weighted: Any, symbols: Any, t: int, by: int, n: int, counts: Any, d_ends: Any
) -> None:
    """Add the posteriors of tokens t, t + by, ... to those of their symbols, `[K, W]`."""
    width, rows, sums = weighted.shape[1], pointer_to(weighted), pointer_to(counts)
    for k in range(len(weighted)):
        first = symbols[n, t + k * by] * width
        for i in range(0, width, WIDTH):
            store(sums, first + i, add(load(sums, first + i), load(rows, k * width + i)))
        if t + k * by == 0:
            copy_row(weighted[k], d_ends[0, n])


@jit(nogil=True)
def gradient_kernel(
    groups: Any,
    chain: Any,
    grad_output: Any,
    saved: Any,
    d_emissions: Any,
    d_ends: Any,
    counts: Any,
    d_table: Any,
) -> None:
    """Write the gradients of half h % 2 of sequence h // 2.

    Beta continues backwards through the first half, and alpha forwards through the second. The
    gradients are those in emissions `[T, N, C]` and in the ends `[2, N, C]`. The counts, unless
    they are empty, are sums of the products of both states of a step, `[2, G, W, W]`: without the
    factor exp(transitions), and transposed for the half in which time runs backwards. Half h adds
    to the counts of group h % 2G. With symbols, the gradients in emissions are not written, but
    added to those in the table, `[2, G, K, W]`.
    """
    width, count = chain.weights.shape[2], 2 * (counts.shape[1] or len(grad_output))
    scores, sums = np.empty((BLOCK, width)), np.empty((BLOCK, width))
    states, others = np.zeros((BLOCK + 1, width)), np.zeros((BLOCK, width))
    weighted, totals = np.empty((BLOCK, width)), np.empty(BLOCK)
    x, y, z = pointer_to(others), pointer_to(sums), pointer_to(weighted)
    for half in sequences_of(groups, count, 2 * len(grad_output)):
        n, forward = half // 2, half % 2
        backward, length, middle = 1 - forward, chain.lengths[n], chain.middle[n]
        first, by = (middle, 1) if forward else (middle - 1, -1)
        tokens, rows = length - middle if forward else middle, n * saved.shape[1]
        starts = first - by >= length  # a sequence of one token has no beta
        if not starts:
            for c in range(width):  # the padding may have the NaN of another sequence
                states[0, c] = 0.0
            load_states(saved, rows + first - by, by, states[:1])
        for k in range(0, tokens, BLOCK):
            t, K = first + k * by, min(BLOCK, tokens - k)
            load_tokens(chain, t, by, n, scores[:K])
            scan_linear(chain.weights[backward], scores[:K], sums[:K], states[: K + 1], starts)
            load_states(saved, rows + t, by, others[:K])
            for i in range(K):
                total = dot_of_rows(x, y, i * width, width)
                totals[i] = 0.0 if total == 0.0 else grad_output[n] / total
                multiply_rows(x, y, i * width, width, totals[i], z)
            if len(chain.symbols):
                index = d_table[backward, half % count // 2]
                count_symbols(weighted[:K], chain.symbols, t, by, n, index, d_ends)
            else:
                write_gradient(weighted[:K], t, by, n, length, d_emissions, d_ends)
            if counts.size:
                for i in range(K):
                    scale_row(pointer_to(states), i * width, width, totals[i])
                # The step at the middle is that of the first half, and the last token has none.
                skip = 1 if k == 0 and (forward or starts) else 0
                index = counts[backward, half % count // 2]
                add_outer_products(states, others, skip, K, index)
            copy_row(states[K], states[0])
        if forward and not len(chain.symbols):
            zero_rows(d_emissions, n, length)
