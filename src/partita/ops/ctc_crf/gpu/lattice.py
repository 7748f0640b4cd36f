"""The kernels that build the target lattice of each sequence and gather its scores."""

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
    unit_ptr,  # [N] fp64, ones: the gradient of log Z that gives marginals
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
    tl.store(unit_ptr + n, 1.0)
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
