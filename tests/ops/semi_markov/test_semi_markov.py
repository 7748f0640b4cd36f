"""Semi-Markov chains against the enumeration of all paths."""

import pytest
import torch
from helpers.chains import assert_close_fp64
from helpers.semi_markov import all_segment_paths, random_semi_markov, segment_posteriors
from torch import Tensor

import partita
from partita import linear_chain, semi_markov_chain

backends = pytest.mark.parametrize("backend", ["reference", "numba"])
# Scores of which some are -inf, and scores of a range that linear arithmetic does not hold.
scores = pytest.mark.parametrize(("forbidden", "scale"), [(0.0, 1.0), (0.2, 1.0), (0.0, 200.0)])


def posterior(scores: Tensor) -> Tensor:
    return scores.softmax(0) if scores.max() > -torch.inf else torch.zeros_like(scores)


@backends
@scores
@pytest.mark.parametrize("seed", range(2))
def test_against_the_enumeration_of_all_paths(
    backend: str, forbidden: float, scale: float, seed: int
) -> None:
    chain = random_semi_markov(
        seed=seed, forbidden=forbidden, scale=scale, ragged=seed > 0, ends=seed > 0
    )
    (_, N, C), D = chain.emissions.shape, len(chain.durations)
    with partita.backend(backend):
        logz, states, segments, path, entropy = (
            chain.logz(),
            chain.state_marginals(),
            chain.segment_marginals(),
            chain.viterbi(),
            chain.entropy(),
        )
    for n in range(N):
        paths = all_segment_paths(chain, n)
        p = posterior(paths.scores)
        one_hot = (paths.states[..., None] == torch.arange(C)).double()
        assert_close_fp64(logz[n], paths.scores.logsumexp(0))
        assert_close_fp64(states[:, n], torch.einsum("p,ptc->tc", p, one_hot))
        assert_close_fp64(segments[:, :, n], segment_posteriors(paths, p, D, C))
        plogp = torch.special.xlogy(p, p)
        torch.testing.assert_close(entropy[n], -plogp.sum(), rtol=0, atol=1e-11 * max(1, scale))
        assert_close_fp64(path.score[n], paths.scores.max())
        log_prob = chain.log_prob(
            paths.states[..., None].expand(-1, -1, N), paths.starts[..., None].expand(-1, -1, N)
        )[:, n]
        if p.any():
            best = paths.scores.argmax()
            assert torch.equal(path.states[:, n], paths.states[best])
            assert torch.equal(path.starts[:, n], paths.starts[best])
            assert_close_fp64(log_prob, paths.scores.log_softmax(0))
        else:
            assert (path.states[:, n] == -1).all() and not path.starts[:, n].any()
            assert (log_prob == -torch.inf).all()


@backends
@scores
def test_divergence_is_that_of_the_enumeration(
    backend: str, forbidden: float, scale: float
) -> None:
    chain = random_semi_markov(forbidden=forbidden, scale=scale, seed=3)
    other = random_semi_markov(seed=4)
    other.lengths = chain.lengths
    with partita.backend(backend):
        kl = chain.kl(other)
    for n in range(len(kl)):
        scores = all_segment_paths(chain, n).scores
        p, other_scores = posterior(scores), all_segment_paths(other, n).scores
        difference = scores.log_softmax(0) - other_scores.log_softmax(0)
        expected = (p * difference.masked_fill(p == 0, 0.0)).sum()
        # It is a difference of numbers up to a thousand times as large.
        torch.testing.assert_close(kl[n], expected, rtol=1e-11, atol=1e-11 * max(1, scale))
    with pytest.raises(ValueError, match=r"other\.durations: expected shape"):
        chain.kl(semi_markov_chain(chain.emissions, chain.transitions, chain.durations[:1]))


@backends
@scores
def test_gradients_are_those_of_the_enumeration(
    backend: str, forbidden: float, scale: float
) -> None:
    chain = random_semi_markov(forbidden=forbidden, scale=scale, seed=5)
    inputs = [chain.emissions, chain.transitions, chain.durations, chain.start, chain.end]
    for tensor in inputs:
        tensor.requires_grad_()
    weight = torch.linspace(0.5, 2, len(chain.start), dtype=torch.float64)
    with partita.backend(backend):
        logz = chain.logz()
        has_path = logz.detach() > -torch.inf
        found = torch.autograd.grad((weight * logz)[has_path].sum(), inputs)
    sums = [
        weight[n] * all_segment_paths(chain, n).scores.logsumexp(0)
        for n in has_path.nonzero().flatten().tolist()
    ]
    expected = torch.autograd.grad(sum(sums), inputs, materialize_grads=True)
    for a, b in zip(found, expected, strict=True):
        assert_close_fp64(a, b.nan_to_num(0.0))


