"""The way in for taggers and hidden Markov models: every state follows every state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _checks
from .chain import Chain, lengths_of


def dense_source(C: int, *, device: torch.device | str | None = None) -> Tensor:
    """The table in which every state has an edge from every state: `source[c, k] = k`, `[C, C]`.

    Args:
        C: number of states.
        device: where the table is.

    Returns:
        `[C, C]` int64.

    Raises:
        ValueError: a number of states that is none.

    Source: the transition matrix of a hidden Markov model, its columns as rows.

    Example:
        >>> from partita import dense_source
        >>> dense_source(2)
        tensor([[0, 1],
                [0, 1]])
    """
    if isinstance(C, bool) or not isinstance(C, int) or C < 0:
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
    _checks.integer("states", states)
    _checks.integer("source", source)
    _checks.device("source", source, states, "states")
    if states.ndim < 2 or states.shape[-2] < 1:
        raise ValueError(f"states: expected shape [..., T + 1, N], got {list(states.shape)}")
    if source.ndim != 2:
        raise ValueError(f"source: expected shape [C, K], got {list(source.shape)}")
    count, slots = source.shape
    before, after = states[..., :-1, :].long(), states[..., 1:, :].long()
    inside = (before >= 0) & (after >= 0) & (after < count)
    fits = (source[after.clamp(0, max(count - 1, 0))] == before[..., None]) & inside[..., None]
    found = fits.any(-1)
    lost = (before >= 0) & (after >= 0) & ~found
    if _checks.values_wanted(states.device) and (place := _checks.first_place(lost)) is not None:
        raise ValueError(f"states: expected an edge between one state and the next, got {int(before[place])} then {int(after[place])} at {list(place)}")
    return torch.where(found, after * slots + fits.int().argmax(-1), -1)


def linear_chain(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None = None,
    end: Tensor | None = None,
    *,
    lengths: Tensor | Sequence[int] | None = None,
) -> Chain:
    """The chain of a tagger or a hidden Markov model: T tokens, of which each has one of C tags.

    A path has the score start[y₀] + Σ emissions[t, y_t] + Σ transitions[y_t, y_{t+1}] + end[y_last]. The chain has T − 1 steps: its states are the
    tags, so `viterbi().states` is `[T, N]`.

    Args:
        emissions: `[T, N, C]` floating, T at least 1.
        transitions: `[C, C]`, from and to.
        start, end: `[C]`; zeros if None.
        lengths: `[N]` integers, 1 to T: how many tokens count, all if None.

    Returns:
        The chain, of `[T - 1, N, C, C]` scores.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes, devices or lengths.

    Source: Lafferty et al., Conditional random fields, 2001.

    Example:
        >>> import torch
        >>> from partita import linear_chain
        >>> emissions = torch.tensor([[[2.0, 0.0]], [[0.0, 0.5]], [[1.0, 0.0]]])
        >>> linear_chain(emissions, torch.eye(2)).viterbi().states.flatten()
        tensor([0, 0, 0])
    """
    _checks.floating("emissions", emissions)
    if emissions.ndim != 3 or emissions.shape[0] < 1:
        raise ValueError(f"emissions: expected shape [T, N, C] with T of at least 1, got {list(emissions.shape)}")
    steps, chains, states = emissions.shape
    for name, value, shape in (("transitions", transitions, [states, states]), ("start", start, [states]), ("end", end, [states])):
        if value is not None:
            _checks.floating(name, value)
            _checks.device(name, value, emissions, "emissions")
            _checks.shape(name, value, shape, "[C, C]" if len(shape) == 2 else "[C]")
    scores = emissions[1:, :, :, None] + transitions.T
    initial = emissions[0] if start is None else emissions[0] + start
    final = None if end is None else end.expand(chains, states)
    counted = lengths_of(lengths, emissions)
    if counted is not None:
        _checks.within("lengths", counted, 1, steps, "tokens")
        counted = counted - 1
    return Chain(scores, dense_source(states, device=emissions.device), initial, final, lengths=counted)
