"""The benchmark of decoding: verdicts, sizes, and the calls of the peers."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.bench import CPU, run, run_as, stand_in

import partita
from partita.bench import decode
from partita.bench.case import Buffers
from partita.bench.providers import PARTITA

GREEDY = decode.Greedy("ctc_greedy", torch.float32, 12, 2, 5, 4)
BEAM = decode.Beam("ctc_beam", torch.float32, 12, 2, 5, 4)
VITERBI = decode.CrfCase("ctc_crf_viterbi", torch.float32, 12, 2, 16, 4)
CRF_BEAM = decode.CrfCase("ctc_crf_beam", torch.float32, 12, 2, 16, 4)


STITCH = decode.StitchCase("ctc_crf_stitch", torch.float32, 24, 9, 3)


def test_reads_of_a_batch_are_compared_with_each_read() -> None:
    inputs = STITCH.inputs(Buffers(CPU.device))
    assert inputs.chunks == [3, 3, 1, 1, 1] and inputs.overlap == 3
    (row,) = run([STITCH], PARTITA)
    assert row.timing and row.error == 0

    def off(inputs: decode.StitchInputs) -> partita.Basecalls:
        found = partita.stitch(inputs.calls, inputs.overlap, chunks=inputs.chunks)
        found.steps[0, -1] += 1
        return found

    (row,) = run_as("partita", STITCH, off)
    assert row.timing is None and row.note.startswith("wrong: 1")


def test_ours_loses_nothing() -> None:
    rows = run([GREEDY, BEAM, VITERBI, CRF_BEAM], PARTITA)
    assert all(row.timing and row.error <= 1e-9 for row in rows) and len(rows) == 4


def test_tokens_that_are_less_probable_are_found() -> None:
    """Ours must not lose anything; of others the loss is shown beside the time."""

    def shorter(inputs: decode.DecodeInputs) -> partita.Hypotheses:
        found = partita.ctc_beam_search(inputs.scores, beam_width=4)
        return found._replace(lengths=found.lengths - 1)

    (row,) = run_as("partita", BEAM, shorter)
    assert row.timing is None and "nats" in row.note
    (row,) = run_as("fast-ctc-decode", BEAM, shorter)
    assert row.timing is not None and row.error > 0.01


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
    inputs = BEAM.inputs(Buffers(CPU.device))
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
    inputs = BEAM.inputs(Buffers(CPU.device))
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
    inputs = CRF_BEAM.inputs(Buffers(CPU.device))
    rounded = inputs._replace(scores=inputs.scores.half().float())
    expected = decode.tokens_of(PARTITA.ops["ctc_crf_beam"]()(rounded), range(2))
    assert decode.tokens_of(decode.koi_beam()(inputs), range(2)) == expected
