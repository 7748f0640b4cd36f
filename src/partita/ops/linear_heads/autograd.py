"""The ops of losses straight from hidden states, and their derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import double_backward, is_double_backward
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.api import cross_entropy
from ..cross_entropy.autograd import scale_gradient
from ..cross_entropy.common import valid_targets
from . import reference
from .backends import BACKENDS
from .common import RowStatistics
from .plan import padded_width

_HEAD = "Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
_WANTED = "bool to_input, bool to_weight, bool to_bias"


def _check_labels(weight: Tensor, target: Tensor, ignore_index: int) -> None:
    checks.labels("target", target, len(weight), ignore_index)


def _rows_fake(
    input: Tensor,
    weight: Tensor,
    bias: Any,
    target: Any,
    class_weight: Any,
    temperature: float,
    softcap: float,
    ignore_index: int,
    spread: bool,
    entropy: bool,
    chunk: int,
    keep: bool,
) -> tuple[Tensor, ...]:
    wide, tokens = acc_dtype(input.dtype), input.shape[0]
    spreads, entropies = tokens if spread else 0, tokens if entropy else 0
    sizes = (tokens, tokens, spreads, entropies, entropies, tokens, tokens)
    kept = input.new_empty(tokens * padded_width(weight.shape[0]) if keep else 0)
    return *(
        input.new_empty(size, dtype=torch.int64 if i == 4 else wide) for i, size in enumerate(sizes)
    ), kept


def _gradients_fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, *wanted: bool
) -> tuple[Tensor, ...]:
    of = (input, weight, input if bias is None else bias)
    return tuple(
        tensor.new_empty(tensor.shape if wants else (0,))
        for tensor, wants in zip(of, wanted, strict=True)
    )


rows = register.define(
    f"linear_rows({_HEAD}, float temperature, float softcap, int ignore_index, bool spread, bool entropy, int chunk, bool keep, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _rows_fake,
    check=lambda input, weight, bias, target, class_weight, temperature, softcap, ignore_index, *_: (
        _check_labels(weight, target, ignore_index)
    ),
    backends=BACKENDS,
)
rows_backward = register.define(
    "linear_rows_backward(Tensor pull, Tensor at_label, Tensor? log_pull, Tensor? by_class, Tensor input, Tensor weight, Tensor? bias, Tensor target,"
    f" Tensor? class_weight, Tensor maximum, Tensor sumexp, Tensor kept, float temperature, float softcap, int chunk, {_WANTED}, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    lambda *args: _gradients_fake(*args[4:7], *args[-3:]),
    backends=BACKENDS,
)
one_pass = register.define(
    f"linear_one_pass({_HEAD}, int ignore_index, float smoothing, float softcap, float z_loss, bool mean, SymInt chunk, {_WANTED}, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda *args: (
        args[0].new_empty((), dtype=acc_dtype(args[0].dtype)),
        *_gradients_fake(*args[:3], *args[-3:]),
    ),
    check=lambda input, weight, bias, target, class_weight, ignore_index, *_: _check_labels(
        weight, target, ignore_index
    ),
    backends=BACKENDS,
)


def plain_fields(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    temperature: float,
    softcap: float,
    ignore_index: int,
    spread: bool,
    entropy: bool,
) -> tuple[Tensor, ...]:
    """The differentiable fields with all logits in memory, differentiable any number of times."""
    x = reference.capped(torch.nn.functional.linear(input, weight, bias), softcap) / temperature
    logp = x.log_softmax(-1)
    labels, counts, wrong = valid_targets(target, len(weight), ignore_index)
    spoilt = torch.where(wrong, torch.nan, 0.0).to(x.dtype)
    nll = torch.where(counts, -logp.gather(1, labels[:, None])[:, 0], 0.0) + spoilt
    of_class = None if class_weight is None else class_weight.to(x.dtype)
    weighted = logp if of_class is None else torch.where(of_class == 0, 0.0, logp * of_class)
    all_ = spoilt - weighted.sum(1) if spread else x.new_empty(0)
    p = logp.exp()
    return (
        nll,
        x.logsumexp(1) + spoilt,
        all_,
        -(p * torch.where(p == 0, 0.0, logp)).sum(1) + spoilt if entropy else x.new_empty(0),
    )


class Rows(torch.autograd.Function):
    """`RowStatistics` of the rows. Where the logits are kept, the first backward pass takes them; later ones compute them again."""

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        temperature: float,
        softcap: float,
        ignore_index: int,
        spread: bool,
        entropy: bool,
        chunk: int,
        keep: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        return rows(
            input,
            weight,
            bias,
            target,
            class_weight,
            temperature,
            softcap,
            ignore_index,
            spread,
            entropy,
            chunk,
            keep,
            backend,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        (
            *tensors,
            ctx.temperature,
            ctx.softcap,
            ctx.ignore_index,
            ctx.spread,
            ctx.entropy,
            ctx.chunk,
            keep,
            ctx.backend,
        ) = inputs
        ctx.mark_non_differentiable(*output[4:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[:-1])
        ctx.kept = (
            output[-1] if keep else None
        )  # past autograd's eyes: the first backward pass writes over it

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        input, weight, bias, target, class_weight, *outputs = ctx.saved_tensors
        numbers, nothing = (ctx.temperature, ctx.softcap, ctx.ignore_index), (None,) * 10
        if all(grad is None for grad in grads[:4]):
            return None, None, None, *nothing
        wanted = tuple(ctx.needs_input_grad[:3])
        if is_double_backward():
            sizes = [field.numel() for field in outputs]
            used = {
                i: grad
                for i, grad in enumerate(grads[:4])
                if grad is not None and sizes[i] == grad.numel()
            }

            def fields_of(input: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
                found = plain_fields(
                    input, weight, bias, target, class_weight, *numbers, ctx.spread, ctx.entropy
                )
                return [found[i] for i in used]

            return *double_backward(
                fields_of, (input, weight, bias), wanted, list(used.values())
            ), *nothing
        fields = RowStatistics(*outputs)
        nll, logsumexp, spread, entropy = grads[:4]
        c = reference.gradient_coefficients(
            nll,
            logsumexp,
            spread,
            entropy,
            target,
            class_weight,
            fields,
            len(weight),
            ctx.temperature,
            ctx.ignore_index,
        )
        kept, ctx.kept = ctx.kept, None
        held = input.new_empty(0) if kept is None else kept
        args = (
            *c,
            input,
            weight,
            bias,
            target,
            class_weight,
            fields.maximum,
            fields.sumexp,
            held,
            ctx.temperature,
            ctx.softcap,
            ctx.chunk,
            *wanted,
        )
        result = rows_backward(*args, ctx.backend)
        return *(
            grad if wants else None for grad, wants in zip(result, wanted, strict=True)
        ), *nothing


def plain_loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float,
    z_loss: float,
    mean: bool,
) -> Tensor:
    """The loss with all logits in memory, differentiable any number of times."""
    logits, reduction = (
        torch.nn.functional.linear(input, weight, bias).to(acc_dtype(input.dtype)),
        "mean" if mean else "sum",
    )
    return cross_entropy(
        logits,
        target,
        class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=smoothing,
        softcap=softcap or None,
        z_loss=z_loss,
    )


class OnePass(torch.autograd.Function):
    """The reduced loss, with the gradients formed beside it, which the first backward pass scales; later ones compute them again. Eager only."""

    @staticmethod
    def forward(
        ctx: Any,
        wanted: tuple[bool, bool, bool],
        backend: str,
        numbers: tuple[Any, ...],
        chunk: int,
        *tensors: Any,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.wanted, ctx.backend, ctx.numbers, ctx.chunk = wanted, backend, numbers, chunk
        ctx.save_for_backward(*tensors)
        loss, *ctx.gradients = one_pass(*tensors, *numbers, chunk, *wanted, backend)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (grad,), nothing = grads, (None,) * 4
        if grad is None:
            return *nothing, *(None,) * 5
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (
                *nothing,
                *double_backward(
                    lambda *inputs: plain_loss(*inputs, *tensors[3:], *ctx.numbers),
                    tensors[:3],
                    ctx.wanted,
                    grad,
                ),
                None,
                None,
            )
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = one_pass(*tensors, *ctx.numbers, ctx.chunk, *ctx.wanted, ctx.backend)[1:]
        for gradient, wants in zip(gradients, ctx.wanted, strict=True):
            if wants:
                scale_gradient.eager(gradient, grad, ctx.backend)
        return (
            *nothing,
            *(
                gradient if wants else None
                for gradient, wants in zip(gradients, ctx.wanted, strict=True)
            ),
            None,
            None,
        )


class OnePassTraced(torch.autograd.Function):
    """The same for compilers, which keep the gradients as tensors of their graph."""

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        softcap: float,
        z_loss: float,
        mean: bool,
        chunk: int,
        to_input: bool,
        to_weight: bool,
        to_bias: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        numbers, wanted = (
            (ignore_index, smoothing, softcap, z_loss, mean, chunk),
            (to_input, to_weight, to_bias),
        )
        return one_pass(input, weight, bias, target, class_weight, *numbers, *wanted, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.wanted = inputs[11:14]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad, pairs = grads[0], zip(ctx.saved_tensors, ctx.wanted, strict=True)
        found = (
            (gradient.to(grad.dtype) * grad).to(gradient.dtype) if wants else None
            for gradient, wants in pairs
        )
        return *found, *(None,) * 12
