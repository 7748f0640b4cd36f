"""Chains against every path written out, against formulas, and at the edges of the contract."""

import math
import warnings

import pytest
import torch
from helpers.chains import TABLES, random_chain, small_chains
from hypothesis import given, settings

import partita
from partita import Chain, Log, Max, Semiring, edges_from_states, linear_chain
from partita.runtime import backend as _backend
from partita.testing import all_paths

COUNT = Semiring(0.0, 1.0, torch.mul, torch.sum)
PROBABILITY = Semiring(0.0, 1.0, torch.mul, torch.sum, lambda x, dim: torch.ones_like(x))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, equal_nan=True)


def each(chain: Chain) -> list[int]:
    return list(range(chain.scores.shape[1]))


def edge_probabilities(chain: Chain, n: int) -> torch.Tensor:
    """`[T, C, K]`, from all paths."""
    paths = all_paths(chain, n)
    result = torch.zeros(chain.scores.shape[0], chain.source.numel(), dtype=torch.float64)
    if paths.scores.numel() and paths.scores.max() > -torch.inf:
        p = paths.scores.softmax(0)
        for t in range(paths.edges.shape[1]):
            result[t].index_add_(0, paths.edges[:, t], p)
    return result.unflatten(1, chain.source.shape)


@settings(max_examples=150, deadline=None)
@given(small_chains())
def test_logz_and_marginals_against_all_paths(chain: Chain) -> None:
    total, marginals = chain.logz(), chain.marginals()
    for n in each(chain):
        scores = all_paths(chain, n).scores
        close(
            total[n],
            scores.logsumexp(0) if len(scores) else torch.tensor(-torch.inf, dtype=torch.float64),
        )
        close(marginals[:, n], edge_probabilities(chain, n))


@settings(max_examples=150, deadline=None)
@given(small_chains())
def test_viterbi_against_all_paths(chain: Chain) -> None:
    best, path = chain.logz(Max), chain.viterbi()
    close(best, path.score)
    for n in each(chain):
        paths = all_paths(chain, n)
        length = paths.edges.shape[1]
        if not len(paths.scores) or paths.scores.max() == -torch.inf:
            assert (
                path.score[n] == -torch.inf
                and (path.states[:, n] == -1).all()
                and (path.edges[:, n] == -1).all()
            )
            continue
        close(best[n], paths.scores.max())
        assert (path.states[length + 1 :, n] == -1).all() and (path.edges[length:, n] == -1).all()
        mine = (paths.states == path.states[: length + 1, n]).all(1) & (
            paths.edges == path.edges[:length, n]
        ).all(1)
        close(paths.scores[mine], paths.scores.max()[None])


def test_viterbi_ties_go_to_the_lowest_edge_then_the_lowest_last_state() -> None:
    source = torch.tensor([[1, 0], [0, 0], [2, 1]])
    path = Chain(torch.zeros(2, 1, 3, 2), source).viterbi()
    assert path.edges.flatten().tolist() == [2, 0]
    assert path.states.flatten().tolist() == [0, 1, 0]


@settings(max_examples=60, deadline=None)
@given(small_chains())
def test_gradient_of_the_best_score_is_the_indicator_of_the_path(chain: Chain) -> None:
    scores = chain.scores.requires_grad_()
    (indicator,) = (
        torch.autograd.grad(chain.logz(Max).sum(), scores)
        if scores.numel()
        else (torch.zeros_like(scores),)
    )
    edges = chain.viterbi().edges
    expected = torch.zeros_like(scores).flatten(2)
    expected.scatter_(2, edges.clamp(min=0)[..., None], (edges >= 0).to(scores.dtype)[..., None])
    assert torch.equal(indicator.flatten(2), expected)


