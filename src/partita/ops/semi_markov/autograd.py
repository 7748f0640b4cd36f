"""The registered ops of semi-Markov chains and the autograd function of log Z."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import (
    first_derivative,
    for_gradients,
    is_double_backward,
    needed_gradients,
    one_by_one,
    saved_tensors,
    skip_unused_gradients,
    sum_of_gradients,
)
from . import fakes, reference, reference_paths


def check_values(emissions: Tensor, lengths: Tensor | None) -> None:
    """Raise for a length that is out of range, where values are checked."""
    if lengths is not None:
        checks.within("lengths", lengths, 1, emissions.shape[0], "steps")


def _cpu() -> tuple[ModuleType, ...]:
    from .cpu import logz, paths

    return logz, paths


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


def _gpu_paths() -> ModuleType:
    from .gpu import launch_paths

    return launch_paths


# It returns log Z [N] fp64, the same in the dtype of results, and what its gradient needs.
logz = register.define(
    reference.semi_markov_logz,
    fakes.fake_logz,
    gpu=_gpu,
    cpu=_cpu,
    check=check_values,
    vmap=one_by_one,
    reference_if_empty=True,
)
# It returns the gradients of sum(grad_output * log Z) in emissions, transitions, durations, start
# and end.
gradient = register.define(
    reference.semi_markov_gradient,
    fakes.fake_gradient,
    gpu=_gpu,
    cpu=_cpu,
    vmap=one_by_one,
)

# It returns the posterior probabilities of segments, [T, D, N, C].
segments = register.define(
    reference.semi_markov_segments,
    fakes.fake_segments,
    gpu=_gpu,
    cpu=_cpu,
    vmap=one_by_one,
    reference_if_empty=True,
)
# It returns the best score [N], and the states and starts of the best path, [T, N].
viterbi = register.define(
    reference_paths.semi_markov_viterbi,
    fakes.fake_viterbi,
    gpu=_gpu_paths,
    cpu=_cpu,
    check=check_values,
    vmap=one_by_one,
    reference_if_empty=True,
)
# It takes uniform numbers [T, 2, k, N] fp64 and returns states and starts [k, T, N].
sample = register.define(
    reference_paths.semi_markov_sample,
    fakes.fake_sample,
    gpu=_gpu_paths,
    cpu=_cpu,
    check=check_values,
    vmap=one_by_one,
    reference_if_empty=True,
)

VARIABLES = 5  # of a chain: all of its tensors but the lengths


class LogZ(torch.autograd.Function):
    """Log Z of each sequence, `[N]`, in fp64 and in the dtype of results."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        emissions: Tensor,
        transitions: Tensor,
        durations: Tensor,
        start: Tensor,
        end: Tensor,
        lengths: Tensor | None,
        save: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        chain = (emissions, transitions, durations, start, end, lengths)
        return logz(*chain, save, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _, ctx.backend = inputs
        fp64, _, saved = output
        ctx.mark_non_differentiable(saved)
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*tensors, fp64, saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output = sum_of_gradients(*grads[:2])
        if grad_output is None:
            return (None,) * 8
        tensors = saved_tensors(ctx)
        results = differentiable_gradient(grad_output, *tensors, False, ctx.backend)
        needed = zip(results, needed_gradients(ctx, *tensors[:5]), strict=True)
        return *(grad if need else None for grad, need in needed), None, None, None


def differentiable_gradient(grad_output: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the results of `gradient`, differentiable in `grad_output` and the chain.

    Their derivative is that of the reference. A compiled call that needs it runs the reference.
    """
    *tensors, per_sequence, backend = args
    op = for_gradients(gradient, grad_output)
    return _differentiable(
        lambda *tensors: op(*tensors, per_sequence, backend),
        partial(reference.semi_markov_gradient, per_sequence=per_sequence),
        1 + VARIABLES,
        (grad_output, *tensors),
    )


def differentiable_segments(*args: Any) -> Tensor:
    """Return the results of `segments`, differentiable in the chain as the gradient is."""
    *tensors, backend = args
    return _differentiable(
        lambda *tensors: segments(*tensors, backend),
        reference.semi_markov_segments,
        VARIABLES,
        tuple(tensors),
    )


def _differentiable(op: Any, specification: Any, variables: int, tensors: tuple[Any, ...]) -> Any:
    if torch.compiler.is_compiling():
        followed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors[:variables])
        return (specification if followed else op)(*tensors)
    if not is_double_backward(*tensors[:variables]):
        return op(*tensors)
    return first_derivative(op, specification, variables, *tensors)
