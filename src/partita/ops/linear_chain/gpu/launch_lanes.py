"""Launch the scans of few states that are parallel in time, with lanes for segments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....runtime.launch import cdiv, launch, next_power_of_2
from . import plan
from .best_operators import linear_chain_best_groups_kernel, linear_chain_best_operators_kernel
from .best_segments import linear_chain_best_boundaries_kernel, linear_chain_best_words_kernel
from .lane_states import linear_chain_lane_states_kernel
from .lanes import (
    linear_chain_lane_groups_kernel,
    linear_chain_lane_operators_kernel,
    linear_chain_table_kernel,
)
from .path_words import linear_chain_trace_words_kernel, linear_chain_word_maps_kernel
from .saved import Saved, end_strides
from .segments import linear_chain_boundaries_kernel
from .steps import linear_chain_weights_kernel


class Operators(NamedTuple):
    """The operators of all segments, or of all groups of one level.

    Fields:
        matrices: `[N, number, C, C]` fp64.
        exponents: `[N, number, C]` fp64, of the rows; None in max-plus arithmetic.
        offsets: `[N, number]` fp64, logarithms of what was taken out; in max-plus arithmetic 0, or
            NaN for a segment that has one.
    """

    matrices: Tensor
    exponents: Tensor | None
    offsets: Tensor


def score_table(transitions: Tensor, orders: int = 1) -> Tensor:
    """Return constant transitions in fp64, contiguous, or `[2, C, C]` with the same transposed.

    Two orders keep the dtype, because each element is read many times.
    """
    C = transitions.shape[0]
    shape, dtype = ((C, C), torch.float64) if orders == 1 else ((orders, C, C), transitions.dtype)
    table = torch.empty(shape, dtype=dtype, device=transitions.device)
    arguments = (transitions, table, C, table.numel(), *transitions.stride())
    launch(linear_chain_table_kernel, cdiv(table.numel(), 256), *arguments, BLOCK=256, num_warps=4)
    return table


def exp_table(transitions: Tensor, span: Tensor) -> Tensor:
    """Return exp of constant transitions relative to the greatest, and the same transposed.

    Nothing is stored if the transitions need the log domain.
    """
    C, parts = transitions.shape[0], plan.range_parts(transitions)
    table = torch.empty((2, C, C), dtype=torch.float64, device=transitions.device)
    launch(
        linear_chain_weights_kernel,
        cdiv(C, 32) ** 2,
        *(transitions, span, table, C, parts, *transitions.stride()),
        BLOCK=32,
        BLOCK_PARTS=plan.parts_block(parts),
    )
    return table


def lane_operators(
    emissions: Tensor,
    table: Tensor,
    end: Tensor | None,
    lengths: Tensor | None,
    saved: Saved | None,
    sizes: plan.LaneSizes,
    exact: bool,
) -> list[Operators]:
    """Return the operators of segments, of groups and so on; in max-plus without `saved`."""
    T, N, C = emissions.shape
    device: dict[str, Any] = {"device": emissions.device, "dtype": torch.float64}
    levels = [
        Operators(
            torch.empty((N, number, C, C), **device),
            None if saved is None else torch.empty((N, number, C), **device),
            torch.empty((N, number), **device),
        )
        for number in sizes.counts
    ]
    parts = 0 if saved is None else -(-saved.span.numel() // 2)
    options = {"C": C, "MAX_PLUS": saved is None, "BLOCK_PARTS": plan.parts_block(parts)}
    span = None if saved is None else saved.span
    lanes = N * sizes.counts[0] * C
    block = plan.lane_options(lanes)
    launch(
        linear_chain_lane_operators_kernel,
        cdiv(lanes, block["LANES"]),
        *(emissions, table, end, lengths, span, *levels[0]),
        *(T, N, parts, sizes.counts[0], *emissions.stride(), *end_strides(end)),
        STEPS=sizes.steps,
        EXACT=exact,
        AHEAD=plan.lane_ahead(C, saved is None),
        WIDTH=plan.lane_width(emissions),
        **options,
        **block,
    )
    for i, number in enumerate(sizes.counts[1:]):
        block = plan.lane_options(N * number * C)
        launch(
            linear_chain_lane_groups_kernel,
            cdiv(N * number * C, block["LANES"]),
            *(*levels[i], span, *levels[i + 1], N, parts, sizes.counts[i], number),
            SIZE=sizes.size,
            **options,
            **block,
        )
    return levels


def best_operators(
    emissions: Tensor,
    table: Tensor,
    end: Tensor | None,
    lengths: Tensor | None,
    sizes: plan.LaneSizes,
) -> list[Operators]:
    """Return the operators in max-plus arithmetic of segments, of groups and so on."""
    T, N, C = emissions.shape
    if not plan.shares_operators(C):
        return lane_operators(emissions, table, end, lengths, None, sizes, True)
    device: dict[str, Any] = {"device": emissions.device, "dtype": torch.float64}
    levels = [
        Operators(torch.empty((N, n, C, C), **device), None, torch.empty((N, n), **device))
        for n in sizes.counts
    ]
    launch(
        linear_chain_best_operators_kernel,
        N * sizes.counts[0],
        *(emissions, table, end, lengths, levels[0].matrices, levels[0].offsets),
        *(T, N, C, sizes.counts[0], *emissions.stride(), *end_strides(end)),
        STEPS=sizes.steps,
        AHEAD=4,
        num_warps=plan.OPERATOR_WARPS,
    )
    for i, number in enumerate(sizes.counts[1:]):
        tensors = (*levels[i][::2], *levels[i + 1][::2])
        launch(
            linear_chain_best_groups_kernel,
            N * number,
            *(*tensors, C, sizes.counts[i], number),
            SIZE=sizes.size,
            num_warps=plan.OPERATOR_WARPS,
        )
    return levels


def lane_scan(
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
    """Scan alpha and beta of few states in linear arithmetic."""
    T, N, C = emissions.shape
    sizes, parts = plan.lane_sizes(T, N, C), plan.range_parts(transitions)
    exact, directions = plan.is_exact(emissions, transitions), 2 if save else 1
    table = exp_table(transitions, saved.span)
    levels = lane_operators(emissions, table, end, lengths, saved, sizes, exact)
    options: dict[str, Any] = {"EXACT": exact, "BLOCK_PARTS": plan.parts_block(parts)}
    known, groups, size = None, 1, next_power_of_2(sizes.counts[-1])
    for level in reversed(range(len(levels)) if save else [len(levels) - 1]):
        number = sizes.counts[level]
        shape = (2, N, number + 1, C)
        boundaries = torch.empty(shape, dtype=torch.float64, device=emissions.device)
        launch(
            linear_chain_boundaries_kernel,
            groups * N * directions,
            *(emissions, start, end, lengths, saved.span, saved.maxima, *levels[level]),
            *(known, boundaries, logz, rounded, T, N, C, parts, number, groups),
            *(*emissions.stride()[1:], *end_strides(start), *end_strides(end)),
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
    options |= {"C": C, "STEPS": sizes.steps, "WIDTH": plan.lane_width(emissions), **block}
    options |= plan.lane_state_options(C)
    launch(
        linear_chain_lane_states_kernel,
        2 * cdiv(N * groups, block["LANES"]),
        *(emissions, table, end, lengths, saved.span, known),
        *(saved.states, saved.scales, T, N, parts, groups, *emissions.stride(), *end_strides(end)),
        **options,
    )


def best_path_in_lanes(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    score: Tensor,
    states: Tensor,
) -> None:
    """Find the best score `[N]` and the best path `[T, N]` of few states, parallel in time."""
    T, N, C = emissions.shape
    device: dict[str, Any] = {"device": emissions.device}
    sizes, table = plan.lane_sizes(T, N, C), score_table(transitions)
    levels = best_operators(emissions, table, end, lengths, sizes)
    last = torch.empty(N, dtype=torch.int32, **device)
    known, groups, size = None, 1, next_power_of_2(sizes.counts[-1])
    for level in reversed(range(len(levels))):
        number = sizes.counts[level]
        boundaries = torch.empty((N, number, C), dtype=torch.float64, **device)
        launch(
            linear_chain_best_boundaries_kernel,
            groups * N,
            *(emissions, table, start, end, lengths),
            *(levels[level].matrices, levels[level].offsets, known, boundaries, score, last),
            *(T, N, C, number, groups, *emissions.stride()[1:]),
            *(*end_strides(start), *end_strides(end)),
            SIZE=size,
            BLOCK_C=plan.small_block(C),
            num_warps=1,
        )
        known, groups, size = boundaries, number, sizes.size
    words = torch.empty((N, T), dtype=torch.int64, **device)
    block = plan.lane_options(N * groups)
    launch(
        linear_chain_best_words_kernel,
        cdiv(N * groups, block["LANES"]),
        *(emissions, table, end, lengths, known, last, words),
        *(T, N, groups, *emissions.stride(), *end_strides(end)),
        C=C,
        STEPS=sizes.steps,
        AHEAD=plan.lane_ahead(C, True),
        **block,
    )
    trace_words(words, lengths, score, states, C)


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
        programs, sizes = cdiv(columns * groups, block["LANES"]), (columns, length, groups)
        arguments = (levels[-1], maps, *sizes)
        launch(linear_chain_word_maps_kernel, programs, *arguments, C=C, SIZE=steps, **block)
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
            *(levels[level], known, following, lengths, score, columns, N, length, groups),
            SIZE=size,
            FINAL=final,
            **block,
        )
        known, groups, size = following, length, steps
