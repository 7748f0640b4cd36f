"""Launch the kernels for paths of dense linear chains: the best one, and samples."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....primitives.gpu.target import target_of
from ....runtime.launch import cdiv, launch, next_power_of_2
from ..common import LinearChainPotentials, fake_sample, fake_viterbi
from . import plan
from .arguments import (
    Batch,
    StridedSteps,
    StridedUniforms,
    batch_of,
    split_saved,
    strided_steps,
)
from .launch import linear_chain_logz
from .launch_lanes import best_path_in_segments, launch_lanes, score_table, trace_words
from .sample import linear_chain_sample_kernel, linear_chain_sample_words_kernel
from .viterbi import (
    linear_chain_best_last_kernel,
    linear_chain_best_states_kernel,
    linear_chain_best_ties_kernel,
    linear_chain_best_trace_kernel,
    linear_chain_path_maps_kernel,
    linear_chain_resident_best_kernel,
    linear_chain_strided_best_kernel,
    linear_chain_trace_kernel,
    linear_chain_viterbi_kernel,
)


def linear_chain_viterbi(chain: LinearChainPotentials) -> tuple[Tensor, Tensor]:
    """Return the best score `[N]` and the states of the best path `[T, N]`."""
    emissions, transitions = chain[:2]
    T, N, C = emissions.shape
    device = emissions.device
    score, states = fake_viterbi(emissions)
    batch, constant = batch_of(chain), transitions.ndim == 2
    target = target_of(device)
    if constant and plan.is_parallel(T, N, C, True, target):
        best_path_in_segments(batch, transitions, score, states)
    elif plan.stores_previous(C, constant, target):
        previous = torch.empty((T, N, C), dtype=torch.int16, device=device)
        last = torch.empty(N, dtype=torch.int32, device=device)
        block = next_power_of_2(max(C, 2))
        launch(
            linear_chain_viterbi_kernel,
            N,
            batch=batch,
            transitions=strided_steps(transitions),
            previous_ptr=previous,
            score_ptr=score,
            last_ptr=last,
            BLOCK_C=block,
            num_warps=plan.warps(block * block // 16),
        )
        trace(batch, previous, None, last, states, False)
    else:
        # Scores of half types tie often, and what follows a tie is scanned again.
        itemsize = min(emissions.element_size(), transitions.element_size())
        meets = itemsize >= 4 and plan.meets(T, N, C, constant, target)
        best_path_from_scores(batch, transitions, score, states, meets)
    return score, states


def best_path_from_scores(
    batch: Batch, transitions: Tensor, score: Tensor, states: Tensor, meets: bool
) -> None:
    """Find the best score `[N]` and path `[T, N]` from the best scores of all states.

    With `meets` the scans from both ends meet in the middle. Where the path after the middle has a
    tie, the sequence is scanned from its middle to its end as well, because the order of ties is
    that of a scan from the start.
    """
    T, N, C, device = batch.T, batch.N, batch.C, score.device
    scores = torch.empty((2, T + 1, N, C), dtype=torch.float64, device=device)
    resident = plan.resident_best(C, transitions.ndim == 2)
    # The steps of many states store that there is a NaN, and not that there is none.
    is_nan = (torch.empty if resident else torch.zeros)((2, N), dtype=torch.int32, device=device)
    last, tied = torch.empty((2, N), dtype=torch.int32, device=device).unbind()
    previous = torch.empty((T, N, C) if resident else 0, dtype=torch.int16, device=device)
    table = score_table(transitions, 2) if meets else None
    shared = {"states_ptr": scores, "lengths_ptr": batch.lengths, **batch.sizes}
    for ties in (None, tied) if meets else (None,):  # then the sequences with ties alone
        both = meets and ties is None
        steps = scan_best(batch, transitions, scores, is_nan, meets, ties)
        launch(
            linear_chain_best_last_kernel,
            N,
            is_nan_ptr=is_nan,
            score_ptr=score,
            last_ptr=last,
            ties_ptr=tied if meets else None,
            **shared,
            MEETS=both,
            BLOCK_C=next_power_of_2(C),
            num_warps=plan.warps(C // 4),
        )
        if not resident:
            block = next_power_of_2(max(C, 32))
            launch(
                linear_chain_best_trace_kernel,
                N,
                transitions=steps,
                last_ptr=last,
                path_ptr=states,
                **shared,
                BLOCK_C=block,
                num_warps=plan.warps(block // 4),
            )
            return
        block = min(64, next_power_of_2(max(C, 16)))
        programs = cdiv((T - 1) * N, 32) * cdiv(C, block)
        launch(
            linear_chain_best_states_kernel,
            2 * programs if both else programs,
            transitions=steps if table is None else StridedSteps(table, 0, 0, C, 1),
            previous_ptr=previous,
            ties_ptr=ties,
            **shared,
            MEETS=both,
            ROWS=32,
            BLOCK_C=block,
            UNROLL=4,
            num_warps=4,
        )
        trace(batch, previous, ties, last, states, both)
        if both:
            rows = max(1, 1024 // next_power_of_2(C))
            launch(
                linear_chain_best_ties_kernel,
                cdiv((T - 1) * N, rows),
                table_ptr=table,
                path_ptr=states,
                ties_ptr=tied,
                **shared,
                ROWS=rows,
                BLOCK_C=next_power_of_2(C),
                num_warps=4,
            )


def scan_best(
    batch: Batch,
    transitions: Tensor,
    scores: Tensor,
    is_nan: Tensor,
    meets: bool,
    ties: Tensor | None,
) -> StridedSteps:
    """Store the best scores `[2, T + 1, N, C]` of all states and which sequences have a NaN.

    With `meets` they are scanned from both ends, or if there are ties, from the middle to the end.
    The transitions that paths are traced through are returned.
    """
    N, C, constant = batch.N, batch.C, transitions.ndim == 2
    steps, arguments = strided_steps(transitions), {"batch": batch, "states_ptr": scores}
    if plan.resident_best(C, constant):
        launch(
            linear_chain_resident_best_kernel,
            2 * N if meets and ties is None else N,
            transitions=steps,
            is_nan_ptr=is_nan if ties is None else None,
            ties_ptr=ties,
            MEETS=meets,
            **arguments,
            **plan.resident_options(C),
        )
        return steps
    if constant:
        # The states that a step leaves are side by side for each state that it enters.
        steps = StridedSteps(score_table(transitions.T), 0, 0, 1, C)
    by_sequence = transitions.ndim == 4
    programs = cdiv(C, 8) * (N if by_sequence else cdiv(N, 8))
    for t in range(batch.T):
        launch(
            linear_chain_strided_best_kernel,
            programs,
            transitions=steps,
            is_nan_ptr=is_nan,
            t=t,
            BY_SEQUENCE=by_sequence,
            UNROLL=16 if C > 256 else 8,
            num_warps=8,
            **arguments,
        )
    return steps


def trace(
    batch: Batch,
    previous: Tensor,
    ties: Tensor | None,
    last: Tensor,
    states: Tensor,
    meets: bool,
) -> None:
    """Trace the best paths from their last states, or from the middle in both directions."""
    T, N, C = batch.T, batch.N, batch.C
    steps = max(8, next_power_of_2(round(math.sqrt(T))))
    segments = 2 * cdiv(T, 2 * steps) if meets else cdiv(T, steps)
    arguments = {
        "previous_ptr": previous,
        "lengths_ptr": batch.lengths,
        "ties_ptr": ties,
        "maps_ptr": torch.empty((N, segments, C), dtype=torch.int32, device=previous.device),
        "segments": segments,
        "STEPS": steps,
        "MEETS": meets,
        **batch.sizes,
    }
    programs = N * segments * cdiv(C, 128)
    launch(linear_chain_path_maps_kernel, programs, **arguments, BLOCK_C=128, num_warps=4)
    arguments |= {"last_ptr": last, "states_ptr": states}
    launch(linear_chain_trace_kernel, N * segments, **arguments, num_warps=1)


def linear_chain_sample(chain: LinearChainPotentials, uniforms: Tensor) -> Tensor:
    """Return the states `[k, T, N]` of k paths from the posterior."""
    T, N, C = chain.emissions.shape
    samples, transitions = uniforms.shape[1], chain.transitions
    states = fake_sample(chain.emissions, uniforms)
    batch = batch_of(chain)
    logz, _, saved = linear_chain_logz(chain._replace(lengths=batch.lengths), True)
    alpha = split_saved(saved, chain)
    arguments = {
        "alpha_ptr": alpha.states,
        "lengths_ptr": batch.lengths,
        "span": alpha.span,
        "uniforms": StridedUniforms(uniforms, *uniforms.stride()),
        **batch.sizes,
        "BLOCK_PARTS": plan.parts_block(alpha.span.parts),
    }
    if transitions.ndim == 2 and plan.uses_lanes(T, N, C, plan.MAX_PARALLEL_STATES):
        words = torch.empty((samples * N, T), dtype=torch.int64, device=states.device)
        arguments |= {"words_ptr": words, "columns": len(words)}
        for is_log in (False, True):
            options = (1, None) if is_log else (2, alpha.span)
            table = score_table(transitions, *options)
            kernel = linear_chain_sample_words_kernel
            launch_lanes(kernel, words.numel(), table_ptr=table, IS_LOG=is_log, **arguments)
        trace_words(words, batch.lengths, logz, states, C)
        return states
    block = next_power_of_2(max(C, 2))
    launch(
        linear_chain_sample_kernel,
        N * samples,
        transitions=strided_steps(transitions),
        logz_ptr=logz,
        states_ptr=states,
        samples=samples,
        **arguments,
        BLOCK_C=block,
        num_warps=plan.warps(block // 4),
    )
    return states
