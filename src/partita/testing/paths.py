"""Enumeration of all paths of a small chain."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.chain.api import Chain

MAX_PATHS = 1_000_000


class Paths(NamedTuple):
    """All paths of one chain.

    Fields:
        states: `[P, L + 1]`, L the length of the chain.
        edges: `[P, L]`, c·K + k for the k-th edge into state c.
        scores: `[P]` fp64, in nats as those of the chain, initial and final scores included.
    """

    states: Tensor
    edges: Tensor
    scores: Tensor


def all_paths(chain: Chain, n: int = 0) -> Paths:
    """Enumerate the paths of the n-th chain of a batch, to check a scan against them.

    Args:
        chain: a small one.
        n: the index of the chain in the batch.

    Returns:
        States, edges and scores of all paths, also of those with a score of -inf.

    Raises:
        ValueError: more than a million paths.

    Example:
        >>> import torch
        >>> from partita import Chain, dense_source
        >>> from partita.testing import all_paths
        >>> len(all_paths(Chain(torch.zeros(3, 1, 2, 2), dense_source(2))).scores)
        16
    """
    C, K = chain.source.shape
    source = chain.source.long().cpu()
    steps = chain.scores.shape[0] if chain.lengths is None else int(chain.lengths[n])
    initial, final = (
        None if t is None else t[n].detach().double().cpu() for t in (chain.initial, chain.final)
    )
    states = torch.arange(C)[:, None]
    edges = torch.empty(C, 0, dtype=torch.int64)
    scores = torch.zeros(C, dtype=torch.float64) if initial is None else initial.clone()
    edge_ids = torch.arange(C * K)
    for t in range(steps):
        next_edges = (source.flatten() == states[:, -1:]).nonzero()  # (path, edge)
        if len(next_edges) > MAX_PATHS:
            raise ValueError(
                f"chain: expected at most {MAX_PATHS} paths, got more after {t + 1} steps"
            )
        path, edge = next_edges[:, 0], edge_ids[next_edges[:, 1]]
        step = chain.scores[t, n].detach().double().cpu().flatten()
        states = torch.cat([states[path], (edge // max(K, 1))[:, None]], 1)
        edges = torch.cat([edges[path], edge[:, None]], 1)
        scores = scores[path] + step[edge]
    return Paths(states, edges, scores if final is None else scores + final[states[:, -1]])
