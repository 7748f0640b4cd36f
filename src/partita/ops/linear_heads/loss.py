"""The loss of a linear head: which path serves a call, and what divides a reduced loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import apply, plain_eager, requires_grad
from ...runtime.backend import current_backend
from ...runtime.checks import REDUCTIONS
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.api import cross_entropy
from . import autograd
from .common import checked_options, chunk_and_save, loss_terms, reduce_losses
from .composed import composed_cross_entropy, is_plain
from .inputs import HeadInputs, all_logits, cast_and_check, flat_inputs, is_usual, needs_logits
from .packing import packs_rows
from .plan import check_budget, is_small

FEW_LABELS = 128  # that many labels are read in Python in less time than one tensor operation takes


class LossCall(NamedTuple):
    """A checked call.

    Fields:
        inputs: hidden states, matrix, bias and labels.
        weight: the factors of the classes.
        reduction: `none`, `mean` or `sum`.
        options: ignored label, label smoothing, soft-cap and factor of the z-loss.
        memory_budget: bytes of workspace, or None.
        denominator: what a sum is divided by, or None.
    """

    inputs: HeadInputs
    weight: Tensor | None
    reduction: str
    options: tuple[int, float, float, float]
    memory_budget: int | None
    denominator: float | Tensor | None


def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    memory_budget: int | None,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """Compute `linear_cross_entropy`, or the quotient of its sum and a denominator.

    A pass that computes the gradients divides them by the denominator before it rounds them to a
    half type. The quotient of `linear_cross_entropy(..., reduction="sum")` would round them first.

    Args:
        denominator: a number, or a tensor `[]` on the device of the hidden states, without a
            gradient; the reduction is then a sum.
        The others: as in `linear_cross_entropy`.
    """
    usual = is_usual(input, linear_weight, linear_bias, target)
    if not usual:
        checked = cast_and_check(input, linear_weight, linear_bias, target)
        input, linear_weight, linear_bias = checked
    if reduction not in REDUCTIONS:
        checks.choice("reduction", reduction, REDUCTIONS)
    if memory_budget is not None:
        check_budget(memory_budget)
    ignore_index = -100 if ignore_index is None else ignore_index
    weight_grad = requires_grad(weight)
    if weight_grad or (not usual and needs_logits(linear_weight, target)):
        dtype = acc_dtype(input.dtype)
        logits = all_logits(input, linear_weight, linear_bias).to(dtype)
        if linear_weight.ndim == 2 and input.ndim > 2:
            logits = logits.movedim(-1, 1)
            target = target.movedim(-1, 1) if target.is_floating_point() else target
        loss = cross_entropy(
            logits,
            target,
            weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=softcap,
            z_loss=z_loss,
        )
        loss = loss.to(dtype)  # autocast may have changed the dtype
        return loss if denominator is None else loss / denominator
    if usual:
        inputs = HeadInputs(input, linear_weight, linear_bias, target)
    else:
        inputs = flat_inputs(input, linear_weight, linear_bias, target)
    if weight is not None:
        checks.floating("weight", weight)
        checks.device("weight", weight, input, "input")
        checks.shape("weight", weight, [len(linear_weight)], "[C]")
        weight = weight.contiguous()
    options = checked_options(ignore_index, label_smoothing, softcap, z_loss)
    call = LossCall(inputs, weight, reduction, options, memory_budget, denominator)
    if not usual and not is_plain(input, linear_weight, linear_bias, target):
        loss = _planned_loss(call)
    elif input.is_cpu:
        loss = _loss_without_ignored(call)
    else:
        loss = _loss(call)
    return loss if usual or reduction != "none" else loss.reshape(target.shape)


def _loss_without_ignored(call: LossCall) -> Tensor:
    """Compute the loss of the tokens that are not ignored.

    A CPU knows their number without waiting, so that the products can leave the others out.
    """
    inputs, labels, ignore_index = call.inputs, call.inputs.target, call.options[0]
    if labels.shape[0] <= FEW_LABELS:
        has_ignored = ignore_index in labels.tolist()
    else:
        has_ignored = bool((labels == ignore_index).any())
    if not has_ignored:
        return _loss(call)
    valid = (labels != ignore_index).nonzero()[:, 0]
    valid_inputs = inputs._replace(
        input=inputs.input.index_select(0, valid), target=labels.index_select(0, valid)
    )
    try:
        loss = _loss(call._replace(inputs=valid_inputs))
    except IndexError:  # This check finds the place of the label among all tokens.
        checks.labels("target", labels, len(inputs.weight), ignore_index)
        raise
    if call.reduction != "none":
        return loss
    return loss.new_zeros(len(labels)).index_put((valid,), loss)


def _loss(call: LossCall) -> Tensor:
    """Compute the loss of a plain eager call."""
    input, matrix, *_ = call.inputs
    if is_small(input.shape[0], matrix.shape[0], input.dtype, call.memory_budget):
        loss = composed_cross_entropy(*call.inputs, call.weight, *call.options, call.reduction)
        return loss if call.denominator is None else loss / call.denominator
    return _planned_loss(call)


def _planned_loss(call: LossCall) -> Tensor:
    """Compute the loss in the chunks of the plan."""
    inputs, weight, reduction, options, memory_budget, denominator = call
    backend, wanted = current_backend(), inputs.wanted
    packs = packs_rows(inputs.input, inputs.weight, inputs.bias, reduction, backend)
    plan = inputs.plan(memory_budget, reduction != "none", packs)
    head = (inputs.input, inputs.weight, inputs.bias, inputs.target, weight)
    if plan.name == "fast" and reduction != "none" and inputs.input.dtype != torch.float16:
        loss_options, divisor = (*options, reduction == "mean"), denominator
        if not (divisor is None or isinstance(divisor, Tensor)):
            dtype = acc_dtype(inputs.input.dtype)
            divisor = torch.full((), divisor, dtype=dtype, device=inputs.input.device)
        if plain_eager() or torch.compiler.is_compiling():
            packs = packs and plain_eager()
            kind = autograd.PACKED_ONE_PASS if packs else autograd.ONE_PASS
            call_args = (*head, divisor, *loss_options, plan.chunk, *wanted, backend)
            return apply(autograd.LinearOnePass, kind, *call_args)[0]
    ignore_index, label_smoothing, softcap, _ = options
    classes = len(inputs.weight)
    chunk, save_logits = chunk_and_save(plan, classes)
    needs_smoothing, needs_entropy = label_smoothing > 0, False
    numbers = (1.0, softcap, ignore_index, needs_smoothing, needs_entropy, chunk, save_logits)
    nll, logsumexp, smoothing_loss, *_ = apply(autograd.LinearRows, *head, *numbers, backend)
    loss, z = loss_terms(nll, logsumexp, smoothing_loss, inputs.target, weight, classes, options)
    loss = reduce_losses(loss, z, inputs.target, weight, classes, ignore_index, reduction)
    return loss if denominator is None else loss / denominator
