"""N-gram language models: the scores of sentences, and of every word after some histories.

The truth is back-off in a dictionary. kenlm looks up one word after another on the host.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.decode.language_model import NgramLM
from .case import (
    Attempt,
    Buffers,
    Case,
    Functions,
    Limited,
    Loop,
    Settings,
    Sizes,
    Verdict,
    cases_of,
    given,
    load,
)
from .paths import worst

LN10 = math.log(10)
FOLLOWERS = (8, 2)  # of each 1-gram and 2-gram, in the 2-grams and the 3-grams
WORDS_OF_A_SENTENCE = 20
ALLOWED, PEER_ALLOWED = 1e-9, 1e-3  # nats; kenlm has fp32
# Words of the model, and sentences or histories.
SIZES = Sizes([(10_000, 1024), (1000, 64)], [(1000, 64)], [(2000, 64), (200, 16)], [(40, 4)])

Gram = tuple[str, ...]


Ngrams = dict[Gram, tuple[float, float]]  # log10 of the probability and of the back-off weight


class NgramInputs(NamedTuple):
    """A model of 3-grams, and sentences, whose ends are the histories of `ngram_advance`."""

    model: NgramLM
    states: Tensor  # [B], after each sentence
    sentences: list[list[str]]
    words: list[str]  # [V], the columns of the model
    ngrams: Ngrams
    folder: Any  # the temporary folder of the model's file, which lives as long as the inputs
    path: Path


Scorer = Callable[[NgramInputs], Tensor]


def drawn_ngrams(words: list[str], drawn: random.Random) -> Ngrams:
    """Draw the n-grams of a model with random weights, each after an n-gram of its last words."""
    order: list[Gram] = [("<unk>",), ("<s>",), ("</s>",), *((word,) for word in words)]
    grams, followers = [*order], {(): [*words, "</s>"]}
    for number in FOLLOWERS:
        contexts = [gram for gram in order if gram[-1] not in ("<unk>", "</s>")]
        followers |= {gram: drawn.sample(followers[gram[1:]], number) for gram in contexts}
        order = [(*gram, word) for gram in contexts for word in followers[gram]]
        grams += order
    return {
        gram: (round(drawn.uniform(-5, 0), 5), round(drawn.uniform(-1, 0), 5)) for gram in grams
    }


def write_arpa(path: Path, ngrams: Ngrams) -> None:
    orders = range(1, len(FOLLOWERS) + 2)
    of_order = [[gram for gram in ngrams if len(gram) == n] for n in orders]
    lines = ["\\data\\", *(f"ngram {n}={len(of_order[n - 1])}" for n in orders)]
    for n, grams in zip(orders, of_order, strict=True):
        lines += ["", f"\\{n}-grams:"]
        for gram in grams:
            log_prob, backoff = ngrams[gram]
            end = f"\t{backoff}" if n < len(orders) else ""
            lines.append(f"{log_prob}\t{' '.join(gram)}{end}")
    path.write_text("\n".join([*lines, "", "\\end\\", ""]), encoding="utf-8")


def log_prob(ngrams: Ngrams, gram: Gram) -> float:
    """Return the log-probability in nats of the last word after the others, by its definition."""
    if gram in ngrams:
        return ngrams[gram][0] * LN10
    backoff = ngrams.get(gram[:-1], (0.0, 0.0))[1]
    return backoff * LN10 + log_prob(ngrams, gram[1:])


def kenlm_model() -> Callable[[Path], Any]:
    """Return what reads a file, once."""
    model = load("kenlm", "Model")()
    return lru_cache(maxsize=1)(lambda path: model(str(path)))


def kenlm_score() -> Scorer:
    model_at = kenlm_model()

    def score(x: NgramInputs) -> Tensor:
        model = model_at(x.path)
        found = [model.score(" ".join(sentence)) for sentence in x.sentences]
        return LN10 * torch.tensor(found, dtype=torch.float64)

    return score


def kenlm_advance() -> Scorer:
    model_at, State = kenlm_model(), load("kenlm", "State")()

    def advance(x: NgramInputs) -> Tensor:
        model, rows = model_at(x.path), []
        for sentence in x.sentences:
            state, following = State(), State()
            model.BeginSentenceWrite(state)
            for word in sentence[-2:]:
                model.BaseScore(state, word, following)
                state, following = following, state
            rows.append([model.BaseScore(state, word, following) for word in x.words])
        return LN10 * torch.tensor(rows, dtype=torch.float64)

    return advance


def on_the_host(inputs: NgramInputs) -> str | None:
    return "runs on the host" if inputs.model.device.type == "cuda" else None


PROVIDERS: Functions = {
    "partita": {
        "ngram_score": given(lambda x: x.model.score(x.sentences)),
        "ngram_advance": given(lambda x: x.model.advance(x.states)[0]),
    },
    "kenlm": {
        "ngram_score": Limited(kenlm_score, on_the_host),
        "ngram_advance": Limited(kenlm_advance, on_the_host),
    },
}


@dataclass(frozen=True)
class NgramCase(Case):
    """A model of 3-grams, in fp64."""

    words: int
    sentences: int

    sizes = ("words", "sentences")
    scores = "words"
    unit = "nats"

    def inputs(self, buffers: Buffers) -> NgramInputs:
        drawn = random.Random(0)
        words = [f"w{i}" for i in range(self.words)]
        ngrams = drawn_ngrams(words, drawn)
        following: dict[str, list[str]] = {}
        for gram in ngrams:
            if len(gram) == 2 and gram[1] != "</s>":
                following.setdefault(gram[0], []).append(gram[1])
        sentences = []
        for _ in range(self.sentences):
            sentence = [drawn.choice(words)]
            while len(sentence) < WORDS_OF_A_SENTENCE:
                known = following[sentence[-1]] if drawn.random() < 0.7 else words
                sentence.append(drawn.choice(known))
            sentences.append(sentence)
        folder = tempfile.TemporaryDirectory()
        path = Path(folder.name, "model.arpa")
        write_arpa(path, ngrams)
        model = NgramLM.from_arpa(path, labels=words).to(buffers.device)
        states = model.start(self.sentences)
        for i in (-2, -1):  # a state knows two words
            column = torch.tensor([[int(sentence[i][1:])] for sentence in sentences])
            states = model.advance(states)[1].gather(1, column.to(states.device))[:, 0]
        return NgramInputs(model, states, sentences, words, ngrams, folder, path)

    def standard(self, inputs: NgramInputs) -> Tensor:
        """Return the scores of sentences, or of all words after each history."""
        ngrams, rows = inputs.ngrams, []
        for sentence in inputs.sentences:
            if self.op == "ngram_advance":
                rows.append([log_prob(ngrams, (*sentence[-2:], word)) for word in inputs.words])
                continue
            marked = ["<s>", *sentence, "</s>"]
            grams = [tuple(marked[max(0, i - 2) : i + 1]) for i in range(1, len(marked))]
            rows.append(math.fsum(log_prob(ngrams, gram) for gram in grams))
        return torch.tensor(rows, dtype=torch.float64, device=inputs.model.device)

    def inference(self, attempt: Attempt) -> Loop:
        return Loop((("inference", lambda: attempt.function(attempt.inputs)),))

    def verdicts(self, attempt: Attempt, standard: Tensor) -> Iterator[Verdict]:
        function, inputs, provider = attempt
        found = function(inputs).to(standard)
        allowed = ALLOWED if provider.is_ours else PEER_ALLOWED
        yield worst((found - standard).abs(), allowed, found, standard)


def ngram_cases(settings: Settings) -> Iterator[Case]:
    """Yield the cases, whose scores are fp64 whatever the dtypes of others."""
    ops = {"ngram_score": (NgramCase, SIZES), "ngram_advance": (NgramCase, SIZES)}
    return cases_of(ops)(replace(settings, dtypes=(torch.float64,)))


OPS = {"ngram": ngram_cases}
