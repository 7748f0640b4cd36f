"""CTC's first scan: α over the first half of the steps and β over the second half.

The two directions are separate programs and meet at the middle, which halves the number of
dependent steps. Each program scans one chunk of 32 target positions (see `lattice.py`). At each
step, α hands the state of a chunk's last label to the next chunk, and β hands what enters the last
label of the previous chunk; the receiver runs a block of steps behind the sender. With SAVE, the
states before each eighth step are saved for the posterior scan. The states at the middle are always
saved, after those of the blocks; the partition function and the posteriors start from them.
"""

import triton
import triton.language as tl
from triton.experimental import gluon

from .lanes import LaneKernel, lane_index
from .lattice import (
    INVALID,
    NEEDS_FP64,
    SIZES,
    TargetScan,
    boundary_states,
    load_chunk,
    load_lengths,
    program_chunk,
    store_carry,
    store_states,
)
from .scores import sequence_rows
from .steps import (
    CarryLinks,
    advance,
    await_carries,
    chunk_source,
    decode_emissions,
    first_scan_half,
    prefetch_carries,
    prefetch_emissions,
)


@triton.jit
def scan_half(
    target,
    states_ptr,  # words [2, 32], the saved states before the first step
    block_stride,  # offset from them to those of the next block of eight steps
    sent_ptr,  # the carries that the chunk sends, one for each step of the half
    chunk_stride,  # offset from them to those of the next chunk
    source,
    state,
    c,
    lane,
    FORWARD: tl.constexpr,
    SAVE: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """Scan half of the steps for chunk c of the target, counted in the direction of the scan.

    Returns the states after the last step, and a tensor `[32]` that is NaN in each lane that met a
    logit beyond the limit.
    """
    BLOCK_T: tl.constexpr = 1 if FP64 else 8
    half = first_scan_half(target.length, source.stride_t, FORWARD, BLOCK_T)
    last = target.target_len // 32
    received_ptr = sent_ptr - chunk_stride if FORWARD else sent_ptr + chunk_stride
    links = CarryLinks(sent_ptr, received_ptr, c < last, c > 0)
    is_sent = (lane == (31 if FORWARD else 0)) & links.has_next
    overflow, can_skip = lane.to(tl.float32) * 0.0, source.lattice.can_skip
    # A step 0 that is no constant leaves one translation of these functions, not two.
    first, has_carries = half.steps * 0, links.has_previous & (half.steps > 0)
    loaded = prefetch_emissions(source, half, first, lane, FORWARD, BLOCK_T, TABLE_WIDTH)
    words = prefetch_carries(links.received_ptr, first, has_carries, lane, BLOCK_T, FP64)
    for p in range(0, half.steps + half.padding, BLOCK_T):
        if not FP64:
            words = await_carries(words, links, p, lane, BLOCK_T, FP64)
        emissions, block_overflow = decode_emissions(
            loaded, source, p, half.padding, lane, BLOCK_T, FP64, TABLE_WIDTH
        )
        carries, overflow = words, overflow + block_overflow
        loaded = prefetch_emissions(source, half, p + BLOCK_T, lane, FORWARD, BLOCK_T, TABLE_WIDTH)
        more_carries = links.has_previous & (p + BLOCK_T < half.steps + half.padding)
        words = prefetch_carries(links.received_ptr, p + BLOCK_T, more_carries, lane, BLOCK_T, FP64)
        if SAVE and p % 8 == 0:
            store_states(states_ptr + p // 8 * block_stride, state, lane, FP64)
        index = lane * 0
        for u in tl.static_range(BLOCK_T):
            store_carry(links.sent_ptr + p + index, state, can_skip, is_sent, FORWARD, FP64)
            blanks, label = emissions.blank, emissions.label[u]
            state = advance(state, carries, blanks, label, index, can_skip, lane, FORWARD, FP64)[1]
            index += 1
    return state, overflow


@triton.jit(do_not_specialize=SIZES)
def ctc_forward_scan_kernel(
    scores,  # ScoreTensors; the normalizers are those of a star
    targets,  # TargetTensors
    saved,  # SavedScan
    tile_counter_ptr,  # [1] int64, zero, or None
    T,
    N,
    C,
    M,
    max_target_len,
    num_chunks,
    num_blocks,
    carry_steps,
    blank,
    stride_t,
    stride_n,
    stride_c,
    prior_scale,  # the bits of an fp64 number, or None without priors
    star,  # the label that is the star, or None
    SAVE: tl.constexpr,  # whether to save the states before each eighth step
    FP64: tl.constexpr,  # whether this run has states in fp64
    ALL_FP64: tl.constexpr,  # whether all sequences have; otherwise those flagged NEEDS_FP64
    TABLE_WIDTH: tl.constexpr,  # row length of the table, 0 for logits
    LAYOUT: tl.constexpr,
):
    """Scan α up to the middle step and β down to it, and flag the sequences that fail."""
    index, n, direction = program_chunk(tile_counter_ptr, N)
    flags = tl.load(saved.flags + n)
    length, target_len, offset, invalid = load_lengths(targets, n, T, max_target_len, M)
    if invalid:
        tl.atomic_or(saved.flags + n, INVALID, sem="relaxed")
    lane, last, begin, end = lane_index(LAYOUT), target_len // 32, index, index + 1
    if FP64:
        end = tl.where(ALL_FP64 | (flags == NEEDS_FP64), last + 1, 0)
    block_stride, chunk_stride = (N.to(tl.int64) * num_chunks) * 64, N.to(tl.int64) * carry_steps
    saved_ptr = saved.states + ((direction * (num_blocks + 1)) * block_stride + n * num_chunks * 64)
    carries_ptr = saved.carries + (direction * num_chunks * chunk_stride + n * carry_steps)
    target = TargetScan(targets.labels + offset, length, target_len, C, blank, scores.limit, star)
    rows = sequence_rows(scores, stride_t, stride_n, stride_c, prior_scale, n, N)
    for c in range(begin, tl.minimum(end, last + 1)):
        chunk = tl.where(direction == 0, c, last - c)
        states_ptr, sent_ptr = saved_ptr + chunk * 64, carries_ptr + chunk * chunk_stride
        lattice, invalid_label = load_chunk(target, chunk, lane)
        source = chunk_source(rows, lattice, target, FP64, TABLE_WIDTH)
        first_position = tl.where(direction == 0, 0, target_len)
        start = boundary_states(chunk * 32 + lane, first_position, lane, FP64)
        inputs = (target, states_ptr, block_stride, sent_ptr, chunk_stride, source, start, c, lane)
        if direction == 0:
            state, overflow = scan_half(*inputs, True, SAVE, FP64, TABLE_WIDTH)
        else:
            state, overflow = scan_half(*inputs, False, SAVE, FP64, TABLE_WIDTH)
        store_states(states_ptr + num_blocks * block_stride, state, lane, FP64)
        new_flags = tl.where(overflow == overflow, 0, 1) | tl.where(invalid_label, 2, 0)
        new_flags = tl.max(new_flags, axis=0)
        if new_flags > 0:
            tl.atomic_or(saved.flags + n, new_flags, sem="relaxed")
        if FP64:
            # The next chunk of this program reads carries that other threads have just stored.
            tl.debug_barrier()


ctc_forward_scan_gluon_kernel = gluon.jit(ctc_forward_scan_kernel.fn, do_not_specialize=SIZES)
FORWARD_SCAN = LaneKernel(ctc_forward_scan_kernel, ctc_forward_scan_gluon_kernel)
