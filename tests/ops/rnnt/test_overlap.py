"""The scan of transducers beside the pass over the logits, against one kernel after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from helpers.rnnt import lattices
from helpers.rows import INTERPRETING, KERNEL_DEVICES, assert_same_bits, kernel_devices
from torch import Tensor

import partita
from partita.ops.rnnt.common import NodeInputs, NodeOptions
from partita.ops.rnnt.gpu import plan
from partita.runtime.caches import clear_caches
from partita.testing import poisoned_memory

pytest.importorskip("triton")
import triton
import triton.language as tl

from partita.ops.rnnt.gpu import launch
from partita.ops.rnnt.gpu.lattice import Sequence
from partita.ops.rnnt.gpu.overlap import step_of_rank

Shape = tuple[int, int, int, int]  # B, T, U, V
DURATIONS = (0, 1, 2, 3, 4)
EXACT: dict[str, float] = {"rtol": 1e-9, "atol": 1e-9}
KINDS = {"rnnt": plan.arc_kinds(()), "tdt": plan.arc_kinds(DURATIONS)}
both = pytest.mark.parametrize("kind", KINDS)
gpu_only = pytest.mark.parametrize("device", KERNEL_DEVICES[1:])


class Batch(NamedTuple):
    """Logits of tokens, and of durations for a TDT, and the other arguments."""

    logits: list[Tensor]
    targets: Tensor
    steps: Tensor
    labels: Tensor


@contextmanager
def overlap(wanted: bool) -> Iterator[mock.Mock]:
    """Let all sizes overlap, or none; yields the mock of the function that overlaps."""
    function = mock.Mock(side_effect=launch.scan_beside_rows)
    with (
        mock.patch.object(plan, "MIN_OVERLAP_BYTES", 0),
        mock.patch.object(plan, "MIN_OVERLAP_ROW_BYTES", 0),
        mock.patch.object(plan, "MAX_OVERLAP_SCANS", plan.MAX_OVERLAP_SCANS if wanted else -1),
        mock.patch.object(launch, "scan_beside_rows", function),
    ):
        clear_caches()  # so that no call is replayed as it was recorded without these sizes
        try:
            yield function
        finally:
            clear_caches()
    assert (function.call_count > 0) == wanted


def batch_of(
    kind: str,
    shape: Shape,
    device: str,
    dtype: torch.dtype = torch.float32,
    durations: int = len(DURATIONS),
) -> Batch:
    """Return a ragged batch with NaN beyond the lengths; class 0 is the blank."""
    tokens, of_durations, *rest = lattices(shape, device, dtype, K=durations)
    return Batch([tokens] if kind == "rnnt" else [tokens, of_durations], *rest)


def losses_of(logits: list[Tensor], x: Batch, durations: Any = DURATIONS, **options: Any) -> Tensor:
    if len(logits) == 1:
        return partita.rnnt_loss(*logits, *x[1:], 0, reduction="none", **options)
    return partita.tdt_loss(*logits, *x[1:], 0, durations, reduction="none", **options)


def results(
    x: Batch, backward: bool = True, backend: str = "triton", **options: Any
) -> list[Tensor]:
    """Return the losses and the gradients of the logits, with NaN in all memory before."""
    logits = [each.detach().requires_grad_(backward) for each in x.logits]
    with partita.backend(backend), poisoned_memory():
        losses = losses_of(logits, x, **options)
        if not backward:
            return [losses]
        upstream = torch.arange(len(losses), device=losses.device) + 1.0
        gradients = torch.autograd.grad(losses, logits, upstream.to(losses.dtype))
    return [losses.detach(), *gradients]


def assert_overlap_changes_nothing(x: Batch, backward: bool = True, **options: Any) -> list[Tensor]:
    """Compare all bits of both ways; returns the results."""
    with overlap(False):
        expected = results(x, backward, **options)
    with overlap(True):
        found = results(x, backward, **options)
    assert_same_bits(found, expected)
    return found


# One chunk of u, two and three; more steps than labels and fewer; rows of one class.
THREE_CHUNKS = (2, 4, 66, 4) if INTERPRETING else (3, 7, 66, 4)
SHAPES = [(2, 5, 3, 7), (1, 9, 34, 5), (2, 12, 2, 301), THREE_CHUNKS, (2, 1, 0, 4), (1, 3, 0, 1)]


@kernel_devices
@both
@pytest.mark.parametrize("backward", [True, False], ids=["gradient", "loss"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_losses_and_gradients(shape: Shape, backward: bool, kind: str, device: str) -> None:
    losses, *_ = assert_overlap_changes_nothing(batch_of(kind, shape, device), backward)
    assert losses.isfinite().all()


@kernel_devices
@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types(dtype: torch.dtype, kind: str, device: str) -> None:
    assert_overlap_changes_nothing(batch_of(kind, (2, 6, 3, 33), device, dtype))


@kernel_devices
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("rnnt", {"hat": True, "delay_penalty": 0.1}),
        ("rnnt", {"clamp": 0.1, "fastemit_lambda": 0.5}),
        ("tdt", {"sigma": 0.3}),
    ],
    ids=str,
)
def test_options_and_strides(kind: str, options: dict[str, Any], device: str) -> None:
    x = batch_of(kind, (2, 6, 3, 9), device)
    turned = [each.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for each in x.logits]
    found = assert_overlap_changes_nothing(x._replace(logits=turned), **options)
    assert_same_bits(found, results(x, **options))


@kernel_devices
@pytest.mark.parametrize("durations", [(1,), (0, 1), (4, 0, 1), (2, 3), (1, 1, 2), (4, 3, 2)])
def test_durations(durations: tuple[int, ...], device: str) -> None:
    """There may be no arc of the row before, or none of earlier rows, and no path."""
    x = batch_of("tdt", (2, 7, 3, 6), device, durations=len(durations))
    found = assert_overlap_changes_nothing(x, durations=durations)
    expected = results(x, backend="reference", durations=durations)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=8e-6)


@kernel_devices
def test_durations_that_are_longer_than_a_sequence(device: str) -> None:
    x = batch_of("tdt", (3, 2, 2, 6), device, durations=3)
    losses, *_ = assert_overlap_changes_nothing(x, durations=(0, 2, 4))
    assert losses[0].isfinite()


@kernel_devices
def test_many_kinds_and_long_durations_do_not_overlap(device: str) -> None:
    x = batch_of("tdt", (1, 9, 2, 6), device, durations=6)
    with overlap(True) as function:
        for durations in ((0, 1, 2, 3, 4, 2), (0, 1, 2, 3, 4, 5)):
            results(x, durations=durations)
        assert function.call_count == 0
        results(batch_of("tdt", (1, 9, 2, 6), device))


@kernel_devices
def test_scores_of_rnnt_whose_words_are_special(device: str) -> None:
    """A probability of 1 has the score 0.0, whose bits would say that it is not written yet."""
    (logits,), targets, steps, labels = x = batch_of("rnnt", (3, 6, 3, 5), device)
    steps[:], labels[:] = 6, 3
    logits[:] = 0.0
    logits[0, :, :3], logits[0, :, 3] = -torch.inf, -torch.inf
    logits[0, :, 3, 0] = 0.0  # The blank has the probability 1 at the end of the target,
    for u in range(3):
        logits[0, 0, u, targets[0, u]] = 0.0  # and the labels have it at the first step,
        logits[0, 1:, u, 0] = 0.0  # so there is one path, which is certain.
    logits[1, 2, 1] = torch.nan
    logits[2, 2, :, 0], logits[2, 2, :, targets[2]] = -torch.inf, -torch.inf
    losses, grad = assert_overlap_changes_nothing(x)
    assert losses[0] == 0.0 and losses[1].isnan() and losses[2] == torch.inf
    assert not grad[0].any() and not grad[2].any()


@kernel_devices
def test_scores_of_tdt_whose_words_are_special(device: str) -> None:
    """Arcs of probability 1 and 0, NaN, and a sequence that all masks make impossible."""
    (tokens, durations), targets, steps, labels = x = batch_of("tdt", (5, 6, 3, 5), device)
    steps[:], labels[:] = 6, 3
    tokens[:], durations[:] = 0.0, 0.0
    tokens[0], durations[0] = -torch.inf, -torch.inf
    tokens[0, :, 3, 0], durations[0, :, :, 1] = 0.0, 0.0  # One path is certain:
    for u in range(3):
        tokens[0, :, u, targets[0, u]] = 0.0  # a label at each of the first three steps.
    tokens[1, 2, 1], durations[2, 2, 1] = torch.nan, torch.nan
    tokens[3, 2, :, 0], tokens[3, 2, :, targets[3]] = -torch.inf, -torch.inf
    tokens[4] = -torch.inf
    losses, *gradients = assert_overlap_changes_nothing(x)
    assert losses[0] == 0.0 and losses[1:3].isnan().all() and losses[3].isfinite()
    assert not gradients[0][0].any() and not gradients[1][0].any()


def wide_batch(device: str, dtype: torch.dtype) -> Batch:
    """Return logits of tens of thousands, with -inf among those of labels and durations.

    One sequence has no path, and the others do.
    """
    (tokens, durations), targets, steps, labels = batch_of("tdt", (4, 8, 34, 5), "cpu")
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
    return Batch(on_device, targets.to(device), steps.to(device), labels.to(device))


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
    (tokens, durations), targets, steps, labels = batch_of("tdt", (3, 6, 2, 5), device)
    steps[:], labels[:] = 6, 2
    tokens, durations = tokens.nan_to_num(), durations.nan_to_num()
    tokens[0, 3, :, 1:] = -1e30  # Blanks are certain at this step, and labels at others.
    tokens[1, :, 0].scatter_(-1, targets[1, :1].expand(6, 1), -1e9)  # No path has this label.
    tokens[2, :, 0].scatter_(-1, targets[2, :1].expand(6, 1), -1e6)
    x = Batch([tokens, durations], targets, steps, labels)
    losses, *gradients = assert_overlap_changes_nothing(x)
    expected = results(x, backend="reference")
    assert losses[1] == torch.inf and not gradients[0][1].any() and not gradients[1][1].any()
    for found, other in zip((losses, *gradients), expected, strict=True):
        torch.testing.assert_close(found[::2], other[::2], rtol=2e-6, atol=8e-6)


@pytest.mark.usefixtures("unchecked")
@kernel_devices
@both
def test_invalid_sequences_and_no_steps(kind: str, device: str) -> None:
    x = batch_of(kind, (5, 3, 2, 6), device)
    x.targets[0, 0], x.targets[1, 0] = 0, 6
    x.steps[2], x.labels[3], x.steps[4] = 4, 3, 0
    x.labels[:2] = 2
    losses, *_ = assert_overlap_changes_nothing(x)
    assert losses[:4].isnan().all() and losses[4] == torch.inf


@kernel_devices
@both
def test_against_the_reference(kind: str, device: str) -> None:
    x = batch_of(kind, (2, 9, 33, 6), device)
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
    (logits, _), targets, steps, labels = batch_of("tdt", shape, device)
    rest = (logits.dtype, directions == 2, NodeOptions(0, DURATIONS, True, False, 0.0, 0.0))
    call = LatticeCall(as_targets(targets, steps, labels), B, T, U + 1, V, *rest)
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
    assert {size: plan.overlaps(*size, KINDS["rnnt"]) for size in sizes} == sizes


def test_which_durations_overlap() -> None:
    size, kinds = (1, 2000, 301, 1025, 2, 2), KINDS["tdt"]
    assert plan.overlaps(*size, kinds)
    # More arcs, and more states that a lane remembers, need more registers.
    assert not plan.overlaps(*size, plan.arc_kinds((0, 1, 2, 3, 4, 4)))
    assert not plan.overlaps(*size, plan.arc_kinds((0, 1, 5)))
    assert not plan.overlaps(32, 200, 101, 1025, 2, 2, kinds)
    # Here fewer scans pay than of two kinds of arcs.
    assert plan.overlaps(8, 400, 101, 1025, 2, 2, KINDS["rnnt"])
    assert not plan.overlaps(8, 400, 101, 1025, 2, 2, kinds)


def test_registers_leave_room_for_32_programs_where_rows_do() -> None:
    for tile, hat, registers in (
        (plan.row_tile(1025, 4, 4), False, 64),
        (plan.row_tile(1025, 2, 2), False, 64),
        (plan.row_tile(1025, 2, 2), True, 80),
        (plan.row_tile(5000, 4, 16), False, 80),
    ):
        assert plan.overlap_registers(tile, hat, KINDS["rnnt"]) == registers


LARGEST = (1, 500, 100, 1025)
LARGE = [
    *(("rnnt", shape) for shape in (LARGEST, (2, 300, 70, 500), (4, 100, 200, 1025))),
    *(("tdt", shape) for shape in (LARGEST, (2, 300, 70, 500), (8, 200, 40, 500))),
]


@gpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "shape"), LARGE, ids=str)
def test_large_lattices_have_the_same_bits_each_time(
    kind: str, shape: Shape, dtype: torch.dtype, device: str
) -> None:
    """The scans wait for rows here, and their order changes from run to run."""
    B, T, U, V = shape
    assert plan.overlaps(B, T, U + 1, V, dtype.itemsize, 2, KINDS[kind])
    x = batch_of(kind, shape, device, dtype)
    expected = assert_overlap_changes_nothing(x)
    assert_overlap_changes_nothing(x, backward=False)
    for _ in range(10):  # The first calls are recorded, and the others replay them.
        assert_same_bits(results(x), expected)


@gpu_only
@pytest.mark.parametrize(
    ("kind", "U", "V", "overlaps"),
    [("rnnt", 1000, 8, False), ("tdt", 200, 128, True), ("tdt", 1000, 8, False)],
)
def test_long_sequences_agree_with_fp64(
    kind: str, U: int, V: int, overlaps: bool, device: str
) -> None:
    """Posteriors of fp32 logits stay within 2e-6 of fp64 for 4,000 steps and 1,000 labels.

    Each path of a TDT takes one arc of thousands of rows, and nothing normalizes their posteriors.
    """
    from partita.ops.rnnt.gpu.launch import rnnt_forward

    T, durations = 4000, DURATIONS if kind == "tdt" else ()
    g = torch.Generator(device=device).manual_seed(0)
    logits = [
        2 * torch.randn(1, T, U + 1, width, generator=g, device=device)
        for width in (V, len(durations))
    ]
    targets = torch.randint(1, V, (1, U), generator=g, device=device)
    lengths = (torch.tensor([T], device=device), torch.tensor([U], device=device))
    assert plan.overlaps(1, T, U + 1, V, 4, 2, KINDS[kind]) == overlaps
    options = NodeOptions(0, durations, True, False, 0.05 if durations else 0.0, 0.0)
    found = []
    for dtype in (torch.float32, torch.float64):
        tokens, of_durations = (each.to(dtype) for each in logits)
        x = NodeInputs(tokens, of_durations if durations else None, targets, *lengths)
        found.append(rnnt_forward(x, options, True))
    (nll, _, _, posteriors), (exact, _, _, expected) = found
    assert (posteriors - expected).abs().max() < 2e-6
    torch.testing.assert_close(nll.double(), exact, rtol=1e-6, atol=0)


@gpu_only
@both
def test_several_streams(kind: str, device: str) -> None:
    """Scans of several calls wait at the same time."""
    x = batch_of(kind, LARGEST, device, torch.bfloat16)
    expected = results(x)
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    for stream in streams * 3:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(results(x))
    torch.cuda.synchronize()
    for each in found:
        assert_same_bits(each, expected)


@gpu_only
@both
def test_a_graph_prepares_the_words_in_each_replay(kind: str, device: str) -> None:
    """Words of the last replay would pass for those of this one."""
    x = batch_of(kind, LARGEST, device, torch.bfloat16)
    values = (x.logits[0], x.logits[0].flip(0).mul(0.5))
    logits = [each.clone().requires_grad_() for each in x.logits]
    expected = [results(x._replace(logits=[first, *x.logits[1:]])) for first in values]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), partita.backend("triton"):
        upstream = torch.ones(1, device=device)
        with torch.cuda.graph(graph, stream=stream):
            losses = losses_of(logits, x)
            gradients = torch.autograd.grad(losses, logits, upstream)
    for i in (0, 1, 0, 1):
        logits[0].data.copy_(values[i])
        graph.replay()
        assert_same_bits([losses.detach(), *gradients], expected[i])


@pytest.mark.usefixtures("unchecked")
@gpu_only
def test_compiled_code(device: str) -> None:
    x = batch_of("rnnt", LARGEST, device, torch.bfloat16)
    expected = results(x)
    logits = x.logits[0].detach().requires_grad_()

    @torch.compile(fullgraph=True)
    def loss(logits: Tensor) -> Tensor:
        return partita.rnnt_loss(logits, *x[1:], 0, reduction="none")

    with partita.backend("triton"):
        losses = loss(logits)
        (grad,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
    assert_same_bits([losses.detach(), grad], expected)
