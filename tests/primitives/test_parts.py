"""Rows that several programs of a GPU share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.divergence import truth
from helpers.rows import KERNEL_DEVICES, assert_same_bits
from torch import Tensor

pytest.importorskip("triton")
import partita
from partita.ops.divergence.gpu.launch import divergence_one_pass
from partita.testing import poisoned_memory

pytestmark = pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
HALF_TYPES = (torch.bfloat16, torch.float16)
ROWS = 701  # more parts than programs that any GPU has at once
# Rows that start on 16 bytes, and rows that start anywhere, with a short last part.
CLASSES = (65_536, 100_000, 50_257)


def draw(classes: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    g = torch.Generator(device=device).manual_seed(seed)
    x = 3 * torch.randn(ROWS, classes, generator=g, device=device)
    x[5, ::3], x[7] = -torch.inf, 100.0  # one row without some classes, one of equal logits
    return x.to(dtype)


def same_bits(function: Callable[[], Any]) -> Any:
    """Return the results in memory that was poisoned, after a check of equal bits."""
    with poisoned_memory():
        first, second = function(), function()
    assert_same_bits(list(first), list(second))
    return first


def assert_rounded(found: Tensor, exact: Tensor, terms: Tensor | None = None) -> None:
    """Check that results are fp64 ones, rounded once to their dtype, up to fp32 arithmetic.

    `terms` are what the results are sums of, where those may cancel.
    """
    finfo = torch.finfo(found.dtype)
    largest = (exact if terms is None else terms).abs().amax(-1, keepdim=True)
    bound = 0.51 * finfo.eps * exact.abs() + finfo.tiny + 2e-6 * largest
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("classes", CLASSES)
def test_softmax(classes: int, dtype: torch.dtype, log: bool, device: str) -> None:
    function, native = (
        (partita.log_softmax, torch.log_softmax) if log else (partita.softmax, torch.softmax)
    )
    x, grad = draw(classes, dtype, device), draw(classes, dtype, device, seed=1)
    grad[5] = grad[6]  # a gradient is finite

    def run() -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        return y.detach(), *torch.autograd.grad(y, leaf, grad)

    y, found = same_bits(run)
    exact = native(x.double(), -1)
    finite = torch.isfinite(exact)
    assert torch.equal(finite, torch.isfinite(y))
    assert_rounded(y.where(finite, 0), exact.where(finite, 0))
    y = y.double()
    if log:
        expected = grad - y.exp() * grad.double().sum(-1, keepdim=True)
    else:
        expected = y * (grad - (grad.double() * y).sum(-1, keepdim=True))
    assert_rounded(found, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("classes", CLASSES)
def test_cross_entropy(
    classes: int, dtype: torch.dtype, inplace: bool, smoothing: float, device: str
) -> None:
    x = draw(classes, dtype, device)
    if smoothing:
        x[5] = 0.0  # a class of probability 0 would make the loss infinite
    g = torch.Generator(device=device).manual_seed(2)
    target = torch.randint(classes, (ROWS,), generator=g, device=device)
    target[5], target[11], target[12] = 1, -100, classes - 1
    options = {"reduction": "sum", "label_smoothing": smoothing}

    def run() -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        logits = leaf.clone() if inplace else leaf
        loss = partita.cross_entropy(logits, target, inplace=inplace, **options)
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    loss, found = same_bits(run)
    fp64 = x.double().requires_grad_()
    exact = F.cross_entropy(fp64, target, **options)
    (expected,) = torch.autograd.grad(exact, fp64)
    # The loss has the dtype of the logits.
    assert abs(loss.double() - exact) <= (0.51 * torch.finfo(dtype).eps + 1e-6) * exact
    assert_rounded(found, expected)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [*HALF_TYPES, torch.float32], ids=str)
@pytest.mark.parametrize("classes", CLASSES)
def test_divergence(classes: int, dtype: torch.dtype, beta: float, device: str) -> None:
    x, t = draw(classes, dtype, device), draw(classes, dtype, device, seed=1)
    # The gradient of two uniform rows is 0, but for the rounding of the probabilities in fp64.
    t[5], t[7] = t[4], t[6]
    x[5] = 0.0
    factor = torch.full((ROWS,), 0.5, device=device)
    factor[::7] = 0  # rows that do not count
    loss, found = same_bits(lambda: divergence_one_pass(x, t, factor, 0.0, beta, 0.8, 0.0))
    fp64 = x.double().requires_grad_()
    exact = truth(fp64, t, beta, 0.8) * (factor != 0)
    (expected,) = torch.autograd.grad((factor * exact).sum(), fp64)
    torch.testing.assert_close(loss.double(), exact.detach(), rtol=2e-6, atol=2e-6)
    logp, logq = ((logits.double() / 0.8).log_softmax(-1) for logits in (x, t))
    terms = factor[:, None] * logp.exp() * (logp - logq) if beta else None
    assert_rounded(found, expected, terms)
