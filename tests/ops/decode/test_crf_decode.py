"""Decoding of CTC-CRF against the enumeration of all paths, and the contract of its results."""

import math
from collections import defaultdict

import pytest
import torch
from helpers.ctc import NEEDS_NUMBA, backends

import partita
from partita import testing

SIZES = {"state_len": 2, "alphabet_size": 3}
STATES, BASES = 4, 2


def sample(T: int, N: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(T, N, STATES, BASES + 1, generator=g, dtype=torch.float64) * 2


def all_paths(scores: torch.Tensor) -> dict[tuple[tuple[int, ...], tuple[int, ...]], float]:
    """Return the score of each path: its states, and the columns of its edges."""
    paths = testing.all_paths(partita.Chain(scores[:, None], partita.debruijn_source(BASES, 2)))
    states, columns = paths.states.tolist(), (paths.edges % (BASES + 1)).tolist()
    keys = zip(map(tuple, states), map(tuple, columns), strict=True)
    return dict(zip(keys, paths.scores.tolist(), strict=True))


def bases_of(states: tuple[int, ...], columns: tuple[int, ...]) -> tuple[int, ...]:
    """Return the labels that a path calls: the first k-mer, then a base for each move."""
    moved = (c % BASES + 1 for c, k in zip(states[1:], columns, strict=True) if k)
    return (states[0] // BASES + 1, states[0] % BASES + 1, *moved)


@backends
@pytest.mark.parametrize("seed", [0, 1])
def test_labels_against_enumeration(seed: int, backend: str) -> None:
    """A beam that holds all prefixes finds the bases with the greatest sum over their paths."""
    T, scores = 4, sample(4, 1, seed)
    paths = all_paths(scores[:, 0])
    best = max(paths, key=paths.__getitem__)
    totals: dict[tuple[int, ...], float] = defaultdict(float)
    for path, score in paths.items():
        totals[bases_of(*path)] += math.exp(score)
    called = max(totals, key=totals.__getitem__)
    with partita.backend(backend):
        for method, expected in (("viterbi", bases_of(*best)), ("beam", called)):
            found = partita.ctc_crf_decode(scores, **SIZES, method=method, beam_width=200)
            S = int(found.lengths[0])
            assert tuple(found.labels[0, :S].tolist()) == expected, method
            assert found.labels.shape == found.steps.shape == (1, T + 2)
            # The moves are those of the best path that calls these bases.
            same = {path: s for path, s in paths.items() if bases_of(*path) == expected}
            columns = max(same, key=same.__getitem__)[1]
            assert found.moves[0].tolist() == [k > 0 for k in columns]
            assert found.steps[0, 2:S].tolist() == [t for t, k in enumerate(columns) if k]


@backends
@pytest.mark.parametrize("method", ["viterbi", "posterior", "beam"])
def test_qualities_against_enumeration(method: str, backend: str) -> None:
    scores = sample(4, 1, 3)
    paths = all_paths(scores[:, 0])
    logz = math.log(math.fsum(map(math.exp, paths.values())))
    state = torch.zeros(5, STATES, dtype=torch.float64)  # the posterior of each state
    for (states, _), score in paths.items():
        for t, c in enumerate(states):
            state[t, c] += math.exp(score - logz)
    with partita.backend(backend):
        found = partita.ctc_crf_decode(scores, **SIZES, method=method)
    S = int(found.lengths[0])
    labels, steps = found.labels[0, :S].tolist(), found.steps[0, :S].tolist()
    first, last = state[0].reshape(2, 2), state[1:].reshape(4, 2, 2).sum(1)
    expected = [first.sum(1)[labels[0] - 1], first.sum(0)[labels[1] - 1]]
    for label, start, end in zip(labels[2:], steps[2:], [*steps[3:], 4], strict=True):
        expected.append(last[start:end, label - 1].mean())
    torch.testing.assert_close(found.log_probs[0, :S].exp(), torch.stack(expected))
    assert not found.log_probs[0, S:].any() and not found.labels[0, S:].any()
    assert (found.steps[0, S:] == -1).all() and steps[:2] == [-1, -1]


@NEEDS_NUMBA
@pytest.mark.parametrize(("width", "seed"), [(1, 0), (3, 1), (4, 2), (200, 3)])
def test_numba_agrees_with_the_reference(width: int, seed: int) -> None:
    scores = sample(12, 3, seed)
    scores = scores.round() if seed == 2 else scores
    options = {**SIZES, "input_lengths": [12, 5, 0], "method": "beam", "beam_width": width}
    with partita.backend("reference"):
        expected = partita.ctc_crf_decode(scores, **options)
    with partita.backend("numba"):
        found = partita.ctc_crf_decode(
            scores.transpose(0, 1).contiguous().transpose(0, 1), **options
        )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("method", ["viterbi", "posterior", "beam"])
def test_flat_scores_impossible_steps_and_invalid_lengths(method: str) -> None:
    scores = sample(5, 3).float()
    expected = partita.ctc_crf_decode(scores, **SIZES, method=method)
    scores[2, 1] = -torch.inf
    found = partita.ctc_crf_decode(
        scores.flatten(2), **SIZES, method=method, input_lengths=[5, 5, 6]
    )
    assert found.log_probs.dtype == torch.float32
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a[0], b[0]) and not a[1:].clamp(min=0).any()


def test_text() -> None:
    scores = torch.zeros(1, 2, 4, 3)
    scores[0, :, 2, 0] = 9.0  # the k-mer BA
    calls = partita.ctc_crf_decode(scores, **SIZES)
    assert calls.to_string("-AB") == ["BA", "BA"]
    lines = calls.to_fastq(alphabet="-AB").splitlines()
    assert lines[:3] == ["@0", "BA", "+"] and lines[4] == "@1" and len(lines) == 8
    quality = -10 * math.log10(-math.expm1(float(calls.log_probs[0, 0])))
    assert ord(lines[3][0]) == 33 + round(quality)
    with pytest.raises(ValueError, match="names: expected 2 names, got 1"):
        calls.to_fastq(["x"])
    with pytest.raises(IndexError, match="alphabet: expected a character for label 2, got '-A'"):
        calls.to_string("-A")


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((5, 1, 13), {}, r"scores: expected shape \[T, N, C \* A\]"),
        ((5, 1, 4, 3), {"method": "best"}, "method: expected one of 'viterbi'"),
        ((5, 1, 4, 3), {"beam_width": 0}, "beam_width: expected a number from 1 to 256, got 0"),
        ((5, 1, 4, 3), {"state_len": 0}, "state_len: expected a number of at least 1, got 0"),
        ((5, 1, 4, 3), {"input_lengths": [6]}, "input_lengths: expected steps from 0 to 5, got 6"),
        ((5, 1, 70, 71), {"state_len": 1, "alphabet_size": 71, "method": "beam"}, "alphabet_size"),
    ],
)
def test_errors_name_the_argument(
    shape: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        partita.ctc_crf_decode(torch.zeros(shape), **{**SIZES, **options})


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["viterbi", "posterior", "beam"])
def test_a_gpu_calls_the_same_bases(method: str) -> None:
    scores = sample(200, 4, 5).float()
    expected = partita.ctc_crf_decode(scores, **SIZES, method=method)
    found = partita.ctc_crf_decode(scores.cuda(), **SIZES, method=method)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)
