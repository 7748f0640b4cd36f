"""Dense linear chains: arguments, failures, exactness at any length, memory."""

import pytest
import torch
from helpers.errors import raises
from helpers.fresh import run_fresh
from helpers.token_chains import KINDS, random_linear_chain

import partita
from partita import LinearChain

backends = pytest.mark.parametrize("backend", ["reference", "numba"])


@backends
@pytest.mark.parametrize(("T", "N", "C"), [(1, 3, 4), (3, 0, 2), (3, 2, 0), (4, 2, 1), (65, 2, 5)])
def test_sizes_at_the_edge(backend: str, T: int, N: int, C: int) -> None:
    for kind in KINDS:
        chain = random_linear_chain(T, N, C, kind=kind, ragged=False)
        inputs = [chain.emissions, chain.transitions, chain.start, chain.end]
        for tensor in inputs:
            tensor.requires_grad_()
        with partita.backend(backend):
            logz = chain.logz()
            grads = torch.autograd.grad(logz.sum(), inputs)
            marginals, path, counts = (
                chain.state_marginals(),
                chain.viterbi(),
                chain.expected_counts(),
            )
        assert [grad.shape for grad in grads] == [tensor.shape for tensor in inputs]
        assert path.states.shape == (T, N) and counts.transitions.shape == (N, C, C)
        if C:
            torch.testing.assert_close(marginals.sum(2), torch.ones(T, N).double())
            steps = torch.full((N,), T - 1.0).double()
            torch.testing.assert_close(counts.transitions.sum((1, 2)), steps)
        else:
            assert (logz == -torch.inf).all()


@backends
def test_any_strides_dtypes_and_ends(backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    emissions, transitions = torch.randn(6, 3, 4, generator=g), torch.randn(4, 4, generator=g)
    start = torch.randn(4, generator=g)
    with partita.backend(backend):
        expected = LinearChain(emissions, transitions, start, start).logz()
        strided = torch.randn(4, 12, 6, generator=g)
        strided[:, ::4] = emissions.permute(2, 1, 0)
        for others in (
            (strided[:, ::4].permute(2, 1, 0), transitions.T.contiguous().T, start, start),
            (emissions, transitions.expand(5, 4, 4), start.expand(3, 4), start.double()),
            (emissions, transitions.expand(5, 3, 4, 4), start.expand(3, 4).clone(), start),
        ):
            torch.testing.assert_close(LinearChain(*others).logz(), expected)


def test_a_mask_with_a_hole_is_nan_where_values_are_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 0]]).bool()
    emissions = torch.zeros(3, 3, 2)
    with pytest.raises(ValueError, match=r"mask: expected a prefix .* at \[2, 0\]"):
        LinearChain(emissions, torch.zeros(2, 2), mask=mask)
    monkeypatch.setenv("PARTITA_CHECK", "0")
    logz = LinearChain(emissions, torch.zeros(2, 2), mask=mask).logz()
    assert logz.isnan().tolist() == [True, False, True]


EMISSIONS, TRANSITIONS = torch.zeros(3, 2, 4), torch.zeros(4, 4)
BAD = {
    "TypeError: emissions: expected a floating dtype": {"emissions": EMISSIONS.long()},
    r"ValueError: emissions: expected shape \[T, N, C\]": {"emissions": EMISSIONS[0]},
    r"ValueError: transitions: expected shape \[C, C\]": {"transitions": TRANSITIONS[:3]},
    r"ValueError: transitions: .*got \[3, 4, 4\]": {"transitions": torch.zeros(3, 4, 4)},
    r"ValueError: start: expected shape \[C\]": {"start": torch.zeros(3)},
    "ValueError: end: expected shape": {"end": torch.zeros(4, 2)},
    "ValueError: lengths: .* from 1 to 3": {"lengths": [3, 0]},
    "TypeError: mask: expected dtype": {"mask": torch.ones(3, 2)},
    "TypeError: mask: expected either lengths or a mask": {
        "mask": torch.ones(3, 2).bool(),
        "lengths": [3, 3],
    },
}


@pytest.mark.parametrize("error", BAD)
def test_arguments_of_the_constructor(error: str) -> None:
    with raises(error):
        partita.linear_chain(**{"emissions": EMISSIONS, "transitions": TRANSITIONS, **BAD[error]})


