"""Expected counts of the transitions of dense linear chains: sums of posteriors over the steps.

In linear arithmetic the counts of constant transitions are exp(transitions) times a product of the
states of both scans over time, which each half of a sequence adds up block by block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....primitives.cpu.jit import jit
from ....primitives.cpu.math import exp
from ....primitives.cpu.vectors import pointer_to
from .linear_steps import add_outer_products, scale_row


@jit
def add_counts(
    alpha: Any,
    beta: Any,
    weights: Any,
    transposed: int,
    total: float,
    grad_output: float,
    line: Any,
    counts: Any,
) -> None:
    """Add the posteriors of the transitions of a step, times grad_output, to `[C, C]`.

    The arithmetic is that of the log domain. The weights may be transposed, the counts are not.
    """
    C = len(weights)
    if total == -np.inf:
        return
    rows, columns = (beta, alpha) if transposed else (alpha, beta)
    for i in range(C):
        w, value = weights[i], rows[i] - total
        for j in range(C):
            line[j] = exp(value + w[j] + columns[j]) * grad_output
        if transposed:
            for j in range(C):
                counts[j, i] += line[j]
        else:
            row = counts[i]
            for j in range(C):
                row[j] += line[j]


@jit
def store_counts(
    linear: bool,
    varies: bool,
    weights: Any,
    states: Any,
    others: Any,
    totals: Any,
    t: int,
    by: int,
    n: int,
    skip: int,
    grad_output: float,
    counts: Any,
) -> None:
    """Add the counts of the steps at tokens t, t + by, ..., and leave out the first `skip` ones.

    Transitions that vary have counts `[T - 1, sequences, C, C]`. Constant ones have partial sums of
    each direction of time, `[2, sequences, C, C]` in the log domain, and `[2, sequences, W, W]` in
    linear arithmetic: without the factor exp(transitions), and transposed if time runs backwards.

    Args:
        states: the states of this scan before each token; in linear arithmetic they are scaled
            here.
        others: the states of the other scan at each token.
        totals: those of `posteriors`.
    """
    backward, index = 1 if by < 0 else 0, n % counts.shape[1]
    if linear:
        width, rows = states.shape[1], pointer_to(states)
        for k in range(skip, len(totals)):
            scale_row(rows, k * width, width, totals[k])
        add_outer_products(states, others, skip, len(totals), counts[backward, index])
        return
    line = np.empty(len(weights))
    for k in range(skip, len(totals)):
        token = t + k * by
        alpha, beta = states[k], others[k]
        if backward:
            alpha, beta = beta, alpha
        row = backward
        if varies:
            row = token if backward else token - 1
        add_counts(
            *(alpha, beta, weights, backward, totals[k], grad_output, line),
            counts[row, index],
        )
