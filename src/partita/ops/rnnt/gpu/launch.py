"""Transducers on a GPU: loss and gradient from logits, from allocation to the last launch.

The loss reads the logits once for each node's log-sum-exp and arcs (`nodes.py`), scans α and β at
the same time (`scan.py`), and turns them into posteriors (`posterior.py`). The gradient reads and
writes the logits once more (`gradient.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2
from ...ctc.gpu.call import launch_lanes
from .call import NodeOptions, Targets, as_targets, launch_gradient, launch_nodes, scan_zeros
from .launch_tdt import rnnt_align, tdt_align, tdt_forward, tdt_gradient
from .plan import BLOCK_ROWS, LSE_DTYPE, LatticePlan, lattice_plan
from .posterior import rnnt_posterior_kernel
from .scan import SCAN

__all__ = [
    "rnnt_align",
    "rnnt_forward",
    "rnnt_gradient",
    "tdt_align",
    "tdt_forward",
    "tdt_gradient",
]


def scan_lattice(
    arcs: Tensor,
    targets: Targets,
    plan: LatticePlan,
    sizes: tuple[int, int, int],
    V: int,
    blank: int,
    dtype: torch.dtype,
    need_posteriors: bool,
) -> tuple[Tensor, Tensor]:
    """Return the losses, and the posteriors `[2, B, T, U1]` or an empty tensor."""
    (B, T, U1), device = sizes, arcs.device
    directions = 2 if need_posteriors else 1
    zeros = scan_zeros(plan, B, directions, device)
    states = None
    if need_posteriors:
        states = torch.empty((2, plan.nodes), dtype=torch.float64, device=device)
    logz = torch.empty(B, dtype=torch.float64, device=device)
    launch_lanes(
        SCAN,
        directions * B * plan.num_chunks,
        arcs,
        *targets,
        states,
        zeros.carries,
        zeros.flags,
        logz,
        zeros.tile_counter,
        T,
        B,
        U1,
        V,
        plan.num_chunks,
        plan.rows,
        plan.carry_steps,
        plan.nodes,
        blank,
        targets.stride,
        DIRECTIONS=directions,
        BLOCK=BLOCK_ROWS,
        FP64=dtype == torch.float64,
    )
    nll = torch.empty(B, dtype=acc_dtype(dtype), device=device)
    shape = (2, B, T, U1) if need_posteriors else (0,)
    posteriors = torch.empty(shape, dtype=acc_dtype(dtype), device=device)
    block_u = min(next_power_of_2(U1), 128)
    diagonals = max(1, 512 // block_u)
    launch(
        rnnt_posterior_kernel,
        B * (cdiv(T + U1 - 1, diagonals) if need_posteriors else 1),
        arcs,
        states,
        targets.logit_lengths,
        targets.target_lengths,
        zeros.flags,
        logz,
        nll,
        posteriors if need_posteriors else None,
        T,
        B,
        U1,
        plan.num_chunks,
        plan.rows,
        plan.nodes,
        FP64=dtype == torch.float64,
        DIAGONALS=diagonals,
        BLOCK_U=block_u,
        num_warps=4,
    )
    return nll, posteriors


def rnnt_forward(
    logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    fused: bool,
    hat: bool,
    delay_penalty: float,
    need_posteriors: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses, the log-sum-exps of the nodes and the posteriors of their arcs."""
    B, T, U1, V = logits.shape
    targets, device = as_targets(labels, logit_lengths, target_lengths), logits.device
    plan = lattice_plan(B, T, U1)
    arcs = torch.empty((2, plan.nodes), dtype=torch.float64, device=device)
    shape = (B, T, U1) if fused and need_posteriors else (0,)
    lse = torch.empty(shape, dtype=LSE_DTYPE, device=device)
    options = NodeOptions(blank, fused, hat, 0.0, delay_penalty)
    launch_nodes(logits, targets, lse, arcs, 0, B * T, (B, T, U1), options)
    nll, posteriors = scan_lattice(
        arcs, targets, plan, (B, T, U1), V, blank, logits.dtype, need_posteriors
    )
    return nll, lse, posteriors


def rnnt_gradient(
    grad: Tensor,
    logits: Tensor,
    lse: Tensor,
    posteriors: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    fused: bool,
    hat: bool,
    clamp: float,
    fastemit_lambda: float,
    inplace: bool,
) -> Tensor:
    """Return the gradient of the losses in the logits, in their memory if `inplace`."""
    dlogits = logits
    if not inplace:
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    targets = as_targets(labels, logit_lengths, target_lengths)
    launch_gradient(
        grad,
        logits,
        lse if fused else None,
        posteriors[:, None],
        targets,
        dlogits,
        0,
        logits.shape[0] * logits.shape[1],
        blank,
        hat,
        clamp,
        fastemit_lambda,
    )
    return dlogits
