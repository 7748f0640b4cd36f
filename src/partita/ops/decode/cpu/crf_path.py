"""A path of CTC-CRF on the CPU, its bases and their posteriors, in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import as_integers, as_steps, row_at, run_over_sequences
from ....primitives.cpu.jit import ZERO, jit
from ...chain.cpu.logz import chain_gradient, chain_logz
from ...chain.cpu.paths import chain_scan, chain_viterbi
from ..basecalls import Basecalls, empty_basecalls
from ..common import ChainFunctions, empty_posteriors, path_and_posteriors
from .crf_beam import ctc_crf_beam_search

CHAIN = ChainFunctions(chain_viterbi, chain_scan, chain_logz, chain_gradient)


@jit(nogil=True)
def crf_posteriors_scan(share: Any, lengths: Any, marginals: Any, by_base: Any, first: Any) -> None:
    """Sum the posteriors of edges by the base that each step ends in, and by the first k-mer."""
    T, _, bases = by_base.shape
    C, strides = first.shape[1], marginals.strides
    for n in share:
        length = lengths[n] if 0 <= lengths[n] <= T else 0
        by_base[:, n, :] = 0.0
        for t in range(length):
            row = row_at(marginals, t, n)
            for c in range(C):
                total = 0.0
                for a in range(bases + 1):
                    total += row[c * strides[2] + a * strides[3]]
                by_base[t, n, c % bases] += total
        first[n, :] = 1.0 / C
        row = row_at(marginals, ZERO, n)
        for c in range(C if length else 0):
            first[n, c] = row[c * strides[2]]
            for target in range(c * bases % C, c * bases % C + bases):
                # The k-mer j x moves to the k-mers x e through their column 1 + j.
                first[n, c] += row[target * strides[2] + (1 + c // (C // bases)) * strides[3]]


def ctc_crf_base_posteriors(marginals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the posteriors for qualities, given those of edges; see the reference."""
    C, A = marginals.shape[2:]
    found, steps = empty_posteriors(marginals), as_integers(lengths)
    arrays = [x.numpy() for x in found]
    run_over_sequences(crf_posteriors_scan, steps, C * A, steps, as_steps(marginals), *arrays)
    return found


def ctc_crf_path(
    scores: Tensor, source: Tensor, input_lengths: Tensor, beam_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a path and the posteriors for its qualities, as the reference does."""
    own = ctc_crf_beam_search, ctc_crf_base_posteriors
    return path_and_posteriors(CHAIN, *own, scores, source, input_lengths, beam_width)


@jit(nogil=True)
def crf_calls_scan(
    share: Any,
    lengths: Any,
    by_base: Any,
    of_first: Any,
    states: Any,
    edges: Any,
    state_len: int,
    calls: Any,
) -> None:
    """Write the bases of each sequence."""
    labels, numbers, log_probs, steps, moves = calls
    T, bases = len(edges), by_base.shape[2]
    posteriors = np.empty(state_len + T)
    for n in share:
        labels[n, :], steps[n, :], log_probs[n, :], moves[n, :] = 0, -1, 0.0, False
        first, length, found = states[0, n], lengths[n], 0
        if first >= 0 and 0 <= length <= T:
            found, power = state_len, of_first.shape[1]
            for i in range(state_len):
                power //= bases
                base, posteriors[i] = first // power % bases, 0.0
                labels[n, i] = 1 + base
                for c in range(of_first.shape[1]):
                    if c // power % bases == base:
                        posteriors[i] += of_first[n, c]
            total, start = 0.0, -1
            for t in range(length):
                if edges[t, n] >= 0 and edges[t, n] % (bases + 1) > 0:
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
    calls = empty_basecalls(by_base, state_len, torch.float64)
    steps, inputs = as_integers(lengths), (by_base, first, states, edges)
    arrays = [x.contiguous().numpy() for x in inputs]
    found = Basecalls._make(x.numpy() for x in calls)
    run_over_sequences(crf_calls_scan, steps, 1, steps, *arrays, state_len, found)
    return calls._replace(log_probs=calls.log_probs.to(dtype))