@settings(max_examples=100, deadline=None)
@given(small_chains())
def test_entropy_expectation_kl_and_log_prob_against_all_paths(chain: Chain) -> None:
    g = torch.Generator().manual_seed(1)
    values = torch.randn(chain.scores.shape, generator=g, dtype=torch.float64)
    ends = torch.randn(2, *chain.scores.shape[1:3], generator=g, dtype=torch.float64)
    other = Chain(
        chain.scores + values, chain.source, chain.initial, chain.final, lengths=chain.lengths
    )
    entropy, mean, divergence = chain.entropy(), chain.expectation(values, *ends), chain.kl(other)
    for n in each(chain):
        paths = all_paths(chain, n)
        if not len(paths.scores) or paths.scores.max() == -torch.inf:
            assert entropy[n] == 0 and mean[n] == 0 and divergence[n] == 0
            continue
        log_p = paths.scores.log_softmax(0)
        p, steps = log_p.exp(), torch.arange(paths.edges.shape[1])
        value = values[:, n].flatten(1)[steps, paths.edges].sum(1)
        close(entropy[n], -(p * log_p.masked_fill(p == 0, 0)).sum())
        close(
            mean[n],
            (p * (value + ends[0, n, paths.states[:, 0]] + ends[1, n, paths.states[:, -1]])).sum(),
        )
        log_q = (paths.scores + value).log_softmax(0)
        close(divergence[n], (p * (log_p - log_q).masked_fill(p == 0, 0)).sum())
        if len(steps):
            edges = torch.full((len(p), chain.scores.shape[0], chain.scores.shape[1]), -1)
            edges[:, : len(steps), n] = paths.edges
            close(chain.log_prob(edges)[:, n], log_p)


def test_kl_is_infinite_where_the_other_forbids_a_path() -> None:
    chain = random_chain(ragged=False, forbidden=0.0)
    scores = chain.scores.clone()
    scores[1, 1, 2] = -torch.inf
    other = Chain(scores, chain.source, chain.initial, chain.final)
    assert chain.kl(other).isinf().tolist() == [
        False,
        bool((chain.marginals()[1, 1, 2] > 0).any()),
        False,
    ]
    assert other.kl(chain).isfinite().all()


def test_kl_of_another_table_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
    source, scores = partita.dense_source(2), torch.randn(3, 2, 2, 2)
    assert Chain(scores, source).kl(Chain(scores, source.flip(1))).isnan().all()
    assert Chain(scores, source, lengths=[3, 2]).kl(Chain(scores, source)).isnan().tolist() == [
        False,
        True,
    ]


