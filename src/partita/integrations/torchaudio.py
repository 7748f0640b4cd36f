"""The names of torchaudio for forced alignment, for decoding on the device, and for transducers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.serialization import add_safe_globals

from ..nn import RNNTLoss
from ..ops.ctc.api import ctc_align
from ..ops.decode.api import ctc_beam_search
from ..ops.decode.common import MAX_BEAM_WIDTH
from ..ops.rnnt.api import rnnt_loss
from ..runtime import checks
from .naming import Renamed

__all__ = [
    "CUCTCDecoder",
    "CUCTCHypothesis",
    "RNNTLoss",
    "TokenSpan",
    "cuda_ctc_decoder",
    "forced_align",
    "merge_tokens",
    "rnnt_loss",
]

TARGETS = (torch.int32, torch.int64)


@dataclass
class TokenSpan:
    """A token with its steps and its score. Its length is the number of steps.

    Fields:
        token: the class.
        start, end: the first step, and the step after the last.
        score: the mean of the scores of its steps.

    Source: the class of this name in torchaudio 2.1, 2023.

    Example:
        >>> from partita.integrations.torchaudio import TokenSpan
        >>> len(TokenSpan(token=3, start=2, end=6, score=-0.5))
        4
    """

    token: int
    start: int
    end: int
    score: float

    def __len__(self) -> int:
        return self.end - self.start


class CUCTCHypothesis(NamedTuple):
    """A decoded sequence.

    Fields:
        tokens: the classes.
        words: the text of each class.
        score: the log-probability in nats, summed over alignments.

    Source: the class of this name in torchaudio 2.1, 2023.

    Example:
        >>> from partita.integrations.torchaudio import CUCTCHypothesis
        >>> CUCTCHypothesis(tokens=[1], words=["a"], score=-0.5).words
        ['a']
    """

    tokens: list[int]
    words: list[str]
    score: float


add_safe_globals([CUCTCHypothesis, TokenSpan])  # `torch.load` reads them by default


class CUCTCDecoder:
    """A prefix beam search with fixed options, on any device.

    Args:
        vocab_list: the text of each class.
        blank_id: the class of the blank.
        beam_size: the number of prefixes that go on after each step, up to 256.
        nbest: the number of hypotheses of each sequence.
        blank_skip_threshold: a probability of the blank; a step above it is taken as a blank.

    Raises:
        ValueError: the blank is no class, or the beam has another size.

    Source: the class of this name in torchaudio 2.1, 2023; the method is that of
        `partita.ctc_beam_search`.

    Example:
        >>> import torch
        >>> from partita.integrations.torchaudio import CUCTCDecoder
        >>> log_probs = (torch.eye(3)[[0, 1, 1, 0, 2]] * 9).log_softmax(-1)[None]
        >>> CUCTCDecoder(["-", "a", "b"])(log_probs, torch.tensor([5]))[0][0].words
        ['a', 'b']
    """

    def __init__(
        self,
        vocab_list: Sequence[str],
        blank_id: int = 0,
        beam_size: int = 10,
        nbest: int = 1,
        blank_skip_threshold: float = 0.95,
    ) -> None:
        checks.blank(blank_id, len(vocab_list))
        if not 1 <= beam_size <= MAX_BEAM_WIDTH:
            raise ValueError(f"beam_size: expected 1 to {MAX_BEAM_WIDTH}, got {beam_size}")
        self.vocab_list, self.blank_id, self.beam_size = list(vocab_list), blank_id, beam_size
        self.nbest, self.blank_skip_threshold = nbest, blank_skip_threshold

    def __call__(self, log_prob: Tensor, encoder_out_lens: Tensor) -> list[list[CUCTCHypothesis]]:
        """Return the hypotheses of each sequence. The host waits for the device.

        Args:
            log_prob: `[B, T, C]` log-probabilities of as many classes as there are texts.
            encoder_out_lens: `[B]`, the number of steps of each sequence.

        Returns:
            For each sequence a list of `CUCTCHypothesis`, the best first, with scores in nats.

        Raises:
            TypeError, ValueError: wrong dtypes, shapes, lengths or numbers; NaN or +inf.

        Example:
            >>> import torch
            >>> from partita.integrations.torchaudio import CUCTCDecoder
            >>> log_probs = (torch.eye(2)[[0, 1]] * 9).log_softmax(-1)[None]
            >>> CUCTCDecoder(["-", "a"], nbest=2)(log_probs, torch.tensor([2]))[0][1].words
            []
        """
        checks.floating("log_prob", log_prob)
        if log_prob.ndim != 3 or log_prob.shape[2] != len(self.vocab_list):
            raise ValueError(
                f"log_prob: expected shape [B, T, C] with C = {len(self.vocab_list)},"
                f" got {list(log_prob.shape)}"
            )
        names = {"log_probs": "log_prob", "blank": "blank_id", "beam_width": "beam_size"}
        with Renamed(names | {"input_lengths": "encoder_out_lens"}):
            found = ctc_beam_search(
                log_prob.transpose(0, 1),
                encoder_out_lens,
                blank=self.blank_id,
                beam_width=self.beam_size,
                nbest=self.nbest,
                blank_skip_threshold=self.blank_skip_threshold,
            )
        if (index := checks.first_index(found.scores.isnan())) is not None:
            raise ValueError(
                "log_prob: expected log-probabilities, got NaN or +inf in the sequence at"
                f" {list(index[:1])}"
            )
        rows = zip(*(x.tolist() for x in (found.tokens, found.lengths, found.scores)), strict=True)
        return [
            [
                CUCTCHypothesis(
                    tokens[:length], [self.vocab_list[token] for token in tokens[:length]], score
                )
                for tokens, length, score in zip(*row, strict=True)
                if score > -float("inf")
            ]
            for row in rows
        ]


def cuda_ctc_decoder(
    tokens: str | Sequence[str],
    nbest: int = 1,
    beam_size: int = 10,
    blank_skip_threshold: float = 0.95,
) -> CUCTCDecoder:
    """Return a prefix beam search with fixed options, whose blank is class 0.

    Args:
        tokens: the text of each class, or the path of a file whose lines begin with it.
        nbest, beam_size, blank_skip_threshold: as in `CUCTCDecoder`.

    Returns:
        A `CUCTCDecoder`.

    Raises:
        OSError: the file cannot be read.

    Source: the function of this name in torchaudio 2.1, 2023.

    Example:
        >>> from partita.integrations.torchaudio import cuda_ctc_decoder
        >>> cuda_ctc_decoder(["-", "a", "b"], beam_size=16).beam_size
        16
    """
    if isinstance(tokens, str):
        lines = Path(tokens).read_text(encoding="utf-8").splitlines()
        tokens = [line.split(maxsplit=1)[0] for line in lines if line.strip()]
    return CUCTCDecoder(tokens, 0, beam_size, nbest, blank_skip_threshold)


def forced_align(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    blank: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the most probable CTC alignment of each target.

    The values of targets and lengths are read on the host.

    Args:
        log_probs: `[B, T, C]` floating: log-probabilities of the classes at each step in nats.
        targets: `[B, L]` int32 or int64, without the blank.
        input_lengths, target_lengths: `[B]` integers; T and L by default.
        blank: the class of the blank.

    Returns:
        `(paths, scores)`, each `[B, T]`: the class of each step in the dtype of `targets`, and its
        log-probability in the dtype of `log_probs`. Past the length of an input they are the blank
        and 0. Not differentiable.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes, devices or lengths; a label that is no class or
            is the blank; a target that has no alignment, because it is longer than the input once a
            blank separates equal labels, or because all alignments have the probability 0.

    Source: the function of this name in torchaudio 2.1, 2023, which takes one sequence; the method
        is that of `partita.ctc_align`.

    Example:
        >>> import torch
        >>> from partita.integrations.torchaudio import forced_align, merge_tokens
        >>> logits = torch.eye(3)[[0, 1, 1, 0, 2]] * 9  # blank, 1, 1, blank, 2
        >>> log_probs = logits.log_softmax(-1)[None]
        >>> paths, scores = forced_align(log_probs, torch.tensor([[1, 2]]))
        >>> paths
        tensor([[0, 1, 1, 0, 2]])
        >>> [(span.token, span.start, span.end) for span in merge_tokens(paths[0], scores[0])]
        [(1, 1, 3), (2, 4, 5)]
    """
    _check_tensors(log_probs, targets)
    B, T, C = log_probs.shape
    inputs = _lengths("input_lengths", input_lengths, B, T)
    lengths = _lengths("target_lengths", target_lengths, B, targets.shape[1])
    checks.blank(blank, C)
    _check_labels(targets.cpu(), inputs, lengths, C, blank)
    found = ctc_align(log_probs.detach().transpose(0, 1), targets, inputs, lengths, blank)
    if (index := checks.first_index(~found.score.isfinite())) is not None:
        raise ValueError(
            "log_probs: expected an alignment of a probability above 0, got none for the target at"
            f" {list(index)}"
        )
    paths = torch.where(found.labels < 0, blank, found.labels)
    return paths.to(targets.dtype), found.scores.to(log_probs.dtype)


