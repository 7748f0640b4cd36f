"""Sparse linear chains in plain PyTorch: scans over time, in fp64, differentiable throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..semiring import Log, Max, Semiring, log_dsum, max_dsum


class Inputs(NamedTuple):
    """A batch of chains, ready to be scanned: nothing in it can index out of bounds or make a NaN where it does not count.

    Fields:
        scores: `[T, N, C, K]` fp64, the semiring's one where the step or the edge does not count.
        source: `[C, K]`, 0 where there is no edge.
        missing: `[C, K]`, where there is no edge.
        initial, final: `[N, C]` fp64.
        active: `[T, N]`, whether the step counts.
    """

    scores: Tensor
    source: Tensor
    missing: Tensor
    initial: Tensor
    final: Tensor
    active: Tensor


def inputs(scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, lengths: Tensor | None, S: Semiring) -> Inputs:
    """Lengths out of range make NaN of their chain, sources out of range of every chain."""
    steps, chains, states, _ = scores.shape
    missing = source < 0
    wrong = ((source < -1) | (source >= states)).any()
    if lengths is None:
        lengths = torch.full((chains,), steps, device=scores.device)
    active = torch.arange(steps, device=scores.device)[:, None] < lengths
    wrong = wrong | (lengths < 0) | (lengths > steps)
    initial = initial.double().masked_fill(wrong[..., None].expand(chains, 1), torch.nan)
    kept = active[:, :, None, None] & ~missing
    safe = torch.where(kept, scores.double(), S.one)
    return Inputs(safe, source.clamp(0, max(states - 1, 0)).long(), missing, initial, final.double(), active)


def edge_terms(x: Inputs, t: int, alpha: Tensor, S: Semiring) -> Tensor:
    """What each edge of step t brings to the state it enters, `[N, C, K]`."""
    return S.mul(x.scores[t], alpha[:, x.source]).masked_fill(x.missing, S.zero)


def forward_scores(x: Inputs, S: Semiring) -> list[Tensor]:
    """α after each step, `[N, C]` each; after the last step that counts it stays as it is."""
    alpha = [x.initial]
    for t in range(len(x.scores)):
        alpha.append(torch.where(x.active[t, :, None], S.sum(edge_terms(x, t, alpha[t], S), -1), alpha[t]))
    return alpha


def backward_scores(x: Inputs, S: Semiring) -> list[Tensor]:
    """β before each step, and the final scores last, `[N, C]` each: what the rest of the chain adds, from each state."""
    states, slots = x.source.shape
    leaving = x.source.masked_fill(x.missing, states).flatten()
    order = leaving.argsort(stable=True)
    degree = torch.bincount(leaving, minlength=states + 1)[:states]
    start = degree.cumsum(0) - degree
    widest = max(int(degree.max()) if states else 0, 1)
    place = start[:, None] + torch.arange(widest, device=degree.device)
    held = torch.arange(widest, device=degree.device) < degree[:, None]
    edge = order[place.clamp(max=states * slots - 1)] if states * slots else place
    beta = [x.final]
    for t in reversed(range(len(x.scores))):
        terms = S.mul(x.scores[t].flatten(1)[:, edge], beta[0][:, edge // max(slots, 1)]).masked_fill(~held, S.zero)
        beta.insert(0, torch.where(x.active[t, :, None], S.sum(terms, -1), beta[0]))
    return beta


def logz_of(x: Inputs, S: Semiring) -> Tensor:
    """⊕ over all paths, `[N]` fp64; the gradient of a chain that has no path is 0."""
    total = S.sum(S.mul(forward_scores(x, S)[-1], x.final), -1)
    return torch.where(total == -torch.inf, total.detach(), total) if S.zero == -torch.inf else total


def chain_logz(scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, lengths: Tensor | None, best: bool, keep: bool) -> tuple[Tensor, Tensor]:
    """log Z, `[N]` fp64, and what the gradient may use again: nothing, for the reference starts anew."""
    steps, chains, states, _ = scores.shape
    kept = scores.new_zeros((steps + 1, chains, states) if keep else (0,), dtype=torch.float64)
    S = Max if best else Log
    return logz_of(inputs(scores, source, initial, final, lengths, S), S), kept


def chain_gradient(
    grad: Tensor, scores: Tensor, initial: Tensor, final: Tensor, source: Tensor, lengths: Tensor | None, logz: Tensor, kept: Tensor,
    best: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of scores, in `dtype`, of initial and of final, from that of log Z: the share of each edge in the sum that entered its state,
    times what went on from that state."""
    S, shares = (Max, max_dsum) if best else (Log, log_dsum)
    x = inputs(scores, source, initial, final, lengths, S)
    alpha = forward_scores(x, S)
    here = d_final = grad.double()[:, None] * shares(S.mul(alpha[-1], x.final), -1)
    d_scores: list[Tensor] = []
    for t in reversed(range(len(x.scores))):
        active = x.active[t, :, None]
        share = here[..., None] * shares(edge_terms(x, t, alpha[t], S), -1)
        d_scores.insert(0, torch.where(active[..., None], share, 0.0 * here[..., None]))
        before = torch.zeros_like(here).index_add(1, x.source.flatten(), share.flatten(1))
        here = torch.where(active, before, here)
    every = torch.stack(d_scores) if d_scores else x.scores
    return every.to(dtype), here.to(initial.dtype), d_final.to(final.dtype)


