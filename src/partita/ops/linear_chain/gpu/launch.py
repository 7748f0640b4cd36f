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
from .arguments import (
    Batch,
    Gradients,
    Saved,
    batch_of,
    split_saved,
    strided_pairs,
    strided_steps,
)
from .counts import (
    linear_chain_counts_kernel,
    linear_chain_pairs_kernel,
    linear_chain_sum_counts_kernel,
)
from .marginals import linear_chain_marginals_kernel
from .prepare import linear_chain_prepare_kernel
from .resident import linear_chain_resident_scan_kernel
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
    batch = batch_of(emissions, start, end, lengths)
    is_short = plan.is_short(transitions, T, N, C)
    size = 0 if is_short and not save else sum(saved_sizes(T, N, C, save))
    saved = torch.empty(size, dtype=torch.float64, device=emissions.device)
    if is_short:
        from .launch_short import short_scan

        parts = split_saved(saved, emissions, transitions) if save else None
        short_scan(batch, transitions, parts, logz, rounded)
        return logz, rounded, saved
    if C == 0:
        logz.fill_(-torch.inf)
        rounded.fill_(-torch.inf)
        return logz, rounded, saved if save else saved.new_empty(0)
    parts = split_saved(saved, emissions, transitions, save)
    options = plan.prepare_options(C)
    launch(
        linear_chain_prepare_kernel,
        parts.span.parts + cdiv(T * N, options["TOKENS"]) if N else 0,
        batch=batch,
        transitions=strided_pairs(transitions),
        span=parts.span,
        maxima_ptr=parts.maxima,
        **options,
    )
    for scan in scans(emissions, transitions, save):
        scan(batch, transitions, parts, save, logz, rounded)
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


def resident_scan(
    batch: Batch, transitions: Tensor, saved: Saved, save: bool, logz: Tensor, rounded: Tensor
) -> None:
    """Scan alpha and beta in linear arithmetic with the transitions in registers."""
    programs = 2 * batch.N if save else batch.N
    arguments = {"batch": batch, "saved": saved, "logz_ptr": logz, "rounded_ptr": rounded}
    options = scan_options(batch, transitions, saved, save)
    if plan.GLUON:
        launch(
            linear_chain_resident_scan_kernel,
            programs,
            transitions=strided_pairs(transitions),
            boundaries_ptr=None,
            segments=1,
            STEPS=0,
            **arguments,
            **plan.resident_options(batch.C),
            **options,
        )
    else:
        launch(
            linear_chain_scan_kernel,
            programs,
            transitions=strided_steps(transitions),
            IS_LOG=False,
            CONSTANT=True,
            **arguments,
            **plan.scan_options(batch.C, False),
            **options,
        )


def scan_options(batch: Batch, transitions: Tensor, saved: Saved, save: bool) -> dict[str, Any]:
    """Return the compile-time arguments that all scans share."""
    exact = plan.is_exact(batch.emissions.ptr, transitions)
    return {"SAVE": save, "EXACT": exact, "BLOCK_PARTS": plan.parts_block(saved.span.parts)}


def log_scan(
    batch: Batch, transitions: Tensor, saved: Saved, save: bool, logz: Tensor, rounded: Tensor
) -> None:
    """Scan alpha and beta in the log domain."""
    N, C = batch.N, batch.C
    arguments = {
        "batch": batch,
        "transitions": strided_steps(transitions),
        "saved": saved,
        "logz_ptr": logz,
        "rounded_ptr": rounded,
        **scan_options(batch, transitions, saved, save),
    }
    programs = 2 * N if save else N
    if plan.MAX_LOG_STATES >= C:
        launch(
            linear_chain_scan_kernel,
            programs,
            IS_LOG=True,
            CONSTANT=transitions.ndim == 2,
            **arguments,
            **plan.scan_options(C, True),
        )
    else:
        from .log_scan import linear_chain_log_scan_kernel

        recent = logz.new_empty((2, 2, N, C))
        options = plan.log_scan_options(C)
        launch(linear_chain_log_scan_kernel, programs, recent_ptr=recent, **arguments, **options)


def step_states(
    batch: Batch, transitions: Tensor, saved: Saved, save: bool, logz: Tensor, rounded: Tensor
) -> None:
    """Scan alpha and beta of many states in linear arithmetic."""
    from .launch_lanes import exp_table
    from .steps import linear_chain_total_kernel

    T, N, C = batch.T, batch.N, batch.C
    options = scan_options(batch, transitions, saved, save)
    weights = exp_table(transitions, saved.span)
    scan = exchanged_steps if plan.exchanges(C, logz.device) else launched_steps
    alpha = scan(batch, weights, saved, options)
    launch(
        linear_chain_total_kernel,
        N,
        lengths_ptr=batch.lengths,
        saved=saved._replace(states=None),
        alpha_ptr=alpha,
        logz_ptr=logz,
        rounded_ptr=rounded,
        T=T,
        N=N,
        C=C,
        BLOCK_T=256,
        BLOCK_C=next_power_of_2(C),
        BLOCK_PARTS=options["BLOCK_PARTS"],
    )


