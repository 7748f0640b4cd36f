"""Divergences and log-probabilities of rows whose classes lie on several ranks.

Each rank computes the state of its classes. The states are gathered, and every rank merges them in
rank order into the same statistics, bit for bit. The upstream gradient is assumed to be equal on
all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...primitives.rows import finite_shift
from ...runtime import checks
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ...runtime.invariance import is_batch_invariant
from ..divergence.autograd import (
    divergence_local_gradient_op,
    divergence_mixture_op,
    divergence_state_op,
)
from ..divergence.common import (
    check_options,
    divergence_options,
    in_common_precision,
    reduced,
)
from ..linear_heads.autograd import rows_linear
from ..linear_heads.common import Head, RowOptions, checked_head, counted_rows
from ..linear_heads.low_rank import LowRank, with_low_rank
from ..logprobs.common import check_ids
from .autograd import (
    merged_statistics,
    parallel_entries,
    parallel_entries_gradient,
    parallel_state,
)
from .local_losses import checked_rows, contiguous_classes
from .shard import (
    Classes,
    VocabShard,
    gather_ranks,
    refuse_second_derivative,
    sum_in_rank_order,
    sum_of_rows,
    sum_over_ranks,
    vocab_shard,
    wait_for,
)

__all__ = ["divergence", "linear_divergence", "linear_logprobs", "logprobs"]

NO_LABEL = -1


def merged_rows(gathered: Tensor, beta: float, temperature: float) -> tuple[Tensor, ...]:
    """Return the `DivergenceRows` from the states of all ranks, `[ranks, 5, M]`."""
    maximum, sumexp, teacher_maximum, teacher_sumexp, weighted = gathered.double().unbind(1)
    first, second = (maximum, sumexp), (teacher_maximum, teacher_sumexp)
    if beta == 0:
        first, second = second, first
    maxima, sums, scales, moved = [], [], [], []
    for of_ranks, sum_of_ranks in (first, second):
        maxima.append(of_ranks.amax(0))
        shift = finite_shift(maxima[-1])
        scales.append(((of_ranks - shift) / temperature).exp())
        sums.append(sum_in_rank_order(sum_of_ranks * scales[-1]))
        moved.append(finite_shift(of_ranks) - shift)
    relative = scales[0] * (weighted + first[1] * (moved[0] - moved[1]))
    total = sum_in_rank_order(torch.where(scales[0] == 0, 0, relative))
    kl = total / sums[0] / temperature + (sums[1] / sums[0]).log()
    pairs = [(maxima[0], sums[0]), (maxima[1], sums[1])]
    student, teacher = pairs if beta else pairs[::-1]
    fields = (field.to(gathered.dtype) for field in (kl, *student, *teacher))
    nothing = gathered.new_empty(len(kl), 0)
    return *fields, nothing, nothing.long()


class ParallelDivergence(torch.autograd.Function):
    """The `DivergenceRows` of rows `[M, C_local]`, from the classes of all ranks.

    The divergence is differentiable in this rank's logits of the student.
    """

    @staticmethod
    def forward(
        logits: Tensor,
        teacher_logits: Tensor,
        beta: float,
        temperature: float,
        softcap: float,
        shard: VocabShard,
        backend: str,
    ) -> tuple[Tensor, ...]:
        options = (*divergence_options(beta, temperature, softcap), backend)
        state = divergence_state_op(logits, teacher_logits, *options)
        terms, *sums, means, argmax = merged_rows(gather_ranks(state, shard), beta, temperature)
        if 0 < beta < 1:
            found = divergence_mixture_op(logits, teacher_logits, *sums, *options)
            both = sum_in_rank_order(gather_ranks(found, shard))
            terms, means = both[0].clone(), both[1].clone()
        return terms, *sums, means, argmax

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, teacher_logits, *ctx.numbers, _, ctx.backend = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(logits, teacher_logits, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        logits, teacher_logits, *rows = ctx.saved_tensors
        if not logits.shape[1]:
            return torch.empty_like(logits), None, None, None, None, None, None
        options = (*divergence_options(*ctx.numbers), ctx.backend)
        pair = (logits, teacher_logits, None)
        dlogits = divergence_local_gradient_op(grads[0], *pair, *rows, *options)
        return dlogits, None, None, None, None, None, None


class ParallelLogprobs(torch.autograd.Function):
    """The log-probabilities of ids, `[M, K]`, from the classes of all ranks, and statistics.

    They are differentiable in this rank's logits. The ranks exchange O(M K) numbers.
    """

    @staticmethod
    def forward(
        logits: Tensor,
        ids: Tensor,
        temperature: float,
        softcap: float,
        shard: VocabShard,
        backend: str,
    ) -> tuple[Tensor, ...]:
        numbers = (temperature, softcap, NO_LABEL)
        options = RowOptions(*numbers, needs_smoothing=False, needs_entropy=True)
        no_label = ids.new_full((len(ids),), NO_LABEL)
        of_rows = (no_label, None, shard.first_class, *options, 0, False, False, False, backend)
        state, _ = parallel_state(logits, None, None, None, None, *of_rows)
        rows = merged_statistics(state, no_label, shard, options, backend)
        local = parallel_entries(logits, ids, shard.first_class, shard.classes, softcap, backend)
        # One rank has the logit of an id, so the sum of the others is exactly 0.
        entries = wait_for(sum_over_ranks(local, shard))
        relative = (entries - finite_shift(rows.maximum)[:, None]) / temperature
        is_class = (ids >= 0) & (ids < shard.classes)
        found = torch.where(is_class, relative - rows.sumexp.log()[:, None], torch.nan)
        return found, entries, rows.maximum, rows.sumexp

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, ids, *ctx.numbers, ctx.shard, ctx.backend = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(logits, ids, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        place = (ctx.shard.first_class, ctx.shard.classes)
        of_ids = (grads[0], *ctx.saved_tensors, *place, *ctx.numbers, ctx.backend)
        return parallel_entries_gradient(*of_ids), None, None, None, None, None


class LocalLinear(torch.autograd.Function):
    """The logits of this rank's classes, `[M, C_local]`.

    The gradients of the hidden states and of the factor beside them are summed over the ranks in
    the accumulator's dtype.
    """

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_rank_input: Tensor | None,
        low_rank_weight: Tensor | None,
        invariant: bool,
        widens: bool,
        shard: VocabShard,
    ) -> Tensor:
        low_rank = (low_rank_input, low_rank_weight)
        return rows_linear(Head(input, weight, bias, *low_rank, invariant, widens))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _, *low_rank, ctx.invariant, _, ctx.shard = inputs
        ctx.save_for_backward(input, weight, *low_rank)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        input, weight, *low_rank = ctx.saved_tensors
        grad = grads[0].to(input.dtype)  # of logits that may be wider
        found: list[Tensor | None] = [None] * 8
        for i, (rows, factor) in zip((0, 3), ((input, weight), low_rank), strict=True):
            if ctx.needs_input_grad[i]:
                columns = factor.T.to(grad.dtype)
                part = rows_linear(Head(grad, columns, None, invariant=ctx.invariant, widens=True))
                found[i] = sum_of_rows(part, ctx.shard, rows.dtype, ctx.invariant)()
            if ctx.needs_input_grad[i + 1]:
                product = grad.T @ counted_rows(rows.to(grad.dtype), grad)
                found[i + 1] = product.to(factor.dtype)
        if ctx.needs_input_grad[2]:
            found[2] = grad.sum(0, dtype=acc_dtype(grad.dtype)).to(grad.dtype)
        return tuple(found)


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
    shard, rows = checked_rows(logits, group, classes)
    checks.floating("teacher_logits", teacher_logits)
    checks.device("teacher_logits", teacher_logits, logits, "logits")
    checks.shape("teacher_logits", teacher_logits, logits.shape, "logits.shape")
    check_options(beta, mask, reduction, logits, "logits")
    teacher_rows = teacher_logits[None].flatten(0, -2)
    loss = _divergences(rows, teacher_rows, shard, beta, temperature, softcap)
    return reduced(loss.reshape(logits.shape[:-1]), mask, reduction)


def _divergences(
    logits: Tensor,
    teacher_logits: Tensor,
    shard: VocabShard,
    beta: float,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Return the divergence of each row of logits `[M, C_local]`."""
    numbers = float(beta), *checks.temperature_and_softcap(temperature, softcap)
    pair = in_common_precision(logits, teacher_logits), teacher_logits.detach()
    result: Tensor = ParallelDivergence.apply(*pair, *numbers, shard, current_backend())[0]
    return result


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
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
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
        logits_dtype: as in `partita.linear_divergence`.
        low_rank: as in `partita.parallel.linear_cross_entropy`, for the student's head.

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
    logits, shard, head = _local_logits(
        input, linear_weight, linear_bias, "", group, classes, logits_dtype, low_rank
    )
    teacher_logits, *_ = _local_logits(
        teacher_input.detach(),
        teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
        "teacher_",
        group,
        classes,
        logits_dtype,
    )
    expected = (*input.shape[:-1], teacher_weight.shape[1])
    checks.shape("teacher_input", teacher_input, expected, "the rows of input and K")
    check_options(beta, mask, reduction, input, "input")
    rows = _divergences(logits, teacher_logits, shard, beta, temperature, softcap)
    return reduced(head.of_tokens(rows, input.shape[:-1]), mask, reduction)


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
    shard, rows = checked_rows(logits, group, classes)
    check_ids(ids, logits, "the logits")
    flat = ids.long()[None].flatten(0, -2)
    return _logprobs(rows, flat, shard, temperature, softcap).reshape(ids.shape)


