"""Semi-Markov chains against the enumeration of all paths."""

import pytest
import torch
from helpers.chains import assert_close_fp64
from helpers.token_chains import (
    all_token_paths,
    posterior,
    random_semi_markov,
    scores_of,
    segment_posteriors,
)
from torch import Tensor

import partita
from partita import semi_markov_chain

backends = pytest.mark.parametrize("backend", ["reference", "numba"])


@backends
@pytest.mark.parametrize(("forbidden", "scale"), [(0.0, 1.0), (0.2, 1.0), (0.0, 200.0)])
def test_segments_against_the_enumeration(backend: str, forbidden: float, scale: float) -> None:
    chain = random_semi_markov(seed=1, forbidden=forbidden, scale=scale)
    (_, N, C), D = chain.emissions.shape, len(chain.durations)
    with partita.backend(backend):
        segments = chain.segment_marginals()
    for n in range(N):
        paths = all_token_paths(chain, n)
        expected = segment_posteriors(paths, posterior(paths.scores), D, C)
        assert_close_fp64(segments[:, :, n], expected)


@backends
@pytest.mark.parametrize(("forbidden", "scale"), [(0.0, 1.0), (0.2, 1.0), (0.0, 200.0)])
def test_expected_counts_against_the_enumeration(
    backend: str, forbidden: float, scale: float
) -> None:
    """The counts are those of all paths, and their derivatives are those of the enumeration."""
    chain = random_semi_markov(seed=6, forbidden=forbidden, scale=scale)
    (_, N, C), D = chain.emissions.shape, len(chain.durations)
    inputs = [tensor.requires_grad_() for tensor in scores_of(chain)]
    with partita.backend(backend):
        found = chain.expected_counts()
        assert found.durations.shape == (N, D, C) and found.transitions.shape == (N, C, C)
        weights = [torch.randn(each.shape, dtype=torch.float64) for each in found]
        total = sum((w * each).sum() for w, each in zip(weights, found, strict=True))
        derivatives = torch.autograd.grad(total, inputs)
    means = []
    for n in range(N):
        paths = all_token_paths(chain, n)
        p = posterior(paths.scores)
        counts = [counts_of(*path, D, C) for path in zip(paths.states, paths.starts, strict=True)]
        expected = [
            torch.einsum("p,p...->...", p, torch.stack(each)) for each in zip(*counts, strict=True)
        ]
        for each, of_sequence, weight in zip(found, expected, weights, strict=True):
            assert_close_fp64(each[n], of_sequence)
            means.append((weight[n] * of_sequence).sum())
    others = torch.autograd.grad(sum(means), inputs, materialize_grads=True)
    for a, b in zip(derivatives, others, strict=True):
        assert_close_fp64(a, b.nan_to_num(0.0))


def counts_of(states: Tensor, starts: Tensor, D: int, C: int) -> tuple[Tensor, ...]:
    """Return the first state, the transitions, the durations and the last state of a path."""
    first = starts.nonzero()[:, 0]
    length = int((states >= 0).sum())
    sizes = torch.diff(first, append=torch.tensor([length])) - 1
    of_segments = states[first]
    pairs = of_segments[:-1] * C + of_segments[1:]
    return (
        torch.eye(C).double()[of_segments[0]],
        torch.bincount(pairs, minlength=C * C).view(C, C).double(),
        torch.bincount(sizes * C + of_segments, minlength=D * C).view(D, C).double(),
        torch.eye(C).double()[of_segments[-1]],
    )


def test_a_divergence_is_between_chains_of_the_same_durations() -> None:
    chain = random_semi_markov()
    with pytest.raises(ValueError, match=r"other\.durations: expected shape"):
        chain.kl(semi_markov_chain(chain.emissions, chain.transitions, chain.durations[:1]))