def test_log_prob_of_states() -> None:
    """Of a chain of no steps too, where edges say nothing."""
    emissions = torch.randn(
        4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    tags = torch.tensor([[0, 2, 1], [1, -1, 2], [1, -1, -1], [0, -1, -1]])
    chain = linear_chain(
        emissions,
        torch.randn(3, 3, dtype=torch.float64),
        torch.randn(3),
        torch.randn(3),
        lengths=[4, 1, 2],
    )
    found, of_edges = (
        chain.log_prob(states=tags),
        chain.log_prob(edges_from_states(tags, chain.source)),
    )
    assert torch.equal(found[[0, 2]], of_edges[[0, 2]]) and of_edges[1] == 0
    close(found[1], (chain.initial[1] + chain.final[1]).log_softmax(0)[2])
    (grad,) = torch.autograd.grad(found[1], emissions)
    assert grad[0, 1, 2] > 0 > grad[0, 1, 0] and not grad[1:].any()
    several = chain.log_prob(states=torch.stack([tags, tags]))
    assert torch.equal(several, torch.stack([found, found]))
    nowhere = tags.clone()
    nowhere[0, 1] = 7
    assert chain.log_prob(states=nowhere)[1] == -torch.inf
    for arguments in ({}, {"edges": tags[1:], "states": tags}):
        with pytest.raises(TypeError, match="expected either edges or states"):
            chain.log_prob(**arguments)
    with pytest.raises(
        ValueError, match=r"states: expected shape \[..., T \+ 1, N\] with \[T, N\] = \[3, 3\]"
    ):
        chain.log_prob(states=tags[1:])
    with pytest.raises(
        ValueError,
        match=r"states: expected an edge between one state and the next, got -5 then 1 at \[0, 0\]",
    ):
        chain.log_prob(states=torch.where(tags == 0, -5, tags))


def test_log_prob_of_edges_that_do_not_follow_one_another() -> None:
    chain = Chain(torch.zeros(2, 1, 2, 2), partita.dense_source(2))
    assert (
        chain.log_prob(torch.tensor([[0], [3]])).isneginf().all()
    )  # into state 0, then from state 1
    assert chain.log_prob(torch.tensor([[0], [-1]])).isneginf().all()


@settings(max_examples=60, deadline=None)
@given(small_chains())
def test_counting_semiring_gives_the_number_of_paths(chain: Chain) -> None:
    ones = Chain(torch.ones_like(chain.scores), chain.source, lengths=chain.lengths)
    assert ones.logz(COUNT).tolist() == [len(all_paths(ones, n).scores) for n in each(chain)]


def test_probability_semiring_is_log_z_in_another_guise() -> None:
    chain = random_chain(6, kind="missing", forbidden=0.0)
    weights = torch.where(chain.source < 0, 1.0, chain.scores.nan_to_num()).exp().requires_grad_()
    scores = weights.log()
    z = partita.logz(
        weights,
        chain.source,
        chain.initial.exp(),
        chain.final.exp(),
        PROBABILITY,
        lengths=chain.lengths,
    )
    log_z = partita.logz(scores, chain.source, chain.initial, chain.final, lengths=chain.lengths)
    close(z.log(), log_z)
    close(
        torch.autograd.grad(z.log().sum(), weights)[0], torch.autograd.grad(log_z.sum(), weights)[0]
    )


@pytest.mark.parametrize("semiring", [Log, Max], ids=["log", "max"])
def test_forward_and_backward_scores(semiring: Semiring) -> None:
    chain = random_chain(5, kind="missing")
    alpha, beta = chain.forward_scores(semiring), chain.backward_scores(semiring)
    total = chain.logz(semiring)
    for t in range(6):  # a cut through all paths, wherever it is
        close(semiring.sum(alpha[t] + beta[t], -1), total)
    assert torch.equal(alpha[0], chain.initial) and torch.equal(beta[-1], chain.final)


def test_sample_frequencies() -> None:
    """Chi-squared over all paths, at an error rate of 1e-4."""
    chain, draws = random_chain(3, 1, 3, 2, ragged=False, seed=3), 20_000
    paths = all_paths(chain)
    sample = chain.sample(draws, torch.Generator().manual_seed(0))
    power = chain.source.numel() ** torch.arange(3)
    first = chain.source.numel() ** 3
    name = (paths.edges * power).sum(1) + first * paths.states[:, 0]
    drawn = (sample.edges[..., 0] * power).sum(1) + first * sample.states[:, 0, 0]
    observed = (drawn == name[:, None]).sum(1).double()
    expected = draws * paths.scores.softmax(0)
    assert observed.sum() == draws, "every sample is one of the paths"
    assert (observed[expected == 0] == 0).all()
    likely = expected > 5
    rest = torch.stack([observed[~likely].sum(), expected[~likely].sum()])
    statistic = ((observed - expected)[likely] ** 2 / expected[likely]).sum() + (
        rest[0] - rest[1]
    ) ** 2 / rest[1].clamp(min=1)
    degrees = int(likely.sum())
    assert statistic < degrees + 3.72 * math.sqrt(2 * degrees) + 2 * 3.72**2, (
        "beyond the bound of Laurent and Massart at about 1e-4"
    )


def test_samples_are_paths_with_their_lengths_and_reproducible() -> None:
    chain = random_chain(6, 5, 4, 3, kind="missing", seed=5)
    one, two = (chain.sample(7, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(one.states, two.states) and torch.equal(one.edges, two.edges)
    assert one.states.shape == (7, 7, 5) and one.edges.shape == (7, 6, 5)
    possible = chain.logz() > -torch.inf
    count = torch.arange(6)[:, None] < chain.lengths
    assert torch.equal(one.edges >= 0, (count & possible).expand_as(one.edges))
    with_steps = possible & (chain.lengths > 0)
    assert chain.log_prob(one.edges)[:, with_steps].isfinite().all()


@pytest.mark.parametrize("kind", TABLES)
def test_first_and_second_derivatives(kind: str) -> None:
    chain = random_chain(3, 2, 3, 2, kind=kind, forbidden=0.0, seed=2)
    scores = torch.where(chain.scores.isnan(), 0.0, chain.scores).requires_grad_()
    ends = [t.clone().requires_grad_() for t in (chain.initial, chain.final)]

    def value(*tensors: torch.Tensor) -> torch.Tensor:
        return partita.logz(tensors[0], chain.source, *tensors[1:], lengths=chain.lengths)

    assert torch.autograd.gradcheck(value, (scores, *ends))
    assert torch.autograd.gradgradcheck(value, (scores, *ends))

    def others(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one = Chain(tensors[0], chain.source, *tensors[1:], lengths=chain.lengths)
        return (
            one.entropy(),
            one.expectation(tensors[0].square()),
            one.kl(Chain(2 * tensors[0], chain.source, lengths=chain.lengths)),
        )

    assert torch.autograd.gradcheck(others, (scores, *ends))


def test_impossible_chains_have_no_gradient() -> None:
    scores = torch.full((2, 2, 2, 2), -torch.inf)
    scores[:, 1] = 0.0
    scores.requires_grad_()
    chain = Chain(scores, partita.dense_source(2))
    assert chain.logz().tolist()[0] == -torch.inf
    for semiring in (Log, Max):
        (grad,) = torch.autograd.grad(chain.logz(semiring).sum(), scores)
        assert not grad[:, 0].any() and grad[:, 1].sum() == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    chain = random_chain(30, 4, 5, 3, dtype=dtype, forbidden=0.05)
    exact = Chain(
        chain.scores.double(),
        chain.source,
        chain.initial.double(),
        chain.final.double(),
        lengths=chain.lengths,
    )
    wide = torch.promote_types(dtype, torch.float32)
    for name in ("logz", "entropy", "marginals"):
        result, truth = getattr(chain, name)(), getattr(exact, name)()
        assert result.dtype == wide
        torch.testing.assert_close(result, truth.to(wide), rtol=1e-6, atol=1e-6)


def test_strides_and_nothing_written() -> None:
    chain = random_chain(5, 3, 4, 3, ragged=False, forbidden=0.0)
    frame = torch.full((3, 5, 3, 8), torch.nan, dtype=torch.float64).permute(1, 0, 3, 2)[:, :, ::2]
    frame.copy_(chain.scores)
    other = Chain(frame, chain.source, chain.initial, chain.final)
    assert (
        not frame.is_contiguous()
        and torch.equal(other.logz(), chain.logz())
        and torch.equal(frame, chain.scores)
    )
    one = chain.scores[:1].expand(5, -1, -1, -1)
    close(Chain(one, chain.source).logz(), Chain(one.contiguous(), chain.source).logz())


@pytest.mark.parametrize("seed", range(3))
def test_linear_chain_is_the_conditional_random_field(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    emissions = torch.randn(4, 2, 3, generator=g, dtype=torch.float64)
    transitions, start, end = torch.randn(5, 3, generator=g, dtype=torch.float64).split([3, 1, 1])
    start, end = start[0], end[0]
    lengths = torch.tensor([4, 2])
    chain = partita.linear_chain(emissions, transitions, start, end, lengths=lengths)
    for n, length in enumerate(lengths.tolist()):
        tags = torch.cartesian_prod(*[torch.arange(3)] * length)
        score = (
            start[tags[:, 0]] + end[tags[:, -1]] + emissions[torch.arange(length), n, tags].sum(1)
        )
        score = score + transitions[tags[:, :-1], tags[:, 1:]].sum(1)
        close(chain.logz()[n], score.logsumexp(0))
        best = chain.viterbi().states[:, n]
        assert (
            best[:length].tolist() == tags[score.argmax()].tolist() and (best[length:] == -1).all()
        )
        padded = torch.full((4, 2), -1)
        padded[:length, n] = tags[5]
        edges = partita.edges_from_states(padded, chain.source)
        close(chain.log_prob(edges)[n], score.log_softmax(0)[5])


def test_linear_chain_is_the_hidden_markov_model() -> None:
    """The forward algorithm in probabilities."""
    g = torch.Generator().manual_seed(0)
    start, end = torch.rand(4, generator=g, dtype=torch.float64).softmax(0), None
    transitions = torch.rand(4, 4, generator=g, dtype=torch.float64).softmax(1)
    likelihood = torch.rand(9, 1, 4, generator=g, dtype=torch.float64)
    p = start * likelihood[0, 0]
    for t in range(1, 9):
        p = (p @ transitions) * likelihood[t, 0]
    close(
        partita.linear_chain(likelihood.log(), transitions.log(), start.log(), end).logz(),
        p.sum().log()[None],
    )


def test_edges_from_states_undoes_states() -> None:
    chain = random_chain(6, 4, 5, 3, kind="missing", seed=7, forbidden=0.1)
    path = chain.viterbi()
    edges = partita.edges_from_states(path.states, chain.source)
    assert torch.equal(edges >= 0, path.edges >= 0)
    entered = chain.source.flatten()[edges.clamp(min=0)]
    assert torch.equal(entered[edges >= 0], path.states[:-1][edges >= 0])
    with pytest.raises(
        ValueError,
        match=r"states: expected an edge between one state and the next, got 0 then 1 at \[0, 0\]",
    ):
        partita.edges_from_states(torch.tensor([[0], [1]]), torch.tensor([[0], [1]]))


def test_debruijn_table_against_all_paths() -> None:
    g = torch.Generator().manual_seed(0)
    chain = Chain(
        torch.randn(3, 1, 9, 4, generator=g, dtype=torch.float64), partita.debruijn_source(3, 2)
    )
    close(chain.logz()[0], all_paths(chain).scores.logsumexp(0))


def test_long_chains_stay_exact() -> None:
    """fp32 scores, 20,000 steps: log Z and marginals against the same scores in fp64."""
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(20_000, 1, 4, 2, generator=g)
    source = torch.tensor([[0, 3], [1, 0], [2, 1], [3, 2]])
    single, double = Chain(scores, source), Chain(scores.double(), source)
    total = double.logz()
    assert (single.logz() - total).abs() <= 1e-6 * total.abs() + 2e-5
    assert (single.marginals() - double.marginals()).abs().max() <= 2e-6


BAD = {
    "rank": (
        lambda c: Chain(c.scores[0], c.source),
        ValueError,
        r"scores: expected shape \[T, N, C, K\], got \[3, 3, 2\]",
    ),
    "dtype": (
        lambda c: Chain(c.scores.long(), c.source),
        TypeError,
        "scores: expected a floating dtype, got torch.int64",
    ),
    "source dtype": (
        lambda c: Chain(c.scores, c.source.float()),
        TypeError,
        "source: expected an integer dtype, got torch.float32",
    ),
    "source shape": (
        lambda c: Chain(c.scores, c.source[:2]),
        ValueError,
        r"source: expected shape \[C, K\] of scores = \[3, 2\], got \[2, 2\]",
    ),
    "initial": (
        lambda c: Chain(c.scores, c.source, c.initial[:1]),
        ValueError,
        r"initial: expected shape \[N, C\] of scores = \[3, 3\], got \[1, 3\]",
    ),
    "device": (
        lambda c: Chain(c.scores, c.source, final=c.final.to("meta")),
        ValueError,
        "final: expected the device of scores, cpu, got meta",
    ),
    "lengths": (
        lambda c: Chain(c.scores, c.source, lengths=[1, 2]),
        ValueError,
        r"lengths: expected shape \[N\] = \[3\], got \[2\]",
    ),
    "float lengths": (
        lambda c: Chain(c.scores, c.source, lengths=[1.5, 2.0, 1.0]),
        TypeError,
        "lengths: expected an integer dtype",
    ),
    "one float": (
        lambda c: Chain(c.scores, c.source, lengths=2.5),
        TypeError,
        "lengths: expected a Tensor or a sequence of integers, got float",
    ),
    "ends of values": (
        lambda c: c.expectation(c.scores, c.initial.to("meta")),
        ValueError,
        "initial: expected the device of scores",
    ),
    "negative length": (
        lambda c: Chain(c.scores, c.source, lengths=[1, -2, 0]).logz(),
        ValueError,
        r"lengths: .* from 0 to 4, got -2 at \[1\]",
    ),
    "long length": (
        lambda c: Chain(c.scores, c.source, lengths=[1, 2, 5]).viterbi(),
        ValueError,
        r"lengths: .* from 0 to 4, got 5 at \[2\]",
    ),
    "source": (
        lambda c: Chain(c.scores, c.source + 3).logz(),
        ValueError,
        r"source: expected states, or -1 for no edge from -1 to 2, got \d at \[0, 0\]",
    ),
    "samples": (
        lambda c: c.sample(-1),
        ValueError,
        "k: expected a number of paths, 0 or more, got -1",
    ),
    "values": (
        lambda c: c.expectation(c.scores[..., :1, :1, :].expand(4, 3, 2, 2)),
        ValueError,
        "values: expected what broadcasts to the scores",
    ),
    "edges": (
        lambda c: c.log_prob(torch.zeros(3, 3, dtype=torch.int64)),
        ValueError,
        r"edges: expected shape \[..., T, N\]",
    ),
    "other lengths": (
        lambda c: c.kl(Chain(c.scores, c.source, lengths=[1, 2, 2])),
        ValueError,
        "other.lengths: expected the lengths",
    ),
    "other": (
        lambda c: c.kl(Chain(c.scores, c.source.roll(1, 0))),
        ValueError,
        "other.source: expected the source of this chain",
    ),
    "kernel": (
        lambda c: _under("numba", lambda: c.logz(COUNT)),
        RuntimeError,
        "backend 'numba': this semiring has no kernel",
    ),
    "tokens": (
        lambda c: partita.linear_chain(c.scores[..., 0], torch.zeros(3, 3), lengths=[1, 0, 2]),
        ValueError,
        r"lengths: .* from 1 to 4, got 0",
    ),
}


def _under(name: str, function: object) -> object:
    with partita.backend(name):
        return function()


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call(random_chain(ragged=False))


def test_unchecked_lengths_and_sources_make_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
    chain = random_chain(ragged=False, forbidden=0.0)
    assert Chain(chain.scores, chain.source, lengths=[1, -2, 9]).logz().isnan().tolist() == [
        False,
        True,
        True,
    ]
    assert Chain(chain.scores, chain.source + 3).logz().isnan().all()


def test_empty() -> None:
    assert Chain(torch.zeros(3, 0, 2, 2), partita.dense_source(2)).logz().shape == (0,)
    assert Chain(torch.zeros(0, 2, 2, 2), partita.dense_source(2)).logz().tolist() == pytest.approx(
        [math.log(2)] * 2
    )
    nowhere = Chain(torch.zeros(2, 1, 2, 1), torch.full((2, 1), -1))
    assert nowhere.logz().tolist() == [-math.inf] and nowhere.viterbi().edges.tolist() == [
        [-1],
        [-1],
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", TABLES)
def test_numba_against_the_specification(kind: str, dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    chain = random_chain(9, 4, 6, 3, kind=kind, dtype=dtype, seed=8)
    results = []
    for backend in ("numba", "reference"):
        tensors = [t.clone().requires_grad_() for t in (chain.scores, chain.initial, chain.final)]
        with partita.backend(backend):
            z = Chain(tensors[0], chain.source, *tensors[1:], lengths=chain.lengths).logz()
            with torch.no_grad():
                alone = Chain(tensors[0], chain.source, *tensors[1:], lengths=chain.lengths).logz()
        assert torch.equal(z.detach(), alone)
        results.append(
            (z.detach(), *torch.autograd.grad(z, tensors, torch.linspace(0.5, 2, 4).to(z.dtype)))
        )
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        eps = torch.finfo(a.dtype).eps
        torch.testing.assert_close(a, b, rtol=4 * eps, atol=4 * eps)


def test_unchecked_values_under_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv("PARTITA_CHECK", "0")
    chain = random_chain(5, 3, ragged=False, forbidden=0.0)
    scores = chain.scores.requires_grad_()
    with partita.backend("numba"):
        z = Chain(scores, chain.source, lengths=[1, -2, 9]).logz()
        assert z.isnan().tolist() == [False, True, True]
        (grad,) = torch.autograd.grad(z.sum(), scores)
        assert grad[:, 1:].isnan().all() and grad[:, 0].isfinite().all()
        assert Chain(scores, chain.source + 3).logz().isnan().all()


def test_without_numba_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _backend._without_numba.cache_clear()
    monkeypatch.setattr(_backend, "has_numba", lambda: False)
    cpu = torch.device("cpu")
    with pytest.warns(RuntimeWarning, match="pip install numba"):
        assert _backend.resolve("auto", cpu, has_cpu=True) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _backend.resolve("auto", cpu, has_cpu=True) == "reference"
    _backend._without_numba.cache_clear()


def test_autocast_leaves_chains_as_they_are() -> None:
    chain = random_chain(6, 3, 4, 3, ragged=False, dtype=torch.float32)
    scores = chain.scores.requires_grad_()
    expected = chain.logz(), chain.entropy(), *torch.autograd.grad(chain.logz().sum(), scores)
    with torch.autocast("cpu", torch.bfloat16):
        found = chain.logz(), chain.entropy(), *torch.autograd.grad(chain.logz().sum(), scores)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("states", "slots"), [(0, 2), (3, 0)])
def test_no_states_and_no_edges(states: int, slots: int, backend: str) -> None:
    with partita.backend(backend):
        chain = Chain(
            torch.zeros(3, 2, states, slots, requires_grad=True),
            torch.zeros(states, slots, dtype=torch.int64),
            lengths=[0, 3],
        )
        total = math.log(states) if states else -math.inf  # of the chain of no steps
        torch.testing.assert_close(chain.logz(), torch.tensor([total, -math.inf]))
        assert (
            chain.viterbi().score.tolist()
            == chain.logz(Max).tolist()
            == [0.0 if states else -math.inf, -math.inf]
        )
        assert chain.log_prob(torch.zeros(3, 2, dtype=torch.int64)).tolist() == [
            0.0 if states else -math.inf,
            -math.inf,
        ]
        assert chain.forward_scores().shape == chain.backward_scores().shape == (4, 2, states)
        assert (chain.sample(2).edges == -1).all() and not chain.marginals().numel()
        assert edges_from_states(torch.full((3, 1), -1), chain.source).tolist() == [[-1], [-1]]


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_tables_of_narrow_types(backend: str) -> None:
    many = (
        torch.arange(300)[:, None] + torch.arange(2)
    ) % 256  # more states than the type has numbers
    source = torch.tensor([[0, -1], [120, 1], *[[i, i - 1] for i in range(2, 128)]])
    scores = torch.randn(4, 2, 128, 2, generator=torch.Generator().manual_seed(0))
    with partita.backend(backend):
        wide, narrow = (
            Chain(torch.zeros(3, 1, 300, 2), table).viterbi()
            for table in (many, many.to(torch.uint8))
        )
        assert all(torch.equal(a, b) for a, b in zip(wide, narrow, strict=True))
        expected = Chain(scores, source).logz()
        assert torch.equal(Chain(scores, source.to(torch.int8)).logz(), expected)
        assert torch.equal(
            Chain(scores, source.clamp(min=0).to(torch.uint8)).logz(),
            Chain(scores, source.clamp(min=0)).logz(),
        )


def test_values_that_are_not_looked_at() -> None:
    """NaN past a length and on missing edges, also where the gradient is to be differentiated again."""
    scores = torch.randn(
        4, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    values = torch.ones(4, 2, 3, 3, dtype=torch.float64)
    values[2:, 0] = torch.nan
    chain = Chain(scores, partita.dense_source(3), lengths=[2, 4])
    for graph in (False, True):
        (grad,) = torch.autograd.grad(chain.expectation(values).sum(), scores, create_graph=graph)
        close(grad, torch.zeros_like(grad))


def test_log_prob_of_what_has_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.full((2, 1, 2, 2), -math.inf)
    assert Chain(scores, partita.dense_source(2)).log_prob(
        torch.zeros(2, 1, dtype=torch.int64)
    ).tolist() == [-math.inf]
    monkeypatch.setenv("PARTITA_CHECK", "0")
    assert (
        Chain(scores, partita.dense_source(2), lengths=[-1])
        .log_prob(torch.zeros(2, 1, dtype=torch.int64))
        .isnan()
        .all()
    )


def test_taggers_in_half_types_add_in_full() -> None:
    generator = torch.Generator().manual_seed(0)
    emissions, transitions = (
        torch.randn(300, 2, 5, generator=generator).bfloat16(),
        torch.randn(5, 5, generator=generator).bfloat16(),
    )
    half, full = (
        linear_chain(emissions, transitions).logz(),
        linear_chain(emissions.double(), transitions.double()).logz(),
    )
    torch.testing.assert_close(half.double(), full, rtol=1e-6, atol=0)
    assert half.dtype == torch.float32


def test_another_default_device() -> None:
    scores, source = torch.randn(3, 2, 4, 2), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    expected = Chain(scores, source, lengths=[2, 3])
    logz, best = expected.logz(), expected.viterbi()
    with torch.device("meta"):
        chain = Chain(scores, source, lengths=[2, 3])
        assert torch.equal(chain.logz(), logz) and torch.equal(chain.viterbi().states, best.states)


def test_no_semiring() -> None:
    with pytest.raises(TypeError, match="semiring: expected a Semiring, as Log or Max, got 'Log'"):
        partita.logz(torch.zeros(2, 1, 2, 2), partita.dense_source(2), semiring="Log")  # type: ignore[arg-type]


def test_compiled_code_samples_and_tags() -> None:
    """At one length after another, with lengths of its own."""
    sample = torch.compile(
        lambda x: Chain(x, partita.dense_source(3)).sample(2).states,
        fullgraph=True,
        backend="aot_eager",
    )
    tag = torch.compile(
        lambda x, n: linear_chain(x, torch.zeros(3, 3), lengths=n).logz(),
        fullgraph=True,
        backend="aot_eager",
    )
    for steps in (4, 5, 6):
        assert sample(torch.zeros(steps, 2, 3, 3)).shape == (2, steps + 1, 2)
        lengths = torch.tensor([steps, 2])
        torch.testing.assert_close(tag(torch.zeros(steps, 2, 3), lengths), lengths * math.log(3))
