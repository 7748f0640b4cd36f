"""Softmax, log-softmax and log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class LogSumExp(NamedTuple):
    logsumexp: Tensor  # [...]
    maximum: Tensor  # [...], at least fp32
    sumexp: Tensor  # [...], sum of exp(input - maximum)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of `dtype` are carried in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite(maximum: Tensor) -> Tensor:
    """What to subtract: not -inf, from which nothing differs by a number."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


ELEMENTS = 2**20  # of rows that are computed together on a CPU: their copies fit a cache


def chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, total)) for first in range(0, total, max(size, 1)))


def cpu_rows(rows: Tensor) -> Iterator[slice]:
    """Of `[M, C]`, some at a time; elsewhere than on a CPU all together."""
    return chunks(len(rows), max(1, ELEMENTS // max(rows.shape[1], 1)) if rows.device.type == "cpu" else len(rows))


def slope(logits: Tensor, softcap: float) -> Tensor:
    """Of the soft-cap: 1 - tanh² of what it takes the tanh of, whose digits a product would have lost."""
    t = (logits.to(accumulator(logits.dtype)) / softcap).tanh()
    return (1 - t) * (1 + t)


def laid_out(result: Tensor, like: Tensor) -> Tensor:
    """The result as kernels lay it out in memory, and as compilers are told: like another tensor."""
    own = torch.empty_like(like, dtype=result.dtype)
    return result if result.stride() == own.stride() else own.copy_(result)


def softmax(input: Tensor, dim: int, log: bool, dtype: torch.dtype) -> Tensor:
    function = torch.log_softmax if log else torch.softmax
    return laid_out(function(input.to(accumulator(input.dtype)), dim).to(dtype), input)


def softmax_backward(grad: Tensor, output: Tensor, dim: int, log: bool, dtype: torch.dtype) -> Tensor:
    return laid_out(softmax_gradient(grad, output, dim, log, dtype), output)


def softmax_gradient(grad: Tensor, output: Tensor, dim: int, log: bool, dtype: torch.dtype) -> Tensor:
    wide = accumulator(output.dtype)
    grad, output = grad.to(wide), output.to(wide)
    if log:
        return (grad - output.exp() * grad.sum(dim, keepdim=True)).to(dtype)
    return (output * (grad - (output * grad).sum(dim, keepdim=True))).to(dtype)


def logsumexp(input: Tensor, dtype: torch.dtype) -> LogSumExp:
    """Over the last dimension; an empty one gives -inf."""
    wide = input.to(accumulator(input.dtype))
    if input.shape[-1] == 0:
        empty = wide.new_full(input.shape[:-1], -torch.inf)
        return LogSumExp(empty.to(dtype, copy=True), empty, torch.zeros_like(empty))
    maximum = wide.amax(-1)
    shift = torch.where(maximum.isinf(), 0, maximum)
    sumexp = (wide - shift.unsqueeze(-1)).exp().sum(-1)
    return LogSumExp((shift + sumexp.log()).to(dtype), maximum, sumexp)


def logsumexp_backward(grad: Tensor, input: Tensor, maximum: Tensor, sumexp: Tensor) -> Tensor:
    wide = input.to(accumulator(input.dtype))
    shift = torch.where(maximum.isinf(), 0, maximum).unsqueeze(-1)
    weight = (grad.to(wide.dtype) / sumexp).unsqueeze(-1)
    return ((wide - shift).exp() * weight).to(input.dtype)


def logsumexp_gradient(grad: Tensor, input: Tensor) -> Tensor:
    """The same from `input` alone, so that it can be differentiated again."""
    wide = accumulator(input.dtype)
    return (grad.to(wide).unsqueeze(-1) * torch.softmax(input.to(wide), -1)).to(input.dtype)
