"""Distillation losses and log-probabilities of rows whose classes lie on several ranks.

Each rank computes the state of its classes. The states are gathered, and every rank merges them in
rank order into the same statistics, bit for bit. The upstream gradient is assumed to be equal on
all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...primitives.rows import finite_shift
from ...runtime import checks
from ...runtime.backend import current_backend, resolve
from ...runtime.dtypes import acc_dtype, integer_dtype
from ...runtime.invariance import is_batch_invariant
from ..divergence.autograd import (
    divergence_local_gradient_op,
    divergence_mixture_op,
    divergence_state_op,
)
from ..divergence.common import (
    Distillation,
    DivergenceRows,
    TermOptions,
    checked_divergence,
    checked_objective,
    columns,
    in_common_precision,
    label_loss,
    origin_of_sums,
    packed,
)
from ..linear_heads.autograd import rows_linear
from ..linear_heads.common import Head, RowOptions, checked_head, counted_rows
from ..linear_heads.low_rank import LowRank, with_low_rank
from ..linear_heads.products import in_blocks, without_padding
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

__all__ = [
    "distillation_loss",
    "divergence",
    "linear_distillation_loss",
    "linear_divergence",
    "linear_logprobs",
    "logprobs",
]

NO_LABEL = -1


class MergedSums(NamedTuple):
    """Maximum and sum of exponentials of the rows of a model, in fp64."""

    # maximum, sumexp: those of all classes, [M]
    maximum: Tensor
    sumexp: Tensor
    origin: Tensor  # what all exponentials are relative to, [M]
    of_ranks: Tensor  # the sums of each rank, [ranks, M]
    scales: Tensor  # the factors that make them relative to `origin`, [ranks, M]
    moved: Tensor  # by how much the origins of the ranks lie above `origin`, [ranks, M]

    @classmethod
    def of(
        cls, maxima: Tensor, of_ranks: Tensor, temperature: float, in_kernels: bool
    ) -> MergedSums:
        """Return the merged sums of the ranks' maxima and sums, `[ranks, M]`."""
        maximum, of_ranks = maxima.amax(0), of_ranks.double()
        origin = origin_of_sums(maximum, temperature, in_kernels)
        moved = origin_of_sums(maxima, temperature, in_kernels) - origin
        scales = torch.where(maxima == -torch.inf, 0, (moved / temperature).exp())
        sumexp = sum_in_rank_order(of_ranks * scales)
        return cls(maximum.double(), sumexp, origin, of_ranks, scales, moved)


