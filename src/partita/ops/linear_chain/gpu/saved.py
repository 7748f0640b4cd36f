"""The tensors that the scans of dense linear chains keep for the gradient."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..common import saved_sizes


class Saved(NamedTuple):
    """The tensors that the scans keep for the gradient, as views of one fp64 tensor.

    Fields:
        states: `[2, T, N, C]`, alpha and beta; empty without a gradient.
        scales: `[T, N]`, the exponents or offsets that were taken from alpha.
        maxima: `[T, N]`, the greatest emission of each token.
        span: `[parts, 2]`, the greatest and the least transition.
    """

    states: Tensor
    scales: Tensor
    maxima: Tensor
    span: Tensor


def split_saved(saved: Tensor, T: int, N: int, C: int, save: bool = True) -> Saved:
    """Return the parts of the tensor that `linear_chain_logz` saves."""
    states, scales, maxima, span = saved.split(saved_sizes(T, N, C, save))
    return Saved(states, scales, maxima, span)


def end_strides(end: Tensor | None) -> tuple[int, int]:
    """Return the strides of start or end."""
    return (0, 0) if end is None else (end.stride(0), end.stride(1))


def transition_strides(transitions: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of transitions over steps, sequences and both states."""
    strides = transitions.stride()
    if transitions.ndim == 2:
        return 0, 0, strides[0], strides[1]
    sequence = strides[1] if transitions.ndim == 4 else 0
    return strides[0], sequence, strides[-2], strides[-1]
