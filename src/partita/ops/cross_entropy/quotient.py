"""The sum of the losses over a denominator that the caller knows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.autograd import apply, plain_eager
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from .api import check_inputs, has_one_pass, loss_of_batch
from .autograd import CROSS_ENTROPY_ONE_PASS, OnePass
from .common import CrossEntropyOptions, LossOptions
from .native import native_cross_entropy


def cross_entropy_over(
    input: Tensor, target: Tensor, denominator: float | Tensor, options: LossOptions
) -> Tensor:
    """Return the sum of the losses of labels over a denominator, fp32 (fp64 for fp64).

    The pass that computes a gradient divides it before it rounds it to a half type. The quotient of
    `cross_entropy(..., reduction="sum")` would round it first.

    Args:
        input: logits `[M, C]`.
        target: labels `[M]`.
        denominator: a number, or a tensor `[]` on the device of the logits, without a gradient.
        options: those of the loss, whose reduction is a sum.
    """
    check_inputs(input, target, None, options.ignore_index)
    backend, dtype = current_backend(), acc_dtype(input.dtype)
    if input.is_cpu and backend == "auto" and options.is_in_torch:
        loss = native_cross_entropy(input, target, None, *options[:2], "sum")
        if loss is not None:
            return loss / denominator
    numbers = CrossEntropyOptions(*options[:4], False, dtype, backend)
    is_one_pass = plain_eager() and torch.is_grad_enabled() and input.requires_grad
    if not is_one_pass or input.dtype == torch.float16 or not has_one_pass(input, numbers):
        return loss_of_batch(input, target, None, numbers, "sum", False) / denominator
    if not isinstance(denominator, Tensor):
        denominator = torch.full((), denominator, dtype=dtype, device=input.device)
    tensors = (input, target, None, denominator)
    return apply(OnePass, CROSS_ENTROPY_ONE_PASS, *tensors, numbers)
