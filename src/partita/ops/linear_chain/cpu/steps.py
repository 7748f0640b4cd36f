"""Steps of dense linear chains for Numba kernels, in linear arithmetic and in the log domain.

In linear arithmetic a step is a product with exp(transitions) in fp64. A state is scaled by a power
of two, so that its maximum lies between 1 and 2. Transitions that span at most `MAX_SPAN` nats keep
every state that matters in range: a state that underflows is improbable by e**-100.
Otherwise, and for transitions of -inf, a step is a log-sum-exp, and a state has the maximum 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF, LOWEST, as_array, as_steps
from ....primitives.cpu.jit import jit
from ....primitives.cpu.math import LN2, bits_of, exp, from_bits, log
from ....primitives.cpu.vectors import (
    WIDTH,
    add,
    fill,
    larger,
    load,
    load_one,
    maximum_of,
    multiply_add,
    store,
)

MAX_SPAN = 300.0  # nats
BLOCK = 32  # tokens; a call of a function with many arrays takes as long as a step
MOST_IN_VECTORS = 64  # states whose matrix stays in the cache that is nearest to the processor


class ChainArrays(NamedTuple):
    """A batch of dense linear chains as arrays.

    Fields:
        lengths: `[N]` int64, in range even where a length is invalid.
        emissions: `Steps` `[T, N, C]`.
        start, end: `[N, C]` fp64.
        transitions: `Steps` `[T - 1, N, C, C]`, with strides of 0 for what is constant.
        weights: `[2, C, C]` fp64: exp(transitions - shift), or the transitions themselves in the
            log domain, then their transpose. Transitions that vary have zeros here.
        shift: the maximum of constant transitions in linear arithmetic, otherwise 0.
        linear: whether arithmetic is linear.
        varies: whether transitions vary.
    """

    lengths: Any
    emissions: Any
    start: Any
    end: Any
    transitions: Any
    weights: Any
    shift: float
    linear: bool
    varies: bool


def chain_arrays(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    *,
    log_domain: bool = False,
) -> tuple[ChainArrays, Tensor]:
    """Return the arrays of a batch and the mask of sequences with an invalid length, `[N]`.

    With `log_domain` the arithmetic is not linear.
    """
    T, N, C = emissions.shape
    if lengths is None:
        lengths = torch.full((N,), T, device="cpu")
    lengths = lengths.long()
    invalid = (lengths < 1) | (lengths > T)
    zeros = torch.zeros(1, 1, dtype=torch.float64, device="cpu").expand(N, C)
    varies = transitions.ndim > 2
    steps = transitions.detach()
    low, high = (0.0, torch.inf) if log_domain else _range(steps)
    linear = high - low <= MAX_SPAN  # False for NaN and infinities
    weights, shift = np.zeros((2, C, C)), 0.0
    if not varies:
        shift = high if linear else 0.0
        matrix = steps.double()
        matrix = (matrix - shift).exp() if linear else matrix
        torch.from_numpy(weights).copy_(torch.stack([matrix, matrix.T]))
        steps = steps.expand(1, 1, C, C)
    elif steps.ndim == 3:
        steps = steps.unsqueeze(1).expand(T - 1, N, C, C)
    arrays = ChainArrays(
        lengths.clamp(1, T).contiguous().numpy(),
        as_steps(emissions),
        as_array(zeros if start is None else start),
        as_array(zeros if end is None else end),
        as_steps(steps),
        weights,
        shift,
        linear,
        varies,
    )
    return arrays, invalid


def _range(transitions: Tensor) -> tuple[float, float]:
    if not transitions.numel():
        return 0.0, 0.0
    low, high = transitions.aminmax()
    return float(low), float(high)


@jit
def middle_of(length: int) -> int:
    """Return the token at which alpha and beta meet: alpha of earlier tokens is saved."""
    return (length + 1) // 2


@jit
def highest_of(row: Any) -> float:
    """Return the maximum of a contiguous row, LOWEST if all numbers are -inf or NaN."""
    C, highest = len(row), LOWEST
    if C < WIDTH:
        for c in range(C):
            highest = row[c] if row[c] > highest else highest
        return highest
    found = fill(LOWEST)
    for c in range(0, C - WIDTH + 1, WIDTH):
        found = larger(load(row, c), found)
    return max(highest, maximum_of(larger(load(row, C - WIDTH), found)))


@jit
def dot(x: Any, y: Any) -> float:
    """Return the sum of products by four partial sums."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = len(x) - len(x) % 4
    for i in range(0, whole, 4):
        a += x[i] * y[i]
        b += x[i + 1] * y[i + 1]
        c += x[i + 2] * y[i + 2]
        d += x[i + 3] * y[i + 3]
    for i in range(whole, len(x)):
        a += x[i] * y[i]
    return (a + b) + (c + d)


