"""Transducers on a GPU: loss and gradient from logits, from allocation to the last launch.

The loss reads the logits once for each node's log-sum-exp and arcs (`nodes.py`), scans α and β at
the same time (`scan.py`), and turns them into posteriors (`posterior.py`). For few sequences the
scan runs while the logits are read (`overlap.py`). The gradient reads and writes the logits once
more (`gradient.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....primitives.gpu.target import target_of
from . import plan as planning
from .call import (
    NodeOptions,
    as_targets,
    lattice_call,
    launch_gradient,
    launch_nodes,
    scan_beside_rows,
    scan_lattice,
)
from .launch_linear import linear_rnnt, linear_tdt
from .launch_tdt import rnnt_align, tdt_align, tdt_forward, tdt_gradient
from .plan import LSE_DTYPE

__all__ = [
    "linear_rnnt",
    "linear_tdt",
    "rnnt_align",
    "rnnt_forward",
    "rnnt_gradient",
    "rnnt_gradient_",
    "tdt_align",
    "tdt_forward",
    "tdt_gradient",
]


def rnnt_forward(
    logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    fused: bool,
    hat: bool,
    delay_penalty: float,
    need_posteriors: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses, the log-sum-exps of the nodes and the posteriors of their arcs."""
    B, T, U1, V = logits.shape
    options = NodeOptions(blank, fused, hat, 0.0, delay_penalty)
    call = lattice_call(logits, labels, logit_lengths, target_lengths, options, need_posteriors)
    lse = call.empty_lse() if fused else torch.empty(0, dtype=LSE_DTYPE, device=logits.device)
    directions, itemsize = call.directions, logits.element_size()
    # Log-probabilities are not read as rows.
    may_overlap = fused and target_of(logits.device).vendor == "nvidia"
    if may_overlap and planning.overlaps(B, T, U1, V, itemsize, directions):
        nll, posteriors = scan_beside_rows(call, logits, lse)
        return nll, lse, posteriors
    arcs = call.empty_arcs()
    launch_nodes(call, logits, lse, arcs, 0, B * T)
    nll, posteriors = scan_lattice(call, arcs)
    return nll, lse, posteriors


def rnnt_gradient(
    grad: Tensor,
    logits: Tensor,
    lse: Tensor,
    posteriors: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    fused: bool,
    hat: bool,
    clamp: float,
    fastemit_lambda: float,
    *,
    inplace: bool = False,
) -> Tensor:
    """Return the gradient of the losses in the logits, in their memory if `inplace`."""
    dlogits = logits
    if not inplace:
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    targets = as_targets(labels, logit_lengths, target_lengths)
    inputs = (grad, logits, lse if fused else None, posteriors, targets)
    steps = logits.shape[0] * logits.shape[1]
    launch_gradient(*inputs, dlogits, 0, steps, blank, hat, clamp, fastemit_lambda)
    return dlogits


def rnnt_gradient_(grad: Tensor, logits: Tensor, *rest: Any) -> None:
    """Write the gradient of the losses over the logits."""
    rnnt_gradient(grad, logits, *rest, inplace=True)
