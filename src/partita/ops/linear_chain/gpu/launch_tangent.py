"""Allocate results and launch the kernels for means over paths and their derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....primitives.gpu.target import target_of
from ....runtime.launch import cdiv, launch
from . import plan
from .arguments import Gradients, Span, StridedSteps, batch_of, split_saved, strided_steps
from .launch import linear_chain_logz, sum_counts
from .tangent import (
    linear_chain_means_kernel,
    linear_chain_pair_covariances_kernel,
    linear_chain_posteriors_kernel,
    linear_chain_rests_kernel,
    linear_chain_state_covariances_kernel,
)


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
        _, _, saved = linear_chain_logz(emissions, transitions, start, end, lengths, True)
        states = split_saved(saved, emissions, transitions)
        values = batch_of(emission_values, start_values, end_values, lengths)
        logs, posteriors, sums, means, rests = torch.empty((5, T, N, C), **fp64).unbind()
        row_options = plan.row_options(C)
        programs = cdiv(T * N, row_options["ROWS"])
        launch(
            linear_chain_posteriors_kernel,
            programs,
            states_ptr=states.states,
            lengths_ptr=values.lengths,
            span=states.span,
            logs_ptr=logs,
            posteriors_ptr=posteriors,
            **values.sizes,
            BLOCK_PARTS=plan.parts_block(states.span.parts),
            **row_options,
        )
        pair_values = strided_steps(transition_values)
        if transition_values.ndim == 3 and transitions.ndim == 2:  # of each sequence
            pair_values = StridedSteps(transition_values, 0, *transition_values.stride())
        arguments = {
            "transitions": strided_steps(transitions),
            "transition_values": pair_values,
            "logs_ptr": logs,
            "posteriors_ptr": posteriors,
            "sums_ptr": sums,
            "EXACT": plan.is_exact(emissions, transitions),
        }
        options = plan.tangent_options(C)
        launch(
            linear_chain_means_kernel,
            N,
            values=values,
            means_ptr=means,
            mean_ptr=mean,
            **arguments,
            **options,
        )
        values = values._replace(start=None)
        launch(linear_chain_rests_kernel, N, values=values, rests_ptr=rests, **arguments, **options)
        grad = {"grad_ptr": grad_output, "grad_n": grad_output.stride(0)}
        launch(
            linear_chain_state_covariances_kernel,
            programs,
            values=values._replace(end=None),
            posteriors_ptr=posteriors,
            means_ptr=means,
            rests_ptr=rests,
            mean_ptr=mean,
            gradients=Gradients(d_emissions, d_start, d_end),
            **grad,
            **row_options,
        )
        number, groups = plan.count_groups(transitions, T, N, False, target_of(means.device))
        constant = transitions.ndim == 2
        if groups.total and d_transitions.numel():
            parts = d_transitions
            if constant:
                parts = torch.empty((number, groups.splits, C, C), **fp64)
            options = plan.count_options(C)
            launch(
                linear_chain_pair_covariances_kernel,
                number * groups.splits * cdiv(C, options["BLOCK"]) ** 2,
                lengths_ptr=values.lengths,
                means_ptr=means,
                rests_ptr=rests,
                mean_ptr=mean,
                result_ptr=parts,
                groups=groups,
                **values.sizes,
                **grad,
                **arguments,
                **options,
            )
            if constant:
                sum_counts(parts, d_transitions, d_transitions, Span(parts, 0))
    d_start, d_end = (mean.new_empty(0) if end is None else end for end in (d_start, d_end))
    return mean, d_emissions, d_transitions, d_start, d_end
