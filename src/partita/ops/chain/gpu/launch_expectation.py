"""Allocate results and launch the kernels for means over the paths of chains."""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime.launch import launch, tl_acc_dtype
from .arguments import (
    ChainGradients,
    StridedChains,
    StridedEdges,
    StridedStates,
    chains_of,
)
from .edge_table import edge_table
from .expectation import (
    StatesWithMeans,
    chain_expectation_gradient_kernel,
    chain_expectation_kernel,
)
from .plan import block_options


def chain_expectation(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    values: Tensor,
    first_values: Tensor,
    last_values: Tensor,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of the values, log Z, and what the gradient needs.

    The third result, `[2, T + 1, N, C]` fp64, is alpha and the mean of the values over the paths
    into each state. It is empty if not `save`.
    """
    T, N, C, _ = scores.shape
    table = edge_table(source)
    saved_shape = (2, T + 1 if save else 2, N, C)
    saved = torch.empty(saved_shape, dtype=torch.float64, device=scores.device)
    mean, logz = (torch.empty(N, dtype=torch.float64, device=scores.device) for _ in range(2))
    if table.has_invalid:
        mean.fill_(torch.nan)
        logz.fill_(torch.nan)
    else:
        launch(
            chain_expectation_kernel,
            N,
            chains=chains_of(scores, table, initial, final, lengths),
            edge_values=StridedEdges(values, *values.stride()),
            first_values=StridedStates(first_values, *first_values.stride()),
            last_values=StridedStates(last_values, *last_values.stride()),
            saved=StatesWithMeans(saved, saved.stride(0)),
            mean_ptr=mean,
            logz_ptr=logz,
            SAVE=save,
            ACC_DTYPE=tl_acc_dtype(scores.dtype),
            **block_options(C),
        )
    return mean, logz, saved if save else saved.new_empty(0)


def chain_expectation_gradient(
    grad: Tensor,
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    values: Tensor,
    first_values: Tensor,
    last_values: Tensor,
    mean: Tensor,
    logz: Tensor,
    saved: Tensor,
    of_scores: bool,
    of_values: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of the mean: of scores, initial, final, then of the three values.

    The first three are empty if not `of_scores`, the others if not `of_values`.
    """
    _, N, C, _ = scores.shape
    table = edge_table(source)
    inputs = (scores, initial, final, values, first_values, last_values)
    needed = (of_scores,) * 3 + (of_values,) * 3
    results = tuple(
        torch.empty(t.shape if is_needed else 0, dtype=t.dtype, device=t.device)
        for t, is_needed in zip(inputs, needed, strict=True)
    )
    if table.has_invalid:
        return tuple(result.fill_(torch.nan) for result in results)
    launch(
        chain_expectation_gradient_kernel,
        N,
        grad=StridedChains(grad, *grad.stride()),
        chains=chains_of(scores, table, initial, final, lengths),
        edge_values=StridedEdges(values, *values.stride()),
        last_values=StridedStates(last_values, *last_values.stride()),
        mean_ptr=mean.contiguous(),
        logz_ptr=logz.contiguous(),
        saved=StatesWithMeans(saved, saved.stride(0)),
        workspace_ptr=torch.empty((2, 2, N, C), dtype=torch.float64, device=scores.device),
        d_scores=ChainGradients(*results[:3]),
        d_values=ChainGradients(*results[3:]),
        OF_SCORES=of_scores,
        OF_VALUES=of_values,
        ACC_DTYPE=tl_acc_dtype(scores.dtype),
        **block_options(C),
    )
    return results
