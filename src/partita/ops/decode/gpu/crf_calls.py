"""The bases of a path over k-mers, with the posterior of each.

Qualities need two kinds of posteriors: of the last base after each step, and of the first k-mers.
They are sums of posteriors of edges, or of posteriors of states where a kernel has stored these.

Another kernel goes through the steps of a sequence, writes a base for each move, and takes the mean
over the steps of a base as a difference of sums over all steps up to its ends.
"""

import triton
import triton.language as tl

from ....primitives.gpu.memory import checked_length


@triton.jit(do_not_specialize=["T", "N", "C", "A", "bases"])
def ctc_crf_base_posteriors_kernel(
    marginals,  # StridedEdges [T, N, C, A]
    lengths_ptr,  # [N]
    by_base_ptr,  # [T, N, bases] fp64
    T,
    N,
    C,
    A,
    bases,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Sum the posteriors of the edges into the states that end in each base, after one step."""
    t, n = (tl.program_id(0) // N).to(tl.int64), (tl.program_id(0) % N).to(tl.int64)
    length, _ = checked_length(lengths_ptr, n, T, 0, 0)
    b, r = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_R)
    rows = tl.where(t < length, C // bases, 0)
    marginals_ptr = marginals.ptr + t * marginals.t + n * marginals.n
    total = tl.zeros([BLOCK_R, BLOCK_B], tl.float64)
    for first in range(0, rows, BLOCK_R):
        mask = ((first + r) < rows)[:, None] & (b < bases)[None, :]
        c = ((first + r) * bases)[:, None] + b[None, :]
        ptrs = marginals_ptr + c.to(tl.int64) * marginals.c
        for _edge in range(A):
            total += tl.load(ptrs, mask=mask, other=0.0).to(tl.float64)
            ptrs += marginals.k
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


@triton.jit(do_not_specialize=["T", "C", "bases"])
def ctc_crf_first_posteriors_kernel(
    marginals,  # StridedEdges [T, N, C, A], or of the states before the first step
    lengths_ptr,  # [N]
    first_ptr,  # [N, C] fp64
    T,
    C,
    bases,
    FROM_STATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the posterior of each k-mer before the first step of one sequence.

    A sequence without steps may start in any k-mer. Posteriors of states are divided by their sum.
    """
    n = tl.program_id(0).to(tl.int64)
    length, _ = checked_length(lengths_ptr, n, T, 0, 0)
    marginals_ptr = marginals.ptr + n * marginals.n
    first_ptr += n * C
    states = tl.where(length > 0, C, 0)  # those that are loaded
    total = tl.zeros([BLOCK], tl.float64)
    if FROM_STATES:
        for block in range(0, states, BLOCK):
            c = block + tl.arange(0, BLOCK)
            total += tl.load(marginals_ptr + c.to(tl.int64) * marginals.c, mask=c < C, other=0.0)
    whole = tl.sum(total, axis=0)
    scale = 1.0 / tl.where(whole == 0.0, 1.0, whole)
    for block in range(0, C, BLOCK):
        c = block + tl.arange(0, BLOCK)
        mask = c < states
        if FROM_STATES:
            ptrs = marginals_ptr + c.to(tl.int64) * marginals.c
            posterior = tl.load(ptrs, mask=mask, other=0.0).to(tl.float64) * scale
        else:
            stay_ptrs = marginals_ptr + c.to(tl.int64) * marginals.c
            posterior = tl.load(stay_ptrs, mask=mask, other=0.0).to(tl.float64)
            # The k-mer j x moves to the k-mers x e through their column 1 + j.
            move_ptrs = marginals_ptr + (1 + c // (C // bases)).to(tl.int64) * marginals.k
            for base in range(bases):
                offset = (c * bases % C + base).to(tl.int64) * marginals.c
                posterior += tl.load(move_ptrs + offset, mask=mask, other=0.0).to(tl.float64)
        posterior = tl.where(length > 0, posterior, 1.0 / tl.full([BLOCK], C, tl.float64))
        tl.store(first_ptr + c, posterior, mask=c < C)


@triton.jit(do_not_specialize=["T", "N", "C", "bases", "state_len"])
def ctc_crf_calls_kernel(
    by_base_ptr,  # [T, N, bases] fp64, the posteriors of the last base after each step
    first_posteriors_ptr,  # [N, C] fp64, those of the k-mers before the first step
    states_ptr,  # [T + 1, N] int64, -1 where there is none
    edges_ptr,  # [T, N] int64
    lengths_ptr,  # [N]
    totals_ptr,  # [N, T + 1] fp64, the sums of the posteriors before each step
    calls,  # Basecalls, S = T + k
    T,
    N,
    C,
    bases,
    state_len,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the bases of one sequence."""
    n, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    S = T + state_len
    length, invalid = checked_length(lengths_ptr, n, T, 0, 0)
    first_state = tl.load(states_ptr + n)
    valid = ~invalid & (first_state >= 0)
    length = tl.where(valid, length, 0)
    states_ptr, edges_ptr = states_ptr + n, edges_ptr + n
    labels_ptr, log_probs_ptr = calls.labels + n * S, calls.log_probs + n * S
    steps_ptr, moves_ptr = calls.steps + n * S, calls.moves + n * T
    totals_ptr += n * (T + 1)
    dtype: tl.constexpr = log_probs_ptr.dtype.element_ty
    for first in range(0, S, BLOCK):  # no bases yet
        i = (first + tl.arange(0, BLOCK)).to(tl.int64)
        zero = tl.zeros([BLOCK], tl.int64)
        tl.store(labels_ptr + i, zero, mask=i < S)
        tl.store(steps_ptr + i, zero - 1, mask=i < S)
        tl.store(log_probs_ptr + i, zero.to(dtype), mask=i < S)
        tl.store(moves_ptr + i, zero != 0, mask=i < T)
    # The bases of the first k-mer, and the sums of the posteriors of the k-mers with them.
    first_posteriors_ptr += n * C
    power = tl.full([BLOCK_K], 1, tl.int32)
    for j in range(1, state_len):
        power = tl.where(k < state_len - j, power * bases, power)
    digit = (tl.maximum(first_state, 0).to(tl.int32) // power) % bases
    of_digit = tl.zeros([BLOCK_K], tl.float64)
    for block in range(0, C, BLOCK_C):
        c = block + tl.arange(0, BLOCK_C)
        of_state = tl.load(first_posteriors_ptr + c, mask=c < C, other=0.0)
        same = (c[:, None] // power[None, :]) % bases == digit[None, :]  # [BLOCK_C, BLOCK_K]
        of_digit += tl.sum(tl.where(same, of_state[:, None], 0.0), axis=0)
    tl.debug_barrier()
    # The label and the step of each move, and the sums of posteriors.
    by_base_ptr += n * bases
    moves, total = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float64)
    tl.store(totals_ptr, total)
    for first in range(0, length, BLOCK):
        t = (first + tl.arange(0, BLOCK)).to(tl.int64)
        mask = t < length
        edge = tl.load(edges_ptr + t * N, mask=mask, other=-1)
        state = tl.load(states_ptr + (t + 1) * N, mask=mask, other=0)
        base = state.to(tl.int32) % bases
        is_move = (edge >= 0) & (edge.to(tl.int32) % (bases + 1) > 0)
        index = state_len - 1 + moves + tl.cumsum(is_move.to(tl.int32), axis=0)
        tl.store(moves_ptr + t, is_move, mask=mask)
        tl.store(labels_ptr + index, (base + 1).to(tl.int64), mask=is_move)
        tl.store(steps_ptr + index, t, mask=is_move)
        offset = t * N * bases + tl.maximum(base, 0)
        posterior = tl.load(by_base_ptr + offset, mask=mask, other=0.0)
        tl.store(totals_ptr + t + 1, total + tl.cumsum(posterior, axis=0), mask=mask)
        moves += tl.sum(is_move.to(tl.int32), axis=0)
        total += tl.sum(posterior, axis=0)
    number = tl.where(valid, state_len + moves, 0)
    tl.store(calls.lengths + n, number.to(tl.int64))
    first_log_prob = tl.minimum(tl.log(of_digit), 0.0).to(dtype)
    tl.store(labels_ptr + k, (digit + 1).to(tl.int64), mask=(k < state_len) & valid)
    tl.store(log_probs_ptr + k, first_log_prob, mask=(k < state_len) & valid)
    tl.debug_barrier()
    for first in range(state_len, number, BLOCK):  # the bases after the first k-mer
        i = (first + tl.arange(0, BLOCK)).to(tl.int64)
        mask = i < number
        start = tl.load(steps_ptr + i, mask=mask, other=0)
        # A base ends where the next one starts, and the last one with the sequence.
        end = tl.load(steps_ptr + i + 1, mask=i + 1 < number, other=0)
        end = tl.where(i + 1 < number, end, length)
        mean = tl.load(totals_ptr + end, mask=mask, other=1.0)
        mean -= tl.load(totals_ptr + start, mask=mask, other=0.0)
        mean /= tl.maximum(end - start, 1).to(tl.float64)
        log_prob = tl.minimum(tl.log(mean), 0.0)
        tl.store(log_probs_ptr + i, log_prob.to(dtype), mask=mask)
