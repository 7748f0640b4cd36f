"""The choice of the best candidates of a step of beam search."""

import pytest
import torch
from helpers.rows import kernel_devices

pytest.importorskip("triton")
import triton
import triton.language as tl

from partita.ops.decode.gpu.select import select_in_order


@triton.jit
def positions_kernel(scores_ptr, result_ptr, width, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    passes, position, _ = select_in_order(tl.load(scores_ptr + lane), width)
    tl.store(result_ptr + lane, tl.where(passes, position, -1))


@pytest.mark.interpreted
@kernel_devices
def test_selection_against_a_sort(device: str) -> None:
    """Numbers of all sizes and both signs, some of them equal, infinite or NaN."""
    g = torch.Generator().manual_seed(0)
    for i, width in enumerate((1, 5, 16, 31, 32, 7)):
        scores = torch.randn(32, generator=g, dtype=torch.float64) * 10.0 ** (3 * (i % 3) - 3)
        if i % 2:
            scores = scores.clamp(-3, 3).round()
            scores[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, -1e308, 1e308, -0.0])
        result = torch.zeros(32, dtype=torch.int64, device=device)
        positions_kernel[(1,)](scores.to(device), result, width, BLOCK=32)
        live = [j for j in range(32) if scores[j] > -torch.inf]
        best = sorted(sorted(live, key=lambda j: (-float(scores[j]), j))[:width])
        expected = [best.index(j) if j in best else -1 for j in range(32)]
        assert result.tolist() == expected
