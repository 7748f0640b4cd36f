"""The ops of CTC, and their derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import double_backward, is_double_backward
from ...runtime.dtypes import acc_dtype
from . import reference
from .backends import BACKENDS
from .common import Targets, reduce_losses
from .gpu.plan import saved_shape


def check_values(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    most: int,
    *_: Any,
) -> None:
    checks.within("input_lengths", input_lengths, 0, logits.shape[0], "steps")
    checks.within("target_lengths", target_lengths, 0, most, "labels")
    if checks.should_check_values(labels.device):
        found, counts = reference.padded_targets(Targets(labels, offsets, target_lengths, most))
        if (
            place := checks.first_index(counts & ((found < 0) | (found >= logits.shape[2])))
        ) is not None:
            raise IndexError(
                f"targets: expected labels from 0 to {logits.shape[2] - 1}, got {int(found[place])} at {list(place)}"
            )


_TARGETS = "Tensor labels, Tensor offsets, Tensor input_lengths, Tensor target_lengths"
loss = register.define(
    f"ctc_loss(Tensor logits, {_TARGETS}, SymInt most, int blank, bool from_logits, str reduction, bool zero_infinity, bool keep,"
    " str backend) -> (Tensor, Tensor, Tensor)",
    lambda logits, labels, offsets, input_lengths, target_lengths, most, blank, from_logits, reduction, zero_infinity, keep, floor: (
        logits.new_empty(
            logits.shape[1] if reduction == "none" else (), dtype=acc_dtype(logits.dtype)
        ),
        logits.new_empty(logits.shape[1], dtype=torch.float64),
        logits.new_empty(
            saved_shape(logits.shape, most, from_logits, keep, floor), dtype=torch.float64
        ),
    ),
    check=check_values,
    fake_by_backend=True,
    backends=BACKENDS,
    reference_if_empty=True,
)
gradient = register.define(
    "ctc_gradient(Tensor grad, Tensor logits, Tensor labels, Tensor offsets, Tensor input_lengths, Tensor target_lengths, Tensor losses, Tensor kept,"
    " SymInt most, int blank, bool from_logits, str reduction, str backend) -> Tensor",
    lambda grad, logits, *rest: torch.empty(logits.shape, dtype=logits.dtype, device=logits.device),
    backends=BACKENDS,
    reference_if_empty=True,
)
align = register.define(
    f"ctc_align(Tensor logits, {_TARGETS}, SymInt most, int blank, bool from_logits, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda logits, *rest: (
        *(
            logits.new_empty((logits.shape[1], logits.shape[0]), dtype=dtype)
            for dtype in (torch.int64, torch.int64, torch.float64)
        ),
        logits.new_empty(logits.shape[1], dtype=torch.float64),
    ),
    check=check_values,
    backends=BACKENDS,
    reference_if_empty=True,
)


class Loss(torch.autograd.Function):
    """-log of the probability of the targets: their mean over the lengths, their sum, or each."""

    @staticmethod
    def forward(
        logits: Tensor,
        labels: Tensor,
        offsets: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
        most: int,
        blank: int,
        from_logits: bool,
        reduction: str,
        zero_infinity: bool,
        keep: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return loss(
            logits,
            labels,
            offsets,
            input_lengths,
            target_lengths,
            most,
            blank,
            from_logits,
            reduction,
            zero_infinity,
            keep,
            backend,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        (
            *tensors,
            ctx.most,
            ctx.blank,
            ctx.from_logits,
            ctx.reduction,
            ctx.zero_infinity,
            _,
            ctx.backend,
        ) = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad = grads[0]
        if grad is None:
            return (None,) * 12
        logits, labels, offsets, input_lengths, target_lengths, losses, kept = ctx.saved_tensors
        if is_double_backward():
            targets = Targets(labels, offsets, target_lengths, ctx.most)

            def function(logits: Tensor) -> Tensor:
                each = reference.loss_of(logits, targets, input_lengths, ctx.blank, ctx.from_logits)
                return reduce_losses(each, target_lengths, ctx.reduction, ctx.zero_infinity).to(
                    grad.dtype
                )

            (result,) = double_backward(function, [logits], [True], grad)
        else:
            inputs = (
                labels,
                offsets,
                input_lengths,
                target_lengths,
                losses,
                kept,
                ctx.most,
                ctx.blank,
                ctx.from_logits,
                ctx.reduction,
            )
            result = gradient(grad, logits, *inputs, ctx.backend)
        return (result, *(None,) * 11)
