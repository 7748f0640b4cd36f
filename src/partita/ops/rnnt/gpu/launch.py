"""Transducers on a GPU: a call, its memory and its launches; loss, gradient and best path.

The loss reads the logits once for each node's log-sum-exp and scores, and makes arcs of these
(`nodes.py`), scans α and β at the same time (`scan.py`), and turns them into posteriors
(`posterior.py`). For few sequences the scan runs while the logits are read (`overlap.py`). The
gradient reads and writes the logits once more (`gradient.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....primitives.gpu.target import target_of
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, tl_acc_dtype, zeroed_words
from ...ctc.gpu.lanes import launch_lanes
from ..common import NodeInputs, NodeOptions
from .arc_rows import Scan
from .gradient import DURATION_NODES, StridedLogits, Upstream, rnnt_gradient_kernel
from .lattice import Durations, Lengths, Targets
from .nodes import rnnt_arcs_kernel, rnnt_nodes_kernel
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
from .scan import BEST_SCAN, SCAN, rnnt_backtrace_kernel

BLOCK_NODES = 128  # nodes of a program


class LatticeCall(NamedTuple):
    """A batch of lattices.

    Fields:
        targets: the targets and the lengths.
        B, T, U1, V: the sizes of the logits.
        dtype: their dtype.
        need_posteriors: whether a gradient follows, which needs β and the log-sum-exps too.
        options: how logits become the log-probabilities of arcs.
    """

    targets: Targets
    B: int
    T: int
    U1: int
    V: int
    dtype: torch.dtype
    need_posteriors: bool
    options: NodeOptions

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

    def empty_lse(self) -> Tensor:
        """Return memory for the log-sum-exps of the nodes, empty if no gradient follows."""
        shape = (self.B, self.T, self.U1) if self.need_posteriors else (0,)
        return torch.empty(shape, dtype=LSE_DTYPE, device=self.device)

    def empty_arcs(self) -> Tensor:
        """Return memory for the arcs, `[kinds * nodes]` after a margin; see `nodes.py`."""
        size = MARGIN + self.kinds.number * self.plan.nodes
        return torch.empty(size, dtype=torch.float64, device=self.device)[MARGIN:]


def as_targets(labels: Tensor, logit_lengths: Tensor, target_lengths: Tensor) -> Targets:
    """Return the targets with labels whose rows are contiguous."""
    if labels.shape[1] > 1 and labels.stride(1) != 1:
        labels = labels.contiguous()
    return Targets(labels, Lengths(logit_lengths, target_lengths))


def duration_logits_of(logits: Tensor | None, lse: Tensor) -> Durations:
    """Return the logits of the durations, None for RNN-T, as kernels take them."""
    contiguous = None if logits is None else logits.contiguous()
    return Durations(contiguous, lse if lse.numel() else None, None)


def tile_of(logits: Tensor, dlogits: Tensor | None = None) -> RowTile:
    """Return how a kernel adds up the rows of logits, or reads them and writes their gradient."""
    tensors = (logits,) if dlogits is None else (logits, dlogits)
    itemsize, V, bits = logits.element_size(), logits.shape[-1], 16
    for tensor in tensors:
        bits |= tensor.data_ptr()
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            bits |= stride * itemsize if size > 1 else 0
    is_adjacent = V <= 1 or all(tensor.stride(-1) == 1 for tensor in tensors)
    alignment = bits & -bits if is_adjacent else 0
    if dlogits is None:
        return row_tile(V, itemsize, alignment)
    # Aligned parts of rows begin at the same columns if the offsets of the rows are the same.
    has_edges = logits.stride() == dlogits.stride() and logits.stride(-1) == 1
    has_edges &= (logits.data_ptr() | dlogits.data_ptr()) % 16 == 0
    return row_tile(V, itemsize, alignment, has_edges)


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
    """Compute the log-sum-exps, and the scores of blank and label, of steps of all sequences.

    The logits are `[B, T, U1, V]`, or those of these steps, `[1, steps, U1, V]`. The scores become
    the first kinds of blanks and of labels among the arcs.
    """
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
        blank=call.options.blank,
        sigma=call.options.sigma,
        delay_penalty=call.options.delay_penalty,
        target_stride=call.targets.stride,
        **node_strides(logits, call.T),
        FUSED=call.options.fused,
        HAT=call.options.hat,
        DTYPE=tl_acc_dtype(logits.dtype),
        TILE=tile_of(logits),
        num_warps=1,
    )


def launch_arcs(
    call: LatticeCall, arcs: Tensor, duration_logits: Tensor | None, flags: Tensor | None
) -> Tensor:
    """Turn the scores of blank and label into arcs, and return the durations' log-sum-exps.

    Without `flags`, the arcs are scores in fp64. Otherwise they are words, and sequences in which
    one is NaN are flagged. Where `arcs` are int64, there are no scores, and the words are prepared
    for a scan that awaits them.
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


