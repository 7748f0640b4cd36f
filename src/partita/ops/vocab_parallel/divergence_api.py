"""Divergences and log-probabilities over a vocabulary that lies on several ranks.

Each rank has the logits, or the rows of the matrix, of some classes, in rank order. Every rank gets
the same result, bit for bit. The upstream gradient is assumed to be equal on all ranks.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ...runtime import checks
from ...runtime.backend import current_backend
from ..divergence.common import check_options, in_common_precision, reduced
from ..logprobs.common import check_ids
from .divergence import LocalLinear, ParallelDivergence, ParallelLogprobs
from .local_losses import checked_local_head
from .shard import Classes, VocabShard, vocab_shard

__all__ = ["divergence", "linear_divergence", "linear_logprobs", "logprobs"]


def divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute `partita.divergence` of logits whose classes lie on several ranks.

    The ranks exchange five numbers of each row, and two more for a beta between 0 and 1.

    Args:
        logits: this rank's logits of the student, `[..., C_local]`; may be -inf.
        teacher_logits: this rank's logits of the teacher, of the same classes, `[..., C_local]`.
        group, classes: as in `partita.parallel.cross_entropy`.
        beta, temperature, softcap, reduction: as in `partita.divergence`.
        mask: as in `partita.divergence`, the same on all ranks.

    Returns:
        The divergence in nats, a number or `[...]`, fp32 (fp64 for fp64), with the same bits on
        every rank, differentiable in this rank's `logits`.

    Raises:
        TypeError, ValueError: as in `partita.divergence`; a DTensor.
        RuntimeError: as in `partita.parallel.cross_entropy`; a second derivative is asked for.

    Source: as for `partita.divergence`, merged over the ranks.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> partita.parallel.divergence(torch.zeros(1, 2), torch.tensor([[1.0986, 0.0]]))
        tensor(0.1308)
        >>> dist.destroy_process_group()
    """
    for name, tensor in (("logits", logits), ("teacher_logits", teacher_logits)):
        checks.floating(name, tensor)
    checks.device("teacher_logits", teacher_logits, logits, "logits")
    checks.shape("teacher_logits", teacher_logits, logits.shape, "logits.shape")
    if logits.ndim == 0:
        raise ValueError("logits: expected shape [..., C_local], got []")
    shard = vocab_shard("logits", logits, -1, group, classes)
    return _divergence(logits, teacher_logits, shard, beta, temperature, softcap, mask, reduction)


def _divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    shard: VocabShard,
    beta: float,
    temperature: float,
    softcap: float | None,
    mask: Tensor | None,
    reduction: str,
) -> Tensor:
    check_options(beta, mask, reduction, logits, "logits")
    numbers = float(beta), *checks.temperature_and_softcap(temperature, softcap)
    logits = in_common_precision(logits, teacher_logits)
    x, t = logits[None].flatten(0, -2), teacher_logits.detach()[None].flatten(0, -2)
    loss = ParallelDivergence.apply(x, t, *numbers, shard, current_backend())[0]
    return reduced(loss.reshape(logits.shape[:-1]), mask, reduction)


