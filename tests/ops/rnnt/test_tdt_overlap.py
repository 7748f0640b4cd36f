"""TDT's scan beside the pass over the logits, against one kernel after the other."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.overlaps import (
    Shape,
    assert_same_bits,
    assert_same_on_streams,
    bits,
    overlap,
    ragged_batch,
    same_both_ways,
)
from helpers.rows import KERNEL_DEVICES, kernel_devices
from torch import Tensor

import partita
from partita.ops.rnnt.gpu import plan
from partita.testing import poisoned_memory

pytest.importorskip("triton")

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # tokens, durations, targets, steps, labels

DURATIONS = (0, 1, 2, 3, 4)
EXACT: dict[str, float] = {"rtol": 1e-9, "atol": 1e-9}
gpu_only = pytest.mark.parametrize("device", KERNEL_DEVICES[1:])


def batch_of(
    shape: Shape, device: str, dtype: torch.dtype = torch.float32, kinds: int = len(DURATIONS)
) -> Batch:
    """Return a ragged batch with NaN beyond the lengths; class 0 is the blank."""
    (tokens, durations), *sequences = ragged_batch(shape, device, dtype, shape[3], kinds)
    return tokens, durations, *sequences


def results(
    x: Batch,
    backward: bool = True,
    durations: Sequence[int] = DURATIONS,
    backend: str = "triton",
    **options: Any,
) -> list[Tensor]:
    """Return the losses and the gradients of the logits, with NaN in all memory before."""
    logits = [each.detach().requires_grad_(backward) for each in x[:2]]
    with partita.backend(backend), poisoned_memory():
        losses = partita.tdt_loss(*logits, *x[2:], 0, durations, reduction="none", **options)
        if not backward:
            return [losses]
        upstream = torch.arange(len(losses), device=losses.device) + 1.0
        gradients = torch.autograd.grad(losses, logits, upstream.to(losses.dtype))
    return [losses.detach(), *gradients]


def assert_overlap_changes_nothing(x: Batch, backward: bool = True, **options: Any) -> list[Tensor]:
    """Compare all bits of both ways; returns the results."""
    return same_both_ways(lambda: results(x, backward, **options))


# One chunk of u, two and three; more steps than labels and fewer; rows of one class.
SHAPES = [(2, 5, 3, 7), (1, 9, 34, 5), (2, 12, 2, 301), (3, 7, 66, 4), (2, 1, 0, 4), (1, 3, 0, 1)]


@kernel_devices
@pytest.mark.parametrize("backward", [True, False], ids=["gradient", "loss"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_losses_and_gradients(shape: Shape, backward: bool, device: str) -> None:
    losses, *_ = assert_overlap_changes_nothing(batch_of(shape, device), backward)
    assert losses.isfinite().all()


@kernel_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types(dtype: torch.dtype, device: str) -> None:
    assert_overlap_changes_nothing(batch_of((2, 6, 3, 33), device, dtype))


@kernel_devices
@pytest.mark.parametrize("durations", [(1,), (0, 1), (4, 0, 1), (2, 3), (1, 1, 2), (4, 3, 2)])
def test_durations(durations: tuple[int, ...], device: str) -> None:
    """There may be no arc of the row before, or none of earlier rows, and no path."""
    x = batch_of((2, 7, 3, 6), device, kinds=len(durations))
    found = assert_overlap_changes_nothing(x, durations=durations)
    for tensor, expected in zip(found, results(x, True, durations, "reference"), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=2e-6, atol=8e-6)


@kernel_devices
def test_durations_that_are_longer_than_a_sequence(device: str) -> None:
    x = batch_of((3, 2, 2, 6), device, kinds=3)
    losses, *_ = assert_overlap_changes_nothing(x, durations=(0, 2, 4))
    assert losses[0].isfinite()


@kernel_devices
def test_many_kinds_and_long_durations_do_not_overlap(device: str) -> None:
    x = batch_of((1, 9, 2, 6), device, kinds=6)
    with overlap(True) as function:
        for durations in ((0, 1, 2, 3, 4, 2), (0, 1, 2, 3, 4, 5)):
            results(x, durations=durations)
        assert function.call_count == 0
        results(batch_of((1, 9, 2, 6), device))


@kernel_devices
def test_sigma_and_strides(device: str) -> None:
    tokens, durations, *rest = batch_of((2, 6, 3, 9), device)
    tokens, durations = (
        each.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for each in (tokens, durations)
    )
    assert_overlap_changes_nothing((tokens, durations, *rest), sigma=0.3)


@kernel_devices
def test_scores_whose_words_are_special(device: str) -> None:
    """Arcs of probability 1 and 0, NaN, and a sequence that all masks make impossible."""
    tokens, durations, targets, steps, labels = batch_of((5, 6, 3, 5), device)
    steps[:], labels[:] = 6, 3
    tokens[:], durations[:] = 0.0, 0.0
    tokens[0], durations[0] = -torch.inf, -torch.inf
    tokens[0, :, 3, 0], durations[0, :, :, 1] = 0.0, 0.0  # One path is certain:
    for u in range(3):
        tokens[0, :, u, targets[0, u]] = 0.0  # a label at each of the first three steps.
    tokens[1, 2, 1], durations[2, 2, 1] = torch.nan, torch.nan
    tokens[3, 2, :, 0], tokens[3, 2, :, targets[3]] = -torch.inf, -torch.inf
    tokens[4] = -torch.inf
    losses, *gradients = assert_overlap_changes_nothing((tokens, durations, targets, steps, labels))
    assert losses[0] == 0.0 and losses[1:3].isnan().all() and losses[3].isfinite()
    assert not gradients[0][0].any() and not gradients[1][0].any()


def wide_batch(device: str, dtype: torch.dtype) -> Batch:
    """Return logits of tens of thousands, with -inf among those of labels and durations.

    One sequence has no path, and the others do.
    """
    tokens, durations, targets, steps, labels = batch_of((4, 8, 34, 5), "cpu", torch.float64)
    steps[:] = 8
    g = torch.Generator().manual_seed(1)
    tokens, durations = (torch.randn(x.shape, generator=g) for x in (tokens, durations))
    tokens, durations = 1e4 * tokens, 1e3 * durations
    for x, first in ((tokens, 1), (durations, 2)):
        masked = torch.rand(x.shape, generator=g) < 0.3
        masked[..., :first], masked[0] = False, False
        x[masked] = -torch.inf
    tokens[2, :, 3] = tokens[2, :, 3].scatter(-1, targets[2, 3, None].expand(8, 1), -torch.inf)
    labels[2] = 5
    on_device = [each.to(device, dtype) for each in (tokens, durations)]
    return on_device[0], on_device[1], targets.to(device), steps.to(device), labels.to(device)


@kernel_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_ranges(dtype: torch.dtype, device: str) -> None:
    """States lie thousands of bits apart, and far below the range of fp64."""
    x = wide_batch(device, dtype)
    losses, *gradients = found = results(x)
    expected = results(x, backend="reference")
    assert losses.isinf().tolist() == [False, False, True, False] and losses[0] > 1e5
    assert not gradients[0][2].any() and not gradients[1][2].any()
    tolerance = {"rtol": 1e-6, "atol": 1e-3} if dtype == torch.float32 else EXACT
    torch.testing.assert_close(found, expected, **tolerance)
    if dtype == torch.float32:
        assert_overlap_changes_nothing(x)


@kernel_devices
def test_log_probabilities_beyond_the_range_of_words_count_as_impossible(device: str) -> None:
    tokens, durations, targets, steps, labels = batch_of((3, 6, 2, 5), device)
    steps[:], labels[:] = 6, 2
    tokens, durations = tokens.nan_to_num(), durations.nan_to_num()
    tokens[0, 3, :, 1:] = -1e30  # Blanks are certain at this step, and labels at others.
    tokens[1, :, 0].scatter_(-1, targets[1, :1].expand(6, 1), -1e9)  # No path has this label.
    tokens[2, :, 0].scatter_(-1, targets[2, :1].expand(6, 1), -1e6)
    x = (tokens, durations, targets, steps, labels)
    losses, *gradients = assert_overlap_changes_nothing(x)
    expected = results(x, backend="reference")
    assert losses[1] == torch.inf and not gradients[0][1].any() and not gradients[1][1].any()
    for found, other in zip((losses, *gradients), expected, strict=True):
        torch.testing.assert_close(found[::2], other[::2], rtol=2e-6, atol=8e-6)


@kernel_devices
def test_invalid_sequences_and_no_steps(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
    x = batch_of((5, 3, 2, 6), device)
    _, _, targets, steps, labels = x
    targets[0, 0], targets[1, 0] = 0, 6
    steps[2], labels[3], steps[4] = 4, 3, 0
    labels[:2] = 2
    losses, *_ = assert_overlap_changes_nothing(x)
    assert losses[:4].isnan().all() and losses[4] == torch.inf


@kernel_devices
def test_against_the_reference(device: str) -> None:
    x = batch_of((2, 9, 33, 6), device)
    with overlap(True):
        found = results(x)
    torch.testing.assert_close(found, results(x, backend="reference"), rtol=2e-6, atol=8e-6)


@kernel_devices
@pytest.mark.parametrize("directions", [1, 2])
def test_words_before_the_scan(directions: int, device: str) -> None:
    """Only words that the next kernel writes are 0, and those that scans share."""
    from partita.ops.rnnt.gpu.arc_words import IMPOSSIBLE_ARC
    from partita.ops.rnnt.gpu.launch import LatticeCall, as_targets, launch_arcs, word_scan

    B, T, U, V = shape = (2, 9, 33, 6)
    logits, _, targets, steps, labels = batch_of(shape, device)
    options = (directions == 2, 0, DURATIONS, True, False, 0.0, 0.0)
    call = LatticeCall(as_targets(targets, steps, labels), B, T, U + 1, V, logits.dtype, *options)
    sizes = call.plan
    with poisoned_memory():
        scan = word_scan(call, call.empty_arcs())
        launch_arcs(call, scan.arcs, None, None)
    for zeros in (scan.flags, scan.carries, scan.counter):
        assert not zeros.any()
    assert len(scan.carries) == directions * sizes.num_chunks * B * sizes.carry_steps
    impossible = IMPOSSIBLE_ARC.value
    for k, words in enumerate(scan.arcs.view(2 * len(DURATIONS), sizes.nodes).cpu()):
        margin = words[len(words) - plan.MARGIN :]
        assert (margin == impossible).all()
        d, is_label = DURATIONS[k % len(DURATIONS)], k >= len(DURATIONS)
        if d == 0 and not is_label:
            continue  # No arc is of this kind, and only its margin is read.
        expected = torch.full((B, sizes.num_chunks, sizes.rows, 32), impossible)
        for b in range(B):
            length, target_len = int(steps[b]), int(labels[b])
            for t in range(length):
                for u in range(target_len + 1):
                    ends = t + d == length and u == target_len and not is_label
                    if (t + d < length and (u < target_len or not is_label)) or ends:
                        expected[b, u // 32, t + u % 32, u % 32] = 0
        assert torch.equal(words[: -plan.MARGIN].view(expected.shape), expected)


def test_which_sizes_overlap() -> None:
    size, kinds = (1, 2000, 301, 1025, 2, 2), plan.arc_kinds(DURATIONS)
    assert plan.overlaps(*size, kinds)
    # More arcs, and more states that a lane remembers, need more registers.
    assert not plan.overlaps(*size, plan.arc_kinds((0, 1, 2, 3, 4, 4)))
    assert not plan.overlaps(*size, plan.arc_kinds((0, 1, 5)))
    assert not plan.overlaps(32, 200, 101, 1025, 2, 2, kinds)
    # Here fewer scans pay than of two kinds of arcs.
    assert plan.overlaps(8, 400, 101, 1025, 2, 2, plan.arc_kinds(()))
    assert not plan.overlaps(8, 400, 101, 1025, 2, 2, kinds)


LARGE = [(1, 500, 100, 1025), (2, 300, 70, 500), (8, 200, 40, 500)]


@gpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_lattices_have_the_same_bits_each_time(
    shape: Shape, dtype: torch.dtype, device: str
) -> None:
    """The scans wait for rows here, and their order changes from run to run."""
    B, T, U, V = shape
    assert plan.overlaps(B, T, U + 1, V, dtype.itemsize, 2, plan.arc_kinds(DURATIONS))
    x = batch_of(shape, device, dtype)
    expected = assert_overlap_changes_nothing(x)
    assert_overlap_changes_nothing(x, backward=False)
    for _ in range(10):  # The first calls are recorded, and the others replay them.
        assert_same_bits(results(x), expected)


@gpu_only
@pytest.mark.parametrize(("U", "V"), [(200, 128), (1000, 8)], ids=["overlap", "separate"])
def test_long_sequences_agree_with_fp64(U: int, V: int, device: str) -> None:
    """Posteriors of fp32 logits stay within 2e-6 of fp64 for 4,000 steps and 1,000 labels.

    Each path takes one arc of thousands of rows, and nothing normalizes their posteriors.
    """
    from partita.ops.rnnt.gpu.launch import rnnt_forward

    T, K = 4000, len(DURATIONS)
    g = torch.Generator(device=device).manual_seed(0)
    tokens = 2 * torch.randn(1, T, U + 1, V, generator=g, device=device)
    durations = 2 * torch.randn(1, T, U + 1, K, generator=g, device=device)
    targets = torch.randint(1, V, (1, U), generator=g, device=device)
    lengths = (torch.tensor([T], device=device), torch.tensor([U], device=device))
    assert plan.overlaps(1, T, U + 1, V, 4, 2, plan.arc_kinds(DURATIONS)) == (U == 200)
    rest = (targets, *lengths, 0, DURATIONS, True, False, 0.05, 0.0, True)
    nll, _, _, posteriors = rnnt_forward(tokens, durations, *rest)
    exact, _, _, expected = rnnt_forward(tokens.double(), durations.double(), *rest)
    assert (posteriors - expected).abs().max() < 2e-6
    torch.testing.assert_close(nll.double(), exact, rtol=1e-6, atol=0)


@gpu_only
def test_two_streams(device: str) -> None:
    """Scans of several calls wait at the same time."""
    x = batch_of(LARGE[0], device, torch.bfloat16)
    assert_same_on_streams(lambda: results(x))


@gpu_only
def test_a_graph_prepares_the_words_in_each_replay(device: str) -> None:
    """Words of the last replay would pass for those of this one."""
    x = batch_of(LARGE[0], device, torch.bfloat16)
    other = x[0].flip(0).mul(0.5)
    tokens, durations = (each.clone().requires_grad_() for each in x[:2])
    expected = [bits(results((values, *x[1:]))) for values in (x[0], other)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), partita.backend("triton"):
        upstream = torch.ones(1, device=device)
        with torch.cuda.graph(graph, stream=stream):
            losses = partita.tdt_loss(tokens, durations, *x[2:], 0, DURATIONS, reduction="none")
            gradients = torch.autograd.grad(losses, (tokens, durations), upstream)
    for i in (0, 1, 0, 1):
        tokens.data.copy_((x[0], other)[i])
        graph.replay()
        found = bits([losses.detach(), *gradients])
        assert all(map(torch.equal, found, expected[i]))
