"""The k best paths of chains in plain PyTorch, parallel in time where few sequences are long.

A state of a step keeps its k best paths, sorted. The best paths that enter a state are among those
of the states before it, each of which has k. So a step sorts K k ways into each state.

A scan over many steps is slow where each step is a few launches on a GPU. Steps are therefore cut
into segments, which are scanned side by side. Where the paths of a segment start is not known yet,
so it finds the k best ones from each state: C times as much work in a fraction of the launches. The
best paths up to the end of each segment follow from those of the one before, segment by segment.

Of equal paths that with the lowest edges, from the last one back, comes first. The paths of a
segment that end in one state have ranks in that order, whatever state they start from, so the order
does not depend on how the steps are cut.

Source: Schwartz and Chow, The N-best algorithm, 1990.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..primitives.rows import chunks

MIN_PARALLEL_STEPS = 512
MAX_PARALLEL_WAYS = 2**26  # that are stored at once, 4 bytes each


class Scanned(NamedTuple):
    """The k best paths of a segment from each of P states to each state.

    Fields:
        scores: `[S, N, P, C, k]`, sorted.
        order: which start and which of its k paths come first, second, ... among equal paths into a
            state, `[S, N, C, P k]`, as start times k plus path.
        ways: for each step of a segment the edge and the path before it, as edge times k plus path,
            `[S, N, P, C k]` each.
    """

    scores: Tensor
    order: Tensor
    ways: list[Tensor]


def number_of_segments(T: int, C: int, k: int, device: torch.device) -> int:
    """Return into how many segments the steps are cut. A CPU is as fast with one."""
    parallel = T >= MIN_PARALLEL_STEPS and T * C * C * k <= MAX_PARALLEL_WAYS
    return math.isqrt(T) if parallel and device.type != "cpu" else 1


def best_of(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k greatest of the last dimension, sorted, and their indices; ties in order."""
    best, index = scores.sort(dim=-1, descending=True, stable=True)
    return best[..., :k], index[..., :k]


