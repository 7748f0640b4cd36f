"""Cross-entropy and token statistics of logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import autocast_dtype
from ...runtime.backend import current_backend
from . import autograd
from .common import check_logits, checked_options
from .loss import check_inputs, loss_of_batch, native_cross_entropy


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
    inplace: bool = False,
) -> Tensor:
    """Cross-entropy between logits and targets: `F.cross_entropy`, with soft-capping and z-loss.

    When `input` needs a gradient and `reduction` is `mean` or `sum`, one pass over the logits
    computes the loss and the gradient: on a GPU with one read and one write. On a CPU PyTorch's own
    function serves small plain losses. With `reduction="none"`, fp16 logits (whose gradient would
    underflow before a loss scale), `torch.compile` and function transforms, the forward pass
    computes the loss and the backward pass the gradient.

    Args:
        input: logits `[N, C, ...]` or `[C]`, floating dtype, any strides.
        target: labels `[N, ...]` or `[]`, any integer dtype; or probabilities with the shape of
            `input`, differentiable.
        weight: `[C]`, one factor for each class; differentiable with target probabilities.
        ignore_index: rows with this label have loss and gradient zero, and the mean leaves them
            out.
        reduction: `none` (shape `[N, ...]`), `mean` (over the class weights of the rows that are
            not ignored) or `sum`.
        label_smoothing: share of the target that all classes have evenly, 0 to 1.
        softcap: replace the logits by `softcap * tanh(input / softcap)`.
        z_loss: add `z_loss * logsumexp ** 2` to each row that is not ignored.
        inplace: write the gradient over the memory of `input`, which no longer has the logits after
            the call (after the backward pass for fp16). There is no effect where no gradient is
            needed and in compiled code. It serves one backward pass.

    Returns:
        The loss in nats, a number or `[N, ...]`, in the dtype that `F.cross_entropy` returns (fp32
        under autocast). A mean over no rows is NaN.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected.
        IndexError: a label out of range; on a GPU only with `PARTITA_CHECK=1`, otherwise the loss
            and the gradient of that row are NaN.
        RuntimeError: `inplace=True` with a leaf.

    Source: Szegedy et al., Rethinking the Inception architecture, 2016 (smoothing); Gemma 2, 2024
    (soft-capping); PaLM, 2022 (z-loss).

    Example:
        >>> import torch, partita
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]], requires_grad=True)
        >>> loss = partita.cross_entropy(logits, torch.tensor([0, 0]))
        >>> loss.backward()
        >>> loss, logits.grad
        (tensor(1.1269, grad_fn=<...>), tensor([[-0.0596,  0.0596],
                [-0.4404,  0.4404]]))
    """
    options = checked_options(ignore_index, label_smoothing, softcap, z_loss, reduction)
    check_inputs(input, target, weight, ignore_index)
    if weight is not None:
        weight = weight.contiguous()
    is_batch = input.ndim > 1
    if is_batch and not inplace:
        loss = native_cross_entropy(input, target, weight, options)
        if loss is not None:
            return loss
    dtype = _loss_dtype(input, target, weight)
    if dtype == torch.float64:
        input = input.to(dtype)  # Probabilities or class weights may be in fp64.
    if is_batch:
        return loss_of_batch(input, target, weight, None, options, dtype, inplace)
    loss = loss_of_batch(
        input.unsqueeze(0), target.unsqueeze(0), weight, None, options, dtype, inplace
    )
    return loss.squeeze(0) if reduction == "none" else loss


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


def token_stats(
    logits: Tensor,
    target: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> TokenStats:
    """Log-probability of the target, log-sum-exp, entropy and arg-max of each row, in one read.

    Args:
        logits: `[..., C]`, floating dtype, any strides; fields are of `logits / temperature`.
            Logits may be -inf (masked classes).
        target: labels `[...]`, any integer dtype. Without it the log-probability is the one of the
            arg-max, and it is differentiated as if the arg-max were the target.
        temperature: positive.
        softcap: replace the logits by `softcap * tanh(logits / softcap)` first.
        ignore_index: rows with this label have log-probability 0; their other fields are as usual.

    Returns:
        `TokenStats`, fields `[...]`, fp32 (fp64 for fp64) in nats, and the arg-max int64.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected.
        IndexError: a label out of range; on a GPU only with `PARTITA_CHECK=1`, otherwise that row's
            differentiable fields and gradient are NaN.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, carried over to
    the entropy.

    Example:
        >>> import torch, partita
        >>> stats = partita.token_stats(torch.zeros(1, 4), torch.tensor([2]))
        >>> stats.logprob, stats.entropy, stats.argmax
        (tensor([-1.3863]), tensor([1.3863]), tensor([0]))
    """
    check_logits(logits, target)
    checks.python_int("ignore_index", ignore_index)
    numbers = checks.temperature_and_softcap(temperature, softcap)
    if target is None:
        ignore_index = -100  # no row is ignored
    fields = autograd.token_stats(logits, target, *numbers, ignore_index, current_backend())
    return TokenStats(*fields[:4])


def _loss_dtype(input: Tensor, target: Tensor, weight: Tensor | None) -> torch.dtype:
    """Return the dtype that `F.cross_entropy` returns, or fp32 under autocast."""
    dtype = input.dtype
    if target.is_floating_point():
        dtype = torch.promote_types(dtype, target.dtype)
        if weight is not None:
            dtype = torch.promote_types(dtype, weight.dtype)
    if dtype in (torch.float16, torch.bfloat16) and autocast_dtype(input.device) is not None:
        return torch.float32
    return dtype
