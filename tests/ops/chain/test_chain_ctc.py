"""CTC is a sparse linear chain: log Z and its gradient against PyTorch's loss."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers.rows import devices
from hypothesis import given, settings
from hypothesis import strategies as st

from partita import Chain


class Case(NamedTuple):
    """The sizes and targets of a batch; its logits are random, and its targets are padded."""

    steps: int
    classes: int
    targets: Sequence[Sequence[int]]
    input_lengths: Sequence[int]
    blank: int = 0


class Result(NamedTuple):
    losses: torch.Tensor  # [N], inf for a target without an alignment
    grad: torch.Tensor  # [T, N, classes], of the sum of the finite losses


def padded(case: Case) -> torch.Tensor:
    """Return the targets, padded with a class that is not blank, `[N, S]`."""
    longest = max(map(len, case.targets))
    padding = (case.blank + 1) % case.classes
    rows = [[*target, *[padding] * (longest - len(target))] for target in case.targets]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), longest)


def ctc_chain(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
) -> Chain:
    """Return the chain whose paths are the alignments of the targets.

    The states are the labels with blanks around them. Each is entered from itself, from the state
    before it, and past a blank between two labels that differ. A path starts on the first blank,
    before the first step.
    """
    labels = targets.new_full((len(targets), 2 * targets.shape[1] + 1), blank)
    labels[:, 1::2] = targets
    skips = labels != labels.roll(2, 1)
    entered = log_probs.gather(2, labels.expand(len(log_probs), -1, -1))
    scores = torch.stack([entered, entered, entered.masked_fill(~skips, -torch.inf)], -1)
    source = (
        torch.arange(labels.shape[1], device=labels.device)[:, None]
        - torch.arange(3, device=labels.device)
    ).clamp(min=-1)
    no_end = log_probs.new_full(labels.shape, -torch.inf)
    last = (2 * target_lengths[:, None] - torch.arange(2, device=labels.device)).clamp(min=0)
    return Chain(
        scores,
        source,
        no_end.index_fill(1, last.new_zeros(1), 0.0),
        no_end.scatter(1, last, 0.0),
        lengths=input_lengths,
    )


def results(case: Case, dtype: torch.dtype, device: str) -> tuple[Result, Result]:
    """Return our result in `dtype` on the device, and PyTorch's in fp64 on the CPU.

    Both start from log-probabilities of that dtype, and have the gradient of the logits.
    """
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(
        case.steps, len(case.targets), case.classes, generator=g, dtype=torch.float64
    )
    logits.requires_grad_()
    log_probs = logits.log_softmax(2).to(dtype)
    targets, input_lengths = padded(case), torch.tensor(case.input_lengths)
    target_lengths = torch.tensor([len(target) for target in case.targets])
    rest = targets, input_lengths, target_lengths

    losses = (
        -ctc_chain(log_probs.to(device), *(t.to(device) for t in rest), case.blank).logz().cpu()
    )
    expected = F.ctc_loss(log_probs.double(), *rest, case.blank, reduction="none")
    finite = F.ctc_loss(log_probs.double(), *rest, case.blank, reduction="none", zero_infinity=True)
    ours, theirs = (
        torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (losses, finite)
    )
    return Result(losses.detach(), ours), Result(expected.detach(), theirs)


def assert_equal(case: Case, dtype: torch.dtype, device: str) -> None:
    """Compare within 1e-10 in fp64, and within the contract in fp32.

    The contract is 1e-6 relative and 1e-9 a step for log Z, and 2e-6 for the posterior of each
    edge. The gradient of a class sums the posteriors of all edges at most, and log_softmax
    subtracts a share of their sum.
    """
    ours, theirs = results(case, dtype, device)
    edges = 3 * (2 * max(map(len, case.targets)) + 1)
    rtol, atol, grad_atol = (
        (1e-6, 1e-6 + 1e-9 * case.steps, 2 * edges * 2e-6)
        if dtype == torch.float32
        else (1e-10,) * 3
    )
    torch.testing.assert_close(ours.losses.double(), theirs.losses, rtol=rtol, atol=atol)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=grad_atol)


CASES = {
    "equal lengths": Case(12, 5, [[1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3]], [12, 12, 12]),
    "ragged lengths": Case(12, 5, [[1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3]], [7, 12, 9]),
    "repeated labels": Case(14, 4, [[1, 1, 2, 2], [3, 3, 3, 3], [1, 2, 1, 2]], [14, 10, 12]),
    "target lengths": Case(12, 5, [[1, 2, 2, 4], [3], [], [4, 4]], [12, 3, 5, 9]),
    "impossible": Case(8, 4, [[1, 1, 1], [1, 2, 3], [2, 2], [3]], [4, 2, 3, 8]),
    "blank last": Case(10, 4, [[0, 0, 2], [1, 2]], [10, 7], blank=3),
    "no input": Case(6, 4, [[], [1], [2, 1]], [0, 0, 6]),
    "long": Case(200, 6, [[1 + i * i % 5 for i in range(40)], [2] * 30], [200, 150]),
}


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_log_z_is_the_ctc_loss(name: str, dtype: torch.dtype, device: str) -> None:
    assert_equal(CASES[name], dtype, device)


def test_an_impossible_alignment_is_infinite_and_has_no_gradient() -> None:
    ours, _ = results(CASES["impossible"], torch.float64, "cpu")
    assert ours.losses.isinf().tolist() == [True, True, False, False]
    assert ours.grad.any(-1).any(0).tolist() == [False, False, True, True]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    classes = draw(st.integers(2, 4))
    steps, blank = draw(st.integers(1, 7)), draw(st.integers(0, classes - 1))
    labels = st.sampled_from([label for label in range(classes) if label != blank])
    targets = draw(st.lists(st.lists(labels, max_size=4), min_size=1, max_size=3))
    return Case(steps, classes, targets, [draw(st.integers(0, steps)) for _ in targets], blank)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_log_z_is_the_ctc_loss_of_any_small_case(case: Case) -> None:
    assert_equal(case, torch.float64, "cpu")