def merged_rows(
    gathered: Tensor, target: Tensor | None, classes: int, options: TermOptions, in_kernels: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Return terms, maxima and sums, means and arg-max from the states of all ranks.

    The states are packed `Exchanged`, `[ranks, M, N]`. The terms and means that need the
    normalisers of both rows first are not among the results, `[M]` each.
    """
    found, temperature = columns(gathered, options.exchanged), options.temperature
    numbers, dtype = (temperature, in_kernels), gathered.dtype
    student = MergedSums.of(found.maximum, found.sumexp, *numbers)
    teacher = MergedSums.of(found.teacher_maximum, found.teacher_sumexp, *numbers)
    terms, means = [], []
    if target is not None:
        origin, plain = student.origin, student.sumexp
        if found.plain is not None:
            origin = finite_shift(student.maximum)
            scales = (found.maximum.double() - origin).exp()
            plain = sum_in_rank_order(found.plain.double() * scales)
            means.append(plain)
        label = found.label.amax(0).double()
        terms.append(label_loss(target, label, origin, plain, classes, options.ignore_index))
    for weighted, first, second in (
        (found.forward, teacher, student),
        (found.reverse, student, teacher),
    ):
        if weighted is not None:
            apart = weighted.double() + first.of_ranks * (first.moved - second.moved)
            relative = torch.where(first.scales == 0, 0, first.scales * apart)
            mean = sum_in_rank_order(relative) / first.sumexp / temperature
            terms.append(mean + (second.sumexp / first.sumexp).log())
    argmax = gathered.new_empty(gathered.shape[1], 0, dtype=torch.int64)
    if options.best:
        bits = found.argmax.contiguous().view(integer_dtype(dtype)).long()
        is_best = found.teacher_maximum == found.teacher_maximum.amax(0)
        argmax = torch.where(is_best, bits, classes - 1).amin(0)
    fields = (terms, [*student[:2], *teacher[:2]], means)
    return *([each.to(dtype) for each in field] for field in fields), argmax  # type: ignore


class ParallelDivergence(torch.autograd.Function):
    """The `DivergenceRows` of rows `[M, C_local]`, from the classes of all ranks.

    The terms are differentiable in this rank's logits of the student.
    """

    @staticmethod
    def forward(
        logits: Tensor,
        teacher_logits: Tensor,
        target: Tensor | None,
        options: TermOptions,
        shard: VocabShard,
        backend: str,
    ) -> tuple[Tensor, ...]:
        of_call, first = (*options, backend), shard.first_class
        state = divergence_state_op(logits, teacher_logits, target, first, *of_call)
        in_kernels = resolve(backend, logits.device, has_cpu=False) == "gpu"
        of_ranks = gather_ranks(state, shard)
        merged = merged_rows(of_ranks, target, shard.classes, options, in_kernels)
        terms, sums, means, argmax = merged
        if options.is_mixed:
            found = divergence_mixture_op(logits, teacher_logits, *sums, *of_call)
            both = sum_in_rank_order(gather_ranks(found, shard))
            terms += [each.clone() for each in both[0].unbind(-1)]
            means += [each.clone() for each in both[1].unbind(-1)]
        return packed(terms, sums[0]), *sums, packed(means, sums[0]), argmax

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, teacher_logits, target, ctx.options, ctx.shard, ctx.backend = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(logits, teacher_logits, target, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        logits, teacher_logits, target, *rows = ctx.saved_tensors
        if not logits.shape[1]:
            return torch.empty_like(logits), None, None, None, None, None
        place = (ctx.shard.first_class, ctx.shard.classes)
        of_rows = (grads[0], logits, teacher_logits, target, *rows)
        dlogits = divergence_local_gradient_op(*of_rows, *place, *ctx.options, ctx.backend)
        return dlogits, None, None, None, None, None


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

    The ranks exchange five numbers of each row, or four and then two for a beta between 0 and 1.

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
    pair = _pair_of_logits(logits, teacher_logits, group, classes)
    of_rows = (logits, "logits", mask, reduction)
    objective, options = checked_divergence(*of_rows, beta, temperature, softcap)
    return objective.loss(pair.rows(None, options).terms)


def distillation_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None = None,
    *,
    weights: Mapping[str, float | Tensor],
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    softcap: float | None = None,
    teacher_classes: Tensor | None = None,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Distillation:
    """Compute `partita.distillation_loss` of logits whose classes lie on several ranks.

    The ranks exchange five to nine numbers of each row, and two more for each of `jsd` and `tv`.

    Args:
        logits: this rank's logits of the student, `[..., C_local]`; may be -inf.
        teacher_logits: this rank's logits of the teacher, of the same classes, `[..., C_local]`.
        target: labels among all classes `[...]`, the same on all ranks; the term `hard` needs them.
        weights: as in `partita.distillation_loss`, the same on all ranks.
        group, classes: as in `partita.parallel.cross_entropy`.
        beta, temperature, scale_by_temperature_squared: as in `partita.distillation_loss`.
        softcap, ignore_index, reduction: as in `partita.distillation_loss`.
        teacher_classes: refused, unlike the `[C]` of `partita.distillation_loss`. A student with a
            part of the vocabulary needs `teacher_logits` that the caller has selected.
        mask: as in `partita.distillation_loss`, the same on all ranks.

    Returns:
        `Distillation` as `partita.distillation_loss` returns it, with the same bits on every rank,
        differentiable in this rank's `logits`. `teacher_argmax` is one of all classes.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.distillation_loss`; a DTensor;
            `teacher_classes`.
        RuntimeError: as in `partita.parallel.divergence`.

    Source: as for `partita.distillation_loss`, merged over the ranks.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> teacher, target = torch.tensor([[1.0986, 0.0]]), torch.tensor([0])
        >>> found = partita.parallel.distillation_loss(
        ...     torch.zeros(1, 2), teacher, target, weights={"hard": 0.5, "kl": 0.5}
        ... )
        >>> found.hard, found.kl, found.loss
        (tensor(0.6931), tensor(0.1308), tensor(0.4120))
        >>> dist.destroy_process_group()
    """
    pair = _pair_of_logits(logits, teacher_logits, group, classes)
    _refuse_teacher_classes(teacher_classes, "teacher_logits[..., ids]")
    numbers = (ignore_index, beta, temperature, scale_by_temperature_squared, softcap)
    of_rows = (logits, "logits", target, mask, reduction)
    objective, options = checked_objective(weights, *of_rows, *numbers)
    rows = pair.rows(target, options)
    return objective.result(objective.loss(rows.terms), rows, None, options.temperature)


def _pair_of_logits(
    logits: Tensor, teacher_logits: Tensor, group: dist.ProcessGroup | None, classes: Classes
) -> Pair:
    """Return the pair of logits `[..., C_local]`; raise unless they fit each other."""
    shard, rows = checked_rows(logits, group, classes)
    checks.floating("teacher_logits", teacher_logits)
    checks.device("teacher_logits", teacher_logits, logits, "logits")
    checks.shape("teacher_logits", teacher_logits, logits.shape, "logits.shape")
    return Pair(rows, teacher_logits[None].flatten(0, -2), shard, False, logits.shape[:-1])


def _refuse_teacher_classes(teacher_classes: Tensor | None, selected: str) -> None:
    if teacher_classes is not None:
        raise ValueError(
            "teacher_classes: expected None over several ranks; pass what they select, such as"
            f" {selected} with the teacher's classes of this rank's classes"
        )


class Pair(NamedTuple):
    """This rank's logits of student and teacher, `[M, C_local]`, and what their rows stand for."""

    logits: Tensor
    teacher_logits: Tensor
    shard: VocabShard  # the classes of the logits
    invariant: bool  # whether the rows may fill whole blocks, as those of heads in that mode do
    shape: torch.Size  # the shape of the rows that a user has

    def rows(self, target: Tensor | None, options: TermOptions) -> DivergenceRows:
        """Return the terms of each row, fields `[...]`."""
        labels = None
        if options.hard and target is not None:
            labels = in_blocks(target.reshape(-1).long(), self.invariant, options.ignore_index)
            checks.labels("target", labels, self.shard.classes, options.ignore_index)
        logits = in_common_precision(self.logits, self.teacher_logits)
        call = (logits, self.teacher_logits.detach(), labels, options, self.shard)
        found = ParallelDivergence.apply(*call, current_backend())
        fields = (without_padding(each, self.shape, self.invariant) for each in found)
        return DivergenceRows(*fields)


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
    heads = (input, linear_weight, teacher_input, teacher_weight, linear_bias, teacher_bias)
    pair = _pair_of_heads(*heads, group, classes, logits_dtype, low_rank)
    of_rows = (input, "input", mask, reduction)
    objective, options = checked_divergence(*of_rows, beta, temperature, softcap)
    return objective.loss(pair.rows(None, options).terms)


def linear_distillation_loss(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    weights: Mapping[str, float | Tensor],
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    softcap: float | None = None,
    teacher_classes: Tensor | None = None,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    reduction: str = "mean",
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
) -> Distillation:
    """Compute the distillation loss of two heads whose classes lie on several ranks.

    This rank's logits of all tokens are in memory, those of student and teacher.

    Args:
        input: the student's hidden states `[..., H]`, the same on all ranks.
        linear_weight: this rank's rows of the student's matrix, `[C_local, H]`.
        teacher_input: the teacher's hidden states `[..., K]`, the same on all ranks.
        teacher_weight: this rank's rows of the teacher's matrix, `[C_local, K]`.
        target, weights: as in `partita.parallel.distillation_loss`.
        linear_bias, teacher_bias: this rank's `[C_local]`.
        group, classes: as in `partita.parallel.cross_entropy`.
        beta, temperature, scale_by_temperature_squared: as in `partita.distillation_loss`.
        softcap, ignore_index, reduction: as in `partita.distillation_loss`.
        teacher_classes, mask: as in `partita.parallel.distillation_loss`.
        logits_dtype: as in `partita.linear_distillation_loss`.
        low_rank: as in `partita.parallel.linear_cross_entropy`, for the student's head.

    Returns:
        `Distillation` as `partita.distillation_loss` returns it, with the same bits on every rank.
        The gradient of the hidden states is complete on every rank.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as in
            `partita.parallel.distillation_loss`.

    Source: as for `partita.linear_distillation_loss` and `partita.parallel.cross_entropy`.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> hidden, matrix = torch.ones(2, 1), torch.zeros(3, 1)
        >>> teacher = hidden, torch.tensor([[1.0], [0.0], [0.0]])
        >>> weights, target = {"hard": 0.1, "kl": 0.9}, torch.tensor([0, 2])
        >>> found = partita.parallel.linear_distillation_loss(
        ...     hidden, matrix, *teacher, target, weights=weights
        ... )
        >>> found.loss, found.kl, found.teacher_argmax
        (tensor(0.2208), tensor(0.1233), tensor([0, 0]))
        >>> dist.destroy_process_group()
    """
    _refuse_teacher_classes(teacher_classes, "teacher_weight[ids]")
    heads = (input, linear_weight, teacher_input, teacher_weight, linear_bias, teacher_bias)
    pair = _pair_of_heads(*heads, group, classes, logits_dtype, low_rank)
    numbers = (ignore_index, beta, temperature, scale_by_temperature_squared, softcap)
    of_rows = (input, "input", target, mask, reduction)
    objective, options = checked_objective(weights, *of_rows, *numbers)
    rows = pair.rows(target, options)
    return objective.result(objective.loss(rows.terms), rows, None, options.temperature)


def _pair_of_heads(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None,
    teacher_bias: Tensor | None,
    group: dist.ProcessGroup | None,
    classes: Classes,
    logits_dtype: torch.dtype | None,
    low_rank: LowRank | None,
) -> Pair:
    """Return the pair of logits of two heads; raise unless they fit each other."""
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
    return Pair(logits, teacher_logits, shard, head.invariant, input.shape[:-1])


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
