"""CTC to text, against an enumeration of all paths, the reference, and pyctcdecode."""

import itertools
import math
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from helpers.decode import enumerate_prefixes
from helpers.errors import raises
from helpers.ngrams import SENTENCES, model_of
from torch import Tensor

import partita
from partita import CTCDecoder, NgramLM, PhraseBoost, Transcripts

LABELS = ["", "a", "b", " "]
PIECES = ["▁", "a", "", "▁a", "ab", "▁b"]  # several label sequences spell one text
EVERYTHING = {"beam_width": 256, "cutoff_top_n": None}
BACKENDS = ["reference", "numba"]


@pytest.fixture(scope="module")
def model() -> NgramLM:
    return model_of(SENTENCES, 3)


def drawn(T: int, C: int, seed: int = 0, N: int = 1, scale: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, N, C, generator=generator, dtype=torch.float64)
    return (scale * logits).log_softmax(-1)


def texts_of_paths(log_probs: Tensor, labels: list[str], blank: int) -> dict[str, float]:
    """Return the log-probability of each text, by all paths through `[T, C]`."""
    found: dict[str, float] = defaultdict(float)
    for tokens, log_prob in enumerate_prefixes(log_probs, blank).items():
        text = "".join(labels[c] for c in tokens).replace("▁", " ")
        found[" ".join(text.split())] += math.exp(log_prob)
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
    sequences = enumerate_prefixes(x[:, 0], 0)
    spaced = {" ".join(labels[c] for c in tokens): p for tokens, p in sequences.items()}
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


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_past_the_lengths_reaches_nothing(model: NgramLM, name: str) -> None:
    x, decoder = drawn(30, 4, N=3), CTCDecoder(LABELS, language_model=model)
    with partita.backend(name):
        expected = decoder(x[:20], [20, 0, 11], nbest=2)
        poisoned = x.clone()
        for n, length in enumerate([20, 0, 11]):
            poisoned[length:, n] = torch.nan
        found = decoder(poisoned, torch.tensor([20, 0, 11]), nbest=2)
        assert (found.text, found.words) == (expected.text, expected.words)
        assert torch.equal(found.lm_scores, expected.lm_scores)
        alone = decoder(x[:11, 2], nbest=2)  # neither does another sequence
        assert alone.text[0] == expected.text[2]
        assert torch.equal(alone.hypotheses.scores[0], expected.hypotheses.scores[2])
        assert found.text[1] == ["", ""]
        assert found.hypotheses.scores[1].tolist() == [0.0, -math.inf]
        assert float(found.lm_scores[1, 0]) == pytest.approx(0.5 * float(model.score("")))
        poisoned[5, 0] = math.inf
        found = decoder(poisoned, [20, 0, 11], nbest=2)
        assert found.text[0] == ["", ""] and found.hypotheses.scores[0].isnan().all()
        assert found.text[2] == expected.text[2]


