"""Paths of chains from alpha at all times: samples from the posterior, or the best path.

From the last step to the first, a sample takes the edge into the state c in proportion to
exp(alpha[t, source[c, k]] + scores[t, c, k]), with alpha under Log. The index drawn is the number
of cumulative weights that do not exceed uniform * total. The best path takes the lowest k for which
that sum is the greatest, with alpha under Max. The final state is chosen in the same way, by
alpha[length, c] + final[c]. One program takes BLOCK_S paths of one chain.

Sources: Carter and Kohn, On Gibbs sampling for state space models, 1994 (forward filtering,
backward sampling); Viterbi, Error bounds for convolutional codes and an asymptotically optimum
decoding algorithm, 1967.
"""

import triton
import triton.language as tl

from .arguments import StridedEdges, StridedStates
from .steps import final_terms, from_step, load_length


@triton.jit
def path_terms(alpha_ptr, scores, edges, final, state, k, IS_LAST: tl.constexpr):
    """Return alpha + score of the k-th edges into the states, [BLOCK_S, BLOCK_K].

    With IS_LAST, return alpha + final of the states k, [1, BLOCK_K].
    """
    if IS_LAST:
        return final_terms(alpha_ptr, final.ptr, k, edges.C, final.c)[None, :]
    else:
        state, k = state[:, None], k[None, :]
        source = tl.load(edges.source_ptr + state * edges.K + k, mask=k < edges.K, other=-1)
        score_ptrs = scores.ptr + state.to(tl.int64) * scores.c + k.to(tl.int64) * scores.k
        score = tl.load(score_ptrs, mask=source >= 0, other=0.0)
        alpha = tl.load(alpha_ptr + source, mask=source >= 0, other=-float("inf"))
        return alpha + score.to(tl.float64)


@triton.jit
def shifted_weights(terms, maximum):
    """Return exp(terms - maximum); zeros where the maximum is -inf."""
    return tl.exp(terms - tl.where(maximum == -float("inf"), 0.0, maximum)[:, None])


@triton.jit
def count_passed(weights, cumulative, threshold, k0):
    """Count how many weights of a block a draw passes.

    Returns:
        The count, the index of the last positive weight (-1 if there is none), and the cumulative
        weight after the block.
    """
    total = cumulative[:, None] + tl.cumsum(weights, axis=1)
    lane = tl.arange(0, weights.shape[1])[None, :]
    passed = tl.sum((total <= threshold[:, None]).to(tl.int32), axis=1)
    return (
        passed,
        tl.max(tl.where(weights > 0.0, k0 + lane, -1), axis=1),
        cumulative + tl.sum(weights, axis=1),
    )


@triton.jit
def choose(
    alpha_ptr,
    scores,
    edges,
    final,
    state,
    uniform,
    BLOCK_K: tl.constexpr,
    IS_LAST: tl.constexpr,
    IS_MAX: tl.constexpr,
):
    """Draw one of the edges into each state or of the last states, or take the best, [BLOCK_S].

    Returns:
        The index, the greatest term, and NaN if a term is NaN, otherwise 0.
    """
    zeros, lane = tl.zeros(state.shape, tl.float64), tl.arange(0, BLOCK_K)
    maximum, total, index = zeros - float("inf"), zeros, tl.zeros(state.shape, tl.int32)
    count = edges.C if IS_LAST else edges.K
    for k0 in range(0, count, BLOCK_K):
        terms = path_terms(alpha_ptr, scores, edges, final, state, k0 + lane, IS_LAST)
        block_max = tl.max(terms, axis=1)
        if IS_MAX:
            lowest = tl.where(terms == block_max[:, None], k0 + lane[None, :], count - 1)
            index = tl.where(block_max > maximum, tl.min(lowest, axis=1), index)
            total += tl.sum(tl.where(terms == terms, 0.0, terms), axis=1)
        maximum = tl.maximum(maximum, block_max)
    if not IS_MAX:
        for k0 in range(0, count, BLOCK_K):
            terms = path_terms(alpha_ptr, scores, edges, final, state, k0 + lane, IS_LAST)
            total += tl.sum(shifted_weights(terms, maximum), axis=1)
        cumulative, last_positive = zeros, index
        for k0 in range(0, count, BLOCK_K):
            terms = path_terms(alpha_ptr, scores, edges, final, state, k0 + lane, IS_LAST)
            weights = shifted_weights(terms, maximum)
            passed, block_last, cumulative = count_passed(weights, cumulative, uniform * total, k0)
            index, last_positive = index + passed, tl.maximum(last_positive, block_last)
        # If uniform * total rounds up to the total, the draw passes the last positive weight.
        index = tl.minimum(index, last_positive)
    return index, maximum, total - total


