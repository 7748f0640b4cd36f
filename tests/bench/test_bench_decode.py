"""The benchmark of decoding: verdicts, sizes, and the calls of the peers."""

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bench import inputs_of, note_of_wrong, run, run_as, stand_in

import partita
from partita.bench import decode
from partita.bench.providers import PARTITA
from partita.integrations.pyctcdecode import build_ctcdecoder

BEAM = decode.Beam("ctc_beam", torch.float32, 12, 2, 5, 4)
MODEL = decode.Text("ctc_decoder_lm", torch.float32, 60, 3, 8, 8, 20)
BOOST = decode.Text("ctc_decoder_boost", torch.float32, 60, 3, 8, 8, 20)
CRF_BEAM = decode.CrfCase("ctc_crf_beam", torch.float32, 12, 2, 16, 4)
STITCH = decode.StitchCase("ctc_crf_stitch", torch.float32, 24, 9, 3)


def test_reads_of_a_batch_are_compared_with_each_read() -> None:
    inputs = inputs_of(STITCH)
    assert inputs.chunks == [3, 3, 1, 1, 1] and inputs.overlap == 3
    (row,) = run([STITCH], PARTITA)
    assert row.timing and row.error == 0

    def off(inputs: decode.StitchInputs) -> partita.Basecalls:
        found = partita.stitch(inputs.calls, inputs.overlap, chunks=inputs.chunks)
        found.steps[0, -1] += 1
        return found

    assert note_of_wrong(STITCH, off, "partita").startswith("wrong: 1")


def test_tokens_that_are_less_probable_are_found() -> None:
    """Ours must not lose anything; of others the loss is shown beside the time."""

    def shorter(inputs: decode.DecodeInputs) -> partita.Hypotheses:
        found = partita.ctc_beam_search(inputs.scores, beam_width=4)
        return found._replace(lengths=found.lengths - 1)

    assert "nats" in note_of_wrong(BEAM, shorter, "partita")
    (row,) = run_as("fast-ctc-decode", BEAM, shorter)
    assert row.timing is not None and row.error > 0.01


@pytest.mark.parametrize("case", [MODEL, BOOST], ids=lambda case: case.op)
def test_texts_are_judged_with_model_and_boost(case: decode.Text) -> None:
    """What a text adds is that of the decoder, and a word less is seen."""
    inputs = inputs_of(case)
    with_model = case is MODEL
    boost = partita.PhraseBoost([f" {word} " for word in inputs.boosted], inputs.labels, 5.0)
    decoder = partita.CTCDecoder(inputs.labels, language_model=inputs.model if with_model else None)
    found = decoder(inputs.scores, boost=None if with_model else boost)
    tokens = decode.tokens_of([text for text, *_ in found.text], range(3))
    ctc = decode.Beam.log_probs(case, inputs, tokens)
    added = case.log_probs(inputs, tokens) - ctc
    torch.testing.assert_close(added.double(), found.lm_scores[:, 0], rtol=1e-5, atol=1e-5)
    assert (added != 0).any()

    def shorter(inputs: decode.TextInputs) -> list[str]:
        return [text.rpartition(" ")[0] for text in PARTITA.ops[case.op]()(inputs)]

    assert "nats" in note_of_wrong(case, shorter, "partita")


