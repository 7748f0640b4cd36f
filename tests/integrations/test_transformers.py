"""The loss of causal language models, position by position and against transformers itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.causal_lm import step
from helpers.configurations import SERVED_BY_NAME, model_of
from helpers.errors import raises
from helpers.linear import Batch, budgets
from helpers.rows import INTERPRETING, class_weights, devices, targets_for
from torch import Tensor

import partita
from partita.integrations.transformers import causal_lm_loss, linear_causal_lm_loss
from partita.runtime.backend import current_backend
from partita.testing import sample_rows

HALVES = [torch.float16, torch.bfloat16]
BATCH, TIME, HIDDEN, CLASSES = 3, 7, 5, 11
OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.01}
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def sample(
    device: str = "cpu", dtype: torch.dtype = torch.float64, ignored: str = "some"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, matrix and labels; none, some or all of the labels are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden, matrix = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((BATCH, TIME, HIDDEN), (CLASSES, HIDDEN))
    )
    labels = torch.randint(CLASSES, (BATCH, TIME), generator=generator)
    share = {"none": 0.0, "some": 0.4, "all": 1.0}[ignored]
    labels[torch.rand(BATCH, TIME, generator=generator) < share] = -100
    return (
        hidden.to(device, dtype).requires_grad_(),
        matrix.to(device, dtype).requires_grad_(),
        labels.to(device),
    )


def meaning(
    logits: Tensor,
    labels: Tensor,
    items: float | None = None,
    ignore_index: int = -100,
    shifted: bool = False,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Compute the loss in fp64, position by position."""
    total, valid = logits.new_zeros((), dtype=torch.float64), 0
    for sequence, tokens in zip(logits.double(), labels.tolist(), strict=True):
        following = tokens if shifted else [*tokens[1:], ignore_index]
        for x, label in zip(sequence, following, strict=True):
            if label == ignore_index:
                continue
            x = x if softcap is None else softcap * torch.tanh(x / softcap)
            nll = x.logsumexp(0) - x
            total = (
                total
                + (1 - label_smoothing) * nll[label]
                + label_smoothing * nll.mean()
                + z_loss * x.logsumexp(0) ** 2
            )
            valid += 1
    return total / (valid if items is None else items)


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return [
        torch.zeros_like(tensor) if grad is None else grad
        for tensor, grad in zip(of, torch.autograd.grad(loss, of, allow_unused=True), strict=True)
    ]


@devices
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
@pytest.mark.parametrize("items", [None, 4, torch.tensor(4), torch.tensor([4])], ids=str)
def test_the_meaning(
    items: int | Tensor | None, shifted: bool, options: dict[str, Any], device: str
) -> None:
    hidden, matrix, labels = sample(device)
    given = (None, items, -100, labels) if shifted else (labels, items)
    expected = meaning(
        hidden @ matrix.T, labels, None if items is None else 4, shifted=shifted, **options
    )
    logits = hidden @ matrix.T
    ours = causal_lm_loss(logits, given[0], CLASSES, *given[1:], **options)
    without = linear_causal_lm_loss(hidden, matrix, *given, **options)
    truth = gradients(expected, hidden, matrix)
    for loss in (ours, without):
        assert loss.shape == (() if not isinstance(items, Tensor) else items.shape)
        torch.testing.assert_close(loss.reshape(()), expected)
        torch.testing.assert_close(gradients(loss, hidden, matrix), truth)


