"""CTC's best alignment on the CPU, in Numba: a Viterbi scan, and its trace by two-bit pointers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import (
    HUGE,
    INF,
    LANES,
    LOWEST,
    as_steps,
    centered_row,
    contiguous_row,
    logsumexp_row,
    run_over_batch,
    start_of,
)
from ....primitives.cpu.half import number_at
from ....primitives.cpu.jit import jit
from ....runtime.dtypes import acc_dtype
from ..common import ScoreOptions
from .batch import (
    IMPOSSIBLE,
    as_batch,
    fill_emitted,
    fill_states,
    has_nan,
    init_alpha,
    sequence_lengths,
)


@jit(nogil=True)
def viterbi_scan(
    share: Any,
    batch: Any,
    scores: Any,
    from_logits: bool,
    pointers: Any,
    labels_out: Any,
    tokens: Any,
    scores_out: Any,
    score: Any,
) -> None:
    """Find the best alignment of each sequence and trace it by pointers, `[N, T, M / 4]` bytes.

    Steps without a label get the label -1 and the score 0. A sequence that is invalid or has NaN
    gets the label -1 and the score NaN at all steps.
    """
    max_states, buffer = 2 * batch.max_target_len + 1, np.empty(batch.C, scores.numbers.dtype)
    maxima, sums = np.empty(LANES), np.empty(LANES)
    for n in share:
        labels, skips = np.empty(max_states, np.int64), np.empty(max_states)
        emitted = np.empty(max_states)
        length, target_len, valid = sequence_lengths(batch, n)
        lse = np.zeros(max(length, 1))
        states = fill_states(batch, n, target_len, labels, skips)
        has_star = labels[:states].max() == batch.C
        before, after = np.empty(max_states + 2), np.full(max_states + 2, LOWEST)
        init_alpha(before, states)
        for t in range(length):
            row = contiguous_row(scores, t, n, buffer)
            lse[t] = logsumexp_row(row, maxima, sums) if from_logits else 0.0
            row, norm = centered_row(row, lse[t], buffer, maxima, sums)
            fill_emitted(batch, row, norm, labels, states, has_star, emitted)
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
        score[n] = -INF if before[state + 2] <= IMPOSSIBLE else before[state + 2]
        if not valid or has_nan(before[: states + 2]):
            score[n] = np.nan
        for t in range(len(labels_out[n])):
            labels_out[n, t], tokens[n, t] = -1, -1
            scores_out[n, t] = 0.0 if score[n] == score[n] else np.nan
        for t in range(length - 1 if score[n] > -INF else -1, -1, -1):
            label = labels[state]
            labels_out[n, t] = label if label < batch.C else batch.star
            tokens[n, t] = state // 2 if state % 2 else -1
            if label < batch.C:
                at = start_of(scores, t, n) + label * scores.strides[2]
                value = number_at(scores, at) - lse[t]
                if HUGE <= abs(lse[t]) < INF:
                    row = contiguous_row(scores, t, n, buffer)
                    row, norm = centered_row(row, lse[t], buffer, maxima, sums)
                    value = row[label] - norm
                scores_out[n, t] = value - (batch.priors[label] if len(batch.priors) else 0.0)
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
    targets = (labels, offsets, input_lengths, target_lengths, max_target_len, blank)
    T, N, _ = logits.shape
    pointers = np.empty((N, T, max_target_len // 2 + 1), dtype=np.uint8)
    classes, tokens = np.empty((N, T), np.int64), np.empty((N, T), np.int64)
    scores, score = np.empty((N, T)), np.empty(N)
    results = (classes, tokens, scores, score)
    inputs = (as_steps(logits), from_logits, pointers)
    batch = as_batch(logits, *targets, ScoreOptions(label_priors, prior_scale, star))
    run_over_batch(viterbi_scan, batch, *inputs, *results)
    labels_found, tokens_found, scores_found, score_found = map(torch.from_numpy, results)
    dtype = acc_dtype(logits.dtype)
    return labels_found, tokens_found, scores_found.to(dtype), score_found.to(dtype)
