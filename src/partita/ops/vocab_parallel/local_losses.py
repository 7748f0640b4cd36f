"""Losses and token statistics of plain tensors, which hold this rank's classes.

On the GPUs of one host, the loss and its gradient come from one pass over the logits. The kernels
of the ranks exchange the statistics of each row while they run, instead of gathering them between
two passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...runtime import checks, private_names
from ...runtime.autograd import apply
from ...runtime.backend import current_backend, resolve
from ...runtime.invariance import is_batch_invariant
from ...runtime.register import PLAIN
from ..cross_entropy.api import TokenStats
from ..cross_entropy.autograd import OnePass, OnePassLoss
from ..cross_entropy.common import LossOptions
from ..linear_heads.common import (
    Head,
    RowOptions,
    RowStatistics,
    checked_head,
    chunk_and_save,
    loss_terms,
)
from ..linear_heads.low_rank import LowRank, with_low_rank
from .autograd import ParallelRows, logits_statistics
from .gpu.plan import slot_count
from .shard import Classes, VocabShard, refuse_second_derivative, vocab_shard
from .symmetric_memory import SharedSlots, may_share_memory, shared_slots

# The losses of the rows in nats without the z-loss, and their z-loss or None, both with the shape
# of the target; and the number of classes of all ranks.
RowLosses = tuple[Tensor, Tensor | None, int]


class ParallelLossArguments(NamedTuple):
    """The arguments of a call that all losses have."""

    weight: Tensor | None  # the weights of the classes of all ranks, [C], or None
    group: dist.ProcessGroup | None  # the process group, or None for all ranks
    classes: Classes  # the number of classes of all ranks or of each rank, or None for equal shards
    options: LossOptions

    @property
    def row_options(self) -> RowOptions:
        """The options of the statistics that the loss needs."""
        ignore_index, smoothing, softcap, *_ = self.options
        return RowOptions(1.0, softcap, ignore_index, smoothing > 0, needs_entropy=False)


def check_labels(
    input: Tensor, target: Tensor, weight: Tensor | None, shard: VocabShard, ignore_index: int
) -> None:
    """Raise unless target and class weights fit the shard."""
    checks.integer("target", target)
    checks.device("target", target, input, "input")
    checks.labels("target", target, shard.classes, ignore_index)
    if weight is not None:
        checks.floating("weight", weight)
        checks.device("weight", weight, input, "input")
        checks.shape("weight", weight, [shard.classes], "[C], of all ranks' classes")
        if weight.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("weight: not differentiable; detach it")


def contiguous_classes(logits: Tensor) -> Tensor:
    """Return logits `[M, C_local]` in which the classes of a row are contiguous."""
    return logits if logits.stride(1) == 1 or logits.shape[1] <= 1 else logits.contiguous()


def checked_rows(
    logits: Tensor, group: dist.ProcessGroup | None, classes: Classes
) -> tuple[VocabShard, Tensor]:
    """Check this rank's logits `[..., C_local]`; return their shard and the rows `[M, C_local]`."""
    checks.floating("logits", logits)
    if logits.ndim == 0:
        raise ValueError("logits: expected shape [..., C_local], got []")
    return vocab_shard("logits", logits, -1, group, classes), logits[None].flatten(0, -2)


def prepare_rows(
    input: Tensor, target: Tensor, arguments: ParallelLossArguments
) -> tuple[VocabShard, Tensor, Tensor]:
    """Check the arguments of a loss from logits `[N, C_local, ...]`.

    Returns the shard, and logits `[M, C_local]` with contiguous classes and labels `[M]` int64.
    """
    checks.floating("input", input)
    if input.ndim < 2:
        raise ValueError(f"input: expected shape [N, C_local, ...], got {list(input.shape)}")
    shard = vocab_shard("input", input, 1, arguments.group, arguments.classes)
    check_labels(input, target, arguments.weight, shard, arguments.options.ignore_index)
    checks.shape("target", target, [input.shape[0], *input.shape[2:]], "input without its classes")
    logits = contiguous_classes(input.movedim(1, -1).flatten(0, -2))
    return shard, logits, target.reshape(-1).long()


def _unreduced(
    statistics: Sequence[Tensor],
    target: Tensor,
    shard: VocabShard,
    arguments: ParallelLossArguments,
) -> RowLosses:
    """Return the losses of rows from their statistics."""
    labels, weight, options = target.reshape(-1).long(), arguments.weight, arguments.options
    loss, z = loss_terms(statistics, labels, weight, shard.classes, options)
    z = None if z is None else z.reshape(target.shape)
    return loss.reshape(target.shape), z, shard.classes


