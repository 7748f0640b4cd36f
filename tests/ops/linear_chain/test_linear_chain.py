"""Dense linear chains against the enumeration of all paths."""

import pytest
import torch
from helpers.chains import NUMBER_OF_PATHS, assert_close_fp64
from helpers.token_chains import KINDS, all_token_paths, posterior, random_linear_chain
from torch import Tensor

import partita
from partita import LinearChain, Max, linear_chain

backends = pytest.mark.parametrize("backend", ["reference", "numba"])
kinds = pytest.mark.parametrize("kind", KINDS)
# Scores of which some are -inf, and scores of a range that linear arithmetic does not hold.
scores = pytest.mark.parametrize(("forbidden", "scale"), [(0.0, 1.0), (0.3, 1.0), (0.0, 200.0)])


@backends
@kinds
@scores
@pytest.mark.parametrize("seed", range(2))
def test_counts_and_marginals_of_moves(
    backend: str, kind: str, forbidden: float, scale: float, seed: int
) -> None:
    chain = random_linear_chain(
        kind=kind, seed=seed, forbidden=forbidden, scale=scale, ragged=seed > 0, ends=seed > 0
    )
    T, N, C = chain.emissions.shape
    with partita.backend(backend):
        xi, counts, best = chain.marginals(), chain.expected_counts(), chain.logz(Max)
        if backend == "reference":
            assert chain.logz(NUMBER_OF_PATHS).shape == (N,)
    for n in range(N):
        paths = all_token_paths(chain, n)
        p = posterior(paths.scores)
        one_hot = (paths.states[..., None] == torch.arange(C)).double()
        expected = torch.einsum("p,pta,ptb->tba", p, one_hot[:, :-1], one_hot[:, 1:])
        last = T - 1 if chain.lengths is None else chain.lengths[n] - 1
        assert_close_fp64(xi[:, n], expected)
        assert_close_fp64(counts.transitions[n], expected.sum(0).T)
        assert_close_fp64(counts.start[n], p @ one_hot[:, 0])
        assert_close_fp64(counts.end[n], p @ one_hot[:, last])
        assert_close_fp64(best[n], paths.scores.max())


@backends
@kinds
@scores
def test_means_and_log_probabilities(
    backend: str, kind: str, forbidden: float, scale: float
) -> None:
    chain = random_linear_chain(kind=kind, forbidden=forbidden, scale=scale)
    T, N, C = chain.emissions.shape
    g = torch.Generator().manual_seed(3)
    values = [
        torch.randn(t.shape, generator=g, dtype=torch.float64)
        for t in (chain.emissions, chain.transitions, chain.start, chain.end)
    ]
    states = torch.randint(0, C, (7, T, N), generator=g)
    with partita.backend(backend):
        mean, log_prob = chain.expectation(*values), chain.log_prob(states)
    value_chain = LinearChain(*values, lengths=chain.lengths)
    for n in range(N):
        paths, _, scores = all_token_paths(chain, n)
        p = posterior(scores)
        assert_close_fp64(mean[n], (p * all_token_paths(value_chain, n).scores).sum())
        for k in range(7) if p.any() else ():
            same = ((paths == states[k, :, n]) | (paths < 0)).all(1)
            assert_close_fp64(log_prob[k, n], scores.log_softmax(0)[same][0])


@backends
@kinds
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_first_and_second_derivatives(backend: str, kind: str, scale: float) -> None:
    """A scale of 300 goes beyond linear arithmetic; all but a few posteriors are then 0 or 1."""
    chain = random_linear_chain(4, 2, 2, kind=kind, seed=2, ragged=False)
    if scale > 1:
        chain.transitions.view(-1)[0] = -scale
    inputs = [chain.emissions, chain.transitions, chain.start, chain.end]
    values = [torch.randn_like(tensor) for tensor in inputs]
    for tensor in (*inputs, *values):
        tensor.requires_grad_()

    def quantities(
        e: Tensor, t: Tensor, s: Tensor, f: Tensor, *values: Tensor
    ) -> tuple[Tensor, ...]:
        chain = LinearChain(e, t, s, f, lengths=[4, 2])
        counts = chain.expected_counts()
        return (
            chain.logz(),
            chain.state_marginals(),
            *counts,
            chain.entropy(),
            chain.expectation(*values),
        )

    with partita.backend(backend):
        assert torch.autograd.gradcheck(quantities, (*inputs, *values), fast_mode=True)
        assert torch.autograd.gradgradcheck(
            lambda *inputs: LinearChain(*inputs, lengths=[4, 2]).logz(), inputs, fast_mode=True
        )


def test_the_chain_of_sparse_edges_is_the_same() -> None:
    for kind in KINDS:
        chain = random_linear_chain(kind=kind, seed=3)
        sparse = chain.to_chain()
        assert_close_fp64(sparse.logz(), chain.logz())
        assert_close_fp64(sparse.marginals(), chain.marginals())
        assert torch.equal(sparse.viterbi().states, chain.viterbi().states)


def test_compiled_code_samples() -> None:
    """The catalogue compiles no samples, as a generator is no argument that a compiler knows."""
    sample = torch.compile(
        lambda x: linear_chain(x, torch.zeros(3, 3)).sample(2).states,
        fullgraph=True,
        backend="aot_eager",
    )
    for steps in (4, 5, 6):
        assert sample(torch.zeros(steps, 2, 3)).shape == (2, steps, 2)


@kinds
@pytest.mark.parametrize(("forbidden", "ragged", "k"), [(0.0, False, 4), (0.3, True, 200)])
def test_the_best_paths_against_the_enumeration(
    kind: str, forbidden: float, ragged: bool, k: int
) -> None:
    chain = random_linear_chain(kind=kind, forbidden=forbidden, ragged=ragged, ends=ragged)
    T, N, _ = chain.emissions.shape
    found = chain.nbest(k)
    assert found.score.shape == (k, N) and found.states.shape == (k, T, N)
    for n in range(N):
        states, _, scores = all_token_paths(chain, n)
        order = scores.sort(descending=True).indices[:k]
        order = order[scores[order] > -torch.inf]
        number, length = len(order), states.shape[1]
        assert_close_fp64(found.score[:number, n], scores[order])
        assert found.states[:number, :length, n].tolist() == states[order].tolist()
        assert (found.score[number:, n] == -torch.inf).all()
        assert (found.states[:, length:, n] == -1).all()
        assert (found.states[number:, :, n] == -1).all()
    torch.testing.assert_close(found.states[0], chain.viterbi().states)


def test_equal_paths_and_invalid_arguments_of_nbest() -> None:
    chain = LinearChain(torch.zeros(2, 1, 2), torch.zeros(2, 2))
    assert chain.nbest(5).states[:, :, 0].tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [-1, -1]]
    assert chain.nbest(1).states[0].tolist() == chain.viterbi().states.tolist()
    with pytest.raises(ValueError, match=r"k: expected a number of paths, 1 or more, got 0"):
        chain.nbest(0)
    with partita.backend("triton"), pytest.raises(RuntimeError, match="nbest has no kernel"):
        chain.nbest(2)
