"""Statistics over the classes that a sampler keeps, from hidden states: ops and the call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import apply, skip_unused_gradients, takes
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ..truncated.autograd import truncated_stats as stats_of_rows
from ..truncated.common import (
    Rules,
    TruncatedRows,
    TruncatedStats,
    check_values,
    checked_rules,
    sums_of_results,
    truncated_fake,
)
from .autograd import define_op, head_backward, saved_logits_fake
from .chunked import gradients_like
from .common import TENSORS, Head, chunk_and_save
from .inputs import all_logits, cast_and_check, flat_labels, takes_all_logits
from .low_rank import LowRank
from .plan import BLOCK_TOKENS, check_budget, padded_width
from .reference import KERNELS

DEFAULT_BYTES = 2**30  # of the workspace, if no budget is given
SEARCH_NUMBERS = 16_896  # of a token beside its logits, among which its threshold is searched
TILE_TOKENS = 128  # of a product's tile


def _check(weight: Tensor, target: Tensor | None, rules: Rules, ignore_index: int) -> None:
    check_values(len(weight), target, rules, ignore_index)


def _fake(head: Head, save_logits: bool) -> tuple[Tensor, ...]:
    return *truncated_fake(head.input), saved_logits_fake(head, save_logits)


truncated_op = define_op(
    KERNELS.linear_truncated_stats, _fake, check=_check, results=len(TruncatedRows._fields) + 1
)
truncated_backward_op = define_op(KERNELS.linear_truncated_stats_backward, gradients_like)


class LinearTruncated(torch.autograd.Function):
    """The results of `truncated_op`, of which the first four are differentiable.

    The chunk of the backward pass is the last argument.
    """

    generate_vmap_rule = True

    @staticmethod
    @takes(truncated_op, "backward_chunk")
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return truncated_op(*args[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.products, ctx.min_p_first, ctx.options = inputs[5:7], inputs[12], inputs[13:16]
        _, save_logits, ctx.backend, ctx.chunk = inputs[16:]
        ctx.mark_non_differentiable(*output[4:])
        skip_unused_gradients(ctx)
        sums = sums_of_results(TruncatedRows(*output[:-1]), inputs[11])
        ctx.save_for_backward(*inputs[:TENSORS], *sums, output[-1], *inputs[8:11])
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients from those of the first four results."""

        def composed(head: Head, *saved: Any) -> tuple[Tensor, ...]:
            (label, _, temperature), rules = saved[:3], saved[-3:]
            options = (*rules, temperature, ctx.min_p_first, *ctx.options, ctx.backend)
            found: tuple[Tensor, ...] = stats_of_rows(all_logits(head), label, *options)
            return found[:4]

        return head_backward(ctx, truncated_backward_op, grads[:4], composed, others=3)


def linear_truncated_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    linear_bias: Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    order: str = "vllm",
    missing: str = "keep",
    ignore_index: int = -100,
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
) -> TruncatedStats:
    """Compute statistics over kept classes from hidden states, without all logits in memory.

    They are `truncated_stats(input @ linear_weight.T + linear_bias, target, ...)`, and a small call
    computes just that; see `linear_cross_entropy`.

    Args:
        input: hidden states `[..., H]`, floating dtype.
        linear_weight: `[C, H]` in the same dtype, or in fp32; see `linear_cross_entropy`.
        target: labels `[...]`, any integer dtype; None for the arg-max, as in `truncated_stats`.
        linear_bias: `[C]` in the dtype of the matrix.
        top_k, top_p, min_p, temperature, softcap, order, missing, ignore_index: as in
            `truncated_stats`; tensors have the shape of `target`.
        memory_budget: bytes of workspace in addition to inputs and results; None for 1 GiB, and
            2 GiB with a gradient. The logits of one token are there in any case.
        logits_dtype, low_rank: as in `linear_cross_entropy`.

    Returns:
        `TruncatedStats`, as in `truncated_stats`. The first four fields are differentiable in
        hidden states, matrix, bias and `low_rank`.

    Raises:
        TypeError, ValueError, IndexError: as in `truncated_stats` and `linear_cross_entropy`.

    Source: as `truncated_stats`, over chunks of the tokens.

    Example:
        >>> import torch, partita
        >>> hidden, matrix = torch.ones(1, 2), torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
        >>> stats = partita.linear_truncated_stats(hidden, matrix, torch.tensor([1]), top_p=0.5)
        >>> stats.logprob, stats.kept
        (tensor([-0.6931]), tensor([2]))
    """
    head = cast_and_check(input, linear_weight, linear_bias, target, low_rank=low_rank)
    rows, classes, head = head.input, len(head.weight), head.of_call(logits_dtype)
    labels = None if target is None else flat_labels(rows, target)
    checks.python_int("ignore_index", ignore_index)
    if softcap is not None:
        checks.number("softcap", softcap, low=0.0, open_low=True)
    options = (top_k, top_p, min_p, temperature, order, missing)
    rules = checked_rules(rows, "input", classes, *options)
    check_budget(memory_budget)
    numbers = (float(softcap or 0.0), checks.NOTHING_IGNORED if target is None else ignore_index)
    if takes_all_logits([head], target, memory_budget):
        of_rows = (all_logits(head), target, *rules, *numbers, current_backend())
        return TruncatedStats(*stats_of_rows(*of_rows)[:6])
    head, chunk, save_logits = head.flat.aligned, classes, False
    if any(head.wanted):
        chunk, save_logits = chunk_and_save(head.plan(memory_budget, False), classes)
    room = DEFAULT_BYTES if memory_budget is None else memory_budget
    bytes_of_logit = rows.element_size() * (1 + head.widens)
    search_bytes = SEARCH_NUMBERS * acc_dtype(rows.dtype).itemsize
    most = room // (padded_width(classes) * bytes_of_logit + search_bytes)
    step = BLOCK_TOKENS if head.invariant else TILE_TOKENS if most > TILE_TOKENS else 1
    most = max(1, most // step) * step
    labels = None if labels is None else head.in_blocks(labels)
    rules = rules.map(lambda each: head.in_blocks(each.reshape(-1), 1))
    call = (*head, labels, *rules, *numbers, most, save_logits, current_backend(), chunk)
    found = apply(LinearTruncated, *call)[:6]
    return TruncatedStats(*(head.of_tokens(field, rows.shape[:-1]) for field in found))
