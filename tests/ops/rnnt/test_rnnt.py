"""Transducers against all of their paths, and against what other libraries compute."""

from typing import Any

import pytest
import torch
from helpers.ctc import backends
from helpers.rnnt import (
    DURATIONS,
    all_paths,
    hat_log_probs,
    losses_of_paths,
    rnnt_arcs,
    sample,
    tdt_arcs,
)
from torch import Tensor

import partita

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


def rnnt_losses(x: Tensor, targets: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
    """Return the losses of log-probabilities, in which class 0 is the blank."""
    arcs = [rnnt_arcs(each, target, 0) for each, target in zip(x, targets, strict=True)]
    return losses_of_paths(arcs, steps, labels)


@backends
@pytest.mark.parametrize("options", ["fused", "log_probs", "hat", "delay"])
def test_rnnt_against_all_paths(options: str, backend: str) -> None:
    logits, _, *sequences = sample()
    x = logits.requires_grad_()
    log_probs = hat_log_probs(x, 0) if options == "hat" else x.log_softmax(-1)
    if options == "log_probs":
        log_probs = x
    scores = log_probs
    if options == "delay":
        t = torch.arange(x.shape[1])
        delay = (sequences[1][:, None] - 1).double() / 2 - t
        is_label = torch.arange(x.shape[3]) > 0
        scores = scores + 0.3 * delay[:, :, None, None] * is_label
    expected = rnnt_losses(scores, *sequences)
    kwargs: dict[str, Any] = {
        "fused_log_softmax": options != "log_probs",
        "hat": options == "hat",
        "delay_penalty": 0.3 * (options == "delay"),
    }
    with partita.backend(backend):
        losses = partita.rnnt_loss(x, *sequences, 0, reduction="none", **kwargs)
        (grad,) = torch.autograd.grad(losses, x, torch.arange(1.0, 5).double())
    torch.testing.assert_close(losses, expected, **EXACT)
    truth = torch.autograd.grad(expected, x, torch.arange(1.0, 5).double())[0]
    torch.testing.assert_close(grad, truth, **EXACT)


@backends
@pytest.mark.parametrize("sigma", [0.0, 0.05])
def test_tdt_against_all_paths(sigma: float, backend: str) -> None:
    tokens, durations, *sequences = sample()
    x, y = tokens.requires_grad_(), durations.requires_grad_()
    targets, *lengths = sequences
    log_probs = x.log_softmax(-1) - sigma, y.log_softmax(-1)
    arcs = [tdt_arcs(*each, 0) for each in zip(*log_probs, targets, strict=True)]
    expected = losses_of_paths(arcs, *lengths)
    upstream = torch.arange(1.0, 5).double()
    with partita.backend(backend):
        losses = partita.tdt_loss(x, y, *sequences, 0, DURATIONS, sigma, "none")
        grads = torch.autograd.grad(losses, (x, y), upstream)
    torch.testing.assert_close(losses, expected, **EXACT)
    truth = torch.autograd.grad(expected, (x, y), upstream)
    torch.testing.assert_close(grads, truth, **EXACT)


@backends
def test_best_paths_are_the_best_of_all(backend: str) -> None:
    tokens, durations, *sequences = sample(seed=3)
    log_tokens, log_durations = tokens.log_softmax(-1), durations.log_softmax(-1)
    targets, steps, labels = sequences
    with partita.backend(backend):
        rnnt = partita.rnnt_align(tokens, *sequences, 0)
        same = partita.rnnt_align(log_tokens, *sequences, 0, fused_log_softmax=False)
        tdt = partita.tdt_align(tokens, durations, *sequences, 0, DURATIONS)
    torch.testing.assert_close(rnnt.scores, same.scores, **EXACT)
    for b, U in enumerate(labels.tolist()):
        for found, arcs in (
            (rnnt, rnnt_arcs(log_tokens[b], targets[b], 0)),
            (tdt, tdt_arcs(log_tokens[b], log_durations[b], targets[b], 0)),
        ):
            best = max(all_paths(arcs, int(steps[b]), U), key=lambda path: float(path.score))
            assert found.steps[b].tolist() == best.steps + [-1] * (targets.shape[1] - U)
            torch.testing.assert_close(found.score[b], best.score, **EXACT)
            assert (found.scores[b, U:] == 0).all()
            for score, value in zip(found.scores[b, :U], best.scores, strict=True):
                torch.testing.assert_close(score, value, **EXACT)


@backends
def test_equally_good_paths(backend: str) -> None:
    """Traced from the end, the path takes blanks first, and then the first duration."""
    x, targets = torch.zeros(1, 4, 3, 4), torch.tensor([[1, 2]])
    with partita.backend(backend):
        assert partita.rnnt_align(x, targets, [4], [2], 0).steps.tolist() == [[0, 0]]
        durations = torch.zeros(1, 4, 3, 3)
        found = partita.tdt_align(x, durations, targets, [4], [2], 0, [2, 1, 0])
    # One blank of two steps at the end, the label of two steps, and one of none.
    assert found.steps.tolist() == [[0, 0]]


@backends
def test_the_meaning_of_torchaudio(backend: str) -> None:
    """These numbers are from the tests and the documentation of torchaudio and warp-transducer."""
    logits = torch.tensor(
        [
            [
                [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.6, 0.1, 0.1], [0.1, 0.1, 0.2, 0.8, 0.1]],
                [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.2, 0.1, 0.1], [0.7, 0.1, 0.2, 0.1, 0.1]],
            ]
        ],
        requires_grad=True,
    )
    sequences = (torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([2]), torch.tensor([2]))
    with partita.backend(backend):
        loss = partita.rnnt_loss(logits, *(t.int() for t in sequences), blank=-1)
        last = partita.rnnt_loss(logits, *sequences, blank=4)
        first = partita.rnnt_loss(logits, *sequences, blank=0)
    assert loss == last
    assert first.item() == pytest.approx(4.495666773770733, rel=1e-6)


