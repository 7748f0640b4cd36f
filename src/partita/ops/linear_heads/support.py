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
    EVERY_CLASS,
    Support,
    SupportStats,
    check_support,
    rows_without_ids,
    with_rows,
)
from . import reference_support
from .api import linear_token_stats
from .chunked import empty_gradients
from .common import Head
from .inputs import all_logits, cast_and_check, flat_labels, needs_logits
from .plan import check_budget


def _gpu() -> ModuleType:
    from .gpu import support

    return support


logits_op = register.define(
    reference_support.linear_support_logits,
    lambda input, order: input.new_empty(order.shape, dtype=acc_dtype(input.dtype)),
    gpu=_gpu,
    vmap=one_by_one,
)
logits_backward_op = register.define(
    reference_support.linear_support_logits_backward, empty_gradients, gpu=_gpu, vmap=one_by_one
)


class EntryLogits(torch.autograd.Function):
    """The logits of the entries of supports, `[E]`, differentiable in the head."""

    generate_vmap_rule = True

    @staticmethod
    @takes(logits_op)
    def forward(*args: Any) -> Tensor:
        found: Tensor = logits_op(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.first_class, ctx.backend = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        *head, kinds, starts, numbers, classes, ordered, order = saved_tensors(ctx)
        support = Support(kinds, starts, numbers, classes, ordered, order)
        wanted = needed_gradients(ctx, *head)
        if is_double_backward(grad, *head):

            def composed(*head: Any) -> Tensor:
                return reference_support.linear_support_logits(
                    Head(*head), support, ctx.first_class
                )

            gradients = double_backward(composed, head, wanted, grad)
        else:
            op = for_gradients(logits_backward_op, grad)
            found = op(grad, *head, *support, ctx.first_class, *wanted, ctx.backend)
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

    They are `support_stats(input @ linear_weight.T + linear_bias, target, ids, offsets, ...)`. Rows
    with ids take one dot product for each class of their sets, and rows without ids those of
    `linear_token_stats`. For the number of these rows a call waits for the GPU once. It waits for
    nothing if the offsets are on the CPU and every row has ids, which is what a CUDA graph needs.
    A compiler does not know the number either: in its code all rows take these products too.

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
    support, in_set = sets_of(labels, ids, offsets, head.weight.shape[0], ignore_index)
    if needs_logits(head.weight, None):
        logits = all_logits(*head)[None].flatten(0, -2)
        logprob, entropy = stats_of(logits, labels, support, *numbers)
        return SupportStats(logprob.reshape(shape), entropy.reshape(shape), in_set.reshape(shape))
    head = head.flat
    x = apply(EntryLogits, *head, *support, 0, current_backend())
    logprob, entropy = stats_of(x, labels, support, *numbers)
    rows = rows_without_ids(support.kinds, offsets)
    if rows is not None:
        found = linear_token_stats(
            head.input[rows],
            head.weight,
            torch.where(support.kinds == EVERY_CLASS, labels, 0)[rows],
            linear_bias=head.bias,
            temperature=temperature,
            softcap=softcap,
            ignore_index=checks.NOTHING_IGNORED,
            memory_budget=memory_budget,
        )
        logprob = with_rows(logprob, support.kinds, rows, found.logprob)
        entropy = with_rows(entropy, support.kinds, rows, found.entropy)
    return SupportStats(logprob.reshape(shape), entropy.reshape(shape), in_set.reshape(shape))
