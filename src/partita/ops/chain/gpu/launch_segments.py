"""Launch the scans of chains that are parallel in time; see `segments.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....primitives.gpu.target import target_of
from ....runtime.launch import launch, tl_acc_dtype
from ....runtime.sizes import cdiv
from . import plan
from .arguments import ChainGradients, Chains, ChainTotals, StridedChains
from .segment_gradient import chain_segment_gradient_kernel
from .segments import (
    SegmentGroups,
    chain_boundaries_kernel,
    chain_group_operators_kernel,
    chain_segment_operators_kernel,
)


def scan_boundaries(
    chains: Chains, boundaries: Tensor | None, directions: int, totals: ChainTotals
) -> None:
    """Scan the operators of segments, and fill in the results of whole chains.

    Args:
        chains: the chains, with the edges into each state.
        boundaries: memory of at least `[directions, N, segments + 1, C]` fp64 for the states at the
            boundaries of segments, or None if they have no use.
        directions: 2 for alpha and beta under Log, 1 for alpha alone; Max if there is a last state.
        totals: the results.
    """
    scores, N = chains.scores.ptr, chains.N
    C, K = chains.edges.C, chains.edges.K
    sizes = plan.segment_sizes(chains.T, N, C, target_of(scores.device))
    rows = plan.segment_options(C)
    options = {
        "ACC_DTYPE": tl_acc_dtype(scores.dtype),
        "IS_MAX": totals.last_ptr is not None,
    }
    dense: dict[str, Any] = {**options, **plan.operator_options(C)}
    fp64: dict[str, Any] = {"dtype": torch.float64, "device": scores.device}
    operators = torch.empty((N, sizes.segments, C, C), **fp64)
    group_operators = torch.empty((N, sizes.groups, C, C), **fp64)
    known = torch.empty((directions, N, sizes.groups + 1, C), **fp64)
    launch(
        chain_segment_operators_kernel,
        cdiv(N * sizes.segments * C, rows["ROWS"]),
        chains=chains,
        operators_ptr=operators,
        segments=sizes.segments,
        steps=sizes.steps,
        DEGREE=plan.unroll_options(K, 0)["UNROLL_IN"],
        **options,
        **rows,
    )
    groups = SegmentGroups(sizes.segments, sizes.groups, sizes.size)
    launch(
        chain_group_operators_kernel,
        N * sizes.groups * C,
        operators_ptr=operators,
        group_operators_ptr=group_operators,
        C=C,
        groups=groups,
        **dense,
    )
    ends = {"chains": chains, "DIRECTIONS": directions, **dense}
    launch(
        chain_boundaries_kernel,
        N * directions,
        operators_ptr=group_operators,
        known_ptr=None,
        boundaries_ptr=known,
        totals=totals,
        groups=SegmentGroups(sizes.groups, 1, sizes.groups),
        **ends,
    )
    if boundaries is not None:
        launch(
            chain_boundaries_kernel,
            sizes.groups * N * directions,
            operators_ptr=operators,
            known_ptr=known,
            boundaries_ptr=boundaries,
            totals=ChainTotals(None, None, None),
            groups=groups,
            **ends,
        )


def parallel_gradient(
    chains: Chains,
    max_out_degree: int,
    boundaries: Tensor,
    grad: StridedChains,
    gradients: ChainGradients,
) -> None:
    """Fill in the gradients of scores, initial and final from the states at the boundaries."""
    scores, N = chains.scores.ptr, chains.N
    T, C, K = chains.T, chains.edges.C, chains.edges.K
    sizes, rows = plan.segment_sizes(T, N, C, target_of(scores.device)), plan.segment_options(C)
    degrees = plan.unroll_options(K, max_out_degree)
    launch(
        chain_segment_gradient_kernel,
        cdiv(N * sizes.segments, rows["ROWS"]),
        grad=grad,
        chains=chains,
        boundaries_ptr=boundaries,
        alpha_ptr=torch.empty((T, N, C), dtype=torch.float64, device=scores.device),
        gradients=gradients,
        segments=sizes.segments,
        steps=sizes.steps,
        DEGREE_IN=degrees["UNROLL_IN"],
        DEGREE_OUT=degrees["UNROLL_OUT"],
        ACC_DTYPE=tl_acc_dtype(scores.dtype),
        **rows,
    )
