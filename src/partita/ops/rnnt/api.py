"""Transducers, with durations (TDT) or without: the loss of a target, and its best alignment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import check_inplace, plain_eager
from ...runtime.backend import current_backend
from ...runtime.lengths import Lengths
from ...runtime.private_names import CAN_WRITE_OVER_LOGITS
from ...runtime.sizes import same_sizes
from ..ctc.common import reduce_losses
from . import autograd as _rnnt
from .arguments import (
    checked_durations,
    clamp_bound,
    class_index,
    node_logits,
    node_options,
    sequences_of,
)
from .common import NO_DURATIONS, REDUCTIONS


class RNNTAlignment(NamedTuple):
    """The best path of each target.

    Fields:
        steps: `[B, U]` int64, the step at which each token is emitted; -1 past a target's length
            and where there is no path.
        scores: `[B, U]`, the log-probability of the token at that step in nats; 0 where there is
            none.
        score: `[B]`, the log-probability of the path, its blanks included; -inf where there is no
            path.
    """

    steps: Tensor
    scores: Tensor
    score: Tensor


def rnnt_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = -1,
    clamp: float = -1.0,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
    *,
    hat: bool = False,
    fastemit_lambda: float = 0.0,
    delay_penalty: float = 0.0,
    inplace: bool = False,
) -> Tensor:
    """Return the transducer loss: minus the log of the total probability of each target's paths.

    A path starts at step 0 before the first label. A blank leads to the next step, a label to the
    next position of the target, and a blank at the last step after the last label ends it.

    Args:
        logits: `[B, T, U + 1, V]` floating: the output of the joint network at each step and
            position; log-probabilities without `fused_log_softmax`. Entries past the lengths are
            not read and get the gradient 0.
        targets: `[B, U]` integers from 0 to V - 1, other than the blank.
        logit_lengths, target_lengths: `[B]`, tensors on any device, lists or tuples.
        blank: the class of the blank; a negative number counts from V.
        clamp: the gradient in the logits is clipped to ± this number before it is multiplied by
            the gradient that arrives from above; none if it is not above 0.
        reduction: `mean` or `mean_batch` (over the batch), `mean_volume` (the sum of the losses
            over the sum of the target lengths), `sum` or `none`.
        fused_log_softmax: whether the op takes the log-softmax itself.
        hat: whether the blank has the probability sigmoid(logit), and the labels share the rest by
            their own softmax.
        fastemit_lambda: the gradient of the labels' arcs is scaled by 1 + this number.
        delay_penalty: λ; λ ((T_b - 1) / 2 - t) is added to the log-probability of a label at step t
            of a sequence of T_b steps.
        inplace: write the gradient over the memory of `logits`, which no longer has the logits
            after the backward pass. It does nothing where no gradient is needed.

    Returns:
        A number, or `[B]`, in nats; fp32 for half types. A target without a path (no steps) has the
        loss inf and the gradient 0.

    Raises:
        TypeError, ValueError, IndexError: wrong dtypes, shapes, devices, lengths or labels. Values
            on a GPU are checked only with `PARTITA_CHECK=1`; otherwise an invalid sequence has the
            loss NaN and the gradient NaN.
        RuntimeError: `inplace=True` with a leaf.

    Source: Graves, Sequence transduction with recurrent neural networks, 2012; the arguments are
        those of `torchaudio.functional.rnnt_loss`. HAT: Variani et al., Hybrid autoregressive
        transducer, 2020. FastEmit: Yu et al., 2021. Delay penalty: Kang et al.,
        Delay-penalized transducer, 2022.

    Example:
        >>> import torch, partita
        >>> logits = torch.zeros(1, 2, 2, 2)  # two steps, one label, two classes
        >>> # Each of the two paths has three arcs of probability 1 / 2.
        >>> partita.rnnt_loss(logits, torch.tensor([[1]]), [2], [1], blank=0)
        tensor(1.3863)
    """
    checks.choice("reduction", reduction, REDUCTIONS)
    node_logits("logits", logits, "V")
    blank = class_index("blank", blank, logits.shape[3])
    sequences = sequences_of(
        targets, logit_lengths, target_lengths, logits.shape[:3], logits.device
    )
    hat, fastemit, delay = node_options(fused_log_softmax, hat, fastemit_lambda, delay_penalty)
    inputs = (logits, None, *sequences)
    nodes = (blank, NO_DURATIONS, bool(fused_log_softmax), hat, 0.0, delay)
    inplace = inplace and torch.is_grad_enabled() and plain_eager() and logits.requires_grad
    inplace = inplace and CAN_WRITE_OVER_LOGITS
    if inplace:
        check_inplace(logits)
        # The version changes before the logits are saved, so that only this backward pass may
        # read them.
        torch.autograd.graph.increment_version(logits)
    of_gradient = (clamp_bound(clamp), fastemit, inplace)
    losses = _rnnt.losses_of(inputs, nodes, of_gradient, current_backend())
    reduction = "mean_batch" if reduction == "mean" else reduction
    return reduce_losses(losses, sequences[2], reduction)


def rnnt_align(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = -1,
    *,
    fused_log_softmax: bool = True,
) -> RNNTAlignment:
    """Return the most probable path of each target.

    Among equally probable paths, it is the one that takes blanks when it is traced from its end.

    Args:
        logits, targets, logit_lengths, target_lengths, blank, fused_log_softmax: as in `rnnt_loss`.

    Returns:
        `RNNTAlignment(steps, scores, score)`; not differentiable. An invalid sequence that is not
        checked has scores of NaN and steps of -1.

    Raises:
        TypeError, ValueError, IndexError: as in `rnnt_loss`.

    Source: Viterbi, Error bounds for convolutional codes, 1967, over the paths of Graves, 2012.

    Example:
        >>> import torch, partita
        >>> logits = torch.zeros(1, 3, 2, 2)
        >>> logits[0, 1, 0, 1] = 9.0  # the label at step 1
        >>> partita.rnnt_align(logits, torch.tensor([[1]]), [3], [1], blank=0).steps
        tensor([[1]])
    """
    with torch.no_grad():
        node_logits("logits", logits, "V")
        blank = class_index("blank", blank, logits.shape[3])
        sequences = sequences_of(
            targets, logit_lengths, target_lengths, logits.shape[:3], logits.device
        )
        options = (blank, NO_DURATIONS, bool(fused_log_softmax), False, 0.0, 0.0)
        found = _rnnt.align(logits, None, *sequences, *options, current_backend())
        return RNNTAlignment(*found)


def _checked_tdt(
    token_logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    logit_lengths: Lengths,
    target_lengths: Lengths,
    blank_token_id: int,
    durations: Sequence[int],
    sigma: float,
) -> tuple[tuple[Tensor, ...], int, list[int], float]:
    """Return both logits, targets and lengths, the blank, the durations and sigma, all checked."""
    node_logits("token_logits", token_logits, "V")
    node_logits("duration_logits", duration_logits, "K")
    checks.device("duration_logits", duration_logits, token_logits, "token_logits")
    nodes = token_logits.shape[:3]
    if not same_sizes(duration_logits.shape[:3], nodes):
        raise ValueError(
            f"duration_logits: expected shape [B, T, U + 1, K] = {[*nodes, 'K']},"
            f" got {list(duration_logits.shape)}"
        )
    if duration_logits.dtype != token_logits.dtype:
        raise TypeError(
            f"duration_logits: expected the dtype of token_logits, {token_logits.dtype},"
            f" got {duration_logits.dtype}"
        )
    checks.number("sigma", sigma, low=0.0)
    sequences = sequences_of(targets, logit_lengths, target_lengths, nodes, token_logits.device)
    blank = class_index("blank_token_id", blank_token_id, token_logits.shape[3])
    numbers = checked_durations(durations, duration_logits.shape[3])
    return (token_logits, duration_logits.contiguous(), *sequences), blank, numbers, float(sigma)


def tdt_loss(
    token_logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    logit_lengths: Lengths,
    target_lengths: Lengths,
    blank_token_id: int,
    durations: Sequence[int],
    sigma: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Return the loss of a token-and-duration transducer (TDT).

    At each step and position a path emits a token and a duration. A label of duration d leads to
    the next position of the target, d steps later. A blank leads d >= 1 steps on. A path ends by a
    blank that leads from the end of the target exactly to the end of the steps.

    Args:
        token_logits: `[B, T, U + 1, V]` floating. Entries past the lengths are not read and get the
            gradient 0.
        duration_logits: `[B, T, U + 1, K]`, of the same dtype.
        targets: `[B, U]` integers from 0 to V - 1, other than the blank.
        logit_lengths, target_lengths: `[B]`, tensors on any device, lists or tuples.
        blank_token_id: the class of the blank; a negative number counts from V.
        durations: the K durations in steps, 0 or more; at most 8. On a GPU none is above 64.
        sigma: what is subtracted from the log-probability of each token.
        reduction: `mean` (of loss / target length), `mean_batch` (over the batch), `mean_volume`
            (the sum of the losses over the sum of the target lengths), `sum` or `none`.

    Returns:
        A number, or `[B]`, in nats; fp32 for half types. A target without a path has the loss inf
        and the gradient 0.

    Raises:
        TypeError, ValueError, IndexError: wrong dtypes, shapes, devices, durations, lengths or
            labels. Values on a GPU are checked only with `PARTITA_CHECK=1`; otherwise an invalid
            sequence has the loss NaN and the gradient NaN.

    Source: Xu et al., Efficient sequence transduction by jointly predicting tokens and durations,
        2023; the arguments are those of `tdt_loss` in transformers.

    Example:
        >>> import torch, partita
        >>> tokens, durations = torch.zeros(1, 2, 1, 2), torch.zeros(1, 2, 1, 3)
        >>> targets = torch.empty(1, 0, dtype=torch.int64)
        >>> # The blank takes two steps at once, or one step in each of two.
        >>> loss = partita.tdt_loss(tokens, durations, targets, [2], [0], 0, [0, 1, 2])
        >>> torch.isclose((-loss).exp(), torch.tensor(1 / 6 + 1 / 36))
        tensor(True)
    """
    checks.choice("reduction", reduction, REDUCTIONS)
    sequences = (targets, logit_lengths, target_lengths)
    inputs, blank, numbers, sigma = _checked_tdt(
        token_logits, duration_logits, *sequences, blank_token_id, durations, sigma
    )
    nodes = (blank, numbers, True, False, sigma, 0.0)
    losses = _rnnt.losses_of(inputs, nodes, (0.0, 0.0, False), current_backend())
    return reduce_losses(losses, inputs[-1], reduction)


