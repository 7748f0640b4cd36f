"""Divergences from a teacher's most probable classes, from logits and from hidden states."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.linear import PLANS, Batch, batch_of, budgets, leaves_of
from helpers.rows import INTERPRETING, devices
from torch import Tensor

import partita
from partita.testing import sample_rows

pytestmark = pytest.mark.interpreted
BETAS = (0.0, 0.25, 1.0)


def teacher_of(rows: int, classes: int, k: int, device: str = "cpu") -> partita.TopK:
    logits = sample_rows(rows, classes, device=device).flip(-1)
    return partita.topk_logprobs(logits, k)


def truth(x: Tensor, teacher: partita.TopK, beta: float, **options: float | None) -> Tensor:
    """Compute the divergence over k + 1 classes in fp64, the rest from its own sum."""
    x = x.double()
    if softcap := options.get("softcap"):
        x = softcap * (x / softcap).tanh()
    logp = (x / options.get("temperature", 1.0)).log_softmax(-1)
    found, q = logp.gather(-1, teacher.indices), teacher.logprobs.double().exp()
    if teacher.indices.shape[-1] < x.shape[-1]:
        is_known = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, teacher.indices, True)
        rest = torch.where(is_known, -torch.inf, logp).logsumexp(-1, keepdim=True)
        found, q = torch.cat([found, rest], -1), torch.cat([q, 1 - q.sum(-1, keepdim=True)], -1)
    with partita.backend("reference"):
        return partita.divergence(found, q.log(), beta=beta, reduction="none")


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("classes", "k"), [(37, 5), (300, 20), (6, 6)])
def test_values_and_gradients(
    classes: int, k: int, beta: float, dtype: torch.dtype, device: str
) -> None:
    x = sample_rows(5, classes, device=device).to(dtype).requires_grad_()
    teacher = teacher_of(5, classes, k, device)
    options = {"temperature": 0.8, "softcap": 6.0}
    loss = partita.topk_divergence(x, teacher, beta=beta, reduction="none", **options)
    exact = x.detach().double().requires_grad_()
    expected = truth(exact, teacher, beta, **options)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.double(), expected, rtol=2e-5, atol=2e-5)
    upstream = torch.linspace(-1, 2, 5, device=device)
    (grad,) = torch.autograd.grad(loss, x, upstream.to(loss.dtype))
    (true,) = torch.autograd.grad(expected, exact, upstream.double())
    bound = torch.finfo(dtype).eps * (2 if INTERPRETING else 1) + 2e-5
    torch.testing.assert_close(grad.double(), true, rtol=bound, atol=2e-5)


@devices
def test_all_classes_are_the_divergence(device: str) -> None:
    x, t = sample_rows(4, 30, device=device), sample_rows(4, 30, device=device).flip(-1)
    teacher = partita.topk_logprobs(t, 30, temperature=0.7)
    for beta in BETAS:
        found = partita.topk_divergence(x, teacher, beta=beta, temperature=0.7)
        expected = partita.divergence(x, t, beta=beta, temperature=0.7)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        fewer = partita.topk_logprobs(t, 4, temperature=0.7)
        assert partita.topk_divergence(x, fewer, beta=beta, temperature=0.7) < expected


@devices
def test_mask_and_reductions(device: str) -> None:
    x, teacher = sample_rows(6, 40, device=device), teacher_of(6, 40, 5, device)
    mask = torch.tensor([1, 0, 1, 1, 0, 0], device=device)
    expected = truth(x, teacher, 0.5) * mask
    x[1], x[4] = torch.nan, -torch.inf
    x.requires_grad_()
    for reduction, right, given in (
        ("none", expected, mask),
        ("sum", expected.sum(), mask.bool()),
        ("mean", expected.sum() / 3, mask.float()),
    ):
        loss = partita.topk_divergence(x, teacher, beta=0.5, mask=given, reduction=reduction)
        torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=1e-6)
    (grad,) = torch.autograd.grad(loss, x)
    assert not grad[mask == 0].any() and grad[mask != 0].any(-1).all()


@devices
def test_a_rest_below_the_resolution(device: str) -> None:
    """A student that gives nearly everything to the teacher's classes has a finite loss."""
    x = torch.zeros(1, 50, device=device)
    x[:, :3] = 40.0
    teacher = partita.TopK(
        torch.tensor([[0.3, 0.3, 0.3]], device=device).log(),
        torch.tensor([[0, 1, 2]], device=device),
        torch.zeros(1, device=device),
    )
    for beta in BETAS:
        leaf = x.clone().requires_grad_()
        loss = partita.topk_divergence(leaf, teacher, beta=beta)
        (grad,) = torch.autograd.grad(loss, leaf)
        assert loss.isfinite() and grad.isfinite().all()


