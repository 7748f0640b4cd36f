"""Few long chains of few states, whose scans are parallel in time, against the reference."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.chains import TABLES, assert_logz_matches_reference, logz_and_gradients, random_chain
from helpers.rows import KERNEL_DEVICES, kernel_devices
from torch import Tensor

import partita
from partita import Chain
from partita.ops.chain.gpu import plan
from partita.runtime.caches import clear_caches
from partita.testing import poisoned_memory

# Some segments and groups are not full, and some lanes of a program have no vector of states.
SHAPES = (
    (7, 1, 2, 1),
    (9, 2, 1, 2),
    (23, 3, 3, 2),
    (17, 2, 4, 4),
    (50, 1, 5, 3),
    (12, 3, 13, 5),
    (9, 1, 32, 3),
    (13, 2, 4, 9),
)
LONG = ((100_000, 1, 16, 5), (2048, 32, 32, 5), (5000, 3, 7, 12), (1_000_000, 1, 4, 4))
GPU = KERNEL_DEVICES[1:]


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let short chains be parallel in time too, in segments of four steps.

    A call that was recorded under another plan would be replayed, so the caches are emptied.
    """
    clear_caches()
    monkeypatch.setattr(plan, "MIN_PARALLEL_STEPS", 7)
    monkeypatch.setattr(plan, "MIN_SEGMENT_STEPS", 4)
    yield
    clear_caches()


def assert_matches_reference(chain: Chain, dtype: torch.dtype) -> None:
    """Assert that log Z and its gradients match the reference, in segments."""
    assert plan.is_parallel(*chain.scores.shape[:3])
    assert_logz_matches_reference(chain, dtype)


@kernel_devices
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logz_and_gradient_match_the_reference(
    shape: tuple[int, ...], kind: str, device: str
) -> None:
    if device == "cpu" and kind == "dense" and shape[2] > 5:
        pytest.skip("the interpreter is slow: it runs dense tables of few states")
    chain = random_chain(*shape, kind=kind, seed=sum(shape), device=device)
    assert_matches_reference(chain, torch.float32)


