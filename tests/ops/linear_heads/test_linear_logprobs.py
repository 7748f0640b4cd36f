"""Log-probabilities of given classes from hidden states, under every plan."""

import os
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.linear import CLASSES, PLANS, TOKENS, Batch, batch_of, budgets, leaves_of
from helpers.rows import INTERPRETING, devices, gradients
from torch import Tensor

import partita
from partita.testing.samples import in_torch

pytestmark = pytest.mark.interpreted
K = 5


def ids_of(x: Batch) -> Tensor:
    """Return ids of which some repeat, and some are ignored."""
    ids = torch.arange(len(x.input) * K, device=x.input.device).view(-1, K) * 11 % len(x.weight)
    ids[:, 1], ids[::3, 2] = ids[:, 0], -100
    ids[4] = -100
    return ids


@devices
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("temperature", "softcap", "bias"), [(1.0, None, False), (0.7, 4.0, True)])
def test_values_and_gradients(
    temperature: float,
    softcap: float | None,
    bias: bool,
    dtype: torch.dtype,
    plan: str,
    device: str,
) -> None:
    x = leaves_of(batch_of(bias=bias, dtype=dtype, device=device))
    ids = ids_of(x)
    options = {"temperature": temperature, "softcap": softcap}
    found = partita.linear_logprobs(
        x.input, x.weight, ids, linear_bias=x.bias, memory_budget=budgets(x)[plan], **options
    )

    def truth(x: Batch) -> Tensor:
        """Compute them in fp64 from logits that are rounded to the dtype."""
        logits = F.linear(x.input, x.weight, x.bias).double()
        return in_torch.logprobs(logits, ids, ignore_index=-100, **options)

    expected = truth(x)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # The products round differently: a logit moves by about an eps of its dtype.
    eps = torch.finfo(dtype).eps * (2 if INTERPRETING else 1)
    torch.testing.assert_close(found.double(), expected, rtol=8 * eps, atol=16 * eps)
    assert not found[ids < 0].any()
    exact = leaves_of(x, torch.float64)
    trues = gradients(truth(exact), exact[:3])
    for grad, true in zip(gradients(found, x[:3]), trues, strict=True):
        assert grad.dtype == dtype
        scale = true.abs().amax().item()
        torch.testing.assert_close(grad.double(), true, rtol=0, atol=32 * eps * scale)


@devices
@pytest.mark.parametrize("plan", PLANS)
def test_an_id_that_is_no_class_spoils_its_row_alone(plan: str, device: str) -> None:
    x = leaves_of(batch_of(device=device))
    ids, budget = ids_of(x), budgets(x)[plan]
    ids_with_no_class = ids.clone()
    ids_with_no_class[2, 3] = CLASSES
    with (
        mock.patch.dict(os.environ, {"PARTITA_CHECK": "1"}),
        pytest.raises(IndexError, match=rf"ids: expected .* got {CLASSES} at \[2, 3\]"),
    ):
        partita.linear_logprobs(x.input, x.weight, ids_with_no_class, memory_budget=budget)
    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}):
        found = partita.linear_logprobs(x.input, x.weight, ids_with_no_class, memory_budget=budget)
        (grad,) = torch.autograd.grad(found.sum(), x.input)
    right = partita.linear_logprobs(x.input, x.weight, ids, memory_budget=budget)
    assert torch.equal(found.isnan(), ids_with_no_class != ids)
    torch.testing.assert_close(found[ids_with_no_class == ids], right[ids_with_no_class == ids])
    assert grad[2].isnan().all() and not grad[:2].isnan().any() and not grad[3:].isnan().any()


@devices
def test_leading_dimensions_and_no_ids(device: str) -> None:
    x = batch_of(device=device)
    ids = ids_of(x)
    flat = partita.linear_logprobs(x.input, x.weight, ids)
    tokens = TOKENS // 2 * 2
    padded = partita.linear_logprobs(
        x.input[:tokens].unflatten(0, (2, -1)), x.weight, ids[:tokens].unflatten(0, (2, -1))
    )
    torch.testing.assert_close(padded.flatten(0, 1), flat[:tokens])
    one = partita.linear_logprobs(x.input[0], x.weight, ids[0])
    torch.testing.assert_close(one, flat[0], rtol=1e-5, atol=1e-5)
    for rows, k, plan in ((3, 0, "fast"), (0, 2, "small")):
        none = torch.zeros(rows, k, dtype=torch.int64, device=device)
        found = partita.linear_logprobs(
            x.input[:rows], x.weight, none, memory_budget=budgets(x)[plan]
        )
        assert found.shape == (rows, k)


def test_bad_input() -> None:
    hidden, matrix = torch.zeros(2, 3), torch.zeros(5, 3)
    ids = torch.zeros(2, 1, dtype=torch.int64)
    good = {"input": hidden, "linear_weight": matrix, "ids": ids}
    for error, changes in {
        "TypeError: linear_weight: expected the dtype of input": {"linear_weight": matrix.double()},
        r"ValueError: linear_weight: .*\[C, H\]": {"linear_weight": matrix[None]},
        "TypeError: ids: expected": {"ids": ids.float()},
        r"ValueError: ids: expected shape \[..., K\] with the rows of input = \[2, K\], got"
        r" \[1\]": {"ids": ids[0]},
        r"IndexError: ids: expected labels from 0 to 4 \(or ignore_index -100\), got 5 at"
        r" \[0, 0\]": {"ids": ids + 5},
        "ValueError: memory_budget: expected": {"memory_budget": -1},
    }.items():
        with raises(error):
            partita.linear_logprobs(**{**good, **changes})
