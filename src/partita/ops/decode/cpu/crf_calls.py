"""The bases of paths over k-mers on the CPU, in Numba, with the sequences in parallel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import run_over_sequences
from ....primitives.cpu.jit import jit
from ..basecalls import Basecalls


@jit
def first_base_posteriors(of_states: Any, first: int, bases: int, posteriors: Any) -> None:
    """Write the posteriors of the bases of the first k-mer, `[k]`, given those of k-mers."""
    C = power = len(of_states)
    for i in range(len(posteriors)):
        power //= bases
        total = 0.0
        for c in range(C):
            if c // power % bases == first // power % bases:
                total += of_states[c]
        posteriors[i] = total


@jit(nogil=True)
def crf_calls_scan(
    share: Any,
    lengths: Any,
    by_base: Any,
    of_first: Any,
    path: Any,
    bases: int,
    state_len: int,
    calls: Any,
) -> None:
    """Write the bases of each sequence."""
    states, edges = path
    labels, numbers, log_probs, steps, moves = calls
    A, T = bases + 1, len(edges)
    posteriors = np.empty(state_len + T)
    for n in share:
        labels[n, :], steps[n, :], log_probs[n, :], moves[n, :] = 0, -1, 0.0, False
        first, length, found = states[0, n], lengths[n], 0
        if first >= 0 and 0 <= length <= T:
            found, power = state_len, of_first.shape[1]
            for i in range(state_len):
                power //= bases
                labels[n, i] = 1 + first // power % bases
            first_base_posteriors(of_first[n], first, bases, posteriors[:state_len])
            total, start = 0.0, -1
            for t in range(length):
                if edges[t, n] >= 0 and edges[t, n] % A > 0:
                    if start >= 0:
                        posteriors[found - 1] = total / (t - start)
                    labels[n, found] = 1 + states[t + 1, n] % bases
                    steps[n, found], moves[n, t] = t, True
                    total, start, found = 0.0, t, found + 1
                if start >= 0:
                    total += by_base[t, n, states[t + 1, n] % bases]
            if start >= 0:
                posteriors[found - 1] = total / (length - start)
            for i in range(found):
                log_probs[n, i] = min(np.log(posteriors[i]), 0.0)
        numbers[n] = found


def ctc_crf_calls(
    by_base: Tensor,
    first: Tensor,
    states: Tensor,
    edges: Tensor,
    lengths: Tensor,
    state_len: int,
    dtype: torch.dtype,
) -> Basecalls:
    """Return the bases of paths: states `[T + 1, N]` and edges `[T, N]`, -1 where there is none."""
    T, N, bases = by_base.shape
    S = T + state_len
    arrays = (
        np.empty((N, S), np.int64),
        np.empty(N, np.int64),
        np.empty((N, S)),
        np.empty((N, S), np.int64),
        np.empty((N, T), np.bool_),
    )
    path = states.contiguous().numpy(), edges.contiguous().numpy()
    posteriors = by_base.contiguous().numpy(), first.contiguous().numpy()
    steps = lengths.contiguous().numpy()
    inputs = (steps, *posteriors, path, bases, state_len, arrays)
    run_over_sequences(crf_calls_scan, steps, 1, *inputs)
    calls = Basecalls(*map(torch.from_numpy, arrays))
    return calls._replace(log_probs=calls.log_probs.to(dtype))
