"""Greedy search on the CPU, in Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from ....primitives.cpu.batch import (
    INF,
    as_integers,
    as_steps,
    contiguous_row,
    run_over_sequences,
)
from ....primitives.cpu.jit import jit
from ....primitives.cpu.logits import Logits, centered_row, logsumexp_row, row_buffers
from ..common import Hypotheses, empty_hypotheses


def run_search(
    kernel: Callable[..., None],
    logits: Tensor,
    input_lengths: Tensor,
    from_logits: bool,
    nbest: int,
    work: int,
    *args: Any,
) -> Hypotheses:
    """Run `kernel(share, lengths, logits, found, *args)` for all sequences; return what it found.

    Args:
        kernel: a function that writes to `Hypotheses` of arrays.
        work: the number of edges of a step.
    """
    found, lengths = empty_hypotheses(logits, nbest), as_integers(input_lengths)
    arrays = Hypotheses._make(x.numpy() for x in found)
    inputs = Logits(as_steps(logits), logits.shape[0], logits.shape[2], from_logits)
    run_over_sequences(kernel, lengths, work, lengths, inputs, arrays, *args)
    return found


@jit(nogil=True)
def greedy_scan(share: Any, lengths: Any, logits: Any, found: Any, blank: int) -> None:
    """Decode each sequence."""
    steps, buffers = logits.steps, row_buffers(logits.steps, logits.C)
    for n in share:
        valid = 0 <= lengths[n] <= logits.T
        previous, S, total = blank, 0, 0.0
        for t in range(lengths[n] if valid else 0):
            row = contiguous_row(steps, t, n, buffers.row)
            best = 0
            for c in range(logits.C):
                valid = valid and row[c] < INF
                best = c if row[c] > row[best] else best
            lse = logsumexp_row(row, buffers) if logits.from_logits else 0.0
            row, lse = centered_row(row, lse, buffers)
            valid = valid and lse == lse
            total += row[best] - lse
            if best not in (blank, previous):
                found.tokens[n, 0, S], found.steps[n, 0, S] = best, t
                S += 1
            previous = best
        S, found.scores[n, 0] = (S, total) if valid else (0, np.nan)
        found.lengths[n, 0] = S
        found.tokens[n, 0, S:], found.steps[n, 0, S:] = -1, -1


def ctc_greedy_search(
    logits: Tensor, input_lengths: Tensor, blank: int, from_logits: bool
) -> Hypotheses:
    """Decode each sequence by the most probable class of each step."""
    work = logits.shape[2]
    return run_search(greedy_scan, logits, input_lengths, from_logits, 1, work, blank)
