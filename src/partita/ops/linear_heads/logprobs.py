"""Log-probabilities of given or of the most probable classes from hidden states: ops and calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import apply, skip_unused_gradients, takes
from ...runtime.backend import current_backend
from ..logprobs.autograd import logprobs_of, topk_of
from ..logprobs.common import TopK, TopKRows, check_ids, check_k, logprobs_fake, topk_fake
from .autograd import define_op, head_backward, saved_logits_fake
from .chunked import gradients_like
from .common import TENSORS, Head, chunk_and_save
from .inputs import all_logits, cast_and_check, takes_all_logits
from .low_rank import LowRank
from .plan import BLOCK_TOKENS, check_budget, padded_width
from .reference import KERNELS

DEFAULT_TOPK_BYTES = 2**30  # of the logits of some tokens, if no budget is given


def _check(weight: Tensor, ids: Tensor, ignore_index: int) -> None:
    checks.labels("ids", ids, len(weight), ignore_index)


def _fake(head: Head, ids: Tensor, needs_rest: bool, save_logits: bool) -> tuple[Tensor, ...]:
    return *logprobs_fake(head.input, ids, needs_rest), saved_logits_fake(head, save_logits)


def _topk_fake(head: Head, k: int, save_logits: bool) -> tuple[Tensor, ...]:
    return *topk_fake(head.input, k), saved_logits_fake(head, save_logits)


logprobs_op = define_op(KERNELS.linear_logprobs, _fake, check=_check)
logprobs_backward_op = define_op(KERNELS.linear_logprobs_backward, gradients_like)
topk_op = define_op(KERNELS.linear_topk_logprobs, _topk_fake)


class LinearLogprobs(torch.autograd.Function):
    """The results of `logprobs_op`, of which the log-probabilities are differentiable."""

    generate_vmap_rule = True

    @staticmethod
    @takes(logprobs_op)
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return logprobs_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.products, ctx.options = inputs[5:7], inputs[8:11]
        _, ctx.chunk, save_logits, ctx.backend = inputs[11:]
        ctx.mark_non_differentiable(*output[1:])
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*inputs[:TENSORS], inputs[7], *output[1:])
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients from that of the log-probabilities of saved ids."""

        def composed(head: Head, *saved: Tensor) -> tuple[Tensor]:
            (ids, *_, rest), (temperature, softcap, ignore_index) = saved, ctx.options
            options = (temperature, softcap, ignore_index, rest.shape[1] > 0)
            return (logprobs_of(all_logits(head), ids, *options),)

        return head_backward(ctx, logprobs_backward_op, grads[:1], composed)


