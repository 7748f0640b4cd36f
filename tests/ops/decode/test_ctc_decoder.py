"""CTC to text, against an enumeration of all paths, the reference, and pyctcdecode."""

import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from helpers.ngrams import arpa, ngrams_of
from torch import Tensor

import partita
from partita import CTCDecoder, NgramLM, PhraseBoost, Transcripts

LABELS = ["", "a", "b", " "]
PIECES = ["▁", "a", "", "▁a", "ab", "▁b"]  # several label sequences spell one text
SENTENCES = [text.split() for text in ("a ab b", "b a", "ab ab a", "b b ab", "a", "bab b a")]
EVERYTHING = {"beam_width": 256, "cutoff_top_n": None}
BACKENDS = ["reference", "numba"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> NgramLM:
    path = tmp_path_factory.mktemp("model") / "model.arpa"
    path.write_text(arpa(ngrams_of(SENTENCES, 3)), encoding="utf-8")
    return NgramLM.from_arpa(path)


def drawn(T: int, C: int, seed: int = 0, N: int = 1, scale: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, N, C, generator=generator, dtype=torch.float64)
    return (scale * logits).log_softmax(-1)


def texts_of_paths(log_probs: Tensor, labels: list[str], blank: int) -> dict[str, float]:
    """Return the log-probability of each text, by all paths through `[T, C]`."""
    T, C = log_probs.shape
    found: dict[str, float] = {}
    for path in itertools.product(range(C), repeat=T):
        emitted = [labels[c] for c, _ in itertools.groupby(path) if c != blank]
        text = " ".join("".join(emitted).replace("▁", " ").split())
        found[text] = found.get(text, 0.0) + math.exp(float(log_probs[range(T), path].sum()))
    return {text: math.log(p) for text, p in found.items()}


def occurrences(phrase: str, text: str) -> int:
    return sum(text.startswith(phrase, i) for i in range(len(text)))


def added(
    text: str,
    model: NgramLM | None,
    known: set[str] | None = None,
    hotwords: dict[str, float] | None = None,
    boost: dict[str, float] | None = None,
) -> float:
    """Return what the words and phrases of a whole text add, with the default weights."""
    words, total, padded = text.split(), 0.0, f" {text} " if text else " "
    if model is not None:
        known = set(model.words) if known is None else known & set(model.words)
        total += 0.5 * float(model.score(words)) + 1.5 * len(words)
        total -= 0.5 * 10 * math.log(10) * sum(word not in known for word in words)
    total += sum(w * occurrences(f" {each} ", padded) for each, w in (hotwords or {}).items())
    return total + sum(w * occurrences(each, padded) for each, w in (boost or {}).items())


def assert_ranked(found: Transcripts, log_probs: dict[str, float], extra: dict[str, float]) -> None:
    """Expect the best texts, with their log-probabilities and what they add."""
    ranked = sorted(extra, key=lambda text: -(log_probs[text] + extra[text]))
    nbest = len(found.text[0])
    assert found.text[0] == ranked[:nbest]
    for i, text in enumerate(found.text[0]):
        assert abs(float(found.hypotheses.scores[0, i]) - log_probs[text]) <= 1e-9
        assert abs(float(found.lm_scores[0, i]) - extra[text]) <= 1e-9


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("labels", [LABELS, PIECES], ids=["characters", "pieces"])
@pytest.mark.parametrize("with_model", [False, True], ids=["bare", "model"])
def test_scores_are_those_of_an_enumeration(
    model: NgramLM, name: str, labels: list[str], with_model: bool
) -> None:
    blank = labels.index("")
    x = drawn(4, len(labels), seed=blank)
    language_model = model if with_model else None
    texts = texts_of_paths(x[:, 0], labels, blank)
    decoder = CTCDecoder(labels, blank=blank, language_model=language_model)
    boost = PhraseBoost([[labels.index("a")], "ab" if blank == 0 else ["ab"]], labels, [0.7, 1.3])
    with partita.backend(name):
        found = decoder(x, nbest=20, **EVERYTHING)
        assert_ranked(found, texts, {text: added(text, language_model) for text in texts})
        options = {"hotwords": ["ab", "b  a"], "hotword_weight": 3.0, "boost": boost}
        found = decoder(x, nbest=20, **options, **EVERYTHING)
    phrases = {"hotwords": {"ab": 3.0, "b a": 3.0}, "boost": {"a": 0.7, "ab": 1.3}}
    assert_ranked(found, texts, {text: added(text, language_model, **phrases) for text in texts})


@pytest.mark.parametrize("name", BACKENDS)
def test_unigrams_are_the_known_words(model: NgramLM, name: str) -> None:
    x, unigrams = drawn(5, 4, seed=3), ["a", "b", "bb"]
    texts = texts_of_paths(x[:, 0], LABELS, 0)
    only = {text for text in texts if set(text.split()) <= set(unigrams)}
    options: dict[str, Any] = {"unigrams": unigrams, "language_model": model}
    with partita.backend(name):
        found = CTCDecoder(LABELS, **options)(x, nbest=20, **EVERYTHING)
        extra = {text: added(text, model, set(unigrams)) for text in texts}
        assert_ranked(found, texts, extra)
        found = CTCDecoder(LABELS, **options, unigrams_only=True)(x, nbest=20, **EVERYTHING)
        assert_ranked(found, texts, {text: extra[text] for text in only})
        del options["language_model"]
        found = CTCDecoder(LABELS, **options, unigrams_only=True)(x, nbest=20, **EVERYTHING)
        assert_ranked(found, texts, dict.fromkeys(only, 0.0))


@pytest.mark.parametrize("name", BACKENDS)
def test_tokens_are_the_words(model: NgramLM, name: str) -> None:
    labels = ["<blank>", "a", "b", "x"]
    x = drawn(4, 4, seed=5)
    sequences: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(4), repeat=4):
        tokens = tuple(c for c, _ in itertools.groupby(path) if c)
        p = math.exp(float(x[range(4), 0, path].sum()))
        sequences[tokens] = sequences.get(tokens, 0.0) + p
    spaced = {" ".join(labels[c] for c in tokens): math.log(p) for tokens, p in sequences.items()}
    boost = PhraseBoost(["ab"], labels, 2.0)
    extra = {text: added(text, model) + 2 * occurrences("a b", text) for text in spaced}
    decoder = CTCDecoder(labels, language_model=model, unit="token")
    with partita.backend(name):
        found = decoder(x, nbest=20, boost=boost, **EVERYTHING)
    pairs = zip(found.hypotheses.tokens[0], found.hypotheses.lengths[0], strict=True)
    texts = [" ".join(labels[c] for c in tokens[:S].tolist()) for tokens, S in pairs]
    assert_ranked(found._replace(text=[texts]), spaced, extra)


