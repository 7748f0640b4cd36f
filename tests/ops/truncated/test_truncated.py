"""Statistics over the classes that a sampler keeps, against brute force and the reference."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from helpers.catalogue import BACKEND
from helpers.rows import INTERPRETING, devices
from torch import Tensor

import partita
from partita.testing import poisoned_memory

INF = math.inf
orders = pytest.mark.parametrize("order", ["vllm", "transformers"])


def rows(dtype: torch.dtype = torch.float32, classes: int = 40, number: int = 24) -> Tensor:
    generator = torch.Generator().manual_seed(classes)
    return (2 * torch.randn(number, classes, generator=generator)).to(dtype)


@orders
def test_brute_force_over_all_thresholds(order: str) -> None:
    """The kept set is the one of the 2^C sets that has every property of the rules."""
    logits, (k, p, low) = rows(torch.float64, 9, 12), (5, 0.7, 0.04)
    stats = partita.truncated_stats(logits, top_k=k, top_p=p, min_p=low, order=order)
    for row, kept, entropy in zip(logits, stats.kept, stats.entropy, strict=True):
        best, prob = row.argsort(descending=True), row.softmax(0)
        above = {int(i) for i in best if prob[i] >= low * prob.max()}
        first = {int(i) for i in best[:k]} & (above if order == "vllm" else set(range(9)))
        total = sum(float(prob[i]) for i in first)
        sets = [
            chosen
            for bits in product((False, True), repeat=9)
            if (chosen := {i for i in range(9) if bits[i]}) and chosen <= first
            if sum(float(prob[i]) for i in chosen) >= p * total
        ]
        smallest = min(sets, key=lambda s: (len(s), -sum(float(prob[i]) for i in s))) & above
        share = prob[sorted(smallest)] / prob[sorted(smallest)].sum()
        assert int(kept) == len(smallest)
        torch.testing.assert_close(entropy, -(share * share.log()).sum())


@pytest.mark.interpreted
@devices
def test_a_dropped_target(device: str) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, -INF]], device=device, requires_grad=True)
    target = torch.tensor([2], device=device)
    with partita.backend(BACKEND):
        found = partita.truncated_stats(logits, target, top_k=2)
        lost = partita.truncated_stats(logits, target, top_k=2, missing="inf")
        (gradient,) = torch.autograd.grad(lost.logprob.sum(), logits)
        masked = partita.truncated_stats(logits, target + 1, top_k=2)
    assert not found.in_set and int(found.kept) == 3
    torch.testing.assert_close(found.logprob, logits[:, :3].log_softmax(-1)[:, 2])
    assert not lost.in_set and int(lost.kept) == 2 and lost.logprob == -INF
    torch.testing.assert_close(lost.entropy, found.entropy.new_tensor([0.58220]), atol=1e-5, rtol=0)
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert masked.logprob == -INF and int(masked.kept) == 2


@pytest.mark.interpreted
@devices
def test_rules_of_each_row(device: str) -> None:
    logits = rows(classes=30, number=4).to(device)
    target = torch.tensor([0, 5, -100, 7], device=device)
    options = {
        "top_k": torch.tensor([3, 0, 40, 5], device=device),
        "top_p": torch.tensor([1.0, 0.5, 0.9, 0.6], device=device, dtype=torch.float64),
        "min_p": torch.tensor([0.0, 0.1, 0.0, 0.3], device=device),
        "temperature": torch.tensor([1.0, 0.5, 2.0, 0.7], device=device),
    }
    with partita.backend(BACKEND):
        stats = partita.truncated_stats(logits, target, **options)
        for i in range(4):
            numbers = {name: value[i].item() for name, value in options.items()}
            alone = partita.truncated_stats(logits[i], target[i], **numbers)
            for together, one in zip(stats, alone, strict=True):
                torch.testing.assert_close(together[i], one, rtol=1e-6, atol=1e-6)
    assert stats.logprob[2] == 0 and stats.in_set[2]


def long_rows(values: str) -> Tensor:
    """Return rows that a kernel reads in blocks, which end inside of the last one."""
    x = 2.6 * torch.randn(2, 9003, generator=torch.Generator().manual_seed(1))
    if values == "ties":
        x[:, ::3] = 1.5
    elif values == "sorted":
        x = x.sort(-1).values
    elif values == "equal":
        x[:] = 1.5
    elif values == "levels":  # more classes are equal than a bracket has room for
        x = x.round()
    elif values == "holes":
        x[:, ::2], x[:, 1::4] = -INF, -1e30
    elif values == "outliers":  # which no sample has
        x[0, 7] = 300.0
        x[1, :] = -INF
        x[1, [7, 8001]] = torch.tensor([-200.0, -201.0])
    return x


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("values", "options"),
    [
        ("normal", {"top_k": 50, "top_p": 0.9, "temperature": 0.7}),
        ("normal", {"top_k": 3000, "top_p": 0.95, "min_p": 1e-4}),
        ("normal", {"top_p": 0.98, "softcap": 5.0}),
        ("normal", {"min_p": 1e-3, "top_p": 0.9}),
        ("normal", {}),
        ("ties", {"top_p": 0.9}),
        ("sorted", {"top_p": 0.98}),
        ("equal", {"top_p": 0.9}),
        ("levels", {"top_p": 0.95}),
        ("levels", {"top_k": 3000}),
        ("holes", {"top_p": 0.98}),
        ("outliers", {"top_p": 0.5}),
    ],
)
def test_long_rows(device: str, dtype: torch.dtype, values: str, options: dict[str, Any]) -> None:
    logits = long_rows(values).to(device, dtype)
    compare(logits, torch.tensor([3, 8001], device=device), options)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("classes", [1, 7, 300, 781, 5003])
def test_rows_of_any_width(device: str, dtype: torch.dtype, classes: int) -> None:
    """Nothing past the last class of a row counts, where each class of it is far below 0."""
    logits = rows(dtype, classes, 3).to(device) - 30
    for options in ({"top_p": 0.9}, {"top_k": 5, "top_p": 0.8, "min_p": 0.01}):
        compare(logits, torch.tensor([0, classes - 1, -100], device=device), options)


def compare(logits: Tensor, target: Tensor, options: dict[str, Any]) -> None:
    """Compare the statistics with those of the reference in fp64."""
    with partita.backend(BACKEND), poisoned_memory():
        found = partita.truncated_stats(logits, target, **options)
    with partita.backend("reference"):
        expected = partita.truncated_stats(logits.double(), target, **options)
    assert torch.equal(found.kept, expected.kept) and torch.equal(found.in_set, expected.in_set)
    for each, true in zip(found[:4], expected[:4], strict=True):
        torch.testing.assert_close(each.double(), true, rtol=1e-6, atol=1e-5)


@pytest.mark.interpreted
@devices
def test_the_arg_max_of_a_long_row_is_its_first_class(device: str) -> None:
    logits = long_rows("normal").to(device)
    logits[0, [5, 9001]], logits[1, [4999, 5000]] = 90.0, 90.0
    logits.requires_grad_()
    with partita.backend(BACKEND):
        partita.truncated_stats(logits, top_k=2).logprob.sum().backward()
    expected = torch.zeros_like(logits)
    for row, (first, second) in enumerate(((5, 9001), (4999, 5000))):
        expected[row, first], expected[row, second] = 0.5, -0.5
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected)


@devices
def test_gradients(device: str) -> None:
    logits = rows(torch.float64, 12, 3).to(device).requires_grad_()
    target = torch.tensor([1, -100, 11], device=device)
    for missing, softcap in (("keep", None), ("inf", 3.0)):
        options = {"top_k": 5, "top_p": 0.9, "missing": missing, "softcap": softcap}

        def statistics(x: Tensor, options: dict[str, Any] = options) -> tuple[Tensor, ...]:
            found = partita.truncated_stats(x, target, temperature=0.7, **options)
            logprob = found.logprob.masked_fill(found.logprob == -INF, 0)
            return logprob, *found[1:4]

        assert torch.autograd.gradcheck(statistics, logits)
        assert torch.autograd.gradgradcheck(statistics, logits)


@pytest.mark.interpreted
@devices
def test_rows_that_nothing_depends_on_may_hold_anything(device: str) -> None:
    logits = rows(classes=50, number=4)
    logits[1], logits[2, :3], logits[3] = math.nan, INF, -INF
    logits = logits.to(device).requires_grad_()
    target = torch.tensor([3, -100, -100, -100], device=device)
    with partita.backend(BACKEND):
        stats = partita.truncated_stats(logits, target, top_k=4, top_p=0.9)
        stats.logprob.sum().backward()
    assert logits.grad is not None
    assert stats.logprob[1:].eq(0).all() and logits.grad[1:].eq(0).all()
    assert logits.grad[0].isfinite().all() and stats.entropy[1:3].isnan().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 2.5}, "top_k: expected an int, got float"),
        ({"top_p": 1.5}, "top_p: expected a number of at least 0.0 and at most 1.0, got 1.5"),
        ({"min_p": -0.1}, "min_p: expected a number of at least 0.0 and at most 1.0, got -0.1"),
        ({"order": "sglang"}, "order: expected one of 'vllm', 'transformers', got 'sglang'"),
        ({"missing": "drop"}, "missing: expected one of 'keep', 'inf', got 'drop'"),
        ({"top_k": torch.ones(2)}, "top_k: expected an integer dtype, got torch.float32"),
        ({"top_p": torch.ones(3)}, "top_p: expected shape logits.shape[:-1] = [2], got [3]"),
        (
            {"top_p": torch.tensor([0.5, 2.0])},
            "top_p: expected numbers from 0 to 1, got 2.0 at [1]",
        ),
        (
            {"temperature": torch.tensor([0.0, 2.0])},
            "temperature: expected numbers above 0, got 0.0 at [0]",
        ),
        ({"temperature": torch.ones(2, requires_grad=True)}, "expected a tensor without"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        partita.truncated_stats(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), **options)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [-0.5, 2.0, math.nan])
def test_an_unchecked_rule_makes_its_row_nan(value: float, monkeypatch: Any) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
    logits = rows(classes=20, number=3).requires_grad_()
    target, top_p = torch.tensor([1, 2, 3]), torch.tensor([0.5, value, 0.5])
    with partita.backend("auto" if not INTERPRETING else BACKEND):
        stats = partita.truncated_stats(logits, target, top_p=top_p)
    (stats.logprob + stats.entropy).sum().backward()
    assert logits.grad is not None
    for each in (*stats[:4], logits.grad):
        assert each[1].isnan().all() and each[[0, 2]].isfinite().all()
