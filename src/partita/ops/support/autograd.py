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
    for_gradients,
    is_capturing,
    is_double_backward,
    one_by_one,
    plain_eager,
    saved_tensors,
    takes,
)
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ...runtime.lengths import on_device
from ..cross_entropy.autograd import token_stats, token_stats_backward_op, token_stats_op
from ..cross_entropy.common import NOT_READ
from . import common, reference
from .common import INVALID, Support, SupportStats


def _gpu() -> tuple[ModuleType, ...]:
    from .gpu import rows

    return rows, common


def _sets_fake(target: Tensor, ids: Tensor, offsets: Tensor) -> Support:
    rows, classes = (ids.new_empty(target.shape[0] + ids.shape[0]) for _ in range(2))
    return Support(rows, classes, torch.empty_like(offsets))


define_op = functools.partial(register.define, gpu=_gpu, vmap=one_by_one)
sets_op = define_op(common.support_sets, _sets_fake, check=common.check_values)
stats_op = define_op(reference.support_stats, common.empty_rows)


def entry_index(logits: Tensor, rows: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the logits of the entries are, `[M, C]`; of no class, anywhere in their row."""
    return rows, classes.clamp(0, logits.shape[1] - 1)


def statistics(
    of_sets: Callable[..., Any], of_all: Callable[..., Any], logits: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """Compute the results of `SupportFunction` by functions like its two ops."""
    if logits.ndim == 1:
        return of_sets(logits, *args)
    rows, classes, _, _, temperature, softcap, backend = args
    x = logits[entry_index(logits, rows, classes)].to(acc_dtype(logits.dtype))
    *found, in_set, labels, dlogprob, dentropy = of_sets(x, *args)
    others = of_all(logits, labels, temperature, softcap, NOT_READ, backend)
    logprob, _, entropy, _, maximum, sumexp = others
    is_of_set = labels == NOT_READ
    found = [torch.where(is_of_set, *pair) for pair in zip(found, (logprob, entropy), strict=True)]
    return *found, in_set, labels, dlogprob, dentropy, maximum, sumexp, entropy


class SupportFunction(torch.autograd.Function):
    """Log-probability and entropy of rows, differentiable in the logits, with what follows them.

    The logits are those of entries, `[E]`, and the results are `SupportRows`. Or they are those of
    all classes, `[M, C]`. Then rows without ids are computed too, and the gradient is one tensor.
    """

    generate_vmap_rule = True

    @staticmethod
    @takes(stats_op)
    def forward(*args: Any) -> Any:
        return statistics(stats_op, token_stats_op, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[4:]
        ctx.mark_non_differentiable(*output[2:])
        if plain_eager():  # Zeros for results that nobody uses would cost a launch each.
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:4], *output[3:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        logits, *saved = saved_tensors(ctx)
        support, labels, (dlogprob, dentropy), of_all = saved[:3], saved[3], saved[4:6], saved[6:]
        used = [grad for grad in grads[:2] if grad is not None]
        if not used:
            return (None,) * 8
        upstream = tuple(torch.zeros_like(used[0]) if g is None else g for g in grads[:2])
        if is_double_backward(logits, *upstream):
            calls = (
                lambda x, *args: reference.support_stats(x, Support(*args[:3]), *args[3:-1]),
                lambda x, y, *args: token_stats(
                    torch.where((y == NOT_READ)[:, None], 0, x), y, *args
                ),
            )
            args = (*support, *ctx.options)
            found = double_backward(
                lambda x: statistics(*calls, x, *args)[:2], [logits], [True], upstream
            )
            return *found, *(None,) * 7
        is_invalid = labels == INVALID
        a, c = (torch.where(is_invalid, torch.nan, grad)[support[0]] for grad in upstream)
        # A row without an upstream gradient has none, even if its logits are NaN.
        gradient = torch.where(torch.logical_or(a, c), a * dlogprob + c * dentropy, 0)
        if logits.ndim > 1:
            _, temperature, softcap, backend = ctx.options
            of_rows = (logits, labels, *of_all, temperature, softcap, NOT_READ, backend)
            op = for_gradients(token_stats_backward_op, *upstream)
            whole = op(upstream[0], None, upstream[1], *of_rows)
            # Entries that do not count, as those of rows without ids, add 0.
            index = entry_index(logits, *support[:2])
            gradient = whole.index_put_(index, gradient.to(whole.dtype), accumulate=True)
        return gradient, *(None,) * 7


def stats_of_parts(
    # Takes the input as rows [M, ...] and a `Support`, and returns the logits of the entries in the
    # accumulator's dtype, [E]; or those of all classes, [M, C].
    entries: Callable[[Tensor, Support], Tensor],
    # Takes some rows, their labels, temperature, softcap, and a label that none of them has. It
    # returns their log-probabilities and entropies. None with all logits.
    all_classes: Callable[..., Sequence[Tensor]] | None,
    input: Tensor,  # logits or hidden states, which the public function calls `name`
    name: str,
    num_classes: int,  # of all ranks
    target: Tensor,
    ids: Tensor,
    offsets: Tensor,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
) -> SupportStats:
    """Return the statistics of rows with ids from the logits of their entries, and of the others.

    With all logits nothing waits. Else, unless offsets on the CPU tell that every row has ids, the
    host waits for the number of rows without ids. Where it must not wait, in compiled code, under
    transforms, and in a captured graph, all rows count as such.
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
    logprob, entropy, in_set, labels = apply(SupportFunction, *call)[:4]
    all_have_ids = plain_eager() and offsets.is_cpu and bool((offsets.diff() > 0).all())
    if all_classes is not None and not all_have_ids:
        has_all, waits = labels >= 0, plain_eager() and not is_capturing(labels)
        if waits:
            rows = has_all.nonzero()[:, 0]
        else:
            rows = torch.arange(labels.shape[0], device=labels.device)
        if not waits or len(rows):
            of_all = (*numbers, checks.NOTHING_IGNORED)
            others = all_classes(x[rows], labels[rows].clamp(min=0), *of_all)
            logprob, entropy = (
                torch.where(has_all, torch.zeros_like(a).index_put((rows,), b), a)
                for a, b in zip((logprob, entropy), others, strict=True)
            )
    return SupportStats(*(field.reshape(target.shape) for field in (logprob, entropy, in_set)))
