"""Results and conventions that the reference and the kernels of log-probabilities share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ...runtime import checks


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


def check_ids(ids: Tensor, rows: Tensor, name: str) -> None:
    """Raise unless the ids are integers `[..., K]` for the rows of the named tensor `[..., D]`."""
    checks.integer("ids", ids)
    checks.device("ids", ids, rows, name)
    if ids.ndim != rows.ndim or ids.shape[:-1] != rows.shape[:-1]:
        expected = ", ".join([*map(str, rows.shape[:-1]), "K"])
        raise ValueError(
            f"ids: expected shape [..., K] with the rows of {name} = [{expected}],"
            f" got {list(ids.shape)}"
        )
