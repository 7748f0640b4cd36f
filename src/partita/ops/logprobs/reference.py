"""The specification of log-probabilities of given classes, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.rows import (
    finite_shift,
    row_chunks,
    softcap_slope,
    softcapped,
    without_inert_rows,
)
from ...runtime import checks
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.common import valid_targets
from ..cross_entropy.reference import scaled_rows
from .common import (
    EntryKernels,
    LogprobRows,
    TopKRows,
    new_rest,
    other_classes,
    with_ids,
    with_rest,
)


def logprobs(
    logits: Tensor,  # [..., C]
    ids: Tensor,  # classes [..., K]
    temperature: float,  # what the soft-capped logits are divided by
    softcap: float,  # the soft-cap, or 0
    ignore_index: int,  # the ignored id
    # Whether the log-probability of all other classes together is appended. The ids of a row differ
    # from each other then.
    needs_rest: bool,
) -> LogprobRows:
    """Compute the log-probabilities of the ids of each row."""
    classes, rows = logits.shape[-1], logits.shape[:-1]
    entries = logits.new_zeros(ids.shape, dtype=acc_dtype(logits.dtype))
    gather_entries(logits, 0, classes, ids, entries, softcap, ignore_index)
    numbers = (classes, temperature, ignore_index)
    if needs_rest:
        rest = new_rest(logits, rows)
        accumulate_rest(logits, 0, ids, rest, temperature, softcap)
        maximum, sumexp = with_ids(rest, entries, ids, *numbers)
    else:
        x, maximum = scaled_rows(logits, temperature, softcap)
        rest, sumexp = x.new_empty(*rows, 0), x.exp().sum(-1)
    found = finish_logprobs(entries, ids, maximum, sumexp, *numbers)
    if needs_rest:
        found = with_rest(found, rest, maximum, sumexp, temperature)
    return LogprobRows(found, entries, maximum, sumexp, rest)


def is_one_of(ids: Tensor, first: int, width: int) -> Tensor:
    """Return which of `width` classes from `first` on are ids of their row, `[..., width]`."""
    found = torch.zeros((*ids.shape[:-1], width + 1), dtype=torch.bool, device=ids.device)
    columns = torch.where((ids >= first) & (ids < first + width), ids - first, width)
    return found.scatter_(-1, columns, True)[..., :width]


def accumulate_rest(
    logits: Tensor, first: int, ids: Tensor, rest: Tensor, temperature: float, softcap: float
) -> None:
    """Update the rest in place with the logits of the classes from `first` on that are no ids.

    The logits are `[..., C]`, the ids `[..., K]`, and maximum and sum of the rest `[..., 2]`.
    """
    is_id = is_one_of(ids, first, logits.shape[-1])
    x = softcapped(logits, softcap).masked_fill(is_id, -torch.inf)
    maximum = torch.maximum(rest[..., 0], x.amax(-1))
    shift = finite_shift(maximum)
    before = rest[..., 1] * ((rest[..., 0] - shift) / temperature).exp()
    sumexp = before + ((x - shift.unsqueeze(-1)) / temperature).exp().sum(-1)
    rest.copy_(torch.stack([maximum, sumexp], -1))


def chunk_columns(
    ids: Tensor, first: int, width: int, classes: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return which ids are among `width` classes from `first` on, and their columns, else 0."""
    _, not_ignored, out_of_range = valid_targets(ids, classes, ignore_index)
    in_chunk = not_ignored & ~out_of_range & (ids >= first) & (ids < first + width)
    return in_chunk, torch.where(in_chunk, ids - first, 0)


def gather_entries(
    logits: Tensor,  # the logits of these classes, [..., C]
    first: int,  # the first of them
    classes: int,  # the number of all classes
    ids: Tensor,  # [..., K] int64
    entries: Tensor,  # [..., K], in which the logits of other classes stay
    softcap: float,  # the soft-cap, or 0
    ignore_index: int,  # the ignored id
) -> None:
    """Write the soft-capped logits of the ids among the classes from `first` on."""
    in_chunk, columns = chunk_columns(ids, first, logits.shape[-1], classes, ignore_index)
    found = softcapped(logits.gather(-1, columns), softcap)
    entries.copy_(torch.where(in_chunk, found, entries))


