"""Launches of the cross-entropy kernels: what each op allocates and which kernels it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import (
    RowView,
    StridedRows,
    exchange_words,
    flat_rows,
    launch_elementwise,
    launch_reduction,
    row_options,
    row_plan_for,
    row_view,
    tile_options,
)
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, zeroed_words
from ..common import LossOptions, RowLosses
from .one_pass import cross_entropy_row_kernel, cross_entropy_tile_kernel
from .plan import HARD_LABELS, PROBABILITIES, SUM_WORDS, fused_block, smoothing_mode
from .reduction import (
    LossSum,
    Targets,
    Words,
    equal_shares,
    reduce_losses,
    row_shape,
    shares_of_denominators,
)
from .two_passes import cross_entropy_backward_kernel, cross_entropy_forward_kernel


class _OnePassCall(NamedTuple):
    """The arguments of a one-pass loss."""

    logits: Tensor  # [N, C, ...]
    dlogits: Tensor  # memory for the gradient, like the logits; may be the logits
    target: Tensor  # labels [N, ...] or probabilities [N, C, ...]
    weight: Tensor | None  # class weights [C], or None
    denominator: Tensor | None  # what divides a sum of losses, [], or None
    # options, dtype: the options, and the dtype of the loss
    options: LossOptions
    dtype: torch.dtype
    is_chunk: bool = False  # whether these are some of the rows of a loss
    shares: Tensor | None = None  # the shares of the denominators of that loss, or None for a sum


def view_of(logits: Tensor, target: Tensor, *outputs: Tensor) -> RowView | None:
    """Return logits, target probabilities and outputs as rows, or None if they allow no view."""
    probabilities = (target,) if target.is_floating_point() else ()
    return row_view(1, logits, *probabilities, *outputs)


def targets_of(view: RowView, target: Tensor, weight: Tensor | None, ignore_index: int) -> Targets:
    """Return the targets as kernels read them: labels contiguous, probabilities by stride."""
    labels, index = (None, 1) if target.is_floating_point() else (target.contiguous(), 0)
    probabilities = StridedRows(view.tensors[index], *view.strides[index])
    return Targets(labels, probabilities, weight, view.classes, ignore_index)


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
        logits, target = logits.contiguous(), target.contiguous()
        view = view_of(logits, target)
        assert view is not None
    shape, dtype = row_shape(logits), acc_dtype(logits.dtype)
    rows = RowLosses(*(logits.new_empty(shape, dtype=dtype) for _ in RowLosses._fields))
    if view.batches * view.rows == 0 and workspace is not None:
        workspace.zero_()
    mode = smoothing_mode(target, label_smoothing)
    launch_reduction(
        cross_entropy_forward_kernel,
        view,
        carried=2 if mode == HARD_LABELS else 4,
        logits=view.strided[0],
        targets=targets_of(view, target, weight, ignore_index),
        results=rows,
        workspace=None if workspace is None else Words(workspace, workspace.numel()),
        smoothing=label_smoothing,
        softcap=softcap,
        SMOOTHING_MODE=mode,
        HAS_SOFTCAP=softcap != 0,
    )
    return rows


def cross_entropy_backward(
    grad_loss: Tensor, grad_logsumexp: Tensor | None, logits: Tensor, *args: Any
) -> Tensor:
    """Compute the gradient of the logits from the rows' statistics."""
    dlogits = torch.empty_like(logits)
    _write_gradient(dlogits, grad_loss, grad_logsumexp, logits, *args)
    return dlogits


def cross_entropy_backward_(
    grad_loss: Tensor, grad_logsumexp: Tensor | None, logits: Tensor, *args: Any
) -> None:
    """Write the gradient of the logits over them."""
    _write_gradient(logits, grad_loss, grad_logsumexp, logits, *args)


def _write_gradient(
    dlogits: Tensor,
    grad_loss: Tensor,
    grad_logsumexp: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    maximum: Tensor,
    sumexp: Tensor,
    total_weight: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
) -> None:
    """Write the gradient of the logits to `dlogits`, which may be the logits."""
    view, written = view_of(logits, target, dlogits), dlogits
    if view is None:
        logits, target, written = logits.contiguous(), target.contiguous(), dlogits.contiguous()
        view = view_of(logits, target, written)
        assert view is not None
    rows = view.strided
    launch_elementwise(
        cross_entropy_backward_kernel,
        view,
        grad_loss=flat_rows(grad_loss),
        grad_logsumexp=flat_rows(grad_logsumexp),
        logits=rows[0],
        targets=targets_of(view, target, weight, ignore_index),
        maximum_ptr=maximum.contiguous(),
        sumexp_ptr=sumexp.contiguous(),
        total_weight_ptr=total_weight.contiguous(),
        dlogits=rows[-1],
        smoothing=label_smoothing,
        softcap=softcap,
        SMOOTHING_MODE=smoothing_mode(target, label_smoothing),
        HAS_SOFTCAP=softcap != 0,
    )
    if written is not dlogits:
        dlogits.copy_(written)


