"""Token statistics from hidden states, against those of the logits."""

import pytest
import torch
import torch.nn.functional as F
from helpers.linear import PLANS, Batch, assert_as_good, batch_of, budgets, results
from helpers.rows import devices
from torch import Tensor

import partita

dtypes = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"]
)


@pytest.mark.interpreted
@devices
@dtypes
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("masked", [False, True])
def test_token_stats(masked: bool, plan: str, dtype: torch.dtype, device: str) -> None:
    """A bias of -inf may mask classes."""
    x = batch_of(bias=True, dtype=dtype, device=device)
    if masked:
        x.bias[::3] = -torch.inf
        x = x._replace(target=torch.where((x.target >= 0) & (x.target % 3 == 0), 1, x.target))

    def ours(x: Batch) -> Tensor:
        budget = budgets(x)[plan]
        return torch.stack(
            partita.linear_token_stats(
                x.input,
                x.weight,
                x.target,
                linear_bias=x.bias,
                temperature=0.7,
                memory_budget=budget,
            )[:3]
        )

    def plain(x: Batch) -> Tensor:
        with partita.backend("reference"):
            return torch.stack(
                partita.token_stats(F.linear(x.input, x.weight, x.bias), x.target, temperature=0.7)[
                    :3
                ]
            )

    found, theirs, truth = results(ours, x), results(plain, x), results(plain, x, torch.float64)
    if masked:  # the gradient of a mask of -inf is 0 here
        found, theirs, truth = (r[:3] for r in (found, theirs, truth))
    assert_as_good(found, theirs, truth, dtype)
    logits = F.linear(x.input, x.weight, x.bias)
    same = partita.linear_token_stats(
        x.input, x.weight, x.target, linear_bias=x.bias
    ).argmax == logits.argmax(1)
    assert same.float().mean() >= (0.9 if dtype == torch.bfloat16 else 1.0)


@pytest.mark.interpreted
@devices
@dtypes
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("softcap", "given"), [(5.0, True), (5.0, False), (None, False)])
def test_soft_capping_and_no_target(
    softcap: float | None, given: bool, plan: str, dtype: torch.dtype, device: str
) -> None:
    x = batch_of(bias=True, dtype=dtype, device=device)
    # Without a target the arg-max of one and the same logits counts, whatever their dtype.
    argmax = F.linear(x.input.double(), x.weight.double(), x.bias.double()).argmax(1)
    options = {"temperature": 0.7, "softcap": softcap}

    def ours(x: Batch) -> Tensor:
        stats = partita.linear_token_stats(
            x.input,
            x.weight,
            x.target if given else None,
            linear_bias=x.bias,
            memory_budget=budgets(x)[plan],
            **options,
        )
        if not given and dtype == torch.float32:
            assert torch.equal(stats.argmax, argmax)
        return torch.stack(stats[:3])

    def plain(x: Batch) -> Tensor:
        logits = F.linear(x.input, x.weight, x.bias)
        with partita.backend("reference"):
            return torch.stack(
                partita.token_stats(logits, x.target if given else None, **options)[:3]
            )

    if not given and dtype == torch.bfloat16:  # a rounded logit may change the arg-max
        x = x._replace(bias=torch.where(torch.arange(len(x.bias)).to(device) == 140, 30.0, x.bias))
        x = x._replace(bias=x.bias.to(dtype))
    found, theirs, truth = results(ours, x), results(plain, x), results(plain, x, torch.float64)
    assert_as_good(found, theirs, truth, dtype)


@devices
@pytest.mark.parametrize("plan", PLANS)
def test_a_temperature_of_large_logits_loses_no_digits(plan: str, device: str) -> None:
    hidden = torch.full((40, 1), 1e4, device=device)
    matrix = 1 + torch.arange(333, device=device)[:, None] * 2.0**-17
    x = batch_of(device=device)
    stats = partita.linear_token_stats(
        hidden,
        matrix,
        torch.arange(40, device=device),
        temperature=3.0,
        memory_budget=budgets(x)[plan],
    )
    logits = F.linear(hidden, matrix).double() / 3.0
    logp = logits.log_softmax(1)
    right = logp[range(40), range(40)]
    torch.testing.assert_close(stats.logprob.double(), right, rtol=1e-6, atol=2e-6)
    entropy = -(logp.exp() * logp).sum(1)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-6, atol=2e-6)


def test_the_lowest_of_equal_classes() -> None:
    hidden, matrix = torch.ones(3, 2), torch.zeros(500, 2)
    matrix[[140, 300, 499]] = 1.0
    for budget in (None, 3 * 128 * 4 + 24 * 4 * 3):
        assert (
            partita.linear_token_stats(
                hidden, matrix, torch.zeros(3, dtype=torch.int64), memory_budget=budget
            ).argmax.tolist()
            == [140] * 3
        )
