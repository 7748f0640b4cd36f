"""Arithmetic of the kernels against fp64."""

import pytest
import torch
from helpers.rows import KERNEL_DEVICES
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl

from partita.primitives.gpu.math import exp_exact
from partita.runtime.launch import launch
from partita.testing import ulp_error


@triton.jit
def exp_exact_kernel(
    x_ptr,  # [programs * BLOCK]
    result_ptr,  # [programs * BLOCK]
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result_ptr + at, exp_exact(tl.load(x_ptr + at)))


def exp_of(x: Tensor) -> Tensor:
    result = torch.full_like(x, torch.nan)
    launch(exp_exact_kernel, len(x) // 1024, x, result, BLOCK=1024)
    return result


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@pytest.mark.parametrize("least", [-1.0, -20.0, -87.0])
def test_the_exact_exponential(least: float, device: str) -> None:
    g = torch.Generator(device=device).manual_seed(0)
    x = least * torch.rand(2**22, generator=g, device=device)
    assert ulp_error(exp_of(x), x.double().exp()).ulp < 1.02


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_the_exact_exponential_at_its_edges(device: str) -> None:
    x = torch.zeros(1024, device=device)
    x[:4] = torch.tensor([-torch.inf, torch.nan, -1e30, -88.0])
    assert exp_of(x)[:5].nan_to_num(nan=-1.0).tolist() == [0.0, -1.0, 0.0, 0.0, 1.0]
