"""Sums and maxima over the paths of a transducer's lattice, in Numba.

An arc advances by some steps and by 0 or 1 labels. The sums go by anti-diagonals n = t + u: all of
a diagonal's nodes depend on earlier diagonals only, so the loop over them becomes vector code.
Inside of the scans LOWEST stands for -inf, so that no difference of two states is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ....primitives.cpu.batch import LOWEST
from ....primitives.cpu.jit import MINUS_ONE, jit
from ....primitives.cpu.logits import fill_row, greatest
from ....primitives.cpu.math import exp, exp_floor, log

IMPOSSIBLE = LOWEST / 2  # a smaller value is the sum of LOWEST and log-probabilities


def arcs_of(durations: Sequence[int]) -> tuple[Any, Any]:
    """Return the steps and the labels by which the kinds of arcs advance, each `[A]`.

    These are the blanks and then the labels of all durations, or without these those of RNN-T.
    """
    if not durations:
        return np.array([1, 0]), np.array([0, 1])
    K = len(durations)
    return np.array([*durations] * 2), np.array([0] * K + [1] * K)


class Lattice(NamedTuple):
    """The lattice of one sequence.

    Fields:
        scores: the scores of the arcs by anti-diagonals, `[A, N, U + 1]`; -inf where no node is,
            and for an arc that leaves the lattice, which counts for nothing even if it is NaN.
        steps, labels: the lengths of the sequence.
        steps_of, labels_of: the steps and labels by which each arc advances, `[A]`.
    """

    scores: Any
    steps: int
    labels: int
    steps_of: Any
    labels_of: Any


@jit
def add_rows(a: Any, b: Any, result: Any) -> None:
    """Write the sum of two rows."""
    for u in range(len(result)):
        result[u] = a[u] + b[u]


@jit
def log_sum_rows(terms: Any, first: int, last: int, maxima: Any, totals: Any, result: Any) -> None:
    """Write the log-sum-exp of the terms `[A, U1]` for the positions from `first` to `last`.

    It is LOWEST where there is no path. NaN passes through.
    """
    own = slice(first, last + 1)
    highest, total, found = maxima[own], totals[own], result[own]
    fill_row(highest, LOWEST)
    fill_row(total, 0.0)
    for a in range(len(terms)):
        row = terms[a, own]
        for u in range(len(row)):
            highest[u] = row[u] if row[u] > highest[u] else highest[u]
    for a in range(len(terms)):
        row = terms[a, own]
        for u in range(len(row)):
            total[u] += exp_floor(row[u] - highest[u])
    for u in range(len(found)):
        value = highest[u] + log(total[u])
        found[u] = LOWEST if value <= IMPOSSIBLE else value


@jit
def lattice_of(lengths: Any, arcs: Any, scores: Any, b: int, delay_penalty: float) -> Lattice:
    """Return the lattice of a sequence. The delay penalty is added to the labels."""
    (steps_of, labels_of), steps, labels = arcs, lengths.steps[b], lengths.labels[b]
    result = np.full((len(scores), steps + labels, labels + 1), -np.inf)
    for a in range(len(scores)):
        for t in range(steps):
            extra = delay_penalty * ((steps - 1) / 2 - t) if labels_of[a] else 0.0
            after = t + steps_of[a]
            for u in range(labels + 1 - labels_of[a]):
                if after < steps or (after == steps and u == labels):
                    result[a, t + u, u] = scores[a, b, t, u] + extra
    return Lattice(result, steps, labels, steps_of, labels_of)


@jit
def forward_states(lattice: Any) -> Any:
    """Return alpha by anti-diagonals, `[N, U + 1]`, LOWEST where no node is."""
    scores, steps, labels, steps_of, labels_of = lattice
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
                fill_row(terms[a, first : last + 1], LOWEST)
                continue
            terms[a, 0] = LOWEST
            before = slice(start - shift, last + 1 - shift)
            add_rows(alpha[m, before], scores[a, m, before], terms[a, start : last + 1])
        log_sum_rows(terms, first, last, maxima, totals, alpha[n])
    return alpha


@jit
def log_partition(alpha: Any, lattice: Any) -> float:
    """Return log Z, the log-sum over the blanks that end the path; -inf if there is none."""
    scores, steps, labels, steps_of, labels_of = lattice
    ends, highest, total = np.full(len(scores), LOWEST), LOWEST, 0.0
    for a in range(len(scores)):
        if not labels_of[a] and 0 < steps_of[a] <= steps:
            n = steps - steps_of[a] + labels
            ends[a] = alpha[n, labels] + scores[a, n, labels]
            highest = ends[a] if ends[a] > highest else highest
    for a in range(len(scores)):
        if not labels_of[a] and 0 < steps_of[a] <= steps:
            total += exp_floor(ends[a] - highest)
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
def backward_posteriors(alpha: Any, lattice: Any, logz: float, posteriors: Any, b: int) -> None:
    """Write the posteriors of the arcs of a sequence, `[A, B, T, U1]`, from alpha and beta."""
    scores, steps, labels, steps_of, labels_of = lattice
    A, N, U1 = scores.shape
    beta = np.full((N + greatest(steps_of) + 1, U1 + 1), LOWEST)
    terms, maxima, totals = np.empty((A, U1)), np.empty(U1), np.empty(U1)
    for n in range(N - 1, -1, -1):
        first, last = max(0, n - steps + 1), min(n, labels)
        own = slice(first, last + 1)
        for a in range(A):
            after, shift = n + steps_of[a] + labels_of[a], labels_of[a]
            moved = slice(first + shift, last + 1 + shift)
            add_rows(beta[after, moved], scores[a, n, own], terms[a, own])
            if not shift and n + steps_of[a] == steps + labels and last == labels:
                terms[a, labels] = scores[a, n, labels]  # this blank ends the path
        log_sum_rows(terms, first, last, maxima, totals, beta[n])
        for a in range(A):
            write_posteriors(alpha[n, own], terms[a, own], logz, n, first, posteriors[a, b])


@jit(nogil=True)
def scan_sequences(
    share: Any,
    lengths: Any,
    arcs: Any,
    scores: Any,
    delay_penalty: float,
    losses: Any,
    posteriors: Any,
) -> None:
    """Compute the losses, `[B]`, and the posteriors of the arcs, `[A, B, T, U1]` or empty.

    An invalid sequence has the loss NaN and posteriors NaN.
    """
    for b in share:
        for a in range(len(posteriors)):
            for t in range(posteriors.shape[2]):
                fill_row(posteriors[a, b, t], np.nan if lengths.invalid[b] else 0.0)
        losses[b] = np.nan if lengths.invalid[b] else np.inf
        if lengths.invalid[b] or lengths.steps[b] == 0:
            continue
        lattice = lattice_of(lengths, arcs, scores, b, delay_penalty)
        alpha = forward_states(lattice)
        # NaN may be in nodes from which no path reaches the end.
        highest = greatest(alpha.ravel())
        logz = log_partition(alpha, lattice) if highest == highest else np.nan
        losses[b] = 0.0 - logz
        if len(posteriors) and logz != -np.inf:
            backward_posteriors(alpha, lattice, logz, posteriors, b)


@jit(nogil=True)
def align_sequences(
    share: Any,
    lengths: Any,
    arcs: Any,
    scores: Any,
    steps_out: Any,
    scores_out: Any,
    score: Any,
) -> None:
    """Find the best path of each sequence, and trace it by the arc that enters each node.

    Labels without a step get the step -1 and the score 0, or NaN in an invalid sequence.
    """
    steps_of, labels_of = arcs
    for b in share:
        steps, labels = lengths.steps[b], lengths.labels[b]
        fill_row(steps_out[b], MINUS_ONE)
        fill_row(scores_out[b], np.nan if lengths.invalid[b] else 0.0)
        score[b] = np.nan if lengths.invalid[b] else -np.inf
        if lengths.invalid[b] or steps == 0:
            continue
        best = np.full((steps + 1, labels + 1), -np.inf)
        entered_by = np.zeros((steps + 1, labels + 1), np.uint8)
        best[0, 0] = 0.0
        for t in range(steps + 1):
            for u in range(labels + 1):
                if t + u == 0 or (t == steps and u < labels):
                    continue
                for a in range(len(scores)):
                    t0, u0 = t - steps_of[a], u - labels_of[a]
                    if t0 < 0 or u0 < 0 or t0 == steps or (t == steps and labels_of[a]):
                        continue
                    value = best[t0, u0] + scores[a, b, t0, u0]
                    # NaN counts as the greatest value, so that it reaches the result.
                    if (value > best[t, u]) | (value != value):
                        best[t, u], entered_by[t, u] = value, a
        highest = greatest(best.ravel())  # NaN if a node is, also where no path leads on from it
        score[b] = best[steps, labels] if highest == highest else np.nan
        if score[b] != score[b]:
            fill_row(scores_out[b], np.nan)
        t, u = steps, labels
        while score[b] > -np.inf and t + u > 0:
            a = entered_by[t, u]
            t, u = t - steps_of[a], u - labels_of[a]
            if labels_of[a]:
                steps_out[b, u], scores_out[b, u] = t, scores[a, b, t, u]
