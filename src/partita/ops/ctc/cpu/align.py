"""CTC's best alignment on the CPU, in Numba: a Viterbi scan, and its trace by two-bit pointers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF, LOWEST, contiguous_row, start_of
from ....primitives.cpu.half import number_at
from ....primitives.cpu.jit import jit
from ....primitives.cpu.logits import HUGE, centered_row, logsumexp_row, row_buffers
from ....runtime.dtypes import acc_dtype
from ..common import ScoreOptions
from .batch import IMPOSSIBLE, as_batch, fill_emitted, has_nan, lattice_of, run_over_lattices


@jit(nogil=True)
def viterbi_scan(
    share: Any,
    batch: Any,
    logits: Any,
    pointers: Any,
    labels: Any,
    tokens: Any,
    scores: Any,
    score: Any,
) -> None:
    """Find the best alignment of each sequence and trace it by pointers, `[N, T, M / 4]` bytes.

    Steps without a label get the label -1 and the score 0. A sequence that is invalid or has NaN
    gets the label -1 and the score NaN at all steps.
    """
    steps = logits.steps
    buffers = row_buffers(steps, logits.C)
    for n in share:
        lattice = lattice_of(batch, logits, n)
        classes, skips, states = lattice.classes, lattice.skips, len(lattice.classes)
        emitted, lse = np.empty(states), np.empty(lattice.length)
        before, after = np.full(states + 2, LOWEST), np.full(states + 2, LOWEST)
        before[2] = 0.0
        for t in range(lattice.length):
            row = contiguous_row(steps, t, n, buffers.row)
            lse[t] = logsumexp_row(row, buffers) if logits.from_logits else 0.0
            row, norm = centered_row(row, lse[t], buffers)
            fill_emitted(batch, lattice, row, norm, emitted)
            for c in range(states):
                # NaN counts as the greatest value, so that it reaches the result.
                best, edge = before[c + 2], 0
                if (before[c + 1] > best) | (before[c + 1] != before[c + 1]):
                    best, edge = before[c + 1], 1
                if (before[c] + skips[c] > best) | (before[c] + skips[c] != before[c] + skips[c]):
                    best, edge = before[c], 2
                value = best + emitted[c]
                after[c + 2] = LOWEST if value <= IMPOSSIBLE else value
                packed = pointers[n, t, c // 4] if c % 4 else 0
                pointers[n, t, c // 4] = packed | (edge << (2 * (c % 4)))
            before, after = after, before
        state = states - 2 if states > 1 and before[states] >= before[states + 1] else states - 1
        best = -INF if before[state + 2] <= IMPOSSIBLE else before[state + 2]
        score[n] = best if lattice.is_valid and not has_nan(before) else np.nan
        labels[n], tokens[n] = -1, -1
        scores[n] = 0.0 if score[n] == score[n] else np.nan
        for t in range(lattice.length - 1 if score[n] > -INF else -1, -1, -1):
            label = classes[state]
            labels[n, t] = label if label < logits.C else batch.star
            tokens[n, t] = state // 2 if state % 2 else -1
            if label < logits.C:
                at = start_of(steps, t, n) + label * steps.strides[2]
                value = number_at(steps, at) - lse[t]
                if HUGE <= abs(lse[t]) < INF:
                    row = contiguous_row(steps, t, n, buffers.row)
                    row, norm = centered_row(row, lse[t], buffers)
                    value = row[label] - norm
                scores[n, t] = value - (batch.priors[label] if len(batch.priors) else 0.0)
            state -= (pointers[n, t, state // 4] >> (2 * (state % 4))) & 3


def ctc_align(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    max_target_len: int,
    blank: int,
    from_logits: bool,
    label_priors: Tensor | None = None,
    prior_scale: float = 1.0,
    star: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the best alignment: label, position and score of each step, and the scores' sum."""
    targets = (labels, offsets, input_lengths, target_lengths, max_target_len, blank, from_logits)
    inputs = as_batch(logits, *targets, ScoreOptions(label_priors, prior_scale, star))
    T, N, _ = logits.shape
    pointers = np.empty((N, T, max_target_len // 2 + 1), np.uint8)
    results = np.empty((N, T), np.int64), np.empty((N, T), np.int64), np.empty((N, T)), np.empty(N)
    run_over_lattices(viterbi_scan, *inputs, pointers, *results)
    best, tokens, scores, score = map(torch.from_numpy, results)
    dtype = acc_dtype(logits.dtype)
    return best, tokens, scores.to(dtype), score.to(dtype)