def _logprobs(
    logits: Tensor,
    ids: Tensor,
    shard: VocabShard,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Return the log-probabilities of ids `[M, K]` from rows of logits `[M, C_local]`."""
    numbers = checks.temperature_and_softcap(temperature, softcap)
    checks.labels("ids", ids, shard.classes, checks.NOTHING_IGNORED)
    of_rows = (contiguous_classes(logits), ids)
    result: Tensor = ParallelLogprobs.apply(*of_rows, *numbers, shard, current_backend())[0]
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
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """Compute log-probabilities of given classes, from a matrix that lies on several ranks.

    This rank's logits of all tokens are in memory.

    Args:
        input: hidden states `[..., H]`, the same on all ranks.
        linear_weight: this rank's rows of the matrix, `[C_local, H]`.
        ids: as in `partita.parallel.logprobs`.
        linear_bias: this rank's `[C_local]`.
        group, classes, temperature, softcap: as in `partita.parallel.logprobs`.
        logits_dtype: as in `partita.linear_cross_entropy`.
        low_rank: as in `partita.parallel.linear_cross_entropy`.

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
    logits, shard, head = _local_logits(
        input, linear_weight, linear_bias, "", group, classes, logits_dtype, low_rank
    )
    check_ids(ids, input, "input")
    flat = head.in_blocks(ids.long()[None].flatten(0, -2))
    return head.of_tokens(_logprobs(logits, flat, shard, temperature, softcap), ids.shape[:-1])


def _local_logits(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prefix: str,
    group: dist.ProcessGroup | None,
    classes: Classes,
    logits_dtype: torch.dtype | None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, VocabShard, Head]:
    """Return the logits of this rank's classes, its shard, and the head that has computed them.

    The logits are rows `[M, C_local]`, which fill whole blocks on a CPU in the mode. The prefix
    stands before the names of the tensors in errors.
    """
    head = checked_head(input, weight, bias, prefix, "[C_local, H]")
    head = with_low_rank(head, low_rank, is_batch_invariant())
    shard = vocab_shard(f"{prefix or 'linear_'}weight", head.weight, 0, group, classes)
    head = head.of_call(logits_dtype).flat.aligned
    return LocalLinear.apply(*head, shard), shard, head
