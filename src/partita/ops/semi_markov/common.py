"""The potentials of a batch of semi-Markov chains."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SemiMarkovPotentials(NamedTuple):
    """A batch of semi-Markov chains in the order of arguments of the registered ops.

    Fields:
        emissions: `[T, N, C]` floating, any strides, T at least 1.
        transitions: `[C, C]`, from and to, between segments, any strides.
        durations: `[D, C]`, the score of a segment by its number of steps minus 1, any strides.
        start, end: the scores of the first and of the last state, `[N, C]`.
        lengths: the number of steps of each sequence, `[N]` integers; None for T.
    """

    emissions: Tensor
    transitions: Tensor
    durations: Tensor
    start: Tensor
    end: Tensor
    lengths: Tensor | None

    @property
    def variables(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the differentiable tensors."""
        return self.emissions, self.transitions, self.durations, self.start, self.end
