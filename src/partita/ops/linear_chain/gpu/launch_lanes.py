"""Launch the scans and paths of few states that are parallel in time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....runtime.launch import cdiv, launch, next_power_of_2
from . import plan
from .arguments import Batch, Operators, Saved, Span, strided_steps
from .best_segments import (
    linear_chain_best_groups_kernel,
    linear_chain_best_operators_kernel,
    linear_chain_best_words_kernel,
    linear_chain_trace_words_kernel,
    linear_chain_word_maps_kernel,
)
from .lanes import (
    linear_chain_lane_groups_kernel,
    linear_chain_lane_operators_kernel,
    linear_chain_lane_states_kernel,
)
from .resident import linear_chain_resident_scan_kernel
from .scan import linear_chain_table_kernel
from .segments import (
    linear_chain_boundaries_kernel,
    linear_chain_group_operators_kernel,
    linear_chain_operators_kernel,
)


def score_table(transitions: Tensor, orders: int = 1, span: Span | None = None) -> Tensor:
    """Return constant transitions in fp64, contiguous, or `[2, C, C]` with the same transposed.

    Those of each sequence are `[N, 2, C, C]`. With a span it is exp of the transitions relative to
    the greatest. Two orders without one keep the dtype, because each element is read many times.
    """
    C, sets = transitions.shape[-1], 1 if span is None else span.sets
    shape = (C, C) if orders == 1 else (sets, orders, C, C)
    dtype = transitions.dtype if orders == 2 and span is None else torch.float64
    table = torch.empty(shape, dtype=dtype, device=transitions.device)
    launch(
        linear_chain_table_kernel,
        sets * cdiv(orders * C * C, 256),
        transitions=strided_steps(transitions),
        span=span,
        table_ptr=table,
        C=C,
        number=orders * C * C,
        sets=sets,
        BLOCK=256,
        BLOCK_PARTS=plan.parts_block(0 if span is None else span.parts),
        num_warps=4,
    )
    return table


def launch_lanes(kernel: Any, lanes: int, halves: int = 1, sets: int = 1, **arguments: Any) -> None:
    """Launch a kernel with a lane for each of something, or in each half of its programs.

    No program has lanes of two sets.
    """
    options = plan.lane_options(lanes)
    launch(kernel, halves * sets * cdiv(lanes // sets, options["LANES"]), **arguments, **options)


def segment_operators(
    batch: Batch,
    transitions: Tensor,
    table: Tensor | None,
    maxima: Tensor | None,
    sizes: plan.SegmentSizes,
    options: dict[str, Any],
) -> list[Operators]:
    """Return the operators of segments, of groups and so on.

    Lanes and max-plus arithmetic read the transitions from the table, and max-plus arithmetic has
    no maxima. The options have the range of the transitions.
    """
    N, C, max_plus = batch.N, batch.C, maxima is None
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
    shared = {name: value for name, value in options.items() if name != "EXACT"}
    # The threads of a program share an operator of more states.
    by_lanes = C <= plan.MAX_LANE_STATES
    group_kernel = linear_chain_group_operators_kernel
    sets = options["span"].sets
    if by_lanes:
        batch, kernel = batch._replace(C=None), linear_chain_lane_operators_kernel
        steps |= {"table_ptr": table, "C": C, "sets": sets}
        launch_lanes(kernel, N * number * C, batch=batch, **steps, **options)
    elif max_plus:
        kernel, group_kernel = linear_chain_best_operators_kernel, linear_chain_best_groups_kernel
        shared = {"num_warps": plan.OPERATOR_WARPS}
        launch(kernel, N * number, batch=batch, table_ptr=table, AHEAD=4, **steps, **shared)
    else:
        shared = {"span": options["span"], "BLOCK_PARTS": options["BLOCK_PARTS"]}
        shared |= {"BLOCK_C": 16, "num_warps": 1}
        launch(
            linear_chain_operators_kernel,
            N * number,
            batch=batch,
            transitions=strided_steps(transitions),
            maxima_ptr=maxima,
            EXACT=options["EXACT"],
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
        members |= {"group_operators": levels[i + 1], "groups": groups, "C": C, **shared}
        if by_lanes:
            kernel = linear_chain_lane_groups_kernel
            launch_lanes(kernel, N * groups * C, sets=sets, N=N, **members)
        else:
            launch(group_kernel, N * groups, **members)
    return levels


def scan_boundaries(
    batch: Batch,
    transitions: Tensor,
    table: Tensor | None,
    maxima: Tensor | None,
    sizes: plan.SegmentSizes,
    options: dict[str, Any],
    directions: int,
    inner: bool,
    **results: Tensor | None,
) -> Tensor:
    """Return the states at the boundaries of segments, and store the results of the last token.

    Two directions are alpha and beta. Without `inner` those between the greatest groups are enough.
    """
    N, C = batch.N, batch.C
    levels = segment_operators(batch, transitions, table, maxima, sizes, options)
    known, groups, size = None, 1, next_power_of_2(sizes.counts[-1])
    for level in reversed(range(len(levels)) if inner else [len(levels) - 1]):
        number = sizes.counts[level]
        boundaries = levels[0].matrices.new_empty((directions, N, number + 1, C))
        launch(
            linear_chain_boundaries_kernel,
            groups * N * directions,
            batch=batch,
            transitions=strided_steps(transitions),
            maxima_ptr=maxima,
            operators=levels[level],
            known_ptr=known,
            boundaries_ptr=boundaries,
            segments=number,
            groups=groups,
            SIZE=size,
            DIRECTIONS=directions,
            BLOCK_C=next_power_of_2(max(C, 2)),
            num_warps=1,
            **results,
            **options,
        )
        known, groups, size = boundaries, number, sizes.size
    return boundaries


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
    table = score_table(transitions, 2, saved.span) if by_lanes else None
    shared = {"EXACT": options["EXACT"], "BLOCK_PARTS": options["BLOCK_PARTS"]}
    boundaries = scan_boundaries(
        batch,
        transitions,
        table,
        saved.maxima,
        sizes,
        {"span": saved.span, "MAX_PLUS": False, **shared},
        2 if save else 1,
        save,
        logz_ptr=logz,
        rounded_ptr=rounded,
        last_ptr=None,
    )
    if not save:
        return
    number = sizes.counts[0]
    shared |= {"boundaries_ptr": boundaries, "segments": number, "STEPS": sizes.steps}
    if by_lanes:
        launch_lanes(
            linear_chain_lane_states_kernel,
            N * number,
            halves=2,
            sets=saved.span.sets,
            batch=batch._replace(start=None, C=None),
            table_ptr=table,
            saved=saved._replace(maxima=None),
            C=C,
            STORED=4 if C == 4 else 1 if C % 2 else 2,
            **shared,
        )
    else:
        launch(
            linear_chain_resident_scan_kernel,
            number * 2 * N,
            batch=batch,
            transitions=strided_steps(transitions),
            saved=saved,
            SAVE=True,
            **shared,
            **plan.resident_options(C),
        )


def best_path_in_segments(batch: Batch, transitions: Tensor, score: Tensor, states: Tensor) -> None:
    """Find the best score `[N]` and the best path `[T, N]` of few states, parallel in time."""
    T, N, C = batch.T, batch.N, batch.C
    sizes, table = plan.lane_sizes(T, N, C), score_table(transitions)
    last = torch.empty(N, dtype=torch.int32, device=table.device)
    options = {"span": Span(None, 0, 1), "EXACT": True, "MAX_PLUS": True, "BLOCK_PARTS": 1}
    boundaries = scan_boundaries(
        batch,
        transitions,
        table,
        None,
        sizes,
        options,
        1,
        True,
        logz_ptr=None,
        rounded_ptr=score,
        last_ptr=last,
    )
    words = torch.empty((N, T), dtype=torch.int64, device=table.device)
    launch_lanes(
        linear_chain_best_words_kernel,
        N * sizes.counts[0],
        batch=batch._replace(start=None, C=None),
        table_ptr=table,
        boundaries_ptr=boundaries,
        last_ptr=last,
        words_ptr=words,
        segments=sizes.counts[0],
        C=C,
        STEPS=sizes.steps,
    )
    trace_words(words, batch.lengths, score, states, C)


def trace_words(
    words: Tensor, lengths: Tensor | None, score: Tensor, states: Tensor, C: int
) -> None:
    """Trace paths back through words of maps `[columns, T]` to states `[columns / N, T, N]`.

    A sequence whose score is -inf or NaN has no path.
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
