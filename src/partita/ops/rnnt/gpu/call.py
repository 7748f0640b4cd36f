"""What all ops of transducers share: a call, its memory, and its launches.

The launches turn logits into the scores of blank and label at each node, these into the arcs of all
kinds, and these into losses and posteriors. Or they do all but the last at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....primitives.gpu.target import target_of
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, tl_acc_dtype, zeroed_words
from ...ctc.gpu.lanes import launch_lanes
from .arc_rows import Carries, Scan
from .arcs import DurationLogits, rnnt_arcs_kernel, rnnt_words_kernel
from .gradient import (
    DURATION_NODES,
    DurationGradient,
    StridedLogits,
    Upstream,
    rnnt_gradient_kernel,
)
from .lattice import Lengths, Targets
from .nodes import rnnt_nodes_kernel
from .overlap import rnnt_overlap_kernel
from .plan import (
    CHUNK,
    LSE_DTYPE,
    MARGIN,
    NODES_PER_PROGRAM,
    ArcKinds,
    LatticePlan,
    RowTile,
    arc_kinds,
    lattice_plan,
    overlap_registers,
    overlaps,
    row_tile,
)
from .posterior import rnnt_posterior_kernel
from .rows import Logits
from .scan import SCAN

BLOCK_NODES = 128  # nodes of a program


class NodeOptions(NamedTuple):
    """The options of the scores of the arcs.

    Fields:
        blank: the class of the blank.
        durations: those of a TDT, or none for RNN-T.
        fused: whether the logits are normalized; otherwise they are log-probabilities.
        hat: whether the blank is a Bernoulli variable apart from the labels.
        sigma: subtracted from each score.
        delay_penalty: added to a label's score, times the steps before the middle.
    """

    blank: int
    durations: Sequence[int]
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
    def kinds(self) -> ArcKinds:
        """The kinds of arcs."""
        return arc_kinds(tuple(self.options.durations))

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
        """The sizes of the lattices as arguments of kernels."""
        return {"T": self.T, "B": self.B, "U1": self.U1, "num_chunks": self.plan.num_chunks}

    @property
    def scan_arguments(self) -> dict[str, Any]:
        """The arguments that all kernels with a scan of these lattices get."""
        return {
            "targets": self.targets,
            **self.sizes,
            "V": self.V,
            "blank": self.options.blank,
            "target_stride": self.targets.stride,
            "CODE": self.kinds.code,
        }

    @property
    def chunk_programs(self) -> int:
        """The programs that have BLOCK_NODES nodes each of all chunks."""
        return self.B * self.plan.num_chunks * cdiv(self.plan.rows * CHUNK, BLOCK_NODES)

    @property
    def carry_words(self) -> int:
        """The words that chunks hand to their neighbors; 0 if there is one chunk."""
        plan = self.plan
        if plan.num_chunks == 1:
            return 0
        return self.directions * plan.num_chunks * self.B * plan.carry_steps

    def empty_lse(self) -> Tensor:
        """Return memory for the log-sum-exps of the nodes, empty if no gradient follows."""
        shape = (self.B, self.T, self.U1) if self.need_posteriors else (0,)
        return torch.empty(shape, dtype=LSE_DTYPE, device=self.device)

    def empty_arcs(self) -> Tensor:
        """Return memory for the arcs, `[kinds * nodes]` after a margin; see `arcs.py`."""
        size = MARGIN + self.kinds.number * self.plan.nodes
        return torch.empty(size, dtype=torch.float64, device=self.device)[MARGIN:]


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


def duration_logits_of(logits: Tensor | None, lse: Tensor) -> DurationLogits:
    """Return the logits of the durations, None for RNN-T, as kernels take them."""
    contiguous = None if logits is None else logits.contiguous()
    return DurationLogits(contiguous, lse if lse.numel() else None)


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


def node_strides(logits: Tensor, T: int) -> dict[str, int]:
    """Return the strides of a batch, or of some steps `[1, steps, U1, V]` of it, by name.

    Sequences of T steps follow each other without a gap where only some steps are there.
    """
    stride_b, stride_t, stride_u, _ = logits.stride()
    if logits.shape[1] != T:
        stride_b = T * stride_t
    return {"stride_b": stride_b, "stride_t": stride_t, "stride_u": stride_u}


def launch_nodes(
    call: LatticeCall, logits: Tensor, lse: Tensor, arcs: Tensor, first_step: int, steps: int
) -> None:
    """Compute the log-sum-exps, and the scores of blank and label, of `steps` steps.

    Args:
        call: the batch.
        logits: `[B, T, U1, V]`, or those of these steps as `[1, steps, U1, V]`.
        lse: `[B, T, U1]`, or an empty tensor if no gradient needs them.
        arcs: memory for the arcs, whose first kinds of blanks and of labels get the scores.
        first_step: the first step, counted over all sequences.
        steps: the number of steps.
    """
    options = call.options
    launch(
        rnnt_nodes_kernel,
        steps * cdiv(call.U1, NODES_PER_PROGRAM),
        logits=Logits(logits, logits.stride(3), lse if lse.numel() else None),
        targets=call.targets,
        blanks_ptr=arcs,
        labels_ptr=arcs[call.kinds.number // 2 * call.plan.nodes :],
        first_step=first_step,
        **call.sizes,
        V=call.V,
        blank=options.blank,
        sigma=options.sigma,
        delay_penalty=options.delay_penalty,
        target_stride=call.targets.stride,
        **node_strides(logits, call.T),
        FUSED=options.fused,
        HAT=options.hat,
        DTYPE=tl_acc_dtype(logits.dtype),
        **tile_options(tile_of(logits)),
    )


def launch_arcs(
    call: LatticeCall, arcs: Tensor, duration_logits: Tensor | None, flags: Tensor | None
) -> Tensor:
    """Turn the scores of blank and label into arcs, and return the durations' log-sum-exps.

    Without `flags`, the arcs are scores in fp64. Otherwise they are words, and sequences in which
    one is NaN are flagged. The log-sum-exps are empty if no gradient or no duration needs them.
    """
    lse = call.empty_lse() if duration_logits is not None else arcs.new_empty(0)
    launch(
        rnnt_arcs_kernel,
        call.chunk_programs + MARGIN // BLOCK_NODES,
        arcs_ptr=arcs,
        durations=duration_logits_of(duration_logits, lse),
        lengths=call.targets.lengths,
        flags_ptr=flags,
        **call.sizes,
        CODE=call.kinds.code,
        PRECISE=call.dtype == torch.float64,
        BLOCK=BLOCK_NODES,
        num_warps=4,
    )
    return lse


class ScanMemory(NamedTuple):
    """The memory that is prepared for a scan.

    Fields:
        flags: `[B]` zeros, which sequences are invalid.
        carries: what programs share, or None if no program waits for another.
    """

    flags: Tensor
    carries: Carries | None


def scan_memory(call: LatticeCall) -> ScanMemory:
    """Return the zeroed words of a scan, all of one fill."""
    size = call.carry_words
    counter, flags, carries = zeroed_words(call.device, int(size > 0), max(call.B, 1), size)
    assert flags is not None
    return ScanMemory(flags, Carries(carries, counter) if size else None)


def prepared_words(call: LatticeCall) -> tuple[ScanMemory, Tensor]:
    """Return the memory and the arcs of a scan that waits for them, prepared by one launch."""
    B, carries = call.B, call.carry_words
    # Rows of words start on 256 bytes.
    zeros = cdiv(B + carries + 1, CHUNK) * CHUNK
    size = zeros + MARGIN + call.kinds.number * call.plan.nodes
    words = torch.empty(size, dtype=torch.int64, device=call.device)
    launch(
        rnnt_words_kernel,
        call.chunk_programs + MARGIN // BLOCK_NODES + cdiv(zeros + MARGIN, BLOCK_NODES),
        words_ptr=words,
        lengths=call.targets.lengths,
        zeros=zeros,
        **call.sizes,
        CODE=call.kinds.code,
        BLOCK=BLOCK_NODES,
        num_warps=4,
    )
    flags, arcs = words[:B], words[zeros + MARGIN :]
    if not carries:
        return ScanMemory(flags, None), arcs
    counter = words[B + carries : B + carries + 1]
    return ScanMemory(flags, Carries(words[B : B + carries], counter)), arcs


def new_scan(call: LatticeCall, arcs: Tensor, flags: Tensor) -> Scan:
    """Return a scan of words, with memory for its results."""
    states = arcs.new_empty((2, call.plan.nodes)) if call.need_posteriors else None
    return Scan(arcs, states, flags, arcs.new_empty((2, call.B)))


def scan_block(kinds: int, device: torch.device) -> int:
    """Return the rows that a scan loads together, so that the scores of their arcs fit registers.

    Triton's compiler for AMD takes minutes for long unrolled loops in kernels of one warp.
    """
    if target_of(device).vendor == "amd":
        return 1
    return 8 if kinds <= 2 else 4 if kinds <= 10 else 2


def scan_lattice(
    call: LatticeCall, arcs: Tensor, duration_logits: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses, the durations' log-sum-exps and the posteriors; see `launch_posteriors`.

    `arcs` has the scores of blank and label at all nodes.
    """
    memory = scan_memory(call)
    duration_lse = launch_arcs(call, arcs, duration_logits, memory.flags)
    scan = new_scan(call, arcs.view(torch.int64), memory.flags)
    launch_lanes(
        SCAN,
        call.directions * call.B * call.plan.num_chunks,
        call.device,
        scan=scan,
        carries=memory.carries,
        **call.scan_arguments,
        DIRECTIONS=call.directions,
        BLOCK=scan_block(call.kinds.number, call.device),
        PRECISE=call.dtype == torch.float64,
    )
    nll, posteriors = launch_posteriors(call, scan)
    return nll, duration_lse, posteriors


