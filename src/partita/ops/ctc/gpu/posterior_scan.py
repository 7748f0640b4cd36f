"""CTC's second scan: α and β each continue through the other's half and give posteriors.

α starts from its states at the middle and goes on to the last step; β goes on to the first. The
other direction went through this half in the first scan, and its states are recomputed block by
block (see `recompute.py`). Each block is recomputed while the previous block is in use: the two
chains of dependent operations interleave, and neither waits for the other. Chunks of 32 positions
exchange carries as in the first scan.

A label's posterior is the product of what enters the label in one direction and its state in the
other. The products of a step carry a common factor, which the gradient divides out. They are stored
by label, `[32]` for each step and chunk, or summed by class if there are few classes.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon

from .lanes import LaneKernel, lane_index, sort_by_class
from .lattice import (
    NEEDS_FP64,
    SIZES,
    LaneStates,
    emit,
    load_chunk,
    load_lengths,
    outgoing_carry,
    program_chunk,
    sum_predecessors,
)
from .posterior_rows import PosteriorRows, store_posteriors
from .recompute import decode_block, prefetch_block
from .state import posterior_of, unpack_state
from .steps import (
    CarryLinks,
    EmissionSource,
    SavedCarries,
    SavedStates,
    await_carries,
    carry_at,
    half_steps,
    prefetch_carries,
)


@triton.jit
def scan_other_half(
    source,
    half,
    can_skip,
    state,
    saved,
    saved_carries,
    links,
    rows,
    exponent,
    lane,
    FORWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Scan the half of the other direction for one chunk, and store the posteriors of its steps.

    `half`, `saved` and `saved_carries` are in the order of the other direction, so this scan visits
    the blocks from last to first, and the steps of each block in reverse.
    """
    is_boundary_lane, last_block = (
        (lane == (31 if FORWARD else 0)) & links.has_next,
        half.steps + half.padding - BLOCK_T,
    )
    words = prefetch_carries(
        links.received_ptr, last_block, links.has_previous & (half.steps > 0), lane, BLOCK_T, FP64
    )
    loaded = prefetch_block(
        source,
        half,
        saved,
        saved_carries,
        last_block,
        lane,
        not FORWARD,
        BLOCK_T,
        FP64,
        TABLE_WIDTH,
    )
    emissions, other_state = decode_block(
        loaded,
        source,
        half,
        can_skip,
        saved_carries,
        last_block,
        lane,
        not FORWARD,
        BLOCK_T,
        FP64,
        TABLE_WIDTH,
    )
    other_states = ()  # the other direction's states after each step of the block
    for u in tl.static_range(BLOCK_T):
        carry = carry_at(loaded.carries, u, lane, FP64)
        incoming = sum_predecessors(other_state, can_skip, carry, lane, not FORWARD, FP64)
        other_state = emit(incoming, emissions, u, lane, FP64)
        other_states = other_states + (other_state,)
    loaded = prefetch_block(
        source,
        half,
        saved,
        saved_carries,
        last_block - BLOCK_T,
        lane,
        not FORWARD,
        BLOCK_T,
        FP64,
        TABLE_WIDTH,
    )
    for p in range(last_block, -1, -BLOCK_T):
        if not FP64:
            words = await_carries(words, links, p, lane, BLOCK_T, FP64)
        carries, other_carries = words, loaded.carries
        next_emissions, other_state = decode_block(
            loaded,
            source,
            half,
            can_skip,
            saved_carries,
            p - BLOCK_T,
            lane,
            not FORWARD,
            BLOCK_T,
            FP64,
            TABLE_WIDTH,
        )
        words = prefetch_carries(
            links.received_ptr, p - BLOCK_T, links.has_previous & (p > 0), lane, BLOCK_T, FP64
        )
        loaded = prefetch_block(
            source,
            half,
            saved,
            saved_carries,
            p - 2 * BLOCK_T,
            lane,
            not FORWARD,
            BLOCK_T,
            FP64,
            TABLE_WIDTH,
        )
        next_states, labels, blanks = (), (), ()
        for u in tl.static_range(BLOCK_T):
            tl.store(
                links.sent_ptr + p + (BLOCK_T - 1 - u) + lane * 0,
                outgoing_carry(state, can_skip, FORWARD, FP64),
                mask=is_boundary_lane,
            )
            carry = carry_at(carries, BLOCK_T - 1 - u, lane, FP64)
            incoming = sum_predecessors(state, can_skip, carry, lane, FORWARD, FP64)
            carry = carry_at(other_carries, u, lane, FP64)
            other_incoming = sum_predecessors(other_state, can_skip, carry, lane, not FORWARD, FP64)
            other_blank, other_label = other_states[BLOCK_T - 1 - u]  # type: ignore[var-annotated]
            labels = (posterior_of(incoming.label, other_label, exponent, FP64),) + labels
            blanks = (posterior_of(incoming.blank, other_blank, exponent, FP64),) + blanks
            state = emit(incoming, emissions, BLOCK_T - 1 - u, lane, FP64)
            other_state = emit(other_incoming, next_emissions, u, lane, FP64)
            next_states = next_states + (other_state,)
        store_posteriors(
            rows, labels, blanks, p, half.padding, lane, not FORWARD, BLOCK_T, GROUPS, WIDTH
        )
        emissions, other_states = next_emissions, next_states


