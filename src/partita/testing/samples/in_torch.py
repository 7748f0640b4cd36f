"""Counterparts of the functions in plain PyTorch, with the same arguments, and sums over paths.

They compute in the dtype of their inputs, in fp32 at least, and PyTorch differentiates them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.logprobs.common import TopK
from ...runtime.dtypes import acc_dtype


def upcast(x: Tensor) -> Tensor:
    return x.to(acc_dtype(x.dtype))


def capped(logits: Tensor, softcap: float | None, temperature: float = 1.0) -> Tensor:
    """Return soft-capped logits over the temperature."""
    x = upcast(logits)
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    return x / temperature


def reduced(losses: Tensor, reduction: str, counts: Tensor | None = None) -> Tensor:
    """Return the losses, their sum, or their mean over the rows that count."""
    if reduction == "none":
        return losses
    number = losses.numel() if counts is None else counts.sum()
    return losses.sum() / number if reduction == "mean" else losses.sum()


def logsumexp(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """Compute log-sum-exp with a gradient that is exact for a large maximum.

    PyTorch's gradient is exp(x - logsumexp), which is not.
    """
    maximum = x.detach().amax(dim, keepdim=True)
    maximum = torch.where(maximum.isinf(), 0, maximum)
    result = maximum + (x - maximum).exp().sum(dim, keepdim=True).log()
    return result if keepdim else result.squeeze(dim)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    # One row is a batch of one: PyTorch's mean over no rows is NaN, but 0 on CUDA without a batch.
    is_row, is_label = input.ndim == 1, not target.is_floating_point()
    if is_row:
        input, target = input[None], target[None]
    target = target.long() if is_label else target
    if is_label:  # A row that does not count has a finite gradient whatever it holds.
        input = torch.where((target != ignore_index).unsqueeze(1), input, 0)
    x = capped(input, softcap)
    loss = F.cross_entropy(
        x,
        target if is_label else target.to(x.dtype),
        None if weight is None else weight.to(x.dtype),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    if z_loss:
        counts = target != ignore_index if is_label else torch.ones_like(x.select(1, 0)) > 0
        squares = z_loss * torch.where(counts, logsumexp(x, 1), 0).square()
        loss = loss + reduced(squares, reduction, counts)
    return loss.reshape(()) if is_row else loss


def token_stats(
    logits: Tensor,
    target: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    x = capped(logits, softcap)
    if target is None:
        target, ignore_index = x.argmax(-1), -100
    # The maximum is subtracted before the division, which would round large logits.
    maximum = x.detach().amax(-1, keepdim=True)
    maximum = torch.where(maximum.isinf(), 0, maximum)
    x = (x - maximum) / temperature
    logp = x.log_softmax(-1)
    p = logp.exp()
    counts = target != ignore_index
    picked = logp.gather(-1, torch.where(counts, target, 0).long().unsqueeze(-1)).squeeze(-1)
    entropy = -(p * logp.masked_fill(p == 0, 0)).sum(-1)
    shift = (maximum / temperature).squeeze(-1)
    return torch.where(counts, picked, 0), shift + logsumexp(x, -1), entropy


def truncated_stats(
    logits: Tensor,
    target: Tensor | None = None,
    *,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    temperature: Any = 1.0,
    softcap: float | None = None,
    order: str = "vllm",
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the statistics of the classes that the formulas of vLLM's sampler keep."""
    rules: Iterable[Any] = (top_k, top_p, min_p, temperature)
    rules = (x.unsqueeze(-1) if isinstance(x, Tensor) else x for x in rules)
    top_k, top_p, min_p, temperature = rules
    x, kept = capped(logits, softcap), torch.ones_like(logits, dtype=torch.bool)
    with torch.no_grad():
        p = (x / temperature).softmax(-1)
        ordered, index = logits.sort(-1, descending=True)
        by_min_p = kept if min_p is None else p >= min_p * p.amax(-1, keepdim=True)
        if order == "vllm":
            kept = by_min_p
        if top_k is not None:
            rank = torch.as_tensor(top_k, device=x.device).expand_as(x[..., :1])
            rank = torch.where(rank > 0, rank, x.shape[-1]).clamp(max=x.shape[-1])
            kept = kept & (logits >= ordered.gather(-1, rank - 1))
        if top_p is not None:
            share = torch.where(kept, p, 0).gather(-1, index)
            before = share.cumsum(-1) - share
            last = (before < top_p * share.sum(-1, keepdim=True)).sum(-1, keepdim=True) - 1
            kept = kept & (logits >= ordered.gather(-1, last.clamp(min=0)))
        kept = kept & by_min_p
        if target is None:
            target, ignore_index = logits.argmax(-1), -100
        counts = (target != ignore_index).unsqueeze(-1)
        label = torch.where(counts, target.long().unsqueeze(-1), 0)
        kept = kept | (torch.zeros_like(kept).scatter(-1, label, True) & counts)
    call: dict[str, Any] = {"temperature": temperature, "ignore_index": ignore_index}
    logprob, kept_logsumexp, entropy = token_stats(x.masked_fill(~kept, -torch.inf), target, **call)
    return logprob, token_stats(x, target, **call)[1], kept_logsumexp, entropy


