"""The blocks of tokens in `partita.batch_invariant()`, whose bits tests/catalogue compares."""

import pytest
import torch
from torch import Tensor

import partita
from partita.ops.linear_heads import api, common, divergence, logprobs, loss, products
from partita.testing import poisoned_memory
from partita.testing.samples import Draw, heads


def loss_and_gradient(
    hidden: Tensor, matrix: Tensor, target: Tensor, budget: int | None = None
) -> tuple[Tensor, Tensor]:
    found = partita.linear_cross_entropy(
        hidden, matrix, target, reduction="none", memory_budget=budget
    )
    return found, torch.autograd.grad(found.sum(), hidden, retain_graph=True)[0]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    draw = Draw()
    return draw.scores(4000, 64), draw.matrix(300, 64), draw.labels(0, 300, 4000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("call", heads.CALLS, ids=lambda call: call.name)
def test_results_are_right(
    call: heads.Call, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a GPU too, which pads no tokens but the products of the last block."""
    for is_padded in (True, False):
        if not is_padded:
            for module in (api, common, divergence, logprobs, loss):
                monkeypatch.setattr(module, "in_blocks", lambda rows, *_: rows)
        for option in ("", *call.options):
            sample = call.sample(Draw(dtype), option)
            if "memory_budget" in sample.inputs:
                sample.inputs["memory_budget"] = 10 * 2**20
            with partita.batch_invariant(), poisoned_memory():
                errors = sample.errors()
            assert max(errors.values()) <= 1, f"{sample}: {errors}"


def test_more_tokens_than_a_block() -> None:
    """Tokens of different blocks, and of chunks that do not keep their logits, are alike."""
    hidden, matrix, target = inputs()
    with partita.batch_invariant():
        loss, gradient = loss_and_gradient(hidden, matrix, target)
        for some in (slice(0, 1), slice(1000, 1100), slice(3999, 4000), slice(700, 4000)):
            part = loss_and_gradient(hidden[some], matrix, target[some])
            assert torch.equal(part[0], loss[some]) and torch.equal(part[1], gradient[some])
        budget, sizes = 5_200_000, (4000, 64, 300, torch.float32)
        options = {"memory_budget": budget, "reduced": False, "batch_invariant": True}
        assert partita.linear_cross_entropy_plan(*sizes, **options)[:2] == ("lean", 300)
        again = loss_and_gradient(hidden, matrix, target, budget)
        assert torch.equal(again[0], loss) and torch.equal(again[1], gradient)
        alone = partita.linear_cross_entropy(hidden[:9], matrix, target[:9], reduction="none")
    # The backward pass has the mode of the forward pass.
    (of_alone,) = torch.autograd.grad(alone.sum(), hidden)
    assert torch.equal(of_alone[:9], gradient[:9])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_way_to_a_sum_depends_on_no_number_of_tokens(dtype: torch.dtype) -> None:
    """Fp16 would round its gradients in another way in chunks of tokens."""
    draw, found = Draw(dtype), []
    hidden, matrix, target = draw.scores(6000, 16), draw.matrix(299, 16), draw.labels(0, 299, 6000)
    for tokens in (100, 6000):  # of which the budget does not hold the logits
        some = hidden.detach()[:tokens].requires_grad_()
        with partita.batch_invariant():
            options = {"reduction": "sum", "memory_budget": 3_300_000}
            loss = partita.linear_cross_entropy(some, matrix, target[:tokens], **options)
        found.append(torch.autograd.grad(0.7 * loss, some)[0][:100])
    assert torch.equal(*found)


@pytest.mark.parametrize("rows", [1, 1024, 1025, 3000])
@pytest.mark.parametrize("adds", [False, True])
def test_blocks_of_a_product(rows: int, adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product has the rows of one block, unless more are known to give the same bits."""
    a, b = Draw(torch.float64).scores(rows, 16).detach(), Draw(torch.float64).matrix(8, 16).detach()
    seen, multiply = [], products.multiply

    def note(a: Tensor, *rest: object, **options: object) -> None:
        seen.append(len(a))
        multiply(a, *rest, **options)

    monkeypatch.setattr(products, "multiply", note)
    for is_proven in (False, True):
        monkeypatch.setattr(products, "_is_proven", lambda *_, known=is_proven: known)
        for room in (rows, rows + -rows % 1024):
            seen.clear()
            out = torch.ones(room, 8, dtype=torch.float64)
            products.multiply_blocks(a, b.T, out, True, adds=adds)
            torch.testing.assert_close(out[:rows], a @ b.T + adds)
            full = rows // 1024
            blocks = [1024 * full] * (full > 0) if is_proven else [1024] * full
            assert seen == blocks + [1024] * (rows % 1024 > 0)


def test_the_comparison_of_a_product_with_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds a product whose bits depend on its rows."""
    a, b, out = torch.zeros(2048, 16), torch.zeros(16, 8), torch.zeros(2048, 8)
    for by_rows in (True, False):

        def multiply(
            a: Tensor, b: Tensor, out: Tensor, *_: object, error: float = 1e-6 * by_rows
        ) -> None:
            out.add_((a[:, :, None] * b).sum(1) * (1 + error * (len(a) > 1024)))

        monkeypatch.setattr(products, "multiply", multiply)
        assert products.blocks_are_alike(a, b, out, None, True) is not by_rows


def test_block_decorator_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, matrix, target = inputs()
    few = hidden[:7], matrix, target[:7]
    outside, in_mode = loss_and_gradient(*few), partita.batch_invariant()(loss_and_gradient)(*few)
    monkeypatch.setenv("PARTITA_BATCH_INVARIANT", "1")
    assert all(map(torch.equal, loss_and_gradient(*few), in_mode))
    with partita.batch_invariant(False):
        assert all(map(torch.equal, loss_and_gradient(*few), outside))
    monkeypatch.setenv("PARTITA_BATCH_INVARIANT", "yes")
    message = "^PARTITA_BATCH_INVARIANT: expected 0, 1 or nothing, got 'yes'$"
    with pytest.raises(ValueError, match=message):
        loss_and_gradient(*few)
    with pytest.raises(TypeError, match=r"^enabled: expected a bool, got 1$"):
        partita.batch_invariant(1)
    with partita.batch_invariant(), pytest.raises(ValueError, match="inside batch_invariant"):
        loss_and_gradient(*few, budget=2**18)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("budget", [None, 2**27, 2**28, 2**31])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32], ids=str)
def test_the_classes_of_a_product_depend_on_no_number_of_tokens(
    dtype: torch.dtype, budget: int | None, logits_dtype: torch.dtype | None
) -> None:
    found = set()
    for tokens in (1, 7, 1024, 1025, 20_000):
        for grads in (0, 1, 2, 3, 4, 5, 6, 7):
            plan = partita.linear_cross_entropy_plan(
                *(tokens, 256, 32_000, dtype),
                memory_budget=budget,
                input_grad=grads & 1 > 0,
                weight_grad=grads & 2 > 0,
                reduced=grads & 4 > 0,
                batch_invariant=True,
                logits_dtype=logits_dtype,
            )
            assert budget is None or plan.workspace_bytes <= budget
            found.add(32_000 if plan.name == "fast" else plan.chunk)
    assert len(found) == 1
