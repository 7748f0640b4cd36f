"""The shapes and dtypes of the results of the registered ops of dense linear chains."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype
from .common import saved_shape


def _fp64(tensor: Tensor, *shape: int) -> Tensor:
    return tensor.new_empty(shape, dtype=torch.float64)


def _end_gradient(end: Tensor | None, emissions: Tensor, dtype: torch.dtype | None) -> Tensor:
    if end is None:
        return emissions.new_empty(0, dtype=dtype)
    return end.new_empty(end.shape, dtype=dtype or end.dtype)


def fake_logz(emissions: Tensor, save: bool, served_by: str) -> tuple[Tensor, Tensor, Tensor]:
    T, N, C = emissions.shape
    rounded = emissions.new_empty(N, dtype=acc_dtype(emissions.dtype))
    saved = saved_shape(served_by, T, N, C) if save else (0,)
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
