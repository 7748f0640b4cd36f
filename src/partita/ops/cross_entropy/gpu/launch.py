"""Launches of the cross-entropy kernels: what each op allocates and which kernels it runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import (
    RowPlan,
    RowView,
    classes_per_program,
    elementwise_plan,
    exchange_words,
    flat_rows,
    merge_slots,
    patched_programs,
    reduce_options,
    reduce_plan_for,
    row_options,
    row_plan_for,
    row_view,
    tile_options,
)
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, zeroed_words
from ..common import OnePass, RowLosses
from .backward import cross_entropy_backward_kernel
from .forward import cross_entropy_forward_kernel
from .one_pass import cross_entropy_row_kernel, cross_entropy_tile_kernel
from .plan import HARD_LABELS, PROBABILITIES, SUM_WORDS, fused_block, smoothing_mode
from .reduction import (
    equal_shares,
    mean_denominators,
    reduce_losses,
    row_shape,
    shares_of_denominator,
)


class _OnePassCall(NamedTuple):
    """The arguments of a one-pass kernel.

    Fields:
        logits: `[N, C, ...]`.
        dlogits: memory for the gradient, like the logits; may be the logits.
        target: labels `[N, ...]` or probabilities `[N, C, ...]`.
        weight: class weights `[C]`, or None.
        denominator: what divides a sum of losses, `[]`, or None.
        ignore_index: the ignored label.
        label_smoothing: the share of the target that all classes have evenly.
        softcap: the soft-cap, or 0.
        z_loss: the factor of the z-loss.
        mean: whether the loss is a mean.
    """

    logits: Tensor
    dlogits: Tensor
    target: Tensor
    weight: Tensor | None
    denominator: Tensor | None
    ignore_index: int
    label_smoothing: float
    softcap: float
    z_loss: float
    mean: bool

    @property
    def smoothing_mode(self) -> int:
        return smoothing_mode(self.target, self.label_smoothing)

    @property
    def numbers(self) -> tuple[int, float, float, float]:
        return self.ignore_index, self.label_smoothing, self.softcap, self.z_loss

    @property
    def flags(self) -> dict[str, Any]:
        return {
            "SMOOTHING_MODE": self.smoothing_mode,
            "HAS_SOFTCAP": self.softcap != 0,
            "HAS_Z_LOSS": self.z_loss != 0,
            "MEAN": self.mean or self.denominator is not None,
        }

    def kernel_target(self) -> Tensor:
        """Return the target as kernels read it: labels contiguous, probabilities by stride."""
        return self.target if self.target.is_floating_point() else self.target.contiguous()


def view_of(logits: Tensor, target: Tensor, *outputs: Tensor) -> RowView | None:
    """Return logits, target probabilities and outputs as rows, or None if they allow no view.

    With labels, the second tensor of the view is the logits once more.
    """
    return row_view(1, logits, target if target.is_floating_point() else logits, *outputs)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    workspace: Tensor | None = None,
) -> RowLosses:
    """Compute the rows' losses and statistics, and clear the workspace for a later kernel."""
    view = view_of(logits, target)
    if view is None:
        return cross_entropy(
            logits.contiguous(),
            target.contiguous(),
            weight,
            ignore_index,
            label_smoothing,
            softcap,
            workspace,
        )
    shape, dtype = row_shape(logits), acc_dtype(logits.dtype)
    rows = RowLosses(*(logits.new_empty(shape, dtype=dtype) for _ in RowLosses._fields))
    mode = smoothing_mode(target, label_smoothing)
    plan = reduce_plan_for(view)
    programs = view.batches * cdiv(view.rows, plan.rows) * plan.splits
    if programs == 0 and workspace is not None:
        workspace.zero_()
    launch(
        cross_entropy_forward_kernel,
        programs,
        view.tensors[0],
        target if mode == PROBABILITIES else target.contiguous(),
        weight,
        *rows,
        merge_slots(view, plan.splits, 2),
        workspace,
        view.rows,
        view.classes,
        plan.splits,
        classes_per_program(view, plan),
        0 if workspace is None else workspace.numel(),
        *view.strides[0],
        *view.strides[1],
        ignore_index,
        label_smoothing,
        softcap,
        SMOOTHING_MODE=mode,
        HAS_SOFTCAP=softcap != 0,
        **reduce_options(plan, view),
    )
    return rows


def cross_entropy_backward(
    grad_loss: Tensor, grad_logsumexp: Tensor | None, logits: Tensor, target: Tensor, *args: Any
) -> Tensor:
    """Compute the gradient of the logits from the rows' statistics."""
    dlogits = torch.empty_like(logits)
    if not _launch_backward(grad_loss, grad_logsumexp, logits, target, dlogits, *args):
        buffer = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _launch_backward(
            grad_loss, grad_logsumexp, logits.contiguous(), target.contiguous(), buffer, *args
        )
        dlogits.copy_(buffer)
    return dlogits


