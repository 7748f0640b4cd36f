"""N-gram language models: the scores of sentences, and of every word after some histories.

The truth is back-off in a dictionary. kenlm looks up one word after another on the host.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops.decode.language_model import NgramLM
from . import case
from .case import Attempt, Buffers, Case, Functions, Limited, Settings, Verdict, given, load
from .paths import worst

LN10 = math.log(10)
FOLLOWERS = (8, 2)  # of each 1-gram and 2-gram, in the 2-grams and the 3-grams
ALLOWED, PEER_ALLOWED = 1e-9, 1e-3  # nats; kenlm has fp32
# Words of the model, and sentences or histories.
SIZES = case.Sizes([(10_000, 1024), (1000, 64)], [(1000, 64)], [(2000, 64), (200, 16)], [(40, 4)])

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


def drawn_ngrams(words: list[str], drawn: random.Random) -> Ngrams:
    """Draw the n-grams of a model with random weights, each after an n-gram of its last words."""
    order: list[Gram] = [("<unk>",), ("<s>",), ("</s>",), *((word,) for word in words)]
    grams = [*order]
    followers: dict[Gram, list[str]] = {(): [*words, "</s>"]}
    for number in FOLLOWERS:
        contexts = [gram for gram in order if gram[-1] not in ("<unk>", "</s>")]
        followers |= {gram: drawn.sample(followers[gram[1:]], number) for gram in contexts}
        order = [(*gram, word) for gram in contexts for word in followers[gram]]
        grams += order
    return {
        gram: (round(drawn.uniform(-5, 0), 5), round(drawn.uniform(-1, 0), 5)) for gram in grams
    }


def write_model(ngrams: Ngrams) -> tuple[Any, Path]:
    """Write the file of a model, and return the temporary folder that it lives in, and its path."""
    orders = [[gram for gram in ngrams if len(gram) == n] for n in (1, 2, 3)]
    lines = ["\\data\\", *(f"ngram {n}={len(grams)}" for n, grams in enumerate(orders, 1))]
    for n, grams in enumerate(orders, 1):
        lines += ["", f"\\{n}-grams:"]
        for gram in grams:
            log_prob, backoff = ngrams[gram]
            lines.append(f"{log_prob}\t{' '.join(gram)}" + f"\t{backoff}" * (n < len(orders)))
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name, "model.arpa")
    path.write_text("\n".join([*lines, "", "\\end\\", ""]), encoding="utf-8")
    return folder, path


def inner_grams(ngrams: Ngrams) -> list[Gram]:
    """Return the 3-grams that neither begin nor end a sentence."""
    return [gram for gram in ngrams if len(gram) == 3 and not {"<s>", "</s>"} & {*gram}]


def log_prob(ngrams: Ngrams, gram: Gram) -> float:
    """Return the log-probability in nats of the last word after the others, by its definition."""
    if gram in ngrams:
        return ngrams[gram][0] * LN10
    return ngrams.get(gram[:-1], (0.0, 0.0))[1] * LN10 + log_prob(ngrams, gram[1:])


def kenlm(score: Callable[[Any, Any, NgramInputs], list[Any]]) -> Limited:
    """Return a function of inputs, given one of kenlm, its model and inputs, in log10."""

    def loaded() -> Callable[[NgramInputs], Tensor]:
        Model, State = load("kenlm", "Model")(), load("kenlm", "State")()
        read: dict[Path, Any] = {}  # the model of the last inputs, which is read untimed

        def function(inputs: NgramInputs) -> Tensor:
            if inputs.path not in read:
                read.clear()
                read[inputs.path] = Model(str(inputs.path))
            found = score(State, read[inputs.path], inputs)
            return LN10 * torch.tensor(found, dtype=torch.float64)

        return function

    return Limited(loaded, lambda x: "runs on the host" if x.states.is_cuda else None)


def kenlm_score(_: Any, model: Any, inputs: NgramInputs) -> list[float]:
    return [model.score(" ".join(sentence)) for sentence in inputs.sentences]


def kenlm_advance(State: Any, model: Any, inputs: NgramInputs) -> list[list[float]]:
    rows = []
    for sentence in inputs.sentences:
        state, following = State(), State()
        model.BeginSentenceWrite(state)
        for word in sentence[-2:]:
            model.BaseScore(state, word, following)
            state, following = following, state
        rows.append([model.BaseScore(state, word, following) for word in inputs.words])
    return rows


PROVIDERS: Functions = {
    "partita": {
        "ngram_score": given(lambda x: x.model.score(x.sentences)),
        "ngram_advance": given(lambda x: x.model.advance(x.states)[0]),
    },
    "kenlm": {"ngram_score": kenlm(kenlm_score), "ngram_advance": kenlm(kenlm_advance)},
}


@dataclass(frozen=True)
class NgramCase(Case):
    """A model of 3-grams, in fp64."""

    words: int
    sentences: int

    sizes = ("words", "sentences")
    shrinks: ClassVar[Mapping[str, int]] = {"sentences": 1}
    scores = "words"
    unit = "nats"
    is_packed = True

    def inputs(self, buffers: Buffers) -> NgramInputs:
        drawn = random.Random(0)
        words = [f"w{i}" for i in range(self.words)]
        ngrams = drawn_ngrams(words, drawn)
        # Known 3-grams one after another, with back-off where the next one begins.
        known = inner_grams(ngrams)
        sentences = [sum(drawn.choices(known, k=7), ()) for _ in range(self.sentences)]
        folder, path = write_model(ngrams)
        model = NgramLM.from_arpa(path, labels=words).to(buffers.device)
        states = model.start(self.sentences)
        for i in (-2, -1):  # a state knows two words
            column = torch.tensor([[words.index(sentence[i])] for sentence in sentences])
            states = model.advance(states)[1].gather(1, column.to(states.device))[:, 0]
        return NgramInputs(model, states, [*map(list, sentences)], words, ngrams, folder, path)

    def standard(self, inputs: NgramInputs) -> Tensor:
        """Return the scores of sentences, or of all words after each history."""
        ngrams = inputs.ngrams

        def scores(sentence: list[str]) -> Any:
            if self.op == "ngram_advance":
                return [log_prob(ngrams, (*sentence[-2:], word)) for word in inputs.words]
            marked = ("<s>", *sentence, "</s>")
            ends = range(2, len(marked) + 1)
            return math.fsum(log_prob(ngrams, marked[max(0, i - 3) : i]) for i in ends)

        rows = [scores(sentence) for sentence in inputs.sentences]
        return torch.tensor(rows, dtype=torch.float64, device=inputs.states.device)

    def verdicts(self, attempt: Attempt, standard: Tensor) -> Iterator[Verdict]:
        found = attempt.function(attempt.inputs).to(standard)
        allowed = ALLOWED if attempt.provider.is_ours else PEER_ALLOWED
        yield worst((found - standard).abs(), allowed, found, standard)


def ngram_cases(settings: Settings) -> Iterator[Case]:
    """Yield the cases, whose scores are fp64 whatever the dtypes of others."""
    ops = {"ngram_score": (NgramCase, SIZES), "ngram_advance": (NgramCase, SIZES)}
    return case.cases_of(ops)(replace(settings, dtypes=(torch.float64,)))


OPS = {"ngram": ngram_cases}