@devices
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("items", [None, 4], ids=str)
def test_half_types_give_fp32(items: int | None, dtype: torch.dtype, device: str) -> None:
    hidden, matrix, labels = sample(device, dtype)
    logits = (hidden @ matrix.T).detach().requires_grad_()
    exact = logits.detach().double().requires_grad_()
    loss = causal_lm_loss(logits, labels, CLASSES, items, **OPTIONS)
    expected = meaning(exact, labels, items, **OPTIONS)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    # Each loss is below 16, and takes fewer than 16 roundings in fp32.
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=16 * eps * 16)
    (grad,), (true,) = gradients(loss, logits), gradients(expected, exact)
    assert grad.dtype == dtype
    # Rounded when it is formed, and once more by the factor from upstream.
    torch.testing.assert_close(grad.double(), true, rtol=torch.finfo(dtype).eps, atol=eps)

    without = linear_causal_lm_loss(hidden, matrix, labels, items)
    expected = meaning(hidden.double() @ matrix.double().T, labels, items)
    assert (without.shape, without.dtype) == ((), torch.float32)
    # Rounding moves a logit by half an eps of it at most. A loss moves by no more than that for the
    # logits of its row, and by no more than that for the logit of its label.
    ratio = 1 if items is None else (labels[:, 1:] != -100).sum().item() / items
    atol = ratio * torch.finfo(dtype).eps * logits.abs().max().item()
    torch.testing.assert_close(without.double(), expected, rtol=0, atol=atol)
    assert all(grad.dtype == dtype for grad in gradients(without, hidden, matrix))


def assert_rounded_once(loss: Tensor, x: Tensor, labels: Tensor, **options: Any) -> None:
    """Compare a loss of bf16 logits, divided by 47, and its gradient with the meaning."""
    exact = x.detach().double().requires_grad_()
    expected = meaning(exact[None], labels[None], 47, shifted=True, **options)
    torch.testing.assert_close(loss.double().reshape(()), expected, rtol=1e-6, atol=0)
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    (true,) = gradients(expected, exact)
    # Triton's interpreter truncates to bf16, which has twice the error of rounding. Two roundings
    # exceed the error of one by nearly a factor of two.
    rounding = torch.finfo(torch.bfloat16).eps / (1 if INTERPRETING else 2)
    torch.testing.assert_close(first.double(), true, rtol=1.01 * rounding, atol=1e-8)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("items", [47, torch.tensor(47), torch.tensor([47.0])], ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(40, 100), (5, 4100)])
def test_the_number_of_items_costs_no_second_rounding(
    rows: int, classes: int, items: int | Tensor, options: dict[str, Any], device: str
) -> None:
    logits = 3 * sample_rows(rows, classes, dtype=torch.bfloat16, device=device)
    labels = targets_for(logits, "labels", ignored=-100)
    logits.requires_grad_()
    loss = causal_lm_loss(logits, None, classes, items, shift_labels=labels, **options)
    assert_rounded_once(loss, logits, labels, **options)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("plan", ["small", "fast"])
@pytest.mark.parametrize("items", [47, torch.tensor(47)], ids=str)
def test_the_number_of_items_costs_a_head_no_second_rounding(
    items: int | Tensor, plan: str, device: str
) -> None:
    # A matrix of ones on the diagonal hands the gradient of the logits to the hidden states.
    hidden = (3 * sample_rows(40, 200, dtype=torch.bfloat16, device=device)).requires_grad_()
    matrix = torch.eye(200, dtype=torch.bfloat16, device=device).requires_grad_()
    labels = targets_for(hidden.detach(), "labels", ignored=-100)
    budget = budgets(Batch(hidden, matrix, None, labels, None))[plan]
    options = {"shift_labels": labels, "memory_budget": budget}
    loss = linear_causal_lm_loss(hidden, matrix, None, items, **options)
    assert_rounded_once(loss, hidden, labels)


