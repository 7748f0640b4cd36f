"""The registered ops of CTC-CRF and the autograd function of its loss."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import (
    apply,
    double_backward,
    first_derivative,
    for_gradients,
    is_double_backward,
    one_by_one,
    skip_unused_gradients,
    takes,
    without_wrappers,
)
from ...runtime.dtypes import acc_dtype
from ..chain import autograd as _chain
from ..chain.common import ChainPotentials
from . import common, reference


def check_values(
    scores: Tensor,
    source: Tensor,
    targets: Tensor,
    target_lengths: Tensor,
    input_lengths: Tensor | None,
) -> None:
    """Raise for the first length or label that is out of range, where values are checked."""
    if not checks.can_check_values(targets):
        return
    if input_lengths is not None:
        checks.within("input_lengths", input_lengths, 0, len(scores), "steps")
    checks.target_labels(targets, target_lengths, 1, source.shape[1] - 1)


def _loss_results(
    scores: Tensor,
    source: Tensor,
    lattice_source: Tensor,
    reduction: str,
    save: bool,
    served_by: str,
) -> tuple[Tensor, ...]:
    """Return empty tensors with the shapes and dtypes of the results of `crf_loss`."""
    T, N, C, L = *scores.shape[:2], source.shape[0], lattice_source.shape[0]
    dtype = acc_dtype(scores.dtype)
    saved = (T + 1, N, C) if save and served_by != "reference" else (0,)
    return (
        scores.new_empty(N if reduction == "none" else (), dtype=dtype),
        scores.new_empty(N, dtype=torch.float64),
        scores.new_empty(N, dtype=torch.float64),
        scores.new_empty(saved, dtype=torch.float64),
        scores.new_empty((T, N, L, 2) if save else (0,), dtype=dtype),
        scores.new_empty((N, L, 2), dtype=torch.int32),
        scores.new_empty(N, dtype=torch.int64),
    )


def _cpu() -> ModuleType:
    from . import cpu

    return cpu


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


loss = register.define(
    reference.crf_loss,
    _loss_results,
    gpu=_gpu,
    cpu=_cpu,
    check=check_values,
    vmap=one_by_one,
    by_identity=("source", "lattice_source"),
)
gradient = register.define(
    reference.crf_gradient,
    lambda scores: torch.empty(scores.shape, dtype=scores.dtype, device=scores.device),
    gpu=_gpu,
    cpu=_cpu,
    vmap=one_by_one,
    by_identity=("source",),
)


class CRFLossFunction(torch.autograd.Function):
    """The CTC-CRF loss after its reduction.

    The other outputs are those of `crf_loss` that serve the gradient. They are not differentiable.
    """

    generate_vmap_rule = True

    @staticmethod
    @takes(loss)
    def forward(*args: Any) -> Any:
        return loss(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.state_len, ctx.reduction, _, ctx.backend = inputs[6:]
        ctx.mark_non_differentiable(*output[1:])
        skip_unused_gradients(ctx)
        scores, source, lattice_source, targets, target_lengths = inputs[:5]
        ctx.save_for_backward(scores, source, target_lengths, *output[1:], lattice_source, targets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if grads[0] is None:
            return (None,) * 10
        saved, options = ctx.saved_tensors, (ctx.state_len, ctx.reduction, ctx.backend)
        return _loss_gradient(grads[0], saved, options), *(None,) * 9


def _loss_gradient(grad: Tensor, saved: tuple[Any, ...], options: tuple[int, str, str]) -> Tensor:
    """Return the gradient in the scores, which may be differentiated again."""
    op, (state_len, reduction, backend) = for_gradients(gradient, grad), options
    scores, *others = without_wrappers(saved)

    # All tensors are arguments, because a transform may end before the second derivative.
    def kernel(grad: Tensor, scores: Tensor, *others: Tensor) -> Tensor:
        *tensors, _, _ = others
        return op(grad, scores, *tensors, reduction, backend)

    def gradient_of_loss(grad: Tensor, scores: Tensor, *others: Tensor) -> Tensor:
        source, target_lengths, *_, lengths, lattice_source, targets = others
        sequences = (source, lattice_source, targets, target_lengths, lengths)

        def logz(chain: ChainPotentials, save: bool) -> tuple[Tensor, Tensor, Tensor]:
            return apply(_chain.LogZ, *chain, True, backend)

        def loss(scores: Tensor) -> Tensor:
            functions = common.CRFFunctions(logz, _chain.logz_gradient)
            inputs = common.CRFInputs(scores, *sequences, state_len)
            return common.crf_loss(functions, inputs, reduction, False)[0].to(grad.dtype)

        (result,) = double_backward(loss, [scores], [True], grad)
        assert result is not None
        return result

    if not is_double_backward():
        return kernel(grad, scores, *others)
    return first_derivative(kernel, gradient_of_loss, 2, grad, scores, *others)
