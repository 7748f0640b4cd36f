"""Specification of statistics over recorded supports, in plain PyTorch.

The support of a row is the set of its recorded classes and its target. With logits x, soft-capped
and divided by the temperature, its distribution is the softmax of x over the support alone. The
gradient of a logit is a (1 - p) or -a p, and -c p (log p + H), for the gradients a and c of the
log-probability and the entropy H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.rows import finite_shift, softcap_slope, softcapped
from ..cross_entropy.common import NOT_READ
from .common import IGNORED, INVALID, WRONG, Support, SupportRows


def support_stats(
    logits: Tensor, support: Support, num_classes: int, temperature: float, softcap: float
) -> SupportRows:
    """Compute log-probability and entropy of each row over its support, and their derivatives.

    The first two results are differentiable in the logits, which are those of the entries, `[E]`.
    """
    (rows, classes, offsets, *_), M = support, len(support.offsets) - 1
    target, is_id = classes[:M], torch.arange(len(rows), device=rows.device) >= M

    def any_in_row(flags: Tensor) -> Tensor:
        return torch.zeros_like(target).index_add(0, rows, flags.long()) > 0

    def row_sums(values: Tensor) -> Tensor:
        """Add up the entries of each row, one by one in their order."""
        sums = torch.zeros(M, dtype=torch.float64, device=rows.device)
        return sums.index_put((rows,), values.double(), accumulate=True).to(values.dtype)

    is_class = (classes >= 0) & (classes < num_classes)
    is_recorded = is_id & (classes == target[rows])
    is_same = is_id[:-1] & (classes[1:] == classes[:-1]) & (rows[1:] == rows[:-1])
    is_repeated = is_recorded | torch.cat([is_id[:1], is_same])
    is_ignored = (target == IGNORED) & (offsets[1:] != WRONG)
    is_invalid = (any_in_row(~is_class) | (offsets[1:] == WRONG)) & ~is_ignored
    has_all = (offsets[1:] == offsets[:-1]) & ~is_ignored
    counts = ~(is_ignored | is_invalid | has_all)
    in_set = ~(is_ignored | is_invalid) & (has_all | any_in_row(is_recorded))

    is_member = is_class & ~is_repeated & counts[rows]
    x = torch.where(is_member, logits, 0)
    capped = torch.where(is_member, softcapped(x, softcap), -torch.inf)
    maximum = capped.new_full((M,), -torch.inf)
    maximum = maximum.scatter_reduce(0, rows, capped.detach(), "amax")
    y = (capped - finite_shift(maximum)[rows]) / temperature
    e = y.exp()
    sumexp = torch.where(counts, row_sums(e), 1)
    p, log_sumexp = e / sumexp[rows], sumexp.log()
    # The sum of p log p would multiply the rounding error of log Z by the entropy.
    entropy = log_sumexp - row_sums(e * torch.where(e == 0, 0, y)) / sumexp
    nan_or_zero = torch.where(is_invalid, torch.nan, 0.0).to(y.dtype)
    of_others = torch.where(is_invalid, INVALID, NOT_READ)

    slope = (softcap_slope(x, softcap) if softcap else 1) / temperature
    surprise = torch.where(p == 0, 0, y) + (entropy - log_sumexp)[rows]
    derivatives = (~is_id).to(y.dtype) - p, -p * surprise
    return SupportRows(
        torch.where(counts, y[:M] - log_sumexp, nan_or_zero),
        torch.where(counts, entropy, nan_or_zero),
        in_set,
        torch.where(has_all, target.where(~is_invalid, num_classes), of_others),
        *(torch.where(is_member, each * slope, nan_or_zero[rows]) for each in derivatives),
    )