def may_overlap(call: LatticeCall) -> bool:
    """Return whether the scan runs beside the pass over the logits; see `plan.overlaps`."""
    # Log-probabilities are not read as rows.
    if not call.options.fused or target_of(call.device).vendor != "nvidia":
        return False
    itemsize = call.dtype.itemsize
    return overlaps(call.B, call.T, call.U1, call.V, itemsize, call.directions, call.kinds)


def scan_beside_rows(
    call: LatticeCall, logits: Tensor, lse: Tensor, duration_logits: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `scan_lattice` does, and write the log-sum-exps, by a scan beside their pass."""
    B, T, U1 = call.B, call.T, call.U1
    options, tile = call.options, tile_of(logits)
    duration_lse = call.empty_lse() if duration_logits is not None else lse.new_empty(0)
    memory, words = prepared_words(call)
    scan = new_scan(call, words, memory.flags)
    launch(
        rnnt_overlap_kernel,
        call.directions * B * call.plan.num_chunks + B * T * cdiv(U1, NODES_PER_PROGRAM),
        logits=Logits(logits, logits.stride(3), lse if lse.numel() else None),
        durations=duration_logits_of(duration_logits, duration_lse),
        scan=scan,
        carries=memory.carries,
        **call.scan_arguments,
        sigma=options.sigma,
        delay_penalty=options.delay_penalty,
        **node_strides(logits, T),
        DIRECTIONS=call.directions,
        HAT=options.hat,
        maxnreg=overlap_registers(tile, options.hat, call.kinds),
        **tile_options(tile),
    )
    nll, posteriors = launch_posteriors(call, scan)
    return nll, duration_lse, posteriors


def launch_posteriors(call: LatticeCall, scan: Scan) -> tuple[Tensor, Tensor]:
    """Return the losses, and the posteriors or an empty tensor if no gradient follows.

    These are those of blanks, of labels and of each duration, `[2 + K, B, T, U1]`.
    """
    dtype, K = acc_dtype(call.dtype), len(call.options.durations)
    shape = (2 + K, call.B, call.T, call.U1) if call.need_posteriors else (0,)
    nll = torch.empty(call.B, dtype=dtype, device=call.device)
    posteriors = torch.empty(shape, dtype=dtype, device=call.device)
    launch(
        rnnt_posterior_kernel,
        call.chunk_programs if call.need_posteriors else call.B,
        scan=scan,
        lengths=call.targets.lengths,
        nll_ptr=nll,
        posteriors_ptr=posteriors if call.need_posteriors else None,
        **call.sizes,
        CODE=call.kinds.code,
        DURATIONS=K > 0,
        PRECISE=call.dtype == torch.float64,
        BLOCK=BLOCK_NODES,
        num_warps=4,
    )
    return nll, posteriors


NO_DURATIONS = DurationGradient(None, None, None)


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
    durations: DurationGradient = NO_DURATIONS,
) -> None:
    """Write the gradient of the logits of `steps` steps, which may replace the logits.

    See `launch_nodes` for the steps. The posteriors are `[2 + K, B, T, U1]`. The gradient of all
    durations is written with the first step.
    """
    kinds, B, T, U1 = posteriors.shape
    has_durations = durations.ptr is not None and first_step == 0
    duration_programs = B * cdiv(T * U1, DURATION_NODES) if has_durations else 0
    d_b, d_t, d_u = node_strides(dlogits, T).values()
    launch(
        rnnt_gradient_kernel,
        steps * cdiv(U1, NODES_PER_PROGRAM) + duration_programs,
        grad=Upstream(grad, grad.stride(0), posteriors, targets.labels),
        logits=Logits(logits, logits.stride(3), lse),
        durations=durations,
        dlogits=StridedLogits(dlogits, d_b, d_t, d_u, dlogits.stride(3)),
        first_step=first_step,
        steps=steps,
        T=T,
        B=B,
        U1=U1,
        V=logits.shape[3],
        blank=blank,
        clamp=clamp,
        fastemit=1.0 + fastemit_lambda,
        target_stride=targets.stride,
        **node_strides(logits, T),
        K=kinds - 2,
        HAT=hat,
        CLIP=clamp > 0,
        **tile_options(tile_of(logits, dlogits)),
    )