def merge_tokens(tokens: Tensor, scores: Tensor, blank: int = 0) -> list[TokenSpan]:
    """Return the tokens of one alignment: equal neighbours merge into one token, blanks drop out.

    Args:
        tokens, scores: `[T]`, a row of each result of `forced_align`.
        blank: the class of the blank.

    Returns:
        A list of `TokenSpan`, ordered by time.

    Raises:
        ValueError: wrong shapes.

    Source: the function of this name in torchaudio 2.1, 2023.

    Example:
        >>> import torch
        >>> from partita.integrations.torchaudio import merge_tokens
        >>> tokens = torch.tensor([0, 7, 7, 0, 7])
        >>> scores = torch.tensor([0.0, -1.0, -2.0, 0.0, -4.0])
        >>> for span in merge_tokens(tokens, scores):
        ...     print(span)
        TokenSpan(token=7, start=1, end=3, score=-1.5)
        TokenSpan(token=7, start=4, end=5, score=-4.0)
    """
    if tokens.ndim != 1 or tokens.shape != scores.shape:
        raise ValueError(
            f"tokens, scores: expected one shape [T], got {list(tokens.shape)} and"
            f" {list(scores.shape)}"
        )
    classes, run, sizes = torch.unique_consecutive(
        tokens.cpu(), return_inverse=True, return_counts=True
    )
    sums = torch.zeros(len(classes), dtype=torch.float64)
    means = sums.index_add(0, run, scores.detach().cpu().double()) / sizes
    ends = sizes.cumsum(0)
    columns = (classes, ends - sizes, ends, means)
    spans = zip(*(column.tolist() for column in columns), strict=True)
    return [TokenSpan(*span) for span in spans if span[0] != blank]


