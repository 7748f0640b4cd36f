"""The loss of logits: which pass serves a call, and what divides a sum."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import (
    apply,
    check_inplace,
    native_serves,
    plain_eager,
    refuse_forward_mode,
)
from ...runtime.backend import current_backend, resolve
from ...runtime.dtypes import acc_dtype
from ...runtime.private_names import CAN_WRITE_OVER_LOGITS
from ...runtime.sizes import same_sizes
from .autograd import (
    CROSS_ENTROPY_IN_PLACE,
    CROSS_ENTROPY_ONE_PASS,
    OnePass,
    cross_entropy_of_rows,
    cross_entropy_reduced_op,
)
from .common import LossOptions, torch_cross_entropy

# The elements of logits up to which PyTorch's function is faster than one pass that computes loss
# and gradient, which takes more calls and less memory.
NATIVE_ELEMENTS = 2**20


def cross_entropy_over(
    input: Tensor, target: Tensor, denominator: float | Tensor, options: LossOptions
) -> Tensor:
    """Return the sum of the losses of labels over a denominator, fp32 (fp64 for fp64).

    The pass that computes a gradient divides it before it rounds it to a half type. The quotient of
    `cross_entropy(..., reduction="sum")` would round it first.

    The logits are `[M, C]`, and the reduction of the options is a sum. The denominator is a number,
    or a tensor `[]` on the device of the logits, without a gradient.
    """
    check_inputs(input, target, None, options.ignore_index)
    loss = native_cross_entropy(input, target, None, options)
    if loss is not None:
        return loss / denominator
    dtype = acc_dtype(input.dtype)
    return loss_of_batch(input, target, None, denominator, options, dtype)


def check_inputs(input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> None:
    """Raise unless these are the tensors of a loss."""
    checks.floating("input", input)
    checks.tensor("target", target)
    shape = input.shape
    if not shape:
        raise ValueError("input: expected shape [N, C, ...] or [C], got []")
    if target.device != input.device:
        checks.device("target", target, input, "input")
    if target.is_floating_point() and same_sizes(target.shape, shape):
        if target.dtype not in checks.FLOATING:
            checks.floating("target", target)
        if ignore_index >= 0:
            raise ValueError(
                "ignore_index: expected none (a negative number) with target probabilities,"
                f" got {ignore_index}"
            )
    else:
        if target.dtype not in checks.INTEGERS:
            checks.integer("target", target)
        rows = [] if len(shape) == 1 else [shape[0], *shape[2:]]
        if not same_sizes(target.shape, rows):
            if len(shape) > 2 and target.shape == shape[:-1]:
                raise ValueError(
                    f"target: expected shape [N, ...] of input without its classes = {rows},"
                    f" got {list(target.shape)}; classes are dimension 1 of input, which"
                    " input.movedim(-1, 1) makes of its last one"
                )
            checks.shape("target", target, rows, "[N, ...] of input without its classes")
    if weight is not None:
        checks.floating("weight", weight)
        checks.device("weight", weight, input, "input")
        checks.shape("weight", weight, [shape[0 if len(shape) == 1 else 1]], "[C]")
        if weight.requires_grad and not target.is_floating_point() and torch.is_grad_enabled():
            raise RuntimeError(
                "weight: not differentiable with label targets, as in torch; detach it, or give"
                " target probabilities"
            )


def native_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    options: LossOptions,
) -> Tensor | None:
    """Return the loss of CPU logits over labels by PyTorch's function, or None.

    It takes less time where it serves, and there it has the same meaning.

    PyTorch lets the logits of an ignored row pass NaN on to the gradient, so such rows are left
    out or replaced by zeros here. It raises for a label out of range, which the op does only where
    labels are checked. It multiplies a class weight of 0 by an infinite loss.
    """
    ignore_index, label_smoothing, softcap, _, reduction = options
    if (
        not logits.is_cpu
        or softcap
        or options.has_logz_term()
        or current_backend() != "auto"
        or labels.is_floating_point()
        or (logits.numel() > NATIVE_ELEMENTS and not label_smoothing and reduction != "none")
        or not labels.numel()
        or not checks.should_check_values(logits.device)
        or (weight is not None and (label_smoothing != 0.0 or weight.dtype != logits.dtype))
    ):
        return None
    strides = logits.stride()
    if strides[-1] == 1 and list(strides) == sorted(strides, reverse=True):
        logits = logits.contiguous()  # Rows that lie apart get the bits of adjacent ones.
    if not native_serves(logits):
        return None
    labels = labels.long()
    rows, row_labels = logits, labels
    if ignore_index >= 0 or int(labels.min()) < 0:
        not_ignored = labels != ignore_index
        if not bool(not_ignored.all()):
            if logits.ndim == 1:
                return None
            if logits.ndim > 2 or reduction == "none":
                rows = logits.masked_fill(~not_ignored.unsqueeze(1), 0)
            else:
                index = not_ignored.nonzero()[:, 0]
                rows, row_labels = logits.index_select(0, index), labels.index_select(0, index)
    return torch_cross_entropy(rows, row_labels, weight, options, labels)


def loss_of_batch(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: float | Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
    inplace: bool = False,
) -> Tensor:
    """Return the loss of `[N, C, ...]` logits, or its sum over a denominator.

    This function chooses the pass that suits the call.
    """
    backend, tensors = current_backend(), (logits, target, weight)
    if not plain_eager():
        inplace = False
    else:
        others_need_grad = target.requires_grad or (weight is not None and weight.requires_grad)
        needs_grad = torch.is_grad_enabled() and (logits.requires_grad or others_need_grad)
        inplace = inplace and needs_grad and logits.requires_grad and CAN_WRITE_OVER_LOGITS
        if inplace:
            check_inplace(logits)
            if others_need_grad:
                raise RuntimeError(
                    "inplace: expected targets and class weights that need no gradient"
                )
        is_reduced = options.reduction != "none"
        if is_reduced and not needs_grad and not options.has_logz_term():
            refuse_forward_mode(*tensors)
            loss = cross_entropy_reduced_op(*tensors, *options, dtype, backend)
            return loss if denominator is None else loss / denominator
        is_one_pass = is_reduced and logits.dtype != torch.float16 and not others_need_grad
        device = logits.device
        on_backend = device.type == "cpu" or resolve(backend, device, has_cpu=False) == "gpu"
        if is_one_pass and (inplace or on_backend) and needs_grad:
            kind = CROSS_ENTROPY_IN_PLACE if inplace else CROSS_ENTROPY_ONE_PASS
            if isinstance(denominator, (int, float)):
                denominator = torch.full((), denominator, dtype=dtype, device=device)
            result: Tensor = apply(OnePass, kind, *tensors, denominator, (*options, dtype, backend))
            return result
    if inplace:
        # The version changes before the logits are saved, so that only this backward pass may
        # read them.
        torch.autograd.graph.increment_version(logits)
    loss = cross_entropy_of_rows(*tensors, options, dtype, backend, inplace)
    return loss if denominator is None else loss / denominator
