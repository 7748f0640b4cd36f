"""The gradient of the best score of dense linear chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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