@pytest.mark.parametrize("plan", ["small", "fast", "lean"])
def test_second_derivatives_of_a_head_divided_by_items(plan: str) -> None:
    hidden = sample_rows(5, 4, dtype=torch.float64).requires_grad_()
    matrix = sample_rows(200, 4, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([3, 0, -100, 199, 7])
    budget = budgets(Batch(hidden, matrix, None, labels, None))[plan]

    def loss(hidden: Tensor, matrix: Tensor) -> Tensor:
        options = {"shift_labels": labels, "memory_budget": budget, **OPTIONS}
        return linear_causal_lm_loss(hidden, matrix, None, 3, **options)

    assert torch.autograd.gradcheck(loss, (hidden, matrix), fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, (hidden, matrix), fast_mode=True)


def test_second_derivatives_of_a_quotient() -> None:
    _, _, labels = sample()
    x = (3 * sample_rows(TIME, CLASSES, dtype=torch.float64)).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return causal_lm_loss(x, labels[0], CLASSES, torch.tensor(4), **OPTIONS)

    with partita.backend("reference"):
        assert torch.autograd.gradcheck(loss, x)
        assert torch.autograd.gradgradcheck(loss, x, fast_mode=True)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
@pytest.mark.parametrize("classes", [37, 4100])
def test_the_ops_of_one_pass_divide_by_a_denominator(classes: int, kind: str, device: str) -> None:
    x = sample_rows(6, classes, device=device)
    inputs = x, targets_for(x, kind), class_weights(classes, torch.float32, device)
    options = (-100, 0.1, 5.0, 1e-3, "sum", torch.float32, current_backend())
    loss, grad = torch.ops.partita.cross_entropy_one_pass(*inputs, None, *options)
    items = torch.tensor(7, device=device)
    quotients = torch.ops.partita.cross_entropy_one_pass(*inputs, items, *options)
    torch.testing.assert_close(quotients, (loss / 7, grad / 7), rtol=1e-5, atol=1e-9)
    over = x.clone()
    inplace = torch.ops.partita.cross_entropy_one_pass_(over, *inputs[1:], items, *options)
    assert torch.equal(inplace, quotients[0]) and torch.equal(over, quotients[1])


def test_the_name_of_the_soft_cap_in_configurations() -> None:
    hidden, matrix, labels = sample()
    expected = linear_causal_lm_loss(hidden, matrix, labels, softcap=3.0)
    for softcap in (None, 3.0):
        options = {"softcap": softcap, "final_logit_softcapping": 3.0}
        assert torch.equal(linear_causal_lm_loss(hidden, matrix, labels, **options), expected)
    plain = linear_causal_lm_loss(hidden, matrix, labels, final_logit_softcapping=None)
    assert not torch.equal(plain, expected)


@devices
def test_all_ignored(device: str) -> None:
    hidden, matrix, labels = sample(device, ignored="all")
    losses = (
        lambda items: causal_lm_loss(hidden @ matrix.T, labels, CLASSES, items),
        lambda items: linear_causal_lm_loss(hidden, matrix, labels, items),
    )
    for loss in losses:
        assert loss(None).isnan()
        assert loss(3) == 0
        assert not any(grad.any() for grad in gradients(loss(3), hidden, matrix))
        assert loss(0).isnan() and loss(torch.tensor(0)).isnan(), "0 / 0, as a tensor divides"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 0, 300])
def test_labels_of_any_dtype_and_ignored_index(ignore_index: int, dtype: torch.dtype) -> None:
    hidden, matrix, labels = sample(ignored="none")
    expected = meaning(hidden @ matrix.T, labels, ignore_index=ignore_index)
    logits = hidden @ matrix.T
    for shift_labels in (None, torch.nn.functional.pad(labels[:, 1:], (0, 1), value=10).to(dtype)):
        if shift_labels is not None:
            expected = meaning(logits, shift_labels, ignore_index=ignore_index, shifted=True)
        given, *rest = (labels.to(dtype), None, ignore_index, shift_labels)
        torch.testing.assert_close(causal_lm_loss(logits, given, CLASSES, *rest), expected)
        loss = linear_causal_lm_loss(hidden, matrix, given, *rest)
        torch.testing.assert_close(loss, expected)


def test_any_leading_dimensions_and_strides() -> None:
    hidden, matrix, labels = sample()

    def assert_same(hidden: Tensor, labels: Tensor, expected: Tensor) -> None:
        loss = causal_lm_loss(hidden @ matrix.T, labels, CLASSES)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(linear_causal_lm_loss(hidden, matrix, labels), expected)

    expected = causal_lm_loss(hidden @ matrix.T, labels, CLASSES)
    apart = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    assert_same(apart, labels.T.contiguous().T, expected)
    assert_same(hidden[None], labels[None], expected)
    one = causal_lm_loss(hidden[:1] @ matrix.T, labels[:1], CLASSES)
    assert_same(hidden[0], labels[0], one)


