"""Launch the linear scans of dense chains that are parallel in time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....runtime.launch import launch
from . import plan
from .resident import linear_chain_resident_scan_kernel
from .saved import Saved, end_strides
from .segments import (
    linear_chain_boundaries_kernel,
    linear_chain_group_operators_kernel,
    linear_chain_operators_kernel,
)


def parallel_scan(
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
    """Scan alpha and beta from the states at the boundaries of segments, in linear arithmetic."""
    T, N, C = emissions.shape
    sizes, parts = plan.segment_sizes(T), plan.range_parts(transitions)
    device: dict[str, Any] = {"device": emissions.device, "dtype": torch.float64}
    options: dict[str, Any] = {"BLOCK_C": 16, "BLOCK_PARTS": plan.parts_block(parts)}
    exact = {"EXACT": plan.is_exact(emissions, transitions)}
    operators, group_operators = (
        (
            torch.empty((N, number, C, C), **device),
            torch.empty((N, number, C), **device),
            torch.empty((N, number), **device),
        )
        for number in (sizes.segments, sizes.groups)
    )
    boundaries, known = (
        torch.empty((2, N, number + 1, C), **device) for number in (sizes.segments, sizes.groups)
    )
    launch(
        linear_chain_operators_kernel,
        N * sizes.segments,
        *(emissions, transitions, end, lengths, saved.span, saved.maxima),
        *operators,
        *(T, N, C, parts, sizes.segments),
        *emissions.stride(),
        *transitions.stride(),
        *end_strides(end),
        STEPS=sizes.steps,
        AHEAD=4,
        num_warps=1,
        **exact,
        **options,
    )
    launch(
        linear_chain_group_operators_kernel,
        N * sizes.groups,
        saved.span,
        *operators,
        *group_operators,
        *(C, parts, sizes.segments, sizes.groups),
        SIZE=sizes.size,
        num_warps=1,
        **options,
    )
    levels: list[tuple[Any, ...]] = [(group_operators, None, known, sizes.groups, 1, sizes.groups)]
    if save:
        levels.append((operators, known, boundaries, sizes.segments, sizes.groups, sizes.size))
    for level, outer, inner, number, groups, size in levels:
        launch(
            linear_chain_boundaries_kernel,
            groups * N * (2 if save else 1),
            *(emissions, start, end, lengths, saved.span, saved.maxima),
            *level,
            *(outer, inner, logz, rounded),
            *(T, N, C, parts, number, groups),
            *emissions.stride()[1:],
            *end_strides(start),
            *end_strides(end),
            SIZE=size,
            DIRECTIONS=2 if save else 1,
            num_warps=1,
            **exact,
            **options,
        )
    if save:
        launch(
            linear_chain_resident_scan_kernel,
            sizes.segments * 2 * N,
            *(emissions, transitions, start, end, lengths, *saved[3:1:-1], *saved[:2]),
            *(boundaries, None, None),
            *(T, N, C, parts, sizes.segments),
            *emissions.stride(),
            *transitions.stride(),
            *end_strides(start),
            *end_strides(end),
            SAVE=True,
            STEPS=sizes.steps,
            BLOCK_PARTS=plan.parts_block(parts),
            **exact,
            **plan.resident_options(C),
        )
