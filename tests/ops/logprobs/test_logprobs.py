"""Log-probabilities of given classes: values, gradients, repeated ids, bad input."""

import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from helpers.errors import raises
from helpers.rows import INTERPRETING, devices, devices_and_dtypes
from torch import Tensor

import partita
from partita.testing import sample_rows
from partita.testing.samples import in_torch

pytestmark = pytest.mark.interpreted
K = 3
ONES = torch.ones(1, 2)


def sample(
    *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return logits and ids, of which every other row repeats one."""
    rows = torch.Size(shape[:-1]).numel()
    logits = sample_rows(rows, shape[-1], device=device)
    ids = torch.arange(rows * K, device=device).view(*shape[:-1], K) * 7
    ids[..., 1] = torch.where(ids[..., 0] % 2 == 0, ids[..., 0], ids[..., 1])
    return logits.view(shape).to(dtype), ids % shape[-1]


def both(
    f: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the result and the gradient, with a different factor for each id."""
    leaf = x.detach().requires_grad_()
    result = f(leaf)
    if upstream is None:
        upstream = torch.linspace(-1, 2, result.numel(), dtype=torch.float64).view(result.shape)
    upstream = upstream.to(result.device, result.dtype)
    return result.detach(), torch.autograd.grad(result, leaf, upstream)[0]


@devices_and_dtypes
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (1.3, 4.0)])
@pytest.mark.parametrize("shape", [(5, 37), (2, 3, 300), (3, 5000), (4, 1)], ids=str)
def test_values_and_gradients(
    shape: tuple[int, ...],
    temperature: float,
    softcap: float | None,
    dtype: torch.dtype,
    device: str,
) -> None:
    logits, ids = sample(*shape, dtype=dtype, device=device)
    options = {"temperature": temperature, "softcap": softcap}
    found, grad = both(lambda x: partita.logprobs(x, ids, **options), logits)
    expected, true = both(lambda x: in_torch.logprobs(x, ids, **options), logits.double())
    single = torch.float64 if dtype == torch.float64 else torch.float32
    assert found.dtype == single and grad.dtype == dtype
    eps = torch.finfo(single).eps
    scale = logits.double().abs().amax() + 1
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=float(16 * eps * scale))
    # Triton's interpreter truncates to bf16, which has twice the error of rounding.
    rounding = torch.finfo(dtype).eps / (1 if INTERPRETING else 2)
    bound = max(rounding * 1.01, 64 * eps)
    torch.testing.assert_close(grad.double(), true, rtol=bound, atol=float(64 * eps * scale))


@devices
def test_strides_and_widths(device: str) -> None:
    logits, ids = sample(4, 3, 50, device=device)
    expected = both(lambda x: partita.logprobs(x, ids), logits)
    padded = torch.full((4, 3, 120), torch.nan, device=device)
    padded[..., 10:110:2] = logits
    transposed = logits.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    apart = logits.permute(1, 0, 2).contiguous().permute(1, 0, 2)
    for x in (padded[..., 10:110:2], transposed, apart):
        assert torch.equal(x, logits)
        found = both(lambda x: partita.logprobs(x, ids), x)
        torch.testing.assert_close(found, expected)
    columns = ids.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(partita.logprobs(logits, columns), expected[0])
    narrow = ids.to(torch.uint8)
    assert torch.equal(partita.logprobs(logits, narrow), expected[0])


@devices
def test_no_ids_and_no_rows(device: str) -> None:
    logits = torch.randn(4, 9, device=device)
    for rows, k in ((4, 0), (0, 3)):
        ids = torch.zeros(rows, k, dtype=torch.int64, device=device)
        found, grad = both(lambda x, ids=ids: partita.logprobs(x, ids), logits[:rows])
        assert found.shape == (rows, k) and grad.shape == (rows, 9) and not grad.any()
    one = partita.logprobs(logits[0], torch.tensor([2, 2], device=device))
    assert one.shape == (2,) and one[0] == one[1]


@devices
def test_masked_and_huge_logits(device: str) -> None:
    logits = torch.tensor(
        [[0.0, -torch.inf, 1.0, 2.0], [1e30, 1e30, -1e30, 0.0], [3e4, 3e4 - 1, -3e4, -torch.inf]],
        device=device,
    )
    ids = torch.tensor([[1, 3], [0, 2], [1, 3]], device=device)
    found, grad = both(lambda x: partita.logprobs(x, ids), logits)
    torch.testing.assert_close(found, in_torch.logprobs(logits.double(), ids).float())
    assert found[0, 0] == found[2, 1] == -torch.inf and not grad.isnan().any()
    _, true = both(lambda x: in_torch.logprobs(x, ids[1:2]), logits[1:2].double(), ONES)
    _, ours = both(lambda x: partita.logprobs(x, ids[1:2]), logits[1:2], ONES)
    torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-6)


@devices
def test_an_id_that_is_no_class_spoils_its_row_alone(device: str) -> None:
    logits, ids = sample(4, 30, device=device)
    ids_with_no_class = ids.clone()
    ids_with_no_class[1, 2], ids_with_no_class[3, 0] = 30, -1
    with (
        mock.patch.dict(os.environ, {"PARTITA_CHECK": "1"}),
        pytest.raises(IndexError, match=r"ids: expected classes from 0 to 29, got 30 at \[1"),
    ):
        partita.logprobs(logits, ids_with_no_class)
    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}):
        found, grad = both(lambda x: partita.logprobs(x, ids_with_no_class), logits)
    right, true = both(lambda x: partita.logprobs(x, ids), logits)
    assert torch.equal(found.isnan(), ids_with_no_class != ids)
    assert torch.equal(found[ids_with_no_class == ids], right[ids_with_no_class == ids])
    assert grad[[1, 3]].isnan().all() and torch.equal(grad[[0, 2]], true[[0, 2]])


X, IDS = torch.zeros(2, 5), torch.zeros(2, K, dtype=torch.int64)
BAD = {
    "TypeError: logits: expected a floating dtype, got torch.int64": {"logits": X.long()},
    "TypeError: ids: expected an integer dtype, got torch.float32": {"ids": IDS.float()},
    r"ValueError: logits: expected shape \[..., C\] with at least one class, got \[2, 0\]": {
        "logits": X[:, :0]
    },
    r"ValueError: ids: expected shape \[..., K\] with the rows of logits = \[2, K\], got \[2\]": {
        "ids": IDS[:, 0]
    },
    "ValueError: temperature: expected a number above 0.0, got 0.0": {"temperature": 0.0},
    "ValueError: softcap: expected a number above 0.0, got -1.0": {"softcap": -1.0},
    "ValueError: ids: expected the device of logits, cpu, got meta": {"ids": IDS.to("meta")},
}


@pytest.mark.parametrize("error", BAD)
def test_bad_input(error: str) -> None:
    with raises(error):
        partita.logprobs(**{"logits": X, "ids": IDS, **BAD[error]})
