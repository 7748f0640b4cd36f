"""Tables of the edges of chains, and the edges of paths that are given by their states."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.sizes import holds
from .common import check_states


def dense_source(C: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return the table in which every state has an edge from every state, `[C, C]`.

    Its entries are `source[c, k] = k`.

    Args:
        C: the number of states.
        device: the device of the table.

    Returns:
        `[C, C]` int64.

    Raises:
        TypeError, ValueError: C is not an integer, or it is negative.

    Source: the transition matrix of Rabiner, A tutorial on hidden Markov models, 1989, transposed.

    Example:
        >>> from partita import dense_source
        >>> dense_source(2)
        tensor([[0, 1],
                [0, 1]])
    """
    checks.python_int("C", C)
    if C < 0:
        raise ValueError(f"C: expected a number of states, 0 or more, got {C!r}")
    return torch.arange(C, device=device).repeat(C, 1)


def edges_from_states(states: Tensor, source: Tensor) -> Tensor:
    """Return the edges of paths that are given by their states.

    Where several edges connect two states, the lowest is returned.

    Args:
        states: `[..., T + 1, N]` integers; -1 past the end of a path.
        source: `[C, K]`, as in `Chain`.

    Returns:
        `[..., T, N]` int64, c·K + k for the k-th edge into state c; -1 where a state is -1.

    Raises:
        TypeError, ValueError: a dtype or shape is wrong, a state is out of range, or no edge
            connects two states. On a GPU the last two are checked only with `PARTITA_CHECK=1`, and
            otherwise give -1.

    Source: the inverse of `ViterbiPath.states`.

    Example:
        >>> import torch
        >>> from partita import dense_source, edges_from_states
        >>> edges_from_states(torch.tensor([[0], [2], [1]]), dense_source(3))
        tensor([[6],
                [5]])
    """
    checks.integer("states", states)
    checks.integer("source", source)
    checks.device("source", source, states, "states")
    if states.ndim < 2 or not holds(states.shape[-2] >= 1):
        raise ValueError(f"states: expected shape [..., T + 1, N], got {list(states.shape)}")
    if source.ndim != 2:
        raise ValueError(f"source: expected shape [C, K], got {list(source.shape)}")
    C, K = source.shape
    check_states("states", states, C, "past the end of a path")
    previous, entered = states[..., :-1, :].long(), states[..., 1:, :].long()
    in_range = (previous >= 0) & (entered >= 0) & (entered < C)
    if not source.numel():
        source = source.new_full((1, 1), -2)  # an index that no state has
    rows = source[entered.clamp(0, len(source) - 1)]
    connects = (rows == previous[..., None]) & in_range[..., None]
    connected = connects.any(-1)
    broken = (previous != -1) & (entered != -1) & ~connected
    if (
        checks.should_check_values(states.device)
        and (index := checks.first_index(broken)) is not None
    ):
        raise ValueError(
            f"states: expected an edge between one state and the next,"
            f" got {int(previous[index])} then {int(entered[index])} at {list(index)}"
        )
    return torch.where(connected, entered * K + connects.int().argmax(-1), -1)
