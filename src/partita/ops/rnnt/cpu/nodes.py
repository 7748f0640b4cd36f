"""From logits to the log-probabilities of the arcs of each node, and back, in Numba.

Each call gets some steps; step t of sequence b has the index b * T + t. Logits are `Steps` of
`[B, T, U1, X]`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ....primitives.cpu.batch import start_of
from ....primitives.cpu.half import load_row, store_row
from ....primitives.cpu.jit import jit
from ....primitives.cpu.logits import HUGE, fill_row, greatest, logsumexp_row, row_buffers
from ....primitives.cpu.math import exp


class Batch(NamedTuple):
    """The targets and the lengths of a batch.

    Fields:
        targets: `[B, U]`.
        steps, labels: the lengths, `[B]`; 0 for an invalid sequence.
        blank: the class of the blank.
        T, V: the steps of the nodes, and their classes.
    """

    targets: Any
    steps: Any
    labels: Any
    blank: int
    T: int
    V: int


class Upstream(NamedTuple):
    """The numbers from which the gradients in the logits are made.

    Fields:
        grad: the gradient of each loss, `[B]`.
        posteriors: those of the blank and the label that leave a node, and of its K durations,
            `[2 + K, B, T, U1]`.
        targets: `[B, U]`.
        blank: the class of the blank.
        V: the number of classes, or of durations.
    """

    grad: Any
    posteriors: Any
    targets: Any
    blank: int
    V: int


@jit
def node_row(logits: Any, b: int, t: int, u: int, buffer: Any) -> Any:
    """Return the logits of a node, contiguous: a view, or a copy in the buffer."""
    first, stride = start_of(logits, b, t) + u * logits.strides[2], logits.strides[3]
    if stride == 1 and not len(logits.words):
        return logits.numbers[first : first + len(buffer)]
    load_row(logits, first, stride, buffer)
    return buffer


@jit
def store_node(result: Any, b: int, t: int, u: int, row: Any) -> None:
    """Write the row of a node."""
    store_row(result, start_of(result, b, t) + u * result.strides[2], result.strides[3], row)


@jit
def log_sigmoid(x: float) -> float:
    """Return log(1 / (1 + exp(-x)))."""
    return min(x, 0.0) - np.log1p(np.exp(-abs(x)))


@jit
def log_sum_of_row(row: Any, buffers: Any) -> tuple[float, float]:
    """Return a shift and the log-sum-exp relative to it, 0 unless logits are far from 0.

    Far from it, fp64 has not the digits of the sum's logarithm beside the greatest logit.
    """
    total = logsumexp_row(row, buffers)
    if not HUGE <= abs(total) < np.inf:
        return 0.0, total
    shift, total = greatest(row), 0.0
    for c in range(len(row)):
        total += np.exp(row[c] - shift)
    return shift, np.log(total)


@jit(nogil=True)
def read_nodes(
    share: Any, batch: Any, logits: Any, fused: bool, hat: bool, sigma: float, arcs: Any, lse: Any
) -> None:
    """Compute the log-probabilities of blank and label at each node, and the log-sum-exps.

    These are the first of the blanks' arcs and the first of the labels', `[2 K, B, T, U1]`. The
    log-sum-exps of the logits are written with `fused`; with `hat` they are those of the
    labels. Nodes past the lengths are neither read nor written.
    """
    buffers, labels_only = row_buffers(logits, batch.V), np.empty(batch.V)
    first_label = len(arcs) // 2
    for i in share:
        b, t = i // batch.T, i % batch.T
        if t >= batch.steps[b]:
            continue
        for u in range(batch.labels[b] + 1):
            row = node_row(logits, b, t, u, buffers.row)
            shift, total = 0.0, 0.0
            blank = float(row[batch.blank])
            if hat:
                for c in range(len(row)):
                    labels_only[c] = row[c]
                labels_only[batch.blank] = -np.inf
                shift, total = log_sum_of_row(labels_only, buffers)
                if total != total and greatest(labels_only) == -np.inf:
                    total = -np.inf
                arcs[0, b, t, u] = log_sigmoid(blank) - sigma
            else:
                if fused:
                    shift, total = log_sum_of_row(row, buffers)
                arcs[0, b, t, u] = blank - shift - total - sigma
            if fused:
                lse[b, t, u] = shift + total
            arcs[first_label, b, t, u] = -np.inf
            if u < batch.labels[b] and total != -np.inf:
                apart = log_sigmoid(-blank) if hat else 0.0
                label = row[batch.targets[b, u]] - shift - total + apart
                arcs[first_label, b, t, u] = label - sigma


@jit(nogil=True)
def add_durations(share: Any, batch: Any, logits: Any, steps_of: Any, arcs: Any, lse: Any) -> None:
    """Add the log-probabilities of the durations to those of blank and label; see `read_nodes`.

    `steps_of` are the steps of the arcs, `[2 K]`; a blank of none has the log-probability -inf.
    """
    K = len(steps_of) // 2
    buffers = row_buffers(logits, K)
    for i in share:
        b, t = i // batch.T, i % batch.T
        if t >= batch.steps[b]:
            continue
        for u in range(batch.labels[b] + 1):
            row = node_row(logits, b, t, u, buffers.row)
            shift, total = log_sum_of_row(row, buffers)
            lse[b, t, u] = shift + total
            blank, label = arcs[0, b, t, u], arcs[K, b, t, u]
            for k in range(K):
                duration = row[k] - shift - total
                arcs[k, b, t, u] = blank + duration if steps_of[k] > 0 else -np.inf
                arcs[K + k, b, t, u] = label + duration


@jit
def softmax_row(row: Any, lse: float, factor: float, excluded: int, result: Any) -> None:
    """Write factor * exp(row - lse), in which the sum over the row has no `excluded` class."""
    if HUGE <= abs(lse) < np.inf:
        total = 0.0
        for c in range(len(result)):
            total += exp(row[c] - lse) if c != excluded else 0.0
        factor /= total
    for c in range(len(result)):
        result[c] = factor * exp(row[c] - lse)


@jit
def finish_row(result: Any, clamp: float, grad: float) -> None:
    """Clip the row to ± clamp, if that is above 0, and multiply it by the upstream gradient."""
    if clamp > 0:
        for c in range(len(result)):
            value = result[c]
            value = clamp if value > clamp else value
            result[c] = -clamp if value < -clamp else value
    if grad != 1.0:
        for c in range(len(result)):
            result[c] *= grad


@jit(nogil=True)
def write_gradient(
    share: Any,
    upstream: Any,
    logits: Any,
    lse: Any,
    fused: bool,
    hat: bool,
    clamp: float,
    label_factor: float,
    of_durations: bool,
    result: Any,
) -> None:
    """Write the gradient of some steps in the logits of tokens or of durations.

    `result` may replace the logits. A row whose posteriors are 0 is 0. `label_factor` scales the
    posteriors of labels.
    """
    grad, posteriors, targets, blank_class, V = upstream
    buffer, row_result = np.empty(V, logits.numbers.dtype), np.empty(V)
    T, U1 = posteriors.shape[2:]
    for i in share:
        b, t = i // T, i % T
        for u in range(U1):
            blank = posteriors[0, b, t, u]
            label = posteriors[1, b, t, u] * label_factor
            fill_row(row_result, 0.0)
            if grad[b] != 0.0 and (blank != blank or label != label):
                fill_row(row_result, np.nan)
            elif grad[b] != 0.0 and (blank != 0.0 or label != 0.0):
                if fused:
                    row = node_row(logits, b, t, u, buffer)
                    factor = label if hat else blank + label
                    if of_durations:  # without a factor of labels, in the dtype of the posteriors
                        factor = posteriors[0, b, t, u] + posteriors[1, b, t, u]
                    if lse[b, t, u] != -np.inf:  # as it is where all labels are impossible
                        excluded = blank_class if hat else -1
                        softmax_row(row, lse[b, t, u], factor, excluded, row_result)
                if of_durations:
                    for k in range(V):
                        row_result[k] -= posteriors[2 + k, b, t, u]
                elif hat:  # The probability of the blank minus 1 would cancel.
                    x = float(row[blank_class])
                    apart, rest = 1.0 / (1.0 + np.exp(-x)), 1.0 / (1.0 + np.exp(x))
                    row_result[blank_class] = label * apart - blank * rest
                else:
                    row_result[blank_class] -= blank
                has_label = label != 0.0 and u < targets.shape[1] and not of_durations
                if has_label and 0 <= targets[b, u] < V:
                    row_result[targets[b, u]] -= label
                finish_row(row_result, clamp, grad[b])
            store_node(result, b, t, u, row_result)
