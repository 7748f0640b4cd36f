"""The chain of taggers and hidden Markov models against the formulas of both."""

import math

import pytest
import torch
from helpers.chains import assert_close_fp64

import partita
from partita import Chain, linear_chain


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
        assert_close_fp64(chain.logz()[n], score.logsumexp(0))
        best = chain.viterbi().states[:, n]
        assert (
            best[:length].tolist() == tags[score.argmax()].tolist() and (best[length:] == -1).all()
        )
        padded = torch.full((4, 2), -1)
        padded[:length, n] = tags[5]
        edges = partita.edges_from_states(padded, chain.source)
        assert_close_fp64(chain.log_prob(edges)[n], score.log_softmax(0)[5])


def test_linear_chain_is_the_hidden_markov_model() -> None:
    """Log Z is that of the forward algorithm in probabilities."""
    g = torch.Generator().manual_seed(0)
    start, end = torch.rand(4, generator=g, dtype=torch.float64).softmax(0), None
    transitions = torch.rand(4, 4, generator=g, dtype=torch.float64).softmax(1)
    likelihood = torch.rand(9, 1, 4, generator=g, dtype=torch.float64)
    p = start * likelihood[0, 0]
    for t in range(1, 9):
        p = (p @ transitions) * likelihood[t, 0]
    assert_close_fp64(
        partita.linear_chain(likelihood.log(), transitions.log(), start.log(), end).logz(),
        p.sum().log()[None],
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


def test_compiled_code_samples_and_tags() -> None:
    """The compiled functions run at several T, with lengths as a tensor."""
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
