"""The ops on hidden states that `partita check` runs, with their counterparts in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.linear_heads.api import linear_cross_entropy, linear_token_stats
from ..ops.linear_heads.divergence import linear_divergence
from ..ops.linear_heads.logprobs import linear_logprobs
from ..ops.linear_heads.topk import linear_topk_logprobs
from ..ops.linear_heads.topk_divergence import linear_topk_divergence
from ..testing.budget import Scale
from .check_torch import (
    divergence_in_torch,
    token_stats_in_torch,
    topk_divergence_in_torch,
    upcast,
)
from .console import DTYPES

# A budget in bytes that does not hold all logits of these rows, and one of two heads, in numbers of
# the dtype.
LEAN = 25_000
HYBRID = 27_000

Function = Callable[..., Any]


def _matrix(x: Tensor) -> Tensor:
    """Return a square matrix that maps rows of hidden states to logits."""
    size = x.shape[1]
    return (
        torch.arange(size * size, device=x.device, dtype=torch.float64)
        .sin()
        .unflatten(0, (size, size))
        / 16
    ).to(x.dtype)


def _linear_in_torch(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, _matrix(x)), target)


def _linear_stats_in_torch(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return token_stats_in_torch(F.linear(x, _matrix(x)), target)


def _linear_divergence_in_torch(x: Tensor) -> Tensor:
    teacher_logits = F.linear(x.detach().flip(0), _matrix(x))
    return divergence_in_torch(F.linear(x, _matrix(x)), 0.5, teacher_logits)


def _linear_topk_divergence(x: Tensor) -> Tensor:
    matrix = _matrix(x)
    teacher = linear_topk_logprobs(x.detach().flip(0), matrix, 7)
    return linear_topk_divergence(x, matrix, teacher, reduction="none")


def _linear_topk_divergence_in_torch(x: Tensor) -> Tensor:
    teacher_logits = F.linear(x.detach().flip(0), _matrix(x))
    return topk_divergence_in_torch(F.linear(x, _matrix(x)), 7, teacher_logits)


# A divergence is a difference of log-probabilities down to -8, each rounded. So a probability has a
# relative error of that size, and a gradient that of the greatest probability, here 1/32. From
# hidden states the logits have errors too, those of sums whose terms add up to about 40.
LOG_PROBABILITY = torch.tensor(8.0)
PROBABILITY_GRADIENT = LOG_PROBABILITY / 32
SCALES: dict[str, tuple[Scale, Scale]] = {
    "linear_divergence, hybrid": (LOG_PROBABILITY, torch.tensor(2.0**-5)),
}

# Each op with its counterpart, and its dtypes: fewer of them where compiling for each takes long.
LINEAR: tuple[tuple[str, Function, Function, tuple[str, ...]], ...] = (
    (
        "linear_cross_entropy",
        lambda x, t: linear_cross_entropy(x, _matrix(x), t),
        _linear_in_torch,
        tuple(DTYPES),
    ),
    (
        "linear_cross_entropy, lean",
        lambda x, t: linear_cross_entropy(x, _matrix(x), t, memory_budget=LEAN),
        _linear_in_torch,
        ("fp32", "fp64"),
    ),
    (
        "linear_token_stats",
        lambda x, t: linear_token_stats(x, _matrix(x), t, temperature=0.75),
        _linear_stats_in_torch,
        tuple(DTYPES),
    ),
    (
        "linear_divergence, hybrid",
        lambda x, _: linear_divergence(
            x, _matrix(x), x.flip(0), _matrix(x), beta=0.5, memory_budget=HYBRID * x.element_size()
        ),
        lambda x, _: _linear_divergence_in_torch(x).mean(),
        ("fp32", "fp64"),
    ),
    (
        "linear_topk_logprobs, lean",
        lambda x, _: linear_topk_logprobs(x, _matrix(x), 7, memory_budget=LEAN).logprobs,
        lambda x, _: upcast(F.linear(x, _matrix(x))).log_softmax(-1).topk(7).values,
        ("fp32", "fp64"),
    ),
    (
        "linear_topk_divergence",
        lambda x, _: _linear_topk_divergence(x),
        lambda x, _: _linear_topk_divergence_in_torch(x),
        ("fp32",),
    ),
    (
        "linear_logprobs, lean",
        lambda x, t: linear_logprobs(
            x, _matrix(x), t.unsqueeze(-1), temperature=0.75, memory_budget=LEAN
        ),
        lambda x, t: (
            (upcast(F.linear(x, _matrix(x))) / 0.75).log_softmax(-1).gather(-1, t.unsqueeze(-1))
        ),
        ("fp32", "fp64"),
    ),
)
