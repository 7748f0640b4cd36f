"""The best path and samples of chains of any size.

The Viterbi algorithm has one program per chain. Its forward pass computes alpha under Max and
stores a backpointer for each state: the lowest k with

    alpha[t + 1, c] = alpha[t, source[c, k]] + scores[t, c, k].

The backward pass starts from the lowest best final state and follows the backpointers to the start.

Samples come from forward filtering and backward sampling, given alpha under Log. The final state is
drawn in proportion to exp(alpha[length, c] + final[c]). Then, from the last step to the first, the
edge into the state c is drawn in proportion to exp(alpha[t, source[c, k]] + scores[t, c, k]). The
index drawn is the number of cumulative weights that do not exceed uniform * total. One program
draws BLOCK_S paths of one chain.

Sources: Viterbi, Error bounds for convolutional codes and an asymptotically optimum decoding
algorithm, 1967; Carter and Kohn, On Gibbs sampling for state space models, 1994.
"""

import triton
import triton.language as tl

from ....primitives.gpu.memory import load_length
from .arguments import StridedEdges, StridedStates
from .steps import (
    edge_score,
    final_terms,
    from_step,
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


@triton.jit
def terms_of(alpha_ptr, scores, edges, state, k):
    """Return alpha + score of the k-th edges into the states, [BLOCK_S, BLOCK_K].

    Without states, return alpha + final of the last states k, [1, BLOCK_K].
    """
    if state is None:
        return final_terms(alpha_ptr, scores.ptr, k, edges.C, scores.c)[None, :]
    else:
        state, k = state[:, None], k[None, :]
        source = tl.load(edges.source_ptr + state * edges.K + k, mask=k < edges.K, other=-1)
        score_ptrs = scores.ptr + state.to(tl.int64) * scores.c + k.to(tl.int64) * scores.k
        score = tl.load(score_ptrs, mask=source >= 0, other=0.0)
        alpha = tl.load(alpha_ptr + source, mask=source >= 0, other=-float("inf"))
        return alpha + score.to(tl.float64)


@triton.jit
def draw(alpha_ptr, scores, edges, state, uniform, BLOCK_K: tl.constexpr):
    """Draw one of the indices k in proportion to exp of the terms of `terms_of`, [BLOCK_S].

    Returns:
        The index drawn, the greatest term, and the sum of the weights exp(term - greatest term).
    """
    count = edges.C if state is None else edges.K
    zeros, lane = tl.zeros(uniform.shape, tl.float64), tl.arange(0, BLOCK_K)
    maximum, total, cumulative = zeros - float("inf"), zeros, zeros
    for k0 in range(0, count, BLOCK_K):
        terms = terms_of(alpha_ptr, scores, edges, state, k0 + lane)
        maximum = tl.maximum(maximum, tl.max(terms, axis=1))
    shift = tl.where(maximum == -float("inf"), 0.0, maximum)[:, None]
    for k0 in range(0, count, BLOCK_K):
        terms = terms_of(alpha_ptr, scores, edges, state, k0 + lane)
        total += tl.sum(tl.exp(terms - shift), axis=1)
    index, last_positive = tl.zeros(uniform.shape, tl.int32), tl.zeros(uniform.shape, tl.int32)
    for k0 in range(0, count, BLOCK_K):
        weights = tl.exp(terms_of(alpha_ptr, scores, edges, state, k0 + lane) - shift)
        passed = cumulative[:, None] + tl.cumsum(weights, axis=1) <= (uniform * total)[:, None]
        block_last = tl.max(tl.where(weights > 0.0, k0 + lane[None, :], -1), axis=1)
        index += tl.sum(passed.to(tl.int32), axis=1)
        last_positive = tl.maximum(last_positive, block_last)
        cumulative += tl.sum(weights, axis=1)
    # If uniform * total rounds up to the total, the draw passes the last positive weight.
    return tl.minimum(index, last_positive), maximum, total


@triton.jit
def chain_sample_kernel(
    chains,  # Chains
    alpha_ptr,  # [T + 1, N, C] fp64
    uniforms_ptr,  # [T + 1, samples, N] fp64
    paths,  # ChainPaths of samples
    samples,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Draw final states, then edges back to the first step."""
    scores, edges = chains[:2]
    final, lengths_ptr, T, N = chains[3:]
    C = edges.C
    n = (tl.program_id(0) % N).to(tl.int64)
    sample = tl.program_id(0) // N * BLOCK_S + tl.arange(0, BLOCK_S)
    valid = sample < samples
    length, invalid = load_length(lengths_ptr, n, T)
    row_stride, step_stride = tl.full([], N, tl.int64) * C, tl.full([], samples, tl.int64) * N
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    alpha_ptr += n * C
    uniforms_ptr += sample.to(tl.int64) * N + n
    path_states_ptr = paths.states_ptr + (sample.to(tl.int64) * (T + 1) * N + n)
    path_edges_ptr = paths.edges_ptr + (sample.to(tl.int64) * T * N + n)
    uniform = tl.load(uniforms_ptr + T * step_stride, mask=valid, other=0.0)
    last_ptr = alpha_ptr + length * row_stride
    final = StridedStates(final.ptr + n * final.n, *final[1:])
    state, maximum, total = draw(last_ptr, final, edges, None, uniform, BLOCK_K)
    possible = (maximum > -float("inf")) & (total + invalid == total)
    for i in range(0, T + 1):
        t = tl.full([], T - i, tl.int64)
        on_path = possible & (t <= length)
        tl.store(path_states_ptr + t * N, tl.where(on_path, state, -1).to(tl.int64), mask=valid)
        if t > 0:
            slot = tl.zeros([BLOCK_S], tl.int32)
            if t <= length:
                step_uniform = tl.load(uniforms_ptr + (t - 1) * step_stride, mask=valid, other=0.0)
                step_alpha_ptr = alpha_ptr + (t - 1) * row_stride
                step_scores = from_step(scores, t - 1)
                inputs = (step_alpha_ptr, step_scores, edges, state)
                slot = draw(*inputs, step_uniform, BLOCK_K)[0]
            edge = state * edges.K + slot
            path_edge = tl.where(on_path, edge, -1).to(tl.int64)
            tl.store(path_edges_ptr + (t - 1) * N, path_edge, mask=valid)
            source = tl.load(edges.source_ptr + edge, mask=on_path, other=0)
            state = tl.where(on_path, source, state)
