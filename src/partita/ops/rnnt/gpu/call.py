"""What all ops of transducers share: a call, its memory, and its launches.

The launches turn logits into the scores of arcs, and these into losses and posteriors. Or they do
both at the same time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype, zeroed_words
from ...ctc.gpu.lanes import launch_lanes
from .gradient import StridedLogits, Upstream, rnnt_gradient_kernel
from .lattice import Lengths, Targets
from .nodes import rnnt_nodes_kernel
from .overlap import rnnt_overlap_kernel
from .plan import (
    BLOCK_ROWS,
    LSE_DTYPE,
    NODES_PER_PROGRAM,
    LatticePlan,
    RowTile,
    lattice_plan,
    overlap_registers,
    row_tile,
)
from .posterior import rnnt_posterior_kernel
from .rows import Logits
from .scan import SCAN, Carries, Scan


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


class LatticeCall(NamedTuple):
    """A batch of lattices.

    Fields:
        targets: the targets and the lengths.
        options: the options of the scores of the arcs.
        B, T, U1, V: the sizes of the logits.
        dtype: their dtype.
        need_posteriors: whether a gradient follows, which needs β and the log-sum-exps too.
    """

    targets: Targets
    options: NodeOptions
    B: int
    T: int
    U1: int
    V: int
    dtype: torch.dtype
    need_posteriors: bool

    @property
    def plan(self) -> LatticePlan:
        """The layout of arrays over the nodes."""
        return lattice_plan(self.B, self.T, self.U1)

    @property
    def device(self) -> torch.device:
        """The device of the batch."""
        return self.targets.labels.device

    @property
    def directions(self) -> int:
        """The directions of the scan: 2 for α and β, 1 for α alone."""
        return 2 if self.need_posteriors else 1

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes and the layout as arguments of kernels."""
        return {"T": self.T, "B": self.B, "U1": self.U1, **self.plan.layout}

    @property
    def scan_arguments(self) -> dict[str, Any]:
        """The arguments that all kernels with a scan of these lattices get."""
        return {
            "targets": self.targets,
            **self.plan.scan_sizes(self.T, self.B, self.U1, self.V),
            "blank": self.options.blank,
            "target_stride": self.targets.stride,
        }

    def empty_lse(self) -> Tensor:
        """Return memory for the log-sum-exps of the nodes, empty if no gradient follows."""
        shape = (self.B, self.T, self.U1) if self.need_posteriors else (0,)
        return torch.empty(shape, dtype=LSE_DTYPE, device=self.device)

    def empty_arcs(self) -> Tensor:
        """Return memory for the scores of the arcs of blanks and labels."""
        return torch.empty((2, self.plan.nodes), dtype=torch.float64, device=self.device)

    def results(self, kinds: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return memory for losses and posteriors, and both as arguments of a kernel.

        The posteriors are `[kinds, B, T, U1]`, or empty if no gradient follows.
        """
        dtype, shape = acc_dtype(self.dtype), (kinds, self.B, self.T, self.U1)
        nll = torch.empty(self.B, dtype=dtype, device=self.device)
        posteriors = torch.empty(
            shape if self.need_posteriors else (0,), dtype=dtype, device=self.device
        )
        stored = posteriors if self.need_posteriors else None
        return nll, posteriors, {"nll_ptr": nll, "posteriors_ptr": stored}


def lattice_call(
    logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    options: NodeOptions,
    need_posteriors: bool,
) -> LatticeCall:
    """Return the call of a batch of logits, `[B, T, U1, V]`."""
    B, T, U1, V = logits.shape
    targets = as_targets(labels, logit_lengths, target_lengths)
    return LatticeCall(targets, options, B, T, U1, V, logits.dtype, need_posteriors)


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
    call: LatticeCall, logits: Tensor, lse: Tensor, arcs: Tensor, first_step: int, steps: int
) -> None:
    """Compute the log-sum-exps and the arcs of `steps` steps.

    Args:
        call: the batch.
        logits: `[B, T, U1, V]`, or those of these steps as `[1, steps, U1, V]`.
        lse: `[B, T, U1]`, or an empty tensor if no gradient needs them.
        arcs: the scores of the arcs, `[2, nodes]`.
        first_step: the first step, counted over all sequences.
        steps: the number of steps.
    """
    options, T, U1 = call.options, call.T, call.U1
    launch(
        rnnt_nodes_kernel,
        steps * cdiv(U1, NODES_PER_PROGRAM),
        logits=Logits(logits, logits.stride(3), lse if lse.numel() else None),
        targets=call.targets,
        arcs_ptr=arcs,
        first_step=first_step,
        T=T,
        U1=U1,
        V=call.V,
        **call.plan.layout,
        blank=options.blank,
        sigma=options.sigma,
        delay_penalty=options.delay_penalty,
        target_stride=call.targets.stride,
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


def scan_zeros(call: LatticeCall, arc_words: int = 0) -> ScanZeros:
    """Return the zeroed words of a scan, all of one fill."""
    plan, B = call.plan, call.B
    has_carries = plan.num_chunks > 1
    carry_words = call.directions * plan.num_chunks * B * plan.carry_steps if has_carries else 0
    counter, flags, carries, arcs = zeroed_words(
        call.device, int(has_carries), max(B, 1), carry_words, arc_words
    )
    assert flags is not None
    return ScanZeros(flags, Carries(carries, counter) if has_carries else None, arcs)


def new_scan(call: LatticeCall, arcs: Tensor, flags: Tensor) -> Scan:
    """Return a scan of scores in fp64 or of words in int64, with memory for its results."""
    totals = arcs.new_empty((call.B,) if arcs.dtype == torch.float64 else (2, call.B))
    states = arcs.new_empty((2, call.plan.nodes)) if call.need_posteriors else None
    return Scan(arcs, states, flags, totals)


def scan_lattice(call: LatticeCall, arcs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses, and the posteriors `[2, B, T, U1]` or an empty tensor."""
    zeros = scan_zeros(call)
    scan = new_scan(call, arcs, zeros.flags)
    launch_lanes(
        SCAN,
        call.directions * call.B * call.plan.num_chunks,
        call.device,
        scan=scan,
        carries=zeros.carries,
        **call.scan_arguments,
        DIRECTIONS=call.directions,
        BLOCK=BLOCK_ROWS,
        FP64=call.dtype == torch.float64,
    )
    return launch_posteriors(call, scan)


def scan_beside_rows(call: LatticeCall, logits: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `scan_lattice` does, and write the log-sum-exps, by a scan beside their pass."""
    B, T, U1 = call.B, call.T, call.U1
    plan, options, tile = call.plan, call.options, tile_of(logits)
    zeros = scan_zeros(call, 2 * plan.nodes)
    assert zeros.arcs is not None
    scan = new_scan(call, zeros.arcs.view(torch.float64), zeros.flags)
    launch(
        rnnt_overlap_kernel,
        call.directions * B * plan.num_chunks + B * T * cdiv(U1, NODES_PER_PROGRAM),
        logits=Logits(logits, logits.stride(3), lse if lse.numel() else None),
        scan=scan._replace(arcs=zeros.arcs),
        carries=zeros.carries,
        **call.scan_arguments,
        delay_penalty=options.delay_penalty,
        **node_strides(logits, T),
        DIRECTIONS=call.directions,
        HAT=options.hat,
        maxnreg=overlap_registers(tile, options.hat),
        **tile_options(tile),
    )
    return launch_posteriors(call, scan)


def launch_posteriors(call: LatticeCall, scan: Scan) -> tuple[Tensor, Tensor]:
    """Return the losses, and the posteriors `[2, B, T, U1]` or an empty tensor."""
    B, T, U1 = call.B, call.T, call.U1
    nll, posteriors, results = call.results(2)
    block_u = min(next_power_of_2(U1), 128)
    diagonals = max(1, 512 // block_u)
    launch(
        rnnt_posterior_kernel,
        B * (cdiv(T + U1 - 1, diagonals) if call.need_posteriors else 1),
        scan=scan,
        lengths=call.targets.lengths,
        **results,
        **call.sizes,
        FP64=call.dtype == torch.float64,
        DIAGONALS=diagonals,
        BLOCK_U=block_u,
        num_warps=4,
    )
    return nll, posteriors


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

    See `launch_nodes` for the steps. The posteriors are those of blanks and labels,
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
