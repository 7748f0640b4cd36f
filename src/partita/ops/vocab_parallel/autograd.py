"""The registered ops of losses over a sharded vocabulary, and their autograd functions.

Each rank computes the packed state of its classes. The states are gathered once, and every rank
merges them into the same statistics, bit for bit.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import register
from ...runtime.autograd import spend
from ...runtime.dtypes import acc_dtype
from ..linear_heads import autograd as linear_heads
from ..linear_heads.common import GradientCoefficients, RowStatistics, counted_states
from ..linear_heads.plan import padded_width
from . import reference
from .common import packed_size
from .matmul import matmul_during_collective, matmul_in_acc_dtype
from .shard import (
    VocabShard,
    gather_ranks,
    refuse_second_derivative,
    sum_and_scatter,
    sum_over_ranks,
    wait_for,
)


class ParallelRowOptions(NamedTuple):
    """The options of the statistics of rows.

    Fields:
        temperature: the logits are divided by it after the soft-cap.
        softcap: bound of the logits, 0 for none.
        ignore_index: the label of rows that do not count.
        smoothing: whether the smoothing loss is computed.
        entropy: whether entropy and argmax are computed.
    """

    temperature: float
    softcap: float
    ignore_index: int
    smoothing: bool
    entropy: bool


def _packed_fake(like: Tensor, smoothing: bool, entropy: bool) -> Tensor:
    size = (packed_size(smoothing, entropy), like.shape[0])
    return like.new_empty(size, dtype=acc_dtype(like.dtype))


def _logits_fake(logits: Tensor, smoothing: bool, entropy: bool) -> Tensor:
    return _packed_fake(logits, smoothing, entropy)


def _linear_fake(
    input: Tensor, weight: Tensor, smoothing: bool, entropy: bool, save_logits: bool
) -> tuple[Tensor, Tensor]:
    saved = input.shape[0] * padded_width(weight.shape[0]) if save_logits else 0
    return _packed_fake(input, smoothing, entropy), input.new_empty(saved)


def _fields_fake(gathered: Tensor, smoothing: bool, entropy: bool) -> tuple[Tensor, ...]:
    M = gathered.shape[2]
    per_entropy = M if entropy else 0
    sizes = (M, M, M if smoothing else 0, per_entropy, per_entropy, M, M)
    return tuple(
        gathered.new_empty(size, dtype=torch.int64 if i == 4 else gathered.dtype)
        for i, size in enumerate(sizes)
    )


def _coefficients_fake(
    target: Tensor,
    grad_nll: Tensor | None,
    grad_logsumexp: Tensor | None,
    grad_smoothing: Tensor | None,
    grad_entropy: Tensor | None,
    entropies: Tensor,
    smoothing: bool,
) -> tuple[Tensor, ...]:
    grads = (grad_nll, grad_logsumexp, grad_smoothing, grad_entropy)
    like = next(grad for grad in grads if grad is not None)
    M = target.shape[0]
    has_log_coef = grad_entropy is not None and entropies.numel() > 0
    has_smoothing_coef = grad_smoothing is not None and smoothing
    sizes = (M, M, M if has_log_coef else 0, M if has_smoothing_coef else 0)
    return tuple(like.new_empty(size) for size in sizes)


def _gradient_fake(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


parallel_logits = register.define(
    reference.parallel_logits,
    _logits_fake,
    name="parallel_logits",
    gpu=_gpu,
)
parallel_linear = register.define(
    reference.parallel_linear,
    _linear_fake,
    name="parallel_linear",
    gpu=_gpu,
)
parallel_fields = register.define(
    reference.parallel_fields,
    _fields_fake,
    gpu=_gpu,
)
parallel_coefficients = register.define(
    reference.parallel_coefficients,
    _coefficients_fake,
    gpu=_gpu,
)
parallel_gradient = register.define(
    reference.parallel_gradient,
    _gradient_fake,
    name="parallel_gradient",
    gpu=_gpu,
)
parallel_gradient_ = register.define(
    reference.parallel_gradient_,
    lambda: None,
    name="parallel_gradient_",
    gpu=_gpu,
    mutates="logits",
)


def merged_statistics(
    packed: Tensor, target: Tensor, shard: VocabShard, options: ParallelRowOptions, backend: str
) -> RowStatistics:
    """Gather the packed states, and merge them into the statistics of the rows."""
    fields = parallel_fields(
        gather_ranks(packed, shard),
        target,
        shard.classes,
        shard.first_class,
        shard.rank,
        options.temperature,
        options.ignore_index,
        options.smoothing,
        options.entropy,
        backend,
    )
    return RowStatistics(*fields)


def _coefficients(
    grads: tuple[Tensor | None, ...],
    target: Tensor,
    class_weight: Tensor | None,
    statistics: RowStatistics,
    shard: VocabShard,
    options: ParallelRowOptions,
    backend: str,
) -> GradientCoefficients:
    """Return the coefficients of each row's gradient from the gradients of its statistics."""
    dlogits_coef, label_coef, log_coef, smoothing_coef = parallel_coefficients(
        target,
        *grads[:4],
        class_weight,
        statistics.entropy,
        options.smoothing,
        shard.classes,
        options.temperature,
        options.ignore_index,
        backend,
    )
    return GradientCoefficients(
        dlogits_coef,
        label_coef,
        log_coef if log_coef.numel() else None,
        smoothing_coef if smoothing_coef.numel() else None,
    )


