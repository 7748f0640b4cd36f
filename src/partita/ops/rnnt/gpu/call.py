"""Targets, tiles of rows, zeroed words and launches that all ops of transducers share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....runtime.launch import cdiv, launch, tl_acc_dtype, zeroed_words
from .gradient import StridedLogits, Upstream, rnnt_gradient_kernel
from .lattice import Lengths, Targets
from .nodes import rnnt_nodes_kernel
from .plan import NODES_PER_PROGRAM, LatticePlan, RowTile, lattice_plan, row_tile
from .rows import Logits
from .scan import Carries, Scan


class NodeOptions(NamedTuple):
    """The options of the scores of the arcs.

    Fields:
        blank: the class of the blank.
        fused: whether the logits are normalized; otherwise they are log-probabilities.
        hat: whether the blank is a Bernoulli variable apart from the labels.
        sigma: subtracted from each score.
        delay_penalty: added to a label's score, times the steps before the middle.
    """

    blank: int
    fused: bool
    hat: bool
    sigma: float
    delay_penalty: float


def as_targets(labels: Tensor, logit_lengths: Tensor, target_lengths: Tensor) -> Targets:
    """Return the targets with labels whose rows are contiguous."""
    if labels.shape[1] > 1 and labels.stride(1) != 1:
        labels = labels.contiguous()
    return Targets(labels, Lengths(logit_lengths, target_lengths))


def tile_of(*tensors: Tensor) -> RowTile:
    """Return how a kernel reads the rows of tensors of one shape and dtype together."""
    first = tensors[0]
    itemsize, V, bits = first.element_size(), first.shape[-1], 16
    # Aligned parts of rows begin at the same columns if the offsets of the rows are the same.
    same_offsets = all(tensor.stride() == first.stride() for tensor in tensors)
    has_edges = same_offsets and first.stride(-1) == 1
    for tensor in tensors:
        bits |= tensor.data_ptr()
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            bits |= stride * itemsize if size > 1 else 0
        if V > 1 and tensor.stride(-1) != 1:
            bits |= itemsize
        has_edges = has_edges and tensor.data_ptr() % 16 == 0
    return row_tile(V, itemsize, bits & -bits, has_edges)


def tile_options(tile: RowTile) -> dict[str, Any]:
    """Return the launch options of a kernel that reads rows."""
    return {
        "VEC": tile.vector,
        "EDGES": tile.edges,
        "PIECES": tile.pieces,
        "BLOCK_V": tile.block,
        "num_warps": 1,
    }


def launch_nodes(
    logits: Tensor,
    targets: Targets,
    lse: Tensor,
    arcs: Tensor,
    first_step: int,
    steps: int,
    sizes: tuple[int, int, int],
    options: NodeOptions,
) -> None:
    """Compute the log-sum-exps and the arcs of `steps` steps.

    Args:
        logits: `[B, T, U1, V]`, or those of these steps as `[1, steps, U1, V]`.
        targets: the targets.
        lse: `[B, T, U1]`, or an empty tensor if no gradient needs them.
        arcs: the scores of the arcs, `[2, nodes]`.
        first_step: the first step, counted over all sequences.
        steps: the number of steps.
        sizes: B, T and U1.
        options: the options of the loss.
    """
    B, T, U1 = sizes
    launch(
        rnnt_nodes_kernel,
        steps * cdiv(U1, NODES_PER_PROGRAM),
        logits=Logits(logits, logits.stride(3), lse if lse.numel() else None),
        targets=targets,
        arcs_ptr=arcs,
        first_step=first_step,
        T=T,
        U1=U1,
        V=logits.shape[3],
        **lattice_plan(B, T, U1).layout,
        blank=options.blank,
        sigma=options.sigma,
        delay_penalty=options.delay_penalty,
        target_stride=targets.stride,
        **node_strides(logits, T),
        FUSED=options.fused,
        HAT=options.hat,
        DTYPE=tl_acc_dtype(logits.dtype),
        **tile_options(tile_of(logits)),
    )


def node_strides(logits: Tensor, T: int) -> dict[str, int]:
    """Return the strides of a batch, or of some steps `[1, steps, U1, V]` of it, by name.

    Sequences of T steps follow each other without a gap where only some steps are there.
    """
    stride_b, stride_t, stride_u, _ = logits.stride()
    if logits.shape[1] != T:
        stride_b = T * stride_t
    return {"stride_b": stride_b, "stride_t": stride_t, "stride_u": stride_u}


class ScanZeros(NamedTuple):
    """The zeroed words of a scan.

    Fields:
        flags: `[B]`, which sequences are invalid.
        carries: what programs share, or None if no program waits for another.
        arcs: the scores of the arcs as words, `[2, nodes]`, if the scan waits for them.
    """

    flags: Tensor
    carries: Carries | None
    arcs: Tensor | None


def scan_zeros(
    plan: LatticePlan, B: int, directions: int, device: torch.device, arc_words: int = 0
) -> ScanZeros:
    """Return the zeroed words of a scan in some directions, all of one fill."""
    has_carries = plan.num_chunks > 1
    carry_words = directions * plan.num_chunks * B * plan.carry_steps if has_carries else 0
    counter, flags, carries, arcs = zeroed_words(
        device, int(has_carries), max(B, 1), carry_words, arc_words
    )
    assert flags is not None
    return ScanZeros(flags, Carries(carries, counter) if has_carries else None, arcs)


def new_scan(plan: LatticePlan, arcs: Tensor, flags: Tensor, B: int, need_posteriors: bool) -> Scan:
    """Return a scan of scores in fp64 or of words in int64, with memory for its results."""
    totals = arcs.new_empty((B,) if arcs.dtype == torch.float64 else (2, B))
    return Scan(arcs, arcs.new_empty((2, plan.nodes)) if need_posteriors else None, flags, totals)


def launch_gradient(
    grad: Tensor,
    logits: Tensor,
    lse: Tensor | None,
    posteriors: Tensor,
    targets: Targets,
    dlogits: Tensor,
    first_step: int,
    steps: int,
    blank: int,
    hat: bool,
    clamp: float,
    fastemit_lambda: float,
) -> None:
    """Write the gradient of the logits of `steps` steps, which may replace the logits.

    The arguments are those of `launch_nodes`, with the posteriors of blanks and labels,
    `[2, B, T, U1]`. More may follow these.
    """
    B, T, U1 = posteriors.shape[1:]
    d_b, d_t, d_u = node_strides(dlogits, T).values()
    launch(
        rnnt_gradient_kernel,
        steps * cdiv(U1, NODES_PER_PROGRAM),
        grad=Upstream(grad, grad.stride(0)),
        logits=Logits(logits, logits.stride(3), lse),
        dlogits=StridedLogits(dlogits, d_b, d_t, d_u, dlogits.stride(3)),
        posteriors_ptr=posteriors,
        labels_ptr=targets.labels,
        first_step=first_step,
        T=T,
        B=B,
        U1=U1,
        V=logits.shape[3],
        blank=blank,
        clamp=clamp,
        fastemit=1.0 + fastemit_lambda,
        target_stride=targets.stride,
        **node_strides(logits, T),
        HAT=hat,
        CLIP=clamp > 0,
        **tile_options(tile_of(logits, dlogits)),
    )
