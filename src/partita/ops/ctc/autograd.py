"""The registered ops of CTC and the autograd function of its loss."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import (
    first_derivative,
    for_gradients,
    is_double_backward,
    one_by_one,
    skip_unused_gradients,
    takes,
    without_wrappers,
)
from ...runtime.dtypes import acc_dtype
from . import reference
from .common import CTCInputs
from .gpu.plan import saved_shape


def check_values(
    logits: Tensor,
    labels: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    label_priors: Tensor | None,
    star: int | None,
) -> None:
    """Raise for the first length, label or prior that is out of range, where values are checked."""
    if not checks.can_check_values(labels):
        return
    if label_priors is not None:
        index = checks.first_index(~label_priors.isfinite())
        if index is not None:
            raise ValueError(
                "label_priors: expected finite logarithms,"
                f" got {float(label_priors[index])} at {list(index)}"
            )
    T, _, C = logits.shape
    checks.within("input_lengths", input_lengths, 0, T, "steps")
    checks.target_labels(labels, target_lengths, 0, C - 1, star=star)


def _loss_results(
    logits: Tensor,
    max_target_len: int,
    reduction: str,
    save: bool,
    star: int | None,
    served_by: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors with the shapes of the reduced loss, the losses and the saved tensor."""
    (T, N, C), dtype = logits.shape, acc_dtype(logits.dtype)
    shape = (T, N, C if star is None else C + 1)
    saved = saved_shape(shape, max_target_len, save, served_by)
    return (
        logits.new_empty(N if reduction == "none" else (), dtype=dtype),
        logits.new_empty(N, dtype=torch.float64),
        logits.new_empty(saved, dtype=torch.float64),
    )


def _cpu() -> ModuleType:
    from . import cpu

    return cpu


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


def _gpu_align() -> ModuleType:
    from .gpu import align

    return align


_define = partial(register.define, cpu=_cpu, vmap=one_by_one, reference_if_empty=True)
loss = _define(reference.ctc_loss, _loss_results, gpu=_gpu, check=check_values)
gradient = _define(
    reference.ctc_gradient,
    lambda logits: torch.empty(logits.shape, dtype=logits.dtype, device=logits.device),
    gpu=_gpu,
)
align = _define(
    reference.ctc_align,
    lambda logits: (
        *(
            logits.new_empty((logits.shape[1], logits.shape[0]), dtype=dtype)
            for dtype in (torch.int64, torch.int64, acc_dtype(logits.dtype))
        ),
        logits.new_empty(logits.shape[1], dtype=acc_dtype(logits.dtype)),
    ),
    gpu=_gpu_align,
    check=check_values,
)


class CTCLossFunction(torch.autograd.Function):
    """The CTC loss after its reduction, with the losses `[N]` and the saved tensor beyond it.

    The last two outputs serve the gradient and are not differentiable.
    """

    generate_vmap_rule = True

    @staticmethod
    @takes(loss)
    def forward(*args: Any) -> Any:
        return loss(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x = CTCInputs(*inputs[:11])
        reduction, _, _, backend = inputs[11:]
        ctx.options = (x[5:8], x[9:], reduction, backend)
        ctx.mark_non_differentiable(*output[1:])
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*x[:5], x.label_priors, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if grads[0] is None:
            return (None,) * 15
        return _loss_gradient(grads[0], ctx.saved_tensors, ctx.options), *(None,) * 14


def _loss_gradient(grad: Tensor, saved: tuple[Any, ...], options: tuple[Any, ...]) -> Tensor:
    """Return the gradient in the logits, which may be differentiated again."""
    op, tensors = for_gradients(gradient, grad), (grad, *without_wrappers(saved))
    sizes, scores, reduction, backend = options

    def inputs(*tensors: Any) -> CTCInputs:
        return CTCInputs._make((*tensors[:5], *sizes, tensors[5], *scores))

    def kernel(grad: Tensor, *tensors: Any) -> Tensor:
        return op(grad, *inputs(*tensors), *tensors[6:], reduction, backend)

    def specification(grad: Tensor, *tensors: Any) -> Tensor:
        losses, saved = tensors[6:]
        return reference.ctc_gradient(grad, inputs(*tensors), losses, saved, reduction)

    if not is_double_backward():
        return kernel(*tensors)
    return first_derivative(kernel, specification, 2, *tensors)