def logits_losses(input: Tensor, target: Tensor, arguments: ParallelLossArguments) -> RowLosses:
    """Return the losses of logits `[N, C_local, ...]`."""
    shard, logits, labels = prepare_rows(input, target, arguments)
    statistics = logits_statistics(logits, labels, arguments.weight, shard, arguments.row_options)
    return _unreduced(statistics, target, shard, arguments)


def hidden_losses(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    arguments: ParallelLossArguments,
    sequence_parallel: bool,
    memory_budget: int | None,
    logits_dtype: torch.dtype | None,
    low_rank: LowRank | None = None,
) -> RowLosses:
    """Return the losses of hidden states `[..., H]` times this rank's rows of the matrix."""
    head = checked_head(input, linear_weight, linear_bias, shape="[C_local, H]")
    head = with_low_rank(head, low_rank, is_batch_invariant())
    input, linear_weight, *_ = head
    shard = vocab_shard("linear_weight", linear_weight, 0, arguments.group, arguments.classes)
    check_labels(input, target, arguments.weight, shard, arguments.options.ignore_index)
    tokens = input.shape[:-1].numel() * (len(shard.sizes) if sequence_parallel else 1)
    if sequence_parallel:
        checks.shape("target", target, [tokens], "all tokens")
    else:
        checks.shape("target", target, input.shape[:-1], "input without H")
    of_rows = (target.reshape(-1).long(), arguments.weight, shard, arguments.row_options)
    plan = (sequence_parallel, memory_budget, logits_dtype)
    statistics = hidden_statistics(head.flat, *of_rows, *plan)
    return _unreduced(statistics, target, shard, arguments)


def hidden_statistics(
    head: Head,
    target: Tensor,
    class_weight: Tensor | None,
    shard: VocabShard,
    options: RowOptions,
    sequence_parallel: bool,
    memory_budget: int | None,
    logits_dtype: torch.dtype | None,
) -> RowStatistics:
    """Return the statistics of hidden states `[M, H]` times this rank's rows of the matrix."""
    head, tokens = head.of_call(logits_dtype).with_aligned_rows, target.shape[0]
    plan = head.plan(memory_budget, reduced=False, of_rank=(tokens, max(shard.sizes)))
    chunk, save_logits = chunk_and_save(plan, max(len(head.weight), 1))
    of_rows = (head.in_blocks(target, options.ignore_index), class_weight, shard)
    rest = (options, chunk, *head.products, save_logits, sequence_parallel, current_backend())
    found = RowStatistics(*ParallelRows.apply(*head.tensors, *of_rows, *rest)[:-1])
    return RowStatistics(*(field[:tokens] for field in found)) if head.invariant else found


def local_token_stats(
    logits: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None,
    classes: Classes,
    temperature: float,
    ignore_index: int,
) -> TokenStats:
    """Return the token statistics of logits `[..., C_local]`."""
    shard, rows = checked_rows(logits, group, classes)
    checks.number("temperature", temperature, low=0.0, open_low=True)
    checks.python_int("ignore_index", ignore_index)
    check_labels(logits, target, None, shard, ignore_index)
    checks.shape("target", target, logits.shape[:-1], "logits without its classes")
    numbers = (float(temperature), 0.0, ignore_index)
    options = RowOptions(*numbers, needs_smoothing=False, needs_entropy=True)
    labels = target.reshape(-1).long()
    found = logits_statistics(contiguous_classes(rows), labels, None, shard, options)
    fields = (-found.nll, found.logsumexp, found.entropy, found.argmax)
    return TokenStats(*(field.reshape(target.shape) for field in fields))


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
    call = (shard, options, current_backend())
    return apply(OnePass, ONE_PASS, logits, labels.contiguous(), call)


def group_slots(logits: Tensor, shard: VocabShard) -> SharedSlots | None:
    """Return the slots for such a call, or None on all ranks where they share no memory."""
    group = private_names.resolve_process_group(shard.group)
    slots = slot_count(len(logits), shard.sizes, logits.element_size())
    return shared_slots(group, logits.device, slots)


def _loss_and_gradient(
    logits: Tensor, target: Tensor, call: tuple[VocabShard, LossOptions, str]
) -> tuple[Tensor, Tensor]:
    """Return the reduced loss and the gradient of this rank's logits.

    There is no reference: GPUs of one host wait for each other inside of the kernel.
    """
    from .gpu.launch import parallel_one_pass

    shard, options, _ = call
    shared = group_slots(logits, shard)
    assert shared is not None
    memory = shared.memory_of_next_call(logits.device)
    rest = (shared.max_polls, shard.sizes, shard.rank, options)
    return parallel_one_pass(logits, target, memory, *rest)


def _composed_loss(*_: Any) -> Tensor:
    refuse_second_derivative()
    raise AssertionError("it is called for second derivatives only")


ONE_PASS = OnePassLoss(_loss_and_gradient, _composed_loss, 2)
