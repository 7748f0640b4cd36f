"""The edges of chains: the table of all, and those of paths that are given by their states."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks


def dense_source(C: int, *, device: torch.device | str | None = None) -> Tensor:
    """The table in which every state has an edge from every state: `source[c, k] = k`, `[C, C]`.

    Args:
        C: number of states.
        device: where the table is.

    Returns:
        `[C, C]` int64.

    Raises:
        ValueError: a number of states that is none.

    Source: the transition matrix of Rabiner, A tutorial on hidden Markov models, 1989, its columns as rows.

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
    """The edges of paths that are given by their states: of several that fit, the lowest.

    Args:
        states: `[..., T + 1, N]` integers; -1 past the end.
        source: `[C, K]`, as in `Chain`.

    Returns:
        `[..., T, N]` int64, c·K + k; -1 where a state is -1.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes; two states that no edge connects (on a GPU only with `PARTITA_CHECK=1`, otherwise -1).

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
    if states.ndim < 2 or states.shape[-2] < 1:
        raise ValueError(f"states: expected shape [..., T + 1, N], got {list(states.shape)}")
    if source.ndim != 2:
        raise ValueError(f"source: expected shape [C, K], got {list(source.shape)}")
    count, slots = source.shape
    before, after = states[..., :-1, :].long(), states[..., 1:, :].long()
    inside = (before >= 0) & (after >= 0) & (after < count)
    if not source.numel():
        source = source.new_full((1, 1), -2)  # which no state is
    fits = (source[after.clamp(0, len(source) - 1)] == before[..., None]) & inside[..., None]
    found = fits.any(-1)
    lost = (before != -1) & (after != -1) & ~found
    if (
        checks.should_check_values(states.device)
        and (place := checks.first_index(lost)) is not None
    ):
        raise ValueError(
            f"states: expected an edge between one state and the next, got {int(before[place])} then {int(after[place])} at {list(place)}"
        )
    return torch.where(found, after * slots + fits.int().argmax(-1), -1)