@kernel_devices
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(9, 3, 6, 3), (9, 3, 3, 12)], ids=str)
def test_dtypes(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates what it stores in bf16")
    assert_matches_reference(random_chain(*shape, seed=1, device=device), dtype)


@kernel_devices
@pytest.mark.usefixtures("short_segments")
def test_missing_ends_and_strides(device: str) -> None:
    chain = random_chain(9, 3, 4, 3, ragged=False, device=device)
    no_ends = random_chain(9, 3, 4, 3, ends=False, device=device)
    assert_matches_reference(no_ends, torch.float64)
    frame = torch.full((3, 9, 3, 8), torch.nan, dtype=torch.float64, device=device)
    frame = frame.permute(1, 0, 3, 2)[:, :, ::2]
    frame.copy_(chain.scores)
    initial = chain.initial[:1].expand(3, -1)
    final = chain.final.repeat_interleave(2, 1)[:, ::2]
    for scores in (frame, chain.scores[:1].expand(9, -1, -1, -1)):
        assert_matches_reference(Chain(scores, chain.source, initial, final), torch.float64)


@kernel_devices
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_values_that_are_not_finite_stay_in_their_chain(value: float, device: str) -> None:
    """One score is NaN or +inf; log Z is not finite, and the other chains do not see it."""
    chain = random_chain(11, 3, 3, 3, ragged=False, forbidden=0.0, device=device)
    chain.source = torch.arange(3, device=device).repeat(3, 1)
    plain = logz_and_gradients(chain, "triton", torch.float32)
    chain.scores[6, 1, 2, 1] = value
    z, alone, d_scores, *_ = logz_and_gradients(chain, "triton", torch.float32)
    for total in (z, alone):
        assert torch.equal(total[::2], plain[0][::2])
        assert not total[1].isfinite()
    assert torch.equal(d_scores[:, ::2], plain[2][:, ::2])
    assert d_scores[:, 1].isnan().any()


@kernel_devices
@pytest.mark.usefixtures("short_segments")
def test_chains_without_a_path(device: str) -> None:
    """A chain in which no step or no end is possible has no marginals."""
    chain = random_chain(11, 4, 3, 2, ragged=False, forbidden=0.0, device=device)
    chain.scores[5, 0], chain.initial[1], chain.final[2] = (-torch.inf,) * 3
    z, _, *grads = logz_and_gradients(chain, "triton", torch.float32)
    assert z.isneginf().tolist() == [True, True, True, False]
    assert all((grad[:3] == 0.0).all() for grad in grads[1:])
    assert (grads[0][:, :3] == 0.0).all()
    assert_matches_reference(chain, torch.float32)


@pytest.mark.usefixtures("unchecked")
@kernel_devices
@pytest.mark.usefixtures("short_segments")
def test_invalid_lengths_make_nan(device: str) -> None:
    chain = random_chain(9, 4, ragged=False, forbidden=0.0, device=device)
    chain.lengths = torch.tensor([1, -2, 10, 0], device=device)
    z, without_grad, *grads = logz_and_gradients(chain, "triton", torch.float32)
    assert z.isnan().tolist() == without_grad.isnan().tolist() == [False, True, True, False]
    for grad, axis in zip(grads, (1, 0, 0), strict=True):
        chains = grad.movedim(axis, 0)
        assert chains[1:3].isnan().all() and chains[::3].isfinite().all()


@kernel_devices
@pytest.mark.usefixtures("short_segments")
def test_second_derivatives(device: str) -> None:
    """The scan over pairs continues from its own states, whatever log Z was computed by."""
    chain, found = random_chain(8, 2, 3, 2, forbidden=0.0, device=device), []
    for backend in ("triton", "reference"):
        scores = chain.scores.clone().nan_to_num(0.0).requires_grad_()
        with partita.backend(backend):
            z = Chain(scores, chain.source, lengths=chain.lengths).logz()
            (grad,) = torch.autograd.grad(z.square().sum(), scores, create_graph=True)
            found.append(torch.autograd.grad(grad.square().sum(), scores)[0])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def sticky_chain(T: int, C: int, device: str) -> Chain:
    """Return a chain whose state changes once in some ten thousand steps."""
    g = torch.Generator().manual_seed(0)
    scores = (torch.randn(T, 1, C, C, generator=g) - 10.0).diagonal_scatter(
        -1e-4 * torch.ones(T, 1, C), dim1=2, dim2=3
    )
    return Chain(scores.to(device), torch.arange(C, device=device).repeat(C, 1))


def chain_of_range(T: int, C: int, K: int, greatest: float, device: str) -> Chain:
    """Return a chain whose scores lie between 0 and `greatest`."""
    g = torch.Generator().manual_seed(int(greatest))
    scores = torch.rand(T, 1, C, K, generator=g) * greatest
    return Chain(scores.to(device), torch.randint(C, (C, K), generator=g).to(device))


def scanned_in_order(chain: Chain, function: Callable[[Chain], Any]) -> Any:
    """Return a function of a chain in fp64, from scans of one step after the other."""
    exact = Chain(chain.scores.double(), chain.source)
    backend = "triton" if chain.scores.is_cuda else "reference"
    with pytest.MonkeyPatch.context() as patch, partita.backend(backend):
        patch.setattr(plan, "MIN_PARALLEL_STEPS", 2**62)
        return function(exact)


def assert_exact(chain: Chain) -> None:
    """Assert the contract of long chains."""
    assert plan.is_parallel(*chain.scores.shape[:3])
    with partita.backend("triton"):
        z, marginals = chain._ops.log_partitions(chain._potentials)[0], chain.marginals()
    expected, exact = scanned_in_order(chain, lambda c: (c.logz(), c.marginals()))
    bound = 1e-6 * expected.abs().clamp(min=1) + 1e-9 * len(chain.scores)
    assert ((z - expected).abs() <= bound).all()
    assert (marginals - exact).abs().max() <= 2e-6


@kernel_devices
@pytest.mark.parametrize("greatest", [0.0, 3.0, 50.0, 500.0, 3000.0])
def test_marginals_are_exact(greatest: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of ever greater range, and a sticky chain for 0.

    The interpreter has fewer and longer blocks, which take it less time.
    """
    if device == "cpu":
        monkeypatch.setattr(plan, "SEGMENT_LANES", 1024)
    T = 100_000 if device == "cuda" else 3000
    chain = chain_of_range(T, 4, 3, greatest, device) if greatest else sticky_chain(T, 4, device)
    assert_exact(chain)


@pytest.mark.parametrize("device", GPU)
@pytest.mark.parametrize("shape", LONG, ids=str)
def test_long_chains(shape: tuple[int, ...], device: str) -> None:
    """Long chains in segments of the usual sizes are exact, and have the same bits each time."""
    g = torch.Generator().manual_seed(0)
    source = torch.randint(shape[2], shape[2:], generator=g).to(device)
    ends = torch.zeros(shape[1:3], device=device)
    chain = Chain(torch.randn(shape, generator=g).to(device), source, ends, ends)
    assert_exact(chain)
    first, *others = (logz_and_gradients(chain, "triton", torch.float32) for _ in range(3))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@kernel_devices
@pytest.mark.usefixtures("short_segments")
def test_lanes_do_not_change_results(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of vectors that a program scans at once is a matter of speed alone."""
    chain, found = random_chain(30, 2, 5, 3, forbidden=0.0, device=device), []
    for lanes in (8, 32, 512):
        monkeypatch.setattr(plan, "SEGMENT_LANES", lanes)
        found.append(logz_and_gradients(chain, "triton", torch.float32))
    for first, *others in zip(*found, strict=True):
        for other in others:
            assert torch.equal(first.nan_to_num(-1.0), other.nan_to_num(-1.0))


def best_results(chain: Chain, backend: str) -> tuple[Tensor, ...]:
    """Return the best path, the best score with and without a gradient, and its gradients."""
    parts = [t.clone().requires_grad_() for t in (chain.scores, chain.initial, chain.final)]
    with partita.backend(backend), poisoned_memory():
        path = chain.viterbi()
        best = Chain(parts[0], chain.source, *parts[1:], lengths=chain.lengths).logz(partita.Max)
        grads = torch.autograd.grad(best.sum(), parts)
        return *path, best, chain.logz(partita.Max), *grads


def assert_best_path_matches_reference(chain: Chain) -> None:
    """Assert that the path is the reference's, with the same score up to rounding."""
    assert plan.is_parallel(*chain.scores.shape[:3])
    for a, b in zip(*(best_results(chain, name) for name in ("triton", "reference")), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert a.is_floating_point() or torch.equal(a, b)


@kernel_devices
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_best_path_matches_the_reference(shape: tuple[int, ...], kind: str, device: str) -> None:
    if device == "cpu" and shape[2] > 5 and kind != "missing":
        pytest.skip("the interpreter is slow: it runs one table of many states")
    chain = random_chain(*shape, kind=kind, seed=sum(shape), device=device, dtype=torch.float32)
    assert_best_path_matches_reference(chain)


@kernel_devices
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("shape", [(30, 3, 4, 3), (41, 2, 3, 9)], ids=str)
def test_ties_are_broken_as_promised(shape: tuple[int, ...], kind: str, device: str) -> None:
    """Scores are integers of few values, so that almost every path has an equal."""
    chain = random_chain(*shape, kind=kind, seed=sum(shape), device=device, dtype=torch.float32)
    for scale in (0.0, 1.0, 30.0):
        scores = (chain.scores * scale).nan_to_num(0.0, neginf=-torch.inf).round()
        ends = [
            (t * scale).nan_to_num(0.0, neginf=-torch.inf).round()
            for t in (chain.initial, chain.final)
        ]
        assert_best_path_matches_reference(
            Chain(scores, chain.source, *ends, lengths=chain.lengths)
        )


@pytest.mark.usefixtures("unchecked")
@kernel_devices
@pytest.mark.usefixtures("short_segments")
def test_best_path_of_invalid_and_impossible_chains(device: str) -> None:
    chain = random_chain(9, 5, ragged=False, forbidden=0.0, device=device)
    chain.lengths = torch.tensor([1, -2, 10, 0, 9], device=device)
    chain.scores[5, 4] = -torch.inf
    with partita.backend("triton"), poisoned_memory():
        score, states, edges = chain.viterbi()
    assert score.isnan().tolist() == [False, True, True, False, False] and score[4] == -torch.inf
    assert (states[:, [1, 2, 4]] == -1).all() and (edges[:, [1, 2, 3, 4]] == -1).all()
    assert (states[:, [0, 3]] >= 0).sum(0).tolist() == [2, 1]
    assert (edges[:, 0] >= 0).sum() == 1


@pytest.mark.parametrize("device", GPU)
@pytest.mark.parametrize("shape", LONG, ids=str)
def test_long_best_paths(shape: tuple[int, ...], device: str) -> None:
    """Integer scores have the path of the scan of one step after the other, ties included."""
    g = torch.Generator().manual_seed(0)
    source = torch.randint(shape[2], shape[2:], generator=g).to(device)
    chain = Chain(torch.randint(-3, 4, shape, generator=g).float().to(device), source)
    with partita.backend("triton"):
        found = [chain.viterbi() for _ in range(3)]
    score, *expected = scanned_in_order(chain, Chain.viterbi)
    for path in found:
        assert torch.equal(path.score.double(), score)
        assert all(torch.equal(a, b) for a, b in zip(path[1:], expected, strict=True))
