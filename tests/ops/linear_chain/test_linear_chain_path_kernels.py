"""The GPU kernels for paths of dense linear chains, and those that are parallel in time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.rows import INTERPRETING, kernel_devices
from helpers.token_chains import KINDS, random_linear_chain
from torch import Tensor

import partita
from partita import LinearChain
from partita.ops.linear_chain import autograd
from partita.ops.linear_chain.common import LinearChainPotentials
from partita.ops.linear_chain.gpu import launch_paths, plan
from partita.ops.linear_chain.gpu.arguments import Batch, StridedSteps, batch_of, strided_steps
from partita.primitives.gpu import target
from partita.runtime.caches import clear_caches
from partita.testing import poisoned_memory

chooses_layouts = pytest.mark.skipif(
    not target.assumed.runs_ptx, reason="these scans choose layouts, which NVIDIA GPUs alone do"
)

# Sequences of one segment, of several groups, of one state, and of more states than lanes add up.
SHAPES = ((9, 1, 3), (70, 1, 2), (34, 2, 5), (17, 2, 1), (20, 1, 8), (20, 1, 10))
LARGE = (
    (1500, 2, 4),
    (1200, 1, 16),
    (200, 3, 50),
    (100, 3, 100),
    (40, 17, 200),
    (9, 3, 512),
    (60, 16, 512),
)


def cut_small(T: int, N: int, C: int) -> plan.SegmentSizes:
    """Return segments of 8 tokens and groups of 2, so that few tokens have several levels."""
    counts = [-(-T // 8)]
    while counts[-1] > 3:
        counts.append(-(-counts[-1] // 2))
    return plan.SegmentSizes(8, 2, tuple(counts))


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scan short sequences in segments."""
    monkeypatch.setattr(plan, "MIN_PARALLEL_TOKENS", 2)
    monkeypatch.setattr(plan, "WORD_STEPS", 4)
    monkeypatch.setattr(plan, "lane_sizes", cut_small)
    clear_caches()
    yield
    clear_caches()


def arguments(chain: LinearChain, whole: bool = False) -> list[Tensor | None]:
    """Return the arguments of the ops, with scores rounded to whole numbers, whose sums tie."""
    scores = [chain.emissions, chain.transitions, chain.start, chain.end]
    return [*(t.round() if whole and t is not None else t for t in scores), chain.lengths]


def both(op: object, tensors: list[Tensor | None], *args: Tensor) -> tuple[object, object]:
    """Return the results of the kernels and of the reference."""
    assert callable(op)
    with poisoned_memory():
        found = op(*tensors, *args, "triton")
    return found, op(*tensors, *args, "reference")


def assert_same_path(chain: LinearChain) -> None:
    """Compare best paths of scores that tie."""
    found, expected = both(autograd.viterbi, arguments(chain, whole=True))
    torch.testing.assert_close(found[0], expected[0], equal_nan=True)
    assert torch.equal(found[1], expected[1])


def assert_equally_good_path(chain: LinearChain, dtype: torch.dtype) -> None:
    """Compare the scores of the best paths, which may be different paths."""
    tensors = [None if t is None else t.to(dtype) for t in arguments(chain)[:4]]
    found, expected = both(autograd.viterbi, [*tensors, chain.lengths])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    rounded = LinearChain(*(None if t is None else t.double() for t in tensors))
    rounded.lengths = chain.lengths
    with partita.backend("reference"):
        scores = [rounded.log_prob(states) for states in (found[1], expected[1])]
    torch.testing.assert_close(*scores, rtol=1e-12, atol=1e-9, equal_nan=True)


