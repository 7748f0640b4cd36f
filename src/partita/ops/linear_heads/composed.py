"""Losses from hidden states whose logits are in memory: `torch.nn.functional.linear`, then a loss.

PyTorch differentiates the product, so this is the path of second derivatives, of function
transforms and of small batches, for which the time of the host matters and memory does not.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import plain_eager, refuse_forward_mode
from ...runtime.backend import current_backend
from ...runtime.register import PLAIN
from ..cross_entropy.api import cross_entropy
from ..cross_entropy.common import LossOptions
from .common import Head


def is_plain(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | None) -> bool:
    """Return whether this is a plain eager call on tensors that are no subclasses."""
    return (
        type(input) in PLAIN
        and type(weight) in PLAIN
        and (target is None or type(target) in PLAIN)
        and (bias is None or type(bias) in PLAIN)
        and plain_eager()
    )


def composed_cross_entropy(
    head: Head, target: Tensor, class_weight: Tensor | None, options: LossOptions
) -> Tensor:
    """Compute the loss from all logits at once, in fp32 at least.

    The logits of half types are rounded to their dtype, like those of the other plans. The cast to
    fp32 keeps their gradient in fp32 until it has its upstream factor.

    On a CPU PyTorch's own function computes the loss, unless the call has an option that it lacks
    or labels are not checked, for which it raises. It is not exact for ignored rows with logits
    that are not finite, so the caller leaves out ignored rows there.

    The labels are `[M]`, the class weights `[C]` or None.
    """
    input, weight, bias = head
    ignore_index, softcap = options.ignore_index, options.softcap
    if not input.is_cpu:  # NaN in ignored rows would reach the gradient of the matrix
        input = input.masked_fill((target == ignore_index).unsqueeze(1), 0.0)
    logits = F.linear(input, weight, bias)
    if logits.dtype.itemsize == 2:
        logits = logits.float()
    weighs_smoothing = options.label_smoothing and class_weight is not None
    is_native = logits.is_cpu and options._replace(softcap=0.0).is_in_torch and not weighs_smoothing
    if is_native and current_backend() == "auto" and checks.should_check_values(logits.device):
        refuse_forward_mode(logits)
        try:
            return F.cross_entropy(
                softcap * (logits / softcap).tanh() if softcap else logits,
                target,
                None if class_weight is None else class_weight.to(logits.dtype),
                ignore_index=ignore_index,
                reduction=options.reduction,
                label_smoothing=options.label_smoothing,
            )
        except IndexError:  # This check names the label and its place.
            checks.labels("target", target, logits.shape[1], ignore_index)
            raise
    return cross_entropy(logits, target, class_weight, **options.keywords())
