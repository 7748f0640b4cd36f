"""The way in for taggers and hidden Markov models: every state follows every state."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...runtime import checks
from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from ...runtime.lengths import lengths_on_device
from ..chain.api import Chain
from ..chain.edges import dense_source


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
        emissions: `[T, N, C]` floating, in nats, T at least 1.
        transitions: `[C, C]`, from and to, in nats.
        start, end: `[C]`, in nats; zeros if None.
        lengths: `[N]` integers, 1 to T: how many tokens count, all if None.

    Returns:
        A `Chain`, of `[T - 1, N, C, C]` scores.

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
    checks.floating("emissions", emissions)
    if emissions.ndim != 3 or emissions.shape[0] < 1:
        raise ValueError(
            f"emissions: expected shape [T, N, C] with T of at least 1, got {list(emissions.shape)}"
        )
    steps, chains, states = emissions.shape
    for name, value, shape in (
        ("transitions", transitions, [states, states]),
        ("start", start, [states]),
        ("end", end, [states]),
    ):
        if value is not None:
            checks.floating(name, value)
            checks.device(name, value, emissions, "emissions")
            checks.shape(name, value, shape, "[C, C]" if len(shape) == 2 else "[C]")
    wide = acc_dtype(emissions.dtype)  # sums of half types would be rounded to them
    emissions, transitions = emissions.to(wide), transitions.to(wide)
    scores = emissions[1:, :, :, None] + transitions.T
    initial = emissions[0] if start is None else emissions[0] + start
    final = None if end is None else end.expand(chains, states)
    counted = (
        None
        if lengths is None
        else lengths_on_device("lengths", lengths, chains, emissions.device)[1]
    )
    if counted is not None:
        checks.within("lengths", counted, 1, steps, "tokens")
        counted = counted - 1
    return Chain(
        scores,
        constant(dense_source, states, device=emissions.device),
        initial,
        final,
        lengths=counted,
    )