@triton.jit
def chain_path_kernel(
    scores,  # StridedEdges [T, N, C, K]
    edges,  # ChainEdges
    final,  # StridedStates [N, C]
    lengths_ptr,  # [N] or None
    alpha_ptr,  # [T + 1, N, C] fp64
    uniforms_ptr,  # [T + 1, samples, N] fp64, or None for the best path
    paths,  # ChainPaths of samples without scores; the best path, or its score alone
    samples,
    T,
    N,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Choose final states, then edges back to the first step."""
    IS_MAX: tl.constexpr = uniforms_ptr is None
    n = (tl.program_id(0) % N).to(tl.int64)
    sample = (tl.program_id(0) // N * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    valid = sample < samples
    length, invalid = load_length(lengths_ptr, n, T)
    row_stride, step_stride = tl.full([], N, tl.int64) * edges.C, tl.full([], samples, tl.int64) * N
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    final = StridedStates(final.ptr + n * final.n, *final[1:])
    alpha_ptr += n * edges.C
    uniform, state = tl.zeros([BLOCK_S], tl.float64), tl.zeros([BLOCK_S], tl.int32)
    if not IS_MAX:
        uniforms_ptr += sample * N + n
        uniform = tl.load(uniforms_ptr + T * step_stride, mask=valid, other=0.0)
    last_ptr = alpha_ptr + length * row_stride
    inputs = (last_ptr, scores, edges, final, state, uniform)
    state, score, nan = choose(*inputs, BLOCK_K, True, IS_MAX)
    score += nan + invalid
    if IS_MAX:
        score_ptr = paths.score_ptr + n
        tl.store(score_ptr + sample, score.to(score_ptr.dtype.element_ty), mask=valid)
    if paths.states_ptr is not None:
        possible = score > -float("inf")
        path_states_ptr = paths.states_ptr + (sample * (T + 1) * N + n)
        path_edges_ptr = paths.edges_ptr + (sample * T * N + n)
        for i in range(0, T + 1):
            t = tl.full([], T - i, tl.int64)
            on_path = possible & (t <= length)
            tl.store(path_states_ptr + t * N, tl.where(on_path, state, -1).to(tl.int64), mask=valid)
            if t > 0:
                k = tl.zeros([BLOCK_S], tl.int32)
                if t <= length:
                    if not IS_MAX:
                        step_ptr = uniforms_ptr + (t - 1) * step_stride
                        uniform = tl.load(step_ptr, mask=valid, other=0.0)
                    step_ptr, step_scores = (
                        alpha_ptr + (t - 1) * row_stride,
                        from_step(scores, t - 1),
                    )
                    inputs = (step_ptr, step_scores, edges, final, state, uniform)
                    k = choose(*inputs, BLOCK_K, False, IS_MAX)[0]
                edge = state * edges.K + k
                path_edge = tl.where(on_path, edge, -1).to(tl.int64)
                tl.store(path_edges_ptr + (t - 1) * N, path_edge, mask=valid)
                source = tl.load(edges.source_ptr + edge, mask=on_path, other=0)
                state = tl.where(on_path, source, state)
