"""Steps of dense linear chains for Numba kernels, in linear arithmetic and in the log domain.

In linear arithmetic a step is a product with exp(transitions) in fp64. A state is scaled by powers
of two, so that its maximum stays near 1. Transitions that span at most `MAX_SPAN` nats keep every
state that matters in range: a state that underflows is improbable by e**-100.
Otherwise, and for transitions that vary or are -inf, a step is a log-sum-exp, and a state has the
maximum 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF, LOWEST, as_array, as_steps
from ....primitives.cpu.half import load_row
from ....primitives.cpu.jit import jit
from ....primitives.cpu.math import LN2, exp, log
from ....primitives.cpu.vectors import (
    WIDTH,
    copy_numbers,
    fill,
    larger,
    load,
    load_one,
    maximum_of,
    pointer_to,
    store,
)
from .linear_steps import exp_row, scan_linear

MAX_SPAN = 300.0  # nats
BLOCK = 32  # tokens; a call of a function with many arrays takes as long as a step


class ChainArrays(NamedTuple):
    """A batch of dense linear chains as arrays.

    Rows have `W` numbers: in linear arithmetic `C` padded to a multiple of `WIDTH` with zeros, and
    `C` in the log domain.

    Fields:
        lengths: `[N]` int64, in range even where a length is invalid.
        emissions: `Steps` `[T, N, C]`.
        start, end: `[N, C]` fp64.
        transitions: `Steps` `[T - 1, N, C, C]`, with strides of 0 for what is constant.
        weights: `[2, C, W]` fp64: exp(transitions - shift), or the transitions themselves in the
            log domain, then their transpose. Transitions that vary have zeros here.
        shift: the maximum of constant transitions in linear arithmetic, otherwise 0.
        linear: whether arithmetic is linear, as it may be with constant transitions.
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
    low, high = (0.0, torch.inf) if log_domain or varies else _range(steps)
    linear = high - low <= MAX_SPAN  # False for NaN and infinities
    width = -(-max(C, 1) // WIDTH) * WIDTH if linear else C
    weights, shift = torch.zeros((2, C, width), dtype=torch.float64, device="cpu"), 0.0
    if not varies:
        shift = high if linear else 0.0
        matrix = steps.double()
        matrix = (matrix - shift).exp() if linear else matrix
        weights[..., :C] = torch.stack([matrix, matrix.T])
        steps = steps.expand(1, 1, C, C)
    elif steps.ndim == 3:
        steps = steps.unsqueeze(1).expand(T - 1, N, C, C)
    arrays = ChainArrays(
        lengths.clamp(1, T).contiguous().numpy(),
        as_steps(emissions),
        as_array(zeros if start is None else start),
        as_array(zeros if end is None else end),
        as_steps(steps),
        weights.numpy(),  # PyTorch's memory starts on a cache line
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
def highest_of(rows: Any, first: int, width: int) -> float:
    """Return the maximum of a row, LOWEST if all numbers are -inf or NaN."""
    found = fill(LOWEST)
    if width < WIDTH:
        for i in range(first, first + width):
            found = larger(load_one(rows, i), found)
    else:
        for i in range(first, first + width - WIDTH + 1, WIDTH):
            found = larger(load(rows, i), found)
        found = larger(load(rows, first + width - WIDTH), found)
    return float(maximum_of(found))


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
    """Write the scores of tokens first, first + by, ..., relative to the maximum of each, `[K, W]`.

    Those of the ends are included. In linear arithmetic the exponentials are written. Return the
    sum of the maxima. The padding gets zeros.
    """
    C, width, total = start.shape[1], scores.shape[1], 0.0
    strides, rows = emissions.strides, pointer_to(scores)
    for k in range(len(scores)):
        t = first + k * by
        base = t * strides[0] + n * strides[1]
        if width > C:
            store(rows, (k + 1) * width - WIDTH, fill(-INF))
        if strides[2] == 1 and not len(emissions.words):
            copy_numbers(pointer_to(emissions.numbers), base, rows, k * width, C)
        else:
            load_row(emissions, base, strides[2], scores[k, :C])
        if t == 0:
            for c in range(C):
                scores[k, c] += start[n, c]
        if t == length - 1:
            for c in range(C):
                scores[k, c] += end[n, c]
        highest = highest_of(rows, k * width, width)
        total += highest if highest > LOWEST else -INF
        if linear:
            exp_row(rows, k * width, width, highest)
        else:
            for c in range(C):
                scores[k, c] -= highest
    return total


@jit
def load_states(saved: Any, t: int, by: int, n: int, states: Any) -> None:
    """Copy the states of tokens t, t + by, ... from `[T, N, C]` to rows, and leave the padding."""
    (N, C), width = saved.shape[1:], states.shape[1]
    source, target = pointer_to(saved), pointer_to(states)
    for k in range(len(states)):
        copy_numbers(source, ((t + k * by) * N + n) * C, target, k * width, C)


@jit
def load_weights(transitions: Any, t: int, n: int, transposed: int, weights: Any) -> None:
    """Write the transitions of the step from token t to t + 1, or values of them, `[C, C]`."""
    strides, C = transitions.strides, len(weights)
    base = t * strides[0] + n * strides[1]
    rows, columns = (strides[3], strides[2]) if transposed else (strides[2], strides[3])
    for i in range(C):
        load_row(transitions, base + i * rows, columns, weights[i, :C])


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
        highest = highest_of(pointer_to(states), (k + 1) * C, C)
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
    highest, total = LOWEST, 0.0
    if linear:
        for c in range(len(a)):
            total += a[c] * b[c]
        return -INF if total == 0.0 else np.log(total)
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
