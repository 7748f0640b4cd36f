"""Dense and semi-Markov chains against the enumeration of all paths."""

from typing import Any

import pytest
import torch
from helpers.chains import assert_close_fp64
from helpers.token_chains import KINDS, all_token_paths, posterior, random_token_chain, scores_of
from torch import Tensor

import partita

backends = pytest.mark.parametrize("backend", ["reference", "numba"])
kinds = pytest.mark.parametrize("kind", [*KINDS, "semi-Markov"])
# Scores of which some are -inf, and scores of a range that linear arithmetic does not hold.
scores = pytest.mark.parametrize(("forbidden", "scale"), [(0.0, 1.0), (0.25, 1.0), (0.0, 200.0)])


@backends
@kinds
@scores
@pytest.mark.parametrize("seed", range(2))
def test_against_the_enumeration_of_all_paths(
    backend: str, kind: str, forbidden: float, scale: float, seed: int
) -> None:
    chain = random_token_chain(
        kind, seed=seed, forbidden=forbidden, scale=scale, ragged=seed > 0, ends=seed > 0
    )
    _, N, C = chain.emissions.shape
    with partita.backend(backend):
        logz, marginals = chain.logz(), chain.state_marginals()
        path, entropy = chain.viterbi(), chain.entropy()
    for n in range(N):
        paths = all_token_paths(chain, n)
        p = posterior(paths.scores)
        one_hot = (paths.states[..., None] == torch.arange(C)).double()
        assert_close_fp64(logz[n], paths.scores.logsumexp(0))
        assert_close_fp64(marginals[:, n], torch.einsum("p,ptc->tc", p, one_hot))
        # The entropy is a difference of numbers up to a thousand times as large.
        plogp = torch.special.xlogy(p, p)
        torch.testing.assert_close(entropy[n], -plogp.sum(), rtol=0, atol=1e-11 * max(1, scale))
        assert_close_fp64(path.score[n], paths.scores.max())
        states, *starts = (each[..., None].expand(-1, -1, N) for each in paths[:2])
        log_prob = chain.log_prob(states, *(starts if kind == "semi-Markov" else ()))[:, n]
        if p.any():
            assert torch.equal(path.states[:, n], paths.states[paths.scores.argmax()])
            if kind == "semi-Markov":
                assert torch.equal(path.starts[:, n], paths.starts[paths.scores.argmax()])
            assert_close_fp64(log_prob, paths.scores.log_softmax(0))
        else:
            assert (path.states[:, n] == -1).all() and (log_prob == -torch.inf).all()
            assert kind != "semi-Markov" or not path.starts[:, n].any()


@backends
@kinds
@scores
def test_divergence_is_that_of_the_enumeration(
    backend: str, kind: str, forbidden: float, scale: float
) -> None:
    chain = random_token_chain(kind, forbidden=forbidden, scale=scale, seed=3)
    other = random_token_chain(kind, seed=4, ragged=False)
    other.lengths = chain.lengths
    for a, b in ((chain, other), (other, chain)):
        with partita.backend(backend):
            kl = a.kl(b)
        for n in range(len(kl)):
            scores, other_scores = (all_token_paths(each, n).scores for each in (a, b))
            if other_scores.max() == -torch.inf:
                continue
            p, difference = posterior(scores), scores.log_softmax(0) - other_scores.log_softmax(0)
            expected = (p * difference.masked_fill(p == 0, 0.0)).sum()
            # It is a difference of numbers up to a thousand times as large.
            torch.testing.assert_close(kl[n], expected, rtol=1e-11, atol=1e-11 * max(1, scale))


@backends
@kinds
@scores
def test_gradients_are_those_of_the_enumeration(
    backend: str, kind: str, forbidden: float, scale: float
) -> None:
    chain = random_token_chain(kind, forbidden=forbidden, scale=scale, seed=5)
    inputs = [tensor.requires_grad_() for tensor in scores_of(chain)]
    weight = torch.linspace(0.5, 2, len(chain.start), dtype=torch.float64)
    with partita.backend(backend):
        logz = chain.logz()
        has_path = logz.detach() > -torch.inf
        found = torch.autograd.grad((weight * logz)[has_path].sum(), inputs)
    sums = [
        weight[n] * all_token_paths(chain, n).scores.logsumexp(0)
        for n in has_path.nonzero().flatten().tolist()
    ]
    expected = torch.autograd.grad(sum(sums), inputs, materialize_grads=True)
    for a, b in zip(found, expected, strict=True):
        assert_close_fp64(a, b.nan_to_num(0.0))