def exchanged_steps(batch: Batch, weights: Tensor, saved: Saved, options: dict[str, Any]) -> Tensor:
    """Take all steps in one launch, whose programs exchange states, and return the last alpha.

    The sign bits of its numbers hold the parity of the step and do not count.
    """
    from .exchange_steps import linear_chain_exchange_kernel

    N, C = batch.N, batch.C
    words = torch.full((4 * N * C + 1,), UNWRITTEN, dtype=torch.int64, device=weights.device)
    launch(
        linear_chain_exchange_kernel,
        plan.exchange_programs(N, C, options["SAVE"]),
        batch=batch,
        weights_ptr=weights,
        saved=saved,
        words_ptr=words,
        **options,
        **plan.exchange_options(C),
    )
    return words[:-1].view(torch.float64).view(2, 2, N, C)[0, (batch.T - 1) % 2]


def launched_steps(batch: Batch, weights: Tensor, saved: Saved, options: dict[str, Any]) -> Tensor:
    """Take each step in a launch of its own, and return the last alpha."""
    from .steps import linear_chain_step_kernel
    from .strided_steps import linear_chain_strided_step_kernel

    N, C = batch.N, batch.C
    recent = weights.new_empty((2, 2, N, C))
    for i in range(batch.T):
        launch(
            linear_chain_strided_step_kernel if plan.GLUON else linear_chain_step_kernel,
            plan.step_programs(N, C, options["SAVE"]),
            batch=batch,
            weights_ptr=weights,
            saved=saved,
            recent_ptr=recent,
            i=i,
            **options,
            **plan.step_options(C),
        )
    return recent[0, (batch.T - 1) % 2]


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
    d_start, d_end = (
        None if end is None else torch.empty((N, C), dtype=end.dtype, device=device)
        for end in (start, end)
    )
    batch = batch_of(emissions, start, end, lengths)._replace(start=None)
    states = split_saved(saved, emissions, transitions)
    results = Gradients(d_emissions, d_start, d_end)
    d_transitions = transitions.new_empty(0)
    if need_transitions and not per_sequence and plan.is_short(transitions, T, N, C):
        from .launch_short import short_gradient

        d_transitions = torch.empty((C, C), dtype=transitions.dtype, device=device)
        short_gradient(grad_output, batch, transitions, states, results, d_transitions)
    else:
        factors = torch.empty((T, N), dtype=torch.float64, device=device)
        options = plan.row_options(C)
        launch(
            linear_chain_marginals_kernel,
            cdiv(T * N, options["ROWS"]),
            grad_ptr=grad_output,
            grad_n=grad_output.stride(0),
            lengths_ptr=batch.lengths,
            saved=states._replace(maxima=None),
            factors_ptr=factors,
            gradients=results,
            T=T,
            N=N,
            C=C,
            BLOCK_PARTS=plan.parts_block(states.span.parts),
            **options,
        )
        if need_transitions:
            d_transitions = count_transitions(
                grad_output, batch, transitions, states, factors, per_sequence
            )
    d_start, d_end = (emissions.new_empty(0) if end is None else end for end in results[1:])
    return d_emissions, d_transitions, d_start, d_end


def count_transitions(
    grad_output: Tensor,
    batch: Batch,
    transitions: Tensor,
    saved: Saved,
    factors: Tensor,
    per_sequence: bool,
) -> Tensor:
    """Return the gradient in the transitions."""
    T, N, C = batch.T, batch.N, batch.C
    device, constant = factors.device, transitions.ndim == 2
    number, groups = plan.count_groups(transitions, T, N, per_sequence)
    shape, dtype = transitions.shape, transitions.dtype
    if per_sequence and constant:
        shape, dtype = torch.Size((N, C, C)), acc_dtype(dtype)
    result = torch.empty(shape, dtype=dtype, device=device)
    if result.numel() == 0:
        return result
    counts = result
    if constant:
        counts = factors.new_empty((number, groups.splits, C, C))
    options = plan.count_options(C)
    programs = number * groups.splits * cdiv(C, options["BLOCK"]) ** 2
    block = plan.parts_block(saved.span.parts)
    arguments = {
        "saved": saved._replace(scales=None),
        "factors_ptr": factors,
        "counts_ptr": counts,
        "groups": groups,
        "EXACT": plan.is_exact(batch.emissions.ptr, transitions),
        "BLOCK_PARTS": block,
    }
    if constant and plan.uses_lane_counts(C):
        from .lane_counts import linear_chain_lane_counts_kernel

        lane_options = plan.lane_count_options(C)
        kernel, tokens = linear_chain_lane_counts_kernel, batch._replace(C=None)
        launch(kernel, programs, batch=tokens, **arguments, **lane_options)
    elif constant:
        kernel = linear_chain_counts_kernel
        launch(kernel, programs, batch=batch, ROWS=16, **arguments, **options)
    launch(
        linear_chain_pairs_kernel,
        programs,
        grad_ptr=grad_output,
        grad_n=grad_output.stride(0),
        batch=batch,
        transitions=strided_steps(transitions),
        **arguments,
        **options,
    )
    if constant:
        options = plan.sum_options(groups.splits, C)
        launch(
            linear_chain_sum_counts_kernel,
            number * cdiv(C * C, options["BLOCK"]),
            transitions=strided_pairs(transitions),
            span=saved.span,
            parts_ptr=counts,
            counts_ptr=result,
            C=C,
            splits=groups.splits,
            BLOCK_PARTS=block,
            **options,
        )
    return result
