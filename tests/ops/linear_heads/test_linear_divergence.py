"""Divergences from hidden states of two heads, under every plan."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.rows import INTERPRETING, devices, gradients
from torch import Tensor

import partita
from partita.ops.linear_heads import divergence
from partita.ops.linear_heads import plan as plans
from partita.testing import poisoned_memory

pytestmark = pytest.mark.interpreted
BETAS = (0.0, 0.25, 1.0)
# The interpreter takes minutes, and the tests of values and gradients show it each beta.
FEW_BETAS = BETAS[1:2] if INTERPRETING else BETAS
TOKENS, CLASSES = 40, 333
# The budget of each plan, as a share of the logits of both heads.
PLANS = {"small": None, "fast": 1.0, "tokens": 0.85, "hybrid": 0.6, "lean": 0.2}

Heads = tuple[Tensor | None, ...]


def heads_of(
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    bias: bool = False,
    teacher_dtype: torch.dtype | None = None,
) -> list[Tensor | None]:
    """Return the heads of a student with 8 hidden numbers and a teacher with 16."""
    g = torch.Generator().manual_seed(CLASSES)
    found: list[Tensor | None] = []
    for hidden, of_head in ((8, dtype), (16, teacher_dtype or dtype)):
        sizes = ((TOKENS, hidden), (CLASSES, hidden), (CLASSES,))
        numbers = [torch.randn(*size, generator=g) / 2 for size in sizes]
        found += [number.to(of_head).to(device) for number in numbers]
        if not bias:
            found[-1] = None
    return found


def call(heads: Heads, plan: str = "small", **options: Any) -> Tensor:
    """Compute the divergence under a plan."""
    share = PLANS[plan]
    if share is not None:
        rows = heads[0].shape[:-1].numel()
        size = heads[0].element_size() + heads[3].element_size()
        size = 8 if "logits_dtype" in options else size
        fixed = plans.ROW_WORDS * 4 * rows
        width = -(-len(heads[1]) // 16) * 16
        budget = fixed + int(share * rows * width * size)
        if share < PLANS["tokens"]:  # the gradient of hidden states in fp32 is added up
            budget += 4 * heads[0].numel()
        elif heads[0].dtype == torch.float16:  # or has no upstream factor yet
            budget += 6 * heads[0].numel()
        options["memory_budget"] = budget
    names = ("input", "linear_weight", "linear_bias", "teacher_input", "teacher_weight")
    named = dict(zip((*names, "teacher_bias"), heads, strict=True))
    return partita.linear_divergence(**named, **options)


@pytest.fixture(autouse=True)
def small_chunks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the plans cut small batches; test the plans of large ones as they are."""
    if "one_pass" in request.fixturenames:
        yield
        return
    chunks = {"MIN_CHUNK_TOKENS": 25, "FORWARD_TOKENS": 7, "MIN_FORWARD_TOKENS": 3}
    with mock.patch.multiple(plans, **chunks, MIN_CHUNK_CLASSES=16):
        yield


def truth(heads: Heads, **options: Any) -> Tensor:
    """Compute the divergence in fp64 from logits that are rounded to the dtypes of the heads."""
    logits, teacher_logits = (F.linear(*head).double() for head in (heads[:3], heads[3:]))
    with partita.backend("reference"):
        return partita.divergence(logits, teacher_logits.detach(), **options)


def leaves_of(heads: Heads, dtype: torch.dtype | None = None) -> list[Tensor | None]:
    """Return the heads with leaves of the student's."""
    found = [None if t is None else t.detach().to(dtype or t.dtype) for t in heads]
    for leaf in found[:3]:
        if leaf is not None:
            leaf.requires_grad_()
    return found


@pytest.mark.parametrize("one_pass", [False, True])
def test_plans(one_pass: bool) -> None:
    """The workspace fits the budget, and the classes of hybrid chunks are saved in one pass."""
    sizes = (8192, 4096, 128_256, torch.bfloat16, torch.bfloat16)
    found = {
        budget: plans.divergence_plan(*sizes, budget, True, True, one_pass)
        for budget in (None, 2**29, int(1.6 * 2**30), 3 * 2**30, 5 * 2**30)
    }
    for budget, plan in found.items():
        assert plan.workspace_bytes <= (budget or plans.DIVERGENCE_BUDGET)
    assert found[None] == found[5 * 2**30]
    assert found[None].tokens == 8192 and (found[None].chunk == 0) == one_pass
    hybrid = found[int(1.6 * 2**30)]
    assert (hybrid.saved >= 40_000) == one_pass and 0 < hybrid.chunk <= 50_000
    assert found[3 * 2**30].tokens == 2048
    frozen = plans.divergence_plan(*sizes, 3 * 2**30, True, False, one_pass)
    assert frozen.tokens > found[3 * 2**30].tokens or not one_pass
    loss = plans.divergence_plan(*sizes, None, False, False, False)
    assert loss.tokens == 512 and loss.workspace_bytes <= plans.DIVERGENCE_LOSS_BUDGET
    with pytest.raises(ValueError, match="memory_budget: expected at least"):
        plans.divergence_plan(*sizes, 2**20, True, True, one_pass)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_small_batches_follow_the_plans(dtype: torch.dtype) -> None:
    """Fp16 computes gradients with the loss in chunks of tokens alone."""
    heads, is_fp16 = leaves_of(heads_of(dtype)), dtype == torch.float16
    found = {}
    for plan in PLANS:
        with mock.patch.object(divergence, "divergence_plan", wraps=plans.divergence_plan) as spy:
            call(heads, plan)
        found[plan] = plans.divergence_plan(*spy.call_args.args) if spy.called else None
    assert found["small"] is None
    assert found["fast"].tokens == TOKENS and (found["fast"].chunk == 0) != is_fp16
    assert 25 <= found["tokens"].tokens < TOKENS and found["tokens"].chunk == 0
    if is_fp16:
        assert found["hybrid"].saved == found["lean"].saved == 0 < found["lean"].chunk
        return
    assert found["hybrid"].tokens in (6, 7) and found["hybrid"].saved > CLASSES // 2
    assert 0 < found["lean"].saved < CLASSES // 4 and found["lean"].chunk < CLASSES // 4


