"""The launches that turn scores of a transducer's arcs, or logits, into losses and posteriors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import INTERPRETED, cdiv, launch, next_power_of_2
from ...ctc.gpu.lanes import launch_lanes
from .call import NodeOptions, Targets, scan_zeros, tile_of, tile_options
from .overlap import rnnt_overlap_kernel
from .plan import (
    BLOCK_ROWS,
    NODES_PER_PROGRAM,
    OVERLAP_BLOCK_ROWS,
    LatticePlan,
    lattice_plan,
    overlap_registers,
)
from .posterior import rnnt_posterior_kernel
from .scan import SCAN


class Scan(NamedTuple):
    """What a scan leaves in memory.

    Fields:
        arcs: the scores of the arcs, `[2, nodes]` fp64.
        states: α and β, `[2, nodes]` fp64, or None for log Z alone.
        flags: `[B]`, which sequences are invalid.
        logz: `[B]` fp64, log2 of the partition functions.
    """

    arcs: Tensor
    states: Tensor | None
    flags: Tensor
    logz: Tensor


def new_states(plan: LatticePlan, need_posteriors: bool, device: torch.device) -> Tensor | None:
    """Return memory for α and β, or None if only log Z is needed."""
    if not need_posteriors:
        return None
    return torch.empty((2, plan.nodes), dtype=torch.float64, device=device)


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
    states = new_states(plan, need_posteriors, device)
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
        *plan.scan_sizes(T, B, U1, V),
        blank,
        targets.stride,
        DIRECTIONS=directions,
        BLOCK=BLOCK_ROWS,
        FP64=dtype == torch.float64,
    )
    return launch_posteriors(Scan(arcs, states, zeros.flags, logz), targets, plan, sizes, dtype)


def scan_beside_rows(
    logits: Tensor, targets: Targets, lse: Tensor, options: NodeOptions, need_posteriors: bool
) -> tuple[Tensor, Tensor]:
    """Return what `scan_lattice` does, and write the log-sum-exps, by a scan beside their pass."""
    (B, T, U1, V), device = logits.shape, logits.device
    plan, tile = lattice_plan(B, T, U1), tile_of(logits)
    directions = 2 if need_posteriors else 1
    zeros = scan_zeros(plan, B, directions, device, 2 * plan.nodes)
    assert zeros.arcs is not None
    states = new_states(plan, need_posteriors, device)
    logz = torch.empty(B, dtype=torch.float64, device=device)
    launch(
        rnnt_overlap_kernel,
        directions * B * plan.num_chunks + B * T * cdiv(U1, NODES_PER_PROGRAM),
        logits,
        *targets,
        lse if lse.numel() else None,
        zeros.arcs,
        states,
        zeros.carries,
        zeros.flags,
        logz,
        zeros.tile_counter,
        *plan.scan_sizes(T, B, U1, V),
        options.blank,
        options.delay_penalty,
        targets.stride,
        *logits.stride(),
        DIRECTIONS=directions,
        BLOCK=OVERLAP_BLOCK_ROWS,
        SCANS_FIRST=not INTERPRETED,  # The interpreter runs one program after the other.
        HAT=options.hat,
        maxnreg=overlap_registers(tile, options.hat),
        **tile_options(tile, logits.dtype),
    )
    arcs = zeros.arcs.view(torch.float64)
    scan = Scan(arcs, states, zeros.flags, logz)
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
        scan.arcs,
        scan.states,
        targets.logit_lengths,
        targets.target_lengths,
        scan.flags,
        scan.logz,
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
