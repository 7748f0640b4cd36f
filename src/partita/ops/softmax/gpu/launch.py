"""The GPU functions of softmax and log-sum-exp: they allocate, plan and launch the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import (
    RowPlan,
    RowView,
    exchange_slots,
    flat_rows,
    launch_elementwise,
    launch_reduction,
    row_options,
    row_plan_for,
    row_view_or_copy,
    tile_options,
    with_output,
)
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch
from ..common import LogSumExp
from .logsumexp import logsumexp_kernel, softmax_elementwise_kernel
from .rows import (
    softmax_backward_row_kernel,
    softmax_backward_tile_kernel,
    softmax_row_kernel,
    softmax_tile_kernel,
)


def softmax(input: Tensor, dim: int, log: bool, dtype: torch.dtype) -> Tensor:
    """Return the softmax, or with `log` its logarithm, rounded to `dtype`."""
    return with_output(lambda view: _softmax(view, log), dim, input, dtype=dtype)


def _softmax(view: RowView, log: bool) -> None:
    input, output = view.strided
    plan, dtype = row_plan_for(view), input.ptr.dtype
    if plan.kind == "loop":  # A row that is too long to hold is read for its statistics first.
        source = view._replace(tensors=view.tensors[:1], strides=view.strides[:1])
        rows = view.batches * view.rows
        fields = (input.ptr.new_empty(rows, dtype=acc_dtype(dtype)) for _ in range(3))
        statistics = _statistics(source, LogSumExp(*fields))
        _normalize(view, None, statistics.maximum, statistics.sumexp, log)
        return
    kernel = softmax_row_kernel if plan.kind == "row" else softmax_tile_kernel
    _launch(kernel, view, plan, input=input, output=output, LOG=log)


def _launch(kernel: Any, view: RowView, plan: RowPlan, **arguments: Any) -> None:
    """Launch the kernel of a plan on rows of the dtype of the view's first tensor."""
    dtype = view.tensors[0].dtype
    arguments.update(rows=view.rows, classes=view.classes)
    if plan.kind == "row":
        launch(
            kernel,
            view.batches * view.rows * plan.splits,
            slots_ptr=exchange_slots(view, plan.splits),
            splits=plan.splits,
            size=plan.part(view.classes),
            zero=0.0,
            **arguments,
            **row_options(plan, view.classes, dtype),
        )
        return
    launch(
        kernel,
        view.batches * cdiv(view.rows, plan.rows),
        PARTIALS=plan.partials,
        **arguments,
        **tile_options(plan, dtype),
    )


def softmax_backward(
    grad: Tensor, output: Tensor, dim: int, log: bool, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the input, rounded to `dtype`."""
    return with_output(lambda view: _softmax_backward(view, log), dim, output, grad, dtype=dtype)


def _softmax_backward(view: RowView, log: bool) -> None:
    output, grad, result = view.strided
    # A gradient that all classes of a row share is read once for each row, so its strides do not
    # limit the plan.
    is_broadcast = view.classes > 1 and grad.column == 0
    planned = view
    if is_broadcast:
        planned = view._replace(tensors=view.tensors[::2], strides=view.strides[::2])
    plan = row_plan_for(planned, operands=2)
    kernel, options = softmax_backward_row_kernel, {"LOG": log, "BROADCAST": is_broadcast}
    if plan.kind != "row":
        kernel, options["WHOLE"] = softmax_backward_tile_kernel, plan.kind == "tile"
    _launch(kernel, view, plan, grad=grad, output=output, result=result, **options)


def logsumexp(input: Tensor, dtype: torch.dtype) -> LogSumExp:
    """Return log-sum-exp over the last dimension, and the maximum and the sum of each row."""
    view = row_view_or_copy(-1, input)
    maximum = input.new_empty(input.shape[:-1], dtype=acc_dtype(input.dtype))
    outputs = LogSumExp(
        input.new_empty(input.shape[:-1], dtype=dtype), maximum, torch.empty_like(maximum)
    )
    return _statistics(view, outputs)


def _statistics(view: RowView, results: LogSumExp) -> LogSumExp:
    """Write the statistics of the rows of a view, and return them."""
    launch_reduction(
        logsumexp_kernel,
        view,
        input=view.strided[0],
        results=results,
        classes=view.classes,
    )
    return results


def logsumexp_backward(grad: Tensor, input: Tensor, maximum: Tensor, sumexp: Tensor) -> Tensor:
    """Return the gradient of the input from the statistics of the forward pass."""
    maximum, sumexp = maximum.contiguous(), sumexp.contiguous()
    return with_output(
        lambda view: _normalize(view, grad, maximum, sumexp), -1, input, dtype=input.dtype
    )


def _normalize(
    view: RowView, grad: Tensor | None, maximum: Tensor, sumexp: Tensor, log: bool = False
) -> None:
    """Write the softmax times the rows' gradients, if there are any, or the log-softmax."""
    input, result = view.strided
    launch_elementwise(
        softmax_elementwise_kernel,
        view,
        grad=flat_rows(grad),
        input=input,
        maximum_ptr=maximum,
        sumexp_ptr=sumexp,
        result=result,
        classes=view.classes,
        LOG=log,
    )
