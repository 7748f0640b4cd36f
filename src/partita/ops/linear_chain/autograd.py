"""The registered ops of dense linear chains and their autograd functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import (
    apply,
    double_backward,
    for_gradients,
    is_batched_gradient,
    is_double_backward,
    is_vmapped,
    needed_gradients,
    one_by_one,
    requires_grad,
    saved_tensors,
    skip_unused_gradients,
    sum_of_gradients,
)
from ...runtime.constants import scalar
from . import fakes, reference, reference_tangent
from .common import HAS_KERNELS
from .paths import path_indicator


def check_values(emissions: Tensor, lengths: Tensor | None) -> None:
    """Raise for a length that is out of range, where values are checked."""
    if lengths is not None:
        checks.within("lengths", lengths, 1, emissions.shape[0], "tokens")


def _cpu() -> ModuleType:
    from .cpu import dense

    return dense


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch if HAS_KERNELS else reference


def _gpu_paths() -> ModuleType:
    from .gpu import launch_paths

    return launch_paths if HAS_KERNELS else reference


def _gpu_tangent() -> ModuleType:
    from .gpu import launch_tangent

    return launch_tangent if HAS_KERNELS else reference_tangent


# It returns log Z [N] fp64, the same in the dtype of results, and what its gradient needs.
logz = register.define(
    reference.linear_chain_logz,
    fakes.fake_logz,
    gpu=_gpu,
    cpu=_cpu,
    check=check_values,
    reference_if_empty=True,
    vmap=one_by_one,
)
# It returns the gradients of sum(grad_output * log Z) in emissions, transitions, start and end.
logz_gradient = register.define(
    reference.linear_chain_gradient,
    fakes.fake_gradient,
    gpu=_gpu,
    cpu=_cpu,
    vmap=one_by_one,
)

# It returns the best score [N] and the states of the best path [T, N].
viterbi = register.define(
    reference.linear_chain_viterbi,
    fakes.fake_viterbi,
    gpu=_gpu_paths,
    cpu=_cpu,
    check=check_values,
    reference_if_empty=True,
    vmap=one_by_one,
)
# It serves the CPU. On a GPU the k best paths are found by the reference.
best_paths = register.define(
    reference.linear_chain_nbest,
    fakes.fake_nbest,
    gpu=lambda: reference,
    cpu=_cpu,
    check=check_values,
    reference_if_empty=True,
    vmap=one_by_one,
)
# It takes uniform numbers [T, k, N] fp64 and returns states [k, T, N].
sample = register.define(
    reference.linear_chain_sample,
    fakes.fake_sample,
    gpu=_gpu_paths,
    cpu=_cpu,
    check=check_values,
    reference_if_empty=True,
    vmap=one_by_one,
)
# It returns the derivative of log Z in the direction of the values [N], and the derivative in that
# direction of the gradients of sum(grad_output * log Z), all in fp64.
tangent = register.define(
    reference_tangent.linear_chain_tangent,
    fakes.fake_tangent,
    gpu=_gpu_tangent,
    cpu=_cpu,
    vmap=one_by_one,
)


class LogZ(torch.autograd.Function):
    """Log Z of each sequence, `[N]`, in fp64 and in the dtype of results."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        emissions: Tensor,
        transitions: Tensor,
        start: Tensor | None,
        end: Tensor | None,
        lengths: Tensor | None,
        save: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return logz(emissions, transitions, start, end, lengths, save, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _, ctx.backend = inputs
        fp64, _, saved = output
        ctx.mark_non_differentiable(saved)
        # Zeros for the gradient of `saved` would take as much memory as `saved`.
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*tensors, fp64, saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output = sum_of_gradients(*grads[:2])
        if grad_output is None:
            return (None,) * 7
        tensors = saved_tensors(ctx)
        needed = needed_gradients(ctx, *tensors[:4])
        results = _logz_gradients(grad_output, *tensors, needed[1], False, ctx.backend)
        pairs = zip(results, needed, strict=True)
        return *(grad if need else None for grad, need in pairs), None, None, None


def _logz_gradients(grad_output: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    """Return the results of `logz_gradient`, which may be differentiated again."""
    variables, lengths = args[:4], args[4]
    results: tuple[Tensor | None, ...]
    if not is_double_backward(grad_output, *variables):
        results = for_gradients(logz_gradient, grad_output)(grad_output, *args)
    elif is_vmapped() or is_batched_gradient(grad_output):
        # PyTorch loses the derivative of a function that is applied to batched gradients.
        results = double_backward(
            lambda a, b, c, d: reference.linear_chain_logz(a, b, c, d, lengths, False)[0],
            variables,
            [requires_grad(variable) for variable in variables],
            grad_output.double(),
        )
    else:
        results = apply(Marginals, grad_output, *args)
    return results


class Marginals(torch.autograd.Function):
    """The gradient of log Z, which can be differentiated again.

    Its product with values is their posterior mean, so its gradient is the gradient of that mean.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_output: Tensor,
        emissions: Tensor,
        transitions: Tensor,
        start: Tensor | None,
        end: Tensor | None,
        lengths: Tensor | None,
        logz: Tensor,
        saved: Tensor,
        need_transitions: bool,
        per_sequence: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        chain = (emissions, transitions, start, end, lengths)
        return logz_gradient(
            grad_output, *chain, logz, saved, need_transitions, per_sequence, backend
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _, _, ctx.need_transitions, ctx.per_sequence, ctx.backend = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *values: Tensor) -> tuple[Any, ...]:
        grad_output, *chain = saved_tensors(ctx)
        *scores, lengths = chain
        _, transitions, start, end = scores
        variables = (grad_output, *scores)
        if is_double_backward(*variables, *values):
            present = (True, ctx.need_transitions, start is not None, end is not None)

            def gradients(*variables: Any) -> list[Tensor]:
                # The reference reads neither log Z nor what was saved.
                unread = (variables[0], variables[0])
                args: Any = (*variables, lengths, *unread, ctx.need_transitions, ctx.per_sequence)
                found = reference.linear_chain_gradient(*args)
                return list(itertools.compress(found, present))

            upstream = list(itertools.compress(values, present))
            results = double_backward(gradients, variables, ctx.needs_input_grad[:5], upstream)
            return *results, *(None,) * 6
        emission_values, transition_values, start_values, end_values = values
        directions = (
            emission_values,
            transition_values if ctx.need_transitions else _zeros_like(transitions),
            None if start is None else start_values,
            None if end is None else end_values,
        )
        op = for_gradients(tangent, *values)
        mean, *results = op(grad_output, *chain, *directions, ctx.backend)
        return mean.to(grad_output.dtype), *_gradients(scores, results), *(None,) * 6


class Expectation(torch.autograd.Function):
    """The posterior mean of values along a path, `[N]` fp64."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        emissions: Tensor,
        transitions: Tensor,
        start: Tensor | None,
        end: Tensor | None,
        lengths: Tensor | None,
        emission_values: Tensor,
        transition_values: Tensor,
        start_values: Tensor | None,
        end_values: Tensor | None,
        backend: str,
    ) -> Tensor:
        chain = (emissions, transitions, start, end, lengths)
        values = (emission_values, transition_values, start_values, end_values)
        return tangent(_ones(emissions), *chain, *values, backend)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.backend = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_output, tensors = grads[0], saved_tensors(ctx)
        chain, values = tensors[:5], tensors[5:]
        needed = needed_gradients(ctx, *tensors)
        if is_double_backward(grad_output, *tensors):
            results = double_backward(
                reference_tangent.expected_value, tensors, needed[:9], grad_output
            )
            return *results, None
        d_scores: tuple[Tensor | None, ...] = (None,) * 4
        d_values: tuple[Tensor | None, ...] = (None,) * 4
        if any(needed[:4]):
            op = for_gradients(tangent, grad_output)
            d_scores = op(grad_output, *chain, *values, ctx.backend)[1:]
        if any(needed[5:9]):
            d_values = _value_gradients(ctx, grad_output, chain, values)
        return *_gradients(chain[:4], d_scores), None, *_gradients(values, d_values), None


def _value_gradients(
    ctx: Any, grad_output: Tensor, chain: tuple[Any, ...], values: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the mean in the values, which are those of log Z in the scores."""
    emissions, transitions, start, end, lengths = chain
    # A value may belong to an end that has no scores, and to one sequence.
    zeros = _zeros_like(emissions[0])
    ends = (zeros if end is None else end for end in (start, end))
    full = (emissions, transitions, *ends, lengths)
    per_sequence = values[1].ndim == 3 and transitions.ndim == 2
    fp64, _, saved = logz(*full, True, ctx.backend)
    op, need = for_gradients(logz_gradient, grad_output), needed_gradients(ctx, *chain, *values)[6]
    results: tuple[Tensor, ...] = op(
        grad_output, *full, fp64, saved, need, per_sequence, ctx.backend
    )
    return results


def _gradients(tensors: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> list[Any]:
    """Return the gradients in the dtypes of their tensors, None where there is no tensor."""
    return [
        None
        if tensor is None or grad is None or grad.shape != tensor.shape
        else grad.to(tensor.dtype)
        for tensor, grad in zip(tensors, grads, strict=True)
    ]


def _ones(emissions: Tensor) -> Tensor:
    return scalar(1.0, torch.float64, emissions.device).expand(emissions.shape[1])


def _zeros_like(tensor: Tensor) -> Tensor:
    """Return zeros of the shape of a tensor without memory of that size."""
    return scalar(0.0, tensor.dtype, tensor.device).expand(tensor.shape)


class BestScore(torch.autograd.Function):
    """The best score of each sequence, `[N]`; its gradient is the indicator of the best path."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        emissions: Tensor,
        transitions: Tensor,
        start: Tensor | None,
        end: Tensor | None,
        lengths: Tensor | None,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        return viterbi(emissions, transitions, start, end, lengths, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        emissions, transitions, start, end, lengths, _ = inputs
        score, states = output
        ctx.mark_non_differentiable(states)
        skip_unused_gradients(ctx)
        ctx.likes = [
            None if t is None else (t.shape, t.dtype) for t in (emissions, transitions, start, end)
        ]
        ctx.save_for_backward(score, states, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output = grads[0]
        if grad_output is None:
            return (None,) * 6
        score, states, lengths = saved_tensors(ctx)
        return *path_indicator(grad_output, score, states, lengths, ctx.likes), None, None
