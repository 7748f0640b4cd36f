"""Allocate results and launch the kernels for log Z, its gradient, scores of states and means.

`chain_logz` saves alpha and beta of each step if a gradient follows, and `chain_gradient` continues
from them. Both choose the same kernels, general, register-resident or parallel in time, because
each kind saves states in a way of its own. Kernels take time to load, so those that few calls need
are imported where they are launched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....primitives.gpu.target import target_of
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import launch, tl_acc_dtype
from ....runtime.sizes import cdiv
from ..common import ChainPotentials, ChainValues, fake_gradient, fake_scan
from . import plan
from .arguments import (
    ChainGradients,
    Chains,
    ChainTotals,
    StridedChains,
    StridedEdges,
    StridedStates,
    chains_of,
    resident_arguments,
)
from .edge_table import edge_table
from .resident_logz import (
    chain_resident_gradient_kernel,
    chain_resident_halves_kernel,
    chain_resident_logz_kernel,
)


def chain_logz(chain: ChainPotentials, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and the states that the gradient needs."""
    scores, table = chain.scores, edge_table(chain.source)
    T, N, C, K = scores.shape
    saved_shape = (T + 1 if save else 4, N, C)
    saved = torch.empty(saved_shape, dtype=torch.float64, device=scores.device)
    logz = torch.empty(N, dtype=torch.float64, device=scores.device)
    rounded = torch.empty(N, dtype=acc_dtype(scores.dtype), device=scores.device)
    chains = chains_of(chain, table)
    if plan.is_parallel(T, N, C):
        outputs = ChainTotals(logz, rounded, None)
        scan_boundaries(chains, saved if save else None, 2 if save else 1, outputs)
    elif (resident := resident_arguments(chain, table)) is not None:
        options = {"saved_ptr": saved.view(torch.int64), "SAVE": save, **resident}
        launch(chain_resident_halves_kernel, 2 * N, BETA=False, **options)
        options["maxnreg"] = None
        launch(chain_resident_logz_kernel, N, logz_ptr=logz, rounded_ptr=rounded, **options)
    else:
        from .logz import chain_halves_kernel, chain_logz_kernel

        options = {
            "chains": chains,
            "saved_ptr": saved,
            "SAVE": save,
            "ACC_DTYPE": tl_acc_dtype(scores.dtype),
            **plan.unroll_options(K, table.max_out_degree),
            **plan.block_options(C),
        }
        launch(chain_halves_kernel, 2 * N, **options)
        del options["UNROLL_OUT"]
        launch(chain_logz_kernel, N, logz_ptr=logz, rounded_ptr=rounded, **options)
    return logz, rounded, saved if save else saved.new_empty(0)


