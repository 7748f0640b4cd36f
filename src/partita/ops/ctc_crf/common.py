"""CTC-CRF as the difference of two chains, on top of the functions for chains of a backend.

The denominator is the chain over all k-mers. The numerator is the target lattice: a chain whose
states are the k-mers of the target, and whose edges read their scores from those of the first
chain. The loss is log Z of the denominator minus log Z of the numerator, and its gradient is the
difference of their marginals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from ..chain.common import ChainPotentials
from ..ctc.common import gradient_per_sequence, reduce_over_lengths


class CRFTargets(NamedTuple):
    """The targets of a batch, as slices of one tensor of labels.

    Fields:
        labels: all labels, counted from 1, `[num_labels]`.
        offsets: index of each sequence's first label, `[N]`.
        lengths: number of labels of each sequence, `[N]`.
        max_lengths: the greatest valid value of each length, `[N]` or `[]`.
    """

    labels: Tensor
    offsets: Tensor
    lengths: Tensor
    max_lengths: Tensor


class CRFLattice(NamedTuple):
    """The target lattice: the chain whose paths spell a target.

    Its states are the target's k-mers. Each state stays or is entered from the one before it.

    Fields:
        edge_index: index c·A + k of each edge's score among the scores of a step, `[N, L, 2]`, for
            staying in a state and for moving into it; -1 for no edge.
        source: the state that each edge comes from, `[L, 2]`.
        initial, final: the score of starting and of ending in each state, `[N, L]`.
    """

    edge_index: Tensor
    source: Tensor
    initial: Tensor
    final: Tensor


class ChainFunctions(NamedTuple):
    """The functions of one backend that compute log Z of chains and its gradient.

    Fields:
        logz, gradient: the functions that serve the ops `chain_logz` and `chain_gradient`.
    """

    logz: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kmer_source(n_base: int, state_len: int, device: torch.device | str | None = None) -> Tensor:
    """Return the k-mer that each edge comes from, `[C, n_base + 1]`.

    Column 0 is the k-mer itself. Column 1 + j is base j followed by all bases but the last.
    """
    C = n_base**state_len
    states = torch.arange(C, device=device)
    moves = states.repeat_interleave(n_base).reshape(n_base, C).T
    return torch.cat([states[:, None], moves], 1)


def lattice_source(states: int, device: torch.device | str | None = None) -> Tensor:
    """Return the state that each edge of a target lattice comes from, `[L, 2]`.

    Column 0 is the state itself and column 1 the state before it, -1 for the first state.
    """
    return torch.arange(states, device=device)[:, None] - torch.arange(2, device=device)


def unflatten_scores(scores: Tensor, source: Tensor) -> Tensor:
    """Return scores `[T, N, C * A]` or `[T, N, C, A]` as `[T, N, C, A]`, the shape of `source`."""
    return scores if scores.ndim == 4 else scores.view(*scores.shape[:2], *source.shape)


def pack_targets(targets: Tensor, lengths: Tensor) -> CRFTargets:
    """Pack targets, `[N, S]`, or all targets concatenated, `[M]`."""
    if targets.ndim == 2:
        N, S = targets.shape
        offsets = torch.arange(N, device=targets.device) * S
        return CRFTargets(targets.reshape(-1), offsets, lengths, torch.full_like(offsets, S))
    # The clamp bounds how far an invalid length can shift the targets after it.
    clamped = lengths.clamp(0, len(targets) + 1)
    offsets = clamped.cumsum(0) - clamped
    return CRFTargets(targets, offsets, lengths, len(targets) - offsets)


def invalid_targets(targets: CRFTargets, n_base: int) -> Tensor:
    """Return the mask of sequences with a label or a length that is out of range, `[N]`."""
    labels, offsets, lengths, max_lengths = targets
    labels = labels.long()  # comparisons with the bounds would wrap in a narrow dtype
    bad_labels = ((labels < 1) | (labels > n_base)).cumsum(0)
    bad_labels = torch.nn.functional.pad(bad_labels, (1, 0))
    ends = offsets + lengths
    first, last = (bad_labels[index.clamp(0, len(labels))] for index in (offsets, ends))
    return (last > first) | (lengths < 0) | (lengths > max_lengths)


def lattice_edge_index(targets: CRFTargets, states: int, state_len: int, n_base: int) -> Tensor:
    """Return the index of each edge's score for the first L k-mers of each target, `[N, L, 2]`.

    It is -1 past a target's end and for the move into the first k-mer, which does not exist.
    """
    position = torch.arange(states + state_len - 1, device=targets.offsets.device)
    position = targets.offsets[:, None] + position
    labels = torch.nn.functional.pad(targets.labels.long(), (0, 1), value=1)
    bases = (labels[position.clamp(0, len(labels) - 1)] - 1).clamp(0, n_base - 1)
    kmer = torch.zeros_like(position[:, :states])
    for i in range(state_len):
        kmer = kmer * n_base + bases[:, i : i + states]
    stay = kmer * (n_base + 1)
    # The move into a k-mer is numbered by the base that it drops, the first of the k-mer before it.
    move = stay + torch.nn.functional.pad(bases[:, : states - 1] + 1, (1, 0))
    state = torch.arange(states, device=position.device)
    within = (state <= (targets.lengths - state_len)[:, None])[..., None]
    has_source = state[:, None] >= torch.arange(2, device=position.device)
    return torch.where(within & has_source, torch.stack([stay, move], -1), -1)


def target_lattice(
    targets: CRFTargets,
    states: int,
    state_len: int,
    n_base: int,
    dtype: torch.dtype,
    source: Tensor,
) -> CRFLattice:
    """Build the lattice of the first L k-mers of each target.

    A target without a k-mer, or with more than L of them, has no final state and so no path.
    """
    state = torch.arange(states, device=targets.offsets.device)
    initial = torch.where(state == 0, 0.0, -torch.inf).to(dtype).expand(len(targets.offsets), -1)
    last = (targets.lengths - state_len)[:, None]
    final = torch.where(state == last, 0.0, -torch.inf).to(dtype)
    edge_index = lattice_edge_index(targets, states, state_len, n_base)
    return CRFLattice(edge_index, source, initial, final)


def lattice_scores(scores: Tensor, edge_index: Tensor) -> Tensor:
    """Gather the scores of the lattice's edges, `[T, N, L, 2]`, from `[T, N, C, A]`.

    The value where there is no edge is arbitrary, because no path uses it.
    """
    # The derivative of indexing adds up in a fixed order on a GPU; that of `gather` does not.
    chain = torch.arange(scores.shape[1], device=scores.device)[:, None, None]
    return scores.flatten(2)[:, chain, edge_index.clamp(min=0)]


def _zero(dtype: torch.dtype, *, device: torch.device) -> Tensor:
    return torch.zeros((1, 1), dtype=dtype, device=device)


def zero_ends(scores: Tensor) -> Tensor:
    """Return scores of 0 for starting and ending in each state, `[N, C]`."""
    zero = constant(_zero, acc_dtype(scores.dtype), device=scores.device)
    return zero.expand(scores.shape[1:3])


def subtract_marginals(
    d_scores: Tensor, marginals: Tensor, edge_index: Tensor, coefficients: Tensor
) -> None:
    """Subtract the marginals of edges times `coefficients`, `[N]`, from `d_scores` in place.

    `d_scores` is `[T, N, C, A]` and contiguous. Several edges may read one score. Their marginals
    are added in a fixed order, by `scatter_add_` on a CPU and by `index_put_` elsewhere.
    """
    # Where there is no edge, the marginal is 0.
    index = edge_index.flatten(1).long().clamp(min=0)
    change, d_scores = marginals.flatten(2) * -coefficients[:, None], d_scores.flatten(2)
    if d_scores.is_cpu:
        d_scores.scatter_add_(2, index.expand(len(change), -1, -1), change)
    else:
        t, n = (torch.arange(size, device=index.device) for size in change.shape[:2])
        d_scores.index_put_((t[:, None, None], n[:, None], index), change, accumulate=True)


def loss_through_chains(
    chains: ChainFunctions,
    scores: Tensor,
    source: Tensor,
    lattice_source: Tensor,
    targets: Tensor,
    target_lengths: Tensor,
    input_lengths: Tensor | None,
    state_len: int,
    reduction: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of the op `crf_loss`; see `reference.py`."""
    scores, dtype = unflatten_scores(scores, source), acc_dtype(scores.dtype)
    packed, n_base = pack_targets(targets, target_lengths), source.shape[1] - 1
    if input_lengths is None:
        input_lengths = torch.full_like(target_lengths, len(scores))
    # The length -1 makes the chains of an invalid sequence, and so its results, NaN.
    lengths = torch.where(invalid_targets(packed, n_base), -1, input_lengths)
    lattice = target_lattice(packed, len(lattice_source), state_len, n_base, dtype, lattice_source)
    ends, edge_scores = zero_ends(scores), lattice_scores(scores, lattice.edge_index)
    of_target = ChainPotentials(edge_scores, *lattice[1:], lengths)
    all_paths = ChainPotentials(scores, source, ends, ends, lengths)
    logz_den, _, saved = chains.logz(all_paths, save)
    logz_num, _, states = chains.logz(of_target, save)
    marginals = edge_scores.new_empty(0, dtype=dtype)
    if save:
        one = torch.ones_like(logz_num)
        marginals = chains.gradient(one, of_target, logz_num, states, dtype)[0]
    losses = torch.where(logz_num == -torch.inf, torch.inf, logz_den - logz_num)
    value = reduce_over_lengths(losses, target_lengths, reduction).to(dtype, copy=True)
    return value, losses, logz_den, saved, marginals, lattice.edge_index.int(), lengths


def gradient_through_chains(
    chains: ChainFunctions,
    grad: Tensor,
    scores: Tensor,
    source: Tensor,
    target_lengths: Tensor,
    losses: Tensor,
    logz: Tensor,
    saved: Tensor,
    marginals: Tensor,
    edge_index: Tensor,
    lengths: Tensor,
    reduction: str,
) -> Tensor:
    """Return the result of the op `crf_gradient`; see `reference.py`."""
    edges, dtype = unflatten_scores(scores, source), acc_dtype(scores.dtype)
    grad = gradient_per_sequence(grad, target_lengths, reduction)
    grad, ends = torch.where(losses == torch.inf, 0.0, grad), zero_ends(edges)
    chain = ChainPotentials(edges, source, ends, ends, lengths)
    result = chains.gradient(grad, chain, logz, saved, dtype)[0]
    subtract_marginals(result, marginals, edge_index, grad.to(dtype))
    return result.to(scores.dtype).view(scores.shape)
