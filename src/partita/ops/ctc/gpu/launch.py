"""CTC's loss and gradient on a GPU, from allocation to the last launch.

The loss normalizes the rows (`normalize.py`), scans α and β to the middle (`forward_scan.py`) and
sums over the alignments there (`loss.py`). The gradient continues both scans through the other
halves (`posterior_scan.py`) and writes softmax minus posterior (`gradient.py`,
`label_gradient.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ....runtime import launch as runtime_launch
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import SideStream, cdiv, next_power_of_2
from .call import CTCCall, launch_normalize, row_tile, score_arguments
from .gradient import GRADIENT_SIZES, LogitTensors, ctc_lane_gradient_kernel
from .lattice import TargetTensors
from .workspace import PosteriorTensors, scan_memory


def ctc_loss(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    max_target_len: int,
    blank: int,
    from_logits: bool,
    reduction: str,
    zero_infinity: bool,
    save: bool,
    label_priors: Tensor | None = None,
    prior_scale: float = 1.0,
    star: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reduced loss, the losses, and the workspace that the gradient uses."""
    scores = score_arguments(label_priors, prior_scale, star)
    targets = TargetTensors(labels.contiguous(), offsets, input_lengths, target_lengths)
    call = CTCCall.of(logits, targets, max_target_len, blank, from_logits, scores, save)
    plan, workspace = call.plan, call.workspace
    losses = torch.empty(logits.shape[1], dtype=torch.float64, device=logits.device)
    value = torch.empty(
        losses.shape if reduction == "none" else (),
        dtype=acc_dtype(logits.dtype),
        device=logits.device,
    )
    normalize = functools.partial(
        launch_normalize, logits, input_lengths, workspace.maxima, workspace.sums, scores
    )
    if plan.table_width:
        zeros = (workspace.zeros, workspace.num_zeros)
        normalize(workspace.table, plan.table_width, *zeros)
    else:
        workspace.buffer[: workspace.num_zeros].zero_()
    # Scans of logits do not wait for the log-sum-exps, unless these are the scores of a star.
    normalizes_first = from_logits and not plan.table_width and star is not None
    normalizes_alongside = from_logits and not plan.table_width and star is None
    if normalizes_first:
        normalize()
    side_stream = SideStream(logits, normalizes_alongside)
    try:
        with side_stream:
            call.launch_forward_scan()
        if normalizes_alongside:
            normalize()
    finally:
        # The streams join after an error too, because the memory belongs to the current stream.
        side_stream.join()
    call.launch_loss(losses, value, reduction == "mean", zero_infinity)
    return value, losses, workspace.buffer


def ctc_gradient(
    grad_output: Tensor,
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    losses: Tensor,
    saved: Tensor,
    label_priors: Tensor | None,
    max_target_len: int,
    blank: int,
    from_logits: bool,
    reduction: str,
    prior_scale: float = 1.0,
    star: int | None = None,
) -> Tensor:
    """Return the gradient of the loss with respect to the logits."""
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if not dlogits.numel():
        return dlogits
    scores = score_arguments(label_priors, prior_scale, star)
    targets = TargetTensors(labels.contiguous(), offsets, input_lengths, target_lengths)
    call = CTCCall.of(
        logits, targets, max_target_len, blank, from_logits, scores, save=True, saved=saved
    )
    memory = scan_memory(logits, call.plan)
    call.launch_posterior_scan(memory)
    _launch_gradient(call, grad_output, memory.posteriors, dlogits, mean=reduction == "mean")
    return dlogits


def _launch_gradient(
    call: CTCCall,
    grad_output: Tensor,
    posteriors: PosteriorTensors,
    dlogits: Tensor,
    mean: bool,
) -> None:
    """Write the gradient with the kernel that suits the number of classes; see `gradient.py`."""
    (T, N, C), plan, targets = call.logits.shape, call.plan, call.targets
    arguments: dict[str, Any] = {
        "grad_output_ptr": grad_output,
        "logits": LogitTensors(call.logits, call.logits.stride(2), dlogits),
        "targets": targets,
        "results": call.results,
        "posteriors": posteriors,
        **call.numbers_of(GRADIENT_SIZES),
        "stride_grad": grad_output.stride(0) if grad_output.ndim else 0,
        "MEAN": mean,
    }
    if plan.class_groups == 0:
        # This kernel takes time to load, and few classes do not need it.
        from .label_gradient import ctc_label_gradient_kernel, label_index

        tile = row_tile(call.logits, C)
        rows = 4 if tile["BLOCK_V"] <= 512 else 1
        if tile["BLOCK_V"] > 512:
            # With a star, ten pieces and its sums have no room in the registers.
            pieces = 10 if call.scores.star is None else 8
            tile |= {"BLOCK_V": 512, "PIECES": min(cdiv(C, 512), pieces)}
        runtime_launch.launch(
            ctc_label_gradient_kernel,
            N * cdiv(T, rows),
            **arguments,
            index=label_index(targets, plan.max_target_len, C, call.blank),
            **tile | {"ROWS": rows},
            BLOCK_L=min(max(32, next_power_of_2(plan.max_target_len + 1)), 256),
            num_warps=4,
        )
    else:
        runtime_launch.launch(
            ctc_lane_gradient_kernel,
            N * cdiv(T, 8),
            **arguments,
            ROWS=8,
            GROUPS=plan.class_groups,
            num_warps=1,
        )
