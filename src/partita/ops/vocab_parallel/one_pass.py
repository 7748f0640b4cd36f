"""The loss and its gradient from one pass over the logits, on the GPUs of one host.

The kernels of the ranks exchange the statistics of each row while they run, instead of gathering
them between two passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import private_names
from ...runtime.backend import current_backend, resolve
from ...runtime.register import PLAIN
from ..cross_entropy.autograd import scale_by_upstream
from ..cross_entropy.common import LossOptions
from .gpu.plan import slot_count
from .local_losses import ParallelLossArguments, prepare_rows
from .shard import VocabShard, refuse_second_derivative
from .symmetric_memory import may_share_memory, next_call_slots


def one_pass_loss(input: Tensor, target: Tensor, arguments: ParallelLossArguments) -> Tensor | None:
    """Return the loss, or None where the kernels of the ranks cannot compute it together.

    The loss is reduced, and the kernels wait for each other. All conditions have the same value on
    all ranks.
    """
    options = arguments.options
    if options.reduction == "none" or arguments.weight is not None or options.label_smoothing:
        return None
    if type(input) not in PLAIN or type(target) not in PLAIN:
        return None
    if not (torch.is_grad_enabled() and input.requires_grad):
        return None
    if input.ndim < 2 or input.dtype not in (torch.bfloat16, torch.float32):
        return None
    if not may_share_memory(input):
        return None
    if resolve(current_backend(), input.device, has_cpu=False) != "gpu":
        return None
    shard, logits, labels = prepare_rows(input, target, arguments)
    if len(shard.sizes) == 1 or not len(logits):
        return None
    result = loss_and_gradient(logits.detach(), labels, shard, options)
    if result is None:
        return None
    return ParallelOnePass.apply(logits, labels, result, shard, options, current_backend())


def loss_and_gradient(
    logits: Tensor, target: Tensor, shard: VocabShard, options: LossOptions
) -> tuple[Tensor, Tensor] | None:
    """Return the reduced loss and the gradient of this rank's logits.

    Returns None on all ranks where they do not share memory. There is no reference: GPUs of one
    host wait for each other inside of the kernel.
    """
    from .gpu.launch import parallel_one_pass

    group = private_names.resolve_process_group(shard.group)
    slots = slot_count(len(logits), shard.sizes, logits.element_size())
    call = next_call_slots(group, logits.device, slots)
    if call is None:
        return None
    return parallel_one_pass(
        logits,
        target.contiguous(),
        *call,
        shard.sizes,
        shard.rank,
        options,
    )


class ParallelOnePass(torch.autograd.Function):
    """The reduced loss of rows of logits, and the gradient that was computed with it.

    The first backward pass scales that gradient. Later ones compute it again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        result: tuple[Tensor, Tensor],
        shard: VocabShard,
        options: LossOptions,
        backend: str,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        loss, dlogits = result
        ctx.shard, ctx.options, ctx.backend, ctx.is_spent = shard, options, backend, False
        ctx.save_for_backward(logits, target, dlogits)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative()
        if grads[0] is None:
            return (None,) * 6
        logits, target, dlogits = ctx.saved_tensors
        if ctx.is_spent:
            result = loss_and_gradient(logits, target, ctx.shard, ctx.options)
            assert result is not None
            dlogits = result[1]
        ctx.is_spent = True
        scale_by_upstream(dlogits, grads[0], ctx.backend)
        return dlogits, None, None, None, None, None