def new_scan(call: LatticeCall, arcs: Tensor, states: Tensor | None, totals: Tensor) -> Scan:
    """Return a scan of arcs with the zeroed words that it needs, all of one fill."""
    chunks, size = call.plan.num_chunks, 0
    if chunks > 1:  # the words that chunks hand to their neighbors
        size = call.directions * chunks * call.B * call.plan.carry_steps
    counter, flags, carries = zeroed_words(call.device, int(size > 0), max(call.B, 1), size)
    return Scan(arcs, states, flags, totals, carries, counter)


def word_scan(call: LatticeCall, arcs: Tensor) -> Scan:
    """Return a scan of words, with memory for its results."""
    words = arcs.view(torch.int64)
    states = words.new_empty((2, call.plan.nodes)) if call.need_posteriors else None
    return new_scan(call, words, states, words.new_empty((2, call.B)))


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
    scan = word_scan(call, arcs)
    duration_lse = launch_arcs(call, arcs, duration_logits, scan.flags)
    launch_lanes(
        SCAN,
        call.directions * call.B * call.plan.num_chunks,
        call.device,
        scan=scan,
        **call.scan_arguments,
        DIRECTIONS=call.directions,
        BLOCK=scan_block(call.kinds.number, call.device),
        PRECISE=call.dtype == torch.float64,
    )
    nll, posteriors = launch_posteriors(call, scan)
    return nll, duration_lse, posteriors


