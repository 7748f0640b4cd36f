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

from ....primitives.gpu.math import UNFUSED
from .lattice import MINUS_ZERO, SIZES, load_sequence, node_offset
from .nodes import NodeSource, score_arcs
from .rows import ROWS, NodeRows
from .scan import ScanSizes, scan_program


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
def nodes_of_rank(program, lengths, T, B, U1, BOTH_ENDS: tl.constexpr):
    """Return the nodes of a program, their sequence, and whether any is within its lengths.

    Programs take the nodes of all sequences rank by rank.
    """
    blocks = tl.cdiv(U1, ROWS)
    rank, b, first_u = program // (B * blocks), program // blocks % B, program % blocks * ROWS
    sequence = load_sequence(b, lengths, T, U1)
    is_node = (rank < sequence.length) & (first_u <= sequence.target_len)
    t = step_of_rank(rank, first_u, sequence, BOTH_ENDS)
    node = NodeRows(b, t, first_u, (b.to(tl.int64) * T + t) * U1 + first_u)
    return node, sequence, is_node


@triton.jit
def program_roles(scans, nodes):
    """Return the index of this program among the scans, and that among the programs with nodes.

    One of them is out of range. The scans come first, but in the interpreter, which runs one
    program after the other, last.
    """
    if UNFUSED:
        return tl.program_id(0) - nodes, tl.program_id(0)
    else:
        return tl.program_id(0), tl.program_id(0) - scans


@triton.jit
def store_words(ptr, scores, mask):
    """Store scores as words, each of which shows that it has been written.

    A word of 0 has not. A score whose upper half is 0 is 0.0, because the least difference of two
    logits is not tiny; it is stored as -0.0.
    """
    words = scores.to(tl.int64, bitcast=True)
    tl.store(ptr, tl.where(words >> 32 == 0, MINUS_ZERO, words), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def rnnt_overlap_kernel(
    logits,  # Logits
    targets,  # Targets
    scan,  # Scan, of scores whose bits are words that are zero before
    carries,  # Carries, or None for one chunk
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
    DIRECTIONS: tl.constexpr,  # 1 for α alone
    HAT: tl.constexpr,
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Scan the chunks in some programs, and compute the arcs of some nodes in each of the others.

    Nodes beyond the lengths are neither read nor written.
    """
    scans, blocks = DIRECTIONS * B * num_chunks, tl.cdiv(U1, ROWS)
    index, program = program_roles(scans, T * B * blocks)
    if (index >= 0) & (index < scans):
        sizes = ScanSizes(T, B, U1, V, num_chunks, rows, carry_steps, nodes)
        inputs = (scan, carries, targets, target_stride, blank, sizes)
        # It loads only 4 rows together, because the pass over the logits needs the registers.
        scan_program(index, *inputs, DIRECTIONS, 4, True, False, None)
    else:
        node, sequence, is_node = nodes_of_rank(program, targets.lengths, T, B, U1, DIRECTIONS == 2)
        if is_node:
            origin = node.b.to(tl.int64) * stride_b + node.t.to(tl.int64) * stride_t
            options = (targets.labels, target_stride, blank, 0.0, delay_penalty)
            source = NodeSource(logits, origin, stride_u, *options)
            blank_score, label_score = score_arcs(
                source, node, sequence, V, True, HAT, VEC, EDGES, PIECES, BLOCK_V, tl.float32
            )
            u = node.first_u + tl.arange(0, ROWS)
            mask = u <= sequence.target_len
            offset = node_offset(node.b, node.t, u, num_chunks, rows)
            store_words(scan.arcs + offset, blank_score, mask)
            store_words(scan.arcs + nodes + offset, label_score, mask)
