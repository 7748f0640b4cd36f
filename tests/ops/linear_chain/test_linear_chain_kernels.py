"""The GPU kernels of dense linear chains against the reference, interpreted and on a GPU."""

import pytest
import torch
from helpers.rows import INTERPRETING, KERNEL_DEVICES, kernel_devices
from helpers.token_chains import KINDS, random_linear_chain

import partita
from partita import LinearChain
from partita.ops.linear_chain import autograd
from partita.ops.linear_chain.gpu import plan
from partita.primitives.gpu.target import TARGETS, Target
from partita.runtime.caches import clear_caches
from partita.testing import poisoned_memory

SHAPES = ((1, 2, 3), (2, 3, 1), (7, 3, 5), (5, 2, 20), (60, 5, 3), (50, 4, 1), (20, 9, 12))
LARGE = ((300, 2, 4), (1000, 1, 16), (60, 3, 50), (40, 3, 128), (20, 17, 200), (9, 3, 512))
SCALES = (1.0, 200.0)  # of the transitions: linear arithmetic, and the log domain


def with_transitions(chain: LinearChain, scale: float) -> LinearChain:
    """Return the chain with transitions times a factor."""
    tensors = chain.emissions, chain.transitions * scale, chain.start, chain.end
    return LinearChain(*tensors, lengths=chain.lengths)


