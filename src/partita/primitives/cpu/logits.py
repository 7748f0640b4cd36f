"""Rows of logits for Numba kernels, and their log-sum-exps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .batch import INF, LOWEST
from .jit import jit, jit_in_place
from .math import exp_floor

HUGE = 2.0**40  # of log-sum-exps, whose digits may be too few
LANES = 64  # partial sums of a log-sum-exp


class Logits(NamedTuple):
    """The logits or log-probabilities of a batch, `[T, N, C]`.

    Fields:
        steps: their memory, as from `as_steps`.
        T, C: the numbers of steps and classes.
        from_logits: whether they are normalized here.
    """

    steps: Any
    T: int
    C: int
    from_logits: bool


class RowBuffers(NamedTuple):
    """Memory of one thread for a row and its log-sum-exp.

    Fields:
        row: a row that is not contiguous in memory, `[C]`.
        maxima, sums: partial results, `[LANES]`. A single running sum would not become vector code.
            Neither would two rows of one array, which might overlap.
    """

    row: Any
    maxima: Any
    sums: Any


@jit
def row_buffers(steps: Any, C: int) -> RowBuffers:
    """Return buffers for rows of C numbers."""
    return RowBuffers(np.empty(C, steps.numbers.dtype), np.empty(LANES), np.empty(LANES))


@jit_in_place
def fill_row(row: Any, value: Any) -> None:
    """Write a value to all places of a row; an assignment to a slice takes long to compile."""
    for c in range(len(row)):
        row[c] = value


@jit_in_place
def greatest(row: Any) -> Any:
    """Return the greatest number of a row, or NaN, as `row.max()`, which takes long to compile."""
    highest = row[0]
    for c in range(1, len(row)):
        highest = row[c] if row[c] > highest or row[c] != row[c] else highest
    return highest


@jit
def logsumexp_row(row: Any, buffers: Any) -> float:
    """Return the log-sum-exp of a row."""
    maxima, sums = buffers.maxima, buffers.sums
    whole = len(row) - len(row) % LANES
    highest, total = LOWEST, 0.0
    for c in range(whole, len(row)):
        highest = row[c] if row[c] > highest else highest
    if whole:
        for i in range(LANES):
            maxima[i], sums[i] = highest, 0.0
        for c in range(0, whole, LANES):
            part = row[c : c + LANES]
            for i in range(LANES):
                maxima[i] = part[i] if part[i] > maxima[i] else maxima[i]
        for i in range(LANES):
            highest = maxima[i] if maxima[i] > highest else highest
        for c in range(0, whole, LANES):
            part = row[c : c + LANES]
            for i in range(LANES):
                sums[i] += exp_floor(part[i] - highest)
        for i in range(LANES):
            total += sums[i]
    rest = row[whole:]
    for i in range(len(rest)):
        sums[i] = exp_floor(rest[i] - highest)
    for i in range(len(rest)):
        total += sums[i]
    # A row of nothing but -inf gives NaN, as a log-softmax does.
    return highest + np.log(total) if highest > LOWEST else np.nan


@jit
def centered_row(row: Any, lse: float, buffers: Any) -> tuple[Any, float]:
    """Return a row and its log-sum-exp; if that is huge, both minus the greatest number of the row.

    In fp64 a log-sum-exp near -1e30 has no digits left for the logarithm of the sum.
    """
    if not HUGE <= abs(lse) < INF:
        return row, lse
    shift = greatest(row)
    for c in range(len(row)):
        buffers.row[c] = row[c] - shift
    return buffers.row, logsumexp_row(buffers.row, buffers)
