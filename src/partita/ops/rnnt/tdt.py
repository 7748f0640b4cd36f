"""Token-and-duration transducers: the loss, and the best alignment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.backend import current_backend
from ...runtime.lengths import Lengths
from ...runtime.sizes import same_sizes
from . import autograd as _rnnt
from .api import RNNTAlignment
from .arguments import Sequences, checked_durations, class_index, node_logits, sequences_of
from .common import REDUCTIONS, reduce_losses


def _checked(
    token_logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    logit_lengths: Lengths,
    target_lengths: Lengths,
    blank_token_id: int,
    durations: Sequence[int],
    sigma: float,
) -> tuple[Sequences, int, list[int], float]:
    """Check the arguments, and return targets and lengths, the blank, the durations and sigma."""
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
    return sequences, blank, numbers, float(sigma)


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
    sequences, blank, numbers, sigma = _checked(
        token_logits,
        duration_logits,
        targets,
        logit_lengths,
        target_lengths,
        blank_token_id,
        durations,
        sigma,
    )
    inputs = (token_logits, duration_logits.contiguous(), *sequences)
    nodes = (blank, numbers, True, False, sigma, 0.0)
    losses = _rnnt.losses_of(inputs, nodes, (0.0, 0.0, False), current_backend())
    reduction = "mean_length" if reduction == "mean" else reduction
    return reduce_losses(losses, sequences.target_lengths, reduction)


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
        sequences, blank, numbers, sigma = _checked(
            token_logits,
            duration_logits,
            targets,
            logit_lengths,
            target_lengths,
            blank_token_id,
            durations,
            sigma,
        )
        inputs = (token_logits, duration_logits.contiguous(), *sequences)
        options = (blank, numbers, True, sigma, current_backend())
        return RNNTAlignment(*_rnnt.align(*inputs, *options))
