"""The scan of token-and-duration transducers beside the pass over the logits, for few sequences.

This is what `overlap.py` does for two kinds of arcs: some programs scan as `arcs.py` does, and the
others compute the arcs of nodes, of which each is a message. Arcs that leave the lattice have no
program. `durations.tdt_words_kernel` has written -inf for them and 0 for the others, so each word
that a scan waits for is there before or is written by a program that waits for none.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .arcs import arc_scan_program
from .durations import arc_score, load_durations, score_durations, stays
from .lattice import SIZES, node_offset
from .nodes import NodeSource, score_arcs, store_scores
from .overlap import nodes_of_rank
from .scan import ScanSizes, ScanTensors


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
def store_duration_arcs(
    program,
    logits,
    options,
    tensors,
    sizes,
    BOTH_ENDS: tl.constexpr,
    DURATIONS: tl.constexpr,
    K: tl.constexpr,
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
        values = load_durations(logits.durations_ptr + start, d_strides[3], mask, K)
        strides = logits.token_strides
        origin = b * strides[0] + t * strides[1]
        target_stride, blank, sigma = options
        layout = (sizes.V, strides[2], strides[3], tensors.targets_ptr, target_stride)
        source = NodeSource(logits.tokens_ptr, origin, *layout, blank, sigma, 0.0)
        lse_ptr = logits.token_lse_ptr
        blank_score, label_score = score_arcs(
            source, lse_ptr, node, sequence, True, False, VEC, EDGES, PIECES, ROWS, BLOCK_V, DTYPE
        )
        log_probs, lse = score_durations(values, K, DTYPE)
        if logits.duration_lse_ptr is not None:
            lse_ptr = logits.duration_lse_ptr + node.index + tl.arange(0, ROWS)
            tl.store(lse_ptr, lse.to(lse_ptr.dtype.element_ty), mask=mask)
        ptr = tensors.arcs_ptr + node_offset(node.b, node.t, u, sizes.num_chunks, sizes.rows)
        for k in tl.static_range(K):
            d = (DURATIONS >> (8 * k)) & 255
            if (DURATIONS >> (8 * k)) & 255:
                valid = mask & stays(node.t, u, d, sequence, False)
                store_scores(ptr + k * sizes.nodes, arc_score(blank_score, log_probs[k]), valid)
            valid = mask & stays(node.t, u, d, sequence, True)
            store_scores(ptr + (K + k) * sizes.nodes, arc_score(label_score, log_probs[k]), valid)


@triton.jit(do_not_specialize=SIZES)
def tdt_overlap_kernel(
    logits_ptr,  # [B, T, U1, V]
    durations_ptr,  # [B, T, U1, K]
    targets_ptr,  # [B, U]
    logit_lengths_ptr,  # [B]
    target_lengths_ptr,  # [B]
    token_lse_ptr,  # [B, T, U1], or None
    duration_lse_ptr,  # [B, T, U1], or None
    arcs_ptr,  # [2, K, B, num_chunks, rows, 32] int64, prepared: the bits of the scores
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
            # Indices of rows and steps of 64 bits would take many more instructions.
            index = tl.atomic_add(tile_counter_ptr, 1, sem="relaxed").to(tl.int32)
        scanned = (index, tensors, None, sizes, blank, target_stride)
        arc_scan_program(
            *scanned, DIRECTIONS, True, True, BLOCK, CODE, 2 * K, DEPTH, False, False, None
        )
    else:
        d_strides = (duration_stride_b, duration_stride_t, duration_stride_u, duration_stride_k)
        tokens = (logits_ptr, (stride_b, stride_t, stride_u, stride_v))
        logits = LogitTensors(*tokens, durations_ptr, d_strides, token_lse_ptr, duration_lse_ptr)
        read = (program, logits, (target_stride, blank, sigma), tensors, sizes)
        store_duration_arcs(
            *read, DIRECTIONS == 2, DURATIONS, K, VEC, EDGES, PIECES, ROWS, BLOCK_V, DTYPE
        )
