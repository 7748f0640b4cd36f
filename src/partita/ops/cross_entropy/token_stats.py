"""What a policy, a teacher or a metric asks of the next-token distribution, from one read of the logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import batch_first, first_derivative
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from . import token_stats_reference as reference
from .backends import BACKENDS


class TokenStats(NamedTuple):
    """The statistics of each row, shape `[...]`.

    Fields:
        logprob: log-probability of the target in nats, 0 where it is ignored; differentiable.
        logsumexp: log Z of the logits over the temperature; differentiable.
        entropy: entropy of the distribution in nats; differentiable.
        argmax: the most probable class, int64, the lowest among equals.
    """

    logprob: Tensor
    logsumexp: Tensor
    entropy: Tensor
    argmax: Tensor


def _vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    count = sum(isinstance(arg, Tensor) for arg in args)
    tensors = [
        batch_first(tensor, at, info.batch_size)
        for tensor, at in zip(args[:count], in_dims, strict=False)
    ]
    if count == 2:
        return _stats(*tensors, *args[count:]), (0,) * 6
    return _stats_backward(*tensors, *args[count:]), 0


def _fake(logits: Tensor, *_: Any) -> tuple[Tensor, ...]:
    wide = acc_dtype(logits.dtype)
    return tuple(
        logits.new_empty(logits.shape[:-1], dtype=torch.int64 if i == 3 else wide) for i in range(6)
    )


_stats = register.define(
    "token_stats(Tensor logits, Tensor target, float temperature, int ignore_index, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
    check=lambda logits, target, temperature, ignore_index: checks.labels(
        "target", target, logits.shape[-1], ignore_index
    ),
    vmap=_vmap,
    backends=BACKENDS,
)
_stats_backward = register.define(
    "token_stats_backward(Tensor grad_logprob, Tensor grad_logsumexp, Tensor grad_entropy, Tensor logits, Tensor target, Tensor maximum, Tensor sumexp,"
    " Tensor entropy, float temperature, int ignore_index, str backend) -> Tensor",
    lambda grad_logprob, grad_logsumexp, grad_entropy, logits, *_: torch.empty_like(logits),
    vmap=_vmap,
    backends=BACKENDS,
)


class _TokenStats(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor, target: Tensor, temperature: float, ignore_index: int, backend: str
    ) -> tuple[Tensor, ...]:
        return _stats(logits, target, temperature, ignore_index, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, target, *ctx.options = inputs
        _, _, entropy, argmax, maximum, sumexp = output
        ctx.mark_non_differentiable(argmax, maximum, sumexp)
        ctx.save_for_backward(logits, target, maximum, sumexp, entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *options, backend = ctx.options
        result = first_derivative(
            lambda *tensors: _stats_backward(*tensors, *options, backend),
            lambda *tensors: reference.token_stats_gradient(*tensors, *options),
            4,
            *grads[:3],
            *ctx.saved_tensors,
        )
        return result, None, None, None, None


def token_stats(
    logits: Tensor, target: Tensor, *, temperature: float = 1.0, ignore_index: int = -100
) -> TokenStats:
    """Log-probability of the target, log-sum-exp, entropy and arg-max of each row, from one read of the logits.

    Args:
        logits: `[..., C]`, floating dtype, any strides; fields are of `logits / temperature`. Logits of -inf (masked classes) are fine.
        target: labels `[...]`, any integer dtype.
        temperature: positive.
        ignore_index: rows with this label have log-probability 0; their other fields are as usual.

    Returns:
        `TokenStats`, fields `[...]`, fp32 (fp64 for fp64) in nats, and the arg-max int64.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or temperature, named with what was expected.
        IndexError: a label out of range; on a GPU only with `PARTITA_CHECK=1`, otherwise that row's differentiable fields and gradient are NaN.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, carried over to the entropy.

    Example:
        >>> import torch, partita
        >>> partita.token_stats(torch.zeros(1, 4), torch.tensor([2]))
        TokenStats(logprob=tensor([-1.3863]), logsumexp=tensor([1.3863]), entropy=tensor([1.3863]), argmax=tensor([0]))
    """
    checks.floating("logits", logits)
    checks.integer("target", target)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"logits: expected shape [..., C] with at least one class, got {list(logits.shape)}"
        )
    checks.shape("target", target, logits.shape[:-1], "logits.shape[:-1]")
    checks.device("target", target, logits, "logits")
    checks.number("temperature", temperature, low=0.0, open_low=True)
    checks.python_int("ignore_index", ignore_index)
    return TokenStats(
        *_TokenStats.apply(logits, target, float(temperature), ignore_index, current_backend())[:4]
    )
