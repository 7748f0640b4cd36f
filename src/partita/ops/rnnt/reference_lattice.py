"""Sums and maxima over the paths of a transducer's lattice, in fp64 and by anti-diagonals.

A path starts at the node (0, 0) and ends at (T_b, U_b). Each arc advances by some steps and by at
most one label, so it leads to a later anti-diagonal n = t + u. Tensors over nodes are `[T + 1, U1]`
or, by anti-diagonals, `[T + U1, U1]`, in which the entry (n, u) is that of the node (n - u, u).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...primitives.semiring import Log, Max
from .common import SequenceLengths, node_mask


class Arc(NamedTuple):
    """A kind of arc.

    Fields:
        steps: the steps by which it advances.
        labels: the labels by which it advances, 0 (a blank) or 1.
    """

    steps: int
    labels: int


def within_lattice(scores: Tensor, arcs: Sequence[Arc], lengths: SequenceLengths) -> Tensor:
    """Return the scores of the arcs, `[A, B, T, U1]`, which are -inf for arcs that leave it.

    An arc leads to a node, or as a blank from the last label to the end of the path.
    """
    T, U1 = scores.shape[2:]
    inside = node_mask(lengths.steps, lengths.labels, 0, T, U1)
    t = torch.arange(T, device=scores.device)[:, None]
    u = torch.arange(U1, device=scores.device)
    steps, labels = lengths.steps[:, None, None], lengths.labels[:, None, None]
    masks = []
    for arc in arcs:
        to_node = (t + arc.steps < steps) & (u + arc.labels <= labels)
        to_end = (t + arc.steps == steps) & (u == labels)
        masks.append(inside & (to_node if arc.labels else to_node | to_end))
    return torch.where(torch.stack(masks), scores, -torch.inf)


def skewed(x: Tensor) -> Tensor:
    """Return `[..., R, U1]` by anti-diagonals, `[..., R + U1 - 1, U1]`, filled with -inf."""
    R, U1 = x.shape[-2:]
    # Row u of the transpose moves by u, because each row of the result is shorter by one.
    flat = pad(x.mT, (0, U1), value=-torch.inf).flatten(-2)[..., :-U1]
    return flat.unflatten(-1, (U1, R + U1 - 1)).mT


def unskewed(x: Tensor, R: int) -> Tensor:
    """Return the rows `[..., R, U1]` of what `skewed` returned."""
    U1 = x.shape[-1]
    flat = pad(x.mT.flatten(-2), (0, U1))
    return flat.unflatten(-1, (U1, R + U1))[..., :R].mT


def _next_label(x: Tensor, labels: int) -> Tensor:
    """Return `[..., U1]`, moved to the next label if `labels` is 1."""
    return pad(x[..., :-1], (1, 0), value=-torch.inf) if labels else x


def _previous_label(x: Tensor, labels: int) -> Tensor:
    """Return `[..., U1]`, moved to the previous label if `labels` is 1."""
    return pad(x[..., 1:], (0, 1), value=-torch.inf) if labels else x


def forward_scores(
    scores: Tensor, arcs: Sequence[Arc], add: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Return the sum, by `add`, over the paths from the start to each node, `[B, N, U1]`.

    `scores` are those of the arcs by anti-diagonals, `[A, B, N, U1]`.
    """
    _, B, N, U1 = scores.shape
    start = scores.new_full((B, U1), -torch.inf)
    alpha = [torch.where(torch.arange(U1, device=scores.device) == 0, 0.0, start)]
    for n in range(1, N):
        terms = []
        for arc, score in zip(arcs, scores, strict=True):
            before = n - arc.steps - arc.labels
            if before >= 0:
                terms.append(_next_label(alpha[before] + score[:, before], arc.labels))
        alpha.append(add(torch.stack(terms), 0) if terms else start)
    return torch.stack(alpha, 1)


def backward_scores(scores: Tensor, arcs: Sequence[Arc], is_end: Tensor) -> Tensor:
    """Return the log-sum over the paths from each node to the end, `[B, N, U1]`.

    `is_end` tells the last node of each sequence, `[B, N, U1]`.
    """
    _, _, N, _ = scores.shape
    ends = torch.where(is_end, 0.0, -torch.inf).to(scores.dtype)
    beta: dict[int, Tensor] = {}
    for n in range(N - 1, -1, -1):
        terms = [ends[:, n]]
        for arc, score in zip(arcs, scores, strict=True):
            after = n + arc.steps + arc.labels
            if after < N:
                terms.append(score[:, n] + _previous_label(beta[after], arc.labels))
        beta[n] = Log.sum(torch.stack(terms), 0)
    return torch.stack([beta[n] for n in range(N)], 1)


