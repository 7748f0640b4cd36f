"""What a rank does with its share of the classes, between the gather of the statistics and the reduction of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.rows import finite_shift
from ...runtime.dtypes import acc_dtype
from ..linear_heads.common import GradientCoefficients, RowState, RowStatistics
from ..linear_heads.reference import accumulate_hidden as absorb_all
from ..linear_heads.reference import accumulate_logits, logits_gradient, row_statistics
from ..linear_heads.reference import gradient_coefficients as coefficients_of


class Packed(NamedTuple):
    """A rank's state, as it is gathered.

    RowStatistics:
        rows: `[4 + 3 spread + 2 entropy, M]`: maximum, sum, label, number of classes; origin, spread, sum of class weights; surprise, arg-max (its bits).
        state: views of these, and an arg-max of its own.
    """

    rows: Tensor
    state: RowState


def bits_of(wide: torch.dtype) -> torch.dtype:
    """An integer of as many bits."""
    return torch.int64 if wide == torch.float64 else torch.int32


def packed(
    like: Tensor,
    rows: int,
    classes: int,
    class_weight: Tensor | None,
    spread: bool,
    entropy: bool,
    *,
    begun: bool,
) -> Packed:
    """Memory for it; with the state before any class, where that is not written by what absorbs the first."""
    words = torch.empty(
        (4 + 3 * spread + 2 * entropy, rows), dtype=acc_dtype(like.dtype), device=like.device
    )
    if not begun:
        words.zero_()
        words[0] = words[2] = -torch.inf
    words[3] = classes
    if spread:
        words[6] = classes if class_weight is None else class_weight.sum(dtype=words.dtype)
    argmax = torch.zeros(rows, dtype=torch.int64, device=like.device) if entropy else None
    origin, summed, surprise = (
        words[4] if spread else None,
        words[5] if spread else None,
        words[-2] if entropy else None,
    )
    return Packed(words, RowState(words[0], words[1], words[2], origin, summed, surprise, argmax))


def closed(x: Packed, first: int) -> Tensor:
    """All that is gathered."""
    if x.state.argmax is not None:
        x.rows[-1] = (x.state.argmax + first).to(bits_of(x.rows.dtype)).view(x.rows.dtype)
    return x.rows


def parallel_logits(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    first: int,
    temperature: float,
    softcap: float,
    spread: bool,
    entropy: bool,
    accumulate_logits: Callable[..., None] = accumulate_logits,
    begun: bool = False,
) -> Tensor:
    """`Packed.rows` of this rank's logits; target and class weights are of its classes."""
    x = packed(
        logits,
        len(logits),
        logits.shape[1],
        class_weight,
        spread,
        entropy,
        begun=begun and logits.numel() > 0,
    )
    if logits.numel():
        accumulate_logits(
            logits, 0, target.contiguous(), class_weight, x.state, temperature, softcap
        )
    return closed(x, first)


def parallel_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    first: int,
    temperature: float,
    softcap: float,
    spread: bool,
    entropy: bool,
    chunk: int,
    keep: bool,
    accumulate_logits: Callable[..., None] = accumulate_logits,
    begun: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same from hidden states and this rank's rows of the matrix; and the logits, where they are to be kept."""
    x = packed(
        input,
        len(input),
        len(weight),
        class_weight,
        spread,
        entropy,
        begun=begun and len(weight) > 0,
    )
    args = (
        input,
        weight,
        bias,
        target,
        class_weight,
        temperature,
        softcap,
        spread,
        entropy,
        chunk,
        keep,
    )
    kept = absorb_all(*args, accumulate_logits=accumulate_logits, first_state=lambda *_: x.state)[1]
    return closed(x, first), kept


def parallel_fields(
    found: Tensor,
    target: Tensor,
    classes: int,
    first: int,
    rank: int,
    temperature: float,
    ignore_index: int,
    spread: bool,
    entropy: bool,
) -> tuple[Tensor, ...]:
    """`Fields` from what all ranks know, `[world, ..., M]`, in rank order. NaN where their classes are not as many as is thought."""
    maxima, sums, labels, sizes = found[:, :4].unbind(1)
    maximum = maxima.amax(0)
    shift = finite_shift(maximum)
    scale = ((maxima - shift) / temperature).exp()
    spoilt = (sizes[:rank].sum(0) != first) | (sizes.sum(0) != classes)
    total = torch.where(spoilt, torch.nan, (sums * scale).sum(0))
    origin = summed = weight = surprise = argmax = None
    if spread:
        origins, spreads, weights = found[:, 4:7].unbind(1)
        origin, weight = origins[0], weights.sum(0)[:1]
        summed = (spreads + weights * (origin - origins)).sum(0)
    if entropy:
        surprises, places = found[:, -2:].unbind(1)
        surprise = (scale * (surprises - sums * (shift - finite_shift(maxima)) / temperature)).sum(
            0
        )
        places = places.contiguous().view(bits_of(found.dtype)).long()
        argmax = torch.where(maxima == maximum, places, classes - 1).amin(0)
    state = RowState(maximum, total, labels.amax(0), origin, summed, surprise, argmax)
    return tuple(row_statistics(state, target, weight, classes, temperature, ignore_index))


def parallel_coefficients(
    target: Tensor,
    nll: Tensor | None,
    logsumexp: Tensor | None,
    spread: Tensor | None,
    entropy: Tensor | None,
    class_weight: Tensor | None,
    entropies: Tensor,
    spreads: bool,
    classes: int,
    temperature: float,
    ignore_index: int,
) -> tuple[Tensor, ...]:
    """`Coefficients` from the gradients of the fields, of which an entropy and a spread were wanted or not; empty for None."""
    like = next(grad for grad in (nll, logsumexp, spread, entropy) if grad is not None)
    nothing = like.new_empty(0)
    fields = RowStatistics(
        nothing,
        nothing,
        like if spreads else nothing,
        entropies,
        nothing,
        torch.empty_like(like),
        nothing,
    )
    found = coefficients_of(
        nll,
        logsumexp,
        spread,
        entropy,
        target,
        class_weight,
        fields,
        classes,
        temperature,
        ignore_index,
    )
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in found)


def parallel_gradient(
    pull: Tensor,
    at_label: Tensor,
    log_pull: Tensor | None,
    by_class: Tensor | None,
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
    logits_gradient: Callable[..., None] = logits_gradient,
) -> Tensor:
    """Of rows of logits, from the coefficients."""
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if logits.numel():
        c = GradientCoefficients(pull, at_label, log_pull, by_class)
        logits_gradient(
            logits,
            0,
            target.contiguous(),
            class_weight,
            c,
            maximum,
            sumexp,
            temperature,
            softcap,
            result,
        )
    return result


def parallel_gradient_(
    logits: Tensor,
    pull: Tensor,
    at_label: Tensor,
    log_pull: Tensor | None,
    by_class: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
    logits_gradient: Callable[..., None] = logits_gradient,
) -> None:
    """Logits that were kept become their gradient."""
    if logits.numel():
        c = GradientCoefficients(pull, at_label, log_pull, by_class)
        logits_gradient(
            logits,
            0,
            target.contiguous(),
            class_weight,
            c,
            maximum,
            sumexp,
            temperature,
            softcap,
            logits,
        )


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b, in the type in which sums are."""
    wide = acc_dtype(a.dtype)
    if a.is_cuda and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)
