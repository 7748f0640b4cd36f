"""A path of CTC-CRF on the CPU, and the posteriors for its qualities, in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import as_steps, row_at, run_over_sequences
from ....primitives.cpu.jit import ZERO, jit
from ...chain.cpu.logz import chain_gradient, chain_logz
from ...chain.cpu.paths import chain_scan, chain_viterbi
from ..common import ChainFunctions, path_and_posteriors
from .crf_beam import ctc_crf_beam_search

CHAIN = ChainFunctions(chain_viterbi, chain_scan, chain_logz, chain_gradient)


@jit
def leaving_posteriors(row: Any, strides: Any, sizes: Any, first: Any) -> None:
    """Write the posteriors of the states before the first step, `[C]`, given its edges."""
    C, A = sizes
    bases, top = A - 1, C // (A - 1)
    for c in range(C):
        total = np.float64(row[c * strides[2]])
        for target in range(c * bases % C, c * bases % C + bases):
            # The k-mer j x moves to the k-mers x e through their column 1 + j.
            total += row[target * strides[2] + (1 + c // top) * strides[3]]
        first[c] = total


@jit(nogil=True)
def crf_posteriors_scan(
    share: Any, lengths: Any, marginals: Any, sizes: Any, by_base: Any, first: Any
) -> None:
    """Sum the posteriors of edges by the base that each step ends in."""
    C, A = sizes
    T, bases = len(by_base), A - 1
    for n in share:
        length = lengths[n] if 0 <= lengths[n] <= T else 0
        by_base[:, n, :] = 0.0
        for t in range(length):
            row = row_at(marginals, t, n)
            for c in range(C):
                total = 0.0
                for a in range(A):
                    total += row[c * marginals.strides[2] + a * marginals.strides[3]]
                by_base[t, n, c % bases] += total
        if length:
            leaving_posteriors(row_at(marginals, ZERO, n), marginals.strides, sizes, first[n])
        else:
            first[n, :] = 1.0 / C


def ctc_crf_base_posteriors(marginals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the posteriors for qualities, given those of edges; see the reference."""
    T, N, C, A = marginals.shape
    by_base, first, steps = np.empty((T, N, A - 1)), np.empty((N, C)), lengths.contiguous().numpy()
    inputs = steps, as_steps(marginals), (C, A), by_base, first
    run_over_sequences(crf_posteriors_scan, steps, C * A, *inputs)
    return torch.from_numpy(by_base), torch.from_numpy(first)


def ctc_crf_path(
    scores: Tensor, source: Tensor, input_lengths: Tensor, beam_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a path and the posteriors for its qualities, as the reference does."""
    own = ctc_crf_beam_search, ctc_crf_base_posteriors
    return path_and_posteriors(CHAIN, *own, scores, source, input_lengths, beam_width)
