"""The scan of transducers beside the pass over the logits, against one kernel after the other."""

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
import triton
import triton.language as tl

from partita.ops.rnnt.gpu.lattice import Sequence
from partita.ops.rnnt.gpu.overlap import step_of_rank

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # logits, targets, steps, labels

gpu_only = pytest.mark.parametrize("device", KERNEL_DEVICES[1:])


def batch_of(shape: Shape, device: str, dtype: torch.dtype = torch.float32) -> Batch:
    """Return a ragged batch with NaN beyond the lengths; class 0 is the blank."""
    (logits,), *sequences = ragged_batch(shape, device, dtype, shape[3])
    return logits, *sequences


def results(x: Batch, backward: bool = True, **options: Any) -> list[Tensor]:
    """Return the losses and the gradient of the logits, with NaN in all memory before."""
    logits = x[0].detach().requires_grad_(backward)
    with partita.backend("triton"), poisoned_memory():
        losses = partita.rnnt_loss(logits, *x[1:], 0, reduction="none", **options)
        if not backward:
            return [losses]
        upstream = torch.arange(len(losses), device=losses.device) + 1.0
        return [losses.detach(), *torch.autograd.grad(losses, logits, upstream.to(losses.dtype))]


def assert_overlap_changes_nothing(x: Batch, backward: bool = True, **options: Any) -> list[Tensor]:
    """Compare all bits of both ways; returns the results."""
    return same_both_ways(lambda: results(x, backward, **options))


# One chunk of u, two and three; more steps than labels and fewer; rows of one class.
SHAPES = [(2, 5, 3, 7), (1, 3, 34, 5), (2, 12, 2, 301), (3, 7, 66, 4), (2, 1, 0, 4), (1, 3, 0, 1)]


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
@pytest.mark.parametrize(
    "options",
    [{"hat": True, "delay_penalty": 0.1}, {"clamp": 0.1, "fastemit_lambda": 0.5}],
    ids=str,
)
def test_options(options: dict[str, Any], device: str) -> None:
    assert_overlap_changes_nothing(batch_of((2, 6, 3, 9), device), **options)


@kernel_devices
def test_strides(device: str) -> None:
    logits, *rest = batch_of((2, 6, 3, 9), device)
    turned = logits.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert_overlap_changes_nothing((turned, *rest))


@kernel_devices
def test_scores_whose_words_are_special(device: str) -> None:
    """A probability of 1 has the score 0.0, whose bits would say that it is not written yet."""
    logits, targets, steps, labels = batch_of((3, 6, 3, 5), device)
    steps[:], labels[:] = 6, 3
    logits[:] = 0.0
    logits[0, :, :3], logits[0, :, 3] = -torch.inf, -torch.inf
    logits[0, :, 3, 0] = 0.0  # The blank has the probability 1 at the end of the target,
    for u in range(3):
        logits[0, 0, u, targets[0, u]] = 0.0  # and the labels have it at the first step,
        logits[0, 1:, u, 0] = 0.0  # so there is one path, which is certain.
    logits[1, 2, 1] = torch.nan
    logits[2, 2, :, 0], logits[2, 2, :, targets[2]] = -torch.inf, -torch.inf
    losses, grad = assert_overlap_changes_nothing((logits, targets, steps, labels))
    assert losses[0] == 0.0 and losses[1].isnan() and losses[2] == torch.inf
    assert not grad[0].any() and not grad[2].any()


