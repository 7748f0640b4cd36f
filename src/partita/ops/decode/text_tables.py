"""The tables that a search from CTC to text reads: spellings of labels, words, and phrases.

A text is a sequence of symbols. Under `unit="word"` these are characters, and the symbol 0 is the
boundary of words; a boundary at the start or after another one adds nothing. Under `unit="token"`
they are the labels themselves, and each of them is a word of the language model.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .language_model import NgramLM
from .phrase_boost import Arcs, PhraseBoost, automaton

BOUNDARY = 0
BOUNDARIES = str.maketrans("▁", " ")
LN10 = math.log(10)
COMMIT_EVERY = 64  # steps after which what lies beyond `max_open_steps` is committed
MARKERS = ("<s>", "</s>", "<unk>")  # words of a model that no text has


class Options(NamedTuple):
    """The numbers of a search.

    Fields:
        blank: the class of the blank.
        width, nbest: the hypotheses that go on after a step, and that are returned.
        labels: the number of labels that may extend a hypothesis at a step.
        min_logp: the log-probability below which a label extends none, unless no class is above it.
        skipped: the log-probability of the blank above which a step is taken as a blank.
        max_open_steps: the number of steps after which the past of the best hypothesis is final.
        alpha, beta: the weight of the language model, and what each word adds.
        unknown: what is added to the log10-probability of an unknown word, and to the score of an
            unfinished one.
        score_boundary: whether the start and the end of a sentence are scored.
        from_logits: whether the search takes the log-softmax.
    """

    blank: int
    width: int
    nbest: int
    labels: int
    min_logp: float
    skipped: float
    max_open_steps: int
    alpha: float
    beta: float
    unknown: float
    score_boundary: bool
    from_logits: bool


class Lexicon(NamedTuple):
    """A trie of words. The children of a node are neighbours, in the order of their symbols.

    Fields:
        first: `[K + 1]` int64, the first child of each node; that of the next node ends them.
        symbols: `[K]` int64, the last symbol of each node; node 0 has none.
        words: `[K]` int64, the word of the language model that a node is, or -1 where it is none.
        known: `[K]` bool, whether that is a word whose score is not lowered.
        starts: `[K]` bool, whether such a word begins with the node.
    """

    first: Tensor
    symbols: Tensor
    words: Tensor
    known: Tensor
    starts: Tensor


class Words:
    """The words of a text as the language model reads them.

    Args:
        model: a language model, or None.
        unigrams: the words that are known, all of the model's by default.
        labels: the tokens, where they are the words.

    Under `only`, which the decoder sets, a text has no words but `known`.
    """

    def __init__(
        self, model: Any, unigrams: Iterable[str] | None, labels: Sequence[str] | None
    ) -> None:
        self.model = model.to("cpu") if isinstance(model, NgramLM) else model
        self.places: dict[str, int] = {}
        if model is not None and (labels is None or isinstance(model, NgramLM)):
            self.places = {word: place for place, word in enumerate(model.words)}
        elif model is not None and labels is not None:
            self.places = {label: place for place, label in enumerate(labels)}
        self.unknown = self.places.get("<unk>", 0)
        known = self.places if unigrams is None else dict.fromkeys(unigrams)
        self.known = {word for word in known if word not in MARKERS}

    def column(self, word: str) -> int:
        """Return the number of a word in the model."""
        return self.places.get(word, self.unknown)

    def lowers(self, word: str) -> bool:
        """Return whether the score of a word is lowered: it is unknown, or none of the model's."""
        return word not in self.known or word not in self.places


