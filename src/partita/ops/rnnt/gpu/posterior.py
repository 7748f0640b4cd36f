"""Posteriors of a transducer's arcs, from α, β and the arcs, and the loss."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2
from .lattice import SIZES, exp2_of, load_sequence, node_offset


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
    return tl.where(mask, exp2_of(blank, FP64), 0.0), tl.where(has_label, exp2_of(label, FP64), 0.0)


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
