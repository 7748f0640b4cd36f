"""Decoding: greedy and beam search of CTC, the best path and beam search over k-mers, and search to
text with a language model or with boosted words.

The error is the number of nats that the tokens found lose against those of the reference in fp64,
summed over all alignments; below 0 they are more probable. Texts are compared with the ones that
were written into the scores, and with what model and boost add. Decoders of others search one
sequence at a time on the host or a batch on a GPU. The chunks of a batch of reads are joined too,
which is compared with one read after another.
"""

from __future__ import annotations

import importlib.util
import math
import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.ctc_crf.api import ctc_crf_loss
from ..ops.decode.api import ctc_beam_search, ctc_crf_decode, ctc_greedy_search
from ..ops.decode.basecalls import Basecalls
from ..ops.decode.common import Hypotheses
from ..ops.decode.ctc_decoder import CTCDecoder
from ..ops.decode.language_model import NgramLM
from ..ops.decode.phrase_boost import PhraseBoost
from ..ops.decode.stitch import stitch
from ..runtime.backend import backend
from .case import (
    Attempt,
    Buffers,
    Functions,
    Limited,
    Sizes,
    Verdict,
    cases_of,
    given,
    load,
    needs_gpu,
)
from .chain import BASES
from .language_model import LN10, drawn_ngrams, inner_grams, write_model
from .paths import READ, SequencesCase, worst

SEQUENCES_JUDGED = 2  # the reference is a loop in Python
ALLOWED = 1e-4  # nats that may be lost to a rounding that decides between prefixes
FIRST_CHARACTER = 0x4E00  # of the text of classes; from here on there are 20,000 letters
SPACE = 1  # the class between words, in the text of which it is one too
ALPHA, BETA, UNKNOWN = 0.5, 1.5, -10.0  # the defaults of pyctcdecode
PEAK = 7.0  # what the right class of a step has before the noise, so that it is found
PHRASES, WEIGHT = 20, 5.0  # that are boosted, of one word each
BLANK_SCORE = 2.0  # of staying in a k-mer, which koi takes as one number
KOI_BASES = "NACGT"

# Steps, sequences, classes or k-mers, and the width of the beam.
QUICK, CRF_QUICK = [(30, 2, 5, 4)], [(20, 2, 16, 4)]
GREEDY_SIZES = Sizes(
    [(150, 128, 5000, 1), (1000, 64, 5, 1)],
    [(150, 128, 5000, 1)],
    [(1000, 1, 5, 1)],
    QUICK,
)
BEAM_SIZES = Sizes(
    [(1000, 64, 5, 16), (500, 32, 32, 16), (150, 128, 5000, 16)],
    [(1000, 64, 5, 16)],
    [(1000, 1, 5, 5), (1000, 1, 5, 32), (500, 1, 32, 16)],
    QUICK,
)
TEXT_SIZES = Sizes([(500, 64, 31, 16)], [(500, 64, 31, 16)], [(500, 1, 31, 16)], QUICK)
# And the words of the language model.
MODEL_SIZES = Sizes(
    [(500, 64, 31, 16, 10_000)],
    [(500, 64, 31, 16, 10_000)],
    [(500, 1, 31, 16, 3_000)],
    [(30, 2, 8, 4, 20)],
)
CRF_SIZES = Sizes([(2000, 64, 1024, 32)], [(2000, 64, 1024, 32)], [(400, 2, 256, 32)], CRF_QUICK)


# Steps, chunks, and chunks of a read; the other reads have one.
STITCH_SIZES = Sizes([(1000, 1024, 16)], [(1000, 1024, 16)], [(1000, 64, 16)], [(40, 6, 3)])
STITCHED_STATES = 16


class DecodeInputs(NamedTuple):
    """Scores of a batch, all of full length."""

    scores: Tensor  # log-probabilities [T, N, C] with the blank 0, or of k-mers [T, N, C, 5]
    beam_width: int  # the number of prefixes that go on after each step


