"""Softmax, log-softmax and log-sum-exp over any dimension of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import batch_first, first_derivative
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from . import reference
from .backends import BACKENDS


def _softmax_vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    *tensors, dim, log, dtype, backend = args
    tensors = [
        batch_first(tensor, at, info.batch_size)
        for tensor, at in zip(tensors, in_dims, strict=False)
    ]
    op = _softmax if len(tensors) == 1 else _softmax_backward
    return op(*tensors, dim + 1, log, dtype, backend), 0


_softmax = register.define(
    "softmax(Tensor input, int dim, bool log, ScalarType dtype, str backend) -> Tensor",
    lambda input, dim, log, dtype: torch.empty_like(input, dtype=dtype),
    vmap=_softmax_vmap,
    backends=BACKENDS,
)
_softmax_backward = register.define(
    "softmax_backward(Tensor grad, Tensor output, int dim, bool log, ScalarType dtype, str backend) -> Tensor",
    lambda grad, output, dim, log, dtype: torch.empty_like(output, dtype=dtype),
    vmap=_softmax_vmap,
    backends=BACKENDS,
)


def _logsumexp_fake(input: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    wide = input.new_empty(input.shape[:-1], dtype=acc_dtype(input.dtype))
    return input.new_empty(input.shape[:-1], dtype=dtype), wide, torch.empty_like(wide)


def _logsumexp_vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    tensors = [
        batch_first(arg, at, info.batch_size)
        for arg, at in zip(args, in_dims, strict=False)
        if isinstance(arg, Tensor)
    ]
    if len(tensors) == 1:
        return _logsumexp(tensors[0], *args[1:]), (0, 0, 0)
    return _logsumexp_backward(*tensors, args[-1]), 0


_logsumexp = register.define(
    "logsumexp(Tensor input, ScalarType dtype, str backend) -> (Tensor, Tensor, Tensor)",
    _logsumexp_fake,
    vmap=_logsumexp_vmap,
    backends=BACKENDS,
)
_logsumexp_backward = register.define(
    "logsumexp_backward(Tensor grad, Tensor input, Tensor maximum, Tensor sumexp, str backend) -> Tensor",
    lambda grad, input, maximum, sumexp: torch.empty_like(input),
    vmap=_logsumexp_vmap,
    backends=BACKENDS,
)


class _Softmax(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, dim: int, log: bool, dtype: torch.dtype, backend: str) -> Tensor:
        return _softmax(input, dim, log, dtype, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, ctx.dim, ctx.log, _, ctx.backend = inputs
        ctx.dtype = input.dtype
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (output,) = ctx.saved_tensors
        dim, log, dtype, backend = ctx.dim, ctx.log, ctx.dtype, ctx.backend
        result = first_derivative(
            lambda grad, output: _softmax_backward(grad, output, dim, log, dtype, backend),
            lambda grad, output: reference.softmax_gradient(grad, output, dim, log, dtype),
            2,
            grads[0],
            output,
        )
        return result, None, None, None, None


class _LogSumExp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor, Tensor]:
        return _logsumexp(input, dtype, backend)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        input, _, ctx.backend = inputs
        _, maximum, sumexp = output
        ctx.mark_non_differentiable(maximum, sumexp)
        ctx.save_for_backward(input, maximum, sumexp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        backend = ctx.backend
        result = first_derivative(
            lambda grad, input, maximum, sumexp: _logsumexp_backward(
                grad, input, maximum, sumexp, backend
            ),
            lambda grad, input, *_: reference.logsumexp_gradient(grad, input),
            2,
            grads[0],
            *ctx.saved_tensors,
        )
        return result, None, None


def _result_dtype(input: Tensor) -> torch.dtype:
    """That of the input; fp32 for half types under autocast on a GPU, as in torch."""
    promoted = input.is_cuda and input.dtype != torch.float64 and torch.is_autocast_enabled("cuda")
    return torch.float32 if promoted else input.dtype


def _normalise(input: Tensor, dim: int, dtype: torch.dtype | None, log: bool) -> Tensor:
    checks.tensor("input", input)
    if dtype is not None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dtype: expected a floating dtype, got {dtype!r}")
        if not (dtype == torch.float32 and input.dtype in (torch.float16, torch.bfloat16)):
            input = input.to(dtype)
    checks.floating("input", input)
    dtype = dtype or _result_dtype(input)
    dim = checks.dimension("dim", dim, input.ndim)
    if input.ndim == 0:
        return _Softmax.apply(input.reshape(1), 0, log, dtype, current_backend()).reshape(())
    return _Softmax.apply(input, dim, log, dtype, current_backend())


def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Exponentials of `input`, scaled to sum to one over `dim`.

    Args:
        input: `[...]`, floating dtype, any strides.
        dim: the dimension that is normalised.
        dtype: cast `input` to it before computing; the result has it too.

    Returns:
        `[...]` in the dtype that `torch.softmax` returns. Sums are carried in fp32 (fp64 for fp64) and rounded once. A row of -inf gives NaN.

    Raises:
        TypeError: `input` is not a floating tensor.
        IndexError: `dim` is out of range.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.

    Example:
        >>> import torch, partita
        >>> partita.softmax(torch.tensor([[0.0, 0.0], [float("-inf"), 3.0]]))
        tensor([[0.5000, 0.5000],
                [0.0000, 1.0000]])
    """
    return _normalise(input, dim, dtype, log=False)