def same(a: Transcripts, b: Transcripts, atol: float = 0.0) -> None:
    assert (a.text, a.words) == (b.text, b.words)
    for x, y in zip((a.lm_scores, *a.hypotheses), (b.lm_scores, *b.hypotheses), strict=True):
        torch.testing.assert_close(x, y, rtol=0.0, atol=atol, equal_nan=True)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"beam_width": 3, "hotwords": ["ab a", "ba", "b"], "hotword_weight": 2.0},
    {"beam_width": 5, "cutoff_top_n": 2, "token_min_logp": -2.0},
    {"beam_width": 5, "blank_skip_threshold": 0.5, "max_open_steps": 10},
    {"beam_width": 9, "token_min_logp": -0.1, "max_open_steps": 1},
]


@pytest.mark.parametrize("labels", [LABELS, PIECES], ids=["characters", "pieces"])
@pytest.mark.parametrize("options", range(len(OPTIONS)))
@pytest.mark.parametrize("kind", ["bare", "model", "lexicon", "token"])
def test_numba_is_the_reference(model: NgramLM, labels: list[str], options: int, kind: str) -> None:
    blank = labels.index("")
    x = drawn(130, len(labels), seed=options, N=2, scale=1 + options).float()
    made: dict[str, Any] = {
        "bare": {},
        "model": {"language_model": model},
        "lexicon": {"unigrams": ["ab", "b"], "unigrams_only": True, "language_model": model},
        "token": {"language_model": model, "unit": "token"},
    }[kind]
    given = dict(OPTIONS[options], nbest=3)
    if kind == "token":
        given = {key: value for key, value in given.items() if "hotword" not in key}
    phrases = [[labels.index("a")], [labels.index("a"), len(labels) - 1]]
    boost = [PhraseBoost(phrases, labels, [0.5, 2.0]), None]
    decoder = CTCDecoder(labels, blank=blank, **made)
    with partita.backend("reference"):
        expected = decoder(x, [130, 70], boost=boost, **given)
    with partita.backend("numba"):
        found = decoder(x, [130, 70], boost=boost, **given)
    same(found, expected, atol=1e-9)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("sizes", [[1], [7, 64, 3], [200]])
def test_chunks_of_any_size_give_the_same_bits(model: NgramLM, name: str, sizes: list[int]) -> None:
    T = 200 if name == "numba" else 90
    x, decoder = drawn(T, 4, N=2, seed=7), CTCDecoder(LABELS, language_model=model)
    given: dict[str, Any] = {"beam_width": 8, "nbest": 3, "hotwords": ["ab"], "max_open_steps": 20}
    lengths = [T, T - 20]
    with partita.backend(name):
        expected = decoder(x, lengths, **given)
        stream, t, before = decoder.stream(2, **given), 0, ["", ""]
        for size in itertools.cycle(sizes):
            chunk = x[t : t + size]
            stream.feed(chunk, [min(max(n - t, 0), len(chunk)) for n in lengths])
            t += size
            parts = stream.partial()
            assert all(p.committed.startswith(b) for p, b in zip(parts, before, strict=True))
            before = [part.committed for part in parts]
            if t >= T:
                break
            stream = pickle.loads(pickle.dumps(stream)) if len(sizes) > 1 else stream
        found = stream.result()
        same(found, expected)
        same(stream.result(), expected)  # which changes nothing
        for part, texts in zip(before, found.text, strict=True):
            assert part and all(f"{text} ".startswith(part) for text in texts)
        stream.reset(0)
        stream.feed(x.roll(1, 1), [5, 0])
        again = stream.result()
        assert again.text[1] == expected.text[1]
        assert again.text[0] == decoder(x[:5, 1], **given).text[0]
