"""The decoder of pyctcdecode, against the real one where it is installed."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.ngrams import SENTENCES, arpa, ngrams_of

import partita
from partita.integrations.pyctcdecode import build_ctcdecoder

ABSENT = "pyctcdecode or kenlm is not installed, so the enumeration of texts alone is compared with"
UNPRUNED: dict[str, Any] = {"token_min_logp": -30.0, "beam_prune_logp": -1e9}


@pytest.fixture
def theirs() -> Any:
    """Return the package, which warns of each alphabet."""
    logging.getLogger("pyctcdecode").setLevel(logging.ERROR)
    pytest.importorskip("kenlm", reason=ABSENT)
    return pytest.importorskip("pyctcdecode", reason=ABSENT)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Return the file of a model whose numbers are exact in fp32, in which kenlm adds."""
    ngrams = {
        gram: weights._replace(
            log_prob=round(64 * weights.log_prob) / 64,
            backoff=None if len(gram) == 3 else round(64 * (weights.backoff or 0)) / 64,
        )
        for gram, weights in ngrams_of(SENTENCES, 3).items()
    }
    path = tmp_path / "model.arpa"
    path.write_text(arpa(ngrams), encoding="utf-8")
    return str(path)


def drawn(T: int, labels: list[str], seed: int, scale: float = 1.5) -> Any:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(T, len(labels), generator=generator, dtype=torch.float64)
    if " " in labels:  # pyctcdecode scores an empty word after a text that ends in a space
        logits[-1, [labels.index(""), labels.index(" ")]] = -1000.0
    return logits.numpy()


@pytest.mark.parametrize(
    "labels", [["", "a", "b", " "], ["▁ab", "a", "", "▁a", "b", "▁b"]], ids=len
)
@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("hotwords", [None, ["ab"]])
def test_scores_are_those_of_pyctcdecode_without_its_pruning(
    theirs: Any, model: str, labels: list[str], with_model: bool, hotwords: list[str] | None
) -> None:
    path = model if with_model else None
    unigrams = partita.NgramLM.from_arpa(model).words if with_model else None
    other = theirs.build_ctcdecoder(labels, path, unigrams)
    decoder = build_ctcdecoder(labels, path)
    options = {**UNPRUNED, "hotwords": hotwords, "hotword_weight": 3.0}
    for seed in range(3):
        logits = drawn(4, labels, seed)
        expected = {beam[0]: beam for beam in other.decode_beams(logits, 5000, **options)}
        found = {beam[0]: beam for beam in decoder.decode_beams(logits, 256, **options)}
        assert len(set(found) & set(expected)) > 20
        for text in set(found) & set(expected) - {""}:  # nor does it score an empty text
            for i in (3, 4):
                assert abs(found[text][i] - expected[text][i]) <= 1e-9


@pytest.mark.parametrize("with_model", [False, True])
def test_peaky_utterances_score_at_least_as_high_as_theirs(
    theirs: Any, model: str, with_model: bool
) -> None:
    labels, path = ["", "a", "b", " "], model if with_model else None
    other = theirs.build_ctcdecoder(labels, path)
    decoder = build_ctcdecoder(labels, path)
    scores = []
    for seed in range(40):
        logits = drawn(60, labels, seed, scale=1.0)
        path_of = np.random.default_rng(seed).integers(4, size=20).repeat(3)
        logits[np.arange(60), path_of] += 5.0
        logits[-1] = drawn(1, labels, seed)[0]
        each = (x.decode_beams(logits, 16)[0][4] for x in (decoder, other))
        scores.append(list(each))
    ours, expected = torch.tensor(scores).unbind(1)
    losses = int((ours < expected - 1e-6).sum())
    print(f"mean score {ours.mean():.4f}, theirs {expected.mean():.4f}; lower in {losses} of 40")
    assert ours.mean() >= expected.mean() - 1e-6


def test_labels_and_inputs_are_theirs() -> None:
    words = build_ctcdecoder(["[PAD]", "he", "##llo", "[UNK]"])
    assert words.decoder.labels == ["", "▁he", "llo", "▁⁇▁"]
    characters = build_ctcdecoder(["_", "a", "|", "<unk>"])
    assert characters.decoder.labels == ["", "a", " ", "⁇"]
    assert build_ctcdecoder(["a", "b"]).decoder.labels == ["a", "b", ""]
    probabilities = torch.tensor([[0.1, 0.8, 0.05, 0.05], [0.2, 0.1, 0.6, 0.1]])
    for logits in (probabilities, probabilities.log().numpy(), probabilities.double().numpy()):
        (beam, *_) = characters.decode_beams(logits, 3)
        assert (beam[0], beam[2]) == ("a", [("a", (0, 1))])
    assert characters.decode_batch(None, []) == []
    assert characters.decode_batch(None, [probabilities, probabilities[:0]]) == ["a", ""]


def test_parameters_that_are_set_later() -> None:
    decoder = build_ctcdecoder(["a", " ", ""])
    decoder.reset_params(alpha=0.0, lm_score_boundary=False)
    found = decoder.decoder
    assert (found.alpha, found.beta, found.score_boundary) == (0.0, 1.5, False)


def test_errors() -> None:
    decoder = build_ctcdecoder(["a", ""])
    with raises(r"ValueError: logits: expected shape \[T, 2\], got \[3, 3\]"):
        decoder.decode(torch.zeros(3, 3))
    with raises("TypeError: expected the options of pyctcdecode, got 'lm_start_state'"):
        decoder.decode(torch.zeros(3, 2), lm_start_state=None)