def test_arguments_of_the_methods() -> None:
    chain = LinearChain(EMISSIONS, TRANSITIONS)
    for error, call in {
        "TypeError: semiring: expected a Semiring": lambda: chain.logz("log"),
        "ValueError: k: expected a number of paths": lambda: chain.sample(-1),
        "TypeError: other: expected a LinearChain": lambda: chain.kl(chain.to_chain()),
        "ValueError: other.lengths: expected the lengths of this chain": lambda: chain.kl(
            LinearChain(EMISSIONS, TRANSITIONS, lengths=[3, 2])
        ),
        "ValueError: states: expected shape": lambda: chain.log_prob(torch.zeros(2, 2).long()),
        "TypeError: states: expected an integer": lambda: chain.log_prob(torch.zeros(3, 2)),
        "ValueError: emission_values: expected what broadcasts to the emissions": lambda: (
            chain.expectation(torch.zeros(3, 5))
        ),
        "ValueError: end_values: expected shape": lambda: chain.expectation(
            end_values=torch.zeros(5)
        ),
    }.items():
        with raises(error):
            call()


def test_a_divergence_takes_a_subclass() -> None:
    class Tagger(LinearChain):
        """A class of the user's own."""

    emissions = torch.arange(24.0).reshape(3, 2, 4).sin()
    chain, other = LinearChain(EMISSIONS, TRANSITIONS), Tagger(emissions, TRANSITIONS)
    expected = chain.kl(LinearChain(emissions, TRANSITIONS))
    assert (expected > 0.1).all()
    assert torch.equal(chain.kl(other), expected)
    assert (other.kl(chain) > 0.1).all()


def sticky_chain(T: int, scale: float = 1.0) -> LinearChain:
    """Return a chain of four states that stay with a probability of 0.9999."""
    g = torch.Generator().manual_seed(0)
    transitions = torch.full((4, 4), 1e-4 / 3).fill_diagonal_(0.9999).log()
    return LinearChain(scale * torch.randn(T, 1, 4, generator=g), transitions)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_posteriors_of_long_chains_are_those_of_the_log_domain(scale: float) -> None:
    chain = sticky_chain(20_000, scale)
    emissions, transitions = chain.emissions[:, 0].double(), chain.transitions.double()
    alpha, beta = [emissions[0]], [torch.zeros(4, dtype=torch.float64)]
    for row in emissions[1:]:
        alpha.append((alpha[-1][:, None] + transitions).logsumexp(0) + row)
    for row in emissions[1:].flip(0):
        beta.append((transitions + row + beta[-1]).logsumexp(1))
    expected = (torch.stack(alpha) + torch.stack(beta[::-1])).softmax(1)
    with partita.backend("numba"):
        found, logz = chain.state_marginals()[:, 0], chain.logz()
    assert (found.double() - expected).abs().max() < 2e-6
    total = alpha[-1].logsumexp(0)
    assert abs(logz.double() - total) <= 1e-6 * max(1, abs(total)) + 1e-9 * 20_000


def test_both_ways_of_arithmetic_agree_at_100_000_tokens() -> None:
    """A forbidden transition between states that are not there changes to the log domain."""
    chain = sticky_chain(100_000)
    wider = LinearChain(
        torch.cat([chain.emissions, torch.full((100_000, 1, 2), -torch.inf)], 2),
        torch.full((6, 6), -torch.inf),
    )
    wider.transitions[:4, :4] = chain.transitions
    with partita.backend("numba"):
        linear, log_domain = chain.state_marginals(), wider.state_marginals()[..., :4]
    assert (linear.double() - log_domain.double()).abs().max() < 1e-6


def test_results_are_the_same_bits_on_any_number_of_threads() -> None:
    chain = random_linear_chain(700, 3, 20, dtype=torch.float32)
    inputs = [chain.emissions, chain.transitions]
    for tensor in inputs:
        tensor.requires_grad_()
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 2):
            torch.set_num_threads(number)
            logz = chain.logz()
            found.append([logz, torch.autograd.grad(logz.sum(), inputs[0])[0]])
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


MEMORY = """
import resource, torch, partita
from partita import linear_chain
small = torch.randn(5, 2, 3, requires_grad=True)
linear_chain(small, torch.randn(3, 3, requires_grad=True)).logz().sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x, w = torch.randn(1000, 8, 200, requires_grad=True), torch.randn(200, 200, requires_grad=True)
linear_chain(x, w).logz().sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_memory_does_not_grow_with_the_transitions_of_all_tokens() -> None:
    """Scores [T - 1, N, C, C] would take 1.2 GiB."""
    assert int(run_fresh(MEMORY).stdout) < 400
