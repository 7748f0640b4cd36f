"""Softmax, log-softmax and log-sum-exp."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.rows import laid_out_like
from ...runtime.dtypes import acc_dtype


class LogSumExp(NamedTuple):
    logsumexp: Tensor  # [...]
    maximum: Tensor  # [...], at least fp32
    sumexp: Tensor  # [...], sum of exp(input - maximum)


def softmax(input: Tensor, dim: int, log: bool, dtype: torch.dtype) -> Tensor:
    function = torch.log_softmax if log else torch.softmax
    return laid_out_like(function(input.to(acc_dtype(input.dtype)), dim).to(dtype), input)


def softmax_backward(
    grad: Tensor, output: Tensor, dim: int, log: bool, dtype: torch.dtype
) -> Tensor:
    return laid_out_like(softmax_gradient(grad, output, dim, log, dtype), output)


def softmax_gradient(
    grad: Tensor, output: Tensor, dim: int, log: bool, dtype: torch.dtype
) -> Tensor:
    wide = acc_dtype(output.dtype)
    grad, output = grad.to(wide), output.to(wide)
    if log:
        return (grad - output.exp() * grad.sum(dim, keepdim=True)).to(dtype)
    return (output * (grad - (output * grad).sum(dim, keepdim=True))).to(dtype)


def logsumexp(input: Tensor, dtype: torch.dtype) -> LogSumExp:
    """Over the last dimension; an empty one gives -inf."""
    wide = input.to(acc_dtype(input.dtype))
    if input.shape[-1] == 0:
        empty = wide.new_full(input.shape[:-1], -torch.inf)
        return LogSumExp(empty.to(dtype, copy=True), empty, torch.zeros_like(empty))
    maximum = wide.amax(-1)
    shift = torch.where(maximum.isinf(), 0, maximum)
    sumexp = (wide - shift.unsqueeze(-1)).exp().sum(-1)
    return LogSumExp((shift + sumexp.log()).to(dtype), maximum, sumexp)


def logsumexp_backward(grad: Tensor, input: Tensor, maximum: Tensor, sumexp: Tensor) -> Tensor:
    wide = input.to(acc_dtype(input.dtype))
    shift = torch.where(maximum.isinf(), 0, maximum).unsqueeze(-1)
    weight = (grad.to(wide.dtype) / sumexp).unsqueeze(-1)
    return ((wide - shift).exp() * weight).to(input.dtype)


def logsumexp_gradient(grad: Tensor, input: Tensor) -> Tensor:
    """The same from `input` alone, so that it can be differentiated again."""
    wide = acc_dtype(input.dtype)
    return (grad.to(wide).unsqueeze(-1) * torch.softmax(input.to(wide), -1)).to(input.dtype)
