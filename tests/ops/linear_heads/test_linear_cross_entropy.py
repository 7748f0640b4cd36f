"""Cross-entropy from hidden states: every plan and option against the composition in fp64."""

import itertools
import os
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.linear import (
    CLASSES,
    HIDDEN,
    PLANS,
    TOKENS,
    assert_as_good,
    batch_of,
    budgets,
    check,
    ours,
    plain,
    results,
)
from helpers.rows import INTERPRETING, devices, training

import partita
from partita.ops.linear_heads.plan import ROW_WORDS

REDUCTIONS = ("none", "mean", "sum")
OPTIONS = list(
    itertools.product((False, True), (False, True), (0.0, 0.1), (None, 5.0), (0.0, 1e-2))
)
if INTERPRETING:  # the interpreter is slow, so it runs without options and with all of them
    OPTIONS = [OPTIONS[0], OPTIONS[-1]]
dtypes = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"]
)


@pytest.mark.interpreted
@training
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("bias", "weighted", "label_smoothing", "softcap", "z_loss"), OPTIONS)
def test_every_combination_of_options(
    bias, weighted, label_smoothing, softcap, z_loss, reduction, plan, dtype, device
) -> None:
    x = batch_of(bias=bias, weighted=weighted, dtype=dtype, device=device)
    budget = budgets(x)[plan]
    check(
        x,
        budget,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
    )


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("plan", PLANS)
def test_fp16_gradients_do_not_underflow_before_a_loss_scale(plan: str, device: str) -> None:
    x = batch_of(dtype=torch.float16, device=device)
    scaled = lambda f: lambda x: 2.0**12 * f(x).float() * 2.0**-4  # noqa: E731
    f = scaled(plain)
    found = results(scaled(lambda x: ours(x, budgets(x)[plan])), x)
    assert_as_good(
        found, results(f, x), results(lambda x: 2.0**8 * plain(x), x, torch.float64), torch.float16
    )


@devices
@dtypes
def test_chunks_of_tokens(dtype: torch.dtype, device: str) -> None:
    """The gradient of the matrix is added up over the chunks."""
    x = batch_of(5000, 50, bias=True, weighted=True, dtype=dtype, device=device)
    plan = partita.linear_cross_entropy_plan(
        5000, HIDDEN, 50, dtype, memory_budget=ROW_WORDS * 4 * 5000 + 600_000
    )
    assert plan.name == "fast" and plan.chunk < 5000
    for reduction in ("mean", "sum"):
        check(
            x, ROW_WORDS * 4 * 5000 + 600_000, reduction=reduction, label_smoothing=0.1, z_loss=1e-3
        )


@devices
def test_shapes_of_the_arguments(device: str) -> None:
    x = batch_of(24, 30, bias=True, weighted=True, device=device)
    flat = ours(x, reduction="none")
    stacked = ours(
        x._replace(
            input=x.input.reshape(2, 3, 4, HIDDEN), target=x.target.reshape(2, 3, 4).to(torch.int32)
        ),
        reduction="none",
    )
    torch.testing.assert_close(stacked.flatten(), flat)
    one = ours(x._replace(input=x.input[1], target=x.target[1]), reduction="none")
    torch.testing.assert_close(one, flat[1])
    assert one.shape == ()
    strided = x._replace(input=x.input.T.contiguous().T, weight=x.weight.T.contiguous().T)
    torch.testing.assert_close(results(ours, strided), results(ours, x))


@devices
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
@pytest.mark.parametrize("dims", [(), (3,), (2, 3)])
def test_matrices_of_more_dimensions_and_probabilities(
    dims: tuple[int, ...], kind: str, device: str
) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, matrix = (
        torch.randn(5, 4, generator=g).to(device),
        torch.randn(6, *dims, 4, generator=g).to(device),
    )
    bias, probabilities = (
        torch.randn(6, *dims, generator=g).to(device),
        torch.randn(5, 6, *dims, generator=g).softmax(1).to(device),
    )
    labels = torch.randint(6, (5, *dims), generator=g).to(device)
    target = labels if kind == "labels" else probabilities
    logits = torch.einsum("nh,c...h->nc...", hidden, matrix) + bias
    for reduction in REDUCTIONS:
        expected = F.cross_entropy(logits, target, reduction=reduction, label_smoothing=0.1)
        found = partita.linear_cross_entropy(
            hidden, matrix, target, linear_bias=bias, reduction=reduction, label_smoothing=0.1
        )
        torch.testing.assert_close(found, expected)
        if hasattr(F, "linear_cross_entropy"):
            theirs = F.linear_cross_entropy(
                hidden, matrix, target, linear_bias=bias, reduction=reduction, label_smoothing=0.1
            )
            torch.testing.assert_close(found, theirs)


def test_probabilities_of_stacked_hidden_states_stand_last() -> None:
    hidden, matrix, target = (
        torch.randn(2, 3, 4),
        torch.randn(5, 4),
        torch.randn(2, 3, 5).softmax(-1),
    )
    expected = F.cross_entropy((hidden @ matrix.T).reshape(6, 5), target.reshape(6, 5))
    torch.testing.assert_close(partita.linear_cross_entropy(hidden, matrix, target), expected)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("plan", PLANS)
def test_nothing_but_ignored_tokens(plan: str, device: str) -> None:
    x = batch_of(8, device=device)
    x = x._replace(target=torch.full_like(x.target, 3))
    for reduction, expected in (("mean", torch.nan), ("sum", 0.0)):
        loss, *grads = results(
            lambda x, r=reduction: ours(x, budgets(x)[plan], reduction=r, ignore_index=3), x
        )
        torch.testing.assert_close(loss, torch.full_like(loss, expected), equal_nan=True)
        for grad in grads:
            assert not grad.any()
    assert ours(x, reduction="sum", ignore_index=None) > 0


