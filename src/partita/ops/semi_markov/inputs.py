"""The potentials of a batch of semi-Markov chains, and the checks of what users give."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...paths.inputs import end_of_chains, steps_first
from ...runtime import checks
from ...runtime.constants import scalar


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


def check_semi_markov(
    emissions: Tensor, transitions: Tensor, durations: Tensor, batch_first: bool
) -> Tensor:
    """Return the emissions as `[T, N, C]`, or raise for a wrong dtype, shape or device."""
    emissions = steps_first(emissions, batch_first)
    C = emissions.shape[2]
    for name, scores in (("transitions", transitions), ("durations", durations)):
        checks.floating(name, scores)
        checks.device(name, scores, emissions, "emissions")
    if tuple(transitions.shape) != (C, C):
        raise ValueError(
            f"transitions: expected shape [C, C] with C = {C}, got {list(transitions.shape)}"
        )
    if durations.ndim != 2 or durations.shape[0] < 1 or durations.shape[1] != C:
        raise ValueError(
            f"durations: expected shape [D, C] with D of at least 1 and C = {C},"
            f" got {list(durations.shape)}"
        )
    return emissions


def as_end(name: str, end: Tensor | None, emissions: Tensor) -> Tensor:
    """Return the scores of the first or last states as `[N, C]`, or raise for a wrong argument."""
    if end is None:
        return scalar(0.0, emissions.dtype, emissions.device).expand(emissions.shape[1:])
    return end_of_chains(name, end, emissions)
