"""Logits that keep the accumulator of a half-precision product, and a matrix in fp32 beside it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import partita
from partita.ops.linear_heads.common import Head
from partita.ops.linear_heads.plan import MemoryPlan
from partita.testing import poisoned_memory

TOKENS, CLASSES, HIDDEN = 2600, 299, 48
WIDE: dict[str, Any] = {"logits_dtype": torch.float32}
# A budget for each way to compute the loss: chunks of tokens, of classes, and all logits at once.
BUDGETS = {"chunks of tokens": 3_100_000, "lean": 2_100_000, "all at once": None}
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def tensors(weight_dtype: torch.dtype, dtype: torch.dtype, tokens: int = TOKENS) -> list[Tensor]:
    """Return hidden states, of which ignored ones are NaN, matrix, bias and labels."""
    g = torch.Generator().manual_seed(tokens)
    target = torch.randint(CLASSES, (tokens,), generator=g)
    target[::5] = -100
    hidden = torch.randn(tokens, HIDDEN, generator=g).to(dtype)
    hidden[::5] = torch.nan
    matrix, bias = (torch.randn(size, generator=g) for size in ((CLASSES, HIDDEN), (CLASSES,)))
    leaves = hidden, (0.5 * matrix).to(weight_dtype), bias.to(weight_dtype)
    return [*(leaf.requires_grad_() for leaf in leaves), target]


def truth(x: list[Tensor], reduction: str, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return loss and gradients in fp64 from tensors rounded as the products take them."""
    dtype = x[0].dtype
    leaves = [each.detach().to(dtype).double().requires_grad_() for each in x[:3]]
    states = torch.where(x[3][:, None] == -100, 0, leaves[0])
    logits = F.linear(states, *leaves[1:])
    loss = partita.cross_entropy(logits, x[3], reduction=reduction, **options)
    return loss, torch.autograd.grad(loss.sum(), leaves)


def compare(x: list[Tensor], loss: Tensor, reduction: str, bound: float, **options: Any) -> None:
    gradients = torch.autograd.grad(loss.sum(), x[:3])
    right, right_gradients = truth(x, reduction, **options)
    torch.testing.assert_close(loss.double(), right, rtol=bound, atol=bound)
    eps = torch.finfo(x[0].dtype).eps
    for found, leaf, expected in zip(gradients, x, right_gradients, strict=False):
        assert found.dtype == leaf.dtype
        scale = float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2 * eps * scale)


