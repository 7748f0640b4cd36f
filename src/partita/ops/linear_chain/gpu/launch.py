"""Allocate results and launch the kernels for log Z of dense linear chains and its gradient.

Kernels that serve few calls are imported where they are launched, because Triton takes a
millisecond to load each function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2
from ..common import saved_sizes
from ..fakes import fake_gradient
from . import plan
from .counts import (
    linear_chain_counts_kernel,
    linear_chain_pairs_kernel,
    linear_chain_sum_counts_kernel,
)
from .marginals import linear_chain_marginals_kernel
from .prepare import linear_chain_prepare_kernel
from .resident import linear_chain_resident_scan_kernel
from .saved import Saved, end_strides, split_saved, transition_strides
from .scan import linear_chain_scan_kernel

# A word of a state that no program has stored: its sign bit is set. Both halves are equal, because
# a recorded program fills memory with 32 bits at a time.
UNWRITTEN = -0x7FFFFFFF80000000


def linear_chain_logz(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and what the gradient needs."""
    T, N, C = emissions.shape
    logz = torch.empty(N, dtype=torch.float64, device=emissions.device)
    rounded = torch.empty(N, dtype=acc_dtype(emissions.dtype), device=emissions.device)
    lengths = None if lengths is None else lengths.contiguous()
    inputs = (emissions, transitions, start, end, lengths)
    is_short = plan.is_short(transitions, T, N, C)
    size = 0 if is_short and not save else sum(saved_sizes(T, N, C, save))
    saved = torch.empty(size, dtype=torch.float64, device=emissions.device)
    if is_short:
        from .launch_short import short_scan

        short_scan(*inputs, saved if save else None, logz, rounded)
        return logz, rounded, saved
    if C == 0:
        logz.fill_(-torch.inf)
        rounded.fill_(-torch.inf)
        return logz, rounded, saved if save else saved.new_empty(0)
    parts = split_saved(saved, T, N, C, save)
    prepare(*inputs, parts)
    for scan in scans(emissions, transitions, save):
        scan(*inputs, parts, save, logz, rounded)
    return logz, rounded, saved if save else saved.new_empty(0)


def scans(emissions: Tensor, transitions: Tensor, save: bool) -> list[Callable[..., None]]:
    """Return the scans for these transitions, of which the device runs one."""
    T, N, C = emissions.shape
    found: list[Callable[..., None]] = []
    if transitions.ndim == 2:
        if plan.uses_lanes(T, N, C, plan.MAX_LANE_STATES):
            from .launch_lanes import lane_scan

            found.append(lane_scan)
        elif plan.is_parallel(T, N, C, save):
            from .launch_segments import parallel_scan

            found.append(parallel_scan)
        else:
            found.append(resident_scan if plan.uses_resident(C) else step_states)
    found.append(log_scan)
    return found


def prepare(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    saved: Saved,
) -> None:
    """Store the range of constant transitions and the greatest emission of each token."""
    T, N, C = emissions.shape
    parts, options = plan.range_parts(transitions), plan.prepare_options(C)
    launch(
        linear_chain_prepare_kernel,
        parts + cdiv(T * N, options["TOKENS"]) if N else 0,
        emissions,
        transitions,
        start,
        end,
        lengths,
        saved.span,
        saved.maxima,
        T,
        N,
        C,
        parts,
        *emissions.stride(),
        *transition_strides(transitions)[2:],
        *end_strides(start),
        *end_strides(end),
        **options,
    )


def resident_scan(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    saved: Saved,
    save: bool,
    logz: Tensor,
    rounded: Tensor,
) -> None:
    """Scan alpha and beta in linear arithmetic with the transitions in registers."""
    T, N, C = emissions.shape
    parts = plan.range_parts(transitions)
    inputs = (emissions, transitions, start, end, lengths, *saved[3:1:-1], *saved[:2])
    ends = (*end_strides(start), *end_strides(end))
    options: dict[str, Any] = {
        "SAVE": save,
        "EXACT": plan.is_exact(emissions, transitions),
        "BLOCK_PARTS": plan.parts_block(parts),
    }
    programs, sizes, strides = 2 * N if save else N, (T, N, C, parts), emissions.stride()
    if plan.GLUON:
        launch(
            linear_chain_resident_scan_kernel,
            programs,
            *inputs,
            None,
            logz,
            rounded,
            *sizes,
            1,
            *strides,
            *transitions.stride(),
            *ends,
            STEPS=0,
            **plan.resident_options(C),
            **options,
        )
    else:
        launch(
            linear_chain_scan_kernel,
            programs,
            *inputs,
            logz,
            rounded,
            *sizes,
            *strides,
            *transition_strides(transitions),
            *ends,
            IS_LOG=False,
            CONSTANT=True,
            **plan.scan_options(C, False),
            **options,
        )


