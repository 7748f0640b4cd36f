"""The kernels that subtract the target's marginals from the gradient of all paths.

Several edges of a lattice may read one score. So the edges of each sequence are sorted by score
once, and each score subtracts the sum over its run of edges, always in the same order.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["grad_stride", "N", "E"])
def crf_edge_order_kernel(
    grad_ptr,  # [N], or [] with the stride 0
    grad_stride,
    losses_ptr,  # [N] fp64
    target_lengths_ptr,  # [N] int64
    edge_index_ptr,  # [N, E] int32, the score that each edge reads, or -1
    coefficients_ptr,  # [N] fp64, the gradient of each sequence's loss
    order_ptr,  # [N, E] int32, the edges sorted by score
    runs_ptr,  # [N, E] int32, the number of edges of a score at the first of them, else 0
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
    tl.store(order_ptr + position, j, mask=j < E)
    is_first = (before == 0) & (index >= 0)
    tl.store(runs_ptr + position, tl.where(is_first, same, 0), mask=j < E)
    if tl.program_id(0) % blocks == 0:
        grad = tl.load(grad_ptr + n * grad_stride).to(tl.float64)
        if MEAN:
            length = tl.maximum(tl.load(target_lengths_ptr + n), 1)
            grad = grad / tl.cast(N, tl.float64) / length.to(tl.float64)
        # A sequence without a path has the gradient 0.
        impossible = tl.load(losses_ptr + n) == float("inf")
        tl.store(coefficients_ptr + n, tl.where(impossible, 0.0, grad))


@triton.jit
def store_rounded(d_scores_ptr, result_ptr, row, valid, V, BLOCK: tl.constexpr):
    """Round the gradient of whole rows, which this program has finished, to a half type."""
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        offset, mask = (row * V)[:, None] + v[None, :], valid[:, None] & (v < V)[None, :]
        d_score = tl.load(d_scores_ptr + offset, mask=mask)
        tl.store(result_ptr + offset, d_score.to(result_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "N", "E"])
def crf_subtract_kernel(
    coefficients_ptr,  # [N] fp64
    marginals_ptr,  # [T, N, E], those of the target lattice
    edge_index_ptr,  # [N, E] int32, the score that each edge reads, or -1
    order_ptr,  # [N, E] int32, the edges sorted by score
    runs_ptr,  # [N, E] int32, the number of edges of a score at the first of them, else 0
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
    """Subtract from each score of ROWS steps the marginals of all edges that read it, in order."""
    n = (tl.program_id(0) % N).to(tl.int64)
    t = (tl.program_id(0) // N).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    row = t * N + n  # [ROWS]
    # After the last step all marginals are 0. An invalid sequence has the gradient NaN already.
    valid = ((t < T) & (t < tl.load(lengths_ptr + n)))[:, None]  # [ROWS, 1]
    dtype: tl.constexpr = marginals_ptr.dtype.element_ty
    coefficient = tl.load(coefficients_ptr + n).to(dtype)
    marginal_ptr, order_ptr = marginals_ptr + (row * E)[:, None], order_ptr + n * E
    for start in range(0, E, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        run = tl.load(runs_ptr + n * E + i, mask=i < E, other=0)
        edge = tl.load(order_ptr + i, mask=run > 0, other=0)
        score = tl.load(edge_index_ptr + n * E + edge, mask=run > 0, other=0)
        mask = valid & (run > 0)[None, :]  # [ROWS, BLOCK]
        d_score_ptr = d_scores_ptr + (row * V)[:, None] + score[None, :]
        d_score = tl.load(d_score_ptr, mask=mask, other=0.0)
        total = tl.load(marginal_ptr + edge[None, :], mask=mask, other=0.0)
        for k in range(1, tl.max(run, axis=0)):
            edge = tl.load(order_ptr + i + k, mask=k < run, other=0)
            total += tl.load(
                marginal_ptr + edge[None, :], mask=valid & (k < run)[None, :], other=0.0
            )
        tl.store(d_score_ptr, d_score - total * coefficient, mask=mask)
    if result_ptr is not None:
        store_rounded(d_scores_ptr, result_ptr, row, t < T, V, BLOCK)
