"""The scores of states of chains, alpha or beta, under Log or Max, with one program per chain.

See `steps.py` for the recursions. After the length, alpha repeats its value at the length, and
beta is the final scores.
"""

import triton
import triton.language as tl

from .arguments import StridedEdges
from .steps import (
    copy_states,
    from_step,
    load_length,
    store_alpha_step,
    store_beta_step,
    store_boundary_scores,
)


@triton.jit
def chain_scan_kernel(
    scores,  # StridedEdges [T, N, C, K]
    edges,  # ChainEdges
    initial,  # StridedStates [N, C]
    final,  # StridedStates [N, C]
    lengths_ptr,  # [N] or None
    result_ptr,  # [T + 1, N, C] fp64
    T,
    N,
    IS_MAX: tl.constexpr,
    REVERSE: tl.constexpr,
    UNROLL_IN: tl.constexpr,
    UNROLL_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Scan alpha from the first step to the last or, with REVERSE, beta in the other direction."""
    n, C = tl.program_id(0).to(tl.int64), edges.C
    length, invalid = load_length(lengths_ptr, n, T)
    result_ptr += n * C
    row_stride = tl.full([], N, tl.int64) * C
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    if REVERSE:
        final_ptr = final.ptr + n * final.n
        for t in range(length, T + 1):
            row_ptr = result_ptr + tl.full([], t, tl.int64) * row_stride
            store_boundary_scores(row_ptr, final_ptr, C, final.c, invalid, BLOCK_C)
        for i in range(0, length):
            t64 = tl.full([], length - 1 - i, tl.int64)
            row_ptr = result_ptr + t64 * row_stride
            beta_ptr, step_scores = result_ptr + (t64 + 1) * row_stride, from_step(scores, t64)
            store_beta_step(
                row_ptr, beta_ptr, step_scores, edges, UNROLL_OUT, BLOCK_C, ACC_DTYPE, IS_MAX
            )
    else:
        initial_ptr = initial.ptr + n * initial.n
        store_boundary_scores(result_ptr, initial_ptr, C, initial.c, invalid, BLOCK_C)
        for t in range(0, length):
            t64 = tl.full([], t, tl.int64)
            row_ptr = result_ptr + (t64 + 1) * row_stride
            alpha_ptr, step_scores = result_ptr + t64 * row_stride, from_step(scores, t64)
            store_alpha_step(
                row_ptr, alpha_ptr, step_scores, edges, UNROLL_IN, BLOCK_C, ACC_DTYPE, IS_MAX
            )
        tl.debug_barrier()
        for t in range(length, T):
            row_ptr = result_ptr + tl.full([], t + 1, tl.int64) * row_stride
            copy_states(row_ptr, result_ptr + length * row_stride, C, BLOCK_C)
