"""The best path through chains of any size: the Viterbi algorithm, with one program per chain.

The forward pass computes alpha under Max and stores a backpointer for each state: the lowest k with

    alpha[t + 1, c] = alpha[t, source[c, k]] + scores[t, c, k].

The backward pass starts from the lowest best final state and follows the backpointers to the start.

Source: Viterbi, Error bounds for convolutional codes and an asymptotically optimum decoding
algorithm, 1967.
"""

import triton
import triton.language as tl

from .steps import (
    ChainEdges,
    EdgeArray,
    edge_score,
    from_step,
    load_length,
    load_source,
    max_add,
    store_boundary_scores,
)


@triton.jit
def viterbi_step(alpha_ptr, scores, edges, c):
    """Return alpha of the states c under Max and the lowest slot that attains it, [BLOCK_C].

    Alpha is NaN where a term is.
    """
    maximum, backpointer = tl.full(c.shape, -float("inf"), tl.float64), tl.zeros(c.shape, tl.int32)
    for k in range(edges.K):
        source, valid = load_source(edges, c, k)
        a = tl.load(alpha_ptr + source, mask=valid, other=-float("inf"))
        term = a + edge_score(scores, c, k, valid)
        backpointer = tl.where(term > maximum, k, backpointer)
        maximum = max_add(maximum, term)
    return maximum, backpointer


@triton.jit
def best_final_state(alpha_ptr, final_ptr, C, final_c, invalid, BLOCK_C: tl.constexpr):
    """Return the best score of a chain and the lowest state in which it ends."""
    maximum, best_state = tl.full([], -float("inf"), tl.float64), tl.full([], 0, tl.int32)
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        value = tl.load(alpha_ptr + c, mask=c < C, other=-float("inf"))
        value += tl.load(final_ptr + c * final_c, mask=c < C, other=-float("inf")).to(tl.float64)
        value = tl.where(c < C, value, -float("inf"))
        block_max, has_nan = tl.max(value, axis=0), tl.max((value != value).to(tl.int32), axis=0)
        block_state = tl.min(tl.where((value == block_max) & (c < C), c, C - 1), axis=0)
        best_state = tl.where(block_max > maximum, block_state, best_state)
        maximum = max_add(maximum, tl.where(has_nan > 0, float("nan"), block_max))
    return maximum + invalid, best_state


@triton.jit
def chain_viterbi_kernel(
    scores_ptr,  # [T, N, C, K]
    source_ptr,  # [C, K] int32
    initial_ptr,  # [N, C]
    final_ptr,  # [N, C]
    lengths_ptr,  # [N] or None
    alpha_ptr,  # [2, N, C] fp64
    backpointers_ptr,  # [T, N, C] integers
    score_ptr,  # [N]
    path_states_ptr,  # [T + 1, N] int64
    path_edges_ptr,  # [T, N] int64
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
    TRACE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Scan alpha under Max with backpointers, then follow them back from the best final state."""
    n = tl.program_id(0).to(tl.int64)
    length, invalid = load_length(lengths_ptr, n, T)
    row_stride, lane = tl.full([], N, tl.int64) * C, tl.arange(0, BLOCK_C)
    alpha_ptr += n * C
    backpointers_ptr += n * C
    edges = ChainEdges(source_ptr, None, None, C, K)
    scores = EdgeArray(scores_ptr + n * stride_n, stride_t, stride_c, stride_k)
    store_boundary_scores(alpha_ptr, initial_ptr + n * initial_n, C, initial_c, invalid, BLOCK_C)
    for t in range(0, length):
        tl.debug_barrier()
        step_scores = from_step(scores, tl.full([], t, tl.int64))
        for c0 in range(0, C, BLOCK_C):
            c = c0 + lane
            maximum, backpointer = viterbi_step(
                alpha_ptr + t % 2 * row_stride, step_scores, edges, c
            )
            tl.store(alpha_ptr + (t + 1) % 2 * row_stride + c, maximum, mask=c < C)
            if TRACE:
                tl.store(
                    backpointers_ptr + tl.full([], t, tl.int64) * row_stride + c,
                    backpointer.to(backpointers_ptr.dtype.element_ty),
                    mask=c < C,
                )
    tl.debug_barrier()
    score, state = best_final_state(
        alpha_ptr + length % 2 * row_stride, final_ptr + n * final_n, C, final_c, invalid, BLOCK_C
    )
    tl.store(score_ptr + n, score.to(score_ptr.dtype.element_ty))
    if TRACE:
        possible = score > -float("inf")
        for i in range(0, T + 1):
            t = T - i
            t64 = tl.full([], t, tl.int64)
            tl.store(
                path_states_ptr + t64 * N + n,
                tl.where(possible & (t <= length), state, -1).to(tl.int64),
            )
            if t > 0:
                on_path = possible & (t <= length)
                slot = tl.load(
                    backpointers_ptr + (t64 - 1) * row_stride + state, mask=on_path, other=0
                ).to(tl.int32)
                edge = state * K + slot
                tl.store(
                    path_edges_ptr + (t64 - 1) * N + n, tl.where(on_path, edge, -1).to(tl.int64)
                )
                state = tl.where(on_path, tl.load(source_ptr + edge, mask=on_path, other=0), state)
