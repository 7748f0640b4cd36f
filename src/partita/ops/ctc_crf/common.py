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
from ...runtime import checks
from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from ..chain.common import ChainPotentials
from ..ctc.common import gradient_per_sequence, reduce_losses


class CRFInputs(NamedTuple):
    """The scores and the targets of a batch, in the order of arguments of the loss.

    Fields:
        scores: `[T, N, C * A]` or `[T, N, C, A]`.
        source: the k-mer that each edge comes from, `[C, A]`, of `kmer_source`.
        lattice_source: the table of a target lattice with L states, `[L, 2]`, of `lattice_source`.
        targets: `[N, S]`, or all targets concatenated; integers of any dtype.
        target_lengths, input_lengths: `[N]` int64; all steps if None.
        state_len: bases of a k-mer.
    """

    scores: Tensor
    source: Tensor
    lattice_source: Tensor
    targets: Tensor
    target_lengths: Tensor
    input_lengths: Tensor | None
    state_len: int


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


class CRFState(NamedTuple):
    """What the loss leaves for its gradient.

    Fields:
        losses: `[N]` fp64. A loss is inf, with the gradient 0, where no path spells the target.
        logz: log Z of all paths, `[N]` fp64.
        saved: what the gradient of log Z of all paths needs.
        marginals: those of the target lattice, `[T, N, L, 2]`; empty if no gradient follows.
        edge_index: the index of each lattice edge among the scores of a step, `[N, L, 2]` int32;
            -1 for no edge.
        lengths: the number of steps, `[N]` int64; -1 for an invalid sequence.
    """

    losses: Tensor
    logz: Tensor
    saved: Tensor
    marginals: Tensor
    edge_index: Tensor
    lengths: Tensor


def check_scores(scores: Tensor, state_len: int, alphabet_size: int) -> None:
    """Raise for scores of another dtype or shape than k-mers and letters have."""
    checks.floating("scores", scores)
    checks.at_least("state_len", state_len, 1)
    checks.at_least("alphabet_size", alphabet_size, 2)
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


def target_lattice(x: CRFInputs) -> tuple[CRFLattice, Tensor]:
    """Build the lattice of the first L k-mers of each target, and check its length and labels.

    A target without a k-mer, or with more than L of them, has no final state and so no path.

    Returns:
        The lattices, and the number of steps of each sequence, -1 for one that is invalid.
    """
    targets, target_lengths, input_lengths, state_len = x[3:]
    states, n_base = len(x.lattice_source), x.source.shape[1] - 1
    device, labels = targets.device, targets.reshape(-1).long()
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
        input_lengths = torch.full_like(target_lengths, len(x.scores))
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
    dtype = acc_dtype(x.scores.dtype)
    initial = torch.where(state == 0, 0.0, -torch.inf).to(dtype).expand(len(offsets), -1)
    final = torch.where(state == last, 0.0, -torch.inf).to(dtype)
    lengths = torch.where(invalid, -1, input_lengths)
    return CRFLattice(edge_index.int(), x.lattice_source, initial, final), lengths


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


def coefficients_of(
    grad: Tensor, state: CRFState, target_lengths: Tensor, reduction: str
) -> tuple[Tensor, None]:
    """Return the gradient of each sequence's loss, `[N]` fp64, and nothing for `subtract`."""
    grad = gradient_per_sequence(grad, target_lengths, reduction)
    return torch.where(state.losses == torch.inf, 0.0, grad), None


def subtract_marginals(
    d_scores: Tensor, coefficients: Tensor, order: None, state: CRFState, dtype: torch.dtype
) -> Tensor:
    """Subtract the marginals of edges times `coefficients`, `[N]`, from `d_scores` in place.

    `d_scores` is `[T, N, C, A]` and contiguous. Several edges may read one score. Their marginals
    are added in a fixed order, by `scatter_add_` on a CPU and by `index_put_` elsewhere.
    """
    # Where there is no edge, the marginal is 0.
    index = state.edge_index.flatten(1).long().clamp(min=0)
    factors, flat = -coefficients.to(d_scores.dtype)[:, None], d_scores.flatten(2)
    change = state.marginals.flatten(2) * factors
    if d_scores.is_cpu:
        flat.scatter_add_(2, index.expand(len(change), -1, -1), change)
    else:
        t, n = (torch.arange(size, device=index.device) for size in change.shape[:2])
        flat.index_put_((t[:, None, None], n[:, None], index), change, accumulate=True)
    return d_scores.to(dtype)


