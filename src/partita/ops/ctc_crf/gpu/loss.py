"""The kernels that reduce the losses, and that subtract the target's marginals from their gradient.

Several edges of a lattice may read one score. So the edges of each sequence are sorted by score
once, and each score subtracts the sum over its run of edges, always in the same order.
"""

from typing import NamedTuple

import triton
import triton.language as tl


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
