"""Losses over a vocabulary that lies on several ranks, from plain tensors or DTensors.

Each rank has the logits, or the rows of the matrix, of some classes, in rank order. The ranks
exchange the statistics of each token once, and every rank gets the same loss, bit for bit. The
upstream gradient is assumed to be equal on all ranks. GPUs of one host exchange the statistics
within one kernel where they can.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..cross_entropy.api import TokenStats
from ..cross_entropy.common import checked_options, reduce_losses
from ..linear_heads.low_rank import LowRank
from . import dtensor
from .local_losses import (
    ParallelLossArguments,
    RowLosses,
    hidden_losses,
    local_token_stats,
    logits_losses,
    one_pass_loss,
)
from .shard import Classes

__all__ = ["cross_entropy", "linear_cross_entropy", "token_stats"]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Compute `partita.cross_entropy` of logits whose classes lie on several ranks.

    Args:
        input: this rank's logits `[N, C_local, ...]`; or a DTensor `[N, C, ...]`, sharded over its
            classes in one dimension of the mesh, and over N in others.
        target: labels among all classes `[N, ...]`, the same on all ranks. With a DTensor `input`
            they are a DTensor, or the labels of this rank's rows.
        weight: class weights `[C]`, of all classes.
        group: the process group, all ranks if None. A DTensor defines its own.
        classes: the total number of classes, sharded as PyTorch does it (the last shards are
            smaller or empty); or the number of classes of each rank; or None where all ranks have
            the same number. If another rank has a different number, the loss is NaN.
        ignore_index, reduction, label_smoothing, softcap, z_loss: as in `partita.cross_entropy`;
            smoothing is over all classes.

    Returns:
        The loss in nats, a number or `[N, ...]`, fp32 for half types, with the same bits on every
        rank; a DTensor if `input` is one.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.cross_entropy`.
        RuntimeError: torch.distributed is not initialised; the group uses Gloo for tensors on a
            GPU; a second derivative is asked for; a rank missed an earlier call or called with
            other rows.

    On GPUs of one host, loss and gradient come from one read and one write of the logits, by
    kernels that wait for each other (`PARTITA_PEERS=0` turns that off). This is so in eager code,
    for bf16 and fp32, `mean` and `sum`, without smoothing and class weights.

    Source: Shoeybi et al., Megatron-LM, 2019, for sharding the vocabulary; one gather of (maximum,
    sum, ...) replaces its three reductions.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> partita.parallel.cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor(1.3863)
        >>> dist.destroy_process_group()
    """
    options = checked_options(ignore_index, label_smoothing, softcap, z_loss, reduction)
    arguments = ParallelLossArguments(weight, group, classes, options)
    if isinstance(input, DTensor):
        return dtensor.cross_entropy(input, target, arguments)
    loss = one_pass_loss(input, target, arguments)
    if loss is not None:
        return loss
    return _reduce(logits_losses(input, target, arguments), target, arguments)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    sequence_parallel: bool = False,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """Compute the cross-entropy of hidden states and a matrix whose classes lie on several ranks.

    Args:
        input: hidden states `[..., H]`, the same on all ranks; with `sequence_parallel` this rank's
            `[M, H]` of all tokens, in rank order. A DTensor is redistributed as needed.
        linear_weight: this rank's rows of the matrix `[C_local, H]`; or a DTensor, sharded in
            dimension 0.
        linear_bias: this rank's `[C_local]`; or a DTensor, sharded in dimension 0.
        target: labels of all tokens `[...]`.
        weight, group, classes: as in `partita.parallel.cross_entropy`.
        sequence_parallel: whether the call gathers the hidden states, and reduces and scatters
            their gradient.
        reduction, ignore_index, label_smoothing, softcap, z_loss, memory_budget, logits_dtype: as
            in `partita.linear_cross_entropy`; the budget is the bytes of each rank.
        low_rank: `(H, B)` or `LoRA(A, B, scale)` as in `partita.linear_cross_entropy`, with H
            beside the hidden states, A the same on all ranks, and this rank's rows of B,
            `[C_local, r]`. Not with DTensors.

    Returns:
        The loss in nats, a number or `[...]`, fp32 for half types, with the same bits on every
        rank. The gradients of the hidden states, of H and of A are complete on every rank, but with
        `sequence_parallel` they are those of this rank's tokens.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as in `partita.parallel.cross_entropy`.

    Source: as for `partita.linear_cross_entropy` and `partita.parallel.cross_entropy`.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> hidden, matrix, labels = torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 3])
        >>> partita.parallel.linear_cross_entropy(hidden, matrix, labels)
        tensor(1.3863)
        >>> dist.destroy_process_group()
    """
    options = checked_options(ignore_index, label_smoothing, softcap, z_loss, reduction)
    arguments = ParallelLossArguments(weight, group, classes, options)
    if isinstance(linear_weight, DTensor):
        if low_rank is not None:
            raise TypeError("low_rank: expected None with a DTensor; pass local tensors and group")
        return dtensor.linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias,
            arguments,
            sequence_parallel,
            memory_budget,
            logits_dtype,
        )
    if isinstance(input, DTensor):
        raise TypeError("linear_weight: expected a DTensor, because input is a DTensor")
    rest = (arguments, sequence_parallel, memory_budget, logits_dtype)
    losses = hidden_losses(input, linear_weight, target, linear_bias, *rest, low_rank)
    return _reduce(losses, target, arguments)


def token_stats(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> TokenStats:
    """Compute `partita.token_stats` of logits whose classes lie on several ranks.

    Args:
        logits: this rank's `[..., C_local]`; or a DTensor `[..., C]`, sharded over its classes in
            one dimension of the mesh, and over its first dimension in others.
        target: labels among all classes `[...]`, the same on all ranks.
        group, classes: as in `partita.parallel.cross_entropy`.
        temperature, ignore_index: as in `partita.token_stats`.

    Returns:
        `TokenStats(logprob, logsumexp, entropy, argmax)`, fields `[...]`, in nats, with the same
        bits on every rank; the first three are differentiable.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as in `partita.parallel.cross_entropy`.

    Source: as for `partita.token_stats`, merged over the ranks.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> partita.parallel.token_stats(torch.zeros(1, 4), torch.tensor([2])).entropy
        tensor([1.3863])
        >>> dist.destroy_process_group()
    """
    if isinstance(logits, DTensor):
        return dtensor.token_stats(logits, target, group, classes, temperature, ignore_index)
    return local_token_stats(logits, target, group, classes, temperature, ignore_index)


def _reduce(losses: RowLosses, target: Tensor, arguments: ParallelLossArguments) -> Tensor:
    """Return the losses, or their sum or mean."""
    loss, z, classes = losses
    options, weight = arguments.options, arguments.weight
    rest = (classes, options.ignore_index, options.reduction)
    return reduce_losses(loss, z, target, weight, *rest)
