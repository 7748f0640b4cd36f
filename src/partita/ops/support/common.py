"""The recorded supports of rows, results and checks that reference and kernels share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.dtypes import acc_dtype

IGNORED = -(2**62)  # the class of a target that is ignored
INVALID = -1  # the label of rows with ids in which a number is out of range
WRONG = 2**62  # offsets that do not run from 0 to the number of ids


class SupportStats(NamedTuple):
    """Statistics of each row over the classes that its sampler recorded as possible.

    Fields:
        logprob: log-probability of the target in nats, 0 where it is ignored, `[...]`.
        entropy: entropy of the distribution in nats, 0 where the target is ignored, `[...]`.
        in_set: whether the target is one of the recorded classes, `[...]` bool.
    """

    logprob: Tensor
    entropy: Tensor
    in_set: Tensor


class Support(NamedTuple):
    """The E = M + K entries of M rows, which are the targets and then the recorded ids, int64."""

    rows: Tensor  # the row of each entry, [E]
    # The class of each entry, [E]. Ids ascend in each row, and may repeat. Those of an ignored row
    # are -1, and its target is `IGNORED`.
    classes: Tensor
    offsets: Tensor  # where the ids of each row begin among all ids, and K, [M + 1]; or all `WRONG`


class SupportRows(NamedTuple):
    """The statistics of each row over its recorded classes, and their derivatives.

    The numbers are NaN in invalid rows, in which the label, an id or the offsets are out of range,
    and 0 in others without ids.
    """

    # logprob, entropy, in_set: as in `SupportStats`, [M]
    logprob: Tensor
    entropy: Tensor
    in_set: Tensor
    # The labels of rows that need the statistics of all classes, [M] int64. They are the targets of
    # rows without ids, C for those that are no class. Of rows with ids it is `NOT_READ`, or
    # `INVALID`, so that the gradient of all their logits is NaN.
    labels: Tensor
    # dlogprob, dentropy: the derivatives of the first two in the logit of each entry, [E]
    dlogprob: Tensor
    dentropy: Tensor


def empty_rows(logits: Tensor, offsets: Tensor) -> SupportRows:
    """Return memory for the statistics of logits of entries, `[E]`, with offsets `[M + 1]`."""
    M, dtype = offsets.shape[0] - 1, acc_dtype(logits.dtype)
    logprob, entropy = (logits.new_empty(M, dtype=dtype) for _ in range(2))
    dlogprob, dentropy = (torch.empty_like(logits, dtype=dtype) for _ in range(2))
    in_set, labels = (offsets.new_empty(M, dtype=of) for of in (torch.bool, torch.int64))
    return SupportRows(logprob, entropy, in_set, labels, dlogprob, dentropy)


def support_sets(
    target: Tensor,
    ids: Tensor,
    offsets: Tensor,
    num_classes: int,
    ignore_index: int,
    is_sound: bool,
) -> Support:
    """Return the `Support` of labels `[M]`, ids `[K]` and offsets `[M + 1]`, all of them int64.

    The ids of a row are sorted, so that those that repeat are neighbours. Nothing waits for a GPU.
    Sound offsets are those of `sound_offsets`.
    """
    M, K = len(target), len(ids) if len(target) else 0
    offsets = offsets.clone() if is_sound else sound_offsets(offsets, len(ids))
    is_ignored = target == ignore_index
    numbers = torch.arange(max(M, K), device=ids.device)
    rows = torch.searchsorted(offsets[1:], numbers[:K], right=True)
    # The rows are in order before and after the sort. Ids out of range stay so.
    keys = torch.add(ids[:K].clamp(-1, num_classes), rows, alpha=num_classes + 2)
    ids = torch.sub(keys.sort().values, rows, alpha=num_classes + 2)
    classes = [torch.where(is_ignored, IGNORED, target), torch.where(is_ignored[rows], -1, ids)]
    return Support(torch.cat([numbers[:M], rows]), torch.cat(classes), offsets)


def sound_offsets(offsets: Tensor, number: int) -> Tensor:
    """Return the offsets, or `WRONG` for all of them if they do not run from 0 to the number.

    Where values are checked, wrong ones raise.
    """
    decreases, ends_wrong = offsets[1:] < offsets[:-1], offsets[-1:] != number
    is_wrong = torch.cat([offsets[:1] != 0, decreases, ends_wrong])
    if not checks.can_check_values(offsets):
        return torch.where(is_wrong.any(), WRONG, offsets)
    if (index := checks.first_index(is_wrong)) is not None:
        place = min(index[0], len(offsets) - 1)
        raise ValueError(
            f"offsets: expected numbers from 0 to the number of ids, {number}, that do not"
            f" decrease, got {int(offsets[place])} at [{place}]"
        )
    return offsets.clone()


def check_support(input: Tensor, name: str, target: Tensor, ids: Tensor, offsets: Tensor) -> None:
    """Raise unless labels, ids and offsets fit the named tensor, which has M rows."""
    for argument, value in (("target", target), ("ids", ids), ("offsets", offsets)):
        checks.integer(argument, value)
        if argument != "offsets" or not offsets.is_cpu:
            checks.device(argument, value, input, name)
    checks.shape("target", target, input.shape[:-1], f"{name}.shape[:-1]")
    if ids.ndim != 1:
        raise ValueError(f"ids: expected shape [K], got {list(ids.shape)}")
    checks.shape("offsets", offsets, [target.numel() + 1], f"[M + 1] for the M rows of {name}")


def check_values(target: Tensor, ids: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise for the first label or id that is no class, where values are checked."""
    checks.labels("target", target, num_classes, ignore_index)
    checks.labels("ids", ids, num_classes, checks.NOTHING_IGNORED)
