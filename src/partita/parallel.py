"""Losses over a vocabulary that is sharded over a `torch.distributed` group, and `balanced` batches."""

from __future__ import annotations

from .ops.vocab_parallel.api import balanced, cross_entropy, linear_cross_entropy, token_stats

__all__ = ["balanced", "cross_entropy", "linear_cross_entropy", "token_stats"]
