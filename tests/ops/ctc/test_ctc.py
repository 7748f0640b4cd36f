"""CTC, with priors and a star too, against every alignment enumerated, and against PyTorch."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ctc import BACKENDS, NEEDS_NUMBA, backends, sample
from hypothesis import given, settings
from hypothesis import strategies as st

import partita


def collapsed(path: tuple[int, ...], blank: int) -> list[int]:
    """Return the labels that are left of an alignment without repeats and blanks."""
    return [label for label, _ in itertools.groupby(path) if label != blank]


def alignments(target: list[int], classes: Iterable[int], T: int, blank: int = 0) -> list[Any]:
    """Return the sequences of classes that spell the target in T steps."""
    paths = itertools.product(classes, repeat=T)
    return [path for path in paths if collapsed(path, blank) == target]


def enumerated(
    log_probs: torch.Tensor, target: list[int], blank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all alignments of a target, `[M, T]`, and their scores, from `[T, C]`."""
    steps, classes = log_probs.shape
    found = alignments(target, range(classes), steps, blank)
    paths = torch.tensor(found, dtype=torch.int64).reshape(len(found), steps)
    return paths, log_probs[torch.arange(steps), paths].sum(1)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[int]], list[int], int]:
    """Draw logits, targets without blanks, input lengths and the blank."""
    steps, classes = draw(st.integers(0, 5)), draw(st.integers(2, 4))
    batch = draw(st.integers(0, 3))
    blank = draw(st.integers(0, classes - 1))
    labels = st.sampled_from([c for c in range(classes) if c != blank])
    targets = [draw(st.lists(labels, max_size=3)) for _ in range(batch)]
    lengths = [draw(st.integers(0, steps)) for _ in range(batch)]
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    logits = torch.randn(steps, batch, classes, generator=g, dtype=torch.float64)
    logits[torch.rand(logits.shape, generator=g) < draw(st.sampled_from([0.0, 0.2]))] = -torch.inf
    # A row without any class has no softmax.
    logits[..., blank] = logits[..., blank].nan_to_num(neginf=0.0)
    return logits, targets, lengths, blank


