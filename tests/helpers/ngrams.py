"""N-gram models of a generated corpus: their ARPA files, and back-off in a dictionary."""

import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from partita import NgramLM

SENTENCES = [text.split() for text in ("a ab b", "b a", "ab ab a", "b b ab", "a", "bab b a")]
Gram = tuple[str, ...]


class Weights(NamedTuple):
    log_prob: float
    backoff: float | None


Ngrams = dict[Gram, Weights]  # in log10


def corpus(sentences: int, seed: int = 0, words: int = 12) -> list[list[str]]:
    """Draw sentences in which few words follow a word, so that long n-grams repeat."""
    drawn = random.Random(seed)
    result = []
    for _ in range(sentences):
        sentence, word = [], drawn.randrange(words)
        for _ in range(drawn.randrange(9)):
            sentence.append(f"w{word}" if word else "ü")
            word = (word * 3 + drawn.choice([1, 1, 1, 5, 8])) % words
        result.append(sentence)
    return result


def ngrams_of(sentences: Sequence[Sequence[str]], order: int, unknown: str = "<unk>") -> Ngrams:
    """Return the n-grams of sentences with random weights, of which some are 0 and some absent.

    Of the longer n-grams some are left out unless they are the context of another one, so a model
    may have an n-gram without its suffixes.
    """
    drawn = random.Random(0)
    found = {("<s>",), ("</s>",)} | ({(unknown,)} if unknown else set())
    for sentence in sentences:
        marked = ("<s>", *sentence, "</s>")
        found |= {
            marked[i : i + n] for n in range(1, order + 1) for i in range(len(marked) - n + 1)
        }
    for n in range(order, 1, -1):
        contexts = {gram[:-1] for gram in found if len(gram) == n + 1}
        rest = sorted(gram for gram in found if len(gram) == n and gram not in contexts)
        found -= {gram for gram in rest if drawn.random() < 0.3}

    def weights(gram: Gram) -> Weights:
        backoff = drawn.choice([None, 0.0, round(drawn.uniform(-2, 0.3), 6)])
        log_prob = -99.0 if gram == ("<s>",) else round(drawn.uniform(-6, 0), 6)
        return Weights(log_prob, None if len(gram) == order else backoff)

    return {gram: weights(gram) for gram in sorted(found, key=lambda gram: (len(gram), gram))}


def arpa(ngrams: Ngrams, seed: int | None = None) -> str:
    """Return the text of the model's file, with the lines of an order shuffled by a seed."""
    orders = range(1, max(map(len, ngrams)) + 1)
    lines = ["\\data\\"]
    lines += [f"ngram {n}={sum(len(gram) == n for gram in ngrams)}" for n in orders]
    for n in orders:
        lines += ["", f"\\{n}-grams:"]
        section = [
            f"{each.log_prob}\t{' '.join(gram)}"
            + ("" if each.backoff is None else f"\t{each.backoff}")
            for gram, each in ngrams.items()
            if len(gram) == n
        ]
        if seed is not None:
            random.Random(seed).shuffle(section)
        lines += section
    return "\n".join([*lines, "", "\\end\\", ""])


def log10_prob(ngrams: Ngrams, history: Gram, word: str) -> float:
    """Return the log-probability of a word after a history, by the definition of back-off."""
    if (*history, word) in ngrams:
        return ngrams[(*history, word)].log_prob
    if not history:
        return -100.0  # no `<unk>`
    weights = ngrams.get(history)
    backoff = weights.backoff if weights else None
    return (backoff or 0.0) + log10_prob(ngrams, history[1:], word)


def log10_score(
    ngrams: Ngrams, sentence: Sequence[str], bos: bool = True, eos: bool = True
) -> float:
    """Return the log-probability of a sentence."""
    order = max(map(len, ngrams))
    unknown = "<UNK>" if ("<UNK>",) in ngrams else "<unk>"
    history: Gram = ("<s>",) * bos
    total = 0.0
    for word in (*sentence, *["</s>"] * eos):
        known = word if (word,) in ngrams else unknown
        total += log10_prob(ngrams, history[max(0, len(history) - order + 1) :], known)
        history = (*history, known)
    return total


def model_of(sentences: Sequence[Sequence[str]], order: int, **options: Any) -> NgramLM:
    """Return the model of sentences, as it is read from an ARPA file with these options."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.arpa")
        path.write_text(arpa(ngrams_of(sentences, order)), encoding="utf-8")
        return NgramLM.from_arpa(path, **options)
