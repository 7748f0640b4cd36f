"""Logits that keep the accumulator of a half-precision product, and a matrix in fp32 beside it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import partita
from partita.ops.linear_heads.common import Head
from partita.testing import poisoned_memory
from partita.testing.samples import Draw, heads

TOKENS, CLASSES, HIDDEN = 3601, 299, 16
WIDE: dict[str, Any] = {"logits_dtype": torch.float32}
# Bytes for each way to compute the loss, in chunks of tokens, of classes, and all logits at once,
# without fp32 logits and with them.
BUDGETS = {
    "tokens": (2_100_000, 3_400_000),
    "classes": (1_550_000, 2_600_000),
    "all": (None, None),
}
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@halves
@pytest.mark.parametrize("weight_dtype", ["half", "fp32"])
@pytest.mark.parametrize("wide", [{}, WIDE], ids=["", "fp32 logits"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("plan", BUDGETS)
def test_losses_and_gradients(
    plan: str,
    reduction: str,
    wide: dict[str, Any],
    weight_dtype: str,
    dtype: torch.dtype,
) -> None:
    """Against fp64 on the rounded matrix, with a loss scale that fp16 needs and ignored NaN."""
    g = torch.Generator().manual_seed(0)
    target = torch.randint(CLASSES, (TOKENS,), generator=g)
    target[-1] = -100
    matrix, bias = (torch.randn(size, generator=g) for size in ((CLASSES, HIDDEN), (CLASSES,)))
    of_matrix = dtype if weight_dtype == "half" else torch.float32
    leaves = [torch.randn(TOKENS, HIDDEN, generator=g).to(dtype), (0.5 * matrix).to(of_matrix)]
    leaves.append(bias.to(of_matrix))
    leaves[0][-1] = torch.nan
    exact = [x.to(dtype).double().requires_grad_() for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    scale = 2.0**16 if reduction == "mean" and dtype == torch.float16 else 1.0
    options = {"label_smoothing": 0.1, "softcap": 6.0, "z_loss": 0.1} if reduction == "sum" else {}
    call = {"reduction": reduction, **options}
    with poisoned_memory():
        budget = BUDGETS[plan][len(wide)]
        hidden, matrix, bias = leaves
        loss = partita.linear_cross_entropy(
            hidden, matrix, target, linear_bias=bias, memory_budget=budget, **call, **wide
        )
        gradients = torch.autograd.grad(scale * loss.sum(), leaves)
    states = torch.where(target[:, None] == -100, 0, exact[0])
    right = partita.cross_entropy(F.linear(states, *exact[1:]), target, **call)
    eps = torch.finfo(dtype).eps
    bound = 2e-6 if wide else 4 * eps
    torch.testing.assert_close(loss.double(), right, rtol=bound, atol=bound)
    truths = torch.autograd.grad(scale * right.sum(), exact)
    for found, leaf, truth in zip(gradients, leaves, truths, strict=True):
        assert found.dtype == leaf.dtype
        largest = float(truth.abs().max())
        torch.testing.assert_close(found.double(), truth, rtol=0, atol=8 * eps * largest)
    if weight_dtype == "fp32":
        assert (gradients[1] != gradients[1].to(dtype)).float().mean() > 0.9


@halves
def test_plans(dtype: torch.dtype) -> None:
    """The budgets have their plans; the workspace is at most twice that of half logits."""
    plan, sizes = partita.linear_cross_entropy_plan, (TOKENS - 1, HIDDEN, CLASSES, dtype)
    for wide in ({}, WIDE):
        rooms = [room[len(wide)] for room in BUDGETS.values()]
        found = [plan(*sizes, memory_budget=room, **wide) for room in rooms]
        assert [each.name for each in found] == ["fast", "lean", "fast"]
        assert found[0].chunk < TOKENS - 1 == found[2].chunk
    for tokens in (2048, 8192, 32768):
        usual, wide = (plan(tokens, 4096, 128256, dtype, **each) for each in ({}, WIDE))
        assert wide[:2] == usual[:2] and wide.flops == usual.flops
        assert wide.workspace_bytes <= 2 * usual.workspace_bytes
    for tokens in (1024, 2048, 3072):  # but for the copy of a row
        usual = plan(tokens, 4096, 128256, dtype)
        in_blocks = plan(tokens, 4096, 128256, dtype, batch_invariant=True, **WIDE)
        assert in_blocks.workspace_bytes <= 2 * usual.workspace_bytes + 4 * 128256
    assert len({plan(8192, 4096, 9, torch.float32, **each) for each in ({}, WIDE)}) == 1
    weighted = partita.linear_cross_entropy(
        torch.ones(3000, 8, dtype=dtype, requires_grad=True),
        torch.ones(CLASSES, 8, dtype=dtype),
        torch.zeros(3000, dtype=torch.long),
        weight=torch.full((CLASSES,), 100.0),
        reduction="sum",
        memory_budget=1_900_000,
    )
    assert weighted.isfinite()


@pytest.mark.parametrize("tokens", [1, 2, 3, 6, 7, 1000, 1500, 3000, 8192])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("are_saved", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gradients_overwrite_no_logits_that_are_read_later(
    tokens: int, invariant: bool, are_saved: bool, device: str
) -> None:
    """Rows of gradients have half the size of those of logits, and begin where saved logits do."""
    input = torch.empty(tokens, 1, dtype=torch.bfloat16, device=device)
    head = Head(input, torch.empty(5, 1), None, invariant=invariant, widens=True)
    in_place = are_saved or head.is_read_in_place(tokens)
    parts = head.parts_to_read(tokens, in_place)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == tokens and all(part.start < part.stop for part in parts)
    rows = head.buffer(tokens, 5, for_gradient=not are_saved).numel() // 16
    assert rows <= head.buffer_rows(tokens)  # those of the logits alone
    if in_place:  # but for the first rows, which are copied; a row of a block is not alone on a CPU
        assert parts[0].stop == min(2 if device == "cpu" else 1, tokens)
        assert all(part.stop <= 2 * part.start for part in parts[1:])
        return
    assert head.rows(tokens) / 2 + max(head.rows(p.stop - p.start) for p in parts) <= rows


@pytest.mark.parametrize("call", heads.CALLS, ids=lambda call: call.name)
def test_every_function_rounds_an_fp32_matrix(call: Any) -> None:
    sample = call.sample(Draw(torch.bfloat16))
    wide = sample.inputs["linear_weight"].detach().float().requires_grad_()
    for ours, theirs in zip(sample.run(linear_weight=wide), sample.run(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    (gradient,) = torch.autograd.grad(sample.run(linear_weight=wide)[0].float().sum(), wide)
    assert gradient.dtype == torch.float32 and gradient.isfinite().all()


HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("input", "weight", "bias", "logits", "message"),
    [
        (SINGLE, SINGLE, SINGLE, HALF, "logits_dtype: expected None, or torch."),
        (DOUBLE, DOUBLE, DOUBLE, SINGLE, "logits_dtype: expected None, or torch."),
        (HALF, DOUBLE, DOUBLE, None, "linear_weight: expected the dtype of input, tor"),
        (SINGLE, HALF, HALF, None, "linear_weight: expected the dtype of input, tor"),
        (HALF, SINGLE, HALF, None, f"linear_bias: .* of linear_weight, {SINGLE}, got {HALF}"),
    ],
    ids=str,
)
def test_dtypes_that_make_no_sense(
    input: torch.dtype, weight: torch.dtype, bias: torch.dtype, logits: Any, message: str
) -> None:
    hidden, matrix = torch.zeros(4, 3, dtype=input), torch.zeros(4, 3, dtype=weight)
    offset = torch.zeros(4, dtype=bias)
    with pytest.raises(TypeError, match=f"^{message}"):
        partita.linear_token_stats(hidden, matrix, linear_bias=offset, logits_dtype=logits)
