"""Launch the scans of few states that are parallel in time, with lanes for segments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....runtime.launch import cdiv, launch, next_power_of_2
from . import plan
from .arguments import Batch, Operators, Saved, Span, of_first_tokens, strided_pairs
from .best_operators import linear_chain_best_groups_kernel, linear_chain_best_operators_kernel
from .best_segments import linear_chain_best_boundaries_kernel, linear_chain_best_words_kernel
from .lane_states import linear_chain_lane_states_kernel
from .lanes import (
    linear_chain_lane_groups_kernel,
    linear_chain_lane_operators_kernel,
    linear_chain_table_kernel,
)
from .path_words import linear_chain_trace_words_kernel, linear_chain_word_maps_kernel
from .segments import linear_chain_boundaries_kernel
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


def lane_operators(
    batch: Batch, table: Tensor, span: Span | None, sizes: plan.LaneSizes, exact: bool
) -> list[Operators]:
    """Return the operators of segments, of groups and so on; in max-plus without `span`."""
    N, C, number = batch.N, batch.C, sizes.counts[0]
    levels = empty_levels(batch, table, sizes, span is not None)
    arguments: dict[str, Any] = {"C": C, "MAX_PLUS": span is None, "span": span or Span(None, 0)}
    arguments["BLOCK_PARTS"] = plan.parts_block(arguments["span"].parts)
    block = plan.lane_options(N * number * C)
    launch(
        linear_chain_lane_operators_kernel,
        cdiv(N * number * C, block["LANES"]),
        batch=batch._replace(start=None, C=None),
        table_ptr=table,
        operators=levels[0],
        segments=number,
        STEPS=sizes.steps,
        EXACT=exact,
        AHEAD=plan.lane_ahead(C, span is None),
        WIDTH=plan.lane_width(batch.emissions.ptr),
        **arguments,
        **block,
    )
    for i, number in enumerate(sizes.counts[1:]):
        block = plan.lane_options(N * number * C)
        launch(
            linear_chain_lane_groups_kernel,
            cdiv(N * number * C, block["LANES"]),
            operators=levels[i],
            group_operators=levels[i + 1],
            N=N,
            segments=sizes.counts[i],
            groups=number,
            SIZE=sizes.size,
            **arguments,
            **block,
        )
    return levels


def empty_levels(
    batch: Batch, table: Tensor, sizes: plan.LaneSizes, with_exponents: bool
) -> list[Operators]:
    """Return memory for the operators of segments, of groups and so on."""
    N, C = batch.N, batch.C
    return [
        Operators(
            table.new_empty((N, number, C, C)),
            table.new_empty((N, number, C)) if with_exponents else None,
            table.new_empty((N, number)),
        )
        for number in sizes.counts
    ]


def best_operators(batch: Batch, table: Tensor, sizes: plan.LaneSizes) -> list[Operators]:
    """Return the operators in max-plus arithmetic of segments, of groups and so on."""
    if not plan.shares_operators(batch.C):
        return lane_operators(batch, table, None, sizes, True)
    levels = empty_levels(batch, table, sizes, False)
    launch(
        linear_chain_best_operators_kernel,
        batch.N * sizes.counts[0],
        batch=batch._replace(start=None),
        table_ptr=table,
        operators=levels[0],
        segments=sizes.counts[0],
        STEPS=sizes.steps,
        AHEAD=4,
        num_warps=plan.OPERATOR_WARPS,
    )
    for i, number in enumerate(sizes.counts[1:]):
        launch(
            linear_chain_best_groups_kernel,
            batch.N * number,
            operators=levels[i],
            group_operators=levels[i + 1],
            C=batch.C,
            segments=sizes.counts[i],
            groups=number,
            SIZE=sizes.size,
            num_warps=plan.OPERATOR_WARPS,
        )
    return levels


def lane_scan(
    batch: Batch, transitions: Tensor, saved: Saved, save: bool, logz: Tensor, rounded: Tensor
) -> None:
    """Scan alpha and beta of few states in linear arithmetic."""
    N, C, sizes = batch.N, batch.C, plan.lane_sizes(batch.T, batch.N, batch.C)
    exact, directions = plan.is_exact(batch.emissions.ptr, transitions), 2 if save else 1
    table = exp_table(transitions, saved.span)
    levels = lane_operators(batch, table, saved.span, sizes, exact)
    options = {"EXACT": exact, "BLOCK_PARTS": plan.parts_block(saved.span.parts)}
    known, groups, size = None, 1, next_power_of_2(sizes.counts[-1])
    for level in reversed(range(len(levels)) if save else [len(levels) - 1]):
        number = sizes.counts[level]
        boundaries = table.new_empty((2, N, number + 1, C))
        launch(
            linear_chain_boundaries_kernel,
            groups * N * directions,
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
            DIRECTIONS=directions,
            BLOCK_C=plan.small_block(C),
            num_warps=1,
            **options,
        )
        known, groups, size = boundaries, number, sizes.size
    if not save:
        return
    block = plan.lane_options(N * groups)
    launch(
        linear_chain_lane_states_kernel,
        2 * cdiv(N * groups, block["LANES"]),
        batch=batch._replace(start=None, C=None),
        table_ptr=table,
        boundaries_ptr=known,
        saved=saved._replace(maxima=None),
        segments=groups,
        C=C,
        STEPS=sizes.steps,
        WIDTH=plan.lane_width(batch.emissions.ptr),
        **options,
        **block,
        **plan.lane_state_options(C),
    )


def best_path_in_lanes(batch: Batch, transitions: Tensor, score: Tensor, states: Tensor) -> None:
    """Find the best score `[N]` and the best path `[T, N]` of few states, parallel in time."""
    T, N, C = batch.T, batch.N, batch.C
    sizes, table = plan.lane_sizes(T, N, C), score_table(transitions)
    levels = best_operators(batch, table, sizes)
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
    block = plan.lane_options(N * groups)
    launch(
        linear_chain_best_words_kernel,
        cdiv(N * groups, block["LANES"]),
        batch=batch._replace(start=None, C=None),
        table_ptr=table,
        boundaries_ptr=known,
        last_ptr=last,
        words_ptr=words,
        segments=groups,
        C=C,
        STEPS=sizes.steps,
        AHEAD=plan.lane_ahead(C, True),
        **block,
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
        block = plan.lane_options(columns * groups)
        launch(
            linear_chain_word_maps_kernel,
            cdiv(columns * groups, block["LANES"]),
            words_ptr=levels[-1],
            maps_ptr=maps,
            columns=columns,
            length=length,
            groups=groups,
            C=C,
            SIZE=steps,
            **block,
        )
        levels.append(maps)
    known, groups, size = None, 1, next_power_of_2(levels[-1].shape[1])
    for level in reversed(range(len(levels))):
        final, length = level == 0, levels[level].shape[1]
        following = states
        if not final:
            following = torch.empty((columns, length), dtype=torch.int32, device=words.device)
        block = plan.lane_options(columns * groups)
        launch(
            linear_chain_trace_words_kernel,
            cdiv(columns * groups, block["LANES"]),
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
            **block,
        )
        known, groups, size = following, length, steps
