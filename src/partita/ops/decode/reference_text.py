"""Beam search from CTC to text in plain Python, in fp64: what each hypothesis is and how it ranks.

A hypothesis is a text, as `text_tables` describes it. It sums over the alignments of all label
sequences that spell the text, and each of them ends in a blank or in a label.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .language_model import NgramLM
from .reference import INF, as_rows, log_add
from .text_tables import BOUNDARY, COMMIT_EVERY, LN10, Found, Options, Vocabulary, Words

Text = tuple[int, ...]
Phrases = dict[Text, float]
Path = tuple[tuple[int, int, int], ...]  # label, first step, and the step after the last, of each
BLANK = -1  # among the endings of a hypothesis; the others are labels


class Ending(NamedTuple):
    """The alignments of a text that end in a label, or in a blank.

    Fields:
        score: the log of the sum of their probabilities.
        best: the log-probability of the most probable one.
        path: the labels of that one.
    """

    score: float
    best: float
    path: Path

    def emits(self, log_prob: float, path: Path) -> Ending:
        """Return the alignments after a step with this log-probability."""
        return Ending(self.score + log_prob, self.best + log_prob, path)


Endings = dict[int, Ending]
Beam = dict[Text, Endings]  # in the order of their ranks


def merged(endings: list[Ending]) -> Ending:
    """Return the sum of alignments; of equally probable ones the first is the best."""
    score = functools.reduce(log_add, (each.score for each in endings), -INF)
    if not endings:
        return Ending(score, -INF, ())
    best = max(endings, key=lambda each: each.best)
    return Ending(score, best.best, best.path)


class TextScores:
    """The score that a text adds to the log-probability of its alignments.

    Args:
        vocabulary: the labels as symbols.
        words: the words, and the language model.
        only: whether a text has known words only.
        hotwords: the boosted words, with a boundary before and after each, and what each adds.
        boost: other phrases, likewise.
        options: the numbers of the search.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        words: Words,
        only: bool,
        hotwords: Phrases,
        boost: Phrases,
        options: Options,
    ) -> None:
        self.vocabulary, self.words, self.only = vocabulary, words, only
        self.hotwords, self.boost, self.options = hotwords, boost, options
        starts = words.known if only else words.known & words.places.keys()
        self.starts = {word[:d] for word in starts for d in range(1, len(word) + 1)}
        self._models: dict[tuple[str, ...], tuple[float, Any]] = {}

    def __call__(self, text: Text, is_whole: bool) -> float:
        """Return the score of the words and phrases of a text, which may go on or is whole."""
        words, unfinished = self.split(text)
        if is_whole and unfinished:
            words, unfinished = (*words, unfinished), ""
        score = self.of_words(words)
        if is_whole and self.words.model is not None and self.options.score_boundary:
            state = self.model_after(words)[1]
            score += self.options.alpha * float(self.words.model.final(state))
        padded = text if self.vocabulary.by_token else (BOUNDARY, *text)
        if is_whole and padded[-1:] != (BOUNDARY,) and not self.vocabulary.by_token:
            padded = (*padded, BOUNDARY)
        begun, credit = begun_phrase(self.hotwords, padded, margin=1)
        score += completed(self.hotwords, padded) + completed(self.boost, padded)
        if is_whole:
            return score
        score += credit + begun_phrase(self.boost, padded, margin=0)[1]
        return score + self.of_unfinished(unfinished, begun)

    def split(self, text: Text) -> tuple[tuple[str, ...], str]:
        """Return the finished words of a text and the unfinished one; tokens are all finished."""
        texts = [self.vocabulary.text_of[symbol] for symbol in text]
        if self.vocabulary.by_token:
            return tuple(texts), ""
        *words, unfinished = "".join(texts).split(" ")
        return tuple(words), unfinished

    def of_words(self, words: tuple[str, ...]) -> float:
        if self.only and not all(word in self.words.known for word in words):
            return -INF
        return self.model_after(words)[0] if self.words.model is not None else 0.0

    def of_unfinished(self, word: str, begins_phrase: bool) -> float:
        if not word or word in self.starts:
            return 0.0
        if self.only:
            return -INF
        if self.words.model is None or begins_phrase:
            return 0.0
        return self.options.unknown * max(1.0, len(word) / 6)

    def model_after(self, words: tuple[str, ...]) -> tuple[float, Any]:
        """Return the score of words, and the state of the language model after them."""
        if words in self._models:
            return self._models[words]
        model, options = self.words.model, self.options
        if not words:
            found = 0.0, model.start(1, bos=options.score_boundary)
        else:
            score, state = self.model_after(words[:-1])
            column = self.words.column(words[-1])
            if isinstance(model, NgramLM):  # whose columns may be other ones
                log_prob, state = model._look_up(state, torch.tensor([column]))
            else:
                log_probs, states = model.advance(state)
                log_prob, state = log_probs[:, column], states[:, column]
            lowered = LN10 * options.unknown * self.words.lowers(words[-1])
            found = score + options.alpha * (float(log_prob) + lowered) + options.beta, state
        self._models[words] = found
        return found


