"""Distillation losses against sums over classes: values, gradients, rows that do not count."""

from typing import Any

import pytest
import torch
from helpers.distillation import WEIGHTS, mean_loss, terms
from helpers.errors import raises
from helpers.rows import devices, devices_and_dtypes
from torch import Tensor

import partita
from partita.ops.divergence.common import Terms
from partita.testing import sample_rows

pytestmark = pytest.mark.interpreted
OPTIONS = ({}, {"temperature": 0.7, "beta": 0.2}, {"temperature": 1.5, "softcap": 4.0})


def sample(
    rows: int, classes: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    x, t = (sample_rows(rows, classes, device=device) for _ in range(2))
    target = torch.arange(rows, device=device) * 7 % classes
    return x.to(dtype), (0.5 * x + t.flip(-1)).to(dtype), target


@devices_and_dtypes
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(5, 37), (2, 9000), (2, 20_000)])
def test_terms_and_gradients(
    rows: int, classes: int, options: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    x, t, target = sample(rows, classes, dtype, device)
    x.requires_grad_()
    found = partita.distillation_loss(x, t, target, weights=WEIGHTS, reduction="none", **options)
    exact = x.detach().double().requires_grad_()
    truth = terms(exact, t, target, **options)
    single = torch.float64 if dtype == torch.float64 else torch.float32
    eps = torch.finfo(single).eps
    bound = max(1.01 * torch.finfo(dtype).eps, 512 * eps)
    for name, weight in WEIGHTS.items():
        ours = getattr(found, name)
        assert ours.dtype == single
        torch.testing.assert_close(ours.double(), truth[name], rtol=64 * eps, atol=64 * eps)
        upstream = torch.linspace(-1, 2, rows, dtype=torch.float64, device=device)
        (grad,) = torch.autograd.grad(ours, x, upstream.to(single), retain_graph=True)
        (true,) = torch.autograd.grad(truth[name], exact, upstream, retain_graph=True)
        torch.testing.assert_close(grad.double(), true, rtol=bound, atol=64 * eps)
        truth[name] = weight * truth[name]
    torch.testing.assert_close(
        found.loss.double(), sum(truth.values()), rtol=64 * eps, atol=64 * eps
    )
    assert torch.equal(found.teacher_argmax, t.argmax(-1)) and found.teacher_mass is None


@devices
@pytest.mark.parametrize("names", [("hard", "kl"), ("tv",), ("jsd",), ("reverse_kl", "hard")])
def test_terms_without_a_weight_are_none(names: tuple[str, ...], device: str) -> None:
    x, t, target = sample(4, 50, device=device)
    x.requires_grad_()
    found = partita.distillation_loss(x, t, target, weights=dict.fromkeys(names, 1.0))
    assert {name for name in Terms._fields if getattr(found, name) is not None} == set(names)
    truth = terms(x, t, target)
    for name in names:
        assert not getattr(found, name).requires_grad
        torch.testing.assert_close(
            getattr(found, name).double(), truth[name].mean().detach(), rtol=1e-5, atol=1e-6
        )


@devices
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_rows_that_do_not_count(reduction: str, device: str) -> None:
    """They hold NaN, and change neither the results nor the gradients of others."""
    x, t, target = sample(6, 300, device=device)
    target[1] = -100
    mask = torch.tensor([1, 0, 1, 1, 0, 1], device=device)
    x[1], t[1], t[4] = torch.nan, torch.nan, torch.nan
    x.requires_grad_()
    # Row 4 has a label, so it counts in the term that needs no teacher.
    found = partita.distillation_loss(x, t, target, weights=WEIGHTS, mask=mask, reduction=reduction)
    counted = (target != -100).nonzero().flatten(), mask.nonzero().flatten()
    exact = x.detach().double().requires_grad_()
    total: Any = 0
    for name, weight in WEIGHTS.items():
        rows = counted[name != "hard"]
        term = terms(exact[rows], t[rows].nan_to_num(), target[rows])[name]
        if reduction == "none":
            placed = term.new_zeros(6).index_put((rows,), term)
            torch.testing.assert_close(getattr(found, name).double(), placed, rtol=1e-5, atol=1e-6)
            total = total + weight * placed.sum()
        else:
            total = total + weight * (term.mean() if reduction == "mean" else term.sum())
    torch.testing.assert_close(found.loss.sum().double(), total, rtol=1e-5, atol=1e-6)
    (grad,) = torch.autograd.grad(found.loss.sum(), x)
    (true,) = torch.autograd.grad(total, exact)
    assert not grad[1].any()
    torch.testing.assert_close(grad.double(), true, rtol=1e-4, atol=1e-6)


@devices
def test_weights_of_rows_and_the_square_of_the_temperature(device: str) -> None:
    x, t, target = sample(5, 80, device=device)
    weight = torch.linspace(0, 1, 5, device=device)
    x.requires_grad_()
    for reduction in ("none", "mean"):
        found = partita.distillation_loss(
            x,
            t,
            target,
            weights={"hard": weight, "kl": 1 - weight, "tv": torch.tensor(2.0, device=device)},
            temperature=2.0,
            scale_by_temperature_squared=True,
            reduction=reduction,
        )
        truth = terms(x, t, target, temperature=2.0)
        rows = weight * truth["hard"] + 4 * (1 - weight) * truth["kl"] + 8 * truth["tv"]
        expected = rows if reduction == "none" else rows.mean()
        torch.testing.assert_close(found.loss.double(), expected, rtol=1e-5, atol=1e-6)


@devices
def test_a_part_of_the_teachers_classes(device: str) -> None:
    """The teacher is normalised over the student's classes, whose probability is its mass."""
    x, _, target = sample(5, 40, device=device)
    t = sample_rows(5, 100, device=device)
    classes = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:40].to(device)
    x.requires_grad_()
    options = {"temperature": 0.7, "softcap": 6.0}
    found = partita.distillation_loss(
        x, t, target, weights=WEIGHTS, teacher_classes=classes, **options
    )
    expected = mean_loss(x, t[:, classes], target, **options)
    torch.testing.assert_close(found.loss.double(), expected, rtol=1e-5, atol=1e-6)
    q = (6.0 * torch.tanh(t.double() / 6.0) / 0.7).softmax(-1)
    mass = found.teacher_mass
    assert mass is not None
    torch.testing.assert_close(mass.double(), q[:, classes].sum(-1), rtol=1e-5, atol=0)
    assert torch.equal(found.teacher_argmax, t.argmax(-1))


