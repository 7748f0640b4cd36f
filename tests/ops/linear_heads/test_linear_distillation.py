"""Distillation losses from hidden states of two heads, under every plan."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.distillation import WEIGHTS
from helpers.rows import INTERPRETING, devices
from torch import Tensor

import partita
from partita.ops.linear_heads import plan as plans
from partita.testing import poisoned_memory

pytestmark = pytest.mark.interpreted
TOKENS, CLASSES, TEACHER_CLASSES = 40, 333, 500
# The budget of each plan, as a share of the logits of both heads.
PLANS = {"small": None, "fast": 1.0, "tokens": 0.85, "hybrid": 0.6, "lean": 0.25}
FEW_PLANS = ("fast", "hybrid") if INTERPRETING else PLANS


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    """Let the plans cut small batches."""
    with mock.patch.multiple(
        plans, MIN_CHUNK_TOKENS=16, MIN_CHUNK_CLASSES=32, FORWARD_TOKENS=8, MIN_FORWARD_TOKENS=4
    ):
        yield


def heads_of(
    dtype: torch.dtype = torch.float64, device: str = "cpu", teacher_classes: int = CLASSES
) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    sizes = {
        "input": (TOKENS, 8),
        "linear_weight": (CLASSES, 8),
        "linear_bias": (CLASSES,),
        "teacher_input": (TOKENS, 16),
        "teacher_weight": (teacher_classes, 16),
        "teacher_bias": (teacher_classes,),
    }
    found = {
        name: (torch.randn(*size, generator=g) / 2).to(dtype).to(device)
        for name, size in sizes.items()
    }
    for name in ("input", "linear_weight", "linear_bias"):
        found[name].requires_grad_()
    target = torch.randint(0, CLASSES, (TOKENS,), generator=g)
    target[::3] = -100
    return {**found, "target": target.to(device)}


def budget(plan: str, heads: dict[str, Tensor]) -> int | None:
    share = PLANS[plan]
    if share is None:
        return None
    size = heads["input"].element_size() + heads["teacher_input"].element_size()
    fixed = plans.ROW_WORDS * 4 * TOKENS + (8 * heads["input"].numel() if share < 0.7 else 0)
    return fixed + int(share * TOKENS * -(-CLASSES // 16) * 16 * size)


def results(found: partita.Distillation, heads: dict[str, Tensor]) -> list[Tensor]:
    leaves = [each for each in heads.values() if each.requires_grad]
    total = found.loss.sum()
    return [*(each for each in found if each is not None), *torch.autograd.grad(total, leaves)]


def from_logits(heads: dict[str, Tensor], **options: Any) -> partita.Distillation:
    logits = torch.nn.functional.linear(
        heads["input"], heads["linear_weight"], heads["linear_bias"]
    )
    teacher = torch.nn.functional.linear(
        heads["teacher_input"], heads["teacher_weight"], heads["teacher_bias"]
    )
    return partita.distillation_loss(logits, teacher, heads["target"], **options)


@devices
@pytest.mark.parametrize("plan", FEW_PLANS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("mapped", [False, True])
def test_every_plan_gives_the_loss_of_logits(
    plan: str, reduction: str, mapped: bool, device: str
) -> None:
    heads = heads_of(device=device, teacher_classes=TEACHER_CLASSES if mapped else CLASSES)
    weight = torch.linspace(0, 1, TOKENS, device=device)
    options: dict[str, Any] = {
        "weights": {**WEIGHTS, "kl": weight},
        "temperature": 1.5,
        "softcap": 6.0,
        "reduction": reduction,
    }
    if mapped:
        g = torch.Generator().manual_seed(1)
        order = torch.randperm(TEACHER_CLASSES, generator=g)
        options["teacher_classes"] = order[:CLASSES].to(device)
    expected = results(from_logits(heads, **options), heads)
    with poisoned_memory():
        found = partita.linear_distillation_loss(
            **heads, **options, memory_budget=budget(plan, heads)
        )
        ours = results(found, heads)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@devices
@pytest.mark.parametrize("plan", ["fast", "lean"])
def test_a_second_backward_pass_and_second_derivatives(plan: str, device: str) -> None:
    heads = heads_of(device=device)
    call = {**heads, "weights": WEIGHTS, "memory_budget": budget(plan, heads)}
    loss = partita.linear_distillation_loss(**call).loss
    first = torch.autograd.grad(loss, heads["input"], retain_graph=True)[0].clone()
    assert torch.equal(first, torch.autograd.grad(loss, heads["input"], retain_graph=True)[0])
    found, expected = [], []
    for losses, each in ((found, loss), (expected, from_logits(heads, weights=WEIGHTS).loss)):
        (grad,) = torch.autograd.grad(each, heads["input"], create_graph=True)
        losses += torch.autograd.grad(grad.square().sum(), [heads["input"], heads["linear_bias"]])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


@devices
@pytest.mark.parametrize("plan", FEW_PLANS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_factors_of_low_rank_are_those_of_a_merged_matrix(
    plan: str, reduction: str, frozen: bool, device: str
) -> None:
    heads = heads_of(device=device)
    g = torch.Generator().manual_seed(5)
    A, B = (torch.randn(*size, generator=g).to(heads["input"]) for size in ((3, 8), (CLASSES, 3)))
    lora = partita.LoRA(A.requires_grad_(), B.requires_grad_(), 0.5)
    options: dict[str, Any] = {"weights": WEIGHTS, "temperature": 1.5, "reduction": reduction}
    if frozen:
        heads["linear_weight"].requires_grad_(False)
    size = budget(plan, heads)
    if size is not None:
        size += plans.low_rank_bytes(3, TOKENS, CLASSES, A.dtype)

    def beside() -> partita.Distillation:
        call = {**heads, **options, "low_rank": lora, "memory_budget": size}
        return partita.linear_distillation_loss(**call)

    def merged() -> partita.Distillation:
        matrix = heads["linear_weight"] + 0.5 * B @ A
        return from_logits({**heads, "linear_weight": matrix}, **options)

    first, second = [], []
    for function in (beside, merged):
        with poisoned_memory():
            first.append(results(function(), {**heads, "A": A, "B": B}))
        loss = function().loss.sum()
        (grad,) = torch.autograd.grad(loss, heads["input"], create_graph=True)
        second.append(torch.autograd.grad(grad.square().sum(), [A, B]))
    torch.testing.assert_close(*first, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(*second, rtol=1e-8, atol=1e-12)


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype, device: str) -> None:
    if INTERPRETING and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes products in bf16 wrongly")
    heads = heads_of(dtype, device)
    call = {**heads, "weights": WEIGHTS, "memory_budget": budget("fast", heads)}
    found = results(partita.linear_distillation_loss(**call), heads)
    exact = {
        name: x.detach().double().requires_grad_(x.requires_grad) if name != "target" else x
        for name, x in heads.items()
    }
    expected = results(from_logits(exact, weights=WEIGHTS), exact)
    for ours, true in zip(found, expected, strict=True):
        if ours.is_floating_point():
            scale = float(true.abs().max())
            bound = 8 * torch.finfo(dtype).eps * max(scale, 1e-3)
            torch.testing.assert_close(ours.double(), true, rtol=0, atol=bound)


def test_vocabularies_of_different_sizes_need_a_map() -> None:
    heads = heads_of(teacher_classes=TEACHER_CLASSES)
    with pytest.raises(ValueError, match="teacher_weight: expected the 333 classes"):
        partita.linear_distillation_loss(**heads, weights=WEIGHTS)
