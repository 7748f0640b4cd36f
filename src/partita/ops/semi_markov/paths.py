"""Scores of paths of semi-Markov chains that are given by their states and starts."""

from __future__ import annotations

import torch
from torch import Tensor

from .inputs import SemiMarkovTensors, full_lengths


def path_score(chain: SemiMarkovTensors, states: Tensor, starts: Tensor) -> Tensor:
    """Return the score of paths with states and starts `[..., T, N]`, `[..., N]` fp64.

    Steps past a length are ignored. The score is -inf for what is no path: a state that is out of
    range or changes inside a segment, a segment of more than D steps, a first step that starts no
    segment. It is NaN for an invalid length.
    """
    emissions, transitions, durations, start, end, _ = chain
    T, N, C = emissions.shape
    D = durations.shape[0]
    lengths = full_lengths(chain)
    invalid = (lengths < 1) | (lengths > T)
    if not C:
        score = emissions.new_full((*states.shape[:-2], N), -torch.inf, dtype=torch.float64)
        return score.masked_fill(invalid, torch.nan)
    sequence = torch.arange(N, device=states.device)
    step = torch.arange(T, device=states.device)[:, None]
    active = step < lengths
    state = states.clamp(0, C - 1)
    first = torch.where(starts, step, -1).cummax(-2).values  # the first step of each segment
    age = (step - first).clamp(0, D - 1)  # minus 1
    possible = (state == states) & (first >= 0) & (step - first < D)
    follows = torch.zeros_like(starts)
    follows[..., 1:, :] = starts[..., 1:, :]  # a segment that follows another starts here
    before = state.roll(1, -2)
    possible[..., 1:, :] &= (starts | (before == state))[..., 1:, :]
    is_last = active & (starts.roll(-1, -2) | (step == lengths - 1))
    # The gradient of a shared number is a sum over many steps, so it is formed in fp64.
    terms = emissions[step, sequence, state].double()
    terms = terms + torch.where(follows, transitions.double()[before, state], 0.0)
    terms = terms + torch.where(is_last, durations.double()[age, state], 0.0)
    total = torch.where(active, terms, 0.0).sum(-2)
    last = (lengths - 1).clamp(0, T - 1).expand(*state.shape[:-2], 1, N)
    total = total + start[sequence, state[..., 0, :]].double()
    total = total + end[sequence, state.gather(-2, last).squeeze(-2)].double()
    possible = (possible | ~active).all(-2)
    return torch.where(possible, total, -torch.inf).masked_fill(invalid, torch.nan)
