"""Softmax, log-softmax and log-sum-exp over any dimension of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import native_serves
from ...runtime.backend import current_backend
from . import autograd


def _result_dtype(input: Tensor) -> torch.dtype:
    """Return the dtype of the input, or fp32 under autocast on a GPU, as PyTorch does."""
    dtype = input.dtype
    if input.is_cuda and dtype != torch.float64 and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return dtype


def _softmax(input: Tensor, dim: int, dtype: torch.dtype | None, log: bool) -> Tensor:
    """Check the arguments and return the softmax, or with `log` its logarithm."""
    checks.tensor("input", input)
    if dtype is not None:
        if dtype not in checks.FLOATING:
            raise TypeError(f"dtype: expected a floating dtype, got {dtype!r}")
        if input.is_floating_point() or input.is_complex() or input.is_quantized:
            checks.floating("input", input)
        if not (dtype == torch.float32 and input.dtype in (torch.float16, torch.bfloat16)):
            input = input.to(dtype)
    if input.dtype not in checks.FLOATING:
        checks.floating("input", input)
    ndim = input.ndim
    if type(dim) is not int or not -ndim <= dim < ndim:
        dim = checks.dimension("dim", dim, ndim)
    elif dim < 0:
        dim += ndim
    backend = current_backend()
    if backend == "auto" and input.is_cpu and native_serves(input):
        # PyTorch's function has the same contract there, and less host time.
        return (torch.log_softmax if log else torch.softmax)(input, dim, dtype)
    dtype = dtype or _result_dtype(input)
    if ndim == 0:
        return autograd.softmax(input.reshape(1), 0, log, dtype, backend).reshape(())
    return autograd.softmax(input, dim, log, dtype, backend)


def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Return the exponentials of `input`, scaled to sum to one over `dim`.

    Args:
        input: `[...]`, floating dtype, any strides.
        dim: the dimension that is normalized.
        dtype: the dtype that `input` is cast to first; the result has it too.

    Returns:
        `[...]` in the dtype that `torch.softmax` returns. Sums are accumulated in fp32 (in fp64 for
        fp64) and rounded once. A row of -inf gives NaN.

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
    return _softmax(input, dim, dtype, log=False)


def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Return the logarithm of the softmax of `input` over `dim`.

    Args:
        input: `[...]`, floating dtype, any strides.
        dim: the dimension that is normalized.
        dtype: the dtype that `input` is cast to first; the result has it too.

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
    return _softmax(input, dim, dtype, log=True)


def logsumexp(input: Tensor, dim: int | Sequence[int] = -1, keepdim: bool = False) -> Tensor:
    """Return the logarithm of the sum of the exponentials of `input` over `dim`.

    This is log Z of the family with one step.

    Args:
        input: `[...]`, floating dtype, any strides.
        dim: the dimension or dimensions to sum over; an empty tuple means all, as in PyTorch.
        keepdim: whether the result has these dimensions with size one.

    Returns:
        `[...]` without `dim`, in nats, in the dtype that `torch.logsumexp` returns. An empty sum
        and a sum of only -inf are -inf.

    Raises:
        TypeError: `input` is not a floating tensor.
        IndexError: `dim` is out of range.
        ValueError: a dimension appears more than once.

    Source: Blanchard, Higham and Higham, Accurately computing the log-sum-exp and softmax
    functions, 2021.

    Example:
        >>> import torch, partita
        >>> partita.logsumexp(torch.tensor([1000.0, 1000.0]))
        tensor(1000.6932)
    """
    checks.floating("input", input)
    ndim = input.ndim
    if type(dim) is int and -ndim <= dim < ndim and (dim == -1 or dim == ndim - 1):
        result = _logsumexp_of(input)
        return result.unsqueeze(-1) if keepdim else result
    if not isinstance(dim, (int, Sequence)):
        raise TypeError(f"dim: expected an int or a tuple of them, got {type(dim).__name__}")
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    dims = [checks.dimension("dim", d, input.ndim) for d in given]
    if len(set(dims)) != len(dims):
        raise ValueError(f"dim: expected each dimension once, got {given}")
    dims = sorted(dims) or list(range(input.ndim))
    if input.ndim == 0:
        return _logsumexp_of(input.reshape(1))
    others = [d for d in range(input.ndim) if d not in dims]
    rows = input.permute(*others, *dims)
    if len(dims) > 1:
        rows = rows.flatten(len(others))
    result = _logsumexp_of(rows)
    if not keepdim:
        return result
    return result.reshape([1 if d in dims else input.shape[d] for d in range(input.ndim)])


def _logsumexp_of(rows: Tensor) -> Tensor:
    """Return the result over the last dimension."""
    result: Tensor = autograd.logsumexp(rows, _result_dtype(rows), current_backend())[0]
    return result
