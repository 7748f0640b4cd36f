"""The kernels of `CTCDecoder` against the reference, under the interpreter and on a GPU."""

from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.ngrams import SENTENCES, model_of
from helpers.rows import kernel_devices
from torch import Tensor

import partita
from partita import CTCDecoder, NgramLM, PhraseBoost, Transcripts

LABELS = ["", "a", "b", " "]


@pytest.fixture(scope="module")
def model() -> NgramLM:
    return model_of(SENTENCES, 3)


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
@pytest.mark.parametrize("kind", ["bare", "model", "lexicon", "words", "tokens"])
def test_kernels_are_the_reference(model: NgramLM, options: int, kind: str, device: str) -> None:
    made: dict[str, Any] = {
        "bare": {},
        "model": {"language_model": model, "alpha": 0.7, "beta": 1.1, "unk_score_offset": -1.3},
        "lexicon": {"unigrams": ["ab", "b"], "unigrams_only": True, "language_model": model},
        "words": {"unigrams": ["ab", "b", "xy"], "unigrams_only": True},
        "tokens": {"language_model": model, "unit": "token"},
    }[kind]
    given = dict(OPTIONS[options], nbest=min(3, OPTIONS[options].get("beam_width", 3)))
    boost = [PhraseBoost([[1], [1, 3]], LABELS, [0.5, 2.0]), None, PhraseBoost(["b"], LABELS, 1.0)]
    x = drawn(14, 4, seed=options, N=3, scale=1 + options)
    if options % 2 == 0:
        given |= {"boost": boost}
    if kind == "tokens":
        given = {key: value for key, value in given.items() if "hotword" not in key}
    given["from_logits"] = True
    compared(CTCDecoder(LABELS, **made), x, [14, 9, 0], device, **given)


@pytest.mark.interpreted
@kernel_devices
def test_equal_scores_and_impossible_classes(model: NgramLM, device: str) -> None:
    """Of equal ranks the older text comes first, also where two extensions lead to one text."""
    decoder = CTCDecoder(LABELS, language_model=model, alpha=0.0, beta=0.0, unk_score_offset=0.0)
    x = drawn(9, 4, seed=3, N=3).round()
    x[:, 1] = 0.0
    x[3:5, 2] = -torch.inf
    x[6, 0, 1:3] = -torch.inf
    compared(decoder, x, [9, 9, 9], device, nbest=4, beam_width=7)
    compared(decoder, x[:, :2], [9, 9], device, nbest=4, beam_width=7, from_logits=True)


@pytest.mark.interpreted
@kernel_devices
def test_what_is_past_the_lengths_reaches_nothing(model: NgramLM, device: str) -> None:
    decoder, lengths = CTCDecoder(LABELS, language_model=model), [9, 0, 6, 4]
    x = drawn(10, 4, N=4)
    for n, length in enumerate(lengths):
        x[length:, n] = torch.nan
    for bad in (torch.nan, torch.inf):
        x[3, 2, 1] = bad
        found = compared(decoder, x, lengths, device, nbest=2, beam_width=4)
        assert found.hypotheses.scores[2].isnan().all()
        assert found.text[2] == ["", ""] and found.text[0][0]


@pytest.mark.interpreted
@kernel_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_strides_and_many_labels(model: NgramLM, dtype: torch.dtype, device: str) -> None:
    labels = [*"xyzab ", "-", *"cdefghi"]
    decoder = CTCDecoder(labels, blank=6, language_model=model)
    x = drawn(2, len(labels), N=6, seed=1).to(dtype).transpose(0, 1)
    compared(decoder, x, [6, 5], device, nbest=20, beam_width=20, from_logits=True)
    compared(decoder, x[:, :1], [6], device, beam_width=3, cutoff_top_n=5, token_min_logp=-3.0)


@pytest.mark.interpreted
@kernel_devices
def test_empty_sizes(model: NgramLM, device: str) -> None:
    compared(CTCDecoder([""]), torch.zeros(3, 1, 1), [3], device)
    decoder = CTCDecoder(LABELS, language_model=model)
    compared(decoder, torch.zeros(0, 2, 4), [0, 0], device, nbest=2)
    compared(decoder, torch.zeros(4, 0, 4), [], device)
    decoder.score_boundary = False
    compared(decoder, drawn(6, 4), [6], device, nbest=2)


def test_calls_that_no_kernel_serves() -> None:
    x, decoder, pieces = drawn(6, 4), CTCDecoder(LABELS), CTCDecoder(["", "a", "ab", " "])
    many = CTCDecoder(["", *map(chr, range(0x4E00, 0x4E80))])
    no_kernel = "RuntimeError: backend 'triton': CTCDecoder has no Triton kernel for "
    with partita.backend("triton"):
        with raises(no_kernel + "labels of several characters"):
            pieces(x)
        with raises(no_kernel + "more steps than max_open_steps"):
            decoder(x, max_open_steps=5)
        with raises(no_kernel + "a beam_width of 256 with 40 labels"):
            many(drawn(6, 129), beam_width=256)
        with raises(no_kernel + "streams"):
            decoder.stream()


@pytest.mark.gpu
def test_what_no_kernel_serves_runs_on_the_host(model: NgramLM) -> None:
    x, decoder = drawn(20, 4, N=2), CTCDecoder(LABELS, language_model=model)
    found = decoder(x.cuda(), max_open_steps=10)
    expected = decoder(x, max_open_steps=10)
    assert (found.text, found.words) == (expected.text, expected.words)
    assert torch.equal(found.hypotheses.scores.cpu(), expected.hypotheses.scores)