def reduced_losses(
    logz_den: Tensor, logz_num: Tensor, target_lengths: Tensor, reduction: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the reduced loss in `dtype` and the losses `[N]` fp64, from log Z of both chains."""
    losses = torch.where(logz_num == -torch.inf, torch.inf, logz_den - logz_num)
    return reduce_losses(losses, target_lengths, reduction).to(dtype, copy=True), losses


class CRFFunctions(NamedTuple):
    """The functions of one backend from which the loss and its gradient are made.

    Fields:
        logz, gradient: the functions that serve the ops `chain_logz` and `chain_gradient`.
        lattice, gather, reduce, coefficients, subtract: in PyTorch where a backend has kernels for
            chains alone. Others have the same signatures and results.
    """

    logz: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[..., tuple[Tensor, Tensor, Tensor]]
    lattice: Callable[..., tuple[CRFLattice, Tensor]] = target_lattice
    gather: Callable[..., Tensor] = lattice_scores
    reduce: Callable[..., tuple[Tensor, Tensor]] = reduced_losses
    coefficients: Callable[..., tuple[Tensor, Any]] = coefficients_of
    subtract: Callable[..., Tensor] = subtract_marginals


def crf_loss(
    functions: CRFFunctions, x: CRFInputs, reduction: str, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the reduced loss, `[]`, or the losses `[N]`, and what the gradient needs.

    The first is fp32, or fp64 for fp64 scores. The others are the fields of `CRFState`, with the
    marginals where a gradient follows, that is with `save`.
    """
    scores, source, dtype = unflatten_scores(*x[:2]), x.source, acc_dtype(x.scores.dtype)
    # The length -1 makes the chains of an invalid sequence, and so its results, NaN.
    lattice, lengths = functions.lattice(x)
    ends, edge_scores = zero_ends(scores), functions.gather(scores, lattice.edge_index, lengths)
    all_paths = ChainPotentials(scores, source, ends, ends, lengths)
    of_target = ChainPotentials(edge_scores, *lattice[1:], lengths)
    logz_den, _, saved = functions.logz(all_paths, save)
    logz_num, _, states = functions.logz(of_target, save)
    marginals = edge_scores.new_empty(0, dtype=dtype)
    if save:
        marginals = functions.gradient(ones(scores), of_target, logz_num, states, dtype)[0]
    value, losses = functions.reduce(logz_den, logz_num, x.target_lengths, reduction, dtype)
    return value, losses, logz_den, saved, marginals, lattice.edge_index, lengths


def crf_gradient(
    functions: CRFFunctions,
    grad: Tensor,
    scores: Tensor,
    source: Tensor,
    target_lengths: Tensor,
    state: CRFState,
    reduction: str,
) -> Tensor:
    """Return the gradient of the reduced loss with respect to the scores.

    It is the marginals of all paths minus those of the paths that spell the target, times the
    gradient of the sequence's loss. Half types are rounded once.
    """
    if not scores.numel():
        return torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    edges, dtype = unflatten_scores(scores, source), acc_dtype(scores.dtype)
    coefficients, order = functions.coefficients(grad, state, target_lengths, reduction)
    ends = zero_ends(edges)
    chain = ChainPotentials(edges, source, ends, ends, state.lengths)
    d_scores = functions.gradient(coefficients, chain, state.logz, state.saved, dtype)[0]
    result = functions.subtract(d_scores, coefficients, order, state, scores.dtype)
    return result.view(scores.shape)
