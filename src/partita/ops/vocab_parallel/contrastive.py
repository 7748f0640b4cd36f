"""Contrastive losses of pairs that lie on several ranks.

Each rank gathers the columns of all ranks and has the logits of its own rows, so that the ranks
compute each logit once. They exchange the log-sum-exp of each column, and the gradients of columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...primitives.rows import finite_shift
from ...runtime import checks
from ...runtime.autograd import apply, needed_gradients, saved_tensors
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ...runtime.sizes import holds
from ..contrastive.autograd import gradient_op, state_op
from ..contrastive.common import checked_inputs, mean_loss, scaled_gradients
from .shard import (
    VocabShard,
    gather_ranks,
    refuse_second_derivative,
    sum_in_rank_order,
    sum_of_rows,
    vocab_shard,
)


class RanksLoss(torch.autograd.Function):
    """The loss of a rank's pairs among the columns of all ranks, `[]`, or its mean over ranks.

    The gradients are those of the sum of all ranks' losses in either case.
    """

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        is_sigmoid: bool,
        symmetric: bool,
        budget: int,
        save: bool,
        local: bool,
        shard: VocabShard,
        backend: str,
    ) -> tuple[Tensor, ...]:
        gathered, first = gather_ranks(b, shard).flatten(0, 1), shard.first_class
        numbers = (logit_scale, logit_bias, first, is_sigmoid, symmetric, budget)
        rows, columns, saved = state_op(a, gathered, *numbers, save, backend)
        own = columns
        if symmetric:
            columns = merged(gather_ranks(columns, shard))
            own = columns[:, first : first + a.shape[0]]
        loss = mean_loss(rows, own, is_sigmoid, symmetric)
        if not local:
            loss = sum_in_rank_order(gather_ranks(loss, shard)) / len(shard.sizes)
        return loss, gathered, rows, columns, saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        a, _, *numbers = inputs[:4]
        *ctx.options, _, _, ctx.shard, ctx.backend = inputs[4:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(a, output[1], *numbers, *output[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("features")
        tensors, shard = saved_tensors(ctx), ctx.shard
        a, _, scale, bias = tensors[:4]
        wanted = needed_gradients(ctx, a, a, scale, bias)
        call = (*tensors, shard.first_class, *ctx.options, *wanted[:2], ctx.backend)
        da, db, sums = gradient_op(*call)
        if wanted[1]:
            db = sum_of_rows(db, shard, acc_dtype(a.dtype), False, scattered=True)()
        found = scaled_gradients(grads[0], scale, (da, db, sums), a.dtype)
        each = zip(found, wanted, strict=True)
        return *(gradient if wants else None for gradient, wants in each), *(None,) * 7


def merged(columns: Tensor) -> Tensor:
    """Return the log-sum-exps of columns, `[2, C]`, from those of each rank's rows, in order."""
    maximum, total = columns.unbind(1)
    greatest = maximum.amax(0)
    scale = (maximum - finite_shift(greatest)).exp()
    return torch.stack([greatest, sum_in_rank_order(total * scale)])


def check_sizes(a: Tensor, b: Tensor, shard: VocabShard) -> None:
    """Raise unless all ranks have features of the same sizes, where values are checked."""
    if not checks.can_check_values(a):
        return
    sizes = torch.tensor([*a.shape, len(b)], device=a.device)
    for rank, other in enumerate(gather_ranks(sizes, shard).tolist()):
        if other != sizes.tolist():
            raise ValueError(
                f"a, b: expected the same sizes on all ranks, got {sizes.tolist()} (N, D, rows of"
                f" b) on rank {shard.rank} and {other} on rank {rank}"
            )


def contrastive_loss(
    a: Tensor,
    b: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float | None = None,
    kind: str = "softmax",
    symmetric: bool = True,
    group: dist.ProcessGroup | None = None,
    local: bool = True,
    memory_budget: int | None = None,
) -> Tensor:
    """Compute `partita.contrastive_loss` of pairs that lie on several ranks.

    The columns of all ranks stand beside each rank's rows. No rank has all logits: it gathers the
    features `b`, takes its own rows in chunks, and exchanges the log-sum-exp of each column.

    Args:
        a, b: this rank's features, as in `partita.contrastive_loss`. All ranks have the same number
            of rows. Without `symmetric`, the hard negatives of all ranks are columns of each row.
        logit_scale, logit_bias: numbers as in `partita.contrastive_loss`, equal on all ranks.
        kind, symmetric: as in `partita.contrastive_loss`.
        group: the process group, all ranks if None.
        local: whether to return the loss of this rank's pairs, whose mean over the ranks is the
            global loss; otherwise the global loss, with the same bits on every rank.
        memory_budget: as in `partita.contrastive_loss`, on each rank.

    Returns:
        The loss in nats, `[]`, fp32 (fp64 for fp64). With `local` or without, gradients are those
        of the sum of the ranks' losses: the mean over ranks that DDP and FSDP take of parameters'
        gradients is then the gradient of the global loss. The upstream gradient is assumed to be
        equal on all ranks. A rank's gradients of scale and bias are those of its own rows' logits.

    Raises:
        TypeError, ValueError: as in `partita.contrastive_loss`; a rank without pairs; a DTensor.
            Where values are checked, on the CPU or with `PARTITA_CHECK=1`, also if ranks have other
            sizes. A GPU does not look otherwise, and the ranks would wait for each other.
        RuntimeError: torch.distributed is not initialised; the group uses Gloo for tensors on a
            GPU; a second derivative is asked for.

    Source: as for `partita.contrastive_loss`; Ilharco et al., OpenCLIP, 2021, for `local_loss` and
    `gather_with_grad`, which it equals under DDP.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> partita.parallel.contrastive_loss(torch.eye(3), torch.eye(3), 2.0)
        tensor(0.2395)
        >>> dist.destroy_process_group()
    """
    inputs = checked_inputs(a, b, logit_scale, logit_bias, kind, symmetric, memory_budget)
    if not holds(inputs.b.shape[0] > 0):
        raise ValueError(f"b: expected at least one row, got shape {list(b.shape)}")
    shard = vocab_shard("b", inputs.b, 0, group, None)
    check_sizes(inputs.a, inputs.b, shard)
    save = inputs.saves(shard.classes)
    loss: Tensor = apply(RanksLoss, *inputs, save, local, shard, current_backend())[0]
    return loss
