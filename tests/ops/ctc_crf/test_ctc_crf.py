"""CTC-CRF against every path through the k-mers enumerated, in all forms and dtypes."""

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.ctc import BACKENDS, backends, crf_loss, crf_sample
from helpers.rows import devices
from hypothesis import given, settings
from hypothesis import strategies as st

import partita
from partita import Chain
from partita.testing import all_paths

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def spelled(states: list[int], edges: list[int], n_base: int, state_len: int) -> list[int]:
    """Return the labels of a path: its first k-mer, then the last base of each k-mer it enters."""
    first = [states[0] // n_base ** (state_len - 1 - i) % n_base + 1 for i in range(state_len)]
    return first + [
        state % n_base + 1
        for state, edge in zip(states[1:], edges, strict=True)
        if edge % (n_base + 1)
    ]


def enumerated(
    scores: torch.Tensor, target: list[int], state_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a sequence and its gradient from all paths, given `[T, C, A]`."""
    steps, kmers, letters = scores.shape
    paths = all_paths(Chain(scores[:, None], partita.debruijn_source(letters - 1, state_len)))
    rows = zip(paths.states.tolist(), paths.edges.tolist(), strict=True)
    spells = torch.tensor(
        [spelled(states, edges, letters - 1, state_len) == target for states, edges in rows],
        dtype=torch.bool,
    )
    total = paths.scores.logsumexp(0)
    loss, grad = (
        total - paths.scores[spells].logsumexp(0),
        torch.zeros(steps, kmers * letters, dtype=torch.float64),
    )
    if not loss.isfinite():
        return torch.tensor(math.inf, dtype=torch.float64), grad.reshape(scores.shape)
    p = (paths.scores - total).exp() - torch.where(spells, (paths.scores - total + loss).exp(), 0.0)
    for t in range(steps):
        grad[t].index_add_(0, paths.edges[:, t], p)
    return loss, grad.reshape(scores.shape)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[int]], list[int], int]:
    """Draw scores `[T, N, C, A]`, targets, input lengths and the length of a k-mer."""
    steps, n_base, batch = draw(st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 3))
    state_len = draw(st.integers(1, 2 if n_base == 3 else 3))
    targets = [draw(st.lists(st.integers(1, n_base), max_size=5)) for _ in range(batch)]
    lengths = [draw(st.integers(0, steps)) for _ in range(batch)]
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    scores = torch.randn(
        steps, batch, n_base**state_len, n_base + 1, generator=g, dtype=torch.float64
    )
    scores[torch.rand(scores.shape, generator=g) < draw(st.sampled_from([0.0, 0.2]))] = -torch.inf
    scores[torch.arange(steps)[:, None] >= torch.tensor(lengths, dtype=torch.int64)] = torch.nan
    return scores, targets, lengths, state_len


def padded(targets: list[list[int]]) -> torch.Tensor:
    width = max(map(len, targets), default=0)
    rows = [t + [0] * (width - len(t)) for t in targets]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(targets), width)


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from(BACKENDS), st.booleans())
def test_against_every_path(batch: tuple[Any, ...], backend: str, joined: bool) -> None:
    scores, targets, lengths, state_len = batch
    x = scores.requires_grad_()
    labels = (
        torch.tensor(list(itertools.chain(*targets)), dtype=torch.int64)
        if joined
        else padded(targets)
    )
    sizes = {"state_len": state_len, "alphabet_size": scores.shape[3]}
    with partita.backend(backend):
        losses = partita.ctc_crf_loss(
            x, labels, [len(t) for t in targets], **sizes, input_lengths=lengths, reduction="none"
        )
        (grad,) = torch.autograd.grad(losses.nan_to_num(posinf=0.0).sum(), x)
    for n, target in enumerate(targets):
        loss, expected = enumerated(scores.detach()[: lengths[n], n], target, state_len)
        torch.testing.assert_close(losses[n].detach(), loss, **EXACT)
        torch.testing.assert_close(grad[: lengths[n], n], expected, **EXACT)
        assert (grad[lengths[n] :, n] == 0).all()


def test_the_table_of_kmers() -> None:
    """Column 0 stays; column 1 + j comes from the k-mer that starts with base j."""
    for n_base, state_len in ((1, 2), (2, 3), (4, 1), (4, 3)):
        source = partita.debruijn_source(n_base, state_len)
        states = torch.arange(n_base**state_len)
        assert torch.equal(source[:, 0], states)
        for base in range(n_base):
            assert torch.equal(
                source[:, 1 + base], base * n_base ** (state_len - 1) + states // n_base
            )


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_against_fp64(dtype: torch.dtype, backend: str) -> None:
    """The reference in fp64 is compared with every path above."""
    scores, *rest = crf_sample(dtype)
    found = []
    for name, x in ((backend, scores), ("reference", scores.double())):
        x.requires_grad_()
        with partita.backend(name):
            losses = crf_loss(x, rest, reduction="none")
        weights = torch.arange(1.0, 6.0, dtype=losses.dtype)
        found.append((losses.detach(), *torch.autograd.grad(losses, x, weights)))
    (losses, grad), (expected, expected_grad) = found
    assert losses.dtype == torch.promote_types(dtype, torch.float32) and grad.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        losses.double(), expected, rtol=4 * torch.finfo(losses.dtype).eps, atol=0.0
    )
    torch.testing.assert_close(
        grad.double(), expected_grad, rtol=2 * eps, atol=1e-6 if eps > 1e-9 else 1e-12
    )
    assert (grad[:, 2] == 0).all()


@devices
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_forms_of_the_arguments(reduction: str, device: str) -> None:
    """All forms of the arguments give the same loss.

    Scores have either shape, targets are padded or concatenated, and lengths are tensors, lists or
    tuples of any dtype.
    """
    scores, targets, lengths, inputs = crf_sample()
    scores, targets, lengths, inputs = (
        t[:, [0, 1, 3]] if t is scores else t[[0, 1, 3]] for t in (scores, targets, lengths, inputs)
    )
    joined = torch.cat([t[:n] for t, n in zip(targets, lengths.tolist(), strict=True)])
    with partita.backend("reference"):
        losses = crf_loss(scores, (targets, lengths, inputs), reduction="none")
    expected = {"none": losses, "mean": (losses / lengths).mean(), "sum": losses.sum()}[reduction]
    for x in (
        scores,
        scores.unflatten(2, (9, 4)),
        scores.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    ):
        for target in (targets, targets.int(), joined, joined.to(torch.uint8)):
            for form in (
                lambda t: t,
                lambda t: t.to(device),
                lambda t: t.int(),
                torch.Tensor.tolist,
                lambda t: tuple(t.tolist()),
            ):
                loss = crf_loss(
                    x.to(device),
                    (target.to(device), form(lengths), form(inputs)),
                    reduction=reduction,
                )
                torch.testing.assert_close(loss.cpu(), expected)


@backends
def test_short_targets_are_impossible(backend: str) -> None:
    x = torch.zeros(3, 5, 8, 3, requires_grad=True)
    targets = torch.tensor(
        [
            [1, 2, 1, 2, 1, 2, 1],
            [1, 2, 0, 0, 0, 0, 0],
            [0] * 7,
            [1, 2, 1, 0, 0, 0, 0],
            [1, 2, 1, 2, 0, 0, 0],
        ]
    )
    with partita.backend(backend):
        sizes = {"state_len": 3, "alphabet_size": 3, "input_lengths": [3, 3, 3, 0, 3]}
        losses = partita.ctc_crf_loss(x, targets, [7, 2, 0, 3, 4], **sizes, reduction="none")
        assert losses.tolist() == pytest.approx(
            [math.inf] * 3 + [math.log(8), math.log(8 * 27 / 3)]
        )
        (grad,) = torch.autograd.grad(losses.sum(), x)
        assert (grad[:, :4] == 0).all() and grad[:, 4].isfinite().all() and grad[:, 4].any()
        assert partita.ctc_crf_loss(x, targets, [7, 2, 0, 3, 4], **sizes) == torch.inf


@devices
def test_long_sequences(device: str) -> None:
    """Losses and gradients in fp32 agree with fp64 at 3,000 steps and 400 labels.

    One target repeats one base.
    """
    g = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(3000, 2, 16 * 5, generator=g)
    targets, found = torch.randint(1, 5, (2, 400), generator=g), []
    targets[1] = 3
    for dtype in (torch.float32, torch.float64):
        x = scores.to(dtype).to(device).requires_grad_()
        loss = partita.ctc_crf_loss(
            x,
            targets.to(device),
            [400, 350],
            state_len=2,
            alphabet_size=5,
            input_lengths=[3000, 2500],
            reduction="sum",
        )
        found.append((loss.detach().double(), torch.autograd.grad(loss, x)[0].double()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=1e-5)
    assert (found[0][1] - found[1][1]).abs().max() <= 4e-6
