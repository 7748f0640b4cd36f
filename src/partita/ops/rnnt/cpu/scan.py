"""Sums and maxima over the paths of a transducer's lattice, in Numba.

An arc advances by some steps and by 0 or 1 labels. The sums go by anti-diagonals n = t + u: all of
a diagonal's nodes depend on earlier diagonals only, so the loop over them becomes vector code.
Inside of the scans LOWEST stands for -inf, so that no difference of two states is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....primitives.cpu.batch import LOWEST
from ....primitives.cpu.jit import jit
from ....primitives.cpu.math import exp, exp_floor, log

IMPOSSIBLE = LOWEST / 2  # a smaller value is the sum of LOWEST and log-probabilities


@jit
def add_rows(a: Any, b: Any, result: Any) -> None:
    """Write the sum of two rows."""
    for u in range(len(result)):
        result[u] = a[u] + b[u]


@jit
def raise_maxima(row: Any, maxima: Any) -> None:
    """Raise the maxima to the numbers of a row."""
    for u in range(len(maxima)):
        maxima[u] = row[u] if row[u] > maxima[u] else maxima[u]


@jit
def add_exponentials(row: Any, maxima: Any, totals: Any) -> None:
    """Add exp(row - maxima) to the totals."""
    for u in range(len(maxima)):
        totals[u] += exp_floor(row[u] - maxima[u])


@jit
def write_logarithms(maxima: Any, totals: Any, result: Any) -> None:
    """Write maxima + log(totals), which is LOWEST where there is no path; NaN passes through."""
    for u in range(len(maxima)):
        value = maxima[u] + log(totals[u])
        result[u] = LOWEST if value <= IMPOSSIBLE else value


@jit
def log_sum_rows(terms: Any, first: int, last: int, maxima: Any, totals: Any, result: Any) -> None:
    """Write the log-sum-exp of the terms `[A, U1]` for the positions from `first` to `last`."""
    highest, total = maxima[first : last + 1], totals[first : last + 1]
    highest[:] = LOWEST
    total[:] = 0.0
    for a in range(len(terms)):
        raise_maxima(terms[a, first : last + 1], highest)
    for a in range(len(terms)):
        add_exponentials(terms[a, first : last + 1], highest, total)
    write_logarithms(highest, total, result[first : last + 1])


@jit
def by_diagonals(
    arcs: Any, b: int, steps: int, labels: int, steps_of: Any, labels_of: Any, delay_penalty: float
) -> Any:
    """Return the scores of the arcs of a sequence by anti-diagonals, `[A, N, U + 1]`.

    They are -inf where no node is. The delay penalty is added to the labels.
    """
    result = np.full((len(arcs), steps + labels, labels + 1), -np.inf)
    for a in range(len(arcs)):
        for t in range(steps):
            extra = delay_penalty * ((steps - 1) / 2 - t) if labels_of[a] else 0.0
            for u in range(labels + 1):
                result[a, t + u, u] = arcs[a, b, t, u] + extra
    return result


@jit
def forward_states(scores: Any, steps: int, labels: int, steps_of: Any, labels_of: Any) -> Any:
    """Return alpha by anti-diagonals, `[N, U + 1]`, LOWEST where no node is."""
    A, N, U1 = scores.shape
    alpha = np.full((N, U1), LOWEST)
    alpha[0, 0] = 0.0
    terms, maxima, totals = np.full((A, U1), LOWEST), np.empty(U1), np.empty(U1)
    for n in range(1, N):
        first, last = max(0, n - steps + 1), min(n, labels)
        for a in range(A):
            m, shift = n - steps_of[a] - labels_of[a], labels_of[a]
            start = max(first, shift)
            if m < 0:
                terms[a, first : last + 1] = LOWEST
                continue
            terms[a, 0] = LOWEST
            before = slice(start - shift, last + 1 - shift)
            add_rows(alpha[m, before], scores[a, m, before], terms[a, start : last + 1])
        log_sum_rows(terms, first, last, maxima, totals, alpha[n])
    return alpha


@jit
def log_partition(
    alpha: Any, scores: Any, steps: int, labels: int, steps_of: Any, labels_of: Any
) -> float:
    """Return log Z, the log-sum over the blanks that end the path; -inf if there is none."""
    highest, total = LOWEST, 0.0
    for a in range(len(scores)):
        if not labels_of[a] and 0 < steps_of[a] <= steps:
            n = steps - steps_of[a] + labels
            value = alpha[n, labels] + scores[a, n, labels]
            highest = value if value > highest else highest
    for a in range(len(scores)):
        if not labels_of[a] and 0 < steps_of[a] <= steps:
            n = steps - steps_of[a] + labels
            total += exp_floor(alpha[n, labels] + scores[a, n, labels] - highest)
    if total != total:
        return np.nan
    return highest + np.log(total) if highest > IMPOSSIBLE else -np.inf


@jit
def write_posteriors(alpha: Any, terms: Any, logz: float, n: int, first: int, result: Any) -> None:
    """Write the posteriors of an arc at the nodes of a diagonal into `[T, U1]`."""
    for u in range(len(alpha)):
        terms[u] = exp(alpha[u] + terms[u] - logz)
    for u in range(len(alpha)):
        result[n - first - u, first + u] = terms[u]


@jit
def backward_posteriors(
    alpha: Any,
    scores: Any,
    logz: float,
    steps: int,
    labels: int,
    steps_of: Any,
    labels_of: Any,
    posteriors: Any,
    b: int,
) -> None:
    """Write the posteriors of the arcs of a sequence, `[A, B, T, U1]`, from alpha and beta."""
    A, N, U1 = scores.shape
    beta = np.full((N + steps_of.max() + 1, U1 + 1), LOWEST)
    terms, maxima, totals = np.empty((A, U1)), np.empty(U1), np.empty(U1)
    for n in range(N - 1, -1, -1):
        first, last = max(0, n - steps + 1), min(n, labels)
        for a in range(A):
            after, shift = n + steps_of[a] + labels_of[a], labels_of[a]
            own = slice(first, last + 1)
            moved = slice(first + shift, last + 1 + shift)
            add_rows(beta[after, moved], scores[a, n, own], terms[a, own])
            if not shift and n + steps_of[a] == steps + labels and last == labels:
                terms[a, labels] = scores[a, n, labels]  # this blank ends the path
        log_sum_rows(terms, first, last, maxima, totals, beta[n])
        for a in range(A):
            own = slice(first, last + 1)
            write_posteriors(alpha[n, own], terms[a, own], logz, n, first, posteriors[a, b])


@jit(nogil=True)
def scan_sequences(
    share: Any,
    batch: Any,
    arcs: Any,
    steps_of: Any,
    labels_of: Any,
    delay_penalty: float,
    losses: Any,
    need_posteriors: bool,
    posteriors: Any,
) -> None:
    """Compute the losses, `[B]`, and the posteriors of the arcs, `[A, B, T, U1]`.

    An invalid sequence has the loss NaN and posteriors NaN.
    """
    for b in share:
        steps, labels = batch.steps[b], batch.labels[b]
        if need_posteriors:
            posteriors[:, b] = np.nan if batch.invalid[b] else 0.0
        losses[b] = np.nan if batch.invalid[b] else np.inf
        if batch.invalid[b] or steps == 0:
            continue
        lattice = (steps, labels, steps_of, labels_of)
        scores = by_diagonals(arcs, b, *lattice, delay_penalty)
        alpha = forward_states(scores, *lattice)
        logz = log_partition(alpha, scores, *lattice)
        losses[b] = 0.0 - logz
        if need_posteriors and logz != -np.inf:
            backward_posteriors(alpha, scores, logz, *lattice, posteriors, b)


@jit(nogil=True)
def align_sequences(
    share: Any,
    batch: Any,
    arcs: Any,
    steps_of: Any,
    labels_of: Any,
    steps_out: Any,
    scores_out: Any,
    score: Any,
) -> None:
    """Find the best path of each sequence, and trace it by the arc that enters each node.

    Labels without a step get the step -1 and the score 0, or NaN in an invalid sequence.
    """
    for b in share:
        steps, labels = batch.steps[b], batch.labels[b]
        steps_out[b], scores_out[b] = -1, np.nan if batch.invalid[b] else 0.0
        score[b] = np.nan if batch.invalid[b] else -np.inf
        if batch.invalid[b] or steps == 0:
            continue
        best = np.full((steps + 1, labels + 1), -np.inf)
        entered_by = np.zeros((steps + 1, labels + 1), np.uint8)
        best[0, 0] = 0.0
        for t in range(steps + 1):
            for u in range(labels + 1):
                if t + u == 0 or (t == steps and u < labels):
                    continue
                for a in range(len(arcs)):
                    t0, u0 = t - steps_of[a], u - labels_of[a]
                    if t0 < 0 or u0 < 0 or t0 == steps or (t == steps and labels_of[a]):
                        continue
                    value = best[t0, u0] + arcs[a, b, t0, u0]
                    # NaN counts as the greatest value, so that it reaches the result.
                    if (value > best[t, u]) | (value != value):
                        best[t, u], entered_by[t, u] = value, a
        score[b] = best[steps, labels]
        if score[b] != score[b]:
            scores_out[b] = np.nan
        t, u = steps, labels
        while score[b] > -np.inf and t + u > 0:
            a = entered_by[t, u]
            t, u = t - steps_of[a], u - labels_of[a]
            if labels_of[a]:
                steps_out[b, u], scores_out[b, u] = t, arcs[a, b, t, u]
