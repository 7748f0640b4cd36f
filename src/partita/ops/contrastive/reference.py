"""Specification of contrastive losses, in plain PyTorch."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ...primitives.rows import finite_shift
from ...runtime.dtypes import acc_dtype
from . import common
from .common import ContrastiveKernels, Logits, LogSumExp


def contrastive_loss(
    # a, b: features [n, D] and [m, D]; row i of both is a pair
    a: Tensor,
    b: Tensor,
    # logit_scale, logit_bias: numbers in the accumulator's dtype, []
    logit_scale: Tensor,
    logit_bias: Tensor | None,
    is_sigmoid: bool,  # whether each logit is that of a binary choice
    symmetric: bool,  # whether columns have a softmax too
) -> Tensor:
    """Compute the loss of n pairs from all logits at once. This is what the ops mean."""
    a, b = (x.to(acc_dtype(x.dtype)) for x in (a, b))
    logits = logit_scale * (a @ b.T)
    if is_sigmoid:
        logits = logits if logit_bias is None else logits + logit_bias
        is_pair = torch.eye(*logits.shape, dtype=torch.bool, device=a.device)
        return -F.logsigmoid(torch.where(is_pair, logits, -logits)).sum(1).mean()
    target = torch.arange(len(a), device=a.device)
    loss = F.cross_entropy(logits, target)
    return (loss + F.cross_entropy(logits.T, target)) / 2 if symmetric else loss


def logits_of(chunk: Logits) -> Tensor:
    """Return a chunk of logits, `[R, C]`."""
    logits = chunk.similarities * chunk.scale
    return logits if chunk.bias is None else logits + chunk.bias


def scan(
    chunk: Logits,
    is_sigmoid: bool,
    rows: LogSumExp,
    pairs: Tensor,
    columns: LogSumExp | None,
    adds: bool,
) -> None:
    """Write the statistics of a chunk; see `ContrastiveKernels`."""
    logits = logits_of(chunk)
    pairs.copy_(logits.diagonal(chunk.first))
    if is_sigmoid:
        signed = logits.diagonal_scatter(-pairs, chunk.first)
        rows.maximum.zero_()
        rows.total.copy_(-F.logsigmoid(-signed).sum(1))
        return
    write_log_sum_exp(logits, rows, 1)
    if columns is None:
        return
    before = LogSumExp(*(each.clone() for each in columns))
    write_log_sum_exp(logits, columns, 0)
    if adds:
        maximum = torch.maximum(before.maximum, columns.maximum)
        total = rescaled(before, maximum) + rescaled(columns, maximum)
        columns.maximum.copy_(maximum)
        columns.total.copy_(total)


def write_log_sum_exp(logits: Tensor, result: LogSumExp, dim: int) -> None:
    """Write the log-sum-exps over a dimension of logits."""
    torch.amax(logits, dim, out=result.maximum)
    shifted = logits - finite_shift(result.maximum).unsqueeze(dim)
    torch.sum(shifted.exp(), dim, out=result.total)


def rescaled(state: LogSumExp, maximum: Tensor) -> Tensor:
    """Return the sums of log-sum-exps relative to a maximum that is at least their own."""
    return state.total * (state.maximum - finite_shift(maximum)).exp()


def gradient(
    chunk: Logits,
    is_sigmoid: bool,
    rows: LogSumExp,
    columns: LogSumExp | None,
    factor: float,
    result: Tensor,
    sums: Tensor,
) -> None:
    """Write the gradient of a chunk of logits and the sums of its rows; see `ContrastiveKernels`.

    That of a pair is p - 1, which is computed without cancellation for a sigmoid.
    """
    logits = logits_of(chunk)
    if is_sigmoid:
        of_pairs = -(-logits.diagonal(chunk.first)).sigmoid()
        found = logits.sigmoid().diagonal_scatter(of_pairs, chunk.first)
    else:
        found = probabilities(logits, rows, 1)
        if columns is not None:
            found = (found + probabilities(logits, columns, 0)) / 2
        found.diagonal(chunk.first).sub_(1)
    sums[0], sums[1] = (found * chunk.similarities).sum(1), found.sum(1)
    result.copy_(found * factor)


def probabilities(logits: Tensor, state: LogSumExp, dim: int) -> Tensor:
    """Return the softmax over a dimension, whose log-sum-exp is given."""
    shift, total = (each.unsqueeze(dim) for each in (finite_shift(state.maximum), state.total))
    return (logits - shift).exp() / total


KERNELS = ContrastiveKernels(scan, gradient)
contrastive_state = functools.partial(common.contrastive_state, kernels=KERNELS)
contrastive_gradient = functools.partial(common.contrastive_gradient, kernels=KERNELS)
