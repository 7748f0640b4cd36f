"""The kernel that subtracts the marginals of the target lattice from the gradient of all paths."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "N", "E", "V"])
def crf_subtract_kernel(
    scale_ptr,  # [N]
    marginals_ptr,  # [T, N, E], one column for each edge of the lattice
    first_edge_ptr,  # [N, V] int32, the first edge that reads each score, or -1
    repeats_ptr,  # [N] int32, how many more edges may read one score
    next_edge_ptr,  # [N, E] int32, the next edge that reads the same score, or -1
    d_scores_ptr,  # [T, N, V], read and written
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
    scale = tl.load(scale_ptr + n)
    valid = (t < T)[:, None]  # [ROWS, 1]
    repeats = tl.load(repeats_ptr + n)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)  # [BLOCK]
        edge = tl.load(first_edge_ptr + n * V + v, mask=v < V, other=-1)
        has_edge = (edge >= 0)[None, :]  # [1, BLOCK]
        total = tl.zeros([ROWS, BLOCK], marginals_ptr.dtype.element_ty)
        d_score_ptr = d_scores_ptr + (row * V)[:, None] + v[None, :]
        before = tl.load(d_score_ptr, mask=valid & has_edge, other=0.0)
        for _ in range(repeats + 1):
            total += tl.load(
                marginals_ptr + (row * E)[:, None] + edge[None, :],
                mask=valid & (edge >= 0)[None, :],
                other=0.0,
            )
            edge = tl.load(next_edge_ptr + n * E + edge, mask=edge >= 0, other=-1)
        tl.store(d_score_ptr, before - total * scale, mask=valid & has_edge)
