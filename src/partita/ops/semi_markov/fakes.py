"""The shapes and dtypes of the results of the registered ops of semi-Markov chains."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype
from .common import saved_shape


def fake_logz(emissions: Tensor, save: bool, served_by: str) -> tuple[Tensor, Tensor, Tensor]:
    T, N, C = emissions.shape
    saved = saved_shape(served_by, T, N, C) if save else (0,)
    return (
        emissions.new_empty(N, dtype=torch.float64),
        emissions.new_empty(N, dtype=acc_dtype(emissions.dtype)),
        emissions.new_empty(saved, dtype=torch.float64),
    )


def fake_gradient(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    N = emissions.shape[1]
    dtype = acc_dtype(emissions.dtype)
    return (
        emissions.new_empty(emissions.shape),
        *(
            emissions.new_empty((N, *scores.shape), dtype=dtype)
            if per_sequence
            else scores.new_empty(scores.shape)
            for scores in (transitions, durations)
        ),
        start.new_empty(start.shape),
        end.new_empty(end.shape),
    )  # type: ignore[return-value]


def fake_segments(emissions: Tensor, durations: Tensor) -> Tensor:
    T, N, C = emissions.shape
    return emissions.new_empty((T, len(durations), N, C), dtype=acc_dtype(emissions.dtype))


def fake_viterbi(emissions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    T, N, _C = emissions.shape
    return (
        emissions.new_empty(N, dtype=acc_dtype(emissions.dtype)),
        emissions.new_empty((T, N), dtype=torch.int64),
        emissions.new_empty((T, N), dtype=torch.bool),
    )


def fake_sample(emissions: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    shape = (uniforms.shape[2], *emissions.shape[:2])
    return (
        emissions.new_empty(shape, dtype=torch.int64),
        emissions.new_empty(shape, dtype=torch.bool),
    )
