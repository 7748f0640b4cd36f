"""TRL's row statistics against its definitions."""

import pytest
import torch
from helpers.rows import devices
from torch import Tensor

from partita.integrations.trl import (
    entropy_from_logits,
    selective_log_softmax,
    selective_log_softmax_and_entropy,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def assert_rounded_once(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Assert that a result is the truth, rounded once to the dtype; on a GPU it may be fp32."""
    dtypes = (dtype,) if found.is_cpu else (dtype, torch.float32)
    assert found.dtype in dtypes and found.shape == expected.shape
    eps = torch.finfo(dtype).eps
    atol = 1e-5 if dtype in (torch.float32, torch.float64) else eps
    torch.testing.assert_close(found.double(), expected, rtol=max(eps, 1e-5), atol=atol)


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [None, 1, 5])
def test_selective_log_softmax(k: int | None, dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 32, 1024, generator=g).to(dtype).to(device).requires_grad_()
    shape = (4, 32) if k is None else (4, 32, k)
    index = torch.randint(1024, shape, generator=g).to(device)
    found = selective_log_softmax(logits, index)
    exact = logits.detach().double().requires_grad_()
    columns = index.unsqueeze(-1) if k is None else index
    expected = exact.log_softmax(-1).gather(-1, columns)
    expected = expected.squeeze(-1) if k is None else expected
    assert_rounded_once(found, expected, dtype)
    (grad,) = torch.autograd.grad(found.sum(), logits)
    (true,) = torch.autograd.grad(expected.sum(), exact)
    assert_rounded_once(grad, true, dtype)


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(768,), (32, 768), (8, 16, 768), (2, 4, 8, 768)], ids=str)
def test_entropy_from_logits(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    for x in (torch.randn(shape, generator=g), torch.full(shape, 3.0)):
        logits = x.to(dtype).to(device)
        found = entropy_from_logits(logits, chunk_size=16)
        logp = logits.double().log_softmax(-1)
        assert_rounded_once(found, -(logp.exp() * logp).sum(-1), dtype)


@devices
@pytest.mark.parametrize("k", [None, 3])
def test_masked_rows(k: int | None, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, 40, generator=g).to(device).requires_grad_()
    shape = (2, 6) if k is None else (2, 6, k)
    index = torch.randint(40, shape, generator=g).to(device)
    mask = (torch.arange(index.numel(), device=device) % 5 > 1).view(shape)
    padded = index.masked_fill(~mask, -100)
    found = selective_log_softmax(logits, padded, temperature=0.7, row_mask=mask.int())
    expected = torch.where(mask, selective_log_softmax(logits / 0.7, index), 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(found.sum(), logits)
    (true,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(grad, true, rtol=1e-5, atol=1e-6)


@devices
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_both_in_one_read(entropy_grad: bool, masked: bool, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, 40, generator=g).to(device).requires_grad_()
    index = torch.randint(40, (2, 6), generator=g).to(device)
    mask = torch.arange(12, device=device).view(2, 6) % 5 > 1 if masked else None
    found = selective_log_softmax_and_entropy(logits, index, entropy_grad, 0.7, mask)
    keep = torch.ones_like(index) if mask is None else mask
    expected = selective_log_softmax(logits, index, 0.7), entropy_from_logits(logits / 0.7)
    for ours, each in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, each * keep, rtol=1e-5, atol=1e-5)
    assert found[1].requires_grad == entropy_grad


def test_bad_input() -> None:
    logits = torch.zeros(2, 3, 4)
    with pytest.raises(TypeError, match="index: expected an integer dtype"):
        selective_log_softmax(logits, torch.zeros(2, 3))
    with pytest.raises(IndexError, match="got 4 at"):
        selective_log_softmax(logits, torch.full((2, 3), 4))
    with pytest.raises(ValueError, match="ids: expected shape"):
        selective_log_softmax(logits, torch.zeros(2, 2, 1, dtype=torch.int64))
    labels = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="row_mask: expected shape the shape of index"):
        selective_log_softmax(logits, labels, row_mask=torch.ones(2))
    with pytest.raises(ValueError, match=r"temperature: expected a number above 0\.0"):
        selective_log_softmax(logits, labels, temperature=0.0)
