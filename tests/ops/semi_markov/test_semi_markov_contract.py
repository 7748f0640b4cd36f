"""Semi-Markov chains: failures, sizes at the edge, dtypes, exactness, transforms."""

import pytest
import torch
from helpers.token_chains import random_semi_markov, scores_of

import partita
from partita import SemiMarkovChain

backends = pytest.mark.parametrize("backend", ["reference", "numba"])


@backends
@pytest.mark.parametrize(
    ("T", "N", "C", "D"),
    [(1, 3, 4, 2), (3, 0, 2, 2), (3, 2, 0, 2), (4, 2, 1, 9), (33, 2, 5, 7), (9, 2, 3, 1)],
)
def test_sizes_at_the_edge(backend: str, T: int, N: int, C: int, D: int) -> None:
    chain = random_semi_markov(T, N, C, D, ragged=False)
    inputs = [tensor.requires_grad_() for tensor in scores_of(chain)]
    with partita.backend(backend):
        logz = chain.logz()
        grads = torch.autograd.grad(logz.sum(), inputs)
        states, segments, path = (
            chain.state_marginals(),
            chain.segment_marginals(),
            chain.viterbi(),
        )
        drawn, ranked = chain.sample(2), chain.nbest(5)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in inputs]
    assert path.states.shape == path.starts.shape == (T, N)
    assert drawn.states.shape == drawn.starts.shape == (2, T, N)
    assert ranked.states.shape == ranked.starts.shape == (5, T, N)
    assert all(map(torch.equal, path, (each[0] for each in ranked)))
    assert segments.shape == (T, D, N, C)
    if C:
        torch.testing.assert_close(states.sum(2), torch.ones(T, N).double())
        steps = (segments.sum((0, 3)) * torch.arange(1, D + 1)[:, None]).sum(0)
        torch.testing.assert_close(steps, torch.full((N,), float(T)).double())
    else:
        assert (logz == -torch.inf).all()


@backends
def test_any_strides_dtypes_and_ends(backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    emissions, transitions = torch.randn(6, 3, 4, generator=g), torch.randn(4, 4, generator=g)
    durations, start = torch.randn(3, 4, generator=g), torch.randn(4, generator=g)
    strided = torch.randn(4, 12, 6, generator=g)
    strided[:, ::4] = emissions.permute(2, 1, 0)
    others = (
        strided[:, ::4].permute(2, 1, 0),
        transitions.T.contiguous().T,
        durations.T.contiguous().T.double(),
    )
    with partita.backend(backend):
        expected = SemiMarkovChain(emissions, transitions, durations, start, start)
        found = SemiMarkovChain(*others, start.expand(3, 4), start.double())
        torch.testing.assert_close(found.logz(), expected.logz())
        torch.testing.assert_close(found.state_marginals(), expected.state_marginals())


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_kernels_of_the_cpu_agree_with_the_reference(offset: float) -> None:
    """Scores of one sign sum to large numbers, of which no difference may be formed."""
    chain = random_semi_markov(300, 3, 6, 9, seed=4)
    chain.emissions += offset
    chain.transitions[0] = -torch.inf
    found = {}
    for backend in ("reference", "numba"):
        inputs = [tensor.clone().requires_grad_() for tensor in scores_of(chain)]
        own = SemiMarkovChain(*inputs, lengths=chain.lengths)
        with partita.backend(backend):
            logz = own.logz()
            drawn = own.sample(20, torch.Generator().manual_seed(0))
            found[backend] = (
                *(logz.detach(), own.state_marginals().detach(), *own.viterbi(), *drawn),
                *own.nbest(4),
                *torch.autograd.grad(logz.sum(), inputs),
            )
    for a, b in zip(*found.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_posteriors_of_a_long_sequence() -> None:
    """Posteriors of fp32 scores are within 2e-6 of the reference, and sum to 1 at any length."""
    chain = random_semi_markov(30_000, 1, 2, 3, ragged=False, dtype=torch.float32)
    found = chain.state_marginals()
    torch.testing.assert_close(found.sum(2), torch.ones(30_000, 1), rtol=0, atol=1e-6)
    short = SemiMarkovChain(chain.emissions[:1000], *scores_of(chain)[1:])
    with partita.backend("reference"):
        expected, logz = short.state_marginals(), short.logz()
    torch.testing.assert_close(short.state_marginals(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(short.logz(), logz, rtol=1e-6, atol=0)
