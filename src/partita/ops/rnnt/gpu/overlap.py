"""Transducers' scan beside the pass over the logits, for few sequences.

The time of a scan depends on the length of the lattice, not on the work, and one or few sequences
leave the GPU idle meanwhile. So some programs of this kernel scan, and the others compute arcs for
them as `nodes.py` does. A program that computes arcs waits for none, so all of them
end, and the scans with them: `plan.overlaps` allows so few that all scans run at the same time.

An arc is a message by itself: one 64-bit word, which is 0 before it is written. Arcs that leave the
lattice have no program. `nodes.rnnt_arcs_kernel` has written words of the probability 0 for them,
and 0 for the others. No other order of memory accesses matters, so the programs need no fence and
no counter.

α needs the arcs of small t + u first, and β those of large t + u. So the arcs are computed from
both ends of the lattice towards its middle anti-diagonal. When the last row is read, each scan has
half of its way left. The arithmetic is that of one kernel after the other, so all results have the
same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import UNFUSED
from ....primitives.gpu.memory import prefetch_line
from .arc_rows import HAS_NAN, num_kinds
from .arc_words import arc_word, exp2_parts, probability_block
from .lattice import SIZES, lattice_sizes, load_sequence, node_offset
from .nodes import NodeSource, score_arcs, stays
from .rows import ROWS, NodeRows, column_offset
from .scan import scan_program


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


@triton.jit(do_not_specialize=SIZES)
def rnnt_overlap_kernel(
    logits,  # Logits of the tokens
    durations,  # Durations
    targets,  # Targets
    scan,  # Scan of words, which are prepared
    T,
    B,
    U1,
    V,
    num_chunks,
    blank,
    sigma: tl.float64,
    delay_penalty: tl.float64,
    target_stride,
    stride_b,
    stride_t,
    stride_u,
    DIRECTIONS: tl.constexpr,  # 1 for α alone
    CODE: tl.constexpr,  # the kinds of arcs; see `arc_rows.py`
    HAT: tl.constexpr,
    TILE: tl.constexpr,  # RowTile
):
    """Scan the chunks in some programs, and compute the arcs of some nodes in each of the others.

    Nodes beyond the lengths are neither read nor written.
    """
    sizes, blocks = lattice_sizes(T, B, U1, num_chunks), tl.cdiv(U1, ROWS)
    scans = DIRECTIONS * B * sizes.num_chunks
    if UNFUSED:  # The interpreter runs one program after the other, so the scans come last.
        index, program = tl.program_id(0) - T * B * blocks, tl.program_id(0)
    else:
        index, program = tl.program_id(0), tl.program_id(0) - scans
    if (index >= 0) & (index < scans):
        # It loads few rows together, because the pass over the logits needs the registers.
        BLOCK: tl.constexpr = 4 if num_kinds(CODE) == 2 else 2
        inputs = (index, scan, targets, target_stride, blank, V, sizes)
        scan_program(*inputs, DIRECTIONS, True, BLOCK, CODE, False, None)
    else:
        # Programs take the nodes of all sequences rank by rank.
        rank, b, first_u = program // (B * blocks), program // blocks % B, program % blocks * ROWS
        sequence = load_sequence(b, targets.lengths, T, U1)
        is_node = (rank < sequence.length) & (first_u <= sequence.target_len)
        t = step_of_rank(rank, first_u, sequence, DIRECTIONS == 2)
        node = NodeRows(b, t, first_u, (b.to(tl.int64) * T + t) * U1 + first_u)
        if is_node:
            origin = b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t
            options = (targets.labels, target_stride, blank, sigma, delay_penalty)
            source = NodeSource(logits, origin, stride_u, *options)
            # The arcs of all kinds are computed side by side, one in each lane.
            K: tl.constexpr = num_kinds(CODE) // 2
            WIDTH: tl.constexpr = triton.next_power_of_2(K)
            u = first_u + tl.arange(0, ROWS)
            mask, k = u <= sequence.target_len, tl.arange(0, WIDTH)[None, :]
            is_kind = mask[:, None] & (k < K)
            if durations.ptr is not None:
                ptr = durations.ptr + (node.index + tl.arange(0, ROWS)[:, None]) * K + k
                values = tl.load(ptr, mask=is_kind, other=-float("inf"))
                if not UNFUSED:
                    # Ask for the cache lines of the logits. A program reads one row after the
                    # other, so it would wait for memory once for each row. The registers of the
                    # scans leave too few programs on a multiprocessor to hide that time.
                    PER_LINE: tl.constexpr = 1024 // logits.ptr.dtype.element_ty.primitive_bitwidth
                    lines, lane = tl.cdiv(V, PER_LINE), tl.arange(0, 32)
                    rows = tl.minimum(ROWS, sequence.target_len + 1 - first_u)
                    for first in range(0, rows * lines, 32):
                        line = tl.minimum(first + lane, rows * lines - 1)
                        row, column = first_u + line // lines, line % lines * PER_LINE
                        offset = origin + row.to(tl.int64) * stride_u
                        offset += column_offset(column, logits.stride_v)
                        prefetch_line(logits.ptr + offset)
            scores = score_arcs(source, node, sequence, V, True, HAT, TILE, tl.float32)
            factor = tl.full([ROWS, WIDTH], 1.0, tl.float64)
            exponent = tl.zeros([ROWS, WIDTH], tl.int32)
            if durations.ptr is not None:
                factor, exponent, lse = probability_block(values, tl.float32)
                if durations.lse_ptr is not None:
                    lse_ptr = durations.lse_ptr + node.index + tl.arange(0, ROWS)
                    tl.store(lse_ptr, lse.to(lse_ptr.dtype.element_ty), mask=mask)
            ptr = scan.arcs + (k.to(tl.int64) * sizes.nodes + node_offset(b, t, u, sizes)[:, None])
            u, has_nan = u[:, None], is_kind & (k < 0)
            for label in tl.static_range(2):
                d = tl.zeros([1, WIDTH], tl.int32)
                for i in tl.static_range(K):
                    d = tl.where(k == i, (CODE >> (8 * (i + label * K))) & 127, d)
                token = exp2_parts(scores[label])
                token = (token[0][:, None], token[1][:, None])
                valid = is_kind & stays(t, u, d, sequence, label) & (d + label > 0)
                arc, is_nan = arc_word(token, (factor, exponent), valid, False)
                tl.store(ptr + label * K * sizes.nodes, arc, mask=valid)
                has_nan = has_nan | is_nan
            # The scan, which runs beside this, may have set the other flag of the sequence.
            lanes = u * 0 + k * 0
            flags_ptr = scan.flags + b.to(tl.int64) + lanes
            tl.atomic_or(flags_ptr, lanes + HAS_NAN, mask=has_nan, sem="relaxed")
