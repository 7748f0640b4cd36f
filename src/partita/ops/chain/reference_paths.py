"""Paths through sparse linear chains in plain PyTorch: the best one, samples from the posterior, and the score of a given one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...primitives.semiring import Log, Max, log_dsum
from .reference import ChainInputs, chain_inputs, counted, edge_terms, forward_scores


def chain_viterbi(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    trace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The best score `[N]` fp64, states `[T + 1, N]` and edges `[T, N]` of its path, -1 where there is none, or nothing without `trace`; ties go to
    the lowest edge into a state, then to the lowest last state."""
    x = chain_inputs(scores, source, initial, final, lengths, Max)
    alpha = forward_scores(x, Max)
    last = alpha[-1] + x.final
    score = Max.sum(last, -1)
    state = last.argmax(-1) if last.shape[1] else torch.full_like(score, -1, dtype=torch.int64)
    if not trace:
        return score, state.new_empty(0), state.new_empty(0)

    def best(t: int, state: Tensor) -> Tensor:
        return _at_states(edge_terms(x, t, alpha[t], Max), state).argmax(-1)

    states, edges = _traced(x, best, state[None], score > -torch.inf)
    return score, states[0], edges[0]


def chain_sample(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Paths from the posterior, states `[S, T + 1, N]` and edges `[S, T, N]`, by uniform numbers `[T + 1, S, N]`."""
    x = chain_inputs(scores, source, initial, final, lengths, Log)
    alpha = forward_scores(x, Log)
    ends = alpha[-1] + x.final

    def drawn(t: int, state: Tensor) -> Tensor:
        return _drawn(_at_states(edge_terms(x, t, alpha[t], Log), state), uniforms[t])

    state = _drawn(ends.expand(uniforms.shape[1], -1, -1), uniforms[-1])
    return _traced(x, drawn, state, Log.sum(ends, -1) > -torch.inf)


def _at_states(terms: Tensor, state: Tensor) -> Tensor:
    """Of `[N, C, K]`, what belongs to states `[S, N]`: `[S, N, K]`."""
    return terms[torch.arange(state.shape[1], device=state.device), state]


def _drawn(terms: Tensor, uniform: Tensor) -> Tensor:
    """One place of `[S, N, K]` for each row, with probabilities in proportion to the exponentials."""
    weights = log_dsum(terms, -1)
    total = weights.cumsum(-1)
    if not terms.shape[-1]:
        return torch.zeros_like(uniform.expand(terms.shape[:-1]), dtype=torch.int64)
    place = (total <= uniform[..., None] * total[..., -1:]).sum(-1)
    possible = (weights > 0) * torch.arange(weights.shape[-1], device=weights.device)
    return torch.minimum(
        place, possible.amax(-1)
    )  # a product that rounds up to the total would pass the last place


def _traced(
    x: ChainInputs, slot_of: Callable[[int, Tensor], Tensor], state: Tensor, possible: Tensor
) -> tuple[Tensor, Tensor]:
    """Paths followed back from their last states `[S, N]`, by the edge into each state: `[S, T + 1, N]` and `[S, T, N]`."""
    slots = x.source.shape[1]
    states = [state]
    edges: list[Tensor] = []
    for t in reversed(range(len(x.scores))):
        slot = slot_of(t, state) if x.source.numel() else state
        edges.insert(0, torch.where(x.active[t] & possible, state * slots + slot, -1))
        state = (
            torch.where(x.active[t], x.source[state, slot], state) if x.source.numel() else state
        )
        states.insert(0, state)
    ended = (
        torch.cat([torch.ones_like(x.active[:1]) if len(x.active) else possible[None], x.active])
        & possible
    )
    return torch.stack(states, 1).masked_fill(~ended, -1), torch.stack(
        edges, 1
    ) if edges else state[:, None][:, :0]


def chain_log_score(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    edges: Tensor,
    first: Tensor | None = None,
) -> Tensor:
    """The score of paths `[..., T, N]`, `[..., N]` fp64; -inf for edges that do not follow one another. A chain of no steps has that of its `first` state
    `[..., N]`, or 0 where nobody knows it."""
    steps, chains, _, slots = scores.shape
    source = source.long()  # a narrow type would wrap the bounds
    active, wrong = counted(scores, source, lengths)
    nothing, chain = (
        torch.where(wrong, torch.nan, 0.0).double().expand(*edges.shape[:-2], chains),
        torch.arange(chains, device=edges.device),
    )
    if first is not None and initial.shape[1]:
        state = first.clamp(0, initial.shape[1] - 1)
        nothing = nothing + torch.where(
            state == first,
            initial[chain, state].double() + final[chain, state].double(),
            -torch.inf,
        )
    if steps == 0 or source.numel() == 0:
        return nothing
    edge = edges.clamp(0, source.numel() - 1)
    entered, slot = edge // slots, edge % slots
    left = source[entered, slot]
    fits = (edges == edge) & (left >= 0)
    fits = torch.cat(
        [fits[..., :1, :], fits[..., 1:, :] & (left[..., 1:, :] == entered[..., :-1, :])], -2
    )
    step = scores[torch.arange(steps, device=edges.device)[:, None], chain, entered, slot].double()
    total = torch.where(active, torch.where(fits, step, -torch.inf), 0.0).sum(-2) + torch.where(
        wrong, torch.nan, 0.0
    )
    last = (active.sum(0) - 1).clamp(min=0)
    last_state = entered.gather(-2, last.expand(*edges.shape[:-2], 1, chains)).squeeze(-2)
    first_state = left[..., 0, :].clamp(0, initial.shape[1] - 1)
    ends = initial[chain, first_state].double() + final[chain, last_state].double()
    return torch.where(active.any(0), total + ends, nothing)
