"""The arguments of the ops of chains, checks of what users give, and shapes of results."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...paths.inputs import check_equal, equal_lengths
from ...runtime import checks
from ...runtime.dtypes import acc_dtype


class ChainPotentials(NamedTuple):
    """A batch of chains in the order of arguments of the registered ops.

    Fields:
        scores: the scores of the edges, `[T, N, C, K]`.
        source: the state that each edge leaves, `[C, K]`; -1 for no edge.
        initial: the scores of the first states, `[N, C]`.
        final: the scores of the last states, `[N, C]`.
        lengths: the number of steps of each chain, `[N]`; None for T.
    """

    scores: Tensor
    source: Tensor
    initial: Tensor
    final: Tensor
    lengths: Tensor | None

    @property
    def variables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the differentiable tensors."""
        return self.scores, self.initial, self.final

    def in_full_precision(self) -> ChainPotentials:
        """Return these potentials; their ops need no wider dtype."""
        return self

    def aligned_with(
        self, other: ChainPotentials
    ) -> tuple[ChainPotentials, ChainPotentials, Tensor]:
        """Return both, and where their lengths and tables of sources are equal, `[N]`."""
        same = equal_lengths(self, other)
        return self, other, same & check_equal("source", self.source, other.source).all()


class ChainValues(NamedTuple):
    """The values whose sum over a path is averaged.

    Fields:
        values: the values of the edges, `[T, N, C, K]`.
        first_values, last_values: the values of the first and of the last states, `[N, C]`.
    """

    values: Tensor
    first_values: Tensor
    last_values: Tensor


def check_end(name: str, end: Tensor, scores: Tensor) -> None:
    """Raise where numbers of the first or last states have a wrong dtype, shape or device."""
    checks.floating(name, end)
    checks.device(name, end, scores, "scores")
    checks.shape(name, end, scores.shape[1:3], "[N, C] of scores")


def check_states(name: str, value: Tensor, number: int, missing: str) -> None:
    """Raise `ValueError` with the first state that is neither one of the number nor -1.

    The message has the meaning of -1, `missing`.
    """

    def expected() -> str:
        return f"a state from 0 to {number - 1}, or -1 {missing}" if number else "-1"

    checks.values(name, value, -1, number - 1, expected)


def _fake_fp64(scores: Tensor, *shape: int) -> Tensor:
    return scores.new_empty(shape, dtype=torch.float64)


def fake_logz(scores: Tensor, save: bool, served_by: str) -> tuple[Tensor, Tensor, Tensor]:
    T, N, C, _ = scores.shape
    saved_shape = (T + 1, N, C) if save and served_by != "reference" else (0,)
    rounded = scores.new_empty(N, dtype=acc_dtype(scores.dtype))
    return _fake_fp64(scores, N), rounded, _fake_fp64(scores, *saved_shape)


def fake_scan(scores: Tensor) -> Tensor:
    T, N, C, _ = scores.shape
    return _fake_fp64(scores, T + 1, N, C)


def fake_gradient(
    scores: Tensor, initial: Tensor, final: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    d_scores = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    d_initial, d_final = (
        torch.empty(end.shape, dtype=end.dtype, device=end.device) for end in (initial, final)
    )
    return d_scores, d_initial, d_final


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
