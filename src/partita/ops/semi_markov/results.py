"""Records that methods of semi-Markov chains return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SemiMarkovPath(NamedTuple):
    """The best path of each sequence.

    Of equal paths it is the one with the lowest last state, then the shortest last segment, then
    the lowest state before it, and so on.

    Fields:
        score: `[N]`, in nats if the scores are; -inf for a sequence without a path.
        states: `[T, N]` int64; -1 past the length and for a sequence without a path.
        starts: `[T, N]` bool; True where a segment starts.
    """

    score: Tensor
    states: Tensor
    starts: Tensor


class SemiMarkovSample(NamedTuple):
    """Paths that are drawn from the posterior.

    Fields:
        states: `[k, T, N]` int64, as in `SemiMarkovPath`.
        starts: `[k, T, N]` bool, as in `SemiMarkovPath`.
    """

    states: Tensor
    starts: Tensor
