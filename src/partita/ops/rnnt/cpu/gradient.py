"""The gradient in the logits from the posteriors of the arcs, in Numba, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....primitives.cpu.batch import HUGE
from ....primitives.cpu.jit import jit
from ....primitives.cpu.math import exp
from .batch import node_row, store_node


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


@jit
def subtract_label(result: Any, targets: Any, b: int, u: int, posterior: float) -> None:
    """Subtract the posterior of the label that leaves a node; it is 0 where there is none."""
    if posterior != 0.0 and u < targets.shape[1] and 0 <= targets[b, u] < len(result):
        result[targets[b, u]] -= posterior


@jit(nogil=True)
def write_rnnt_gradient(
    share: Any,
    targets: Any,
    blank_class: int,
    T: int,
    grad: Any,
    logits: Any,
    lse: Any,
    posteriors: Any,
    fused: bool,
    hat: bool,
    clamp: float,
    label_factor: float,
    result: Any,
) -> None:
    """Write the gradient of some steps, whose logits `result` may replace.

    A row whose posteriors are 0 is 0. `label_factor` scales the posteriors of labels.
    """
    buffer, row_result = np.empty(logits.size, logits.numbers.dtype), np.empty(logits.size)
    U1 = posteriors.shape[3]
    for i in share:
        b, t = i // T, i % T
        for u in range(U1):
            blank = posteriors[0, b, t, u]
            label = posteriors[1, b, t, u] * label_factor
            row_result[:] = 0.0
            if grad[b] != 0.0 and (blank != blank or label != label):
                row_result[:] = np.nan
            elif grad[b] != 0.0 and (blank != 0.0 or label != 0.0):
                if fused:
                    row = node_row(logits, b, t, u, buffer)
                    factor = label if hat else blank + label
                    if lse[b, t, u] != -np.inf:  # as it is where all labels are impossible
                        excluded = blank_class if hat else -1
                        softmax_row(row, lse[b, t, u], factor, excluded, row_result)
                if hat:  # The probability of the blank minus 1 would cancel.
                    x = float(row[blank_class])
                    apart, rest = 1.0 / (1.0 + np.exp(-x)), 1.0 / (1.0 + np.exp(x))
                    row_result[blank_class] = label * apart - blank * rest
                else:
                    row_result[blank_class] -= blank
                subtract_label(row_result, targets, b, u, label)
                finish_row(row_result, clamp, grad[b])
            store_node(result, b, t, u, row_result)


@jit(nogil=True)
def write_tdt_gradient(
    share: Any,
    targets: Any,
    blank_class: int,
    T: int,
    grad: Any,
    tokens: Any,
    durations: Any,
    token_lse: Any,
    duration_lse: Any,
    posteriors: Any,
    token_result: Any,
    duration_result: Any,
) -> None:
    """Write the gradients of some steps in the logits of tokens and durations.

    `posteriors` are `[2 + K, B, T, U1]`. A row whose posteriors are 0 is 0.
    """
    K, U1 = durations.size, posteriors.shape[3]
    buffer, row_result = np.empty(tokens.size, tokens.numbers.dtype), np.empty(tokens.size)
    duration_buffer, duration_row = np.empty(K, durations.numbers.dtype), np.empty(K)
    for i in share:
        b, t = i // T, i % T
        for u in range(U1):
            blank, label = posteriors[0, b, t, u], posteriors[1, b, t, u]
            row_result[:], duration_row[:] = 0.0, 0.0
            total = blank + label
            if grad[b] != 0.0 and total != total:
                row_result[:], duration_row[:] = np.nan, np.nan
            elif grad[b] != 0.0 and total != 0.0:
                row = node_row(tokens, b, t, u, buffer)
                softmax_row(row, token_lse[b, t, u], total, -1, row_result)
                row_result[blank_class] -= blank
                subtract_label(row_result, targets, b, u, label)
                row = node_row(durations, b, t, u, duration_buffer)
                softmax_row(row, duration_lse[b, t, u], total, -1, duration_row)
                for k in range(K):
                    duration_row[k] -= posteriors[2 + k, b, t, u]
                finish_row(row_result, 0.0, grad[b])
                finish_row(duration_row, 0.0, grad[b])
            store_node(token_result, b, t, u, row_result)
            store_node(duration_result, b, t, u, duration_row)
