"""Hidden states, matrix, bias and labels of the linear heads, checked and made flat."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import autocast_dtype, plain_eager, top_transform
from ...runtime.checks import FLOATING
from ...runtime.invariance import is_batch_invariant
from ...runtime.register import PLAIN
from .autograd import rows_linear
from .common import Head, checked_head
from .low_rank import LowRank, with_low_rank
from .plan import is_small


def is_plain(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | None) -> bool:
    """Return whether this is a plain eager call on tensors that are no subclasses."""
    tensors = (input, weight, bias, target)
    return plain_eager() and all(type(each) in PLAIN for each in tensors if each is not None)


def is_usual(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> bool:
    """Return whether these are plain tensors `[M, H]`, `[C, H]`, `[C]` and `[M]`, in eager mode.

    Their dtypes and devices fit each other too, so that no other check of them is needed. This is
    one expression, since a small call takes little longer than its checks.
    """
    return (
        plain_eager()
        and type(input) in PLAIN
        and type(weight) in PLAIN
        and type(target) is Tensor
        and input.layout is weight.layout is torch.strided
        and not (input.is_nested or weight.is_nested)
        and len(shape := input.shape) == 2
        and len(matrix_shape := weight.shape) == 2
        and matrix_shape[0] != 0
        and shape[1] == matrix_shape[1]
        and target.shape == shape[:1]
        and target.dtype is torch.int64
        and target.is_contiguous()
        and (dtype := input.dtype) in FLOATING
        and weight.dtype is dtype
        and weight.device == (device := input.device)
        and target.device == device
        and (
            bias is None
            or (
                type(bias) in PLAIN
                and bias.dtype is dtype
                and bias.device == device
                and bias.shape == matrix_shape[:1]
            )
        )
        and autocast_dtype(device) is None
    )


def cast_and_check(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None = None,
    more_dimensions: bool = False,
    low_rank: LowRank | None = None,
) -> Head:
    """Return the head in the dtype of autocast; raise unless it fits the target."""
    head = checked_head(input, weight, bias, more_dimensions=more_dimensions, may_round=True)
    if target is not None:
        checks.tensor("target", target)
        checks.device("target", target, input, "input")
    if len(weight) == 0:
        raise ValueError(
            f"linear_weight: expected at least one class, got shape {list(weight.shape)}"
        )
    if weight.ndim > 2 and input.ndim != 2:
        raise ValueError(
            f"input: expected shape [N, H] with a matrix of {weight.ndim} dimensions,"
            f" got {list(input.shape)}"
        )
    return with_low_rank(head, low_rank, is_batch_invariant())


def flat_labels(input: Tensor, target: Tensor) -> Tensor:
    """Check the labels of hidden states `[..., H]`, and return them as `[M]`."""
    checks.integer("target", target)
    checks.shape("target", target, input.shape[:-1], "input without H")
    return target.reshape(-1).long().contiguous()  # a narrow type would wrap the bounds


def all_logits(head: Head) -> Tensor:
    """Compute all logits.

    The classes are in the last dimension for a matrix `[C, H]`, in dimension 1 for one with more
    dimensions.
    """
    input, weight, bias, states, factor = head.tensors
    flat_bias = None if bias is None else bias.flatten()
    flat_factor = None if factor is None else factor.flatten(0, -2)
    flat = Head(input, weight.flatten(0, -2), flat_bias, states, flat_factor, *head.products)
    logits = rows_linear(flat)
    return logits if weight.ndim == 2 else logits.unflatten(1, weight.shape[:-1])


def needs_logits(linear_weight: Tensor, target: Tensor | None) -> bool:
    """Return whether the loss has to be computed from all logits at once."""
    transformed = top_transform() is not None
    has_probabilities = target is not None and target.is_floating_point()
    return linear_weight.ndim > 2 or has_probabilities or transformed


def takes_all_logits(
    heads: Sequence[Head], target: Tensor | None, memory_budget: int | None
) -> bool:
    """Return whether a call computes all logits of these heads at once.

    A small call does, but not in the batch-invariant mode, as the number of tokens must not decide.
    """
    input, weight, *_ = heads[0]
    if needs_logits(weight, None):
        return True
    if not all(is_plain(*head[:3], target) and head.is_usual for head in heads):
        return False
    tokens = len(heads) * input.shape[:-1].numel()  # which would fix a size that is traced
    return is_small(tokens, len(weight), input.dtype, memory_budget)
