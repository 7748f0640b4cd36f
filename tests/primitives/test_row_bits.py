"""Rows have the same bits wherever they start, and whichever kernel serves them."""

import pytest
import torch
from helpers.rows import KERNEL_DEVICES, assert_same_bits
from torch import Tensor

pytest.importorskip("triton")
import partita

pytestmark = pytest.mark.parametrize("device", KERNEL_DEVICES)


def outcome(x: Tensor, grad: Tensor, target: Tensor, dim: int = -1) -> list[Tensor]:
    """Return the softmax, the log-softmax and their gradients, and that of a cross-entropy."""
    leaf, found = x.detach().requires_grad_(), []
    for function in (partita.softmax, partita.log_softmax):
        y = function(leaf, dim)
        found += [y.detach(), *torch.autograd.grad(y, leaf, grad)]
    if dim == -1:
        for smoothing in (0.0, 0.1):
            loss = partita.cross_entropy(leaf, target, reduction="sum", label_smoothing=smoothing)
            found += torch.autograd.grad(loss, leaf)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("classes", [512, 1023, 5001])
def test_any_start(classes: int, dtype: torch.dtype, device: str) -> None:
    g = torch.Generator(device=device).manual_seed(0)
    x, grad = (torch.randn(9, classes, generator=g, device=device).to(dtype) for _ in range(2))
    x[2], x[3, ::2] = 100.0, -torch.inf
    grad[3] = -0.0
    target = torch.arange(9, device=device) * (classes // 9)
    alone = [outcome(x[i, None], grad[i, None], target[i, None]) for i in range(9)]
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]

    def placed(rows: Tensor, stride: int) -> Tensor:
        """Return rows that start one class after a vector, `stride` apart, among NaN."""
        memory = rows.new_full((9 * stride + 1,), torch.nan)
        found = memory[1:].as_strided(rows.shape, (stride, 1))
        return found.copy_(rows)

    assert_same_bits(outcome(x, grad, target), expected)
    for stride in (classes, classes + 3):
        found = outcome(placed(x, stride), placed(grad, stride), target)
        assert_same_bits(found, expected)