class TextInputs(NamedTuple):
    """Scores of utterances with spaces between words, a model of these, and phrases to boost."""

    scores: Tensor  # log-probabilities [T, N, C]
    beam_width: int
    labels: list[str]  # [C], the blank, the space and letters
    words: list[str]
    model: NgramLM
    boosted: list[str]  # words
    tokens: list[list[int]]  # of each utterance
    folder: Any  # the temporary folder of the model's file, which lives as long as the inputs
    path: Path


Decoder = Callable[[Any], Any]  # returns what its library does; `tokens_of` reads it


class StitchInputs(NamedTuple):
    """The called bases of chunks, and the number of chunks of each read."""

    calls: Basecalls
    overlap: int
    chunks: list[int]


def characters(classes: int) -> list[str]:
    """Return a letter for each class."""
    return [chr(FIRST_CHARACTER + c) for c in range(classes)]


def tokens_of(found: Any, sequences: Sequence[int]) -> list[list[int]]:
    """Return the tokens of some sequences in the result of a provider; bases count from 1."""

    def token(letter: str) -> int:
        return SPACE if letter == " " else ord(letter) - FIRST_CHARACTER

    if isinstance(found, Hypotheses):
        rows = zip(found.tokens[:, 0], found.lengths[:, 0], strict=True)
    elif isinstance(found, Basecalls):
        rows = zip(found.labels, found.lengths, strict=True)
    elif isinstance(found[0], str):
        return [[token(letter) for letter in found[n]] for n in sequences]
    else:  # koi: letters [N, T], qualities and moves
        letters = [bytes(row[row != 0].tolist()).decode() for row in found[0].cpu()]
        return [[KOI_BASES.index(letter) for letter in letters[n]] for n in sequences]
    each = list(rows)
    return [each[n][0][: int(each[n][1])].tolist() for n in sequences]


def prepared(prepare: Callable[[Any], Any], search: Callable[[Any, int], Any]) -> Decoder:
    """Return a decoder whose library takes other inputs, which are made one time and not timed."""
    last: list[Any] = [None, None]  # scores and what the library takes instead of the inputs

    def decode(inputs: Any) -> Any:
        if last[0] is not inputs.scores:
            last[:] = inputs.scores, prepare(inputs)
        return search(last[1], inputs.beam_width)

    return decode


def arrays(scores: Tensor) -> list[Any]:
    """Return the steps of each sequence as an array in fp32."""
    return [each.contiguous().numpy() for each in scores.float().unbind(1)]


def fast_ctc_decode(name: str, *options: float) -> Decoder:
    """Return one of its searches; that over a beam takes its width and a cut-off too."""
    search_one = load("fast_ctc_decode", name)()

    def search(sequences: list[Any], beam_width: int) -> list[str]:
        alphabet = characters(sequences[0].shape[1])
        others = (beam_width, *options) if options else ()
        return [search_one(each, alphabet, *others)[0] for each in sequences]

    def prepare(inputs: DecodeInputs) -> list[Any]:
        return arrays(inputs.scores.exp())

    return prepared(prepare, search)


def pyctcdecode_beam() -> Decoder:
    """Return its beam search without a language model, with the cut-offs that it has by default."""
    build = load("pyctcdecode", "build_ctcdecoder")()

    def prepare(inputs: DecodeInputs) -> tuple[Any, list[Any]]:
        labels = ["", *characters(inputs.scores.shape[2])[1:]]
        return build(labels), arrays(inputs.scores)

    def search(prepared_inputs: tuple[Any, list[Any]], beam_width: int) -> list[str]:
        decoder, sequences = prepared_inputs
        return [decoder.decode(each, beam_width=beam_width) for each in sequences]

    return prepared(prepare, search)