def cross_entropy_backward_(
    grad_loss: Tensor, grad_logsumexp: Tensor | None, logits: Tensor, target: Tensor, *args: Any
) -> None:
    """Write the gradient of the logits over them."""
    if not _launch_backward(grad_loss, grad_logsumexp, logits, target, logits, *args):
        logits.copy_(cross_entropy_backward(grad_loss, grad_logsumexp, logits, target, *args))


def _launch_backward(
    grad_loss: Tensor,
    grad_logsumexp: Tensor | None,
    logits: Tensor,
    target: Tensor,
    dlogits: Tensor,
    weight: Tensor | None,
    maximum: Tensor,
    sumexp: Tensor,
    total_weight: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
) -> bool:
    """Launch the backward kernel, or return False without a launch if the strides allow no view."""
    view = view_of(logits, target, dlogits)
    if view is None:
        return False
    mode = smoothing_mode(target, label_smoothing)
    plan = elementwise_plan(view)
    grad_loss, loss_step = flat_rows(grad_loss)
    grad_logsumexp, logsumexp_step = flat_rows(grad_logsumexp)
    launch(
        cross_entropy_backward_kernel,
        view.batches * cdiv(view.rows, plan.rows) * cdiv(view.classes, plan.block),
        grad_loss,
        grad_logsumexp,
        logits,
        target if mode == PROBABILITIES else target.contiguous(),
        weight,
        maximum.contiguous(),
        sumexp.contiguous(),
        total_weight.contiguous(),
        dlogits,
        view.rows,
        view.classes,
        loss_step,
        logsumexp_step,
        *view.strides[0],
        *view.strides[1],
        *view.strides[2],
        ignore_index,
        label_smoothing,
        softcap,
        SMOOTHING_MODE=mode,
        HAS_SOFTCAP=softcap != 0,
        **tile_options(plan, logits.dtype),
    )
    return True


