"""CTC's first scan: α over the first half of the steps and β over the second half.

The two directions are separate programs and meet at the middle, which halves the number of
dependent steps. Each program scans one chunk of 32 target positions (see `lattice.py`). At each
step, α hands the state of a chunk's last label to the next chunk, and β hands what enters the last
label of the previous chunk; the receiver runs a block of steps behind the sender. With SAVE, the
states before each eighth step are saved for the posterior scan. The states at the middle are always
saved, after those of the blocks; the partition function and the posteriors start from them.
"""

from typing import NamedTuple

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
from .scores import optional, row_scores
from .steps import (
    EmissionRows,
    SavedStates,
    advance,
    await_carries,
    carry_links,
    chunk_source,
    decode_emissions,
    first_scan_half,
    prefetch_carries,
    prefetch_emissions,
)


@triton.jit
def scan_step(state, label, index, block, FORWARD: tl.constexpr, FP64: tl.constexpr):
    """Send the carry of a step, and return the states after it; see `advance`."""
    sent_ptr, is_sent, can_skip, carries, blanks, lane = block
    store_carry(sent_ptr + index, state, can_skip, is_sent, FORWARD, FP64)
    return advance(state, carries, blanks, label, index, can_skip, lane, FORWARD, FP64)[1]


@triton.jit
def scan_block(
    p,
    state,
    overflow,
    words,
    loaded,
    source,
    half,
    can_skip,
    saved,
    links,
    is_boundary_lane,
    lane,
    FORWARD: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """Take the steps of the block at padded step p, and load the next block.

    `words` are the loaded carries of the block and `loaded` its emissions. Returns the states and
    the overflow after the block, and the carries and emissions of the next one. This is a function
    because Triton translates the body of a loop two times.
    """
    if not FP64:
        words = await_carries(words, links, p, lane, BLOCK_T, FP64)
    emissions, block_overflow = decode_emissions(
        loaded, source, p, half.padding, lane, BLOCK_T, FP64, TABLE_WIDTH
    )
    carries, overflow = words, overflow + block_overflow
    loaded = prefetch_emissions(source, half, p + BLOCK_T, lane, FORWARD, BLOCK_T, TABLE_WIDTH)
    has_carries = links.has_previous & (p + BLOCK_T < half.steps + half.padding)
    words = prefetch_carries(links.received_ptr, p + BLOCK_T, has_carries, lane, BLOCK_T, FP64)
    if SAVE and p % 8 == 0:
        store_states(saved.ptr + p // 8 * saved.block_stride, state, lane, FP64)
    index = lane * 0
    block = (links.sent_ptr + p, is_boundary_lane, can_skip, carries, emissions.blank, lane)
    for u in tl.static_range(BLOCK_T):
        state = scan_step(state, emissions.label[u], index, block, FORWARD, FP64)
        index += 1
    return state, overflow, words, loaded


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
    is_boundary_lane = (lane == (31 if FORWARD else 0)) & links.has_next
    overflow = lane.to(tl.float32) * 0.0
    # A step 0 that is no constant leaves one translation of these functions, not two.
    first, has_carries = half.steps * 0, links.has_previous & (half.steps > 0)
    loaded = prefetch_emissions(source, half, first, lane, FORWARD, BLOCK_T, TABLE_WIDTH)
    words = prefetch_carries(links.received_ptr, first, has_carries, lane, BLOCK_T, FP64)
    for p in range(0, half.steps + half.padding, BLOCK_T):
        state, overflow, words, loaded = scan_block(
            p,
            state,
            overflow,
            words,
            loaded,
            source,
            half,
            can_skip,
            saved,
            links,
            is_boundary_lane,
            lane,
            FORWARD,
            SAVE,
            BLOCK_T,
            FP64,
            TABLE_WIDTH,
        )
    return state, overflow


class ForwardMemory(NamedTuple):
    """The memory of a sequence for one direction.

    Fields:
        saved_ptr: saved states, `[num_blocks + 1, N, num_chunks, 2, 32]`.
        carries_ptr: carries, `[num_chunks, N, carry_steps]`.
        block_stride: offset from the states of a block to those of the next block.
        chunk_stride: offset from the carries of a chunk to those of the next chunk.
        num_blocks: blocks of eight steps in a half.
    """

    saved_ptr: tl.tensor
    carries_ptr: tl.tensor
    block_stride: tl.tensor
    chunk_stride: tl.tensor
    num_blocks: tl.tensor


@triton.jit
def scan_chunk(
    target,
    memory,
    c,
    rows,
    lane,
    SAVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """Scan chunk c of a target, counted in the scan's direction, up to the middle.

    `rows` are the sequence's logits or emissions. Returns the flags of what failed.
    """
    direction, last = target.direction, target.target_len // 32
    chunk = tl.where(direction == 0, c, last - c)
    chunk_ptr = memory.saved_ptr + chunk * 64
    sent_ptr = memory.carries_ptr + chunk * memory.chunk_stride
    lattice, invalid_label = load_chunk(
        target.labels_ptr, chunk * 32, target.target_len, target.C, target.star, lane
    )
    source = chunk_source(rows, lattice, target.blank, target.limit, FP64, TABLE_WIDTH)
    end = tl.where(direction == 0, 0, target.target_len)
    start = boundary_states(chunk * 32 + lane, end, lane, FP64)
    saved = SavedStates(chunk_ptr, memory.block_stride)
    if direction == 0:
        state, overflow = scan_half(
            source,
            first_scan_half(target.length, rows.stride_t, True, BLOCK_T),
            lattice.can_skip,
            start,
            saved,
            carry_links(sent_ptr, memory.chunk_stride, c, last, True),
            lane,
            True,
            SAVE,
            BLOCK_T,
            FP64,
            TABLE_WIDTH,
        )
    else:
        state, overflow = scan_half(
            source,
            first_scan_half(target.length, rows.stride_t, False, BLOCK_T),
            lattice.can_skip,
            start,
            saved,
            carry_links(sent_ptr, memory.chunk_stride, c, last, False),
            lane,
            False,
            SAVE,
            BLOCK_T,
            FP64,
            TABLE_WIDTH,
        )
    store_states(chunk_ptr + memory.num_blocks * memory.block_stride, state, lane, FP64)
    return tl.max(tl.where(overflow == overflow, 0, 1) | tl.where(invalid_label, 2, 0), axis=0)


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
    priors_ptr,  # [C], or None without priors and for a table, which has them
    maxima_ptr,  # [T, N], or None without a star, for a table and for log-probabilities
    sums_ptr,  # [T, N], or None likewise
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
    prior_scale,  # the bits of an fp64 number, or None without priors
    star,  # the label that is the star, or None
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
    lane, last, begin, end = lane_index(LAYOUT), target_len // 32, index, index + 1
    if FP64:
        end = tl.where(ALL_FP64 | (flags == NEEDS_FP64), last + 1, 0)
    block_stride, chunk_stride = (N.to(tl.int64) * num_chunks) * 64, N.to(tl.int64) * carry_steps
    saved_ptr += (direction * (num_blocks + 1)) * block_stride + n * num_chunks * 64
    carries_ptr += direction * num_chunks * chunk_stride + n * carry_steps
    memory = ForwardMemory(saved_ptr, carries_ptr, block_stride, chunk_stride, num_blocks)
    target = TargetScan(
        labels_ptr + offset, direction, length, target_len, C, blank, limit, optional(star)
    )
    priors, normalizers = row_scores(priors_ptr, prior_scale, maxima_ptr, sums_ptr, n, N)
    rows = EmissionRows(source_ptr + n * stride_n, stride_t, stride_c, priors, normalizers)
    for c in range(begin, tl.minimum(end, last + 1)):
        new_flags = scan_chunk(target, memory, c, rows, lane, SAVE, BLOCK_T, FP64, TABLE_WIDTH)
        if new_flags > 0:
            tl.atomic_or(flags_ptr + n, new_flags, sem="relaxed")
        if FP64:
            # The next chunk of this program reads carries that other threads have just stored.
            tl.debug_barrier()


ctc_forward_scan_gluon_kernel = gluon.jit(ctc_forward_scan_kernel.fn, do_not_specialize=SIZES)
FORWARD_SCAN = LaneKernel(ctc_forward_scan_kernel, ctc_forward_scan_gluon_kernel)
