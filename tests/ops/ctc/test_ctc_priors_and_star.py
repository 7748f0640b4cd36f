"""Class priors and the star of CTC against the enumeration of all alignments."""

from itertools import product

import pytest
import torch
from helpers.ctc import backends
from torch import Tensor

import partita

STAR = 9
PRIORS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()


def alignments(target: list[int], steps: int, C: int) -> list[tuple[int, ...]]:
    """Return the sequences of classes, with the star among them, that spell the target."""
    found = []
    for classes in product([*range(C), STAR], repeat=steps):
        merged = [c for i, c in enumerate(classes) if i == 0 or c != classes[i - 1]]
        if [c for c in merged if c] == target:
            found.append(classes)
    return found


def scores_of(log_probs: Tensor, n: int, target: list[int], steps: int) -> Tensor:
    C = log_probs.shape[2]
    return torch.stack(
        [
            sum((log_probs[t, n, c] for t, c in enumerate(path) if c != STAR), torch.zeros(()))
            for path in alignments(target, steps, C)
        ]
    )


@backends
@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(("priors", "scale", "star"), [(PRIORS, 0.7, None), (None, 1.0, STAR)])
def test_against_the_enumeration(
    backend: str, from_logits: bool, priors: Tensor | None, scale: float, star: int | None
) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 2, 3, generator=g, dtype=torch.float64, requires_grad=True)
    first = [2, 1] if star is None else [2, STAR]
    targets, lengths = torch.tensor([first, [1, 77]]), ([4, 3], [2, 1])
    options = {"label_priors": priors, "prior_scale": scale, "star": star}
    with partita.backend(backend):
        loss = partita.ctc_loss(
            logits, targets, *lengths, reduction="none", from_logits=from_logits, **options
        )
        best = partita.ctc_align(logits, targets, *lengths, from_logits=from_logits, **options)
    log_probs = logits.log_softmax(-1) if from_logits else logits
    if priors is not None:
        log_probs = log_probs - scale * priors
    totals = []
    for n, (target, steps) in enumerate(zip((first, [1]), lengths[0], strict=True)):
        scores, ways = scores_of(log_probs, n, target, steps), alignments(target, steps, 3)
        totals.append(-scores.logsumexp(0))
        torch.testing.assert_close(loss[n], totals[-1])
        torch.testing.assert_close(best.score[n], scores.max())
        assert tuple(best.labels[n, :steps].tolist()) == ways[int(scores.argmax())]
    found, expected = (torch.autograd.grad(x, logits)[0] for x in (loss.sum(), sum(totals)))
    torch.testing.assert_close(found, expected)


def test_a_star_takes_any_class_and_gives_its_steps_no_gradient() -> None:
    logits = torch.zeros(3, 1, 4, requires_grad=True)
    loss = partita.ctc_loss(logits, torch.tensor([[4]]), [3], [1], from_logits=True, star=4)
    assert loss < 0  # the star alone has probability 1, and alignments with blanks add to it
    labels = partita.ctc_align(logits, torch.tensor([[4]]), [3], [1], from_logits=True, star=4)
    assert labels.labels.tolist() == [[4, 4, 4]] and labels.spans().end.tolist() == [[3]]


def test_errors_name_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(3, 2, 4)
    targets, lengths = torch.tensor([[1, 2], [5, 4]]), ([3, 3], [2, 1])
    for options, message in (
        ({"star": 3}, "star: expected an index of at least C = 4, got 3"),
        ({"star": 2**63}, "star: expected an index of int64, got 9223372036854775808"),
        (
            {"label_priors": torch.tensor([0.0, 0.0, -torch.inf, 0.0]), "star": 5},
            r"label_priors: expected finite logarithms, got -inf at \[2\]",
        ),
        (
            {"label_priors": torch.zeros(3)},
            r"label_priors: expected shape \[C\] = \[4\], got \[3\]",
        ),
        ({"label_priors": torch.zeros(4), "prior_scale": -1.0}, "prior_scale: expected a number"),
    ):
        with pytest.raises(ValueError, match=message):
            partita.ctc_loss(logits, targets, *lengths, **options)
    with pytest.raises(TypeError, match="label_priors: expected a floating dtype"):
        partita.ctc_align(logits, targets, *lengths, label_priors=torch.zeros(4).long())
    with pytest.raises(IndexError, match=r"to 3 or the star 9, got 5 at \[1, 0\]"):
        partita.ctc_loss(logits, targets, *lengths, star=9)
    monkeypatch.setenv("PARTITA_CHECK", "0")
    losses = partita.ctc_loss(logits, targets, *lengths, star=9, reduction="none")
    assert losses.isnan().tolist() == [False, True]
    targets[1, 0] = 4  # the class that stands for the star inside
    losses = partita.ctc_loss(logits, targets, *lengths, star=9, reduction="none")
    assert losses.isnan().tolist() == [False, True]
