"""Transducers' scan beside the pass over the logits, for few sequences.

The time of a scan depends on the length of the lattice, not on the work, and one or few sequences
leave the GPU idle meanwhile. So some programs of this kernel scan, and the others compute arcs for
them as `nodes.py` does. A program that computes arcs waits for none, so all of them end, and the
scans with them: `plan.overlaps` allows so few that all scans run at the same time.

An arc is a message by itself. Its score is one 64-bit word, which is 0 before it is written, and a
score of 0.0 is written as -0.0. No other order of memory accesses matters, so the programs need no
fence and no counter. α and β never are -0.0, so their sums do not depend on the sign of a zero.

α needs the arcs of small t + u first, and β those of large t + u. So the arcs are computed from
both ends of the lattice towards its middle anti-diagonal. When the last row is read, each scan has
half of its way left. The arithmetic is that of `scan.py` and `nodes.py`, so all results have the
bits of one kernel after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lattice import SIZES, load_sequence
from .nodes import NodeResult, NodeSource, store_arcs
from .rows import NodeRows
from .scan import ScanSizes, ScanTensors, scan_program


@triton.jit
def step_of_rank(rank, first_u, sequence, BOTH_ENDS: tl.constexpr):
    """Return the step whose nodes from first_u on are the ones of a rank below the length.

    Without BOTH_ENDS it is the rank. Otherwise the steps of the first half of the anti-diagonals
    ascend, those of the second half descend, and both progress evenly from rank 0 to the length.
    Higher ranks have no step.
    """
    if BOTH_ENDS:
        length = tl.maximum(sequence.length, 1)
        middle = (length + sequence.target_len) // 2 - first_u
        first_half = tl.minimum(tl.maximum(middle, 0), length)
        # Both are at most 2**15; see `plan.overlaps`.
        before = rank * first_half // length
        is_first = rank * first_half - before * length + first_half >= length
        return tl.where(is_first, before, length - 1 - (rank - before))
    else:
        return rank


@triton.jit
def nodes_of_rank(program, tensors, sizes, BOTH_ENDS: tl.constexpr, ROWS: tl.constexpr):
    """Return the ROWS nodes of a program, their sequence, and whether any is within its lengths.

    Programs take the nodes of all sequences rank by rank.
    """
    B, T, U1 = sizes.B, sizes.T, sizes.U1
    blocks = tl.cdiv(U1, ROWS)
    rank, b, first_u = program // (B * blocks), program // blocks % B, program % blocks * ROWS
    sequence = load_sequence(b, tensors.logit_lengths_ptr, tensors.target_lengths_ptr, T, U1)
    is_node = (rank < sequence.length) & (first_u <= sequence.target_len)
    t = step_of_rank(rank, first_u, sequence, BOTH_ENDS)
    node = NodeRows(b, t, first_u, (b.to(tl.int64) * T + t) * U1 + first_u)
    return node, sequence, is_node


@triton.jit
def store_arcs_of_rank(
    program,
    logits,
    lse_ptr,
    tensors,
    sizes,
    BOTH_ENDS: tl.constexpr,
    HAT: tl.constexpr,
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute the arcs of ROWS nodes.

    `logits` has the address of the logits, their strides, the blank, the delay penalty, and the
    offset from a target to the next.
    """
    logits_ptr, strides, blank, delay_penalty, target_stride = logits
    node, sequence, is_node = nodes_of_rank(program, tensors, sizes, BOTH_ENDS, ROWS)
    if is_node:
        origin = node.b.to(tl.int64) * strides[0] + node.t.to(tl.int64) * strides[1]
        labels = (tensors.targets_ptr, target_stride)
        options = (blank, 0.0, delay_penalty)
        source = NodeSource(logits_ptr, origin, sizes.V, strides[2], strides[3], *labels, *options)
        layout = (sizes.num_chunks, sizes.rows, sizes.nodes)
        result = NodeResult(lse_ptr, tensors.arcs_ptr, *layout)
        store_arcs(
            source, result, node, sequence, True, HAT, VEC, EDGES, PIECES, ROWS, BLOCK_V, DTYPE
        )


@triton.jit(do_not_specialize=SIZES)
def rnnt_overlap_kernel(
    logits_ptr,  # [B, T, U1, V]
    targets_ptr,  # [B, U]
    logit_lengths_ptr,  # [B]
    target_lengths_ptr,  # [B]
    lse_ptr,  # [B, T, U1], or None
    arcs_ptr,  # [2, B, num_chunks, rows, 32] int64, zero: the bits of the scores
    states_ptr,  # [2, B, num_chunks, rows, 32] fp64: α and β, or None for log Z alone
    carries_ptr,  # [DIRECTIONS, num_chunks, B, carry_steps] int64, zero; or None for one chunk
    flags_ptr,  # [B] int64, zero
    logz_ptr,  # [B] fp64
    tile_counter_ptr,  # [1] int64, zero; or None for one chunk
    T,
    B,
    U1,
    V,
    num_chunks,
    rows,
    carry_steps,
    nodes: tl.int64,  # elements of an array over all nodes
    blank,
    delay_penalty: tl.float64,
    target_stride,
    stride_b,
    stride_t,
    stride_u,
    stride_v,
    DIRECTIONS: tl.constexpr,  # 1 for α alone
    BLOCK: tl.constexpr,  # rows of the lattice that are loaded together
    SCANS_FIRST: tl.constexpr,  # whether scans have the lowest indices; otherwise the highest
    HAT: tl.constexpr,
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,  # nodes of a program
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Scan the chunks in some programs, and compute the arcs of some nodes in each of the others.

    Nodes beyond the lengths are neither read nor written.
    """
    scans, blocks = DIRECTIONS * B * num_chunks, tl.cdiv(U1, ROWS)
    scan, program = tl.program_id(0), tl.program_id(0) - scans
    if not SCANS_FIRST:
        scan, program = tl.program_id(0) - T * B * blocks, tl.program_id(0)
    sizes = ScanSizes(T, B, U1, V, num_chunks, rows, carry_steps, nodes)
    lengths, written = (logit_lengths_ptr, target_lengths_ptr), (states_ptr, carries_ptr)
    tensors = ScanTensors(arcs_ptr, targets_ptr, *lengths, *written, flags_ptr, logz_ptr)
    if (scan >= 0) & (scan < scans):
        index = scan
        if tile_counter_ptr is not None:
            index = tl.atomic_add(tile_counter_ptr, 1, sem="relaxed")
        scan_program(
            index, tensors, sizes, blank, target_stride, DIRECTIONS, BLOCK, True, False, None
        )
    else:
        strides = (stride_b, stride_t, stride_u, stride_v)
        store_arcs_of_rank(
            program,
            (logits_ptr, strides, blank, delay_penalty, target_stride),
            lse_ptr,
            tensors,
            sizes,
            DIRECTIONS == 2,
            HAT,
            VEC,
            EDGES,
            PIECES,
            ROWS,
            BLOCK_V,
            DTYPE,
        )
