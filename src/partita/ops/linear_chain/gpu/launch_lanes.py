"""Launch the scans and paths of few states that are parallel in time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....runtime.launch import cdiv, launch, next_power_of_2
from . import plan
from .arguments import Batch, Operators, Saved, Span, of_first_tokens, strided_pairs
from .best_operators import linear_chain_best_groups_kernel, linear_chain_best_operators_kernel
from .best_segments import (
    linear_chain_best_boundaries_kernel,
    linear_chain_best_words_kernel,
    linear_chain_trace_words_kernel,
    linear_chain_word_maps_kernel,
)
from .lanes import (
    linear_chain_lane_groups_kernel,
    linear_chain_lane_operators_kernel,
    linear_chain_lane_states_kernel,
    linear_chain_table_kernel,
)
from .resident import linear_chain_resident_scan_kernel
from .segments import (
    linear_chain_boundaries_kernel,
    linear_chain_group_operators_kernel,
    linear_chain_operators_kernel,
)
from .steps import linear_chain_weights_kernel


def score_table(transitions: Tensor, orders: int = 1) -> Tensor:
    """Return constant transitions in fp64, contiguous, or `[2, C, C]` with the same transposed.

    Two orders keep the dtype, because each element is read many times.
    """
    C = transitions.shape[0]
    shape, dtype = ((C, C), torch.float64) if orders == 1 else ((orders, C, C), transitions.dtype)
    table = torch.empty(shape, dtype=dtype, device=transitions.device)
    launch(
        linear_chain_table_kernel,
        cdiv(table.numel(), 256),
        transitions=strided_pairs(transitions),
        table_ptr=table,
        C=C,
        number=table.numel(),
        BLOCK=256,
        num_warps=4,
    )
    return table


def exp_table(transitions: Tensor, span: Span) -> Tensor:
    """Return exp of constant transitions relative to the greatest, and the same transposed.

    Nothing is stored if the transitions need the log domain.
    """
    C = transitions.shape[0]
    table = torch.empty((2, C, C), dtype=torch.float64, device=transitions.device)
    launch(
        linear_chain_weights_kernel,
        cdiv(C, 32) ** 2,
        transitions=strided_pairs(transitions),
        span=span,
        weights_ptr=table,
        C=C,
        BLOCK=32,
        BLOCK_PARTS=plan.parts_block(span.parts),
    )
    return table


def launch_lanes(kernel: Any, lanes: int, halves: int = 1, **arguments: Any) -> None:
    """Launch a kernel with a lane for each of something, or in each half of its programs."""
    options = plan.lane_options(lanes)
    launch(kernel, halves * cdiv(lanes, options["LANES"]), **arguments, **options)


def segment_operators(
    batch: Batch,
    transitions: Tensor,
    table: Tensor | None,
    saved: Saved | None,
    exact: bool,
    sizes: plan.SegmentSizes,
) -> list[Operators]:
    """Return the operators of segments, of groups and so on.

    Args:
        batch: the scores of the states.
        transitions: `[C, C]`.
        table: the transitions that lanes and max-plus arithmetic read; else None.
        saved: the maxima and the range of the transitions, or None for max-plus arithmetic.
        exact: whether exponentials have to be right in fp64.
        sizes: how sequences are cut.
    """
    N, C, max_plus = batch.N, batch.C, saved is None
    levels = [
        Operators(
            transitions.new_empty((N, number, C, C), dtype=torch.float64),
            None if max_plus else transitions.new_empty((N, number, C), dtype=torch.float64),
            transitions.new_empty((N, number), dtype=torch.float64),
        )
        for number in sizes.counts
    ]
    number, batch = sizes.counts[0], batch._replace(start=None)
    steps: dict[str, Any] = {"operators": levels[0], "segments": number, "STEPS": sizes.steps}
    span = Span(None, 0) if saved is None else saved.span
    shared: dict[str, Any] = {"span": span, "BLOCK_PARTS": plan.parts_block(span.parts)}
    # The threads of a program share an operator of more states.
    by_lanes = C <= plan.MAX_LANE_STATES
    if by_lanes:
        shared |= {"C": C, "MAX_PLUS": max_plus}
        launch_lanes(
            linear_chain_lane_operators_kernel,
            N * number * C,
            batch=batch._replace(C=None),
            table_ptr=table,
            EXACT=exact,
            AHEAD=plan.lane_ahead(C, max_plus),
            WIDTH=plan.lane_width(batch.emissions.ptr),
            **steps,
            **shared,
        )
    elif saved is None:
        shared, kernel = {"num_warps": plan.OPERATOR_WARPS}, linear_chain_best_operators_kernel
        launch(kernel, N * number, batch=batch, table_ptr=table, AHEAD=4, **steps, **shared)
    else:
        shared |= {"BLOCK_C": 16, "num_warps": 1}
        launch(
            linear_chain_operators_kernel,
            N * number,
            batch=batch,
            transitions=strided_pairs(transitions),
            maxima_ptr=saved.maxima,
            EXACT=exact,
            AHEAD=4,
            **steps,
            **shared,
        )
    for i, groups in enumerate(sizes.counts[1:]):
        members: dict[str, Any] = {
            "operators": levels[i],
            "segments": sizes.counts[i],
            "SIZE": sizes.size,
        }
        members |= {"group_operators": levels[i + 1], "groups": groups, **shared}
        if by_lanes:
            launch_lanes(linear_chain_lane_groups_kernel, N * groups * C, N=N, **members)
        else:
            kernel = linear_chain_group_operators_kernel
            if max_plus:
                kernel = linear_chain_best_groups_kernel
            launch(kernel, N * groups, C=C, **members)
    return levels


def parallel_scan(
    batch: Batch,
    transitions: Tensor,
    saved: Saved,
    options: dict[str, Any],
    logz: Tensor,
    rounded: Tensor,
) -> None:
    """Scan alpha and beta from the states at the boundaries of segments, in linear arithmetic."""
    T, N, C, save = batch.T, batch.N, batch.C, options["SAVE"]
    by_lanes = C <= plan.MAX_LANE_STATES
    sizes = plan.lane_sizes(T, N, C) if by_lanes else plan.segment_sizes(T)
    table = exp_table(transitions, saved.span) if by_lanes else None
    levels = segment_operators(batch, transitions, table, saved, options["EXACT"], sizes)
    shared = {"EXACT": options["EXACT"], "BLOCK_PARTS": options["BLOCK_PARTS"]}
    known, groups, size = None, 1, next_power_of_2(sizes.counts[-1])
    for level in reversed(range(len(levels)) if save else [len(levels) - 1]):
        number = sizes.counts[level]
        boundaries = logz.new_empty((2, N, number + 1, C))
        launch(
            linear_chain_boundaries_kernel,
            groups * N * (2 if save else 1),
            batch=of_first_tokens(batch),
            span=saved.span,
            maxima_ptr=saved.maxima,
            operators=levels[level],
            known_ptr=known,
            boundaries_ptr=boundaries,
            logz_ptr=logz,
            rounded_ptr=rounded,
            segments=number,
            groups=groups,
            SIZE=size,
            DIRECTIONS=2 if save else 1,
            BLOCK_C=plan.small_block(C),
            num_warps=1,
            **shared,
        )
        known, groups, size = boundaries, number, sizes.size
    if not save:
        return
    shared |= {"boundaries_ptr": known, "segments": groups, "STEPS": sizes.steps}
    if by_lanes:
        launch_lanes(
            linear_chain_lane_states_kernel,
            N * groups,
            halves=2,
            batch=batch._replace(start=None, C=None),
            table_ptr=table,
            saved=saved._replace(maxima=None),
            C=C,
            WIDTH=plan.lane_width(batch.emissions.ptr),
            **shared,
            **plan.lane_state_options(C),
        )
    else:
        launch(
            linear_chain_resident_scan_kernel,
            groups * 2 * N,
            batch=batch,
            transitions=strided_pairs(transitions),
            saved=saved,
            SAVE=True,
            **shared,
            **plan.resident_options(C),
        )


def best_path_in_lanes(batch: Batch, transitions: Tensor, score: Tensor, states: Tensor) -> None:
    """Find the best score `[N]` and the best path `[T, N]` of few states, parallel in time."""
    T, N, C = batch.T, batch.N, batch.C
    sizes, table = plan.lane_sizes(T, N, C), score_table(transitions)
    levels = segment_operators(batch, transitions, table, None, True, sizes)
    last = torch.empty(N, dtype=torch.int32, device=table.device)
    known, groups, size = None, 1, next_power_of_2(sizes.counts[-1])
    for level in reversed(range(len(levels))):
        number = sizes.counts[level]
        boundaries = table.new_empty((N, number, C))
        launch(
            linear_chain_best_boundaries_kernel,
            groups * N,
            batch=of_first_tokens(batch),
            table_ptr=table,
            operators=levels[level],
            known_ptr=known,
            boundaries_ptr=boundaries,
            score_ptr=score,
            last_ptr=last,
            segments=number,
            groups=groups,
            SIZE=size,
            BLOCK_C=plan.small_block(C),
            num_warps=1,
        )
        known, groups, size = boundaries, number, sizes.size
    words = torch.empty((N, T), dtype=torch.int64, device=table.device)
    launch_lanes(
        linear_chain_best_words_kernel,
        N * groups,
        batch=batch._replace(start=None, C=None),
        table_ptr=table,
        boundaries_ptr=known,
        last_ptr=last,
        words_ptr=words,
        segments=groups,
        C=C,
        STEPS=sizes.steps,
        AHEAD=plan.lane_ahead(C, True),
    )
    trace_words(words, batch.lengths, score, states, C)


def trace_words(
    words: Tensor, lengths: Tensor | None, score: Tensor, states: Tensor, C: int
) -> None:
    """Trace paths back through words of maps.

    Args:
        words: `[columns, T]`, for each token the state at it given each state at the next one.
        lengths: `[N]` or None.
        score: `[N]`; a sequence whose score is -inf or NaN has no path.
        states: `[columns / N, T, N]`, the result.
        C: the number of states.
    """
    columns, N, steps = len(words), states.shape[-1], plan.WORD_STEPS
    levels = [words]
    while levels[-1].shape[1] > 2 * steps:
        length = levels[-1].shape[1]
        groups = cdiv(length, steps)
        maps = torch.empty((columns, groups), dtype=torch.int64, device=words.device)
        launch_lanes(
            linear_chain_word_maps_kernel,
            columns * groups,
            words_ptr=levels[-1],
            maps_ptr=maps,
            columns=columns,
            length=length,
            groups=groups,
            C=C,
            SIZE=steps,
        )
        levels.append(maps)
    known, groups, size = None, 1, next_power_of_2(levels[-1].shape[1])
    for level in reversed(range(len(levels))):
        final, length = level == 0, levels[level].shape[1]
        following = states
        if not final:
            following = torch.empty((columns, length), dtype=torch.int32, device=words.device)
        launch_lanes(
            linear_chain_trace_words_kernel,
            columns * groups,
            words_ptr=levels[level],
            known_ptr=known,
            states_ptr=following,
            lengths_ptr=lengths,
            score_ptr=score,
            columns=columns,
            N=N,
            length=length,
            groups=groups,
            SIZE=size,
            FINAL=final,
        )
        known, groups, size = following, length, steps
