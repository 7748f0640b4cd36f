"""Statistics over recorded supports whose classes lie on several ranks.

Each rank computes the logits of the entries whose classes it has, and 0 for others. Their sum over
the ranks is exact, so every rank has the logits of all entries, and computes the same statistics
from them. A rank's gradients are those of its own entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...runtime import checks
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ..linear_heads.common import Head, RowOptions, RowStatistics, checked_head
from ..linear_heads.support import EntryLogits
from ..support.autograd import sets_of, stats_of
from ..support.common import (
    EVERY_CLASS,
    Support,
    SupportStats,
    check_support,
    rows_without_ids,
    with_rows,
)
from .autograd import logits_statistics
from .local_losses import check_labels, contiguous_classes, hidden_statistics
from .shard import (
    Classes,
    VocabShard,
    refuse_second_derivative,
    sum_over_ranks,
    vocab_shard,
    wait_for,
)


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks, whose gradient is the same on all of them.

    With `of_gradients` the tensor is the same on all ranks, and its gradients are added up.
    """

    @staticmethod
    def forward(x: Tensor, shard: VocabShard, of_gradients: bool) -> Tensor:
        return x.view_as(x) if of_gradients else wait_for(sum_over_ranks(x.clone(), shard))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.shard, ctx.of_gradients = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        refuse_second_derivative("classes")
        if ctx.of_gradients:
            grad = wait_for(sum_over_ranks(grad.clone(), ctx.shard))
        return grad, None, None


def entry_logits(logits: Tensor, support: Support, first_class: int) -> Tensor:
    """Return the logits of the entries whose classes are among those of `[M, C]`, 0 for others."""
    columns = support.classes - first_class
    x = logits.to(acc_dtype(logits.dtype))
    if logits.shape[1] == 0:
        return x.new_zeros(columns.shape) + x.sum()
    is_own = (support.classes >= 0) & (columns >= 0) & (columns < logits.shape[1])
    return torch.where(is_own, logits[support.rows(), torch.where(is_own, columns, 0)].to(x), 0)


def _statistics(
    entries: Callable[[Support], Tensor],
    whole: Callable[[Tensor, Tensor, RowOptions], RowStatistics],
    target: Tensor,
    ids: Tensor,
    offsets: Tensor,
    shard: VocabShard,
    numbers: tuple[float, float],
    ignore_index: int,
) -> SupportStats:
    """Return the statistics from what two functions return.

    They return this rank's logits of the entries, and the statistics of some rows, given their
    labels, over all classes of all ranks.
    """
    labels = target.reshape(-1).long().contiguous()
    support, in_set = sets_of(labels, ids, offsets, shard.classes, ignore_index)
    x = SumOverRanks.apply(entries(support), shard, False)
    logprob, entropy = stats_of(x, labels, support, *numbers)
    rows = rows_without_ids(support.kinds, offsets)  # the same on all ranks
    if rows is not None:
        options = RowOptions(*numbers, checks.NOTHING_IGNORED, False, needs_entropy=True)
        labels = torch.where(support.kinds == EVERY_CLASS, labels, 0)
        found = whole(rows, labels[rows], options)
        logprob = with_rows(logprob, support.kinds, rows, -found.nll)
        entropy = with_rows(entropy, support.kinds, rows, found.entropy)
    return SupportStats(*(each.reshape(target.shape) for each in (logprob, entropy, in_set)))