class LogitsStatistics(torch.autograd.Function):
    """The `RowStatistics` of rows of logits, from the classes of all ranks.

    The first four are differentiable in this rank's logits.
    """

    @staticmethod
    def forward(
        logits: Tensor,
        target: Tensor,
        class_weight: Tensor | None,
        shard: VocabShard,
        options: ParallelRowOptions,
        backend: str,
    ) -> tuple[Tensor, ...]:
        packed = parallel_logits(
            logits,
            target - shard.first_class,
            shard.local_weight(class_weight),
            shard.first_class,
            options.temperature,
            options.softcap,
            options.smoothing,
            options.entropy,
            backend,
        )
        return merged_statistics(packed, target, shard, options, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.shard, ctx.options, ctx.backend = inputs
        ctx.mark_non_differentiable(*output[4:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        logits, target, class_weight, *outputs = ctx.saved_tensors
        refuse_second_derivative()
        if all(grad is None for grad in grads[:4]):
            return (None,) * 6
        options, shard, statistics = ctx.options, ctx.shard, RowStatistics(*outputs)
        coefficients = _coefficients(
            grads, target, class_weight, statistics, shard, options, ctx.backend
        )
        dlogits = parallel_gradient(
            *coefficients,
            logits,
            target - shard.first_class,
            shard.local_weight(class_weight),
            statistics.maximum,
            statistics.sumexp,
            options.temperature,
            options.softcap,
            ctx.backend,
        )
        return dlogits, None, None, None, None, None


class HiddenStatistics(torch.autograd.Function):
    """The `RowStatistics` of hidden states times a matrix, from the classes of all ranks.

    The first four are differentiable in the hidden states and in this rank's rows of the matrix.
    The gradient of the hidden states is complete on every rank. With `scattered` each rank has some
    of the tokens, and its gradient is that of its own tokens.
    """

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        shard: VocabShard,
        options: ParallelRowOptions,
        chunk: int,
        save_logits: bool,
        scattered: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        if scattered:
            input = gather_ranks(input, shard).flatten(0, 1)
        packed, saved_logits = parallel_linear(
            input,
            weight,
            bias,
            target - shard.first_class,
            shard.local_weight(class_weight),
            shard.first_class,
            options.temperature,
            options.softcap,
            options.smoothing,
            options.entropy,
            chunk,
            save_logits,
            backend,
        )
        return *merged_statistics(packed, target, shard, options, backend), saved_logits

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        (
            *tensors,
            ctx.shard,
            ctx.options,
            ctx.chunk,
            save_logits,
            ctx.scattered,
            ctx.backend,
        ) = inputs
        ctx.mark_non_differentiable(*output[4:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        target, class_weight, *outputs, logits = ctx.saved_tensors[3:]
        refuse_second_derivative("matrix")
        if all(grad is None for grad in grads[:4]):  # the same on all ranks
            return (None,) * 11
        statistics = RowStatistics(*outputs)
        coefficients = _coefficients(
            grads, target, class_weight, statistics, ctx.shard, ctx.options, ctx.backend
        )
        saved = spend(ctx, logits)
        if saved is None:
            results = _recomputed_gradients(ctx, coefficients, statistics)
        else:
            results = _saved_gradients(ctx, saved[0], coefficients, statistics)
        needed = zip(results, ctx.needs_input_grad[:3], strict=True)
        return *(grad if needs_grad else None for grad, needs_grad in needed), *(None,) * 8


def _all_hidden(ctx: Any, input: Tensor) -> Tensor:
    """Return the hidden states of all tokens."""
    return gather_ranks(input, ctx.shard).flatten(0, 1) if ctx.scattered else input


def _start_hidden_sum(ctx: Any, d_input: Tensor) -> Tensor:
    """Start the sum of the hidden states' gradient over the ranks."""
    return (sum_and_scatter if ctx.scattered else sum_over_ranks)(d_input, ctx.shard)


def _recomputed_gradients(
    ctx: Any, coefficients: GradientCoefficients, statistics: RowStatistics
) -> tuple[Tensor, ...]:
    """Compute the logits again, chunk by chunk, and return the gradients of `HiddenStatistics`."""
    input, weight, bias, target, class_weight = ctx.saved_tensors[:5]
    input = _all_hidden(ctx, input)
    d_input, d_weight, d_bias = linear_heads.rows_backward(
        *coefficients,
        input,
        weight,
        bias,
        target - ctx.shard.first_class,
        ctx.shard.local_weight(class_weight),
        statistics.maximum,
        statistics.sumexp,
        input.new_empty(0),  # no saved logits
        ctx.options.temperature,
        ctx.options.softcap,
        ctx.chunk,
        *ctx.needs_input_grad[:3],
        ctx.backend,
    )
    if ctx.needs_input_grad[0]:
        summed = _start_hidden_sum(ctx, d_input.to(statistics.nll.dtype))
        d_input = wait_for(summed).to(input.dtype)
    return d_input, d_weight, d_bias


def _saved_gradients(
    ctx: Any,
    saved_logits: Tensor,
    coefficients: GradientCoefficients,
    statistics: RowStatistics,
) -> tuple[Tensor, ...]:
    """Overwrite the saved logits by their gradient, and return those of `HiddenStatistics`."""
    input, weight, bias, target, class_weight = ctx.saved_tensors[:5]
    to_input, to_weight, to_bias = ctx.needs_input_grad[:3]
    input = _all_hidden(ctx, input)
    dlogits = saved_logits.view(len(input), padded_width(len(weight)))[:, : len(weight)]
    parallel_gradient_.eager(
        dlogits,
        *coefficients,
        target - ctx.shard.first_class,
        ctx.shard.local_weight(class_weight),
        statistics.maximum,
        statistics.sumexp,
        ctx.options.temperature,
        ctx.options.softcap,
        ctx.backend,
    )
    d_input = d_weight = d_bias = input.new_empty(0)
    if to_input:
        d_input = _start_hidden_sum(ctx, matmul_in_acc_dtype(dlogits, weight))
    if to_weight:  # while the ranks add up the gradient of the hidden states
        multiply = matmul_during_collective if to_input else torch.mm
        states = counted_states(input, coefficients.counts(), d_weight)
        d_weight = multiply(dlogits.T, states)
    if to_bias and bias is not None:
        d_bias = dlogits.sum(0, dtype=statistics.nll.dtype).to(bias.dtype)
    if to_input:
        d_input = wait_for(d_input).to(input.dtype)
    return d_input, d_weight, d_bias