@backends
def test_reductions(backend: str) -> None:
    tokens, durations, *sequences = sample()
    labels = sequences[2]

    def rnnt(reduction: str) -> Tensor:
        return partita.rnnt_loss(tokens, *sequences, 0, reduction=reduction)

    def tdt(reduction: str) -> Tensor:
        inputs = (tokens, durations, *sequences, 0, DURATIONS)
        return partita.tdt_loss(*inputs, reduction=reduction)

    with partita.backend(backend):
        for loss, lengths in ((rnnt, 1), (tdt, labels.clamp(min=1))):
            losses = loss("none")
            torch.testing.assert_close(loss("mean"), (losses / lengths).mean())
            torch.testing.assert_close(loss("mean_batch"), losses.mean())
            torch.testing.assert_close(loss("mean_volume"), losses.sum() / labels.sum())
            torch.testing.assert_close(loss("sum"), losses.sum())


@backends
@pytest.mark.parametrize("fused", [True, False])
def test_clamp_and_fastemit_change_the_gradient_alone(fused: bool, backend: str) -> None:
    logits, _, *sequences = sample()
    x = (logits if fused else logits.log_softmax(-1)).requires_grad_()
    upstream = torch.tensor([1.0, -2.0, 3.0, 0.5]).double()

    def losses(**options: Any) -> tuple[Tensor, Tensor]:
        with partita.backend(backend):
            value = partita.rnnt_loss(
                x, *sequences, 0, reduction="none", fused_log_softmax=fused, **options
            )
            return value, torch.autograd.grad(value, x, upstream)[0]

    plain, grad = losses()
    factor = upstream[:, None, None, None]
    clamped, grad_clamped = losses(clamp=0.1)
    torch.testing.assert_close(clamped, plain, rtol=0, atol=0)
    torch.testing.assert_close(grad_clamped, (grad / factor).clamp(-0.1, 0.1) * factor, **EXACT)
    fast, grad_fast = losses(fastemit_lambda=0.5)
    torch.testing.assert_close(fast, plain, rtol=0, atol=0)
    # The gradient is linear in the scores of the labels' arcs, of which each node has one.
    log_probs = x.log_softmax(-1) if fused else x
    scale = torch.ones_like(x.detach()).requires_grad_()
    total = (rnnt_losses(log_probs * scale, *sequences) * upstream).sum()
    (of_arcs,) = torch.autograd.grad(total, scale, retain_graph=True)
    of_labels = of_arcs / log_probs.detach() * 0.5
    of_labels[..., 0] = 0
    (extra,) = torch.autograd.grad(log_probs, x, of_labels)
    torch.testing.assert_close(grad_fast, grad + extra, **EXACT)


@backends
def test_long_sequences_are_exact(backend: str) -> None:
    """Posteriors at the far end of a long sequence have no error that grows with its length."""
    T, U = (1500, 60) if backend == "numba" else (200, 20)
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, T, U + 1, 4, generator=g)
    targets = torch.randint(1, 4, (1, U), generator=g)
    x, truth = logits.clone().requires_grad_(), logits.double().requires_grad_()
    with partita.backend(backend):
        (grad,) = torch.autograd.grad(partita.rnnt_loss(x, targets, [T], [U], 0), x)
        loss = partita.rnnt_loss(truth, targets, [T], [U], 0)
        (expected,) = torch.autograd.grad(loss, truth)
    torch.testing.assert_close(grad.double(), expected, rtol=0, atol=2e-6)


@backends
def test_logits_far_from_zero(backend: str) -> None:
    """A log-sum-exp in fp32 would lose the digits that the softmax needs."""
    tokens, durations, *sequences = sample(torch.float32)
    x, y = (tokens + 1e4).requires_grad_(), (durations - 1e4).requires_grad_()
    with partita.backend(backend):
        for loss in (
            lambda x, y: partita.rnnt_loss(x, *sequences, 0) + 0 * y.sum(),
            lambda x, y: partita.tdt_loss(x, y, *sequences, 0, DURATIONS),
        ):
            found = torch.autograd.grad(loss(x, y), (x, y))
            truth = [t.detach().double().requires_grad_() for t in (x, y)]
            expected = torch.autograd.grad(loss(*truth), truth)
            for grad, exact in zip(found, expected, strict=True):
                torch.testing.assert_close(grad.double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("value", [-1e10, -1e30, 1e30, torch.finfo(torch.float32).min])
def test_nodes_whose_logits_are_all_far_from_zero(value: float, backend: str) -> None:
    """Equal logits are equal probabilities, as in a log-softmax, even where all are masked."""
    g = torch.Generator().manual_seed(0)
    tokens, durations = torch.randn(1, 3, 2, 4, generator=g), torch.randn(1, 3, 2, 2, generator=g)
    x = (torch.tensor([[1]]), [3], [1], 0)
    results = []
    for fill in (value, 0.0):
        tokens[0, 1], durations[0, 0] = fill, fill
        inputs = [tokens.clone().requires_grad_(), durations.clone().requires_grad_()]
        with partita.backend(backend):
            losses = [partita.rnnt_loss(inputs[0], *x)]
            losses += [partita.tdt_loss(*inputs, *x, [0, 1])]
            results.append([*losses, *torch.autograd.grad(sum(losses), inputs)])
    torch.testing.assert_close(*results)
