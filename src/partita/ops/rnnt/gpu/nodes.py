"""Transducers' pass over the logits: each node's log-sum-exp and the scores of its two arcs."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E, finite_shift
from .lattice import LN2_FP32, SIZES, lattice_sizes, load_sequence, log2_units, log_sum, node_offset
from .rows import ROWS, is_huge, locate_row, program_nodes, row_normalizer, step_offset


class NodeSource(NamedTuple):
    """The tensors and numbers from which the arcs of the nodes of a step are computed.

    Fields:
        logits: the logits.
        origin, stride_u: the offset of the step in these, and their stride over u.
        labels_ptr, target_stride: the labels, `[B, U]`.
        blank: the class of the blank.
        sigma, delay_penalty: see `launch.LatticeCall`.
    """

    logits: tl.tensor
    origin: tl.tensor
    stride_u: tl.tensor
    labels_ptr: tl.tensor
    target_stride: tl.tensor
    blank: tl.tensor
    sigma: tl.tensor
    delay_penalty: tl.tensor


@triton.jit
def log_sigmoid(x):
    """Return log(1 / (1 + e**-x)) in fp64."""
    term = tl.exp(-tl.abs(x))
    total = 1.0 + term
    # The last term is what the sum has lost by rounding.
    return tl.where(x < 0.0, x, 0.0) - (tl.log(total) + (term - (total - 1.0)) / total)


@triton.jit
def score_arcs(
    source,
    node,
    sequence,
    V,
    FUSED: tl.constexpr,
    HAT: tl.constexpr,
    TILE: tl.constexpr,  # RowTile
    DTYPE: tl.constexpr,
):
    """Return the scores of blank and label for some nodes, and store their log-sum-exps.

    Nodes outside of the lengths are not read, and have any scores.
    """
    logits_ptr, stride_v, lse_ptr = source.logits
    origin, stride_u = source.origin, source.stride_u
    length, target_len = sequence.length, sequence.target_len
    lane = tl.arange(0, ROWS)
    u = node.first_u + lane
    mask = u <= target_len
    has_label = u < target_len
    label_ptr = source.labels_ptr + node.b.to(tl.int64) * source.target_stride + u
    label = tl.load(label_ptr, mask=has_label, other=0)
    label = tl.where((label >= 0) & (label < V), label, 0).to(tl.int64)
    start = origin + u.to(tl.int64) * stride_u
    at_blank = start + tl.cast(source.blank, tl.int64) * stride_v
    blank_x = tl.load(logits_ptr + at_blank, mask=mask, other=0.0).to(tl.float64)
    label_x = tl.load(logits_ptr + start + label * stride_v, mask=mask, other=0.0).to(tl.float64)
    blank_score, label_score = log2_units(blank_x, DTYPE), log2_units(label_x, DTYPE)
    if FUSED:
        maxima, totals = tl.zeros([ROWS], DTYPE), tl.zeros([ROWS], tl.float64)
        for r in range(0, tl.minimum(ROWS, target_len + 1 - node.first_u)):
            row_start = origin + (node.first_u + r).to(tl.int64) * stride_u
            row = locate_row(logits_ptr, row_start, stride_v, V, TILE)
            maximum, total = row_normalizer(row, V, source.blank, HAT, TILE, DTYPE)
            is_row = lane == r
            maxima, totals = tl.where(is_row, maximum, maxima), tl.where(is_row, total, totals)
        # What exponents are relative to is subtracted first, because it is near the scores.
        shifts = (finite_shift(maxima) * LOG2E).to(tl.float64)
        if DTYPE != tl.float64:  # See `rows.row_factor` for huge rows.
            shifts = tl.where(is_huge(maxima), log2_units(maxima.to(tl.float64), DTYPE), shifts)
        log2_totals = log_sum(totals, DTYPE) * LOG2E
        if lse_ptr is not None:
            # The inverse of `log2_units`.
            lse = (shifts + log2_totals) * (LN2 if DTYPE == tl.float64 else LN2_FP32)
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


@triton.jit(do_not_specialize=SIZES)
def rnnt_nodes_kernel(
    logits,  # Logits, all of them or those of some steps
    targets,  # Targets
    blanks_ptr,  # [B, num_chunks, rows, 32] fp64: log2 of the probability of the blank
    labels_ptr,  # the same of the label
    first_step,  # the first step in `logits`, counted over all sequences
    T,
    B,
    U1,
    V,
    num_chunks,
    blank,
    sigma: tl.float64,  # subtracted from both arcs
    delay_penalty: tl.float64,
    target_stride,
    stride_b,
    stride_t,
    stride_u,
    FUSED: tl.constexpr,  # whether to normalize the logits
    HAT: tl.constexpr,
    TILE: tl.constexpr,  # RowTile
    DTYPE: tl.constexpr,
):
    """Compute the log-sum-exps and the scores of the arcs of some nodes.

    Nodes beyond the lengths are neither read nor written.
    """
    node = program_nodes(first_step, T, U1)
    sequence = load_sequence(node.b, targets.lengths, T, U1)
    if (node.t >= sequence.length) | (node.first_u > sequence.target_len):
        return
    origin = step_offset(node, first_step, stride_b, stride_t)
    options = (targets.labels, target_stride, blank, sigma, delay_penalty)
    source = NodeSource(logits, origin, stride_u, *options)
    blank_score, label_score = score_arcs(source, node, sequence, V, FUSED, HAT, TILE, DTYPE)
    u = node.first_u + tl.arange(0, ROWS)
    mask = u <= sequence.target_len
    offset = node_offset(node.b, node.t, u, lattice_sizes(T, B, U1, num_chunks))
    tl.store(blanks_ptr + offset, blank_score, mask=mask)
    tl.store(labels_ptr + offset, label_score, mask=mask)
