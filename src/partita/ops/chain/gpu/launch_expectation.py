"""Allocate results and launch the kernels for means over the paths of chains."""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime.launch import launch, tl_acc_dtype
from .edge_table import edge_table
from .expectation import chain_expectation_kernel
from .expectation_gradient import chain_expectation_gradient_kernel
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
        strided = (scores, values, initial, final, first_values, last_values)
        launch(
            chain_expectation_kernel,
            N,
            scores,
            table.source,
            initial,
            final,
            None if lengths is None else lengths.contiguous(),
            values,
            first_values,
            last_values,
            saved,
            mean,
            logz,
            saved.stride(0),
            *scores.shape,
            *(stride for t in strided for stride in t.stride()),
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
    workspace = torch.empty((2, 2, N, C), dtype=torch.float64, device=scores.device)
    launch(
        chain_expectation_gradient_kernel,
        N,
        grad,
        scores,
        table.source,
        table.out_offsets,
        table.out_edges,
        final,
        None if lengths is None else lengths.contiguous(),
        values,
        last_values,
        mean.contiguous(),
        logz.contiguous(),
        saved,
        workspace,
        *results,
        saved.stride(0),
        *scores.shape,
        *(stride for t in (grad, scores, values, final, last_values) for stride in t.stride()),
        OF_SCORES=of_scores,
        OF_VALUES=of_values,
        ACC_DTYPE=tl_acc_dtype(scores.dtype),
        **block_options(C),
    )
    return results
