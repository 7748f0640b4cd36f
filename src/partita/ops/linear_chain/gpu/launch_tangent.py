"""Allocate results and launch the kernels for means over paths and their derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....runtime.launch import cdiv, launch
from . import plan
from .counts import linear_chain_sum_counts_kernel
from .covariances import (
    linear_chain_pair_covariances_kernel,
    linear_chain_state_covariances_kernel,
)
from .launch import linear_chain_logz
from .saved import end_strides, split_saved, transition_strides
from .tangent import (
    linear_chain_means_kernel,
    linear_chain_posteriors_kernel,
    linear_chain_rests_kernel,
)


def value_strides(values: Tensor, transitions: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of transition values over steps, sequences and both states."""
    if values.ndim == 3 and transitions.ndim == 2:
        return 0, values.stride(0), values.stride(1), values.stride(2)
    return transition_strides(values)


def linear_chain_tangent(
    grad_output: Tensor,
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    emission_values: Tensor,
    transition_values: Tensor,
    start_values: Tensor | None,
    end_values: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the mean of the values `[N]`, and its gradients weighted by grad_output, in fp64."""
    T, N, C = emissions.shape
    fp64: dict[str, Any] = {"dtype": torch.float64, "device": emissions.device}
    d_emissions, d_transitions = (
        torch.zeros(tensor.shape, **fp64) for tensor in (emissions, transitions)
    )
    d_start, d_end = (None if x is None else torch.zeros((N, C), **fp64) for x in (start, end))
    mean = torch.zeros(N, **fp64)
    if N and C:
        lengths = None if lengths is None else lengths.contiguous()
        exact = plan.is_exact(emissions, transitions)
        _, _, saved = linear_chain_logz(emissions, transitions, start, end, lengths, True)
        states, parts = split_saved(saved, T, N, C), plan.range_parts(transitions)
        logs, posteriors, sums, means, rests = torch.empty((5, T, N, C), **fp64).unbind()
        row_options = plan.row_options(C)
        programs = cdiv(T * N, row_options["ROWS"])
        launch(
            linear_chain_posteriors_kernel,
            programs,
            *(states.states, lengths, states.span, logs, posteriors, T, N, C, parts),
            BLOCK_PARTS=plan.parts_block(parts),
            **row_options,
        )
        steps = (*transition_strides(transitions), *value_strides(transition_values, transitions))
        ends = (*end_strides(start_values), *end_strides(end_values))
        options = {"EXACT": exact, **plan.tangent_options(C)}
        launch(
            linear_chain_means_kernel,
            N,
            *(transitions, emission_values, transition_values, start_values, end_values, lengths),
            *(logs, posteriors, sums, means, mean, T, N, C, *steps),
            *(*emission_values.stride(), *ends),
            **options,
        )
        launch(
            linear_chain_rests_kernel,
            N,
            *(transitions, emission_values, transition_values, end_values, lengths),
            *(logs, posteriors, sums, rests, T, N, C, *steps),
            *(*emission_values.stride(), *ends[2:]),
            **options,
        )
        launch(
            linear_chain_state_covariances_kernel,
            programs,
            *(grad_output, emission_values, lengths, posteriors, means, rests, mean),
            *(d_emissions, d_start, d_end, T, N, C, grad_output.stride(0)),
            *emission_values.stride(),
            **row_options,
        )
        tensors = (logs, posteriors, sums, means, rests, mean)
        inputs = (grad_output, transitions, transition_values, lengths, *tensors)
        pair_covariances(inputs, steps, d_transitions, T, exact)
    empty = emissions.new_empty(0, dtype=torch.float64)
    return (
        mean,
        d_emissions,
        d_transitions,
        empty if d_start is None else d_start,
        emissions.new_empty(0, dtype=torch.float64) if d_end is None else d_end,
    )


def pair_covariances(
    inputs: tuple[Tensor | None, ...],
    steps: tuple[int, ...],
    result: Tensor,
    T: int,
    exact: bool,
) -> None:
    """Compute the gradient in the transitions.

    Args:
        inputs: the tensors that the kernel reads, in its order.
        steps: the strides of the transitions and of their values.
        result: fp64, in the shape of the transitions.
        T: the number of tokens.
        exact: whether exponentials have to be right in fp64.
    """
    grad_output = inputs[0]
    assert grad_output is not None
    N, C, constant = len(grad_output), result.shape[-1], result.ndim == 2
    groups = plan.count_groups(result, T, N, False)
    if groups.total == 0 or not result.numel():
        return
    parts = result
    if constant:
        shape = (groups.groups, groups.splits, C, C)
        parts = torch.empty(shape, dtype=torch.float64, device=result.device)
    options = plan.count_options(C)
    launch(
        linear_chain_pair_covariances_kernel,
        groups.groups * groups.splits * cdiv(C, options["BLOCK"]) ** 2,
        *(*inputs, parts, T, N, C, groups.splits, grad_output.stride(0), *steps, *groups[2:]),
        EXACT=exact,
        **options,
    )
    if constant:
        options = plan.sum_options(groups.splits, C)
        # Without parts of a range the counts are not multiplied by exp(transitions).
        launch(
            linear_chain_sum_counts_kernel,
            groups.groups * cdiv(C * C, options["BLOCK"]),
            *(result, parts, parts, result, C, 0, groups.splits, *result.stride()),
            BLOCK_PARTS=1,
            **options,
        )
