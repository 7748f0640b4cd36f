"""One step of sparse linear chains, and what the CPU's kernels of chains share.

Numbers of edges lie side by side as `[C * K]` where a step is read or written as a whole, and as `[K, C]` where loops over states become vector
code. The loops that look states up stay scalar code; those with few slots are compiled for their number, which spares most of what a loop costs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ....primitives.cpu.batch import INF, LOWEST, row_at
from ....primitives.cpu.math import FLAGS, exp, exp_floor, log, prefetch

SMALLEST = np.finfo(np.float64).tiny


class Batch(NamedTuple):
    """Which states the edges connect, and how many steps of each chain count.

    Fields:
        slots: K.
        sources: `[C * K]` int32, -1 where there is no edge.
        order: the edges by the states that they leave, uint32 (an index that may be negative costs); within a state in their own order.
        starts: where in that order the edges of each state start, and their number, `[C + 1]` int32.
        degree: how many edges leave each state, or 0 if not all are left by as many.
        lengths: `[N]`, 0 for a chain that has no right answer.
    """

    slots: int
    sources: Any
    order: Any
    starts: Any
    degree: int
    lengths: Any


@njit(**FLAGS)
def edges_of(steps: Any, t: int, n: int, slots: int, buffer: Any) -> Any:
    """The numbers of a step, `[C * K]`: where they lie if that is side by side, otherwise copied to the buffer."""
    numbers = row_at(steps, t, n)
    by_state, by_slot = steps.strides[2], steps.strides[3]
    if by_slot == 1 and by_state == slots:
        return numbers[: len(buffer)]
    for c in range(len(buffer) // max(slots, 1)):
        for k in range(slots):
            buffer[c * slots + k] = numbers[c * by_state + k * by_slot]
    return buffer


@njit(inline="always", **FLAGS)
def _enter(
    row: Any, sources: Any, alpha: Any, terms: Any, most: Any, ahead: Any, slots: int
) -> None:
    for c in range(len(most)):
        prefetch(ahead, c * slots)
        highest = LOWEST
        for k in range(slots):
            s = sources[c * slots + k]
            term = row[c * slots + k] + alpha[s] if s >= 0 else -INF
            terms[k, c] = term
            highest = term if term > highest else highest
        most[c] = highest


@njit(**FLAGS)
def enter(row: Any, sources: Any, alpha: Any, terms: Any, most: Any, ahead: Any) -> None:
    """Score plus α of each edge, `[K, C]`, and the greatest of each state, `[C]`; what is read next is asked for meanwhile."""
    slots = len(terms)
    if slots == 2:
        _enter(row, sources, alpha, terms, most, ahead, 2)
    elif slots == 3:
        _enter(row, sources, alpha, terms, most, ahead, 3)
    elif slots == 4:
        _enter(row, sources, alpha, terms, most, ahead, 4)
    elif slots == 5:
        _enter(row, sources, alpha, terms, most, ahead, 5)
    else:
        _enter(row, sources, alpha, terms, most, ahead, slots)


@njit(**FLAGS)
def advance(
    row: Any, sources: Any, alpha: Any, terms: Any, most: Any, total: Any, after: Any, ahead: Any
) -> None:
    """α after a step under Log, from that before it, `[C]` both."""
    enter(row, sources, alpha, terms, most, ahead)
    for c in range(len(total)):
        total[c] = 0.0
    for k in range(len(terms)):
        for c in range(len(total)):
            total[c] += exp_floor(terms[k, c] - most[c])
    for c in range(len(total)):
        value = most[c] + log(total[c])
        after[c] = -INF if value == LOWEST else value


@njit(**FLAGS)
def choose(terms: Any, best: Any, slot: Any) -> None:
    """The greatest term of each state, `[C]`, and the first slot that has it; NaN where one is NaN."""
    for c in range(len(best)):
        best[c] = -INF
        slot[c] = 0
    for k in range(len(terms)):
        for c in range(len(best)):
            term = terms[k, c]
            better = (term > best[c]) | (term != term)
            best[c] = term if better else best[c]
            slot[c] = k if better else slot[c]


@njit(**FLAGS)
def onward(row: Any, entered: Any, edges: Any) -> None:
    """Of each edge `[C * K]`, its number plus that of the state it enters, `[C]`."""
    slots = len(edges) // max(len(entered), 1)
    for c in range(len(entered)):
        for k in range(slots):
            edges[c * slots + k] = row[c * slots + k] + entered[c]


@njit(**FLAGS)
def retreat(
    row: Any,
    batch: Any,
    beta: Any,
    edges: Any,
    ordered: Any,
    most: Any,
    total: Any,
    best: bool,
    before: Any,
) -> None:
    """β before a step under Max or Log, from that after it, `[C]` both; a state that no edge leaves has -inf."""
    onward(row, beta, edges)
    for c in range(len(beta)):
        highest, greatest = LOWEST, -INF
        for i in range(batch.starts[c], batch.starts[c + 1]):
            term = edges[batch.order[i]]
            ordered[i] = term
            highest = term if term > highest else highest
            greatest = term if (term > greatest) | (term != term) else greatest
        most[c], before[c] = highest, greatest
    if best:
        return
    for c in range(len(beta)):
        for i in range(batch.starts[c], batch.starts[c + 1]):
            ordered[i] -= most[c]
    for i in range(len(ordered)):
        ordered[i] = exp_floor(ordered[i])
    for c in range(len(beta)):
        total[c] = 0.0
        for i in range(batch.starts[c], batch.starts[c + 1]):
            total[c] += ordered[i]
    for c in range(len(beta)):
        value = most[c] + log(total[c])
        before[c] = -INF if value == LOWEST else value


@njit(inline="always", **FLAGS)
def _spread(
    sources: Any, alpha: Any, added: Any, edges: Any, row: Any, ahead: Any, slots: int
) -> None:
    for c in range(len(added)):
        prefetch(row, c * slots)
        prefetch(ahead, c)
        entered = added[c]
        for k in range(slots):
            s = sources[c * slots + k]
            edges[c * slots + k] = (alpha[s] if s >= 0 else 0.0) + entered


@njit(**FLAGS)
def spread(sources: Any, alpha: Any, added: Any, edges: Any, row: Any, ahead: Any) -> None:
    """Of each edge `[C * K]`, α of the state it leaves plus what is added for the state it enters; what is read next is asked for meanwhile."""
    slots = len(sources) // max(len(added), 1)
    if slots == 2:
        _spread(sources, alpha, added, edges, row, ahead, 2)
    elif slots == 3:
        _spread(sources, alpha, added, edges, row, ahead, 3)
    elif slots == 4:
        _spread(sources, alpha, added, edges, row, ahead, 4)
    elif slots == 5:
        _spread(sources, alpha, added, edges, row, ahead, 5)
    else:
        _spread(sources, alpha, added, edges, row, ahead, slots)


@njit(fastmath={"contract", "reassoc"})
def total_of(numbers: Any) -> float:
    total = 0.0
    for i in range(len(numbers)):
        total += numbers[i]
    return total


@njit(**FLAGS)
def behind(here: Any, after: Any, result: Any) -> None:
    """What takes score plus α of an edge to the logarithm of its posterior: log of the posterior of the state it enters, less the α of that, `[C]`."""
    scale = 1.0 / total_of(here)
    for c in range(len(here)):
        value = log(here[c] * scale) - after[c]
        result[c] = -INF if here[c] < SMALLEST else value


@njit(**FLAGS)
def posteriors(row: Any, sources: Any, edges: Any, factor: float, scaled: Any) -> None:
    """The logarithms less the scores, `[C * K]`, become the posteriors of the edges; these times a factor, too."""
    for e in range(len(edges)):
        x = row[e] + edges[e]
        p = exp(
            0.0 if x > 0.0 else x
        )  # with scores so large that they swallow others, what is rounded may be anything
        p = p if sources[e] >= 0 else 0.0
        edges[e] = p
        scaled[e] = p * factor


@njit(inline="always", **FLAGS)
def _gather(order: Any, edges: Any, result: Any, degree: int) -> None:
    for c in range(len(result)):
        total = 0.0
        for i in range(degree):
            total += edges[order[c * degree + i]]
        result[c] = total


@njit(**FLAGS)
def leaving(batch: Any, edges: Any, result: Any) -> None:
    """Of numbers on the edges `[C * K]`, the sum over those that leave each state, `[C]`."""
    degree = batch.degree
    if degree == 2:
        _gather(batch.order, edges, result, 2)
    elif degree == 3:
        _gather(batch.order, edges, result, 3)
    elif degree == 4:
        _gather(batch.order, edges, result, 4)
    elif degree == 5:
        _gather(batch.order, edges, result, 5)
    else:
        for c in range(len(result)):
            result[c] = 0.0
        for e in range(len(edges)):
            if batch.sources[e] >= 0:
                result[batch.sources[e]] += edges[e]


@njit(**FLAGS)
def clear(rows: Any, n: int, length: int) -> None:
    """Zeros past the length of a chain, `[T, N, C * K]`."""
    for t in range(length, len(rows)):
        for e in range(rows.shape[2]):
            rows[t, n, e] = 0.0


@njit(**FLAGS)
def stay(kept: Any, n: int, length: int) -> None:
    """What is kept at the length of a chain `[T + 1, N, C]` stays as it is after it."""
    for t in range(length + 1, len(kept)):
        for c in range(kept.shape[2]):
            kept[t, n, c] = kept[length, n, c]


@njit(**FLAGS)
def log_sum(alpha: Any, final: Any) -> float:
    """log Σ exp(α + final), over the states."""
    highest = LOWEST
    for c in range(len(alpha)):
        value = alpha[c] + final[c]
        highest = value if value > highest else highest
    total = 0.0
    for c in range(len(alpha)):
        total += exp_floor(alpha[c] + final[c] - highest)
    value = highest + np.log(total)
    return -INF if value == LOWEST else value


def batch_of(scores: Tensor, source: Tensor, lengths: Tensor | None) -> tuple[Batch, Tensor]:
    """What indexes nothing out of bounds; and which chains have no right answer, `[N]`: a length or, for every chain, a source is out of range."""
    span, chains, states, slots = scores.shape
    count = torch.full((chains,), span, device="cpu") if lengths is None else lengths.long()
    source = source.long()  # a narrow type would wrap the bounds
    outside = (source < -1) | (source >= states)
    wrong = (count < 0) | (count > span) | outside.any()
    safe = count.masked_fill(wrong, 0).numpy()
    sources = source.masked_fill(outside, -1).int().flatten().numpy()
    degrees = np.bincount(sources[sources >= 0], minlength=states)
    starts = np.concatenate([[0], degrees.cumsum()]).astype(np.int32)
    order = sources.argsort(kind="stable")[len(sources) - starts[-1] :].astype(np.uint32)
    degree = int(starts[-1]) // max(states, 1)
    regular = bool((degrees == degree).all())
    return Batch(slots, sources, order, starts, degree if regular else 0, safe), wrong
