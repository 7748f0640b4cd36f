"""Boosted phrases, against a search for each phrase at each place."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from helpers.errors import raises

from partita import PhraseBoost

LABELS = ["-", "a", "b", "c"]
PHRASES = {"ab": 4.0, "abcab": 3.0, "bca": 2.0, "b": 0.5, "cc": -1.0, "abb": 6.0, "caca": 1.0}


def occurrences(text: str) -> float:
    """Return the weights of all phrases at all of their places in a text."""
    return sum(
        weight
        for phrase, weight in PHRASES.items()
        for i in range(len(text))
        if text.startswith(phrase, i)
    )


def credit(text: str) -> float:
    """Return the share of the phrase that the longest end of the text begins."""
    for d in range(len(text), 0, -1):
        begun = [
            (len(phrase), -weight * d / len(phrase))
            for phrase, weight in PHRASES.items()
            if d < len(phrase) and phrase.startswith(text[-d:])
        ]
        if begun:
            return -min(begun)[1]
    return 0.0


def totals(boost: PhraseBoost, columns: Sequence[int]) -> list[float]:
    """Return the score after each label, and after the end."""
    states, total, found = boost.start(1), 0.0, []
    for column in columns:
        scores, following = boost.advance(states)
        total, states = total + scores[0, column].item(), following[:, column]
        found.append(total)
    return [*found, total + boost.final(states).item()]


def test_scores_are_those_of_a_search_for_each_phrase() -> None:
    boost = PhraseBoost(list(PHRASES), LABELS, list(PHRASES.values()))
    drawn = random.Random(0)
    texts = [*map("".join, itertools.product("-abc", repeat=4))]
    texts += ["".join(drawn.choices("-abc", [1, 4, 4, 4], k=40)) for _ in range(20)]
    for text in texts:
        prefixes = [text[: i + 1] for i in range(len(text))]
        expected = [occurrences(each) + credit(each) for each in prefixes]
        found = totals(boost, list(map(LABELS.index, text)))
        assert found == pytest.approx([*expected, occurrences(text)], abs=1e-12)


def test_equal_states_have_begun_the_same() -> None:
    boost = PhraseBoost(list(PHRASES), LABELS, 1.0)
    ends: dict[int, set[str]] = {}
    for text in map("".join, itertools.product("-abc", repeat=5)):
        state = boost.start(1)
        for letter in text:
            state = boost.advance(state)[1][:, LABELS.index(letter)]
        begun = [
            text[i:]
            for i in range(5)
            if any(p.startswith(text[i:]) and p != text[i:] for p in PHRASES)
        ]
        ends.setdefault(int(state), set()).add(begun[0] if begun else "")
    assert all(len(each) == 1 for each in ends.values())
    assert len(ends) == len(set.union(*ends.values()))


def test_phrases_of_subwords_and_of_indices() -> None:
    labels = ["<blank>", "▁new", "▁york", "▁y"]
    expected = [0.0, 1.5, 3.0, 3.0]
    for phrase in (["▁new", "▁york"], [1, 2], ("▁new", 2)):
        boost = PhraseBoost([phrase], labels, 3.0)
        assert totals(boost, [0, 1, 2]) == expected
        assert totals(boost, [1, 0, 2]) == [1.5, 0.0, 0.0, 0.0]


def test_a_phrase_twice_counts_once() -> None:
    assert totals(PhraseBoost(["a", "a", [1]], LABELS, [1.0, 3.0, 2.0]), [1]) == [3.0, 3.0]


def test_no_phrases_add_nothing() -> None:
    boost = PhraseBoost([], LABELS, 1.0)
    assert totals(boost, [0, 1, 2]) == [0.0] * 4
    scores, states = boost.advance(boost.start(0))
    assert scores.shape == states.shape == (0, len(LABELS))


def test_wrong_arguments_are_named() -> None:
    boost = PhraseBoost(["ab"], LABELS, 1.0)
    for call, message in (
        (lambda: PhraseBoost("ab", LABELS, 1.0), "TypeError: phrases: expected a list, got str"),
        (lambda: PhraseBoost(["ab"], "abc", 1.0), "TypeError: labels: expected a list, got str"),
        (lambda: PhraseBoost(["ab"], [], 1.0), "ValueError: labels: expected at least one"),
        (lambda: PhraseBoost(["ab"], LABELS, [1.0] * 2), "ValueError: weight: expected 1 numbers"),
        (lambda: PhraseBoost(["a"], LABELS, float("nan")), "ValueError: weight: expected finite"),
        (lambda: PhraseBoost(["a", ""], LABELS, 1.0), r"ValueError: phrases\[1\]: expected at lea"),
        (lambda: PhraseBoost(["a b"], LABELS, 1.0), r"ValueError: phrases\[0\]: .*, got ' '; give"),
        (lambda: PhraseBoost([[4]], LABELS, 1.0), r"ValueError: phrases\[0\]: .* 0 to 3, got 4"),
        (lambda: PhraseBoost([[1.0]], LABELS, 1.0), r"TypeError: phrases\[0\]: expected an int"),
        (lambda: PhraseBoost([3], LABELS, 1.0), r"TypeError: phrases\[0\]: expected a string or"),
        (lambda: boost.start(-1), "ValueError: B: expected a number from 0 on"),
        (lambda: boost.advance(torch.tensor([0, 9])), "ValueError: states: expected states of"),
        (lambda: boost.final(torch.zeros(1)), "TypeError: states: expected an integer dtype"),
    ):
        with raises(message):
            call()