class Path(NamedTuple):
    """Score `[N]`, states `[T + 1, N]` and edges `[T, N]`, -1 where there is none."""

    score: Tensor
    states: Tensor
    edges: Tensor


def chain_viterbi(scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, lengths: Tensor | None) -> Path:
    """The best path; ties to the lowest edge into a state, then to the lowest last state."""
    x = inputs(scores, source, initial, final, lengths, Max)
    alpha = forward_scores(x, Max)
    last = alpha[-1] + x.final
    state = last.argmax(-1)
    score = last.gather(-1, state[:, None]).squeeze(-1)

    def best(t: int, state: Tensor) -> Tensor:
        return _at_states(edge_terms(x, t, alpha[t], Max), state).argmax(-1)

    states, edges = _traced(x, best, state[None], score > -torch.inf)
    return Path(score, states[0], edges[0])


def chain_sample(
    scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, lengths: Tensor | None, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Paths from the posterior, states `[S, T + 1, N]` and edges `[S, T, N]`, by uniform numbers `[T + 1, S, N]`."""
    x = inputs(scores, source, initial, final, lengths, Log)
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
    place = (total <= uniform[..., None] * total[..., -1:]).sum(-1)
    possible = (weights > 0) * torch.arange(weights.shape[-1], device=weights.device)
    return torch.minimum(place, possible.amax(-1))  # a product that rounds up to the total would pass the last place


def _traced(x: Inputs, slot_of: Callable[[int, Tensor], Tensor], state: Tensor, possible: Tensor) -> tuple[Tensor, Tensor]:
    """Paths followed back from their last states `[S, N]`, by the edge into each state: `[S, T + 1, N]` and `[S, T, N]`."""
    slots = x.source.shape[1]
    states = [state]
    edges: list[Tensor] = []
    for t in reversed(range(len(x.scores))):
        slot = slot_of(t, state)
        edges.insert(0, torch.where(x.active[t] & possible, state * slots + slot, -1))
        state = torch.where(x.active[t], x.source[state, slot], state)
        states.insert(0, state)
    ended = torch.cat([torch.ones_like(x.active[:1]) if len(x.active) else possible[None], x.active]) & possible
    return torch.stack(states, 1).masked_fill(~ended, -1), torch.stack(edges, 1) if edges else state[:, None][:, :0]


class Values(NamedTuple):
    """Numbers on the edges `[T, N, C, K]`, on the first states and on the last `[N, C]`."""

    edges: Tensor
    initial: Tensor
    final: Tensor


def chain_expectation(scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, lengths: Tensor | None, values: Values) -> Tensor:
    """The mean of the sum of values along a path, `[N]` fp64, by a scan over pairs: α, and the mean over the paths into each state."""
    x = inputs(scores, source, initial, final, lengths, Log)
    alpha, mean = x.initial, values.initial.double()
    for t in range(len(x.scores)):
        terms = edge_terms(x, t, alpha, Log)
        through = _weighed(log_dsum(terms, -1), values.edges[t].double() + mean[:, x.source])
        active = x.active[t, :, None]
        alpha, mean = torch.where(active, Log.sum(terms, -1), alpha), torch.where(active, through, mean)
    return _weighed(log_dsum(alpha + x.final, -1), mean + values.final.double())


def _weighed(weights: Tensor, values: Tensor) -> Tensor:
    """Σ weights · values over the last dimension, with 0 · (±inf) = 0."""
    return (weights * values.masked_fill(weights == 0, 0.0)).sum(-1)


def chain_log_score(scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, lengths: Tensor | None, edges: Tensor) -> Tensor:
    """The score of paths `[..., T, N]`, `[..., N]` fp64; -inf for edges that do not follow one another, 0 for a chain of no steps."""
    x = inputs(scores, source, initial, final, lengths, Log)
    steps, chains, _, slots = x.scores.shape
    known = (edges >= 0) & (edges < x.source.numel())
    edge = edges.clamp(0, max(x.source.numel() - 1, 0))
    entered, left = edge // max(slots, 1), x.source.flatten()[edge]
    fits = known & ~x.missing.flatten()[edge]
    follows = torch.ones_like(fits)
    follows[..., 1:, :] = left[..., 1:, :] == entered[..., :-1, :]
    flat = x.scores.flatten(2).expand(*edges.shape[:-2], *x.scores.shape[:2], -1)
    step = flat.gather(-1, edge[..., None]).squeeze(-1).masked_fill(~(fits & follows), -torch.inf)
    total = step.masked_fill(~x.active, 0.0).sum(-2)
    if steps == 0:
        return total
    last = (x.active.sum(0) - 1).clamp(min=0)
    first_state = left[..., 0, :]
    last_state = entered.gather(-2, last.expand(*edges.shape[:-2], 1, chains)).squeeze(-2)
    chain = torch.arange(chains, device=edges.device)
    return torch.where(x.active.any(0), total + x.initial[chain, first_state] + x.final[chain, last_state], total)
