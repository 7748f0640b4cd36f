"""Token-and-duration transducers and best paths on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....primitives.gpu.target import target_of
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch
from ...ctc.gpu.lanes import launch_lanes
from . import plan as planning
from .call import (
    LatticeCall,
    NodeOptions,
    ScanZeros,
    as_targets,
    lattice_call,
    launch_nodes,
    new_scan,
    node_strides,
    scan_zeros,
    tile_of,
    tile_options,
)
from .durations import tdt_arcs_kernel, tdt_duration_gradient_kernel
from .durations_launch import (
    BLOCK_NODES,
    ArcKinds,
    arc_kinds,
    chunk_programs,
    duration_arcs,
    duration_code,
    duration_strides,
    launch_duration_posteriors,
    scan_durations_beside_rows,
)
from .gradient import StridedLogits, Upstream
from .gradient_tdt import DURATION_NODES, tdt_gradient_kernel
from .plan import MARGIN, NODES_PER_PROGRAM
from .rows import Logits
from .scan import Scan
from .scan_best import BEST_SCAN, rnnt_backtrace_kernel
from .scan_tdt import TDT_SCAN

RNNT_ARCS = ((1, False), (0, True))  # the blank's and the label's


def scan_block(kinds: int, device: torch.device) -> int:
    """Return the rows that a scan loads together, so that the scores of their arcs fit registers.

    Triton's compiler for AMD takes minutes for long unrolled loops in kernels of one warp.
    """
    if target_of(device).vendor == "amd":
        return 1
    return 8 if kinds <= 2 else 4 if kinds <= 10 else 2


def tdt_arcs(
    call: LatticeCall,
    token_logits: Tensor,
    duration_logits: Tensor,
    durations: Sequence[int],
    flags: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arcs and the log-sum-exps of tokens and durations; see `token_duration_arcs`."""
    token_lse, tokens = call.empty_lse(), call.empty_arcs()
    launch_nodes(call, token_logits, token_lse, tokens, 0, call.B * call.T)
    arcs, duration_lse = token_duration_arcs(call, tokens, duration_logits, durations, flags)
    return arcs, token_lse, duration_lse