def pyctcdecode_text(with_model: bool) -> Decoder:
    """Return its beam search with a language model or hotwords, with its default cut-offs."""
    build = load("pyctcdecode", "build_ctcdecoder")()

    def prepare(inputs: TextInputs) -> tuple[Any, list[Any], dict[str, Any]]:
        # Without `unigrams` it knows the words of the file that have a back-off weight.
        of_model = {"kenlm_model_path": str(inputs.path), "unigrams": inputs.words}
        decoder = build(inputs.labels, **(of_model if with_model else {}))
        boosted = {} if with_model else {"hotwords": inputs.boosted, "hotword_weight": WEIGHT}
        return decoder, arrays(inputs.scores), boosted

    def search(prepared_inputs: Any, beam_width: int) -> list[str]:
        decoder, sequences, boosted = prepared_inputs
        return [decoder.decode(each, beam_width=beam_width, **boosted) for each in sequences]

    return prepared(prepare, search)


def flashlight_text() -> Decoder:
    """Return its beam search over the words of a lexicon, with a model that kenlm reads."""
    text = "flashlight.lib.text"
    names = ("CriterionType", "LexiconDecoder", "LexiconDecoderOptions", "SmearingMode", "Trie")
    classes: list[Any] = [load(f"{text}.decoder", name)() for name in names]
    Criterion, LexiconDecoder, Options, Smearing, Trie = classes
    KenLM = load(f"{text}.decoder.kenlm", "KenLM")()
    Dictionary = load(f"{text}.dictionary", "Dictionary")()

    def prepare(inputs: TextInputs) -> tuple[Any, ...]:
        places = {label: place for place, label in enumerate(inputs.labels)}
        known = Dictionary([*inputs.words, "<unk>"])
        model = KenLM(str(inputs.path), known)
        start, trie = model.start(False), Trie(len(places), SPACE)
        for word in inputs.words:
            index = known.get_index(word)
            spelling = [places[letter] for letter in word + " "]
            trie.insert(spelling, index, model.score(start, index)[1])
        trie.smear(Smearing.MAX)
        options = Options(
            beam_size=inputs.beam_width,
            beam_size_token=len(places),
            beam_threshold=1000.0,
            lm_weight=ALPHA * LN10,  # of log10
            word_score=BETA,
            unk_score=-math.inf,
            sil_score=0.0,
            log_add=True,
            criterion_type=Criterion.CTC,
        )
        unknown = known.get_index("<unk>")
        decoder = LexiconDecoder(options, trie, model, SPACE, 0, unknown, [], False)
        return decoder, known, arrays(inputs.scores), model  # which the decoder does not own

    def search(prepared_inputs: Any, beam_width: int) -> list[str]:
        decoder, known, sequences, _ = prepared_inputs
        found = (decoder.decode(x.ctypes.data, *x.shape)[0].words for x in sequences)
        return [" ".join(known.get_entry(i) for i in words if i >= 0) for words in found]

    return prepared(prepare, search)


def koi_beam() -> Decoder:
    """Return koi's beam search over k-mers as bonito calls it, in fp16."""
    beam_search = load("koi.decode", "beam_search")()

    def prepare(inputs: DecodeInputs) -> Tensor:
        return inputs.scores[..., 1:].transpose(0, 1).flatten(2).half().contiguous()

    def search(scores: Tensor, beam_width: int) -> Any:
        options = {"beam_cut": 100.0, "scale": 1.0, "offset": 0.0, "blank_score": BLANK_SCORE}
        return beam_search(scores, beam_width=beam_width, **options)

    return prepared(prepare, search)


def kmer_length(states: int) -> int:
    """Return the number of bases of a k-mer, of which there are 4^k."""
    return (states.bit_length() - 1) // 2


def over_kmers(method: Any) -> Decoder:
    return lambda inputs: ctc_crf_decode(
        inputs.scores,
        state_len=kmer_length(inputs.scores.shape[2]),
        alphabet_size=inputs.scores.shape[3],
        method=method,
        beam_width=inputs.beam_width,
    )


def on_the_host(inputs: Any) -> str | None:
    return "runs on the host" if inputs.scores.is_cuda else None


def needs_kenlm(inputs: TextInputs) -> str | None:
    missing = importlib.util.find_spec("kenlm") is None
    return on_the_host(inputs) or ("needs kenlm" if missing else None)


