"""Paths of dense linear chains that are given by their states: scores, and indicators of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .inputs import LinearChainTensors, full_lengths


def path_score(chain: LinearChainTensors, states: Tensor) -> Tensor:
    """Return the score of paths with the states `[..., T, N]`, `[..., N]` fp64.

    States past a length are ignored. The score is -inf for a state that is out of range, and NaN
    for an invalid length.
    """
    emissions, transitions, start, end, _ = chain
    T, N, C = emissions.shape
    lengths = full_lengths(chain).long()
    invalid = (lengths < 1) | (lengths > T)
    sequence = torch.arange(N, device=states.device)
    token = torch.arange(T, device=states.device)[:, None]
    active = token < lengths
    if not C:
        return emissions.new_full((*states.shape[:-2], N), -torch.inf, dtype=torch.float64)
    index = states.clamp(0, C - 1)
    possible = ((index == states) | ~active).all(-2)
    scores = torch.where(active, emissions[token, sequence, index].double(), 0.0)
    total = scores.sum(-2)
    before, after = index[..., :-1, :], index[..., 1:, :]
    # The gradient of a shared number is a sum over many steps, so it is formed in fp64.
    if transitions.ndim == 2:
        steps = transitions.double()[before, after]
    elif transitions.ndim == 3:
        steps = transitions.double()[token[:-1], before, after]
    else:
        steps = transitions[token[:-1], sequence, before, after]
    total = total + torch.where(active[1:], steps.double(), 0.0).sum(-2)
    if start is not None:
        total = total + start[sequence, index[..., 0, :]].double()
    if end is not None:
        last = (lengths - 1).clamp(0, T - 1).expand(*index.shape[:-2], 1, N)
        total = total + end[sequence, index.gather(-2, last).squeeze(-2)].double()
    return torch.where(possible, total, -torch.inf).masked_fill(invalid, torch.nan)


def path_indicator(
    grad_output: Tensor,
    score: Tensor,
    states: Tensor,
    lengths: Tensor | None,
    likes: Sequence[Any],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the best score in emissions, transitions, start and end.

    Args:
        grad_output: the gradient of each score, `[N]`.
        score: the best scores `[N]`; NaN makes the gradients of its sequence NaN, up to its length
            if that is valid.
        states: the states of the best paths, `[T, N]`.
        lengths: `[N]`, or None.
        likes: the shape and dtype of each argument, None for an argument that is None.
    """
    emissions, transitions, start, end = likes
    T, N, C = emissions[0]
    on_path = torch.zeros(T, N, C, dtype=torch.float64, device=score.device)
    if C:
        index, value = states.clamp(min=0)[..., None], (states >= 0).double()[..., None]
        on_path = on_path.scatter(2, index, value)
    token = torch.arange(T, device=score.device)[:, None]
    lengths = torch.full((N,), T, device=score.device) if lengths is None else lengths.long()
    counts = (token < lengths) | (lengths < 1) | (lengths > T)
    failed = torch.where(counts & score.isnan(), torch.nan, 0.0).double()[..., None]
    d_path = torch.where(on_path > 0, grad_output.double()[:, None], 0.0)
    before, after = d_path[:-1], on_path[1:] + failed[1:]
    if len(transitions[0]) == 2:
        # PyTorch's scatter would add in an order that varies on a GPU; a product does not.
        d_transitions = before.reshape(-1, C).T @ after.reshape(-1, C)
    elif len(transitions[0]) == 3:
        d_transitions = before.transpose(1, 2) @ after
    else:
        d_transitions = before[..., None] * after[:, :, None]
    follows = torch.cat([on_path[1:].sum(2), torch.zeros_like(failed[:1, :, 0])])
    d_emissions = d_path + failed
    d_end = torch.where(follows[..., None] > 0, 0.0, d_emissions).sum(0)
    return (
        d_emissions.to(emissions[1]),
        d_transitions.to(transitions[1]),
        None if start is None else d_emissions[0].to(start[1]),
        None if end is None else d_end.to(end[1]),
    )


def best_paths(chain: LinearChainTensors, k: int) -> tuple[Tensor, Tensor]:
    """Return the scores `[k, N]` fp64 of the k best paths, from the best on, and their states.

    The states are `[k, T, N]`, and -1 past the length and for a path that does not exist, whose
    score is -inf. Of equal paths that with the lowest states, from the last state back, comes
    first. A step sorts all ways into a state, so the scan takes memory of `[N, C k, C]`.

    Source: Schwartz and Chow, The N-best algorithm, 1990.
    """
    emissions, transitions, start, end, _ = chain
    T, N, C = emissions.shape
    lengths = full_lengths(chain).long()
    invalid = (lengths < 1) | (lengths > T)
    if not (C and k):
        score = emissions.new_full((k, N), -torch.inf, dtype=torch.float64)
        return score.masked_fill(invalid, torch.nan), lengths.new_full((k, T, N), -1)
    # scores[n, c, r] is that of the r-th best path into state c.
    scores = emissions.new_full((N, C, k), -torch.inf, dtype=torch.float64)
    scores[..., 0] = emissions[0].double() if start is None else emissions[0].double() + start
    pointers = []  # for each step, the state before and its rank, as state * k + rank
    own = torch.arange(C * k, device=emissions.device).reshape(C, k)
    for t in range(1, T):
        step = transitions if transitions.ndim == 2 else transitions[t - 1]
        step = step.double().expand(N, C, C)[:, :, None]
        ways = (scores[..., None] + step).reshape(N, C * k, C)
        best, way = (
            part[:, :k].transpose(1, 2) for part in ways.sort(dim=1, descending=True, stable=True)
        )
        active = (t < lengths)[:, None, None]
        scores = torch.where(active, best + emissions[t].double()[..., None], scores)
        pointers.append(torch.where(active, way, own))
    if end is not None:
        scores = scores + end.double()[..., None]
    scores, slot = (
        part[:, :k].T for part in scores.flatten(1).sort(dim=1, descending=True, stable=True)
    )
    states, sequence = [slot // k], torch.arange(N, device=slot.device)
    for pointer in reversed(pointers):
        slot = pointer.flatten(1)[sequence, slot]
        states.append(slot // k)
    token = torch.arange(T, device=slot.device)[:, None]
    exists = (scores > -torch.inf)[:, None] & (token < lengths) & ~invalid
    path = torch.where(exists, torch.stack(states[::-1], 1), -1)
    return scores.masked_fill(invalid, torch.nan), path