def _check_tensors(log_probs: Tensor, targets: Tensor) -> None:
    checks.floating("log_probs", log_probs)
    checks.tensor("targets", targets)
    if targets.dtype not in TARGETS:
        raise TypeError(f"targets: expected int32 or int64, got {targets.dtype}")
    checks.device("targets", targets, log_probs, "log_probs")
    if log_probs.ndim != 3:
        raise ValueError(f"log_probs: expected shape [B, T, C], got {list(log_probs.shape)}")
    if targets.ndim != 2 or len(targets) != len(log_probs):
        raise ValueError(
            f"targets: expected shape [B, L] with B = {len(log_probs)}, got {list(targets.shape)}"
        )


def _lengths(name: str, value: Tensor | None, B: int, greatest: int) -> Tensor:
    """Return the lengths, `[B]`, on the host."""
    if value is None:
        return torch.full((B,), greatest)
    checks.integer(name, value)
    checks.shape(name, value, [B], "[B]")
    value = value.cpu().long()
    checks.within(name, value, 0, greatest, "lengths")
    return value


def _check_labels(
    targets: Tensor, input_lengths: Tensor, lengths: Tensor, classes: int, blank: int
) -> None:
    """Raise unless labels are classes other than the blank and inputs are long enough for them.

    All tensors are on the host.
    """
    mask = torch.arange(targets.shape[1]) < lengths[:, None]
    bad = (targets < 0) | (targets >= classes) | (targets == blank)
    if (index := checks.first_index(mask & bad)) is not None:
        raise ValueError(
            f"targets: expected labels from 0 to {classes - 1} without the blank {blank},"
            f" got {int(targets[index])} at {list(index)}"
        )
    repeats = (mask[:, 1:] & (targets[:, 1:] == targets[:, :-1])).sum(1)
    if (index := checks.first_index(lengths + repeats > input_lengths)) is not None:
        n = index[0]
        raise ValueError(
            f"targets: expected at most {int(input_lengths[n])} labels and repeats,"
            f" got {int(lengths[n])} and {int(repeats[n])} at [{n}]"
        )
