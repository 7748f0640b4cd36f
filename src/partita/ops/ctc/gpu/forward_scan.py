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
    LaneStates,
    emit,
    load_chunk,
    load_lengths,
    outgoing_carry,
    program_chunk,
    store_states,
    sum_predecessors,
)
from .state import constant_state, select
from .steps import (
    CarryLinks,
    EmissionSource,
    SavedStates,
    await_carries,
    carry_at,
    decode_emissions,
    half_steps,
    prefetch_carries,
    prefetch_emissions,
)


@triton.jit
def scan_half(
    source,
    half,
    can_skip,
    state,
    saved,
    links,
    lane,
    FORWARD: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """Scan half of the steps for one chunk of the target.

    Returns the states after the last step, and a tensor `[32]` that is NaN in each lane that met a
    logit beyond the limit.
    """
    is_boundary_lane, overflow = (
        (lane == (31 if FORWARD else 0)) & links.has_next,
        lane.to(tl.float32) * 0.0,
    )
    loaded = prefetch_emissions(source, half, 0, lane, FORWARD, BLOCK_T, TABLE_WIDTH)
    words = prefetch_carries(
        links.received_ptr, 0, links.has_previous & (half.steps > 0), lane, BLOCK_T, FP64
    )
    padded_steps = half.steps + half.padding
    for p in range(0, padded_steps, BLOCK_T):
        if not FP64:
            words = await_carries(words, links, p, lane, BLOCK_T, FP64)
        emissions, block_overflow = decode_emissions(
            loaded, source, p, half.padding, lane, BLOCK_T, FP64, TABLE_WIDTH
        )
        carries, overflow = words, overflow + block_overflow
        loaded = prefetch_emissions(source, half, p + BLOCK_T, lane, FORWARD, BLOCK_T, TABLE_WIDTH)
        has_carries = links.has_previous & (p + BLOCK_T < padded_steps)
        words = prefetch_carries(links.received_ptr, p + BLOCK_T, has_carries, lane, BLOCK_T, FP64)
        if SAVE and p % 8 == 0:
            store_states(saved.ptr + p // 8 * saved.block_stride, state, lane, FP64)
        for u in tl.static_range(BLOCK_T):
            tl.store(
                links.sent_ptr + p + u + lane * 0,
                outgoing_carry(state, can_skip, FORWARD, FP64),
                mask=is_boundary_lane,
            )
            carry = carry_at(carries, u, lane, FP64)
            incoming = sum_predecessors(state, can_skip, carry, lane, FORWARD, FP64)
            state = emit(incoming, emissions, u, lane, FP64)
    return state, overflow


@triton.jit(do_not_specialize=SIZES)
def ctc_forward_scan_kernel(
    source_ptr,  # [T, N, C] logits, or [N, 24 + T + 24, TABLE_WIDTH] emissions as words
    labels_ptr,  # [M]
    offsets_ptr,  # [N]
    input_lengths_ptr,  # [N]
    target_lengths_ptr,  # [N]
    saved_ptr,  # [2, num_blocks + 1, N, num_chunks, 2, 32] int64
    carries_ptr,  # [2, num_chunks, N, carry_steps] int64, zero
    flags_ptr,  # [N] int64, zero
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
    limit,
    stride_t,
    stride_n,
    stride_c,
    SAVE: tl.constexpr,  # whether to save the states before each eighth step
    BLOCK_T: tl.constexpr,  # steps that are loaded together
    FP64: tl.constexpr,  # whether this run has states in fp64
    ALL_FP64: tl.constexpr,  # whether all sequences have; otherwise those flagged NEEDS_FP64
    TABLE_WIDTH: tl.constexpr,  # row length of the table, 0 for logits
    LAYOUT: tl.constexpr,
):
    """Scan α up to the middle step and β down to it, and flag the sequences that fail."""
    index, n, direction = program_chunk(tile_counter_ptr, N)
    flags = tl.load(flags_ptr + n)
    length, target_len, offset, invalid = load_lengths(
        n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, T, max_target_len, M
    )
    if invalid:
        tl.atomic_or(flags_ptr + n, INVALID, sem="relaxed")
    middle, last, begin, end = length // 2, target_len // 32, index, index + 1
    if FP64:
        end = tl.where(ALL_FP64 | (flags == NEEDS_FP64), last + 1, 0)
    lane = lane_index(LAYOUT)
    block_stride, chunk_stride = (N.to(tl.int64) * num_chunks) * 64, N.to(tl.int64) * carry_steps
    saved_ptr += (direction * (num_blocks + 1)) * block_stride + n * num_chunks * 64
    carries_ptr += direction * num_chunks * chunk_stride + n * carry_steps
    source_ptr += n * stride_n
    for c in range(begin, tl.minimum(end, last + 1)):
        chunk = tl.where(direction == 0, c, last - c)
        chunk_ptr, sent_ptr, zero = (
            saved_ptr + chunk * 64,
            carries_ptr + chunk * chunk_stride,
            constant_state(0, lane, FP64),
        )
        lattice, invalid_label = load_chunk(labels_ptr + offset, chunk * 32, target_len, C, lane)
        source = EmissionSource(
            source_ptr + lattice.label.to(tl.int64) * stride_c,
            source_ptr + (n * 0 + blank) * stride_c,
            lattice.has_label,
            limit,
        )
        start = select(
            chunk * 32 + lane == tl.where(direction == 0, 0, target_len),
            constant_state(1, lane, FP64),
            zero,
            FP64,
        )
        if direction == 0:
            end_state, overflow = scan_half(
                source,
                half_steps(length * 0, middle, stride_t, True, BLOCK_T),
                lattice.can_skip,
                LaneStates(start, zero),
                SavedStates(chunk_ptr, block_stride),
                CarryLinks(sent_ptr, sent_ptr - chunk_stride, c < last, c > 0),
                lane,
                True,
                SAVE,
                BLOCK_T,
                FP64,
                TABLE_WIDTH,
            )
        else:
            end_state, overflow = scan_half(
                source,
                half_steps(tl.maximum(length - 1, 0), length - middle, stride_t, False, BLOCK_T),
                lattice.can_skip,
                LaneStates(start, zero),
                SavedStates(chunk_ptr, block_stride),
                CarryLinks(sent_ptr, sent_ptr + chunk_stride, c < last, c > 0),
                lane,
                False,
                SAVE,
                BLOCK_T,
                FP64,
                TABLE_WIDTH,
            )
        store_states(chunk_ptr + num_blocks * block_stride, end_state, lane, FP64)
        new_flags = tl.max(
            tl.where(overflow == overflow, 0, 1) | tl.where(invalid_label, 2, 0), axis=0
        )
        if new_flags > 0:
            tl.atomic_or(flags_ptr + n, new_flags, sem="relaxed")
        if FP64:
            # The next chunk of this program reads carries that other threads have just stored.
            tl.debug_barrier()


ctc_forward_scan_gluon_kernel = gluon.jit(ctc_forward_scan_kernel.fn, do_not_specialize=SIZES)
FORWARD_SCAN = LaneKernel(ctc_forward_scan_kernel, ctc_forward_scan_gluon_kernel)
