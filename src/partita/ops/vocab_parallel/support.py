"""Statistics over recorded supports whose classes lie on several ranks.

Each rank computes the logits of the entries whose classes it has, and 0 for others. Their sum over
the ranks is exact, so every rank has the logits of all entries, and computes the same statistics
from them. A rank's gradients are those of its own entries.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...primitives.rows import softcapped
from ...runtime import checks, register
from ...runtime.autograd import is_traced
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ..linear_heads.common import (
    HeadGradients,
    RowOptions,
    RowStatistics,
    checked_head,
    chunk_and_save,
)
from ..linear_heads.plan import linear_cross_entropy_plan
from ..support.autograd import sets_of
from ..support.common import (
    EVERY_CLASS,
    Support,
    SupportRows,
    SupportStats,
    check_support,
    may_lack_ids,
    rows_without_ids,
)
from . import reference_support
from .autograd import ParallelRows
from .local_losses import check_labels, contiguous_classes
from .shard import (
    Classes,
    VocabShard,
    refuse_second_derivative,
    sum_over_ranks,
    vocab_shard,
    wait_for,
)


def _gpu() -> ModuleType:
    from .gpu import support

    return support


def _gradients_fake(
    coefficients: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> HeadGradients:
    return HeadGradients(
        coefficients.new_empty(input.shape if input_grad else (0,)),
        weight.new_empty(weight.shape if weight_grad else (0,)),
        weight.new_empty(weight.shape[:1] if bias_grad else (0,)),
    )


dots_op = register.define(
    reference_support.parallel_support_dots,
    lambda input, rows: input.new_empty(rows.shape, dtype=acc_dtype(input.dtype)),
    gpu=_gpu,
)
rows_op = register.define(
    reference_support.parallel_support_rows,
    lambda x, target: tuple(x.new_empty(target.shape) for _ in SupportRows._fields),
    gpu=_gpu,
)
coefficients_op = register.define(
    reference_support.parallel_support_coefficients,
    lambda x: torch.empty_like(x),
    gpu=_gpu,
)
gradients_op = register.define(
    reference_support.parallel_support_gradients,
    _gradients_fake,
    gpu=_gpu,
)


def local_support(support: Support, shard: VocabShard) -> Support:
    """Return the supports with classes relative to this rank's; those of others do not count."""
    first, size = shard.first_class, shard.sizes[shard.rank]
    classes, keys = support.classes - first, support.keys - first
    is_own = (support.classes >= first) & (classes < size)
    has_key = (keys >= 0) & (keys < size)
    return Support(
        offsets=support.offsets,
        classes=torch.where(is_own, classes, -1),
        order=support.order,
        keys=torch.where(has_key, keys, size),
        rows=support.rows,
        kinds=support.kinds,
    )


