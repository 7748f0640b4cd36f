"""CTC-CRF on a GPU: allocate results, and launch its kernels around those of chains.

The loss builds the target lattices, gathers their scores, scans all paths and the target's paths,
and reduces the difference of their log Z. The gradient is that of all paths, from which the
target's marginals are subtracted in place.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2
from ...chain.gpu.launch import chain_gradient, chain_logz
from .. import common
from ..common import CRFFunctions, CRFInputs, CRFLattice, CRFState
from .kernels import (
    EdgeOrder,
    crf_edge_order_kernel,
    crf_gather_kernel,
    crf_lattice_kernel,
    crf_loss_kernel,
    crf_subtract_kernel,
)

ROWS = 4  # steps of one sequence that a program gathers or subtracts
ORDER_BLOCK = 64  # edges of a sequence that a program sorts
LATTICE_BLOCK = 256  # labels, k-mers or earlier lengths that a lattice's program takes at a time
LOSS_BLOCK = 256  # losses that are reduced at a time


def tile_options(E: int) -> dict[str, int]:
    """Return the tile of a program that gathers or subtracts E edges at ROWS steps."""
    block = min(max(next_power_of_2(E), 128), 1024)
    return {"ROWS": ROWS, "BLOCK": block, "num_warps": block // 128}


def build_lattice(x: CRFInputs) -> tuple[CRFLattice, Tensor]:
    """Return the lattices, and the number of steps, -1 for an invalid sequence."""
    targets, device, dtype = x.targets, x.targets.device, acc_dtype(x.scores.dtype)
    N, L = len(x.target_lengths), len(x.lattice_source)
    edge_index = torch.empty((N, L, 2), dtype=torch.int32, device=device)
    initial = torch.empty((N, L), dtype=dtype, device=device)
    final = torch.empty((N, L), dtype=dtype, device=device)
    lengths = torch.empty(N, dtype=torch.int64, device=device)
    packed = targets.ndim == 1
    launch(
        crf_lattice_kernel,
        N,
        targets_ptr=targets,
        stride_n=0 if packed else targets.stride(0),
        stride_s=targets.stride(-1),
        target_lengths_ptr=x.target_lengths,
        input_lengths_ptr=x.input_lengths,
        edge_index_ptr=edge_index,
        initial_ptr=initial,
        final_ptr=final,
        lengths_ptr=lengths,
        T=len(x.scores),
        S=targets.shape[-1],
        L=L,
        state_len=x.state_len,
        n_base=x.source.shape[1] - 1,
        PACKED=packed,
        BLOCK=LATTICE_BLOCK,
        num_warps=4,
    )
    return CRFLattice(edge_index, x.lattice_source, initial, final), lengths


def gather_scores(scores: Tensor, edge_index: Tensor, lengths: Tensor) -> Tensor:
    """Return the scores of the lattice's edges, `[T, N, L, 2]`."""
    T, N, _, A = scores.shape
    L, strides = edge_index.shape[1], scores.stride()
    edge_scores = torch.empty((T, N, L, 2), dtype=scores.dtype, device=scores.device)
    launch(
        crf_gather_kernel,
        N * cdiv(T, ROWS),
        scores_ptr=scores,
        stride_t=strides[0],
        stride_n=strides[1],
        stride_c=strides[2],
        stride_a=strides[3],
        edge_index_ptr=edge_index,
        lengths_ptr=lengths,
        edge_scores_ptr=edge_scores,
        T=T,
        N=N,
        E=2 * L,
        A=A,
        **tile_options(2 * L),
    )
    return edge_scores


def reduced_losses(
    logz_den: Tensor, logz_num: Tensor, target_lengths: Tensor, reduction: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the reduced loss and the losses `[N]` fp64, from log Z of both chains."""
    N, device = len(logz_den), logz_den.device
    losses = torch.empty(N, dtype=torch.float64, device=device)
    value = torch.empty((N,) if reduction == "none" else (), dtype=dtype, device=device)
    launch(
        crf_loss_kernel,
        1,
        logz_den_ptr=logz_den,
        logz_num_ptr=logz_num,
        target_lengths_ptr=target_lengths,
        losses_ptr=losses,
        value_ptr=value,
        N=N,
        REDUCE=reduction != "none",
        MEAN=reduction == "mean",
        BLOCK=LOSS_BLOCK,
        num_warps=4,
    )
    return value, losses


def sort_edges(
    grad: Tensor, state: CRFState, target_lengths: Tensor, reduction: str
) -> tuple[Tensor, EdgeOrder]:
    """Return the gradient of each sequence's loss, `[N]` fp64, and the edges in sorted order."""
    edge_index, device = state.edge_index, grad.device
    N, E = len(edge_index), 2 * edge_index.shape[1]
    coefficients = torch.empty(N, dtype=torch.float64, device=device)
    order = EdgeOrder(*(torch.empty((N, E), dtype=torch.int32, device=device) for _ in range(2)))
    launch(
        crf_edge_order_kernel,
        N * cdiv(E, ORDER_BLOCK),
        grad_ptr=grad,
        grad_stride=grad.stride(0) if grad.ndim else 0,
        losses_ptr=state.losses,
        target_lengths_ptr=target_lengths,
        edge_index_ptr=edge_index,
        coefficients_ptr=coefficients,
        order=order,
        N=N,
        E=E,
        MEAN=reduction == "mean",
        BLOCK=ORDER_BLOCK,
        num_warps=4,
    )
    return coefficients, order


def subtract_marginals(
    d_scores: Tensor, coefficients: Tensor, order: EdgeOrder, state: CRFState, dtype: torch.dtype
) -> Tensor:
    """Subtract the marginals times the coefficients from `d_scores`, `[T, N, C, A]`, in place.

    The result is rounded to a half type.
    """
    (T, N, C, A), E, result = d_scores.shape, 2 * state.edge_index.shape[1], None
    if dtype != d_scores.dtype:
        result = torch.empty(d_scores.shape, dtype=dtype, device=d_scores.device)
    launch(
        crf_subtract_kernel,
        N * cdiv(T, ROWS),
        coefficients_ptr=coefficients,
        marginals_ptr=state.marginals,
        edge_index_ptr=state.edge_index,
        order=order,
        lengths_ptr=state.lengths,
        d_scores_ptr=d_scores,
        result_ptr=result,
        T=T,
        N=N,
        E=E,
        V=C * A,
        **tile_options(E),
    )
    return d_scores if result is None else result


FUNCTIONS = CRFFunctions(
    chain_logz,
    chain_gradient,
    build_lattice,
    gather_scores,
    reduced_losses,
    sort_edges,
    subtract_marginals,
)
crf_loss = partial(common.crf_loss, FUNCTIONS)
crf_gradient = partial(common.crf_gradient, FUNCTIONS)