@devices
@pytest.mark.parametrize("plan", ["logits", *PLANS])
@pytest.mark.parametrize("confidence", [5.0, 20.0, 60.0])
def test_a_student_surer_than_the_rounding_of_a_sum(
    confidence: float, plan: str, device: str
) -> None:
    """Its rest is the log-sum-exp of the other classes, in fp32 as in fp64."""
    x = torch.tensor([[confidence, 0.0, 1.0], [0.0, -1.0, 2.0]], device=device)
    teacher = partita.topk_logprobs(torch.tensor([[3.0, -2.0, 0.0]] * 2, device=device), 1)
    for beta in BETAS:
        exact = x.double().requires_grad_()
        expected = truth(exact, teacher, beta).sum()
        (true,) = torch.autograd.grad(expected, exact)
        leaf = x.clone().requires_grad_()
        if plan == "logits":
            loss = partita.topk_divergence(leaf, teacher, beta=beta, reduction="sum")
        else:
            eye = torch.eye(3, device=device)
            batch = Batch(x, eye, None, teacher.indices[:, 0], None)
            options = {"beta": beta, "reduction": "sum", "memory_budget": budgets(batch)[plan]}
            loss = partita.linear_topk_divergence(leaf, eye, teacher, **options)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
        (grad,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(grad.double(), true, rtol=1e-5, atol=1e-7)


@devices
@pytest.mark.parametrize("beta", BETAS)
def test_nothing_but_the_classes_of_the_teacher(beta: float, device: str) -> None:
    """Where neither has other classes, rounding gives the teacher none."""
    x = torch.full((1, 6), -torch.inf, device=device)
    x[:, :3] = torch.tensor([0.3, -0.7, 0.1])
    t = x.clone()
    t[:, :3] *= -2.0
    leaf = x.requires_grad_()
    loss = partita.topk_divergence(leaf, partita.topk_logprobs(t, 3), beta=beta)
    exact = leaf.detach()[:, :3].double().requires_grad_()
    expected = truth(exact, partita.topk_logprobs(t[:, :3], 3), beta)
    torch.testing.assert_close(loss.double(), expected.sum(), rtol=1e-5, atol=1e-6)
    (grad,), (true,) = (
        torch.autograd.grad(each.sum(), z) for each, z in ((loss, leaf), (expected, exact))
    )
    assert not grad[:, 3:].any()
    torch.testing.assert_close(grad[:, :3].double(), true, rtol=1e-5, atol=1e-6)


@devices
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_hidden_states(dtype: torch.dtype, plan: str, device: str) -> None:
    x = batch_of(bias=True, dtype=dtype, device=device)
    teacher, budget = teacher_of(len(x.input), len(x.weight), 7, device), budgets(x)[plan]
    mask = torch.arange(len(x.input), device=device) % 4 != 1
    for beta in BETAS:
        leaves, exact = leaves_of(x)[:3], leaves_of(x, torch.float64)[:3]
        options: dict[str, Any] = {"beta": beta, "mask": mask, "memory_budget": budget}
        head = (*leaves[:2], teacher)
        loss = partita.linear_topk_divergence(*head, linear_bias=leaves[2], **options)
        expected = truth(F.linear(*exact), teacher, beta)[mask].mean()
        eps = torch.finfo(dtype).eps * (2 if INTERPRETING else 1)
        torch.testing.assert_close(loss.double(), expected, rtol=8 * eps, atol=8 * eps)
        found = torch.autograd.grad(loss, leaves)
        for grad, true in zip(found, torch.autograd.grad(expected, exact), strict=True):
            bound = 32 * eps * true.abs().amax().item()
            torch.testing.assert_close(grad.double(), true, rtol=0, atol=bound)


def test_bad_input() -> None:
    x, teacher = torch.zeros(2, 6), teacher_of(2, 6, 3)
    for error, changed in {
        r"TypeError: teacher: expected a TopK.*got tuple; partita.TopK\(": {
            "teacher": tuple(teacher)
        },
        "ValueError: teacher.indices: expected shape": {"teacher": teacher_of(3, 6, 3)},
        "ValueError: teacher.logprobs: expected shape": {"teacher": teacher._replace(logprobs=x)},
        "ValueError: beta: expected": {"beta": 2.0},
        "ValueError: mask: expected shape": {"mask": torch.ones(3)},
        "ValueError: reduction: expected": {"reduction": "batchmean"},
    }.items():
        arguments: dict[str, Any] = {"teacher": teacher, **changed}
        with raises(error):
            partita.topk_divergence(x, **arguments)
        with raises(error):
            partita.linear_topk_divergence(torch.zeros(2, 3), torch.zeros(6, 3), **arguments)
    with pytest.raises(TypeError, match="got a TopK, which topk_divergence takes"):
        partita.divergence(x, teacher)
    checked = mock.patch.dict(os.environ, {"PARTITA_CHECK": "1"})
    with checked, pytest.raises(IndexError, match=r"teacher.indices: expected classes from 0 to 5"):
        partita.topk_divergence(x, teacher._replace(indices=teacher.indices + 5))
