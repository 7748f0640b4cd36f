"""Log-probabilities over recorded supports, from hidden states, with their gradients.

Most sets are small: 8 classes on average, and 512 in one of 128 tokens. The loss is the mean of
minus the log-probabilities. PyTorch computes all logits and masks those outside of the sets.
Partita's results are compared with fp64 and have bounds of their own, because it does not round the
logits of recorded classes as PyTorch does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.linear_heads.support import linear_support_stats
from .case import Buffers, Function, Functions, Provider, cases_of, given
from .heads import CLASSES_JUDGED, PEER_BOUND, SIZES, TOKENS_JUDGED, HeadCase, products, sample
from .paths import Truth, evenly

USUAL_IDS, MANY_IDS, ONE_IN = 4, 512, 128
STEP = 31  # from one class of a set to the next, if there are enough classes


class SupportInputs(NamedTuple):
    hidden: Tensor  # [tokens, hidden]
    matrix: Tensor  # [vocabulary, hidden]
    target: Tensor  # [tokens]
    ids: Tensor  # [K]
    offsets: Tensor  # [tokens + 1]


def mean_loss(*inputs: Tensor) -> Tensor:
    return -linear_support_stats(*inputs).logprob.mean()


def composed_loss(
    hidden: Tensor, matrix: Tensor, target: Tensor, ids: Tensor, offsets: Tensor
) -> Tensor:
    """Compute all logits, and mask those outside of the sets with PyTorch's ops."""
    logits = F.linear(hidden, matrix)
    rows = rows_of(offsets, len(ids))
    mask = torch.full_like(logits, -torch.inf)
    mask[rows, ids] = 0
    mask[torch.arange(len(target), device=target.device), target] = 0
    return F.cross_entropy(logits + mask, target)


def rows_of(offsets: Tensor, number: int) -> Tensor:
    """Return the row of each id, without waiting for their number."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return rows.repeat_interleave(offsets.diff(), output_size=number)


def products_of_head() -> Function:
    """Return the bare products of a loss from all logits."""
    function = products()
    return lambda hidden, matrix, *_: function(hidden, matrix)


TORCH: dict[str, Function] = {"linear_support_stats": composed_loss}
PROVIDERS: Functions = {
    "partita": {"linear_support_stats": given(mean_loss)},
    "products": {"linear_support_stats": products_of_head},
}


class LinearSupport(HeadCase):
    """The mean loss over recorded supports. Its unit is the time of products that it leaves out."""

    def inputs(self, buffers: Buffers) -> SupportInputs:
        """Draw the first class of each set, which is its target; the others follow in steps."""
        hidden, matrix = self.head(buffers)
        target = buffers.labels(self.tokens, self.vocabulary)
        row = torch.arange(self.tokens, device=target.device)
        numbers = torch.where(row % ONE_IN == 0, MANY_IDS, 1 + row % (2 * USUAL_IDS - 1))
        step = STEP if self.vocabulary >= STEP * MANY_IDS else 1
        numbers = numbers.clamp(max=self.vocabulary // step)  # so that none repeats
        offsets = torch.cat([numbers.new_zeros(1), numbers.cumsum(0)])
        rows = row.repeat_interleave(numbers)
        place = torch.arange(len(rows), device=target.device) - offsets[rows]
        ids = (target[rows] + step * place) % self.vocabulary
        return SupportInputs(hidden, matrix, target, ids, offsets)

    def standard(self, inputs: SupportInputs) -> Truth:
        truth = self.truth(inputs)
        return truth._replace(own=[0.0] * (2 + len(truth.gradients)))

    def slack(self, dtype: torch.dtype) -> float:
        """Return the bound of a gradient: its last rounding, and sums in fp32."""
        return torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5

    def truth(self, inputs: SupportInputs) -> Truth:
        """Compute the loss in fp64, and gradients of some tokens, and of classes in sets or not."""
        _, _, target, ids, offsets = inputs
        hidden, matrix = (x.detach().double().requires_grad_() for x in inputs[:2])
        rows = rows_of(offsets, len(ids))
        x = (hidden[rows] * matrix[ids]).sum(1)  # of variance 1, so their exponentials are finite
        total = x.new_zeros(len(target)).index_add(0, rows, x.exp())
        loss = (total.log() - x[offsets[:-1]]).mean()
        of_hidden, of_matrix = torch.autograd.grad(loss, (hidden, matrix))
        which = evenly(TOKENS_JUDGED, len(target), ids.device)
        samples = [sample(0, which, of_hidden[which])]
        is_recorded = torch.bincount(ids, minlength=len(matrix)) > 0
        for group in (is_recorded, ~is_recorded):
            candidates = group.nonzero().squeeze(1)
            if len(candidates):
                which = candidates[evenly(CLASSES_JUDGED, len(candidates), ids.device)]
                truth = of_matrix[which]
                samples.append(sample(1, which, truth)._replace(unit=truth.abs().max().clamp(1e-9)))
        return Truth(loss.detach(), ..., samples)

    def bounds(self, provider: Provider, standard: Truth) -> list[float]:
        if not provider.is_ours:
            return [PEER_BOUND] * (2 + len(standard.gradients))
        slack = [self.slack(self.dtype)] * len(standard.gradients)
        return [*slack, 1e-5, 1e-5]  # of the loss, whose logits are not rounded


OPS = {
    "linear_support_stats": cases_of(
        {"linear_support_stats": (LinearSupport, SIZES)}, torch.bfloat16
    )
}
