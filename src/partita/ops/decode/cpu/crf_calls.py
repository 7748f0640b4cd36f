"""The bases of paths over k-mers on the CPU, in Numba, with the sequences in parallel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import as_steps, row_at, run_over_sequences
from ....primitives.cpu.jit import jit
from ....runtime.dtypes import acc_dtype
from ..basecalls import Basecalls


@jit
def base_posterior(row: Any, strides: Any, base: int, sizes: Any) -> float:
    """Return the posterior that a step ends in a base, given the marginals of its edges."""
    C, A = sizes
    total = 0.0
    for c in range(base, C, A - 1):
        for a in range(A):
            total += row[c * strides[2] + a * strides[3]]
    return total


@jit
def first_posteriors(row: Any, strides: Any, first: int, sizes: Any, posteriors: Any) -> None:
    """Add the posteriors of the bases of the first k-mer, `[k]`, given the first step."""
    C, A = sizes
    bases, top = A - 1, C // (A - 1)
    for c in range(C):
        leaves = np.float64(row[c * strides[2]])
        for target in range(c * bases % C, c * bases % C + bases):
            # The k-mer j x moves to the k-mers x e through their column 1 + j.
            leaves += row[target * strides[2] + (1 + c // top) * strides[3]]
        power = C
        for i in range(len(posteriors)):
            power //= bases
            if c // power % bases == first // power % bases:
                posteriors[i] += leaves


@jit(nogil=True)
def crf_calls_scan(
    share: Any, lengths: Any, marginals: Any, path: Any, sizes: Any, state_len: int, calls: Any
) -> None:
    """Write the bases of each sequence."""
    states, edges = path
    labels, numbers, log_probs, steps, moves = calls
    C, A = sizes
    bases, T = A - 1, len(edges)
    posteriors = np.empty(state_len + T)
    for n in share:
        labels[n, :], steps[n, :], log_probs[n, :], moves[n, :] = 0, -1, 0.0, False
        first, length, found = states[0, n], lengths[n], 0
        if first >= 0 and 0 <= length <= T:
            found, power = state_len, C
            posteriors[:state_len] = 0.0 if length else 1.0 / bases
            for i in range(state_len):
                power //= bases
                labels[n, i] = 1 + first // power % bases
            if length:
                row = row_at(marginals, 0, n)
                first_posteriors(row, marginals.strides, first, sizes, posteriors[:state_len])
            total, start = 0.0, -1
            for t in range(length):
                if edges[t, n] >= 0 and edges[t, n] % A > 0:
                    if start >= 0:
                        posteriors[found - 1] = total / (t - start)
                    labels[n, found] = 1 + states[t + 1, n] % bases
                    steps[n, found], moves[n, t] = t, True
                    total, start, found = 0.0, t, found + 1
                if start >= 0:
                    row = row_at(marginals, t, n)
                    base = states[t + 1, n] % bases
                    total += base_posterior(row, marginals.strides, base, sizes)
            if start >= 0:
                posteriors[found - 1] = total / (length - start)
            for i in range(found):
                log_probs[n, i] = min(np.log(posteriors[i]), 0.0)
        numbers[n] = found


def ctc_crf_calls(
    marginals: Tensor, states: Tensor, edges: Tensor, lengths: Tensor, state_len: int
) -> Basecalls:
    """Return the bases of paths: states `[T + 1, N]` and edges `[T, N]`, -1 where there is none."""
    T, N, C, A = marginals.shape
    S = T + state_len
    arrays = (
        np.empty((N, S), np.int64),
        np.empty(N, np.int64),
        np.empty((N, S)),
        np.empty((N, S), np.int64),
        np.empty((N, T), np.bool_),
    )
    path = states.contiguous().numpy(), edges.contiguous().numpy()
    steps = lengths.contiguous().numpy()
    inputs = (steps, as_steps(marginals), path, (C, A), state_len, arrays)
    run_over_sequences(crf_calls_scan, steps, C * A // (A - 1), *inputs)
    calls = Basecalls(*map(torch.from_numpy, arrays))
    return calls._replace(log_probs=calls.log_probs.to(acc_dtype(marginals.dtype)))