def support_stats(
    logits: Tensor,
    target: Tensor,
    ids: Tensor,
    offsets: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> SupportStats:
    """Compute `partita.support_stats` of logits whose classes lie on several ranks.

    Args:
        logits: this rank's `[..., C_local]`.
        target: labels among all classes `[...]`, the same on all ranks.
        ids, offsets: as in `partita.support_stats`, among all classes, the same on all ranks.
        group, classes: as in `partita.parallel.cross_entropy`.
        temperature, softcap, ignore_index: as in `partita.support_stats`.

    Returns:
        `SupportStats(logprob, entropy, in_set)` as in `partita.support_stats`, with the same bits
        on every rank; the first two are differentiable in this rank's logits.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.support_stats`; a DTensor.
        RuntimeError: as in `partita.parallel.cross_entropy`; a second derivative is asked for.

    Source: as for `partita.support_stats`; the ranks exchange a number for each target and id.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> target, ids, offsets = torch.tensor([2]), torch.tensor([2, 3]), torch.tensor([0, 2])
        >>> partita.parallel.support_stats(torch.zeros(1, 4), target, ids, offsets).logprob
        tensor([-0.6931])
        >>> dist.destroy_process_group()
    """
    checks.floating("logits", logits)
    if logits.ndim == 0:
        raise ValueError("logits: expected shape [..., C_local], got []")
    shard = vocab_shard("logits", logits, -1, group, classes)
    checks.python_int("ignore_index", ignore_index)
    check_labels(logits, target, None, shard, ignore_index)
    checks.shape("target", target, logits.shape[:-1], "logits without its classes")
    check_support(ids, offsets, target.reshape(-1), "logits")
    numbers = checks.temperature_and_softcap(temperature, softcap)
    x = contiguous_classes(logits[None].flatten(0, -2))
    return _statistics(
        lambda support: entry_logits(x, support, shard.first_class),
        lambda rows, labels, options: logits_statistics(x[rows], labels, None, shard, options),
        *(target, ids, offsets, shard, numbers, ignore_index),
    )


def linear_support_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    ids: Tensor,
    offsets: Tensor,
    *,
    linear_bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    memory_budget: int | None = None,
) -> SupportStats:
    """Compute `partita.linear_support_stats` with a matrix whose classes lie on several ranks.

    Args:
        input: hidden states `[..., H]`, the same on all ranks.
        linear_weight: this rank's rows of the matrix, `[C_local, H]`.
        target, ids, offsets: as in `partita.parallel.support_stats`.
        linear_bias: this rank's `[C_local]`.
        group, classes, temperature, softcap, ignore_index: as in `partita.parallel.support_stats`.
        memory_budget: bytes of workspace of each rank for rows without ids.

    Returns:
        `SupportStats(logprob, entropy, in_set)` as in `partita.linear_support_stats`, with the same
        bits on every rank. The gradient of the hidden states is complete on every rank.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as in `partita.parallel.support_stats`.

    Source: as for `partita.linear_support_stats` and `partita.parallel.support_stats`.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> hidden, matrix, target = torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([2])
        >>> sets = torch.tensor([2, 3]), torch.tensor([0, 2])
        >>> partita.parallel.linear_support_stats(hidden, matrix, target, *sets).logprob
        tensor([-0.6931])
        >>> dist.destroy_process_group()
    """
    head = checked_head(input, linear_weight, linear_bias, shape="[C_local, H]")
    shard = vocab_shard("linear_weight", head.weight, 0, group, classes)
    checks.python_int("ignore_index", ignore_index)
    check_labels(input, target, None, shard, ignore_index)
    checks.shape("target", target, input.shape[:-1], "input without H")
    check_support(ids, offsets, target.reshape(-1), "input")
    numbers = checks.temperature_and_softcap(temperature, softcap)
    head = head.flat

    def entries(support: Support) -> Tensor:
        # The sum over the ranks of the gradients of hidden states is in the accumulator's dtype.
        states = SumOverRanks.apply(head.input.to(acc_dtype(input.dtype)), shard, True)
        place = (shard.first_class, current_backend())
        x: Tensor = EntryLogits.apply(states, head.weight, head.bias, *support, *place)
        return x

    def whole(rows: Tensor, labels: Tensor, options: RowOptions) -> RowStatistics:
        part = Head(head.input[rows], head.weight, head.bias)
        return hidden_statistics(part, labels, None, shard, options, False, memory_budget)

    return _statistics(entries, whole, target, ids, offsets, shard, numbers, ignore_index)
