"""Transducers on a GPU: loss, gradient and best path from logits.

The loss reads the logits once for each node's log-sum-exp and scores (`nodes.py`), makes arcs of
these (`arcs.py`), scans α and β at the same time (`scan.py`), and turns them into posteriors
(`posterior.py`). For few sequences the scan runs while the logits are read (`overlap.py`). The
gradient reads and writes the logits once more (`gradient.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import launch
from ...ctc.gpu.lanes import launch_lanes
from .arc_rows import Scan
from .call import (
    NO_DURATIONS,
    NodeOptions,
    as_targets,
    lattice_call,
    launch_arcs,
    launch_gradient,
    launch_nodes,
    may_overlap,
    scan_beside_rows,
    scan_block,
    scan_lattice,
    scan_memory,
)
from .gradient import DurationGradient
from .launch_linear import linear_rnnt
from .plan import LSE_DTYPE
from .scan_best import BEST_SCAN, rnnt_backtrace_kernel

__all__ = [
    "linear_rnnt",
    "rnnt_align",
    "rnnt_forward",
    "rnnt_gradient",
    "rnnt_gradient_",
]


def rnnt_forward(
    logits: Tensor,
    duration_logits: Tensor | None,
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    durations: Sequence[int],
    fused: bool,
    hat: bool,
    sigma: float,
    delay_penalty: float,
    need_posteriors: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the losses, the log-sum-exps of logits and durations, and the posteriors."""
    options = NodeOptions(blank, durations, fused, hat, sigma, delay_penalty)
    call = lattice_call(logits, labels, logit_lengths, target_lengths, options, need_posteriors)
    lse = call.empty_lse() if fused else torch.empty(0, dtype=LSE_DTYPE, device=logits.device)
    if may_overlap(call):
        nll, duration_lse, posteriors = scan_beside_rows(call, logits, lse, duration_logits)
        return nll, lse, duration_lse, posteriors
    arcs = call.empty_arcs()
    launch_nodes(call, logits, lse, arcs, 0, call.B * call.T)
    nll, duration_lse, posteriors = scan_lattice(call, arcs, duration_logits)
    return nll, lse, duration_lse, posteriors


def rnnt_gradient(
    grad: Tensor,
    logits: Tensor,
    duration_logits: Tensor | None,
    lse: Tensor,
    duration_lse: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """Return the gradients in logits and durations; with `inplace` the first is in their memory."""
    dlogits, ddurations = logits, logits.new_empty(0)
    if not inplace:
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    durations = NO_DURATIONS
    if duration_logits is not None:
        ddurations = logits.new_empty(duration_logits.shape)
        durations = DurationGradient(duration_logits.contiguous(), duration_lse, ddurations)
    targets = as_targets(labels, logit_lengths, target_lengths)
    inputs = (grad, logits, lse if fused else None, posteriors, targets, dlogits)
    steps = logits.shape[0] * logits.shape[1]
    launch_gradient(*inputs, 0, steps, blank, hat, clamp, fastemit_lambda, durations)
    return dlogits, ddurations


def rnnt_gradient_(
    grad: Tensor, logits: Tensor, lse: Tensor, posteriors: Tensor, *rest: Any
) -> None:
    """Write the gradient of RNN-T's losses over the logits."""
    rnnt_gradient(grad, logits, None, lse, lse, posteriors, *rest, inplace=True)


def rnnt_align(
    logits: Tensor,
    duration_logits: Tensor | None,
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    durations: Sequence[int],
    fused: bool,
    sigma: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the steps and scores of the labels on the best path, and its score."""
    options = NodeOptions(blank, durations, fused, False, sigma, 0.0)
    call = lattice_call(logits, labels, logit_lengths, target_lengths, options, False)
    arcs = call.empty_arcs()
    launch_nodes(call, logits, call.empty_lse(), arcs, 0, call.B * call.T)
    launch_arcs(call, arcs, duration_logits, None)
    B, U1, device, memory = call.B, call.U1, call.device, scan_memory(call)
    pointers = torch.empty(call.plan.nodes, dtype=torch.int8, device=device)
    best = torch.empty(B, dtype=torch.float64, device=device)
    scan = Scan(arcs, pointers, memory.flags, best)
    launch_lanes(
        BEST_SCAN,
        B * call.plan.num_chunks,
        device,
        scan=scan,
        carries=memory.carries,
        **call.scan_arguments,
        BLOCK=scan_block(call.kinds.number, device),
    )
    steps = torch.empty((B, U1 - 1), dtype=torch.int64, device=device)
    scores = torch.empty((B, U1 - 1), dtype=acc_dtype(call.dtype), device=device)
    score = torch.empty(B, dtype=scores.dtype, device=device)
    launch(
        rnnt_backtrace_kernel,
        B,
        scan=scan,
        lengths=call.targets.lengths,
        steps_ptr=steps,
        scores_ptr=scores,
        score_ptr=score,
        **call.sizes,
        CODE=call.kinds.code,
        BLOCK_U=128,
        num_warps=1,
    )
    return steps, scores, score