class TargetScan(NamedTuple):
    """The values that the scans of all chunks of a sequence in one direction share.

    Fields:
        labels_ptr: the target's labels.
        direction: 0 for α, 1 for β.
        length: number of steps.
        target_len: number of labels.
        T: number of rows of logits.
        C: number of classes.
        blank: the class of the blank.
        limit: the greatest absolute value of a logit that has an emission.
    """

    labels_ptr: tl.tensor
    direction: tl.tensor
    length: tl.tensor
    target_len: tl.tensor
    T: tl.tensor
    C: tl.tensor
    blank: tl.tensor
    limit: tl.tensor


class PosteriorMemory(NamedTuple):
    """The memory of a sequence: what the first scan saved, and what this scan writes.

    Fields:
        saved_ptr: saved states of α, `[num_blocks + 1, N, num_chunks, 2, 32]`; β's follow.
        saved_carries_ptr: carries of the first scan, `[2, num_chunks, N, carry_steps]`.
        carries_ptr: carries of this scan in the same order.
        posteriors_ptr: `[num_chunks, T, WIDTH]`.
        blanks_ptr: `[num_chunks, T]`.
        block_stride: offset from the states of a block to those of the next block.
        chunk_stride: offset from the carries of a chunk to those of the next chunk.
        num_blocks: blocks of eight steps in a half.
        num_chunks: chunks of all targets.
    """

    saved_ptr: tl.tensor
    saved_carries_ptr: tl.tensor
    carries_ptr: tl.tensor
    posteriors_ptr: tl.tensor
    blanks_ptr: tl.tensor
    block_stride: tl.tensor
    chunk_stride: tl.tensor
    num_blocks: tl.tensor
    num_chunks: tl.tensor


