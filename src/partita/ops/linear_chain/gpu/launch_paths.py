"""Launch the kernels for paths of dense linear chains: the best one, and samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2
from . import plan
from .arguments import (
    Batch,
    Saved,
    StridedSteps,
    StridedUniforms,
    batch_of,
    split_saved,
    strided_pairs,
    strided_steps,
)
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
    batch, constant = batch_of(emissions, start, end, lengths), transitions.ndim == 2
    # Scores of half types tie often, and what follows a tie is scanned again.
    itemsize = min(emissions.element_size(), transitions.element_size())
    if constant and plan.uses_lanes(T, N, C, plan.MAX_PARALLEL_STATES):
        best_path_in_lanes(batch, transitions, score, states)
    elif itemsize >= 4 and plan.meets(T, N, C, constant):
        best_path_from_both_ends(batch, transitions, score, states)
    elif not plan.stores_previous(C, constant):
        best_path_from_scores(batch, transitions, score, states)
    else:
        previous = torch.empty((T, N, C), dtype=previous_dtype(C), device=device)
        last = torch.empty(N, dtype=torch.int32, device=device)
        launch(
            linear_chain_viterbi_kernel,
            N,
            batch=batch,
            transitions=strided_steps(transitions),
            previous_ptr=previous,
            score_ptr=score,
            last_ptr=last,
            CONSTANT=constant,
            **plan.viterbi_options(C),
        )
        trace(previous, batch.lengths, None, last, states, False)
    return score, states


def previous_dtype(C: int) -> torch.dtype:
    """Return the dtype of the best states before each state."""
    return torch.int16 if C <= 2**15 else torch.int32


def best_path_from_scores(batch: Batch, transitions: Tensor, score: Tensor, states: Tensor) -> None:
    """Find the best score `[N]` and path `[T, N]` from the best scores of all states."""
    T, N, C = batch.T, batch.N, batch.C
    constant, steps = transitions.ndim == 2, strided_steps(transitions)
    scores = torch.empty((2, T + 1, N, C), dtype=torch.float64, device=score.device)
    last = torch.empty(N, dtype=torch.int32, device=score.device)
    is_nan = torch.zeros((2, N), dtype=torch.int32, device=score.device)
    if plan.resident_best(C, constant):
        launch(
            linear_chain_resident_best_kernel,
            N,
            batch=batch,
            transitions=strided_pairs(transitions),
            states_ptr=scores,
            is_nan_ptr=is_nan,
            ties_ptr=None,
            MEETS=False,
            **plan.resident_best_options(C),
        )
    else:
        by_sequence = transitions.ndim == 4
        if constant:
            # The states that a step leaves are side by side for each state that it enters.
            steps = StridedSteps(score_table(transitions.T), 0, 0, 1, C)
        options = plan.best_step_options(C, by_sequence)
        for t in range(T):
            launch(
                linear_chain_strided_best_kernel if plan.GLUON else linear_chain_best_step_kernel,
                plan.best_step_programs(N, C, by_sequence),
                batch=batch,
                transitions=steps,
                states_ptr=scores,
                is_nan_ptr=is_nan,
                t=t,
                **options,
            )
    find_last(scores, batch.lengths, is_nan, score, last, None, False, False)
    if plan.traces_scores(N, C):
        launch(
            linear_chain_best_trace_kernel,
            N,
            transitions=steps,
            states_ptr=scores,
            lengths_ptr=batch.lengths,
            last_ptr=last,
            path_ptr=states,
            T=T,
            N=N,
            C=C,
            **plan.best_trace_options(C),
        )
    else:
        previous = torch.empty((T, N, C), dtype=previous_dtype(C), device=score.device)
        steps = strided_steps(transitions)
        find_previous(steps, scores, previous, batch.lengths, None, constant, False, False)
        trace(previous, batch.lengths, None, last, states, False)


def best_path_from_both_ends(
    batch: Batch, transitions: Tensor, score: Tensor, states: Tensor
) -> None:
    """Find the best score `[N]` and path `[T, N]` by scans that meet in the middle.

    Where the path after the middle has a tie, the sequence is scanned from its middle to its end as
    well, because the order of ties is that of a scan from the start.
    """
    T, N, C, lengths = batch.T, batch.N, batch.C, batch.lengths
    device: dict[str, Any] = {"device": score.device}
    scores = torch.empty((2, T + 1, N, C), dtype=torch.float64, **device)
    table = score_table(transitions, 2)
    steps = StridedSteps(table, 0, 0, C, 1)
    is_nan, ties, last = torch.empty((4, N), dtype=torch.int32, **device).split((2, 1, 1))
    previous = torch.empty((T, N, C), dtype=previous_dtype(C), **device)
    arguments = {
        "batch": batch,
        "transitions": strided_pairs(transitions),
        "states_ptr": scores,
        "MEETS": True,
        **plan.resident_best_options(C),
    }
    kernel = linear_chain_resident_best_kernel
    launch(kernel, 2 * N, is_nan_ptr=is_nan, ties_ptr=None, **arguments)
    find_last(scores, lengths, is_nan, score, last, ties, True, False)
    find_previous(steps, scores, previous, lengths, None, True, True, False)
    trace(previous, lengths, None, last, states, True)
    rows = plan.tie_rows(C)
    launch(
        linear_chain_best_ties_kernel,
        cdiv((T - 1) * N, rows),
        table_ptr=table,
        states_ptr=scores,
        path_ptr=states,
        lengths_ptr=lengths,
        ties_ptr=ties,
        T=T,
        N=N,
        C=C,
        ROWS=rows,
        BLOCK_C=next_power_of_2(C),
        num_warps=4,
    )
    launch(kernel, N, is_nan_ptr=None, ties_ptr=ties, **arguments)
    find_last(scores, lengths, is_nan, score, last, ties, False, True)
    find_previous(steps, scores, previous, lengths, ties, True, False, True)
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
        states_ptr=scores,
        lengths_ptr=lengths,
        is_nan_ptr=is_nan,
        score_ptr=score,
        last_ptr=last,
        ties_ptr=ties,
        T=rows - 1,
        N=N,
        C=C,
        MEETS=meets,
        TIED=tied,
        BLOCK_C=next_power_of_2(C),
        num_warps=plan.warps(C // 4),
    )


def find_previous(
    transitions: StridedSteps,
    scores: Tensor,
    previous: Tensor,
    lengths: Tensor | None,
    ties: Tensor | None,
    constant: bool,
    meets: bool,
    tied: bool,
) -> None:
    """Find the best states before each state, or with `meets` away from the middle."""
    T, N, C = previous.shape
    options = plan.best_states_options(C, constant)
    programs = cdiv((T - 1) * N, options["ROWS"]) * cdiv(C, options["BLOCK_C"])
    launch(
        linear_chain_best_states_kernel,
        2 * programs if meets else programs,
        transitions=transitions,
        states_ptr=scores,
        previous_ptr=previous,
        lengths_ptr=lengths,
        ties_ptr=ties,
        T=T,
        N=N,
        C=C,
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
    arguments = {
        "previous_ptr": previous,
        "lengths_ptr": lengths,
        "ties_ptr": ties,
        "maps_ptr": maps,
        "T": T,
        "N": N,
        "C": C,
        "segments": segments,
        "STEPS": steps,
        "MEETS": meets,
    }
    programs = N * segments * cdiv(C, 128)
    launch(linear_chain_path_maps_kernel, programs, **arguments, BLOCK_C=128, num_warps=4)
    launch(
        linear_chain_trace_kernel,
        N * segments,
        last_ptr=last,
        states_ptr=states,
        num_warps=1,
        **arguments,
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
    alpha = split_saved(saved, emissions, transitions)
    if transitions.ndim == 2 and plan.uses_lanes(T, N, C, plan.MAX_PARALLEL_STATES):
        sample_in_lanes(transitions, lengths, alpha, logz, uniforms, states)
        return states
    launch(
        linear_chain_sample_kernel,
        N * samples,
        transitions=strided_steps(transitions),
        lengths_ptr=lengths,
        span=alpha.span,
        alpha_ptr=alpha.states,
        logz_ptr=logz,
        uniforms=StridedUniforms(uniforms, *uniforms.stride()),
        states_ptr=states,
        T=T,
        N=N,
        C=C,
        samples=samples,
        BLOCK_PARTS=plan.parts_block(alpha.span.parts),
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
    C = len(transitions)
    words = torch.empty((samples * N, T), dtype=torch.int64, device=states.device)
    options = plan.lane_options(words.numel())
    for is_log in (False, True):
        table = score_table(transitions) if is_log else exp_table(transitions, alpha.span)
        launch(
            linear_chain_sample_words_kernel,
            cdiv(words.numel(), options["LANES"]),
            alpha_ptr=alpha.states,
            table_ptr=table,
            lengths_ptr=lengths,
            span=alpha.span,
            uniforms=StridedUniforms(uniforms, *uniforms.stride()),
            words_ptr=words,
            T=T,
            N=N,
            columns=len(words),
            C=C,
            IS_LOG=is_log,
            BLOCK_PARTS=plan.parts_block(alpha.span.parts),
            **options,
        )
    trace_words(words, lengths, logz, states, C)
