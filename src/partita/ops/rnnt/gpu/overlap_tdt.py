"""The scan of token-and-duration transducers beside the pass over the logits, for few sequences.

This is what `overlap.py` does for two kinds of arcs: some programs scan as `scan_tdt.py` does, and
the others compute the arcs of nodes, of which each is a message. Arcs that leave the lattice have
no program. `durations.tdt_words_kernel` has written words of the probability 0 for them, and 0 for
the others, so each word that a scan waits for is there before or is written by a program that waits
for none.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import UNFUSED
from ....primitives.gpu.memory import prefetch_line
from .arc_words import arc_word, exp2_parts, probability_block
from .durations import stays
from .lattice import SIZES, node_offset
from .nodes import NodeSource, score_arcs
from .overlap import nodes_of_rank
from .rows import column_offset
from .scan import HAS_NAN, ScanSizes, ScanTensors
from .scan_tdt import tdt_scan_program


class LogitTensors(NamedTuple):
    """The logits of tokens and durations, and where their log-sum-exps are stored.

    Fields:
        tokens_ptr, token_strides: `[B, T, U1, V]`.
        durations_ptr, duration_strides: `[B, T, U1, K]`.
        token_lse_ptr, duration_lse_ptr: `[B, T, U1]`, or None.
    """

    tokens_ptr: tl.tensor
    token_strides: tl.tuple
    durations_ptr: tl.tensor
    duration_strides: tl.tuple
    token_lse_ptr: tl.tensor
    duration_lse_ptr: tl.tensor


@triton.jit
def prefetch_rows(source, node, sequence, ROWS: tl.constexpr):
    """Ask for the cache lines of the logits of some nodes.

    A program reads one row after the other, so it would wait for memory once for each row. The
    registers of the scans leave too few programs on a multiprocessor to hide that time.
    """
    if not UNFUSED:
        PER_LINE: tl.constexpr = 1024 // source.logits_ptr.dtype.element_ty.primitive_bitwidth
        lines, lane = tl.cdiv(source.V, PER_LINE), tl.arange(0, 32)
        rows = tl.minimum(ROWS, sequence.target_len + 1 - node.first_u)
        for first in range(0, rows * lines, 32):
            line = tl.minimum(first + lane, rows * lines - 1)
            u, column = node.first_u + line // lines, line % lines * PER_LINE
            offset = source.origin + u.to(tl.int64) * source.stride_u
            prefetch_line(source.logits_ptr + (offset + column_offset(column, source.stride_v)))


@triton.jit
def store_duration_arcs(
    program,
    logits,
    options,
    tensors,
    sizes,
    BOTH_ENDS: tl.constexpr,
    DURATIONS: tl.constexpr,
    K: tl.constexpr,
    KINDS: tl.constexpr,
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute the arcs of ROWS nodes.

    `options` has the offset from a target to the next, the blank and sigma.
    """
    node, sequence, is_node = nodes_of_rank(program, tensors, sizes, BOTH_ENDS, ROWS)
    if is_node:
        b, t, u = node.b.to(tl.int64), node.t.to(tl.int64), node.first_u + tl.arange(0, ROWS)
        mask, d_strides = u <= sequence.target_len, logits.duration_strides
        start = b * d_strides[0] + t * d_strides[1] + u.to(tl.int64) * d_strides[2]
        # All arcs of the nodes are computed side by side, one in each lane.
        k, d = tl.arange(0, KINDS)[None, :], tl.zeros([1, KINDS], tl.int32)
        for i in tl.static_range(K):
            d = tl.where(k == i, (DURATIONS >> (8 * i)) & 255, d)
        is_kind, stride_k = mask[:, None] & (k < K), tl.cast(d_strides[3], tl.int64)
        ptr = logits.durations_ptr + (start[:, None] + k.to(tl.int64) * stride_k)
        values = tl.load(ptr, mask=is_kind, other=-float("inf"))
        strides = logits.token_strides
        origin = b * strides[0] + t * strides[1]
        target_stride, blank, sigma = options
        layout = (sizes.V, strides[2], strides[3], tensors.targets_ptr, target_stride)
        source = NodeSource(logits.tokens_ptr, origin, *layout, blank, sigma, 0.0)
        prefetch_rows(source, node, sequence, ROWS)
        lse_ptr = logits.token_lse_ptr
        blank_score, label_score = score_arcs(
            source, lse_ptr, node, sequence, True, False, VEC, EDGES, PIECES, ROWS, BLOCK_V, DTYPE
        )
        factor, exponent, lse = probability_block(values, DTYPE)
        if logits.duration_lse_ptr is not None:
            lse_ptr = logits.duration_lse_ptr + node.index + tl.arange(0, ROWS)
            tl.store(lse_ptr, lse.to(lse_ptr.dtype.element_ty), mask=mask)
        offset = node_offset(node.b, node.t, u, sizes.num_chunks, sizes.rows)[:, None]
        ptr, u = tensors.arcs_ptr + (k.to(tl.int64) * sizes.nodes + offset), u[:, None]
        has_nan = is_kind & (k < 0)
        for label in tl.static_range(2):
            token = exp2_parts(label_score if label else blank_score)
            token = (token[0][:, None], token[1][:, None])
            valid = is_kind & stays(node.t, u, d, sequence, label) & (d + label > 0)
            arc, is_nan = arc_word(token, (factor, exponent), valid, False)
            tl.store(ptr + label * K * sizes.nodes, arc, mask=valid)
            has_nan = has_nan | is_nan
        # The scan, which runs beside this, may have set the other flag.
        lanes = u * 0 + k * 0
        flags_ptr = tensors.flags_ptr + b + lanes
        tl.atomic_or(flags_ptr, lanes + HAS_NAN, mask=has_nan, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def tdt_overlap_kernel(
    logits_ptr,  # [B, T, U1, V]
    durations_ptr,  # [B, T, U1, K]
    targets_ptr,  # [B, U]
    logit_lengths_ptr,  # [B]
    target_lengths_ptr,  # [B]
    token_lse_ptr,  # [B, T, U1], or None
    duration_lse_ptr,  # [B, T, U1], or None
    arcs_ptr,  # [2, K, B, num_chunks, rows, 32] int64, prepared: words of arcs
    states_ptr,  # [2, B, num_chunks, rows, 32] int64: words of α and β, or None
    carries_ptr,  # [DIRECTIONS, num_chunks, B, carry_steps] int64, zero; or None for one chunk
    flags_ptr,  # [B] int64, zero
    totals_ptr,  # [2, B] int64: the bits of the significand, and the biased exponent, of the sums
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
    sigma: tl.float64,
    target_stride,
    stride_b,
    stride_t,
    stride_u,
    stride_v,
    duration_stride_b,
    duration_stride_t,
    duration_stride_u,
    duration_stride_k,
    DIRECTIONS: tl.constexpr,  # 1 for α alone
    BLOCK: tl.constexpr,  # rows of the lattice that are loaded together
    SCANS_FIRST: tl.constexpr,  # whether scans have the lowest indices; otherwise the highest
    CODE: tl.constexpr,
    DEPTH: tl.constexpr,  # states that a lane remembers
    DURATIONS: tl.constexpr,
    K: tl.constexpr,
    KINDS: tl.constexpr,  # a power of two of at least K
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
    tensors = ScanTensors(arcs_ptr, targets_ptr, *lengths, *written, flags_ptr, None)
    if (scan >= 0) & (scan < scans):
        index = scan
        if tile_counter_ptr is not None:
            # Indices of rows and steps of 64 bits would take many more instructions.
            index = tl.atomic_add(tile_counter_ptr, 1, sem="relaxed").to(tl.int32)
        scanned = (index, tensors, totals_ptr, sizes, blank, target_stride)
        tdt_scan_program(*scanned, DIRECTIONS, True, BLOCK, CODE, 2 * K, DEPTH, False, None)
    else:
        d_strides = (duration_stride_b, duration_stride_t, duration_stride_u, duration_stride_k)
        tokens = (logits_ptr, (stride_b, stride_t, stride_u, stride_v))
        logits = LogitTensors(*tokens, durations_ptr, d_strides, token_lse_ptr, duration_lse_ptr)
        read = (program, logits, (target_stride, blank, sigma), tensors, sizes)
        store_duration_arcs(
            *read, DIRECTIONS == 2, DURATIONS, K, KINDS, VEC, EDGES, PIECES, ROWS, BLOCK_V, DTYPE
        )
