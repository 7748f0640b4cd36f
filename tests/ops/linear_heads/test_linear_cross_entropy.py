"""Cross-entropy from hidden states: every plan and option against the composition in fp64."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any
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
    Batch,
    assert_as_good,
    batch_of,
    budgets,
    check,
    leaves_of,
    ours,
    plain,
    results,
)
from helpers.rows import INTERPRETING, devices, training
from torch import Tensor

import partita
from partita.ops.linear_heads.plan import ROW_WORDS, SMALL_COPIES, SMALL_LOGITS_BYTES, is_small

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
    check(
        x,
        budgets(x)[plan],
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
    states, factor = torch.randn(6, 3), torch.randn(20, 3)
    expected = partita.cross_entropy(
        module.linear(hidden) + states @ factor.T, target, label_smoothing=0.1, softcap=5.0
    )
    found = module(hidden, target, low_rank=(states, factor))
    torch.testing.assert_close(found, expected)
    stacked = partita.nn.LinearCrossEntropyLoss(8, 20, out_features=(2, 3), reduction="none")
    assert stacked(hidden, torch.randint(20, (6, 2, 3))).shape == (6, 2, 3)
    if hasattr(torch.nn, "LinearCrossEntropyLoss"):
        theirs = torch.nn.LinearCrossEntropyLoss(8, 20, bias=True, label_smoothing=0.1)
        theirs.load_state_dict(module.state_dict())
        plain = partita.nn.LinearCrossEntropyLoss(8, 20, bias=True, label_smoothing=0.1)
        plain.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(plain(hidden, target), theirs(hidden, target))


def stats(x: Batch, budget: int | None = None, **options: Any) -> Tensor:
    """Return the differentiable token statistics from the hidden states, stacked."""
    call = {"target": x.target, "linear_bias": x.bias, "memory_budget": budget, **options}
    return torch.stack(partita.linear_token_stats(x.input, x.weight, **call)[:3])


def plain_stats(x: Batch, **options: Any) -> Tensor:
    """Return those of the reference from the logits."""
    logits = F.linear(x.input, x.weight, x.bias)
    with partita.backend("reference"):
        return torch.stack(partita.token_stats(logits, **{"target": x.target, **options})[:3])


def check_stats(x: Batch, plan: str, parts: int, **options: Any) -> None:
    """Compare the statistics and the first gradients, `parts` in all, with the composition's."""
    f = lambda x: plain_stats(x, **options)  # noqa: E731
    found = results(lambda x: stats(x, budgets(x)[plan], **options), x)
    theirs, truth = results(f, x), results(f, x, torch.float64)
    assert_as_good(found[:parts], theirs[:parts], truth[:parts], x.input.dtype)


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
    # The gradient of a mask of -inf is 0 here.
    check_stats(x, plan, 3 if masked else 4, temperature=0.7)
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
    options = {"temperature": 0.7, "softcap": softcap, **({} if given else {"target": None})}
    # Without a target the arg-max of one and the same logits counts, whatever their dtype.
    argmax = F.linear(x.input.double(), x.weight.double(), x.bias.double()).argmax(1)
    if not given and dtype == torch.bfloat16:  # a rounded logit may change the arg-max
        x = x._replace(bias=torch.where(torch.arange(len(x.bias)).to(device) == 140, 30.0, x.bias))
        x = x._replace(bias=x.bias.to(dtype))
    check_stats(x, plan, 4, **options)
    if not given and dtype == torch.float32:
        head, budget = leaves_of(x)[:3], budgets(x)[plan]
        call = {"linear_bias": head[2], "memory_budget": budget, **options}
        assert torch.equal(partita.linear_token_stats(*head[:2], **call).argmax, argmax)


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


def test_the_limit_of_small_calls() -> None:
    classes = SMALL_LOGITS_BYTES // 4 // 64
    assert is_small(64, classes, torch.float32, None)
    assert is_small(64, classes, torch.bfloat16, None)  # the loss takes a copy in fp32
    assert not is_small(64, classes + 1, torch.float32, None)
    assert not is_small(64, classes, torch.float64, None)
    assert is_small(2, 3, torch.float32, SMALL_COPIES * 24)
    assert not is_small(2, 3, torch.float32, SMALL_COPIES * 24 - 1)


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
