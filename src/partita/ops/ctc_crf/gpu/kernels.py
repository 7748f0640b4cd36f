"""The kernels of CTC-CRF around those of chains.

They build the target lattice of each sequence, gather its scores, reduce the losses, and subtract
the target's marginals from their gradient. Several edges of a lattice may read one score. So the
edges of each sequence are sorted by score once, and each score subtracts the sum over its run of
edges, always in the same order.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.memory import checked_length


@triton.jit
def load_base(target_ptr, stride_s, position, length, n_base):
    """Return the base at each position, from 0 to n_base - 1; 0 outside of the target."""
    inside = (position >= 0) & (position < length)
    label = tl.load(target_ptr + position * stride_s, mask=inside, other=1).to(tl.int64)
    return (tl.minimum(tl.maximum(label, 1), n_base) - 1).to(tl.int32)


@triton.jit(do_not_specialize=["stride_n", "stride_s", "T", "S", "L", "state_len", "n_base"])
def crf_lattice_kernel(
    targets_ptr,  # [N, S], or [S] where PACKED; any integer dtype
    stride_n,
    stride_s,
    target_lengths_ptr,  # [N] int64
    input_lengths_ptr,  # [N] int64, or None for T
    edge_index_ptr,  # [N, L, 2] int32
    initial_ptr,  # [N, L]
    final_ptr,  # [N, L]
    lengths_ptr,  # [N] int64, the input lengths; -1 for an invalid sequence
    T,
    S,
    L,
    state_len,
    n_base,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Build the lattice of the first L k-mers of one target, and check its length and labels.

    A target without a k-mer, or with more than L of them, has no final state and so no path. Packed
    targets follow one another, each by its length.
    """
    n = tl.program_id(0).to(tl.int64)
    if PACKED:
        # The bound on each length limits how far an invalid one can shift the targets after it.
        bound, offset = tl.full([], S, tl.int64) + 1, tl.full([], 0, tl.int64)
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            before = tl.load(target_lengths_ptr + i, mask=i < n, other=0)
            offset += tl.sum(tl.minimum(tl.maximum(before, 0), bound), axis=0)
        length, invalid = checked_length(target_lengths_ptr, n, S - offset, 0, 0)
        target_ptr = targets_ptr + tl.where(invalid, 0, offset) * stride_s
    else:
        length, invalid = checked_length(target_lengths_ptr, n, S, 0, 0)
        target_ptr = targets_ptr + n * stride_n
    bad_labels = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        i = (start + tl.arange(0, BLOCK)).to(tl.int64)
        label = tl.load(target_ptr + i * stride_s, mask=i < length, other=1).to(tl.int64)
        bad_labels |= ((label < 1) | (label > n_base)).to(tl.int32)
    invalid |= tl.max(bad_labels, axis=0) > 0
    steps = tl.full([], T, tl.int64)
    if input_lengths_ptr is not None:
        steps = tl.load(input_lengths_ptr + n)
    tl.store(lengths_ptr + n, tl.where(invalid, -1, steps))
    last = length - state_len
    for start in range(0, L, BLOCK):
        state = (start + tl.arange(0, BLOCK)).to(tl.int64)  # [BLOCK]
        kmer = tl.zeros([BLOCK], tl.int32)
        for i in range(state_len):
            kmer = kmer * n_base + load_base(target_ptr, stride_s, state + i, length, n_base)
        stay = kmer * (n_base + 1)
        # The move into a k-mer is numbered by the base that it drops.
        move = stay + 1 + load_base(target_ptr, stride_s, state - 1, length, n_base)
        entry, mask = n * L + state, state < L
        tl.store(edge_index_ptr + 2 * entry, tl.where(state <= last, stay, -1), mask=mask)
        has_move = (state > 0) & (state <= last)
        tl.store(edge_index_ptr + 2 * entry + 1, tl.where(has_move, move, -1), mask=mask)
        tl.store(initial_ptr + entry, tl.where(state == 0, 0.0, -float("inf")), mask=mask)
        tl.store(final_ptr + entry, tl.where(state == last, 0.0, -float("inf")), mask=mask)


