"""Softmax, log-softmax, log-sum-exp and their gradients in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import laid_out_like
from ...runtime import private_names
from ...runtime.dtypes import acc_dtype
from .common import LogSumExp


def softmax(input: Tensor, dim: int, log: bool, dtype: torch.dtype) -> Tensor:
    """Return the softmax, or with `log` its logarithm, rounded to `dtype`."""
    function = torch.log_softmax if log else torch.softmax
    return function(input.to(acc_dtype(input.dtype)), dim).to(dtype)


def softmax_gradient(
    grad: Tensor, output: Tensor, dim: int, log: bool, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the input; it can be differentiated again.

    It has the bits of PyTorch's own gradient, which serves adjacent rows on a CPU.
    """
    acc = acc_dtype(output.dtype)
    function = private_names.log_softmax_gradient if log else private_names.softmax_gradient
    return function(grad.to(acc), output.to(acc), dim, acc).to(dtype)


def over_any_dim(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of softmax that makes its dimension the last one, as rows have it."""

    @functools.wraps(function)
    def run(*args: Any) -> Tensor:
        *tensors, dim, log, dtype = args
        if dim == tensors[0].ndim - 1:
            return function(*args)
        moved = (tensor.movedim(dim, -1) for tensor in tensors)
        result = function(*moved, -1, log, dtype).movedim(-1, dim)
        return laid_out_like(result, tensors[-1])

    return run


def logsumexp(input: Tensor, dtype: torch.dtype) -> LogSumExp:
    """Return log-sum-exp over the last dimension. The sum over an empty dimension is -inf."""
    x = input.to(acc_dtype(input.dtype))
    if input.shape[-1] == 0:
        empty = x.new_full(input.shape[:-1], -torch.inf)
        return LogSumExp(empty.to(dtype, copy=True), empty, torch.zeros_like(empty))
    maximum = x.amax(-1)
    shift = torch.where(maximum.isinf(), 0, maximum)
    sumexp = (x - shift.unsqueeze(-1)).exp().sum(-1)
    return LogSumExp((shift + sumexp.log()).to(dtype), maximum, sumexp)


def logsumexp_backward(grad: Tensor, input: Tensor, maximum: Tensor, sumexp: Tensor) -> Tensor:
    """Return the gradient of the input from the statistics of the forward pass."""
    x = input.to(acc_dtype(input.dtype))
    shift = torch.where(maximum.isinf(), 0, maximum).unsqueeze(-1)
    coef = (grad.to(x.dtype) / sumexp).unsqueeze(-1)
    return ((x - shift).exp() * coef).to(input.dtype)


def logsumexp_gradient(grad: Tensor, input: Tensor, maximum: Tensor, sumexp: Tensor) -> Tensor:
    """Return the gradient of the input from the input only, so it can be differentiated again."""
    acc = acc_dtype(input.dtype)
    return (grad.to(acc).unsqueeze(-1) * torch.softmax(input.to(acc), -1)).to(input.dtype)
