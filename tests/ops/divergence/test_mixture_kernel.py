"""Divergences from a mixture of wide rows of 16-bit logits, which stay in registers on a GPU."""

import pytest
import torch
from helpers.divergence import truth
from helpers.rows import KERNEL_DEVICES
from torch import Tensor

pytest.importorskip("triton")
from partita.ops.divergence.gpu import launch
from partita.ops.divergence.gpu.plan import mixture_plan

pytestmark = pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
HALF_TYPES = (torch.bfloat16, torch.float16)


def draw(rows: int, classes: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator(device=device).manual_seed(0)
    x = torch.randn(rows, classes, generator=g, device=device)
    t = 0.5 * x + torch.randn(rows, classes, generator=g, device=device)
    return x.to(dtype), t.to(dtype)


def one_pass(x: Tensor, t: Tensor, row_factor: Tensor | None, softcap: float = 0.0) -> list[Tensor]:
    """Return losses and gradients of the kernel, which gives the same bits twice."""
    assert launch._mixture_plan(x, t, 0.5) is not None
    arguments = (x, t, row_factor, 0.5, 0.5, 0.8, softcap)
    first, second = (launch.divergence_one_pass(*arguments) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    return list(first)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("classes", [9000, 32_000, 128_256])
def test_values_and_gradients(
    classes: int, softcap: float, dtype: torch.dtype, device: str
) -> None:
    x, t = draw(40, classes, dtype, device)
    fp64 = x.double().requires_grad_()
    expected = truth(fp64, t, 0.5, 0.8, softcap)
    (grad,) = torch.autograd.grad(0.5 * expected.sum(), fp64)
    loss, found = one_pass(x, t, None, softcap)
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=2e-6)
    ulp = torch.finfo(dtype).eps * grad.abs() + torch.finfo(dtype).tiny
    assert ((found.double() - grad).abs() <= ulp + 1e-6 * grad.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_logits_far_from_zero(scale: float, dtype: torch.dtype, device: str) -> None:
    """The base-2 log-sum-exp is carried in two numbers, so its rounding does not count."""
    x, t = draw(40, 65_536, torch.float32, device)
    x, t = (scale * x + 8192).to(dtype), (scale * t - 8192).to(dtype)
    loss, _ = one_pass(x, t, None)
    torch.testing.assert_close(loss.double(), truth(x, t, 0.5, 0.8), rtol=0, atol=3e-6)


def test_infinite_logits_and_rows_that_do_not_count(device: str) -> None:
    x, t = draw(40, 65_536, torch.bfloat16, device)
    masked = torch.rand(x.shape, device=device) < 0.3
    x[masked], t[masked] = -torch.inf, -torch.inf
    x[4, ::2], t[4, 1::2] = -torch.inf, -torch.inf  # no class in common
    row_factor = torch.full((40,), 0.5, device=device)
    row_factor[::3] = 0.0
    x[::3], row_factor[5] = torch.nan, torch.nan
    x[7], t[8, 0] = -torch.inf, torch.nan
    loss, grad = one_pass(x, t, row_factor)
    expected = truth(x, t, 0.5, 0.8)
    expected[::3] = 0.0
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=2e-6, equal_nan=True)
    assert not grad[::3].any() and not grad[1][masked[1]].any()
    is_nan = grad.isnan()
    assert is_nan[[5, 7, 8]].all() and is_nan.any(-1).nonzero().flatten().tolist() == [5, 7, 8]


def test_which_rows_stay_in_registers(device: str) -> None:
    x, t = draw(2, 32_008, torch.bfloat16, device)
    plan = launch._mixture_plan(x, t, 0.5)
    assert plan is not None and plan == mixture_plan(32_008)
    assert launch._mixture_plan(x, t, 0.0) is launch._mixture_plan(x, t, 1.0) is None
    assert launch._mixture_plan(x[:, 1:], t[:, 1:], 0.5) is None  # not aligned
    assert launch._mixture_plan(x.float(), t.float(), 0.5) is None