def cross_entropy_reduced(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the sum or the mean of the loss without a gradient and without its z-loss."""
    workspace = torch.empty(SUM_WORDS, dtype=torch.int64, device=logits.device)
    loss = cross_entropy(logits, target, weight, *options[:3], workspace).loss
    if options.reduction == "sum":
        return reduce_losses(loss, workspace, dtype)
    if target.is_floating_point():
        return reduce_losses(loss, workspace, dtype, shares=equal_shares(logits))
    targets = Targets(target.contiguous(), None, weight, logits.shape[1], options.ignore_index)
    return reduce_losses(loss, workspace, dtype, targets=targets)


def cross_entropy_one_pass(logits: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    """Compute the reduced loss and its gradient together."""
    dlogits = torch.empty_like(logits)
    return _one_pass(_OnePassCall(logits, dlogits, *call)), dlogits


def cross_entropy_one_pass_(logits: Tensor, *call: Any) -> Tensor:
    """Compute the reduced loss and write its gradient over the logits."""
    return _one_pass(_OnePassCall(logits, logits, *call))


def one_pass_of_chunk(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    shares: Tensor | None,
    result: Tensor,
) -> Tensor:
    """Compute the loss of some of a loss's rows, and write its gradient to `result`.

    The logits are `[N, C]`, and the targets labels. `shares` are the shares of the denominators of
    a mean over all rows. `result` may be the logits.
    """
    numbers = (options, acc_dtype(logits.dtype), True, shares)
    return _one_pass(_OnePassCall(logits, result, target, weight, None, *numbers))


def _one_pass(call: _OnePassCall) -> Tensor:
    """Compute the reduced loss and write its gradient with the kernel that suits the rows."""
    logits, options = call.logits, call.options
    view = view_of(logits, call.target, call.dlogits)
    plan = None if view is None else row_plan_for(view, patched=True)
    mode = smoothing_mode(call.target, options.label_smoothing)
    if view is None or plan is None or plan.kind == "loop":
        return _reduced_two_passes(call)
    # Registers hold no target probabilities beside a long row, nor the slopes of a soft-cap.
    if plan.kind == "row" and (mode == PROBABILITIES or options.softcap):
        if plan.splits > 1 or plan.max_registers is not None:
            return _reduced_two_passes(call)
        plan = replace(plan, kind="tile")
    is_row = plan.kind == "row"
    programs = view.batches * (view.rows * plan.splits if is_row else cdiv(view.rows, plan.rows))
    slots = 1 if mode == HARD_LABELS else 2
    num_words = exchange_words(view, plan.splits, slots) if is_row else 0
    block, is_plain = 0, not call.is_chunk and call.denominator is None
    if is_plain and plan.max_registers is None:  # The sum of the labels' weights would spill.
        block = fused_block(view.batches * view.rows, programs, view.classes)
    if block:
        sum_words = 0 if programs == 1 else 1 + programs
        sums, exchanged = zeroed_words(logits.device, sum_words, num_words)
        losses = LossSum(logits.new_empty((), dtype=call.dtype), None, sums)
    else:
        workspace, shares = _prepare_workspace(call, num_words)
        exchanged = workspace[SUM_WORDS:]
        loss = logits.new_empty(row_shape(logits), dtype=acc_dtype(logits.dtype))
        losses = LossSum(loss, shares, None)
    strided, *_, gradient = view.strided
    arguments: dict[str, Any] = {
        "logits": strided,
        "targets": targets_of(view, call.target, call.weight, options.ignore_index),
        "losses": losses,
        "dlogits": gradient,
        "rows": view.rows,
        "smoothing": options.label_smoothing,
        "z_loss": options.z_loss,
        "SMOOTHING_MODE": mode,
        "HAS_Z_LOSS": options.z_loss != 0,
        "MEAN": options.reduction == "mean" or call.denominator is not None,
        "FUSED_BLOCK": block,
    }
    if is_row:
        launch(
            cross_entropy_row_kernel,
            programs,
            slots_ptr=exchanged,
            parts=programs,
            splits=plan.splits,
            size=plan.part(view.classes),
            zero=0.0,
            **arguments,
            **row_options(plan, view.classes, logits.dtype),
        )
    else:
        launch(
            cross_entropy_tile_kernel,
            programs,
            softcap=options.softcap,
            HAS_SOFTCAP=options.softcap != 0,
            PARTIALS=plan.partials,
            **arguments,
            **tile_options(plan, logits.dtype),
        )
    if block:
        return losses.loss
    return reduce_losses(losses.loss, workspace, call.dtype, shares=shares)


def _reduced_two_passes(call: _OnePassCall) -> Tensor:
    """Compute the reduced loss where registers do not hold a row: its statistics come first."""
    workspace, shares = _prepare_workspace(call)
    z_loss, numbers = call.options.z_loss, call.options[:3]
    rows = cross_entropy(call.logits, call.target, call.weight, *numbers)
    scale, z_scale = (1.0, 1.0)
    if shares is not None:
        scale, z_scale = shares.sum(1).to(rows.loss.dtype).reciprocal().unbind()
    _write_gradient(
        call.dlogits,
        torch.ones_like(rows.loss) * scale,
        2 * z_loss * rows.logsumexp * z_scale,
        call.logits,
        call.target,
        call.weight,
        rows.maximum,
        rows.sumexp,
        rows.total_weight,
        *numbers,
    )
    loss = rows.loss
    if z_loss:
        loss = loss + z_loss * rows.logsumexp.square() * (z_scale / scale)
    return reduce_losses(loss, workspace, call.dtype, shares=shares)


def _prepare_workspace(call: _OnePassCall, num_words: int = 0) -> tuple[Tensor, Tensor | None]:
    """Allocate the zeroed workspace and find the shares of the mean's denominators.

    The workspace has the words of the reduction and, after them, `num_words` for the exchange
    between programs.
    """
    size = SUM_WORDS + num_words
    workspace = torch.empty(size, dtype=torch.int64, device=call.logits.device)
    if call.denominator is None:
        if call.options.reduction == "sum" or call.is_chunk:
            return workspace.zero_(), call.shares
        if call.target.is_floating_point():
            return workspace.zero_(), equal_shares(call.logits)
    shares = shares_of_denominators(
        call.target,
        call.weight,
        call.denominator,
        call.options.ignore_index,
        call.logits.shape[1],
        acc_dtype(call.logits.dtype),
        workspace,
    )
    return workspace, shares