def text_decoder(inputs: DecodeInputs) -> Hypotheses:
    """Return what the decoder to text finds, without a language model."""
    decoder = CTCDecoder(["", *characters(inputs.scores.shape[2])[1:]])
    return decoder(inputs.scores, beam_width=inputs.beam_width, cutoff_top_n=None).hypotheses


def text_search(with_model: bool) -> Decoder:
    """Return the decoder to text with a language model, or with boosted words and no model."""

    def prepare(inputs: TextInputs) -> tuple[CTCDecoder, Tensor, PhraseBoost | None]:
        if not with_model:
            boost = PhraseBoost([f" {word} " for word in inputs.boosted], inputs.labels, WEIGHT)
            return CTCDecoder(inputs.labels), inputs.scores, boost
        weights: dict[str, Any] = {"alpha": ALPHA, "beta": BETA, "unk_score_offset": UNKNOWN}
        decoder = CTCDecoder(inputs.labels, language_model=inputs.model, **weights)
        return decoder, inputs.scores, None

    def search(prepared_inputs: Any, beam_width: int) -> list[str]:
        decoder, scores, boost = prepared_inputs
        return [best for best, *_ in decoder(scores, boost=boost, beam_width=beam_width).text]

    return prepared(prepare, search)


OURS: dict[str, Decoder] = {
    "ctc_greedy": lambda inputs: ctc_greedy_search(inputs.scores),
    "ctc_beam": lambda inputs: ctc_beam_search(inputs.scores, beam_width=inputs.beam_width),
    "ctc_decoder": text_decoder,
    "ctc_decoder_lm": text_search(with_model=True),
    "ctc_decoder_boost": text_search(with_model=False),
    "ctc_crf_viterbi": over_kmers("viterbi"),
    "ctc_crf_beam": over_kmers("beam"),
}
PROVIDERS: Functions = {
    "partita": {
        **{op: given(function) for op, function in OURS.items()},
        "ctc_crf_stitch": given(lambda x: stitch(x.calls, x.overlap, chunks=x.chunks)),
    },
    "koi": {"ctc_crf_beam": Limited(koi_beam, needs_gpu)},
    "fast-ctc-decode": {
        "ctc_greedy": Limited(lambda: fast_ctc_decode("viterbi_search"), on_the_host),
        # Its cut-off leaves out labels.
        "ctc_beam": Limited(lambda: fast_ctc_decode("beam_search", 0.0), on_the_host),
    },
    "pyctcdecode": {
        **dict.fromkeys(("ctc_beam", "ctc_decoder"), Limited(pyctcdecode_beam, on_the_host)),
        "ctc_decoder_lm": Limited(lambda: pyctcdecode_text(True), needs_kenlm),
        # Its hotwords, which are boosted words too.
        "ctc_decoder_boost": Limited(lambda: pyctcdecode_text(False), on_the_host),
    },
    "flashlight-text": {"ctc_decoder_lm": Limited(flashlight_text, on_the_host)},
}


class Truth(NamedTuple):
    """The log-probability of what the reference finds in some sequences."""

    sequences: list[int]
    log_probs: Tensor  # fp64


