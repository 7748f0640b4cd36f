"""The row statistics and losses of TRL's trainers, under its names."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.cross_entropy.api import TokenStats, token_stats
from ..ops.divergence.api import divergence
from ..ops.linear_heads.api import linear_token_stats
from ..ops.logprobs.autograd import logprobs_of
from ..ops.logprobs.common import check_ids
from ..runtime import checks
from .naming import Renamed, labels_read

__all__ = [
    "chunked_cross_entropy_loss",
    "entropy_from_logits",
    "generalized_jsd_loss",
    "selective_log_softmax",
    "selective_log_softmax_and_entropy",
]

IGNORED = -100  # the label of positions without a loss
SMALLEST_PROBABILITY = 1e-8  # to which TRL raises smaller probabilities
NO_LABEL = -1  # no class, and so what a masked row may have as its ignored label


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """Log-probabilities of the given classes of each row, `log_softmax` and then `gather`.

    Args:
        logits: `[..., C]`, floating dtype.
        index: classes `[...]`, or `[..., K]`, any integer dtype.
        temperature: positive; what the logits are divided by.
        row_mask: `[...]` or `[..., K]`, the shape of the classes; where it is 0, results and
            gradients are 0, and the class may be any number.

    Returns:
        Log-probabilities in nats, `[...]` or `[..., K]`, differentiable in the logits. Half types
        give fp32 on a GPU and their own dtype on a CPU, as in TRL.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.token_stats` and `partita.logprobs`.

    Source: `trl.trainer.utils.selective_log_softmax` of TRL 1.16, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.trl import selective_log_softmax
        >>> selective_log_softmax(torch.zeros(1, 2, 4), torch.tensor([[3, 0]]))
        tensor([[-1.3863, -1.3863]])
    """
    checks.floating("logits", logits)
    checks.integer("index", index)
    if index.ndim == logits.ndim - 1:
        return _in_dtype(_statistics(logits, index, temperature, row_mask).logprob, logits)
    numbers = checks.temperature_and_softcap(temperature, None)
    with Renamed({"ids": "index"}):
        check_ids(index, logits, "logits")
        ids, ignored = _with_ignored(index, row_mask)
        return _in_dtype(logprobs_of(logits, ids, *numbers, ignored), logits)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of one class, and entropy, of each row, from one read of the logits.

    Args:
        logits: `[..., C]`, floating dtype.
        index: classes `[...]`, any integer dtype.
        entropy_requires_grad: whether the entropy is differentiable.
        temperature, row_mask: as in `selective_log_softmax`.

    Returns:
        Log-probabilities and entropies in nats, both `[...]`, in the dtype of
        `selective_log_softmax`.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.token_stats`.

    Source: the function of that name in TRL 1.16, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.trl import selective_log_softmax_and_entropy
        >>> selective_log_softmax_and_entropy(torch.zeros(1, 4), torch.tensor([2]))
        (tensor([-1.3863]), tensor([1.3863]))
    """
    checks.floating("logits", logits)
    checks.integer("index", index)
    stats = _statistics(logits, index, temperature, row_mask)
    entropy = stats.entropy if entropy_requires_grad else stats.entropy.detach()
    if row_mask is not None:
        entropy = entropy.masked_fill(_masked(index, row_mask), 0.0)
    return _in_dtype(stats.logprob, logits), _in_dtype(entropy, logits)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """Entropy of each row of logits, in nats.

    Args:
        logits: `[..., C]`, floating dtype.
        chunk_size: taken for TRL's signature, and not used: no chunk of probabilities is made.

    Returns:
        Entropies `[...]`, differentiable in the logits, in the dtype of `selective_log_softmax`.

    Raises:
        TypeError, ValueError: as in `partita.token_stats`.

    Source: `trl.trainer.utils.entropy_from_logits` of TRL 1.16, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.trl import entropy_from_logits
        >>> entropy_from_logits(torch.zeros(1, 2, 4))
        tensor([[1.3863, 1.3863]])
    """
    return _in_dtype(token_stats(logits).entropy, logits)


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    logits_are_probs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Generalised Jensen-Shannon divergence of a student from a teacher, for distillation.

    Args:
        student_logits, teacher_logits: `[N, ..., C]`, floating dtype.
        labels: `[N, ...]`, any integer dtype; positions with -100 have loss and gradient 0.
        beta, temperature: as in `partita.divergence`.
        reduction: `batchmean` (over the positions with a label; over N without labels), `mean`
            (over these positions and the C classes) or `sum`.
        logits_are_probs: whether both are probabilities, from which no temperature is taken.
        num_items_in_batch: what the sum is divided by instead, a number.

    Returns:
        The divergence in nats, a number, fp32 (fp64 for fp64), differentiable in `student_logits`.
        Without any label it is 0, and its `mean` NaN.

    Raises:
        TypeError, ValueError: as in `partita.divergence`.

    Source: `GKDTrainer.generalized_jsd_loss` and that of `GOLDTrainer` in TRL 1.16, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.trl import generalized_jsd_loss
        >>> teacher = torch.tensor([[[1.0986, 0.0]]])
        >>> generalized_jsd_loss(torch.zeros(1, 1, 2), teacher, torch.tensor([[1]]), beta=0.0)
        tensor(0.1308)
    """
    checks.choice("reduction", reduction, ("batchmean", "mean", "sum"))
    checks.floating("student_logits", student_logits)
    checks.floating("teacher_logits", teacher_logits)
    mask = None
    if labels is not None:
        checks.integer("labels", labels)
        mask = labels != IGNORED
    if logits_are_probs:
        student_logits, teacher_logits = (
            p.clamp_min(SMALLEST_PROBABILITY).log() for p in (student_logits, teacher_logits)
        )
        temperature = 1.0
    is_mean = num_items_in_batch is None and (
        reduction == "mean" or (reduction == "batchmean" and mask is not None)
    )
    with Renamed({"logits": "student_logits", "mask": "labels"}):
        loss = divergence(
            student_logits,
            teacher_logits,
            beta=beta,
            temperature=temperature,
            mask=mask,
            reduction="mean" if is_mean else "sum",
        )
    if num_items_in_batch is not None:
        return loss / _on_device(num_items_in_batch, loss)
    if reduction == "mean":
        return loss / student_logits.shape[-1]
    if reduction == "sum":
        return loss
    if mask is None:
        return loss / max(student_logits.shape[0], 1)
    return loss.masked_fill(~mask.any(), 0.0)


