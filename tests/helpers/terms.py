"""The magnitudes in fp64 of the terms that each result and gradient is a sum of.

Errors of the results are measured in ulp of these magnitudes. An exponential of x - m has an error
of |x - m| ulp from the rounding of its argument, in addition to its own error. A logarithm of a sum
has an absolute error of at least one ulp of 1, which is the relative error of the sum. Arithmetic
in the accumulator may flush numbers below its smallest normal number to zero. So an exponential may
be off by that much, however small it is, and a product with it by that much times its coefficients.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from partita.runtime.dtypes import acc_dtype


class Terms(NamedTuple):
    """The magnitudes of the terms of an op.

    Fields:
        forward: those of the result, or of each result.
        backward: those of the gradient of the input.
    """

    forward: Tensor | list[Tensor]
    backward: Tensor


class Parts(NamedTuple):
    """The parts that softmax and its logarithm are computed from, in fp64.

    Fields:
        maximum: the magnitude of the maximum.
        depth: |x - maximum|.
        log_sum: |log of the sum of exponentials|.
        p: the softmax.
        p_error: the magnitude of p's error in ulp: that of its exponential and of a flush to zero.
    """

    maximum: Tensor
    depth: Tensor
    log_sum: Tensor
    p: Tensor
    p_error: Tensor


def flush(dtype: torch.dtype) -> float:
    """Return the term whose ulp in the accumulator is its smallest normal number."""
    limits = torch.finfo(acc_dtype(dtype))
    return limits.smallest_normal / limits.eps


def parts(x: Tensor, dim: int, flushed: float, noise: float = 0.0) -> Parts:
    """Compute the parts of x, which is in fp64.

    Args:
        x: the logits.
        dim: the dimension of the classes.
        flushed: the magnitude that the flush to zero adds to p. A p that is 0 in fp64 too has no
            digits to flush.
        noise: the magnitude of the error of x itself.
    """
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
        torch.where(p == 0, 0, p * (1 + depth) + flushed),
    )


def softmax_terms(name: str, x: Tensor, dim: int, upstream: Tensor) -> Terms:
    """Return the terms of softmax or log-softmax."""
    # The backward pass reads the rounded output.
    rounded = torch.finfo(x.dtype).eps / torch.finfo(acc_dtype(x.dtype)).eps
    _, depth, log_sum, p, p_error = parts(x.double(), dim, flush(x.dtype) / rounded)
    g = upstream.double().abs()
    total = (p * g).sum(dim, keepdim=True)
    if name == "softmax":
        return Terms(
            p_error, rounded * (p_error * (g + total) + p * (p_error * g).sum(dim, keepdim=True))
        )
    return Terms(
        depth + log_sum + 1, g + rounded * (p_error + p * log_sum) * g.sum(dim, keepdim=True)
    )


def logsumexp_terms(x: Tensor, dim: int, upstream: Tensor) -> Terms:
    """Return the terms of log-sum-exp."""
    maximum, _, log_sum, _, p_error = parts(x.double(), dim, flush(x.dtype))
    return Terms(
        (maximum + log_sum + 1).squeeze(dim), upstream.double().abs().unsqueeze(dim) * p_error
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
    """Return the terms of cross-entropy with all its options."""
    dim = min(logits.ndim - 1, 1)
    classes = logits.shape[dim]
    x = logits.double() if softcap is None else softcap * torch.tanh(logits.double() / softcap)
    maximum, depth, log_sum, _, p_error = parts(x, dim, flush(logits.dtype), softcap or 0.0)
    weights = (
        torch.ones(classes, dtype=torch.float64, device=x.device)
        if weight is None
        else weight.double()
    )
    weights = weights.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    if target.is_floating_point():
        valid = torch.ones_like(log_sum)
        q = weights * (target.double() * (1 - label_smoothing) + label_smoothing / classes)
        total_weight = num_rows = valid.sum()
    else:
        valid = (target != ignore_index).unsqueeze(dim).double()
        labels = torch.where(target == ignore_index, 0, target).long().unsqueeze(dim)
        hot = torch.zeros_like(x).scatter(dim, labels, 1.0)
        q = valid * weights * (hot * (1 - label_smoothing) + label_smoothing / classes)
        total_weight = (valid * weights.expand_as(x).gather(dim, labels)).sum()
        num_rows = valid.sum()
    g = upstream.double().abs()
    g = g.unsqueeze(dim) if reduction == "none" else g
    main, z = (g / total_weight, g / num_rows) if reduction == "mean" else (g, g)
    lse = maximum + log_sum + 1
    row = torch.where(q == 0, 0, q * (depth + log_sum + 1)).sum(dim, keepdim=True)
    slope = (
        main * (torch.where(valid == 0, 0, p_error) * q.sum(dim, keepdim=True) + q)
        + 2 * z * z_loss * lse * valid * p_error
    )
    slope = slope if softcap is None else slope * (1 + (x / softcap) ** 2)
    if reduction == "none":
        return Terms((row + z_loss * valid * lse**2).squeeze(dim), slope)
    rows, squares = row.sum(), z_loss * (valid * lse**2).sum()
    return Terms(
        rows / total_weight + squares / num_rows if reduction == "mean" else rows + squares, slope
    )


def token_stats_terms(
    logits: Tensor,
    target: Tensor | None,
    upstream: list[Tensor],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Terms:
    """Return the terms of `token_stats`: log-probability, log-sum-exp and entropy."""
    x = logits.double() if softcap is None else softcap * torch.tanh(logits.double() / softcap)
    if target is None:
        target, ignore_index = x.argmax(-1), -100
    noise = (softcap or 0.0) / temperature
    maximum, depth, log_sum, p, p_error = parts(x / temperature, -1, flush(logits.dtype), noise)
    valid = (target != ignore_index).unsqueeze(-1)
    labels = torch.where(valid, target.unsqueeze(-1), 0).long()
    hot = torch.zeros_like(x).scatter(-1, labels, 1.0)
    logprob = torch.where(valid, depth.gather(-1, labels) + log_sum + 1, 0)
    neg_log_p = torch.where(p == 0, 0, depth + log_sum + 1)
    entropy = (p_error * neg_log_p).sum(-1, keepdim=True)
    on_target, h, e = (u.double().abs().unsqueeze(-1) for u in upstream)
    slope = valid * on_target * (hot + p_error) + h * p_error + e * p_error * (neg_log_p + entropy)
    slope = slope if softcap is None else slope * (1 + (x / softcap) ** 2)
    return Terms(
        [t.squeeze(-1) for t in (logprob, maximum + log_sum + 1, entropy)], slope / temperature
    )
