"""Transducers' pass over the logits: each node's log-sum-exp and the scores of its two arcs."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E
from .lattice import (
    MINUS_ZERO,
    SIZES,
    load_sequence,
    log2_units,
    log_sum,
    natural_units,
    node_offset,
)
from .rows import exact_shift, locate_row, program_nodes, row_normalizer, step_offset


class NodeSource(NamedTuple):
    """What the arcs of some nodes are computed from.

    Fields:
        logits_ptr: the logits.
        origin: the offset of the step of the nodes.
        V: the number of classes.
        stride_u, stride_v: the strides of the logits.
        targets_ptr: the labels, `[B, U]`.
        target_stride: the offset from a target to the next.
        blank: the class of the blank.
        sigma, delay_penalty: see `call.NodeOptions`.
    """

    logits_ptr: tl.tensor
    origin: tl.tensor
    V: tl.tensor
    stride_u: tl.tensor
    stride_v: tl.tensor
    targets_ptr: tl.tensor
    target_stride: tl.tensor
    blank: tl.tensor
    sigma: tl.tensor
    delay_penalty: tl.tensor


class NodeResult(NamedTuple):
    """Where the arcs of nodes are stored.

    Fields:
        lse_ptr: `[B, T, U1]`, or None.
        arcs_ptr: `[2, B, num_chunks, rows, 32]` fp64, or int64 words; see `store_scores`.
        num_chunks, rows, nodes: the layout; see `plan.LatticePlan`.
    """

    lse_ptr: tl.tensor
    arcs_ptr: tl.tensor
    num_chunks: tl.tensor
    rows: tl.tensor
    nodes: tl.tensor


@triton.jit
def load_node_label(targets_ptr, b, u, mask, target_stride, V):
    """Return the labels of nodes, and 0 outside of the mask and for labels out of range."""
    label = tl.load(targets_ptr + b.to(tl.int64) * target_stride + u, mask=mask, other=0)
    return tl.where((label >= 0) & (label < V), label, 0).to(tl.int64)


@triton.jit
def log_sigmoid(x):
    """Return log(1 / (1 + e**-x)) in fp64."""
    term = tl.exp(-tl.abs(x))
    total = 1.0 + term
    # The last term is what the sum has lost by rounding.
    return tl.where(x < 0.0, x, 0.0) - (tl.log(total) + (term - (total - 1.0)) / total)


@triton.jit
def store_scores(ptr, scores, mask):
    """Store scores, in memory of int64 words so that each word shows that it has been written.

    A word of 0 has not. A score whose upper half is 0 is 0.0, because the least difference of two
    logits is not tiny; it is stored as -0.0.
    """
    if ptr.dtype.element_ty == tl.int64:
        words = scores.to(tl.int64, bitcast=True)
        tl.store(ptr, tl.where(words >> 32 == 0, MINUS_ZERO, words), mask=mask)
    else:
        tl.store(ptr, scores, mask=mask)


@triton.jit
def score_arcs(
    source,
    lse_ptr,
    node,
    sequence,
    FUSED: tl.constexpr,
    HAT: tl.constexpr,
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the scores of blank and label for some nodes, and store their log-sum-exps.

    Nodes outside of the lengths are not read, and have any scores.
    """
    logits_ptr, origin, V, stride_u, stride_v = source[:5]
    length, target_len = sequence.length, sequence.target_len
    lane = tl.arange(0, ROWS)
    u = node.first_u + lane
    mask = u <= target_len
    label = load_node_label(source.targets_ptr, node.b, u, u < target_len, source.target_stride, V)
    start = origin + u.to(tl.int64) * stride_u
    at_blank = start + tl.cast(source.blank, tl.int64) * stride_v
    blank_x = tl.load(logits_ptr + at_blank, mask=mask, other=0.0).to(tl.float64)
    label_x = tl.load(logits_ptr + start + label * stride_v, mask=mask, other=0.0).to(tl.float64)
    blank_score, label_score = log2_units(blank_x, DTYPE), log2_units(label_x, DTYPE)
    if FUSED:
        maxima, totals = tl.zeros([ROWS], DTYPE), tl.zeros([ROWS], tl.float64)
        for r in range(0, tl.minimum(ROWS, target_len + 1 - node.first_u)):
            row = locate_row(origin + (node.first_u + r).to(tl.int64) * stride_u, V, VEC, EDGES)
            maximum, total = row_normalizer(
                logits_ptr, row, V, stride_v, source.blank, HAT, VEC, EDGES, PIECES, BLOCK_V, DTYPE
            )
            is_row = lane == r
            maxima, totals = tl.where(is_row, maximum, maxima), tl.where(is_row, total, totals)
        # The shift is subtracted first, because it is near the scores.
        shifts, log2_totals = exact_shift(maxima, DTYPE), log_sum(totals, DTYPE) * LOG2E
        if lse_ptr is not None:
            lse = natural_units(shifts + log2_totals, DTYPE)
            lse_dtype: tl.constexpr = lse_ptr.dtype.element_ty
            tl.store(lse_ptr + node.index + lane, lse.to(lse_dtype), mask=mask)
        label_score = (label_score - shifts) - log2_totals
        if HAT:
            label_score += log_sigmoid(-blank_x) * LOG2E
            # Without a possible label the total is 0.
            label_score = tl.where(totals == 0.0, -float("inf"), label_score)
            blank_score = log_sigmoid(blank_x) * LOG2E
        else:
            blank_score = (blank_score - shifts) - log2_totals
    delay = 0.5 * (length - 1).to(tl.float64) - node.t.to(tl.float64)
    label_score += delay * source.delay_penalty * LOG2E
    return blank_score - source.sigma * LOG2E, label_score - source.sigma * LOG2E


@triton.jit
def store_arcs(
    source,
    result,
    node,
    sequence,
    FUSED: tl.constexpr,
    HAT: tl.constexpr,
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Store the log-sum-exps and the scores of the arcs of some nodes within the lengths."""
    lse_ptr = result.lse_ptr
    blank_score, label_score = score_arcs(
        source, lse_ptr, node, sequence, FUSED, HAT, VEC, EDGES, PIECES, ROWS, BLOCK_V, DTYPE
    )
    u = node.first_u + tl.arange(0, ROWS)
    mask = u <= sequence.target_len
    offset = node_offset(node.b, node.t, u, result.num_chunks, result.rows)
    store_scores(result.arcs_ptr + offset, blank_score, mask)
    store_scores(result.arcs_ptr + result.nodes + offset, label_score, mask)


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
    sequence = load_sequence(node.b, logit_lengths_ptr, target_lengths_ptr, T, U1)
    if (node.t >= sequence.length) | (node.first_u > sequence.target_len):
        return
    origin = step_offset(node, first_step, stride_b, stride_t)
    source = NodeSource(
        logits_ptr,
        origin,
        V,
        stride_u,
        stride_v,
        targets_ptr,
        target_stride,
        blank,
        sigma,
        delay_penalty,
    )
    result = NodeResult(lse_ptr, arcs_ptr, num_chunks, rows, nodes)
    store_arcs(source, result, node, sequence, FUSED, HAT, VEC, EDGES, PIECES, ROWS, BLOCK_V, DTYPE)
