"""Posteriors of the arcs of transducers, from α, β and the arcs, and the loss."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2
from .arc_rows import INVALID, num_kinds
from .arc_words import (
    ARC_BIAS,
    LEAST_STATE,
    STATE_BIAS,
    add_product,
    arc_exponent,
    halves,
    state_of_word,
)
from .lattice import SIZES, lattice_sizes, load_sequence, node_offset


@triton.jit
def load_kinds(
    arcs_ptr, after_ptr, nodes, mask, FIRST: tl.constexpr, K: tl.constexpr, CODE: tl.constexpr
):
    """Load the arcs of K kinds from FIRST on, at some nodes, and β where they lead, as words.

    `after_ptr` is the address of β where arcs of duration 0 lead. Arcs that leave the lattice have
    the probability 0, and any β.
    """
    arcs, after = (), ()
    for k in tl.static_range(FIRST, FIRST + K):
        d = (CODE >> (8 * k)) & 127
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
def rnnt_posterior_kernel(
    scan,  # Scan of words
    lengths,  # Lengths
    nll_ptr,  # [B]
    posteriors_ptr,  # [2, B, T, U1], with DURATIONS [2 + K, B, T, U1]; or None for the loss alone
    T,
    B,
    U1,
    num_chunks,
    CODE: tl.constexpr,  # the kinds of arcs; see `arc_rows.py`
    DURATIONS: tl.constexpr,  # whether the arcs have durations with probabilities
    PRECISE: tl.constexpr,  # see `arc_words.py`
    BLOCK: tl.constexpr,  # nodes of a program
):
    """Write the posteriors of some nodes, and the loss.

    These are those of blanks, of labels and of each duration. All words are loaded at once, since
    only the arcs of nodes within the lengths are possible.
    """
    K: tl.constexpr = num_kinds(CODE) // 2
    sizes = lattice_sizes(T, B, U1, num_chunks)
    blocks, chunk_blocks = 1, tl.cdiv(sizes.rows * 32, BLOCK)
    if posteriors_ptr is not None:
        blocks = sizes.num_chunks * chunk_blocks
    b, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    # The nodes are counted as the arcs lie in memory.
    index = block % chunk_blocks * BLOCK + tl.arange(0, BLOCK)
    t, u = index // 32 - index % 32, block // chunk_blocks * 32 + index % 32
    is_node = (t >= 0) & (t < T) & (u < U1)
    if posteriors_ptr is not None:
        nodes, offset = sizes.nodes, node_offset(b, t, u, sizes)
        after = node_offset(b, t, u + 1, sizes)
        arcs_ptr, beta_ptr = scan.arcs + offset, scan.states + nodes
        alpha = tl.load(scan.states + offset, mask=is_node, other=0)
        blanks = load_kinds(arcs_ptr, beta_ptr + offset, nodes, is_node, 0, K, CODE)
        has_label = is_node & (u + 1 < U1)
        labels = load_kinds(arcs_ptr, beta_ptr + after, nodes, has_label, K, K, CODE)
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
            if (CODE >> (8 * k)) & 255:
                blank = arc_posterior(blanks[0][k], blanks[1][k], significand, field, PRECISE)
                all_blanks += blank
                label += blank
            if DURATIONS:
                tl.store(node_ptr + (2 + k) * size, (label + zero).to(dtype), mask=is_node)
        tl.store(node_ptr, all_blanks.to(dtype), mask=is_node)
        tl.store(node_ptr + size, all_labels.to(dtype), mask=is_node)
