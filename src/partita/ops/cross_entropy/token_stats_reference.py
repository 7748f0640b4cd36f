"""Statistics of the next-token distribution."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...primitives.rows import finite_shift, laid_out_like
from ...runtime.dtypes import acc_dtype
from .common import valid_targets


class Stats(NamedTuple):
    logprob: Tensor  # [...], 0 where ignored
    logsumexp: Tensor  # [...]
    entropy: Tensor  # [...]
    argmax: Tensor  # [...], int64
    maximum: Tensor  # [...], of the logits
    sumexp: Tensor  # [...], sum of exp((logits - maximum) / temperature)


def token_stats(logits: Tensor, target: Tensor, temperature: float, ignore_index: int) -> Stats:
    x = logits.to(acc_dtype(logits.dtype)) / temperature
    logp = x.log_softmax(-1)
    p = logp.exp()
    labels, kept, wrong = valid_targets(target, x.shape[-1], ignore_index)
    logprob = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(p * torch.where(p == 0, 0, logp)).sum(-1)
    maximum = x.amax(-1)
    sumexp = (x - finite_shift(maximum).unsqueeze(-1)).exp().sum(-1)
    spoiled = torch.where(wrong, torch.nan, 0.0).to(x.dtype)
    logprob = torch.where(kept, logprob, 0) + spoiled
    return Stats(
        logprob,
        maximum + sumexp.log() + spoiled,
        entropy + spoiled,
        x.argmax(-1),
        maximum * temperature,
        sumexp,
    )


def token_stats_gradient(
    grad_logprob: Tensor,
    grad_logsumexp: Tensor,
    grad_entropy: Tensor,
    logits: Tensor,
    target: Tensor,
    maximum: Tensor | None,
    sumexp: Tensor | None,
    entropy: Tensor | None,
    temperature: float,
    ignore_index: int,
) -> Tensor:
    """Differentiable in the first four; the three that follow the target spare a kernel work."""
    x = logits.to(acc_dtype(logits.dtype)) / temperature
    logp = x.log_softmax(-1)
    p = logp.exp()
    surprise = p * torch.where(p == 0, 0, logp)  # in this order for the second derivative too
    labels, kept, wrong = valid_targets(target, x.shape[-1], ignore_index)
    hot = torch.arange(x.shape[-1], device=x.device) == labels.unsqueeze(-1)
    on_target = (torch.where(kept, grad_logprob.to(x.dtype), 0)).unsqueeze(-1)
    h = grad_logsumexp.to(x.dtype).unsqueeze(-1)
    grad = on_target * (hot.to(x.dtype) - p) + h * p
    grad = grad - grad_entropy.to(x.dtype).unsqueeze(-1) * (
        surprise - p * surprise.sum(-1, keepdim=True)
    )
    return torch.where(wrong.unsqueeze(-1), torch.nan, grad / temperature).to(logits.dtype)


def token_stats_backward(
    grad_logprob: Tensor, grad_logsumexp: Tensor, grad_entropy: Tensor, logits: Tensor, *args: Any
) -> Tensor:
    return laid_out_like(
        token_stats_gradient(grad_logprob, grad_logsumexp, grad_entropy, logits, *args), logits
    )
