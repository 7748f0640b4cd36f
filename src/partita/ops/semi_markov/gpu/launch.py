"""Allocate results and launch the kernels for log Z of semi-Markov chains and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch
from ..common import saved_shape
from . import plan
from .gradient import (
    Splits,
    semi_markov_changes_kernel,
    semi_markov_pairs_kernel,
    semi_markov_segments_kernel,
    semi_markov_states_kernel,
    semi_markov_sum_kernel,
)
from .memory_scan import semi_markov_memory_scan_kernel
from .scan import semi_markov_scan_kernel
from .scores import Chains, Emissions, Matrix, Scans
from .tables import semi_markov_tables_kernel, semi_markov_weights_kernel


def is_exact(*tensors: Tensor) -> bool:
    """Return whether exponentials have to be right in fp64."""
    return any(tensor.dtype == torch.float64 for tensor in tensors)


def strided(scores: Tensor) -> Matrix:
    """Return scores `[rows, columns]` with their strides, as kernels take them."""
    return Matrix(scores, *scores.stride())


def batch_of(
    emissions: Tensor, durations: Tensor, start: Tensor, end: Tensor, lengths: Tensor | None
) -> Chains:
    """Return the chains of a batch, as the scans take them."""
    T, N, C = emissions.shape
    lengths = None if lengths is None else lengths.contiguous()
    emissions_of = Emissions(emissions, *emissions.stride())
    return Chains(emissions_of, strided(start), strided(end), lengths, T, N, C, len(durations))


def semi_markov_logz(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and the scores of both scans."""
    T, N, C = emissions.shape
    fp64: dict[str, Any] = {"dtype": torch.float64, "device": emissions.device}
    logz = torch.empty(N, **fp64)
    rounded = torch.empty(N, dtype=acc_dtype(emissions.dtype), device=emissions.device)
    saved = torch.empty(saved_shape("gpu", T, N, C) if save else (0,), **fp64)
    D, programs = len(durations), 2 * N if save else N
    arguments: dict[str, Any] = {
        "chains": batch_of(emissions, durations, start, end, lengths),
        "saved_ptr": saved,
        "logz_ptr": logz,
        "rounded_ptr": rounded,
        "SAVE": save,
        "EXACT": is_exact(emissions, transitions, durations),
    }
    if plan.is_resident(C, D):
        ring = (programs, plan.duration_block(D) + 1, plan.state_block(C) + 1)
        launch(
            semi_markov_scan_kernel,
            programs,
            weights_ptr=scan_weights(transitions, durations),
            ring_ptr=torch.empty(ring, **fp64),
            **arguments,
            **plan.scan_options(C, D),
        )
    else:
        launch_memory_scan(programs, transitions, durations, IS_MAX=False, **arguments)
    return logz, rounded, saved


def launch_memory_scan(
    programs: int, transitions: Tensor, durations: Tensor, **arguments: Any
) -> None:
    """Launch the scan whose ring is in memory, and before it the tables that it reads."""
    D, C = durations.shape
    fp64: dict[str, Any] = {"dtype": torch.float64, "device": durations.device}
    tables = torch.empty(plan.tables_size(C, D), **fp64)
    launch(
        semi_markov_tables_kernel,
        cdiv(len(tables), 256),
        transitions=strided(transitions),
        durations=strided(durations),
        tables_ptr=tables,
        C=C,
        D=D,
        slots=plan.duration_block(D),
        BLOCK=256,
        num_warps=4,
    )
    launch(
        semi_markov_memory_scan_kernel,
        programs,
        tables_ptr=tables,
        slots=plan.duration_block(D),
        ring_ptr=torch.empty((programs, D + 2, C), **fp64),
        **arguments,
        **plan.memory_scan_options(C),
    )


def scan_weights(transitions: Tensor, durations: Tensor) -> Tensor:
    """Return transitions and durations as the scans in registers read them, see `tables.py`."""
    D, C = durations.shape
    slots = plan.duration_block(D)
    block = plan.state_block(C)
    size = (4 * slots + 2 * block + 2, block + 1)
    weights = torch.empty(size, dtype=torch.float64, device=durations.device)
    launch(
        semi_markov_weights_kernel,
        1,
        transitions=strided(transitions),
        durations=strided(durations),
        weights_ptr=weights,
        C=C,
        D=D,
        BLOCK_C=block,
        SLOTS=slots,
        num_warps=8,
    )
    return weights


