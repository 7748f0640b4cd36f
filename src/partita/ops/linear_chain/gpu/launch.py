"""Allocate results and launch the kernels for log Z of dense linear chains and its derivatives.

Kernels that serve few calls are imported where they are launched, because Triton takes a
millisecond to load each function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....paths.autograd import ones
from ....primitives.gpu.target import target_of
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2
from ..common import (
    LinearChainPotentials,
    LinearChainValues,
    fake_gradient,
    fake_tangent,
    is_constant,
    saved_sizes,
)
from . import plan
from .arguments import (
    Batch,
    Gradients,
    Saved,
    Span,
    StridedSteps,
    batch_of,
    split_saved,
    strided_steps,
)
from .gradient import (
    linear_chain_counts_kernel,
    linear_chain_lane_counts_kernel,
    linear_chain_marginals_kernel,
    linear_chain_sum_counts_kernel,
)
from .resident import linear_chain_resident_scan_kernel
from .scan import (
    linear_chain_log_scan_kernel,
    linear_chain_prepare_kernel,
    linear_chain_scan_kernel,
    linear_chain_total_kernel,
)

# A word of a state that no program has stored: its sign bit is set. Both halves are equal, because
# a recorded program fills memory with 32 bits at a time.
UNWRITTEN = -0x7FFFFFFF80000000


def linear_chain_logz(chain: LinearChainPotentials, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and what the gradient needs."""
    emissions, transitions = chain[:2]
    T, N, C = emissions.shape
    logz = torch.empty(N, dtype=torch.float64, device=emissions.device)
    rounded = torch.empty(N, dtype=acc_dtype(emissions.dtype), device=emissions.device)
    batch = batch_of(chain)
    size = sum(saved_sizes(T, N, C, save))
    saved = torch.empty(size, dtype=torch.float64, device=emissions.device)
    parts = split_saved(saved, chain, save)
    prepare_options, ranges = plan.prepare_options(C), parts.span.parts * parts.span.sets
    launch(
        linear_chain_prepare_kernel,
        ranges + cdiv(T * N, prepare_options["TOKENS"]),
        batch=batch,
        transitions=strided_steps(transitions),
        span=parts.span,
        maxima_ptr=parts.maxima,
        ranges=ranges,
        **prepare_options,
    )
    if not save:
        parts = parts._replace(states=saved.new_empty((2, N, C)))
    block = plan.parts_block(parts.span.parts)
    options = {"SAVE": save, "EXACT": plan.is_exact(emissions, transitions), "BLOCK_PARTS": block}
    steps = strided_steps(transitions)
    arguments = {"batch": batch, "transitions": steps, "saved": parts, **options}
    is_parallel = plan.is_parallel(T, N, C, save, target_of(logz.device))
    # The device runs the scan in linear arithmetic or that in the log domain.
    if parts.span.parts:
        if is_parallel:
            from .launch_lanes import parallel_scan

            parallel_scan(batch, transitions, parts, options, logz, rounded)
        elif C <= plan.MAX_RESIDENT_STATES:
            launch(
                linear_chain_resident_scan_kernel,
                2 * N,
                boundaries_ptr=None,
                segments=1,
                STEPS=0,
                **arguments,
                **plan.resident_options(C),
            )
        else:
            step_states(batch, transitions, parts, options)
    if C <= plan.MAX_LOG_STATES:
        states = next_power_of_2(max(C, 2))
        launch(
            linear_chain_scan_kernel,
            2 * N,
            CONSTANT=is_constant(transitions, T),
            **arguments,
            AHEAD=2,
            BLOCK_C=states,
            num_warps=plan.warps(states * states // 8),
        )
    else:
        states = min(next_power_of_2(C), 256)
        launch(
            linear_chain_log_scan_kernel,
            2 * N,
            recent_ptr=saved.new_empty((2, 2, N, C)),
            **arguments,
            BLOCK_K=max(4, 4096 // states),
            BLOCK_C=states,
            num_warps=8,
        )
    launch(
        linear_chain_total_kernel,
        N,
        lengths_ptr=batch.lengths,
        saved=parts,
        logz_ptr=logz,
        rounded_ptr=rounded,
        **batch.sizes,
        SAVE=save,
        PARALLEL=is_parallel,
        BLOCK_T=256,
        BLOCK_C=next_power_of_2(C),
        BLOCK_PARTS=block,
    )
    return logz, rounded, saved if save else saved.new_empty(0)


def step_states(batch: Batch, transitions: Tensor, saved: Saved, options: dict[str, Any]) -> None:
    """Scan alpha and beta of many states in linear arithmetic."""
    from .launch_lanes import score_table
    from .steps import linear_chain_exchange_kernel, linear_chain_strided_step_kernel

    T, N, C = batch.T, batch.N, batch.C
    weights = score_table(transitions, 2, saved.span)
    arguments = {"batch": batch, "weights_ptr": weights, "saved": saved, **options}
    if plan.exchanges(C, target_of(weights.device)):
        # One launch takes all steps. Its programs exchange states, whose sign bits hold the parity
        # of the step and do not count.
        words = torch.full((4 * N * C + 1,), UNWRITTEN, dtype=torch.int64, device=weights.device)
        arguments |= {"words_ptr": words, **plan.exchange_options(C)}
        programs = 2 * cdiv(C, arguments["STATES"]) * cdiv(N, 16)
        launch(linear_chain_exchange_kernel, programs, **arguments)
    else:
        recent = weights.new_empty((2, 2, N, C))
        arguments |= {"recent_ptr": recent, "UNROLL": 8, "num_warps": 8}
        kernel, programs = linear_chain_strided_step_kernel, 2 * cdiv(C, 8) * cdiv(N, 16)
        for i in range(T if options["SAVE"] else T // 2 + 1):
            launch(kernel, programs, i=i, **arguments)


def linear_chain_gradient(
    grad_output: Tensor,
    chain: LinearChainPotentials,
    logz: Tensor,
    saved: Tensor,
    need_transitions: bool,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of sum(grad_output * log Z) in the dtypes of the arguments."""
    emissions, transitions, start, end, _ = chain
    gradients = fake_gradient(emissions, transitions, start, end, need_transitions, per_sequence)
    if not emissions.numel():  # The reference has served log Z, and saved nothing.
        for gradient in gradients:
            gradient.zero_()
        return gradients
    d_emissions, d_transitions, d_start, d_end = gradients
    batch = batch_of(chain._replace(start=None))  # No step enters a first token.
    states = split_saved(saved, chain)
    ends = (None if start is None else d_start, None if end is None else d_end)
    grad = {"grad_ptr": grad_output, "grad_n": grad_output.stride(0)}
    factors = state_gradients(grad, batch, states, Gradients(d_emissions, *ends))
    if d_transitions.numel():
        count_transitions(grad, batch, transitions, states, factors, per_sequence, d_transitions)
    return gradients


def state_gradients(
    grad: dict[str, Any], batch: Batch, saved: Saved, gradients: Gradients
) -> Tensor:
    """Compute the gradients in the scores of states, and return factors of transitions `[T, N]`."""
    factors, sets = saved.states.new_empty((batch.T, batch.N)), saved.span.sets
    options = plan.row_options(batch.C)
    launch(
        linear_chain_marginals_kernel,
        sets * cdiv(batch.T * batch.N // sets, options["ROWS"]),
        lengths_ptr=batch.lengths,
        saved=saved._replace(maxima=None),
        factors_ptr=factors,
        gradients=gradients,
        **batch.sizes,
        BLOCK_PARTS=plan.parts_block(saved.span.parts),
        **grad,
        **options,
    )
    return factors


def count_transitions(
    grad: dict[str, Any],
    batch: Batch,
    transitions: Tensor,
    saved: Saved,
    factors: Tensor,
    per_sequence: bool,
    result: Tensor,
) -> None:
    """Compute the gradient in the transitions."""
    T, N, C, constant = batch.T, batch.N, batch.C, is_constant(transitions, batch.T)
    number, groups = plan.count_groups(transitions, T, N, per_sequence, target_of(factors.device))
    counts = result
    if constant:
        counts = factors.new_empty((number, groups.splits, C, C))
    options = plan.count_options(C)
    programs = number * groups.splits * cdiv(C, options["BLOCK"]) ** 2
    arguments = {
        "saved": saved._replace(scales=None),
        "factors_ptr": factors,
        "counts_ptr": counts,
        "groups": groups,
        "EXACT": plan.is_exact(batch.emissions.ptr, transitions),
        "BLOCK_PARTS": plan.parts_block(saved.span.parts),
    }
    in_lanes = constant and C <= plan.MAX_LANE_STATES
    if in_lanes:
        kernel, tokens = linear_chain_lane_counts_kernel, batch._replace(C=None)
        lanes = {"C": C, "LANES": plan.COUNT_LANES, "num_warps": plan.COUNT_LANES // 32}
        launch(kernel, programs, batch=tokens, **arguments, **lanes)
    launch(
        linear_chain_counts_kernel,
        programs,
        batch=batch,
        transitions=strided_steps(transitions),
        SERVES_LINEAR=constant and not in_lanes,
        ROWS=16,
        **grad,
        **arguments,
        **options,
    )
    if constant:
        sum_counts(counts, result, transitions, saved.span)


def sum_counts(parts: Tensor, counts: Tensor, transitions: Tensor, span: Span) -> None:
    """Add the parts `[groups, splits, C, C]` of counts `[groups, C, C]`.

    Only with parts of a range are the counts multiplied by exp(transitions).
    """
    number, splits, C, _ = parts.shape
    options = plan.sum_options(splits, C)
    launch(
        linear_chain_sum_counts_kernel,
        number * cdiv(C * C, options["BLOCK"]),
        transitions=strided_steps(transitions),
        span=span,
        parts_ptr=parts,
        counts_ptr=counts,
        C=C,
        splits=splits,
        BLOCK_PARTS=plan.parts_block(span.parts),
        **options,
    )


def linear_chain_tangent(
    grad_output: Tensor, chain: LinearChainPotentials, values: LinearChainValues
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the mean of the values `[N]`, and its gradients weighted by grad_output, in fp64."""
    from .tangent import (
        linear_chain_means_kernel,
        linear_chain_pair_covariances_kernel,
        linear_chain_state_covariances_kernel,
    )

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
                sum_counts(parts, d_transitions, d_transitions, Span(parts, 0, 1))
    return results
