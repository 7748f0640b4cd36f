"""Records that methods of dense linear chains return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LinearPath(NamedTuple):
    """The best path of each sequence.

    Of equal paths it is the one with the lowest state before each state, then the lowest last
    state. The k best paths of `nbest` have a leading dimension k.

    Fields:
        score: `[N]`, in nats if the scores are; -inf for a sequence without a path.
        states: `[T, N]` int64; -1 past the length and for a sequence without a path.
    """

    score: Tensor
    states: Tensor


class LinearSample(NamedTuple):
    """Paths that are drawn from the posterior.

    Fields:
        states: `[k, T, N]` int64, as in `LinearPath`.
    """

    states: Tensor


class ExpectedCounts(NamedTuple):
    """What the E-step of expectation maximization needs, summed over the tokens.

    Fields:
        start: the posterior of the first state, `[N, C]`.
        transitions: the expected number of transitions `[N, C, C]`, as `[n, from, to]`.
        end: the posterior of the last state, `[N, C]`.
    """

    start: Tensor
    transitions: Tensor
    end: Tensor