@triton.jit(do_not_specialize=["stride_t", "stride_n", "stride_c", "stride_a", "T", "N", "E", "A"])
def crf_gather_kernel(
    scores_ptr,  # [T, N, C, A]
    stride_t,
    stride_n,
    stride_c,
    stride_a,
    edge_index_ptr,  # [N, E] int32, the index c * A + k of each edge's score, or -1
    lengths_ptr,  # [N] int64, the number of steps; below 0 for an invalid sequence
    edge_scores_ptr,  # [T, N, E]
    T,
    N,
    E,
    A,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather the scores of the lattice's edges at ROWS steps of one sequence.

    The score is 0 where there is no edge: no path of the target uses it, but it must not be NaN. No
    scan uses the scores after the last step, so they stay unwritten.
    """
    n = (tl.program_id(0) % N).to(tl.int64)
    t = (tl.program_id(0) // N).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    valid = ((t < T) & (t < tl.load(lengths_ptr + n)))[:, None]  # [ROWS, 1]
    step_ptr = scores_ptr + n * stride_n + (t * stride_t)[:, None]  # [ROWS, 1]
    for start in range(0, E, BLOCK):
        e = start + tl.arange(0, BLOCK)
        index = tl.load(edge_index_ptr + n * E + e, mask=e < E, other=-1)
        state, slot = (index // A).to(tl.int64), (index % A).to(tl.int64)
        offset = (state * stride_c + slot * stride_a)[None, :]
        score = tl.load(step_ptr + offset, mask=valid & (index >= 0)[None, :], other=0.0)
        edge_score_ptr = edge_scores_ptr + ((t * N + n) * E)[:, None] + e[None, :]
        tl.store(edge_score_ptr, score, mask=valid & (e < E)[None, :])


class EdgeOrder(NamedTuple):
    """The edges of each lattice, sorted by the score that they read; both `[N, E]` int32.

    Fields:
        edges: the edges in that order.
        runs: the number of edges that read a score at the first of them, else 0.
    """

    edges: tl.tensor
    runs: tl.tensor


@triton.jit(do_not_specialize=["N"])
def crf_loss_kernel(
    logz_den_ptr,  # [N] fp64, of all paths
    logz_num_ptr,  # [N] fp64, of the paths that spell the target
    target_lengths_ptr,  # [N] int64
    losses_ptr,  # [N] fp64
    value_ptr,  # [N], or [] where REDUCE
    N,
    REDUCE: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the loss of each sequence, and their sum or their mean over target lengths."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        mask = n < N
        logz_den = tl.load(logz_den_ptr + n, mask=mask, other=0.0)
        logz_num = tl.load(logz_num_ptr + n, mask=mask, other=0.0)
        loss = tl.where(logz_num == -float("inf"), float("inf"), logz_den - logz_num)
        tl.store(losses_ptr + n, loss, mask=mask)
        if not REDUCE:
            tl.store(value_ptr + n, loss.to(value_ptr.dtype.element_ty), mask=mask)
        elif MEAN:
            length = tl.load(target_lengths_ptr + n, mask=mask, other=1)
            total += loss / tl.maximum(length, 1).to(tl.float64)
        else:
            total += loss
    if REDUCE:
        value = tl.sum(total, axis=0)
        if MEAN:
            value /= tl.cast(N, tl.float64)
        tl.store(value_ptr, value.to(value_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["grad_stride", "N", "E"])
def crf_edge_order_kernel(
    grad_ptr,  # [N], or [] with the stride 0
    grad_stride,
    losses_ptr,  # [N] fp64
    target_lengths_ptr,  # [N] int64
    edge_index_ptr,  # [N, E] int32, the score that each edge reads, or -1
    coefficients_ptr,  # [N] fp64, the gradient of each sequence's loss
    order,  # EdgeOrder
    N,
    E,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sort BLOCK edges of one sequence among all of its edges, and compute its coefficient.

    The position of an edge is the number of edges with a lower score, or with the same score and a
    lower number.
    """
    blocks = tl.cdiv(E, BLOCK)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    index = tl.load(edge_index_ptr + n * E + j, mask=j < E, other=-1)
    lower, before, same = (tl.zeros([BLOCK], tl.int32),) * 3
    for start in range(0, E, BLOCK):
        i = start + tl.arange(0, BLOCK)
        other = tl.load(edge_index_ptr + n * E + i, mask=i < E, other=2147483647)
        is_lower = other[None, :] < index[:, None]  # [BLOCK, BLOCK]
        is_same = other[None, :] == index[:, None]
        lower += tl.sum(is_lower.to(tl.int32), axis=1)
        before += tl.sum((is_same & (i[None, :] < j[:, None])).to(tl.int32), axis=1)
        same += tl.sum(is_same.to(tl.int32), axis=1)
    position = n * E + lower + before
    tl.store(order.edges + position, j, mask=j < E)
    is_first = (before == 0) & (index >= 0)
    tl.store(order.runs + position, tl.where(is_first, same, 0), mask=j < E)
    if tl.program_id(0) % blocks == 0:
        grad = tl.load(grad_ptr + n * grad_stride).to(tl.float64)
        if MEAN:
            length = tl.maximum(tl.load(target_lengths_ptr + n), 1)
            grad = grad / tl.cast(N, tl.float64) / length.to(tl.float64)
        # A sequence without a path has the gradient 0.
        impossible = tl.load(losses_ptr + n) == float("inf")
        tl.store(coefficients_ptr + n, tl.where(impossible, 0.0, grad))


@triton.jit(do_not_specialize=["T", "N", "E"])
def crf_subtract_kernel(
    coefficients_ptr,  # [N] fp64
    marginals_ptr,  # [T, N, E], those of the target lattice
    edge_index_ptr,  # [N, E] int32, the score that each edge reads, or -1
    order,  # EdgeOrder
    lengths_ptr,  # [N] int64, the number of steps; below 0 for an invalid sequence
    d_scores_ptr,  # [T, N, V], read and written
    result_ptr,  # [T, N, V] of a half type, or None if d_scores is the result
    T,
    N,
    E,
    V,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Subtract from each score of ROWS steps the marginals of all edges that read it, in order.

    Finished rows are then rounded to a half type, if there is a result for them.
    """
    n = (tl.program_id(0) % N).to(tl.int64)
    t = (tl.program_id(0) // N).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    row = t * N + n  # [ROWS]
    # After the last step all marginals are 0. An invalid sequence has the gradient NaN already.
    valid = ((t < T) & (t < tl.load(lengths_ptr + n)))[:, None]  # [ROWS, 1]
    dtype: tl.constexpr = marginals_ptr.dtype.element_ty
    coefficient = tl.load(coefficients_ptr + n).to(dtype)
    marginal_ptr, edges_ptr = marginals_ptr + (row * E)[:, None], order.edges + n * E
    for start in range(0, E, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        run = tl.load(order.runs + n * E + i, mask=i < E, other=0)
        edge = tl.load(edges_ptr + i, mask=run > 0, other=0)
        score = tl.load(edge_index_ptr + n * E + edge, mask=run > 0, other=0)
        mask = valid & (run > 0)[None, :]  # [ROWS, BLOCK]
        d_score_ptr = d_scores_ptr + (row * V)[:, None] + score[None, :]
        d_score = tl.load(d_score_ptr, mask=mask, other=0.0)
        total = tl.load(marginal_ptr + edge[None, :], mask=mask, other=0.0)
        for k in range(1, tl.max(run, axis=0)):
            edge = tl.load(edges_ptr + i + k, mask=k < run, other=0)
            total += tl.load(
                marginal_ptr + edge[None, :], mask=valid & (k < run)[None, :], other=0.0
            )
        tl.store(d_score_ptr, d_score - total * coefficient, mask=mask)
    if result_ptr is not None:
        tl.debug_barrier()  # other threads stored what this one reads
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            offset, mask = (row * V)[:, None] + v[None, :], (t < T)[:, None] & (v < V)[None, :]
            d_score = tl.load(d_scores_ptr + offset, mask=mask)
            tl.store(result_ptr + offset, d_score.to(result_ptr.dtype.element_ty), mask=mask)
