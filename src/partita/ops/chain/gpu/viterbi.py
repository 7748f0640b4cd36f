"""The best path through chains of any size: the Viterbi algorithm, with one program per chain.

The forward pass computes alpha under Max and stores a backpointer for each state: the lowest k with

    alpha[t + 1, c] = alpha[t, source[c, k]] + scores[t, c, k].

The backward pass starts from the lowest best final state and follows the backpointers to the start.

Source: Viterbi, Error bounds for convolutional codes and an asymptotically optimum decoding
algorithm, 1967.
"""

import triton
import triton.language as tl

from .arguments import StridedEdges
from .steps import (
    edge_score,
    from_step,
    load_length,
    load_source,
    max_add,
    store_boundary_scores,
)


@triton.jit
def chain_viterbi_kernel(
    chains,  # Chains
    alpha_ptr,  # [2, N, C] fp64
    backpointers_ptr,  # [T, N, C] integers
    paths,  # ChainPaths
    TRACE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Scan alpha under Max with backpointers, then follow them back from the best final state."""
    scores, edges, initial, final, lengths_ptr, T, N = chains
    n, C = tl.program_id(0).to(tl.int64), edges.C
    length, invalid = load_length(lengths_ptr, n, T)
    row_stride, lane = tl.full([], N, tl.int64) * C, tl.arange(0, BLOCK_C)
    alpha_ptr += n * C
    backpointers_ptr += n * C
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    initial_ptr = initial.ptr + n * initial.n
    store_boundary_scores(alpha_ptr, initial_ptr, C, initial.c, invalid, BLOCK_C)
    for t in range(0, length):
        tl.debug_barrier()
        step_scores = from_step(scores, tl.full([], t, tl.int64))
        for c0 in range(0, C, BLOCK_C):
            c = c0 + lane
            before_ptr = alpha_ptr + t % 2 * row_stride
            best = tl.full(c.shape, -float("inf"), tl.float64)
            backpointer = tl.zeros(c.shape, tl.int32)
            for k in range(edges.K):
                source, valid = load_source(edges, c, k)
                a = tl.load(before_ptr + source, mask=valid, other=-float("inf"))
                term = a + edge_score(step_scores, c, k, valid)
                backpointer = tl.where(term > best, k, backpointer)
                best = max_add(best, term)
            tl.store(alpha_ptr + (t + 1) % 2 * row_stride + c, best, mask=c < C)
            if TRACE:
                tl.store(
                    backpointers_ptr + tl.full([], t, tl.int64) * row_stride + c,
                    backpointer.to(backpointers_ptr.dtype.element_ty),
                    mask=c < C,
                )
    tl.debug_barrier()
    last_ptr, final_ptr = alpha_ptr + length % 2 * row_stride, final.ptr + n * final.n
    maximum, state = tl.full([], -float("inf"), tl.float64), tl.full([], 0, tl.int32)
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        value = tl.load(last_ptr + c, mask=c < C, other=-float("inf"))
        value += tl.load(final_ptr + c * final.c, mask=c < C, other=-float("inf")).to(tl.float64)
        value = tl.where(c < C, value, -float("inf"))
        block_max, has_nan = tl.max(value, axis=0), tl.max((value != value).to(tl.int32), axis=0)
        block_state = tl.min(tl.where((value == block_max) & (c < C), c, C - 1), axis=0)
        state = tl.where(block_max > maximum, block_state, state)
        maximum = max_add(maximum, tl.where(has_nan > 0, float("nan"), block_max))
    score = maximum + invalid
    tl.store(paths.score_ptr + n, score.to(paths.score_ptr.dtype.element_ty))
    if TRACE:
        possible = score > -float("inf")
        for i in range(0, T + 1):
            t = T - i
            t64 = tl.full([], t, tl.int64)
            state_ptr = paths.states_ptr + t64 * N + n
            on_path = possible & (t <= length)
            tl.store(state_ptr, tl.where(on_path, state, -1).to(tl.int64))
            if t > 0:
                pointer_ptr = backpointers_ptr + (t64 - 1) * row_stride + state
                slot = tl.load(pointer_ptr, mask=on_path, other=0).to(tl.int32)
                edge, edge_ptr = state * edges.K + slot, paths.edges_ptr + (t64 - 1) * N + n
                tl.store(edge_ptr, tl.where(on_path, edge, -1).to(tl.int64))
                source = tl.load(edges.source_ptr + edge, mask=on_path, other=0)
                state = tl.where(on_path, source, state)
