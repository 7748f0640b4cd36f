"""The tensors of a batch of dense linear chains, in the order of arguments of the registered ops."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LinearChainTensors(NamedTuple):
    """A batch of dense linear chains.

    Fields:
        emissions: `[T, N, C]` floating, any strides, T at least 1.
        transitions: `[C, C]`, `[T - 1, C, C]` or `[T - 1, N, C, C]`, from and to, any strides.
        start, end: the scores of the first and of the last state, `[N, C]`; None for zeros.
        lengths: the number of tokens of each sequence, `[N]` integers; None for T.
    """

    emissions: Tensor
    transitions: Tensor
    start: Tensor | None
    end: Tensor | None
    lengths: Tensor | None
