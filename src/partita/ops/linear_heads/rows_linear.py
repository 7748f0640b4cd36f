"""The linear layer of a head, in which rows without a gradient do not count.

Padding often holds NaN. PyTorch's own layer multiplies it by the gradient 0 of its logits, and the
gradient of the matrix becomes NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.autograd import apply, needed_gradients, requires_grad, saved_tensors
from .common import counted_rows


class RowsLinear(torch.autograd.Function):
    """`torch.nn.functional.linear`, whose gradients are differentiable again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (input, weight, bias) = grads, saved_tensors(ctx)
        dinput = dweight = dbias = None
        of_input, of_weight, of_bias = needed_gradients(ctx, input, weight, bias)
        if of_input:
            dinput = grad @ weight
        rows = input.shape[:-1].numel()  # a reshape that batched gradients know
        grad = grad.reshape(rows, grad.shape[-1])
        if of_weight:
            dweight = grad.T @ counted_rows(input.reshape(rows, input.shape[-1]), grad)
        if of_bias:
            dbias = grad.sum(0)
        return dinput, dweight, dbias


def rows_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `input @ weight.T + bias` of hidden states `[..., H]` and a matrix `[C, H]`."""
    if requires_grad(weight) and torch.is_grad_enabled():
        result: Tensor = apply(RowsLinear, input, weight, bias)
        return result
    return F.linear(input, weight, bias)