@devices
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("beta", FEW_BETAS)
def test_gradients_of_fp16_in_chunks_of_tokens(beta: float, reduction: str, device: str) -> None:
    """They underflow in no mean over many rows and overflow for no teacher that is far away."""
    heads = heads_of(torch.float16, device, bias=True)
    times = 2 if INTERPRETING else 50
    heads[0], heads[3] = (heads[i].repeat(times, 1) for i in (0, 3))
    heads[5][::2] += 4  # the teacher's bias
    mask = torch.arange(times * TOKENS, device=device) % 3 != 0
    heads, options = leaves_of(heads), {"beta": beta, "reduction": reduction, "mask": mask}
    options["temperature"], wide = 0.1, {"logits_dtype": torch.float32}
    with poisoned_memory():
        loss = call(heads, "tokens", **options, **wide)
    assert type(loss.grad_fn).__name__ == "OnePassRowsBackward"
    scale = 2.0**10 if reduction == "mean" else 2.0**-6
    exact = leaves_of(heads, torch.float64)
    leaves, of_exact = heads[:3], exact[:3]
    right = torch.autograd.grad(truth(exact, **options) * scale, of_exact)
    for found, true in zip(torch.autograd.grad(loss * scale, leaves), right, strict=True):
        assert found.dtype == torch.float16
        bound = 16 * torch.finfo(torch.float16).eps * float(true.abs().max())
        torch.testing.assert_close(found.double(), true, rtol=0, atol=bound)
    nothing = call(heads, "tokens", **{**options, "mask": torch.zeros_like(mask)}, **wide)
    assert not any(grad.any() for grad in torch.autograd.grad(nothing, leaves))


@devices
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_values_and_gradients(
    reduction: str, dtype: torch.dtype, beta: float, plan: str, device: str
) -> None:
    has_options = dtype == torch.float32
    heads = leaves_of(heads_of(dtype, device, bias=has_options))
    options: dict[str, Any] = {"beta": beta, "reduction": reduction}
    if has_options:
        options |= {"temperature": 0.7, "softcap": 4.0}
        options["mask"] = torch.arange(TOKENS, device=device) % 7 != 0
    with poisoned_memory():
        loss = call(heads, plan, **options)
        found = gradients(loss, heads[:3])
    exact = leaves_of(heads, torch.float64)
    expected = truth(heads, **options)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # The products round differently: a logit moves by about an eps of its dtype.
    eps = torch.finfo(dtype).eps * (2 if INTERPRETING else 1)
    torch.testing.assert_close(loss.double(), expected, rtol=8 * eps, atol=8 * eps)
    trues = gradients(truth(exact, **options), exact[:3])
    for grad, true in zip(found, trues, strict=True):
        assert grad.dtype == dtype
        bound = 32 * eps * true.abs().amax().item()
        torch.testing.assert_close(grad.double(), true, rtol=0, atol=bound)


@devices
@pytest.mark.parametrize("plan", PLANS)
def test_rows_of_the_mask(plan: str, device: str) -> None:
    heads = leaves_of(heads_of(device=device))
    mask = torch.arange(TOKENS, device=device) % 3 == 0
    with torch.no_grad():
        heads[0][1] = torch.nan
    for beta in FEW_BETAS:
        loss = call(heads, plan, beta=beta, mask=mask)
        valid = [heads[0][mask], heads[1], None, heads[3][mask], *heads[4:]]
        torch.testing.assert_close(loss, call(valid, beta=beta), rtol=1e-5, atol=1e-6)
        (grad,) = torch.autograd.grad(loss, heads[0])
        assert not grad[~mask].any() and grad[mask].abs().amax(1).all()
        nothing = call(heads, plan, beta=beta, mask=torch.zeros_like(mask))
        assert nothing.isnan()


