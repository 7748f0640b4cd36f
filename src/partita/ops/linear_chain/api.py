"""The chain of taggers and hidden Markov models, in which every state follows every state."""

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
    """Return the chain of a tagger or a hidden Markov model: T tokens, each with one of C tags.

    A path has the score
    start[y₀] + Σ emissions[t, y_t] + Σ transitions[y_t, y_{t+1}] + end[y_last].
    The chain has T − 1 steps. Its states are the tags, so `viterbi().states` is `[T, N]`.

    Args:
        emissions: `[T, N, C]` floating, in nats, T at least 1.
        transitions: `[C, C]`, from and to, in nats.
        start, end: `[C]`, in nats; zeros if None.
        lengths: `[N]` integers, 1 to T: the number of tokens of each sequence; T if None.

    Returns:
        A `Chain` with scores `[T - 1, N, C, C]`.

    Raises:
        TypeError, ValueError: a dtype, shape, device or length is wrong.

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
    T, N, C = emissions.shape
    for name, value, shape in (
        ("transitions", transitions, [C, C]),
        ("start", start, [C]),
        ("end", end, [C]),
    ):
        if value is not None:
            checks.floating(name, value)
            checks.device(name, value, emissions, "emissions")
            checks.shape(name, value, shape, "[C, C]" if len(shape) == 2 else "[C]")
    # Sums in half types would be rounded to those types.
    dtype = acc_dtype(emissions.dtype)
    emissions, transitions = emissions.to(dtype), transitions.to(dtype)
    scores = emissions[1:, :, :, None] + transitions.T
    initial = emissions[0] if start is None else emissions[0] + start
    final = None if end is None else end.expand(N, C)
    steps = None
    if lengths is not None:
        tokens = lengths_on_device("lengths", lengths, N, emissions.device)[1]
        checks.within("lengths", tokens, 1, T, "tokens")
        steps = tokens - 1
    source = constant(dense_source, C, device=emissions.device)
    return Chain(scores, source, initial, final, lengths=steps)
