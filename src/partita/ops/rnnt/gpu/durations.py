"""Token-and-duration transducers: scores of the arcs, posteriors, and the gradient in durations.

The arcs of a node are those of the blank with each of K durations, and then those of the label.
Blanks of duration 0 have no arc. `DURATIONS` has the duration k in byte k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E
from .lattice import SIZES, exp2_of, load_sequence, log_sum, node_offset


@triton.jit(do_not_specialize=SIZES)
def tdt_arcs_kernel(
    durations_ptr,  # [B, T, U1, K] logits, or those of some steps
    logit_lengths_ptr,  # [B]
    target_lengths_ptr,  # [B]
    tokens_ptr,  # [2, B, num_chunks, rows, 32] fp64: scores of blank and label
    lse_ptr,  # [B, T, U1], or None
    arcs_ptr,  # [2, K, B, num_chunks, rows, 32] fp64
    T,
    B,
    U1,
    num_chunks,
    rows,
    nodes: tl.int64,  # elements of an array over all nodes
    stride_b,
    stride_t,
    stride_u,
    stride_k,
    DURATIONS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes of a program, which are some rows of a chunk
):
    """Compute the log-sum-exps of the durations and the scores of the arcs of some nodes.

    Arcs that leave the lattice have the score -inf, also those of nodes beyond the lengths, and so
    has the margin after the last sequence, which the programs after its own write.
    """
    blocks = tl.cdiv(rows * 32, BLOCK)
    chunk, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b = tl.minimum(chunk // num_chunks, B - 1)
    length, target_len, _ = load_sequence(b, logit_lengths_ptr, target_lengths_ptr, T, U1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    t, u = index // 32 - index % 32, chunk % num_chunks * 32 + index % 32
    is_margin = index * 0 + chunk >= B * num_chunks
    mask = (t >= 0) & (t < length) & (u <= target_len) & (is_margin == 0)
    offset = chunk.to(tl.int64) * rows * 32 + index
    start = b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t + u.to(tl.int64) * stride_u
    values = ()
    for k in tl.static_range(K):
        x = tl.load(durations_ptr + start + k * tl.cast(stride_k, tl.int64), mask=mask, other=0.0)
        values = values + (x.to(tl.float64),)
    maximum = values[0]  # type: ignore[misc]
    for k in tl.static_range(1, K):
        maximum = tl.where(values[k] > maximum, values[k], maximum)
    maximum = tl.where(maximum == -float("inf"), 0.0, maximum)
    total = tl.exp(values[0] - maximum)  # type: ignore[misc]
    for k in tl.static_range(1, K):
        total += tl.exp(values[k] - maximum)
    log_total = log_sum(total, durations_ptr.dtype.element_ty)
    lse = maximum + log_total
    if lse_ptr is not None:
        node = (b.to(tl.int64) * T + t) * U1 + u
        tl.store(lse_ptr + node, lse.to(lse_ptr.dtype.element_ty), mask=mask)
    blank = tl.load(tokens_ptr + offset, mask=mask, other=0.0)
    label = tl.load(tokens_ptr + nodes + offset, mask=mask, other=0.0)
    for k in tl.static_range(K):
        after = t + ((DURATIONS >> (8 * k)) & 255)
        duration = (values[k] - maximum - log_total) * LOG2E
        in_array = index < rows * 32
        if (DURATIONS >> (8 * k)) & 255:
            valid = mask & ((after < length) | ((after == length) & (u == target_len)))
            score = tl.where(valid, blank + duration, -float("inf"))
            tl.store(arcs_ptr + k * nodes + offset, score, mask=in_array)
        else:  # no scan reads the arcs of this kind, but the margin after them
            nothing = tl.full([BLOCK], -float("inf"), tl.float64)
            tl.store(arcs_ptr + k * nodes + offset, nothing, mask=is_margin)
        valid = mask & (after < length) & (u < target_len)
        score = tl.where(valid, label + duration, -float("inf"))
        tl.store(arcs_ptr + (K + k) * nodes + offset, score, mask=in_array)


@triton.jit(do_not_specialize=SIZES)
def tdt_posterior_kernel(
    arcs_ptr,  # [2, K, B, num_chunks, rows, 32] fp64
    states_ptr,  # [2, B, num_chunks, rows, 32] fp64: α and β, or None
    logit_lengths_ptr,  # [B]
    target_lengths_ptr,  # [B]
    flags_ptr,  # [B] int64
    logz_ptr,  # [B] fp64
    nll_ptr,  # [B]
    posteriors_ptr,  # [2, K, B, T, U1], or None for the loss alone
    T,
    B,
    U1,
    num_chunks,
    rows,
    nodes: tl.int64,  # elements of an array over all nodes
    DURATIONS: tl.constexpr,
    K: tl.constexpr,
    FP64: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes of a program
):
    """Write the posteriors of the arcs of some nodes, and the loss."""
    blocks = 1
    if posteriors_ptr is not None:
        blocks = num_chunks * tl.cdiv(rows * 32, BLOCK)
    b, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    sequence = load_sequence(b, logit_lengths_ptr, target_lengths_ptr, T, U1)
    logz, flag = tl.load(logz_ptr + b), tl.load(flags_ptr + b)
    if block == 0:
        nll = tl.where(flag > 0, float("nan"), -logz * LN2)
        tl.store(nll_ptr + b, nll.to(nll_ptr.dtype.element_ty))
    if posteriors_ptr is not None:
        length = tl.where(logz == -float("inf"), 0, sequence.length)
        # The nodes are counted as the arcs lie in memory.
        chunk_blocks = tl.cdiv(rows * 32, BLOCK)
        index = block % chunk_blocks * BLOCK + tl.arange(0, BLOCK)
        t, u = index // 32 - index % 32, block // chunk_blocks * 32 + index % 32
        is_node = (t >= 0) & (t < T) & (u < U1)
        mask = (t >= 0) & (t < length) & (u <= sequence.target_len)
        offset = node_offset(b, t, u, num_chunks, rows)
        after = node_offset(b, t, u + 1, num_chunks, rows)
        alpha = tl.load(states_ptr + offset, mask=mask, other=-float("inf")) - logz
        beta_ptr = states_ptr + nodes
        zero = tl.where(flag > 0, float("nan"), 0.0).to(posteriors_ptr.dtype.element_ty)
        size = B.to(tl.int64) * T * U1
        node_ptr = posteriors_ptr + ((b.to(tl.int64) * T + t) * U1 + u)
        for k in tl.static_range(K):
            d = (DURATIONS >> (8 * k)) & 255
            blank, label = zero + index * 0.0, zero + index * 0.0
            if (DURATIONS >> (8 * k)) & 255:
                valid = mask & (t + d <= length)
                score = tl.load(arcs_ptr + k * nodes + offset, mask=valid, other=0.0)
                score += tl.load(beta_ptr + offset + d * 32, mask=valid, other=0.0)
                blank = tl.where(valid, exp2_of(alpha + score, FP64), 0.0) + zero
            valid = mask & (t + d < length) & (u < sequence.target_len)
            score = tl.load(arcs_ptr + (K + k) * nodes + offset, mask=valid, other=0.0)
            score += tl.load(beta_ptr + after + d * 32, mask=valid, other=0.0)
            label = tl.where(valid, exp2_of(alpha + score, FP64), 0.0) + zero
            tl.store(node_ptr + k * size, blank, mask=is_node)
            tl.store(node_ptr + (K + k) * size, label, mask=is_node)


@triton.jit(do_not_specialize=SIZES)
def tdt_duration_gradient_kernel(
    grad_ptr,  # [B]
    durations_ptr,  # [B, T, U1, K] logits
    lse_ptr,  # [B, T, U1]
    posteriors_ptr,  # [2, K, B, T, U1]
    ddurations_ptr,  # [B, T, U1, K]
    T,
    B,
    U1,
    grad_stride,
    stride_b,
    stride_t,
    stride_u,
    stride_k,
    K: tl.constexpr,
    FP64: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes of a program
):
    """Write the gradient in the logits of the durations of some nodes."""
    blocks = tl.cdiv(T * U1, BLOCK)
    b, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    index = block * BLOCK + tl.arange(0, BLOCK)
    t, u, mask = (index // U1).to(tl.int64), (index % U1).to(tl.int64), index < T * U1
    node, size = b * T * U1 + index, B.to(tl.int64) * T * U1
    scale = tl.load(grad_ptr + (b + index * 0) * grad_stride).to(posteriors_ptr.dtype.element_ty)
    read = mask & (scale != 0.0)
    arcs, total = (), tl.zeros([BLOCK], posteriors_ptr.dtype.element_ty)
    for k in tl.static_range(K):
        arc = tl.load(posteriors_ptr + k * size + node, mask=read, other=0.0)
        arc += tl.load(posteriors_ptr + (K + k) * size + node, mask=read, other=0.0)
        arcs = arcs + (arc,)
        total += arc
    active = read & (total != 0.0)
    lse = tl.load(lse_ptr + node, mask=active, other=0.0).to(tl.float64)
    start = b * stride_b + t * stride_t + u * stride_u
    for k in tl.static_range(K):
        x = tl.load(
            durations_ptr + start + k * tl.cast(stride_k, tl.int64), mask=active, other=0.0
        ).to(tl.float64)
        softmax = tl.exp(x - lse) if FP64 else tl.exp((x - lse).to(tl.float32))
        d = tl.where(active, (total * softmax - arcs[k]) * scale, 0.0)
        tl.store(ddurations_ptr + node * K + k, d.to(ddurations_ptr.dtype.element_ty), mask=mask)
