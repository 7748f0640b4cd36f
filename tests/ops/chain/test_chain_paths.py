"""Best paths, samples, and log-probabilities of given paths."""

import math

import pytest
import torch
from helpers.chains import assert_close_fp64, random_chain, small_chains
from hypothesis import given, settings
from hypothesis import strategies as st

import partita
from partita import Chain, Max, edges_from_states, linear_chain
from partita.testing import all_paths


@settings(max_examples=150, deadline=None)
@given(small_chains())
def test_viterbi_against_all_paths(chain: Chain) -> None:
    best, path = chain.logz(Max), chain.viterbi()
    assert_close_fp64(best, path.score)
    for n in range(chain.scores.shape[1]):
        paths = all_paths(chain, n)
        length = paths.edges.shape[1]
        if not len(paths.scores) or paths.scores.max() == -torch.inf:
            assert (
                path.score[n] == -torch.inf
                and (path.states[:, n] == -1).all()
                and (path.edges[:, n] == -1).all()
            )
            continue
        assert_close_fp64(best[n], paths.scores.max())
        assert (path.states[length + 1 :, n] == -1).all() and (path.edges[length:, n] == -1).all()
        is_best = (paths.states == path.states[: length + 1, n]).all(1) & (
            paths.edges == path.edges[:length, n]
        ).all(1)
        assert_close_fp64(paths.scores[is_best], paths.scores.max()[None])


@settings(max_examples=60, deadline=None)
@given(small_chains(), st.sampled_from((1, 3, 300)))
def test_the_best_paths_against_all_paths(chain: Chain, k: int) -> None:
    (T, N), found = chain.scores.shape[:2], chain.nbest(k)
    assert found.score.shape == (k, N) and found.edges.shape == (k, T, N)
    for n in range(chain.scores.shape[1]):
        paths = all_paths(chain, n)
        length = paths.edges.shape[1]
        exist = paths.scores[paths.scores > -torch.inf]
        best = exist.sort(descending=True).values[:k]
        number = len(best)
        assert_close_fp64(found.score[:number, n], best)
        assert (found.score[number:, n] == -torch.inf).all()
        states, edges = found.states[:, :, n], found.edges[:, :, n]
        assert (states[number:] == -1).all() and (states[:, length + 1 :] == -1).all()
        assert (edges[number:] == -1).all() and (edges[:, length:] == -1).all()
        rows = torch.cat([states[:number, : length + 1], edges[:number, :length]], 1)
        assert len(rows.unique(dim=0)) == number  # no path comes twice
        known = torch.cat([paths.states, paths.edges], 1)
        for row, score in zip(rows, best, strict=True):
            assert_close_fp64(paths.scores[(known == row).all(1)], score[None])
    best = chain.viterbi()
    torch.testing.assert_close(found.score[0], best.score)
    if k == 1:
        assert torch.equal(found.states[0], best.states) and torch.equal(found.edges[0], best.edges)


def test_equal_paths_and_invalid_arguments_of_nbest() -> None:
    source = torch.tensor([[0, 0], [0, -1]])  # two edges between the same states are two paths
    chain = Chain(torch.zeros(2, 1, 2, 2), source)
    best = chain.nbest(9)
    assert best.edges[:, :, 0].tolist() == [
        *([0, 0], [1, 0], [0, 1], [1, 1], [0, 2], [1, 2]),
        *[[-1, -1]] * 3,
    ]
    invalid = Chain(torch.zeros(2, 1, 2, 2), source, lengths=torch.tensor([2]))
    invalid.lengths = torch.tensor([3])
    with partita.backend("reference"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARTITA_CHECK", "0")
        assert invalid.nbest(2).score.isnan().all() and (invalid.nbest(2).edges == -1).all()
    with pytest.raises(ValueError, match=r"k: expected a number of paths, 1 or more, got 0"):
        chain.nbest(0)
    with pytest.raises(TypeError, match=r"^k: "):
        chain.nbest(1.5)  # type: ignore[arg-type]
    with partita.backend("triton"), pytest.raises(RuntimeError, match="nbest has no kernel"):
        chain.nbest(2)


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


def test_log_prob_of_states() -> None:
    """States also tell the path of a chain of no steps, which edges do not."""
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
    ).to_chain()
    found, from_edges = (
        chain.log_prob(states=tags),
        chain.log_prob(edges_from_states(tags, chain.source)),
    )
    assert torch.equal(found[[0, 2]], from_edges[[0, 2]]) and from_edges[1] == 0
    assert_close_fp64(found[1], (chain.initial[1] + chain.final[1]).log_softmax(0)[2])
    (grad,) = torch.autograd.grad(found[1], emissions)
    assert grad[0, 1, 2] > 0 > grad[0, 1, 0] and not grad[1:].any()
    several = chain.log_prob(states=torch.stack([tags, tags]))
    assert torch.equal(several, torch.stack([found, found]))
    for arguments in ({}, {"edges": tags[1:], "states": tags}):
        with pytest.raises(TypeError, match="expected either edges or states"):
            chain.log_prob(**arguments)
    with pytest.raises(ValueError, match=r"states: expected a state from 0 to 2, .* got -5"):
        chain.log_prob(states=torch.where(tags == 0, -5, tags))


def test_log_prob_of_edges_that_do_not_follow_one_another() -> None:
    chain = Chain(torch.zeros(2, 1, 2, 2), partita.dense_source(2))
    assert (
        chain.log_prob(torch.tensor([[0], [3]])).isneginf().all()
    )  # into state 0, then from state 1
    assert chain.log_prob(torch.tensor([[0], [-1]])).isneginf().all()


def test_sample_frequencies() -> None:
    """A chi-squared test over all paths has an error rate of 1e-4."""
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
    active = torch.arange(6)[:, None] < chain.lengths
    assert torch.equal(one.edges >= 0, (active & possible).expand_as(one.edges))
    with_steps = possible & (chain.lengths > 0)
    assert chain.log_prob(one.edges)[:, with_steps].isfinite().all()


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


@pytest.mark.usefixtures("unchecked")
def test_log_prob_of_a_chain_without_a_path() -> None:
    scores = torch.full((2, 1, 2, 2), -math.inf)
    assert Chain(scores, partita.dense_source(2)).log_prob(
        torch.zeros(2, 1, dtype=torch.int64)
    ).tolist() == [-math.inf]
    assert (
        Chain(scores, partita.dense_source(2), lengths=[-1])
        .log_prob(torch.zeros(2, 1, dtype=torch.int64))
        .isnan()
        .all()
    )
