"""The specification of sparse linear chains in plain PyTorch: log Z, means, gradients, and paths.

With ⊕ and ⊗ of a semiring, the scans over time compute

    alpha[0] = initial      alpha[t + 1, c] = ⊕ over k: scores[t, c, k] ⊗ alpha[t, source[c, k]]
    beta[T] = final         beta[t, a] = ⊕ over (c, k) with source[c, k] = a:
                                             scores[t, c, k] ⊗ beta[t + 1, c]
    Z = ⊕ over c: alpha[T, c] ⊗ final[c]

All scans run in fp64, and autograd can differentiate them.

For means over paths a value belongs to each edge, first state and last state, and a path has the
sum of its values. The scan carries pairs: alpha, and the mean of the values over the paths into
each state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...paths import nbest
from ...primitives.semiring import Log, Max, Semiring, draw, log_dsum
from ...runtime.dtypes import acc_dtype
from ...runtime.sizes import decide
from .common import ChainPotentials, ChainValues


class ChainInputs(NamedTuple):
    """A batch of chains that is ready to be scanned.

    No index is out of bounds, and scores of inactive steps and missing edges are not NaN.

    Fields:
        scores: takes a step and returns its scores, `[N, C, K]` fp64, or takes some steps `[S]`;
            the semiring's one for an inactive step. A dense chain forms them here, so that it takes
            no memory for all steps.
        source: `[C, K]`; 0 for a missing edge.
        missing: `[C, K]`; True for a missing edge.
        initial, final: `[N, C]` fp64; NaN for an invalid chain.
        active: `[T, N]`; True for a step before the chain's length.
        unused: `[N]` fp64: the gradient past a length, 0, or NaN for an invalid chain.
    """

    scores: Callable[[Any], Tensor]
    source: Tensor
    missing: Tensor
    initial: Tensor
    final: Tensor
    active: Tensor
    unused: Tensor


def active_steps(scores: Tensor, source: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mask of active steps, `[T, N]`, and the mask of invalid chains, `[N]` or `[]`.

    A length out of range makes its chain invalid. A source out of range makes all chains invalid.
    """
    T, N, C, _ = scores.shape
    if lengths is None:
        lengths = torch.full((N,), T, device=scores.device)
    invalid = ((source < -1) | (source >= C)).any() | (lengths < 0) | (lengths > T)
    return torch.arange(T, device=scores.device)[:, None] < lengths, invalid


def chain_inputs(chain: ChainPotentials, semiring: Semiring) -> ChainInputs:
    """Return the inputs of a scan; the ends of invalid chains are NaN."""
    scores, source, initial, final, lengths = chain
    N, C = scores.shape[1:3]
    source = source.long()  # a narrow type would wrap the bounds
    missing = source < 0
    active, invalid = active_steps(scores, source, lengths)
    unused = torch.where(invalid, torch.nan, 0.0).double().expand(N)
    initial, final = (
        end.double().masked_fill(unused.isnan()[:, None], torch.nan) for end in (initial, final)
    )
    valid = active[:, :, None, None] & ~missing
    safe_scores = torch.where(valid, scores.double(), semiring.one)
    source = source.clamp(0, max(C - 1, 0))
    return ChainInputs(safe_scores.__getitem__, source, missing, initial, final, active, unused)


def edge_terms(x: ChainInputs, t: int, alpha: Tensor, semiring: Semiring) -> Tensor:
    """Return each edge's term in the sum for the state it enters at step t, `[N, C, K]`."""
    terms = semiring.mul(x.scores(t), alpha[:, x.source])
    return terms.masked_fill(x.missing, semiring.zero)


def forward_scores(x: ChainInputs, semiring: Semiring) -> list[Tensor]:
    """Return alpha after 0 to T steps, `[N, C]` each; past a chain's length it does not change."""
    alpha = [x.initial]
    for t, active in enumerate(x.active):
        entered = semiring.sum(edge_terms(x, t, alpha[t], semiring), -1)
        alpha.append(torch.where(active[:, None], entered, alpha[t]))
    return alpha


