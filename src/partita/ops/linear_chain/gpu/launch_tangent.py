"""Allocate results and launch the kernels for means over paths and their derivatives."""

from __future__ import annotations

from torch import Tensor

from ....paths.autograd import ones
from ....primitives.gpu.target import target_of
from ....runtime.launch import cdiv, launch, next_power_of_2
from ..common import LinearChainPotentials, LinearChainValues, fake_tangent
from . import plan
from .arguments import Gradients, Span, StridedSteps, batch_of, split_saved, strided_steps
from .launch import linear_chain_logz, state_gradients, sum_counts
from .tangent import (
    linear_chain_means_kernel,
    linear_chain_pair_covariances_kernel,
    linear_chain_state_covariances_kernel,
)


def linear_chain_tangent(
    grad_output: Tensor, chain: LinearChainPotentials, values: LinearChainValues
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the mean of the values `[N]`, and its gradients weighted by grad_output, in fp64."""
    emissions, transitions, start, end, _ = chain
    T, N, C = emissions.shape
    results = fake_tangent(emissions, transitions, start, end)
    mean, d_emissions, d_transitions, d_start, d_end = results
    if T == 1 or not emissions.numel():  # without a step, or without a state
        for result in results:
            result.zero_()
    if emissions.numel():
        _, _, saved = linear_chain_logz(chain, True)
        batch = batch_of(chain._replace(start=None))
        states = split_saved(saved, chain)
        of_states = batch_of(LinearChainPotentials(*values, chain.lengths))
        posteriors, sums, *_ = buffers = saved.new_empty((4, T, N, C))
        unit = {"grad_ptr": ones(emissions), "grad_n": 0}
        state_gradients(unit, batch, states, Gradients(posteriors, None, None))
        of_pairs = values.transition_values
        pair_values = strided_steps(of_pairs)
        if of_pairs.ndim == 3 and transitions.ndim == 2:  # of each sequence
            pair_values = StridedSteps(of_pairs, 0, *of_pairs.stride())
        arguments = {
            "transitions": strided_steps(transitions),
            "transition_values": pair_values,
            "states_ptr": states.states,
            "posteriors_ptr": posteriors,
            "sums_ptr": sums,
            "means_ptr": buffers[2:],
            "mean_ptr": mean,
            "EXACT": plan.is_exact(emissions, transitions),
        }
        block = min(32, next_power_of_2(max(C, 2)))
        launch(
            linear_chain_means_kernel,
            2 * N,
            batch=batch,
            span=states.span,
            values=of_states,
            **arguments,
            BLOCK=block,
            num_warps=plan.warps(block * block // 8),
            BLOCK_PARTS=plan.parts_block(states.span.parts),
        )
        grad = {"grad_ptr": grad_output, "grad_n": grad_output.stride(0)}
        ends = (None if start is None else d_start, None if end is None else d_end)
        row_options = plan.row_options(C)
        launch(
            linear_chain_state_covariances_kernel,
            cdiv(T * N, row_options["ROWS"]),
            values=of_states._replace(start=None, end=None),
            posteriors_ptr=posteriors,
            means_ptr=buffers[2:],
            mean_ptr=mean,
            gradients=Gradients(d_emissions, *ends),
            **grad,
            **row_options,
        )
        number, groups = plan.count_groups(transitions, T, N, False, target_of(mean.device))
        constant = transitions.ndim == 2
        if groups.total and d_transitions.numel():
            parts = d_transitions
            if constant:
                parts = saved.new_empty((number, groups.splits, C, C))
            options = plan.count_options(C)
            launch(
                linear_chain_pair_covariances_kernel,
                number * groups.splits * cdiv(C, options["BLOCK"]) ** 2,
                lengths_ptr=batch.lengths,
                result_ptr=parts,
                groups=groups,
                **batch.sizes,
                **grad,
                **arguments,
                **options,
            )
            if constant:
                sum_counts(parts, d_transitions, d_transitions, Span(parts, 0))
    return results
