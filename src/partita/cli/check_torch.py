"""Counterparts in plain PyTorch of the ops that `partita check` runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def divergence_in_torch(x: Tensor, beta: float, teacher: Tensor | None = None) -> Tensor:
    """Compute the divergence of rows from a teacher's, or from themselves in the opposite order."""
    teacher = x.detach().flip(-1) if teacher is None else teacher
    p, q = upcast(x).softmax(-1), upcast(teacher).softmax(-1)
    first, second = (q, p) if beta == 0 else (p, q)
    if beta in (0.0, 1.0):
        return F.kl_div(second.log(), first, reduction="none").sum(-1)
    mixture = (beta * q + (1 - beta) * p).log()
    parts = (F.kl_div(mixture, r, reduction="none").sum(-1) for r in (q, p))
    return beta * next(parts) + (1 - beta) * next(parts)


def topk_divergence_in_torch(x: Tensor, k: int, teacher: Tensor) -> Tensor:
    """Compute the forward KL from the k best classes of the teacher's logits."""
    q, ids = upcast(teacher).softmax(-1).topk(k)
    p = upcast(x).softmax(-1).gather(-1, ids)
    p, q = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in (p, q))
    return F.kl_div(p.log(), q, reduction="none").sum(-1)


def token_stats_in_torch(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    x = upcast(x) / 0.75
    logp = x.log_softmax(-1)
    p = logp.exp()
    entropy = -(p * logp.masked_fill(p == 0, 0)).sum(-1)
    return logp.gather(-1, target.unsqueeze(-1)).squeeze(-1), x.logsumexp(-1), entropy


def paths_in_torch(scores: Tensor, source: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute the sum over all paths, or the best score."""
    alpha = torch.zeros_like(scores[0, :, :, 0])
    for step in scores:
        alpha = total(step + alpha[:, source])
    return total(alpha)


def pairs_in_torch(scores: Tensor, source: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log Z and the expected sum of the values of a path; each step has its own values."""
    alpha, mean = torch.zeros(2, *scores.shape[1:3], dtype=scores.dtype, device=scores.device)
    for step, value in zip(scores, values, strict=True):
        terms = step + alpha[:, source]
        mean = (terms.softmax(-1) * (value + mean[:, source])).sum(-1)
        alpha = terms.logsumexp(-1)
    return alpha.logsumexp(-1), (alpha.softmax(-1) * mean).sum(-1)