def finish_logprobs(
    entries: Tensor,
    ids: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    classes: int,
    temperature: float,
    ignore_index: int,
) -> Tensor:
    """Return the log-probabilities of the ids from their logits and the rows' statistics."""
    _, not_ignored, out_of_range = valid_targets(ids, classes, ignore_index)
    found = (entries - finite_shift(maximum).unsqueeze(-1)) / temperature
    result = torch.where(not_ignored, found - sumexp.log().unsqueeze(-1), 0)
    return torch.where(out_of_range, torch.nan, result)


def row_totals(grad: Tensor, ids: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the sum of the gradients of each row's ids, and one of its classes.

    The sum is NaN if an id is neither a class nor ignored.
    """
    labels, not_ignored, out_of_range = valid_targets(ids, classes, ignore_index)
    on_ids = torch.where(out_of_range, torch.nan, torch.where(not_ignored, grad, 0))
    label = labels.amax(-1) if ids.shape[-1] else labels.new_zeros(labels.shape[:-1])
    return on_ids.sum(-1), label


def write_entries(
    dlogits: Tensor,
    # first, classes, ids: as in `gather_entries`
    first: int,
    classes: int,
    grad: Tensor,  # the gradient of the log-probabilities, [M, K]
    ids: Tensor,
    totals: Tensor,  # its sum over each row's ids, [M]
    # entries, maximum, sumexp: the logits of the ids, and the statistics of the rows
    entries: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Write the gradient of the logits of the ids among the classes from `first` on.

    It is written to `dlogits`, `[M, C]`, the gradient of these classes, which is returned.
    """
    in_chunk, columns = chunk_columns(ids, first, dlogits.shape[-1], classes, ignore_index)
    on_class = torch.zeros_like(grad)
    for other, of_other in zip(ids.unbind(-1), grad.unbind(-1), strict=True):
        on_class += torch.where(other.unsqueeze(-1) == ids, of_other.unsqueeze(-1), 0)
    p = ((entries - finite_shift(maximum).unsqueeze(-1)) / temperature).exp()
    on_row = totals.unsqueeze(-1)
    # A row without a gradient has the gradient 0, whatever its logits are.
    value = on_class - torch.where(on_row == 0, 0, p / sumexp.unsqueeze(-1) * on_row)
    value = value / temperature
    if softcap:
        t = entries / softcap
        value = torch.where(value == 0, 0, value * (1 - t) * (1 + t))
    rows, k = in_chunk.nonzero(as_tuple=True)
    dlogits[rows, columns[rows, k]] = value[rows, k].to(dlogits.dtype)
    return dlogits


def accumulate_rest_of_rows(
    logits: Tensor, first: int, ids: Tensor, rest: Tensor, temperature: float, softcap: float
) -> None:
    """Do the same for rows `[M, C]`, a few of them at a time on a CPU."""
    for rows in row_chunks(logits):
        accumulate_rest(logits[rows], first, ids[rows], rest[rows], temperature, softcap)


ENTRY_KERNELS = EntryKernels(
    gather_entries, finish_logprobs, row_totals, write_entries, accumulate_rest_of_rows
)


def topk_logprobs(logits: Tensor, k: int, temperature: float, softcap: float) -> TopKRows:
    """Find the k most probable classes of each row, `[..., C]`, and their log-probabilities."""
    x, maximum = scaled_rows(logits, temperature, softcap)
    ids = largest_classes(softcapped(logits, softcap), k)
    sumexp = x.exp().sum(-1)
    entries = softcapped(logits.gather(-1, ids), softcap)
    of_rows = (maximum, sumexp, logits.shape[-1], temperature, checks.NOTHING_IGNORED)
    return TopKRows(
        logprobs=finish_logprobs(entries, ids, *of_rows),
        indices=ids,
        logsumexp=finite_shift(maximum) / temperature + sumexp.log(),
        entries=entries,
        maximum=maximum,
        sumexp=sumexp,
    )


def topk_of_rows(
    logits: Tensor, k: int, temperature: float, softcap: float, found: TopKRows
) -> None:
    """Write the k most probable classes of rows `[M, C]` to the results."""
    for rows in row_chunks(logits):
        part = topk_logprobs(logits[rows], k, temperature, softcap)
        for field, value in zip(found, part, strict=True):
            field[rows] = value


def largest_classes(x: Tensor, k: int) -> Tensor:
    """Return the classes of the k largest numbers of each row, of equal ones the lower classes.

    `torch.topk` finds the numbers, but any of equal ones. NaN counts as infinity.
    """
    x = torch.where(x.isnan(), torch.inf, x)
    least = x.topk(k).values[..., -1:]
    is_greater, is_equal = x > least, x == least
    free = k - is_greater.sum(-1, keepdim=True)
    chosen = is_greater | (is_equal & (is_equal.cumsum(-1) <= free))
    classes = torch.arange(x.shape[-1], device=x.device)
    ids = torch.where(chosen, classes, x.shape[-1]).topk(k, largest=False).values.sort().values
    order = x.gather(-1, ids).sort(descending=True, stable=True).indices
    return ids.gather(-1, order)


def logprobs_gradient(
    grad: Tensor,
    logits: Tensor,
    ids: Tensor,
    entries: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    rest: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Compute the gradient of the logits, differentiable in the first two arguments.

    The statistics only say which rows are not finite.
    """
    labels, not_ignored, out_of_range = valid_targets(ids, logits.shape[-1], ignore_index)
    on_ids, on_rest = grad.split([ids.shape[-1], rest.shape[-1] // 2], -1)
    on_ids = torch.where(not_ignored, on_ids, 0)
    of_row = on_ids.abs().sum(-1) + on_rest.abs().sum(-1)
    logits = without_inert_rows(logits, (maximum, sumexp), (of_row,))
    x, _ = scaled_rows(logits, temperature, softcap)
    on_ids, on_rest = on_ids.to(x.dtype), on_rest.to(x.dtype)
    totals = on_ids.sum(-1, keepdim=True) + on_rest.sum(-1, keepdim=True)
    result = -x.softmax(-1) * totals
    classes = torch.arange(logits.shape[-1], device=x.device)
    is_id = torch.zeros_like(x, dtype=torch.bool)
    for k in range(ids.shape[-1]):
        is_class = classes == labels[..., k : k + 1]
        result = result + is_class.to(x.dtype) * on_ids[..., k : k + 1]
        is_id = is_id | (is_class & not_ignored[..., k : k + 1])
    if rest.shape[-1]:
        y = x.masked_fill(is_id, -torch.inf)
        e = (y - finite_shift(y.detach().amax(-1, keepdim=True))).exp()
        sum_e = e.sum(-1, keepdim=True)
        result = result + on_rest * e / torch.where(sum_e == 0, 1, sum_e)
    result = result / temperature
    if softcap:
        result = result * softcap_slope(logits, softcap)
    is_invalid = out_of_range.any(-1, keepdim=True)
    return torch.where(is_invalid, torch.nan, result).to(logits.dtype)


def logprobs_backward(
    grad: Tensor,
    logits: Tensor,
    ids: Tensor,
    entries: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    rest: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Compute the gradient of the logits."""
    classes, K = logits.shape[-1], ids.shape[-1]
    totals, _ = row_totals(grad[..., :K], ids, classes, ignore_index)
    totals = totals + grad[..., K:].sum(-1)
    others = other_classes(grad, totals, maximum, sumexp, rest, temperature)
    factor, shift, of_row = (each.unsqueeze(-1) for each in others)
    x = softcapped(logits, softcap)
    result = ((x - finite_shift(shift)) / temperature).exp() * (factor / temperature / of_row)
    if softcap:
        result = result * softcap_slope(logits, softcap)
    # A row without a gradient has the gradient 0, whatever its logits are.
    rows = torch.where(factor == 0, 0, result).to(logits.dtype).reshape(-1, classes)
    grad, ids = grad[..., :K].reshape(len(rows), K), ids.reshape(len(rows), K)
    of_rows = (totals.reshape(-1), entries.reshape(ids.shape), maximum.reshape(-1))
    options = (temperature, softcap, ignore_index)
    write_entries(rows, 0, classes, grad, ids, *of_rows, sumexp.reshape(-1), *options)
    return rows.view(logits.shape)
