"""Beam search of transducers, against all of their sequences and against loops."""

import math
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.transducers import (
    LABELS,
    TDT,
    Cached,
    Recurrent,
    Stateless,
    beam,
    exact_scores,
    sequences,
    transducer,
)

from partita import NgramLM, PhraseBoost, rnnt_beam_search


def texts(found: Any, b: int) -> list[tuple[int, ...]]:
    """Return the tokens of the hypotheses of a sequence."""
    exist = found.scores[b] > -torch.inf
    rows = zip(found.tokens[b][exist].tolist(), found.lengths[b][exist].tolist(), strict=True)
    return [tuple(row[:length]) for row, length in rows]


@pytest.mark.parametrize("durations", [None, (0, 1, 2), (1, 3)])
@pytest.mark.parametrize("kind", [Recurrent, Stateless])
def test_a_beam_that_holds_everything_is_exact(
    kind: Any, durations: tuple[int, ...] | None
) -> None:
    network = transducer(kind, (4, 1, 3), durations, classes=3, dtype=torch.float64)
    options = {"beam_width": 90, "nbest": 20, "max_tokens": 3}
    found = network.search(rnnt_beam_search, **options)
    every = sequences(3, 3)
    for b in range(3):
        exact = exact_scores(network, b, every)
        possible = int((exact > -torch.inf).sum())
        values, order = exact.sort(descending=True)
        assert texts(found, b) == [every[i] for i in order[:possible]]
        torch.testing.assert_close(found.scores[b, : len(every)], values, rtol=1e-12, atol=0)
        assert (found.scores[b, len(every) :] == -torch.inf).all()


@pytest.mark.parametrize("kind", [Recurrent, Cached])
@pytest.mark.parametrize("durations", [None, TDT, (1, 2)])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_it_is_the_search_by_loops(
    kind: Any, durations: tuple[int, ...] | None, width: int, model: NgramLM
) -> None:
    boost = PhraseBoost([["w1", "w2"], ["w3", "w4", "w3"]], LABELS, 3.0)
    several = 0
    for seed, models in enumerate(([], [(model, 0.4)], [(boost, 1.0)], [(model, 0.3), (boost, 1)])):
        network = transducer(kind, (7, 5, 0, 6), durations, dtype=torch.float64, seed=seed)
        given: dict[str, Any] = {"max_symbols_per_step": 2, "max_tokens": 8}
        options = {**given, "beam_width": width, "nbest": width}
        for each, weight in models:
            options["boost" if each is boost else "language_model"] = each
            options |= {} if each is boost else {"alpha": weight}
        found = network.search(rnnt_beam_search, **options)
        for b in range(4):
            expected = beam(network, b, width, models=models, **given)
            assert texts(found, b) == [each.tokens for each in expected]
            several += len(expected) > 1
            for i, each in enumerate(expected):
                n = len(each.tokens)
                assert float(found.scores[b, i]) == pytest.approx(each.score, rel=1e-12)
                columns = [x[b, i].tolist() for x in (found.steps, found.durations)]
                assert columns[0] == [*(e[0] for e in each.emitted), *[-1] * (8 - n)]
                assert columns[1] == [*(e[1] for e in each.emitted), *[0] * (8 - n)]
                scores = [*(e[2] for e in each.emitted), *[0.0] * (8 - n)]
                assert found.token_scores[b, i].tolist() == pytest.approx(scores, rel=1e-12)
    assert several > 8 or width == 1


def test_boosts_of_utterances() -> None:
    boosts = [PhraseBoost([["w3"]], LABELS, 9.0), None, PhraseBoost([["w5"]], LABELS, 9.0)]
    network = transducer(lengths=(6, 6, 6), dtype=torch.float64)
    found = network.search(rnnt_beam_search, boost=boosts, beam_width=3)
    for b, each in enumerate(boosts):
        models = [(each, 1.0)] if each else []
        (best, *_) = beam(network, b, 3, 12, models=models)
        assert texts(found, b) == [best.tokens]
    assert 3 in texts(found, 0)[0]
    assert 5 in texts(found, 2)[0]


def test_scores_over_lengths() -> None:
    network = transducer(lengths=(7, 5, 0), dtype=torch.float64)
    plain = network.search(rnnt_beam_search, nbest=6, beam_width=6)
    found = network.search(rnnt_beam_search, nbest=6, beam_width=6, length_normalize=True)
    scores = plain.scores / plain.lengths.clamp(min=1)
    torch.testing.assert_close(found.scores, scores.sort(1, descending=True)[0])
    assert sorted(texts(found, 0)) == sorted(texts(plain, 0))
    assert texts(found, 0) != texts(plain, 0)


@pytest.mark.parametrize("seed", range(8))
def test_nan_in_some_frames_stays_in_its_sequence(seed: int) -> None:
    """Labels that may not follow are no better beside NaN."""
    network = transducer(durations=(0, 1, 3), seed=seed)
    expected = network.search(rnnt_beam_search)
    poisoned = network.encoder.clone()
    poisoned[0, seed % poisoned.shape[1]] = torch.nan
    found = network._replace(encoder=poisoned).search(rnnt_beam_search)
    for a, b in zip(found[:-1], expected[:-1], strict=True):
        assert torch.equal(a[1:], b[1:])


def test_frames_that_no_durations_add_up_to_have_no_hypothesis() -> None:
    network = transducer(lengths=(4, 3), durations=(2,))
    found = network.search(rnnt_beam_search)
    assert found.scores[0, 0] > -torch.inf
    assert found.scores[1, 0] == -torch.inf
    assert found.lengths[1, 0] == 0


def test_wrong_arguments_are_named(model: NgramLM) -> None:
    search = transducer().search
    for options, message in (
        ({"beam_width": 0}, "ValueError: beam_width: expected a number of at least 1, got 0"),
        ({"nbest": 9}, "ValueError: nbest: expected a number from 1 to 8, got 9"),
        ({"nbest": 1.0}, "TypeError: nbest: expected an int, got float"),
        ({"alpha": -1.0, "language_model": model}, "ValueError: alpha: expected a number of at"),
        ({"alpha": math.inf, "language_model": model}, "ValueError: alpha: expected a number of"),
    ):
        with raises(message):
            search(rnnt_beam_search, **options)
