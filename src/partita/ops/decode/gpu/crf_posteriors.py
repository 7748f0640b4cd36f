"""The posteriors that qualities need: of the last base after each step, and of the first states.

They are sums of posteriors of edges, or of posteriors of states where a kernel has stored these.
"""

import triton
import triton.language as tl

from .greedy import load_length


@triton.jit(
    do_not_specialize=["T", "N", "C", "A", "bases", "stride_t", "stride_n", "stride_c", "stride_a"]
)
def ctc_crf_base_posteriors_kernel(
    marginals_ptr,  # [T, N, C, A]
    lengths_ptr,  # [N]
    by_base_ptr,  # [T, N, bases] fp64
    T,
    N,
    C,
    A,
    bases,
    stride_t,
    stride_n,
    stride_c,
    stride_a,
    NORMALIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Sum the posteriors of the states that end in each base, after one step of one sequence.

    A state's posterior is the sum over the A edges into it; states alone have A = 1.
    """
    t, n = (tl.program_id(0) // N).to(tl.int64), (tl.program_id(0) % N).to(tl.int64)
    length, _ = load_length(lengths_ptr, n, T)
    b, r = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_R)
    rows = tl.where(t < length, C // bases, 0)
    marginals_ptr += t * stride_t + n * stride_n
    total = tl.zeros([BLOCK_R, BLOCK_B], tl.float64)
    for first in range(0, rows, BLOCK_R):
        mask = ((first + r) < rows)[:, None] & (b < bases)[None, :]
        c = ((first + r) * bases)[:, None] + b[None, :]
        ptrs = marginals_ptr + c.to(tl.int64) * stride_c
        for _edge in range(A):
            total += tl.load(ptrs, mask=mask, other=0.0).to(tl.float64)
            ptrs += stride_a
    by_base = tl.sum(total, axis=0)  # [BLOCK_B]
    if NORMALIZE:
        whole = tl.sum(by_base, axis=0)
        by_base = by_base / tl.where(whole == 0.0, 1.0, whole)
    row_ptr = by_base_ptr + (t * N + n) * bases
    tl.store(row_ptr + b, by_base, mask=b < bases)


@triton.jit
def leaving_posteriors(marginals_ptr, stride_c, stride_a, c, mask, C, bases):
    """Return the posteriors of k-mers before the first step, given those of its edges."""
    stay_ptr = marginals_ptr + c.to(tl.int64) * stride_c
    total = tl.load(stay_ptr, mask=mask, other=0.0).to(tl.float64)
    # The k-mer j x moves to the k-mers x e through their column 1 + j.
    move_ptr = marginals_ptr + (1 + c // (C // bases)).to(tl.int64) * stride_a
    for base in range(bases):
        offset = (c * bases % C + base).to(tl.int64) * stride_c
        total += tl.load(move_ptr + offset, mask=mask, other=0.0).to(tl.float64)
    return total


@triton.jit(do_not_specialize=["T", "C", "bases", "stride_n", "stride_c", "stride_a"])
def ctc_crf_first_posteriors_kernel(
    marginals_ptr,  # [N, C, A], those of the first step, or [N, C] of the states before it
    lengths_ptr,  # [N]
    first_ptr,  # [N, C] fp64
    T,
    C,
    bases,
    stride_n,
    stride_c,
    stride_a,
    FROM_STATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the posterior of each k-mer before the first step of one sequence.

    A sequence without steps may start in any k-mer. Posteriors of states are divided by their sum.
    """
    n = tl.program_id(0).to(tl.int64)
    length, _ = load_length(lengths_ptr, n, T)
    marginals_ptr += n * stride_n
    first_ptr += n * C
    states = tl.where(length > 0, C, 0)  # those that are loaded
    total = tl.zeros([BLOCK], tl.float64)
    if FROM_STATES:
        for block in range(0, states, BLOCK):
            c = block + tl.arange(0, BLOCK)
            total += tl.load(marginals_ptr + c.to(tl.int64) * stride_c, mask=c < C, other=0.0)
    whole = tl.sum(total, axis=0)
    scale = 1.0 / tl.where(whole == 0.0, 1.0, whole)
    for block in range(0, C, BLOCK):
        c = block + tl.arange(0, BLOCK)
        mask = c < states
        if FROM_STATES:
            ptrs = marginals_ptr + c.to(tl.int64) * stride_c
            posterior = tl.load(ptrs, mask=mask, other=0.0).to(tl.float64) * scale
        else:
            posterior = leaving_posteriors(marginals_ptr, stride_c, stride_a, c, mask, C, bases)
        posterior = tl.where(length > 0, posterior, 1.0 / tl.full([BLOCK], C, tl.float64))
        tl.store(first_ptr + c, posterior, mask=c < C)