def padded(targets: list[list[int]], fill: int = -7) -> torch.Tensor:
    width = max(map(len, targets), default=0)
    rows = [t + [fill] * (width - len(t)) for t in targets]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(targets), width)


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from(BACKENDS), st.booleans())
def test_against_every_alignment(batch: tuple[Any, ...], backend: str, from_logits: bool) -> None:
    logits, targets, lengths, blank = batch
    x = (logits if from_logits else logits.log_softmax(-1)).requires_grad_()
    with partita.backend(backend):
        rest = padded(targets), lengths, [len(t) for t in targets], blank
        losses = partita.ctc_loss(x, *rest, "none", from_logits=from_logits)
        best = partita.ctc_align(x, *rest, from_logits=from_logits)
        (grad,) = torch.autograd.grad(losses.nan_to_num(posinf=0.0).sum(), x)
    log_probs = logits.log_softmax(-1)
    for n, target in enumerate(targets):
        length = lengths[n]
        paths, scores = enumerated(log_probs[:length, n], target, blank)
        total = scores.logsumexp(0) if len(scores) else torch.tensor(-torch.inf)
        torch.testing.assert_close(losses[n].detach(), -total.double(), rtol=1e-10, atol=1e-10)
        expected = torch.zeros(len(logits), logits.shape[2], dtype=torch.float64)
        assert (best.labels[n, length:] == -1).all() and (best.tokens[n, length:] == -1).all()
        if total > -torch.inf:
            for t in range(length):
                expected[t].index_add_(0, paths[:, t], -(scores - total).exp())
            expected[:length] += from_logits * log_probs[:length, n].exp()
            torch.testing.assert_close(best.score[n].double(), scores.max(), rtol=1e-6, atol=1e-6)
            assert collapsed(tuple(best.labels[n, :length].tolist()), blank) == target
            found = (paths == best.labels[n, :length]).all(1)
            torch.testing.assert_close(scores[found], scores.max()[None], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(best.scores[n].sum(), best.score[n], rtol=1e-6, atol=1e-6)
        else:
            assert best.score[n] == -torch.inf and (best.labels[n] == -1).all()
        torch.testing.assert_close(grad[:, n], expected, rtol=1e-9, atol=1e-9)


@backends
@pytest.mark.parametrize("classes", [63, 64, 65, 200])
def test_wide_vocabularies(classes: int, backend: str) -> None:
    """Sums over several lanes are right, whether the classes of a step are contiguous or not.

    A NaN among the classes makes its sequence NaN; -inf does not.
    """
    g = torch.Generator().manual_seed(classes)
    x = 3 * torch.randn(6, 3, classes, dtype=torch.float64, generator=g) + 500
    x[0, :, 5] = -torch.inf
    targets = torch.tensor([[1, classes - 1], [2, 2], [62, 1]])
    rest = targets, torch.full((3,), 6), torch.tensor([2, 2, 2])
    truth = F.ctc_loss(x.log_softmax(2), *rest, reduction="none")
    # PyTorch's gradient is NaN where logits are -inf.
    low = x.clamp(min=-1000.0).requires_grad_()
    (expected,) = torch.autograd.grad(F.ctc_loss(low.log_softmax(2), *rest, reduction="sum"), low)
    for laid in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        leaf = laid.clone(memory_format=torch.preserve_format).requires_grad_()
        with partita.backend(backend):
            loss = partita.ctc_loss(leaf, *rest, reduction="none", from_logits=True)
            (grad,) = torch.autograd.grad(loss.sum(), leaf)
        torch.testing.assert_close(loss, truth, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-11)
    for c in (0, classes // 2, classes - 1):
        with_nan = x.clone()
        with_nan[3, 1, c] = torch.nan
        with partita.backend(backend):
            loss = partita.ctc_loss(with_nan, *rest, reduction="none", from_logits=True)
        assert loss.isnan().tolist() == [False, True, False]


@backends
def test_targets_that_cannot_be_aligned(backend: str) -> None:
    x = torch.zeros(2, 3, 3, requires_grad=True)
    rest = torch.tensor([[1, 1], [1, 2], [2, 2]]), [2, 2, 0], [2, 2, 0]
    with partita.backend(backend):
        losses = partita.ctc_loss(x, *rest, reduction="none", from_logits=True)
        assert losses.tolist() == pytest.approx([math.inf, 2 * math.log(3), 0.0])
        for zero in (False, True):
            options = {"zero_infinity": zero, "reduction": "sum", "from_logits": True}
            loss = partita.ctc_loss(x, *rest, **options)
            assert torch.isfinite(loss) == zero
            (grad,) = torch.autograd.grad(loss, x)
            assert not grad[:, [0, 2]].any() and grad[:, 1].abs().sum() > 0


def test_long_sequences() -> None:
    """Losses and gradients in fp32 agree with fp64 at 4,000 steps and 300 labels."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 2, 8, generator=g)
    targets, lengths = torch.randint(1, 8, (2, 300), generator=g), [300, 250]
    found = []
    for dtype in (torch.float32, torch.float64):
        x = logits.to(dtype).requires_grad_()
        loss = partita.ctc_loss(
            x, targets, [4000, 3500], lengths, reduction="sum", from_logits=True
        )
        found.append((loss.detach().double(), torch.autograd.grad(loss, x)[0].double()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=4e-6)
    assert (found[0][1] - found[1][1]).abs().max() <= 2e-6


def test_spans_of_tokens() -> None:
    path = torch.tensor([0, 1, 1, 0, 2, 2, 2, 0])
    x = torch.where(F.one_hot(path, 3) > 0, 0.9, 0.05).log()[:, None]
    spans = partita.ctc_align(x, torch.tensor([[1, 2, 1]]), [8], [2]).spans()
    assert spans.start.tolist() == [[1, 4, -1]] and spans.end.tolist() == [[3, 7, -1]]
    assert spans.score.flatten().tolist() == pytest.approx([*[math.log(0.9)] * 2, 0.0], rel=1e-6)
    concatenated = partita.ctc_align(x, torch.tensor([1, 2]), [8], [2]).spans()
    assert concatenated.end.tolist() == [[3, 7]]
    nowhere = partita.ctc_align(x[:1], torch.tensor([[1, 2]]), [1], [2]).spans()
    assert nowhere.start.tolist() == [[-1, -1]] and nowhere.score.tolist() == [[0.0, 0.0]]


@backends
def test_nan_is_not_a_loss_of_zero(backend: str) -> None:
    """A NaN makes its own sequence NaN, with `zero_infinity` too.

    A step whose logits are all -inf does the same.
    """
    rest = torch.tensor([[1, 2], [1, 2]]), [5, 5], [2, 2]
    for value, from_logits in ((math.nan, False), (math.nan, True), (math.inf, True)):
        logits = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))
        logits[2, 0] = value
        all_impossible = logits.clone()
        all_impossible[2, 0] = -math.inf
        options = {"zero_infinity": True, "reduction": "none", "from_logits": from_logits}
        for row in (logits, all_impossible) if from_logits else (logits,):
            leaf = row.clone().requires_grad_()
            with partita.backend(backend):
                loss = partita.ctc_loss(leaf, *rest, **options)
                best = partita.ctc_align(row, *rest, from_logits=from_logits)
            (grad,) = torch.autograd.grad(loss.sum(), leaf)
            assert loss.isnan().tolist() == best.score.isnan().tolist() == [True, False]
            assert grad[:, 0].isnan().any() and grad[:, 1].isfinite().all()


@NEEDS_NUMBA
def test_threads_share_large_batches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads give the same bits as one, and a small batch does not start them."""
    from partita.primitives.cpu import batch

    logits, *rest = sample()
    x = logits.requires_grad_()

    def run() -> tuple[torch.Tensor, ...]:
        loss = partita.ctc_loss(x, *rest, from_logits=True)
        best = partita.ctc_align(x, *rest, from_logits=True)
        return loss, torch.autograd.grad(loss, x)[0], best.labels, best.score

    started = []
    pool = batch._pool
    monkeypatch.setattr(batch, "_pool", lambda threads: started.append(threads) or pool(threads))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with partita.backend("numba"):
        alone = run()
        assert not started
        monkeypatch.setattr(batch, "SMALL", 0)
        assert all(map(torch.equal, run(), alone)) and started


def test_words_of_tokens() -> None:
    """Spaces belong to no word, a token that is not aligned counts nothing."""
    spans = partita.TokenSpans(
        start=torch.tensor([[0, 3, 4, 7, -1], [2, 5, 6, 8, 9]]),
        end=torch.tensor([[2, 4, 6, 8, -1], [4, 6, 8, 9, 11]]),
        score=torch.tensor([[-1.0, -2.0, -4.0, -3.0, 0.0], [-1.0, -3.0, -2.0, -5.0, -6.0]]),
    )
    words = torch.tensor([[0, 0, -1, 2, 2], [0, -1, 0, 1, 9]])
    found = partita.word_spans(spans, words)
    assert found.start.tolist() == [[0, -1, 7, -1, -1], [2, 8, -1, -1, -1]]
    assert found.end.tolist() == [[4, -1, 8, -1, -1], [8, 9, -1, -1, -1]]
    expected = torch.tensor([[-4.0 / 3, 0, -3.0, 0, 0], [-6.0 / 4, -5.0, 0, 0, 0]])
    torch.testing.assert_close(found.score, expected)
    with pytest.raises(ValueError, match=r"word_of_token: expected shape \[N, S\] = \[2, 5\]"):
        partita.word_spans(spans, words[:, :4])
    with pytest.raises(TypeError, match="spans: expected TokenSpans, got tuple"):
        partita.word_spans(tuple(spans), words)  # type: ignore[arg-type]


STAR = 9
PRIORS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()


@backends
@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(("priors", "scale", "star"), [(PRIORS, 0.7, None), (None, 1.0, STAR)])
def test_priors_and_a_star_against_every_alignment(
    backend: str, from_logits: bool, priors: torch.Tensor | None, scale: float, star: int | None
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
        ways = alignments(target, [0, 1, 2, STAR], steps)
        terms = ([log_probs[t, n, c] for t, c in enumerate(path) if c != STAR] for path in ways)
        scores = torch.stack([sum(each, torch.zeros(())) for each in terms])
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
