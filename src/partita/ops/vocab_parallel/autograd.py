"""The registered ops of losses over a sharded vocabulary, and their autograd functions.

Each rank computes the packed state of its classes. The states are gathered once, and every rank
merges them into the same statistics, bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime import register
from ...runtime.autograd import spend
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ..linear_heads import autograd as linear_heads
from ..linear_heads.common import (
    TENSORS,
    GradientCoefficients,
    Head,
    LowRankGradients,
    RowOptions,
    RowStatistics,
    StatisticsGrads,
    Wanted,
    counted_states,
    empty_coefficients,
    empty_statistics,
)
from ..linear_heads.products import multiply_blocks
from . import reference
from .common import packed_size
from .shard import (
    VocabShard,
    gather_ranks,
    refuse_second_derivative,
    sum_of_rows,
)


def _state_fake(
    input: Tensor,
    weight: Tensor | None,
    options: RowOptions,
    invariant: bool,
    widens: bool,
    save_logits: bool,
) -> tuple[Tensor, Tensor]:
    size = (packed_size(options.needs_smoothing, options.needs_entropy), input.shape[0])
    saved = input.new_empty(0)
    if weight is not None:
        head = Head(input, weight, None, invariant=invariant, widens=widens)
        saved = linear_heads.saved_logits_fake(head, save_logits)
    return input.new_empty(size, dtype=acc_dtype(input.dtype)), saved


def _coefficients_fake(target: Tensor, grads: StatisticsGrads) -> GradientCoefficients:
    return empty_coefficients(target.shape[0], grads)


def _gradient_fake(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _gpu() -> tuple[Any, ...]:
    from .gpu import launch

    return launch, launch.RANK_KERNELS


define_op = functools.partial(register.define, gpu=_gpu)
parallel_state = define_op(reference.RANK_KERNELS.parallel_state, _state_fake)
parallel_fields = define_op(
    reference.parallel_fields,
    lambda gathered, needs_smoothing, needs_entropy: empty_statistics(
        gathered, gathered.shape[2], needs_smoothing, needs_entropy
    ),
)
parallel_coefficients = define_op(reference.parallel_coefficients, _coefficients_fake)
parallel_gradient = define_op(reference.RANK_KERNELS.parallel_gradient, _gradient_fake)
parallel_entries = define_op(
    reference.RANK_KERNELS.parallel_entries,
    lambda logits, ids: logits.new_empty(ids.shape, dtype=acc_dtype(logits.dtype)),
)
parallel_entries_gradient = define_op(
    reference.RANK_KERNELS.parallel_entries_gradient, _gradient_fake
)


def merged_statistics(
    packed: Tensor, target: Tensor, shard: VocabShard, options: RowOptions, backend: str
) -> RowStatistics:
    """Gather the packed states, and merge them into the statistics of the rows."""
    gathered, place = gather_ranks(packed, shard), (shard.classes, shard.first_class, shard.rank)
    return RowStatistics(*parallel_fields(gathered, target, *place, *options, backend))


class ParallelRows(torch.autograd.Function):
    """The `RowStatistics` of rows from the classes of all ranks, and the saved logits of a head.

    Without a matrix the input is this rank's logits. The first four results are differentiable in
    the input and in this rank's rows of the matrix. The gradients of hidden states and of the
    factor beside them are complete on every rank. With `scattered` each rank has some of the
    tokens, and these gradients are those of its own tokens.
    """

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        low_rank_input: Tensor | None,
        low_rank_weight: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        shard: VocabShard,
        options: RowOptions,
        chunk: int,
        invariant: bool,
        widens: bool,
        save_logits: bool,
        scattered: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        if weight is not None:
            input = _all_tokens(input, target, shard, scattered)
        if low_rank_input is not None:
            low_rank_input = _all_tokens(low_rank_input, target, shard, scattered)
        low_rank = (low_rank_input, low_rank_weight)
        of_rows = (*shard.local(target, class_weight), shard.first_class, *options)
        packed, saved_logits = parallel_state(
            input, weight, bias, *low_rank, *of_rows, chunk, invariant, widens, save_logits, backend
        )
        return *merged_statistics(packed, target, shard, options, backend), saved_logits

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.shard, ctx.options, ctx.chunk = inputs[:10]
        *ctx.products, save_logits, ctx.scattered, ctx.backend = inputs[10:]
        ctx.mark_non_differentiable(*output[4:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (input, weight, *_), (target, class_weight, *outputs, saved_logits) = (
            ctx.saved_tensors[:TENSORS],
            ctx.saved_tensors[TENSORS:],
        )
        refuse_second_derivative("logits" if weight is None else "matrix")
        if all(grad is None for grad in grads[:4]):  # the same on all ranks
            return (None,) * 15
        shard, options, statistics = ctx.shard, ctx.options, RowStatistics(*outputs)
        found = parallel_coefficients(
            target,
            *options.used(grads),
            class_weight,
            statistics.entropy,
            shard.classes,
            options.temperature,
            options.ignore_index,
            ctx.backend,
        )
        optional = (each if each.numel() else None for each in found[2:])
        coefficients = GradientCoefficients(*found[:2], *optional)
        if weight is not None:
            results = _hidden_gradients(ctx, saved_logits, coefficients, statistics)
            needed = zip(results, ctx.needs_input_grad[:TENSORS], strict=True)
            return *(grad if needs_grad else None for grad, needs_grad in needed), *(None,) * 10
        of_rows = (*shard.local(target, class_weight), statistics.maximum, statistics.sumexp)
        dlogits = parallel_gradient(*coefficients, input, *of_rows, *options[:2], ctx.backend)
        return dlogits, *(None,) * 14


def logits_statistics(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    shard: VocabShard,
    options: RowOptions,
) -> RowStatistics:
    """Return the statistics of rows of this rank's logits, `[M, C_local]`."""
    of_rows, unused = (target, class_weight, shard, options), (0, False, False, False, False)
    found = ParallelRows.apply(
        logits, *(None,) * (TENSORS - 1), *of_rows, *unused, current_backend()
    )
    return RowStatistics(*found[:-1])