@devices
def test_classes_of_probability_0(device: str) -> None:
    """A class that neither has, and one that the teacher alone lacks in finite terms."""
    x, t, target = sample(3, 60, device=device)
    target += 2
    x[:, 0], t[:, 0], t[:, 1] = -torch.inf, -torch.inf, -torch.inf
    x.requires_grad_()
    finite = {"hard": 1.0, "kl": 1.0, "jsd": 1.0, "tv": 1.0}
    found = partita.distillation_loss(x, t, target, weights=finite)
    (grad,) = torch.autograd.grad(found.loss, x)
    kept = x.detach()[:, 1:].double().requires_grad_()
    # The smallest logits stand for -inf, which has no logarithm of a ratio.
    expected = mean_loss(kept, t[:, 1:].clamp(min=-200), target - 1, finite)
    (true,) = torch.autograd.grad(expected, kept)
    torch.testing.assert_close(found.loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert not grad[:, 0].any()
    torch.testing.assert_close(grad[:, 1:].double(), true, rtol=1e-4, atol=1e-6)


@devices
def test_equal_rows_and_ties(device: str) -> None:
    x = sample_rows(3, 50, device=device).requires_grad_()
    weights = dict.fromkeys(("kl", "reverse_kl", "jsd", "tv"), 1.0)
    found = partita.distillation_loss(x, x.detach(), weights=weights)
    assert abs(found.loss.item()) < 1e-6
    (grad,) = torch.autograd.grad(found.loss, x)
    assert grad.abs().max() < 1e-6
    t = torch.zeros(2, 3000, device=device)
    t[0, 2500], t[0, 77] = 1.0, 1.0
    found = partita.distillation_loss(torch.zeros_like(t), t, weights={"kl": 1.0})
    assert found.teacher_argmax.tolist() == [77, 0]


@devices
def test_bad_labels_are_nan_in_their_row(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
    x, t, target = sample(4, 30, device=device)
    target[2] = 30
    x.requires_grad_()
    found = partita.distillation_loss(x, t, target, weights=WEIGHTS, reduction="none")
    (grad,) = torch.autograd.grad(found.loss.sum(), x)
    assert (
        found.loss.isnan().tolist() == grad.isnan().all(1).tolist() == [False, False, True, False]
    )
    assert grad.isnan().any(1).tolist() == [False, False, True, False]
    classes = torch.arange(30, device=device)
    classes[3] = 99
    found = partita.distillation_loss(
        x, t, target, weights={"kl": 1.0}, teacher_classes=classes, reduction="none"
    )
    (grad,) = torch.autograd.grad(found.loss.sum(), x)
    assert found.loss.isnan().all() and grad.isnan().all()


@devices
def test_no_rows(device: str) -> None:
    x = torch.zeros(0, 5, device=device, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64, device=device)
    for reduction, expected in (("mean", torch.nan), ("sum", 0.0)):
        call = (x, x.detach(), target)
        found = partita.distillation_loss(*call, weights=WEIGHTS, reduction=reduction)
        torch.testing.assert_close(found.loss.item(), expected, equal_nan=True)
        assert torch.autograd.grad(found.loss, x)[0].shape == x.shape
    ignored = torch.full((2,), -100, device=device)
    x = torch.zeros(2, 5, device=device, requires_grad=True)
    found = partita.distillation_loss(x, x.detach(), ignored, weights=WEIGHTS)
    assert found.loss.isnan() and not torch.autograd.grad(found.loss, x)[0].any()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"target": None}, "ValueError: target: expected the labels of the term 'hard', got None"),
        ({"weights": {}}, "TypeError: weights: expected a dict .* got {}"),
        (
            {"weights": {"ce": 1.0}},
            "ValueError: weights: expected one of 'hard', .* got 'ce'",
        ),
        (
            {"weights": {"kl": -1.0}},
            r"ValueError: weights\['kl'\]: expected a number of at least 0.0, got -1.0",
        ),
        (
            {"weights": {"kl": torch.ones(3)}},
            r"ValueError: weights\['kl'\]: expected shape .* = \[4\], got \[3\]",
        ),
        (
            {"weights": {"jsd": 1.0}, "beta": 1.0},
            "ValueError: beta: expected a number between 0 and 1 for the term 'jsd', got 1.0",
        ),
        (
            {"teacher_logits": torch.zeros(4, 29)},
            "ValueError: teacher_logits: expected the shape .* teacher_classes",
        ),
        (
            {"target": torch.tensor([0, 30, 0, 0])},
            r"IndexError: target: expected labels from 0 to 29 .* got 30 at \[1\]",
        ),
        (
            {"teacher_classes": torch.arange(30, 0, -1)},
            r"IndexError: teacher_classes: expected classes from 0 to 29, got 30 at \[0\]",
        ),
    ],
    ids=lambda value: value.partition(":")[2][:30] if isinstance(value, str) else "",
)
def test_errors(changes: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "1")
    x, t, target = sample(4, 30)
    call = {"logits": x, "teacher_logits": t, "target": target, "weights": {"hard": 1, "kl": 1}}
    with raises(error):
        partita.distillation_loss(**{**call, **changes})