class Vocabulary:
    """The labels of a network as symbols.

    Args:
        labels: the text of each class.
        blank: the class of the blank, which has no symbols.
        by_token: whether the symbols are the labels.
    """

    def __init__(self, labels: Sequence[str], blank: int, by_token: bool) -> None:
        texts = ["" if c == blank else each for c, each in enumerate(labels)]
        self.texts = texts if by_token else [each.translate(BOUNDARIES) for each in texts]
        self.by_token = by_token
        characters = sorted(set("".join(self.texts)) - {" "})
        self.places = {each: place for place, each in enumerate([" ", *characters])}
        if by_token:
            self.places = {each: place for place, each in enumerate(labels)}
        each_text = [[label] for label in labels] if by_token else self.texts
        spelling = [tuple(map(self.places.__getitem__, each)) for each in each_text]
        self.spelling = [each if c != blank else () for c, each in enumerate(spelling)]
        self.symbols = len(self.places) + 1  # the last one stands for all that no label has
        self.text_of = {place: each for each, place in self.places.items()}
        # Labels that can come last in one text spell ends of one another.
        spelled = [self.extend((), each) or (BOUNDARY,) for each in self.spelling if each]
        counts = collections.Counter(spelled)
        numbers = [sum(counts[one[i:]] for i in range(len(one))) for one in spelled]
        self.most_endings = max(numbers, default=1)

    def spell(self, text: str) -> tuple[int, ...]:
        """Return the symbols of a text of characters."""
        return tuple(self.places.get(each, self.symbols - 1) for each in text)

    def extend(self, text: tuple[int, ...], symbols: Iterable[int]) -> tuple[int, ...]:
        """Return a text with more symbols, without the boundaries that add nothing."""
        for symbol in symbols:
            at_boundary = not text or text[-1] == BOUNDARY
            if self.by_token or symbol != BOUNDARY or not at_boundary:
                text = (*text, symbol)
        return text


class Found(NamedTuple):
    """A whole text that a search has found.

    Fields:
        path: label, first step, and the step after the last of each label that its most probable
            alignment emits.
        score: the log-probability of all its alignments.
        lm_score: what its words and phrases add.
    """

    path: Any
    score: float
    lm_score: float


class TextBatch(NamedTuple):
    """The best whole texts of a batch, with -1 after the labels of each.

    Fields:
        tokens, steps, ends: `[N, nbest, T]` int64, the labels of the most probable alignment, the
            first step of each and the step after its last one.
        lengths: `[N, nbest]` int64, the number of labels.
        scores, lm_scores: `[N, nbest]` fp64, as in `Found`; -inf and 0 where there is no text, NaN
            for an invalid sequence.
    """

    tokens: Tensor
    steps: Tensor
    ends: Tensor
    lengths: Tensor
    scores: Tensor
    lm_scores: Tensor


def empty_texts(N: int, nbest: int, T: int, device: torch.device) -> TextBatch:
    """Return a batch in which no text is found yet."""
    tokens, steps, ends = (torch.full((N, nbest, T), -1, device=device) for _ in range(3))
    lengths = torch.zeros((N, nbest), dtype=torch.int64, device=device)
    scores = torch.full((N, nbest), -math.inf, dtype=torch.float64, device=device)
    return TextBatch(tokens, steps, ends, lengths, scores, torch.zeros_like(scores))


