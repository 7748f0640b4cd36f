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
