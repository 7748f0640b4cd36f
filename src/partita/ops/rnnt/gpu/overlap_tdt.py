"""The scan of token-and-duration transducers beside the pass over the logits, for few sequences.

This is what `overlap.py` does for two kinds of arcs: some programs scan as `scan_tdt.py` does, and
the others compute the arcs of nodes, of which each is a message. Arcs that leave the lattice have
no program. `durations.tdt_words_kernel` has written words of the probability 0 for them, and 0 for
the others, so each word that a scan waits for is there before or is written by a program that waits
for none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import UNFUSED
from ....primitives.gpu.memory import prefetch_line
from .arc_words import arc_word, exp2_parts, probability_block
from .durations import stays
from .lattice import SIZES, node_offset
from .nodes import NodeSource, score_arcs
from .overlap import nodes_of_rank, program_roles
from .rows import ROWS, column_offset
from .scan import HAS_NAN, ScanSizes
from .scan_tdt import tdt_scan_program


@triton.constexpr_function
def num_durations(code):
    """Return the number of durations, which is that of the labels' arcs among `plan`'s kinds."""
    return (code & int("80" * 16, 16)).bit_count()


@triton.constexpr_function
def remembered_states(code):
    """Return how many states of earlier steps a lane needs, given the kinds of arcs."""
    kinds = code.to_bytes(16, "little")
    return max(1, *((kind & 127) + (kind >> 7) for kind in kinds))


@triton.jit
def prefetch_rows(source, node, sequence, V):
    """Ask for the cache lines of the logits of some nodes.

    A program reads one row after the other, so it would wait for memory once for each row. The
    registers of the scans leave too few programs on a multiprocessor to hide that time.
    """
    if not UNFUSED:
        logits_ptr, stride_v, _ = source.logits
        PER_LINE: tl.constexpr = 1024 // logits_ptr.dtype.element_ty.primitive_bitwidth
        lines, lane = tl.cdiv(V, PER_LINE), tl.arange(0, 32)
        rows = tl.minimum(ROWS, sequence.target_len + 1 - node.first_u)
        for first in range(0, rows * lines, 32):
            line = tl.minimum(first + lane, rows * lines - 1)
            u, column = node.first_u + line // lines, line % lines * PER_LINE
            offset = source.origin + u.to(tl.int64) * source.stride_u
            prefetch_line(logits_ptr + (offset + column_offset(column, stride_v)))


@triton.jit(do_not_specialize=SIZES)
def tdt_overlap_kernel(
    tokens,  # Logits of the tokens, [B, T, U1, V]
    durations,  # Logits of the durations, [B, T, U1, K]
    targets,  # Targets
    scan,  # Scan of words, which are prepared
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
    sigma: tl.float64,
    target_stride,
    stride_b,
    stride_t,
    stride_u,
    duration_stride_b,
    duration_stride_t,
    duration_stride_u,
    DIRECTIONS: tl.constexpr,  # 1 for α alone
    CODE: tl.constexpr,
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Scan the chunks in some programs, and compute the arcs of some nodes in each of the others.

    Nodes beyond the lengths are neither read nor written.
    """
    K: tl.constexpr = num_durations(CODE)
    KINDS: tl.constexpr = triton.next_power_of_2(K)
    scans, blocks = DIRECTIONS * B * num_chunks, tl.cdiv(U1, ROWS)
    index, program = program_roles(scans, T * B * blocks)
    if (index >= 0) & (index < scans):
        DEPTH: tl.constexpr = remembered_states(CODE)
        sizes = ScanSizes(T, B, U1, V, num_chunks, rows, carry_steps, nodes)
        inputs = (index, scan, carries, targets, target_stride, blank, sizes)
        # It loads 2 rows together; see `plan.TDT_OVERLAP_REGISTERS`.
        tdt_scan_program(*inputs, DIRECTIONS, True, 2, CODE, 2 * K, DEPTH, False, None)
    else:
        node, sequence, is_node = nodes_of_rank(program, targets.lengths, T, B, U1, DIRECTIONS == 2)
        if is_node:
            b, t, u = node.b.to(tl.int64), node.t.to(tl.int64), node.first_u + tl.arange(0, ROWS)
            mask = u <= sequence.target_len
            start = b * duration_stride_b + t * duration_stride_t
            start += u.to(tl.int64) * duration_stride_u
            # All arcs of the nodes are computed side by side, one in each lane.
            k, d = tl.arange(0, KINDS)[None, :], tl.zeros([1, KINDS], tl.int32)
            for i in tl.static_range(K):
                d = tl.where(k == i, (CODE >> (8 * i)) & 255, d)
            is_kind, stride_k = mask[:, None] & (k < K), tl.cast(durations.stride_v, tl.int64)
            ptr = durations.ptr + (start[:, None] + k.to(tl.int64) * stride_k)
            values = tl.load(ptr, mask=is_kind, other=-float("inf"))
            origin = b * stride_b + t * stride_t
            options = (targets.labels, target_stride, blank, sigma, 0.0)
            source = NodeSource(tokens, origin, stride_u, *options)
            prefetch_rows(source, node, sequence, V)
            blank_score, label_score = score_arcs(
                source, node, sequence, V, True, False, VEC, EDGES, PIECES, BLOCK_V, tl.float32
            )
            factor, exponent, lse = probability_block(values, tl.float32)
            if durations.lse_ptr is not None:
                lse_ptr = durations.lse_ptr + node.index + tl.arange(0, ROWS)
                tl.store(lse_ptr, lse.to(lse_ptr.dtype.element_ty), mask=mask)
            offset = node_offset(node.b, node.t, u, num_chunks, rows)[:, None]
            ptr, u = scan.arcs + (k.to(tl.int64) * nodes + offset), u[:, None]
            has_nan = is_kind & (k < 0)
            for label in tl.static_range(2):
                token = exp2_parts(label_score if label else blank_score)
                token = (token[0][:, None], token[1][:, None])
                valid = is_kind & stays(node.t, u, d, sequence, label) & (d + label > 0)
                arc, is_nan = arc_word(token, (factor, exponent), valid, False)
                tl.store(ptr + label * K * nodes, arc, mask=valid)
                has_nan = has_nan | is_nan
            # The scan, which runs beside this, may have set the other flag.
            lanes = u * 0 + k * 0
            flags_ptr = scan.flags + b + lanes
            tl.atomic_or(flags_ptr, lanes + HAS_NAN, mask=has_nan, sem="relaxed")