@backends
@pytest.mark.parametrize(("forbidden", "scale"), [(0.0, 1.0), (0.3, 1.0), (0.0, 200.0)])
@pytest.mark.parametrize("k", [1, 4, 150])
def test_the_k_best_paths_are_those_of_the_enumeration(
    backend: str, k: int, forbidden: float, scale: float
) -> None:
    for seed in (2, 3):
        chain = random_semi_markov(seed=seed, forbidden=forbidden, scale=scale, ragged=seed > 2)
        T, N, _ = chain.emissions.shape
        with partita.backend(backend):
            found, best = chain.nbest(k), chain.viterbi()
        assert found.score.shape == (k, N) and found.states.shape == (k, T, N)
        for a, b in zip(found, best, strict=True):
            assert_close_fp64(a[0], b)
        for n in range(N):
            paths = all_token_paths(chain, n)
            scores = paths.scores[paths.scores > -torch.inf]
            expected = scores.sort(descending=True).values[:k]
            there = len(expected)
            assert_close_fp64(found.score[:there, n], expected)
            assert (found.score[there:, n] == -torch.inf).all()
            assert (found.states[there:, :, n] == -1).all() and not found.starts[there:, :, n].any()
            # All are different, and have the scores that they come with.
            steps = 2 * found.states[:there, :, n] + found.starts[:there, :, n]
            assert len(steps.unique(dim=0)) == there
            same = steps[:, None] == 2 * paths.states + paths.starts
            assert_close_fp64(found.score[:there, n], paths.scores[same.all(2).int().argmax(1)])
            assert same.all(2).any(1).all()


@backends
def test_equal_paths_and_invalid_arguments_of_nbest(backend: str) -> None:
    """The first of equal paths is that of `viterbi`, and all come in the order of both backends."""
    chain = semi_markov_chain(torch.zeros(3, 1, 1), torch.zeros(1, 1), torch.zeros(2, 1))
    with partita.backend(backend):
        assert chain.nbest(4).starts[:, :, 0].int().tolist() == [
            [1, 1, 1],
            [1, 0, 1],
            [1, 1, 0],
            [0, 0, 0],
        ]
        with pytest.raises(ValueError, match="k: expected a number of paths, 1 or more, got 0"):
            chain.nbest(0)
        with pytest.raises(TypeError, match="k: expected an int, got float"):
            chain.nbest(1.5)  # type: ignore[arg-type]
    with partita.backend("triton"), pytest.raises(RuntimeError, match="nbest has no kernel"):
        chain.nbest(2000)  # does not fit the registers


@backends
def test_the_k_best_paths_of_odd_numbers(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN spoils its own sequence, and so does an invalid length that is not checked."""
    monkeypatch.setenv("PARTITA_CHECK", "0")
    chain = random_semi_markov(6, 4, 3, 2, seed=5, ragged=False)
    expected = semi_markov_chain(*scores_of(chain)).nbest(3)
    chain.emissions[2, 1, 0] = torch.nan
    chain.emissions[3, 2] = -torch.inf
    chain.lengths = torch.tensor([6, 6, 6, 7])
    with partita.backend(backend):
        found = chain.nbest(3)
    assert_close_fp64(found.score[:, 0], expected.score[:, 0])
    assert torch.equal(found.states[..., 0], expected.states[..., 0])
    assert found.score[0, 1].isnan() and found.score[:, 3].isnan().all()
    assert (found.score[:, 2] == -torch.inf).all()
    assert (found.states[..., 2:] == -1).all() and not found.starts[..., 2:].any()


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
        {"emissions": torch.zeros(3, 1, 2).long()},
        {"transitions": torch.zeros(2, 3)},
        {"durations": torch.zeros(0, 2)},
        {"durations": torch.zeros(4, 3)},
        {"durations": torch.zeros(4, 2, dtype=torch.int64)},
        {"start": torch.zeros(3)},
        {"end": torch.zeros(2, 2)},
        {"lengths": [4]},
        {"lengths": [0]},
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
