"""The mode in which linear heads give each token bits that depend on that token alone."""

from __future__ import annotations

from contextlib import ContextDecorator
from contextvars import ContextVar, Token

import torch

from . import checks

VARIABLE = "PARTITA_BATCH_INVARIANT"
_chosen: ContextVar[bool | None] = ContextVar("partita_batch_invariant", default=None)
_latest: bool | None = None  # mirrors `_chosen` for compilers, which cannot trace a ContextVar


class batch_invariant(ContextDecorator):
    """Give each token of a linear head results whose bits depend on that token alone.

    Inside, the results of `linear_cross_entropy` and of the other linear heads, and the gradient of
    the hidden states, are bitwise the same whatever other tokens a batch has, how many, and where
    the token stands among them. Those of `partita.parallel` depend on the number of ranks and on
    their shards too. `linear_rnnt_loss` and `linear_tdt_loss` have this for their sequences.
    Products have blocks of 1,024 tokens, so a batch of fewer tokens takes as long as one of 1,024.
    This holds for the losses of tokens, and for the gradient of such a loss or of a sum. A mean,
    and the gradient of the matrix, are sums over the batch.

    A block applies to the current thread or task. The backward pass of a graph has the mode of its
    forward pass, wherever it is called. Without a block, `PARTITA_BATCH_INVARIANT=1` sets the mode.

    Args:
        enabled: False for the usual products, for example inside of another block.

    Raises:
        TypeError: `enabled` is no bool.

    Source: He et al., Defeating nondeterminism in LLM inference, 2025, for the problem; the blocks
    of tokens are our own.

    Example:
        >>> import torch, partita
        >>> hidden, matrix = torch.randn(5, 16), torch.randn(100, 16)
        >>> with partita.batch_invariant():
        ...     alone = partita.linear_token_stats(hidden[3:4], matrix)
        ...     among_others = partita.linear_token_stats(hidden, matrix)
        >>> torch.equal(alone.logsumexp[0], among_others.logsumexp[3])
        True
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled: expected a bool, got {enabled!r}")
        self.enabled = enabled
        self._tokens: list[Token[bool | None]] = []

    def __enter__(self) -> None:
        global _latest
        self._tokens.append(_chosen.set(self.enabled))
        _latest = self.enabled

    def __exit__(self, *raised: object) -> None:
        global _latest
        _chosen.reset(self._tokens.pop())
        _latest = _chosen.get()


def is_batch_invariant() -> bool:
    """Return whether linear heads are in the batch-invariant mode."""
    chosen = _latest if torch.compiler.is_compiling() else _chosen.get()
    if chosen is not None:
        return chosen
    return bool(checks.variable(VARIABLE))
