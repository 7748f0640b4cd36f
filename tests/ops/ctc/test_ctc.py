"""CTC against every alignment written out, against PyTorch, and at the edges of the contract."""

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import partita

BACKENDS = ["reference", "numba"]
backends = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _numba(request: pytest.FixtureRequest) -> None:
    if "numba" in request.node.name:
        pytest.importorskip("numba")


def collapsed(path: tuple[int, ...], blank: int) -> list[int]:
    """The labels that an alignment spells."""
    return [label for label, _ in itertools.groupby(path) if label != blank]


def enumerated(
    log_probs: torch.Tensor, target: list[int], blank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The alignments of a target `[M, T]`, and their scores; of `[T, C]`."""
    steps, classes = log_probs.shape
    every = [
        path
        for path in itertools.product(range(classes), repeat=steps)
        if collapsed(path, blank) == target
    ]
    paths = torch.tensor(every, dtype=torch.int64).reshape(len(every), steps)
    return paths, log_probs[torch.arange(steps), paths].sum(1)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[int]], list[int], int]:
    """Logits, targets without blanks, input lengths and the blank."""
    steps, classes, count = (
        draw(st.integers(0, 5)),
        draw(st.integers(2, 4)),
        draw(st.integers(0, 3)),
    )
    blank = draw(st.integers(0, classes - 1))
    labels = st.sampled_from([c for c in range(classes) if c != blank])
    targets = [draw(st.lists(labels, max_size=3)) for _ in range(count)]
    lengths = [draw(st.integers(0, steps)) for _ in range(count)]
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    logits = torch.randn(steps, count, classes, generator=g, dtype=torch.float64)
    logits[torch.rand(logits.shape, generator=g) < draw(st.sampled_from([0.0, 0.2]))] = -torch.inf
    logits[..., blank] = logits[..., blank].nan_to_num(
        neginf=0.0
    )  # a row without any class has no softmax
    return logits, targets, lengths, blank


def padded(targets: list[list[int]], fill: int = -7) -> torch.Tensor:
    most = max(map(len, targets), default=0)
    return torch.tensor([t + [fill] * (most - len(t)) for t in targets], dtype=torch.int64).reshape(
        len(targets), most
    )


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from(BACKENDS), st.booleans())
def test_against_every_alignment(batch: tuple[Any, ...], backend: str, from_logits: bool) -> None:
    logits, targets, lengths, blank = batch
    x = (logits if from_logits else logits.log_softmax(-1)).requires_grad_()
    with partita.backend(backend):
        losses = partita.ctc_loss(
            x,
            padded(targets),
            lengths,
            [len(t) for t in targets],
            blank,
            "none",
            from_logits=from_logits,
        )
        best = partita.ctc_align(
            x, padded(targets), lengths, [len(t) for t in targets], blank, from_logits=from_logits
        )
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
            mine = (paths == best.labels[n, :length]).all(1)
            torch.testing.assert_close(scores[mine], scores.max()[None], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(best.scores[n].sum(), best.score[n], rtol=1e-6, atol=1e-6)
        else:
            assert best.score[n] == -torch.inf and (best.labels[n] == -1).all()
        torch.testing.assert_close(grad[:, n], expected, rtol=1e-9, atol=1e-9)


def sample(
    dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """12 steps, 5 sequences, 6 classes; every target fits."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, 5, 6, generator=g, dtype=torch.float64).to(dtype)
    return (
        logits,
        torch.randint(1, 6, (5, 4), generator=g),
        torch.tensor([12, 9, 8, 12, 10]),
        torch.tensor([4, 2, 4, 0, 1]),
    )


@backends
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_forms_of_the_arguments(reduction: str, backend: str) -> None:
    """Padded and concatenated targets, lengths as tensors, lists and tuples of any dtype, and single sequences, as PyTorch takes them."""
    logits, targets, inputs, lengths = sample()
    x = logits.log_softmax(-1)
    joined = torch.cat([t[:n] for t, n in zip(targets, lengths.tolist(), strict=True)])
    expected = F.ctc_loss(x, targets, inputs, lengths, reduction=reduction)
    with partita.backend(backend):
        for target in (targets, targets.int(), joined, joined.to(torch.uint8)):
            for form in (
                lambda t: t,
                lambda t: t.int(),
                torch.Tensor.tolist,
                lambda t: tuple(t.tolist()),
            ):
                torch.testing.assert_close(
                    partita.ctc_loss(x, target, form(inputs), form(lengths), reduction=reduction),
                    expected,
                )
        alone = F.ctc_loss(x[:, 0], targets[0], (12,), (4,), reduction=reduction)
        for one in (12, 4), ((12,), [4]), (torch.tensor(12), torch.tensor(4)):
            torch.testing.assert_close(
                partita.ctc_loss(x[:, 0], targets[0], *one, reduction=reduction), alone
            )


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("from_logits", [False, True])
def test_dtypes(from_logits: bool, dtype: torch.dtype, backend: str) -> None:
    logits, *rest = sample(dtype)
    x = logits.requires_grad_()
    truth = logits.detach().double().requires_grad_()
    with partita.backend(backend):
        loss = partita.ctc_loss(x, *rest, from_logits=from_logits)
        (grad,) = torch.autograd.grad(loss, x)
    with partita.backend("reference"):
        expected = partita.ctc_loss(truth, *rest, from_logits=from_logits)
        (expected_grad,) = torch.autograd.grad(expected, truth)
    assert loss.dtype == torch.promote_types(dtype, torch.float32) and grad.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        loss.double(), expected, rtol=4 * torch.finfo(loss.dtype).eps, atol=0.0
    )
    torch.testing.assert_close(grad.double(), expected_grad, rtol=2 * eps, atol=2 * eps)


