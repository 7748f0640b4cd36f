"""The contract of transducers: forms of the arguments, invalid values, padding, errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ctc import backends
from helpers.errors import raises
from helpers.rnnt import DURATIONS, sample
from torch import Tensor

import partita

X, Y, TARGETS, STEPS, LABELS = sample()


def rnnt(x: Tensor, targets: Any, steps: Any, labels: Any) -> Tensor:
    return partita.rnnt_loss(x, targets, steps, labels, 0, reduction="none")


def tdt(x: Tensor, targets: Any, steps: Any, labels: Any) -> Tensor:
    """Return the loss of token logits, with the durations' logits from the same tensor."""
    inputs = (x, 0.5 * x[..., : len(DURATIONS)], targets, steps, labels)
    return partita.tdt_loss(*inputs, 0, DURATIONS, reduction="none")


LOSSES: dict[str, Callable[..., Tensor]] = {"rnnt": rnnt, "tdt": tdt}
losses = pytest.mark.parametrize("name", LOSSES)


@backends
@losses
def test_forms_of_the_arguments(name: str, backend: str) -> None:
    loss = LOSSES[name]
    with partita.backend(backend):
        expected = loss(X, TARGETS, STEPS, LABELS)
        for form in (torch.Tensor.tolist, lambda t: tuple(t.tolist()), lambda t: t.int()):
            assert torch.equal(loss(X, TARGETS.int(), form(STEPS), form(LABELS)), expected)
        strided = X.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
        wide_targets = TARGETS.repeat_interleave(2, 1)[:, ::2].to(torch.uint8)
        assert torch.equal(loss(strided, wide_targets, STEPS, LABELS), expected)
        repeated = X[:, :1].expand(-1, 4, -1, -1)
        found = loss(repeated, TARGETS, STEPS, LABELS)
        assert torch.equal(found, loss(repeated.contiguous(), TARGETS, STEPS, LABELS))


@backends
@losses
def test_labels_past_the_lengths_may_have_any_value(name: str, backend: str) -> None:
    targets = torch.where(torch.arange(TARGETS.shape[1]) < LABELS[:, None], TARGETS, -7)
    x = X.clone().requires_grad_()
    with partita.backend(backend):
        expected, found = (LOSSES[name](x, each, STEPS, LABELS) for each in (TARGETS, targets))
        assert torch.equal(found, expected)
        grads = (torch.autograd.grad(each.sum(), x)[0] for each in (expected, found))
        assert torch.equal(*grads)


@pytest.mark.usefixtures("unchecked")
@backends
@losses
def test_an_unchecked_blank_in_a_target_makes_nan_of_its_sequence(name: str, backend: str) -> None:
    targets = TARGETS.clone()
    targets[1, 0] = 0
    x = X.clone().requires_grad_()
    with partita.backend(backend):
        found = LOSSES[name](x, targets, STEPS, LABELS)
        (grad,) = torch.autograd.grad(found.sum(), x)
        best = partita.rnnt_align(x, targets, STEPS, LABELS, 0)
    invalid = [False, True, False, False]
    assert found.isnan().tolist() == best.score.isnan().tolist() == invalid
    assert grad[1].isnan().all() and grad[[0, 2, 3]].isfinite().all()
    assert (best.steps[1] == -1).all()


@backends
@losses
def test_sequences_without_a_path_and_without_a_gradient(name: str, backend: str) -> None:
    x = X.clone()
    x[2] = torch.nan  # its loss is NaN, and its upstream gradient is 0
    x = x.requires_grad_()
    steps = torch.tensor([4, 0, 3, 2])
    with partita.backend(backend):
        found = LOSSES[name](x, TARGETS, steps, LABELS)
        (grad,) = torch.autograd.grad(found, x, torch.tensor([1.0, 1, 0, 1]).double())
        best = partita.rnnt_align(x, TARGETS, steps, LABELS, 0)
    assert found[1] == torch.inf and found[2].isnan()
    assert (grad[1:3] == 0).all() and grad.isfinite().all()
    assert best.score[1] == -torch.inf and best.score[2].isnan()
    assert (best.steps[1:3] == -1).all() and (best.scores[1] == 0).all()


@backends
def test_a_tdt_that_no_duration_fits(backend: str) -> None:
    """Without a duration of 1, three steps have no path of blanks of two."""
    x, y = torch.zeros(1, 3, 1, 2, requires_grad=True), torch.zeros(1, 3, 1, 2)
    targets = torch.empty(1, 0, dtype=torch.int64)
    with partita.backend(backend):
        loss = partita.tdt_loss(x, y, targets, [3], [0], 0, [0, 2])
        assert loss == torch.inf
        assert (torch.autograd.grad(loss, x)[0] == 0).all()
        assert partita.tdt_align(x, y, targets, [3], [0], 0, [0, 2]).score == -torch.inf


@backends
def test_nan_in_a_node_that_no_path_takes(backend: str) -> None:
    """The loss and the gradient are both NaN or neither: training sees the loss alone."""
    for (t, u), is_nan in {(1, 0): True, (2, 0): False, (2, 1): False}.items():
        x, y = torch.zeros(1, 3, 3, 3), torch.zeros(1, 3, 3, 1)
        x[0, t, u] = torch.nan  # Each arc takes a step, so the only path is (0, 0), (1, 1), (2, 2).
        tensors = [x.requires_grad_(), y.requires_grad_()]
        arguments = (torch.tensor([[1, 2]]), [3], [2], 0, [1])
        with partita.backend(backend):
            loss = partita.tdt_loss(*tensors, *arguments)
            grads = torch.autograd.grad(loss, tensors)
            best = partita.tdt_align(x, y, *arguments)
        assert loss.isnan() == best.score.isnan() == is_nan
        for grad in grads:
            assert (grad.isnan() == is_nan).all()


