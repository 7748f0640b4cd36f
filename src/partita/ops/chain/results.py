"""Records that methods of chains return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ViterbiPath(NamedTuple):
    """The best path of each chain.

    Of equal paths it is the one with the lowest edge into each state, then the lowest last state.

    Fields:
        score: `[N]`, in nats if the scores are; -inf for a chain without a path.
        states: `[T + 1, N]` int64; row 0 is the initial state. -1 past the length and for a chain
            without a path.
        edges: `[T, N]` int64, c·K + k for the k-th edge into state c; -1 as in states.
    """

    score: Tensor
    states: Tensor
    edges: Tensor


class ChainSample(NamedTuple):
    """Paths that are drawn from the posterior.

    Fields:
        states: `[k, T + 1, N]` int64, as in `ViterbiPath`.
        edges: `[k, T, N]` int64, as in `ViterbiPath`.
    """

    states: Tensor
    edges: Tensor
