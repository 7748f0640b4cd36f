"""`partita.batch_invariant()`: the bits of a token of a linear head depend on that token alone."""

from dataclasses import replace

import pytest
import torch
from helpers.invariance import BATCHES, differences
from helpers.rows import INTERPRETING
from torch import Tensor

import partita
from partita.ops.linear_heads import api, common, divergence, logprobs, loss, products
from partita.testing import poisoned_memory
from partita.testing.samples import CALLS, Draw, Sample, heads

KERNELS = "triton" if INTERPRETING else "auto"
NAMES = [call.name for call in heads.CALLS]
OPTIONS = ("", "bias, all options", "all options", "sum, lean", "beta 0.5, all options")
places = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def samples(name: str, draw: Draw) -> list[Sample]:
    """Return calls with all classes in each product, and one with chunks of classes."""
    call = CALLS[name]
    found = [call.sample(draw, option) for option in OPTIONS if option in ("", *call.options)]
    for sample in found:
        if "memory_budget" in sample.inputs:
            sample.inputs["memory_budget"] = 5 * 2**20
    if name == "linear_cross_entropy":
        found.append(call.sample(draw, "probabilities"))
    if "divergence" not in name or "topk" in name:
        inputs = {**found[0].inputs, "memory_budget": 2**21 * draw.dtype.itemsize // 8}
        found.append(replace(found[0], name="chunks of classes", inputs=inputs))
    return found


@places
@pytest.mark.parametrize("name", NAMES)
def test_tokens_have_bits_of_their_own(name: str, device: str) -> None:
    """They are the same alone as in each batch and in each place, gradients included."""
    batches, layouts = (1, 2, 7, 33), ("",)
    if device == "cuda":
        batches, layouts = BATCHES, ("", "odd start")
    with partita.batch_invariant():
        wrong = [
            f"{sample}: {found}"
            for sample in samples(name, Draw(device=device))
            for found in differences(sample, batches, layouts)
        ]
    assert not wrong


@places
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_results_are_right(name: str, dtype: torch.dtype, device: str) -> None:
    with partita.batch_invariant():
        for sample in samples(name, Draw(dtype, device=device)):
            errors = sample.errors()
            assert max(errors.values()) <= 1, f"{sample}: {errors}"


@pytest.mark.interpreted
def test_kernels_of_a_block() -> None:
    """The kernels between the products of one block give a token the same bits in each place."""
    call = CALLS["linear_cross_entropy"]
    with partita.backend(KERNELS), partita.batch_invariant():
        assert not list(differences(call.sample(Draw(), sizes={"rows": 2}), (1, 3), ("",)))


def loss_and_gradient(hidden: Tensor, matrix: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss = partita.linear_cross_entropy(hidden, matrix, target, reduction="none")
    return loss, torch.autograd.grad(loss.sum(), hidden, retain_graph=True)[0]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    draw = Draw(dtype)
    hidden = draw.scores(1500, 64)
    return hidden, draw.matrix(300, 64), draw.labels(0, 300, 1500)


def test_more_tokens_than_a_block() -> None:
    """Tokens of different blocks, and of chunks that do not keep their logits, are alike."""
    hidden, matrix, target = inputs()
    with partita.batch_invariant():
        loss, gradient = loss_and_gradient(hidden, matrix, target)
        for some in (slice(0, 1), slice(1000, 1100), slice(1499, 1500), slice(700, 1500)):
            part = loss_and_gradient(hidden[some], matrix, target[some])
            assert torch.equal(part[0], loss[some])
            assert torch.equal(part[1], gradient[some])
        # It holds the logits of one block twice, but not those of both blocks and their rows.
        budget = 2 * 1024 * 304 * 4
        assert partita.linear_cross_entropy_plan(
            1500, 64, 300, torch.float32, memory_budget=budget, reduced=False, batch_invariant=True
        )[:2] == ("lean", 300)
        again = partita.linear_cross_entropy(
            hidden, matrix, target, reduction="none", memory_budget=budget
        )
        assert torch.equal(again, loss)
        assert torch.equal(torch.autograd.grad(again.sum(), hidden)[0], gradient)


@pytest.mark.parametrize("name", NAMES)
def test_products_of_tokens_that_fill_no_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU pads no tokens, only the products of the last block, in memory that may hold NaN."""
    for module in (api, common, divergence, logprobs, loss):
        monkeypatch.setattr(module, "in_blocks", lambda rows, *_: rows)
    call = CALLS[name]
    options = [option for option in call.options if "probabilities" not in option]
    with partita.batch_invariant(), poisoned_memory():
        for dtype in (torch.float32, torch.bfloat16):
            for option in ("", *options):
                sample = call.sample(Draw(dtype), option)
                if "memory_budget" in sample.inputs:
                    sample.inputs["memory_budget"] = 5 * 2**20
                errors = sample.errors()
                assert max(errors.values()) <= 1, f"{sample}: {errors}"


@pytest.mark.parametrize("rows", [1, 1023, 1024, 1025, 3000])
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
    """It is made on random numbers, and finds a product whose bits depend on its rows."""
    a, b, out = torch.zeros(2048, 16), torch.zeros(16, 8), torch.zeros(2048, 8)

    def alike(adds: bool) -> bool:
        return products.blocks_are_alike(a, b, out, None, adds)

    def by_rows(a: Tensor, b: Tensor, out: Tensor, *_: object) -> None:
        out.copy_((a.double() @ b.double()) * (1 + 1e-6 * (len(a) > 1024)))

    def by_row(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, adds: bool) -> None:
        out.copy_((a[:, :, None] * b).sum(1) + (out if adds else 0))

    state = torch.get_rng_state()
    monkeypatch.setattr(products, "multiply", by_rows)
    assert not alike(False)
    monkeypatch.setattr(products, "multiply", by_row)
    assert alike(False) and alike(True)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_gradient_of_the_matrix_takes_whole_chunks() -> None:
    """Without room for all logits, chunks of tokens have the memory of the rounded gradient."""
    for hidden, budget, tokens in ((512, 2_900_000, 1024), (4096, 6_500_000, 4096)):
        states, matrix = (
            torch.zeros(rows, hidden, dtype=torch.bfloat16, requires_grad=True)
            for rows in (9000, 320)
        )
        head = common.Head(states, matrix, None, 1024)
        lean, fast = (head.plan(room, False) for room in (budget, None))
        assert lean[:2] == ("lean", 320) and head.with_blocks_of(lean).block == tokens
        assert fast.name == "fast" and head.with_blocks_of(fast).block == 9216


def test_the_backward_pass_has_the_mode_of_the_forward_pass() -> None:
    hidden, matrix, target = inputs()
    some = slice(300, 333)
    with partita.batch_invariant():
        _, gradient = loss_and_gradient(hidden, matrix, target)
        loss = partita.linear_cross_entropy(hidden[some], matrix, target[some], reduction="none")
    assert torch.equal(torch.autograd.grad(loss.sum(), hidden)[0][some], gradient[some])


def test_block_decorator_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, matrix, target = (x[:7] if i != 1 else x for i, x in enumerate(inputs()))
    in_mode = partita.batch_invariant()(loss_and_gradient)(hidden, matrix, target)
    outside = loss_and_gradient(hidden, matrix, target)
    monkeypatch.setenv("PARTITA_BATCH_INVARIANT", "1")
    by_variable = loss_and_gradient(hidden, matrix, target)
    with partita.batch_invariant(False):
        disabled = loss_and_gradient(hidden, matrix, target)
    assert all(map(torch.equal, by_variable, in_mode))
    assert all(map(torch.equal, disabled, outside))
    monkeypatch.setenv("PARTITA_BATCH_INVARIANT", "yes")
    message = "^PARTITA_BATCH_INVARIANT: expected 0, 1 or nothing, got 'yes'$"
    with pytest.raises(ValueError, match=message):
        loss_and_gradient(hidden, matrix, target)
    with pytest.raises(TypeError, match=r"^enabled: expected a bool, got 1$"):
        partita.batch_invariant(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("budget", [None, 2**27, 2**28, 2**31])
@pytest.mark.parametrize("grads", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("reduced", [False, True])
def test_the_classes_of_a_product_depend_on_no_number_of_tokens(
    dtype: torch.dtype, budget: int | None, grads: tuple[bool, bool], reduced: bool
) -> None:
    sizes, found = (256, 32_000, dtype), set()
    for tokens in (1, 7, 1024, 1025, 20_000):
        plan = partita.linear_cross_entropy_plan(
            tokens,
            *sizes,
            memory_budget=budget,
            input_grad=grads[0],
            weight_grad=grads[1],
            reduced=reduced,
            batch_invariant=True,
        )
        assert budget is None or plan.workspace_bytes <= budget
        found.add(32_000 if plan.name == "fast" else plan.chunk)
    assert len(found) == 1


def test_too_small_a_budget() -> None:
    hidden, matrix, target = inputs()
    message = r"^memory_budget: expected at least 1,048,576 bytes inside batch_invariant\(\), or"
    with partita.batch_invariant(), pytest.raises(ValueError, match=message):
        partita.linear_cross_entropy(hidden, matrix, target, memory_budget=2**19)


def test_transforms_and_second_derivatives() -> None:
    hidden, matrix, target = (x[:5] if i != 1 else x for i, x in enumerate(inputs(torch.float64)))

    def loss(x: Tensor, labels: Tensor = target) -> Tensor:
        return partita.linear_cross_entropy(x, matrix, labels, reduction="sum")

    with partita.batch_invariant():
        (expected,) = torch.autograd.grad(loss(hidden), hidden)
        torch.testing.assert_close(torch.func.grad(loss)(hidden.detach()), expected)
        rows = torch.vmap(torch.func.grad(lambda x, label: loss(x[None], label[None])))
        torch.testing.assert_close(rows(hidden.detach(), target), expected)
        few = hidden[:2, :].detach().requires_grad_()
        assert torch.autograd.gradgradcheck(lambda x: loss(x, target[:2]), few, fast_mode=True)


@pytest.mark.long
def test_compiled_calls_have_the_bits_of_eager_ones() -> None:
    """One compilation in the mode serves each number of tokens; outside of it there is another."""
    hidden, matrix, target = inputs()

    def losses(x: Tensor, labels: Tensor) -> Tensor:
        return partita.linear_cross_entropy(x, matrix, labels, reduction="none")

    compiled = torch.compile(losses, fullgraph=True, dynamic=True)
    with partita.batch_invariant():
        loss, gradient = loss_and_gradient(hidden, matrix, target)
        for tokens in (3, 40, 1200):
            part = compiled(hidden[:tokens], target[:tokens])
            assert torch.equal(part, loss[:tokens])
            assert torch.equal(
                torch.autograd.grad(part.sum(), hidden)[0][:tokens], gradient[:tokens]
            )
    few = hidden[:3], target[:3]
    torch.testing.assert_close(compiled(*few), losses(*few))
