"""Class priors and the star label of CTC, as scores that the ops take for log-probabilities.

The scores are a tensor of their own, `[T, N, C]` or with a star `[T, N, C + 1]`, and autograd takes
their gradient back to the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime import checks
from ...runtime.dtypes import acc_dtype
from .arguments import CTCArguments
from .common import PackedTargets, padded_targets


def check_priors_and_star(
    logits: Tensor, name: str, label_priors: Any, prior_scale: Any, star: Any
) -> None:
    """Raise for priors of a wrong dtype, shape or device, a bad scale, or a star below C."""
    C = logits.shape[-1]
    if label_priors is not None:
        checks.floating("label_priors", label_priors)
        checks.shape("label_priors", label_priors, (C,), "[C]")
        checks.device("label_priors", label_priors, logits, name)
    checks.number("prior_scale", prior_scale, low=0.0)
    if star is not None:
        checks.python_int("star", star)
        if star < C:
            raise ValueError(f"star: expected an index of at least C = {C}, got {star}")


def with_priors_and_star(
    x: CTCArguments,
    from_logits: bool,
    label_priors: Tensor | None,
    prior_scale: float,
    star: int | None,
) -> CTCArguments:
    """Return the arguments of an op with scores in place of logits, and class C as the star."""
    scores = x.logits.to(acc_dtype(x.logits.dtype))
    if from_logits:
        scores = scores.log_softmax(-1)
    if label_priors is not None:
        scores = scores - prior_scale * label_priors.to(scores.dtype)
    if star is None:
        return x._replace(logits=scores)
    _check_labels(x, star)
    C, labels = x.logits.shape[-1], x.labels.long()
    # The class C is the star, so that any other label from C on has to stay out of range.
    labels = torch.where(labels == star, C, torch.where(labels >= C, labels + 1, labels))
    return x._replace(logits=F.pad(scores, (0, 1)), labels=labels)


def _check_labels(x: CTCArguments, star: int) -> None:
    """Raise for the first label that is neither a class nor the star, where values are checked."""
    if not checks.should_check_values(x.labels.device) or x.labels.is_meta:
        return
    C = x.logits.shape[-1]
    targets = PackedTargets(x.labels, x.offsets, x.target_lengths, x.max_target_len)
    padded, mask = padded_targets(targets)
    index = checks.first_index(mask & (padded != star) & ((padded < 0) | (padded >= C)))
    if index is not None:
        raise IndexError(
            f"targets: expected labels from 0 to {C - 1} or the star {star},"
            f" got {int(padded[index])} at {list(index)}"
        )
