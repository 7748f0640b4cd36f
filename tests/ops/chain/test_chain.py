"""Sums over paths against every path written out, against formulas, and their derivatives."""

import pytest
import torch
from helpers.chains import NUMBER_OF_PATHS, assert_close_fp64, random_chain, small_chains
from hypothesis import given, settings

import partita
from partita import Chain, Log, Max, Semiring
from partita.testing import all_paths

PROBABILITY = Semiring(0.0, 1.0, torch.mul, torch.sum, lambda x, dim: torch.ones_like(x))


def edge_probabilities(chain: Chain, n: int) -> torch.Tensor:
    """Return the posteriors of the edges `[T, C, K]` from all paths."""
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
    for n in range(chain.scores.shape[1]):
        scores = all_paths(chain, n).scores
        assert_close_fp64(
            total[n],
            scores.logsumexp(0) if len(scores) else torch.tensor(-torch.inf, dtype=torch.float64),
        )
        assert_close_fp64(marginals[:, n], edge_probabilities(chain, n))


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
    for n in range(chain.scores.shape[1]):
        paths = all_paths(chain, n)
        if not len(paths.scores) or paths.scores.max() == -torch.inf:
            assert entropy[n] == 0 and mean[n] == 0 and divergence[n] == 0
            continue
        log_p = paths.scores.log_softmax(0)
        p, steps = log_p.exp(), torch.arange(paths.edges.shape[1])
        value = values[:, n].flatten(1)[steps, paths.edges].sum(1)
        assert_close_fp64(entropy[n], -(p * log_p.masked_fill(p == 0, 0)).sum())
        assert_close_fp64(
            mean[n],
            (p * (value + ends[0, n, paths.states[:, 0]] + ends[1, n, paths.states[:, -1]])).sum(),
        )
        log_q = (paths.scores + value).log_softmax(0)
        assert_close_fp64(divergence[n], (p * (log_p - log_q).masked_fill(p == 0, 0)).sum())
        if len(steps):
            edges = torch.full((len(p), chain.scores.shape[0], chain.scores.shape[1]), -1)
            edges[:, : len(steps), n] = paths.edges
            assert_close_fp64(chain.log_prob(edges)[:, n], log_p)


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


@settings(max_examples=60, deadline=None)
@given(small_chains())
def test_counting_semiring_gives_the_number_of_paths(chain: Chain) -> None:
    ones = Chain(torch.ones_like(chain.scores), chain.source, lengths=chain.lengths)
    assert ones.logz(NUMBER_OF_PATHS).tolist() == [
        len(all_paths(ones, n).scores) for n in range(chain.scores.shape[1])
    ]


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
    assert_close_fp64(z.log(), log_z)
    assert_close_fp64(
        torch.autograd.grad(z.log().sum(), weights)[0], torch.autograd.grad(log_z.sum(), weights)[0]
    )


@pytest.mark.parametrize("semiring", [Log, Max], ids=["log", "max"])
def test_forward_and_backward_scores(semiring: Semiring) -> None:
    chain = random_chain(5, kind="missing")
    alpha, beta = chain.forward_scores(semiring), chain.backward_scores(semiring)
    total = chain.logz(semiring)
    for t in range(6):  # every path passes one state after t steps
        assert_close_fp64(semiring.sum(alpha[t] + beta[t], -1), total)
    assert torch.equal(alpha[0], chain.initial) and torch.equal(beta[-1], chain.final)


def test_values_that_are_not_read() -> None:
    """Values past a length may be NaN, also if the gradient is differentiable."""
    scores = torch.randn(
        4, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    values = torch.ones(4, 2, 3, 3, dtype=torch.float64)
    values[2:, 0] = torch.nan
    chain = Chain(scores, partita.dense_source(3), lengths=[2, 4])
    for graph in (False, True):
        (grad,) = torch.autograd.grad(chain.expectation(values).sum(), scores, create_graph=graph)
        assert_close_fp64(grad, torch.zeros_like(grad))
