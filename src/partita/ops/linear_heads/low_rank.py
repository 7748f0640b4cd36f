"""Factors of low rank beside the matrix of a head, as adapters have them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from .autograd import rows_linear
from .common import Head, cast_to_autocast
from .products import aligned_columns


class LoRA(NamedTuple):
    """Factors of low rank that add `scale * input @ A.T @ B.T` to the logits of a linear head.

    Pass it as `low_rank` to `linear_cross_entropy` or another function of a linear head. It is
    differentiable in A and B. A frozen matrix gets no gradient, and no sum of the matrix and B A is
    formed.

    Fields:
        A: `[r, H]`, floating dtype.
        B: `[C, r]`, floating dtype.
        scale: a number; LoRA takes `alpha / r`.

    Source: Hu et al., LoRA: low-rank adaptation of large language models, 2021.

    Example:
        >>> import torch, partita
        >>> hidden, matrix, target = torch.eye(2), torch.zeros(3, 2), torch.tensor([0, 1])
        >>> A, B = torch.tensor([[1.0, -1.0]]), torch.zeros(3, 1, requires_grad=True)
        >>> lora = partita.LoRA(A, B, scale=2.0)
        >>> loss = partita.linear_cross_entropy(hidden, matrix, target, low_rank=lora)
        >>> loss.backward()
        >>> B.grad.T
        tensor([[-1.,  1.,  0.]])
    """

    A: Tensor
    B: Tensor
    scale: float = 1.0


LowRank = tuple[Tensor, Tensor] | LoRA


def with_low_rank(head: Head, low_rank: LowRank | None, invariant: bool) -> Head:
    """Return the head with factors of low rank, checked, in the dtype of autocast.

    Their columns are padded to a multiple of 16, which fast products need.
    """
    if low_rank is None:
        return head
    input, weight = head.input, head.weight
    if isinstance(low_rank, LoRA):
        A, factor, scale = low_rank
        _check("low_rank.A", A, input)
        checks.shape("low_rank.A", A, (*A.shape[:1], input.shape[-1]), "[r, H]")
        checks.number("low_rank.scale", scale, low=-torch.inf)
        names, rank = ("low_rank.A", "low_rank.B"), A.shape[0]
        (A,) = cast_to_autocast(A)  # type: ignore[assignment]
        A = A.to(torch.promote_types(A.dtype, input.dtype))
        states = rows_linear(Head(input, A, None, invariant=invariant)) * scale
    else:
        states, factor = _pair(low_rank)
        names = ("low_rank[0]", "low_rank[1]")
        _check(names[0], states, input)
        rank = states.shape[-1] if states.ndim else 0
        checks.shape(names[0], states, (*input.shape[:-1], rank), "[..., r]")
    _check(names[1], factor, input)
    checks.shape(names[1], factor, (*weight.shape[:-1], rank), "[C, r]")
    states, factor = cast_to_autocast(states, factor)  # type: ignore[assignment]
    states, factor = (aligned_columns(each) for each in (states, factor))
    return Head(*head[:3], states, factor, *head.products)


def with_states(input: Tensor, low_rank_input: Tensor | None) -> Tensor:
    """Return hidden states and the factor beside them in one tensor, to choose rows of both."""
    if low_rank_input is None:
        return input
    return torch.cat((input, low_rank_input.to(input.dtype)), -1)


def _pair(low_rank: Any) -> tuple[Any, Any]:
    if not isinstance(low_rank, (tuple, list)) or len(low_rank) != 2:
        raise TypeError(f"low_rank: expected (H, B), a LoRA or None, got {low_rank!r}")
    return low_rank[0], low_rank[1]


def _check(name: str, tensor: Any, input: Tensor) -> None:
    checks.floating(name, tensor)
    checks.device(name, tensor, input, "input")