@devices
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_several_backward_passes_and_the_same_bits(reduction: str, plan: str, device: str) -> None:
    heads = leaves_of(heads_of(torch.bfloat16, device, bias=True))
    for beta in FEW_BETAS:
        loss, repeated = (call(heads, plan, beta=beta, reduction=reduction) for _ in range(2))
        assert torch.equal(loss, repeated)
        upstream = torch.rand(loss.shape, device=device)
        first, second, other = (
            torch.autograd.grad(each, heads[:3], upstream, retain_graph=True)
            for each in (loss, loss, repeated)
        )
        for a, b, c in zip(first, second, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=1e-3)
            assert torch.equal(a, c)


@devices
@pytest.mark.parametrize("plan", PLANS)
def test_masked_classes_and_teachers_of_other_dtypes(plan: str, device: str) -> None:
    """A bias of -inf takes a class from both heads."""
    for dtype, teacher_dtype in (
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
    ):
        heads = heads_of(dtype, device, bias=True, teacher_dtype=teacher_dtype)
        heads[2][30:40] = heads[5][30:40] = -torch.inf
        heads = leaves_of(heads)
        for beta in FEW_BETAS:
            loss = call(heads, plan, beta=beta)
            assert loss.dtype == torch.float32
            eps = max(torch.finfo(each).eps for each in (dtype, teacher_dtype))
            torch.testing.assert_close(
                loss.double(), truth(heads, beta=beta), rtol=8 * eps, atol=8 * eps
            )
            found = torch.autograd.grad(loss, heads[:3])
            assert not any(grad.isnan().any() for grad in found) and not found[2][30:40].any()


@devices
def test_shapes(device: str) -> None:
    heads = heads_of(device=device)
    for plan in PLANS:
        flat = call(heads, plan, reduction="none")
        padded = [heads[0].unflatten(0, (2, -1)), *heads[1:3], heads[3].unflatten(0, (2, -1))]
        found = call([*padded, *heads[4:]], plan, reduction="none")
        torch.testing.assert_close(found.flatten(), flat)
    one = [heads[0][0], *heads[1:3], heads[3][0], *heads[4:]]
    assert call(one).shape == () and call(one, reduction="none").shape == ()
    empty = leaves_of([heads[0][:0], *heads[1:3], heads[3][:0], *heads[4:]])
    for budget in (None, 2**20):
        loss = partita.linear_divergence(empty[0], empty[1], *empty[3:5], memory_budget=budget)
        assert loss.isnan()
        assert not torch.autograd.grad(loss, empty[1])[0].nan_to_num().any()


@devices
def test_only_some_gradients_are_wanted(device: str) -> None:
    heads = heads_of(device=device, bias=True)
    for plan in PLANS:
        everything = gradients(call(leaves := leaves_of(heads), plan), leaves[:3])
        for wanted in range(3):
            chosen = [t.detach() for t in heads]
            chosen[wanted].requires_grad_()
            (found,) = torch.autograd.grad(
                call(chosen, plan), chosen[wanted], torch.tensor(-1.0).to(device)
            )
            torch.testing.assert_close(found, everything[wanted], rtol=1e-4, atol=1e-6)


def test_the_teacher_gets_no_gradient() -> None:
    heads = leaves_of(heads_of())
    heads[4].requires_grad_()
    for plan in PLANS:
        loss = call(heads, plan)
        assert torch.autograd.grad(loss, heads[4], allow_unused=True) == (None,)


BAD = {
    "TypeError: teacher_weight: expected the dty": {"teacher_weight": lambda t: t.double()},
    r"ValueError: teacher_weight: expected shape": {"teacher_weight": lambda t: t[None]},
    r"ValueError: teacher_weight: expected the 5 classes of linear_weight, got 10; pass"
    r" teacher_weight\[:5\] to compare": {"teacher_weight": lambda t: torch.cat([t, t])},
    "ValueError: teacher_input: expected shape": {"teacher_input": lambda t: t[:1]},
    "ValueError: mask: expected shape input.shape": {"mask": lambda t: torch.ones(3)},
    "ValueError: beta: expected": {"beta": lambda t: 2.0},
    "ValueError: memory_budget: expected": {"memory_budget": lambda t: -1},
    "ValueError: teacher_bias: expected shape": {"teacher_bias": lambda t: torch.ones(3)},
    "ValueError: reduction: expected": {"reduction": lambda t: "batchmean"},
}


@pytest.mark.parametrize("error", BAD)
def test_bad_input(error: str) -> None:
    arguments: dict[str, Any] = {
        "input": torch.zeros(2, 3),
        "linear_weight": torch.zeros(5, 3),
        "teacher_input": torch.zeros(2, 4),
        "teacher_weight": torch.zeros(5, 4),
    }
    for argument, change in BAD[error].items():
        arguments[argument] = change(arguments.get(argument))
    with raises(error):
        partita.linear_divergence(**arguments)
