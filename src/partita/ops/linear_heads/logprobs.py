"""Log-probabilities of given classes from hidden states: the registered ops and the public call."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import apply, one_by_one
from ...runtime.backend import current_backend
from ..logprobs.autograd import logprobs_of
from ..logprobs.common import check_ids, logprobs_fake
from . import reference
from .autograd import gradients_fake, head_backward
from .common import chunk_and_save
from .inputs import all_logits, checked_matrix, takes_all_logits
from .plan import check_budget, padded_width


def _check(weight: Tensor, ids: Tensor, ignore_index: int) -> None:
    checks.labels("ids", ids, len(weight), ignore_index)


def _fake(
    input: Tensor, weight: Tensor, ids: Tensor, needs_rest: bool, save_logits: bool
) -> tuple[Tensor, ...]:
    saved = input.shape[0] * padded_width(weight.shape[0]) if save_logits else 0
    return *logprobs_fake(input, ids, needs_rest), input.new_empty(saved)


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


logprobs_op = register.define(
    reference.linear_logprobs,
    _fake,
    gpu=_gpu,
    check=_check,
    vmap=one_by_one,
)
logprobs_backward_op = register.define(
    reference.linear_logprobs_backward,
    gradients_fake,
    gpu=_gpu,
    vmap=one_by_one,
)


def logprobs_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients from that of the log-probabilities of saved ids."""

    def composed(input: Tensor, weight: Tensor, bias: Tensor | None, *saved: Tensor) -> Tensor:
        ids, *_, rest = saved
        return composed_logprobs(input, weight, bias, ids, rest.shape[1] > 0, *ctx.options)

    return head_backward(ctx, logprobs_backward_op, grad, composed)


class LinearLogprobs(torch.autograd.Function):
    """The results of `logprobs_op`, of which the log-probabilities are differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float,
        softcap: float,
        ignore_index: int,
        needs_rest: bool,
        chunk: int,
        save_logits: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        numbers = (temperature, softcap, ignore_index, needs_rest, chunk)
        return logprobs_op(input, weight, bias, ids, *numbers, save_logits, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options, (_, ctx.chunk, save_logits, ctx.backend) = inputs[4:7], inputs[7:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:4], *output[1:])
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return logprobs_gradients(ctx, grads[0])


def composed_logprobs(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    needs_rest: bool,
    temperature: float,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Compute the log-probabilities from all logits at once."""
    options = (temperature, softcap, ignore_index, needs_rest)
    return logprobs_of(all_logits(input, weight, bias), ids, *options)


def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    memory_budget: int | None = None,
) -> Tensor:
    """Compute the log-probabilities of K given classes from hidden states, without the logits.

    They are `logprobs(input @ linear_weight.T + linear_bias, ids, ...)`, and a small call computes
    just that; see `linear_cross_entropy`.

    Args:
        input: hidden states `[..., H]`, floating dtype.
        linear_weight: `[C, H]` in the same dtype.
        ids: classes `[..., K]`, any integer dtype. Classes may repeat.
        linear_bias: `[C]` in the same dtype.
        temperature, softcap: as in `logprobs`.
        ignore_index: such ids have log-probability and gradient zero.
        memory_budget: bytes of workspace in addition to inputs and results; None for 2 GiB.

    Returns:
        Log-probabilities in nats, `[..., K]`, fp32 (fp64 for fp64), differentiable in hidden
        states, matrix and bias.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected.
        IndexError: an id that is no class; on a GPU only with `PARTITA_CHECK=1`, otherwise its
            log-probability is NaN, and so are the gradients that depend on its row.

    Source: as `logprobs`, merged over chunks of the classes.

    Example:
        >>> import torch, partita
        >>> partita.linear_logprobs(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([[2, 0]]))
        tensor([[-1.3863, -1.3863]])
    """
    options = (linear_bias, temperature, softcap, ignore_index, memory_budget)
    return linear_logprobs_of(input, linear_weight, ids, *options)


def linear_logprobs_of(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    linear_bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
    memory_budget: int | None,
    needs_rest: bool = False,
) -> Tensor:
    """Return `linear_logprobs`, with the rest `[..., K + 1]`; see `reference.logprobs`."""
    head = checked_matrix(input, linear_weight, linear_bias)
    check_ids(ids, input, "input")
    checks.python_int("ignore_index", ignore_index)
    numbers = *checks.temperature_and_softcap(temperature, softcap), ignore_index
    check_budget(memory_budget)
    ids = ids.long()  # a narrow type would wrap the bounds
    if takes_all_logits([head], ids, memory_budget):
        return composed_logprobs(*head, ids, needs_rest, *numbers)
    flat, head = ids[None].flatten(0, -2).contiguous(), head.flat
    plan = head.plan(memory_budget, False)
    chunk, save_logits = chunk_and_save(plan, len(head.weight))
    call = (*head, flat, *numbers, needs_rest, chunk, save_logits, current_backend())
    found = apply(LinearLogprobs, *call)[0]
    return found.reshape(*ids.shape[:-1], found.shape[-1])
