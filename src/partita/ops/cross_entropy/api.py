"""Cross-entropy between logits and targets, with its gradient in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import (
    apply,
    autocast_dtype,
    plain_eager,
    refuse_forward_mode,
)
from ...runtime.backend import current_backend, resolve
from ...runtime.checks import REDUCTIONS
from .autograd import _OnePass, _Options, _reduced, _reduced_loss


def _check(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, softcap: float | None
) -> None:
    checks.floating("input", input)
    checks.tensor("target", target)
    checks.python_int("ignore_index", ignore_index)
    if input.ndim == 0:
        raise ValueError("input: expected shape [N, C, ...] or [C], got []")
    checks.device("target", target, input, "input")
    classes = input.shape[0 if input.ndim == 1 else 1]
    if target.shape == input.shape and target.is_floating_point():
        if ignore_index >= 0:
            raise ValueError(
                f"ignore_index: expected none (a negative number) with target probabilities, got {ignore_index}"
            )
    else:
        checks.integer("target", target)
        rows = [] if input.ndim == 1 else [input.shape[0], *input.shape[2:]]
        checks.shape("target", target, rows, "[N, ...] of input without its classes")
    if weight is not None:
        checks.floating("weight", weight)
        checks.device("weight", weight, input, "input")
        checks.shape("weight", weight, [classes], "[C]")
        if weight.requires_grad and not target.is_floating_point() and torch.is_grad_enabled():
            raise RuntimeError(
                "weight: not differentiable with label targets, as in torch; detach it, or give target probabilities"
            )
    if softcap is not None:
        checks.number("softcap", softcap, low=0.0, open_low=True)


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

    When `input` needs a gradient and `reduction` is `mean` or `sum`, the loss and the gradient come from one pass over the logits, on a GPU one
    read and one write, on a CPU some rows at a time. With `reduction="none"`, fp16 logits (whose gradient would underflow before a loss scale),
    `torch.compile` and function transforms, the loss comes in the forward pass and the gradient in the backward pass.

    Args:
        input: logits `[N, C, ...]` or `[C]`, floating dtype, any strides.
        target: labels `[N, ...]` or `[]`, any integer dtype; or probabilities with the shape of `input`, differentiable.
        weight: `[C]`, one factor for each class; differentiable with target probabilities.
        ignore_index: rows with this label have loss and gradient zero and are not counted.
        reduction: `none` (shape `[N, ...]`), `mean` (over the class weights of the rows that count) or `sum`.
        label_smoothing: share of the target that is spread evenly over the classes, 0 to 1.
        softcap: put `softcap * tanh(input / softcap)` in the place of the logits.
        z_loss: add `z_loss * logsumexp ** 2` to each row that is not ignored.
        inplace: write the gradient over the memory of `input`, which is no longer logits after the call (after the backward pass for fp16); no
            effect where no gradient is needed and in compiled code. It serves one backward pass.

    Returns:
        The loss in nats, a number or `[N, ...]`, in the dtype that `F.cross_entropy` returns (fp32 under autocast). A mean over no rows is NaN.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected.
        IndexError: a label out of range; on a GPU only with `PARTITA_CHECK=1`, otherwise the loss and the gradient of that row are NaN.
        RuntimeError: `inplace=True` with a leaf.

    Source: Szegedy et al., Rethinking the Inception architecture, 2016 (smoothing); Gemma 2, 2024 (soft-capping); PaLM, 2022 (z-loss).

    Example:
        >>> import torch, partita
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]], requires_grad=True)
        >>> loss = partita.cross_entropy(logits, torch.tensor([0, 0]))
        >>> loss.backward()
        >>> loss, logits.grad
        (tensor(1.1269, grad_fn=<...>), tensor([[-0.0596,  0.0596],
                [-0.4404,  0.4404]]))
    """
    _check(input, target, weight, ignore_index, softcap)
    checks.choice("reduction", reduction, REDUCTIONS)
    weight = None if weight is None else weight.contiguous()
    if label_smoothing != 0.0:
        checks.number("label_smoothing", label_smoothing, low=0.0, high=1.0)
    if z_loss != 0.0:
        checks.number("z_loss", z_loss, low=0.0)
    result = input.dtype
    if target.is_floating_point():
        result = torch.promote_types(result, target.dtype)
    if weight is not None and target.is_floating_point():
        result = torch.promote_types(result, weight.dtype)
    if result in (torch.float16, torch.bfloat16) and autocast_dtype(input.device) is not None:
        result = torch.float32
    if result == torch.float64:
        input = input.to(result)  # in which probabilities or class weights came
    numbers = float(label_smoothing), float(softcap or 0.0), float(z_loss)
    options = _Options(ignore_index, *numbers, reduction == "mean", result, current_backend())
    if input.ndim > 1:
        return _loss(input, target, weight, options, reduction, inplace)
    loss = _loss(input.unsqueeze(0), target.unsqueeze(0), weight, options, reduction, inplace)
    return loss.squeeze(0) if reduction == "none" else loss


def _loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: _Options,
    reduction: str,
    inplace: bool,
) -> Tensor:
    if not plain_eager():
        return _reduced(logits, target, weight, options, reduction)
    others = target.requires_grad or (weight is not None and weight.requires_grad)
    if not (torch.is_grad_enabled() and (logits.requires_grad or others)):
        refuse_forward_mode(logits, target, weight)
        if reduction == "none" or options.z_loss:
            return _reduced(logits, target, weight, options, reduction)
        return _reduced_loss(logits, target, weight, *options[:3], *options[4:])
    inplace = inplace and logits.requires_grad
    if inplace:
        _check_inplace(logits, others)
    early = reduction != "none" and logits.dtype != torch.float16 and not others
    if early and (
        inplace
        or logits.device.type == "cpu"
        or resolve(options.backend, logits.device, has_cpu=False) == "gpu"
    ):
        return apply(_OnePass, logits, target, weight, options, inplace)
    if inplace:
        torch.autograd.graph.increment_version(
            logits
        )  # before the logits are saved: the backward pass alone may read them
    return _reduced(logits, target, weight, options, reduction, inplace)


def _check_inplace(logits: Tensor, others: bool) -> None:
    base = logits._base if logits._is_view() else logits
    if logits.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
        raise RuntimeError(
            "inplace: expected logits that were computed from something, got a leaf, whose values would be lost"
        )
    reach = 0
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                "inplace: expected logits whose elements each have their own memory, got a tensor that is expanded or overlaps itself"
            )
        reach += stride * (size - 1)
    if others:
        raise RuntimeError("inplace: expected targets and class weights that need no gradient")