@backends
def test_inplace_writes_the_gradient_over_the_logits(backend: str) -> None:
    with partita.backend(backend):
        x = X.clone().requires_grad_()
        expected = torch.autograd.grad(rnnt(x, TARGETS, STEPS, LABELS).mean(), x)[0]
        h = x * 1
        loss = partita.rnnt_loss(h, TARGETS, STEPS, LABELS, 0, inplace=True)
        loss.backward()
        assert torch.equal(x.grad, expected) and torch.equal(h.detach(), expected)
        with pytest.raises(RuntimeError, match="inplace: expected logits that were computed"):
            partita.rnnt_loss(x, TARGETS, STEPS, LABELS, 0, inplace=True)
        h = x * 1
        loss = partita.rnnt_loss(h, TARGETS, STEPS, LABELS, 0, inplace=True)
        with pytest.raises(RuntimeError, match="no second"):
            torch.autograd.grad(loss, x, create_graph=True)
        before = X.clone()
        partita.rnnt_loss(before, TARGETS, STEPS, LABELS, 0, inplace=True)
        assert torch.equal(before, X)


BAD: dict[str, dict[str, Any]] = {
    "TypeError: logits: expected a floating dtype": {"logits": X.long()},
    r"ValueError: logits: expected shape \[B, T, U \+ 1, V\] with U >= 0 and V >= 1, got"
    r" \[4, 3, 5\]": {"logits": X[0]},
    "TypeError: targets: expected an integer dtype": {"targets": TARGETS.double()},
    r"ValueError: targets: expected shape \[B, U\] = \[4, 2\], got \[4, 1\]": {
        "targets": TARGETS[:, :1]
    },
    r"IndexError: targets: expected labels from 0 to 4 other than the blank 0, got 5 at \[0, 0\]": {
        "targets": TARGETS.clone().fill_(5)
    },
    r"IndexError: targets: expected labels from 0 to 4 other than the blank 0, got 0 at \[0, 0\]": {
        "targets": TARGETS.clone().fill_(0)
    },
    "ValueError: blank: expected a class from -5 to 4, got 5": {"blank": 5},
    r"ValueError: logit_lengths: expected steps from 0 to 4, got 5 at \[1\]": {
        "logit_lengths": [4, 5, 1, 1]
    },
    r"ValueError: target_lengths: expected labels from 0 to 2, got -1 at \[0\]": {
        "target_lengths": [-1, 2, 1, 1]
    },
    r"ValueError: target_lengths: expected shape \[N\] = \[4\], got \[1\]": {"target_lengths": [1]},
    "ValueError: reduction: expected one of 'none', 'mean', 'sum', 'mean_batch', 'mean_volume',"
    " got 'max'": {"reduction": "max"},
    "ValueError: hat: expected logits, which is fused_log_softmax=True, got log-probabilities": {
        "hat": True,
        "fused_log_softmax": False,
    },
    "TypeError: clamp: expected a number, got '1'": {"clamp": "1"},
    "ValueError: fastemit_lambda: expected a number of at least 0.0, got -1.0": {
        "fastemit_lambda": -1.0
    },
}


@pytest.mark.parametrize("error", BAD)
def test_bad_input(error: str) -> None:
    good = {
        "logits": X,
        "targets": TARGETS,
        "logit_lengths": STEPS,
        "target_lengths": LABELS,
        "blank": 0,
    }
    with raises(error):
        partita.rnnt_loss(**{**good, **BAD[error]})


BAD_TDT: dict[str, dict[str, Any]] = {
    r"ValueError: duration_logits: expected shape \[B, T, U \+ 1, K\] = \[4, 4, 3, 'K'\],": {
        "duration_logits": Y[:, :2]
    },
    "TypeError: duration_logits: expected the dtype of token_logits, torch.float64, got"
    " torch.float32": {"duration_logits": Y.float()},
    "ValueError: blank_token_id: expected a class from -5 to 4, got 7": {"blank_token_id": 7},
    r"ValueError: durations: expected 1 to 8 numbers, 0 or more, of which one is above 0, got"
    r" \[0, 1, -2\]": {"durations": [0, 1, -2]},
    "ValueError: durations: expected 1 to 8 numbers": {"durations": [0, 0, 0]},
    "ValueError: durations: expected 3 numbers, one for each entry of the duration logits, got 2": {
        "durations": [0, 1]
    },
    "ValueError: sigma: expected a number of at least 0.0, got -0.1": {"sigma": -0.1},
}


@pytest.mark.parametrize("error", BAD_TDT)
def test_bad_input_of_tdt(error: str) -> None:
    good = {
        "token_logits": X,
        "duration_logits": Y,
        "targets": TARGETS,
        "logit_lengths": STEPS,
        "target_lengths": LABELS,
        "blank_token_id": 0,
        "durations": DURATIONS,
    }
    with raises(error):
        partita.tdt_loss(**{**good, **BAD_TDT[error]})
