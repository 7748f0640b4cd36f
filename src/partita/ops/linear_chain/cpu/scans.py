"""Log Z of dense linear chains and its gradient in linear arithmetic, parallel in time.

Each sequence is cut in the middle. Alpha runs over the first half and beta over the second, on two
threads, and log Z is formed where they meet. Like alpha, beta includes the emission of its token.
For the gradient each continues through the other half. The posteriors of each token are divided by
their sum, so no error adds up over the tokens.

A step is a product with exp(transitions) in fp64, and a state is scaled by powers of two. Rows are
padded with zeros to a multiple of `WIDTH`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF, LOWEST, as_array, as_steps
from ....primitives.cpu.half import load_row
from ....primitives.cpu.jit import jit
from ....primitives.cpu.math import LN2
from ....primitives.cpu.vectors import (
    WIDTH,
    copy_numbers,
    fill,
    larger,
    load,
    maximum_of,
    pointer_to,
    store,
)
from ...chain.cpu.steps import sequences_of, zero_rows
from .linear_steps import (
    add_outer_products,
    dot_of_rows,
    exp_row,
    multiply_rows,
    product,
    scale_row,
    scan_linear,
)

BLOCK = 32  # tokens; a call of a function with many arrays takes as long as a step


class DenseArrays(NamedTuple):
    """A batch of dense linear chains with constant transitions as arrays.

    Fields:
        lengths: `[N]` int64, in range even where a length is invalid.
        middle: the number of tokens of which alpha is saved, `[N]`; beta is saved of the others.
        emissions: `Steps` `[T, N, C]`.
        start, end: `[N, C]` fp64.
        weights: exp(transitions - shift), then their transpose, `[2, C, W]` fp64.
        shift: the maximum of the transitions.
    """

    lengths: Any
    middle: Any
    emissions: Any
    start: Any
    end: Any
    weights: Any
    shift: float


def dense_arrays(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    tokens: Tensor,
) -> DenseArrays:
    """Return the arrays of a batch of sequences with `tokens` `[N]` tokens."""
    N, C = emissions.shape[1:]
    zeros = torch.zeros(N, C, dtype=torch.float64, device="cpu")
    width = -(-max(C, 1) // WIDTH) * WIDTH
    weights = torch.zeros((2, C, width), dtype=torch.float64, device="cpu")
    shift = float(transitions.max()) if C else 0.0
    matrix = (transitions.detach().double() - shift).exp()
    weights[..., :C] = torch.stack([matrix, matrix.T])
    return DenseArrays(
        tokens.contiguous().numpy(),
        ((tokens + 1) // 2).numpy(),
        as_steps(emissions),
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
def load_tokens(chain: Any, first: int, by: int, n: int, scores: Any) -> float:
    """Write exp(score - maximum) of tokens first, first + by, ..., `[K, W]`, with zeros as padding.

    The scores include those of the ends. Return the sum of the maxima.
    """
    emissions, C, width, total = chain.emissions, chain.start.shape[1], scores.shape[1], 0.0
    strides, rows = emissions.strides, pointer_to(scores)
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
def load_states(saved: Any, t: int, by: int, n: int, states: Any) -> None:
    """Copy the states of tokens t, t + by, ... from `[T, N, C]` to rows, and leave the padding."""
    (N, C), width = saved.shape[1:], states.shape[1]
    source, target = pointer_to(saved), pointer_to(states)
    for k in range(len(states)):
        copy_numbers(source, ((t + k * by) * N + n) * C, target, k * width, C)


@jit
def store_states(states: Any, t: int, by: int, n: int, saved: Any) -> None:
    """Write the states of tokens t, t + by, ... to `[T, N, C]`."""
    (N, C), width = saved.shape[1:], states.shape[1]
    source, target = pointer_to(states), pointer_to(saved)
    for k in range(len(states)):
        copy_numbers(source, k * width, target, ((t + k * by) * N + n) * C, C)


@jit(nogil=True)
def forward_kernel(halves: Any, chain: Any, saved: Any, meeting: Any, log_scale: Any) -> None:
    """Scan half h % 2 of sequence h // 2: alpha forwards over the first, beta backwards.

    Write the state at the middle, `meeting` `[2N, W]`, the log of its scale, `[2N]`, and to `saved`
    all states, `[T, N, C]`, unless it is empty.
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
                store_states(states[1 : K + 1], t, by, n, saved)
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
    store_states(weighted, t, by, n, d_emissions)
    for k in range(len(weighted)):
        if t + k * by == 0:
            copy_row(weighted[k], d_ends[0, n])
        if t + k * by == length - 1:
            copy_row(weighted[k], d_ends[1, n])


@jit(nogil=True)
def gradient_kernel(
    groups: Any,
    chain: Any,
    grad_output: Any,
    saved: Any,
    d_emissions: Any,
    d_ends: Any,
    counts: Any,
) -> None:
    """Write the gradients of half h % 2 of sequence h // 2.

    Beta continues backwards through the first half, and alpha forwards through the second. The
    gradients are those in emissions `[T, N, C]` and in the ends `[2, N, C]`. The counts, unless
    they are empty, are sums of the products of both states of a step, `[2, G, W, W]`: without the
    factor exp(transitions), and transposed for the half in which time runs backwards. Half h adds
    to the counts of group h % 2G.
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
        tokens = length - middle if forward else middle
        starts = first - by >= length  # a sequence of one token has no beta
        if not starts:
            load_states(saved, first - by, by, n, states[:1])
        for k in range(0, tokens, BLOCK):
            t, K = first + k * by, min(BLOCK, tokens - k)
            load_tokens(chain, t, by, n, scores[:K])
            scan_linear(chain.weights[backward], scores[:K], sums[:K], states[: K + 1], starts)
            load_states(saved, t, by, n, others[:K])
            for i in range(K):
                total = dot_of_rows(x, y, i * width, width)
                totals[i] = 0.0 if total == 0.0 else grad_output[n] / total
                multiply_rows(x, y, i * width, width, totals[i], z)
            write_gradient(weighted[:K], t, by, n, length, d_emissions, d_ends)
            if counts.size:
                for i in range(K):
                    scale_row(pointer_to(states), i * width, width, totals[i])
                # The step at the middle is that of the first half, and the last token has none.
                skip = 1 if k == 0 and (forward or starts) else 0
                index = counts[backward, half % count // 2]
                add_outer_products(states, others, skip, K, index)
            copy_row(states[K], states[0])
        if forward:
            zero_rows(d_emissions, n, length)
