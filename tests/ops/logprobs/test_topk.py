"""The most probable classes of each row, from logits and from hidden states."""

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.linear import PLANS, batch_of, budgets, leaves_of
from helpers.rows import INTERPRETING, devices, devices_and_dtypes, gradients
from torch import Tensor

import partita
from partita.testing import sample_rows
from partita.testing.samples import in_torch

pytestmark = pytest.mark.interpreted
SHAPES = ((5, 37, 6), (2, 3, 300, 9), (3, 9000, 5), (2, 40_000, 3), (4, 1, 1), (3, 70, 70))


def best(x: Tensor, k: int) -> Tensor:
    """Return the classes of the k largest numbers, of equal ones the lower classes."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@devices_and_dtypes
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 4.0)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(
    shape: tuple[int, ...],
    temperature: float,
    softcap: float | None,
    dtype: torch.dtype,
    device: str,
) -> None:
    *rows, classes, k = shape
    x = sample_rows(torch.Size(rows).numel(), classes, device=device).to(dtype)
    x = x.view(*rows, classes).requires_grad_()
    options = {"temperature": temperature, "softcap": softcap}
    found = partita.topk_logprobs(x, k, **options)
    single = torch.float64 if dtype == torch.float64 else torch.float32
    assert found.logprobs.dtype == found.logsumexp.dtype == single
    ids = best(x.detach(), k)
    if not softcap:  # a soft cap may make different logits equal
        assert torch.equal(found.indices, ids)
    exact = x.detach().double().requires_grad_()
    expected = in_torch.logprobs(exact, ids, **options)
    eps = torch.finfo(single).eps
    torch.testing.assert_close(found.logprobs.double(), expected, rtol=16 * eps, atol=16 * eps)
    logsumexp = in_torch.capped(exact, softcap, temperature).logsumexp(-1)
    torch.testing.assert_close(found.logsumexp.double(), logsumexp, rtol=16 * eps, atol=16 * eps)
    assert not found.logsumexp.requires_grad
    expected = in_torch.logprobs(exact, found.indices, **options)
    (grad,), (true,) = gradients(found.logprobs, [x]), gradients(expected, [exact])
    rounding = torch.finfo(dtype).eps / (1 if INTERPRETING else 2)
    bound = max(1.01 * rounding, 256 * eps)
    torch.testing.assert_close(grad.double(), true, rtol=bound, atol=64 * eps)


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [40, 600, 5000, 33_000])
def test_ties_take_the_lower_class(width: int, dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(width)
    x = torch.randint(-3, 3, (4, width), generator=g).to(dtype).to(device)
    x[1] = 2.0
    x[2] = torch.where(torch.arange(width, device=device) % 2 == 0, -0.0, 0.0)
    x[3] = -torch.inf
    x[3, width // 2] = x[3, -1] = 1.0
    padded = torch.full((4, width + 7), 9.0, dtype=dtype, device=device)
    padded[:, 3 : 3 + width] = x
    for logits in (x, padded[:, 3 : 3 + width], x.T.contiguous().T):
        found = partita.topk_logprobs(logits, 12)
        assert torch.equal(found.indices, best(x + 0.0, 12))
        expected = in_torch.logprobs(x.double(), found.indices)
        torch.testing.assert_close(found.logprobs.double(), expected, rtol=1e-5, atol=1e-5)


@devices
def test_nan_and_rows_of_minus_infinity(device: str) -> None:
    x = sample_rows(3, 50, device=device)
    x[0, 5], x[1] = torch.nan, -torch.inf
    found = partita.topk_logprobs(x, 4)
    assert found.logprobs[0].isnan().all() and found.logprobs[1].isnan().all()
    assert found.indices[0, 0] == 5 and found.indices[1].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(found.logprobs[2], x[2].log_softmax(-1).topk(4).values)


@devices
def test_no_rows_and_one_row(device: str) -> None:
    x = sample_rows(2, 50, device=device)
    none, one = partita.topk_logprobs(x[:0], 4), partita.topk_logprobs(x[0], 4)
    assert none.logprobs.shape == none.indices.shape == (0, 4) and none.logsumexp.shape == (0,)
    assert torch.equal(one.indices, best(x, 4)[0]) and one.logsumexp.shape == ()


@devices
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_hidden_states(dtype: torch.dtype, plan: str, device: str) -> None:
    x = leaves_of(batch_of(bias=True, dtype=dtype, device=device))
    options = {"temperature": 0.7, "softcap": 20.0}
    found = partita.linear_topk_logprobs(
        x.input, x.weight, 5, linear_bias=x.bias, memory_budget=budgets(x)[plan], **options
    )
    logits = F.linear(x.input, x.weight, x.bias).detach().double()
    eps = torch.finfo(dtype).eps * (2 if INTERPRETING else 1)
    for ids in (found.indices, best(logits, 5)):
        right = in_torch.logprobs(logits, ids, **options)
        torch.testing.assert_close(found.logprobs.double(), right, rtol=16 * eps, atol=32 * eps)
    if dtype != torch.bfloat16:  # the products round differently
        assert torch.equal(found.indices, best(logits, 5))
    exact = leaves_of(x, torch.float64)
    logits = F.linear(exact.input, exact.weight, exact.bias)
    trues = gradients(in_torch.logprobs(logits, found.indices, **options), exact[:3])
    first, again = (gradients(found.logprobs, x[:3]) for _ in range(2))
    for grad, second, true in zip(first, again, trues, strict=True):
        assert grad.dtype == dtype
        bound = 32 * eps * true.abs().amax().item()
        torch.testing.assert_close(grad.double(), true, rtol=0, atol=bound)
        torch.testing.assert_close(second.double(), true, rtol=0, atol=bound)


@devices
def test_hidden_states_of_few_tokens_at_a_time(device: str) -> None:
    """A budget that holds the logits of three tokens gives the same bits as one without a cut."""
    x = batch_of(device=device)
    whole = partita.linear_topk_logprobs(x.input, x.weight, 4)
    parts = partita.linear_topk_logprobs(x.input, x.weight, 4, memory_budget=3 * 336 * 4)
    assert torch.equal(whole.indices, parts.indices)
    torch.testing.assert_close(whole.logprobs, parts.logprobs)
    tokens = x.input[:38].unflatten(0, (2, -1))
    padded = partita.linear_topk_logprobs(tokens, x.weight, 4, memory_budget=3 * 336 * 4)
    assert padded.logprobs.shape == (2, 19, 4) and padded.logsumexp.shape == (2, 19)
    assert torch.equal(padded.indices.flatten(0, 1), whole.indices[:38])


def test_bad_input() -> None:
    x = torch.zeros(2, 5)
    for error, call in {
        "ValueError: k: expected a number from 1 to the 5": lambda: partita.topk_logprobs(x, 6),
        "ValueError: k: expected .* got 0": lambda: partita.topk_logprobs(x, 0),
        "TypeError: k: expected an int": lambda: partita.topk_logprobs(x, 1.0),
        "TypeError: logits: expected": lambda: partita.topk_logprobs(x.long(), 1),
        "ValueError: k: expected .* the 2 classes": lambda: partita.linear_topk_logprobs(x, x, 3),
        "TypeError: linear_weight: .* dtype of input": lambda: partita.linear_topk_logprobs(
            x, x.double(), 1
        ),
    }.items():
        with raises(error):
            call()