@devices
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_tokens(reduction: str, device: str) -> None:
    x = batch_of(0, 9, bias=True, device=device)
    for a, b in zip(
        results(lambda x: ours(x, reduction=reduction), x),
        results(lambda x: plain(x, reduction=reduction), x),
        strict=True,
    ):
        torch.testing.assert_close(a, b.to(a.dtype), equal_nan=True)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("plan", PLANS)
def test_a_wrong_label_spoils_its_token_alone(plan: str, device: str) -> None:
    x = batch_of(9, device=device)
    for invalid in (-1, CLASSES, 2**40):
        bad = x._replace(target=x.target.index_fill(0, torch.tensor([4], device=device), invalid))
        with (
            mock.patch.dict(os.environ, {"PARTITA_CHECK": "1"}),
            pytest.raises(IndexError, match=r"target: expected labels from 0 to .* at \[4\]"),
        ):
            ours(bad)
        with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}):
            loss, grad, matrix = results(lambda x: ours(x, budgets(x)[plan], reduction="none"), bad)
            right, right_grad, _ = results(lambda x: ours(x, budgets(x)[plan], reduction="none"), x)
            stats = partita.linear_token_stats(*bad[:2], bad.target)
        others = torch.arange(9, device=device) != 4
        assert (
            loss[4].isnan()
            and grad[4].isnan().all()
            and matrix.isnan().all()
            and stats.logprob[4].isnan()
        )
        assert torch.equal(loss[others], right[others]) and torch.equal(
            grad[others], right_grad[others]
        )


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_strided_and_narrow_arguments(reduction: str, plan: str, device: str) -> None:
    """Labels and class weights are strided, and the bounds would wrap in the types of labels."""
    tokens = 9 if device == "cpu" else TOKENS  # the interpreter is slow
    x = batch_of(tokens, weighted=True, device=device)
    x = x._replace(target=torch.arange(tokens, device=device) * 13 % 120)
    expected = results(
        lambda x: ours(x, budgets(x)[plan], reduction=reduction, label_smoothing=0.1), x
    )
    for dtype in (torch.int64, torch.uint8, torch.int8):
        target = torch.stack([x.target, x.target * 0], 1).to(dtype)[:, 0]
        weight = torch.stack([x.class_weight, x.class_weight * 0 + 1e9], 1)[:, 0]
        strided = x._replace(target=target, class_weight=weight)
        found = results(
            lambda x: ours(x, budgets(x)[plan], reduction=reduction, label_smoothing=0.1), strided
        )
        torch.testing.assert_close(found, expected)
    loss = partita.cross_entropy(x.input @ x.weight.T, x.target, weight, label_smoothing=0.1)
    torch.testing.assert_close(
        loss,
        partita.cross_entropy(x.input @ x.weight.T, x.target, x.class_weight, label_smoothing=0.1),
    )


def test_hidden_states_of_no_size() -> None:
    torch.testing.assert_close(
        partita.linear_cross_entropy(torch.zeros(2, 0), torch.zeros(5, 0), torch.tensor([0, 1])),
        torch.tensor(5.0).log(),
    )


BAD = {
    "ValueError: input: expected shape": {"input": torch.zeros(2, 5)},
    "ValueError: linear_weight: expected shape": {"linear_weight": torch.zeros(5)},
    "TypeError: linear_weight: expected the dtype of input": {
        "linear_weight": torch.zeros(3, 4).double()
    },
    "ValueError: linear_bias: expected shape": {"linear_bias": torch.zeros(4)},
    "ValueError: target: expected shape": {"target": torch.zeros(3, dtype=torch.int64)},
    "ValueError: weight: expected shape": {"weight": torch.zeros(4)},
    "ValueError: reduction: expected one of": {"reduction": "median"},
    "ValueError: label_smoothing: expected a number": {"label_smoothing": 2.0},
    "ValueError: softcap: expected a number above 0": {"softcap": 0.0},
    "ValueError: memory_budget: expected at least": {"memory_budget": 7},
}


@pytest.mark.parametrize("error", BAD)
def test_errors(error: str) -> None:
    arguments = {
        "input": torch.zeros(2, 4),
        "linear_weight": torch.zeros(3, 4),
        "target": torch.zeros(2, dtype=torch.int64),
    }
    with raises(error):
        partita.linear_cross_entropy(**(arguments | BAD[error]))


def test_module() -> None:
    torch.manual_seed(0)
    module = partita.nn.LinearCrossEntropyLoss(8, 20, bias=True, label_smoothing=0.1, softcap=5.0)
    hidden, target = torch.randn(6, 8), torch.randint(20, (6,))
    expected = partita.cross_entropy(
        module.linear(hidden), target, label_smoothing=0.1, softcap=5.0
    )
    torch.testing.assert_close(module(hidden, target), expected)
    stacked = partita.nn.LinearCrossEntropyLoss(8, 20, out_features=(2, 3), reduction="none")
    assert stacked(hidden, torch.randint(20, (6, 2, 3))).shape == (6, 2, 3)
    if hasattr(torch.nn, "LinearCrossEntropyLoss"):
        theirs = torch.nn.LinearCrossEntropyLoss(8, 20, bias=True, label_smoothing=0.1)
        theirs.load_state_dict(module.state_dict())
        plain = partita.nn.LinearCrossEntropyLoss(8, 20, bias=True, label_smoothing=0.1)
        plain.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(plain(hidden, target), theirs(hidden, target))
