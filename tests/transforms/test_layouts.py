"""Inputs as programs really have them, and the memory layouts of results as fakes report them.

The inputs are rows cut out of others, labels of narrow types, lengths in a column of a tensor, and
tensors made in inference mode.
"""

from collections.abc import Callable

import pytest
import torch
from helpers.rows import OPS, check, check_loss, check_op, check_stats, devices, targets_for
from torch import Tensor

import partita

NARROW = (torch.int8, torch.uint8)


def without_the_last(device: str, classes: int = 20_000) -> Tensor:
    """Return all steps but the last of each sequence, as a language model's loss takes them.

    The rows lie in several groups, and several programs share each row.
    """
    rows = torch.randn(3, 4, classes, generator=torch.Generator().manual_seed(0)).to(device)
    return rows[:, :-1]


@pytest.mark.interpreted
@devices
def test_rows_cut_out_of_others(device: str) -> None:
    x = without_the_last(device)
    for op in OPS.values():
        check_op(op, x, -1)
    check_stats(x, targets_for(x.reshape(-1, x.shape[-1]), "labels").reshape(x.shape[:-1]))


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_of_rows_cut_out_of_others(reduction: str, device: str) -> None:
    x = without_the_last(device).transpose(1, 2)
    check_loss(x, torch.arange(9, device=device).reshape(3, 3) * 7, reduction=reduction)


def same_bits(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, *targets: Tensor) -> None:
    """Assert that the loss and its gradient have the same bits for all of the targets."""
    results = []
    for target in targets:
        leaf = logits.clone().requires_grad_()
        value = loss(leaf, target)
        results.append((value.detach(), *torch.autograd.grad(value, leaf)))
    for first, other in zip(*results, strict=True):
        assert torch.equal(first, other)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_labels_of_a_narrow_type(dtype: torch.dtype, device: str) -> None:
    """Masked lanes have no label, even if the narrow type cannot represent `ignore_index`."""
    logits = torch.randn(21, 120, generator=torch.Generator().manual_seed(0)).to(device)
    target = torch.arange(21, device=device) * 3
    matrix = torch.eye(120, device=device)
    for ignore_index in (-100, 1000):
        for loss in (
            lambda x, t, i=ignore_index: partita.cross_entropy(x, t, ignore_index=i),
            lambda x, t, i=ignore_index: partita.cross_entropy(
                x, t, ignore_index=i, reduction="sum", label_smoothing=0.1
            ),
            lambda x, t, i=ignore_index: partita.linear_cross_entropy(x, matrix, t, ignore_index=i),
            lambda x, t, i=ignore_index: partita.token_stats(x, t, ignore_index=i).logprob.sum(),
        ):
            same_bits(loss, logits, target, target.to(dtype))


@pytest.mark.interpreted
@devices
def test_targets_of_ctc_of_a_narrow_type(device: str) -> None:
    """Some classes, and the blank, are beyond the range of the type."""
    logits = torch.randn(8, 2, 300, generator=torch.Generator().manual_seed(0)).to(device)
    targets = torch.tensor([[254, 3, 254, 254, 7], [5, 255, 255, 1, 0]], device=device)
    same_bits(
        lambda x, t: partita.ctc_loss(x, t, [8, 7], [5, 4], blank=299, from_logits=True),
        logits,
        targets,
        targets.to(torch.uint8),
    )
    aligned = (
        partita.ctc_align(logits, t, [8, 7], [5, 4], blank=299, from_logits=True)[:4]
        for t in (targets, targets.to(torch.uint8))
    )
    for expected, found in zip(*aligned, strict=True):
        assert torch.equal(expected, found)


@pytest.mark.interpreted
@devices
def test_lengths_in_a_column(device: str) -> None:
    """The columns of one tensor are views with a stride."""
    scores = torch.randn(9, 3, 8, generator=torch.Generator().manual_seed(0)).to(device)
    targets, lengths = (
        torch.tensor([[1, 2], [3, 3], [4, 0]], device=device),
        torch.tensor([[9, 2], [7, 2], [5, 1]], device=device),
    )
    kmers = torch.randn(9, 3, 4 * 3, generator=torch.Generator().manual_seed(1)).to(device)
    bases = torch.tensor([[1, 2, 2], [2, 1, 1], [1, 1, 1]], device=device)
    columns = lengths.unbind(1)
    for op in (
        lambda a, b: partita.ctc_loss(scores, targets, a, b, reduction="none", from_logits=True),
        lambda a, b: partita.ctc_align(scores, targets, a, b, from_logits=True).score,
        lambda a, b: partita.ctc_crf_loss(
            kmers, bases, b, state_len=2, alphabet_size=3, input_lengths=a, reduction="none"
        ),
        lambda a, b: partita.linear_chain(
            scores, torch.zeros(8, 8, device=device), lengths=a
        ).logz(),
    ):
        assert torch.equal(op(*columns), op(*(column.contiguous() for column in columns)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.interpreted
@devices
def test_a_negative_target_length_invalidates_only_its_own_sequence(device: str) -> None:
    logits = torch.randn(9, 3, 5, generator=torch.Generator().manual_seed(0)).to(device)
    joined = torch.tensor([1, 2, 3, 4, 1], device=device)
    expected = partita.ctc_loss(
        logits[:, 1:],
        joined,
        torch.tensor([9, 9], device=device),
        torch.tensor([2, 3], device=device),
        reduction="none",
    )
    lengths = torch.tensor([-2, 2, 3], device=device)
    found = partita.ctc_loss(
        logits, joined, torch.full((3,), 9, device=device), lengths, reduction="none"
    )
    assert found[0].isnan()
    torch.testing.assert_close(found[1:], expected)


@pytest.mark.interpreted
@devices
def test_chains_in_inference_mode(device: str) -> None:
    """Tables that are made in inference mode are tensors without a version counter."""
    emissions = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0)).to(device)
    transitions = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).to(device)

    def results(source: Tensor) -> list[Tensor]:
        tagger, chain = (
            partita.linear_chain(emissions, transitions),
            partita.Chain(emissions[..., None].expand(-1, -1, -1, 4), source),
        )
        return [tagger.logz(), *tagger.viterbi(), chain.logz(), chain.marginals(), *chain.viterbi()]

    expected = results(partita.dense_source(4, device=device))
    with torch.inference_mode():
        source = partita.dense_source(4, device=device)
        for _ in range(2):
            for found, wanted in zip(results(source), expected, strict=True):
                assert torch.equal(found, wanted)
    assert torch.equal(results(source)[0], expected[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, t: partita.cross_entropy(x, t),
        lambda x, t: partita.softmax(x.transpose(1, 2), 1),
        lambda x, t: partita.token_stats(x.transpose(1, 2), t).entropy,
        lambda x, t: partita.ctc_loss(
            x.permute(2, 0, 1), t[:, :2] % 4 + 1, [7, 7], [2, 2], from_logits=True
        ),
    ],
    ids=["cross_entropy", "softmax", "token_stats", "ctc_loss"],
)
def test_compiled_code_takes_them(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(2, 5, 7), torch.randint(5, (2, 7))
    check(
        torch.compile(lambda x: function(x, target), fullgraph=True),
        lambda x: function(x, target),
        x,
    )
