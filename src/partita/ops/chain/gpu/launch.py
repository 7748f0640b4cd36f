"""Allocate results and launch the kernels for log Z, its gradient and the scores of states.

`chain_logz` saves alpha and beta of each step if a gradient follows, and `chain_gradient` continues
from them. Both choose the same kernels, general, register-resident or parallel in time, because
each kind saves states in a way of its own. Kernels take time to load, so those that few calls need
are imported where they are launched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import launch, tl_acc_dtype
from ..common import ChainPotentials
from .arguments import (
    ChainGradients,
    ChainTotals,
    StridedChains,
    chains_of,
    resident_arguments,
)
from .edge_table import edge_table
from .plan import block_options, is_parallel, unroll_options
from .resident_gradient import chain_resident_gradient_kernel
from .resident_scan import chain_resident_halves_kernel, chain_resident_logz_kernel


def chain_logz(chain: ChainPotentials, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and the states that the gradient needs."""
    scores, table = chain.scores, edge_table(chain.source)
    T, N, C, K = scores.shape
    saved_shape = (T + 1 if save else 4, N, C)
    saved = torch.empty(saved_shape, dtype=torch.float64, device=scores.device)
    logz = torch.empty(N, dtype=torch.float64, device=scores.device)
    rounded = torch.empty(N, dtype=acc_dtype(scores.dtype), device=scores.device)
    chains = chains_of(chain, table)
    if table.has_invalid:
        logz.fill_(torch.nan)
        rounded.fill_(torch.nan)
    elif is_parallel(T, N, C):
        from .launch_segments import scan_boundaries

        outputs = ChainTotals(logz, rounded, None)
        scan_boundaries(chains, saved if save else None, 2 if save else 1, outputs)
    elif (resident := resident_arguments(chain, table)) is not None:
        options = {"saved_ptr": saved.view(torch.int64), "SAVE": save, **resident}
        launch(chain_resident_halves_kernel, 2 * N, **options)
        options["maxnreg"] = None
        launch(chain_resident_logz_kernel, N, logz_ptr=logz, rounded_ptr=rounded, **options)
    else:
        from .forward_scan import chain_halves_kernel, chain_logz_kernel

        options = {
            "chains": chains,
            "saved_ptr": saved,
            "SAVE": save,
            "ACC_DTYPE": tl_acc_dtype(scores.dtype),
            **unroll_options(K, table.max_out_degree),
            **block_options(C),
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
    d_scores = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    d_initial, d_final = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (chain.initial, chain.final)
    )
    results = d_scores, d_initial, d_final
    chains = chains_of(chain, table)
    inputs: dict[str, Any] = {
        "grad": StridedChains(grad, *grad.stride()),
        "gradients": ChainGradients(*results),
    }
    if table.has_invalid:
        for result in results:
            result.fill_(torch.nan)
    elif is_parallel(T, N, C):
        from .launch_segments import parallel_gradient

        parallel_gradient(chains, table.max_out_degree, saved, **inputs)
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
        from .gradient import chain_gradient_kernel

        launch(
            chain_gradient_kernel,
            2 * N,
            logz_ptr=logz,
            saved_ptr=saved,
            workspace_ptr=torch.empty((4, N, C), dtype=torch.float64, device=scores.device),
            ACC_DTYPE=tl_acc_dtype(scores.dtype),
            chains=chains,
            **inputs,
            **unroll_options(K, table.max_out_degree),
            **block_options(C),
        )
    return results


def chain_scan(chain: ChainPotentials, use_max: bool, reverse: bool) -> Tensor:
    """Return alpha, or beta if `reverse`, at each time."""
    from .forward_scan import chain_scan_kernel

    scores, table = chain.scores, edge_table(chain.source)
    T, N, C, K = scores.shape
    result = torch.empty((T + 1, N, C), dtype=torch.float64, device=scores.device)
    if table.has_invalid:
        return result.fill_(torch.nan)
    launch(
        chain_scan_kernel,
        N,
        chains=chains_of(chain, table),
        result_ptr=result,
        IS_MAX=use_max,
        REVERSE=reverse,
        ACC_DTYPE=tl_acc_dtype(scores.dtype),
        **unroll_options(K, table.max_out_degree),
        **block_options(C),
    )
    return result