def by_diagonals(scores: Tensor) -> Tensor:
    """Return the scores `[A, B, T, U1]` by anti-diagonals, with a row for the end of the paths."""
    return skewed(pad(scores, (0, 0, 0, 1), value=-torch.inf))


def end_nodes(lengths: SequenceLengths, N: int, U1: int) -> Tensor:
    """Return which node by anti-diagonals is the last of each sequence, `[B, N, U1]`."""
    device = lengths.steps.device
    n, u = torch.arange(N, device=device)[:, None], torch.arange(U1, device=device)
    steps, labels = lengths.steps[:, None, None], lengths.labels[:, None, None]
    return (n == steps + labels) & (u == labels)


def log_partition(
    scores: Tensor, arcs: Sequence[Arc], lengths: SequenceLengths, need_posteriors: bool
) -> tuple[Tensor, Tensor]:
    """Return log Z, `[B]`, and the posterior of each arc, `[A, B, T, U1]`, if it is needed.

    Both are differentiable in the scores of the arcs, `[A, B, T, U1]`.
    """
    T, U1 = scores.shape[2:]
    skew = by_diagonals(scores)
    alpha = forward_scores(skew, arcs, Log.sum)
    is_end = end_nodes(lengths, skew.shape[2], U1)
    logz = Log.sum(torch.where(is_end, alpha, -torch.inf).flatten(1), 1)
    logz = torch.where(lengths.steps > 0, logz, -torch.inf)
    if not need_posteriors:
        return logz, scores.new_empty(0)
    beta = backward_scores(skew, arcs, is_end)
    shift = logz.masked_fill(logz == -torch.inf, 0.0)[:, None, None]
    posteriors = []
    for arc, score in zip(arcs, skew, strict=True):
        after = pad(beta, (0, 0, 0, arc.steps + arc.labels), value=-torch.inf)
        after = _previous_label(after[:, arc.steps + arc.labels :], arc.labels)
        posteriors.append((alpha + score + after - shift).exp())
    found = unskewed(torch.stack(posteriors), T + 1)[..., :T, :]
    return logz, torch.where(node_mask(lengths.steps, lengths.labels, 0, T, U1), found, 0.0)


def best_paths(
    scores: Tensor, arcs: Sequence[Arc], lengths: SequenceLengths
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best path of each sequence, traced from its end.

    Among equally good arcs into a node, it takes the first in the order of `arcs`.

    Returns:
        The step that emits each label, `[B, U]`, -1 where there is none; the score of its arc,
        `[B, U]` fp64, 0 where there is none; and the score of the path, `[B]` fp64.
    """
    _, B, _, U1 = scores.shape
    skew, batch = by_diagonals(scores), torch.arange(B, device=scores.device)
    best = forward_scores(skew, arcs, Max.sum)
    t, u = lengths.steps, lengths.labels
    score = torch.where(t > 0, best[batch, t + u, u], -torch.inf)
    # The last column takes what belongs to no label.
    steps = t.new_full((B, U1), -1)
    label_scores = scores.new_zeros(B, U1)
    t = torch.where(score > -torch.inf, t, 0)
    u = torch.where(score > -torch.inf, u, 0)
    for _ in range(skew.shape[2] - 1):
        values = []
        for arc, each in zip(arcs, skew, strict=True):
            t0, u0 = t - arc.steps, u - arc.labels
            possible, node = (t0 >= 0) & (u0 >= 0), (batch, (t0 + u0).clamp(min=0), u0.clamp(min=0))
            values.append(torch.where(possible, best[node] + each[node], -torch.inf))
        value, chosen = torch.stack(values).max(0)
        moves = value > -torch.inf
        for i, arc in enumerate(arcs):
            taken = moves & (chosen == i)
            t, u = torch.where(taken, t - arc.steps, t), torch.where(taken, u - arc.labels, u)
            if arc.labels:
                column = torch.where(taken, u, U1 - 1)
                steps[batch, column] = t
                label_scores[batch, column] = skew[i][batch, t + u, u]
    position = torch.arange(U1 - 1, device=scores.device)
    found = (position < lengths.labels[:, None]) & (score > -torch.inf)[:, None]
    steps = torch.where(found, steps[:, :-1], -1)
    return steps, torch.where(found, label_scores[:, :-1], 0.0), score
