"""Launch the kernels for paths of dense linear chains: the best one, and samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2
from . import plan
from .best_steps import (
    linear_chain_best_last_kernel,
    linear_chain_best_states_kernel,
    linear_chain_best_step_kernel,
    linear_chain_best_ties_kernel,
    linear_chain_best_trace_kernel,
)
from .launch import linear_chain_logz
from .launch_lanes import best_path_in_lanes, exp_table, score_table, trace_words
from .resident_best import linear_chain_resident_best_kernel, linear_chain_strided_best_kernel
from .sample import linear_chain_sample_kernel, linear_chain_sample_words_kernel
from .saved import Saved, end_strides, split_saved, transition_strides
from .viterbi import (
    linear_chain_path_maps_kernel,
    linear_chain_trace_kernel,
    linear_chain_viterbi_kernel,
)


def linear_chain_viterbi(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the best score `[N]` and the states of the best path `[T, N]`."""
    T, N, C = emissions.shape
    device = emissions.device
    score = torch.empty(N, dtype=acc_dtype(emissions.dtype), device=device)
    states = torch.empty((T, N), dtype=torch.int64, device=device)
    if C == 0:
        return score.fill_(-torch.inf), states.fill_(-1)
    lengths = None if lengths is None else lengths.contiguous()
    if transitions.ndim == 2 and plan.uses_lanes(T, N, C, plan.MAX_PARALLEL_STATES):
        best_path_in_lanes(emissions, transitions, start, end, lengths, score, states)
        return score, states
    constant = transitions.ndim == 2
    # Scores of half types tie often, and what follows a tie is scanned again.
    itemsize = min(emissions.element_size(), transitions.element_size())
    if itemsize >= 4 and plan.meets(T, N, C, constant):
        best_path_from_both_ends(emissions, transitions, start, end, lengths, score, states)
        return score, states
    if not plan.stores_previous(C, constant):
        best_path_from_scores(emissions, transitions, start, end, lengths, score, states)
        return score, states
    previous = torch.empty((T, N, C), dtype=previous_dtype(C), device=device)
    last = torch.empty(N, dtype=torch.int32, device=device)
    launch(
        linear_chain_viterbi_kernel,
        N,
        *(emissions, transitions, start, end, lengths, previous, score, last, T, N, C),
        *emissions.stride(),
        *transition_strides(transitions),
        *end_strides(start),
        *end_strides(end),
        CONSTANT=constant,
        **plan.viterbi_options(C),
    )
    trace(previous, lengths, None, last, states, False)
    return score, states


def previous_dtype(C: int) -> torch.dtype:
    """Return the dtype of the best states before each state."""
    return torch.int16 if C <= 2**15 else torch.int32


def best_path_from_scores(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    score: Tensor,
    states: Tensor,
) -> None:
    """Find the best score `[N]` and path `[T, N]` from the best scores of all states."""
    T, N, C = emissions.shape
    constant = transitions.ndim == 2
    scores = torch.empty((2, T + 1, N, C), dtype=torch.float64, device=emissions.device)
    last = torch.empty(N, dtype=torch.int32, device=emissions.device)
    is_nan = torch.zeros((2, N), dtype=torch.int32, device=emissions.device)
    results, sizes = (scores, is_nan), (T, N, C, *emissions.stride())
    ends, strides = (*end_strides(start), *end_strides(end)), transition_strides(transitions)
    steps, step_strides = transitions, strides
    if plan.resident_best(C, constant):
        inputs = (emissions, transitions, start, end, lengths)
        numbers, options = (*sizes, *strides[2:], *ends), plan.resident_best_options(C)
        kernel = linear_chain_resident_best_kernel
        launch(kernel, N, *inputs, *results, None, *numbers, MEETS=False, **options)
    else:
        by_sequence = transitions.ndim == 4
        kernel = linear_chain_strided_best_kernel if plan.GLUON else linear_chain_best_step_kernel
        programs = plan.best_step_programs(N, C, by_sequence)
        if constant:
            # The states that a step leaves are side by side for each state that it enters.
            steps, step_strides = score_table(transitions.T), (0, 0, 1, C)
        inputs, numbers = (emissions, steps, start, end, lengths), (*sizes, *step_strides, *ends)
        options = plan.best_step_options(C, by_sequence)
        for t in range(T):
            launch(kernel, programs, *inputs, *results, t, *numbers, **options)
    find_last(scores, lengths, is_nan, score, last, None, False, False)
    if plan.traces_scores(N, C):
        inputs, options = (steps, scores, lengths, last, states), plan.best_trace_options(C)
        launch(linear_chain_best_trace_kernel, N, *inputs, *sizes[:3], *step_strides, **options)
    else:
        previous = torch.empty((T, N, C), dtype=previous_dtype(C), device=emissions.device)
        find_previous(transitions, scores, previous, lengths, None, strides, False, False)
        trace(previous, lengths, None, last, states, False)


