"""Results and conventions that the reference and the kernels of log-probabilities share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.dtypes import acc_dtype
from ...runtime.sizes import same_sizes


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


class TopK(NamedTuple):
    """The k most probable classes of each row.

    Fields:
        logprobs: their log-probabilities in nats, in descending order, `[..., k]`.
        indices: the classes, int64; of equal logits the lower class comes first, `[..., k]`.
        logsumexp: log-sum-exp of all soft-capped logits over the temperature, `[...]`.
    """

    logprobs: Tensor
    indices: Tensor
    logsumexp: Tensor


class TopKRows(NamedTuple):
    """A `TopK` of rows, and what its gradient needs.

    Fields:
        logprobs, indices, logsumexp: the fields of `TopK`.
        entries, maximum, sumexp: as in `LogprobRows`.
    """

    logprobs: Tensor
    indices: Tensor
    logsumexp: Tensor
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


def topk_fake(rows: Tensor, k: int) -> TopKRows:
    """Return the shapes of the results for rows `[..., D]`."""
    dtype, shape = acc_dtype(rows.dtype), rows.shape[:-1]
    return TopKRows(
        logprobs=rows.new_empty((*shape, k), dtype=dtype),
        indices=rows.new_empty((*shape, k), dtype=torch.int64),
        logsumexp=rows.new_empty(shape, dtype=dtype),
        entries=rows.new_empty((*shape, k), dtype=dtype),
        maximum=rows.new_empty(shape, dtype=dtype),
        sumexp=rows.new_empty(shape, dtype=dtype),
    )


def check_k(k: object, classes: int) -> None:
    """Raise unless k is a number from 1 to the number of classes."""
    checks.python_int("k", k)
    if not 1 <= k <= classes:  # type: ignore[operator]
        raise ValueError(f"k: expected a number from 1 to the {classes} classes, got {k}")


def check_ids(ids: Tensor, rows: Tensor, name: str) -> None:
    """Raise unless the ids are integers `[..., K]` for the rows of the named tensor `[..., D]`."""
    checks.integer("ids", ids)
    checks.device("ids", ids, rows, name)
    if ids.ndim != rows.ndim or not same_sizes(ids.shape[:-1], rows.shape[:-1]):
        expected = ", ".join([*map(str, rows.shape[:-1]), "K"])
        raise ValueError(
            f"ids: expected shape [..., K] with the rows of {name} = [{expected}],"
            f" got {list(ids.shape)}"
        )
