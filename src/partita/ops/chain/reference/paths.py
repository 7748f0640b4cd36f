"""Paths through linear chains in plain PyTorch: the best one, samples, and path scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....primitives.semiring import Log, Max, draw
from ....runtime.dtypes import acc_dtype
from ....runtime.sizes import decide
from .logz import (
    ChainInputs,
    active_steps,
    chain_inputs,
    edge_terms,
    forward_scores,
    log_partition,
)


def chain_viterbi(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    trace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best score `[N]`, and the states `[T + 1, N]` and edges `[T, N]` of its path.

    The score is fp64 for fp64 scores and otherwise fp32. States and edges are -1 where the path has
    none, and empty without `trace`. Ties go to the lowest edge into a state, then to the lowest
    last state.
    """
    x = chain_inputs(scores, source, initial, final, lengths, Max)
    if trace:
        best, states, edges = best_path(x)
    else:
        best, states = log_partition(x, Max), x.source.new_empty(0)
        edges = states.clone()
    return best.to(acc_dtype(scores.dtype)), states, edges


def best_path(x: ChainInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best score `[N]` fp64, and the states and edges of its path."""
    alpha = forward_scores(x, Max)
    ends = alpha[-1] + x.final
    best = Max.sum(ends, -1)
    last_state = (
        ends.argmax(-1) if ends.shape[1] else torch.full(best.shape, -1, device=best.device)
    )

    def best_edge(t: int, state: Tensor) -> Tensor:
        return _rows_of_states(edge_terms(x, t, alpha[t], Max), state).argmax(-1)

    states, edges = _trace_back(x, best_edge, last_state[None], best > -torch.inf)
    return best, states[0], edges[0]


def chain_sample(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the states `[S, T + 1, N]` and edges `[S, T, N]` of S paths from the posterior.

    The draws use the uniform numbers `[T + 1, S, N]`, the last ones for the last states.
    """
    x = chain_inputs(scores, source, initial, final, lengths, Log)
    return sample_paths(x, uniforms, uniforms[-1])


def sample_paths(x: ChainInputs, uniforms: Tensor, of_last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states and edges of paths from the posterior.

    The last state is drawn first, by `of_last` `[S, N]`, then the edge into each state, by the
    uniform numbers of its step.
    """
    alpha = forward_scores(x, Log)
    ends = alpha[-1] + x.final

    def draw_edge(t: int, state: Tensor) -> Tensor:
        return draw(_rows_of_states(edge_terms(x, t, alpha[t], Log), state), uniforms[t])

    last_state = draw(ends.expand(len(of_last), -1, -1), of_last)
    return _trace_back(x, draw_edge, last_state, Log.sum(ends, -1) > -torch.inf)


def _rows_of_states(terms: Tensor, state: Tensor) -> Tensor:
    """Return the rows `[S, N, K]` of the terms `[N, C, K]` that belong to the states `[S, N]`."""
    return terms[torch.arange(state.shape[1], device=state.device), state]


def _trace_back(
    x: ChainInputs,
    choose_edge: Callable[[int, Tensor], Tensor],
    state: Tensor,
    has_path: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the states `[S, T + 1, N]` and edges `[S, T, N]` of paths that end in `state`.

    Args:
        choose_edge: takes a step t and the states `[S, N]` after it, and returns the index
            `[S, N]`, 0 to K - 1, of the edge into each.
        state: the last states, `[S, N]`.
        has_path: `[N]`; False for a chain whose states and edges are all -1.
    """
    K = x.source.shape[1]
    states = [state]
    edges: list[Tensor] = []
    for t in reversed(range(len(x.active))):
        k = choose_edge(t, state) if x.source.numel() else state
        edges.insert(0, torch.where(x.active[t] & has_path, state * K + k, -1))
        if x.source.numel():
            state = torch.where(x.active[t], x.source[state, k], state)
        states.insert(0, state)
    first = torch.ones_like(x.active[:1]) if len(x.active) else has_path[None]
    on_path = torch.cat([first, x.active]) & has_path
    return (
        torch.stack(states, 1).masked_fill(~on_path, -1),
        torch.stack(edges, 1) if edges else state[:, None][:, :0],
    )


def path_score(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    edges: Tensor,
    first_state: Tensor | None = None,
) -> Tensor:
    """Return the score of paths with the edges `[..., T, N]`, `[..., N]` fp64.

    The score is -inf for edges that do not form a path. A chain of no steps has the score of its
    `first_state` `[..., N]`, or 0 if that is None.
    """
    T, N, _, K = scores.shape
    source = source.long()  # a narrow type would wrap the bounds
    active, invalid = active_steps(scores, source, lengths)
    invalid_score = torch.where(invalid, torch.nan, 0.0)
    no_steps = invalid_score.double().expand(*edges.shape[:-2], N)
    chain = torch.arange(N, device=edges.device)
    if first_state is not None and initial.shape[1]:
        state = first_state.clamp(0, initial.shape[1] - 1)
        ends = initial[chain, state].double() + final[chain, state].double()
        no_steps = no_steps + torch.where(state == first_state, ends, -torch.inf)
    if not source.numel() or decide(T == 0, otherwise=False):
        return no_steps
    edge = edges.clamp(0, source.numel() - 1)
    entered, k = edge // K, edge % K
    left = source[entered, k]
    connected = (edges == edge) & (left >= 0)
    follows = connected[..., 1:, :] & (left[..., 1:, :] == entered[..., :-1, :])
    connected = torch.cat([connected[..., :1, :], follows], -2)
    step = torch.arange(T, device=edges.device)[:, None]
    edge_scores = torch.where(connected, scores[step, chain, entered, k].double(), -torch.inf)
    total = torch.where(active, edge_scores, 0.0).sum(-2) + invalid_score
    last = (active.sum(0) - 1).clamp(min=0)
    last_state = entered.gather(-2, last.expand(*edges.shape[:-2], 1, N)).squeeze(-2)
    start_state = left[..., 0, :].clamp(0, initial.shape[1] - 1)
    ends = initial[chain, start_state].double() + final[chain, last_state].double()
    return torch.where(active.any(0), total + ends, no_steps)
