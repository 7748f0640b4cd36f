"""CTC: the loss of a target whose alignment is unknown, and the best alignment."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import (
    apply,
    needs_gradient,
    plain_eager,
    refuse_forward_mode,
)
from ...runtime.backend import current_backend
from ...runtime.lengths import Lengths
from . import autograd as _ctc
from .arguments import prepare


class TokenSpans(NamedTuple):
    """The steps at which each token of each target is emitted.

    Fields:
        start, end: `[N, S]` int64 with the S of padded targets, the token's first step and the step
            after its last; -1 past a target's length and where there is no alignment.
        score: `[N, S]`, the mean log-probability of the token's steps in nats; 0 past a target's
            length and where there is no alignment.
    """

    start: Tensor
    end: Tensor
    score: Tensor


class CTCAlignment(NamedTuple):
    """The best alignment of each target.

    Fields:
        labels: `[N, T]` int64, the class that each step emits; -1 past the input's length and where
            there is no alignment. A target with NaN among its scores has none, and scores of NaN.
        tokens: `[N, T]` int64, the position of that label in the target; -1 where `labels` is -1
            and on blanks.
        scores: `[N, T]`, the log-probability of that label in nats; 0 where there is none.
        score: `[N]`, the sum of `scores`; -inf where there is no alignment.
        longest: the width S of padded targets; of concatenated ones, the greatest target length,
            or a bound of it where the lengths are on another device.
    """

    labels: Tensor
    tokens: Tensor
    scores: Tensor
    score: Tensor
    longest: int

    def spans(self) -> TokenSpans:
        """Return start, end and score of each token. The computation stays on the device.

        Example:
            >>> import torch, partita
            >>> logits = torch.eye(3)[[0, 1, 1, 0, 2]][:, None] * 9  # blank, 1, 1, blank, 2
            >>> targets = torch.tensor([[1, 2]])
            >>> partita.ctc_align(logits, targets, [5], [2], from_logits=True).spans().end
            tensor([[3, 5]])
        """
        N, T = self.tokens.shape
        # Steps without a token go to an extra column, which is dropped.
        token = torch.where(self.tokens < 0, self.longest, self.tokens)
        step = torch.arange(T, device=token.device).expand(N, -1)
        empty = token.new_zeros(N, self.longest + 1)
        start = empty.fill_(T).scatter_reduce(1, token, step, "amin")[:, : self.longest]
        end = torch.zeros_like(empty).scatter_reduce(1, token, step + 1, "amax")[:, : self.longest]
        valid = end > 0
        # A cumulative sum has a fixed order, unlike a scattered one.
        total = torch.nn.functional.pad(self.scores.double().cumsum(1), (1, 0))
        start, end = torch.where(valid, start, 0), torch.where(valid, end, 0)
        mean = (total.gather(1, end) - total.gather(1, start)) / (end - start).clamp(min=1)
        start, end = torch.where(valid, start, -1), torch.where(valid, end, -1)
        return TokenSpans(start, end, mean.to(self.scores.dtype))


def word_spans(spans: TokenSpans, word_of_token: Tensor) -> TokenSpans:
    """Return start, end and score of each word, given those of its tokens.

    Args:
        spans: the spans of the tokens, `[N, S]` each.
        word_of_token: `[N, S]` integers, the number of each token's word from 0; -1 for a token of
            no word, such as a space. The tokens of a word are neighbours, apart from such tokens.

    Returns:
        `TokenSpans(start, end, score)`, `[N, S]` each, with a column for each possible word: the
        first step of the word's first token, the step after the last one of its last token, and the
        mean log-probability in nats of the steps of its tokens. The first two are -1 and the score
        is 0 for a word without a token that is aligned. The computation stays on the device.

    Raises:
        TypeError, ValueError: a wrong type, dtype, shape or device.

    Source: the word boundaries of torchaudio's tutorial of forced alignment, 2023.

    Example:
        >>> import torch, partita
        >>> logits = torch.eye(4)[[1, 2, 2, 0, 3]][:, None] * 9
        >>> found = partita.ctc_align(logits, torch.tensor([[1, 2, 3]]), [5], [3], from_logits=True)
        >>> words = partita.word_spans(found.spans(), torch.tensor([[0, 0, 1]]))
        >>> words.start, words.end
        (tensor([[ 0,  4, -1]]), tensor([[ 3,  5, -1]]))
    """
    if not isinstance(spans, TokenSpans):
        raise TypeError(f"spans: expected TokenSpans, got {type(spans).__name__}")
    checks.integer("word_of_token", word_of_token)
    checks.shape("word_of_token", word_of_token, spans.start.shape, "[N, S]")
    checks.device("word_of_token", word_of_token, spans.start, "spans")
    N, S = spans.start.shape
    word = word_of_token.long()
    valid = (word >= 0) & (word < S) & (spans.start >= 0)
    word = torch.where(valid, word, S)  # the others go to an extra column, which is dropped
    token = torch.arange(S, device=word.device).expand(N, -1)
    low, high = (
        word.new_full((N, S + 1), torch.iinfo(torch.int64).max),
        word.new_full((N, S + 1), -1),
    )
    start = low.scatter_reduce(1, word, spans.start, "amin")[:, :S]
    end = high.scatter_reduce(1, word, spans.end, "amax")[:, :S]
    first = low.scatter_reduce(1, word, token, "amin")[:, :S]
    last = high.scatter_reduce(1, word, token, "amax")[:, :S]
    steps = torch.where(valid, spans.end - spans.start, 0)
    # Cumulative sums have a fixed order, unlike scattered ones.
    total, number = (
        torch.nn.functional.pad(x.cumsum(1), (1, 0)) for x in (spans.score.double() * steps, steps)
    )
    has = last >= 0
    first, after = torch.where(has, first, 0), last + 1
    mean = (total.gather(1, after) - total.gather(1, first)) / (
        number.gather(1, after) - number.gather(1, first)
    ).clamp(min=1)
    return TokenSpans(torch.where(has, start, -1), end, mean.to(spans.score.dtype))


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
    *,
    from_logits: bool = False,
    label_priors: Tensor | None = None,
    prior_scale: float = 1.0,
    star: int | None = None,
) -> Tensor:
    """Return the CTC loss: minus the log of the total probability of each target's alignments.

    Args:
        log_probs: `[T, N, C]` or `[T, C]` floating: log-probabilities of the classes at each step,
            or logits with `from_logits`.
        targets: `[N, S]`, or all targets concatenated, `[sum of target_lengths]`; integers from 0
            to C - 1, or the star.
        input_lengths, target_lengths: `[N]`, tensors on any device, lists or tuples; numbers for a
            single sequence.
        blank: the class of the blank.
        reduction: `mean` (of loss / target length), `sum` or `none`.
        zero_infinity: whether the infinite loss of a target that cannot be aligned becomes 0. Its
            gradient is 0 in both cases.
        from_logits: whether the op takes the log-softmax itself.
        label_priors: `[C]` floating, the finite logarithms of the frequencies of the classes, which
            are subtracted from the log-probabilities; None for none. They get no gradient.
        prior_scale: a factor of the priors, 0 or more.
        star: an index of C or more that stands for any class in the targets, with log-probability
            0; None for none. As with other labels, a star after a star needs a blank between them.

    Scores with priors or a star are not normalised, so the loss may be negative.

    Returns:
        A number, or `[N]`, in nats; fp32 for half types. The gradient is the true one: minus the
        posterior of each class, or the softmax minus it with `from_logits`. With a star, the
        softmax of a step is multiplied by the posterior of all classes but the star.

    Raises:
        TypeError, ValueError, IndexError: wrong dtypes, shapes, devices, lengths or labels. Values
            on a GPU are checked only with `PARTITA_CHECK=1`; otherwise an invalid sequence has the
            loss NaN and the gradient NaN.

    Source: Graves et al., Connectionist temporal classification, 2006; the arguments are those of
        `torch.nn.functional.ctc_loss`.

    Example:
        >>> import torch, partita
        >>> logits = torch.zeros(2, 1, 2)  # two steps, blank and one label
        >>> # 3 of the 4 sequences of classes collapse to the target.
        >>> partita.ctc_loss(logits, torch.tensor([[1]]), [2], [1], from_logits=True)
        tensor(0.2877)
    """
    checks.choice("reduction", reduction, checks.REDUCTIONS)
    scores = (blank, from_logits, label_priors, prior_scale, star)
    x = prepare(log_probs, targets, input_lengths, target_lengths, *scores)
    if needs_gradient(label_priors):
        raise ValueError(
            "label_priors: expected a tensor that needs no gradient, got one that requires it;"
            " detach it"
        )
    save = needs_gradient(x.logits)
    options = (reduction, bool(zero_infinity), save, current_backend())
    if plain_eager() and not save:
        refuse_forward_mode(log_probs, label_priors)
        loss = _ctc.loss(*x, *options)[0]
    else:
        loss = apply(_ctc.CTCLossFunction, *x, *options)[0]
    return loss[0] if reduction == "none" and log_probs.ndim == 2 else loss


def ctc_align(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    *,
    from_logits: bool = False,
    label_priors: Tensor | None = None,
    prior_scale: float = 1.0,
    star: int | None = None,
) -> CTCAlignment:
    """Return the most probable alignment of each target.

    Among equally probable alignments, it is the one that stays in the later state when the
    alignment is traced from its end.

    Args:
        log_probs, targets, input_lengths, target_lengths, blank, from_logits: as in `ctc_loss`;
            N is 1 without a batch dimension.
        label_priors, prior_scale, star: as in `ctc_loss`. The scores of the alignment have the
            priors subtracted, and `labels` has the star where a step emits it.

    Returns:
        `CTCAlignment(labels, tokens, scores, score, longest)`; not differentiable.

    Raises:
        TypeError, ValueError, IndexError: as in `ctc_loss`.

    Source: Viterbi, Error bounds for convolutional codes, 1967, over the alignments of Graves et
        al., 2006.

    Example:
        >>> import torch, partita
        >>> logits = torch.eye(3)[[0, 1, 1, 0, 2]][:, None] * 9  # blank, 1, 1, blank, 2
        >>> partita.ctc_align(logits, torch.tensor([[1, 2]]), [5], [2], from_logits=True).labels
        tensor([[0, 1, 1, 0, 2]])
    """
    with torch.no_grad():
        options = (blank, from_logits, label_priors, prior_scale, star)
        x = prepare(log_probs, targets, input_lengths, target_lengths, *options)
        labels, tokens, scores, score = _ctc.align(*x, current_backend())
    # The shape of the spans must not depend on whether the host can read the lengths.
    longest = targets.shape[1] if targets.ndim == 2 else x.max_target_len
    return CTCAlignment(labels, tokens, scores, score, longest)