def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Logarithm of the softmax of `input` over `dim`.

    Args:
        input: `[...]`, floating dtype, any strides.
        dim: the dimension that is normalised.
        dtype: cast `input` to it before computing; the result has it too.

    Returns:
        `[...]` in nats, in the dtype that `torch.log_softmax` returns.

    Raises:
        TypeError: `input` is not a floating tensor.
        IndexError: `dim` is out of range.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.

    Example:
        >>> import torch, partita
        >>> partita.log_softmax(torch.zeros(1, 4))
        tensor([[-1.3863, -1.3863, -1.3863, -1.3863]])
    """
    return _normalise(input, dim, dtype, log=True)


def logsumexp(input: Tensor, dim: int | Sequence[int] = -1, keepdim: bool = False) -> Tensor:
    """Logarithm of the sum of the exponentials of `input` over `dim`: log Z of a family with one step.

    Args:
        input: `[...]`, floating dtype, any strides.
        dim: the dimension, or the dimensions, summed over; an empty tuple means all, as in torch.
        keepdim: keep them with size one.

    Returns:
        `[...]` without `dim`, in nats, in the dtype that `torch.logsumexp` returns. An empty sum, or one of -inf alone, is -inf.

    Raises:
        TypeError: `input` is not a floating tensor.
        IndexError: `dim` is out of range.
        ValueError: a dimension is named twice.

    Source: Blanchard, Higham and Higham, Accurately computing the log-sum-exp and softmax functions, 2021.

    Example:
        >>> import torch, partita
        >>> partita.logsumexp(torch.tensor([1000.0, 1000.0]))
        tensor(1000.6932)
    """
    checks.floating("input", input)
    if not isinstance(dim, (int, Sequence)):
        raise TypeError(f"dim: expected an int or a tuple of them, got {type(dim).__name__}")
    dims = [
        checks.dimension("dim", d, input.ndim) for d in ((dim,) if isinstance(dim, int) else dim)
    ]
    if len(set(dims)) != len(dims):
        raise ValueError(
            f"dim: expected each dimension once, got {tuple(dim) if not isinstance(dim, int) else dim}"
        )
    dims = sorted(dims) or list(range(input.ndim))
    if input.ndim == 0:
        return _LogSumExp.apply(input.reshape(1), _result_dtype(input), current_backend())[0]
    kept = [d for d in range(input.ndim) if d not in dims]
    rows = input.permute(*kept, *dims)
    if len(dims) > 1:
        rows = rows.flatten(len(kept))
    result = _LogSumExp.apply(rows, _result_dtype(input), current_backend())[0]
    return (
        result.reshape([1 if d in dims else input.shape[d] for d in range(input.ndim)])
        if keepdim
        else result
    )