class LinearTopK(LinearLogprobs):
    """The results of `topk_op`, of which the log-probabilities are differentiable.

    The chunk of the backward pass is the last argument.
    """

    @staticmethod
    @takes(topk_op, "backward_chunk")
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return topk_op(*args[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *head, invariant, widens, _, temperature, softcap, _, save_logits = inputs[:-2]
        (ctx.backend, ctx.chunk), ctx.products = inputs[-2:], (invariant, widens)
        ctx.options = (temperature, softcap, checks.NOTHING_IGNORED)
        ctx.mark_non_differentiable(*output[1:])
        skip_unused_gradients(ctx)
        rows = TopKRows(*output[:-1])
        of_rows = (rows.entries, rows.maximum, rows.sumexp, rows.entries[:, :0])
        ctx.save_for_backward(*head, rows.indices, *of_rows, output[-1])
        ctx.is_spent = not save_logits


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
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """Compute the log-probabilities of K given classes from hidden states, without the logits.

    They are `logprobs(input @ linear_weight.T + linear_bias, ids, ...)`, and a small call computes
    just that; see `linear_cross_entropy`.

    Args:
        input: hidden states `[..., H]`, floating dtype.
        linear_weight: `[C, H]` in the same dtype, or in fp32; see `linear_cross_entropy`.
        ids: classes `[..., K]`, any integer dtype. Classes may repeat.
        linear_bias: `[C]` in the dtype of the matrix.
        temperature, softcap: as in `logprobs`.
        ignore_index: such ids have log-probability and gradient zero.
        memory_budget: bytes of workspace in addition to inputs and results; None for 2 GiB.
        logits_dtype, low_rank: as in `linear_cross_entropy`.

    Returns:
        Log-probabilities in nats, `[..., K]`, fp32 (fp64 for fp64), differentiable in hidden
        states, matrix, bias and `low_rank`.

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
    head = cast_and_check(input, linear_weight, linear_bias, low_rank=low_rank)
    check_ids(ids, input, "input")
    checks.python_int("ignore_index", ignore_index)
    options = (temperature, softcap, ignore_index, memory_budget)
    return linear_logprobs_of(head.of_call(logits_dtype), ids, *options)


def linear_logprobs_of(
    head: Head,
    ids: Tensor,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
    memory_budget: int | None,
    needs_rest: bool = False,
) -> Tensor:
    """Return `linear_logprobs`, with the rest `[..., K + 1]`; see `reference.logprobs`."""
    numbers = *checks.temperature_and_softcap(temperature, softcap), ignore_index
    check_budget(memory_budget)
    ids = ids.long()  # a narrow type would wrap the bounds
    if takes_all_logits([head], ids, memory_budget):
        return logprobs_of(all_logits(head), ids, *numbers, needs_rest)
    flat, head = ids[None].flatten(0, -2).contiguous(), head.flat.aligned
    flat = head.in_blocks(flat)
    chunk, save_logits = chunk_and_save(head.plan(memory_budget, False), len(head.weight))
    call = (*head, flat, *numbers, needs_rest, chunk, save_logits, current_backend())
    found = apply(LinearLogprobs, *call)[0]
    return head.of_tokens(found, ids.shape[:-1])


def linear_topk_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
) -> TopK:
    """Find the k most probable classes from hidden states, without all logits in memory.

    They are `topk_logprobs(input @ linear_weight.T + linear_bias, k, ...)`, and a small call
    computes just that; see `linear_cross_entropy`.

    Args:
        input: hidden states `[..., H]`, floating dtype.
        linear_weight: `[C, H]` in the same dtype, or in fp32; see `linear_cross_entropy`.
        k: how many classes of each row, from 1 to C.
        linear_bias: `[C]` in the dtype of the matrix.
        temperature, softcap: as in `topk_logprobs`.
        memory_budget: bytes of workspace in addition to inputs and results; None for 1 GiB, and
            2 GiB with a gradient. The logits of one token are there in any case.
        logits_dtype, low_rank: as in `linear_cross_entropy`.

    Returns:
        `TopK(logprobs, indices, logsumexp)` in nats, as in `topk_logprobs`. The log-probabilities
        are differentiable in hidden states, matrix, bias and `low_rank`.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected.

    Source: as `topk_logprobs`, over chunks of the tokens.

    Example:
        >>> import torch, partita
        >>> found = partita.linear_topk_logprobs(torch.ones(1, 2), torch.eye(3, 2), 2)
        >>> found.logprobs, found.indices
        (tensor([[-0.8620, -0.8620]]), tensor([[0, 1]]))
    """
    head = cast_and_check(input, linear_weight, linear_bias, low_rank=low_rank)
    rows, classes = head.input.shape[:-1], len(head.weight)
    check_k(k, classes)
    numbers = checks.temperature_and_softcap(temperature, softcap)
    check_budget(memory_budget)
    head = head.of_call(logits_dtype)
    if takes_all_logits([head], None, memory_budget):
        return topk_of(all_logits(head), k, *numbers)
    head, chunk, save_logits = head.flat.aligned, classes, False
    if any(head.wanted):
        chunk, save_logits = chunk_and_save(head.plan(memory_budget, False), classes)
    room = DEFAULT_TOPK_BYTES if memory_budget is None else memory_budget // (1 + head.widens)
    step = BLOCK_TOKENS if head.invariant else 1
    at_once = max(1, room // (step * padded_width(classes) * head.input.element_size())) * step
    call = (*head, k, *numbers, at_once, save_logits, current_backend(), chunk)
    found = TopK(*apply(LinearTopK, *call)[:3])
    return TopK(*(head.of_tokens(field, rows) for field in found))
