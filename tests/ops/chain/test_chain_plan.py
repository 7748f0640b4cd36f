"""The plans of chains, which are pure functions of sizes."""

import pytest
import torch
from helpers.fresh import run_fresh

from partita.ops.chain.gpu import plan
from partita.primitives.gpu.target import H100, MI300, TARGETS, Target


def test_plans_import_no_triton() -> None:
    code = "import sys; import partita.ops.chain.gpu.plan; assert 'triton' not in sys.modules"
    assert run_fresh(code).code == 0


@pytest.mark.parametrize("T", [0, 1, 2, 31, 32, 33, 63, 64, 65, 66, 127, 1000, 20_001, 200_000])
def test_segments_cover_a_path(T: int) -> None:
    """Both rounds cover their steps, and the second round fits the workspace of the first."""
    (half_size, halves), (size, number) = plan.path_segments(T, False), plan.path_segments(T, True)
    middle = max(T - 1, 0) // 2
    assert half_size * halves >= max(middle, T - 1 - middle)
    assert size * number >= T
    assert number <= 2 * halves
    assert half_size in (16, 32, 64, 128, 256) and size in (16, 32, 64, 128, 256)
    if 0 < T <= plan.MAX_SINGLE_SEGMENT:
        assert halves == number == 1


def test_the_degree_decides_the_kernels() -> None:
    """Tables with few edges into and out of each state have register-resident kernels."""
    scores = torch.empty(3, 2, 64, 5)
    resident = plan.resident_options(scores, 5, H100)
    assert resident is not None and resident["BLOCK_C"] == 64 and resident["DEGREE"] == 5
    assert plan.resident_options(scores, 9, H100) is None
    assert plan.resident_options(scores, 5, MI300) is None
    assert plan.resident_options(scores, 5, H100._replace(interpreted=True)) is None
    assert plan.resident_options(scores.double(), 5, H100) is None
    assert plan.unroll_options(5, 9) == {"UNROLL_IN": 5, "UNROLL_OUT": 0}
    assert plan.block_options(2000) == {"BLOCK_C": 1024, "num_warps": 32}


def test_few_long_chains_are_parallel_in_time() -> None:
    assert plan.is_parallel(2048, 32, 32) and plan.is_parallel(10**7, 1, 1)
    for sizes in ((2047, 1, 4), (2048, 33, 4), (2048, 1, 33), (2048, 0, 4), (2048, 1, 0)):
        assert not plan.is_parallel(*sizes)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("C", [1, 4, 5, 16, 32])
@pytest.mark.parametrize("N", [1, 7, 32])
@pytest.mark.parametrize("T", [2048, 2049, 10_000, 100_000, 1_000_000, 10_000_001])
def test_segments_cover_a_chain(T: int, N: int, C: int, target: Target) -> None:
    """Segments cover the steps, groups the segments, and all states fit into what is saved."""
    sizes, options = plan.segment_sizes(T, N, C, target), plan.segment_options(C)
    assert sizes.steps in (16, 32, 64, 128)
    assert 0 <= sizes.steps * sizes.segments - T < sizes.steps
    assert 0 <= sizes.size * sizes.groups - sizes.segments < sizes.size
    assert sizes.size / 4 <= sizes.groups <= 2 * sizes.size
    assert 2 * (sizes.segments + 1) <= T + 1
    assert options["BLOCK_C"] >= C and options["ROWS"] * options["BLOCK_C"] == 32


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_segments_fill_a_gpu(target: Target) -> None:
    """The scans from known states have some warps for each multiprocessor."""
    for T, N, C in ((100_000, 1, 16), (1_000_000, 1, 4), (20_000, 8, 16)):
        rows = N * plan.segment_sizes(T, N, C, target).segments
        assert rows // plan.segment_options(C)["ROWS"] >= 8 * target.multiprocessors