@kernel_devices
def test_invalid_sequences_and_no_steps(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
    x = batch_of((5, 3, 2, 6), device)
    _, targets, steps, labels = x
    targets[0, 0], targets[1, 0] = 0, 6
    steps[2], labels[3], steps[4] = 4, 3, 0
    labels[:2] = 2
    losses, _ = assert_overlap_changes_nothing(x)
    assert losses[:4].isnan().all() and losses[4] == torch.inf


@kernel_devices
def test_against_the_reference(device: str) -> None:
    x = batch_of((2, 9, 33, 6), device)
    with overlap(True):
        found = results(x)
    logits = x[0].detach().requires_grad_()
    with partita.backend("reference"):
        losses = partita.rnnt_loss(logits, *x[1:], 0, reduction="none")
        (grad,) = torch.autograd.grad(losses, logits, torch.arange(2, device=device) + 1.0)
    torch.testing.assert_close(found, [losses.detach(), grad], rtol=2e-6, atol=8e-6)


@triton.jit(do_not_specialize=["length", "target_len", "first_u"])
def order_kernel(steps_ptr, length, target_len, first_u, BLOCK: tl.constexpr):
    rank = tl.arange(0, BLOCK)
    step = step_of_rank(rank, first_u, Sequence(length, target_len, False), True)
    tl.store(steps_ptr + rank, step, mask=rank < length)


@kernel_devices
def test_the_order_of_the_steps(device: str) -> None:
    """Each step comes once, first from both ends and then from the middle anti-diagonal."""
    for length, target_len in ((1, 0), (2, 1), (7, 3), (31, 64), (50, 20), (64, 64)):
        for first_u in range(0, target_len + 1, 4):
            found = torch.full((length,), -1, dtype=torch.int32, device=device)
            order_kernel[(1,)](found, length, target_len, first_u, BLOCK=64, num_warps=1)
            steps = found.tolist()
            assert sorted(steps) == list(range(length))
            first_half = min(max((length + target_len) // 2 - first_u, 0), length)
            assert [t for t in steps if t < first_half] == list(range(first_half))
            assert [t for t in steps if t >= first_half] == list(
                range(length - 1, first_half - 1, -1)
            )
            for rank in range(length):  # Both progress evenly.
                done = sum(t < first_half for t in steps[:rank])
                assert abs(done - rank * first_half / length) < 1


def test_which_sizes_overlap() -> None:
    sizes = {
        (1, 2000, 301, 1025, 4, 2): True,
        (1, 2000, 301, 1025, 2, 2): True,
        (4, 1000, 201, 1025, 2, 2): True,
        (1, 2000, 301, 1025, 8, 2): False,  # fp64 needs more registers
        (32, 200, 101, 1025, 4, 2): False,  # so many scans fill the GPU
        (64, 200, 101, 1025, 4, 1): False,
        (1, 2**15 + 1, 301, 1025, 4, 2): False,
        (1, 20, 11, 1025, 4, 2): False,  # reading takes no time
        (1, 20_000, 301, 30, 4, 2): False,  # rows are too short to hide anything
        (0, 2000, 301, 1025, 4, 2): False,
    }
    kinds = plan.arc_kinds(())
    assert {size: plan.overlaps(*size, kinds) for size in sizes} == sizes


def test_registers_leave_room_for_32_programs_where_rows_do() -> None:
    kinds = plan.arc_kinds(())
    for tile, hat, registers in (
        (plan.row_tile(1025, 4, 4, True), False, 64),
        (plan.row_tile(1025, 2, 2, True), False, 64),
        (plan.row_tile(1025, 2, 2, True), True, 80),
        (plan.row_tile(5000, 4, 16, True), False, 80),
    ):
        assert plan.overlap_registers(tile, hat, kinds) == registers


LARGE = [(1, 500, 100, 1025), (2, 300, 70, 500), (4, 100, 200, 1025)]


@gpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_lattices_have_the_same_bits_each_time(
    shape: Shape, dtype: torch.dtype, device: str
) -> None:
    """The scans wait for rows here, and their order changes from run to run."""
    B, T, U, V = shape
    assert plan.overlaps(B, T, U + 1, V, dtype.itemsize, 2, plan.arc_kinds(()))
    x = batch_of(shape, device, dtype)
    expected = assert_overlap_changes_nothing(x)
    assert_overlap_changes_nothing(x, backward=False)
    for _ in range(10):  # The first calls are recorded, and the others replay them.
        assert_same_bits(results(x), expected)


@gpu_only
def test_two_streams(device: str) -> None:
    """Scans of several calls wait at the same time."""
    x = batch_of(LARGE[0], device, torch.bfloat16)
    assert_same_on_streams(lambda: results(x))


@gpu_only
def test_a_graph_zeroes_the_arcs_in_each_replay(device: str) -> None:
    """Words of the last replay would pass for those of this one."""
    x = batch_of(LARGE[0], device, torch.bfloat16)
    other = x[0].flip(0).mul(0.5)
    logits = x[0].clone().requires_grad_()
    expected = []
    for values in (x[0], other):
        expected.append(bits(results((values, *x[1:]))))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), partita.backend("triton"):
        upstream = torch.ones(1, device=device)
        with torch.cuda.graph(graph, stream=stream):
            losses = partita.rnnt_loss(logits, *x[1:], 0, reduction="none")
            (grad,) = torch.autograd.grad(losses, logits, upstream)
    for i in (0, 1, 0, 1):
        logits.data.copy_((x[0], other)[i])
        graph.replay()
        found = bits([losses.detach(), grad])
        assert all(map(torch.equal, found, expected[i]))


@gpu_only
def test_compiled_code(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
    x = batch_of(LARGE[0], device, torch.bfloat16)
    expected = results(x)
    logits = x[0].detach().requires_grad_()

    @torch.compile(fullgraph=True)
    def loss(logits: Tensor) -> Tensor:
        return partita.rnnt_loss(logits, *x[1:], 0, reduction="none")

    with partita.backend("triton"):
        losses = loss(logits)
        (grad,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
    assert all(map(torch.equal, bits([losses.detach(), grad]), bits(expected)))
