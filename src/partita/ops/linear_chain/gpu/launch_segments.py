"""Launch the linear scans of dense chains that are parallel in time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....runtime.launch import launch
from . import plan
from .arguments import (
    Batch,
    Operators,
    Saved,
    of_first_tokens,
    strided_pairs,
)
from .resident import linear_chain_resident_scan_kernel
from .segments import (
    linear_chain_boundaries_kernel,
    linear_chain_group_operators_kernel,
    linear_chain_operators_kernel,
)


def parallel_scan(
    batch: Batch, transitions: Tensor, saved: Saved, save: bool, logz: Tensor, rounded: Tensor
) -> None:
    """Scan alpha and beta from the states at the boundaries of segments, in linear arithmetic."""
    N, C, sizes = batch.N, batch.C, plan.segment_sizes(batch.T)
    exact = plan.is_exact(batch.emissions.ptr, transitions)
    options: dict[str, Any] = {"BLOCK_C": 16, "BLOCK_PARTS": plan.parts_block(saved.span.parts)}
    operators, group_operators = (
        Operators(*map(logz.new_empty, ((N, number, C, C), (N, number, C), (N, number))))
        for number in (sizes.segments, sizes.groups)
    )
    boundaries, known = (
        logz.new_empty((2, N, number + 1, C)) for number in (sizes.segments, sizes.groups)
    )
    launch(
        linear_chain_operators_kernel,
        N * sizes.segments,
        batch=batch._replace(start=None),
        transitions=strided_pairs(transitions),
        span=saved.span,
        maxima_ptr=saved.maxima,
        operators=operators,
        segments=sizes.segments,
        STEPS=sizes.steps,
        EXACT=exact,
        AHEAD=4,
        num_warps=1,
        **options,
    )
    launch(
        linear_chain_group_operators_kernel,
        N * sizes.groups,
        span=saved.span,
        operators=operators,
        group_operators=group_operators,
        C=C,
        segments=sizes.segments,
        groups=sizes.groups,
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
            batch=of_first_tokens(batch),
            span=saved.span,
            maxima_ptr=saved.maxima,
            operators=level,
            known_ptr=outer,
            boundaries_ptr=inner,
            logz_ptr=logz,
            rounded_ptr=rounded,
            segments=number,
            groups=groups,
            SIZE=size,
            DIRECTIONS=2 if save else 1,
            EXACT=exact,
            num_warps=1,
            **options,
        )
    if save:
        launch(
            linear_chain_resident_scan_kernel,
            sizes.segments * 2 * N,
            batch=batch,
            transitions=strided_pairs(transitions),
            saved=saved,
            boundaries_ptr=boundaries,
            logz_ptr=None,
            rounded_ptr=None,
            segments=sizes.segments,
            SAVE=True,
            EXACT=exact,
            STEPS=sizes.steps,
            BLOCK_PARTS=options["BLOCK_PARTS"],
            **plan.resident_options(C),
        )
