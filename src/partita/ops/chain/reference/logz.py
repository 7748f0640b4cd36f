"""Log Z of linear chains and its gradient in plain PyTorch.

With ⊕ and ⊗ of a semiring, the scans over time compute

    alpha[0] = initial      alpha[t + 1, c] = ⊕ over k: scores[t, c, k] ⊗ alpha[t, source[c, k]]
    beta[T] = final         beta[t, a] = ⊕ over (c, k) with source[c, k] = a:
                                             scores[t, c, k] ⊗ beta[t + 1, c]
    Z = ⊕ over c: alpha[T, c] ⊗ final[c]

All scans run in fp64, and autograd can differentiate them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ....primitives.semiring import Log, Max, Semiring, log_dsum
from ....runtime.dtypes import acc_dtype


class ChainInputs(NamedTuple):
    """A batch of chains that is ready to be scanned.

    No index is out of bounds, and scores of inactive steps and missing edges are not NaN.

    Fields:
        scores: takes a step and returns its scores, `[N, C, K]` fp64; the semiring's one for an
            inactive step. A dense chain forms them here, so that it takes no memory for all steps.
        source: `[C, K]`; 0 for a missing edge.
        missing: `[C, K]`; True for a missing edge.
        initial, final: `[N, C]` fp64; NaN for an invalid chain.
        active: `[T, N]`; True for a step before the chain's length.
        unused: `[N]` fp64: the gradient past a length, 0, or NaN for an invalid chain.
    """

    scores: Callable[[int], Tensor]
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


def chain_inputs(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    semiring: Semiring,
) -> ChainInputs:
    """Return the inputs of a scan; the ends of invalid chains are NaN."""
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


def chain_logz(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z, `[N]`, in fp64 and in the dtype of results, and what its gradient needs.

    The reference saves nothing for the gradient.
    """
    logz = log_partition(chain_inputs(scores, source, initial, final, lengths, Log), Log)
    rounded = logz.to(acc_dtype(scores.dtype), copy=True)
    return logz, rounded, scores.new_empty(0, dtype=torch.float64)


def chain_gradient(
    grad_output: Tensor,
    scores: Tensor,
    initial: Tensor,
    final: Tensor,
    source: Tensor,
    lengths: Tensor | None,
    logz: Tensor,
    saved: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of log Z in scores (in `dtype`), initial and final."""
    x = chain_inputs(scores, source, initial, final, lengths, Log)
    d_final, *d_edges, d_initial = posteriors(x, grad_output)
    d_scores = torch.stack(d_edges[::-1]) if d_edges else torch.empty_like(scores)
    return (
        d_scores.to(dtype),
        d_initial.to(initial.dtype, copy=True),
        d_final.to(final.dtype),
    )


def sum_by_source(x: ChainInputs, edge_values: Tensor) -> Tensor:
    """Return the sum of the edge values `[N, C, K]` over the edges that leave each state.

    It is added up in a fixed order on a GPU too, unlike a sum by `index_add`.
    """
    sums = torch.zeros_like(x.initial).T
    return sums.index_put((x.source.flatten(),), edge_values.flatten(1).T, accumulate=True).T


def chain_scan(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    use_max: bool,
    reverse: bool,
) -> Tensor:
    """Return alpha, or beta if `reverse`, under Log or Max, `[T + 1, N, C]` fp64."""
    semiring = Max if use_max else Log
    x = chain_inputs(scores, source, initial, final, lengths, semiring)
    return torch.stack(backward_scores(x, semiring) if reverse else forward_scores(x, semiring))
