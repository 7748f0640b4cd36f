"""Steps of dense linear chains in vectors, for every number of states that a vector cuts."""

import pytest
import torch

import partita

pytest.importorskip("numba")


def test_a_state_is_scaled_when_it_leaves_its_range() -> None:
    """Each token allows one state, so the maximum falls by many powers of two at each step."""
    T, C = 40, 5
    transitions = torch.rand(C, C, dtype=torch.float64) * 280
    emissions = torch.full((T, 1, C), -1e4, dtype=torch.float64)
    path = torch.arange(T) % C
    emissions[torch.arange(T), 0, path] = 0.0
    chain = partita.linear_chain(emissions, transitions)
    expected = transitions[path[:-1], path[1:]].sum()
    torch.testing.assert_close(chain.logz()[0], expected, rtol=1e-12, atol=0)
    marginals = torch.nn.functional.one_hot(path, C).double()
    torch.testing.assert_close(chain.state_marginals()[:, 0], marginals, rtol=0, atol=1e-12)


@pytest.mark.parametrize("C", [1, 3, 7, 8, 9, 11, 16, 23, 24, 31, 33, 50, 64, 65, 67, 90])
def test_counts_are_those_of_the_reference_for_ragged_lengths(C: int) -> None:
    """Groups of sequences, lengths of one token, and padding add nothing to the counts."""
    T, N = 37, 9
    emissions = torch.randn(T, N, C, dtype=torch.float64, requires_grad=True)
    transitions = torch.randn(C, C, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([37, 1, 2, 3, 36, 20, 1, 33, 34])
    weights = torch.randn(N, dtype=torch.float64)

    def results(backend: str) -> tuple[torch.Tensor, ...]:
        with partita.backend(backend):
            logz = partita.linear_chain(emissions, transitions, lengths=lengths).logz()
            grads = torch.autograd.grad((logz * weights).sum(), [emissions, transitions])
            return logz.detach(), *grads

    ours, expected = results("numba"), results("reference")
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(ours, results("numba"), strict=True))
