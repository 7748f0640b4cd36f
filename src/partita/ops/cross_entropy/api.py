"""Cross-entropy and token statistics of logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import (
    apply,
    autocast_dtype,
    check_inplace,
    plain_eager,
    refuse_forward_mode,
)
from ...runtime.backend import current_backend, resolve
from ...runtime.private_names import CAN_WRITE_OVER_LOGITS
from ...runtime.sizes import same_sizes
from . import autograd
from .autograd import (
    CROSS_ENTROPY_IN_PLACE,
    CROSS_ENTROPY_ONE_PASS,
    OnePass,
    cross_entropy_of_rows,
    cross_entropy_reduced_op,
)
from .common import CrossEntropyOptions, check_logits, checked_options
from .native import native_cross_entropy


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
    checked = checked_options(ignore_index, label_smoothing, softcap, z_loss, reduction)
    check_inputs(input, target, weight, ignore_index)
    if weight is not None:
        weight = weight.contiguous()
    backend, is_batch = current_backend(), input.ndim > 1
    if is_batch and input.is_cpu and backend == "auto" and not (softcap or z_loss or inplace):
        loss = native_cross_entropy(input, target, weight, ignore_index, label_smoothing, reduction)
        if loss is not None:
            return loss
    dtype = _loss_dtype(input, target, weight)
    if dtype == torch.float64:
        input = input.to(dtype)  # Probabilities or class weights may be in fp64.
    options = CrossEntropyOptions(*checked[:4], reduction == "mean", dtype, backend)
    if is_batch:
        return loss_of_batch(input, target, weight, options, reduction, inplace)
    loss = loss_of_batch(
        input.unsqueeze(0), target.unsqueeze(0), weight, options, reduction, inplace
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
    check_logits(logits)
    if target is not None:
        checks.integer("target", target)
        checks.shape("target", target, logits.shape[:-1], "logits.shape[:-1]")
        checks.device("target", target, logits, "logits")
    checks.python_int("ignore_index", ignore_index)
    numbers = checks.temperature_and_softcap(temperature, softcap)
    if target is None:
        ignore_index = -100  # no row is ignored
    fields = autograd.token_stats(logits, target, *numbers, ignore_index, current_backend())
    return TokenStats(*fields[:4])


def check_inputs(input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> None:
    checks.floating("input", input)
    checks.tensor("target", target)
    shape = input.shape
    if not shape:
        raise ValueError("input: expected shape [N, C, ...] or [C], got []")
    if target.device != input.device:
        checks.device("target", target, input, "input")
    if target.is_floating_point() and same_sizes(target.shape, shape):
        if target.dtype not in checks.FLOATING:
            checks.floating("target", target)
        if ignore_index >= 0:
            raise ValueError(
                "ignore_index: expected none (a negative number) with target probabilities,"
                f" got {ignore_index}"
            )
    else:
        if target.dtype not in checks.INTEGERS:
            checks.integer("target", target)
        rows = [] if len(shape) == 1 else [shape[0], *shape[2:]]
        if not same_sizes(target.shape, rows):
            if len(shape) > 2 and target.shape == shape[:-1]:
                raise ValueError(
                    f"target: expected shape [N, ...] of input without its classes = {rows},"
                    f" got {list(target.shape)}; classes are dimension 1 of input, which"
                    " input.movedim(-1, 1) makes of its last one"
                )
            checks.shape("target", target, rows, "[N, ...] of input without its classes")
    if weight is not None:
        checks.floating("weight", weight)
        checks.device("weight", weight, input, "input")
        checks.shape("weight", weight, [shape[0 if len(shape) == 1 else 1]], "[C]")
        if weight.requires_grad and not target.is_floating_point() and torch.is_grad_enabled():
            raise RuntimeError(
                "weight: not differentiable with label targets, as in torch; detach it, or give"
                " target probabilities"
            )


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


def loss_of_batch(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: CrossEntropyOptions,
    reduction: str,
    inplace: bool,
) -> Tensor:
    """Return the loss of `[N, C, ...]` logits by the pass that suits the call."""
    if not plain_eager():
        return cross_entropy_of_rows(logits, target, weight, options, reduction)
    others_need_grad = target.requires_grad or (weight is not None and weight.requires_grad)
    if not (torch.is_grad_enabled() and (logits.requires_grad or others_need_grad)):
        refuse_forward_mode(logits, target, weight)
        if reduction == "none" or options.z_loss:
            return cross_entropy_of_rows(logits, target, weight, options, reduction)
        return cross_entropy_reduced_op(logits, target, weight, *options[:3], *options[4:])
    inplace = inplace and logits.requires_grad and CAN_WRITE_OVER_LOGITS
    if inplace:
        check_inplace(logits)
        if others_need_grad:
            raise RuntimeError("inplace: expected targets and class weights that need no gradient")
    is_one_pass = reduction != "none" and logits.dtype != torch.float16 and not others_need_grad
    if is_one_pass and (inplace or has_one_pass(logits, options)):
        loss = CROSS_ENTROPY_IN_PLACE if inplace else CROSS_ENTROPY_ONE_PASS
        return apply(OnePass, loss, logits, target, weight, None, options)
    if inplace:
        # The version changes before the logits are saved, so that only this backward pass may
        # read them.
        torch.autograd.graph.increment_version(logits)
    return cross_entropy_of_rows(logits, target, weight, options, reduction, inplace)


def has_one_pass(logits: Tensor, options: CrossEntropyOptions) -> bool:
    """Return whether the backend computes the loss and its gradient together."""
    device = logits.device
    return device.type == "cpu" or resolve(options.backend, device, has_cpu=False) == "gpu"