@triton.jit
def scan_chunk(
    target,
    memory,
    c,
    source_ptr,
    stride_t,
    stride_c,
    exponent,
    lane,
    BLOCK_T: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Scan chunk c of a target, counted in the scan's direction, through the other half.

    `source_ptr` and its strides lead to the sequence's logits, or to its emissions.
    """
    direction, length, last = target.direction, target.length, target.target_len // 32
    middle, last_step, chunk = (
        length // 2,
        tl.maximum(length - 1, 0),
        tl.where(direction == 0, c, last - c),
    )
    num_blocks, block_stride, chunk_stride = (
        memory.num_blocks,
        memory.block_stride,
        memory.chunk_stride,
    )
    chunk_ptr, carried_ptr, sent_ptr = (
        memory.saved_ptr + chunk * 64,
        memory.saved_carries_ptr + chunk * chunk_stride,
        memory.carries_ptr + (direction * memory.num_chunks + chunk) * chunk_stride,
    )
    lattice = load_chunk(target.labels_ptr, chunk * 32, target.target_len, target.C, lane)[0]
    source = EmissionSource(
        source_ptr + lattice.label.to(tl.int64) * stride_c,
        source_ptr + (length.to(tl.int64) * 0 + target.blank) * stride_c,
        lattice.has_label,
        target.limit,
    )
    order, bounds = sort_by_class(lattice.label, lattice.has_label, lane, GROUPS)
    row = chunk.to(tl.int64) * target.T
    label_row_ptr, blank_row_ptr, middle_ptr = (
        memory.posteriors_ptr + row * WIDTH,
        memory.blanks_ptr + row,
        chunk_ptr + (num_blocks + direction * (num_blocks + 1)) * block_stride,
    )
    state = LaneStates(
        unpack_state(tl.load(middle_ptr + lane), FP64),
        unpack_state(tl.load(middle_ptr + 32 + lane), FP64),
    )
    if direction == 0:
        scan_other_half(
            source,
            half_steps(last_step, length - middle, stride_t, False, BLOCK_T),
            lattice.can_skip,
            state,
            SavedStates(chunk_ptr + (num_blocks + 1) * block_stride, block_stride),
            SavedCarries(carried_ptr + (memory.num_chunks + 1) * chunk_stride, chunk < last),
            CarryLinks(sent_ptr, sent_ptr - chunk_stride, c < last, c > 0),
            PosteriorRows(
                label_row_ptr + last_step.to(tl.int64) * WIDTH,
                blank_row_ptr + last_step,
                order,
                bounds,
                target.C,
            ),
            exponent,
            lane,
            True,
            BLOCK_T,
            FP64,
            TABLE_WIDTH,
            GROUPS,
            WIDTH,
        )
    else:
        scan_other_half(
            source,
            half_steps(length * 0, middle, stride_t, True, BLOCK_T),
            lattice.can_skip,
            state,
            SavedStates(chunk_ptr, block_stride),
            SavedCarries(carried_ptr - chunk_stride, chunk > 0),
            CarryLinks(sent_ptr, sent_ptr + chunk_stride, c < last, c > 0),
            PosteriorRows(label_row_ptr, blank_row_ptr, order, bounds, target.C),
            exponent,
            lane,
            False,
            BLOCK_T,
            FP64,
            TABLE_WIDTH,
            GROUPS,
            WIDTH,
        )


@triton.jit(do_not_specialize=SIZES)
def ctc_posterior_scan_kernel(
    logits_ptr,  # [T, N, C]
    table_ptr,  # [N, 24 + T + 24, TABLE_WIDTH] emissions as words, or None
    labels_ptr,  # [M]
    offsets_ptr,  # [N]
    input_lengths_ptr,  # [N]
    target_lengths_ptr,  # [N]
    saved_ptr,  # [2, num_blocks + 1, N, num_chunks, 2, 32] int64
    saved_carries_ptr,  # [2, num_chunks, N, carry_steps] int64, of the forward scan
    carries_ptr,  # [2, num_chunks, N, carry_steps] int64, zero
    flags_ptr,  # [N] int64
    logz_ptr,  # [N] fp64
    posteriors_ptr,  # [N, num_chunks, T, WIDTH], by label, or with GROUPS by class
    blanks_ptr,  # [N, num_chunks, T]
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
    BLOCK_T: tl.constexpr,  # steps that are loaded together, unless the states are in fp64
    ALL_FP64: tl.constexpr,  # whether all states are in fp64, or those of flagged sequences
    TABLE_WIDTH: tl.constexpr,  # row length of the table, 0 for logits
    GROUPS: tl.constexpr,  # groups of 32 classes by which posteriors are summed, or 0
    WIDTH: tl.constexpr,  # row length of the posteriors
    LAYOUT: tl.constexpr,
):
    """Scan α and β through each other's half, and store the posteriors of labels and blanks.

    The posteriors of a step are correct up to a common factor. The first program of a sequence that
    is flagged NEEDS_FP64 scans all of its chunks one after another in each direction.
    """
    index, n, direction = program_chunk(tile_counter_ptr, N)
    flags, logz = tl.load(flags_ptr + n), tl.load(logz_ptr + n)
    length, target_len, offset = load_lengths(
        n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, T, max_target_len, M
    )[:3]
    lane, last, carry_start = lane_index(LAYOUT), target_len // 32, n * carry_steps
    memory = PosteriorMemory(
        saved_ptr + n * num_chunks * 64,
        saved_carries_ptr + carry_start,
        carries_ptr + carry_start,
        posteriors_ptr + n * num_chunks * T * WIDTH,
        blanks_ptr + n * num_chunks * T,
        (N.to(tl.int64) * num_chunks) * 64,
        N.to(tl.int64) * carry_steps,
        num_blocks,
        num_chunks,
    )
    target = TargetScan(labels_ptr + offset, direction, length, target_len, T, C, blank, limit)
    logits_ptr += n * stride_n
    has_path, needs_fp64 = logz > -float("inf"), flags == NEEDS_FP64
    if ALL_FP64:
        needs_fp64 = flags == flags
    for c in range(0, tl.where(has_path & needs_fp64 & (index == 0), last + 1, 0)):
        scan_chunk(
            target,
            memory,
            c,
            logits_ptr,
            stride_t,
            stride_c,
            logz,
            lane,
            1,
            True,
            0,
            GROUPS,
            WIDTH,
        )
        # The next chunk of this program reads carries that other threads have just stored.
        tl.debug_barrier()
    if not ALL_FP64:
        if TABLE_WIDTH:
            logits_ptr = table_ptr + (n * (T + 48) + 24) * TABLE_WIDTH
            stride_t, stride_c = stride_t * 0 + TABLE_WIDTH, 1
        exponent = tl.floor(tl.where(has_path, logz, 0.0)).to(tl.int32)
        for c in range(index, tl.where(has_path & (flags == 0), tl.minimum(index, last) + 1, 0)):
            scan_chunk(
                target,
                memory,
                c,
                logits_ptr,
                stride_t,
                stride_c,
                exponent,
                lane,
                BLOCK_T,
                False,
                TABLE_WIDTH,
                GROUPS,
                WIDTH,
            )


ctc_posterior_scan_gluon_kernel = gluon.jit(ctc_posterior_scan_kernel.fn, do_not_specialize=SIZES)
POSTERIOR_SCAN = LaneKernel(ctc_posterior_scan_kernel, ctc_posterior_scan_gluon_kernel)
