"""The launches that turn scores of a transducer's arcs into losses and posteriors."""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2
from ...ctc.gpu.call import launch_lanes
from .call import Targets, scan_zeros
from .plan import BLOCK_ROWS, LatticePlan
from .posterior import rnnt_posterior_kernel
from .scan import SCAN


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
