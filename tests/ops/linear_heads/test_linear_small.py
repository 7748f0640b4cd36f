"""Small calls, which compose PyTorch's linear layer with the loss of its logits."""

import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from helpers.linear import Batch, batch_of, budgets, ours, results
from helpers.rows import devices
from torch import Tensor

import partita
from partita.ops.linear_heads import autograd
from partita.ops.linear_heads.plan import SMALL_COPIES, SMALL_LOGITS_BYTES, is_small


def stats(x: Batch, budget: int | None = None) -> Tensor:
    """Return the differentiable token statistics, stacked."""
    found = partita.linear_token_stats(
        x.input, x.weight, x.target, linear_bias=x.bias, memory_budget=budget
    )
    return torch.stack(found[:3])


def test_the_limit_of_small_calls() -> None:
    classes = SMALL_LOGITS_BYTES // 4 // 64
    assert is_small(64, classes, torch.float32, None)
    assert is_small(64, classes, torch.bfloat16, None)  # the loss takes a copy in fp32
    assert not is_small(64, classes + 1, torch.float32, None)
    assert not is_small(64, classes, torch.float64, None)
    assert is_small(2, 3, torch.float32, SMALL_COPIES * 24)
    assert not is_small(2, 3, torch.float32, SMALL_COPIES * 24 - 1)


@pytest.mark.parametrize("shape", [(40,), (5, 8)])
@pytest.mark.parametrize("f", [ours, stats])
def test_small_calls_take_no_op_on_hidden_states(f: Callable, shape: tuple[int, ...]) -> None:
    x = batch_of(bias=True)
    x = x._replace(input=x.input.reshape(*shape, -1), target=x.target.reshape(shape))
    ops = {"one_pass": mock.DEFAULT, "rows": mock.DEFAULT, "rows_backward": mock.DEFAULT}
    with mock.patch.multiple(autograd, **ops) as replaced:
        for op in replaced.values():
            op.side_effect = AssertionError
        results(f, x)
        with torch.no_grad():
            f(x)
        with pytest.raises(AssertionError):
            f(x, budgets(batch_of(bias=True))["fast"])


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_dtype_and_shape_of_the_loss(reduction: str, dtype: torch.dtype, device: str) -> None:
    x = batch_of(12, 9, bias=True, dtype=dtype, device=device)
    loss, *grads = results(lambda x: ours(x, reduction=reduction), x)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.shape == ((12,) if reduction == "none" else ())
    assert all(grad.dtype == dtype for grad in grads)
    with torch.no_grad():  # on a GPU another kernel serves this call
        torch.testing.assert_close(ours(x, reduction=reduction), loss, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tokens", [9, 200])
@pytest.mark.parametrize("ignored", [False, True])
def test_the_place_of_a_wrong_label_counts_all_tokens(ignored: bool, tokens: int) -> None:
    x = batch_of(tokens, 30)
    target = torch.arange(tokens) % 30
    target[5] = 30
    if ignored:
        target[:2] = -100
    x = x._replace(target=target)
    with pytest.raises(IndexError, match=r"labels from 0 to 29 .* got 30 at \[5\]"):
        ours(x)
    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}):
        loss = ours(x, reduction="none")
        assert loss[5].isnan() and loss.isnan().sum() == 1
        assert ours(x).isnan()


@pytest.mark.parametrize("f", [ours, stats])
def test_the_backend_is_asked(f: Callable) -> None:
    with partita.backend("numba"), pytest.raises(RuntimeError, match="backend 'numba'"):
        f(batch_of(6, 9))
    with partita.backend("reference"):
        found = f(batch_of(6, 9))
    torch.testing.assert_close(found, f(batch_of(6, 9)))


def test_a_subclass_follows_the_plan() -> None:
    class Tagged(Tensor):
        pass

    x = batch_of(6, 9)
    found = ours(x._replace(input=x.input.as_subclass(Tagged)))
    torch.testing.assert_close(found.as_subclass(Tensor), ours(x))
