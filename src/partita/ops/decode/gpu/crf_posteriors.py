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
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Sum the posteriors of the edges into the states that end in each base, after one step."""
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
    row_ptr = by_base_ptr + (t * N + n) * bases
    tl.store(row_ptr + b, tl.sum(total, axis=0), mask=b < bases)


@triton.jit(do_not_specialize=["T", "N"])
def ctc_crf_base_sums_kernel(
    posteriors_ptr,  # [T, N, P] fp32, of states or sums of states that end in base p % BASES
    lengths_ptr,  # [N]
    by_base_ptr,  # [T, N, BASES] fp64
    T,
    N,
    P,
    BASES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Sum the posteriors of states by the last base, and divide them by their sum, for ROWS steps.

    The steps of the sequences are in the order of memory.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t, n, exists = row // N, row % N, row // N < T
    length = tl.load(lengths_ptr + n)
    # A length out of range has no steps.
    inside = exists & (t < length) & (length <= T)
    r, b = tl.arange(0, BLOCK_R)[None, :, None], tl.arange(0, BLOCK_B)[None, None, :]
    ptrs = posteriors_ptr + row[:, None, None] * P + (r * BASES + b)
    by_base = tl.zeros([ROWS, BLOCK_B], tl.float64)
    for first in range(0, P // BASES, BLOCK_R):
        mask = inside[:, None, None] & (first + r < P // BASES) & (b < BASES)
        posterior = tl.load(ptrs + first * BASES, mask=mask, other=0.0)
        by_base += tl.sum(posterior.to(tl.float64), axis=1)
    whole = tl.sum(by_base, axis=1)[:, None]
    by_base = by_base / tl.where(whole == 0.0, 1.0, whole)
    b = tl.arange(0, BLOCK_B)[None, :]
    result_ptrs = by_base_ptr + row[:, None] * BASES + b
    tl.store(result_ptrs, by_base, mask=exists[:, None] & (b < BASES))


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
            stay_ptrs = marginals_ptr + c.to(tl.int64) * stride_c
            posterior = tl.load(stay_ptrs, mask=mask, other=0.0).to(tl.float64)
            # The k-mer j x moves to the k-mers x e through their column 1 + j.
            move_ptrs = marginals_ptr + (1 + c // (C // bases)).to(tl.int64) * stride_a
            for base in range(bases):
                offset = (c * bases % C + base).to(tl.int64) * stride_c
                posterior += tl.load(move_ptrs + offset, mask=mask, other=0.0).to(tl.float64)
        posterior = tl.where(length > 0, posterior, 1.0 / tl.full([BLOCK], C, tl.float64))
        tl.store(first_ptr + c, posterior, mask=c < C)
