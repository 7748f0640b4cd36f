"""The form in which CTC's arguments reach the ops."""

from unittest import mock

import pytest
import torch

import partita
from partita.ops.ctc import arguments, autograd
from partita.ops.ctc.arguments import prepare
from partita.runtime.lengths import copy_together


@pytest.mark.parametrize("N", [0, 1, 4, 5])
@pytest.mark.parametrize("pinned", [False, torch.cuda.is_available()])
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
    usual = prepare("log_probs", x, targets, steps, lengths, 0)
    assert usual.logits is x and usual.input_lengths is steps and usual.target_lengths is lengths
    assert usual.labels.data_ptr() == targets.data_ptr()
    assert usual.offsets.tolist() == [0, 3] and usual.max_target_len == 2
    for form in (torch.Tensor.tolist, torch.Tensor.int, lambda t: t[:, None].expand(-1, 2)[:, 0]):
        other = prepare("log_probs", x, targets.short(), form(steps), form(lengths), 0)
        for tensor, expected in zip(other[1:5], usual[1:5], strict=True):
            assert torch.equal(tensor, expected) and tensor.is_contiguous()
    joined = prepare("log_probs", x, torch.tensor([1, 2, 4]), steps, lengths, 0)
    assert joined.offsets.tolist() == [0, 2] and joined.max_target_len == 2


def test_lengths_on_the_device_of_the_logits_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The width of padded targets bounds the lengths where reading them would wait for a device."""
    x, targets = torch.zeros(7, 2, 5, device="meta"), torch.zeros(2, 3, device="meta").long()
    lengths = torch.zeros(2, dtype=torch.int64, device="meta")
    assert prepare("log_probs", x, targets, lengths, lengths, 0).max_target_len == 3
    empty = torch.zeros(7, 0, 5, device="meta"), targets[:0], lengths[:0], lengths[:0]
    assert prepare("log_probs", *empty, 0).max_target_len == 0


def test_a_loss_without_a_gradient_calls_the_op_directly() -> None:
    x = torch.zeros(4, 1, 3, requires_grad=True)
    rest = torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    expected = partita.ctc_loss(x, *rest, from_logits=True)
    with mock.patch.object(autograd.CTCLossFunction, "forward", side_effect=AssertionError):
        assert torch.equal(partita.ctc_loss(x.detach(), *rest, from_logits=True), expected)
        with torch.no_grad():
            assert torch.equal(partita.ctc_loss(x, *rest, from_logits=True), expected)
        with pytest.raises(AssertionError):
            partita.ctc_loss(x, *rest, from_logits=True)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
def test_offsets_are_made_once_for_each_stream(device: str) -> None:
    arguments._cached_offsets.clear()
    where = torch.device(device, 0)
    first = arguments._row_offsets(3, 5, where)
    assert first.tolist() == [0, 5, 10] and arguments._row_offsets(3, 5, where) is first
    with torch.cuda.stream(torch.cuda.Stream()):
        other = arguments._row_offsets(3, 5, where)
    torch.cuda.synchronize()
    assert other is not first and torch.equal(other, first)