@pytest.mark.parametrize("name", BACKENDS)
def test_empty_sizes_and_impossible_steps(name: str) -> None:
    decoder = CTCDecoder(["", "a", " "])
    with partita.backend(name):
        assert CTCDecoder([""])(torch.zeros(3, 1)).hypotheses.scores.tolist() == [[0.0]]
        assert decoder(torch.zeros(0, 2, 3)).text == [[""], [""]]
        assert decoder(torch.zeros(4, 0, 3)).hypotheses.tokens.shape == (0, 1, 4)
        found = decoder(torch.full((3, 1, 3), -math.inf), nbest=2)
        assert found.text == [["", ""]]
        assert found.hypotheses.scores.tolist() == [[-math.inf, -math.inf]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_strides_and_logits(model: NgramLM, dtype: torch.dtype) -> None:
    decoder = CTCDecoder(LABELS, language_model=model)
    x = drawn(40, 4, N=2).to(dtype)
    expected = decoder(x.double(), from_logits=True)
    same(decoder(x, from_logits=True), expected, atol=1e-9)
    same(decoder(x.transpose(0, 1).contiguous().transpose(0, 1), from_logits=True), expected, 1e-9)
    assert decoder(x[:, 0], from_logits=True).text[0] == expected.text[0]


def test_weights_can_be_set(model: NgramLM) -> None:
    x, decoder = drawn(12, 4), CTCDecoder(LABELS, language_model=model)
    before = decoder(x)
    decoder.alpha, decoder.beta = 0.0, -3.0
    words = len(decoder(x).words[0][0])
    assert words < len(before.words[0][0])
    assert float(decoder(x).lm_scores) == -3.0 * words


def test_the_boundary_of_sentences_can_be_set(model: NgramLM) -> None:
    x, decoder = drawn(12, 4), CTCDecoder(LABELS, language_model=model)
    decoder(x)
    decoder.score_boundary = False
    fresh = CTCDecoder(LABELS, language_model=model, score_boundary=False)
    same(decoder(x), fresh(x), 0.0)


@pytest.mark.parametrize("phrases", [["b"], ["b", "bb"]])
def test_a_phrase_of_one_symbol_counts(phrases: list[str]) -> None:
    x = torch.tensor([[[0.1, 0.5, 0.3, 0.1]]]).log()
    decoder = CTCDecoder(["", "a", "b", " "])
    boost = PhraseBoost(phrases, decoder.labels, 5.0)
    found = decoder(x, boost=boost)
    assert found.text == [["b"]]
    assert found.lm_scores.tolist() == [[5.0]]
    with partita.backend("reference"):
        same(found, decoder(x, boost=boost), 1e-9)


@pytest.mark.parametrize("length", [-3, 10**11])
def test_a_stream_survives_an_invalid_length(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
    stream = CTCDecoder(LABELS).stream(2)
    x = drawn(6, 4, N=2)
    stream.feed(x, [length, 6])
    found = stream.result()
    assert found.hypotheses.scores[0].isnan().all()
    assert found.text[1] == CTCDecoder(LABELS)(x).text[1]


class Uniform:
    """A language model that knows two words, which are equally probable after anything."""

    def __init__(self, words: tuple[str, ...] = ("<unk>", "a", "b")) -> None:
        self.words = words

    def start(self, B: int, bos: bool = True) -> Tensor:
        return torch.zeros(B, dtype=torch.int64)

    def advance(self, states: Tensor) -> tuple[Tensor, Tensor]:
        shape = len(states), 3
        return torch.full(shape, -2.0), torch.zeros(shape, dtype=torch.int64)

    def final(self, states: Tensor) -> Tensor:
        return torch.full((len(states),), -1.0)


def test_a_model_of_ones_own_is_served_by_the_reference() -> None:
    x, decoder = drawn(5, 4), CTCDecoder(LABELS, language_model=Uniform(), beta=0.0)
    found = decoder(x, nbest=5)
    for words, score in zip(found.words[0], found.lm_scores[0].tolist(), strict=True):
        unknown = sum(word not in ("a", "b") for word, *_ in words)
        expected = 0.5 * (-2 * len(words) - 10 * math.log(10) * unknown - 1)
        assert score == pytest.approx(expected)
    with partita.backend("numba"), raises("RuntimeError: backend 'numba': expected an NgramLM"):
        decoder(x)
    with partita.backend("triton"), raises("RuntimeError: backend 'triton': CTCDecoder has no"):
        decoder(x)


def test_a_long_stream_takes_the_same_memory(model: NgramLM) -> None:
    def memory() -> tuple[int, int]:
        (search,) = stream._search.searches
        arrays = sum(x.nbytes for name, x in search._asdict().items() if name != "written")
        return arrays, len(pickle.dumps(stream._search)) - 24 * int(search.counts[5])

    # Ambiguous steps: the beam holds many texts that differ early.
    x, decoder = drawn(400, 4, scale=0.7), CTCDecoder(LABELS, language_model=model)
    stream = decoder.stream(max_open_steps=100)
    stream.feed(x)
    held, pickled = memory()
    for _ in range(10):
        stream.feed(x)
    (part,) = stream.partial()
    assert memory()[0] == held and memory()[1] < 3 * pickled
    assert len(part.committed) > 10 * len(part.open)
    text = stream.result().text[0][0]
    assert text.startswith(part.committed.strip())


@pytest.mark.gpu
def test_scores_on_a_gpu(model: NgramLM) -> None:
    x, decoder = drawn(60, 4, N=2).cuda(), CTCDecoder(LABELS, language_model=model)
    found, expected = decoder(x, [60, 40], nbest=2), decoder(x.cpu(), [60, 40], nbest=2)
    assert all(each.is_cuda for each in (found.lm_scores, *found.hypotheses))
    cpu = partita.Hypotheses(*(each.cpu() for each in found.hypotheses))
    same(found._replace(hypotheses=cpu, lm_scores=found.lm_scores.cpu()), expected, 1e-9)
    assert decoder.language_model is model and model.device.type == "cpu"


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"labels": "abc"}, "TypeError: labels: expected a sequence of strings, got str"),
    ({"labels": []}, "ValueError: labels: expected at least one"),
    ({"labels": ["", "a", "a"]}, r"ValueError: labels\[2\]: expected different labels, got 'a'"),
    ({"labels": ["-", ""]}, r"ValueError: labels\[1\]: expected a text"),
    ({"labels": ["-", 1]}, r"TypeError: labels\[1\]: expected a string, got int"),
    ({"unit": "letter"}, "ValueError: unit: expected one of 'word', 'token', got 'letter'"),
    ({"unigrams": ["a"]}, "ValueError: unigrams: expected unit="),
    ({"unigrams": "a", "unigrams_only": True}, "TypeError: unigrams: expected words, got one"),
    ({"unigrams_only": True}, "ValueError: unigrams_only: expected unigrams or a language model"),
    ({"language_model": "x.arpa"}, "TypeError: language_model: expected an object .* got str"),
    (
        {"language_model": Uniform(words=("<unk>", "a", "b", "c"))},
        "ValueError: language_model: .* each of the 4 words, got 3",
    ),
    (
        {"language_model": Uniform(), "unit": "token"},
        "ValueError: language_model: .* each of the 4 labels, got 3",
    ),
    (
        {"language_model": Uniform(words=("a", "b"))},
        "ValueError: language_model: expected `words`, one of them <unk>",
    ),
]


