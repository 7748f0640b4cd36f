"""Steps of dense linear chains in vectors agree with NumPy for every number of states."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
import numba

import partita
from partita.ops.linear_chain.cpu import scans
from partita.primitives.cpu.vectors import WIDTH, pointer_to

rng = np.random.default_rng(0)


@numba.njit
def product(states, weights, result):
    C, width = weights.shape
    for k in range(len(states)):
        scans.product(
            pointer_to(states), k * width, pointer_to(weights), C, width, pointer_to(result)
        )


@pytest.mark.parametrize("C", [1, 3, 7, 8, 9, 16, 23, 24, 31, 33, 50, 64, 65, 67, 90])
def test_products_and_sums_of_outer_products(C: int) -> None:
    width = -(-C // WIDTH) * WIDTH
    states, others, weights = np.zeros((5, width)), np.zeros((5, width)), np.zeros((C, width))
    states[:, :C], others[:, :C] = rng.random((2, 5, C))
    weights[:, :C] = rng.random((C, C))
    result = np.full((5, width), np.nan)
    product(states, weights, result)
    np.testing.assert_allclose(result, states[:, :C] @ weights, rtol=1e-14)
    counts = rng.random((width, width))
    expected = counts + states[1:4].T @ others[1:4]
    scans.add_outer_products(states, others, 1, 4, counts)
    np.testing.assert_allclose(counts, expected, rtol=1e-14)


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


def test_counts_are_those_of_the_reference_for_ragged_lengths() -> None:
    """Groups of sequences, lengths of one token, and padding add nothing to the counts."""
    T, N, C = 37, 9, 11
    emissions = torch.randn(T, N, C, dtype=torch.float64, requires_grad=True)
    transitions = torch.randn(C, C, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([37, 1, 2, 3, 36, 20, 1, 33, 34])
    weights = torch.randn(N, dtype=torch.float64)

    def gradients(backend: str) -> tuple[torch.Tensor, ...]:
        with partita.backend(backend):
            logz = partita.linear_chain(emissions, transitions, lengths=lengths).logz()
            return torch.autograd.grad((logz * weights).sum(), [emissions, transitions])

    ours, expected = gradients("numba"), gradients("reference")
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients("numba"), strict=True))