def logprobs(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = None,
) -> Tensor:
    logp = capped(logits, softcap, temperature).log_softmax(-1)
    counts = torch.ones_like(ids) > 0 if ignore_index is None else ids != ignore_index
    return torch.where(counts, logp.gather(-1, torch.where(counts, ids, 0)), 0)


def members(target: Tensor, ids: Tensor, offsets: Tensor, classes: int) -> Tensor:
    """Return which classes are in the set of each row, `[..., C]`; all of them without ids."""
    numbers = offsets.diff().long()
    rows = torch.arange(target.numel(), device=target.device)
    found = torch.zeros(len(rows), classes, dtype=torch.bool, device=target.device)
    found[rows.repeat_interleave(numbers), ids.long()] = True
    found[rows, target.flatten().long().clamp(min=0)] = True
    return (found | (numbers == 0).unsqueeze(-1)).reshape(*target.shape, classes)


def support_stats(
    logits: Tensor,
    target: Tensor,
    ids: Tensor,
    offsets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    counts = target != ignore_index
    target = torch.where(counts, target, 0)
    is_member = members(target, ids, offsets, logits.shape[-1])
    x = capped(torch.where(is_member & counts.unsqueeze(-1), logits, 0), softcap)
    x = torch.where(is_member, x, -torch.inf)
    # The maximum is subtracted before the division, which would round large logits.
    x = (x - x.detach().amax(-1, keepdim=True)) / temperature
    e = x.exp()
    total = e.sum(-1)
    picked = x.gather(-1, target.unsqueeze(-1)).squeeze(-1) - total.log()
    entropy = total.log() - (e * torch.where(e == 0, 0, x)).sum(-1) / total
    return torch.where(counts, picked, 0), torch.where(counts, entropy, 0)


def topk_logprobs(
    logits: Tensor, k: int, *, temperature: float = 1.0, softcap: float | None = None
) -> Tensor:
    logp = capped(logits, softcap, temperature).log_softmax(-1)
    # PyTorch's `topk` takes any of equal classes, and so their gradients would differ.
    return logp.gather(
        -1, torch.sort(logits, stable=True, dim=-1, descending=True).indices[..., :k]
    )


def kl(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) of probabilities and log-probabilities, both in log."""
    return (first.exp() * torch.where(first == -torch.inf, 0, first - second)).sum(-1)


def mixed(logq: Tensor, logp: Tensor, beta: float) -> Tensor:
    """Return the divergence between a teacher q and a student p."""
    if beta in (0.0, 1.0):
        return kl(logp, logq) if beta else kl(logq, logp)
    mixture = (beta * logq.exp() + (1 - beta) * logp.exp()).log()
    return beta * kl(logq, mixture) + (1 - beta) * kl(logp, mixture)


def counted(losses: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    return reduced(losses if mask is None else torch.where(mask, losses, 0), reduction, mask)


def divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    dtype = torch.promote_types(logits.dtype, teacher_logits.dtype)
    logp, logq = (
        capped(each.to(dtype), softcap, temperature).log_softmax(-1)
        for each in (logits, teacher_logits.detach())
    )
    return counted(mixed(logq, logp, beta), mask, reduction)


def distillation(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None = None,
    *,
    weights: dict[str, Any],
    beta: float = 0.5,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    softcap: float | None = None,
    teacher_classes: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> list[Tensor]:
    """Return the loss, and under `none` the terms that have a weight."""
    t = teacher_logits if teacher_classes is None else teacher_logits[..., teacher_classes]
    x = logits.to(torch.promote_types(logits.dtype, t.dtype))
    counts = None if target is None else target != -100
    scale = temperature**2 if scale_by_temperature_squared else 1.0
    found: dict[str, tuple[Tensor, Tensor | None]] = {}
    if "hard" in weights:
        assert target is not None and counts is not None
        labels = torch.where(counts, target, 0).long().unsqueeze(-1)
        plain = capped(x, softcap)
        found["hard"] = logsumexp(plain, -1) - plain.gather(-1, labels).squeeze(-1), counts
    counts = counts if mask is None else mask
    at: dict[str, Any] = {"temperature": temperature, "softcap": softcap}
    for name, b in (("kl", 0.0), ("reverse_kl", 1.0), ("jsd", beta)):
        if name in weights:
            found[name] = scale * divergence(x, t, beta=b, reduction="none", **at), counts
    if "tv" in weights:
        p, q = (capped(y, softcap, temperature).softmax(-1) for y in (x, t.detach().to(x.dtype)))
        found["tv"] = scale * (p - q).abs().sum(-1) / 2, counts
    terms = [counted(*each, reduction) for each in found.values()]
    weighted = [(weights[name] * rows, which) for name, (rows, which) in found.items()]
    loss: Any = sum(counted(*each, reduction) for each in weighted)
    return [loss, *terms] if reduction == "none" else [loss]


def topk_divergence(
    logits: Tensor,
    teacher: TopK,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    x = capped(logits, softcap, temperature)
    known = torch.zeros_like(x, dtype=torch.bool).scatter(-1, teacher.indices, True)
    rest = x.masked_fill(known, -torch.inf).logsumexp(-1, keepdim=True)
    logp = torch.cat([x.gather(-1, teacher.indices), rest], -1) - x.logsumexp(-1, keepdim=True)
    best = teacher.logprobs.to(logp.dtype)
    logq = torch.cat([best, torch.log1p(-best.exp().sum(-1, keepdim=True))], -1)
    return counted(mixed(logq, logp, beta), mask, reduction)


def from_hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of hidden states from one of logits."""

    def call(
        input: Tensor,
        linear_weight: Tensor,
        *,
        linear_bias: Tensor | None = None,
        low_rank_input: Tensor | None = None,
        low_rank_weight: Tensor | None = None,
        memory_budget: int | None = None,
        **others: Any,
    ) -> Any:
        logits = F.linear(input, linear_weight, linear_bias)
        if low_rank_input is not None and low_rank_weight is not None:
            logits = logits + F.linear(low_rank_input, low_rank_weight)
        return function(logits, **others)

    return call


def linear_divergence(
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    teacher_bias: Tensor | None = None,
    **student: Any,
) -> Tensor:
    teacher = F.linear(teacher_input, teacher_weight, teacher_bias)
    found: Tensor = from_hidden(divergence)(teacher_logits=teacher, **student)
    return found


def linear_distillation(
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    teacher_bias: Tensor | None = None,
    **student: Any,
) -> list[Tensor]:
    teacher = F.linear(teacher_input, teacher_weight, teacher_bias)
    found: list[Tensor] = from_hidden(distillation)(teacher_logits=teacher, **student)
    return found


def reachable(scores: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores with -inf where there is no edge, and a table in which all sources exist."""
    missing = source < 0
    return upcast(scores).masked_fill(missing, -torch.inf), source.masked_fill(missing, 0).long()


def total_of_paths(scores: Tensor, source: Tensor, initial: Tensor, final: Tensor) -> Tensor:
    """Compute the sum over all paths of chains of one length."""
    scores, source = reachable(scores, source)
    alpha = initial
    for step in scores:
        alpha = (step + alpha[:, source]).logsumexp(-1)
    return (alpha + final).logsumexp(-1)


def linear_chain(emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Compute log Z of dense chains of one length."""
    emissions = upcast(emissions)
    alpha = emissions[0] + start
    for row in emissions[1:]:
        alpha = (alpha[..., None] + transitions).logsumexp(1) + row
    return (alpha + end).logsumexp(-1)


def semi_markov_chain(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    total: Callable[..., Tensor] = torch.logsumexp,
) -> Tensor:
    """Compute the sum over all segmentations of sequences of one length, or another `total`.

    `ages[d]` has the scores of segments that are open since d + 1 steps.
    """
    emissions = upcast(emissions)
    opened = start.to(emissions.dtype).expand_as(emissions[0])
    ages = emissions[:0]
    for row in emissions:
        ages = torch.cat([opened[None], ages[: len(durations) - 1]]) + row
        closed = total(ages + durations[: len(ages), None], 0)
        opened = total(closed[..., None] + transitions, 1)
    return total(closed + end, -1)
