"""The loss of a linear head: which path serves a call, and what divides a reduced loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import apply, plain_eager, refuse_forward_mode, requires_grad
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.api import cross_entropy
from ..cross_entropy.autograd import OnePass
from ..cross_entropy.common import LossOptions, reduce_losses, torch_cross_entropy
from . import autograd
from .common import Head, chunk_and_save, loss_terms
from .inputs import (
    all_logits,
    cast_and_check,
    flat_labels,
    is_plain,
    is_usual,
    needs_logits,
)
from .low_rank import LowRank
from .packing import packs_rows
from .plan import ALL_AT_ONCE, check_budget, is_small

FEW_LABELS = 128  # that many labels are read in Python in less time than one tensor operation takes


class LossCall(NamedTuple):
    """A checked call: hidden states `[M, H]`, labels `[M]` int64, and what may divide a sum."""

    head: Head
    target: Tensor
    weight: Tensor | None
    options: LossOptions
    memory_budget: int | None
    denominator: float | Tensor | None


def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    memory_budget: int | None,
    # A number, or a tensor [] on the device of the hidden states, without a gradient; the reduction
    # is then a sum.
    denominator: float | Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """Compute `linear_cross_entropy`, or the quotient of its sum and a denominator.

    A pass that computes the gradients divides them by the denominator before it rounds them to a
    half type. The quotient of `linear_cross_entropy(..., reduction="sum")` would round them first.
    """
    usual = low_rank is None and is_usual(input, linear_weight, linear_bias, target)
    head = Head(input, linear_weight, linear_bias)
    if not usual:
        head = cast_and_check(*head[:3], target, more_dimensions=True, low_rank=low_rank)
        input, linear_weight, linear_bias, *_ = head
    if memory_budget is not None:
        check_budget(memory_budget)
    weight_grad = requires_grad(weight)
    head, labels = head.of_call(logits_dtype), target
    if weight_grad or (not usual and needs_logits(linear_weight, target)):
        dtype = acc_dtype(input.dtype)
        logits = all_logits(head).to(dtype)
        if linear_weight.ndim == 2 and input.ndim > 2:
            logits = logits.movedim(-1, 1)
            target = target.movedim(-1, 1) if target.is_floating_point() else target
        loss = cross_entropy(logits, target, weight, **options.keywords())
        loss = loss.to(dtype)  # autocast may have changed the dtype
        return loss if denominator is None else loss / denominator
    if not usual:
        labels, head = flat_labels(input, target), head.flat
    if weight is not None:
        checks.floating("weight", weight)
        checks.device("weight", weight, input, "input")
        checks.shape("weight", weight, [len(linear_weight)], "[C]")
        weight = weight.contiguous()
    call = LossCall(head, labels, weight, options, memory_budget, denominator)
    if not usual and not is_plain(input, linear_weight, linear_bias, target):
        loss = _planned_loss(call)
    elif input.is_cpu:
        loss = _loss_without_ignored(call)
    else:
        loss = _loss(call)
    return loss if usual or options.reduction != "none" else loss.reshape(target.shape)


def _loss_without_ignored(call: LossCall) -> Tensor:
    """Compute the loss of the tokens that are not ignored.

    A CPU knows their number without waiting, so that the products can leave the others out.
    """
    head, labels, ignore_index = call.head, call.target, call.options.ignore_index
    if labels.shape[0] <= FEW_LABELS:
        has_ignored = ignore_index in labels.tolist()
    else:
        has_ignored = bool((labels == ignore_index).any())
    if not has_ignored:
        return _loss(call)
    valid = (labels != ignore_index).nonzero()[:, 0]
    valid_head = head.with_rows(lambda rows: rows.index_select(0, valid))
    try:
        loss = _loss(call._replace(head=valid_head, target=labels.index_select(0, valid)))
    except IndexError:  # This check finds the place of the label among all tokens.
        checks.labels("target", labels, len(head.weight), ignore_index)
        raise
    if call.options.reduction != "none":
        return loss
    return loss.new_zeros(len(labels)).index_put((valid,), loss)


def _loss(call: LossCall) -> Tensor:
    """Compute the loss of a plain eager call."""
    input, matrix, *_ = call.head
    sizes = input.shape[0], matrix.shape[0], input.dtype
    if call.head.is_usual and is_small(*sizes, call.memory_budget):
        loss = _composed_cross_entropy(call.head, call.target, call.weight, call.options)
        return loss if call.denominator is None else loss / call.denominator
    return _planned_loss(call)


def _planned_loss(call: LossCall) -> Tensor:
    """Compute the loss in the chunks of the plan."""
    (head, target, weight, options, memory_budget, denominator), shape = call, call.target.shape
    head, target = head.aligned, head.in_blocks(target, options.ignore_index)
    backend, reduction, input = current_backend(), options.reduction, head.input
    is_reduced, is_fp16 = reduction != "none", input.dtype == torch.float16
    if is_fp16 and reduction == "sum" and weight is not None and denominator is None:
        is_reduced = False  # gradients without an upstream factor that is small might overflow
    plan = head.plan(memory_budget, is_reduced)
    # Fp16 has saved logits, and gradients that need no scale, where the workspace holds all.
    if plan.name == "fast" and is_reduced and not (is_fp16 and plan.reason == ALL_AT_ONCE):
        divisor = denominator
        if not (divisor is None or isinstance(divisor, Tensor)):
            dtype = acc_dtype(input.dtype)
            divisor = torch.full((), divisor, dtype=dtype, device=input.device)
        if plain_eager() or torch.compiler.is_compiling():
            packs = head.is_usual and packs_rows(*head[:3], reduction, backend)
            kind = autograd.PACKED_ONE_PASS if packs else autograd.ONE_PASS
            tensors = (*head.tensors, target, weight, divisor)
            plan_options = (*head.products, *options, plan.chunk, *head.wanted, backend)
            result: Tensor = apply(OnePass, kind, *tensors, plan_options)
            return result
    classes = len(head.weight)
    chunk, save_logits = chunk_and_save(plan, classes)
    needs_smoothing, needs_entropy = options.label_smoothing > 0, False
    needs = (options.softcap, options.ignore_index, needs_smoothing, needs_entropy)
    numbers = (1.0, *needs, chunk, save_logits, backend)
    statistics = apply(autograd.LinearRows, *head, target, weight, *numbers)
    loss, z = loss_terms(statistics, target, weight, classes, options)
    loss = reduce_losses(loss, z, target, weight, classes, options.ignore_index, reduction)
    loss = head.of_tokens(loss, shape) if reduction == "none" else loss
    return loss if denominator is None else loss / denominator


def _composed_cross_entropy(
    head: Head, target: Tensor, class_weight: Tensor | None, options: LossOptions
) -> Tensor:
    """Compute the loss from all logits at once, in fp32 at least.

    The logits of half types are rounded to their dtype, like those of the other plans. The cast to
    fp32 keeps their gradient in fp32 until it has its upstream factor.

    On a CPU PyTorch's own function computes the loss, unless the call has an option that it lacks
    or labels are not checked, for which it raises. It is not exact for ignored rows with logits
    that are not finite, so the caller leaves out ignored rows there.

    The labels are `[M]`, the class weights `[C]` or None.
    """
    input, matrix, bias, *_ = head
    softcap = options.softcap
    if not input.is_cpu:  # NaN in ignored rows would reach the gradient of the matrix
        input = input.masked_fill((target == options.ignore_index).unsqueeze(1), 0.0)
    logits = F.linear(input, matrix, bias)
    if logits.dtype.itemsize == 2:
        logits = logits.float()
    weighs_smoothing = options.label_smoothing and class_weight is not None
    is_native = logits.is_cpu and not options.has_logz_term() and not weighs_smoothing
    if is_native and current_backend() == "auto" and checks.should_check_values(logits.device):
        refuse_forward_mode(logits)
        capped = softcap * (logits / softcap).tanh() if softcap else logits
        weight = None if class_weight is None else class_weight.to(logits.dtype)
        return torch_cross_entropy(capped, target, weight, options, target)
    return cross_entropy(logits, target, class_weight, **options.keywords())
