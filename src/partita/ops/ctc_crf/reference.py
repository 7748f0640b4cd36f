"""CTC-CRF in plain PyTorch: log Z of all paths minus log Z of the paths that spell the target."""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.semiring import Log
from ...runtime.dtypes import acc_dtype
from ..chain.reference import chain_gradient, chain_inputs, log_partition
from .common import CRFLattice, lattice_scores, marginal_scale, subtract_marginals, zero_ends


def crf_loss(scores: Tensor, source: Tensor, lattice: CRFLattice, lengths: Tensor | None) -> Tensor:
    """Return the loss of each sequence, `[N]` fp64.

    It is inf, with the gradient 0, where no path spells the target.
    """
    zeros = scores.new_zeros(scores.shape[1:3])
    all_paths = chain_inputs(scores, source, zeros, zeros, lengths, Log)
    target_scores = lattice_scores(scores, lattice.edge_index)
    target_paths = chain_inputs(
        target_scores, lattice.source, lattice.initial, lattice.final, lengths, Log
    )
    logz_den, logz_num = log_partition(all_paths, Log), log_partition(target_paths, Log)
    return torch.where(logz_num == -torch.inf, torch.inf, logz_den - logz_num)


def crf_gradient(
    grad: Tensor,
    scores: Tensor,
    source: Tensor,
    lengths: Tensor,
    logz: Tensor,
    saved: Tensor,
    marginals: Tensor,
    edge_index: Tensor,
) -> Tensor:
    """Return the marginals of all paths minus those of the target's paths, times `grad`.

    The marginals of the target lattice come in units of `FIXED_POINT`. Half types are rounded once.
    """
    dtype, ends = acc_dtype(scores.dtype), zero_ends(scores)
    result = chain_gradient(grad, scores, ends, ends, source, lengths, logz, saved, dtype)[0]
    subtract_marginals(result, marginals, edge_index, marginal_scale(grad, dtype))
    return result.to(scores.dtype)
