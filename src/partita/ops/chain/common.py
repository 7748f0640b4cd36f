"""The arguments of the ops of chains, and the checks of what users give."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...primitives.semiring import Semiring
from ...runtime import checks
from ...runtime.constants import scalar
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


class ChainValues(NamedTuple):
    """The values whose sum over a path is averaged.

    Fields:
        values: the values of the edges, `[T, N, C, K]`.
        first_values, last_values: the values of the first and of the last states, `[N, C]`.
    """

    values: Tensor
    first_values: Tensor
    last_values: Tensor


def check_chain(
    scores: Tensor, source: Tensor, initial: Tensor | None, final: Tensor | None
) -> None:
    """Raise for a wrong dtype, shape or device."""
    checks.floating("scores", scores)
    if scores.ndim != 4:
        raise ValueError(f"scores: expected shape [T, N, C, K], got {list(scores.shape)}")
    checks.integer("source", source)
    checks.device("source", source, scores, "scores")
    checks.shape("source", source, scores.shape[2:], "[C, K] of scores")
    if initial is not None:
        check_end("initial", initial, scores)
    if final is not None:
        check_end("final", final, scores)


def check_end(name: str, end: Tensor, scores: Tensor) -> None:
    """Raise where numbers of the first or last states have a wrong dtype, shape or device."""
    checks.floating(name, end)
    checks.device(name, end, scores, "scores")
    checks.shape(name, end, scores.shape[1:3], "[N, C] of scores")


def check_states(name: str, value: Tensor, number: int, missing: str) -> None:
    """Raise `ValueError` with the first state that is neither one of the number nor -1.

    Args:
        name: the name of the argument.
        value: the states.
        number: the number of states.
        missing: the meaning of -1.
    """

    def expected() -> str:
        return f"a state from 0 to {number - 1}, or -1 {missing}" if number else "-1"

    checks.values(name, value, -1, number - 1, expected)


def chain_potentials(
    scores: Tensor,
    source: Tensor,
    initial: Tensor | None,
    final: Tensor | None,
    lengths: Tensor | None,
    semiring: Semiring,
) -> ChainPotentials:
    """Return the potentials of a batch of chains; ends that are None are the semiring's one."""
    if initial is None or final is None:
        one = scalar(semiring.one, acc_dtype(scores.dtype), scores.device)
        # Each end is a tensor of its own: compilers refuse one tensor for two arguments.
        N_C = scores.shape[1:3]
        initial, final = (one.expand(N_C) if end is None else end for end in (initial, final))
    return ChainPotentials(scores, source, initial, final, lengths)
