"""CTC-CRF as the difference of two chains, on top of the functions for chains of a backend.

The denominator is the chain over all k-mers. The numerator is the target lattice: a chain whose
states are the k-mers of the target, and whose edges read their scores from those of the first
chain. The loss is log Z of the denominator minus log Z of the numerator, and its gradient is the
difference of their marginals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...paths.autograd import ones
from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from ..chain.common import ChainPotentials
from ..ctc.common import gradient_per_sequence, reduce_over_lengths


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


class CRFFunctions(NamedTuple):
    """The functions of one backend from which the loss is made.

    Fields:
        logz, gradient: the functions that serve the ops `chain_logz` and `chain_gradient`.
        lattice, gather, reduce: those that have the signatures and results of `target_lattice`,
            `lattice_scores` and `reduced_losses`.
    """

    logz: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[..., tuple[Tensor, Tensor, Tensor]]
    lattice: Callable[..., tuple[CRFLattice, Tensor]]
    gather: Callable[..., Tensor]
    reduce: Callable[..., tuple[Tensor, Tensor]]


def check_shape(scores: Tensor, state_len: int, alphabet_size: int) -> None:
    """Raise for scores of another shape than k-mers and letters have."""
    C, A, ndim = (alphabet_size - 1) ** state_len, alphabet_size, scores.ndim
    if ndim == 3 and scores.shape[2] == C * A:
        return
    if ndim == 4 and scores.shape[2] == C and scores.shape[3] == A:
        return
    raise ValueError(
        "scores: expected shape [T, N, C * A] or [T, N, C, A]"
        f" with C = {A - 1}^{state_len} = {C} and A = {A}, got {list(scores.shape)}"
    )


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


def target_lattice(
    source: Tensor,
    targets: Tensor,
    target_lengths: Tensor,
    input_lengths: Tensor | None,
    T: int,
    state_len: int,
    n_base: int,
    dtype: torch.dtype,
) -> tuple[CRFLattice, Tensor]:
    """Build the lattice of the first L k-mers of each target, and check its length and labels.

    A target without a k-mer, or with more than L of them, has no final state and so no path.

    Returns:
        The lattices, and the number of steps of each sequence, -1 for one that is invalid.
    """
    states, device, labels = len(source), targets.device, targets.reshape(-1).long()
    if targets.ndim == 2:
        offsets = torch.arange(len(targets), device=device) * targets.shape[1]
        max_lengths = torch.full_like(offsets, targets.shape[1])
    else:
        # The clamp bounds how far an invalid length can shift the targets after it.
        clamped = target_lengths.clamp(0, len(labels) + 1)
        offsets = clamped.cumsum(0) - clamped
        max_lengths = len(labels) - offsets
    bad_labels = torch.nn.functional.pad(((labels < 1) | (labels > n_base)).cumsum(0), (1, 0))
    ends = (offsets, offsets + target_lengths)
    first, last = (bad_labels[index.clamp(0, len(labels))] for index in ends)
    invalid = (last > first) | (target_lengths < 0) | (target_lengths > max_lengths)
    if input_lengths is None:
        input_lengths = torch.full_like(target_lengths, T)
    position = offsets[:, None] + torch.arange(states + state_len - 1, device=device)
    labels = torch.nn.functional.pad(labels, (0, 1), value=1)
    bases = (labels[position.clamp(0, len(labels) - 1)] - 1).clamp(0, n_base - 1)
    kmer = torch.zeros_like(position[:, :states])
    for i in range(state_len):
        kmer = kmer * n_base + bases[:, i : i + states]
    stay = kmer * (n_base + 1)
    # The move into a k-mer is numbered by the base that it drops, the first of the k-mer before it.
    move = stay + torch.nn.functional.pad(bases[:, : states - 1] + 1, (1, 0))
    state, last = torch.arange(states, device=device), (target_lengths - state_len)[:, None]
    has_source = state[:, None] >= torch.arange(2, device=device)
    is_edge = (state <= last)[..., None] & has_source
    edge_index = torch.where(is_edge, torch.stack([stay, move], -1), -1)
    initial = torch.where(state == 0, 0.0, -torch.inf).to(dtype).expand(len(offsets), -1)
    final = torch.where(state == last, 0.0, -torch.inf).to(dtype)
    lengths = torch.where(invalid, -1, input_lengths)
    return CRFLattice(edge_index.int(), source, initial, final), lengths


def lattice_scores(scores: Tensor, edge_index: Tensor, lengths: Tensor) -> Tensor:
    """Gather the scores of the lattice's edges, `[T, N, L, 2]`, from `[T, N, C, A]`.

    The value is arbitrary where there is no edge and past the lengths, because no path uses it.
    """
    # The derivative of indexing adds up in a fixed order on a GPU; that of `gather` does not.
    chain = torch.arange(scores.shape[1], device=scores.device)[:, None, None]
    return scores.flatten(2)[:, chain, edge_index.long().clamp(min=0)]


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


def reduced_losses(
    logz_den: Tensor, logz_num: Tensor, target_lengths: Tensor, reduction: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the reduced loss in `dtype` and the losses `[N]` fp64, from log Z of both chains."""
    losses = torch.where(logz_num == -torch.inf, torch.inf, logz_den - logz_num)
    return reduce_over_lengths(losses, target_lengths, reduction).to(dtype, copy=True), losses