def completed(phrases: Phrases, text: Text) -> float:
    """Return the weights of all phrases at all of their places in a text."""
    return sum(
        weight
        for phrase, weight in phrases.items()
        for i in range(len(text) - len(phrase) + 1)
        if text[i : i + len(phrase)] == phrase
    )


def begun_phrase(phrases: Phrases, text: Text, margin: int) -> tuple[bool, float]:
    """Return whether an end of the text begins a phrase, and the share that the longest one earns.

    Of the phrases that it begins, that is a share of the shortest, without `margin` symbols of it
    on each side.
    """
    for d in range(len(text), 0, -1):
        begun = [
            (len(phrase), -weight * (d - margin) / (len(phrase) - 2 * margin))
            for phrase, weight in phrases.items()
            if d < len(phrase) and phrase[:d] == text[-d:]
        ]
        if begun:
            return True, -min(begun)[1]
    return False, 0.0


def next_beam(beam: Beam, row: list[float], t: int, scores: TextScores) -> Beam:
    """Return the best hypotheses after a step, of equal ranks the older first."""
    options, vocabulary = scores.options, scores.vocabulary
    if row[options.blank] > options.skipped:
        row = [p if c == options.blank else -INF for c, p in enumerate(row)]
    enough = min(options.min_logp, max(row))
    labels = [c for c, p in enumerate(row) if c != options.blank and -INF < p >= enough]
    labels = sorted(sorted(labels, key=lambda c: -row[c])[: options.labels])
    found: Beam = {}
    for text, endings in beam.items():
        whole = merged(list(endings.values()))
        found[text] = {BLANK: whole.emits(row[options.blank], whole.path)}
        for c, each in endings.items():
            if c != BLANK:
                (*path, last) = each.path
                found[text][c] = each.emits(row[c], (*path, (*last[:2], t + 1)))
    for text, endings in beam.items():
        for c in labels:
            # A label after itself needs a blank between, and so do different sequences of a text.
            inflow = merged([each for last, each in endings.items() if last != c])
            if inflow.score == -INF:
                continue
            inflow = inflow.emits(row[c], (*inflow.path, (c, t, t + 1)))
            target = found.setdefault(vocabulary.extend(text, vocabulary.spelling[c]), {})
            target[c] = merged([target[c], inflow]) if c in target else inflow
    ranked = {
        text: merged(list(endings.values())).score + scores(text, is_whole=False)
        for text, endings in found.items()
    }
    best = sorted(ranked, key=lambda text: -ranked[text])[: options.width]
    return {text: found[text] for text in best if ranked[text] > -INF}


