"""Launch the scans of chains that are parallel in time; see `segments.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....runtime.launch import launch, tl_acc_dtype
from ....runtime.sizes import cdiv
from . import plan
from .edge_table import EdgeTable
from .segment_gradient import chain_segment_gradient_kernel
from .segments import (
    chain_boundaries_kernel,
    chain_group_operators_kernel,
    chain_segment_operators_kernel,
)


def scan_boundaries(
    scores: Tensor,
    table: EdgeTable,
    ends: tuple[Tensor, Tensor, Tensor | None],
    boundaries: Tensor | None,
    directions: int,
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Scan the operators of segments, and fill in the results of whole chains.

    Args:
        scores: `[T, N, C, K]`.
        table: the edges of the chain.
        ends: initial and final scores, and lengths.
        boundaries: memory of at least `[directions, N, segments + 1, C]` fp64 for the states at the
            boundaries of segments, or None if they have no use.
        directions: 2 for alpha and beta under Log, 1 for alpha alone; Max if there is a last state.
        outputs: log Z or the best score in fp64, the same rounded, and the last state of the best
            path, int32. Each may be None.
    """
    T, N, C, K = scores.shape
    sizes, device = plan.segment_sizes(T, N, C), scores.device
    options = {"ACC_DTYPE": tl_acc_dtype(scores.dtype), "IS_MAX": outputs[2] is not None}
    dense: dict[str, Any] = {**options, **plan.operator_options(C)}
    operators, group_operators = (
        torch.empty((N, number, C, C), dtype=torch.float64, device=device)
        for number in (sizes.segments, sizes.groups)
    )
    known = torch.empty((directions, N, sizes.groups + 1, C), dtype=torch.float64, device=device)
    rows = plan.segment_options(C)
    launch(
        chain_segment_operators_kernel,
        cdiv(N * sizes.segments * C, rows["ROWS"]),
        scores,
        table.source,
        ends[2],
        operators,
        *scores.shape,
        *scores.stride(),
        sizes.segments,
        sizes.steps,
        DEGREE=plan.unroll_options(K, 0)["UNROLL_IN"],
        **options,
        **rows,
    )
    launch(
        chain_group_operators_kernel,
        N * sizes.groups * C,
        operators,
        group_operators,
        C,
        sizes.segments,
        sizes.groups,
        sizes.size,
        **dense,
    )
    outer = (group_operators, None, known, *outputs)
    levels: list[tuple[Any, ...]] = [(*outer, sizes.groups, 1, sizes.groups)]
    if boundaries is not None:
        inner = (operators, known, boundaries, None, None, None)
        levels.append((*inner, sizes.segments, sizes.groups, sizes.size))
    for *level, number, groups, size in levels:
        launch(
            chain_boundaries_kernel,
            groups * N * directions,
            *ends,
            *level,
            T,
            N,
            C,
            number,
            groups,
            size,
            *ends[0].stride(),
            *ends[1].stride(),
            DIRECTIONS=directions,
            **dense,
        )


def parallel_gradient(
    grad: Tensor,
    scores: Tensor,
    table: EdgeTable,
    lengths: Tensor | None,
    boundaries: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill in the gradients of scores, initial and final from the states at the boundaries."""
    T, N, C, K = scores.shape
    sizes, rows = plan.segment_sizes(T, N, C), plan.segment_options(C)
    degrees = plan.unroll_options(K, table.max_out_degree)
    launch(
        chain_segment_gradient_kernel,
        cdiv(N * sizes.segments, rows["ROWS"]),
        grad,
        scores,
        table.source,
        table.out_offsets,
        table.out_edges,
        lengths,
        boundaries,
        torch.empty((T, N, C), dtype=torch.float64, device=scores.device),
        *results,
        *scores.shape,
        sizes.segments,
        sizes.steps,
        *grad.stride(),
        *scores.stride(),
        DEGREE_IN=degrees["UNROLL_IN"],
        DEGREE_OUT=degrees["UNROLL_OUT"],
        ACC_DTYPE=tl_acc_dtype(scores.dtype),
        **rows,
    )
