"""Chains at the edges of the contract: dtypes, strides, empty and wrong inputs."""

import math

import pytest
import torch
from helpers.chains import NUMBER_OF_PATHS, random_chain
from helpers.errors import raises

import partita
from partita import Chain, Max, edges_from_states


@pytest.mark.usefixtures("unchecked")
def test_kl_of_another_table_unchecked() -> None:
    source, scores = partita.dense_source(2), torch.randn(3, 2, 2, 2)
    assert Chain(scores, source).kl(Chain(scores, source.flip(1))).isnan().all()
    assert Chain(scores, source, lengths=[3, 2]).kl(Chain(scores, source)).isnan().tolist() == [
        False,
        True,
    ]


CHAIN = random_chain(ragged=False)
SCORES, SOURCE = CHAIN.scores, CHAIN.source
BAD = {
    r"ValueError: scores: expected shape \[T, N, C, K\], got \[3, 3, 2\]": {"scores": SCORES[0]},
    "TypeError: scores: expected a floating dtype, got torch.int64": {"scores": SCORES.long()},
    "TypeError: source: expected an integer dtype, got torch.float32": {"source": SOURCE.float()},
    r"ValueError: source: expected shape \[C, K\] of scores = \[3, 2\], got \[2, 2\]": {
        "source": SOURCE[:2]
    },
    r"ValueError: initial: expected shape \[N, C\] of scores = \[3, 3\], got \[1, 3\]": {
        "initial": CHAIN.initial[:1]
    },
    "ValueError: final: expected the device of scores, cpu, got meta": {
        "final": CHAIN.final.to("meta")
    },
    r"ValueError: lengths: expected shape \[N\] = \[3\], got \[2\]": {"lengths": [1, 2]},
    "TypeError: lengths: expected an integer dtype": {"lengths": [1.5, 2.0, 1.0]},
    "TypeError: lengths: expected a Tensor or a sequence of integers, got float": {"lengths": 2.5},
    r"ValueError: lengths: .* from 0 to 4, got -2 at \[1\]": {"lengths": [1, -2, 0]},
    r"ValueError: lengths: .* from 0 to 4, got 5 at \[2\]": {"lengths": [1, 2, 5]},
    r"ValueError: source: expected a state from 0 to 2, or -1 for no edge, got \d at \[0, 0\]": {
        "source": SOURCE + 3
    },
}


@pytest.mark.parametrize("error", BAD)
def test_bad_chains(error: str) -> None:
    arguments = {"scores": SCORES, "source": SOURCE, **BAD[error]}
    for method in (Chain.logz, Chain.viterbi):
        with raises(error):
            method(Chain(**arguments))


def test_bad_arguments_of_methods() -> None:
    narrow = SCORES[..., :1, :1, :].expand(4, 3, 2, 2)
    for error, call in {
        "ValueError: initial: expected the device of scores": lambda: CHAIN.expectation(
            SCORES, CHAIN.initial.to("meta")
        ),
        "ValueError: k: expected a number of paths, 0 or more, got -1": lambda: CHAIN.sample(-1),
        "ValueError: values: expected what broadcasts to the scores": lambda: CHAIN.expectation(
            narrow
        ),
        r"ValueError: edges: expected shape \[..., T, N\]": lambda: CHAIN.log_prob(
            torch.zeros(3, 3, dtype=torch.int64)
        ),
        "ValueError: other.lengths: expected the lengths": lambda: CHAIN.kl(
            Chain(SCORES, SOURCE, lengths=[1, 2, 2])
        ),
        "ValueError: other.source: expected the source of this chain": lambda: CHAIN.kl(
            Chain(SCORES, SOURCE.roll(1, 0))
        ),
        "TypeError: semiring: expected a Semiring, as Log or Max, got 'Log'": lambda: CHAIN.logz(
            "Log"
        ),
    }.items():
        with raises(error):
            call()
    with partita.backend("numba"), raises("RuntimeError: backend 'numba': this semiring has no"):
        CHAIN.logz(NUMBER_OF_PATHS)


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
        total = math.log(states) if states else -math.inf  # the chain of no steps
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
    # The table has more states than uint8 has numbers.
    many = (torch.arange(300)[:, None] + torch.arange(2)) % 256
    source = torch.tensor([[0, -1], [120, 1], *[[i, i - 1] for i in range(2, 128)]])
    scores = torch.randn(4, 2, 128, 2, generator=torch.Generator().manual_seed(0))
    with partita.backend(backend):
        int64, uint8 = (
            Chain(torch.zeros(3, 1, 300, 2), table).viterbi()
            for table in (many, many.to(torch.uint8))
        )
        assert all(torch.equal(a, b) for a, b in zip(int64, uint8, strict=True))
        expected = Chain(scores, source).logz()
        assert torch.equal(Chain(scores, source.to(torch.int8)).logz(), expected)
        assert torch.equal(
            Chain(scores, source.clamp(min=0).to(torch.uint8)).logz(),
            Chain(scores, source.clamp(min=0)).logz(),
        )


def test_another_default_device() -> None:
    scores, source = torch.randn(3, 2, 4, 2), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    expected = Chain(scores, source, lengths=[2, 3])
    logz, best = expected.logz(), expected.viterbi()
    with torch.device("meta"):
        chain = Chain(scores, source, lengths=[2, 3])
        assert torch.equal(chain.logz(), logz) and torch.equal(chain.viterbi().states, best.states)
