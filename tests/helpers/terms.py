"""The magnitude of the terms that each result and gradient is a sum of, in fp64: what their errors are counted in ulp of.

An exponential of x - m carries the rounding of its argument, so an error of |x - m| ulp beside its own; a logarithm of a sum has an absolute
error of at least one ulp of 1, the sum's relative one. Arithmetic in the accumulator may flush what is below its smallest normal number to
zero: an exponential is off by as much, however small it is, and so is every product with it, times its coefficients.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from partita.runtime.dtypes import acc_dtype


class Terms(NamedTuple):
    forward: Tensor | list[Tensor]
    backward: Tensor


class Parts(NamedTuple):
    maximum: Tensor
    depth: Tensor  # |x - maximum|
    log_sum: Tensor
    p: Tensor
    blurred: Tensor  # p, with the error of its exponential, and with its flush to zero


def flush(dtype: torch.dtype) -> float:
    """The term whose ulp in the accumulator is the accumulator's smallest normal number."""
    limits = torch.finfo(acc_dtype(dtype))
    return limits.smallest_normal / limits.eps


def parts(x: Tensor, dim: int, floor: float, noise: float = 0.0) -> Parts:
    """Of x in fp64; `floor` is what p counts as at least: not where it is 0 in fp64 too, for then nothing is left to flush."""
    maximum = x.amax(dim, keepdim=True)
    maximum = torch.where(maximum.isinf(), 0, maximum)
    depth = (x - maximum).abs() + noise
    sum_exp = (x - maximum).exp().sum(dim, keepdim=True)
    p = (x - maximum).exp() / sum_exp
    return Parts(
        maximum.abs() + noise,
        depth,
        sum_exp.log().abs(),
        p,
        torch.where(p == 0, 0, p * (1 + depth) + floor),
    )


def softmax_terms(name: str, x: Tensor, dim: int, upstream: Tensor) -> Terms:
    rounded = (
        torch.finfo(x.dtype).eps / torch.finfo(acc_dtype(x.dtype)).eps
    )  # the backward pass starts from the rounded output
    _, depth, log_sum, p, blurred = parts(x.double(), dim, flush(x.dtype) / rounded)
    g = upstream.double().abs()
    total = (p * g).sum(dim, keepdim=True)
    if name == "softmax":
        return Terms(
            blurred, rounded * (blurred * (g + total) + p * (blurred * g).sum(dim, keepdim=True))
        )
    return Terms(
        depth + log_sum + 1, g + rounded * (blurred + p * log_sum) * g.sum(dim, keepdim=True)
    )


def logsumexp_terms(x: Tensor, dim: int, upstream: Tensor) -> Terms:
    maximum, _, log_sum, _, blurred = parts(x.double(), dim, flush(x.dtype))
    return Terms(
        (maximum + log_sum + 1).squeeze(dim), upstream.double().abs().unsqueeze(dim) * blurred
    )


def cross_entropy_terms(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    upstream: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Terms:
    dim = min(logits.ndim - 1, 1)
    classes = logits.shape[dim]
    x = logits.double() if softcap is None else softcap * torch.tanh(logits.double() / softcap)
    maximum, depth, log_sum, _, blurred = parts(x, dim, flush(logits.dtype), softcap or 0.0)
    weights = (
        torch.ones(classes, dtype=torch.float64, device=x.device)
        if weight is None
        else weight.double()
    )
    weights = weights.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    if target.is_floating_point():
        kept = torch.ones_like(log_sum)
        q = weights * (target.double() * (1 - label_smoothing) + label_smoothing / classes)
        main_count = count = kept.sum()
    else:
        kept = (target != ignore_index).unsqueeze(dim).double()
        labels = torch.where(target == ignore_index, 0, target).long().unsqueeze(dim)
        hot = torch.zeros_like(x).scatter(dim, labels, 1.0)
        q = kept * weights * (hot * (1 - label_smoothing) + label_smoothing / classes)
        main_count, count = (kept * weights.expand_as(x).gather(dim, labels)).sum(), kept.sum()
    g = upstream.double().abs()
    g = g.unsqueeze(dim) if reduction == "none" else g
    main, z = (g / main_count, g / count) if reduction == "mean" else (g, g)
    lse = maximum + log_sum + 1
    row = torch.where(q == 0, 0, q * (depth + log_sum + 1)).sum(dim, keepdim=True)
    slope = (
        main * (torch.where(kept == 0, 0, blurred) * q.sum(dim, keepdim=True) + q)
        + 2 * z * z_loss * lse * kept * blurred
    )
    slope = slope if softcap is None else slope * (1 + (x / softcap) ** 2)
    if reduction == "none":
        return Terms((row + z_loss * kept * lse**2).squeeze(dim), slope)
    rows, squares = row.sum(), z_loss * (kept * lse**2).sum()
    return Terms(
        rows / main_count + squares / count if reduction == "mean" else rows + squares, slope
    )


def token_stats_terms(
    logits: Tensor,
    target: Tensor,
    upstream: list[Tensor],
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> Terms:
    x = logits.double() / temperature
    maximum, depth, log_sum, p, blurred = parts(x, -1, flush(logits.dtype))
    kept = (target != ignore_index).unsqueeze(-1)
    labels = torch.where(kept, target.unsqueeze(-1), 0).long()
    hot = torch.zeros_like(x).scatter(-1, labels, 1.0)
    logprob = torch.where(kept, depth.gather(-1, labels) + log_sum + 1, 0)
    surprise = torch.where(p == 0, 0, depth + log_sum + 1)
    entropy = (blurred * surprise).sum(-1, keepdim=True)
    on_target, h, e = (u.double().abs().unsqueeze(-1) for u in upstream)
    slope = kept * on_target * (hot + blurred) + h * blurred + e * blurred * (surprise + entropy)
    # x / temperature is rounded before the maximum is taken from it
    blur = 1 if temperature == 1 else 1 + maximum
    return Terms(
        [(t * blur).squeeze(-1) for t in (logprob, maximum + log_sum + 1, entropy)],
        slope * blur / temperature,
    )