def _all_tokens(input: Tensor, target: Tensor, shard: VocabShard, scattered: bool) -> Tensor:
    """Return the hidden states of all labels, with zeros for those that fill a block of tokens."""
    if scattered:
        input = gather_ranks(input, shard).flatten(0, 1)
    missing = len(target) - len(input)
    return F.pad(input, (0, 0, 0, missing)) if missing else input


def matmul_during_collective(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, computed in two parts so that a collective can start between them.

    A product occupies the whole device. NCCL's kernel is queued after the first part, which is a
    quarter of the rows, and it starts when that part leaves the device.
    """
    first = len(a) // 4 // 128 * 128
    result = torch.empty((len(a), b.shape[1]), dtype=a.dtype, device=a.device)
    for part in (slice(0, first), slice(first, None)) if first else (slice(None),):
        torch.mm(a[part], b, out=result[part])
    return result


def _hidden_gradients(
    ctx: Any, logits: Tensor, coefficients: GradientCoefficients, statistics: RowStatistics
) -> tuple[Tensor, ...]:
    """Return the gradients of the tensors of the head.

    The first backward pass overwrites saved logits by their gradient, and its products follow here.
    Later passes and those without saved logits compute the logits again, chunk by chunk.
    """
    input, weight, bias, states, factor, target, class_weight = ctx.saved_tensors[: TENSORS + 2]
    needed = Wanted(*ctx.needs_input_grad[:TENSORS])
    to_input, to_weight, to_bias, to_states, _ = needed
    tokens = len(input) * (len(ctx.shard.sizes) if ctx.scattered else 1)
    input = _all_tokens(input, target, ctx.shard, ctx.scattered)
    if states is not None:
        states = _all_tokens(states, target, ctx.shard, ctx.scattered)
    head = Head(input, weight, bias, states, factor, *ctx.products)
    saved = spend(ctx, logits)
    d_input, d_weight, d_bias, d_states, d_factor = linear_heads.rows_backward(
        *coefficients,
        *head,
        *ctx.shard.local(target, class_weight),
        statistics.maximum,
        statistics.sumexp,
        input.new_empty(0) if saved is None else saved[0],
        *ctx.options[:2],
        True,
        ctx.chunk,
        *(needed if saved is None else (False,) * TENSORS),
        ctx.backend,
    )
    if saved is not None:
        rows = head.rows_in(saved[0].view(input.dtype), len(input), len(weight))[:, : len(weight)]
        if to_input:
            d_input = d_input.new_empty(len(rows), input.shape[1])
            multiply_blocks(rows, weight, d_input, head.invariant)
    if to_input:
        rest = (ctx.shard, input.dtype, head.invariant, ctx.scattered)
        sum_of_ranks = sum_of_rows(d_input[:tokens], *rest)
    if saved is not None:
        dlogits = rows[: len(input)]
        if to_weight:  # while the ranks add up the gradient of the hidden states
            multiply = matmul_during_collective if to_input else torch.mm
            d_weight = multiply(dlogits.T, counted_states(input, coefficients.counts(), d_weight))
        if to_bias and bias is not None:
            d_bias = dlogits.sum(0, dtype=statistics.nll.dtype).to(bias.dtype)
        low_rank = LowRankGradients(head.rounded, needed)
        everything = slice(0, len(input)), slice(0, len(weight))
        low_rank.start(everything[0], lambda _: coefficients.counts())
        low_rank.add(rows, *everything)
        if factor is not None and low_rank.dweight is not None:
            d_factor = low_rank.dweight.to(factor.dtype)
        d_states = d_states if low_rank.dinput is None else low_rank.dinput
    if to_input:
        d_input = sum_of_ranks()
    if to_states and states is not None:
        rest = (ctx.shard, states.dtype, head.invariant, ctx.scattered)
        d_states = sum_of_rows(d_states[:tokens], *rest)()
    return d_input, d_weight, d_bias, d_states, d_factor
