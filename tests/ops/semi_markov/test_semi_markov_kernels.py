"""The GPU kernels of semi-Markov chains against the reference, interpreted and on a GPU."""

from collections.abc import Callable

import pytest
import torch
from helpers.rows import INTERPRETING, kernel_devices
from helpers.token_chains import random_semi_markov, scores_of

from partita import SemiMarkovChain, backend
from partita.ops.semi_markov import autograd
from partita.ops.semi_markov.gpu import plan
from partita.runtime.caches import clear_caches
from partita.testing import poisoned_memory

SHAPES = ((1, 2, 3, 2), (7, 3, 5, 4), (6, 1, 2, 40))
LARGE = ((300, 3, 24, 50), (100, 2, 16, 100), (70, 2, 40, 33), (1000, 2, 5, 9))


def tensors_of(chain: SemiMarkovChain, dtype: torch.dtype) -> list[torch.Tensor]:
    return [tensor.to(dtype) for tensor in scores_of(chain)]


def results(chain: SemiMarkovChain, name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return log Z in fp64 with and without gradients, all gradients, and the segments."""
    arguments = (*tensors_of(chain, dtype), chain.lengths)
    grad = torch.linspace(0.5, 2, chain.emissions.shape[1], device=chain.emissions.device)
    with backend(name), poisoned_memory():
        logz, rounded, saved = autograd.logz(*arguments, True, name)
        without, _, _ = autograd.logz(*arguments, False, name)
        found = [logz, without, rounded.double()]
        for per_sequence in (False, True):
            found += autograd.gradient(grad, *arguments, logz, saved, per_sequence, name)
        return [*found, autograd.segments(*arguments, logz, saved, name)]


def agree(chain: SemiMarkovChain, dtype: torch.dtype = torch.float32) -> None:
    """Compare the kernels with the reference in fp64 of the same inputs."""
    scores = (tensor.to(dtype).double() for tensor in tensors_of(chain, dtype))
    exact = SemiMarkovChain(*scores, lengths=chain.lengths)
    found = results(chain, "triton", dtype)
    expected = results(exact, "reference", torch.float64)
    bound = 1e-9 if dtype == torch.float64 else 1e-6
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        limit = 1e-11 if i < 2 else bound  # log Z is in fp64 for all dtypes
        torch.testing.assert_close(a.double(), b.double(), rtol=limit, atol=limit, equal_nan=True)


def agree_in_paths(chain: SemiMarkovChain) -> None:
    """Compare the best paths and samples, which are the same to the last bit."""
    uniforms = torch.linspace(0, 1, chain.emissions.shape[0] * 6 * chain.emissions.shape[1])
    uniforms = uniforms.double().reshape(-1, 2, 3, chain.emissions.shape[1])
    arguments = (*tensors_of(chain, chain.emissions.dtype), chain.lengths)
    device = chain.emissions.device
    uniforms, found = uniforms.to(device), []
    for name in ("triton", "reference"):
        with poisoned_memory():
            path = autograd.viterbi(*arguments, name)
            found.append((*path, *autograd.sample(*arguments, uniforms, name)))
            for k in (2, 3):
                if plan.nbest_options(chain.emissions.shape[2], len(chain.durations), k):
                    found[-1] += autograd.best_paths(*arguments, k, name)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@kernel_devices
@pytest.mark.parametrize("shape", SHAPES)
def test_log_z_and_gradients(shape: tuple[int, int, int, int], device: str) -> None:
    agree(random_semi_markov(*shape, device=device, forbidden=0.1))


@kernel_devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_and_large_scores(dtype: torch.dtype, device: str) -> None:
    chain = random_semi_markov(6, 2, 3, 2, device=device, scale=50.0, dtype=dtype)
    if dtype == torch.float64:
        agree(chain, dtype)
        return
    found, expected = (results(chain, name, dtype) for name in ("triton", "reference"))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@kernel_devices
def test_rings_in_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_RING", 0)
    clear_caches()
    chain = random_semi_markov(6, 2, 3, 4, device=device, forbidden=0.1)
    agree(chain)
    agree_in_paths(chain)
    clear_caches()


def left_to_right(chain: SemiMarkovChain) -> None:
    chain.transitions.fill_(-torch.inf).fill_diagonal_(0.0)
    chain.transitions[0, 1] = chain.transitions[1, 2] = 0.0
    chain.start[:, 1:] = -torch.inf
    chain.emissions[15:].mul_(100)


@kernel_devices
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda chain: chain.emissions[:, :, 1].sub_(60), id="falling state"),
        pytest.param(lambda chain: chain.emissions[15:, :, 0].sub_(300), id="late change"),
        pytest.param(lambda chain: chain.emissions[5:20, :, 2].fill_(-torch.inf), id="no emission"),
        pytest.param(lambda chain: chain.emissions.mul_(1000), id="large emissions"),
        pytest.param(lambda chain: chain.emissions.add_(1e5), id="offset"),
        pytest.param(lambda chain: chain.transitions.mul_(400), id="large transitions"),
        pytest.param(lambda chain: chain.durations.mul_(400), id="large durations"),
        pytest.param(lambda chain: chain.durations[:6].fill_(-torch.inf), id="long segments"),
        pytest.param(lambda chain: chain.durations[:, 1].fill_(-torch.inf), id="state without"),
        pytest.param(left_to_right, id="left to right"),
    ],
)
def test_scores_beyond_linear_arithmetic(
    change: Callable[[SemiMarkovChain], object], device: str
) -> None:
    chain = random_semi_markov(30, 2, 3, 9, ragged=False, dtype=torch.float32, device=device)
    change(chain)
    agree(chain)
    agree_in_paths(chain)


def allow_moves(chain: SemiMarkovChain, farthest: int, nearest: int = 0) -> None:
    """Allow transitions up by `nearest` to `farthest` states, from the first to the last."""
    states = torch.arange(chain.transitions.shape[0], device=chain.transitions.device)
    move = states[None, :] - states[:, None]
    chain.transitions.masked_fill_((move < nearest) | (move > farthest), -torch.inf)
    chain.start[:, 1:] = -torch.inf
    chain.end[:, :-1] = -torch.inf


def drift(chain: SemiMarkovChain) -> None:
    allow_moves(chain, 1)
    chain.emissions.sub_(8 * torch.arange(6, device=chain.emissions.device))


def forbid_short_segments(chain: SemiMarkovChain) -> None:
    allow_moves(chain, 1)
    chain.durations[:7] = -torch.inf
    chain.emissions.mul_(10)


def enter_after_longest_segment(chain: SemiMarkovChain) -> None:
    chain.emissions[:30, :, 1] = -torch.inf
    chain.transitions[:, 2] = chain.start[:, 2] = -torch.inf
    chain.transitions[1, 2] = 0.0


def interrupt(chain: SemiMarkovChain) -> None:
    allow_moves(chain, 2)
    chain.emissions[20:40, :, ::2] = -torch.inf
    chain.emissions[45, :, :4] = -torch.inf


@kernel_devices
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda chain: allow_moves(chain, 1), id="left to right"),
        pytest.param(lambda chain: allow_moves(chain, 3), id="skips"),
        pytest.param(lambda chain: allow_moves(chain, 2, 1), id="each state once"),
        pytest.param(drift, id="states drift apart"),
        pytest.param(forbid_short_segments, id="long segments"),
        pytest.param(enter_after_longest_segment, id="late state"),
        pytest.param(interrupt, id="forbidden emissions"),
        pytest.param(lambda chain: chain.durations[:11].fill_(-torch.inf), id="one duration"),
    ],
)
def test_impossible_states_and_segments(
    change: Callable[[SemiMarkovChain], object], device: str
) -> None:
    chain = random_semi_markov(60, 1, 6, 12, ragged=False, dtype=torch.float32, device=device)
    change(chain)
    agree(chain)


def chain_of_two(T: int, D: int, device: str) -> SemiMarkovChain:
    """Return a chain of two states that ends in the second one, all other scores 0."""
    scores = (torch.zeros(shape, device=device) for shape in ((T, 1, 2), (2, 2), (D, 2), (1, 2)))
    end = torch.tensor([[-torch.inf, 0.0]], device=device)
    return SemiMarkovChain(*scores, end)


@kernel_devices
@pytest.mark.parametrize(("gain", "steps"), [(60.0, 20), (800.0, 20), (800.0, 1)])
def test_a_segment_that_others_round_to_zero_may_be_the_only_path(
    gain: float, steps: int, device: str
) -> None:
    """The second state takes all 20 steps. It is opened at each, with scores that rise."""
    chain = chain_of_two(20, 20, device)
    chain.emissions[:steps, :, 0] = gain
    chain.durations[1:, 0] = chain.durations[:-1, 1] = -torch.inf
    agree(chain)


@kernel_devices
def test_the_only_path_may_have_a_state_that_falls_at_once(device: str) -> None:
    chain = chain_of_two(9, 1, device)
    chain.transitions[0, 0] = chain.transitions[1, 0] = chain.start[:, 1] = -torch.inf
    chain.emissions[1] = -1500.0
    agree(chain)


@kernel_devices
@pytest.mark.parametrize("score", [-300.0, -900.0])
def test_scores_whose_exponentials_are_zero_beside_the_greatest(score: float, device: str) -> None:
    """The only path has a duration or a transition with a score that is far below others."""
    chain = chain_of_two(9, 9, device)
    chain.transitions.fill_(-torch.inf)
    chain.start[:, 0] = -torch.inf
    chain.durations[8] = score
    agree(chain)
    chain = chain_of_two(9, 3, device)
    chain.start[:, 1] = -torch.inf
    chain.transitions[0, 1] = score
    agree(chain)


@pytest.mark.usefixtures("unchecked")
@kernel_devices
def test_invalid_lengths_nan_and_no_path_stay_in_their_sequence(device: str) -> None:
    chain = random_semi_markov(4, 4, 3, 2, device=device, ragged=False)
    chain.emissions[2, 1, 2] = torch.nan
    chain.emissions[2, 2] = -torch.inf
    chain.lengths = torch.tensor([3, 4, 4, 9], device=device)
    found, expected = (results(chain, name, torch.float32) for name in ("triton", "reference"))
    for i in (0, 1, 2, 3):  # log Z and the gradient in the emissions
        torch.testing.assert_close(found[i], expected[i], rtol=1e-6, atol=1e-6, equal_nan=True)
    agree_in_paths(chain)


@kernel_devices
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_best_paths_and_samples(shape: tuple[int, int, int, int], device: str) -> None:
    agree_in_paths(random_semi_markov(*shape, device=device, forbidden=0.2))


@kernel_devices
@pytest.mark.parametrize(
    ("C", "D", "k"), [(3, 4, 5), (1, 3, 3), (2, 1, 4), (5, 2, 1), (8, 9, 6), (3, 3, 12)]
)
def test_the_k_best_paths(C: int, D: int, k: int, device: str) -> None:
    """The kernel has the paths of the reference, equal ones in the same order, to the last bit."""
    assert plan.nbest_options(C, D, k)
    for seed in range(2):
        chain = random_semi_markov(6, 3, C, D, device=device, seed=seed, forbidden=0.2)
        if seed:  # scores that tie
            for scores in tensors_of(chain, torch.float64):
                scores.round_()
        found = []
        for name in ("triton", "reference"):
            with backend(name), poisoned_memory():
                found.append(chain.nbest(k))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_which_k_best_paths_have_a_kernel() -> None:
    assert plan.nbest_options(8, 32, 5) == {"BLOCK_C": 8, "SLOTS": 32, "K": 5, "num_warps": 1}
    assert plan.nbest_options(24, 50, 2) and not plan.nbest_options(24, 50, 3)
    assert not plan.nbest_options(33, 2, 1) and not plan.nbest_options(2, 2, 10_000)


@pytest.mark.gpu
def test_the_k_best_paths_at_full_size() -> None:
    chain = random_semi_markov(1000, 4, 8, 32, device="cuda", dtype=torch.float32)
    found = chain.nbest(5)
    on_cpu = (each.cpu() for each in (*tensors_of(chain, torch.float32),))
    expected = SemiMarkovChain(*on_cpu, lengths=chain.lengths.cpu()).nbest(5)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=0)
    large = random_semi_markov(40, 2, 40, 6, device="cuda", dtype=torch.float32)  # in PyTorch
    best = large.viterbi()
    for a, b in zip(large.nbest(3), best, strict=True):
        torch.testing.assert_close(a[0], b)


@kernel_devices
@pytest.mark.skipif(INTERPRETING, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("shape", LARGE)
def test_large_chains(shape: tuple[int, int, int, int], device: str) -> None:
    chain = random_semi_markov(*shape, device=device, dtype=torch.float32)
    agree(chain)
    agree_in_paths(chain)
    repeated = results(chain, "triton", torch.float32)
    for a, b in zip(results(chain, "triton", torch.float32), repeated, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("T", "N", "C"), [(1, 1, 1), (1000, 32, 24), (100_000, 1, 3), (9, 4000, 2)]
)
def test_the_parts_of_sequences_cover_them(T: int, N: int, C: int) -> None:
    parts, steps = plan.splits(T, N, C)
    assert (parts - 1) * steps < T <= parts * steps and steps % plan.ROWS == 0
    assert parts * N <= max(N, plan.PROGRAMS)


def test_each_element_of_a_ring_in_memory_belongs_to_one_warp() -> None:
    """A ring is loaded and stored without a barrier, so a second warp could load what is new."""
    for C in (1, 2, 3, 4, 5, 8, 9, 33, 100, 1000):
        options = plan.memory_scan_options(C)
        elements = options["BLOCK_C"] * options["BLOCK_K"]
        assert options["num_warps"] == 1 or elements >= 32 * options["num_warps"]
