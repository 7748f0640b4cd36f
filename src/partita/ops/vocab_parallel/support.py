"""Statistics over recorded supports whose classes lie on several ranks.

Each rank computes the logits of the entries whose classes it has, and 0 for others. Their sum over
the ranks is exact, so every rank has the logits of all entries, and computes the same statistics
from them. A rank's gradients are those of its own entries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...runtime.dtypes import acc_dtype
from ...runtime.invariance import is_batch_invariant
from ..linear_heads.autograd import logits_of_entries
from ..linear_heads.common import Head, RowOptions, checked_head
from ..linear_heads.low_rank import LowRank, with_low_rank, with_states
from ..support.autograd import stats_of_parts
from ..support.common import Support, SupportStats
from .autograd import logits_statistics
from .local_losses import checked_rows, contiguous_classes, hidden_statistics
from .shard import (
    Classes,
    VocabShard,
    refuse_second_derivative,
    sum_of_rows,
    sum_over_ranks,
    vocab_shard,
    wait_for,
)


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks of a tensor, or of its gradients if it is the same on all ranks.

    The gradient of the sum is the same on all ranks.
    """

    @staticmethod
    def forward(x: Tensor, shard: VocabShard, of_gradients: bool, invariant: bool) -> Tensor:
        return x.view_as(x) if of_gradients else wait_for(sum_over_ranks(x.clone(), shard))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.shard, ctx.of_gradients, ctx.invariant = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("classes")
        grad = grads[0]
        if ctx.of_gradients:
            grad = sum_of_rows(grad.clone(), ctx.shard, grad.dtype, ctx.invariant)()
        return grad, None, None, None


class LocalEntries(torch.autograd.Function):
    """The logits of the entries whose columns a rank has, and 0 for others, `[E]`.

    If an entry's gradient is NaN, on any rank, that of all logits of its row is.
    """

    @staticmethod
    def forward(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        own = x.new_zeros(rows.shape, dtype=acc_dtype(x.dtype))
        if not x.shape[1]:
            return own
        is_own = (columns >= 0) & (columns < x.shape[1])
        return torch.where(is_own, x[rows, torch.where(is_own, columns, 0)].to(own.dtype), 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *index = inputs
        ctx.save_for_backward(*index)
        ctx.shape, ctx.dtype = x.shape, x.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,), (rows, columns), (M, width) = grads, ctx.saved_tensors, ctx.shape
        of_rows = grad.new_zeros(M).index_add(0, rows, torch.where(grad.isnan(), grad, 0))
        gradient = of_rows.to(ctx.dtype).unsqueeze(1).repeat(1, width)
        if width:
            is_own = (columns >= 0) & (columns < width)
            index = (rows, torch.where(is_own, columns, 0))
            own = torch.where(is_own, grad, 0).to(ctx.dtype)
            gradient = gradient.index_put_(index, own, accumulate=True)
        return gradient, None, None


def row_options(temperature: float, softcap: float, ignore_index: int) -> RowOptions:
    """Return the options of rows without ids."""
    return RowOptions(temperature, softcap, ignore_index, needs_smoothing=False, needs_entropy=True)


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
        ids, offsets: as in `partita.support_stats`, among all classes, the same on all ranks. As in
            `partita.linear_support_stats` a call waits for the number of rows without ids.
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
    shard, _ = checked_rows(logits, group, classes)

    def entries(x: Tensor, support: Support) -> Tensor:
        own = LocalEntries.apply(x, support.rows, support.classes - shard.first_class)
        total: Tensor = SumOverRanks.apply(own, shard, False, False)
        return total

    def all_classes(x: Tensor, labels: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        of_rows = (contiguous_classes(x), labels, None, shard, row_options(*options))
        found = logits_statistics(*of_rows)
        return -found.nll, found.entropy

    call = (logits, "logits", shard.classes, target, ids, offsets)
    return stats_of_parts(entries, all_classes, *call, temperature, softcap, ignore_index)


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
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
) -> SupportStats:
    """Compute `partita.linear_support_stats` with a matrix whose classes lie on several ranks.

    Args:
        input: hidden states `[..., H]`, the same on all ranks.
        linear_weight: this rank's rows of the matrix, `[C_local, H]`.
        target, ids, offsets: as in `partita.parallel.support_stats`.
        linear_bias: this rank's `[C_local]`.
        group, classes, temperature, softcap, ignore_index: as in `partita.parallel.support_stats`.
        memory_budget: bytes of workspace of each rank for rows without ids.
        logits_dtype: as in `partita.linear_cross_entropy`, for rows without ids.
        low_rank: as in `partita.parallel.linear_cross_entropy`.

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
    head = with_low_rank(head, low_rank, is_batch_invariant())
    shard = vocab_shard("linear_weight", head.weight, 0, group, classes)
    hidden, (_, weight, bias, low_rank_input, factor) = input.shape[-1], head.tensors
    states = with_states(head.input, low_rank_input)

    def entries(x: Tensor, support: Support) -> Tensor:
        # The gradients of hidden states are added up in the accumulator's dtype.
        x = SumOverRanks.apply(x.to(acc_dtype(x.dtype)), shard, True, is_batch_invariant())
        own = logits_of_entries(x, head, shard.first_class, support)
        total: Tensor = SumOverRanks.apply(own, shard, False, False)
        return total

    def all_classes(x: Tensor, labels: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        low_rank = (None if factor is None else x[:, hidden:], factor)
        part = Head(x[:, :hidden], weight, bias, *low_rank)
        of_rows = (labels, None, shard, row_options(*options), False)
        found = hidden_statistics(part, *of_rows, memory_budget, logits_dtype)
        return -found.nll, found.entropy

    call = (states, "input", shard.classes, target, ids, offsets)
    return stats_of_parts(entries, all_classes, *call, temperature, softcap, ignore_index)
