"""Results and conventions that the reference and the kernels of log-probabilities share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NOTHING_IGNORED = torch.iinfo(torch.int64).min  # an id that nobody gives


class LogprobRows(NamedTuple):
    """The log-probabilities of some classes of each row, and what their gradient needs.

    Fields:
        logprobs: log-probabilities of the given ids, 0 where an id is ignored, `[..., K]`.
        entries: the soft-capped logits of the ids, 0 where an id is no class, `[..., K]`.
        maximum: maximum of the soft-capped logits, `[...]`.
        sumexp: sum of exp((logits - maximum) / temperature), `[...]`.
    """

    logprobs: Tensor
    entries: Tensor
    maximum: Tensor
    sumexp: Tensor


class EntryKernels(NamedTuple):
    """The functions of one backend that work on the logits of given ids.

    Fields:
        gather: writes the logits of the ids among some classes.
        finish: returns log-probabilities from these logits and the statistics of the rows.
        totals: returns the sum of the gradients of each row's ids, and one of its classes.
        write: writes the gradient of the logits of the ids among some classes.
    """

    gather: Callable[..., None]
    finish: Callable[..., Tensor]
    totals: Callable[..., tuple[Tensor, Tensor]]
    write: Callable[..., Tensor]
