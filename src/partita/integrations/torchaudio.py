"""The names of torchaudio for forced alignment, for batches of any size, and for transducers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..nn import RNNTLoss
from ..ops.ctc.api import ctc_align
from ..ops.rnnt.api import rnnt_loss
from ..runtime import checks

__all__ = ["RNNTLoss", "TokenSpan", "forced_align", "merge_tokens", "rnnt_loss"]

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
    if (index := checks.first_index((value < 0) | (value > greatest))) is not None:
        raise ValueError(
            f"{name}: expected lengths from 0 to {greatest}, got {int(value[index])} at"
            f" {list(index)}"
        )
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
