"""The shapes and dtypes of the results of the registered ops of chains, for compilers."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype


def _fake_fp64(scores: Tensor, *shape: int) -> Tensor:
    return scores.new_empty(shape, dtype=torch.float64)


def _fake_gradient(tensor: Tensor, dtype: torch.dtype | None = None, needed: bool = True) -> Tensor:
    shape = tensor.shape if needed else (0,)
    return torch.empty(shape, dtype=dtype or tensor.dtype, device=tensor.device)


def fake_logz(scores: Tensor, save: bool, served_by: str) -> tuple[Tensor, Tensor, Tensor]:
    T, N, C, _ = scores.shape
    saved_shape = (T + 1, N, C) if save and served_by != "reference" else (0,)
    rounded = scores.new_empty(N, dtype=acc_dtype(scores.dtype))
    return _fake_fp64(scores, N), rounded, _fake_fp64(scores, *saved_shape)


def fake_scan(scores: Tensor) -> Tensor:
    T, N, C, _ = scores.shape
    return _fake_fp64(scores, T + 1, N, C)


def fake_logz_gradient(
    scores: Tensor, initial: Tensor, final: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradient(scores, dtype), _fake_gradient(initial), _fake_gradient(final)


def fake_viterbi(scores: Tensor, trace: bool) -> tuple[Tensor, Tensor, Tensor]:
    T, N = scores.shape[:2]
    states = scores.new_empty((T + 1, N) if trace else (0,), dtype=torch.int64)
    edges = scores.new_empty((T, N) if trace else (0,), dtype=torch.int64)
    return scores.new_empty(N, dtype=acc_dtype(scores.dtype)), states, edges


def fake_nbest(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    T, N = scores.shape[:2]
    states = scores.new_empty((k, T + 1, N), dtype=torch.int64)
    edges = scores.new_empty((k, T, N), dtype=torch.int64)
    return _fake_fp64(scores, k, N), states, edges


def fake_sample(scores: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    T, N = scores.shape[:2]
    samples = uniforms.shape[1]
    states = scores.new_empty((samples, T + 1, N), dtype=torch.int64)
    return states, scores.new_empty((samples, T, N), dtype=torch.int64)


def fake_expectation(scores: Tensor, save: bool, served_by: str) -> tuple[Tensor, Tensor, Tensor]:
    T, N, C, _ = scores.shape
    saved_shape = (2, T + 1, N, C) if save and served_by != "reference" else (0,)
    mean, logz = (_fake_fp64(scores, N) for _ in range(2))
    return mean, logz, _fake_fp64(scores, *saved_shape)


def fake_expectation_gradient(
    scores: Tensor,
    initial: Tensor,
    final: Tensor,
    values: Tensor,
    first_values: Tensor,
    last_values: Tensor,
    need_score_grads: bool,
    need_value_grads: bool,
) -> tuple[Tensor, ...]:
    return (
        *(_fake_gradient(t, needed=need_score_grads) for t in (scores, initial, final)),
        *(_fake_gradient(t, needed=need_value_grads) for t in (values, first_values, last_values)),
    )
