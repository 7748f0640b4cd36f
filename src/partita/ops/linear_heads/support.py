"""Statistics over recorded supports from hidden states: the registered ops and the call."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import (
    apply,
    double_backward,
    for_gradients,
    is_double_backward,
    needed_gradients,
    one_by_one,
    saved_tensors,
    takes,
)
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ..support.autograd import sets_of, stats_of
from ..support.common import (
    Support,
    SupportRows,
    SupportStats,
    check_support,
    may_lack_ids,
)
from . import reference_support
from .chunked import empty_gradients
from .common import chunk_and_save
from .inputs import all_logits, cast_and_check, flat_labels, takes_all_logits
from .plan import check_budget


def _fake(input: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    dtype, M = acc_dtype(input.dtype), input.shape[0]
    statistics = (input.new_empty(M, dtype=dtype) for _ in SupportRows._fields)
    x = input.new_empty(rows.shape[0], dtype=dtype)
    whole_rows = input.new_empty(M, dtype=torch.int64)
    return *statistics, x, whole_rows, torch.empty((), dtype=torch.int64, device="cpu")


def _gpu() -> ModuleType:
    from .gpu import support

    return support


support_op = register.define(
    reference_support.linear_support,
    _fake,
    gpu=_gpu,
    vmap=one_by_one,
)
support_backward_op = register.define(
    reference_support.linear_support_backward,
    empty_gradients,
    gpu=_gpu,
    vmap=one_by_one,
)


class LinearSupport(torch.autograd.Function):
    """The results of `support_op`, of which log-probability and entropy are differentiable."""

    generate_vmap_rule = True

    @staticmethod
    @takes(support_op)
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return support_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, temperature, softcap, ctx.chunk, _, ctx.backend = inputs
        ctx.options = (temperature, softcap)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grads, saved = grads[:2], saved_tensors(ctx)
        head, (target, *support) = saved[:3], saved[3:10]
        wanted = needed_gradients(ctx, *head)
        if is_double_backward(*grads, *head):

            def composed(*head: Any) -> tuple[Tensor, Tensor]:
                return stats_of(all_logits(*head), target, Support(*support), *ctx.options)

            gradients = double_backward(composed, head, wanted, grads)
        else:
            op = for_gradients(support_backward_op, *grads)
            found = op(*grads, *saved, *ctx.options, ctx.chunk, *wanted, ctx.backend)
            pairs = zip(found, wanted, strict=True)
            gradients = tuple(grad if wants else None for grad, wants in pairs)
        return *gradients, *(None,) * (len(ctx.needs_input_grad) - 3)


def linear_support_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    ids: Tensor,
    offsets: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    memory_budget: int | None = None,
) -> SupportStats:
    """Compute statistics over recorded supports from hidden states, without the other logits.

    They are `support_stats(input @ linear_weight.T + linear_bias, target, ids, offsets, ...)`, and
    a small call computes just that; see `linear_cross_entropy`. Otherwise rows with ids take one
    dot product for each class of their sets, and rows without ids those of `linear_token_stats`.
    For the number of these rows a call on a GPU waits once. It waits for nothing if the offsets are
    on the CPU and every row has ids. While a CUDA graph is captured, which cannot wait, all rows
    take the products with the whole matrix otherwise.

    Args:
        input: hidden states `[..., H]`, floating dtype.
        linear_weight: `[C, H]` in the same dtype.
        target: labels `[...]`, any integer dtype.
        ids, offsets: the recorded classes `[K]` and where those of each row begin, `[M + 1]`, as in
            `support_stats`.
        linear_bias: `[C]` in the same dtype.
        temperature, softcap, ignore_index: as in `support_stats`.
        memory_budget: bytes of workspace for rows without ids; None for 2 GiB.

    Returns:
        `SupportStats(logprob, entropy, in_set)` as in `support_stats`. The first two are
        differentiable in hidden states, matrix and bias. The sums are in fp32, and the logits of
        rows with ids are not rounded to a half type.

    Raises:
        TypeError, ValueError, IndexError: as in `support_stats` and `linear_cross_entropy`.

    Source: as `support_stats`; the matrix's gradient is a segmented sum over entries sorted by
    class.

    Example:
        >>> import torch, partita
        >>> ids, offsets = torch.tensor([2, 3]), torch.tensor([0, 2])
        >>> target = torch.tensor([2])
        >>> partita.linear_support_stats(torch.zeros(1, 3), torch.zeros(4, 3), target, ids, offsets)
        SupportStats(logprob=tensor([-0.6931]), entropy=tensor([0.6931]), in_set=tensor([True]))
    """
    head = cast_and_check(input, linear_weight, linear_bias, target)
    labels, shape = flat_labels(input, target), input.shape[:-1]
    check_support(ids, offsets, labels, "input")
    checks.python_int("ignore_index", ignore_index)
    numbers = checks.temperature_and_softcap(temperature, softcap)
    check_budget(memory_budget)
    classes, may_lack = len(head.weight), may_lack_ids(offsets)
    support, in_set = sets_of(labels, ids, offsets, classes, ignore_index)
    if takes_all_logits([head], target, memory_budget):
        logits = all_logits(*head)[None].flatten(0, -2)
        logprob, entropy = stats_of(logits, labels, support, *numbers)
    else:
        head = head.flat
        chunk, _ = chunk_and_save(head.plan(memory_budget, False), classes)
        call = (*head, labels, *support, *numbers, chunk, may_lack, current_backend())
        logprob, entropy = apply(LinearSupport, *call)[:2]
    return SupportStats(logprob.reshape(shape), entropy.reshape(shape), in_set.reshape(shape))
