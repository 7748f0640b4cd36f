"""The potentials of a batch of semi-Markov chains."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...paths.inputs import equal_lengths
from ...runtime import checks


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

    def in_full_precision(self) -> SemiMarkovPotentials:
        """Return the potentials in fp64, so that gradients are as exact as the results."""
        return SemiMarkovPotentials._make([*(x.double() for x in self.variables), self.lengths])

    def aligned_with(
        self, other: SemiMarkovPotentials
    ) -> tuple[SemiMarkovPotentials, SemiMarkovPotentials, Tensor]:
        """Return both, and where their lengths are equal, `[N]`."""
        shape = self.durations.shape
        checks.shape("other.durations", other.durations, shape, "that of this chain")
        return self, other, equal_lengths(self, other)
