"""Transducers' pass over the logits: each node's log-sum-exp and the scores of its two arcs."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E
from .lattice import SIZES, load_sequence, log2_units, log_sum, natural_units, node_offset
from .rows import exact_shift, locate_row, program_nodes, row_normalizer, step_offset


@triton.jit
def load_node_label(targets_ptr, b, u, mask, target_stride, V):
    """Return the labels of nodes, and 0 outside of the mask and for labels out of range."""
    label = tl.load(targets_ptr + b.to(tl.int64) * target_stride + u, mask=mask, other=0)
    return tl.where((label >= 0) & (label < V), label, 0).to(tl.int64)


@triton.jit
def log_sigmoid(x):
    """Return log(1 / (1 + e**-x)) in fp64."""
    return tl.where(x < 0.0, x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit(do_not_specialize=SIZES)
def rnnt_nodes_kernel(
    logits_ptr,  # [B, T, U1, V], or those of some steps
    targets_ptr,  # [B, U]
    logit_lengths_ptr,  # [B]
    target_lengths_ptr,  # [B]
    lse_ptr,  # [B, T, U1], or None
    arcs_ptr,  # [2, B, num_chunks, rows, 32] fp64: log2 of the blank's and of the label's
    first_step,  # the first step in `logits`, counted over all sequences
    T,
    U1,
    V,
    num_chunks,
    rows,
    nodes: tl.int64,  # elements of an array over all nodes
    blank,
    sigma: tl.float64,  # subtracted from both arcs
    delay_penalty: tl.float64,
    target_stride,
    stride_b,
    stride_t,
    stride_u,
    stride_v,
    FUSED: tl.constexpr,  # whether to normalize the logits
    HAT: tl.constexpr,
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,  # nodes of a program
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute the log-sum-exps and the scores of the arcs of some nodes.

    Nodes beyond the lengths are neither read nor written.
    """
    node = program_nodes(first_step, T, U1, ROWS)
    length, target_len, _ = load_sequence(node.b, logit_lengths_ptr, target_lengths_ptr, T, U1)
    if (node.t >= length) | (node.first_u > target_len):
        return
    lane = tl.arange(0, ROWS)
    u = node.first_u + lane
    mask = u <= target_len
    label = load_node_label(targets_ptr, node.b, u, u < target_len, target_stride, V)
    origin = step_offset(node, first_step, stride_b, stride_t)
    start = origin + u.to(tl.int64) * stride_u
    at_blank = start + tl.cast(blank, tl.int64) * stride_v
    blank_x = tl.load(logits_ptr + at_blank, mask=mask, other=0.0).to(tl.float64)
    label_x = tl.load(logits_ptr + start + label * stride_v, mask=mask, other=0.0).to(tl.float64)
    blank_score, label_score = log2_units(blank_x, DTYPE), log2_units(label_x, DTYPE)
    if FUSED:
        maxima, totals = tl.zeros([ROWS], DTYPE), tl.zeros([ROWS], tl.float64)
        for r in range(0, tl.minimum(ROWS, target_len + 1 - node.first_u)):
            row = locate_row(origin + (node.first_u + r).to(tl.int64) * stride_u, V, VEC, EDGES)
            maximum, total = row_normalizer(
                logits_ptr, row, V, stride_v, blank, HAT, VEC, EDGES, PIECES, BLOCK_V, DTYPE
            )
            is_row = lane == r
            maxima, totals = tl.where(is_row, maximum, maxima), tl.where(is_row, total, totals)
        # The shift is subtracted first, because it is near the scores.
        shifts, log2_totals = exact_shift(maxima, DTYPE), log_sum(totals) * LOG2E
        if lse_ptr is not None:
            lse = natural_units(shifts + log2_totals, DTYPE)
            lse_dtype: tl.constexpr = lse_ptr.dtype.element_ty
            tl.store(lse_ptr + node.index + lane, lse.to(lse_dtype), mask=mask)
        label_score = (label_score - shifts) - log2_totals
        if HAT:
            label_score += log_sigmoid(-blank_x) * LOG2E
            blank_score = log_sigmoid(blank_x) * LOG2E
        else:
            blank_score = (blank_score - shifts) - log2_totals
    delay = 0.5 * (length - 1).to(tl.float64) - node.t.to(tl.float64)
    label_score += delay * delay_penalty * LOG2E
    offset = node_offset(node.b, node.t, u, num_chunks, rows)
    tl.store(arcs_ptr + offset, blank_score - sigma * LOG2E, mask=mask)
    tl.store(arcs_ptr + nodes + offset, label_score - sigma * LOG2E, mask=mask)