def commit(beam: Beam, horizon: int) -> Beam:
    """Keep the alignments that agree with the best one of the best hypothesis before a step."""

    def past(ending: Ending) -> list[tuple[int, int]]:
        return [(label, start) for label, start, _ in ending.path if start < horizon]

    decided = past(merged(list(next(iter(beam.values())).values())))
    found = {
        text: {
            c: each if past(each) == decided else Ending(-INF, -INF, each.path)
            for c, each in endings.items()
        }
        for text, endings in beam.items()
    }
    return {text: found[text] for text in found if merged(list(found[text].values())).score > -INF}


def whole_texts(beam: Beam, scores: TextScores) -> list[Found]:
    """Return the best whole texts of a beam, in the order of their ranks."""
    found: dict[Text, list[Ending]] = {}
    for text, endings in beam.items():
        if text and not scores.vocabulary.by_token:
            text = scores.vocabulary.extend(text, (BOUNDARY,))
        found.setdefault(text, []).append(merged(list(endings.values())))
    texts = []
    for text, parts in found.items():
        whole = merged(parts)
        texts.append(Found(whole.path, whole.score, scores(text, is_whole=True)))
    texts = [each for each in texts if each.score + each.lm_score > -INF]
    return sorted(texts, key=lambda each: -(each.score + each.lm_score))[: scores.options.nbest]


class ReferenceSearch:
    """Searches over the sequences of a batch, which go on with each part of their steps.

    Args:
        scores: what the texts of each sequence add, with the options of the search.
    """

    def __init__(self, scores: list[TextScores]) -> None:
        self.scores = scores
        self.beams: list[Beam | None] = [None] * len(scores)  # None for an invalid sequence
        self.steps = [0] * len(scores)
        for n in range(len(scores)):
            self.reset(n)

    def reset(self, n: int) -> None:
        """Let sequence n start anew."""
        self.beams[n], self.steps[n] = {(): {BLANK: Ending(0.0, 0.0, ())}}, 0

    def advance(self, logits: Tensor, lengths: Tensor, collects: bool) -> None:
        """Search over the next steps `[T, N, C]`, of which each sequence has `lengths` `[N]`."""
        from_logits = bool(self.scores) and self.scores[0].options.from_logits
        for n, rows in enumerate(as_rows(logits, lengths, from_logits)):
            beam, scores = self.beams[n], self.scores[n]
            if rows is None or beam is None:
                self.beams[n] = None
                continue
            for row in rows:
                t = self.steps[n]
                beam = next_beam(beam, row, t, scores)
                self.steps[n] = t + 1
                horizon = t + 1 - scores.options.max_open_steps
                if beam and horizon > 0 and (t + 1) % COMMIT_EVERY == 0:
                    beam = commit(beam, horizon)
            self.beams[n] = beam

    def results(self) -> list[list[Found] | None]:
        """Return the best texts of each sequence; None where it is invalid."""
        return [
            None if beam is None else whole_texts(beam, scores)
            for beam, scores in zip(self.beams, self.scores, strict=True)
        ]

    def best_paths(self, firsts: list[int]) -> list[tuple[Path, int]]:
        """Return the labels of each best hypothesis, and how many of them cannot change.

        The labels are those from the first one on that each sequence has in `firsts`.
        """
        found: list[tuple[Path, int]] = []
        for beam, first in zip(self.beams, firsts, strict=True):
            paths = [
                [each[:2] for each in ending.path]
                for endings in (beam or {}).values()
                for ending in endings.values()
                if ending.score > -INF
            ]
            # The last label that all share may be repeated yet.
            together = zip(*paths, strict=False)
            shared = itertools.takewhile(lambda each: len(set(each)) == 1, together)
            best = merged(list(next(iter((beam or {}).values()), {}).values())).path
            found.append((best[first:], max(first, len(list(shared)) - 1)))
        return found

    def attach(self, decoder: Any) -> None:
        """Go on after pickling, for which nothing is missing."""
