"""Losses that PyTorch's own function computes on the CPU, with the same meaning and less time."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...runtime.autograd import native_serves
from ...runtime.checks import labels as check_labels
from ...runtime.checks import should_check_values

# The elements of logits up to which PyTorch's function is faster than one pass that computes loss
# and gradient, which takes more calls and less memory.
NATIVE_ELEMENTS = 2**20
FEW_LABELS = 64


def native_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> Tensor | None:
    """Return the loss of CPU logits over labels by PyTorch, or None where the contracts differ.

    PyTorch lets the logits of an ignored row pass NaN on to the gradient, so such rows are left
    out here. It raises for a label out of range, which the op does only where labels are checked.
    It multiplies a class weight of 0 by an infinite loss.
    """
    if (
        labels.is_floating_point()
        or (logits.numel() > NATIVE_ELEMENTS and not label_smoothing and reduction != "none")
        or not labels.numel()
        or not native_serves(logits)
        or not should_check_values(logits.device)
        or (weight is not None and (label_smoothing != 0.0 or weight.dtype != logits.dtype))
    ):
        return None
    labels = labels.long()
    rows, row_labels = logits, labels
    if ignore_index >= 0 or _lowest(labels) < 0:
        not_ignored = labels != ignore_index
        if not bool(not_ignored.all()):
            if logits.ndim != 2 or reduction == "none":
                return None
            index = not_ignored.nonzero()[:, 0]
            rows, row_labels = logits.index_select(0, index), labels.index_select(0, index)
    try:
        return F.cross_entropy(
            rows,
            row_labels,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    except IndexError:  # This check names the label and its place.
        check_labels("target", labels, logits.shape[1], ignore_index)
        raise


def _lowest(labels: Tensor) -> int:
    """Return the lowest label. Python finds it among few labels in less time than PyTorch."""
    if labels.ndim == 1 and len(labels) <= FEW_LABELS:
        return min(labels.tolist())
    return int(labels.min())