def linear_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute the divergence of two heads whose classes lie on several ranks.

    This rank's logits of all tokens are in memory, those of student and teacher.

    Args:
        input: the student's hidden states `[..., H]`, the same on all ranks.
        linear_weight: this rank's rows of the student's matrix, `[C_local, H]`.
        teacher_input: the teacher's hidden states `[..., K]`, the same on all ranks.
        teacher_weight: this rank's rows of the teacher's matrix, `[C_local, K]`.
        linear_bias, teacher_bias: this rank's `[C_local]`.
        group, classes: as in `partita.parallel.cross_entropy`.
        beta, temperature, softcap, mask, reduction: as in `partita.parallel.divergence`.

    Returns:
        The divergence in nats, a number or `[...]`, fp32 (fp64 for fp64), with the same bits on
        every rank. The gradient of the hidden states is complete on every rank.

    Raises:
        TypeError, ValueError, RuntimeError: as in `partita.parallel.divergence`.

    Source: as for `partita.linear_divergence` and `partita.parallel.cross_entropy`.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> hidden, matrix, teacher_matrix = torch.ones(2, 1), torch.zeros(2, 1), torch.ones(2, 1)
        >>> partita.parallel.linear_divergence(hidden, matrix, hidden, teacher_matrix)
        tensor(0.)
        >>> dist.destroy_process_group()
    """
    logits, shard = _local_logits(input, linear_weight, linear_bias, "", group, classes)
    teacher_logits, _ = _local_logits(
        teacher_input.detach(),
        teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
        "teacher_",
        group,
        classes,
    )
    expected = (*input.shape[:-1], teacher_weight.shape[1])
    checks.shape("teacher_input", teacher_input, expected, "the rows of input and K")
    return _divergence(logits, teacher_logits, shard, beta, temperature, softcap, mask, reduction)


def logprobs(
    logits: Tensor,
    ids: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Compute `partita.logprobs` of logits whose classes lie on several ranks.

    Args:
        logits: this rank's `[..., C_local]`.
        ids: classes `[..., K]` among all classes, the same on all ranks. They may repeat.
        group, classes: as in `partita.parallel.cross_entropy`.
        temperature, softcap: as in `partita.logprobs`.

    Returns:
        Log-probabilities in nats, `[..., K]`, fp32 (fp64 for fp64), with the same bits on every
        rank, differentiable in this rank's logits.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.logprobs`; a DTensor.
        RuntimeError: as in `partita.parallel.cross_entropy`; a second derivative is asked for.

    Source: as for `partita.logprobs`; the ranks exchange O(K) numbers of each row.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> partita.parallel.logprobs(torch.zeros(1, 4), torch.tensor([[2, 0]]))
        tensor([[-1.3863, -1.3863]])
        >>> dist.destroy_process_group()
    """
    checks.floating("logits", logits)
    if logits.ndim == 0:
        raise ValueError("logits: expected shape [..., C_local], got []")
    shard = vocab_shard("logits", logits, -1, group, classes)
    return _logprobs(logits, ids, shard, temperature, softcap)


def _logprobs(
    logits: Tensor, ids: Tensor, shard: VocabShard, temperature: float, softcap: float | None
) -> Tensor:
    check_ids(ids, logits, "the logits")
    numbers = checks.temperature_and_softcap(temperature, softcap)
    checks.labels("ids", ids, shard.classes, checks.NOTHING_IGNORED)
    x = logits[None].flatten(0, -2)
    x = x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
    flat = ids.long()[None].flatten(0, -2)
    found = ParallelLogprobs.apply(x, flat, *numbers, shard, current_backend())[0]
    result: Tensor = found.reshape(ids.shape)
    return result


def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    *,
    linear_bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Compute log-probabilities of given classes, from a matrix that lies on several ranks.

    This rank's logits of all tokens are in memory.

    Args:
        input: hidden states `[..., H]`, the same on all ranks.
        linear_weight: this rank's rows of the matrix, `[C_local, H]`.
        ids: as in `partita.parallel.logprobs`.
        linear_bias: this rank's `[C_local]`.
        group, classes, temperature, softcap: as in `partita.parallel.logprobs`.

    Returns:
        Log-probabilities in nats, `[..., K]`, fp32 (fp64 for fp64), with the same bits on every
        rank. The gradient of the hidden states is complete on every rank.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as in `partita.parallel.logprobs`.

    Source: as for `partita.parallel.logprobs`.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> hidden, matrix, ids = torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([[2, 0]])
        >>> partita.parallel.linear_logprobs(hidden, matrix, ids)
        tensor([[-1.3863, -1.3863]])
        >>> dist.destroy_process_group()
    """
    logits, shard = _local_logits(input, linear_weight, linear_bias, "", group, classes)
    return _logprobs(logits, ids, shard, temperature, softcap)


def _local_logits(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prefix: str,
    group: dist.ProcessGroup | None,
    classes: Classes,
) -> tuple[Tensor, VocabShard]:
    """Return the logits of this rank's classes, `[..., C_local]`, and its shard.

    The prefix stands before the names of the tensors in errors.
    """
    head = checked_local_head(input, weight, bias, prefix)
    shard = vocab_shard(f"{prefix or 'linear_'}weight", head.weight, 0, group, classes)
    logits = LocalLinear.apply(*head.flat, shard)
    return logits.reshape(*input.shape[:-1], len(weight)), shard
