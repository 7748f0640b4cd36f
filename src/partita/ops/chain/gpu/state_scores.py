"""The scores of states of chains, alpha or beta, under Log or Max, with one program per chain.

See `steps.py` for the recursions. After the length, alpha repeats its value at the length, and
beta is the final scores.
"""

import triton
import triton.language as tl

from .steps import (
    ChainEdges,
    EdgeArray,
    copy_states,
    from_step,
    load_length,
    store_alpha_step,
    store_beta_step,
    store_boundary_scores,
)


@triton.jit
def chain_scan_kernel(
    scores_ptr,  # [T, N, C, K]
    source_ptr,  # [C, K] int32
    out_offsets_ptr,  # [C + 1] int32
    out_edges_ptr,  # [C * K] int32
    initial_ptr,  # [N, C]
    final_ptr,  # [N, C]
    lengths_ptr,  # [N] or None
    result_ptr,  # [T + 1, N, C] fp64
    T,
    N,
    C,
    K,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    initial_n,
    initial_c,
    final_n,
    final_c,
    IS_MAX: tl.constexpr,
    REVERSE: tl.constexpr,
    UNROLL_IN: tl.constexpr,
    UNROLL_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Scan alpha from the first step to the last or, with REVERSE, beta in the other direction."""
    n = tl.program_id(0).to(tl.int64)
    length, invalid = load_length(lengths_ptr, n, T)
    result_ptr += n * C
    row_stride = tl.full([], N, tl.int64) * C
    edges = ChainEdges(source_ptr, out_offsets_ptr, out_edges_ptr, C, K)
    scores = EdgeArray(scores_ptr + n * stride_n, stride_t, stride_c, stride_k)
    if REVERSE:
        final_ptr += n * final_n
        for t in range(length, T + 1):
            row_ptr = result_ptr + tl.full([], t, tl.int64) * row_stride
            store_boundary_scores(row_ptr, final_ptr, C, final_c, invalid, BLOCK_C)
        for i in range(0, length):
            t64 = tl.full([], length - 1 - i, tl.int64)
            row_ptr = result_ptr + t64 * row_stride
            beta_ptr, step_scores = result_ptr + (t64 + 1) * row_stride, from_step(scores, t64)
            store_beta_step(
                row_ptr, beta_ptr, step_scores, edges, UNROLL_OUT, BLOCK_C, ACC_DTYPE, IS_MAX
            )
    else:
        initial_ptr += n * initial_n
        store_boundary_scores(result_ptr, initial_ptr, C, initial_c, invalid, BLOCK_C)
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