def scan_beside_rows(
    call: LatticeCall, logits: Tensor, lse: Tensor, duration_logits: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `scan_lattice` does, and write the log-sum-exps, by a scan beside their pass."""
    B, T, U1 = call.B, call.T, call.U1
    tile = tile_of(logits)
    duration_lse = call.empty_lse() if duration_logits is not None else lse.new_empty(0)
    scan = word_scan(call, call.empty_arcs())
    launch_arcs(call, scan.arcs, None, None)
    launch(
        rnnt_overlap_kernel,
        call.directions * B * call.plan.num_chunks + B * T * cdiv(U1, NODES_PER_PROGRAM),
        logits=Logits(logits, logits.stride(3), lse if lse.numel() else None),
        durations=duration_logits_of(duration_logits, duration_lse),
        scan=scan,
        **call.scan_arguments,
        sigma=call.options.sigma,
        delay_penalty=call.options.delay_penalty,
        **node_strides(logits, T),
        DIRECTIONS=call.directions,
        HAT=call.options.hat,
        maxnreg=overlap_registers(tile, call.options.hat, call.kinds),
        TILE=tile,
        num_warps=1,
    )
    nll, posteriors = launch_posteriors(call, scan)
    return nll, duration_lse, posteriors


def launch_posteriors(call: LatticeCall, scan: Scan) -> tuple[Tensor, Tensor]:
    """Return the losses, and the posteriors, `[2 + K, B, T, U1]`, empty if no gradient follows."""
    dtype, K = acc_dtype(call.dtype), len(call.options.durations)
    shape = (2 + K, call.B, call.T, call.U1) if call.need_posteriors else (0,)
    nll = torch.empty(call.B, dtype=dtype, device=call.device)
    posteriors = torch.empty(shape, dtype=dtype, device=call.device)
    launch(
        rnnt_posterior_kernel,
        call.chunk_programs if call.need_posteriors else call.B,
        scan=scan._replace(carries=None, counter=None),  # so that it is compiled once
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


NO_DURATIONS = Durations(None, None, None)


def launch_gradient(
    grad: Tensor,
    logits: Tensor,
    lse: Tensor | None,
    posteriors: Tensor,
    targets: Targets,
    dlogits: Tensor,
    first_step: int,
    steps: int,
    options: NodeOptions,
    clamp: float,
    fastemit_lambda: float,
    durations: Durations = NO_DURATIONS,
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
        blank=options.blank,
        clamp=clamp,
        fastemit=1.0 + fastemit_lambda,
        target_stride=targets.stride,
        **node_strides(logits, T),
        K=kinds - 2,
        HAT=options.hat,
        CLIP=clamp > 0,
        TILE=tile_of(logits, dlogits),
        num_warps=1,
    )


def lattice_call(inputs: NodeInputs, options: NodeOptions, need_posteriors: bool) -> LatticeCall:
    """Return the batch of lattices of some logits."""
    logits, _, *sequences = inputs
    (B, T, U1, V), dtype = logits.shape, logits.dtype
    return LatticeCall(as_targets(*sequences), B, T, U1, V, dtype, need_posteriors, options)


def rnnt_forward(
    inputs: NodeInputs, options: NodeOptions, need_posteriors: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the losses, the log-sum-exps of logits and durations, and the posteriors."""
    (logits, duration_logits, *_), fused = inputs, options.fused
    call = lattice_call(inputs, options, need_posteriors)
    lse = call.empty_lse() if fused else torch.empty(0, dtype=LSE_DTYPE, device=logits.device)
    sizes = (*logits.shape, call.dtype.itemsize, call.directions, call.kinds)
    # Log-probabilities are not read as rows.
    if fused and target_of(call.device).vendor == "nvidia" and overlaps(*sizes):
        nll, duration_lse, posteriors = scan_beside_rows(call, logits, lse, duration_logits)
        return nll, lse, duration_lse, posteriors
    arcs = call.empty_arcs()
    launch_nodes(call, logits, lse, arcs, 0, call.B * call.T)
    nll, duration_lse, posteriors = scan_lattice(call, arcs, duration_logits)
    return nll, lse, duration_lse, posteriors


def rnnt_gradient(
    grad: Tensor,
    inputs: NodeInputs,
    lse: Tensor,
    duration_lse: Tensor,
    posteriors: Tensor,
    options: NodeOptions,
    clamp: float,
    fastemit_lambda: float,
    *,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients in logits and durations; with `inplace` the first is in their memory."""
    logits, duration_logits, *sequences = inputs
    dlogits, ddurations, durations = logits, logits.new_empty(0), NO_DURATIONS
    if not inplace:
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if duration_logits is not None:
        ddurations = logits.new_empty(duration_logits.shape)
        durations = Durations(duration_logits.contiguous(), duration_lse, ddurations)
    nodes = (grad, logits, lse if options.fused else None, posteriors, as_targets(*sequences))
    steps = logits.shape[0] * logits.shape[1]
    launch_gradient(*nodes, dlogits, 0, steps, options, clamp, fastemit_lambda, durations)
    return dlogits, ddurations


def rnnt_gradient_(*args: Any) -> None:
    """Write the gradient of RNN-T's losses over the logits."""
    rnnt_gradient(*args, inplace=True)


def rnnt_align(inputs: NodeInputs, options: NodeOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return the steps and scores of the labels on the best path, and its score."""
    call = lattice_call(inputs, options, False)
    B, U1, arcs = call.B, call.U1, call.empty_arcs()
    launch_nodes(call, inputs.logits, call.empty_lse(), arcs, 0, B * call.T)
    launch_arcs(call, arcs, inputs.duration_logits, None)
    device = call.device
    pointers = torch.empty(call.plan.nodes, dtype=torch.int8, device=device)
    scan = new_scan(call, arcs, pointers, torch.empty(B, dtype=torch.float64, device=device))
    launch_lanes(
        BEST_SCAN,
        B * call.plan.num_chunks,
        device,
        scan=scan,
        **call.scan_arguments,
        BLOCK=scan_block(call.kinds.number, device),
    )
    steps = torch.empty((B, U1 - 1), dtype=torch.int64, device=device)
    scores = torch.empty((B, U1 - 1), dtype=acc_dtype(call.dtype), device=device)
    score = torch.empty(B, dtype=scores.dtype, device=device)
    launch(
        rnnt_backtrace_kernel,
        B,
        scan=scan._replace(carries=None, counter=None),
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
