"""Transducer losses from encoder and predictor, against the losses of all logits."""

from typing import Any

import pytest
import torch
from helpers.ctc import backends
from helpers.errors import raises
from helpers.rnnt import DURATIONS, sample
from torch import Tensor

import partita

D = 3
SEQUENCES = sample()[2:]
ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}


def joint_tensors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return encoder, predictor, and matrix and bias of tokens and of durations."""
    g = torch.Generator().manual_seed(1)
    B, T, U1, V = sample()[0].shape
    K = len(DURATIONS)
    shapes = [(B, T, D), (B, U1, D), (V, D), (V,), (K, D), (K,)]
    tensors = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)
    return [tensor.requires_grad_() for tensor in tensors]


def linear_loss(name: str, tensors: list[Any], **options: Any) -> Tensor:
    encoder, predictor, weight, bias, *durations = tensors
    if name == "rnnt":
        options |= {"linear_bias": bias, "blank": 0, "delay_penalty": 0.1, "hat": True}
        return partita.linear_rnnt_loss(encoder, predictor, weight, *SEQUENCES, **options)
    options |= {"linear_bias": bias, "duration_bias": durations[1]}
    weights = (weight, durations[0])
    return partita.linear_tdt_loss(
        encoder, predictor, *weights, *SEQUENCES, 0, DURATIONS, 0.05, **options
    )


def loss_of_logits(name: str, tensors: list[Any], activation: str, **options: Any) -> Tensor:
    encoder, predictor, *heads = tensors
    hidden = ACTIVATIONS[activation](encoder[:, :, None] + predictor[:, None])
    tokens, durations = (hidden @ heads[i].T + heads[i + 1] for i in (0, 2))
    if name == "rnnt":
        options |= {"delay_penalty": 0.1, "hat": True}
        return partita.rnnt_loss(tokens, *SEQUENCES, 0, **options)
    return partita.tdt_loss(tokens, durations, *SEQUENCES, 0, DURATIONS, 0.05, **options)


@backends
@pytest.mark.parametrize("name", ["rnnt", "tdt"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "mean_batch", "mean_volume"])
def test_all_chunks_give_the_loss_of_all_logits(reduction: str, name: str, backend: str) -> None:
    tensors = joint_tensors()
    tensors = tensors[:4] if name == "rnnt" else tensors
    rest = joint_tensors()[len(tensors) :]
    upstream = torch.tensor([1.0, -2, 0.5, 3]).double() if reduction == "none" else None
    for i, activation in enumerate(ACTIVATIONS):
        with partita.backend(backend):
            plain = loss_of_logits(name, [*tensors, *rest], activation, reduction=reduction)
            expected = torch.autograd.grad(plain, tensors, upstream)
            # Several sequences at a time, parts of one, and a step at a time.
            budget = (None, 11800, 8600)[i]
            loss = linear_loss(
                name,
                [*tensors, *rest],
                reduction=reduction,
                activation=activation,
                memory_budget=budget,
            )
            found = torch.autograd.grad(loss, tensors, upstream)
        torch.testing.assert_close(loss, plain)
        torch.testing.assert_close(found, expected)


@backends
@pytest.mark.parametrize("name", ["rnnt", "tdt"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_lora_gives_the_loss_of_the_sum_of_matrices(
    dtype: torch.dtype, name: str, backend: str
) -> None:
    tensors, V = joint_tensors(dtype), sample()[0].shape[-1]
    rows = V + len(DURATIONS) * (name == "tdt")
    g = torch.Generator().manual_seed(2)
    factors = [torch.randn(s, generator=g, dtype=torch.float32) for s in ((2, D), (rows, 2))]
    A, B = (each.to(dtype).float().requires_grad_() for each in factors)
    leaves = [*tensors[: 4 if name == "rnnt" else 6], A, B]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    *heads, exact_A, exact_B = exact
    for i, part in ((2, slice(0, V)), (4, slice(V, rows)))[: 1 + (name == "tdt")]:
        heads[i] = heads[i] + 0.5 * exact_B[part] @ exact_A
    padding = [each.detach().double() for each in tensors[len(heads) :]]
    truth = loss_of_logits(name, [*heads, *padding], "tanh")
    expected = torch.autograd.grad(truth, exact)
    options = {"low_rank": partita.LoRA(A, B, 0.5), "activation": "tanh"}
    close = {"rtol": 1e-7, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-3}
    for budget in (
        None,
        {"rnnt": 12_600, "tdt": 18_000}[name],
    ):  # all logits, and a few steps at a time
        with partita.backend(backend):
            loss = linear_loss(name, tensors, memory_budget=budget, **options)
            found = torch.autograd.grad(loss, leaves)
        torch.testing.assert_close(loss.double(), truth, **close)
        assert [each.dtype for each in found] == [each.dtype for each in leaves]
        for ours, right in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), right, **close)


def test_bad_lora() -> None:
    encoder, _, weight, *_ = tensors = joint_tensors(torch.float32)[:4]
    A, B = torch.zeros(2, D), torch.zeros(len(weight), 2)
    for low_rank, error, message in (
        ((encoder, B), TypeError, "low_rank: expected a LoRA or None, got"),
        (partita.LoRA(A[:, :2], B), ValueError, r"low_rank.A: expected shape \[r, D\] = \[2, 3\]"),
        (partita.LoRA(A, B[1:]), ValueError, r"low_rank.B: expected shape \[rows of all matrices"),
        (partita.LoRA(A.long(), B), TypeError, "low_rank.A: expected a floating dtype"),
    ):
        with pytest.raises(error, match=message):
            linear_loss("rnnt", tensors, low_rank=low_rank)


@backends
def test_fastemit_scales_the_gradient_of_labels(backend: str) -> None:
    tensors = joint_tensors()[:4]
    encoder, predictor, weight, bias = tensors
    logits = (encoder[:, :, None] + predictor[:, None]).relu() @ weight.T + bias
    with partita.backend(backend):
        plain = partita.rnnt_loss(logits, *SEQUENCES, 0, fastemit_lambda=0.5)
        loss = partita.linear_rnnt_loss(
            encoder, predictor, weight, *SEQUENCES, linear_bias=bias, blank=0, fastemit_lambda=0.5
        )
        found, expected = (torch.autograd.grad(value, tensors) for value in (loss, plain))
    torch.testing.assert_close(found, expected)


def test_chunks_are_those_of_the_plan() -> None:
    """The budgets of the test above give each way of cutting the batch."""
    plans = [
        partita.linear_rnnt_plan(
            4, 4, 2, D, 5, torch.float64, durations=3, memory_budget=memory_budget
        )
        for memory_budget in (None, 11800, 8600)
    ]
    assert [plan.name for plan in plans] == ["fast", "lean", "lean"]
    assert [plan.chunk for plan in plans] == [16, 5, 1]
    for plan, budget in zip(plans, (2**30, 11800, 8600), strict=True):
        assert plan.workspace_bytes <= budget
    assert plans[1].flops * 3 == plans[0].flops * 4
    loss = partita.linear_rnnt_plan(4, 4, 2, D, 5, torch.float64, gradient=False)
    assert (loss.name, loss.flops * 3) == (
        "loss",
        partita.linear_rnnt_plan(4, 4, 2, D, 5, torch.float64).flops,
    )
    with pytest.raises(ValueError, match=r"^memory_budget: expected at least .* for 48 nodes"):
        partita.linear_rnnt_plan(4, 4, 2, D, 5, torch.float64, memory_budget=100)
    with pytest.raises(ValueError, match=r"^steps: expected an int of at least 0, got -1"):
        partita.linear_rnnt_plan(4, -1, 2, D, 5, torch.float64)
    with pytest.raises(TypeError, match=r"^dtype: expected a floating torch.dtype"):
        partita.linear_rnnt_plan(4, 4, 2, D, 5, torch.int64)


@pytest.mark.parametrize(
    ("name", "activation"),
    [("rnnt", "tanh"), ("rnnt", "sigmoid"), ("tdt", "tanh"), ("tdt", "relu")],
)
def test_batch_invariant_products_have_blocks(
    name: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product whose bits depend on the number of its rows changes no sequence's results."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result = x @ weight.T * (1 + 1e-3 * len(x) + 1e-9 * len(x.shape))
        return result if bias is None else result + bias

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    g, (B, T, U, V, D, K) = torch.Generator().manual_seed(2), (3, 90, 6, 5, 17, len(DURATIONS))
    shapes = [(B, T, D), (B, U + 1, D), (V, D), (V,), (K, D), (K,)]
    tensors = [torch.randn(shape, generator=g).requires_grad_() for shape in shapes]
    sequences = (
        torch.randint(1, V, (B, U), generator=g),
        torch.tensor([T, 70, 9]),
        torch.full((B,), U),
    )

    def found(rows: slice, budget: int | None) -> list[Tensor]:
        encoder, predictor, weight, bias, *durations = (
            x.detach()[rows] if i < 2 else x.detach() for i, x in enumerate(tensors)
        )
        encoder.requires_grad_()
        predictor.requires_grad_()
        options = {"linear_bias": bias, "activation": activation, "memory_budget": budget}
        rest = (*(each[rows] for each in sequences), 0)
        if name == "rnnt":
            loss = partita.linear_rnnt_loss(
                encoder, predictor, weight, *rest[:3], blank=0, reduction="sum", **options
            )
        else:
            loss = partita.linear_tdt_loss(
                *(encoder, predictor, weight, durations[0], *rest, DURATIONS, 0.05, "sum"),
                duration_bias=durations[1],
                **options,
            )
        return [loss.detach(), *torch.autograd.grad(loss, (encoder, predictor))]

    def differ(budgets: tuple[int | None, int | None]) -> bool:
        together = found(slice(B), budgets[0])
        alone = [found(slice(b, b + 1), budgets[1]) for b in range(B)]
        gradients = (torch.cat(each) for each in list(zip(*alone, strict=True))[1:])
        return not all(map(torch.equal, together[1:], gradients))

    assert differ((None, None))
    with partita.batch_invariant():
        for budgets in ((None, None), (400_000, None), (300_000, 110_000)):
            assert not differ(budgets)


def test_autocast_and_unused_gradients() -> None:
    tensors = joint_tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_loss("rnnt", tensors)
    expected = linear_loss("rnnt", [t.detach().bfloat16() for t in tensors])
    assert loss.dtype == torch.float32 and torch.equal(loss, expected)
    (grad,) = torch.autograd.grad(loss, tensors[2])
    assert grad.dtype == torch.float32
    frozen = [t.detach() for t in tensors]
    frozen[3].requires_grad_()
    expected_grad = torch.autograd.grad(linear_loss("rnnt", tensors), tensors[3])
    found = torch.autograd.grad(linear_loss("rnnt", frozen), frozen[3])
    torch.testing.assert_close(found, expected_grad)


def test_bad_input() -> None:
    encoder, predictor, weight, bias, *_ = (t.detach() for t in joint_tensors())
    good = {"encoder": encoder, "predictor": predictor, "linear_weight": weight}
    good |= zip(("targets", "logit_lengths", "target_lengths"), SEQUENCES, strict=True)
    for error, changes in {
        r"ValueError: encoder: expected shape \[B, T, D\]": {"encoder": encoder[0]},
        r"ValueError: predictor: expected shape \[B, U \+ 1": {"predictor": predictor[:2]},
        "ValueError: linear_weight: expected shape": {"linear_weight": weight[:, :2]},
        "TypeError: predictor: expected the dtype": {"predictor": predictor.float()},
        "ValueError: linear_bias: expected shape the rows of linear_weight": {
            "linear_bias": bias[:2]
        },
        "ValueError: activation: expected one of 'relu', 'tanh', 'sigmoid', got 'gelu'": {
            "activation": "gelu"
        },
        "ValueError: memory_budget: expected at least": {"memory_budget": 10},
    }.items():
        with raises(error):
            partita.linear_rnnt_loss(**{**good, "blank": 0, **changes})
