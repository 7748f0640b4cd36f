"""Sparse linear chains in plain PyTorch: scans over time, in fp64, differentiable throughout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.semiring import Log, Max, Semiring, log_dsum


class ChainInputs(NamedTuple):
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


def counted(scores: Tensor, source: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which steps count, `[T, N]`, and which chains have no right answer, `[N]` or `[]`: a length or, for every chain, a source is out of range."""
    steps, chains, states, _ = scores.shape
    if lengths is None:
        lengths = torch.full((chains,), steps, device=scores.device)
    wrong = ((source < -1) | (source >= states)).any() | (lengths < 0) | (lengths > steps)
    return torch.arange(steps, device=scores.device)[:, None] < lengths, wrong


def chain_inputs(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    S: Semiring,
) -> ChainInputs:
    """Lengths out of range make NaN of their chain, sources out of range of every chain."""
    chains, states = scores.shape[1:3]
    source = source.long()  # a narrow type would wrap the bounds
    missing = source < 0
    active, wrong = counted(scores, source, lengths)
    initial, final = (
        end.double().masked_fill(wrong[..., None].expand(chains, 1), torch.nan)
        for end in (initial, final)
    )
    kept = active[:, :, None, None] & ~missing
    safe = torch.where(kept, scores.double(), S.one)
    return ChainInputs(safe, source.clamp(0, max(states - 1, 0)), missing, initial, final, active)


def edge_terms(x: ChainInputs, t: int, alpha: Tensor, S: Semiring) -> Tensor:
    """What each edge of step t brings to the state it enters, `[N, C, K]`."""
    return S.mul(x.scores[t], alpha[:, x.source]).masked_fill(x.missing, S.zero)


def forward_scores(x: ChainInputs, S: Semiring) -> list[Tensor]:
    """α after each step, `[N, C]` each; after the last step that counts it stays as it is."""
    alpha = [x.initial]
    for t in range(len(x.scores)):
        alpha.append(
            torch.where(x.active[t, :, None], S.sum(edge_terms(x, t, alpha[t], S), -1), alpha[t])
        )
    return alpha


def backward_scores(x: ChainInputs, S: Semiring) -> list[Tensor]:
    """β before each step, and the final scores last, `[N, C]` each: what the rest of the chain adds, from each state."""
    states, slots = x.source.shape
    leaving = x.source.masked_fill(x.missing, states).flatten()
    order = leaving.argsort(stable=True)
    degree = torch.zeros(states + 1, dtype=torch.int64, device=leaving.device).index_add(
        0, leaving, torch.ones_like(leaving)
    )[:states]
    start = degree.cumsum(0) - degree
    widest = max(int(degree.max()) if states else 0, 1)
    place = start[:, None] + torch.arange(widest, device=degree.device)
    held = torch.arange(widest, device=degree.device) < degree[:, None]
    beta = [x.final]
    if not states * slots:
        return [
            torch.where(active[:, None], torch.full_like(x.final, S.zero), x.final)
            for active in x.active
        ] + beta
    edge = order[place.clamp(max=states * slots - 1)]
    for t in reversed(range(len(x.scores))):
        terms = S.mul(x.scores[t].flatten(1)[:, edge], beta[0][:, edge // slots]).masked_fill(
            ~held, S.zero
        )
        beta.insert(0, torch.where(x.active[t, :, None], S.sum(terms, -1), beta[0]))
    return beta


def log_partition(x: ChainInputs, S: Semiring) -> Tensor:
    """⊕ over all paths, `[N]` fp64; the gradient of a chain that has no path is 0."""
    total = S.sum(S.mul(forward_scores(x, S)[-1], x.final), -1)
    return (
        torch.where(total == -torch.inf, total.detach(), total) if S.zero == -torch.inf else total
    )


def chain_logz(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """log Z, `[N]` fp64, and what the gradient may use again: nothing, for the reference starts anew."""
    return log_partition(
        chain_inputs(scores, source, initial, final, lengths, Log), Log
    ), scores.new_empty(0, dtype=torch.float64)


def chain_gradient(
    grad: Tensor,
    scores: Tensor,
    initial: Tensor,
    final: Tensor,
    source: Tensor,
    lengths: Tensor | None,
    logz: Tensor,
    kept: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of scores, in `dtype`, of initial and of final, from that of log Z: the share of each edge in the sum that entered its state,
    times what went on from that state."""
    x = chain_inputs(scores, source, initial, final, lengths, Log)
    alpha = forward_scores(x, Log)
    here = d_final = grad.double()[:, None] * log_dsum(alpha[-1] + x.final, -1)
    d_scores: list[Tensor] = []
    for t in reversed(range(len(x.scores))):
        active = x.active[t, :, None]
        share = here[..., None] * log_dsum(edge_terms(x, t, alpha[t], Log), -1)
        d_scores.insert(0, torch.where(active[..., None], share, 0.0 * here[..., None]))
        here = torch.where(active, leaving(x, share), here)
    every = torch.stack(d_scores) if d_scores else x.scores
    return every.to(dtype), here.to(initial.dtype), d_final.to(final.dtype)


def leaving(x: ChainInputs, edges: Tensor) -> Tensor:
    """Of numbers on the edges `[N, C, K]`, the sum over those that leave each state, `[N, C]`."""
    return torch.zeros_like(x.initial).index_add(1, x.source.flatten(), edges.flatten(1))


def chain_scan(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    best: bool,
    reverse: bool,
) -> Tensor:
    """α or β under Log or Max, `[T + 1, N, C]` fp64."""
    S = Max if best else Log
    x = chain_inputs(scores, source, initial, final, lengths, S)
    return torch.stack(backward_scores(x, S) if reverse else forward_scores(x, S))
