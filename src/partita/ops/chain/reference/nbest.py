"""The k best paths of sparse linear chains in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ....primitives.semiring import Max
from .logz import ChainInputs, chain_inputs


def chain_nbest(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `best_paths`."""
    return best_paths(chain_inputs(scores, source, initial, final, lengths, Max), k)


def best_paths(x: ChainInputs, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores `[k, N]` fp64 of the k best paths, their states and their edges.

    States are `[k, T + 1, N]` and edges `[k, T, N]`, -1 past the length and for a path that does
    not exist, whose score is -inf. Of equal paths that with the lowest edges, from the last state
    back, comes first. A step sorts all ways into a state, in memory of `[N, C, K k]`.

    Source: Schwartz and Chow, The N-best algorithm, 1990.
    """
    N, C = x.initial.shape
    T, K = len(x.scores), x.source.shape[1]
    if not C:
        none = x.source.new_full((k, T + 1, N), -1)
        return x.initial.new_full((k, N), -torch.inf), none, none[:, 1:]
    # alpha[n, c, r] is the score of the r-th best path into state c.
    alpha = torch.cat([x.initial[..., None], x.initial.new_full((N, C, k - 1), Max.zero)], 2)
    ways = []  # for each step, the edge into a state and the rank of the path before it
    for t in range(T if K else 0):
        entered = x.scores[t][..., None] + alpha[:, x.source]
        entered = entered.masked_fill(x.missing[..., None], Max.zero).flatten(2)
        best, way = (part[..., :k] for part in entered.sort(dim=2, descending=True, stable=True))
        alpha = torch.where(x.active[t, :, None, None], best, alpha)
        ways.append(way)
    if not K:  # Only chains of no steps have paths.
        alpha = alpha.masked_fill(x.active.any(0)[:, None, None], Max.zero)
    ends = (alpha + x.final[..., None]).flatten(1)
    score, slot = (part[:, :k].T for part in ends.sort(dim=1, descending=True, stable=True))
    exists = (score > Max.zero)[:, None]
    chain = torch.arange(N, device=slot.device)
    states = [slot // k]
    edges: list[Tensor] = []
    for t in reversed(range(len(ways))):
        state, way = slot // k, ways[t].flatten(1)[chain, slot]
        before = x.source[state, way // k] * k + way % k
        slot = torch.where(x.active[t], before, slot)
        edges.append(state * K + way // k)
        states.append(slot // k)
    if not K:
        states *= T + 1
        edges = [slot] * T
    on_path = exists & x.active
    edge = torch.stack(edges[::-1], 1) if T else slot[:, None][:, :0]
    entered_on_path = torch.cat([exists, on_path], 1)
    return (
        score,
        torch.stack(states[::-1], 1).masked_fill(~entered_on_path, -1),
        edge.masked_fill(~on_path, -1),
    )