def test_pyctcdecode_gets_the_model_or_hotwords(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in has its arguments."""
    stand_in(monkeypatch, "pyctcdecode", build_ctcdecoder=build_ctcdecoder)
    for case in (MODEL, BOOST):
        inputs = inputs_of(case)
        found = decode.pyctcdecode_text(case is MODEL)(inputs)
        assert found == PARTITA.ops[case.op]()(inputs)
    monkeypatch.setitem(sys.modules, "kenlm", None)
    assert decode.needs_kenlm(inputs) == "needs kenlm"


def test_flashlight_text_gets_a_lexicon_and_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in reads log-probabilities where they lie, and spells the words of the lexicon."""

    class Dictionary(list[str]):
        get_index, get_entry = list.index, list.__getitem__

    class KenLM:
        def __init__(self, path: str, words: Dictionary) -> None:
            self.model, self.words = partita.NgramLM.from_arpa(path), words

        def start(self, is_empty: bool) -> int:
            return 0

        def score(self, state: int, word: int) -> tuple[int, float]:
            return state, float(self.model.score(self.words[word], eos=False)) / decode.LN10

    class Trie:
        def __init__(self, children: int, root: int) -> None:
            self.words: dict[int, list[int]] = {}

        def insert(self, spelling: list[int], word: int, score: float) -> None:
            assert spelling[-1] == decode.SPACE and score < 0
            self.words[word] = spelling[:-1]

        def smear(self, mode: str) -> None:
            assert mode == "max"

    class LexiconDecoder:
        def __init__(self, options: Any, trie: Trie, lm: KenLM, *rest: Any) -> None:
            assert rest == (decode.SPACE, 0, lm.words.index("<unk>"), [], False)
            self.lm, self.options = lm, options
            self.labels = ["", " ", *decode.characters(8)[2:]]
            for word, spelling in trie.words.items():
                assert "".join(self.labels[c] for c in spelling) == lm.words[word]

        def decode(self, address: int, T: int, C: int) -> list[Any]:
            x = np.ctypeslib.as_array((ctypes.c_float * (T * C)).from_address(address))
            decoder = partita.CTCDecoder(
                self.labels,
                language_model=self.lm.model,
                unigrams_only=True,
                alpha=self.options.lm_weight / decode.LN10,
                beta=self.options.word_score,
            )
            found = decoder(torch.from_numpy(x.reshape(T, C)), beam_width=self.options.beam_size)
            words = [self.lm.words.index(word) for word in found.text[0][0].split()]
            return [SimpleNamespace(words=[-1, *words])]

    names = SimpleNamespace(CTC="ctc"), SimpleNamespace(MAX="max")
    members = {"LexiconDecoder": LexiconDecoder, "LexiconDecoderOptions": SimpleNamespace}
    members |= {"CriterionType": names[0], "SmearingMode": names[1], "Trie": Trie}
    stand_in(monkeypatch, "flashlight.lib.text.decoder", **members)
    stand_in(monkeypatch, "flashlight.lib.text.decoder.kenlm", KenLM=KenLM)
    stand_in(monkeypatch, "flashlight.lib.text.dictionary", Dictionary=Dictionary)
    inputs = inputs_of(MODEL)
    assert decode.flashlight_text()(inputs) == PARTITA.ops["ctc_decoder_lm"]()(inputs)


def found_by_ours(inputs: decode.DecodeInputs) -> list[list[int]]:
    return decode.tokens_of(PARTITA.ops["ctc_beam"]()(inputs), range(2))


def stand_in_text(probabilities: np.ndarray, alphabet: list[str], width: int) -> str:
    x = torch.from_numpy(probabilities)
    found = partita.ctc_beam_search(x, beam_width=width)
    return "".join(alphabet[c] for c in found.tokens[0, 0, : int(found.lengths[0, 0])])


def test_fast_ctc_decode_gets_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in takes arrays of probabilities, as fast_ctc_decode does."""

    def beam_search(x: np.ndarray, alphabet: list[str], width: int, cut: float) -> Any:
        assert x.dtype == np.float32 and x.flags.c_contiguous and cut == 0.0
        np.testing.assert_allclose(x.sum(1), 1.0, rtol=1e-5)
        return stand_in_text(np.log(x), alphabet, width), []

    def viterbi_search(x: np.ndarray, alphabet: list[str]) -> Any:
        found = partita.ctc_greedy_search(torch.from_numpy(x).log())
        return "".join(alphabet[c] for c in found.tokens[0, 0, : int(found.lengths[0, 0])]), []

    members = {"beam_search": beam_search, "viterbi_search": viterbi_search}
    stand_in(monkeypatch, "fast_ctc_decode", **members)
    inputs = inputs_of(BEAM)
    found = decode.fast_ctc_decode("beam_search", 0.0)(inputs)
    assert decode.tokens_of(found, [1]) == [found_by_ours(inputs)[1]]
    greedy, found = (
        decode.tokens_of(search(inputs), range(2))
        for search in (PARTITA.ops["ctc_greedy"](), decode.fast_ctc_decode("viterbi_search"))
    )
    assert found == greedy


def test_pyctcdecode_gets_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    class Decoder:
        def __init__(self, labels: list[str]) -> None:
            assert labels[0] == ""
            self.labels = labels

        def decode(self, x: np.ndarray, beam_width: int) -> str:
            return stand_in_text(x, self.labels, beam_width)

    stand_in(monkeypatch, "pyctcdecode", build_ctcdecoder=Decoder)
    inputs = inputs_of(BEAM)
    found = decode.pyctcdecode_beam()(inputs)
    assert decode.tokens_of(found, range(2)) == found_by_ours(inputs)


def test_koi_gets_moves_without_the_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    def beam_search(x: torch.Tensor, beam_width: int, blank_score: float, **other: float) -> Any:
        assert x.dtype == torch.float16 and x.is_contiguous() and x.shape == (2, 12, 16 * 4)
        moves = x.float().unflatten(2, (16, 4)).transpose(0, 1)
        scores = torch.nn.functional.pad(moves, (1, 0), value=blank_score)
        calls = partita.ctc_crf_decode(
            scores, state_len=2, alphabet_size=5, method="beam", beam_width=beam_width
        )
        letters = torch.tensor([0, *b"ACGT"], dtype=torch.uint8)[calls.labels]
        return letters, letters, calls.moves

    stand_in(monkeypatch, "koi.decode", beam_search=beam_search)
    inputs = inputs_of(CRF_BEAM)
    rounded = inputs._replace(scores=inputs.scores.half().float())
    expected = decode.tokens_of(PARTITA.ops["ctc_crf_beam"]()(rounded), range(2))
    assert decode.tokens_of(decode.koi_beam()(inputs), range(2)) == expected
