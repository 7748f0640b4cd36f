"""Factors of low rank beside the matrix, against the merged matrix in fp64."""

from typing import Any

import pytest
import torch
from helpers.memory import Largest
from helpers.rows import devices, kernel_devices
from torch import Tensor

import partita
from partita.ops.linear_heads.plan import low_rank_bytes
from partita.testing import assert_within_budget, poisoned_memory
from partita.testing.samples import Draw, heads

M, H, C, R = 40, 24, 300, 5
fp32 = torch.float32


def numbers(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
    return x.to(device, dtype).requires_grad_()


def labels(device: str = "cpu") -> Tensor:
    target = torch.randint(C, (M,), generator=torch.Generator().manual_seed(7)).to(device)
    target[3] = -100
    return target


def lora_loss(hidden: Tensor, matrix: Tensor, A: Tensor, B: Tensor, **options: Any) -> Tensor:
    target = labels(hidden.device.type)
    lora = partita.LoRA(A, B, 0.5)
    return partita.linear_cross_entropy(hidden, matrix, target, low_rank=lora, **options)


def merged_loss(hidden: Tensor, matrix: Tensor, A: Tensor, B: Tensor) -> Tensor:
    logits = hidden @ (matrix + 0.5 * B @ A).T
    return torch.nn.functional.cross_entropy(logits.double(), labels(hidden.device.type))


def two_products_loss(hidden: Tensor, matrix: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Round as a layer of PEFT does: both products, and their sum."""
    logits = hidden @ matrix.T + (hidden @ A.to(hidden.dtype).T * 0.5) @ B.to(hidden.dtype).T
    return torch.nn.functional.cross_entropy(logits.float(), labels(hidden.device.type))


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, wanted)]


@devices
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("budget", [None, "lean"], ids=str)
@pytest.mark.parametrize(
    ("dtype", "factors"),
    [
        (torch.float64, torch.float64),
        (fp32, fp32),
        (fp32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, fp32),
        (torch.float16, fp32),
    ],
    ids=str,
)
def test_lora_equals_the_merged_matrix(
    dtype: torch.dtype, factors: torch.dtype, budget: str | None, frozen: bool, device: str
) -> None:
    """Errors are at most twice those of PyTorch, which rounds each product and their sum."""
    options: dict[str, Any] = {}
    if budget:
        options = {"memory_budget": 11_000 * dtype.itemsize + low_rank_bytes(R, M, C, dtype)}
        plan = partita.linear_cross_entropy_plan(M, H, C, dtype, low_rank=R, **options)
        assert plan.name == "lean"
    leaves = [numbers(M, H, dtype=dtype, device=device), numbers(C, H, dtype=dtype, device=device)]
    leaves += [numbers(*shape, dtype=factors, device=device) for shape in ((R, H), (C, R))]
    leaves[1].requires_grad_(not frozen)
    exact = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    truth = gradients(merged_loss(*exact), exact)
    with poisoned_memory():
        found = gradients(lora_loss(*leaves, **options), leaves)
    theirs = gradients(two_products_loss(*leaves), leaves)
    for ours, right, other in zip(found, truth, theirs, strict=True):
        error, bound = ((each.double() - right).norm() for each in (ours, other))
        eps = torch.finfo(ours.dtype).eps
        assert error <= 2 * bound + 4 * eps * right.norm()
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    assert [each.dtype for each in found[1:]] == [leaf.dtype for leaf in wanted]


def test_a_pair_is_what_it_says() -> None:
    hidden, matrix, A, B = numbers(M, H), numbers(C, H), numbers(R, H), numbers(C, R)
    states = (0.5 * hidden @ A.T).detach().requires_grad_()
    loss = partita.linear_cross_entropy(hidden, matrix, labels(), low_rank=(states, B))
    assert_within_budget(loss, merged_loss(hidden, matrix, A, B), scale=loss)
    found = torch.autograd.grad(loss, [hidden, states, B])
    x, y, z = (each.detach().requires_grad_() for each in (hidden, states, B))
    logits = x @ matrix.T + y @ z.T
    truth = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels()), [x, y, z])
    torch.testing.assert_close(found, truth)


@kernel_devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("C", "r"), [(2**16, 16), (2**16 + 16, 16), (2**16 + 512, 32)])
def test_both_gradients_in_one_read(C: int, r: int, dtype: torch.dtype, device: str) -> None:
    """The last program has some of the classes of the others, and partial sums find room there."""
    from partita.ops.linear_heads.gpu.launch import low_rank_gradients

    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no products in bf16")
    memory = numbers(70, C + 16, device=device).detach().to(dtype)
    memory[:, C:] = memory[69] = torch.nan  # padding, and a row of another chunk
    states, factor = (numbers(n, r, device=device).detach().to(dtype) for n in (69, C))
    sums = [numbers(n, r, dtype=fp32, device=device).detach() for n in (69, C)]
    gradient = memory[:69, :C].double()
    products = gradient @ factor.double(), gradient.T @ states.double()
    expected = [each + product for each, product in zip(sums, products, strict=True)]
    found = [[each[:n].clone() for each, n in zip(sums, (m, C), strict=True)] for m in (69, 1)]
    for m, each in zip((69, 1), found, strict=True):
        assert low_rank_gradients(memory.clone()[:m, :C], states[:m], factor, *each)
    for ours, right in zip(found[0], expected, strict=True):
        assert (ours - right).abs().max() <= 3e-6 * right.abs().max()
    assert torch.equal(found[0][0][:1], found[1][0])  # whatever the other tokens are
    for few in (states[:, :0], factor[:, :0]), (states.float(), factor.float()):
        assert not low_rank_gradients(memory[:69, :C].to(few[0].dtype), *few, *sums)


@kernel_devices
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_read_overwrites_what_no_other_gradient_needs(reduction: str, device: str) -> None:
    C, r, dtype = 2**16, 16, torch.float16
    shapes = ((5, 8), (C, 8), (C,), (5, r), (C, r))
    leaves = [numbers(*shape, device=device).detach().to(dtype) for shape in shapes]
    hidden, matrix, bias, *low_rank = (each.requires_grad_() for each in leaves)
    target = torch.tensor([0, C - 1, 700, -100, 40_000], device=device)
    found = []
    for backend in ("triton", "reference"):
        with partita.backend(backend):
            options: dict[str, Any] = {"low_rank": low_rank, "reduction": reduction}
            loss = partita.linear_cross_entropy(
                hidden, matrix, target, linear_bias=bias, memory_budget=2**24, **options
            )
            found.append(gradients(loss.sum(), leaves))
    for ours, right in zip(*found, strict=True):
        assert (ours.double() - right.double()).norm() <= 2e-3 * right.double().norm()


def test_a_frozen_matrix_makes_no_tensor_of_its_size() -> None:
    """With few tokens even the logits are smaller than the matrix."""
    hidden, matrix, A = numbers(8, H), numbers(C, H).detach(), numbers(R, H)
    B, target = numbers(C, R), labels()[:8]
    with Largest() as largest:
        lora = partita.LoRA(A, B)
        partita.linear_cross_entropy(hidden, matrix, target, low_rank=lora).backward()
    assert 0 < largest.elements < matrix.numel() and B.grad.any() and A.grad.any()


def test_ignored_rows_may_hold_anything() -> None:
    for options in ({}, {"reduction": "none"}, {"weight": torch.ones(C).double()}):
        hidden, matrix, A, B = numbers(M, H), numbers(C, H), numbers(R, H), numbers(C, R)
        target = labels()
        expected = gradients(lora_loss(hidden, matrix, A, B, **options).sum(), [hidden, A, B])
        with torch.no_grad():
            hidden[target == -100] = torch.nan
        loss = lora_loss(hidden, matrix, A, B, **options).sum()
        torch.testing.assert_close(gradients(loss, [hidden, A, B]), expected)
        stats = partita.linear_token_stats(
            hidden, matrix, target, low_rank=partita.LoRA(A, B, 0.5)
        ).logprob
        found = torch.autograd.grad(stats.sum(), [hidden, A, B])
        assert not any(each.isnan().any() for each in found)


def test_only_the_factors_need_a_gradient() -> None:
    """The base model is frozen, as with an adapter on the head alone."""
    hidden, matrix, A, B = numbers(M, H).detach(), numbers(C, H), numbers(R, H), numbers(C, R)
    loss = lora_loss(hidden, matrix.detach(), A, B)
    truth = torch.autograd.grad(merged_loss(hidden, matrix, A, B), [A, B])
    torch.testing.assert_close(torch.autograd.grad(loss, [A, B]), truth)
    with torch.no_grad():
        assert_within_budget(lora_loss(hidden, matrix, A, B), loss, scale=loss)


def test_leading_dimensions_and_no_rank() -> None:
    hidden, matrix, target = numbers(4, 10, H), numbers(C, H), labels().view(4, 10)
    states, B = numbers(4, 10, R), numbers(C, R)
    low_rank = (states, B)
    one_by_one = partita.linear_cross_entropy(
        hidden[0, 0], matrix, target[0, 0], low_rank=(states[0, 0], B)
    )
    rows = partita.linear_cross_entropy(hidden, matrix, target, low_rank=low_rank, reduction="none")
    assert rows.shape == (4, 10)
    torch.testing.assert_close(rows[0, 0], one_by_one)
    none = (states[..., :0], B[:, :0])
    found = partita.linear_cross_entropy(hidden, matrix, target, low_rank=none)
    torch.testing.assert_close(found, partita.linear_cross_entropy(hidden, matrix, target))


def test_a_matrix_of_more_dimensions() -> None:
    matrix, factor = numbers(6, 7, H), numbers(6, 7, R)
    hidden, states = numbers(M, H), numbers(M, R)
    target = torch.randint(6, (M, 7), generator=torch.Generator().manual_seed(1))
    found = partita.linear_cross_entropy(hidden, matrix, target, low_rank=(states, factor))
    logits = torch.einsum("mh,cdh->mcd", hidden, matrix)
    logits = logits + torch.einsum("mr,cdr->mcd", states, factor)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, target))


def test_autocast() -> None:
    leaves = [numbers(*shape, dtype=fp32) for shape in ((M, H), (C, H), (R, H), (C, R))]
    expected = gradients(merged_loss(*leaves), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        loss = lora_loss(*leaves)
    found = gradients(loss, leaves)
    assert {each.dtype for each in found} == {fp32}
    for ours, right in zip(found, expected, strict=True):
        assert (ours - right).norm() <= 0.02 * right.norm()


def test_a_compiled_step_takes_lora() -> None:
    leaves = [numbers(*shape, dtype=fp32) for shape in ((M, H), (C, H), (R, H), (C, R))]
    target = labels()

    def loss(hidden: Tensor, matrix: Tensor, A: Tensor, B: Tensor) -> Tensor:
        lora = partita.LoRA(A, B, 0.5)
        return partita.linear_cross_entropy(hidden, matrix, target, low_rank=lora)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = gradients(compiled(*leaves), leaves)
    torch.testing.assert_close(found, gradients(loss(*leaves), leaves))


@devices
def test_rows_have_their_own_bits_in_the_invariant_mode(device: str) -> None:
    hidden, matrix = (numbers(n, H, dtype=torch.bfloat16, device=device) for n in (1100, C))
    A, B = (numbers(*shape, dtype=fp32, device=device) for shape in ((R, H), (C, R)))

    def outcome(tokens: int) -> tuple[Tensor, Tensor]:
        states = hidden[:tokens].detach().requires_grad_()
        target = torch.arange(tokens, device=device) % C
        with partita.batch_invariant():
            stats = partita.linear_token_stats(
                states, matrix, target, low_rank=partita.LoRA(A, B, 3.0)
            )
            return stats.logprob.detach(), torch.autograd.grad(stats.logprob.sum(), states)[0]

    whole = outcome(1100)
    for tokens in (1, 33, 1024):
        for some, all_rows in zip(outcome(tokens), whole, strict=True):
            assert torch.equal(some, all_rows[:tokens])


def test_the_plan_counts_the_factors() -> None:
    sizes = (8192, 4096, 128_256, torch.bfloat16)
    plan = partita.linear_cross_entropy_plan(*sizes, weight_grad=False, low_rank=16)
    without = partita.linear_cross_entropy_plan(*sizes, weight_grad=False)
    added = low_rank_bytes(16, 8192, 128_256, torch.bfloat16)
    assert plan.workspace_bytes == without.workspace_bytes + added <= 2**31
    assert plan.chunk == 8192
    with pytest.raises(ValueError, match="low_rank: expected an int of at least 0, got -1"):
        partita.linear_cross_entropy_plan(*sizes, low_rank=-1)


@pytest.mark.parametrize("call", heads.CALLS, ids=lambda call: call.name)
def test_wrong_arguments(call: heads.Call) -> None:
    sample = call.sample(Draw(), sizes={"rows": 2, "hidden": 3, "classes": 4})
    A, B = torch.zeros(5, 3), torch.zeros(4, 5)
    states = torch.zeros(2, 5)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (7, TypeError, r"low_rank: expected \(H, B\), a LoRA or None, got 7"),
        ((states,), TypeError, r"low_rank: expected \(H, B\), a LoRA or None"),
        ((states, None), TypeError, r"low_rank\[1\]: expected a Tensor, got NoneType"),
        ((states.long(), B), TypeError, r"low_rank\[0\]: expected a floating dtype"),
        ((states[:1], B), ValueError, r"low_rank\[0\]: expected shape \[..., r\] = \[2, 5\]"),
        ((states, B[:3]), ValueError, r"low_rank\[1\]: expected shape \[C, r\] = \[4, 5\]"),
        ((states, B[:, :4]), ValueError, r"low_rank\[1\]: expected shape \[C, r\] = \[4, 5\]"),
        (partita.LoRA(A[:, :2], B), ValueError, r"low_rank\.A: expected shape \[r, H\] = \[5, 3\]"),
        (partita.LoRA(A, B[:, :4]), ValueError, r"low_rank\.B: expected shape \[C, r\] = \[4, 5\]"),
        (partita.LoRA(A, B, "1"), TypeError, r"low_rank\.scale: expected a number, got str"),
        ((states, B.to("meta")), ValueError, r"low_rank\[1\]: expected the device of input"),
    ]
    for low_rank, error, message in wrong:
        with pytest.raises(error, match=message):
            sample.run(low_rank=low_rank)
