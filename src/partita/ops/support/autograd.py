"""The registered ops of statistics over recorded supports, and their autograd function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import (
    apply,
    double_backward,
    is_capturing,
    is_double_backward,
    one_by_one,
    plain_eager,
    saved_tensors,
    takes,
)
from ...runtime.backend import current_backend
from ...runtime.lengths import on_device
from . import common, reference
from .common import Support, SupportStats


def _gpu() -> tuple[ModuleType, ...]:
    from .gpu import rows

    return rows, common


def _sets_fake(target: Tensor, ids: Tensor, offsets: Tensor, num_classes: int) -> Support:
    E = target.shape[0] + ids.shape[0]
    rows, classes, order = (ids.new_empty(E) for _ in range(3))
    starts = ids.new_empty(num_classes + 1)
    return Support(rows, classes, torch.empty_like(offsets), order, starts)


define_op = functools.partial(register.define, gpu=_gpu, vmap=one_by_one)
sets_op = define_op(common.support_sets, _sets_fake, check=common.check_values)
stats_op = define_op(reference.support_stats, common.empty_rows)


class EntryStats(torch.autograd.Function):
    """The `SupportRows` of the logits of entries, of which the first two are differentiable."""

    generate_vmap_rule = True

    @staticmethod
    @takes(stats_op)
    def forward(*args: Any) -> Any:
        return stats_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[6:-1]
        ctx.mark_non_differentiable(*output[2:])
        if plain_eager():  # Zeros for results that nobody uses would cost a launch each.
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:6], *output[3:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        logits, *support, dlogprob, dentropy = saved_tensors(ctx)
        used = [grad for grad in grads[:2] if grad is not None]
        if not used:
            return (None,) * len(ctx.needs_input_grad)
        upstream = tuple(torch.zeros_like(used[0]) if g is None else g for g in grads[:2])
        if is_double_backward(logits, *upstream):
            (gradient,) = double_backward(
                lambda x: reference.support_stats(x, Support(*support), *ctx.options)[:2],
                [logits],
                [True],
                upstream,
            )
        else:
            a, c = (grad[support[0]] for grad in upstream)
            # A row without an upstream gradient has none, even if its logits are NaN.
            gradient = torch.where((a == 0) & (c == 0), 0, a * dlogprob + c * dentropy)
        return gradient, *(None,) * (len(ctx.needs_input_grad) - 1)


def stats_of_parts(
    entries: Callable[[Tensor, Support], Tensor],
    all_classes: Callable[..., Sequence[Tensor]],
    waits: bool,
    input: Tensor,
    name: str,
    num_classes: int,
    target: Tensor,
    ids: Tensor,
    offsets: Tensor,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
) -> SupportStats:
    """Return the statistics of rows with ids from the logits of their entries, and of the others.

    If every row has ids, offsets on the CPU tell so. Else the host waits for the number of rows
    without ids, or all rows count as such: where it must not wait, in compiled code, under
    transforms, and in a captured graph.

    Args:
        entries: takes the input as rows `[M, ...]` and a `Support`, and returns the logits of the
            entries in the accumulator's dtype, `[E]`.
        all_classes: takes some rows, their labels, temperature, softcap, and a label that none of
            them has. It returns their log-probabilities and entropies.
        waits: whether the host may wait.
        input: logits or hidden states, which the public function calls `name`.
        num_classes: the number of all classes; the rest are arguments of the public function.
    """
    common.check_support(input, name, target, ids, offsets)
    checks.python_int("ignore_index", ignore_index)
    numbers = checks.temperature_and_softcap(temperature, softcap)
    x, labels = input[None].flatten(0, -2), target.reshape(-1).long().contiguous()
    ids, begins = ids.long().contiguous(), offsets.long().contiguous()
    is_sound = offsets.device != target.device
    if is_sound:  # It takes the host less time on the CPU.
        begins = on_device(target.device, common.sound_offsets(begins, len(ids)))[0]
    of_rows, backend = (labels, ids, begins, num_classes, ignore_index), current_backend()
    support = Support(*sets_op(*of_rows, is_sound, backend))
    call = (entries(x, support), *support, num_classes, *numbers, backend)
    *found, status = apply(EntryStats, *call)[:3]
    if not (plain_eager() and offsets.is_cpu and bool((offsets.diff() > 0).all())):
        begin, end = support.offsets[:-1], support.offsets[1:]
        has_all = (begin == end) & (begin != common.WRONG) & (labels != ignore_index)
        of_all = (*numbers, checks.NOTHING_IGNORED)
        if not (waits and plain_eager()) or is_capturing(labels):
            # The gradient of an invalid row of logits is NaN for all classes, by the factor here.
            is_invalid = status < 0
            factor = torch.where(is_invalid, torch.nan, 1.0).to(found[0].dtype)
            others = all_classes(x, torch.where(has_all & ~is_invalid, labels, 0), *of_all)
            pairs = zip(found, others, strict=True)
            found = [torch.where(has_all | is_invalid, b * factor, a) for a, b in pairs]
        elif len(rows := has_all.nonzero()[:, 0]):
            others = all_classes(x[rows], labels[rows], *of_all)
            found = [
                torch.where(has_all, torch.zeros_like(a).index_put((rows,), b), a)
                for a, b in zip(found, others, strict=True)
            ]
    return SupportStats(*(field.reshape(target.shape) for field in (*found, status == 1)))