def cross_entropy_reduced(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    mean: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the sum or the mean of the loss without a gradient."""
    workspace = torch.empty(SUM_WORDS, dtype=torch.int64, device=logits.device)
    loss = cross_entropy(
        logits, target, weight, ignore_index, label_smoothing, softcap, workspace
    ).loss
    if not mean:
        return reduce_losses(loss, workspace, dtype)
    if target.is_floating_point():
        return reduce_losses(loss, workspace, dtype, shares=equal_shares(logits))
    return reduce_losses(
        loss,
        workspace,
        dtype,
        target=target,
        weight=weight,
        ignore_index=ignore_index,
        classes=logits.shape[1],
    )


def cross_entropy_one_pass(logits: Tensor, *args: Any) -> OnePass:
    """Compute the reduced loss and its gradient together."""
    *options, dtype = args
    dlogits = torch.empty_like(logits)
    return OnePass(_one_pass(_OnePassCall(logits, dlogits, *options), dtype), dlogits)


def cross_entropy_one_pass_(logits: Tensor, *args: Any) -> Tensor:
    """Compute the reduced loss and write its gradient over the logits."""
    *options, dtype = args
    return _one_pass(_OnePassCall(logits, logits, *options), dtype)


def one_pass_of_chunk(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    mean: bool,
    shares: Tensor | None,
) -> Tensor:
    """Compute the loss of some of a loss's rows and write its gradient over the logits.

    Args:
        logits: `[N, C]`, which become their gradient.
        target, weight: labels `[N]`, and class weights `[C]` or None.
        ignore_index: the ignored label.
        label_smoothing: the share of the target that all classes have evenly.
        softcap, z_loss: the soft-cap and the factor of the z-loss, or 0.
        mean: whether the loss is a mean over all rows.
        shares: the shares of the denominators of that mean; None for a sum.
    """
    numbers = (ignore_index, label_smoothing, softcap, z_loss, mean)
    call = _OnePassCall(logits, logits, target, weight, None, *numbers)
    return _one_pass(call, acc_dtype(logits.dtype), shares, is_chunk=True)


def _one_pass(
    call: _OnePassCall, dtype: torch.dtype, shares: Tensor | None = None, is_chunk: bool = False
) -> Tensor:
    """Compute the reduced loss and write its gradient with the kernel that suits the rows."""
    view = view_of(call.logits, call.target, call.dlogits)
    plan = None if view is None else row_plan_for(view, patched=True)
    if view is None or plan is None or plan.kind == "loop":
        return _reduced_two_passes(call, dtype, shares, is_chunk)
    if plan.kind == "row" and call.smoothing_mode == PROBABILITIES:
        return _reduced_two_passes(call, dtype, shares, is_chunk)
    is_row = plan.kind == "row"
    run = _launch_rows if is_row else _launch_tiles
    programs = view.rows * plan.splits if is_row else view.batches * cdiv(view.rows, plan.rows)
    slots = 1 if call.smoothing_mode == HARD_LABELS else 2
    num_words = exchange_words(view, plan.splits, slots) if is_row else 0
    block, is_plain = 0, not is_chunk and call.denominator is None
    if is_plain and plan.max_registers is None:  # The sum of the labels' weights would spill.
        block = fused_block(view.batches * view.rows, programs, view.classes)
    if block:
        sum_words = 0 if programs == 1 else 1 + programs
        sums, exchanged = zeroed_words(call.logits.device, sum_words, num_words)
        result = call.logits.new_empty((), dtype=dtype)
        run(call, view, plan, _LossMemory(None, result, sums, exchanged, block), programs)
        return result
    workspace, shares = _prepare_workspace(call, shares, is_chunk, num_words)
    loss = call.logits.new_empty(row_shape(call.logits), dtype=acc_dtype(call.logits.dtype))
    memory = _LossMemory(shares, loss, None, workspace[SUM_WORDS:], 0)
    run(call, view, plan, memory, programs)
    return reduce_losses(loss, workspace, dtype, shares=shares)


class _LossMemory(NamedTuple):
    """The memory with which a one-pass kernel reduces the loss, or leaves that to another kernel.

    Fields:
        shares: shares of the mean's denominators, or None.
        loss: memory for the rows' losses, or for the reduced loss.
        sums: zeroed words for the losses of the programs, or None.
        exchanged: zeroed words for the exchange between the programs of a row, or None.
        block: the block of `fused_block`, 0 if the kernel does not reduce the loss.
    """

    shares: Tensor | None
    loss: Tensor
    sums: Tensor | None
    exchanged: Tensor | None
    block: int


def _launch_tiles(
    call: _OnePassCall, view: RowView, plan: RowPlan, memory: _LossMemory, programs: int
) -> None:
    """Launch the kernel whose programs have whole rows."""
    launch(
        cross_entropy_tile_kernel,
        programs,
        call.logits,
        call.kernel_target(),
        call.weight,
        memory.shares,
        memory.loss,
        memory.sums,
        call.dlogits,
        view.rows,
        view.classes,
        *view.strides[0],
        *view.strides[1],
        *view.strides[2],
        *call.numbers,
        **call.flags,
        FUSED_BLOCK=memory.block,
        **tile_options(plan, call.logits.dtype),
    )


def _launch_rows(
    call: _OnePassCall, view: RowView, plan: RowPlan, memory: _LossMemory, programs: int
) -> None:
    """Launch the kernel whose programs have one row, or parts of rows."""
    launch(
        cross_entropy_row_kernel,
        patched_programs(view, plan),
        call.logits,
        call.kernel_target(),
        call.weight,
        memory.shares,
        memory.exchanged,
        memory.loss,
        memory.sums,
        call.dlogits,
        programs,
        view.classes,
        plan.splits,
        view.strides[0][1],
        view.strides[2][1],
        *call.numbers,
        0.0,
        **call.flags,
        FUSED_BLOCK=memory.block,
        **row_options(plan, call.logits.dtype),
    )


def _reduced_two_passes(
    call: _OnePassCall, dtype: torch.dtype, shares: Tensor | None, is_chunk: bool
) -> Tensor:
    """Compute the reduced loss where a row fits no tile: first statistics, then the gradient."""
    workspace, shares = _prepare_workspace(call, shares, is_chunk)
    numbers = (call.ignore_index, call.label_smoothing, call.softcap)
    rows = cross_entropy(call.logits, call.target, call.weight, *numbers)
    scale, z_scale = (1.0, 1.0)
    if shares is not None:
        scale, z_scale = shares.sum(1).to(rows.loss.dtype).reciprocal().unbind()
    args = (
        torch.ones_like(rows.loss) * scale,
        2 * call.z_loss * rows.logsumexp * z_scale,
        call.logits,
        call.target,
        call.weight,
        rows.maximum,
        rows.sumexp,
        rows.total_weight,
        *numbers,
    )
    if call.dlogits.data_ptr() == call.logits.data_ptr():
        cross_entropy_backward_(*args)
    else:
        call.dlogits.copy_(cross_entropy_backward(*args))
    loss = rows.loss
    if call.z_loss:
        loss = loss + call.z_loss * rows.logsumexp.square() * (z_scale / scale)
    return reduce_losses(loss, workspace, dtype, shares=shares)


def _prepare_workspace(
    call: _OnePassCall, shares: Tensor | None, is_chunk: bool, num_words: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Allocate the zeroed workspace and find the shares of the mean's denominators.

    The workspace has the words of the reduction and, after them, `num_words` for the exchange
    between programs. A chunk uses the shares that it is given.
    """
    size = SUM_WORDS + num_words
    workspace = torch.empty(size, dtype=torch.int64, device=call.logits.device)
    if call.denominator is not None:
        dtype = acc_dtype(call.logits.dtype)
        return workspace, shares_of_denominator(call.denominator, dtype, workspace)
    if not call.mean or is_chunk:
        return workspace.zero_(), shares
    if call.target.is_floating_point():
        return workspace.zero_(), equal_shares(call.logits)
    shares = mean_denominators(
        call.target, call.weight, call.ignore_index, call.logits.shape[1], workspace
    )
    return workspace, shares