@backends
@pytest.mark.parametrize("kind", ["constant", "semi-Markov"])
def test_samples_follow_the_posterior(backend: str, kind: str) -> None:
    k = 4000
    for forbidden, scale in ((0.0, 1.0), (0.2, 1.0), (0.0, 150.0)):
        options = {"D": 2} if kind == "semi-Markov" else {}
        chain = random_token_chain(
            kind, T=3, N=3, C=2, forbidden=forbidden, scale=scale, seed=1, **options
        )
        with partita.backend(backend):
            drawn, repeated = (chain.sample(k, torch.Generator().manual_seed(0)) for _ in range(2))
        assert all(map(torch.equal, drawn, repeated))
        for n in range(3):
            paths = all_token_paths(chain, n)
            if paths.scores.max() == -torch.inf:
                assert (drawn.states[:, :, n] == -1).all()
                assert kind != "semi-Markov" or not drawn.starts[:, :, n].any()
                continue
            p = posterior(paths.scores)
            same = (drawn.states[:, None, :, n] == paths.states).all(2)
            if kind == "semi-Markov":
                same &= (drawn.starts[:, None, :, n] == paths.starts).all(2)
            assert ((same.double().mean(0) - p).abs() <= 5 * (p / k).sqrt()).all()


@backends
@pytest.mark.parametrize("kind", ["constant", "semi-Markov"])
def test_half_types_add_in_full(backend: str, kind: str) -> None:
    half = random_token_chain(kind, T=60, N=2, C=5, ragged=False, dtype=torch.bfloat16)
    full = type(half)(*(tensor.double() for tensor in scores_of(half)))

    def sums(chain: Any) -> list[Tensor]:
        segments = [chain.segment_marginals()] if kind == "semi-Markov" else []
        return [chain.state_marginals(), chain.entropy(), *chain.expected_counts(), *segments]

    with partita.backend(backend):
        assert half.logz().dtype == torch.float32
        torch.testing.assert_close(half.logz().double(), full.logz(), rtol=1e-6, atol=0)
        for found, expected in zip(sums(half), sums(full), strict=True):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@backends
@kinds
def test_a_chain_without_a_path(backend: str, kind: str) -> None:
    chain = random_token_chain(kind, N=4, ragged=False)
    chain.emissions[3, 2] = -torch.inf
    inputs = [tensor.requires_grad_() for tensor in scores_of(chain)]
    states = torch.zeros(5, 4, dtype=torch.int64)
    with partita.backend(backend):
        logz = chain.logz()
        grads = torch.autograd.grad(logz[2], inputs)
        assert logz[2] == -torch.inf and chain.entropy()[2] == 0
        assert chain.viterbi().score[2] == -torch.inf
        assert not chain.state_marginals()[:, 2].any()
        assert (chain.sample(3).states[:, :, 2] == -1).all()
        starts = (states == 0,) if kind == "semi-Markov" else ()
        assert chain.log_prob(states, *starts)[2] == -torch.inf
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("kind", ["by sequence", "semi-Markov"])
def test_masks_and_batch_first_emissions(kind: str) -> None:
    chain = random_token_chain(kind, T=4, N=3, seed=2)
    make = partita.semi_markov_chain if kind == "semi-Markov" else partita.linear_chain
    mask = torch.arange(4) < chain.lengths[:, None]
    emissions, *rest = scores_of(chain)
    for other in (
        make(emissions, *rest, mask=mask.T),
        make(emissions.transpose(0, 1), *rest, mask=mask, batch_first=True),
    ):
        assert torch.equal(other.lengths, chain.lengths)
        assert torch.equal(other.logz(), chain.logz())
        assert torch.equal(other.viterbi().states, chain.viterbi().states)  # [T, N] in any case