@jit
def load_tokens(
    emissions: Any,
    start: Any,
    end: Any,
    length: int,
    first: int,
    by: int,
    n: int,
    linear: bool,
    scores: Any,
) -> float:
    """Write the scores of tokens first, first + by, ..., relative to the maximum of each, `[K, C]`.

    Those of the ends are included. In linear arithmetic the exponentials are written. Return the
    sum of the maxima.
    """
    numbers, stride, C = emissions.numbers, emissions.strides[2], scores.shape[1]
    total = 0.0
    for k in range(len(scores)):
        t, row = first + k * by, scores[k]
        base = t * emissions.strides[0] + n * emissions.strides[1]
        token = numbers[base:]  # an index that may be negative would not become vector code
        if stride == 1:
            for c in range(C):
                row[c] = token[c]
        else:
            for c in range(C):
                row[c] = token[c * stride]
        if t == 0:
            for c in range(C):
                row[c] += start[n, c]
        if t == length - 1:
            for c in range(C):
                row[c] += end[n, c]
        highest = highest_of(row)
        total += highest if highest > LOWEST else -INF
        for c in range(C):
            row[c] -= highest
    if linear:
        flat = scores.reshape(-1)
        for i in range(len(flat)):
            flat[i] = exp(flat[i])
    return total


@jit
def load_weights(
    transitions: Any, t: int, n: int, transposed: int, linear: bool, weights: Any
) -> float:
    """Write the weights of the step from token t to t + 1, and return their shift."""
    numbers, strides, C = transitions.numbers, transitions.strides, len(weights)
    base = t * strides[0] + n * strides[1]
    rows, columns = (strides[3], strides[2]) if transposed else (strides[2], strides[3])
    highest = LOWEST
    for i in range(C):
        row, values = weights[i], numbers[base + i * rows :]
        if columns == 1:
            for j in range(C):
                row[j] = values[j]
        else:
            for j in range(C):
                row[j] = values[j * columns]
        highest = max(highest, highest_of(row))
    if not linear:
        return 0.0
    for i in range(C):
        row = weights[i]
        for j in range(C):
            row[j] = exp(row[j] - highest)
    return float(highest)


@jit
def product(state: Any, weights: Any, result: Any) -> None:
    """Write the product of a state `[C]` and a matrix `[C, C]`."""
    C = len(state)
    if C < WIDTH or C > MOST_IN_VECTORS:
        product_by_rows(state, weights, result)
        return
    whole = C - C % (2 * WIDTH)
    for j in range(0, whole, 2 * WIDTH):
        two_columns_of_product(state, weights, j, result)
    # The last columns may be computed twice: the results are the same.
    if C - whole > WIDTH:
        column_of_product(state, weights, whole, result)
    if C > whole:
        column_of_product(state, weights, C - WIDTH, result)


