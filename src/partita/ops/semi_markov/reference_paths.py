"""The best path, samples and path scores of semi-Markov chains in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...paths.inputs import full_lengths
from ...primitives.semiring import Log, Max, draw
from ...runtime.dtypes import acc_dtype
from .reference import (
    ForwardScores,
    SemiMarkovInputs,
    forward_scores,
    log_partition,
    semi_markov_inputs,
)

# It takes terms [k, N, choices], a step t, and whether they are those of states or of durations,
# and returns an index [k, N].
Choose = Callable[[Tensor, int, int], Tensor]
STATE, DURATION = 0, 1


def trace_back(
    x: SemiMarkovInputs, scores: ForwardScores, logz: Tensor, k: int, choose: Choose
) -> tuple[Tensor, Tensor]:
    """Return states and starts `[k, T, N]` of paths that are traced from the last step.

    At the last step of a segment its state is chosen, then its number of steps. States are -1 past
    the length and for a sequence without a path.
    """
    T, N, C = x.emissions.shape
    sequence, last = torch.arange(N, device=logz.device), x.last.expand(k, N)
    shape = (k, T, N)
    states = torch.full(shape, -1, device=logz.device)
    starts = torch.zeros(shape, dtype=torch.bool, device=logz.device)
    if not C:
        return states, starts
    ends, state, first = last, torch.zeros_like(last), torch.zeros_like(last)
    for t in reversed(range(T)):
        entered = torch.where((last == t)[..., None], x.end, x.transitions.T[state])
        is_end = ends == t
        state = torch.where(is_end, choose(scores.alpha[t] + entered, t, STATE), state)
        terms = x.closed(scores.opened[t], (x.ages() <= t) & (t <= x.last))
        terms = terms[:, sequence, state].movedim(0, -1)
        first = torch.where(is_end, t - choose(terms, t, DURATION), first)
        states[:, t] = torch.where(t <= last, state, -1)
        starts[:, t] = (t <= last) & (t == first)
        ends = torch.where(first == t, t - 1, ends)
    has_path = logz > -torch.inf  # False for NaN
    return states.masked_fill(~has_path, -1), starts & has_path


def semi_markov_viterbi(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best score `[N]`, and the states and starts of the best path `[T, N]`.

    Ties go to the lowest last state, then to the shortest last segment, then to the lowest state
    before it, and so on.
    """
    x = semi_markov_inputs(emissions, transitions, durations, start, end, lengths)
    scores = forward_scores(x, Max)
    best = log_partition(x, scores.alpha, Max)
    states, starts = trace_back(x, scores, best, 1, lambda terms, t, kind: terms.argmax(-1))
    return best.to(acc_dtype(emissions.dtype)), states[0], starts[0]


def semi_markov_sample(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the states and starts `[k, T, N]` of k paths from the posterior.

    A path is drawn from its end. The state and the duration of a segment are drawn by the uniform
    numbers of its last step, `[T, 2, k, N]`.
    """
    x = semi_markov_inputs(emissions, transitions, durations, start, end, lengths)
    scores = forward_scores(x, Log)
    logz = log_partition(x, scores.alpha)
    k = uniforms.shape[2]
    return trace_back(
        x, scores, logz, k, lambda terms, t, kind: draw(terms.expand(k, -1, -1), uniforms[t, kind])
    )


def path_score(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    states: Tensor,
    starts: Tensor,
) -> Tensor:
    """Return the score of paths with states and starts `[..., T, N]`, `[..., N]` fp64.

    Steps past a length are ignored. The score is -inf for what is no path: a state that is out of
    range or changes inside a segment, a segment of more than D steps, a first step that starts no
    segment. It is NaN for an invalid length.
    """
    T, N, C = emissions.shape
    D = durations.shape[0]
    lengths = full_lengths(emissions, lengths)
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
