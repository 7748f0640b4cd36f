"""The Numba kernels of chains against the reference."""

import math

import pytest
import torch
from helpers.chains import TABLES, random_chain

import partita
from partita import Chain, LinearChain, Max, debruijn_source, dense_source

pytest.importorskip("numba")
from partita.ops.chain import autograd as _chain
from partita.ops.chain.cpu import logz as cpu_logz
from partita.ops.chain.cpu import paths as cpu_paths
from partita.primitives.cpu import batch as cpu_batch
from partita.primitives.cpu import math as cpu_math
from partita.primitives.cpu.batch import empty_batch

RING = torch.tensor([[0, 3], [1, 0], [2, 1], [3, 2]])
WIDTHS = (
    (0, 2, 3, 2),
    (3, 0, 3, 2),
    (1, 1, 1, 1),
    (4, 3, 1, 3),
    (5, 4, 3, 4),
    (5, 3, 13, 5),
    (4, 2, 9, 6),
)


@pytest.fixture(autouse=True)
def poisoned_and_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, and run the smallest batch on all threads."""
    for module in (cpu_logz, cpu_paths):
        monkeypatch.setattr(
            module, "empty_batch", lambda *args: empty_batch(*args).fill_(torch.nan)
        )
    monkeypatch.setattr(cpu_batch, "SMALL", 0)


def all_ops(
    chain: Chain, values: torch.Tensor, backend: str
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return the results of each op; its other inputs are the same in each call."""
    g = torch.Generator().manual_seed(3)
    T, N, C, _ = chain.scores.shape
    first, last = torch.randn(2, N, C, generator=g, dtype=torch.float64)
    grad_output = torch.randn(N, generator=g).double()
    uniforms = torch.rand(T + 1, 4, N, generator=g, dtype=torch.float64)
    inputs = chain._potentials
    value_inputs = (values, first, last)
    results = {}
    for use_max in (False, True):
        for reverse in (False, True):
            name = f"scan {use_max} {reverse}"
            results[name] = (_chain.scan(*inputs, use_max, reverse, backend),)
    logz, _, saved = _chain.logz(*inputs, True, backend)
    results["logz"] = logz, _chain.logz(*inputs, False, backend)[0]
    results["gradient"] = _chain.logz_gradient(
        grad_output, *inputs, logz, saved, torch.float64, backend
    )
    results["viterbi"] = _chain.viterbi(*inputs, True, backend)
    results["best score"] = _chain.viterbi(*inputs, False, backend)
    for k in (1, 2, 5):
        results[f"{k} best"] = _chain.best_paths(*inputs, k, backend)
    results["sample"] = _chain.sample(*inputs, uniforms, backend)
    mean, logz, saved = _chain.expectation(*inputs, *value_inputs, True, backend)
    results["expectation"] = mean, logz, *_chain.expectation(*inputs, *value_inputs, False, backend)
    results["expectation gradient"] = _chain.expectation_gradient(
        grad_output, *inputs, *value_inputs, mean, logz, saved, backend
    )
    return results


