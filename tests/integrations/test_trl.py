"""TRL's row statistics against its definitions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.divergence import truth
from helpers.errors import raises
from helpers.rows import DTYPES, devices
from torch import Tensor

from partita.integrations.trl import (
    entropy_from_logits,
    generalized_jsd_loss,
    selective_log_softmax,
    selective_log_softmax_and_entropy,
)


def assert_rounded_once(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Assert that a result is the truth, rounded once to the dtype; on a GPU it may be fp32."""
    dtypes = (dtype,) if found.is_cpu else (dtype, torch.float32)
    assert found.dtype in dtypes and found.shape == expected.shape
    eps = torch.finfo(dtype).eps
    atol = 1e-5 if dtype in (torch.float32, torch.float64) else eps
    torch.testing.assert_close(found.double(), expected, rtol=max(eps, 1e-5), atol=atol)


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [None, 1, 5])
def test_selective_log_softmax(k: int | None, dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 32, 1024, generator=g).to(dtype).to(device).requires_grad_()
    shape = (4, 32) if k is None else (4, 32, k)
    index = torch.randint(1024, shape, generator=g).to(device)
    found = selective_log_softmax(logits, index)
    exact = logits.detach().double().requires_grad_()
    columns = index.unsqueeze(-1) if k is None else index
    expected = exact.log_softmax(-1).gather(-1, columns)
    expected = expected.squeeze(-1) if k is None else expected
    assert_rounded_once(found, expected, dtype)
    (grad,) = torch.autograd.grad(found.sum(), logits)
    (true,) = torch.autograd.grad(expected.sum(), exact)
    assert_rounded_once(grad, true, dtype)


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(768,), (2, 4, 8, 768)], ids=str)
def test_entropy_from_logits(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    for x in (torch.randn(shape, generator=g), torch.full(shape, 3.0)):
        logits = x.to(dtype).to(device)
        found = entropy_from_logits(logits, chunk_size=16)
        logp = logits.double().log_softmax(-1)
        assert_rounded_once(found, -(logp.exp() * logp).sum(-1), dtype)


@devices
@pytest.mark.parametrize("k", [None, 3])
def test_masked_rows(k: int | None, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, 40, generator=g).to(device).requires_grad_()
    shape = (2, 6) if k is None else (2, 6, k)
    index = torch.randint(40, shape, generator=g).to(device)
    mask = (torch.arange(index.numel(), device=device) % 5 > 1).view(shape)
    padded = index.masked_fill(~mask, -100)
    found = selective_log_softmax(logits, padded, temperature=0.7, row_mask=mask.int())
    expected = torch.where(mask, selective_log_softmax(logits / 0.7, index), 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(found.sum(), logits)
    (true,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(grad, true, rtol=1e-5, atol=1e-6)


@devices
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_both_in_one_read(entropy_grad: bool, masked: bool, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, 40, generator=g).to(device).requires_grad_()
    index = torch.randint(40, (2, 6), generator=g).to(device)
    mask = torch.arange(12, device=device).view(2, 6) % 5 > 1 if masked else None
    found = selective_log_softmax_and_entropy(logits, index, entropy_grad, 0.7, mask)
    keep = torch.ones_like(index) if mask is None else mask
    expected = selective_log_softmax(logits, index, 0.7), entropy_from_logits(logits / 0.7)
    for ours, each in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, each * keep, rtol=1e-5, atol=1e-5)
    assert found[1].requires_grad == entropy_grad


def assert_masked_rows_do_not_matter(
    f: Callable[..., Any], masked: Tensor, *rows: Tensor, grads: int = 1
) -> None:
    """Fill the masked rows of all tensors; the first `grads` of them have a gradient."""
    found = []
    for fill in (0.0, torch.nan, torch.inf, -torch.inf, 1e38):
        inputs = [x.masked_fill(masked[:, None], fill) for x in rows]
        leaves = [x.requires_grad_() for x in inputs[:grads]]
        results = f(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        firsts = torch.autograd.grad([r.square().sum() for r in results], leaves, create_graph=True)
        seconds = torch.autograd.grad([g.square().sum() for g in firsts], leaves)
        assert not any(grad[masked].any() for grad in (*firsts, *seconds)), fill
        found.append([*results, *firsts, *seconds])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@devices
@pytest.mark.parametrize("k", [None, 3])
def test_masked_rows_do_not_matter(k: int | None, device: str) -> None:
    logits = torch.linspace(-3, 3, 5 * 20, device=device).view(5, 20).sin() * 4
    mask = torch.tensor([1, 0, 1, 0, 1], device=device)
    index = torch.arange(5 * (k or 1), device=device).view(5, -1)
    index, keep = (index[:, 0], mask) if k is None else (index, mask[:, None].expand(5, k))
    labels = torch.where(mask == 1, 3, -100)
    calls: list[Callable[..., Any]] = [
        lambda x: selective_log_softmax(x, index, 0.7, row_mask=keep)
    ]
    if k is None:
        calls += [lambda x: selective_log_softmax_and_entropy(x, index, True, 0.7, mask)]
    for call in calls:
        assert_masked_rows_do_not_matter(call, mask == 0, logits)
    rows = (logits.softmax(-1), logits.flip(0).softmax(-1))
    for p in (False, True):
        assert_masked_rows_do_not_matter(
            lambda x, t, p=p: generalized_jsd_loss(x, t, labels, logits_are_probs=p),
            mask == 0,
            *rows,
        )


def test_bad_input() -> None:
    logits = torch.zeros(2, 3, 4)
    with raises("TypeError: index: expected an integer dtype"):
        selective_log_softmax(logits, torch.zeros(2, 3))
    for index in (torch.full((2, 3), 4), torch.full((2, 3, 1), 4)):
        with raises(r"IndexError: index: .*got 4 at \[0, 0"):
            selective_log_softmax(logits, index)
    with raises("ValueError: index: expected shape"):
        selective_log_softmax(logits, torch.zeros(2, 2, 1, dtype=torch.int64))
    labels = torch.zeros(2, 3, dtype=torch.int64)
    with raises("ValueError: row_mask: expected shape the shape of index"):
        selective_log_softmax(logits, labels, row_mask=torch.ones(2))
    with raises(r"ValueError: temperature: expected a number above 0\.0"):
        selective_log_softmax(logits, labels, temperature=0.0)


@devices
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("labelled", [False, True])
def test_generalized_jsd_loss(labelled: bool, beta: float, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(3, 5, 40, generator=g).to(device) for _ in range(2))
    student.requires_grad_()
    labels = torch.where(torch.arange(15, device=device).view(3, 5) % 4 > 0, 7, -100)
    keep = labels != -100 if labelled else torch.ones_like(labels, dtype=torch.bool)
    each = torch.where(keep, truth(student / 0.7, teacher / 0.7, beta), 0.0)
    number = keep.sum() if labelled else 3
    expected = {"sum": each.sum(), "mean": each.sum() / keep.sum() / 40}
    expected["batchmean"] = each.sum() / number
    given = labels if labelled else None
    for reduction, right in expected.items():
        loss = generalized_jsd_loss(student, teacher, given, beta, 0.7, reduction)
        torch.testing.assert_close(loss, right.float(), rtol=1e-5, atol=1e-6)
        found = torch.autograd.grad(loss, student)[0]
        true = torch.autograd.grad(right, student, retain_graph=True)[0]
        torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-6)
    items = torch.tensor(7, device=device)
    for number in (7, items):
        loss = generalized_jsd_loss(
            student, teacher, given, beta, 0.7, "sum", num_items_in_batch=number
        )
        torch.testing.assert_close(loss, expected["sum"].float() / 7, rtol=1e-5, atol=1e-6)
    p, q = student.softmax(-1), teacher.softmax(-1)
    found = generalized_jsd_loss(p, q, given, beta, 0.7, "sum", logits_are_probs=True)
    each = torch.where(keep, truth(student, teacher, beta), 0.0)
    torch.testing.assert_close(found, each.sum().float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("items", [None, 3])
def test_a_batch_without_labels_has_no_divergence(items: int | None) -> None:
    student, labels = torch.randn(2, 3, 4, requires_grad=True), torch.full((2, 3), -100)
    teacher = torch.randn(2, 3, 4)
    loss = generalized_jsd_loss(student, teacher, labels, num_items_in_batch=items)
    loss.backward()
    assert loss == 0 and not student.grad.any()
    assert generalized_jsd_loss(student[:0], teacher[:0]) == 0
    assert generalized_jsd_loss(student, teacher, labels, reduction="mean").isnan()


def test_bad_input_of_losses() -> None:
    with raises("ValueError: reduction: expected"):
        generalized_jsd_loss(torch.zeros(1, 2), torch.zeros(1, 2), reduction="none")
    with raises("TypeError: labels: expected an integer dtype"):
        generalized_jsd_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1))
    with raises("ValueError: teacher_logits: expected the shape of student_logits"):
        generalized_jsd_loss(torch.zeros(1, 2), torch.zeros(1, 3))
    with raises(r"ValueError: labels: expected shape student_logits\.shape\[:-1\]"):
        generalized_jsd_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(2).long())
