"""The kernels of prefix beam search of CTC-CRF: the search, and the trace of its best path."""

import triton
import triton.language as tl

from .crf_beam import (
    BUFFER_INTEGERS,
    EVENT,
    HASHES,
    INTEGERS,
    NUMBERS,
    STATE,
    KmerMemory,
    KmerSizes,
    KmerStep,
    all_candidates,
    enter,
    extend,
    order_best,
    start,
    stay,
    store_best,
)
from .greedy import load_length


@triton.jit(
    do_not_specialize=["T", "stride_t", "stride_n", "stride_c", "stride_a", "later_t", "hash_mask"]
)
def ctc_crf_beam_search_kernel(
    scores_ptr,  # [T, N, C, A]
    later_ptr,  # [T + 1, N, C] fp64
    input_lengths_ptr,  # [N]
    numbers_ptr,  # [N, 8, BLOCK_W] fp64; see `KmerMemory`
    hashes_ptr,  # [N, 4, BLOCK_W] int64
    integers_ptr,  # [N, 15, BLOCK_W] int32
    children_ptr,  # [N, BLOCK_W, bases] int32
    events_ptr,  # [N, T, BLOCK_W] int64
    parents_ptr,  # [N, T, BLOCK_W] int32
    T,
    C,
    bases,
    width,
    hash_mask: tl.int64,
    stride_t,
    stride_n,
    stride_c,
    stride_a,
    later_t,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Search the prefixes of one sequence. The buffer of the last beam is the length modulo 2."""
    n = tl.program_id(0).to(tl.int64)
    length, _ = load_length(input_lengths_ptr, n, T)
    size = KmerSizes(C, bases, C // bases, width, hash_mask)
    memory = KmerMemory(
        numbers_ptr + n * NUMBERS * BLOCK_W,
        hashes_ptr + n * HASHES * BLOCK_W,
        integers_ptr + n * INTEGERS * BLOCK_W,
        children_ptr + n * BLOCK_W * bases,
        events_ptr + n * T * BLOCK_W,
        parents_ptr + n * T * BLOCK_W,
    )
    scores_ptr += n * stride_n
    later_ptr += n * C
    start(memory, size, later_ptr, BLOCK_W, BLOCK_P, BLOCK_J)
    for t in range(0, length):
        t64, buffer = tl.full([], t, tl.int64), t % 2
        row_ptr, row_later_ptr = scores_ptr + t64 * stride_t, later_ptr + (t64 + 1) * later_t
        step = KmerStep(tl.full([], t, tl.int32), row_ptr, stride_c, stride_a, row_later_ptr)
        ranks = extend(memory, size, step, buffer, BLOCK_W, BLOCK_P)
        stay(memory, size, step, buffer, BLOCK_W, BLOCK_J)
        tl.debug_barrier()
        ranks = all_candidates(memory, size, step, ranks, BLOCK_W, BLOCK_P)
        candidates = store_best(memory, size, ranks, tl.arange(0, BLOCK_P), BLOCK_W)
        tl.debug_barrier()
        order_best(memory, candidates, BLOCK_W, BLOCK_J)
        tl.debug_barrier()
        enter(memory, size, step, buffer, BLOCK_W)
        tl.debug_barrier()


@triton.jit
def store_stays(states_ptr, edges_ptr, N, first, last, state, edge, BLOCK: tl.constexpr):
    """Write the state after the steps from `first` to `last` - 1, and the edge that stays in it."""
    for block in range(first, last, BLOCK):
        t = (block + tl.arange(0, BLOCK)).to(tl.int64)
        mask, value = t < last, tl.zeros([BLOCK], tl.int64)
        tl.store(states_ptr + (t + 1) * N, value + state, mask=mask)
        tl.store(edges_ptr + t * N, value + edge, mask=mask)


@triton.jit(do_not_specialize=["T", "N", "C", "bases"])
def ctc_crf_beam_trace_kernel(
    integers_ptr,  # [N, 15, BLOCK_W] int32
    events_ptr,  # [N, T, BLOCK_W] int64
    input_lengths_ptr,  # [N]
    states_ptr,  # [T + 1, N] int64
    edges_ptr,  # [T, N] int64
    T,
    N,
    C,
    bases,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the best path of the best prefix of one sequence, from its last event to its first."""
    n = tl.program_id(0).to(tl.int64)
    length, valid = load_length(input_lengths_ptr, n, T)
    integers_ptr += n * INTEGERS * BLOCK_W
    beam_ptr = integers_ptr + (length % 2) * BUFFER_INTEGERS * BLOCK_W
    state = tl.load(beam_ptr + STATE * BLOCK_W).to(tl.int64)
    event = tl.load(beam_ptr + EVENT * BLOCK_W)
    valid = valid & (state >= 0)
    A, states_ptr, edges_ptr = bases + 1, states_ptr + n, edges_ptr + n
    t = tl.where(valid, length, 0)
    store_stays(states_ptr, edges_ptr, N, t, T, -1, -1, BLOCK)
    event, events_ptr = tl.where(valid, event, -1), events_ptr + n * T * BLOCK_W
    # The word of an event has the event before it and its own state, so one load follows another.
    word = tl.load(events_ptr + event, mask=event >= 0, other=0)
    while event >= 0:
        step, event = event // BLOCK_W, (word >> 32).to(tl.int32)
        word = tl.load(events_ptr + event, mask=event >= 0, other=0)
        before = tl.where(event >= 0, word & 0xFFFFFFFF, (-1 - event).to(tl.int64))
        store_stays(states_ptr, edges_ptr, N, step + 1, t, state, state * A, BLOCK)
        tl.store(states_ptr + (step + 1).to(tl.int64) * N, state)
        tl.store(edges_ptr + step.to(tl.int64) * N, state * A + 1 + before // (C // bases))
        state, t = before, step
    store_stays(states_ptr, edges_ptr, N, 0, t, state, state * A, BLOCK)
    tl.store(states_ptr, tl.where(valid, state, -1))
