"""Posteriors of the arcs of transducers, from α, β and the arcs, and the loss."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2
from .arc_words import (
    ARC_BIAS,
    LEAST_STATE,
    STATE_BIAS,
    add_product,
    arc_exponent,
    halves,
    state_of_word,
)
from .lattice import SIZES, load_sequence, node_offset
from .scan import INVALID


@triton.jit
def arc_posteriors(scan, num_chunks, rows, nodes, b, t, u, sequence, logz, FP64: tl.constexpr):
    """Return the posteriors of the blank's and the label's arc of some nodes, not normalized."""
    mask = (t >= 0) & (t < sequence.length) & (u >= 0) & (u <= sequence.target_len)
    has_label = mask & (u < sequence.target_len)
    offset = node_offset(b, t, u, num_chunks, rows)
    alpha = tl.load(scan.states + offset, mask=mask, other=-float("inf")) - logz
    beta_ptr = scan.states + nodes
    blank = alpha + tl.load(scan.arcs + offset, mask=mask, other=0.0)
    blank += tl.load(beta_ptr + offset + 32, mask=mask, other=0.0)
    label = alpha + tl.load(scan.arcs + nodes + offset, mask=has_label, other=-float("inf"))
    after = node_offset(b, t, u + 1, num_chunks, rows)
    label += tl.load(beta_ptr + after, mask=has_label, other=0.0)
    dtype: tl.constexpr = tl.float64 if FP64 else tl.float32
    blank = tl.where(mask, tl.exp2(blank.to(dtype)), 0.0)
    return blank, tl.where(has_label, tl.exp2(label.to(dtype)), 0.0)


@triton.jit(do_not_specialize=SIZES)
def rnnt_posterior_kernel(
    scan,  # Scan of scores
    lengths,  # Lengths
    nll_ptr,  # [B]
    posteriors_ptr,  # [2, B, T, U1], or None for the loss alone
    T,
    B,
    U1,
    num_chunks,
    rows,
    nodes: tl.int64,  # elements of an array over all nodes
    FP64: tl.constexpr,
    DIAGONALS: tl.constexpr,  # anti-diagonals of a program
    BLOCK_U: tl.constexpr,
):
    """Write the posteriors of some anti-diagonals, and the loss.

    Each path leaves each anti-diagonal by one arc, so their posteriors are divided by their sum.
    """
    blocks = 1
    if posteriors_ptr is not None:
        blocks = tl.cdiv(T + U1 - 1, DIAGONALS)
    b, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    sequence = load_sequence(b, lengths, T, U1)
    logz, flag = tl.load(scan.totals + b), tl.load(scan.flags + b)
    if block == 0:
        nll = tl.where(flag > 0, float("nan"), -logz * LN2)
        tl.store(nll_ptr + b, nll.to(nll_ptr.dtype.element_ty))
    if posteriors_ptr is not None:
        no_path = logz == -float("inf")
        logz = tl.where(no_path, 0.0, logz)
        diagonal = block * DIAGONALS + tl.arange(0, DIAGONALS)[:, None]
        lane = tl.arange(0, BLOCK_U)[None, :]
        total = tl.zeros([DIAGONALS], tl.float64)
        for first in range(0, tl.where(no_path, 0, sequence.target_len + 1), BLOCK_U):
            u = first + lane
            blank, label = arc_posteriors(
                scan, num_chunks, rows, nodes, b, diagonal - u, u, sequence, logz, FP64
            )
            total += tl.sum((blank + label).to(tl.float64), axis=1)
        scale = tl.where(total == 0.0, 1.0, 1.0 / total).to(posteriors_ptr.dtype.element_ty)
        scale = tl.where(flag > 0, float("nan"), scale)[:, None]
        for first in range(0, U1, BLOCK_U):
            u = first + lane
            t = diagonal - u
            blank, label = arc_posteriors(
                scan, num_chunks, rows, nodes, b, t, u, sequence, logz, FP64
            )
            scale_of_node = tl.where(no_path & (flag == 0), 0.0, scale)
            mask = (u < U1) & (t >= 0) & (t < T)
            ptr = posteriors_ptr + (b.to(tl.int64) * T + t) * U1 + u
            tl.store(ptr, blank * scale_of_node, mask=mask)
            tl.store(ptr + B.to(tl.int64) * T * U1, label * scale_of_node, mask=mask)


@triton.jit
def load_kinds(arcs_ptr, after_ptr, nodes, mask, K: tl.constexpr, DURATIONS: tl.constexpr):
    """Load the arcs of some nodes by a token and all durations, and β where they lead, as words.

    `after_ptr` is the address of β where arcs of duration 0 lead. Arcs that leave the lattice have
    the probability 0, and any β.
    """
    arcs, after = (), ()
    for k in tl.static_range(K):
        d = (DURATIONS >> (8 * k)) & 255
        arcs = arcs + (tl.load(arcs_ptr + k * nodes, mask=mask, other=0),)
        after = after + (tl.load(after_ptr + d * 32, mask=mask, other=0),)
    return arcs, after


@triton.jit
def arc_posterior(arc, after, alpha, field, PRECISE: tl.constexpr):
    """Return the posteriors of arcs, given their words and those of β where they lead.

    `alpha` is the significand of α divided by that of the sum over all paths, and `field` 1023 plus
    their exponent without the bias of arc and β.
    """
    significand, exponent = state_of_word(after)
    lower, upper = halves(arc)
    power = arc_exponent(upper, PRECISE)
    # A posterior is at most about 1. The words of arcs that no path takes may have any exponents.
    field = tl.minimum(power + exponent + field, 1100)
    posterior = add_product(alpha * 0.0, lower, upper, significand, field, PRECISE) * alpha
    return tl.where(power > 0, posterior, 0.0)


@triton.jit(do_not_specialize=SIZES)
def tdt_posterior_kernel(
    scan,  # Scan of words
    lengths,  # Lengths
    nll_ptr,  # [B]
    posteriors_ptr,  # [2 + K, B, T, U1], or None for the loss alone
    T,
    B,
    U1,
    num_chunks,
    rows,
    nodes: tl.int64,  # elements of an array over all nodes
    DURATIONS: tl.constexpr,
    K: tl.constexpr,
    PRECISE: tl.constexpr,  # see `arc_words.py`
    BLOCK: tl.constexpr,  # nodes of a program
):
    """Write the posteriors of some nodes, and the loss.

    These are those of blanks, of labels and of each duration. All words are loaded at once, since
    only the arcs of nodes within the lengths are possible.
    """
    blocks, chunk_blocks = 1, tl.cdiv(rows * 32, BLOCK)
    if posteriors_ptr is not None:
        blocks = num_chunks * chunk_blocks
    b, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    # The nodes are counted as the arcs lie in memory.
    index = block % chunk_blocks * BLOCK + tl.arange(0, BLOCK)
    t, u = index // 32 - index % 32, block // chunk_blocks * 32 + index % 32
    is_node = (t >= 0) & (t < T) & (u < U1)
    if posteriors_ptr is not None:
        offset = node_offset(b, t, u, num_chunks, rows)
        after = node_offset(b, t, u + 1, num_chunks, rows)
        beta_ptr, label_ptr = scan.states + nodes, scan.arcs + K * nodes + offset
        alpha = tl.load(scan.states + offset, mask=is_node, other=0)
        blanks = load_kinds(scan.arcs + offset, beta_ptr + offset, nodes, is_node, K, DURATIONS)
        has_label = is_node & (u + 1 < U1)
        labels = load_kinds(label_ptr, beta_ptr + after, nodes, has_label, K, DURATIONS)
    flag, bits = tl.load(scan.flags + b), tl.load(scan.totals + b)
    total, exponent = bits.to(tl.float64, bitcast=True), tl.load(scan.totals + B + b)
    length, target_len, _ = load_sequence(b, lengths, T, U1)
    has_path = (exponent >= LEAST_STATE) & (length > 0)
    if block == 0:
        logz = tl.log2(total) + (exponent - STATE_BIAS).to(tl.float64)
        nll = tl.where(has_path, -logz * LN2, float("inf"))
        nll = tl.where(flag > 0, float("nan"), nll)
        tl.store(nll_ptr + b, nll.to(nll_ptr.dtype.element_ty))
    if posteriors_ptr is not None:
        scale = tl.where(flag > 0, float("nan"), tl.where(has_path, 1.0 / total, 0.0))
        counts = ((t < length) & (u <= target_len)) | ((flag & INVALID) > 0)
        scale = tl.where(counts, scale, 0.0)
        significand, alpha_exponent = state_of_word(alpha)
        significand, zero = significand * scale, scale * 0.0
        field = alpha_exponent + (1023 - ARC_BIAS - STATE_BIAS) - exponent.to(tl.int32)
        dtype: tl.constexpr = posteriors_ptr.dtype.element_ty
        size = B.to(tl.int64) * T * U1
        node_ptr = posteriors_ptr + ((b.to(tl.int64) * T + t) * U1 + u)
        all_blanks, all_labels = zero + index * 0.0, zero + index * 0.0
        for k in tl.static_range(K):
            label = arc_posterior(labels[0][k], labels[1][k], significand, field, PRECISE)
            all_labels += label
            if (DURATIONS >> (8 * k)) & 255:
                blank = arc_posterior(blanks[0][k], blanks[1][k], significand, field, PRECISE)
                all_blanks += blank
                label += blank
            tl.store(node_ptr + (2 + k) * size, (label + zero).to(dtype), mask=is_node)
        tl.store(node_ptr, all_blanks.to(dtype), mask=is_node)
        tl.store(node_ptr + size, all_labels.to(dtype), mask=is_node)