def scan_segments(
    scores: Callable[[Tensor], Tensor],
    source: Tensor,
    missing: Tensor,
    active: Tensor,
    start: Tensor,
    k: int,
) -> Scanned:
    """Find the k best paths of all segments from each of P states to each state.

    Args:
        scores: takes one step of each segment and returns the scores of its edges, `[S, N, C, K]`.
        source: the state that each edge comes from, `[C, K]`.
        missing: the edges that no path takes, `[C, K]`.
        active: which steps count, `[S, L, N]`.
        start: the scores of the states before the first step, `[N, P, C]`.
        k: the number of paths.
    """
    (S, L, N), C, P = active.shape, len(source), start.shape[1]
    device = source.device
    alpha = start.new_full((S, N, P, C, k), -torch.inf)
    alpha[..., 0] = start
    state = torch.arange(C, device=device)[:, None, None]
    first = torch.arange(S, device=device) * L
    entry = torch.arange(P * k, device=device).view(P, k)
    rank, ways = entry.flatten().expand(S, N, C, P * k), []
    for i in range(L):
        counts = active[:, i, :, None, None, None]
        entered = alpha[..., source, :] + scores(first + i)[:, :, None, ..., None]
        entered = entered.masked_fill(missing[..., None], -torch.inf).flatten(-2)
        best, way = best_of(entered, k)
        alpha = torch.where(counts, best, alpha)
        ways.append(way.flatten(-2).int())
        if S > 1:
            # The last edge decides, and then the rank of the path before it.
            edge, path = (part.transpose(2, 3) for part in (way // k, way % k))
            before = source[state, edge] * (P * k) + entry[:, :1] + path
            key = edge.flatten(3) * (P * k) + rank.flatten(2).gather(2, before.flatten(2)).view(
                S, N, C, P * k
            )
            rank = torch.where(counts[..., 0], key.argsort(dim=3).argsort(dim=3), rank)
    return Scanned(alpha, rank.argsort(dim=3), ways)


def join_segments(
    segments: Scanned, initial: Tensor, final: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the k best paths through all segments.

    Args:
        segments: the paths of each segment.
        initial: the scores of the P starts of the first segment, `[N, P]`.
        final: the scores of the last states, `[N, C]`.
        k: the number of paths.

    Returns:
        The scores `[N, k]`; for each segment where a path starts, and its last state times k plus
        its rank among the paths of the segment between these states, both `[S, N, k]`.
    """
    _, N, P, C, _ = segments.scores.shape
    best, steps = final.new_full((N, P, k), -torch.inf), []  # the paths up to each segment
    best[..., 0] = initial
    for scores, order in zip(segments.scores, segments.order, strict=True):
        start = order // k
        in_order = scores.transpose(1, 2).flatten(2).gather(2, order)  # [N, C, P k]
        before = best.gather(1, start.flatten(1)[..., None].expand(-1, -1, k)).view(N, C, P * k, k)
        best, way = best_of((in_order[..., None] + before).flatten(2), k)
        entry = order.gather(2, way // k)  # [N, C, k]
        steps.append((entry.flatten(1), (entry // k * k + way % k).flatten(1)))
    score, slot = best_of((best + final[..., None]).flatten(1), k)
    starts, ends = [], []
    for entry, before in reversed(steps):
        found = entry.gather(1, slot)
        starts.append(found // k)
        ends.append(slot // k * k + found % k)
        slot = before.gather(1, slot)
    return score, torch.stack(starts[::-1]), torch.stack(ends[::-1])


def best_paths(
    scores: Callable[[Tensor], Tensor],
    source: Tensor,
    missing: Tensor,
    initial: Tensor,
    final: Tensor,
    active: Tensor,
    k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores `[k, N]` fp64 of the k best paths, their states and their edges.

    States are `[k, T + 1, N]` and edges `[k, T, N]`. A step that does not count stays in its state,
    by edge 0. A path that does not exist has the score -inf, and any states.

    Args:
        scores: takes some steps and returns the scores of their edges, `[S, N, C, K]` fp64.
        source: the state that each edge comes from, `[C, K]`, with at least one state.
        missing: the edges that no path takes, `[C, K]`.
        initial, final: the scores of the ends, `[N, C]` fp64.
        active: which steps count, `[T, N]`, the first ones of each sequence.
        k: the number of paths.
    """
    (T, N), C = active.shape, len(source)
    S = number_of_segments(T, C, k, source.device)
    L = -(-T // S)
    group = max(1, MAX_PARALLEL_WAYS // max(1, T * C * C * k))
    if S > 1 and group < N:  # How a sequence is cut does not depend on the others.
        found = [
            best_paths(
                lambda steps, part=part: scores(steps)[:, part],  # type: ignore[misc]
                *(source, missing, initial[part], final[part], active[:, part], k),
            )
            for part in chunks(N, group)
        ]
        score, entered, taken = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
        return score, entered, taken
    counts = torch.cat([active, active.new_zeros(S * L - T, N)]).view(S, L, N)
    start, first = initial[:, None], initial.new_zeros(N, 1)
    if S > 1:  # Segments start anywhere.
        start, first = torch.eye(C).log().to(initial).expand(N, C, C), initial

    def scores_of(steps: Tensor) -> Tensor:
        return scores(steps.clamp(max=T - 1))

    segments = scan_segments(scores_of, source, missing, counts, start, k)
    score, starts, slot = join_segments(segments, first, final, k)
    segment = torch.arange(S, device=source.device)[:, None, None]
    sequence = torch.arange(N, device=source.device)[:, None]
    states, edges = [slot // k], []
    for i in reversed(range(L)):
        way = segments.ways[i][segment, sequence, starts, slot].long()
        edge, step_counts = way // k, counts[:, i, :, None]
        before = source[slot // k, edge] * k + way % k
        slot = torch.where(step_counts, before, slot)
        states.append(slot // k)
        edges.append(torch.where(step_counts, edge, 0))
    entered = torch.stack(states[::-1], 1)  # [S, L + 1, N, k]
    entered = torch.cat([entered[0, :1], entered[:, 1:].flatten(0, 1)[:T]])
    taken = torch.stack(edges[::-1], 1).flatten(0, 1)[:T] if T else entered[:0]
    return score.T, entered.movedim(2, 0), taken.movedim(2, 0)