def assert_matches_reference(chain: Chain, values: torch.Tensor | None = None) -> None:
    """Paths and shapes are equal; numbers agree within 1e-11 or 2 ulp of their dtype."""
    if values is None:
        values = torch.randn(
            chain.scores.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
        )
    ours, truth = (all_ops(chain, values, backend) for backend in ("numba", "reference"))
    for name in truth:
        for a, b in zip(ours[name], truth[name], strict=True):
            tolerance = max(1e-11, 2 * torch.finfo(a.dtype).eps) if a.is_floating_point() else 0
            torch.testing.assert_close(
                a,
                b,
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("shape", WIDTHS, ids=str)
def test_against_the_reference(shape: tuple[int, ...], kind: str) -> None:
    chain = random_chain(*shape, kind=kind, seed=sum(shape))
    if len(chain.lengths) > 1:
        chain.lengths[1] = 0
    assert_matches_reference(chain)
    assert_matches_reference(
        random_chain(*shape, kind=kind, seed=sum(shape), ragged=False, forbidden=0.6, ends=False)
    )


@pytest.mark.parametrize(
    "source",
    [RING, debruijn_source(2, 3), debruijn_source(3, 2), debruijn_source(4, 3)],
    ids=lambda source: f"{list(source.shape)}",
)
def test_tables_with_one_out_degree(source: torch.Tensor) -> None:
    scores = torch.randn(
        7, 3, *source.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    assert_matches_reference(Chain(scores, source, lengths=[7, 0, 4]))


def test_values_of_another_dtype_and_without_a_stride() -> None:
    chain = random_chain(6, 3, 4, 3, kind="missing", seed=4, dtype=torch.float32)
    values = torch.randn(4, 3, dtype=torch.float16)
    assert_matches_reference(chain, values.expand(chain.scores.shape))
    assert_matches_reference(chain, torch.ones(()).expand(chain.scores.shape))


def test_values_where_the_posterior_is_zero() -> None:
    """Infinite and NaN values whose posterior is 0 add 0."""
    chain = random_chain(5, 3, 4, 3, kind="missing", seed=6)
    finite = torch.randn(
        chain.scores.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    impossible = chain.marginals() == 0
    odd = (
        torch.tensor([torch.inf, -torch.inf, torch.nan])
        .double()
        .repeat(finite.numel())[: finite.numel()]
    )
    results = []
    with partita.backend("numba"):
        for values in (finite, torch.where(impossible, odd.view_as(finite), finite)):
            tensors = [
                t.clone().requires_grad_() for t in (chain.scores, chain.initial, chain.final)
            ]
            mean = Chain(tensors[0], chain.source, *tensors[1:], lengths=chain.lengths).expectation(
                values
            )
            results.append((mean.detach(), *torch.autograd.grad(mean.sum(), tensors)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_finite_numbers_that_stand_for_minus_infinity() -> None:
    chain = random_chain(6, 3, 4, 3, forbidden=0.3, ragged=False, seed=4, dtype=torch.float32)
    results = []
    for least in (-torch.inf, -1e38, -1e9):
        scores, start = (
            chain.scores.clamp(min=least),
            torch.tensor([0.0, least, least, least]).expand(3, -1),
        )
        with partita.backend("numba"):
            one = Chain(scores, chain.source, start)
            results.append((one.logz(), one.marginals()))
    assert results[0][0].isfinite().all()
    for other in results[1:]:
        torch.testing.assert_close(results[0], other)
    with partita.backend("numba"):  # all paths have the least score
        marginals = Chain(scores, chain.source, torch.full((3, 4), -1e38)).marginals()
    assert ((marginals >= 0) & (marginals <= 1)).all()


@pytest.mark.parametrize("offset", [-5.0, 5.0])
@pytest.mark.parametrize("value", [-1e30, 1e30])
def test_posteriors_beside_huge_scores_sum_to_1(value: float, offset: float) -> None:
    """No digit of the other scores is left in log Z."""
    start = torch.full((2, 3), value, dtype=torch.float64, requires_grad=True)
    g = torch.Generator().manual_seed(0)
    scores = offset + torch.randn(4, 2, 3, 3, generator=g, dtype=torch.float64)
    chain = Chain(scores, dense_source(3), start)
    dense = LinearChain(scores[..., 0], scores[1:], start.detach())
    with partita.backend("numba"):
        sums = (
            *chain.marginals().sum((2, 3)),
            *dense.state_marginals().sum(2),
            *dense.marginals().sum((2, 3)),
            torch.autograd.grad(chain.logz().sum(), start)[0].sum(1),
        )
    for each in sums:
        torch.testing.assert_close(each.double(), torch.ones(2).double())


def test_more_slots_than_a_byte_counts() -> None:
    g, slots = torch.Generator().manual_seed(0), 300
    scores, source = (
        torch.randn(3, 2, 2, slots, generator=g, dtype=torch.float64),
        torch.randint(0, 2, (2, slots), generator=g),
    )
    with partita.backend("numba"):
        ours = Chain(scores, source).viterbi()
    with partita.backend("reference"):
        truth = Chain(scores, source).viterbi()
    assert ours.edges.remainder(slots).max() > slots // 10
    for a, b in zip(ours, truth, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("seed", range(20))
def test_ties(seed: int) -> None:
    chain = random_chain(8, 4, 4, 3, kind=TABLES[seed % 4], seed=seed, ends=seed % 2 == 0)
    chain.scores, *ends = (
        None if t is None else t.round() for t in (chain.scores, chain.initial, chain.final)
    )
    chain.initial, chain.final = ends
    for a, b in zip(
        *(_chain.viterbi(*chain._potentials, True, backend) for backend in ("numba", "reference")),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("bad", [4, -2, 2**40])
def test_an_invalid_source_makes_all_chains_nan(bad: int, backend: str) -> None:
    chain = random_chain(5, 3, 4, 3, ragged=False, forbidden=0.0)
    chain.source[2, 1] = bad
    for name, results in all_ops(chain, chain.scores, backend).items():
        for a in results:
            assert (a.isnan() if a.is_floating_point() else a == -1).all(), name


def test_scores_that_are_nan_are_not_lost() -> None:
    for kind in TABLES:
        chain = random_chain(4, 2, 3, 2, kind=kind, ragged=False, forbidden=0.0, seed=1)
        chain.scores[1, 0] = torch.nan
        with partita.backend("numba"):
            path = chain.viterbi()
            results = chain.logz(), chain.logz(Max), chain.expectation(chain.scores), path.score
        assert all(r.isnan().tolist() == [True, False] for r in results)
        assert (
            (path.states[:, 0] == -1).all()
            and (path.edges[:, 0] == -1).all()
            and (path.states[:, 1] >= 0).all()
        )


def test_the_same_bits_on_any_number_of_threads() -> None:
    chain, threads = random_chain(12, 7, 9, 3, seed=4), torch.get_num_threads()
    values = torch.randn(chain.scores.shape, dtype=torch.float64)
    runs = []
    try:
        for number in (1, 2, 2, 5):
            torch.set_num_threads(number)
            runs.append(all_ops(chain, values, "numba"))
    finally:
        torch.set_num_threads(threads)
    for name in runs[0]:
        for one, *others in zip(*(run[name] for run in runs), strict=True):
            assert all(
                torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0)) for other in others
            ), name


@pytest.mark.parametrize("source", [RING, debruijn_source(4, 2)], ids=["ring", "k-mers"])
def test_long_chains(source: torch.Tensor) -> None:
    """Log Z and marginals of 2,000 steps of fp32 scores agree with the reference in fp64."""
    scores = torch.randn(2_000, 1, *source.shape, generator=torch.Generator().manual_seed(0))
    results = []
    for backend in ("numba", "reference"):
        inputs = Chain(scores, source)._potentials
        logz, _, saved = _chain.logz(*inputs, True, backend)
        grad = torch.ones_like(logz)
        results.append(
            (
                logz,
                _chain.logz_gradient(grad, *inputs, logz, saved, torch.float64, backend)[0],
            )
        )
    (logz, marginals), (true_logz, truth) = results
    torch.testing.assert_close(logz, true_logz, rtol=1e-13, atol=0)
    torch.testing.assert_close(marginals, truth, rtol=0, atol=1e-10)


def test_exponential_and_logarithm() -> None:
    g = torch.Generator().manual_seed(0)
    for x in (torch.rand(2_000, generator=g, dtype=torch.float64) * -40).tolist():
        assert cpu_math.exp(x) == pytest.approx(math.exp(x), rel=4e-15)
        assert cpu_math.log(1 - x) == pytest.approx(math.log(1 - x), rel=1e-15)
    assert cpu_math.exp(0.0) == 1.0 and cpu_math.log(1.0) == 0.0
    assert (
        cpu_math.exp(-699.0) == pytest.approx(math.exp(-699.0), rel=1e-13)
        and cpu_math.exp(-701.0) == cpu_math.exp(-math.inf) == 0.0
    )
    assert math.isnan(cpu_math.exp(math.nan)) and math.isnan(cpu_math.log(math.nan))