def token_duration_arcs(
    call: LatticeCall,
    tokens: Tensor,
    duration_logits: Tensor,
    durations: Sequence[int],
    flags: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the arcs, `[2 K * nodes]`, and the durations' log-sum-exps.

    `tokens` are the scores of blank and label, `[2, nodes]`. The arcs are scores in fp64 without
    `flags`. Otherwise they are words, and sequences in which one is NaN are flagged. The
    log-sum-exps are empty if no gradient follows.
    """
    plan, K, duration_lse = call.plan, len(durations), call.empty_lse()
    saved_lse = duration_lse if call.need_posteriors else None
    # A scan reads some rows before and after its chunk. Those before it must have the probability
    # 0, because NaN would reach the states. In the same kind they have it, as arcs that leave the
    # lattice do. So each kind ends with a margin of probability 0, and the first one follows one.
    dtype = torch.float64 if flags is None else torch.int64
    arcs = torch.empty(MARGIN + 2 * K * plan.nodes, dtype=dtype, device=call.device)[MARGIN:]
    launch(
        tdt_arcs_kernel,
        chunk_programs(plan, call.B) + MARGIN // BLOCK_NODES,
        durations=Logits(duration_logits, duration_logits.stride(3), saved_lse),
        lengths=call.targets.lengths,
        tokens_ptr=tokens,
        arcs_ptr=arcs,
        flags_ptr=flags,
        **call.sizes,
        **node_strides(duration_logits, call.T),
        DURATIONS=duration_code(durations),
        K=K,
        BLOCK=BLOCK_NODES,
        num_warps=4,
    )
    return arcs, duration_lse


def tdt_forward(
    token_logits: Tensor,
    duration_logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    durations: Sequence[int],
    sigma: float,
    need_posteriors: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the losses, both log-sum-exps and the posteriors, `[2 + K, B, T, U1]`."""
    B, T, U1, V = token_logits.shape
    options = NodeOptions(blank, True, False, sigma, 0.0)
    call = lattice_call(
        token_logits, labels, logit_lengths, target_lengths, options, need_posteriors
    )
    kinds, directions = arc_kinds(duration_arcs(durations)), call.directions
    size = (B, T, U1, V, token_logits.element_size(), directions)
    target = target_of(token_logits.device)
    if target.vendor == "nvidia" and planning.tdt_overlaps(*size, kinds.number, kinds.depth):
        return scan_durations_beside_rows(call, token_logits, duration_logits, durations)
    zeros = scan_zeros(call)
    inputs = (token_logits, duration_logits, durations)
    arcs, token_lse, duration_lse = tdt_arcs(call, *inputs, zeros.flags)
    nll, posteriors = scan_durations(call, arcs, zeros, durations)
    return nll, token_lse, duration_lse, posteriors


def scan_durations(
    call: LatticeCall, arcs: Tensor, zeros: ScanZeros, durations: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the losses, and the posteriors `[2 + K, B, T, U1]` or an empty tensor."""
    kinds = arc_kinds(duration_arcs(durations))
    scan = new_scan(call, arcs, zeros.flags)
    launch_lanes(
        TDT_SCAN,
        call.directions * call.B * call.plan.num_chunks,
        call.device,
        scan=scan,
        carries=zeros.carries,
        **call.scan_arguments,
        DIRECTIONS=call.directions,
        BLOCK=scan_block(kinds.number, call.device),
        CODE=kinds.code,
        ARCS=kinds.number,
        DEPTH=kinds.depth,
        PRECISE=call.dtype == torch.float64,
    )
    return launch_duration_posteriors(call, scan, durations)


def tdt_gradient(
    grad: Tensor,
    token_logits: Tensor,
    duration_logits: Tensor,
    token_lse: Tensor,
    duration_lse: Tensor,
    posteriors: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the losses in the logits of tokens and of durations."""
    (B, T, U1, V), K = token_logits.shape, duration_logits.shape[-1]
    targets, device = as_targets(labels, logit_lengths, target_lengths), token_logits.device
    dtokens = torch.empty(token_logits.shape, dtype=token_logits.dtype, device=device)
    ddurations = torch.empty(duration_logits.shape, dtype=duration_logits.dtype, device=device)
    launch(
        tdt_gradient_kernel,
        B * T * cdiv(U1, NODES_PER_PROGRAM) + B * cdiv(T * U1, DURATION_NODES),
        grad=Upstream(grad, grad.stride(0)),
        tokens=Logits(token_logits, token_logits.stride(3), token_lse),
        durations=Logits(duration_logits, duration_logits.stride(3), duration_lse),
        posteriors_ptr=posteriors,
        labels_ptr=targets.labels,
        dtokens=StridedLogits(dtokens, *dtokens.stride()),
        ddurations_ptr=ddurations,
        T=T,
        B=B,
        U1=U1,
        V=V,
        blank=blank,
        target_stride=targets.stride,
        **node_strides(token_logits, T),
        **duration_strides(duration_logits),
        K=K,
        **tile_options(tile_of(token_logits, dtokens)),
    )
    return dtokens, ddurations


def duration_gradient(
    grad: Tensor, duration_logits: Tensor, duration_lse: Tensor, posteriors: Tensor
) -> Tensor:
    """Return the gradient of the losses in the logits of the durations."""
    B, T, U1, K = duration_logits.shape
    ddurations = torch.empty(
        duration_logits.shape, dtype=duration_logits.dtype, device=duration_logits.device
    )
    launch(
        tdt_duration_gradient_kernel,
        B * cdiv(T * U1, BLOCK_NODES),
        grad=Upstream(grad, grad.stride(0)),
        durations=Logits(duration_logits, duration_logits.stride(3), duration_lse),
        posteriors_ptr=posteriors,
        ddurations_ptr=ddurations,
        T=T,
        B=B,
        U1=U1,
        **node_strides(duration_logits, T),
        K=K,
        BLOCK=BLOCK_NODES,
        num_warps=4,
    )
    return ddurations


def best_path(
    call: LatticeCall, arcs: Tensor, kinds: ArcKinds, filled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the steps and scores of the labels on the best path, and its score.

    If the arcs are `filled`, those that leave the lattice have the score -inf; see
    `token_duration_arcs`.
    """
    B, U1, plan, device = call.B, call.U1, call.plan, call.device
    zeros = scan_zeros(call)
    pointers = torch.empty(plan.nodes, dtype=torch.int8, device=device)
    best = torch.empty(B, dtype=torch.float64, device=device)
    scan = Scan(arcs, pointers, zeros.flags, best)
    shared = {"CODE": kinds.code, "ARCS": kinds.number}
    launch_lanes(
        BEST_SCAN,
        B * plan.num_chunks,
        device,
        scan=scan,
        carries=zeros.carries,
        **call.scan_arguments,
        FILLED=filled,
        BLOCK=scan_block(kinds.number, call.device),
        DEPTH=kinds.depth,
        **shared,
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
        T=call.T,
        U1=U1,
        **plan.layout,
        BLOCK_U=128,
        num_warps=1,
        **shared,
    )
    return steps, scores, score


def rnnt_align(
    logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the steps and scores of the labels on the best path, and its score."""
    options = NodeOptions(blank, fused, False, 0.0, 0.0)
    call = lattice_call(logits, labels, logit_lengths, target_lengths, options, False)
    arcs = call.empty_arcs()
    launch_nodes(call, logits, call.empty_lse(), arcs, 0, call.B * call.T)
    return best_path(call, arcs, arc_kinds(RNNT_ARCS), False)


def tdt_align(
    token_logits: Tensor,
    duration_logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    durations: Sequence[int],
    sigma: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the steps and scores of the labels on the best path, and its score."""
    options = NodeOptions(blank, True, False, sigma, 0.0)
    call = lattice_call(token_logits, labels, logit_lengths, target_lengths, options, False)
    arcs, _, _ = tdt_arcs(call, token_logits, duration_logits, durations, None)
    return best_path(call, arcs, arc_kinds(duration_arcs(durations)), True)
