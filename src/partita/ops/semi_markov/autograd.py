"""The registered ops of semi-Markov chains and the autograd function of log Z."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...paths.autograd import best_paths_of, log_partitions_of, ones, save_log_partition
from ...runtime import checks, register
from ...runtime.autograd import (
    first_derivative,
    for_gradients,
    is_double_backward,
    needed_gradients,
    one_by_one,
    refuse_forward_mode,
    saved_tensors,
    sum_of_gradients,
    takes,
)
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from . import reference
from .common import SemiMarkovPotentials
from .gpu import plan


def check_values(emissions: Tensor, lengths: Tensor | None) -> None:
    """Raise for a length that is out of range, where values are checked."""
    if lengths is not None:
        checks.within("lengths", lengths, 1, emissions.shape[0], "steps")


def _cpu() -> ModuleType:
    from . import cpu

    return cpu


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


def _logz_results(emissions: Tensor, save: bool, served_by: str) -> tuple[Tensor, Tensor, Tensor]:
    T, N, C = emissions.shape
    tensors = {"reference": 0, "gpu": 4, "cpu": 2}[served_by] if save else 0
    return (
        emissions.new_empty(N, dtype=torch.float64),
        emissions.new_empty(N, dtype=acc_dtype(emissions.dtype)),
        emissions.new_empty((tensors, T, N, C) if tensors else (0,), dtype=torch.float64),
    )


def _gradient_results(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    per_sequence: bool,
) -> tuple[Tensor, ...]:
    N, dtype = emissions.shape[1], acc_dtype(emissions.dtype)
    shared = (
        emissions.new_empty((N, *scores.shape), dtype=dtype)
        if per_sequence
        else scores.new_empty(scores.shape)
        for scores in (transitions, durations)
    )
    emissions, start, end = (x.new_empty(x.shape) for x in (emissions, start, end))
    return emissions, *shared, start, end


_define = partial(register.define, gpu=_gpu, cpu=_cpu, vmap=one_by_one)
_checked = partial(_define, check=check_values, reference_if_empty=True)
logz = _checked(reference.semi_markov_logz, _logz_results)
gradient = _define(reference.semi_markov_gradient, _gradient_results)
segments = _define(
    reference.semi_markov_segments,
    lambda emissions, durations: emissions.new_empty(
        (len(emissions), len(durations), *emissions.shape[1:]), dtype=acc_dtype(emissions.dtype)
    ),
    reference_if_empty=True,
)
viterbi = _checked(
    reference.semi_markov_viterbi,
    lambda emissions: (
        emissions.new_empty(emissions.shape[1], dtype=acc_dtype(emissions.dtype)),
        emissions.new_empty(emissions.shape[:2], dtype=torch.int64),
        emissions.new_empty(emissions.shape[:2], dtype=torch.bool),
    ),
)
best_paths = _checked(
    reference.semi_markov_nbest,
    lambda emissions, k: (
        emissions.new_empty((k, emissions.shape[1]), dtype=torch.float64),
        emissions.new_empty((k, *emissions.shape[:2]), dtype=torch.int64),
        emissions.new_empty((k, *emissions.shape[:2]), dtype=torch.bool),
    ),
)
sample = _checked(
    reference.semi_markov_sample,
    lambda emissions, uniforms: tuple(
        emissions.new_empty((uniforms.shape[2], *emissions.shape[:2]), dtype=dtype)
        for dtype in (torch.int64, torch.bool)
    ),
)

VARIABLES = 5  # of a chain: all of its tensors but the lengths


class LogZ(torch.autograd.Function):
    """Log Z of each sequence, `[N]`, in fp64 and in the dtype of results."""

    generate_vmap_rule = True
    setup_context = staticmethod(save_log_partition)

    @staticmethod
    @takes(logz)
    def forward(*args: Any) -> Any:
        return logz(*args)

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
        1,
        (grad_output, *tensors),
    )


def differentiable_segments(*args: Any) -> Tensor:
    """Return the results of `segments`, differentiable in the chain as the gradient is."""
    *tensors, backend = args
    return _differentiable(
        lambda *tensors: segments(*tensors, backend),
        reference.semi_markov_segments,
        0,
        tuple(tensors),
    )


def _differentiable(op: Any, reference: Any, before: int, tensors: tuple[Any, ...]) -> Any:
    """Return the results of an op whose derivative is that of the reference.

    There are `before` tensors before the chain, in which the op is differentiable too.
    """
    variables = before + VARIABLES

    def specification(*tensors: Any) -> Any:
        chain = SemiMarkovPotentials(*tensors[before : variables + 1])
        return reference(*tensors[:before], chain, *tensors[variables + 1 :])

    if torch.compiler.is_compiling():
        followed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors[:variables])
        return (specification if followed else op)(*tensors)
    if not is_double_backward(*tensors[:variables]):
        return op(*tensors)
    return first_derivative(op, specification, variables, *tensors)


def marginals(chain: SemiMarkovPotentials) -> tuple[Tensor, ...]:
    """Return the gradients of log Z of each sequence, which are differentiable.

    They are those in emissions, transitions `[N, C, C]`, durations `[N, D, C]`, start and end.
    """
    args, backend = _posterior_arguments(chain), current_backend()
    return differentiable_gradient(ones(chain.emissions), *args, True, backend)


def segment_marginals(chain: SemiMarkovPotentials) -> Tensor:
    """Return the posterior probabilities of segments, `[T, D, N, C]`, which are differentiable."""
    return differentiable_segments(*_posterior_arguments(chain), current_backend())


def _posterior_arguments(chain: SemiMarkovPotentials) -> tuple[Tensor | None, ...]:
    """Return the chain, its log Z, and what that saves for posteriors."""
    refuse_forward_mode(*chain)
    with torch.no_grad():
        fp64, _, saved = logz(*chain, True, current_backend())
    return *chain, fp64, saved


log_partitions = partial(log_partitions_of, logz, LogZ)


def best_path(chain: SemiMarkovPotentials) -> tuple[Tensor, ...]:
    """Return the best score, the states and the starts of segments of each sequence."""
    return viterbi(*chain, current_backend())


def nbest(chain: SemiMarkovPotentials, k: int) -> tuple[Tensor, ...]:
    """Return the scores, states and starts of the k best paths."""
    backend = current_backend()
    has_kernel = not chain.emissions.is_cpu or backend == "triton"
    if has_kernel and plan.nbest_options(chain.emissions.shape[2], len(chain.durations), k):
        return best_paths(*chain, k, backend)
    return best_paths_of(best_paths, reference.semi_markov_nbest, check_values, chain, k)


def draw(chain: SemiMarkovPotentials, k: int, uniform: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """Return the states and starts of k paths, drawn by the numbers of `uniform(*shape)`."""
    T, N, _ = chain.emissions.shape
    return sample(*chain, uniform(T, 2, k, N), current_backend())


def mean_and_log_partition(
    chain: SemiMarkovPotentials, values: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Return the mean of the sum of values along a path, and log Z, `[N]` fp64.

    0 times ±inf is 0.
    """
    emissions, *counts = marginals(chain)
    posteriors = (emissions.transpose(0, 1), *counts)  # [N, ...]
    values = (values[0].transpose(0, 1), *values[1:])
    means = (
        (posterior * torch.where(posterior == 0, 0.0, value)).flatten(1).sum(1)
        for posterior, value in zip(posteriors, values, strict=True)
    )
    return torch.stack([*means]).sum(0), log_partitions(chain)[0]