def _places(support: Support) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return which entries this rank has, and their rows and columns, 0 for others."""
    counts = support.classes >= 0
    columns = torch.where(counts, support.classes, 0).long()
    return counts, (torch.where(counts, support.rows_of_entries(), 0), columns)


class ParallelSupport(torch.autograd.Function):
    """The `SupportRows` of rows with ids from the classes of all ranks, and the entries' logits.

    Without a matrix the input is this rank's logits. The first two results are differentiable. The
    gradient of hidden states is complete on every rank.
    """

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        target: Tensor,
        support: tuple[Tensor, ...],
        temperature: float,
        softcap: float,
        shard: VocabShard,
        backend: str,
    ) -> tuple[Tensor, ...]:
        local = local_support(Support(*support), shard)
        if weight is not None:
            x = dots_op(input, weight, bias, *local, softcap, backend)
        elif input.shape[1]:
            counts, places = _places(local)
            x = torch.where(counts, softcapped(input[places], softcap), 0)
        else:
            x = input.new_zeros(local.rows.shape, dtype=acc_dtype(input.dtype))
        x = wait_for(sum_over_ranks(x, shard))
        return *rows_op(x, target, *support, temperature, backend), x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *head, target, support, temperature, softcap, ctx.shard, ctx.backend = inputs
        ctx.options = (temperature, softcap)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*head, target, *support, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        input, weight, bias, target, *rest = ctx.saved_tensors
        refuse_second_derivative("logits" if weight is None else "matrix")
        support, (*statistics, x) = rest[:6], rest[6:]
        call = (*grads[:2], x, target, *support, *statistics, *ctx.options, ctx.backend)
        coefficients = coefficients_op(*call)
        local, no_others = local_support(Support(*support), ctx.shard), (None,) * 6
        if weight is None:
            dlogits = torch.zeros(input.shape, dtype=input.dtype, device=input.device)
            if input.shape[1]:
                # An entry of another rank adds 0 to the first logit, in a fixed order.
                counts, places = _places(local)
                values = torch.where(counts, coefficients, 0).to(input.dtype)
                dlogits.index_put_(places, values, accumulate=True)
            return dlogits, None, None, *no_others
        wanted = ctx.needs_input_grad[:3]
        found = gradients_op(coefficients, input, weight, bias, *local, *wanted, ctx.backend)
        dinput, dweight, dbias = found
        if wanted[0]:
            dinput = wait_for(sum_over_ranks(dinput, ctx.shard)).to(input.dtype)
        pairs = zip((dinput, dweight, dbias), wanted, strict=True)
        return *(grad if wants else None for grad, wants in pairs), *no_others


def _statistics(
    head: tuple[Tensor, Tensor | None, Tensor | None],
    target: Tensor,
    ids: Tensor,
    offsets: Tensor,
    shard: VocabShard,
    temperature: float,
    softcap: float,
    ignore_index: int,
    memory_budget: int | None,
) -> SupportStats:
    """Return the statistics of this rank's logits, or of hidden states `[M, H]` and a matrix.

    Rows without ids take the statistics over all classes of all ranks.
    """
    input, weight, bias = head
    labels = target.reshape(-1).long().contiguous()
    support, in_set = sets_of(labels, ids, offsets, shard.classes, ignore_index)
    backend = current_backend()
    options = (temperature, softcap, shard, backend)
    logprob, entropy, *_ = ParallelSupport.apply(*head, labels, tuple(support), *options)
    if not may_lack_ids(offsets):
        index = labels[:0]
    elif is_traced():  # A compiler does not know which rows have no ids.
        index = torch.arange(labels.shape[0], device=labels.device)
    else:
        rows, number = rows_without_ids(support.kinds)  # the same on all ranks
        index = rows[: int(number)]
    if is_traced() or len(index):
        is_whole = support.kinds == EVERY_CLASS
        of_rows = RowOptions(temperature, softcap, -100, needs_smoothing=False, needs_entropy=True)
        chunk, save_logits = 0, False
        if weight is not None:
            needs = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in head]
            plan = linear_cross_entropy_plan(
                index.shape[0],
                input.shape[1],
                max(shard.sizes),
                input.dtype,
                memory_budget=memory_budget,
                input_grad=needs[0],
                weight_grad=needs[1] or needs[2],
                parallel=True,
            )
            chunk, save_logits = chunk_and_save(plan, max(weight.shape[0], 1))
        of_whole = torch.where(is_whole, labels, 0)[index]
        call = (of_whole, None, shard, of_rows, chunk, save_logits, False, backend)
        found = RowStatistics(*ParallelRows.apply(input[index], weight, bias, *call)[:-1])
        whole = [
            torch.zeros_like(logprob).index_put((index,), field)
            for field in (-found.nll, found.entropy)
        ]
        logprob = torch.where(is_whole, whole[0], logprob)
        entropy = torch.where(is_whole, whole[1], entropy)
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
    rows = contiguous_classes(logits[None].flatten(0, -2))
    call = (target, ids, offsets, shard, *numbers, ignore_index, None)
    return _statistics((rows, None, None), *call)


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
    flat = head.flat
    call = (target, ids, offsets, shard, *numbers, ignore_index, memory_budget)
    return _statistics((flat.input, flat.weight, flat.bias), *call)
