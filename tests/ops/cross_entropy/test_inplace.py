"""`inplace=True` writes the gradient over the logits, and refuses calls where that is wrong."""

from collections.abc import Callable

import pytest
import torch
from helpers.rows import check_loss, class_weights, devices, devices_and_dtypes, leaf, targets_for
from torch import Tensor

import partita
from partita.testing import edge_rows, sample_labels, sample_rows

CLASSES = 37
passes = pytest.mark.parametrize("reduction", ["none", "mean"])  # two passes, and one


@pytest.mark.interpreted
@devices_and_dtypes
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3}], ids=["plain", "all"]
)
def test_against_fp64(
    options: dict, kind: str, reduction: str, dtype: torch.dtype, device: str
) -> None:
    logits = 3 * sample_rows(16, CLASSES, dtype=dtype, device=device)
    weight = class_weights(CLASSES, dtype, device) if options else None
    check_loss(
        logits,
        targets_for(logits, kind, ignored=-100),
        weight,
        inplace=True,
        reduction=reduction,
        **options,
    )


@pytest.mark.interpreted
@devices_and_dtypes
@passes
def test_the_gradient_lies_where_the_logits_were(
    reduction: str, dtype: torch.dtype, device: str
) -> None:
    x = leaf(6, CLASSES, dtype=dtype, device=device)
    logits = x * 1
    version = logits._version
    loss = partita.cross_entropy(
        logits, targets_for(x, "labels"), reduction=reduction, inplace=True
    )
    assert logits._version > version
    (grad,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
    assert grad.data_ptr() == logits.data_ptr()
    assert not torch.equal(logits, x)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_only_the_logits_are_written(dtype: torch.dtype, device: str) -> None:
    x = edge_rows("framed", columns=CLASSES, dtype=dtype, device=device)
    frame = x.as_strided((x.shape[0] + 2, CLASSES + 3), (x.stride(0), 1), 0)
    base = frame.clone().requires_grad_()
    logits = (base * 1)[1:-1, 1:-2]
    memory = logits._base
    loss = partita.cross_entropy(logits, targets_for(x, "labels"), inplace=True)
    torch.autograd.grad(loss, base)
    inside = torch.zeros_like(memory, dtype=torch.bool)
    inside[1:-1, 1:-2] = True
    assert torch.equal(memory.detach().isnan(), ~inside)


@pytest.mark.interpreted
@devices
def test_no_effect_where_no_gradient_is_needed(device: str) -> None:
    logits, target = sample_labels(6, CLASSES, device=device)
    before, version = logits.clone(), logits._version
    partita.cross_entropy(logits, target, inplace=True)
    with torch.no_grad():
        partita.cross_entropy(logits.clone().requires_grad_() * 1, target, inplace=True)
        partita.cross_entropy(tracked := logits.clone().requires_grad_(), target, inplace=True)
    assert torch.equal(logits, before)
    assert torch.equal(tracked, before)
    assert logits._version == version


@pytest.mark.interpreted
@devices
@passes
def test_refuses_a_second_derivative(reduction: str, device: str) -> None:
    x = leaf(6, CLASSES, device=device)
    loss = partita.cross_entropy(x * 1, targets_for(x, "labels"), reduction=reduction, inplace=True)
    with pytest.raises(RuntimeError, match=r"inplace=True.*second derivative"):
        torch.autograd.grad(loss.sum(), x, create_graph=True)


@pytest.mark.interpreted
@devices
@passes
def test_refuses_a_second_backward_pass(reduction: str, device: str) -> None:
    x = leaf(6, CLASSES, device=device)
    loss = partita.cross_entropy(
        x * 1, targets_for(x, "labels"), reduction=reduction, inplace=True
    ).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"inplace|in-place"):
        loss.backward()


@devices
@passes
def test_autograd_raises_if_others_saved_the_logits(reduction: str, device: str) -> None:
    """Check that autograd raises: the backward pass of exp needs its result, which is gone."""
    x = leaf(6, CLASSES, device=device)
    loss = partita.cross_entropy(
        x.exp(), targets_for(x, "labels"), reduction=reduction, inplace=True
    )
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        loss.sum().backward()


@pytest.mark.interpreted
@devices
def test_autograd_raises_on_a_use_between_the_passes(device: str) -> None:
    """Check that autograd raises if the logits are saved between forward and backward pass.

    Without a reduction the logits live until the backward pass, so other ops may still use them.
    """
    x = leaf(6, CLASSES, device=device)
    logits = x * 1
    loss = partita.cross_entropy(logits, targets_for(x, "labels"), reduction="none", inplace=True)
    square = logits.square().sum()
    loss.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        square.backward()


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize(
    "write",
    [lambda z, t: z.detach().zero_(), lambda z, t: partita.cross_entropy(z, t, inplace=True)],
    ids=["zeros", "another loss"],
)
def test_a_write_over_the_gradient_raises(
    write: Callable[[Tensor, Tensor], Tensor], device: str
) -> None:
    logits = leaf(4, CLASSES, device=device) * 2
    target = torch.zeros(4, dtype=torch.int64, device=device)
    loss = partita.cross_entropy(logits, target, inplace=True)
    write(logits, target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "view",
    [
        lambda p: p,
        lambda p: p.view(37, 4).T,
        lambda p: p[:],
        lambda p: p.t().t(),
        lambda p: p.narrow(0, 1, 2),
    ],
)
def test_a_leaf_and_its_views_are_refused(view: Callable[[Tensor], Tensor]) -> None:
    parameter = leaf(4, CLASSES)
    before, logits = parameter.detach().clone(), view(parameter)
    message = "^inplace: expected logits that were computed .*, got a leaf, whose values would be"
    with pytest.raises(RuntimeError, match=message):
        partita.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64), inplace=True)
    assert torch.equal(parameter, before)


def test_rows_that_overlap_are_refused() -> None:
    numbers = torch.randn(10, requires_grad=True) * 1
    for rows in (numbers.unfold(0, 4, 1), numbers.expand(7, 10)):
        with pytest.raises(ValueError, match=r"^inplace: .* that is expanded or overlaps itself"):
            partita.cross_entropy(rows, torch.zeros(7, dtype=torch.int64), inplace=True)
    padded = (torch.randn(3, 6, requires_grad=True) * 1)[:, :5].T.T
    partita.cross_entropy(padded, torch.zeros(3, dtype=torch.int64), inplace=True).backward()


@pytest.mark.parametrize("which", ["target", "weight"])
def test_targets_and_weights_that_need_a_gradient_are_refused(which: str) -> None:
    x = leaf(6, CLASSES)
    tensors = {
        "target": targets_for(x.detach(), "probabilities"),
        "weight": class_weights(CLASSES, torch.float32, "cpu"),
    }
    tensors[which].requires_grad_()
    message = "^inplace: expected targets and class weights that need no gradient"
    with pytest.raises(RuntimeError, match=message):
        partita.cross_entropy(x * 1, **tensors, inplace=True)