def results(chain: LinearChain, backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return log Z with and without gradients, all gradients, and those of each sequence."""
    ends = [None if t is None else t.to(dtype) for t in (chain.start, chain.end)]
    tensors = [chain.emissions.to(dtype), chain.transitions.to(dtype), *ends]
    arguments = (*tensors, chain.lengths)
    grad = torch.linspace(0.5, 2, chain.emissions.shape[1], device=chain.emissions.device)
    with partita.backend(backend), poisoned_memory():
        logz, rounded, saved = autograd.logz(*arguments, True, backend)
        without, _, _ = autograd.logz(*arguments, False, backend)
        found = [logz, rounded.double(), without]
        for per_sequence in (False, True):
            options = (True, per_sequence, backend)
            found += autograd.logz_gradient(grad, *arguments, logz, saved, *options)
    return found


def agree(chain: LinearChain, dtype: torch.dtype = torch.float32) -> None:
    """Compare the kernels with the reference in fp64 of the same inputs."""
    rounded = LinearChain(
        *(
            None if t is None else t.to(dtype).double()
            for t in (chain.emissions, chain.transitions, chain.start, chain.end)
        ),
        lengths=chain.lengths,
    )
    expected = results(rounded, "reference", torch.float64)
    bound = 1e-9 if dtype == torch.float64 else 2e-6
    for a, b in zip(results(chain, "triton", dtype), expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=bound, atol=bound, equal_nan=True)


@kernel_devices
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES)
def test_log_z_and_gradients(shape: tuple[int, int, int], scale: float, device: str) -> None:
    chain = random_linear_chain(*shape, device=device, dtype=torch.float32)
    agree(with_transitions(chain, scale))


@kernel_devices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forbidden", [0.0, 0.3])
def test_all_kinds_of_transitions(kind: str, forbidden: float, device: str) -> None:
    agree(random_linear_chain(6, 3, 4, kind=kind, forbidden=forbidden, device=device))
    agree(random_linear_chain(6, 3, 4, kind=kind, ends=False, ragged=False, device=device))


@kernel_devices
@pytest.mark.parametrize("scale", SCALES)
def test_fp64(scale: float, device: str) -> None:
    chain = random_linear_chain(9, 3, 5, device=device)
    agree(with_transitions(chain, scale), torch.float64)


@kernel_devices
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", [(1, 2, 5), (3, 17, 20)])
def test_states_that_pass_through_memory(
    shape: tuple[int, int, int], scale: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_RESIDENT_STATES", "MAX_LOG_STATES"):
        monkeypatch.setattr(plan, name, 0)
    clear_caches()
    agree(with_transitions(random_linear_chain(*shape, device=device), scale))
    clear_caches()


@kernel_devices
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", [(9, 1, 3), (40, 2, 5), (40, 1, 8), (40, 1, 10)])
def test_parallel_in_time(
    shape: tuple[int, int, int], scale: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MIN_PARALLEL_TOKENS", 2)
    clear_caches()
    agree(with_transitions(random_linear_chain(*shape, device=device), scale))
    clear_caches()


@kernel_devices
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_chains_without_a_path_stay_in_their_sequence(kind: str, device: str) -> None:
    chain = random_linear_chain(6, 4, 3, kind=kind, ragged=False, device=device)
    chain.emissions[3, 1, 2] = torch.nan
    chain.emissions[2, 2] = -torch.inf
    logz, _, without, d_emissions, *_ = results(chain, "triton", torch.float64)
    for found in (logz, without):
        assert found[1].isnan() and found[2] == -torch.inf and found[[0, 3]].isfinite().all()
    assert d_emissions[:, 1].isnan().all() and (d_emissions[:, 2] == 0).all()
    assert d_emissions[:, [0, 3]].isfinite().all()


@kernel_devices
def test_tokens_past_a_length_do_not_reach_the_transitions(device: str) -> None:
    """Sequences of one token take no transition, whatever its score and their gradient are."""
    chain = random_linear_chain(3, 2, 3, ragged=False, device=device)
    chain.transitions[0, 1] = torch.inf
    lengths = torch.tensor([1, 1], device=device)
    agree(LinearChain(chain.emissions, chain.transitions, lengths=lengths))
    for scale in SCALES:
        chain = with_transitions(random_linear_chain(3, 2, 3, device=device), scale)
        one = LinearChain(chain.emissions, chain.transitions, lengths=lengths)
        tensors = (one.emissions, one.transitions, None, None, one.lengths)
        with partita.backend("triton"), poisoned_memory():
            logz, _, saved = autograd.logz(*tensors, True, "triton")
            grad = torch.full_like(logz, torch.nan)
            options = (True, False, "triton")
            found = autograd.logz_gradient(grad, *tensors, logz, saved, *options)
        assert (found[1] == 0).all()


@kernel_devices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("C", [3, 70])
@pytest.mark.parametrize("forbidden", [0.0, 0.6])
def test_paths_and_samples(kind: str, C: int, forbidden: float, device: str) -> None:
    """Compare paths of scores that tie, and samples from the same uniform numbers."""
    T, N = (9, 3) if C < 10 else (3, 2)
    chain = random_linear_chain(T, N, C, kind=kind, forbidden=forbidden, device=device)
    tensors = [t.round() for t in (chain.emissions, chain.transitions, chain.start, chain.end)]
    uniforms = torch.rand(T, 4, N, dtype=torch.float64, device=device)
    (score, states), expected = (
        autograd.viterbi(*tensors, chain.lengths, backend) for backend in ("triton", "reference")
    )
    torch.testing.assert_close(score, expected[0])
    assert torch.equal(states, expected[1])
    drawn, expected_draws = (
        autograd.sample(*tensors, chain.lengths, uniforms, backend)
        for backend in ("triton", "reference")
    )
    assert torch.equal(drawn, expected_draws)


@kernel_devices
@pytest.mark.skipif(INTERPRETING, reason="too large for the interpreter")
@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("shape", LARGE)
def test_large(shape: tuple[int, int, int], scale: float, device: str) -> None:
    chain = random_linear_chain(*shape, device=device, dtype=torch.float32)
    chain = with_transitions(chain, scale)
    agree(chain)
    first, second = (results(chain, "triton", torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("shape", [(33, 40, 150), (50, 16, 512), (8, 100, 257)])
def test_exchanged_steps(
    shape: tuple[int, int, int], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that exchange states find what a launch for each step finds, and the same bits."""
    chain = with_transitions(random_linear_chain(*shape, device="cuda"), scale)
    chain.emissions[5, 3] *= 100
    chain.emissions[2, 1, 4], chain.emissions[4, 2] = torch.nan, -torch.inf
    found, same = (results(chain, "triton", torch.float64) for _ in range(2))
    for a, b in zip(found, same, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr(plan, "MAX_EXCHANGE_STATES", 0)
    clear_caches()
    expected = results(chain, "triton", torch.float64)
    clear_caches()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.gpu
def test_exchanges_on_several_streams() -> None:
    """Chains on two streams, and replays of a graph, give the bits of a call alone."""
    chain = random_linear_chain(60, 64, 512, device="cuda", dtype=torch.float32)
    expected = results(chain, "triton", torch.float32)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(results(chain, "triton", torch.float32))
    torch.cuda.synchronize()
    with partita.backend("triton"), torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logz = chain.logz()
        for _ in range(3):
            logz.zero_()
            graph.replay()
            torch.testing.assert_close(logz, expected[0].to(logz.dtype), rtol=1e-6, atol=0)
    for each in found:
        for a, b in zip(each, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_segments_cover_all_steps() -> None:
    for T in (*range(1, 300), 9_999, 100_000, 1_000_000):
        sizes = plan.segment_sizes(T)
        segments, groups = sizes.counts
        assert segments * sizes.steps >= T - 1 > (segments - 1) * sizes.steps or T == 1
        assert groups * sizes.size >= segments > (groups - 1) * sizes.size


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_splits_cover_all_tokens(target: Target) -> None:
    for ndim, C in ((2, 3), (2, 200), (3, 4), (4, 4)):
        for T, N in ((2, 1), (7, 3), (500, 32)):
            transitions = torch.empty({2: (C, C), 3: (T - 1, C, C), 4: (T - 1, N, C, C)}[ndim])
            for per_sequence in (False, True):
                _, groups = plan.count_groups(transitions, T, N, per_sequence, target)
                assert groups.splits * groups.per_split >= groups.total
                assert (groups.splits - 1) * groups.per_split < groups.total


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["50", "500", "sticky"])
def test_posteriors_of_long_chains_of_many_states(kind: str) -> None:
    """Posteriors are within 2e-6 of fp64 where programs exchange states."""
    T, N, C = 20_000, 2, 160
    g = torch.Generator(device="cuda").manual_seed(0)
    if kind == "sticky":
        emissions = 0.3 * torch.randn(T, N, C, generator=g, device="cuda")
        transitions = torch.full((C, C), 1e-4 / (C - 1), device="cuda", dtype=torch.float64)
        transitions = transitions.fill_diagonal_(0.9999).log().float()
    else:
        emissions = float(kind) * torch.rand(T, N, C, generator=g, device="cuda")
        transitions = float(kind) * torch.rand(C, C, generator=g, device="cuda")
    e, by_target, by_source = emissions.double(), transitions.double(), transitions.double().mT
    by_source = by_source.contiguous()
    expected = torch.empty_like(e)  # alpha, and then alpha plus beta
    alpha, beta = e[0], torch.zeros(N, C, dtype=torch.float64, device="cuda")
    expected[0] = alpha
    for t in range(1, T):
        alpha = (alpha[:, :, None] + by_target).logsumexp(1) + e[t]
        expected[t] = alpha
    for t in range(T - 2, -1, -1):
        beta = ((beta + e[t + 1])[:, :, None] + by_source).logsumexp(1)
        expected[t] += beta
    with partita.backend("triton"):
        found = LinearChain(emissions, transitions).state_marginals()
    assert (found.double() - expected.softmax(-1)).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("reference", "cpu"),
        ("numba", "cpu"),
        *(pytest.param("triton", *each.values, marks=each.marks) for each in KERNEL_DEVICES),
    ],
)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("shape", [(3, 3, 2), (40, 3, 5), (40, 2, 8), (9, 3, 12), (300, 3, 16)])
def test_transitions_of_each_sequence(
    shape: tuple[int, int, int],
    ragged: bool,
    backend: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sequence gets what it gets alone, in the arithmetic that its own transitions need."""
    T, N, C = shape
    if T > 100 and INTERPRETING:
        pytest.skip("too long for the interpreter")
    monkeypatch.setattr(plan, "MIN_PARALLEL_TOKENS", 20)
    clear_caches()
    emissions, _, start, end = random_linear_chain(
        *shape, ragged=False, device=device
    )._potentials.variables
    moves = torch.randn(N, C, C, dtype=torch.float64, device=device)
    moves[1] *= 200
    moves[0, 0, 1] -= 100  # which linear arithmetic holds
    lengths = torch.arange(T, T - N, -1, device=device) if ragged else None

    def found(*args: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        with poisoned_memory():
            logz, _, saved = autograd.logz(*args, True, backend)
            without = autograd.logz(*args, False, backend)[0]
            grad = torch.ones_like(logz)
            options = (True, False, backend)
            return logz, without, *autograd.logz_gradient(grad, *args, logz, saved, *options)

    together = found(emissions, moves[None], start, end, lengths)
    assert together[3].shape == (1, N, C, C)
    dims = (0, 0, 1, 1, 0, 0)
    for n in range(N):
        alone = found(
            emissions[:, n : n + 1],
            moves[n],
            start[n : n + 1],
            end[n : n + 1],
            None if lengths is None else lengths[n : n + 1],
        )
        for i, (a, b) in enumerate(zip(together, alone, strict=True)):
            own = a.narrow(dims[i], n, 1)
            torch.testing.assert_close(own, b.view_as(own), rtol=1e-9, atol=1e-12)
    clear_caches()
