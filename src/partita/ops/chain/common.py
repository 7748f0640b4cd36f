"""The arguments of the ops of chains, and the checks of what users give."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...runtime import checks


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