@backends
def test_strides_and_stride_zero(backend: str) -> None:
    logits, *rest = sample()
    frame = torch.full((5, 8, 12, 2), torch.nan, dtype=torch.float64)[:, :6, :, 0].permute(2, 0, 1)
    frame.copy_(logits)
    with partita.backend(backend):
        for x in (frame, logits[:, :1].expand(-1, 5, -1)):
            assert partita.ctc_loss(x, *rest, from_logits=True) == partita.ctc_loss(
                x.contiguous(), *rest, from_logits=True
            )


@backends
@pytest.mark.parametrize("classes", [63, 64, 65, 200])
def test_wide_vocabularies(classes: int, backend: str) -> None:
    """Sums of more than a lane or two, of classes side by side and of others; NaN in one of them spoils its sequence, -inf does not."""
    x = (
        3
        * torch.randn(
            6, 3, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(classes)
        )
        + 500
    )
    x[0, :, 5] = -torch.inf
    targets, lengths = torch.tensor([[1, classes - 1], [2, 2], [62, 1]]), torch.tensor([2, 2, 2])
    truth = F.ctc_loss(x.log_softmax(2), targets, torch.full((3,), 6), lengths, reduction="none")
    for laid in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        leaf = laid.clone(memory_format=torch.preserve_format).requires_grad_()
        with partita.backend(backend):
            loss = partita.ctc_loss(
                leaf, targets, torch.full((3,), 6), lengths, reduction="none", from_logits=True
            )
            (grad,) = torch.autograd.grad(loss.sum(), leaf)
        torch.testing.assert_close(loss, truth, rtol=1e-11, atol=1e-11)
        low = x.clamp(
            min=-1000.0
        ).requires_grad_()  # PyTorch's gradient is NaN where logits are -inf
        expected = torch.autograd.grad(
            F.ctc_loss(low.log_softmax(2), targets, torch.full((3,), 6), lengths, reduction="sum"),
            low,
        )[0]
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-11)
    for place in (0, classes // 2, classes - 1):
        spoilt = x.clone()
        spoilt[3, 1, place] = torch.nan
        with partita.backend(backend):
            loss = partita.ctc_loss(
                spoilt, targets, torch.full((3,), 6), lengths, reduction="none", from_logits=True
            )
        assert loss.isnan().tolist() == [False, True, False]


@backends
def test_what_cannot_be_aligned(backend: str) -> None:
    x = torch.zeros(2, 3, 3, requires_grad=True)
    targets, lengths = torch.tensor([[1, 1], [1, 2], [2, 2]]), [2, 2, 0]
    with partita.backend(backend):
        losses = partita.ctc_loss(
            x, targets, [2, 2, 0], lengths, reduction="none", from_logits=True
        )
        assert losses.tolist() == pytest.approx([math.inf, 2 * math.log(3), 0.0])
        for zero in (False, True):
            loss = partita.ctc_loss(
                x,
                targets,
                [2, 2, 0],
                lengths,
                zero_infinity=zero,
                reduction="sum",
                from_logits=True,
            )
            assert torch.isfinite(loss) == zero
            (grad,) = torch.autograd.grad(loss, x)
            assert (
                (grad[:, 0] == 0).all() and (grad[:, 2] == 0).all() and grad[:, 1].abs().sum() > 0
            )


@backends
def test_unchecked_values_make_nan_of_their_sequence(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
    x = torch.zeros(4, 5, 3, requires_grad=True)
    targets = torch.tensor([[1, 2], [1, 9], [-3, 1], [1, 2], [1, 2]])
    with partita.backend(backend):
        losses = partita.ctc_loss(
            x, targets, [4, 4, 4, 5, 4], [2, 2, 2, 2, -1], reduction="none", from_logits=True
        )
        assert losses.isnan().tolist() == [False, True, True, True, True]
        (grad,) = torch.autograd.grad(losses.sum(), x)
        assert grad[:, 0].isfinite().all() and grad[:, 1:].isnan().all()
        assert partita.ctc_align(x, targets, [4] * 5, [2] * 5).score.isnan().tolist() == [
            False,
            True,
            True,
            False,
            False,
        ]


def test_empty_batches() -> None:
    x, targets = torch.zeros(3, 0, 4), torch.zeros(0, 2, dtype=torch.int64)
    assert partita.ctc_loss(x, targets, [], [], reduction="sum") == 0
    assert partita.ctc_loss(x, targets, [], []).isnan()
    assert partita.ctc_loss(x, targets, [], [], reduction="none").shape == (0,)


@backends
def test_second_derivatives(backend: str) -> None:
    logits, *rest = sample()
    small = logits[:6, :, :4].clone().requires_grad_()
    targets, lengths = rest[0].clamp(max=3), (rest[2] // 2).clamp(max=2)
    with partita.backend(backend):
        for from_logits in (False, True):
            f = lambda x, b=from_logits: partita.ctc_loss(
                x, targets, [6, 6, 5, 6, 0], lengths, zero_infinity=True, from_logits=b
            )  # noqa: E731
            assert torch.autograd.gradcheck(f, small) and torch.autograd.gradgradcheck(f, small)


@backends
def test_twice_the_same_bits(backend: str) -> None:
    logits, *rest = sample(torch.float32)
    x = logits.requires_grad_()
    with partita.backend(backend):
        a, b = (
            torch.autograd.grad(partita.ctc_loss(x, *rest, from_logits=True), x)[0]
            for _ in range(2)
        )
    assert torch.equal(a, b)


def test_long_sequences() -> None:
    """Losses and gradients in fp32, 4,000 steps and 300 labels, beside fp64."""
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
    assert spans.start.tolist() == [[1, 4]] and spans.end.tolist() == [[3, 7]]
    assert spans.score.flatten().tolist() == pytest.approx([math.log(0.9)] * 2, rel=1e-6)
    nowhere = partita.ctc_align(x[:1], torch.tensor([[1, 2]]), [1], [2]).spans()
    assert nowhere.start.tolist() == [[-1, -1]] and nowhere.score.tolist() == [[0.0, 0.0]]


def test_fullgraph() -> None:
    logits, targets, inputs, lengths = sample(torch.float32)
    f: Callable[..., torch.Tensor] = lambda x: partita.ctc_loss(
        x, targets, inputs, lengths, from_logits=True
    )  # noqa: E731
    x = logits.requires_grad_()
    expected = torch.autograd.grad(f(x), x)[0]
    with mock.patch.dict("os.environ", {"PARTITA_CHECK": "0"}):
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], expected)


BAD = {
    "dtype": (
        {"log_probs": torch.zeros(3, 2, 4).long()},
        TypeError,
        "log_probs: expected a floating dtype",
    ),
    "rank": (
        {"log_probs": torch.zeros(4)},
        ValueError,
        r"log_probs: expected shape \[T, N, C\] or \[T, C\], got \[4\]",
    ),
    "targets dtype": (
        {"targets": torch.zeros(2, 2)},
        TypeError,
        "targets: expected an integer dtype",
    ),
    "targets shape": (
        {"targets": torch.ones(3, 2).long()},
        ValueError,
        r"targets: expected shape \[N, S\] with N = 2",
    ),
    "label": (
        {"targets": torch.tensor([[1, 2], [3, 4]])},
        IndexError,
        r"targets: expected labels from 0 to 3, got 4 at \[1, 1\]",
    ),
    "blank": ({"blank": 4}, ValueError, "blank: expected a class from 0 to 3, got 4"),
    "input length": (
        {"input_lengths": [3, 4]},
        ValueError,
        r"input_lengths: expected steps from 0 to 3, got 4 at \[1\]",
    ),
    "target length": (
        {"target_lengths": [-1, 2]},
        ValueError,
        r"target_lengths: expected labels from 0 to 2, got -1 at \[0\]",
    ),
    "number of lengths": (
        {"target_lengths": [1]},
        ValueError,
        r"target_lengths: expected shape \[N\] = \[2\], got \[1\]",
    ),
    "sum of lengths": (
        {"targets": torch.ones(5).long()},
        ValueError,
        "targets: expected as many labels as the sum of target_lengths, 4, got 5",
    ),
    "reduction": (
        {"reduction": "max"},
        ValueError,
        "reduction: expected one of 'none', 'mean', 'sum', got 'max'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    changes, error, message = BAD[name]
    good = {
        "log_probs": torch.zeros(3, 2, 4),
        "targets": torch.ones(2, 2).long(),
        "input_lengths": [3, 3],
        "target_lengths": [2, 2],
    }
    with pytest.raises(error, match=message):
        partita.ctc_loss(**{**good, **changes})


@backends
def test_nan_is_not_a_loss_of_zero(backend: str) -> None:
    """Of the sequence that has it alone; also behind `zero_infinity`, and where logits are all -inf."""
    for spoil, from_logits in ((math.nan, False), (math.nan, True), (math.inf, True)):
        logits = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))
        logits[2, 0] = spoil
        for row in (
            (
                logits,
                logits.clone().index_put(
                    (torch.tensor(2), torch.tensor(0)), torch.tensor(-math.inf)
                ),
            )
            if from_logits
            else (logits,)
        ):
            leaf = row.clone().requires_grad_()
            with partita.backend(backend):
                loss = partita.ctc_loss(
                    leaf,
                    torch.tensor([[1, 2], [1, 2]]),
                    [5, 5],
                    [2, 2],
                    reduction="none",
                    zero_infinity=True,
                    from_logits=from_logits,
                )
                best = partita.ctc_align(
                    row, torch.tensor([[1, 2], [1, 2]]), [5, 5], [2, 2], from_logits=from_logits
                )
            (grad,) = torch.autograd.grad(loss.sum(), leaf)
            assert loss.isnan().tolist() == best.score.isnan().tolist() == [True, False]
            assert grad[:, 0].isnan().any() and grad[:, 1].isfinite().all()


@backends
def test_lengths_that_overflow_read_nothing_outside(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
    log_probs, joined = torch.zeros(6, 3, 5).log_softmax(-1), torch.tensor([1, 2, 3])
    for lengths in (
        [2**62, 2**62, 2],
        [2**63 - 1, 3, 1],
        [2**63 - 1, 1, 1],
        [-(10**9), 1, 2],
        [9, 1, 2],
    ):
        with partita.backend(backend):
            loss = partita.ctc_loss(log_probs, joined, [6] * 3, lengths, reduction="none")
        wrong = torch.tensor([not 0 <= n <= 3 for n in lengths])
        assert loss[wrong].isnan().all()
        assert (loss[~wrong].isnan() | ((loss[~wrong] > 0) & (loss[~wrong] < 20))).all()


def test_one_target_beside_an_unbatched_input() -> None:
    log_probs = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    for targets in (torch.tensor([[1, 2]]), torch.tensor([[1, 2, 3]])):
        expected = F.ctc_loss(log_probs, targets, torch.tensor(4), torch.tensor(2))
        torch.testing.assert_close(partita.ctc_loss(log_probs, targets, 4, 2), expected)


def test_compiled_code_takes_targets_of_any_width() -> None:
    lengths = torch.tensor([6, 6]), torch.tensor([1, 2])
    compiled = torch.compile(
        lambda x, t: partita.ctc_loss(x, t, *lengths, reduction="none"),
        fullgraph=True,
        backend="aot_eager",
    )
    x = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    for width in range(2, 14):
        targets = torch.ones(2, width, dtype=torch.int64)
        torch.testing.assert_close(
            compiled(x, targets), partita.ctc_loss(x, targets, *lengths, reduction="none")
        )
