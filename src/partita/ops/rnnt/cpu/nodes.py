"""From logits to the log-probabilities of the arcs of each node, in Numba.

Each call gets some steps; step t of sequence b has the index b * T + t. Nodes past the lengths are
neither read nor written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....primitives.cpu.batch import HUGE, LANES, logsumexp_row
from ....primitives.cpu.jit import jit
from .batch import node_row


@jit
def log_sigmoid(x: float) -> float:
    """Return log(1 / (1 + exp(-x)))."""
    return min(x, 0.0) - np.log1p(np.exp(-abs(x)))


@jit
def log_sum_of_row(row: Any, maxima: Any, sums: Any) -> tuple[float, float]:
    """Return a shift and the log-sum-exp relative to it, 0 unless logits are far from 0.

    Far from it, fp64 has not the digits of the sum's logarithm beside the greatest logit.
    """
    total = logsumexp_row(row, maxima, sums)
    if not HUGE <= abs(total) < np.inf:
        return 0.0, total
    shift, total = row.max(), 0.0
    for c in range(len(row)):
        total += np.exp(row[c] - shift)
    return shift, np.log(total)


@jit
def log_sum_of_labels(row: Any, maxima: Any, sums: Any) -> tuple[float, float]:
    """Return what `log_sum_of_row` does, or 0 and -inf where all labels are impossible."""
    shift, total = log_sum_of_row(row, maxima, sums)
    if total == total:
        return shift, total
    for c in range(len(row)):
        if row[c] != -np.inf:
            return shift, total
    return 0.0, -np.inf


@jit(nogil=True)
def read_rnnt_nodes(
    share: Any, batch: Any, logits: Any, fused: bool, hat: bool, arcs: Any, lse: Any
) -> None:
    """Compute the log-probabilities of blank and label, `[2, B, T, U1]`, and the log-sum-exps.

    With `hat` the log-sum-exp is that of the labels. Without `fused` it is not written.
    """
    buffer, labels_only = np.empty(logits.size, logits.numbers.dtype), np.empty(logits.size)
    maxima, sums = np.empty(LANES), np.empty(LANES)
    for i in share:
        b, t = i // batch.T, i % batch.T
        if t >= batch.steps[b]:
            continue
        for u in range(batch.labels[b] + 1):
            row = node_row(logits, b, t, u, buffer)
            shift, total = 0.0, 0.0
            blank = float(row[batch.blank])
            if hat:
                for c in range(len(row)):
                    labels_only[c] = row[c]
                labels_only[batch.blank] = -np.inf
                shift, total = log_sum_of_labels(labels_only, maxima, sums)
                arcs[0, b, t, u] = log_sigmoid(blank)
            else:
                if fused:
                    shift, total = log_sum_of_row(row, maxima, sums)
                arcs[0, b, t, u] = blank - shift - total
            if fused:
                lse[b, t, u] = shift + total
            arcs[1, b, t, u] = -np.inf
            if u < batch.labels[b] and total != -np.inf:
                apart = log_sigmoid(-blank) if hat else 0.0
                arcs[1, b, t, u] = row[batch.targets[b, u]] - shift - total + apart


@jit(nogil=True)
def read_tdt_nodes(
    share: Any,
    batch: Any,
    tokens: Any,
    durations: Any,
    sigma: float,
    steps_of: Any,
    arcs: Any,
    token_lse: Any,
    duration_lse: Any,
) -> None:
    """Compute the log-probabilities of the arcs, `[2 K, B, T, U1]`, blanks first.

    `steps_of` are the steps of the arcs, `[2 K]`; a blank of none has the log-probability -inf.
    """
    K = durations.size
    buffer = np.empty(tokens.size, tokens.numbers.dtype)
    duration_buffer = np.empty(K, durations.numbers.dtype)
    maxima, sums = np.empty(LANES), np.empty(LANES)
    for i in share:
        b, t = i // batch.T, i % batch.T
        if t >= batch.steps[b]:
            continue
        for u in range(batch.labels[b] + 1):
            row = node_row(tokens, b, t, u, buffer)
            row_of_durations = node_row(durations, b, t, u, duration_buffer)
            shift, total = log_sum_of_row(row, maxima, sums)
            duration_shift, duration_total = log_sum_of_row(row_of_durations, maxima, sums)
            token_lse[b, t, u] = shift + total
            duration_lse[b, t, u] = duration_shift + duration_total
            blank, label = row[batch.blank] - shift - total - sigma, -np.inf
            if u < batch.labels[b]:
                label = row[batch.targets[b, u]] - shift - total - sigma
            for k in range(K):
                duration = row_of_durations[k] - duration_shift - duration_total
                arcs[k, b, t, u] = blank + duration if steps_of[k] > 0 else -np.inf
                arcs[K + k, b, t, u] = label + duration
