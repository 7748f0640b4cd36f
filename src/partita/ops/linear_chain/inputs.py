"""The tensors of a batch of dense linear chains, and the checks of what users give."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...paths.inputs import full_lengths, steps_first
from ...runtime import checks
from ...runtime.sizes import same_sizes


class LinearChainTensors(NamedTuple):
    """A batch of dense linear chains in the order of arguments of the registered ops.

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


def check_linear_chain(emissions: Tensor, transitions: Tensor, batch_first: bool) -> Tensor:
    """Return the emissions as `[T, N, C]`, or raise for a wrong dtype, shape or device."""
    emissions = steps_first(emissions, batch_first)
    checks.floating("transitions", transitions)
    checks.device("transitions", transitions, emissions, "emissions")
    T, N, C = emissions.shape
    shapes = {2: (C, C), 3: (T - 1, C, C), 4: (T - 1, N, C, C)}
    if not same_sizes(transitions.shape, shapes.get(transitions.ndim, (-1,))):
        raise ValueError(
            "transitions: expected shape [C, C], [T - 1, C, C] or [T - 1, N, C, C] with"
            f" [T, N, C] = {[T, N, C]}, got {list(transitions.shape)}"
        )
    return emissions


def check_same_lengths(chain: LinearChainTensors, other: LinearChainTensors) -> None:
    """Raise where another chain has other lengths; the values are read only if checked."""
    if chain.lengths is other.lengths or not checks.should_check_values(chain.emissions.device):
        return
    lengths = [full_lengths(each.emissions, each.lengths) for each in (other, chain)]
    if all(map(checks.can_check_values, lengths)) and not torch.equal(*lengths):
        raise ValueError("other.lengths: expected the lengths of this chain, got others")
