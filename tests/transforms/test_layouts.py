"""Inputs as programs really have them, and the memory layouts of results as fakes report them.

The inputs are rows cut out of others, labels of narrow types, lengths in a column of a tensor, and
tensors made in inference mode.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.rows import INTERPRETING, OPS, check, check_loss, check_op, devices, targets_for
from helpers.stats import check_stats
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

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


@pytest.mark.interpreted
@devices
def test_a_negative_target_length_invalidates_only_its_own_sequence(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
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


@pytest.mark.gpu
def test_a_tagger_in_a_capture() -> None:
    emissions, transitions = torch.randn(6, 2, 4, device="cuda"), torch.randn(4, 4, device="cuda")
    # The first call makes the edge table, which the capture then finds in the cache.
    expected = partita.linear_chain(emissions, transitions).logz()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = partita.linear_chain(emissions, transitions).logz()
    graph.replay()
    assert torch.equal(found, expected)


def layouts(*shape: int) -> Iterator[Tensor]:
    """Yield tensors of one shape with different strides."""
    yield torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    if INTERPRETING:  # slow
        return
    yield torch.randn(shape)
    yield torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    yield torch.randn(shape[0], shape[1] + 1, *shape[2:])[:, :-1]
    yield torch.randn(shape[0], *shape[:0:-1]).permute(0, *reversed(range(1, len(shape))))


def calls() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield registered ops, with arguments of many layouts."""
    ops = torch.ops.partita
    labels, columns = torch.randint(4, (3, 5)), torch.randint(5, (3, 4))
    for x in layouts(3, 4, 5):
        for dim in range(3):
            yield ops.softmax, (x, dim, True, x.dtype)
            yield ops.softmax_backward, (torch.randn(3, 4, 5), x, dim, False, x.dtype)
        for target in (labels, torch.rand(3, 4, 5)):
            loss_args = (x, target, None, -100, 0.0, 0.0)
            yield ops.cross_entropy, loss_args
            saved = ops.cross_entropy(*loss_args, "auto")[2:]
            grads = (torch.randn(3, 5), torch.randn(3, 5))
            yield (
                ops.cross_entropy_backward,
                (*grads, *loss_args[:3], *saved, *loss_args[3:]),
            )
            for items, mean in ((None, True), (torch.tensor(7), False)):
                head = (*loss_args[:3], items, *loss_args[3:])
                yield ops.cross_entropy_one_pass, (*head, 0.0, mean, x.dtype)
        stats = ops.token_stats(x, columns, 1.0, 0.0, -100, "auto")
        yield ops.token_stats, (x, columns, 1.0, 0.0, -100)
        grads = tuple(torch.randn(3, 4) for _ in range(3))
        yield (
            ops.token_stats_backward,
            (*grads, x, columns, stats[4], stats[5], stats[2], 1.0, 0.0, -100),
        )
        teacher = torch.randn(3, 4, 5)
        for beta in (0.0, 0.5, 1.0):
            numbers = (beta, 0.7, 5.0)
            yield ops.divergence, (x, teacher, *numbers)
            found = ops.divergence(x, teacher, *numbers, "auto")
            grad = torch.randn(3, 4)
            yield ops.divergence_backward, (grad, x, teacher, *found[1:], *numbers)
        ids = torch.randint(5, (3, 4, 2))
        numbers = (0.7, 5.0, -100)
        yield ops.topk_logprobs, (x, 3, 0.7, 5.0)
        for needs_rest in (False, True):
            yield ops.logprobs, (x, ids, *numbers, needs_rest)
            found = ops.logprobs(x, ids, *numbers, needs_rest, "auto")
            grad = torch.randn(found[0].shape)
            yield ops.logprobs_backward, (grad, x, ids, *found[1:], *numbers)
    lengths, target_lengths = torch.tensor([6, 5]), torch.tensor([2, 2])
    targets = (torch.tensor([1, 2, 3, 1]), torch.tensor([0, 2]), lengths, target_lengths)
    for x in layouts(6, 2, 5):
        for save in (True, False):
            reduction = "none" if save else "mean"
            yield ops.ctc_loss, (x, *targets, 2, 0, True, reduction, False, save, None, 1.0, None)
        yield ops.ctc_align, (x, *targets, 2, 0, True, None, 1.0, None)
        yield ops.ctc_greedy_search, (x, lengths, 0, True)
        yield ops.ctc_beam_search, (x, lengths, 0, 3, 2, 4, 0.0, True)
    source, ends = torch.tensor([[0, 1], [1, 2], [2, -1]]), torch.randn(3, 2).T
    for x in layouts(4, 2, 3, 2):
        chain = (x, source, ends, ends, None)
        yield ops.chain_logz, (*chain, True)
        yield ops.chain_rounded_logz, (*chain, True)
        logz = ops.chain_logz(*chain, True, "auto")
        grad = torch.ones(2, dtype=torch.float64)
        yield ops.chain_gradient, (grad, x, ends, ends, source, None, *logz, x.dtype)
        yield ops.chain_viterbi, (*chain, True)
        yield ops.chain_expectation, (*chain, x, ends, ends, True)


@pytest.mark.parametrize(
    "backend", [pytest.param("auto", marks=pytest.mark.interpreted), "reference"]
)
def test_results_lie_as_compilers_are_told(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare sizes, dtypes and strides of each op's results with those of its fake."""
    if INTERPRETING:
        backend = "triton"
    differing, compared = [], 0
    for op, arguments in calls():
        mode = FakeTensorMode()
        fake_arguments = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        real = op(*arguments, backend)
        with mode:
            fake = op(*fake_arguments, backend)
        for result, expected in zip(
            *([r] if isinstance(r, Tensor) else r for r in (real, fake)), strict=True
        ):
            compared += 1
            strides = [
                [step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1]
                for t in (result, expected)
            ]
            if (
                result.shape != expected.shape
                or result.dtype != expected.dtype
                or (result.numel() and strides[0] != strides[1])
            ):
                differing.append((op, arguments[0].stride(), result.stride(), expected.stride()))
    assert not differing and compared > 40


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
    x, target = torch.randn(2, 5, 7), torch.randint(5, (2, 7))
    check(
        torch.compile(lambda x: function(x, target), fullgraph=True),
        lambda x: function(x, target),
        x,
    )
