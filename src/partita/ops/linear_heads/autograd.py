"""The registered ops of losses from hidden states and their autograd functions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import finite_shift, inert_rows, softcapped
from ...runtime import checks, register
from ...runtime.autograd import (
    double_backward,
    for_gradients,
    is_double_backward,
    needed_gradients,
    one_by_one,
    plain_eager,
    saved_tensors,
    skip_unused_gradients,
    spend,
)
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.api import cross_entropy
from ..cross_entropy.autograd import scaled_gradient
from ..cross_entropy.common import valid_targets
from . import reference
from .common import RowStatistics
from .plan import padded_width
from .rows_linear import rows_linear


def _check_labels(weight: Tensor, target: Tensor | None, ignore_index: int) -> None:
    if target is not None:
        checks.labels("target", target, len(weight), ignore_index)


def _rows_fake(
    input: Tensor, weight: Tensor, needs_smoothing: bool, needs_entropy: bool, save_logits: bool
) -> tuple[Tensor, ...]:
    M, C, dtype = input.shape[0], weight.shape[0], acc_dtype(input.dtype)
    entropy_rows = M if needs_entropy else 0
    statistics = RowStatistics(
        nll=input.new_empty(M, dtype=dtype),
        logsumexp=input.new_empty(M, dtype=dtype),
        smoothing_loss=input.new_empty(M if needs_smoothing else 0, dtype=dtype),
        entropy=input.new_empty(entropy_rows, dtype=dtype),
        argmax=input.new_empty(entropy_rows, dtype=torch.int64),
        maximum=input.new_empty(M, dtype=dtype),
        sumexp=input.new_empty(M, dtype=dtype),
    )
    return *statistics, input.new_empty(M * padded_width(C) if save_logits else 0)


def gradients_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    """Return the shapes of the gradients; those that are not wanted are empty."""
    tensors = (input, weight, input if bias is None else bias)
    return tuple(
        tensor.new_empty(tensor.shape if wants else (0,))
        for tensor, wants in zip(tensors, (input_grad, weight_grad, bias_grad), strict=True)
    )


def _one_pass_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    loss = input.new_empty((), dtype=acc_dtype(input.dtype))
    return loss, *gradients_fake(input, weight, bias, input_grad, weight_grad, bias_grad)


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


def _gpu_packed() -> ModuleType:
    from .gpu import packed

    return packed


rows = register.define(
    reference.linear_rows,
    _rows_fake,
    gpu=_gpu,
    check=_check_labels,
    vmap=one_by_one,
)
rows_backward = register.define(
    reference.linear_rows_backward,
    gradients_fake,
    gpu=_gpu,
    vmap=one_by_one,
)
one_pass = register.define(
    reference.linear_one_pass,
    _one_pass_fake,
    gpu=_gpu,
    check=_check_labels,
    vmap=one_by_one,
)
# The same from the rows whose labels are not ignored, on the GPUs and for the sizes that
# `packing.packs_rows` names.
packed_one_pass = register.define(
    reference.linear_one_pass,
    _one_pass_fake,
    gpu=_gpu_packed,
    name="linear_packed_one_pass",
    check=_check_labels,
    vmap=one_by_one,
)


def differentiable_statistics(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    temperature: float,
    softcap: float,
    ignore_index: int,
    needs_smoothing: bool,
    needs_entropy: bool,
    is_inert: Tensor,
) -> tuple[Tensor, ...]:
    """Compute nll, log Z, smoothing loss and entropy from all logits at once.

    The result is differentiable any number of times. Inert rows, `[M]`, have zeros for logits.
    """
    logits = torch.where(is_inert[:, None], 0, rows_linear(input, weight, bias))
    x = softcapped(logits, softcap)
    # Quotients of large logits would lose what tells the classes apart.
    shift = finite_shift(x.detach().amax(-1))
    x = (x - shift[:, None]) / temperature
    logp = x.log_softmax(-1)
    labels, valid, invalid = valid_targets(target, len(weight), ignore_index)
    nan_mask = torch.where(invalid, torch.nan, 0.0).to(x.dtype)
    nll = torch.where(valid, -logp.gather(1, labels[:, None])[:, 0], 0.0) + nan_mask
    smoothing_loss, entropy = x.new_empty(0), x.new_empty(0)
    if needs_smoothing:
        weighted = logp
        if class_weight is not None:
            weights = class_weight.to(x.dtype)
            weighted = torch.where(weights == 0, 0.0, logp * weights)
        smoothing_loss = nan_mask - weighted.sum(1)
    if needs_entropy:
        p = logp.exp()
        entropy = -(p * torch.where(p == 0, 0.0, logp)).sum(1) + nan_mask
    logsumexp = shift / temperature + x.logsumexp(1)
    return nll, logsumexp + nan_mask, smoothing_loss, entropy


class LinearRows(torch.autograd.Function):
    """The `RowStatistics` of the rows.

    If the logits are saved, the first backward pass overwrites them with their gradient. Later
    backward passes compute them again. Without a target, the arg-max is the target of the backward
    pass.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor | None,
        class_weight: Tensor | None,
        temperature: float,
        softcap: float,
        ignore_index: int,
        needs_smoothing: bool,
        needs_entropy: bool,
        chunk: int,
        save_logits: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        head = (input, weight, bias, target, class_weight)
        options = (temperature, softcap, ignore_index, needs_smoothing, needs_entropy)
        return rows(*head, *options, chunk, save_logits, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *head, ctx.temperature, ctx.softcap, ctx.ignore_index = inputs[:8]
        ctx.needs_smoothing, ctx.needs_entropy, ctx.chunk, save_logits, ctx.backend = inputs[8:]
        ctx.mark_non_differentiable(*output[4:])
        skip_unused_gradients(ctx)
        if head[3] is None:
            head[3] = RowStatistics(*output[:-1]).argmax
        ctx.save_for_backward(*head, *output)
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        no_option_grads = (None,) * 10
        if all(grad is None for grad in grads[:4]):
            return None, None, None, *no_option_grads
        input, weight, bias, target, class_weight, *outputs, logits = saved_tensors(ctx)
        wanted = needed_gradients(ctx, input, weight, bias)
        if is_double_backward(*grads[:4], input, weight, bias):
            return *LinearRows._differentiable_gradients(ctx, grads, wanted), *no_option_grads
        statistics = RowStatistics(*outputs)
        nll, logsumexp, smoothing_loss, entropy = grads[:4]
        coefficients = reference.gradient_coefficients(
            nll,
            logsumexp,
            smoothing_loss if ctx.needs_smoothing else None,
            entropy if ctx.needs_entropy else None,
            target,
            class_weight,
            statistics,
            len(weight),
            ctx.temperature,
            ctx.ignore_index,
        )
        saved, op = None, for_gradients(rows_backward, *grads[:4])
        if plain_eager() and op is rows_backward:
            # A batch of gradients would overwrite the logits more than once.
            saved = spend(ctx, logits)
        gradients = op(
            *coefficients,
            input,
            weight,
            bias,
            target,
            class_weight,
            statistics.maximum,
            statistics.sumexp,
            *(saved or (input.new_empty(0),)),
            ctx.temperature,
            ctx.softcap,
            ctx.chunk,
            *wanted,
            ctx.backend,
        )
        return *only_wanted(gradients, wanted), *no_option_grads

    @staticmethod
    def _differentiable_gradients(
        ctx: Any, grads: tuple[Tensor | None, ...], wanted: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        input, weight, bias, target, class_weight, *outputs, _ = saved_tensors(ctx)
        numbers = (ctx.temperature, ctx.softcap, ctx.ignore_index)
        sizes = [output.numel() for output in outputs]
        used = {
            i: grad
            for i, grad in enumerate(grads[:4])
            if grad is not None and sizes[i] == grad.numel()
        }
        statistics, counted = RowStatistics(*outputs), dict(used)
        if 0 in counted:  # that of nll
            counted[0] = torch.where(target == ctx.ignore_index, 0, counted[0])
        is_inert = inert_rows((statistics.maximum, statistics.sumexp), counted.values())

        def used_statistics(input: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
            options = (*numbers, ctx.needs_smoothing, ctx.needs_entropy, is_inert)
            found = differentiable_statistics(input, weight, bias, target, class_weight, *options)
            return [found[i] for i in used]

        return double_backward(used_statistics, (input, weight, bias), wanted, list(used.values()))


def only_wanted(
    gradients: tuple[Tensor, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return None for the gradients that are not wanted."""
    return tuple(
        gradient if wants else None for gradient, wants in zip(gradients, wanted, strict=True)
    )


def differentiable_loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    mean: bool,
) -> Tensor:
    """Compute the loss from all logits at once, differentiable any number of times."""
    logits = rows_linear(input, weight, bias).to(acc_dtype(input.dtype))
    return cross_entropy(
        logits,
        target,
        class_weight,
        ignore_index=ignore_index,
        reduction="mean" if mean else "sum",
        label_smoothing=label_smoothing,
        softcap=softcap or None,
        z_loss=z_loss,
    )


class LinearOnePass(torch.autograd.Function):
    """The reduced loss and its gradients, which are not differentiable outputs.

    The first backward pass of eager code scales the saved gradients in place, and later ones
    compute them again. A compiler keeps them as tensors of its graph. A denominator, `[]`, divides
    a sum before the gradients are rounded.
    """

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        denominator: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        softcap: float,
        z_loss: float,
        mean: bool,
        chunk: int,
        input_grad: bool,
        weight_grad: bool,
        bias_grad: bool,
        packs: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        head = (input, weight, bias, target, class_weight, denominator)
        numbers = (ignore_index, label_smoothing, softcap, z_loss, mean, chunk)
        op = packed_one_pass if packs else one_pass
        return op(*head, *numbers, input_grad, weight_grad, bias_grad, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        head, ctx.numbers, ctx.rest = inputs[:6], inputs[6:11], (inputs[11], *inputs[12:15])
        ctx.wanted, (ctx.packs, ctx.backend) = inputs[12:15], inputs[15:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*head, *output[1:])
        ctx.is_spent = False

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad, no_option_grads = grads[0], (None,) * 14
        if grad is None:
            return None, None, None, *no_option_grads
        saved: tuple[Any, ...] = ctx.saved_tensors
        head, gradients = saved[:6], saved[6:]
        if is_double_backward():
            denominator = head[5]
            if denominator is not None:
                grad = (grad / denominator).to(grad.dtype)
            results = double_backward(
                lambda *inputs: differentiable_loss(*inputs, *head[3:5], *ctx.numbers),
                head[:3],
                ctx.wanted,
                grad,
            )
            return *results, *no_option_grads
        if ctx.is_spent:
            op = packed_one_pass if ctx.packs else one_pass
            gradients = op(*head, *ctx.numbers, *ctx.rest, ctx.backend)[1:]
        return *scaled_gradients(ctx, gradients, grad), *no_option_grads


def scaled_gradients(
    ctx: Any, gradients: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a one-pass loss, in eager code in their own memory, which is spent.

    Args:
        ctx: the context, with `wanted`, `backend` and `is_spent`.
        gradients: those that the forward pass computed.
        grad: the gradient of the loss.
    """
    return tuple(
        scaled_gradient(ctx, gradient, grad, ctx.backend) if wants else None
        for gradient, wants in zip(gradients, ctx.wanted, strict=True)
    )
