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
from numba import njit
from torch import Tensor

from ....primitives.cpu.batch import INF, LOWEST, as_array, as_steps, contiguous_row, row_at
from ....primitives.cpu.math import FLAGS, LN2, bits_of, exp, from_bits, log, prefetch

MAX_SPAN = 300.0  # nats


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
) -> tuple[ChainArrays, Tensor]:
    """Return the arrays of a batch and the mask of sequences with an invalid length, `[N]`."""
    T, N, C = emissions.shape
    if lengths is None:
        lengths = torch.full((N,), T, device="cpu")
    lengths = lengths.long()
    invalid = (lengths < 1) | (lengths > T)
    zeros = torch.zeros(1, 1, dtype=torch.float64, device="cpu").expand(N, C)
    varies = transitions.ndim > 2
    steps = transitions.detach()
    low, high = _range(steps)
    linear = high - low <= MAX_SPAN  # False for NaN and infinities
    weights, shift = np.zeros((2, C, C)), 0.0
    if not varies:
        shift = high if linear else 0.0
        matrix = steps.double()
        matrix = (matrix - shift).exp() if linear else matrix
        torch.from_numpy(weights).copy_(torch.stack([matrix, matrix.T]))
    elif steps.ndim == 3:
        steps = steps.unsqueeze(1).expand(T - 1, N, C, C)
    arrays = ChainArrays(
        lengths.clamp(1, T).contiguous().numpy(),
        as_steps(emissions),
        as_array(zeros if start is None else start),
        as_array(zeros if end is None else end),
        as_steps(steps if varies else steps.expand(1, 1, C, C)),
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


@njit(**FLAGS)
def middle_of(length: int) -> int:
    """Return the token at which alpha and beta meet: alpha of earlier tokens is saved."""
    return (length + 1) // 2


@njit(**FLAGS)
def load_token(chain: Any, t: int, n: int, buffer: Any, scores: Any) -> float:
    """Write the scores of a token, with those of the ends, relative to their maximum.

    Return the maximum. In linear arithmetic the exponentials of the scores are written.
    """
    row = contiguous_row(chain.emissions, t, n, buffer)
    C = len(scores)
    for c in range(C):
        scores[c] = row[c]
    if t == 0:
        for c in range(C):
            scores[c] += chain.start[n, c]
    if t == chain.lengths[n] - 1:
        for c in range(C):
            scores[c] += chain.end[n, c]
    highest = LOWEST
    for c in range(C):
        highest = scores[c] if scores[c] > highest else highest
    if chain.linear:
        for c in range(C):
            scores[c] = exp(scores[c] - highest)
    else:
        for c in range(C):
            scores[c] -= highest
    return highest if highest > LOWEST else -INF


@njit(**FLAGS)
def prefetch_token(chain: Any, t: int, n: int) -> None:
    """Prefetch the emissions of a token, which may be out of range."""
    C = chain.start.shape[1]
    if 0 <= t < chain.lengths[n] and chain.emissions.strides[2] == 1:
        row = row_at(chain.emissions, t, n)
        for c in range(0, C, 16):
            prefetch(row, c)


@njit(**FLAGS)
def load_weights(chain: Any, t: int, n: int, transposed: int, buffer: Any) -> float:
    """Write the weights of the step from token t to t + 1 that vary, and return their shift.

    Constant weights are in `buffer` already.
    """
    if not chain.varies:
        return chain.shift
    C, strides = len(buffer), chain.transitions.strides
    row = row_at(chain.transitions, t, n)
    rows, columns = (strides[3], strides[2]) if transposed else (strides[2], strides[3])
    highest = LOWEST
    for i in range(C):
        for j in range(C):
            value = np.float64(row[i * rows + j * columns])
            buffer[i, j] = value
            highest = value if value > highest else highest
    if not chain.linear:
        return 0.0
    for i in range(C):
        weights = buffer[i]
        for j in range(C):
            weights[j] = exp(weights[j] - highest)
    return highest


@njit(**FLAGS)
def weight_buffer(chain: Any, transposed: int) -> Any:
    """Return constant weights, or a buffer for weights that vary, `[C, C]`."""
    if chain.varies:
        return np.empty(chain.weights.shape[1:])
    return chain.weights[transposed]


@njit(**FLAGS)
def product(state: Any, weights: Any, result: Any) -> None:
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


@njit(**FLAGS)
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


@njit(**FLAGS)
def step(chain: Any, state: Any, weights: Any, maxima: Any, result: Any) -> None:
    """Write the sums over the paths into each state, before its emission."""
    if chain.linear:
        product(state, weights, result)
    else:
        log_product(state, weights, maxima, result)


@njit(**FLAGS)
def multiply_and_scale(chain: Any, sums: Any, scores: Any, state: Any) -> float:
    """Write the state from sums and scores of a token, scaled, and return the log of the scale."""
    C, highest = len(sums), 0.0 if chain.linear else LOWEST
    if chain.linear:
        for c in range(C):
            state[c] = sums[c] * scores[c]
        for c in range(C):
            highest = state[c] if state[c] > highest else highest
        if not highest > 0.0:
            return 0.0
        exponent = (bits_of(highest) >> 52) - 1023
        scale = from_bits((1023 - exponent) << 52)
        for c in range(C):
            state[c] *= scale
        return exponent * LN2
    for c in range(C):
        state[c] = sums[c] + scores[c]
    for c in range(C):
        highest = state[c] if state[c] > highest else highest
    if not highest > LOWEST:
        return 0.0
    for c in range(C):
        state[c] -= highest
    return highest


@njit(**FLAGS)
def log_of_sum(chain: Any, a: Any, b: Any) -> float:
    """Return the log of the sum over the states of the product of a and b."""
    total, highest = 0.0, LOWEST
    if chain.linear:
        for c in range(len(a)):
            total += a[c] * b[c]
        return -INF if total == 0.0 else np.log(total)
    for c in range(len(a)):
        highest = a[c] + b[c] if a[c] + b[c] > highest else highest
    for c in range(len(a)):
        total += exp(a[c] + b[c] - highest)
    return -INF if total == 0.0 else highest + log(total)


@njit(**FLAGS)
def one_of(chain: Any) -> float:
    """Return the one of the arithmetic."""
    return 1.0 if chain.linear else 0.0
