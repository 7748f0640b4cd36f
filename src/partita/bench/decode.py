"""Decoding: greedy and beam search of CTC, and the best paths and prefixes over k-mers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.ctc_crf.api import ctc_crf_loss
from ..ops.decode.api import ctc_beam_search, ctc_greedy_search
from ..ops.decode.crf import ctc_crf_decode
from ..runtime.backend import backend
from .case import Buffers, Case, Loop, Moves, Settings, Verdict
from .chain import BASES
from .decode_peers import BLANK_SCORE, DecodeInputs, kmer_length, tokens_of
from .providers import Function, Provider, is_ours

SEQUENCES_JUDGED = 2  # the reference is a loop in Python
ALLOWED = 1e-4  # nats that may be lost to a rounding that decides between prefixes


class Size(NamedTuple):
    steps: int
    sequences: int
    classes: int
    beam_width: int


GREEDY_SIZES = (Size(150, 128, 5000, 1), Size(1000, 64, 5, 1))
BEAM_SIZES = (Size(1000, 64, 5, 16), Size(500, 32, 32, 16), Size(150, 128, 5000, 16))
CRF_SIZES = (Size(2000, 64, 1024, 32),)
CPU_GREEDY_SIZES = (Size(1000, 1, 5, 1),)
CPU_BEAM_SIZES = Size(1000, 1, 5, 5), Size(1000, 1, 5, 32), Size(500, 1, 32, 16)
CPU_CRF_SIZES = (Size(400, 2, 256, 32),)
CPU_QUICK_SIZES = (Size(30, 2, 5, 4),)
CPU_QUICK_CRF_SIZES = (Size(20, 2, 16, 4),)


class Truth(NamedTuple):
    """The log-probability of what the reference finds in some sequences."""

    sequences: list[int]
    log_probs: Tensor  # fp64


@dataclass(frozen=True)
class DecodeCase(Case):
    """A batch of sequences of full length."""

    steps: int
    sequences: int
    classes: int
    beam_width: int

    sizes: ClassVar[tuple[str, ...]] = ("steps", "sequences", "classes", "beam_width")
    varying: ClassVar[tuple[str, ...]] = sizes
    scores: ClassVar[str] = "scores"
    unit: ClassVar[str] = "nats"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.steps, self.sequences, self.classes

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {}

    @abstractmethod
    def reference(self, scores: Tensor) -> Any:
        """Return what this search finds."""

    @abstractmethod
    def log_prob(self, scores: Tensor, tokens: list[int]) -> Tensor:
        """Return the log-probability of tokens, summed over all alignments, for `[T, 1, ...]`."""

    def standard(self, inputs: DecodeInputs) -> Truth:
        sequences = sorted({*range(min(self.sequences, SEQUENCES_JUDGED - 1)), self.sequences - 1})
        scores = inputs.scores[:, sequences].double()
        with backend("reference"):
            found = self.reference(scores)
        return Truth(sequences, self.log_probs(scores, tokens_of(found, range(len(sequences)))))

    def log_probs(self, scores: Tensor, tokens: list[list[int]]) -> Tensor:
        """Return the log-probability of the tokens of each sequence."""
        return torch.stack(
            [self.log_prob(scores[:, n : n + 1], each) for n, each in enumerate(tokens)]
        )

    def verdicts(
        self, function: Function, inputs: DecodeInputs, provider: Provider, standard: Truth
    ) -> Iterator[Verdict]:
        """Yield how many nats are lost against the reference; below 0, more probable tokens."""
        tokens = tokens_of(function(inputs), standard.sequences)
        found = self.log_probs(inputs.scores[:, standard.sequences].double(), tokens)
        lost = standard.log_probs - found
        allowed = ALLOWED if is_ours(provider.name) else math.inf
        for i, n in enumerate(standard.sequences):
            expected = float(standard.log_probs[i])
            yield Verdict(float(lost[i]), allowed, (n,), float(found[i]), expected)

    def loops(self, function: Function, inputs: DecodeInputs, provider: Provider) -> Sequence[Loop]:
        return [Loop((("inference", lambda: function(inputs)),), lambda: None)]

    def is_slow(self, provider: Provider, device: torch.device) -> bool:
        """Return whether this is a loop in Python."""
        return provider.name == "pyctcdecode"


@dataclass(frozen=True)
class Beam(DecodeCase):
    """Prefix beam search over the log-probabilities of classes."""

    def inputs(self, buffers: Buffers) -> DecodeInputs:
        logits = buffers.normal("scores", self.shape, self.dtype)
        return DecodeInputs((2 * logits).log_softmax(-1), self.beam_width)

    def reference(self, scores: Tensor) -> Any:
        return ctc_beam_search(scores, beam_width=self.beam_width)

    def log_prob(self, scores: Tensor, tokens: list[int]) -> Tensor:
        target = torch.tensor([tokens], dtype=torch.int64, device=scores.device)
        lengths = torch.tensor([len(scores)]), torch.tensor([len(tokens)])
        return -F.ctc_loss(scores, target, *lengths, reduction="sum")


@dataclass(frozen=True)
class Greedy(Beam):
    """The most probable class of each step, for one read of the log-probabilities."""

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(self.bytes, "read")}

    def reference(self, scores: Tensor) -> Any:
        return ctc_greedy_search(scores)


@dataclass(frozen=True)
class CrfViterbi(DecodeCase):
    """The best path over k-mers, with qualities from the posteriors."""

    sizes: ClassVar[tuple[str, ...]] = ("steps", "sequences", "states", "beam_width")
    varying: ClassVar[tuple[str, ...]] = sizes
    method: ClassVar[str] = "viterbi"

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

    def reference(self, scores: Tensor) -> Any:
        return ctc_crf_decode(
            scores,
            state_len=kmer_length(self.states),
            alphabet_size=BASES + 1,
            method=self.method,
            beam_width=self.beam_width,
        )

    def log_prob(self, scores: Tensor, tokens: list[int]) -> Tensor:
        target = torch.tensor([tokens], dtype=torch.int64, device=scores.device)
        lengths = torch.tensor([len(tokens)], device=scores.device)
        sizes = {"state_len": kmer_length(self.states), "alphabet_size": BASES + 1}
        return -ctc_crf_loss(scores, target, lengths, **sizes, reduction="sum")


@dataclass(frozen=True)
class CrfBeam(CrfViterbi):
    """Prefix beam search over k-mers, with qualities from the posteriors."""

    method: ClassVar[str] = "beam"


def _chosen(
    settings: Settings, full: Sequence[Size], cpu: Sequence[Size], quick: Sequence[Size]
) -> Iterator[Size]:
    if settings.device.type == "cuda":
        sizes = full[:1] if settings.quick else full
    else:
        sizes = quick if settings.quick else cpu
    for size in sizes:
        yield _within(size, settings.elements) if settings.elements else size


def _within(size: Size, elements: int) -> Size:
    """Return a size with fewer or shorter sequences that has at most this number of scores."""
    sequences = max(1, min(size.sequences, elements // (size.steps * size.classes)))
    steps = max(2, min(size.steps, elements // (sequences * size.classes)))
    return size._replace(steps=steps, sequences=sequences)


def cases(settings: Settings) -> Iterator[Case]:
    for dtype in settings.types(torch.float32):
        for size in _chosen(settings, GREEDY_SIZES, CPU_GREEDY_SIZES, CPU_QUICK_SIZES):
            yield Greedy("ctc_greedy", dtype, *size)
        for size in _chosen(settings, BEAM_SIZES, CPU_BEAM_SIZES, CPU_QUICK_SIZES):
            yield Beam("ctc_beam", dtype, *size)
        for size in _chosen(settings, CRF_SIZES, CPU_CRF_SIZES, CPU_QUICK_CRF_SIZES):
            yield CrfViterbi("ctc_crf_viterbi", dtype, *size)
            yield CrfBeam("ctc_crf_beam", dtype, *size)
