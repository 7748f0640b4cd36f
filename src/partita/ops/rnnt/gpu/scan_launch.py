"""The launches that turn scores of a transducer's arcs, or logits, into losses and posteriors."""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2
from ...ctc.gpu.lanes import launch_lanes
from .call import NodeOptions, new_scan, node_strides, scan_zeros, tile_of, tile_options
from .lattice import Targets
from .overlap import rnnt_overlap_kernel
from .plan import BLOCK_ROWS, NODES_PER_PROGRAM, LatticePlan, lattice_plan, overlap_registers
from .posterior import rnnt_posterior_kernel
from .rows import Logits
from .scan import SCAN, Scan


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
    B, T, U1 = sizes
    directions = 2 if need_posteriors else 1
    zeros = scan_zeros(plan, B, directions, arcs.device)
    scan = new_scan(plan, arcs, zeros.flags, B, need_posteriors)
    launch_lanes(
        SCAN,
        directions * B * plan.num_chunks,
        scan=scan,
        carries=zeros.carries,
        targets=targets,
        **plan.scan_sizes(T, B, U1, V),
        blank=blank,
        target_stride=targets.stride,
        DIRECTIONS=directions,
        BLOCK=BLOCK_ROWS,
        FP64=dtype == torch.float64,
    )
    return launch_posteriors(scan, targets, plan, sizes, dtype)


def scan_beside_rows(
    logits: Tensor, targets: Targets, lse: Tensor, options: NodeOptions, need_posteriors: bool
) -> tuple[Tensor, Tensor]:
    """Return what `scan_lattice` does, and write the log-sum-exps, by a scan beside their pass."""
    B, T, U1, V = logits.shape
    plan, tile = lattice_plan(B, T, U1), tile_of(logits)
    directions = 2 if need_posteriors else 1
    zeros = scan_zeros(plan, B, directions, logits.device, 2 * plan.nodes)
    assert zeros.arcs is not None
    arcs = zeros.arcs.view(torch.float64)
    scan = new_scan(plan, arcs, zeros.flags, B, need_posteriors)
    launch(
        rnnt_overlap_kernel,
        directions * B * plan.num_chunks + B * T * cdiv(U1, NODES_PER_PROGRAM),
        logits=Logits(logits, logits.stride(3), lse if lse.numel() else None),
        targets=targets,
        scan=scan._replace(arcs=zeros.arcs),
        carries=zeros.carries,
        **plan.scan_sizes(T, B, U1, V),
        blank=options.blank,
        delay_penalty=options.delay_penalty,
        target_stride=targets.stride,
        **node_strides(logits, T),
        DIRECTIONS=directions,
        HAT=options.hat,
        maxnreg=overlap_registers(tile, options.hat),
        **tile_options(tile),
    )
    return launch_posteriors(scan, targets, plan, (B, T, U1), logits.dtype)


def launch_posteriors(
    scan: Scan,
    targets: Targets,
    plan: LatticePlan,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the losses, and the posteriors `[2, B, T, U1]` or an empty tensor without states."""
    (B, T, U1), device, need_posteriors = sizes, scan.arcs.device, scan.states is not None
    nll = torch.empty(B, dtype=acc_dtype(dtype), device=device)
    shape = (2, B, T, U1) if need_posteriors else (0,)
    posteriors = torch.empty(shape, dtype=acc_dtype(dtype), device=device)
    block_u = min(next_power_of_2(U1), 128)
    diagonals = max(1, 512 // block_u)
    launch(
        rnnt_posterior_kernel,
        B * (cdiv(T + U1 - 1, diagonals) if need_posteriors else 1),
        scan=scan,
        lengths=targets.lengths,
        nll_ptr=nll,
        posteriors_ptr=posteriors if need_posteriors else None,
        T=T,
        B=B,
        U1=U1,
        **plan.layout,
        FP64=dtype == torch.float64,
        DIAGONALS=diagonals,
        BLOCK_U=block_u,
        num_warps=4,
    )
    return nll, posteriors