def once_each(make: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """Return `make(value)` for each value, made once for those that are the same object."""
    made = {key: make(value) for key, value in {id(value): value for value in values}.items()}
    return [made[id(value)] for value in values]


def build_lexicon(vocabulary: Vocabulary, words: Words, only: bool) -> Lexicon:
    """Return the trie of the words that a model knows, or that a text may have."""
    if vocabulary.by_token:
        texts = vocabulary.texts
        columns = torch.tensor(list(map(words.column, texts)))
        known = ~torch.tensor(list(map(words.lowers, texts)))
        return Lexicon(columns[:0], columns[:0], columns, known, known)
    listed = words.known if only else words.places.keys() - set(MARKERS)
    # Symbols as characters, which the interpreter translates, sorts and joins in C.
    places = {ord(each): place for each, place in vocabulary.places.items()}
    symbols_of: dict[int, int] = collections.defaultdict(lambda: vocabulary.symbols - 1, places)
    spelled = sorted((word.translate(symbols_of), word) for word in listed if word)
    lengths = torch.tensor([len(each) for each, _ in spelled], dtype=torch.int64)
    text = "".join(each for each, _ in spelled).encode("utf-32-le", "surrogatepass")
    flat = torch.frombuffer(bytearray(text), dtype=torch.int32) if text else lengths.int()
    offsets = lengths.cumsum(0) - lengths
    unknown = words.unknown
    columns = torch.tensor([words.places.get(word, unknown) for _, word in spelled]).long()
    known = ~torch.tensor([words.lowers(word) for _, word in spelled]).bool()
    starts_known = known | only
    node = torch.zeros(len(spelled), dtype=torch.int64)  # of the start of each word
    alive = torch.arange(len(spelled))
    root = torch.zeros(1, dtype=torch.int64)
    symbols, parents, size = [root.int()], [root - 1], 1
    ends, ended, starts = [], [], [root]
    depth = 0
    while len(alive):
        symbol, parent = flat[offsets[alive] + depth], node[alive]
        differs = torch.ones(len(alive), dtype=torch.bool)
        differs[1:] = (symbol[1:] != symbol[:-1]) | (parent[1:] != parent[:-1])
        node[alive] = size - 1 + differs.cumsum(0)
        symbols.append(symbol[differs])
        parents.append(parent[differs])
        size += int(differs.sum())
        starts.append(node[alive[starts_known[alive]]])
        depth += 1
        stops = lengths[alive] == depth
        ends.append(node[alive[stops]])
        ended.append(alive[stops])
        alive = alive[~stops]
    parent = torch.cat(parents)
    lexicon = Lexicon(
        first=1 + torch.searchsorted(parent[1:].contiguous(), torch.arange(size + 1)),
        symbols=torch.cat(symbols).long(),
        words=torch.full((size,), -1, dtype=torch.int64),
        known=torch.zeros(size, dtype=torch.bool),
        starts=torch.zeros(size, dtype=torch.bool),
    )
    if ends:
        at, word = torch.cat(ends), torch.cat(ended)
        lexicon.words[at], lexicon.known[at] = columns[word], known[word]
    lexicon.starts[torch.cat(starts)] = True
    return lexicon


def hotword_phrases(
    vocabulary: Vocabulary, hotwords: Iterable[str], weight: float
) -> dict[tuple[int, ...], float]:
    """Return boosted words as symbols, each with a boundary before and after it."""
    texts = (" ".join(each.split()) for each in hotwords)
    return {vocabulary.spell(f" {each} "): weight for each in texts if each}


def boost_phrases(
    vocabulary: Vocabulary, boost: PhraseBoost | None
) -> dict[tuple[int, ...], float]:
    """Return the phrases of a boost, which are labels, as symbols."""
    found: dict[tuple[int, ...], float] = {}
    for phrase, weight in boost.phrases.items() if boost is not None else ():
        symbols: tuple[int, ...] = ()
        for label in phrase:
            for symbol in vocabulary.spelling[label]:
                repeats = symbols[-1:] == (BOUNDARY,) and not vocabulary.by_token
                symbols = symbols if repeats and symbol == BOUNDARY else (*symbols, symbol)
        if symbols:
            found[symbols] = max(weight, found.get(symbols, weight))
    return found


class PhraseTables(NamedTuple):
    """The automata of boosted words and of a boost."""

    hotwords: Arcs
    boost: Arcs


def phrase_tables(
    vocabulary: Vocabulary,
    hotwords: dict[tuple[int, ...], float],
    boost: dict[tuple[int, ...], float],
) -> PhraseTables:
    """Return the automata of phrases."""
    # The boundaries around a boosted word earn nothing of its weight.
    return PhraseTables(
        automaton(hotwords, vocabulary.symbols, margin=1), automaton(boost, vocabulary.symbols)
    )
