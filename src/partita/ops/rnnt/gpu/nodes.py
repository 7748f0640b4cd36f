"""Transducers' pass over the logits: each node's log-sum-exp and the scores of its two arcs."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E
from .lattice import SIZES, load_sequence, log_sum, node_offset
from .rows import locate_rows, program_nodes, row_normalizers


@triton.jit
def load_node_label(targets_ptr, b, u, mask, target_stride, V):
    """Return the labels of nodes, and 0 outside of the mask and for labels out of range."""
    label = tl.load(targets_ptr + b.to(tl.int64) * target_stride + u, mask=mask, other=0)
    return tl.where((label >= 0) & (label < V), label, 0)


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
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute the log-sum-exps and the scores of the arcs of some nodes.

    Nodes beyond the lengths are neither read nor written.
    """
    node = program_nodes(first_step, T, U1, ROWS)
    length, target_len, _ = load_sequence(node.b, logit_lengths_ptr, target_lengths_ptr, T, U1)
    mask = (node.u <= target_len) & (node.t < length)
    first_u = tl.program_id(0) % tl.cdiv(U1, ROWS) * ROWS
    if (node.t >= length) | (first_u > target_len):
        return
    values = locate_rows(node, first_step, T, V, stride_b, stride_t, stride_u, VEC, EDGES)
    label = load_node_label(targets_ptr, node.b, node.u, node.u < target_len, target_stride, V)
    at_blank = values.start + tl.cast(blank, tl.int64) * stride_v
    blank_x = tl.load(logits_ptr + at_blank, mask=mask, other=0.0).to(tl.float64)
    at_label = values.start + label.to(tl.int64) * stride_v
    label_x = tl.load(logits_ptr + at_label, mask=mask, other=0.0).to(tl.float64)
    if FUSED:
        shift, total = row_normalizers(
            logits_ptr,
            values,
            mask,
            V,
            stride_v,
            blank,
            HAT,
            VEC,
            EDGES,
            PIECES,
            BLOCK_V,
            DTYPE,
        )
        shift, log_total = shift.to(tl.float64), log_sum(total)
        if lse_ptr is not None:
            lse = (shift + log_total).to(lse_ptr.dtype.element_ty)
            tl.store(lse_ptr + node.index, lse, mask=mask)
        label_x = (label_x - shift) - log_total
        if HAT:
            label_x += log_sigmoid(-blank_x)
            blank_x = log_sigmoid(blank_x)
        else:
            blank_x = (blank_x - shift) - log_total
    label_x += delay_penalty * (0.5 * (length - 1).to(tl.float64) - node.t.to(tl.float64))
    offset = node_offset(node.b, node.t, node.u, num_chunks, rows)
    tl.store(arcs_ptr + offset, (blank_x - sigma) * LOG2E, mask=mask)
    tl.store(arcs_ptr + nodes + offset, (label_x - sigma) * LOG2E, mask=mask)
