"""CTC-CRF in plain PyTorch: log Z of all paths minus log Z of the paths that spell the target."""

from __future__ import annotations

from torch import Tensor

from ..chain.reference import chain_gradient, chain_logz
from .common import gradient_through_chains, in_torch, loss_through_chains


def crf_loss(
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
    functions = in_torch(chain_logz, chain_gradient)
    tensors = (scores, source, lattice_source, targets, target_lengths, input_lengths)
    return loss_through_chains(functions, *tensors, state_len, reduction, save)


def crf_gradient(
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
    gradient of the sequence's loss. Half types are rounded once.
    """
    results = (losses, logz, saved, marginals, edge_index, lengths)
    tensors = (grad, scores, source, target_lengths, *results)
    return gradient_through_chains(chain_gradient, *tensors, reduction)