def scans_of(lengths: Tensor | None, logz: Tensor, saved: Tensor, emissions: Tensor) -> Scans:
    """Return what the scans left, as the kernels of posteriors take it."""
    lengths = None if lengths is None else lengths.contiguous()
    return Scans(lengths, logz, saved, *emissions.shape)


def semi_markov_gradient(
    grad_output: Tensor,
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    logz: Tensor,
    saved: Tensor,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of sum(grad_output * log Z) in the dtypes of the arguments."""
    T, N, C = emissions.shape
    D, device = len(durations), emissions.device
    d_emissions = torch.empty((T, N, C), dtype=emissions.dtype, device=device)
    d_start, d_end = (torch.empty((N, C), dtype=x.dtype, device=device) for x in (start, end))
    splits = Splits(*plan.splits(T, N, C))
    common = {
        "scans": scans_of(lengths, logz, saved, emissions),
        "splits": splits,
        "EXACT": is_exact(emissions, transitions, durations),
    }
    changes = torch.empty((N, splits.number, C), dtype=torch.float64, device=device)
    programs, options = N * splits.number if C else 0, plan.state_options(C)
    launch(semi_markov_changes_kernel, programs, changes_ptr=changes, **common, **options)
    launch(
        semi_markov_states_kernel,
        programs,
        grad_ptr=grad_output,
        grad_n=grad_output.stride(0),
        emissions=Emissions(emissions, *emissions.stride()),
        changes_ptr=changes,
        d_emissions_ptr=d_emissions,
        d_start_ptr=d_start,
        d_end_ptr=d_end,
        **common,
        **options,
    )
    pairs = torch.empty((N, splits.number, C * C), dtype=torch.float64, device=device)
    launch(
        semi_markov_pairs_kernel,
        N * splits.number * cdiv(C, plan.posterior_block(C)) ** 2,
        transitions=strided(transitions),
        pairs_ptr=pairs,
        **common,
        **plan.pair_options(C),
    )
    counts = torch.empty((N, splits.number, D * C), dtype=torch.float64, device=device)
    launch(
        semi_markov_segments_kernel,
        N * splits.number * cdiv(C, plan.posterior_block(C)),
        emissions=Emissions(emissions, *emissions.stride()),
        durations=strided(durations),
        result_ptr=counts,
        D=D,
        SEGMENTS=False,
        **common,
        **plan.segment_options(C),
    )
    d_transitions, d_durations = (
        add_parts(grad_output, parts, scores, per_sequence, acc_dtype(emissions.dtype))
        for parts, scores in ((pairs, transitions), (counts, durations))
    )
    return d_emissions, d_transitions, d_durations, d_start, d_end


def add_parts(
    grad_output: Tensor, parts: Tensor, scores: Tensor, per_sequence: bool, dtype: torch.dtype
) -> Tensor:
    """Return the sum of the parts `[N, splits, columns]` in the shape of the scores.

    With `per_sequence` there is a sum for each sequence, in `dtype`.
    """
    N, splits, columns = parts.shape
    shape, groups = tuple(scores.shape), 1
    if per_sequence:
        shape, groups = (N, *shape), N
    result = torch.empty(shape, dtype=dtype if per_sequence else scores.dtype, device=parts.device)
    if not parts.numel():
        return result.zero_()
    options = plan.sum_options(N * splits // groups, columns)
    launch(
        semi_markov_sum_kernel,
        groups * cdiv(columns, options["BLOCK"]),
        grad_ptr=grad_output,
        grad_n=grad_output.stride(0),
        parts_ptr=parts,
        result_ptr=result,
        N=N,
        splits=splits,
        columns=columns,
        groups=groups,
        **options,
    )
    return result


def semi_markov_segments(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    logz: Tensor,
    saved: Tensor,
) -> Tensor:
    """Return the posteriors of segments, `[T, D, N, C]` in the dtype of results."""
    T, N, C = emissions.shape
    D, dtype = len(durations), acc_dtype(emissions.dtype)
    result = torch.empty((T, D, N, C), dtype=dtype, device=emissions.device)
    splits = Splits(*plan.splits(T, N, C))
    launch(
        semi_markov_segments_kernel,
        N * splits.number * cdiv(C, plan.posterior_block(C)),
        emissions=Emissions(emissions, *emissions.stride()),
        durations=strided(durations),
        scans=scans_of(lengths, logz, saved, emissions),
        splits=splits,
        result_ptr=result,
        D=D,
        SEGMENTS=True,
        EXACT=is_exact(emissions, transitions, durations),
        **plan.segment_options(C),
    )
    return result
