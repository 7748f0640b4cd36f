"""Decoders by others, which search one sequence at a time on the host or a batch on a GPU.

Each takes `DecodeInputs` and returns what the library returns; `tokens_of` reads it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.decode.basecalls import Basecalls
from ..ops.decode.common import Hypotheses

FIRST_CHARACTER = 0x4E00  # of the text of classes; from here on there are 20,000 letters
BLANK_SCORE = 2.0  # of staying in a k-mer, which koi takes as one number
KOI_BASES = "NACGT"


class DecodeInputs(NamedTuple):
    """Scores of a batch, all of full length.

    Fields:
        scores: log-probabilities `[T, N, C]` with the blank 0, or scores of k-mers `[T, N, C, 5]`.
        beam_width: the number of prefixes that go on after each step.
    """

    scores: Tensor
    beam_width: int


Function = Callable[[DecodeInputs], Any]


def characters(classes: int) -> list[str]:
    """Return a letter for each class."""
    return [chr(FIRST_CHARACTER + c) for c in range(classes)]


def tokens_of(found: Any, sequences: Sequence[int]) -> list[list[int]]:
    """Return the tokens of some sequences in the result of a provider; bases count from 1."""
    if isinstance(found, Hypotheses):
        rows = zip(found.tokens[:, 0], found.lengths[:, 0], strict=True)
    elif isinstance(found, Basecalls):
        rows = zip(found.labels, found.lengths, strict=True)
    elif isinstance(found[0], str):
        return [[ord(letter) - FIRST_CHARACTER for letter in found[n]] for n in sequences]
    elif isinstance(found[0], Tensor):  # koi: letters [N, T], qualities and moves
        letters = [bytes(row[row != 0].tolist()).decode() for row in found[0].cpu()]
        return [[KOI_BASES.index(letter) for letter in letters[n]] for n in sequences]
    else:
        return [list(found[n][0].tokens) for n in sequences]
    each = list(rows)
    return [each[n][0][: int(each[n][1])].tolist() for n in sequences]


def prepared(prepare: Callable[[Tensor], Any], search: Callable[[Any, int], Any]) -> Function:
    """Return a decoder whose library takes other inputs, which are made one time and not timed."""
    last: list[Any] = [None, None]  # scores and what the library takes instead of them

    def decode(inputs: DecodeInputs) -> Any:
        if last[0] is not inputs.scores:
            last[:] = inputs.scores, prepare(inputs.scores)
        return search(last[1], inputs.beam_width)

    return decode


def _probabilities(log_probs: Tensor) -> list[Any]:
    return [each.contiguous().numpy() for each in log_probs.float().exp().unbind(1)]


def fast_ctc_decode_greedy() -> Function:
    library: Any = importlib.import_module("fast_ctc_decode")

    def search(sequences: list[Any], beam_width: int) -> list[str]:
        alphabet = characters(sequences[0].shape[1])
        return [library.viterbi_search(each, alphabet)[0] for each in sequences]

    return prepared(_probabilities, search)


def fast_ctc_decode_beam() -> Function:
    """Return its beam search without the cut-off, by which it leaves out labels."""
    library: Any = importlib.import_module("fast_ctc_decode")

    def search(sequences: list[Any], beam_width: int) -> list[str]:
        alphabet = characters(sequences[0].shape[1])
        return [library.beam_search(each, alphabet, beam_width, 0.0)[0] for each in sequences]

    return prepared(_probabilities, search)


def pyctcdecode_beam() -> Function:
    """Return its beam search without a language model, with the cut-offs that it has by default."""
    library: Any = importlib.import_module("pyctcdecode")

    def prepare(log_probs: Tensor) -> tuple[Any, list[Any]]:
        labels = ["", *characters(log_probs.shape[2])[1:]]
        arrays = [each.contiguous().numpy() for each in log_probs.float().unbind(1)]
        return library.build_ctcdecoder(labels), arrays

    def search(prepared_inputs: tuple[Any, list[Any]], beam_width: int) -> list[str]:
        decoder, sequences = prepared_inputs
        return [decoder.decode(each, beam_width=beam_width) for each in sequences]

    return prepared(prepare, search)


def torchaudio_beam() -> Function:
    """Return the CUDA decoder of torchaudio up to 2.8, without skipped steps."""
    library: Any = importlib.import_module("torchaudio.models.decoder")
    decoder = library.CUCTCDecoder

    def search(log_probs: Tensor, beam_width: int) -> Any:
        N, T, C = log_probs.shape
        lengths = torch.full((N,), T, dtype=torch.int32, device=log_probs.device)
        return decoder(characters(C), beam_size=beam_width, blank_skip_threshold=1.0)(
            log_probs, lengths
        )

    return prepared(lambda scores: scores.float().transpose(0, 1).contiguous(), search)


def koi_beam() -> Function:
    """Return koi's beam search over k-mers as bonito calls it, in fp16."""
    library: Any = importlib.import_module("koi.decode")

    def prepare(scores: Tensor) -> Tensor:
        return scores[..., 1:].transpose(0, 1).flatten(2).half().contiguous()

    def search(scores: Tensor, beam_width: int) -> Any:
        return library.beam_search(
            scores,
            beam_width=beam_width,
            beam_cut=100.0,
            scale=1.0,
            offset=0.0,
            blank_score=BLANK_SCORE,
        )

    return prepared(prepare, search)


def partita(method: str) -> Callable[[], Function]:
    """Return how to get Partita's decoder: `greedy` or `beam` of CTC, `viterbi` or `crf_beam`."""

    def import_op() -> Function:
        library: Any = importlib.import_module("partita")
        if method == "greedy":
            return lambda inputs: library.ctc_greedy_search(inputs.scores)
        if method == "beam":
            return lambda inputs: library.ctc_beam_search(
                inputs.scores, beam_width=inputs.beam_width
            )
        return lambda inputs: library.ctc_crf_decode(
            inputs.scores,
            state_len=kmer_length(inputs.scores.shape[2]),
            alphabet_size=inputs.scores.shape[3],
            method=method.removeprefix("crf_"),
            beam_width=inputs.beam_width,
        )

    return import_op


def kmer_length(states: int) -> int:
    """Return the number of bases of a k-mer, of which there are 4^k."""
    return (states.bit_length() - 1) // 2


def runs_on_the_host(inputs: Any) -> str | None:
    """Return why a decoder on the host cannot be timed with these inputs, or None."""
    return "runs on the host" if inputs.scores.is_cuda else None


def on_a_gpu(others: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """Return why a decoder on a GPU cannot take the inputs of a case; `others` is for other ops."""

    def beyond(inputs: Any) -> str | None:
        if not isinstance(inputs, DecodeInputs):
            return others(inputs)
        return None if inputs.scores.is_cuda else "needs a GPU"

    return beyond


PARTITA_OPS = {
    "ctc_greedy": partita("greedy"),
    "ctc_beam": partita("beam"),
    "ctc_crf_viterbi": partita("viterbi"),
    "ctc_crf_beam": partita("crf_beam"),
}