def in_torch(logz: Callable[..., Any], gradient: Callable[..., Any]) -> CRFFunctions:
    """Return the functions of a backend that has kernels for chains alone, given those."""
    return CRFFunctions(logz, gradient, target_lattice, lattice_scores, reduced_losses)


def crf_loss(
    functions: CRFFunctions,
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
    """Return the reduced loss, and what its gradient needs.

    Args:
        functions: those of the backend.
        scores: `[T, N, C * A]` or `[T, N, C, A]`.
        source: the k-mer that each edge comes from, `[C, A]`, of `kmer_source`.
        lattice_source: the table of a target lattice with L states, `[L, 2]`, of `lattice_source`.
        targets: `[N, S]`, or all targets concatenated; integers of any dtype.
        target_lengths, input_lengths: `[N]` int64; all steps if None.
        state_len: bases of a k-mer.
        reduction: `mean`, `sum` or `none`.
        save: whether a gradient follows.

    Returns:
        value: the reduced loss, `[]`, or the losses `[N]`; fp32, or fp64 for fp64 scores.
        losses: `[N]` fp64. A loss is inf, with the gradient 0, where no path spells the target.
        logz: log Z of all paths, `[N]` fp64.
        saved: what the gradient of log Z of all paths needs.
        marginals: those of the target lattice, `[T, N, L, 2]`; empty if not `save`.
        edge_index: the index of each lattice edge among the scores of a step, `[N, L, 2]` int32;
            -1 for no edge.
        lengths: the number of steps, `[N]` int64; -1 for an invalid sequence.
    """
    scores, dtype = unflatten_scores(scores, source), acc_dtype(scores.dtype)
    sizes = (len(scores), state_len, source.shape[1] - 1)
    sequences = (targets, target_lengths, input_lengths)
    # The length -1 makes the chains of an invalid sequence, and so its results, NaN.
    lattice, lengths = functions.lattice(lattice_source, *sequences, *sizes, dtype)
    ends, edge_scores = zero_ends(scores), functions.gather(scores, lattice.edge_index, lengths)
    all_paths = ChainPotentials(scores, source, ends, ends, lengths)
    of_target = ChainPotentials(edge_scores, *lattice[1:], lengths)
    logz_den, _, saved = functions.logz(all_paths, save)
    logz_num, _, states = functions.logz(of_target, save)
    marginals = edge_scores.new_empty(0, dtype=dtype)
    if save:
        marginals = functions.gradient(ones(scores), of_target, logz_num, states, dtype)[0]
    value, losses = functions.reduce(logz_den, logz_num, target_lengths, reduction, dtype)
    return value, losses, logz_den, saved, marginals, lattice.edge_index, lengths


def crf_gradient(
    gradient: Callable[..., tuple[Tensor, Tensor, Tensor]],
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
    """Return the gradient of the reduced loss with respect to the scores.

    It is the marginals of all paths minus those of the paths that spell the target, times the
    gradient of the sequence's loss, given the function for the gradient of chains. Half types are
    rounded once.
    """
    edges, dtype = unflatten_scores(scores, source), acc_dtype(scores.dtype)
    grad = gradient_per_sequence(grad, target_lengths, reduction)
    grad, ends = torch.where(losses == torch.inf, 0.0, grad), zero_ends(edges)
    chain = ChainPotentials(edges, source, ends, ends, lengths)
    result = gradient(grad, chain, logz, saved, dtype)[0]
    subtract_marginals(result, marginals, edge_index, grad.to(dtype))
    return result.to(scores.dtype).view(scores.shape)