def chain_gradient(
    grad: Tensor,
    chain: ChainPotentials,
    logz: Tensor,
    saved: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of log Z; that of log Z may have any floating dtype and any stride."""
    scores, table = chain.scores, edge_table(chain.source)
    T, N, C, K = scores.shape
    results = fake_gradient(*chain.variables, dtype)
    chains = chains_of(chain, table)
    inputs: dict[str, Any] = {
        "grad": StridedChains(grad, *grad.stride()),
        "gradients": ChainGradients(*results),
    }
    if plan.is_parallel(T, N, C):
        from .segments import chain_segment_gradient_kernel

        sizes, rows = plan.segment_sizes(T, N, C, target_of(scores.device)), plan.segment_options(C)
        degrees = plan.unroll_options(K, table.max_out_degree)
        launch(
            chain_segment_gradient_kernel,
            cdiv(N * sizes.segments, rows["ROWS"]),
            chains=chains,
            boundaries_ptr=saved,
            alpha_ptr=torch.empty((T, N, C), dtype=torch.float64, device=scores.device),
            segments=sizes.segments,
            steps=sizes.steps,
            DEGREE_IN=degrees["UNROLL_IN"],
            DEGREE_OUT=degrees["UNROLL_OUT"],
            ACC_DTYPE=tl_acc_dtype(scores.dtype),
            **inputs,
            **rows,
        )
    elif (resident := resident_arguments(chain, table)) is not None:
        launch(
            chain_resident_gradient_kernel,
            2 * N,
            logz_ptr=logz,
            saved_ptr=saved.view(torch.int64),
            **inputs,
            **resident,
        )
    else:
        from .logz import chain_gradient_kernel

        launch(
            chain_gradient_kernel,
            2 * N,
            logz_ptr=logz,
            saved_ptr=saved,
            workspace_ptr=torch.empty((4, N, C), dtype=torch.float64, device=scores.device),
            ACC_DTYPE=tl_acc_dtype(scores.dtype),
            chains=chains,
            **inputs,
            **plan.unroll_options(K, table.max_out_degree),
            **plan.block_options(C),
        )
    return results


def chain_scan(chain: ChainPotentials, use_max: bool, reverse: bool) -> Tensor:
    """Return alpha, or beta if `reverse`, at each time."""
    from .logz import chain_scan_kernel

    scores, table = chain.scores, edge_table(chain.source)
    N, C, K = scores.shape[1:]
    result = fake_scan(scores)
    launch(
        chain_scan_kernel,
        N,
        chains=chains_of(chain, table),
        result_ptr=result,
        IS_MAX=use_max,
        REVERSE=reverse,
        ACC_DTYPE=tl_acc_dtype(scores.dtype),
        **plan.unroll_options(K, table.max_out_degree),
        **plan.block_options(C),
    )
    return result


def scan_boundaries(
    chains: Chains, boundaries: Tensor | None, directions: int, totals: ChainTotals
) -> None:
    """Scan the operators of segments, and fill in the results of whole chains.

    Args:
        boundaries: memory of at least `[directions, N, segments + 1, C]` fp64 for the states at the
            boundaries of segments, or None if they have no use.
        directions: 2 for alpha and beta under Log, 1 for alpha alone; Max if there is a last state.
    """
    from .segments import (
        SegmentGroups,
        chain_boundaries_kernel,
        chain_group_operators_kernel,
        chain_segment_operators_kernel,
    )

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


def chain_expectation(
    chain: ChainPotentials, values: ChainValues, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean, log Z, and alpha and the mean into each state, `[2, T + 1, N, C]` fp64."""
    from .expectation import StatesWithMeans, chain_expectation_kernel

    scores, table = chain.scores, edge_table(chain.source)
    T, N, C, K = scores.shape
    saved_shape = (2, T + 1 if save else 2, N, C)
    saved = torch.empty(saved_shape, dtype=torch.float64, device=scores.device)
    edges, first, last = values
    mean, logz = (torch.empty(N, dtype=torch.float64, device=scores.device) for _ in range(2))
    launch(
        chain_expectation_kernel,
        N,
        chains=chains_of(chain, table),
        edge_values=StridedEdges(edges, *edges.stride()),
        first_values=StridedStates(first, *first.stride()),
        last_values=StridedStates(last, *last.stride()),
        saved=StatesWithMeans(saved, saved.stride(0)),
        mean_ptr=mean,
        logz_ptr=logz,
        SAVE=save,
        ACC_DTYPE=tl_acc_dtype(scores.dtype),
        **plan.mean_options(C, K),
    )
    return mean, logz, saved if save else saved.new_empty(0)


def chain_expectation_gradient(
    grad: Tensor,
    chain: ChainPotentials,
    values: ChainValues,
    mean: Tensor,
    logz: Tensor,
    saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the mean in scores, initial and final."""
    from .expectation import StatesWithMeans, chain_expectation_gradient_kernel

    scores, table = chain.scores, edge_table(chain.source)
    _, N, C, K = scores.shape
    edges, _, last = values
    results = fake_gradient(*chain.variables, scores.dtype)
    launch(
        chain_expectation_gradient_kernel,
        N,
        grad=StridedChains(grad, *grad.stride()),
        chains=chains_of(chain, table),
        edge_values=StridedEdges(edges, *edges.stride()),
        last_values=StridedStates(last, *last.stride()),
        mean_ptr=mean.contiguous(),
        logz_ptr=logz.contiguous(),
        saved=StatesWithMeans(saved, saved.stride(0)),
        workspace_ptr=torch.empty((2, 2, N, C), dtype=torch.float64, device=scores.device),
        gradients=ChainGradients(*results),
        ACC_DTYPE=tl_acc_dtype(scores.dtype),
        **plan.mean_options(C, K),
    )
    return results
