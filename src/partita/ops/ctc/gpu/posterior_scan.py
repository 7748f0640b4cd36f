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

from .lanes import LaneKernel, lane_index, prefix_sums, range_sum, sort_by_class, sum_over_lanes
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


class PosteriorRows(NamedTuple):
    """The memory for a chunk's posteriors, and the order in which they are summed.

    Fields:
        label_ptr: the first row of posteriors, `[WIDTH]` for each step.
        blank_ptr: the blank's posterior of the first step.
        order: the lanes sorted by class, `[32]`.
        bounds: the range of each class in that order, for each group of 32 classes.
        C: number of classes.
    """

    label_ptr: tl.tensor
    blank_ptr: tl.tensor
    order: tl.tensor
    bounds: tuple[tl.tensor, ...]
    C: tl.tensor


@triton.jit
def store_posteriors(
    rows,
    labels,
    blanks,
    p,
    padding,
    lane,
    FORWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store the posteriors of a block of steps, by label or by class, and those of the blanks.

    The sums of the blanks have one step in every 32 / BLOCK_T lanes.
    """
    sign: tl.constexpr = 1 if FORWARD else -1
    step = p - padding + lane * BLOCK_T // 32
    total = sum_over_lanes(blanks, lane).to(rows.blank_ptr.dtype.element_ty)
    tl.store(rows.blank_ptr + step * sign, total, mask=(lane % (32 // BLOCK_T) == 0) & (step >= 0))
    row_ptr = rows.label_ptr + (p - padding).to(tl.int64) * (sign * WIDTH) + lane
    if GROUPS == 0:
        for u in tl.static_range(BLOCK_T):
            tl.store(
                row_ptr + u * sign * WIDTH,
                labels[u].to(rows.label_ptr.dtype.element_ty),
                mask=p + u >= padding,
            )
    else:
        ordered = ()
        for u in tl.static_range(BLOCK_T):
            ordered = ordered + (tl.gather(labels[u], rows.order, 0),)
        sums = prefix_sums(ordered, lane)
        for g in tl.static_range(GROUPS):
            for u in tl.static_range(BLOCK_T):
                valid = (p + u >= padding) & (g * 32 + lane < rows.C)
                tl.store(
                    row_ptr + (u * sign * WIDTH + g * 32),
                    range_sum(sums[u], rows.bounds[g][0], rows.bounds[g][1]),
                    mask=valid,
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


@triton.jit(do_not_specialize=SIZES)
def ctc_posterior_scan_kernel(
    source_ptr,  # [T, N, C] logits, or [N, 24 + T + 24, TABLE_WIDTH] emissions as words
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
    BLOCK_T: tl.constexpr,  # steps that are loaded together
    FP64: tl.constexpr,  # whether this run has states in fp64
    ALL_FP64: tl.constexpr,  # whether all sequences have; otherwise those flagged NEEDS_FP64
    TABLE_WIDTH: tl.constexpr,  # row length of the table, 0 for logits
    GROUPS: tl.constexpr,  # groups of 32 classes by which posteriors are summed, or 0
    WIDTH: tl.constexpr,  # row length of the posteriors
    LAYOUT: tl.constexpr,
):
    """Scan α and β through each other's half, and store the posteriors of labels and blanks.

    The posteriors of a step are correct up to a common factor.
    """
    index, n, direction = program_chunk(tile_counter_ptr, N)
    flags, logz = tl.load(flags_ptr + n), tl.load(logz_ptr + n)
    length, target_len, offset = load_lengths(
        n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, T, max_target_len, M
    )[:3]
    middle, last, begin = length // 2, target_len // 32, index
    end = tl.minimum(index, target_len // 32) + 1
    if FP64:
        end = last + 1
    end = tl.where(
        logz > -float("inf"),
        tl.where((ALL_FP64 | (flags == NEEDS_FP64)) if FP64 else (flags == 0), end, 0),
        0,
    )
    exponent = logz
    if not FP64:
        exponent = tl.floor(tl.where(logz > -float("inf"), logz, 0.0)).to(tl.int32)
    lane = lane_index(LAYOUT)
    block_stride, chunk_stride = (N.to(tl.int64) * num_chunks) * 64, N.to(tl.int64) * carry_steps
    saved_ptr += n * num_chunks * 64
    saved_carries_ptr += n * carry_steps
    carries_ptr += n * carry_steps
    source_ptr += n * stride_n
    for c in range(begin, end):
        chunk = tl.where(direction == 0, c, last - c)
        chunk_ptr, sent_ptr, last_step = (
            saved_ptr + chunk * 64,
            carries_ptr + (direction * num_chunks + chunk) * chunk_stride,
            tl.maximum(length - 1, 0),
        )
        lattice = load_chunk(labels_ptr + offset, chunk * 32, target_len, C, lane)[0]
        source = EmissionSource(
            source_ptr + lattice.label.to(tl.int64) * stride_c,
            source_ptr + (n * 0 + blank) * stride_c,
            lattice.has_label,
            limit,
        )
        order, bounds = sort_by_class(lattice.label, lattice.has_label, lane, GROUPS)
        blank_row_ptr = blanks_ptr + (n * num_chunks + chunk) * T
        label_row_ptr, middle_ptr = (
            posteriors_ptr + (n * num_chunks + chunk) * T * WIDTH,
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
                SavedCarries(
                    saved_carries_ptr + (num_chunks + chunk + 1) * chunk_stride, chunk < last
                ),
                CarryLinks(sent_ptr, sent_ptr - chunk_stride, c < last, c > 0),
                PosteriorRows(
                    label_row_ptr + last_step.to(tl.int64) * WIDTH,
                    blank_row_ptr + last_step,
                    order,
                    bounds,
                    C,
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
                SavedCarries(saved_carries_ptr + (chunk - 1) * chunk_stride, chunk > 0),
                CarryLinks(sent_ptr, sent_ptr + chunk_stride, c < last, c > 0),
                PosteriorRows(label_row_ptr, blank_row_ptr, order, bounds, C),
                exponent,
                lane,
                False,
                BLOCK_T,
                FP64,
                TABLE_WIDTH,
                GROUPS,
                WIDTH,
            )
        if FP64:
            # The next chunk of this program reads carries that other threads have just stored.
            tl.debug_barrier()


ctc_posterior_scan_gluon_kernel = gluon.jit(ctc_posterior_scan_kernel.fn, do_not_specialize=SIZES)
POSTERIOR_SCAN = LaneKernel(ctc_posterior_scan_kernel, ctc_posterior_scan_gluon_kernel)