def log_scan(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    saved: Saved,
    save: bool,
    logz: Tensor,
    rounded: Tensor,
) -> None:
    """Scan alpha and beta in the log domain."""
    T, N, C = emissions.shape
    parts = plan.range_parts(transitions)
    inputs = (emissions, transitions, start, end, lengths, *saved[3:1:-1], *saved[:2])
    sizes = (T, N, C, parts, *emissions.stride(), *transition_strides(transitions))
    ends = (*end_strides(start), *end_strides(end))
    options: dict[str, Any] = {
        "SAVE": save,
        "EXACT": plan.is_exact(emissions, transitions),
        "BLOCK_PARTS": plan.parts_block(parts),
    }
    programs = 2 * N if save else N
    if plan.MAX_LOG_STATES >= C:
        options |= {"IS_LOG": True, "CONSTANT": parts > 0, **plan.scan_options(C, True)}
        results = (logz, rounded)
        launch(linear_chain_scan_kernel, programs, *inputs, *results, *sizes, *ends, **options)
    else:
        from .log_scan import linear_chain_log_scan_kernel

        recent = torch.empty((2, 2, N, C), dtype=torch.float64, device=emissions.device)
        options |= plan.log_scan_options(C)
        results = (recent, logz, rounded)
        launch(linear_chain_log_scan_kernel, programs, *inputs, *results, *sizes, *ends, **options)


def step_states(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    saved: Saved,
    save: bool,
    logz: Tensor,
    rounded: Tensor,
) -> None:
    """Scan alpha and beta of many states in linear arithmetic."""
    from .launch_lanes import exp_table
    from .steps import linear_chain_total_kernel

    T, N, C = emissions.shape
    parts = plan.range_parts(transitions)
    block = {"BLOCK_PARTS": plan.parts_block(parts)}
    options = {"SAVE": save, "EXACT": plan.is_exact(emissions, transitions), **block}
    weights = exp_table(transitions, saved.span)
    inputs = (emissions, weights, start, end, lengths)
    strides = (*emissions.stride(), *end_strides(start), *end_strides(end))
    scan = exchanged_steps if plan.exchanges(C, emissions.device) else launched_steps
    alpha = scan(inputs, saved, parts, strides, options)
    tensors = (saved.span, lengths, saved.maxima, saved.scales, alpha)
    launch(
        linear_chain_total_kernel,
        N,
        *tensors,
        logz,
        rounded,
        T,
        N,
        C,
        parts,
        BLOCK_T=256,
        BLOCK_C=next_power_of_2(C),
        **block,
    )


def exchanged_steps(
    inputs: tuple[Any, ...],
    saved: Saved,
    parts: int,
    strides: tuple[int, ...],
    options: dict[str, Any],
) -> Tensor:
    """Take all steps in one launch, whose programs exchange states, and return the last alpha.

    The sign bits of its numbers hold the parity of the step and do not count.
    """
    from .exchange_steps import linear_chain_exchange_kernel

    emissions = inputs[0]
    T, N, C = emissions.shape
    words = torch.full((4 * N * C + 1,), UNWRITTEN, dtype=torch.int64, device=emissions.device)
    launch(
        linear_chain_exchange_kernel,
        plan.exchange_programs(N, C, options["SAVE"]),
        *inputs,
        *(saved.span, saved.maxima, saved.states, saved.scales, words),
        *(T, N, C, parts, *strides),
        **options,
        **plan.exchange_options(C),
    )
    return words[:-1].view(torch.float64).view(2, 2, N, C)[0, (T - 1) % 2]


def launched_steps(
    inputs: tuple[Any, ...],
    saved: Saved,
    parts: int,
    strides: tuple[int, ...],
    options: dict[str, Any],
) -> Tensor:
    """Take each step in a launch of its own, and return the last alpha."""
    from .steps import linear_chain_step_kernel
    from .strided_steps import linear_chain_strided_step_kernel

    emissions = inputs[0]
    T, N, C = emissions.shape
    recent = torch.empty((2, 2, N, C), dtype=torch.float64, device=emissions.device)
    for i in range(T):
        launch(
            linear_chain_strided_step_kernel if plan.GLUON else linear_chain_step_kernel,
            plan.step_programs(N, C, options["SAVE"]),
            *inputs,
            *(saved.span, saved.maxima, saved.states, saved.scales, recent),
            *(i, T, N, C, parts, *strides),
            **options,
            **plan.step_options(C),
        )
    return recent[0, (T - 1) % 2]


