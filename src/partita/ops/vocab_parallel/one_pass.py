"""The loss and its gradient from one pass over the logits, on the GPUs of one host.

The kernels of the ranks exchange the statistics of each row while they run, instead of gathering
them between two passes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import private_names
from ...runtime.autograd import apply
from ...runtime.backend import current_backend, resolve
from ...runtime.register import PLAIN
from ..cross_entropy.autograd import OnePassLoss, RowsOnePass
from ..cross_entropy.common import LossOptions
from .gpu.plan import slot_count
from .local_losses import ParallelLossArguments, prepare_rows
from .shard import VocabShard, refuse_second_derivative
from .symmetric_memory import SharedSlots, may_share_memory, shared_slots


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
    if group_slots(logits, shard) is None:
        return None
    call = OnePassOptions(shard, options, current_backend())
    return apply(RowsOnePass, ONE_PASS, logits, labels.contiguous(), call)


def group_slots(logits: Tensor, shard: VocabShard) -> SharedSlots | None:
    """Return the slots for such a call, or None on all ranks where they share no memory."""
    group = private_names.resolve_process_group(shard.group)
    slots = slot_count(len(logits), shard.sizes, logits.element_size())
    return shared_slots(group, logits.device, slots)


class OnePassOptions(NamedTuple):
    """The options of `parallel_one_pass`, and the backend."""

    shard: VocabShard
    options: LossOptions
    backend: str


def _loss_and_gradient(
    logits: Tensor, target: Tensor, call: OnePassOptions
) -> tuple[Tensor, Tensor]:
    """Return the reduced loss and the gradient of this rank's logits.

    There is no reference: GPUs of one host wait for each other inside of the kernel.
    """
    from .gpu.launch import parallel_one_pass

    shared = group_slots(logits, call.shard)
    assert shared is not None
    memory = shared.memory_of_next_call(logits.device)
    rest = (shared.max_polls, call.shard.sizes, call.shard.rank, call.options)
    return parallel_one_pass(logits, target, memory, *rest)


def _composed_loss(*_: Any) -> Tensor:
    refuse_second_derivative()
    raise AssertionError("it is called for second derivatives only")


ONE_PASS = OnePassLoss(_loss_and_gradient, _composed_loss, 2)
