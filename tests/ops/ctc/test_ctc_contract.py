"""The contract of CTC: forms of the arguments, invalid values, errors and compiled code."""

import pytest
import torch
import torch.nn.functional as F
from helpers.ctc import BAD_SEQUENCES, backends, sample
from helpers.errors import raises
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import partita
from partita.ops.ctc import arguments
from partita.ops.ctc.arguments import prepare
from partita.runtime.lengths import copy_together


@backends
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_forms_of_the_arguments(reduction: str, backend: str) -> None:
    """All forms that PyTorch takes give the same loss.

    Targets are padded or concatenated, lengths are tensors, lists or tuples of any dtype, and
    sequences may come without a batch dimension.
    """
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


BAD = {
    "TypeError: log_probs: expected a floating dtype": {"log_probs": torch.zeros(3, 2, 4).long()},
    r"ValueError: log_probs: expected shape \[T, N, C\] or \[T, C\], got \[4\]": {
        "log_probs": torch.zeros(4)
    },
    **BAD_SEQUENCES,
    r"IndexError: targets: expected labels from 0 to 3, got 4 at \[1, 1\]": {
        "targets": torch.tensor([[1, 2], [3, 4]])
    },
    "ValueError: blank: expected a class from 0 to 3, got 4": {"blank": 4},
}


@pytest.mark.parametrize("error", BAD)
def test_bad_input(error: str) -> None:
    good = {
        "log_probs": torch.zeros(3, 2, 4),
        "targets": torch.ones(2, 2).long(),
        "input_lengths": [3, 3],
        "target_lengths": [2, 2],
    }
    with raises(error):
        partita.ctc_loss(**{**good, **BAD[error]})


@pytest.mark.usefixtures("unchecked")
@backends
def test_lengths_that_overflow_read_nothing_outside(backend: str) -> None:
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
        invalid = torch.tensor([not 0 <= n <= 3 for n in lengths])
        assert loss[invalid].isnan().all()
        assert (loss[~invalid].isnan() | ((loss[~invalid] > 0) & (loss[~invalid] < 20))).all()


def test_an_unbatched_input_with_one_row_of_targets() -> None:
    log_probs = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    for targets in (torch.tensor([[1, 2]]), torch.tensor([[1, 2, 3]])):
        expected = F.ctc_loss(log_probs, targets, torch.tensor(4), torch.tensor(2))
        torch.testing.assert_close(partita.ctc_loss(log_probs, targets, 4, 2), expected)


def test_logits_of_a_subclass_reach_it() -> None:
    """A subclass gets the ops and decides what they do: it may have no memory, or several."""
    logits, targets, inputs, lengths = sample()

    def value_and_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = partita.ctc_loss(x, targets, inputs, lengths, from_logits=True)
        return loss, torch.autograd.grad(loss, x)[0]

    expected = value_and_gradient(logits.detach().requires_grad_())
    two = TwoTensor(logits.detach(), logits.detach()).requires_grad_()
    for result, truth in zip(value_and_gradient(two), expected, strict=True):
        assert isinstance(result, TwoTensor) and torch.equal(result.a, truth)
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(logits.detach())
    for result, truth in zip(value_and_gradient(fake.requires_grad_()), expected, strict=True):
        assert type(result) is type(fake) and result.shape == truth.shape


@pytest.mark.parametrize("N", [0, 1, 4, 5])
@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_lengths_are_copied_together(N: int, pinned: bool) -> None:
    rows = [torch.arange(N) + 10 * i for i in range(3)]
    copies = copy_together(rows, torch.device("cpu"), pinned)
    for copy, row in zip(copies, rows, strict=True):
        assert torch.equal(copy, row) and copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0


def test_the_usual_forms_reach_the_ops_as_they_are() -> None:
    """Nothing copies int64 targets and lengths; other forms give the same values."""
    x, targets = torch.zeros(7, 2, 5), torch.tensor([[1, 2, 3], [4, 1, 1]])
    steps, lengths = torch.tensor([7, 6]), torch.tensor([2, 1])
    usual = prepare(x, targets, steps, lengths, 0)
    assert usual.logits is x and usual.input_lengths is steps and usual.target_lengths is lengths
    assert usual.labels.data_ptr() == targets.data_ptr()
    assert usual.offsets.tolist() == [0, 3] and usual.max_target_len == 2
    for form in (torch.Tensor.tolist, torch.Tensor.int, lambda t: t[:, None].expand(-1, 2)[:, 0]):
        other = prepare(x, targets.short(), form(steps), form(lengths), 0)
        for tensor, expected in zip(other[1:5], usual[1:5], strict=True):
            assert torch.equal(tensor, expected) and tensor.is_contiguous()
    joined = prepare(x, torch.tensor([1, 2, 4]), steps, lengths, 0)
    assert joined.offsets.tolist() == [0, 2] and joined.max_target_len == 2


def test_lengths_on_the_device_of_the_logits_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The width of padded targets bounds the lengths where reading them would wait for a device."""
    x, targets = torch.zeros(7, 2, 5, device="meta"), torch.zeros(2, 3, device="meta").long()
    lengths = torch.zeros(2, dtype=torch.int64, device="meta")
    assert prepare(x, targets, lengths, lengths, 0).max_target_len == 3
    empty = torch.zeros(7, 0, 5, device="meta"), targets[:0], lengths[:0], lengths[:0]
    assert prepare(*empty, 0).max_target_len == 0


@pytest.mark.gpu
def test_offsets_are_made_once_for_each_stream() -> None:
    arguments._cached_offsets.clear()
    where = torch.device("cuda", 0)
    first = arguments._row_offsets(3, 5, where)
    assert first.tolist() == [0, 5, 10] and arguments._row_offsets(3, 5, where) is first
    with torch.cuda.stream(torch.cuda.Stream()):
        other = arguments._row_offsets(3, 5, where)
    torch.cuda.synchronize()
    assert other is not first and torch.equal(other, first)