@jit
def two_columns_of_product(state: Any, weights: Any, j: int, result: Any) -> None:
    """Write the columns j to j + 2 * WIDTH of a product, by four partial sums."""
    C, k = len(state), j
    a, b, c, d = fill(0.0), fill(0.0), fill(0.0), fill(0.0)
    e, f, g, h = fill(0.0), fill(0.0), fill(0.0), fill(0.0)
    for i in range(C // 4):
        x, y = load_one(state, 4 * i), load_one(state, 4 * i + 1)
        a = multiply_add(x, load(weights, k), a)
        e = multiply_add(x, load(weights, k + WIDTH), e)
        b = multiply_add(y, load(weights, k + C), b)
        f = multiply_add(y, load(weights, k + C + WIDTH), f)
        x, y, k = load_one(state, 4 * i + 2), load_one(state, 4 * i + 3), k + 2 * C
        c = multiply_add(x, load(weights, k), c)
        g = multiply_add(x, load(weights, k + WIDTH), g)
        d = multiply_add(y, load(weights, k + C), d)
        h = multiply_add(y, load(weights, k + C + WIDTH), h)
        k += 2 * C
    for i in range(C - C % 4, C):
        x = load_one(state, i)
        a = multiply_add(x, load(weights, i * C + j), a)
        e = multiply_add(x, load(weights, i * C + j + WIDTH), e)
    store(result, j, add(add(a, b), add(c, d)))
    store(result, j + WIDTH, add(add(e, f), add(g, h)))


@jit
def column_of_product(state: Any, weights: Any, j: int, result: Any) -> None:
    """Write the columns j to j + WIDTH of a product, by four partial sums."""
    C, k = len(state), j
    a, b, c, d = fill(0.0), fill(0.0), fill(0.0), fill(0.0)
    for i in range(C // 4):
        a = multiply_add(load_one(state, 4 * i), load(weights, k), a)
        b = multiply_add(load_one(state, 4 * i + 1), load(weights, k + C), b)
        c = multiply_add(load_one(state, 4 * i + 2), load(weights, k + 2 * C), c)
        d = multiply_add(load_one(state, 4 * i + 3), load(weights, k + 3 * C), d)
        k += 4 * C
    for i in range(C - C % 4, C):
        a = multiply_add(load_one(state, i), load(weights, i * C + j), a)
    store(result, j, add(add(a, b), add(c, d)))


@jit
def product_by_rows(state: Any, weights: Any, result: Any) -> None:
    """Write the product of a state `[C]` and a matrix `[C, C]`, four rows of it at a time."""
    C = len(state)
    for j in range(C):
        result[j] = 0.0
    for i in range(0, C - C % 4, 4):
        a, b, c, d = state[i], state[i + 1], state[i + 2], state[i + 3]
        w, x, y, z = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for j in range(C):
            result[j] += (a * w[j] + b * x[j]) + (c * y[j] + d * z[j])
    for i in range(C - C % 4, C):
        a, w = state[i], weights[i]
        for j in range(C):
            result[j] += a * w[j]


@jit
def log_product(state: Any, weights: Any, maxima: Any, result: Any) -> None:
    """Write the log of the product of exp(state) `[C]` and exp(weights) `[C, C]`."""
    C = len(state)
    for j in range(C):
        maxima[j], result[j] = LOWEST, 0.0
    for i in range(C):
        a, w = state[i], weights[i]
        for j in range(C):
            maxima[j] = a + w[j] if a + w[j] > maxima[j] else maxima[j]
    for i in range(C):
        a, w = state[i], weights[i]
        for j in range(C):
            result[j] += exp(a + w[j] - maxima[j])
    for j in range(C):
        total = result[j]
        result[j] = -INF if total == 0.0 else maxima[j] + log(total)


@jit
def scan_linear(weights: Any, scores: Any, sums: Any, states: Any, is_first: bool) -> int:
    """Scan K tokens in linear arithmetic.

    Args:
        weights: the weights of all steps, `[C, C]`.
        scores: exponentials of the scores of the tokens, `[K, C]`.
        sums: the result before the emission of each token, `[K, C]`.
        states: the state before the tokens and the result for each, `[K + 1, C]`.
        is_first: whether the first token starts the scan.

    Return the sum of the exponents of 2 that the states were divided by.
    """
    C, total = scores.shape[1], 0
    for k in range(len(scores)):
        before, score, entered, state = states[k], scores[k], sums[k], states[k + 1]
        if is_first and k == 0:
            for c in range(C):
                entered[c] = 1.0
        else:
            product(before, weights, entered)
        for c in range(C):
            state[c] = entered[c] * score[c]
        highest = highest_of(state)
        if highest > 0.0:
            exponent = (bits_of(highest) >> 52) - 1023
            scale = from_bits((1023 - exponent) << 52)
            total += exponent
            for c in range(C):
                state[c] *= scale
    return total


@jit
def scan_log(weights: Any, scores: Any, sums: Any, states: Any, is_first: bool) -> float:
    """Scan K tokens in the log domain, as `scan_linear` does.

    Return the sum of what was subtracted from the states.
    """
    C, total = scores.shape[1], 0.0
    maxima = np.empty(C)
    for k in range(len(scores)):
        before, score, entered, state = states[k], scores[k], sums[k], states[k + 1]
        if is_first and k == 0:
            for c in range(C):
                entered[c] = 0.0
        else:
            log_product(before, weights, maxima, entered)
        for c in range(C):
            state[c] = entered[c] + score[c]
        highest = highest_of(state)
        if highest > LOWEST:
            total += highest
            for c in range(C):
                state[c] -= highest
    return total


@jit
def scan(linear: bool, weights: Any, scores: Any, sums: Any, states: Any, is_first: bool) -> float:
    """Scan K tokens, and return the log of the scale of the states."""
    if linear:
        return scan_linear(weights, scores, sums, states, is_first) * LN2
    return scan_log(weights, scores, sums, states, is_first)


@jit
def log_of_sum(linear: bool, a: Any, b: Any) -> float:
    """Return the log of the sum over the states of the product of a and b."""
    if linear:
        total = dot(a, b)
        return -INF if total == 0.0 else np.log(total)
    highest, total = LOWEST, 0.0
    for c in range(len(a)):
        highest = a[c] + b[c] if a[c] + b[c] > highest else highest
    for c in range(len(a)):
        total += exp(a[c] + b[c] - highest)
    return -INF if total == 0.0 else highest + log(total)


@jit
def copy_row(source: Any, target: Any) -> None:
    """Copy a row; an assignment of slices takes seconds to compile."""
    for c in range(len(target)):
        target[c] = source[c]


def halves_of(chain: ChainArrays) -> tuple[Any, int]:
    """Return the numbers of tokens of the halves of all sequences, and the edges of a step."""
    return chain.lengths.repeat(2) // 2, chain.start.shape[1] ** 2
