"""Greedy search on the CPU, in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import (
    INF,
    LANES,
    as_steps,
    centered_row,
    contiguous_row,
    logsumexp_row,
    run_over_sequences,
)
from ....primitives.cpu.jit import jit
from ....runtime.dtypes import acc_dtype
from ..common import Hypotheses


@jit(nogil=True)
def greedy_scan(
    share: Any,
    lengths: Any,
    scores: Any,
    size: Any,
    blank: int,
    from_logits: bool,
    tokens: Any,
    counts: Any,
    totals: Any,
    emitted: Any,
) -> None:
    """Decode each sequence; `size` is (T, C)."""
    T, C = size
    buffer = np.empty(C, scores.numbers.dtype)
    maxima, sums = np.empty(LANES), np.empty(LANES)
    for n in share:
        length = lengths[n]
        valid = 0 <= length <= T
        previous, S, total = blank, 0, 0.0
        for t in range(length if valid else 0):
            row = contiguous_row(scores, t, n, buffer)
            best = 0
            for c in range(C):
                valid = valid and row[c] < INF
                best = c if row[c] > row[best] else best
            lse = logsumexp_row(row, maxima, sums) if from_logits else 0.0
            row, lse = centered_row(row, lse, buffer, maxima, sums)
            valid = valid and lse == lse
            total += row[best] - lse
            if best not in (blank, previous):
                tokens[n, S], emitted[n, S] = best, t
                S += 1
            previous = best
        counts[n], totals[n] = (S, total) if valid else (0, np.nan)
        tokens[n, counts[n] :] = -1
        emitted[n, counts[n] :] = -1


def ctc_greedy_search(
    logits: Tensor, input_lengths: Tensor, blank: int, from_logits: bool
) -> Hypotheses:
    """Decode each sequence by the most probable class of each step."""
    T, N, C = logits.shape
    tokens, emitted = np.empty((N, T), np.int64), np.empty((N, T), np.int64)
    counts, totals = np.empty(N, np.int64), np.empty(N)
    lengths = input_lengths.contiguous().numpy()
    inputs = (lengths, as_steps(logits), (T, C), blank, from_logits)
    run_over_sequences(greedy_scan, lengths, C, *inputs, tokens, counts, totals, emitted)
    found = Hypotheses(*(torch.from_numpy(x)[:, None] for x in (tokens, counts, totals, emitted)))
    return found._replace(scores=found.scores.to(acc_dtype(logits.dtype)))
