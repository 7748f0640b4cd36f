"""The best path of a transducer, traced back on the device from the kinds of its arcs."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2
from .lattice import SIZES, load_sequence, node_offset


@triton.jit(do_not_specialize=SIZES)
def rnnt_backtrace_kernel(
    scan,  # Scan of the best path
    lengths,  # Lengths
    steps_ptr,  # [B, U] int64
    scores_ptr,  # [B, U]
    score_ptr,  # [B]
    T,
    U1,
    num_chunks,
    rows,
    nodes: tl.int64,  # elements of an array over all nodes
    CODE: tl.constexpr,  # see `arc_rows.py`
    ARCS: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """Write the step and the score of each label on the best path of a sequence, and its score."""
    b = tl.program_id(0)
    length, target_len, _ = load_sequence(b, lengths, T, U1)
    best = tl.load(scan.totals + b)
    is_nan = (tl.load(scan.flags + b) > 0) | (best != best)
    dtype: tl.constexpr = scores_ptr.dtype.element_ty
    tl.store(score_ptr + b, tl.where(is_nan, float("nan"), best * LN2).to(dtype))
    steps_ptr += b.to(tl.int64) * (U1 - 1)
    scores_ptr += b.to(tl.int64) * (U1 - 1)
    for first in range(0, U1 - 1, BLOCK_U):
        lane = first + tl.arange(0, BLOCK_U)
        tl.store(steps_ptr + lane, tl.full([BLOCK_U], -1, tl.int64), mask=lane < U1 - 1)
        nothing = tl.where(is_nan, float("nan"), lane * 0.0).to(dtype)
        tl.store(scores_ptr + lane, nothing, mask=lane < U1 - 1)
    # The path's values replace those that other threads have just stored.
    tl.debug_barrier()
    has_path = tl.where(is_nan, 0, tl.where(best > -float("inf"), 1, 0))
    t, u = length * has_path, target_len * has_path
    while t + u > 0:
        node = node_offset(b, t, u, num_chunks, rows)
        pointer = tl.load(scan.states + node).to(tl.int32)
        duration, is_label = t * 0, t * 0
        for i in tl.static_range(ARCS):
            duration = tl.where(pointer == i, (CODE >> (8 * i)) & 127, duration)
            is_label = tl.where(pointer == i, (CODE >> (8 * i + 7)) & 1, is_label)
        t, u = t - duration, u - is_label
        source = node_offset(b, t, u, num_chunks, rows)
        score = tl.load(scan.arcs + pointer * nodes + source, mask=is_label > 0, other=0.0)
        tl.store(steps_ptr + u, t.to(tl.int64), mask=is_label > 0)
        tl.store(scores_ptr + u, (score * LN2).to(dtype), mask=is_label > 0)
