"""Checks of the scores and lengths of paths, which all families share."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor

from ..primitives.semiring import Semiring
from ..runtime import checks
from ..runtime.constants import scalar
from ..runtime.lengths import Lengths, lengths_on_device
from ..runtime.sizes import holds, same_sizes


def check_semiring(semiring: Semiring) -> None:
    """Raise for an argument that is not a semiring."""
    if not isinstance(semiring, Semiring):
        raise TypeError(f"semiring: expected a Semiring, as Log or Max, got {semiring!r}")


def full_lengths(scores: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the lengths `[N]` int64 of scores `[T, N, ...]`; T for each if none were given."""
    if lengths is None:
        return torch.full((scores.shape[1],), scores.shape[0], device=scores.device)
    return lengths.long()


def steps_first(emissions: Any, batch_first: bool) -> Tensor:
    """Return emissions as `[T, N, C]`, or raise for a wrong dtype or shape."""
    checks.floating("emissions", emissions)
    if emissions.ndim != 3 or not holds(emissions.shape[1 if batch_first else 0] >= 1):
        raise ValueError(
            f"emissions: expected shape {_layout(batch_first)} with T of at least 1,"
            f" got {list(emissions.shape)}"
        )
    return emissions.transpose(0, 1) if batch_first else emissions


def end_of_chains(name: str, end: Tensor, emissions: Tensor) -> Tensor:
    """Return numbers of the first or last states, `[C]` or `[N, C]`, as `[N, C]`.

    A wrong dtype, shape or device raises.
    """
    checks.floating(name, end)
    checks.device(name, end, emissions, "emissions")
    N, C = emissions.shape[1:]
    if not same_sizes(end.shape, (C,) if end.ndim == 1 else (N, C)):
        raise ValueError(
            f"{name}: expected shape [C] or [N, C] with [N, C] = {[N, C]}, got {list(end.shape)}"
        )
    return end.expand(N, C)


def checked_mask(emissions: Tensor, mask: Tensor, batch_first: bool) -> Tensor:
    """Return a mask, `[N, T]` with `batch_first`, as `[T, N]` bool; a wrong one raises.

    The emissions are `[T, N, C]`.
    """
    T, N, _ = emissions.shape
    checks.tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: expected dtype torch.bool, got {mask.dtype}")
    shape, meaning = ((N, T), "[N, T]") if batch_first else ((T, N), "[T, N]")
    try:
        checks.shape("mask", mask, shape, f"{meaning} of emissions")
    except ValueError as error:
        is_other = tuple(mask.shape) == shape[::-1]
        raise ValueError(f"{error}{_other_layout(batch_first, is_other)}") from None
    checks.device("mask", mask, emissions, "emissions")
    return mask.mT if batch_first else mask


def lengths_of_chains(
    emissions: Tensor, lengths: Lengths | None, mask: Tensor | None, batch_first: bool, unit: str
) -> Tensor | None:
    """Return the lengths of sequences, `[N]` on the device of the emissions; None for T of each.

    Args:
        emissions: `[T, N, C]`.
        lengths: `[N]`, 1 to T, or None.
        mask: `[T, N]` bool instead of lengths, True for a prefix of each sequence; or None.
        batch_first: whether the mask is `[N, T]`, as the user's emissions are `[N, T, C]`.
        unit: what a sequence consists of, in messages.
    """
    T, N, _ = emissions.shape
    if mask is None:
        if lengths is None:
            return None
        try:
            found = lengths_on_device("lengths", lengths, N, emissions.device)[1]
        except ValueError as error:
            is_other = T != N and isinstance(lengths, Sized) and len(lengths) == T
            raise ValueError(f"{error}{_other_layout(batch_first, is_other)}") from None
        checks.within("lengths", found, 1, T, f"{unit}s")
        return found
    if lengths is not None:
        raise TypeError("mask: expected either lengths or a mask, got both")
    steps = checked_mask(emissions, mask, batch_first)
    hole = steps[1:] & ~steps[:-1]
    if checks.can_check_values(mask):
        if (index := checks.first_index(hole.mT)) is not None:
            n, t = index[0], index[1] + 1
            is_other = bool(steps[:, 0].all()) and not bool((steps[:, 1:] & ~steps[:, :-1]).any())
            raise ValueError(
                f"mask: expected a prefix of each sequence, got a {unit} at"
                f" {[n, t] if batch_first else [t, n]} after one that is left out"
                f"{_other_layout(batch_first, is_other)}"
            )
        if (index := checks.first_index(~steps[0])) is not None:
            raise ValueError(
                f"mask: expected at least one {unit} in each sequence, got none in {index[0]}"
            )
    return torch.where(hole.any(0), -1, steps.sum(0))


def _layout(batch_first: bool) -> str:
    return "[N, T, C]" if batch_first else "[T, N, C]"


def _other_layout(batch_first: bool, is_meant: bool) -> str:
    """Return the end of a message to a user who seems to mean the other layout, or nothing."""
    if not is_meant:
        return ""
    return (
        f"; emissions is {_layout(batch_first)}, and batch_first={not batch_first} takes"
        f" {_layout(not batch_first)}"
    )


def check_equal(name: str, expected: Tensor, given: Tensor) -> Tensor:
    """Return where the integers of another distribution are the expected ones.

    Others raise where values are checked.
    """
    given = given.to(expected.dtype)
    same = expected == given
    is_checked = given is not expected and checks.should_check_values(expected.device)
    if is_checked and checks.can_check_values(same) and not same.all():
        raise ValueError(f"other.{name}: expected the {name} of this chain, got another")
    return same


def equal_lengths(p: Any, q: Any) -> Tensor:
    """Return where the lengths of two potentials are equal, `[N]`, as in `check_equal`."""
    return check_equal("lengths", *(full_lengths(x[0], x.lengths) for x in (p, q)))


def as_values(
    name: str, values: Tensor | None, scores: Tensor, scores_name: str, device: str
) -> Tensor:
    """Return values in the shape of the scores that they belong to, zeros for None.

    A wrong dtype, shape or device raises. The argument called `device` is on the right one.
    """
    if values is None:
        values = scalar(0.0, scores.dtype, scores.device)
    checks.floating(name, values)
    checks.device(name, values, scores, device)
    try:
        return values.expand(scores.shape)
    except RuntimeError:
        raise ValueError(
            f"{name}: expected what broadcasts to the {scores_name}, {list(scores.shape)},"
            f" got {list(values.shape)}"
        ) from None
