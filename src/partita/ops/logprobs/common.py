"""Results and conventions that the reference and the kernels of log-probabilities share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.rows import finite_shift
from ...runtime import checks
from ...runtime.dtypes import acc_dtype
from ...runtime.sizes import same_sizes
from ..cross_entropy.common import valid_targets


class LogprobRows(NamedTuple):
    """The log-probabilities of some classes of each row, and what their gradient needs."""

    # Log-probabilities of the given ids, 0 where an id is ignored; with a rest also that of all
    # other classes together, [..., K] or [..., K + 1].
    logprobs: Tensor
    entries: Tensor  # the soft-capped logits of the ids, 0 where an id is no class, [..., K]
    maximum: Tensor  # maximum of the soft-capped logits, [...]
    sumexp: Tensor  # sum of exp((logits - maximum) / temperature), [...]
    rest: Tensor  # maximum and sum of the other classes, [..., 2]; [..., 0] without a rest


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
    """A `TopK` of rows, and what its gradient needs."""

    # logprobs, indices, logsumexp: the fields of `TopK`
    logprobs: Tensor
    indices: Tensor
    logsumexp: Tensor
    # entries, maximum, sumexp: as in `LogprobRows`
    entries: Tensor
    maximum: Tensor
    sumexp: Tensor


class EntryKernels(NamedTuple):
    """The functions of one backend that work on the logits of given ids."""

    gather: Callable[..., None]  # writes the logits of the ids among some classes
    # Returns log-probabilities from these logits and the statistics of the rows.
    finish: Callable[..., Tensor]
    # Returns the sum of the gradients of each row's ids, and one of its classes.
    totals: Callable[..., tuple[Tensor, Tensor]]
    write: Callable[..., Tensor]  # writes the gradient of the logits of the ids among some classes
    accumulate_rest: Callable[..., None]  # updates the statistics of the classes that are no ids


class OtherClasses(NamedTuple):
    """The terms of the gradient of the logits of the classes that are no ids.

    It is `factor` / temperature times a softmax.
    """

    factor: Tensor  # the factor of each row, [...]
    # maximum, sumexp: the statistics of the softmax, [...]
    maximum: Tensor
    sumexp: Tensor


def logprobs_fake(logits: Tensor, ids: Tensor, needs_rest: bool) -> LogprobRows:
    """Return the shapes of the results for rows of logits, or of hidden states."""
    dtype, shape, K = acc_dtype(logits.dtype), logits.shape[:-1], ids.shape[-1]
    return LogprobRows(
        logprobs=logits.new_empty((*shape, K + 1 if needs_rest else K), dtype=dtype),
        entries=logits.new_empty((*shape, K), dtype=dtype),
        maximum=logits.new_empty(shape, dtype=dtype),
        sumexp=logits.new_empty(shape, dtype=dtype),
        rest=logits.new_empty((*shape, 2 if needs_rest else 0), dtype=dtype),
    )


def new_rest(like: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the statistics of no classes of rows of these sizes, `[..., 2]`."""
    rest = like.new_zeros((*rows, 2), dtype=acc_dtype(like.dtype))
    rest[..., 0] = -torch.inf
    return rest


def relative_to(maximum: Tensor, shift: Tensor, temperature: float) -> Tensor:
    """Return exp((maximum - shift) / temperature)."""
    return ((maximum - finite_shift(shift)) / temperature).exp()


def with_ids(
    rest: Tensor, entries: Tensor, ids: Tensor, classes: int, temperature: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return maximum and sum of all classes from those of the rest and the logits of the ids.

    The ids of a row that are classes differ from each other.
    """
    _, not_ignored, out_of_range = valid_targets(ids, classes, ignore_index)
    x = torch.where(not_ignored & ~out_of_range, entries, -torch.inf)
    maximum = torch.cat([rest[..., :1], x], -1).amax(-1)
    sumexp = rest[..., 1] * relative_to(rest[..., 0], maximum, temperature)
    return maximum, sumexp + relative_to(x, maximum.unsqueeze(-1), temperature).sum(-1)


def with_rest(
    found: Tensor, rest: Tensor, maximum: Tensor, sumexp: Tensor, temperature: float
) -> Tensor:
    """Append the log-probability of all other classes together to those of the ids."""
    relative = (rest[..., 0] - finite_shift(maximum)) / temperature
    of_rest = relative + (rest[..., 1].log() - sumexp.log())
    return torch.cat([found, of_rest.unsqueeze(-1)], -1)


def other_classes(
    grad: Tensor,  # the gradient of the log-probabilities, of which the last is that of the rest
    totals: Tensor,  # the sum of the gradients of each row, [...]
    # maximum, sumexp, rest: as in `LogprobRows`
    maximum: Tensor,
    sumexp: Tensor,
    rest: Tensor,
    temperature: float,  # what the logits are divided by
) -> OtherClasses:
    """Return how the classes that are no ids get their gradient."""
    if not rest.shape[-1]:
        return OtherClasses(-totals, maximum, sumexp)
    rest_maximum, rest_sumexp = rest.unbind(-1)
    probability = rest_sumexp * relative_to(rest_maximum, maximum, temperature) / sumexp
    # A row without a gradient has the factor 0, whatever its logits are.
    factor = grad[..., -1] - torch.where(totals == 0, 0, totals * probability)
    rest_sumexp = torch.where(rest_sumexp == 0, 1, rest_sumexp)
    return OtherClasses(factor, rest_maximum.contiguous(), rest_sumexp)


def topk_fake(logits: Tensor, k: int) -> TopKRows:
    """Return the shapes of the results for rows of logits, or of hidden states."""
    dtype, shape = acc_dtype(logits.dtype), logits.shape[:-1]
    return TopKRows(
        logprobs=logits.new_empty((*shape, k), dtype=dtype),
        indices=logits.new_empty((*shape, k), dtype=torch.int64),
        logsumexp=logits.new_empty(shape, dtype=dtype),
        entries=logits.new_empty((*shape, k), dtype=dtype),
        maximum=logits.new_empty(shape, dtype=dtype),
        sumexp=logits.new_empty(shape, dtype=dtype),
    )


def check_k(k: object, classes: int) -> None:
    """Raise unless k is a number from 1 to the number of classes."""
    checks.python_int("k", k)
    if not 1 <= k <= classes:  # type: ignore[operator]
        raise ValueError(f"k: expected a number from 1 to the {classes} classes, got {k}")


def check_ids(ids: Tensor, rows: Tensor, name: str, name_of_ids: str = "ids") -> None:
    """Raise unless the ids are integers `[..., K]` for the rows of the named tensor `[..., D]`."""
    checks.integer(name_of_ids, ids)
    checks.device(name_of_ids, ids, rows, name)
    if ids.ndim != rows.ndim or not same_sizes(ids.shape[:-1], rows.shape[:-1]):
        expected = ", ".join([*map(str, rows.shape[:-1]), "K"])
        raise ValueError(
            f"{name_of_ids}: expected shape [..., K] with the rows of {name} = [{expected}],"
            f" got {list(ids.shape)}"
        )
