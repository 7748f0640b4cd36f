"""The most probable classes from hidden states: the registered op and the public call."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import apply, one_by_one
from ...runtime.backend import current_backend
from ..logprobs.autograd import topk_of
from ..logprobs.common import TopK, TopKRows, check_k, topk_fake
from . import reference
from .common import chunk_and_save
from .inputs import all_logits, checked_matrix, takes_all_logits
from .logprobs import logprobs_gradients
from .plan import check_budget, padded_width

DEFAULT_BYTES = 2**30  # of the logits of some tokens, if no budget is given


def _fake(input: Tensor, weight: Tensor, k: int, save_logits: bool) -> tuple[Tensor, ...]:
    size = input.shape[0] * padded_width(weight.shape[0]) if save_logits else 0
    return *topk_fake(input, k), input.new_empty(size)


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


topk_op = register.define(
    reference.linear_topk_logprobs,
    _fake,
    gpu=_gpu,
    vmap=one_by_one,
)


class LinearTopK(torch.autograd.Function):
    """The results of `topk_op`, of which the log-probabilities are differentiable.

    The chunk of the backward pass is the last argument.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        k: int,
        temperature: float,
        softcap: float,
        tokens: int,
        save_logits: bool,
        backend: str,
        chunk: int,
    ) -> tuple[Tensor, ...]:
        options = (k, temperature, softcap, tokens, save_logits, backend)
        return topk_op(input, weight, bias, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *head, _, temperature, softcap, _, save_logits, ctx.backend, ctx.chunk = inputs
        ctx.options = (temperature, softcap, checks.NOTHING_IGNORED)
        ctx.mark_non_differentiable(*output[1:])
        rows = TopKRows(*output[:-1])
        of_rows = (rows.entries, rows.maximum, rows.sumexp, rows.entries[:, :0])
        ctx.save_for_backward(*head, rows.indices, *of_rows, output[-1])
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return logprobs_gradients(ctx, grads[0])


def linear_topk_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    memory_budget: int | None = None,
) -> TopK:
    """Find the k most probable classes from hidden states, without all logits in memory.

    They are `topk_logprobs(input @ linear_weight.T + linear_bias, k, ...)`, and a small call
    computes just that; see `linear_cross_entropy`.

    Args:
        input: hidden states `[..., H]`, floating dtype.
        linear_weight: `[C, H]` in the same dtype.
        k: how many classes of each row, from 1 to C.
        linear_bias: `[C]` in the same dtype.
        temperature, softcap: as in `topk_logprobs`.
        memory_budget: bytes of workspace in addition to inputs and results; None for 1 GiB, and
            2 GiB with a gradient. The logits of one token are there in any case.

    Returns:
        `TopK(logprobs, indices, logsumexp)` in nats, as in `topk_logprobs`. The log-probabilities
        are differentiable in hidden states, matrix and bias.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected.

    Source: as `topk_logprobs`, over chunks of the tokens.

    Example:
        >>> import torch, partita
        >>> found = partita.linear_topk_logprobs(torch.ones(1, 2), torch.eye(3, 2), 2)
        >>> found.logprobs, found.indices
        (tensor([[-0.8620, -0.8620]]), tensor([[0, 1]]))
    """
    head = checked_matrix(input, linear_weight, linear_bias)
    rows, classes = head.input.shape[:-1], len(head.weight)
    check_k(k, classes)
    numbers = checks.temperature_and_softcap(temperature, softcap)
    check_budget(memory_budget)
    if takes_all_logits([head], None, memory_budget):
        return topk_of(all_logits(*head), k, *numbers)
    head, chunk, save_logits = head.flat, classes, False
    if any(head.wanted):
        chunk, save_logits = chunk_and_save(head.plan(memory_budget, False), classes)
    room = DEFAULT_BYTES if memory_budget is None else memory_budget
    at_once = max(1, room // (padded_width(classes) * head.input.element_size()))
    call = (*head, k, *numbers, at_once, save_logits, current_backend(), chunk)
    found = TopK(*apply(LinearTopK, *call)[:3])
    return TopK(*(field.reshape(*rows, *field.shape[1:]) for field in found))