@pytest.mark.parametrize(("given", "error"), ERRORS)
def test_errors_of_a_decoder(given: dict[str, Any], error: str) -> None:
    with raises(error):
        CTCDecoder(**{"labels": LABELS, **given})


CALLS: list[tuple[dict[str, Any], str]] = [
    ({"beam_width": 0}, "ValueError: beam_width: expected 1 to 256, got 0"),
    ({"nbest": 17}, "ValueError: nbest: expected 1 to 16, got 17"),
    ({"cutoff_top_n": 0}, "ValueError: cutoff_top_n: expected a number from 1 on, got 0"),
    ({"token_min_logp": 1.0}, "ValueError: token_min_logp: expected a number"),
    ({"blank_skip_threshold": 0.0}, "ValueError: blank_skip_threshold: expected a number above"),
    ({"max_open_steps": None}, "TypeError: max_open_steps: expected an int, got NoneType"),
    ({"input_lengths": [6]}, "ValueError: input_lengths: expected"),
    ({"hotwords": "ab"}, "TypeError: hotwords: expected words, got one string"),
    ({"hotwords": {"ab": 2.0}}, "TypeError: hotwords: expected words, got dict"),
    ({"hotwords": [1]}, r"TypeError: hotwords\[0\]: expected a string, got int"),
    ({"boost": [None, None]}, "ValueError: boost: expected 1 of them, got 2"),
    ({"boost": "ab"}, "TypeError: boost: expected PhraseBoosts, got str"),
    ({"boost": ["ab"]}, "TypeError: boost: expected a PhraseBoost, got str"),
    (
        {"boost": PhraseBoost(["a"], ["a"], 1.0)},
        "ValueError: boost: expected phrases over 4 labels, got 1",
    ),
]


@pytest.mark.parametrize(("given", "error"), CALLS)
def test_errors_of_a_call(given: dict[str, Any], error: str) -> None:
    with raises(error):
        CTCDecoder(LABELS)(drawn(5, 4), **given)


def test_errors_of_steps_and_streams() -> None:
    decoder = CTCDecoder(LABELS)
    with raises(r"ValueError: log_probs: expected shape \[T, 1, 4\], got \[5, 3\]"):
        decoder(torch.zeros(5, 3))
    with raises("TypeError: log_probs"):
        decoder(torch.zeros(5, 4, dtype=torch.int64))
    with raises(r"ValueError: log_probs: expected shape \[T, 2, 4\], got \[5, 4\]"):
        decoder.stream(2).feed(torch.zeros(5, 4))
    with raises("IndexError: n: expected"):
        decoder.stream(2).reset(2)
    with raises("TypeError: stream: got an unexpected keyword 'width'"):
        decoder.stream(width=3)
    tokens = CTCDecoder(LABELS, unit="token")
    with raises("ValueError: hotwords: expected unit="):
        tokens(drawn(5, 4), hotwords=["ab"])
    decoder.alpha = math.nan
    with raises("ValueError: alpha: expected a number"):
        decoder(drawn(5, 4))