def linear_chain_gradient(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of sum(grad_output * log Z) in the dtypes of the arguments."""
    T, N, C = emissions.shape
    device = emissions.device
    if not emissions.numel():  # The reference has served log Z, and saved nothing.
        tensors = (emissions, transitions, start, end)
        gradients = fake_gradient(*tensors, need_transitions, per_sequence)
        for gradient in gradients:
            gradient.zero_()
        return gradients
    d_emissions = torch.empty((T, N, C), dtype=emissions.dtype, device=device)
    ends = [
        None if end is None else torch.empty((N, C), dtype=end.dtype, device=device)
        for end in (start, end)
    ]
    lengths = None if lengths is None else lengths.contiguous()
    parts, states = plan.range_parts(transitions), split_saved(saved, T, N, C)
    if need_transitions and not per_sequence and plan.is_short(transitions, T, N, C):
        from .launch_short import short_gradient

        d_transitions = torch.empty((C, C), dtype=transitions.dtype, device=device)
        chain = (grad_output, emissions, transitions, end, lengths)
        short_gradient(chain, states, (d_emissions, d_transitions, *ends))
        d_start, d_end = (emissions.new_empty(0) if end is None else end for end in ends)
        return d_emissions, d_transitions, d_start, d_end
    factors = torch.empty((T, N), dtype=torch.float64, device=device)
    options = plan.row_options(C)
    launch(
        linear_chain_marginals_kernel,
        cdiv(T * N, options["ROWS"]),
        grad_output,
        lengths,
        states.span,
        states.states,
        states.scales,
        factors,
        d_emissions,
        *ends,
        T,
        N,
        C,
        parts,
        grad_output.stride(0),
        BLOCK_PARTS=plan.parts_block(parts),
        **options,
    )
    d_start, d_end = (emissions.new_empty(0) if end is None else end for end in ends)
    if not need_transitions:
        return d_emissions, transitions.new_empty(0), d_start, d_end
    inputs = (grad_output, emissions, transitions, end, lengths, states, factors)
    return d_emissions, count_transitions(*inputs, per_sequence), d_start, d_end


def count_transitions(
    grad_output: Tensor,
    emissions: Tensor,
    transitions: Tensor,
    end: Tensor | None,
    lengths: Tensor | None,
    saved: Saved,
    factors: Tensor,
    per_sequence: bool,
) -> Tensor:
    """Return the gradient in the transitions."""
    T, N, C = emissions.shape
    device, parts = emissions.device, plan.range_parts(transitions)
    groups = plan.count_groups(transitions, T, N, per_sequence)
    shape, dtype = transitions.shape, transitions.dtype
    if per_sequence and parts:
        shape, dtype = torch.Size((N, C, C)), acc_dtype(dtype)
    result = torch.empty(shape, dtype=dtype, device=device)
    if result.numel() == 0:
        return result
    counts = result
    if parts:
        size = (groups.groups, groups.splits, C, C)
        counts = torch.empty(size, dtype=torch.float64, device=device)
    options = plan.count_options(C)
    programs = groups.groups * groups.splits * cdiv(C, options["BLOCK"]) ** 2
    options["EXACT"] = plan.is_exact(emissions, transitions)
    options["BLOCK_PARTS"] = block = plan.parts_block(parts)
    sizes = (T, N, C, parts, groups.splits)
    ends = (*end_strides(end), *groups[2:])
    states = (saved.span, saved.maxima, saved.states, factors, counts)
    if parts:
        kernel, in_lanes = linear_chain_counts_kernel, plan.uses_lane_counts(C)
        own = {"ROWS": 16, **plan.count_options(C)}
        if in_lanes:
            from .lane_counts import linear_chain_lane_counts_kernel as kernel

            own = plan.lane_count_options(C)
        launch(
            kernel,
            programs,
            *(emissions, end, lengths, *states, T, N, *(() if in_lanes else (C,))),
            *(parts, groups.splits, *emissions.stride(), *ends),
            EXACT=options["EXACT"],
            BLOCK_PARTS=block,
            **own,
        )
    launch(
        linear_chain_pairs_kernel,
        programs,
        grad_output,
        emissions,
        transitions,
        end,
        lengths,
        *states,
        *sizes,
        grad_output.stride(0),
        *emissions.stride(),
        *transition_strides(transitions),
        *ends,
        **options,
    )
    if parts:
        options = plan.sum_options(groups.splits, C)
        launch(
            linear_chain_sum_counts_kernel,
            groups.groups * cdiv(C * C, options["BLOCK"]),
            transitions,
            saved.span,
            counts,
            result,
            *sizes[2:],
            *transitions.stride(),
            BLOCK_PARTS=block,
            **options,
        )
    return result