@kernel_devices
@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("forbidden", [0.0, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_paths_and_samples_in_segments(
    shape: tuple[int, int, int], forbidden: float, device: str
) -> None:
    assert plan.uses_lanes(*shape, plan.MAX_PARALLEL_STATES)
    chain = random_linear_chain(*shape, forbidden=forbidden, device=device)
    assert_same_path(chain)
    T, N, _ = shape
    uniforms = torch.rand(T, 3, N, dtype=torch.float64, device=device)
    assert torch.equal(*both(autograd.sample, arguments(chain), uniforms))
    chain = random_linear_chain(*shape, ends=False, ragged=False, device=device)
    assert_same_path(chain)
    assert torch.equal(*both(autograd.sample, arguments(chain), uniforms))


@kernel_devices
@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("scale", [1.0, 200.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_of_any_range_in_segments(scale: float, dtype: torch.dtype, device: str) -> None:
    chain = random_linear_chain(40, 2, 5, scale=scale, device=device)
    assert_equally_good_path(chain, dtype)
    uniforms = torch.rand(40, 3, 2, dtype=torch.float64, device=device)
    assert torch.equal(*both(autograd.sample, arguments(chain), uniforms))


@pytest.mark.usefixtures("unchecked")
@kernel_devices
@pytest.mark.usefixtures("segments")
def test_nan_and_invalid_lengths_stay_in_their_sequence_in_segments(device: str) -> None:
    chain = random_linear_chain(40, 7, 3, ragged=False, device=device)
    chain.emissions[21, 1, 2] = torch.nan
    chain.emissions[12, 2] = -torch.inf
    chain.start[3, 1], chain.end[4, 1] = torch.nan, torch.nan
    chain.lengths = torch.tensor([40, 40, 40, 40, 40, 0, 41], device=device)
    (score, states), _ = both(autograd.viterbi, arguments(chain))
    assert score.isnan().tolist() == [False, True, False, True, True, True, True]
    assert score[2] == -torch.inf and (states[:, 1:] == -1).all() and (states[:, 0] >= 0).all()
    drawn, _ = both(autograd.sample, arguments(chain), torch.rand(40, 2, 7, device=device).double())
    assert (drawn[:, :, 1:] == -1).all() and (drawn[:, :, 0] >= 0).all()
    chain.transitions[1, 2] = torch.nan
    (score, states), _ = both(autograd.viterbi, arguments(chain))
    assert score.isnan().all() and (states == -1).all()


def scan_best_in_torch(
    batch: Batch, transitions: Tensor, scores: Tensor, is_nan: Tensor, *unused: Any
) -> StridedSteps:
    """Store what `launch_paths.scan_best` does, whose kernels Triton's interpreter does not run."""
    T, N = batch.T, batch.N
    lengths = torch.full((N,), T) if batch.lengths is None else batch.lengths
    is_nan.zero_()
    tokens = torch.where((lengths >= 1) & (lengths <= T), lengths, 1)
    start, end = (0.0 if x.ptr is None else x.ptr.double() for x in (batch.start, batch.end))
    for t, emissions in enumerate(batch.emissions.ptr.double()):
        y, x = torch.zeros_like(emissions), emissions + start
        if t > 0:
            step = transitions if transitions.ndim == 2 else transitions[t - 1]
            y = (scores[0, t - 1, :, :, None] + step).amax(1)
            x = y + emissions
        x = torch.where((t == tokens - 1)[:, None], x + end, x)
        active = t < tokens
        scores[:, t, active] = torch.stack((x, y))[:, active]
        is_nan[0] |= active & x.isnan().any(1)
    return strided_steps(transitions)


@pytest.fixture(params=["maps", "traced"])
def way_back(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace paths through maps of all states, and from the scores alone."""
    if not target.assumed.runs_ptx:
        monkeypatch.setattr(plan, "stores_previous", lambda *args: False)
        monkeypatch.setattr(launch_paths, "scan_best", scan_best_in_torch)
    if request.param == "traced":
        monkeypatch.setattr(plan, "MAX_RESIDENT_STATES", 0)
    clear_caches()
    yield
    clear_caches()


@kernel_devices
@pytest.mark.usefixtures("way_back")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 2, 70), (3, 2, 66), (140, 1, 65)])
def test_paths_of_many_states(kind: str, shape: tuple[int, int, int], device: str) -> None:
    assert not plan.stores_previous(
        shape[-1], kind == "constant", target.target_of(torch.device(device))
    )
    for forbidden in (0.0, 0.6):
        assert_same_path(random_linear_chain(*shape, kind=kind, forbidden=forbidden, device=device))
    chain = random_linear_chain(*shape, kind=kind, ends=False, ragged=False, device=device)
    assert_equally_good_path(chain, torch.float32)


@pytest.mark.usefixtures("unchecked")
@kernel_devices
@pytest.mark.usefixtures("way_back")
@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_sequence_of_many_states(kind: str, device: str) -> None:
    chain = random_linear_chain(3, 6, 66, kind=kind, ragged=False, device=device)
    chain.emissions[0, 0, 65] = torch.nan
    chain.emissions[2, 1, 0] = torch.nan
    chain.emissions[1, 2] = -torch.inf
    chain.lengths = torch.tensor([3, 3, 3, 2, 0, 4], device=device)
    chain.emissions[2, 3] = torch.nan
    score, states = both(autograd.viterbi, arguments(chain))[0]
    assert score.isnan().tolist() == [True, True, False, False, True, True]
    assert score[2] == -torch.inf and (states[:, [0, 1, 2, 4, 5]] == -1).all()
    assert states[:, 3].tolist()[2] == -1 and (states[:2, 3] >= 0).all()
    chain.transitions[..., 65, 65] = torch.nan
    score, states = both(autograd.viterbi, arguments(chain))[0]
    assert score.isnan().all() and (states == -1).all()


@pytest.fixture
def from_both_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scan best scores of all lengths from both ends."""
    monkeypatch.setattr(plan, "MIN_MEETING_TOKENS", 1)
    clear_caches()
    yield
    clear_caches()


@kernel_devices
@pytest.mark.usefixtures("from_both_ends")
@chooses_layouts
@pytest.mark.parametrize("forbidden", [0.0, 0.5])
@pytest.mark.parametrize("shape", [(1, 2, 20), (2, 3, 50), (3, 4, 128), (41, 7, 33), (300, 5, 100)])
def test_paths_from_both_ends(shape: tuple[int, int, int], forbidden: float, device: str) -> None:
    assert plan.meets(*shape, True, target.target_of(torch.device(device)))
    chain = random_linear_chain(*shape, forbidden=forbidden, device=device)
    assert_same_path(chain)  # whole numbers tie, so the second half is scanned from the middle too
    for dtype in (torch.float32, torch.float64):
        assert_equally_good_path(chain, dtype)
    chain = random_linear_chain(*shape, ends=False, ragged=False, device=device)
    assert_same_path(chain)
    assert_equally_good_path(chain, torch.float32)
    first, second = (autograd.viterbi(*arguments(chain), "triton") for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.usefixtures("unchecked")
@kernel_devices
@pytest.mark.usefixtures("from_both_ends")
@chooses_layouts
def test_nan_and_ties_stay_in_their_sequence_from_both_ends(device: str) -> None:
    chain = random_linear_chain(40, 8, 30, ragged=False, device=device)
    chain.emissions[:, 7] = 0.0
    chain.emissions[31, 1, 2] = chain.emissions[2, 2, 29] = torch.nan
    chain.emissions[32, 3] = -torch.inf
    chain.lengths = torch.tensor([40, 40, 40, 40, 0, 41, 20, 40], device=device)
    chain.emissions[20, 6] = torch.nan
    tensors = [chain.emissions, chain.transitions, None, None, chain.lengths]
    found, expected = both(autograd.viterbi, tensors)
    torch.testing.assert_close(found[0], expected[0], equal_nan=True)
    assert torch.equal(found[1], expected[1])
    chain.transitions.zero_()[1, 2] = torch.nan
    score, states = both(autograd.viterbi, tensors)[0]
    assert score.isnan().all() and (states == -1).all()


@kernel_devices
@pytest.mark.skipif(INTERPRETING, reason="too large for the interpreter")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", LARGE)
def test_large_paths(kind: str, shape: tuple[int, int, int], device: str) -> None:
    T, N, C = shape
    if kind == "by sequence" and T * N * C * C > 2**26:
        T = max(2, 2**26 // (N * C * C))
    chain = random_linear_chain(T, N, C, kind=kind, device=device, dtype=torch.float32)
    assert_same_path(chain)
    first, second = (autograd.viterbi(*arguments(chain), "triton") for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    if kind == "constant" and C <= 16:
        uniforms = torch.rand(T, 3, N, dtype=torch.float64, device=device)
        found, expected = both(autograd.sample, arguments(chain), uniforms)
        # A uniform number within rounding of a boundary may draw another state.
        assert (found == expected).double().mean() > 0.999


def test_levels_cover_all_segments() -> None:
    for T in (1, 2, 256, 9_999, 100_000, 1_000_000):
        for N, C in ((1, 4), (32, 8), (1, 16)):
            sizes = plan.lane_sizes(T, N, C)
            assert sizes.counts[0] * sizes.steps >= T > (sizes.counts[0] - 1) * sizes.steps
            for number, groups in zip(sizes.counts, sizes.counts[1:], strict=False):
                assert groups * sizes.size >= number > (groups - 1) * sizes.size
            assert sizes.counts[-1] <= 2 * sizes.size


@kernel_devices
@pytest.mark.parametrize("meets", [False, True])
def test_traces_from_the_last_and_from_the_middle_token(meets: bool, device: str) -> None:
    """Trace maps of states backwards from a known one, and forwards after it."""
    T, N, C = 70, 4, 20
    previous = torch.randint(C, (T, N, C), dtype=torch.int16, device=device)
    lengths = torch.tensor([70, 1, 41, 70], device=device)
    last, ties = torch.tensor([[3, 5, 0, -1], [1, 1, 1, 1]], dtype=torch.int32, device=device)
    emissions = torch.empty((T, N, C), device=device)
    batch = batch_of(LinearChainPotentials(emissions, emissions, None, None, lengths))
    expected = torch.full((T, N), -1)
    for n, tokens in enumerate(lengths.tolist()[:3]):
        middle = tokens // 2 if meets else tokens - 1
        expected[middle, n] = last[n]
        for t in range(middle, 0, -1):
            expected[t - 1, n] = previous[t, n, expected[t, n]]
        for t in range(middle + 1, tokens):
            expected[t, n] = previous[t, n, expected[t - 1, n]]
    states = torch.empty((T, N), dtype=torch.int64, device=device)
    launch_paths.trace(batch, previous, None, last, states, meets)
    assert torch.equal(states.cpu(), expected)
    states[:], ties[1] = 7, 0
    expected[:, 1] = 7
    launch_paths.trace(batch, previous, ties, last, states, meets)
    assert torch.equal(states.cpu(), expected)
