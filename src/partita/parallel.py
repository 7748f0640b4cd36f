"""Losses of classes or pairs that lie on the ranks of a process group, and balanced batches."""

from __future__ import annotations

from .ops.vocab_parallel.api import cross_entropy, linear_cross_entropy, token_stats
from .ops.vocab_parallel.balanced import balanced
from .ops.vocab_parallel.contrastive import contrastive_loss
from .ops.vocab_parallel.divergence import (
    distillation_loss,
    divergence,
    linear_distillation_loss,
    linear_divergence,
    linear_logprobs,
    logprobs,
)
from .ops.vocab_parallel.support import linear_support_stats, support_stats

__all__ = [
    "balanced",
    "contrastive_loss",
    "cross_entropy",
    "distillation_loss",
    "divergence",
    "linear_cross_entropy",
    "linear_distillation_loss",
    "linear_divergence",
    "linear_logprobs",
    "linear_support_stats",
    "logprobs",
    "support_stats",
    "token_stats",
]