def chunked_cross_entropy_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    chunk_size: int,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    lm_head_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss of a causal language model from hidden states, with the numbers that `SFTTrainer` logs.

    Args:
        hidden_states: `[N, T, H]`, floating dtype; the input of the model's last layer.
        lm_head_weight: `[C, H]` in the same dtype.
        chunk_size: taken for TRL's signature, and not used: the chunks follow the sizes.
        labels: `[N, T]`, the tokens themselves, which this function shifts; -100 for positions
            without a loss. They are not read if `shift_labels` is given.
        shift_labels: `[N, T]`, the label of each position.
        num_items_in_batch: what the sum is divided by, a number; None for the number of labels.
        logit_scale: positive; a factor of the logits.
        final_logit_softcapping: the soft-cap of the logits, after the factor.
        lm_head_bias: `[C]`.

    Returns:
        The loss in nats, differentiable in hidden states, matrix and bias; how many labels are the
        most probable class; the sum of the entropies of their rows in nats; and the number of
        labels. Each is a number. Without any label the loss is 0.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.linear_token_stats`.

    Source: `trl.trainer.sft_trainer._chunked_cross_entropy_loss` of TRL 1.12 to 1.14, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.trl import chunked_cross_entropy_loss
        >>> hidden_states, labels = torch.zeros(1, 3, 4), torch.tensor([[5, -100, 0]])
        >>> chunked_cross_entropy_loss(hidden_states, torch.ones(8, 4), 256, labels)
        (tensor(2.0794), tensor(1.), tensor(2.0794), tensor(1))
    """
    if labels is None and shift_labels is None:
        raise ValueError("labels: expected labels or shift_labels, got None for both")
    checks.number("logit_scale", logit_scale, low=0.0, open_low=True)
    checks.floating("hidden_states", hidden_states)
    given = labels_read(labels, shift_labels)
    if shift_labels is None:
        hidden_states, shift_labels = hidden_states[..., :-1, :], given.tensor[..., 1:]
    temperature = 1.0 / logit_scale
    if logit_scale != 1.0 and final_logit_softcapping is not None:
        # The cap comes after the factor, so the temperature, which comes last, cannot serve.
        temperature = 1.0
        hidden_states = hidden_states * logit_scale
        lm_head_bias = None if lm_head_bias is None else lm_head_bias * logit_scale
    names = {"input": "hidden_states", "linear_weight": "lm_head_weight", "target": given.name}
    names |= {"linear_bias": "lm_head_bias", "softcap": "final_logit_softcapping"}
    with Renamed(names, given, lm_head_weight.shape[0], IGNORED):
        stats = linear_token_stats(
            hidden_states,
            lm_head_weight,
            shift_labels,
            linear_bias=lm_head_bias,
            temperature=temperature,
            softcap=final_logit_softcapping,
        )
    is_valid = shift_labels != IGNORED
    number = is_valid.sum()
    correct = ((stats.argmax == shift_labels) & is_valid).sum().float()
    entropy = torch.where(is_valid, stats.entropy.detach(), 0.0).sum()
    total = -stats.logprob.sum()
    denominator = number.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return total / _on_device(denominator, total), correct, entropy, number


def _on_device(number: Tensor | int, like: Tensor) -> Tensor | int:
    return number.to(like.device) if isinstance(number, Tensor) else number


def _in_dtype(found: Tensor, logits: Tensor) -> Tensor:
    """Return a result in the dtype that TRL gives: its kernels for GPUs return fp32."""
    return found.to(logits.dtype) if logits.is_cpu else found


def _statistics(
    logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None
) -> TokenStats:
    """Return the statistics of the rows, of which masked ones have log-probability 0."""
    labels, ignored = _with_ignored(index, row_mask)
    with Renamed({"target": "index"}):
        return token_stats(logits, labels, temperature=temperature, ignore_index=ignored)


def _with_ignored(index: Tensor, row_mask: Tensor | None) -> tuple[Tensor, int]:
    """Return the classes, those that are masked replaced by an ignored label, and that label."""
    if row_mask is None:
        return index.long(), checks.NOTHING_IGNORED
    return index.long().masked_fill(_masked(index, row_mask), NO_LABEL), NO_LABEL


def _masked(index: Tensor, row_mask: Tensor) -> Tensor:
    """Return where the mask is 0; raise unless it has the shape of the index."""
    checks.tensor("row_mask", row_mask)
    checks.shape("row_mask", row_mask, index.shape, "the shape of index")
    checks.device("row_mask", row_mask, index, "index")
    return row_mask == 0
