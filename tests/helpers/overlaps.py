"""What tests of the scans beside the pass over the logits share: batches, and runs of both ways."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from partita.ops.rnnt.gpu import plan
from partita.runtime.caches import clear_caches

Shape = tuple[int, int, int, int]  # B, T, U, V


@contextmanager
def overlap(wanted: bool) -> Iterator[mock.Mock]:
    """Let all sizes overlap, or none; yields the mock of the function that overlaps."""
    from partita.ops.rnnt.gpu import launch

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


def ragged_batch(
    shape: Shape, device: str, dtype: torch.dtype, *widths: int
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Return logits of each width with NaN beyond the lengths, targets, steps and labels.

    Class 0 is the blank.
    """
    B, T, U, V = shape
    g = torch.Generator().manual_seed(0)
    logits = [2 * torch.randn(B, T, U + 1, width, generator=g) for width in widths]
    targets = torch.randint(1, max(V, 2), (B, U), generator=g)
    steps, labels = torch.randint(1, T + 1, (B,), generator=g), torch.arange(B) % (U + 1)
    steps[0], labels[0] = T, U
    for b in range(B):
        for each in logits:
            each[b, steps[b] :], each[b, :, labels[b] + 1 :] = torch.nan, torch.nan
    on_device = [each.to(device, dtype) for each in logits]
    return on_device, targets.to(device), steps.to(device), labels.to(device)


def bits(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors as integers, so that NaN equals any NaN and 0.0 is not -0.0."""
    words = {2: torch.int16, 4: torch.int32}
    one_nan = (each.masked_fill(each.isnan(), torch.nan).contiguous() for each in tensors)
    return [each.view(words[each.element_size()]) for each in one_nan]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(map(torch.equal, bits(found), bits(expected)))


def same_both_ways(run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Run with and without the overlap, compare all bits, and return the results."""
    with overlap(False):
        expected = run()
    with overlap(True):
        found = run()
    assert_same_bits(found, expected)
    return found


def assert_same_on_streams(run: Callable[[], list[Tensor]]) -> None:
    """Compare all bits of runs on several streams, whose scans wait at the same time."""
    expected = run()
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    for stream in streams * 3:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(run())
    torch.cuda.synchronize()
    for each in found:
        assert_same_bits(each, expected)