@halves
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("plan", BUDGETS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 6.0, "z_loss": 0.1}])
def test_logits_are_not_rounded(
    plan: str, reduction: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    x = tensors(dtype, dtype)
    with poisoned_memory():
        loss = partita.linear_cross_entropy(
            *x[:2],
            x[3],
            linear_bias=x[2],
            reduction=reduction,
            memory_budget=BUDGETS[plan],
            **WIDE,
            **options,
        )
        compare(x, loss, reduction, 2e-6, **options)


@halves
def test_the_budgets_choose_their_plans(dtype: torch.dtype) -> None:
    def plan(budget: int | None, reduced: bool) -> MemoryPlan:
        sizes = (TOKENS, HIDDEN, CLASSES, dtype)
        return partita.linear_cross_entropy_plan(
            *sizes, memory_budget=budget, reduced=reduced, **WIDE
        )

    assert plan(None, True)[:2] == ("fast", TOKENS)
    assert plan(BUDGETS["lean"], True).name == plan(BUDGETS["lean"], False).name == "lean"
    if dtype == torch.bfloat16:
        chunks = plan(BUDGETS["chunks of tokens"], True)
        assert chunks.name == "fast" and chunks.chunk < TOKENS


def test_the_workspace_is_at_most_twice_that_of_half_logits() -> None:
    plan, sizes = partita.linear_cross_entropy_plan, (4096, 128256, torch.bfloat16)
    for tokens in (2048, 8192, 32768):
        usual, wide = plan(tokens, *sizes), plan(tokens, *sizes, **WIDE)
        assert wide[:2] == usual[:2] and wide.flops == usual.flops
        assert wide.workspace_bytes <= 2 * usual.workspace_bytes
    assert plan(8192, 4096, 128256, torch.float32, **WIDE) == plan(
        8192, 4096, 128256, torch.float32
    )


@pytest.mark.parametrize("tokens", [1, 2, 3, 6, 7, 1000, 1500, 8192])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("are_saved", [False, True])
def test_gradients_overwrite_no_logits_that_are_read_later(
    tokens: int, invariant: bool, are_saved: bool
) -> None:
    """Rows of gradients have half the size of those of logits, and begin where saved logits do."""
    input = torch.empty(tokens, 1, dtype=torch.bfloat16)
    head = Head(input, torch.empty(5, 1), None, invariant, True)
    parts = head.parts_to_read(tokens, are_saved)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == tokens and all(part.start < part.stop for part in parts)
    if are_saved:  # but for the first row, which is copied
        assert parts[0].stop == 1 and all(part.stop <= 2 * part.start for part in parts[1:])
    else:
        rows = head.buffer(tokens, 5, for_gradient=True).numel() // 16
        assert head.rows(tokens) / 2 + max(head.rows(p.stop - p.start) for p in parts) <= rows
        assert len(parts) <= 2 and rows <= head.buffer_rows(tokens) + (512 if invariant else 0)


@halves
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("plan", BUDGETS)
@pytest.mark.parametrize("options", [{}, WIDE], ids=str)
def test_a_matrix_in_fp32(
    plan: str, reduction: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    x, budget = tensors(torch.float32, dtype), BUDGETS[plan]
    with poisoned_memory():
        loss = partita.linear_cross_entropy(
            *x[:2], x[3], linear_bias=x[2], reduction=reduction, memory_budget=budget, **options
        )
        bound = 2e-6 if options else 4 * torch.finfo(dtype).eps
        if not options:  # the gradients follow the rounding of the logits
            gradients = torch.autograd.grad(loss.sum(), x[:3])
            right, expected = truth(x, reduction)
            torch.testing.assert_close(loss.double(), right, rtol=bound, atol=bound)
            for found, leaf, each in zip(gradients, x, expected, strict=False):
                assert found.dtype == leaf.dtype
                scale = float(each.abs().max())
                torch.testing.assert_close(found.double(), each, rtol=0, atol=4 * bound * scale)
        else:
            compare(x, loss, reduction, bound)
            gradients = torch.autograd.grad(
                partita.linear_cross_entropy(*x[:2], x[3], reduction=reduction, **WIDE).sum(), x[1]
            )
    weight_gradient = gradients[-2] if not options else gradients[0]
    assert (weight_gradient != weight_gradient.to(dtype)).float().mean() > 0.9


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_function_takes_both(weight_dtype: torch.dtype) -> None:
    hidden, matrix, _, target = tensors(weight_dtype, torch.bfloat16, 21)
    rows = target != -100
    hidden, target = hidden[rows].detach().requires_grad_(), target[rows]
    teacher = torch.randn_like(hidden), torch.randn(CLASSES, HIDDEN).to(weight_dtype)
    ids = torch.arange(3 * len(hidden)).reshape(-1, 3)
    exact = F.linear(hidden.double(), matrix.bfloat16().double())
    right = F.linear(teacher[0].double(), teacher[1].bfloat16().double())
    best = partita.topk_logprobs(right.float(), 4)
    pairs = (
        (lambda *x, **o: partita.linear_token_stats(*x, target, **o).entropy,
         lambda logits: partita.token_stats(logits, target).entropy),
        (lambda *x, **o: partita.linear_logprobs(*x, ids, **o),
         lambda logits: partita.logprobs(logits, ids)),
        (lambda *x, **o: partita.linear_topk_logprobs(*x, 4, **o).logprobs,
         lambda logits: partita.topk_logprobs(logits, 4).logprobs),
        (lambda *x, **o: partita.linear_divergence(*x, *teacher, **o),
         lambda logits: partita.divergence(logits, right)),
        (lambda *x, **o: partita.linear_topk_divergence(*x, best, **o),
         lambda logits: partita.topk_divergence(logits, best)),
        (lambda *x, **o: partita.linear_cross_entropy(*x, right.softmax(1), **o),
         lambda logits: partita.cross_entropy(logits, right.softmax(1))),
    )  # fmt: skip
    for ours, theirs in pairs:
        found, expected = ours(hidden, matrix, **WIDE), theirs(exact)
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)
        gradients = torch.autograd.grad(found.sum(), (hidden, matrix))
        true_gradients = torch.autograd.grad(expected.sum(), (hidden, matrix), retain_graph=True)
        for gradient, leaf, each in zip(gradients, (hidden, matrix), true_gradients, strict=True):
            assert gradient.dtype == leaf.dtype
            bound = 0.02 * float(each.abs().max())
            torch.testing.assert_close(gradient.double(), each.double(), rtol=0, atol=bound)


def test_transforms_second_derivatives_and_autocast() -> None:
    hidden, matrix, _, target = tensors(torch.bfloat16, torch.bfloat16, 21)
    rows = target != -100
    hidden, target = hidden[rows].detach().requires_grad_(), target[rows]

    def loss(x: Tensor, labels: Tensor = target) -> Tensor:
        return partita.linear_cross_entropy(x, matrix, labels, reduction="sum", **WIDE)

    expected = torch.autograd.grad(loss(hidden), hidden)[0].float()
    bound = 0.01 * float(expected.abs().max())
    found = torch.func.grad(loss)(hidden.detach()).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
    each = torch.vmap(lambda x, label: loss(x[None], label[None]))(hidden, target)
    torch.testing.assert_close(each.sum(), loss(hidden), rtol=1e-6, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        under = torch.vmap(lambda x, label: loss(x[None], label[None]))(hidden.float(), target)
    torch.testing.assert_close(under, each, rtol=1e-6, atol=1e-5)
    (gradient,) = torch.autograd.grad(loss(hidden), hidden, create_graph=True)
    (second,) = torch.autograd.grad(gradient.float().square().sum(), hidden)
    exact = hidden.detach().double().requires_grad_()
    of_exact = F.cross_entropy(exact @ matrix.detach().double().T, target, reduction="sum")
    (right,) = torch.autograd.grad(of_exact, exact, create_graph=True)
    (right,) = torch.autograd.grad(right.square().sum(), exact)
    torch.testing.assert_close(second.double(), right, rtol=0, atol=0.02 * float(right.abs().max()))


@pytest.mark.parametrize(
    ("input_dtype", "weight_dtype", "logits_dtype", "message"),
    [
        (torch.float32, torch.float32, torch.bfloat16, "logits_dtype: expected None, or torch.flo"),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, "logits_dtype: expected None, or torch.f"),
        (torch.float64, torch.float64, torch.float32, "logits_dtype: expected None, or torch.floa"),
        (torch.bfloat16, torch.float64, None, "linear_weight: expected the dtype of input, torch"),
        (torch.float32, torch.bfloat16, None, "linear_weight: expected the dtype of input, torch"),
    ],
)
def test_dtypes_that_make_no_sense(
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    logits_dtype: torch.dtype | None,
    message: str,
) -> None:
    hidden, matrix = torch.zeros(2, 3, dtype=input_dtype), torch.zeros(4, 3, dtype=weight_dtype)
    with pytest.raises(TypeError, match=f"^{message}"):
        partita.linear_token_stats(hidden, matrix, logits_dtype=logits_dtype)


def test_a_bias_has_the_dtype_of_the_matrix() -> None:
    hidden, bias = torch.zeros(2, 3).bfloat16(), torch.zeros(4).bfloat16()
    message = "^linear_bias: expected the dtype of linear_weight, torch.float32, got torch.bfloat16"
    with pytest.raises(TypeError, match=message):
        partita.linear_token_stats(hidden, torch.zeros(4, 3), linear_bias=bias)