def test_a_bias_and_a_budget_are_passed_on() -> None:
    hidden, matrix, labels = sample()
    bias = torch.linspace(-1, 1, CLASSES, dtype=torch.float64, requires_grad=True)
    expected = causal_lm_loss(hidden @ matrix.T + bias, labels, CLASSES)
    loss = linear_causal_lm_loss(hidden, matrix, labels, linear_bias=bias)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        gradients(loss, hidden, matrix, bias), gradients(expected, hidden, matrix, bias)
    )
    with pytest.raises(ValueError, match="memory_budget: expected at least"):
        linear_causal_lm_loss(hidden, matrix, labels, memory_budget=1)


def test_what_else_models_pass_on_is_not_looked_at() -> None:
    hidden, matrix, labels = sample()
    more = {"cache_position": torch.arange(3), "output_attentions": True, "reduction": "none"}
    for f, arguments in (
        (causal_lm_loss, (hidden @ matrix.T, labels, CLASSES)),
        (linear_causal_lm_loss, (hidden, matrix, labels)),
    ):
        assert torch.equal(f(*arguments, **more), f(*arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiled_and_under_autocast(dtype: torch.dtype) -> None:
    hidden, matrix, labels = sample(dtype=dtype)
    items = torch.tensor(4)
    for f, arguments in (
        (causal_lm_loss, ((hidden @ matrix.T).detach().requires_grad_(), labels, CLASSES)),
        (linear_causal_lm_loss, (hidden, matrix, labels)),
    ):
        loss = f(*arguments, items)
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")(*arguments, items)
        torch.testing.assert_close(compiled, loss)
        of = [tensor for tensor in arguments if isinstance(tensor, Tensor) and tensor.requires_grad]
        eps = torch.finfo(dtype).eps
        found, eager = (gradients(each, *of) for each in (compiled, loss))
        torch.testing.assert_close(found, eager, rtol=2 * eps, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_causal_lm_loss(hidden.bfloat16(), matrix.float(), labels)
        assert loss.dtype == torch.float32
        assert causal_lm_loss(hidden @ matrix.T, labels, CLASSES).dtype == torch.float32
    expected = linear_causal_lm_loss(hidden.bfloat16(), matrix.bfloat16(), labels)
    torch.testing.assert_close(loss, expected)


@pytest.mark.gpu
def test_labels_and_number_of_items_come_from_another_device() -> None:
    hidden, matrix, labels = sample("cuda")
    items = torch.tensor(4)
    expected = meaning(hidden @ matrix.T, labels, 4)
    torch.testing.assert_close(
        causal_lm_loss(hidden @ matrix.T, labels.cpu(), CLASSES, items), expected
    )
    torch.testing.assert_close(linear_causal_lm_loss(hidden, matrix, labels.cpu(), items), expected)
    torch.testing.assert_close(
        causal_lm_loss((hidden @ matrix.T).cpu(), labels, CLASSES, items.cuda()), expected.cpu()
    )


@pytest.mark.gpu
def test_no_copy_of_the_logits() -> None:
    logits = torch.randn(1024, 32_768, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(32_768, (1024,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    causal_lm_loss(logits, labels, 32_768, 1024).backward()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 1.1 * logits.nbytes, "the gradient, and no more"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("items", [None, 4, torch.tensor(4)], ids=str)
@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
def test_as_transformers(shifted: bool, items: int | Tensor | None, dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("transformers.loss.loss_utils", exc_type=ImportError)
    hidden, matrix, labels = sample(dtype=dtype)
    logits = (hidden @ matrix.T).detach().requires_grad_()
    given = (None, labels) if shifted else (labels, None)
    arguments = (logits, given[0], CLASSES, items, -100, given[1])
    loss, expected = causal_lm_loss(*arguments), theirs.ForCausalLMLoss(*arguments)
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(gradients(each, logits)[0] for each in (loss, expected)))


def test_as_the_loss_of_a_model_of_transformers() -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    model = model_of(SERVED_BY_NAME["LlamaForCausalLM"])
    for more in ({}, {"num_items_in_batch": torch.tensor(9)}):
        expected, truth = step(model, **more)
        model.loss_function = causal_lm_loss
        found, others = step(model, **more)
        del model._loss_function
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(others, truth)


LOGITS, LABELS = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
BAD = torch.tensor([[9, 1, 2], [3, 0, 7]])


@pytest.mark.parametrize(
    ("error", "changes"),
    {
        "TypeError: logits: expected a Tensor, got list": {"logits": [1.0]},
        "TypeError: logits: expected a floating dtype": {"logits": LOGITS.long()},
        r"ValueError: logits: expected shape \[..., T, vocab_size\] with vocab_size = 5, got"
        r" \[2, 3, 4\]": {"vocab_size": 5},
        "ValueError: vocab_size: expected an int of at least 1, got None": {"vocab_size": None},
        "TypeError: labels: expected a Tensor, got NoneType": {"labels": None},
        "TypeError: labels: expected an integer dtype, got torch.float32": {
            "labels": LABELS.float()
        },
        r"ValueError: labels: expected 6 labels, one for each position, got 4, of shape \[2, 2\]": {
            "labels": LABELS[:, 1:]
        },
        r"ValueError: labels: expected shape \[..., T\], got \[\]": {"labels": LABELS[0, 0]},
        r"IndexError: labels: expected labels from 0 to 3 \(or ignore_index -100\), got 7 at"
        r" \[1, 2\]": {"labels": BAD},
        r"ValueError: shift_labels: expected 6 labels, one for each position, got 3": {
            "shift_labels": LABELS[:1]
        },
        "TypeError: shift_labels: expected an integer dtype, got torch.bool": {
            "shift_labels": LABELS.bool()
        },
        "TypeError: num_items_in_batch: expected a number, a Tensor or None, got str": {
            "num_items_in_batch": "6"
        },
        "ValueError: label_smoothing: expected a number": {"label_smoothing": 2.0},
        "ValueError: softcap: expected a number above 0.0, got 0.0": {"softcap": 0.0},
    }.items(),
)
def test_what_is_refused(error: str, changes: dict[str, object]) -> None:
    with raises(error):
        causal_lm_loss(**{"logits": LOGITS, "labels": LABELS, "vocab_size": 4, **changes})


@pytest.mark.parametrize(
    ("error", "changes"),
    {
        "TypeError: hidden_states: expected a floating dtype": {"hidden_states": LABELS},
        r"ValueError: hidden_states: expected shape \[..., H\] with H = 5, got \[2, 3, 6\]": {
            "hidden_states": torch.zeros(2, 3, 6)
        },
        r"ValueError: lm_head_weight: expected shape \[vocab_size, H\], got \[5\]": {
            "lm_head_weight": torch.zeros(5)
        },
        "TypeError: lm_head_weight: expected a Tensor, got NoneType": {"lm_head_weight": None},
        "ValueError: softcap: expected one number, got 3.0 and final_logit_softcapping 4.0": {
            "softcap": 3.0,
            "final_logit_softcapping": 4.0,
        },
        "TypeError: lm_head_weight: expected the dtype of hidden_states, torch.float32": {
            "lm_head_weight": torch.zeros(4, 5, dtype=torch.bfloat16)
        },
        "ValueError: lm_head_weight: expected the device of hidden_states, cpu, got meta": {
            "lm_head_weight": torch.zeros(4, 5, device="meta")
        },
        r"IndexError: labels: expected labels from 0 to 3.*got 7 at \[1, 2\]": {"labels": BAD},
        r"IndexError: shift_labels: .*got 9 at \[0, 0\]": {"shift_labels": BAD},
        "ValueError: linear_bias: expected shape": {"linear_bias": torch.zeros(3)},
        "TypeError: num_items_in_batch: expected a number, a Tensor or None, got bool": {
            "num_items_in_batch": True
        },
    }.items(),
)
def test_what_is_refused_without_logits(error: str, changes: dict[str, object]) -> None:
    hidden, matrix = torch.zeros(2, 3, 5), torch.zeros(4, 5)
    given = {"hidden_states": hidden, "lm_head_weight": matrix, "labels": LABELS, **changes}
    with raises(error):
        linear_causal_lm_loss(**given)