@dataclass(frozen=True)
class DecodeCase(SequencesCase):
    """A batch of sequences of full length."""

    sequences: int
    classes: int
    beam_width: int

    dimensions = ("steps", "sequences", "classes")
    sizes: ClassVar[tuple[str, ...]] = (*dimensions, "beam_width")
    scores = "scores"
    unit = "nats"
    is_packed = True

    @abstractmethod
    def log_prob(self, scores: Tensor, tokens: list[int]) -> Tensor:
        """Return the log-probability of tokens, summed over all alignments, for `[T, 1, ...]`."""

    def standard(self, inputs: Any) -> Truth:
        sequences = sorted({*range(min(self.sequences, SEQUENCES_JUDGED - 1)), self.sequences - 1})
        some = inputs._replace(scores=inputs.scores[:, sequences].double())
        with backend("reference"):
            found = OURS[self.op](some)
        tokens = tokens_of(found, range(len(sequences)))
        return Truth(sequences, self.log_probs(some, tokens))

    def log_probs(self, inputs: Any, tokens: list[list[int]]) -> Tensor:
        """Return what ranks the tokens of each sequence, in fp64."""
        scores = inputs.scores
        return torch.stack(
            [self.log_prob(scores[:, n : n + 1], each) for n, each in enumerate(tokens)]
        )

    def verdicts(self, attempt: Attempt, standard: Truth) -> Iterator[Verdict]:
        """Yield how many nats are lost against the reference; below 0, more probable tokens."""
        function, inputs, provider = attempt
        tokens = tokens_of(function(inputs), standard.sequences)
        scores = inputs.scores[:, standard.sequences].double()
        found = self.log_probs(inputs._replace(scores=scores), tokens)
        lost = standard.log_probs - found
        allowed = ALLOWED if provider.is_ours else math.inf
        for i, n in enumerate(standard.sequences):
            expected = float(standard.log_probs[i])
            yield Verdict(float(lost[i]), allowed, (n,), float(found[i]), expected)


class Beam(DecodeCase):
    """Prefix beam search over the log-probabilities of classes."""

    def inputs(self, buffers: Buffers) -> Any:
        logits = buffers.normal("scores", self.shape, self.dtype)
        return DecodeInputs((2 * logits).log_softmax(-1), self.beam_width)

    def log_prob(self, scores: Tensor, tokens: list[int]) -> Tensor:
        target = torch.tensor([tokens], dtype=torch.int64, device=scores.device)
        lengths = torch.tensor([len(scores)]), torch.tensor([len(tokens)])
        return -F.ctc_loss(scores, target, *lengths, reduction="sum")