def outgoing_edges(x: ChainInputs) -> tuple[Tensor, Tensor]:
    """Return the edges c·K + k that leave each state, and the mask of the valid ones.

    Both are `[C, D]`, where D is the greatest number of edges that leave a state, at least 1.
    """
    C, K = x.source.shape
    source = x.source.masked_fill(x.missing, C).flatten()
    order = source.argsort(stable=True)
    degree = torch.zeros(C + 1, dtype=torch.int64, device=source.device).index_add(
        0, source, torch.ones_like(source)
    )[:C]
    start = degree.cumsum(0) - degree
    offset = torch.arange(max(int(degree.max()), 1), device=degree.device)
    index = start[:, None] + offset
    return order[index.clamp(max=C * K - 1)], offset < degree[:, None]


def backward_scores(x: ChainInputs, semiring: Semiring) -> list[Tensor]:
    """Return beta after 0 to T steps, `[N, C]` each; from a chain's length on it is `final`."""
    C, K = x.source.shape
    beta = [x.final]
    if not C * K:
        no_path = torch.full_like(x.final, semiring.zero)
        return [torch.where(active[:, None], no_path, x.final) for active in x.active] + beta
    edge, valid = outgoing_edges(x)
    for t in reversed(range(len(x.active))):
        terms = semiring.mul(x.scores(t).flatten(1)[:, edge], beta[0][:, edge // K])
        left = semiring.sum(terms.masked_fill(~valid, semiring.zero), -1)
        beta.insert(0, torch.where(x.active[t, :, None], left, beta[0]))
    return beta


def log_partition(x: ChainInputs, semiring: Semiring) -> Tensor:
    """Return the ⊕ over all paths, `[N]` fp64; a chain without a path has the gradient 0."""
    logz = semiring.sum(semiring.mul(forward_scores(x, semiring)[-1], x.final), -1)
    if semiring.zero == -torch.inf:
        return torch.where(logz == -torch.inf, logz.detach(), logz)
    return logz


def posteriors(x: ChainInputs, grad_output: Tensor) -> Iterator[Tensor]:
    """Yield the posteriors times grad_output `[N]`, which are the gradient of log Z.

    The first are those of the last states `[N, C]`, then come those of the edges `[N, C, K]` from
    the last step to the first, then those of the first states. The posterior of an edge is the
    posterior of the state that it enters, times the edge's share in the sum that entered it.
    """
    alpha = forward_scores(x, Log)
    state = grad_output.double()[:, None] * log_dsum(alpha[-1] + x.final, -1)
    yield state
    for t in reversed(range(len(x.active))):
        active = x.active[t, :, None]
        edges = state[..., None] * log_dsum(edge_terms(x, t, alpha[t], Log), -1)
        yield torch.where(active[..., None], edges, x.unused[:, None, None])
        state = torch.where(active, sum_by_source(x, edges), state)
    yield state


def chain_logz(chain: ChainPotentials, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z, `[N]`, in fp64 and in the dtype of results, and what its gradient needs.

    The reference saves nothing for the gradient.
    """
    logz = log_partition(chain_inputs(chain, Log), Log)
    rounded = logz.to(acc_dtype(chain.scores.dtype), copy=True)
    return logz, rounded, logz.new_empty(0)


def chain_gradient(
    grad_output: Tensor,
    chain: ChainPotentials,
    logz: Tensor,
    saved: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of log Z in scores (in `dtype`), initial and final."""
    return stacked(posteriors(chain_inputs(chain, Log), grad_output), chain, dtype)


def stacked(
    gradients: Iterator[Tensor], chain: ChainPotentials, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients in the order of `posteriors` as those in scores, initial and final."""
    d_final, *d_edges, d_initial = gradients
    d_scores = torch.stack(d_edges[::-1]) if d_edges else torch.empty_like(chain.scores)
    return (
        d_scores.to(dtype),
        d_initial.to(chain.initial.dtype, copy=True),
        d_final.to(chain.final.dtype),
    )


def sum_by_source(x: ChainInputs, edge_values: Tensor) -> Tensor:
    """Return the sum of the edge values `[N, C, K]` over the edges that leave each state.

    It is added up in a fixed order on a GPU too, unlike a sum by `index_add`.
    """
    sums = torch.zeros_like(x.initial).T
    return sums.index_put((x.source.flatten(),), edge_values.flatten(1).T, accumulate=True).T


class Values(NamedTuple):
    """Values of the edges and of the ends of paths.

    Fields:
        edges: takes a step and returns the values of its edges, `[N, C, K]` fp64.
        first, last: the values of the first and of the last states, `[N, C]` fp64.
    """

    edges: Callable[[int], Tensor]
    first: Tensor
    last: Tensor


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Return Σ weights · values over the last dimension, with 0 · (±inf) = 0."""
    return (weights * values.masked_fill(weights == 0, 0.0)).sum(-1)


def _forward_means(x: ChainInputs, values: Values) -> tuple[list[Tensor], list[Tensor]]:
    """Return alpha and the mean over the paths into each state, after 0 to T steps, `[N, C]`."""
    alpha, mean = [x.initial], [values.first]
    for t in range(len(x.active)):
        active, terms = x.active[t, :, None], edge_terms(x, t, alpha[t], Log)
        # Other values may be NaN, which a second derivative would carry into its result.
        valid = active[..., None] & ~x.missing
        valid_values = values.edges(t).masked_fill(~valid, 0.0)
        entered = _weighted_sum(log_dsum(terms, -1), valid_values + mean[t][:, x.source])
        alpha.append(torch.where(active, Log.sum(terms, -1), alpha[t]))
        mean.append(torch.where(active, entered, mean[t]))
    return alpha, mean


def mean_value(x: ChainInputs, values: Values) -> Tensor:
    """Return the posterior mean of the sum of values along a path, `[N]` fp64."""
    alpha, mean = _forward_means(x, values)
    return _weighted_sum(log_dsum(alpha[-1] + x.final, -1), mean[-1] + values.last)


def covariances(x: ChainInputs, values: Values, grad_output: Tensor) -> Iterator[Tensor]:
    """Yield the gradients of the mean times grad_output `[N]`, in the order of `posteriors`.

    Each is a posterior times the difference between the mean over the paths through a state or edge
    and the mean over all paths.
    """
    alpha, mean_into = _forward_means(x, values)
    posterior = log_dsum(alpha[-1] + x.final, -1)
    mean = _weighted_sum(posterior, mean_into[-1] + values.last)[:, None]
    # d_state is grad_output times the posterior of each state. mean_from is the mean over the
    # rest of the paths from each state. Both are [N, C].
    d_state, mean_from = grad_output.double()[:, None] * posterior, values.last

    def weighted(posterior: Tensor, value: Tensor) -> Tensor:
        return torch.where(posterior == 0, 0.0, posterior * value)

    yield weighted(d_state, mean_into[-1] + mean_from - mean)
    for t in reversed(range(len(x.active))):
        active = x.active[t, :, None]
        d_edge = d_state[..., None] * log_dsum(edge_terms(x, t, alpha[t], Log), -1)
        edge_mean_from = values.edges(t) + mean_from[..., None]
        edge_mean = mean_into[t][:, x.source] + edge_mean_from
        d_score = weighted(d_edge, edge_mean - mean[..., None])
        yield torch.where(active[..., None], d_score, x.unused[:, None, None])
        d_previous = sum_by_source(x, d_edge)
        previous_mean = sum_by_source(x, weighted(d_edge, edge_mean_from)) / d_previous
        previous_mean = torch.where(d_previous == 0, 0.0, previous_mean)
        mean_from = torch.where(active, previous_mean, mean_from)
        d_state = torch.where(active, d_previous, d_state)
    yield weighted(d_state, mean_into[0] + mean_from - mean)


def as_values(values: ChainValues) -> Values:
    """Return the values as the scans take them."""
    return Values(lambda t: values[0][t].double(), *(ends.double() for ends in values[1:]))


def chain_expectation(
    chain: ChainPotentials, values: ChainValues, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean, log Z and an empty tensor: the reference saves nothing."""
    x = chain_inputs(chain, Log)
    mean = mean_value(x, as_values(values))
    return mean, log_partition(x, Log), mean.new_empty(0)


def chain_expectation_gradient(
    grad_output: Tensor,
    chain: ChainPotentials,
    values: ChainValues,
    mean: Tensor,
    logz: Tensor,
    saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the mean in scores, initial and final."""
    x = chain_inputs(chain, Log)
    return stacked(covariances(x, as_values(values), grad_output), chain, chain.scores.dtype)


def chain_scan(chain: ChainPotentials, use_max: bool, reverse: bool) -> Tensor:
    """Return alpha, or beta if `reverse`, under Log or Max, `[T + 1, N, C]` fp64."""
    semiring = Max if use_max else Log
    x = chain_inputs(chain, semiring)
    return torch.stack(backward_scores(x, semiring) if reverse else forward_scores(x, semiring))


def chain_viterbi(chain: ChainPotentials, trace: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best score `[N]`, and the states `[T + 1, N]` and edges `[T, N]` of its path.

    The score is fp64 for fp64 scores and otherwise fp32. States and edges are -1 where the path has
    none, and empty without `trace`. Ties go to the lowest edge into a state, then to the lowest
    last state.
    """
    x = chain_inputs(chain, Max)
    if trace:
        best, states, edges = best_path(x)
    else:
        best, states = log_partition(x, Max), x.source.new_empty(0)
        edges = states.clone()
    return best.to(acc_dtype(chain.scores.dtype)), states, edges


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


def chain_sample(chain: ChainPotentials, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states `[S, T + 1, N]` and edges `[S, T, N]` of S paths from the posterior.

    The draws use the uniform numbers `[T + 1, S, N]`, the last ones for the last states.
    """
    x = chain_inputs(chain, Log)
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


def path_score(chain: ChainPotentials, edges: Tensor, first_state: Tensor | None = None) -> Tensor:
    """Return the score of paths with the edges `[..., T, N]`, `[..., N]` fp64.

    The score is -inf for edges that do not form a path. A chain of no steps has the score of its
    `first_state` `[..., N]`, or 0 if that is None.
    """
    scores, source, initial, final, lengths = chain
    T, N, _, K = scores.shape
    source = source.long()  # a narrow type would wrap the bounds
    active, invalid = active_steps(scores, source, lengths)
    invalid_score = torch.where(invalid, torch.nan, 0.0)
    no_steps = invalid_score.double().expand(*edges.shape[:-2], N)
    n = torch.arange(N, device=edges.device)
    if first_state is not None and initial.shape[1]:
        state = first_state.clamp(0, initial.shape[1] - 1)
        ends = initial[n, state].double() + final[n, state].double()
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
    edge_scores = torch.where(connected, scores[step, n, entered, k].double(), -torch.inf)
    total = torch.where(active, edge_scores, 0.0).sum(-2) + invalid_score
    last = (active.sum(0) - 1).clamp(min=0)
    last_state = entered.gather(-2, last.expand(*edges.shape[:-2], 1, N)).squeeze(-2)
    start_state = left[..., 0, :].clamp(0, initial.shape[1] - 1)
    ends = initial[n, start_state].double() + final[n, last_state].double()
    return torch.where(active.any(0), total + ends, no_steps)


def best_paths(x: ChainInputs, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores `[k, N]` fp64 of the k best paths, their states and their edges.

    States are `[k, T + 1, N]` and edges `[k, T, N]`, -1 past the length and for a path that does
    not exist, whose score is -inf. Of equal paths that with the lowest edges, from the last state
    back, comes first. A step sorts all ways into a state, in memory of `[N, C, K k]`.
    """
    (N, C), K = x.initial.shape, x.source.shape[1]
    T = len(x.active)
    if not C:
        none = x.source.new_full((k, T + 1, N), -1)
        return x.initial.new_full((k, N), -torch.inf), none, none[:, 1:]
    if not K:  # Only chains of no steps have paths.
        source, missing = x.source.new_zeros(C, 1), x.missing.new_ones(C, 1)
        x = x._replace(
            scores=x.final.new_zeros(T, N, C, 1).__getitem__, source=source, missing=missing
        )
    score, states, edges = nbest.best_paths(*x[:-1], k=k)
    on_path = (score > -torch.inf)[:, None] & torch.cat([x.active.new_ones(1, N), x.active])
    edges = states[:, 1:] * K + edges
    return score, states.masked_fill(~on_path, -1), edges.masked_fill(~on_path[:, 1:], -1)


def chain_nbest(chain: ChainPotentials, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `best_paths`."""
    return best_paths(chain_inputs(chain, Max), k)