def best_path_from_both_ends(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    score: Tensor,
    states: Tensor,
) -> None:
    """Find the best score `[N]` and path `[T, N]` by scans that meet in the middle.

    Where the path after the middle has a tie, the sequence is scanned from its middle to its end as
    well, because the order of ties is that of a scan from the start.
    """
    T, N, C = emissions.shape
    device: dict[str, Any] = {"device": emissions.device}
    scores = torch.empty((2, T + 1, N, C), dtype=torch.float64, **device)
    table = score_table(transitions, 2)
    is_nan, ties, last = torch.empty((4, N), dtype=torch.int32, **device).split((2, 1, 1))
    previous = torch.empty((T, N, C), dtype=previous_dtype(C), **device)
    inputs = (emissions, transitions, start, end, lengths, scores)
    numbers = (T, N, C, *emissions.stride(), *transitions.stride())
    numbers = (*numbers, *end_strides(start), *end_strides(end))
    options, strides = plan.resident_best_options(C), (0, 0, C, 1)
    kernel = linear_chain_resident_best_kernel
    launch(kernel, 2 * N, *inputs, is_nan, None, *numbers, MEETS=True, **options)
    find_last(scores, lengths, is_nan, score, last, ties, True, False)
    find_previous(table, scores, previous, lengths, None, strides, True, False)
    trace(previous, lengths, None, last, states, True)
    rows = plan.tie_rows(C)
    launch(
        linear_chain_best_ties_kernel,
        cdiv((T - 1) * N, rows),
        *(table, scores, states, lengths, ties, T, N, C),
        ROWS=rows,
        BLOCK_C=next_power_of_2(C),
        num_warps=4,
    )
    launch(kernel, N, *inputs, None, ties, *numbers, MEETS=True, **options)
    find_last(scores, lengths, is_nan, score, last, ties, False, True)
    find_previous(table, scores, previous, lengths, ties, strides, False, True)
    trace(previous, lengths, ties, last, states, False)


def find_last(
    scores: Tensor,
    lengths: Tensor | None,
    is_nan: Tensor,
    score: Tensor,
    last: Tensor,
    ties: Tensor | None,
    meets: bool,
    tied: bool,
) -> None:
    """Find the best scores, and the last states of the best paths or those in the middle."""
    _, rows, N, C = scores.shape
    launch(
        linear_chain_best_last_kernel,
        N,
        *(scores, lengths, is_nan, score, last, ties, rows - 1, N, C),
        MEETS=meets,
        TIED=tied,
        BLOCK_C=next_power_of_2(C),
        num_warps=plan.warps(C // 4),
    )


def find_previous(
    transitions: Tensor,
    scores: Tensor,
    previous: Tensor,
    lengths: Tensor | None,
    ties: Tensor | None,
    strides: tuple[int, ...],
    meets: bool,
    tied: bool,
) -> None:
    """Find the best states before each state, or with `meets` away from the middle."""
    T, N, C = previous.shape
    constant = meets or tied or transitions.ndim == 2
    options = plan.best_states_options(C, constant)
    programs = cdiv((T - 1) * N, options["ROWS"]) * cdiv(C, options["BLOCK_C"])
    launch(
        linear_chain_best_states_kernel,
        2 * programs if meets else programs,
        *(transitions, scores, previous, lengths, ties, T, N, C, *strides),
        CONSTANT=constant,
        MEETS=meets,
        TIED=tied,
        **options,
    )


def trace(
    previous: Tensor,
    lengths: Tensor | None,
    ties: Tensor | None,
    last: Tensor,
    states: Tensor,
    meets: bool,
) -> None:
    """Trace the best paths from their last states, or from the middle in both directions."""
    T, N, C = previous.shape
    steps = plan.trace_steps(T)
    segments = 2 * cdiv(T, 2 * steps) if meets else cdiv(T, steps)
    maps = torch.empty((N, segments, C), dtype=torch.int32, device=previous.device)
    sizes = (T, N, C, segments)
    launch(
        linear_chain_path_maps_kernel,
        N * segments * cdiv(C, 128),
        *(previous, lengths, ties, maps),
        *sizes,
        STEPS=steps,
        MEETS=meets,
        BLOCK_C=128,
        num_warps=4,
    )
    launch(
        linear_chain_trace_kernel,
        N * segments,
        *(previous, lengths, ties, maps, last, states),
        *sizes,
        STEPS=steps,
        MEETS=meets,
        num_warps=1,
    )


def linear_chain_sample(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> Tensor:
    """Return the states `[k, T, N]` of k paths from the posterior."""
    T, N, C = emissions.shape
    samples = uniforms.shape[1]
    states = torch.empty((samples, T, N), dtype=torch.int64, device=emissions.device)
    if C == 0:
        return states.fill_(-1)
    lengths = None if lengths is None else lengths.contiguous()
    logz, _, saved = linear_chain_logz(emissions, transitions, start, end, lengths, True)
    parts, alpha = plan.range_parts(transitions), split_saved(saved, T, N, C)
    if parts and plan.uses_lanes(T, N, C, plan.MAX_PARALLEL_STATES):
        sample_in_lanes(transitions, lengths, alpha, logz, uniforms, states)
        return states
    launch(
        linear_chain_sample_kernel,
        N * samples,
        *(transitions, lengths, alpha.span, alpha.states, logz, uniforms, states),
        *(T, N, C, parts, samples),
        *transition_strides(transitions),
        *uniforms.stride(),
        BLOCK_PARTS=plan.parts_block(parts),
        **plan.sample_options(C),
    )
    return states


def sample_in_lanes(
    transitions: Tensor,
    lengths: Tensor | None,
    alpha: Saved,
    logz: Tensor,
    uniforms: Tensor,
    states: Tensor,
) -> None:
    """Draw paths of few states `[k, T, N]`, parallel in time."""
    samples, T, N = states.shape
    C, parts = len(transitions), plan.range_parts(transitions)
    words = torch.empty((samples * N, T), dtype=torch.int64, device=states.device)
    options = plan.lane_options(words.numel())
    for is_log in (False, True):
        table = score_table(transitions) if is_log else exp_table(transitions, alpha.span)
        launch(
            linear_chain_sample_words_kernel,
            cdiv(words.numel(), options["LANES"]),
            *(alpha.states, table, lengths, alpha.span, uniforms, words),
            *(T, N, parts, len(words), *uniforms.stride()),
            C=C,
            IS_LOG=is_log,
            BLOCK_PARTS=plan.parts_block(parts),
            **options,
        )
    trace_words(words, lengths, logz, states, C)
