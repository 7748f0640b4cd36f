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
    semi_markov_changes_kernel,
    semi_markov_pairs_kernel,
    semi_markov_segments_kernel,
    semi_markov_states_kernel,
    semi_markov_sum_kernel,
)
from .scan import semi_markov_scan_kernel
from .tables import semi_markov_tables_kernel, semi_markov_weights_kernel


def is_exact(*tensors: Tensor) -> bool:
    """Return whether exponentials have to be right in fp64."""
    return any(tensor.dtype == torch.float64 for tensor in tensors)


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
    D = len(durations)
    lengths = None if lengths is None else lengths.contiguous()
    inputs = (emissions, start, end, lengths)
    strides = (*emissions.stride(), *start.stride(), *end.stride())
    programs, exact = 2 * N if save else N, is_exact(emissions, transitions, durations)
    options = {"SAVE": save, "EXACT": exact}
    if plan.is_resident(C, D):
        scan = plan.scan_options(C, D)
        weights = scan_weights(transitions, durations)
        ring = torch.empty((programs, plan.duration_block(D) + 1, plan.state_block(C) + 1), **fp64)
        launch(
            semi_markov_scan_kernel,
            programs,
            *(*inputs, weights, ring, saved, logz, rounded, T, N, C, D, *strides),
            **options,
            **scan,
        )
    else:
        from .memory_scan import semi_markov_memory_scan_kernel

        tables = score_tables(transitions, durations)
        ring = torch.empty((programs, D + 2, C), **fp64)
        sizes = (T, N, C, D, plan.duration_block(D))
        launch(
            semi_markov_memory_scan_kernel,
            programs,
            *(*inputs, tables, ring, saved, logz, rounded, *sizes, *strides),
            **options,
            **plan.memory_scan_options(C),
        )
    return logz, rounded, saved


def score_tables(transitions: Tensor, durations: Tensor) -> Tensor:
    """Return transitions and durations as the scans read them, see `tables.py`."""
    D, C = durations.shape
    size = plan.tables_size(C, D)
    tables = torch.empty(size, dtype=torch.float64, device=durations.device)
    strides = (*transitions.stride(), *durations.stride())
    launch(
        semi_markov_tables_kernel,
        cdiv(size, 256),
        *(transitions, durations, tables, C, D, plan.duration_block(D), *strides),
        BLOCK=256,
        num_warps=4,
    )
    return tables


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
        *(transitions, durations, weights, C, D, *transitions.stride(), *durations.stride()),
        BLOCK_C=block,
        SLOTS=slots,
        num_warps=8,
    )
    return weights


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
    exact = is_exact(emissions, transitions, durations)
    lengths = None if lengths is None else lengths.contiguous()
    d_emissions = torch.empty((T, N, C), dtype=emissions.dtype, device=device)
    d_start, d_end = (torch.empty((N, C), dtype=x.dtype, device=device) for x in (start, end))
    grad_n = grad_output.stride(0)
    splits, per_split = plan.splits(T, N, C)
    changes = torch.empty((N, splits, C), dtype=torch.float64, device=device)
    programs, options = N * splits if C else 0, plan.state_options(C)
    launch(
        semi_markov_changes_kernel,
        programs,
        *(logz, lengths, saved, changes, T, N, C, splits, per_split),
        EXACT=exact,
        **options,
    )
    launch(
        semi_markov_states_kernel,
        programs,
        *(grad_output, emissions, lengths, logz, saved, changes, d_emissions, d_start, d_end),
        *(T, N, C, splits, per_split, grad_n, *emissions.stride()),
        EXACT=exact,
        **options,
    )
    pairs = torch.empty((N, splits, C * C), dtype=torch.float64, device=device)
    launch(
        semi_markov_pairs_kernel,
        N * splits * cdiv(C, plan.posterior_block(C)) ** 2,
        *(transitions, lengths, logz, saved, pairs, T, N, C, splits, per_split),
        *transitions.stride(),
        EXACT=exact,
        **plan.pair_options(C),
    )
    counts = torch.empty((N, splits, D * C), dtype=torch.float64, device=device)
    launch(
        semi_markov_segments_kernel,
        N * splits * cdiv(C, plan.posterior_block(C)),
        *(emissions, durations, lengths, logz, saved, counts, T, N, C, D, splits, per_split),
        *(*emissions.stride(), *durations.stride()),
        SEGMENTS=False,
        EXACT=exact,
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
    shape, groups = (N, *scores.shape) if per_sequence else tuple(scores.shape), 1
    if per_sequence:
        groups = N
    dtype = dtype if per_sequence else scores.dtype
    result = torch.empty(shape, dtype=dtype, device=parts.device)
    if not parts.numel():
        return result.zero_()
    options = plan.sum_options(N * splits // groups, columns)
    launch(
        semi_markov_sum_kernel,
        groups * cdiv(columns, options["BLOCK"]),
        *(grad_output, parts, result, N, splits, columns, groups, grad_output.stride(0)),
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
    lengths = None if lengths is None else lengths.contiguous()
    options = plan.segment_options(C)
    splits, per_split = plan.splits(T, N, C)
    launch(
        semi_markov_segments_kernel,
        N * splits * cdiv(C, options["BLOCK_C"]),
        *(emissions, durations, lengths, logz, saved, result, T, N, C, D, splits, per_split),
        *(*emissions.stride(), *durations.stride()),
        SEGMENTS=True,
        EXACT=is_exact(emissions, transitions, durations),
        **options,
    )
    return result