def tdt_align(
    token_logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    logit_lengths: Lengths,
    target_lengths: Lengths,
    blank_token_id: int,
    durations: Sequence[int],
    sigma: float = 0.0,
) -> RNNTAlignment:
    """Return the most probable path of each target through a token-and-duration transducer.

    Among equally probable paths, it is the one that, traced from its end, takes blanks before
    labels, and among these the earlier of `durations`.

    Args:
        token_logits, duration_logits, targets, logit_lengths, target_lengths: as in `tdt_loss`.
        blank_token_id, durations, sigma: as in `tdt_loss`.

    Returns:
        `RNNTAlignment(steps, scores, score)`, whose scores are those of tokens and durations; not
        differentiable.

    Raises:
        TypeError, ValueError, IndexError: as in `tdt_loss`.

    Source: Viterbi, Error bounds for convolutional codes, 1967, over the paths of Xu et al., 2023.

    Example:
        >>> import torch, partita
        >>> tokens, durations = torch.zeros(1, 3, 2, 2), torch.zeros(1, 3, 2, 2)
        >>> tokens[0, 1, 0, 1] = 9.0  # the label at step 1
        >>> found = partita.tdt_align(tokens, durations, torch.tensor([[1]]), [3], [1], 0, [0, 1])
        >>> found.steps
        tensor([[1]])
    """
    with torch.no_grad():
        sequences = (targets, logit_lengths, target_lengths)
        inputs, blank, numbers, sigma = _checked_tdt(
            token_logits, duration_logits, *sequences, blank_token_id, durations, sigma
        )
        options = (blank, numbers, True, False, sigma, 0.0)
        return RNNTAlignment(*_rnnt.align(*inputs, *options, current_backend()))
