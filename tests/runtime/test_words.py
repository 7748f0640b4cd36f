"""Integers that reach the GPU as parameters of launches."""

from unittest import mock

import pytest
import torch
from helpers.rows import kernel_devices

pytest.importorskip("triton")
from partita.runtime import lengths, words
from partita.runtime.lengths import launch_together, on_device


@kernel_devices
@pytest.mark.parametrize("N", [1, 4, 5, 17])
def test_lengths_are_launched_together(N: int, device: str) -> None:
    rows = [torch.arange(N) * 1000 - 1 + i for i in range(3)]
    rows[0][-1] = words.LIMIT
    copies = launch_together(rows, torch.device(device))
    assert copies is not None
    for copy, row in zip(copies, rows, strict=True):
        assert torch.equal(copy.cpu(), row) and copy.is_contiguous() and copy.dtype == torch.int64
        assert copy.data_ptr() % 16 == 0
    rows[1][0] = words.LIMIT + 1
    assert launch_together(rows, torch.device(device)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("largest", [9, words.LIMIT + 9])
@pytest.mark.parametrize("N", [0, 3, 16, 33])
def test_lengths_on_a_gpu(N: int, largest: int) -> None:
    """Few small lengths are launched; the others are copied, and one is on the device already."""
    rows = [torch.arange(N), torch.arange(N) + largest, torch.arange(N, device="cuda")]
    launches = 0 < 2 * N <= lengths.LAUNCHED_WORDS and largest < words.LIMIT
    with mock.patch.object(lengths, "copy_together", wraps=lengths.copy_together) as copied:
        found = on_device(torch.device("cuda"), *rows)
    assert copied.called is not launches
    for tensor, row in zip(found, rows, strict=True):
        assert tensor.is_cuda and torch.equal(tensor.cpu(), row.cpu())
