"""CTC: the loss of a target whose alignment is not known, and the best alignment."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import apply
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ...runtime.lengths import Lengths, as_lengths, to_device_together
from . import autograd as _ctc
from .common import Targets

REDUCTIONS = ("none", "mean", "sum")


class TokenSpans(NamedTuple):
    """Where each token of each target lies.

    Fields:
        start, end: `[N, S]` int64, its first step and the one behind its last; -1 past a target's length and where there is no alignment.
        score: `[N, S]`, the mean log-probability of its steps in nats; 0 likewise.
    """

    start: Tensor
    end: Tensor
    score: Tensor


class CTCAlignment(NamedTuple):
    """The best alignment of each target.

    Fields:
        labels: `[N, T]` int64, the class that each step emits; -1 past the input's length and where there is no alignment.
        tokens: `[N, T]` int64, its place in the target; -1 on a blank too.
        scores: `[N, T]`, its log-probability in nats; 0 where there is no label.
        score: `[N]`, their sum; -inf where there is no alignment.
        longest: no target has more tokens.
    """

    labels: Tensor
    tokens: Tensor
    scores: Tensor
    score: Tensor
    longest: int

    def spans(self) -> TokenSpans:
        """Start, end and score of each token, on the device.

        Example:
            >>> import torch, partita
            >>> logits = torch.eye(3)[[0, 1, 1, 0, 2]][:, None] * 9  # blank, 1, 1, blank, 2
            >>> partita.ctc_align(logits, torch.tensor([[1, 2]]), [5], [2], from_logits=True).spans().end
            tensor([[3, 5]])
        """
        count, steps = self.tokens.shape
        place = torch.where(self.tokens < 0, self.longest, self.tokens)
        step = torch.arange(steps, device=place.device).expand(count, -1)
        empty = place.new_zeros(count, self.longest + 1)
        start = empty.fill_(steps).scatter_reduce(1, place, step, "amin")[:, : self.longest]
        end = torch.zeros_like(empty).scatter_reduce(1, place, step + 1, "amax")[:, : self.longest]
        there = end > 0
        total = torch.nn.functional.pad(
            self.scores.double().cumsum(1), (1, 0)
        )  # no sum whose order may differ
        start, end = torch.where(there, start, 0), torch.where(there, end, 0)
        mean = (total.gather(1, end) - total.gather(1, start)) / (end - start).clamp(min=1)
        return TokenSpans(
            torch.where(there, start, -1), torch.where(there, end, -1), mean.to(self.scores.dtype)
        )


class _Prepared(NamedTuple):
    """Arguments as the ops take them: a batch, with targets one after another.

    Fields:
        logits: `[T, N, C]`.
        targets: on its device.
        input_lengths: `[N]` int64, likewise.
        batched: whether the caller's was.
    """

    logits: Tensor
    targets: Targets
    input_lengths: Tensor
    batched: bool


def _prepare(
    name: str,
    logits: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int,
) -> _Prepared:
    checks.floating(name, logits)
    checks.integer("targets", targets)
    checks.device("targets", targets, logits, name)
    batched = logits.ndim == 3
    if logits.ndim not in (2, 3):
        raise ValueError(f"{name}: expected shape [T, N, C] or [T, C], got {list(logits.shape)}")
    if not batched:
        logits = logits[:, None]
    _, count, classes = logits.shape
    if targets.ndim != 1 and (targets.ndim != 2 or len(targets) != count):
        raise ValueError(
            f"targets: expected shape [N, S] with N = {count}, or [sum of target_lengths], got {list(targets.shape)}"
        )
    checks.blank(blank, classes)
    steps, came = (
        as_lengths("input_lengths", input_lengths, count),
        as_lengths("target_lengths", target_lengths, count),
    )
    known = came.device.type == "cpu" and not torch.compiler.is_compiling()
    longest = int(came.max()) if known and count else targets.shape[-1] if count else 0
    if targets.ndim == 2:
        offsets = torch.arange(count, device=came.device) * targets.shape[1]
        most = targets.shape[1]
    else:
        there = came.clamp(0, len(targets))  # a wrong one must not move the others far
        offsets, most = there.cumsum(0) - there, len(targets)
    if (
        targets.ndim == 1
        and not torch.compiler.is_compiling()
        and checks.should_check_values(logits.device)
        and int(came.sum()) != most
    ):
        raise ValueError(
            f"targets: expected as many labels as the sum of target_lengths, {int(came.sum())}, got {most}"
        )
    inputs, lengths, offsets = to_device_together(logits.device, steps, came, offsets)
    labels = (
        targets.reshape(-1)
        if targets.dtype in (torch.int32, torch.int64)
        else targets.reshape(-1).long()
    )  # a narrow type would wrap bounds and blanks
    return _Prepared(
        logits, Targets(labels, offsets, lengths, max(min(longest, most), 0)), inputs, batched
    )


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
) -> Tensor:
    """The CTC loss: minus the logarithm of the summed probability of all alignments of each target, in nats.

    Args:
        log_probs: `[T, N, C]` or `[T, C]` floating: log-probabilities of the classes at each step, or logits with `from_logits`.
        targets: `[N, S]`, or all one after another, `[sum of target_lengths]`; integers from 0 to C - 1.
        input_lengths, target_lengths: `[N]`, tensors on any device, or lists, tuples, or for one sequence numbers.
        blank: the class of the blank.
        reduction: `mean` (of loss / target length), `sum` or `none`.
        zero_infinity: 0 in place of the infinite loss of a target that cannot be aligned; its gradient is 0 in both cases.
        from_logits: take the log-softmax within.

    Returns:
        A number, or `[N]`; fp32 for half types. The gradient is the true one: minus the posterior of each class, or softmax minus it.

    Raises:
        TypeError, ValueError, IndexError: wrong dtypes, shapes, devices, lengths or labels (values on a GPU only with `PARTITA_CHECK=1`, otherwise
            that sequence's loss and gradient are NaN).

    Source: Graves et al., Connectionist temporal classification, 2006; the arguments are those of `torch.nn.functional.ctc_loss`.

    Example:
        >>> import torch, partita
        >>> logits = torch.zeros(2, 1, 2)  # two steps, blank and one label
        >>> partita.ctc_loss(logits, torch.tensor([[1]]), [2], [1], from_logits=True)  # 3 of the 4 sequences collapse to it
        tensor(0.2877)
    """
    checks.choice("reduction", reduction, REDUCTIONS)
    x = _prepare("log_probs", log_probs, targets, input_lengths, target_lengths, blank)
    keep = torch.is_grad_enabled() and log_probs.requires_grad
    tensors = (x.targets.labels, x.targets.offsets, x.input_lengths, x.targets.lengths)
    options = (x.targets.most, blank, from_logits, reduction, bool(zero_infinity), keep)
    loss: Tensor = apply(_ctc.Loss, x.logits, *tensors, *options, current_backend())[0]
    return loss[0] if reduction == "none" and not x.batched else loss


def ctc_align(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    *,
    from_logits: bool = False,
) -> CTCAlignment:
    """The most probable alignment of each target; of equals, the one that stays longer, from the end.

    Args:
        log_probs, targets, input_lengths, target_lengths, blank, from_logits: as in `ctc_loss`; without a batch, N is 1.

    Returns:
        `CTCAlignment(labels, tokens, scores, score, longest)`; not differentiable.

    Raises:
        TypeError, ValueError, IndexError: as in `ctc_loss`.

    Source: Viterbi, Error bounds for convolutional codes, 1967, over the alignments of Graves et al., 2006.

    Example:
        >>> import torch, partita
        >>> logits = torch.eye(3)[[0, 1, 1, 0, 2]][:, None] * 9  # blank, 1, 1, blank, 2
        >>> partita.ctc_align(logits, torch.tensor([[1, 2]]), [5], [2], from_logits=True).labels
        tensor([[0, 1, 1, 0, 2]])
    """
    with torch.no_grad():
        x = _prepare("log_probs", log_probs, targets, input_lengths, target_lengths, blank)
        tensors = (x.targets.labels, x.targets.offsets, x.input_lengths, x.targets.lengths)
        labels, tokens, scores, score = _ctc.align(
            x.logits, *tensors, x.targets.most, blank, from_logits, current_backend()
        )
        dtype = acc_dtype(log_probs.dtype)
    return CTCAlignment(labels, tokens, scores.to(dtype), score.to(dtype), x.targets.most)