@backends
def test_samples_follow_the_posterior(backend: str) -> None:
    k = 3000
    for forbidden in (0.0, 0.2):
        chain = random_semi_markov(3, 3, 2, 2, forbidden=forbidden, seed=1)
        with partita.backend(backend):
            drawn = chain.sample(k, torch.Generator().manual_seed(0))
            repeated = chain.sample(k, torch.Generator().manual_seed(0))
        assert torch.equal(drawn.states, repeated.states)
        assert torch.equal(drawn.starts, repeated.starts)
        for n in range(3):
            paths = all_segment_paths(chain, n)
            if paths.scores.max() == -torch.inf:
                assert (drawn.states[:, :, n] == -1).all() and not drawn.starts[:, :, n].any()
                continue
            p = posterior(paths.scores)
            same = (drawn.states[:, None, :, n] == paths.states).all(2)
            same &= (drawn.starts[:, None, :, n] == paths.starts).all(2)
            assert ((same.double().mean(0) - p).abs() <= 5 * (p / k).sqrt()).all()


def test_segments_of_one_step_are_a_linear_chain() -> None:
    chain = random_semi_markov(7, 3, 4, 1, seed=3)
    linear = linear_chain(
        chain.emissions + chain.durations[0],
        *(chain.transitions, chain.start, chain.end),
        lengths=chain.lengths,
    )
    with partita.backend("reference"):
        assert_close_fp64(chain.logz(), linear.logz())
        assert_close_fp64(chain.state_marginals(), linear.state_marginals())
        assert_close_fp64(chain.entropy(), linear.entropy())
        assert torch.equal(chain.viterbi().states, linear.viterbi().states)
        assert torch.equal(chain.viterbi().starts, chain.viterbi().states >= 0)


def test_equal_paths_go_to_low_states_and_short_segments() -> None:
    chain = semi_markov_chain(torch.zeros(4, 1, 2), torch.zeros(2, 2), torch.zeros(3, 2))
    for backend in ("reference", "numba"):
        with partita.backend(backend):
            path = chain.viterbi()
        assert not path.states.any() and path.starts.all()


def test_what_is_no_path_has_no_probability() -> None:
    chain = semi_markov_chain(
        torch.zeros(4, 1, 2), torch.zeros(2, 2), torch.zeros(2, 2), lengths=[3]
    )
    valid = [0, 0, 1, 7], [True, False, True, True]  # the last step is past the length

    def log_prob(states: list[int], starts: list[bool]) -> float:
        return float(chain.log_prob(torch.tensor(states)[:, None], torch.tensor(starts)[:, None]))

    assert log_prob(*valid) == pytest.approx(-float(chain.logz()))
    for states, starts in (
        ([0, 1, 1, 0], valid[1]),  # another state inside a segment
        ([0, 0, 2, 0], valid[1]),  # no such state
        (valid[0], [False, False, True, False]),  # no segment starts first
        ([0, 0, 0, 0], [True, False, False, False]),  # a segment of 3 steps
    ):
        assert log_prob(states, starts) == -torch.inf


@pytest.mark.parametrize(
    "change",
    [
        {"emissions": torch.zeros(3, 2)},
        {"emissions": torch.zeros(0, 1, 2)},
        {"emissions": torch.zeros(3, 1, 2).long()},
        {"transitions": torch.zeros(2, 3)},
        {"durations": torch.zeros(0, 2)},
        {"durations": torch.zeros(4, 3)},
        {"durations": torch.zeros(4, 2, dtype=torch.int64)},
        {"start": torch.zeros(3)},
        {"end": torch.zeros(2, 2)},
        {"lengths": [4]},
        {"lengths": [0]},
        {"lengths": [1, 1]},
    ],
)
def test_errors_name_the_argument(change: dict[str, Tensor]) -> None:
    arguments = {
        "emissions": torch.zeros(3, 1, 2),
        "transitions": torch.zeros(2, 2),
        "durations": torch.zeros(4, 2),
    }
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(change))}: expected .* got "):
        semi_markov_chain(**{**arguments, **change})


def test_a_sample_takes_a_generator_only() -> None:
    chain = semi_markov_chain(torch.zeros(3, 1, 2), torch.zeros(2, 2), torch.zeros(4, 2))
    with pytest.raises(TypeError, match=r"generator: expected .* got int"):
        chain.sample(2, 3)  # type: ignore[arg-type]
