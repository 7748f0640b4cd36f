"""The kernels of `CTCDecoder` against the reference, under the interpreter and on a GPU."""

from typing import Any

import pytest
import torch
from helpers.ngrams import arpa, ngrams_of
from helpers.rows import kernel_devices
from torch import Tensor

import partita
from partita import CTCDecoder, NgramLM, PhraseBoost, Transcripts

LABELS = ["", "a", "b", " "]
SENTENCES = [text.split() for text in ("a ab b", "b a", "ab ab a", "b b ab", "a", "bab b a")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> NgramLM:
    path = tmp_path_factory.mktemp("model") / "model.arpa"
    path.write_text(arpa(ngrams_of(SENTENCES, 3)), encoding="utf-8")
    return NgramLM.from_arpa(path)


def drawn(T: int, C: int, seed: int = 0, N: int = 1, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(T, N, C, generator=generator, dtype=torch.float64)


def compared(
    decoder: CTCDecoder, x: Tensor, lengths: list[int], device: str, **given: Any
) -> Transcripts:
    """Decode with the kernels, and expect what the reference finds."""
    with partita.backend("reference"):
        expected = decoder(x, lengths, **given)
    with partita.backend("triton"):
        found = decoder(x.to(device), lengths, **given)
    assert (found.text, found.words) == (expected.text, expected.words)
    tensors = [(each.lm_scores, *each.hypotheses) for each in (found, expected)]
    for a, b in zip(*tensors, strict=True):
        assert a.device.type == device
        torch.testing.assert_close(a.cpu(), b, rtol=0.0, atol=1e-9, equal_nan=True)
    return found


OPTIONS: list[dict[str, Any]] = [
    {},
    {"beam_width": 3, "hotwords": ["ab a", "ba", "b"], "hotword_weight": 2.0},
    {"beam_width": 5, "cutoff_top_n": 2, "token_min_logp": -2.0},
    {"beam_width": 5, "blank_skip_threshold": 0.5},
    {"beam_width": 1, "token_min_logp": -0.1},
]


@pytest.mark.interpreted
@kernel_devices
@pytest.mark.parametrize("options", range(len(OPTIONS)))
@pytest.mark.parametrize("kind", ["bare", "model", "lexicon", "words"])
def test_kernels_are_the_reference(model: NgramLM, options: int, kind: str, device: str) -> None:
    made: dict[str, Any] = {
        "bare": {},
        "model": {"language_model": model, "alpha": 0.7, "beta": 1.1, "unk_score_offset": -1.3},
        "lexicon": {"unigrams": ["ab", "b"], "unigrams_only": True, "language_model": model},
        "words": {"unigrams": ["ab", "b", "xy"], "unigrams_only": True},
    }[kind]
    given = dict(OPTIONS[options], nbest=min(3, OPTIONS[options].get("beam_width", 3)))
    boost = [PhraseBoost([[1], [1, 3]], LABELS, [0.5, 2.0]), None, PhraseBoost(["b"], LABELS, 1.0)]
    x = drawn(14, 4, seed=options, N=3, scale=1 + options)
    if options % 2 == 0:
        given |= {"boost": boost}
    given["from_logits"] = True
    compared(CTCDecoder(LABELS, **made), x, [14, 9, 0], device, **given)