@dataclass(frozen=True)
class Text(Beam):
    """Search to text with a language model, or with boosted words, over utterances with noise."""

    words: int

    sizes = (*Beam.sizes, "words")

    def inputs(self, buffers: Buffers) -> TextInputs:
        drawn = random.Random(0)
        labels = ["", " ", *characters(self.classes)[2:]]
        spelled: dict[str, None] = {}
        while len(spelled) < self.words:
            spelled["".join(drawn.choices(labels[2:], k=drawn.randint(2, 8)))] = None
        words = [*spelled]
        ngrams = drawn_ngrams(words, drawn)
        (folder, path), known = write_model(ngrams), inner_grams(ngrams)
        # A label lasts for two steps, and a blank follows.
        steps, tokens = torch.zeros(self.sequences, self.steps, dtype=torch.int64), []
        for row in steps:
            text = " ".join(word for _ in range(self.steps) for word in drawn.choice(known))
            text = text[: self.steps // 3].rpartition(" ")[0]
            tokens.append([labels.index(letter) for letter in text])
            written = torch.tensor([*tokens[-1], SPACE])
            path_of = torch.stack([written, written, 0 * written], 1).flatten()[: self.steps]
            row[: len(path_of)] = path_of
        logits = buffers.normal("scores", self.shape, self.dtype)
        right = F.one_hot(steps.T, self.classes).to(logits)
        scores = (logits + PEAK * right).log_softmax(-1)
        model, boosted = NgramLM.from_arpa(path), words[: min(PHRASES, self.words // 4)]
        others = (model, boosted, tokens, folder, path)
        return TextInputs(scores, self.beam_width, labels, words, *others)

    def standard(self, inputs: TextInputs) -> Truth:
        every = inputs._replace(scores=inputs.scores.double())
        return Truth([*range(self.sequences)], self.log_probs(every, inputs.tokens))

    def log_probs(self, inputs: TextInputs, tokens: list[list[int]]) -> Tensor:
        of_steps = super().log_probs(inputs, tokens)
        texts = ["".join(inputs.labels[c] for c in each).split() for each in tokens]
        if self.op == "ctc_decoder_boost":
            counts = [sum(word in inputs.boosted for word in text) for text in texts]
            return of_steps + WEIGHT * torch.tensor(counts).to(of_steps)
        known = {*inputs.words}
        unknown = torch.tensor([sum(word not in known for word in text) for text in texts])
        lengths = torch.tensor([len(text) for text in texts])
        added = ALPHA * (inputs.model.score(texts) + LN10 * UNKNOWN * unknown) + BETA * lengths
        return of_steps + added.to(of_steps)


class Greedy(Beam):
    """The most probable class of each step, for one read of the log-probabilities."""

    work = READ


class CrfCase(DecodeCase):
    """The best path or prefix beam search over k-mers, with qualities from the posteriors."""

    sizes = ("steps", "sequences", "states", "beam_width")

    @property
    def states(self) -> int:
        return self.classes

    @property
    def shape(self) -> tuple[int, ...]:
        return self.steps, self.sequences, self.states, BASES + 1

    def inputs(self, buffers: Buffers) -> DecodeInputs:
        scores = buffers.normal("scores", self.shape, self.dtype).clone()
        scores[..., 0] = BLANK_SCORE
        return DecodeInputs(scores, self.beam_width)

    def log_prob(self, scores: Tensor, tokens: list[int]) -> Tensor:
        target = torch.tensor([tokens], dtype=torch.int64, device=scores.device)
        lengths = torch.tensor([len(tokens)], device=scores.device)
        sizes = {"state_len": kmer_length(self.states), "alphabet_size": BASES + 1}
        return -ctc_crf_loss(scores, target, lengths, **sizes, reduction="sum")


@dataclass(frozen=True)
class StitchCase(SequencesCase):
    """The chunks of a batch of reads, half of which have many chunks and the others one."""

    sequences: int
    of_a_read: int

    sizes = ("steps", "sequences", "of_a_read")
    dimensions = ("steps", "sequences")
    scores = "moves"
    is_packed = True

    def inputs(self, buffers: Buffers) -> StitchInputs:
        shape = (self.steps, self.sequences, STITCHED_STATES, BASES + 1)
        calls = OURS["ctc_crf_viterbi"](
            DecodeInputs(buffers.normal("scores", shape, self.dtype), 1)
        )
        long = self.sequences // (self.of_a_read + 1)
        single = self.sequences - long * self.of_a_read
        return StitchInputs(calls, self.steps // 8, [self.of_a_read] * long + [1] * single)

    def standard(self, inputs: StitchInputs) -> list[Basecalls]:
        parts = zip(*(part.split(inputs.chunks) for part in inputs.calls), strict=True)
        return [stitch(Basecalls(*part), inputs.overlap) for part in parts]

    def verdicts(self, attempt: Attempt, standard: list[Basecalls]) -> Iterator[Verdict]:
        """Count the bases of each read that are others than where it is joined alone."""
        found = attempt.function(attempt.inputs)
        for n, read in enumerate(standard):
            S = read.labels.shape[1]
            differ = (found.labels[n, :S] != read.labels[0]) | (found.steps[n, :S] != read.steps[0])
            wrong = (differ.sum() + (found.lengths[n] != read.lengths[0])).double()
            yield worst(wrong, 0.0, wrong, torch.zeros_like(wrong))


decode_cases = cases_of(
    {
        "ctc_greedy": (Greedy, GREEDY_SIZES),
        "ctc_beam": (Beam, BEAM_SIZES),
        "ctc_decoder": (Beam, TEXT_SIZES),
        "ctc_decoder_lm": (Text, MODEL_SIZES),
        "ctc_decoder_boost": (Text, MODEL_SIZES),
        "ctc_crf_viterbi": (CrfCase, CRF_SIZES),
        "ctc_crf_beam": (CrfCase, CRF_SIZES),
        "ctc_crf_stitch": (StitchCase, STITCH_SIZES),
    },
    torch.float32,
)
OPS = {"decode": decode_cases}
