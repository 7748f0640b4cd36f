"""Paths through sparse linear chains in plain PyTorch: the best one, samples, and path scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....primitives.semiring import Log, Max, log_dsum
from ....runtime.dtypes import acc_dtype
from ....runtime.sizes import decide
from .logz import ChainInputs, active_steps, chain_inputs, edge_terms, forward_scores


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
    alpha = forward_scores(x, Max)
    end_scores = alpha[-1] + x.final
    best = Max.sum(end_scores, -1)
    score = best.to(acc_dtype(scores.dtype))
    if end_scores.shape[1]:
        last_state = end_scores.argmax(-1)
    else:
        last_state = torch.full_like(best, -1, dtype=torch.int64)
    if not trace:
        return score, last_state.new_empty(0), last_state.new_empty(0)

    def best_edge(t: int, state: Tensor) -> Tensor:
        return _rows_of_states(edge_terms(x, t, alpha[t], Max), state).argmax(-1)

    states, edges = _trace_back(x, best_edge, last_state[None], best > -torch.inf)
    return score, states[0], edges[0]


def chain_sample(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the states `[S, T + 1, N]` and edges `[S, T, N]` of S paths from the posterior.

    The last state is drawn first, then the edge into each state. The draws use the uniform numbers
    `[T + 1, S, N]`.
    """
    x = chain_inputs(scores, source, initial, final, lengths, Log)
    alpha = forward_scores(x, Log)
    end_scores = alpha[-1] + x.final

    def draw_edge(t: int, state: Tensor) -> Tensor:
        return _draw(_rows_of_states(edge_terms(x, t, alpha[t], Log), state), uniforms[t])

    last_state = _draw(end_scores.expand(uniforms.shape[1], -1, -1), uniforms[-1])
    return _trace_back(x, draw_edge, last_state, Log.sum(end_scores, -1) > -torch.inf)


def _rows_of_states(terms: Tensor, state: Tensor) -> Tensor:
    """Return the rows `[S, N, K]` of the terms `[N, C, K]` that belong to the states `[S, N]`."""
    return terms[torch.arange(state.shape[1], device=state.device), state]


def _draw(terms: Tensor, uniform: Tensor) -> Tensor:
    """Draw an index into each row of `[S, N, K]` with probabilities proportional to exp(terms)."""
    weights = log_dsum(terms, -1)
    cumulative = weights.cumsum(-1)
    if not terms.shape[-1]:
        return torch.zeros_like(uniform.expand(terms.shape[:-1]), dtype=torch.int64)
    index = (cumulative <= uniform[..., None] * cumulative[..., -1:]).sum(-1)
    # A product that rounds up to the total would pass the last index with a positive weight.
    possible = (weights > 0) * torch.arange(weights.shape[-1], device=weights.device)
    return torch.minimum(index, possible.amax(-1))


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
    for t in reversed(range(len(x.scores))):
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
