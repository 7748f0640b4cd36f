"""The scores of states of chains, alpha or beta, under Log or Max, with one program per chain.

See `steps.py` for the recursions. After the length, alpha repeats its value at the length, and
beta is the final scores.
"""

import triton
import triton.language as tl

from .steps import alpha_step, beta_step, load_length, store_boundary_scores


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
    scores_ptr += n * stride_n
    row_stride, lane = tl.full([], N, tl.int64) * C, tl.arange(0, BLOCK_C)
    if REVERSE:
        for t in range(length, T + 1):
            store_boundary_scores(
                result_ptr + tl.full([], t, tl.int64) * row_stride,
                final_ptr + n * final_n,
                C,
                final_c,
                invalid,
                BLOCK_C,
            )
        for i in range(0, length):
            t64 = tl.full([], length - 1 - i, tl.int64)
            for c0 in range(0, C, BLOCK_C):
                value = beta_step(
                    result_ptr + (t64 + 1) * row_stride,
                    scores_ptr + t64 * stride_t,
                    out_offsets_ptr,
                    out_edges_ptr,
                    c0 + lane,
                    C,
                    K,
                    stride_c,
                    stride_k,
                    UNROLL_OUT,
                    ACC_DTYPE,
                    IS_MAX,
                )
                tl.store(result_ptr + t64 * row_stride + c0 + lane, value, mask=c0 + lane < C)
    else:
        store_boundary_scores(
            result_ptr, initial_ptr + n * initial_n, C, initial_c, invalid, BLOCK_C
        )
        for t in range(0, length):
            t64 = tl.full([], t, tl.int64)
            for c0 in range(0, C, BLOCK_C):
                value = alpha_step(
                    result_ptr + t64 * row_stride,
                    scores_ptr + t64 * stride_t,
                    source_ptr,
                    c0 + lane,
                    C,
                    K,
                    stride_c,
                    stride_k,
                    UNROLL_IN,
                    ACC_DTYPE,
                    IS_MAX,
                )
                tl.store(result_ptr + (t64 + 1) * row_stride + c0 + lane, value, mask=c0 + lane < C)
        tl.debug_barrier()
        for t in range(length, T):
            for c0 in range(0, C, BLOCK_C):
                value = tl.load(result_ptr + length * row_stride + c0 + lane, mask=c0 + lane < C)
                tl.store(
                    result_ptr + tl.full([], t + 1, tl.int64) * row_stride + c0 + lane,
                    value,
                    mask=c0 + lane < C,
                )
