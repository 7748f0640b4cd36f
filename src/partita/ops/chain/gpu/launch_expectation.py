"""Allocate results and launch the kernels for means over the paths of chains."""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime.launch import launch, tl_acc_dtype
from ..common import ChainPotentials, ChainValues
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
    chain: ChainPotentials, values: ChainValues, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean, log Z, and alpha and the mean into each state, `[2, T + 1, N, C]` fp64."""
    scores, table = chain.scores, edge_table(chain.source)
    T, N, C, _ = scores.shape
    saved_shape = (2, T + 1 if save else 2, N, C)
    saved = torch.empty(saved_shape, dtype=torch.float64, device=scores.device)
    edges, first, last = values
    mean, logz = (torch.empty(N, dtype=torch.float64, device=scores.device) for _ in range(2))
    if table.has_invalid:
        mean.fill_(torch.nan)
        logz.fill_(torch.nan)
    else:
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
            **block_options(C),
        )
    return mean, logz, saved if save else saved.new_empty(0)


def chain_expectation_gradient(
    grad: Tensor,
    chain: ChainPotentials,
    values: ChainValues,
    mean: Tensor,
    logz: Tensor,
    saved: Tensor,
    need_score_grads: bool,
    need_value_grads: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of the mean; one that is not needed is empty."""
    scores, table = chain.scores, edge_table(chain.source)
    _, N, C, _ = scores.shape
    edges, _, last = values
    inputs = (*chain.variables, *values)
    needed = (need_score_grads,) * 3 + (need_value_grads,) * 3
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
        chains=chains_of(chain, table),
        edge_values=StridedEdges(edges, *edges.stride()),
        last_values=StridedStates(last, *last.stride()),
        mean_ptr=mean.contiguous(),
        logz_ptr=logz.contiguous(),
        saved=StatesWithMeans(saved, saved.stride(0)),
        workspace_ptr=torch.empty((2, 2, N, C), dtype=torch.float64, device=scores.device),
        d_scores=ChainGradients(*results[:3]),
        d_values=ChainGradients(*results[3:]),
        OF_SCORES=need_score_grads,
        OF_VALUES=need_value_grads,
        ACC_DTYPE=tl_acc_dtype(scores.dtype),
        **block_options(C),
    )
    return results
