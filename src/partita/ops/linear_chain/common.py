"""What the backends of dense linear chains share: sizes, and the shapes and dtypes of results."""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.gpu.target import assumed
from ...runtime.dtypes import acc_dtype

RANGE_ROWS = 16  # states whose transitions one part of the search for the range reads

# Triton 3.6 compiles products of fp64 matrices for NVIDIA GPUs only, and the scans choose layouts.
HAS_KERNELS = assumed.vendor == "nvidia"


def saved_sizes(T: int, N: int, C: int, save: bool) -> list[int]:
    """Return the sizes of the parts of `gpu.arguments.Saved`; without `save`, of its work."""
    return [2 * T * N * C if save else 0, T * N, T * N, 2 * -(-C // RANGE_ROWS)]


def _fp64(tensor: Tensor, *shape: int) -> Tensor:
    return tensor.new_empty(shape, dtype=torch.float64)


def _end_gradient(end: Tensor | None, emissions: Tensor, dtype: torch.dtype | None) -> Tensor:
    if end is None:
        return emissions.new_empty(0, dtype=dtype)
    return end.new_empty(end.shape, dtype=dtype or end.dtype)


def fake_logz(emissions: Tensor, save: bool, served_by: str) -> tuple[Tensor, Tensor, Tensor]:
    T, N, C = emissions.shape
    rounded = emissions.new_empty(N, dtype=acc_dtype(emissions.dtype))
    saved: tuple[int, ...] = (T, N, C)  # of the backend for the CPU
    if not save or served_by == "reference" or (served_by == "gpu" and not HAS_KERNELS):
        saved = (0,)
    elif served_by == "gpu":
        saved = (sum(saved_sizes(T, N, C, True)),)
    return _fp64(emissions, N), rounded, _fp64(emissions, *saved)


def fake_gradient(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    need_transitions: bool,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, C = emissions.shape[1:]
    if not need_transitions:
        d_transitions = transitions.new_empty(0)
    elif per_sequence and transitions.ndim == 2:
        d_transitions = transitions.new_empty((N, C, C), dtype=acc_dtype(transitions.dtype))
    else:
        d_transitions = transitions.new_empty(transitions.shape)
    return (
        emissions.new_empty(emissions.shape),
        d_transitions,
        _end_gradient(start, emissions, None),
        _end_gradient(end, emissions, None),
    )


def fake_viterbi(emissions: Tensor) -> tuple[Tensor, Tensor]:
    T, N, _C = emissions.shape
    score = emissions.new_empty(N, dtype=acc_dtype(emissions.dtype))
    return score, emissions.new_empty((T, N), dtype=torch.int64)


def fake_nbest(emissions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    T, N, _ = emissions.shape
    return _fp64(emissions, k, N), emissions.new_empty((k, T, N), dtype=torch.int64)


def fake_sample(emissions: Tensor, uniforms: Tensor) -> Tensor:
    T, N, _ = emissions.shape
    return emissions.new_empty((uniforms.shape[1], T, N), dtype=torch.int64)


def fake_tangent(
    emissions: Tensor, transitions: Tensor, start: Tensor | None, end: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        _fp64(emissions, emissions.shape[1]),
        _fp64(emissions, *emissions.shape),
        _fp64(emissions, *transitions.shape),
        _end_gradient(start, emissions, torch.float64),
        _end_gradient(end, emissions, torch.float64),
    )
