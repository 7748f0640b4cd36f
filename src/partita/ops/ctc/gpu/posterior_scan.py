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
    TargetScan,
    emit,
    load_chunk,
    load_lengths,
    load_states,
    program_chunk,
    send_carry,
    sum_predecessors,
)
from .posterior_rows import PosteriorRows, store_posteriors
from .recompute import (
    RecomputedHalf,
    decode_block,
    prefetch_block,
    recompute_block,
)
from .scores import optional, row_scores
from .state import posterior_of
from .steps import (
    EmissionRows,
    SavedCarries,
    SavedStates,
    await_carries,
    carry_at,
    carry_links,
    chunk_source,
    first_scan_half,
    prefetch_carries,
)


@triton.jit
def scan_other_half(
    other,
    state,
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

    `other` is in the order of the other direction, so this scan visits the blocks from last to
    first, and the steps of each block in reverse.
    """
    BACK: tl.constexpr = not FORWARD
    can_skip, steps, padding = other.can_skip, other.half.steps, other.half.padding
    is_boundary_lane = (lane == (31 if FORWARD else 0)) & links.has_next
    last_block, has_carries = steps + padding - BLOCK_T, links.has_previous & (steps > 0)
    words = prefetch_carries(links.received_ptr, last_block, has_carries, lane, BLOCK_T, FP64)
    loaded = prefetch_block(other, last_block, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH)
    emissions, other_states = recompute_block(
        loaded, other, last_block, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH
    )
    loaded = prefetch_block(other, last_block - BLOCK_T, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH)
    for p in range(last_block, -1, -BLOCK_T):
        if not FP64:
            words = await_carries(words, links, p, lane, BLOCK_T, FP64)
        carries, other_carries = words, loaded.carries
        next_emissions, other_state = decode_block(
            loaded, other, p - BLOCK_T, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH
        )
        has_carries = links.has_previous & (p > 0)
        words = prefetch_carries(links.received_ptr, p - BLOCK_T, has_carries, lane, BLOCK_T, FP64)
        loaded = prefetch_block(other, p - 2 * BLOCK_T, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH)
        next_states, labels, blanks = (), (), ()
        for v in tl.static_range(BLOCK_T - 1, -1, -1):
            send_carry(links, p, v, state, can_skip, is_boundary_lane, lane, FORWARD, FP64)
            carry = carry_at(carries, v, lane, FP64)
            incoming = sum_predecessors(state, can_skip, carry, lane, FORWARD, FP64)
            carry = carry_at(other_carries, BLOCK_T - 1 - v, lane, FP64)
            other_incoming = sum_predecessors(other_state, can_skip, carry, lane, BACK, FP64)
            other_blank, other_label = other_states[v]
            labels = (posterior_of(incoming.label, other_label, exponent, FP64),) + labels
            blanks = (posterior_of(incoming.blank, other_blank, exponent, FP64),) + blanks
            state = emit(incoming, emissions, v, lane, FP64)
            other_state = emit(other_incoming, next_emissions, BLOCK_T - 1 - v, lane, FP64)
            next_states = next_states + (other_state,)
        store_posteriors(rows, labels, blanks, p, padding, lane, BACK, BLOCK_T, GROUPS, WIDTH)
        emissions, other_states = next_emissions, next_states


class ChunkStates(NamedTuple):
    """The states of a sequence that the first scan saved.

    Fields:
        ptr: states of α, `[num_blocks + 1, N, num_chunks, 2, 32]`; those of β follow.
        block_stride: offset from the states of a block to those of the next block.
        num_blocks: blocks of eight steps in a half.
    """

    ptr: tl.tensor
    block_stride: tl.tensor
    num_blocks: tl.tensor


class ChunkCarries(NamedTuple):
    """The carries that the chunks of a sequence exchange, `[2, num_chunks, N, carry_steps]`.

    Fields:
        saved_ptr: those of the first scan.
        ptr: those of this scan, in the same order.
        chunk_stride: offset from the carries of a chunk to those of the next chunk.
        num_chunks: chunks of all targets.
    """

    saved_ptr: tl.tensor
    ptr: tl.tensor
    chunk_stride: tl.tensor
    num_chunks: tl.tensor


class ChunkPosteriors(NamedTuple):
    """The posteriors of a sequence, which this scan writes.

    Fields:
        labels_ptr: `[num_chunks, T, WIDTH]`.
        blanks_ptr: `[num_chunks, T]`.
        T: number of rows of a chunk.
    """

    labels_ptr: tl.tensor
    blanks_ptr: tl.tensor
    T: tl.tensor


class PosteriorMemory(NamedTuple):
    """The memory of a sequence: what the first scan saved, and what this scan writes.

    Fields:
        states: see `ChunkStates`.
        carries: see `ChunkCarries`.
        posteriors: see `ChunkPosteriors`.
    """

    states: tuple[tl.tensor, ...]
    carries: tuple[tl.tensor, ...]
    posteriors: tuple[tl.tensor, ...]


@triton.jit
def sequence_memory(saved_ptr, carries, posteriors, sizes, WIDTH: tl.constexpr):
    """Return the memory of a sequence, given the tensors of the batch and its sizes."""
    n, N, T, num_chunks, num_blocks, carry_steps = sizes
    first_chunk, carry_start, N64 = n * num_chunks, n * carry_steps, N.to(tl.int64)
    saved_carries_ptr, carries_ptr = carries[0] + carry_start, carries[1] + carry_start
    labels_ptr, blanks_ptr = posteriors
    return PosteriorMemory(
        ChunkStates(saved_ptr + first_chunk * 64, (N64 * num_chunks) * 64, num_blocks),
        ChunkCarries(saved_carries_ptr, carries_ptr, N64 * carry_steps, num_chunks),
        ChunkPosteriors(labels_ptr + first_chunk * T * WIDTH, blanks_ptr + first_chunk * T, T),
    )


@triton.jit
def recomputed_half(
    target, memory, chunk, source, can_skip, stride_t, FORWARD: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Return the half that α (FORWARD) or β took in the first scan, and what it saved of a chunk.

    A chunk of α received the carries of the chunk before it, and one of β those of the next one.
    """
    states, carries, _ = memory
    half = first_scan_half(target.length, stride_t, FORWARD, BLOCK_T)
    states_ptr = states.ptr + chunk * 64
    carries_ptr = carries.saved_ptr + chunk * carries.chunk_stride
    if FORWARD:
        received = SavedCarries(carries_ptr - carries.chunk_stride, chunk > 0)
    else:
        states_ptr += (states.num_blocks + 1) * states.block_stride
        carries_ptr += (carries.num_chunks + 1) * carries.chunk_stride
        received = SavedCarries(carries_ptr, chunk < target.target_len // 32)
    saved = SavedStates(states_ptr, states.block_stride)
    return RecomputedHalf(source, half, can_skip, saved, received)


@triton.jit
def scan_chunk(
    target,
    memory,
    c,
    rows,
    exponent,
    lane,
    BLOCK_T: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Scan chunk c of a target, counted in the scan's direction, through the other half.

    `rows` are the sequence's logits or emissions.
    """
    states, carries, posteriors = memory
    direction, last, stride_t = target.direction, target.target_len // 32, rows.stride_t
    last_step, chunk = tl.maximum(target.length - 1, 0), tl.where(direction == 0, c, last - c)
    sent_ptr = carries.ptr + (direction * carries.num_chunks + chunk) * carries.chunk_stride
    lattice = load_chunk(
        target.labels_ptr, chunk * 32, target.target_len, target.C, target.star, lane
    )[0]
    can_skip, columns = lattice.can_skip, target.C + len(target.star)
    source = chunk_source(rows, lattice, target.blank, target.limit, FP64, TABLE_WIDTH)
    order, bounds = sort_by_class(lattice.label, lattice.has_label, lane, GROUPS)
    row = chunk.to(tl.int64) * posteriors.T
    labels_ptr, blanks_ptr = posteriors.labels_ptr + row * WIDTH, posteriors.blanks_ptr + row
    middle = states.num_blocks + direction * (states.num_blocks + 1)
    state = load_states(states.ptr + chunk * 64 + middle * states.block_stride, lane, FP64)
    if direction == 0:
        scan_other_half(
            recomputed_half(target, memory, chunk, source, can_skip, stride_t, False, BLOCK_T),
            state,
            carry_links(sent_ptr, carries.chunk_stride, c, last, True),
            PosteriorRows(
                labels_ptr + last_step.to(tl.int64) * WIDTH,
                blanks_ptr + last_step,
                order,
                bounds,
                columns,
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
            recomputed_half(target, memory, chunk, source, can_skip, stride_t, True, BLOCK_T),
            state,
            carry_links(sent_ptr, carries.chunk_stride, c, last, False),
            PosteriorRows(labels_ptr, blanks_ptr, order, bounds, columns),
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
    priors_ptr,  # [C] or None
    maxima_ptr,  # [T, N], or None without a star and for log-probabilities
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
    lane, last = lane_index(LAYOUT), target_len // 32
    carries, posteriors = (saved_carries_ptr, carries_ptr), (posteriors_ptr, blanks_ptr)
    sizes = (n, N, T, num_chunks, num_blocks, carry_steps)
    memory = sequence_memory(saved_ptr, carries, posteriors, sizes, WIDTH)
    labels_ptr, star = labels_ptr + offset, optional(star)
    target = TargetScan(labels_ptr, direction, length, target_len, C, blank, limit, star)
    priors, normalizers = row_scores(priors_ptr, prior_scale, maxima_ptr, sums_ptr, n, N)
    rows = EmissionRows(logits_ptr + n * stride_n, stride_t, stride_c, priors, normalizers)
    has_path = logz > -float("inf")
    needs_fp64 = flags == flags if ALL_FP64 else flags == NEEDS_FP64
    for c in range(0, tl.where(has_path & needs_fp64 & (index == 0), last + 1, 0)):
        scan_chunk(target, memory, c, rows, logz, lane, 1, True, 0, GROUPS, WIDTH)
        # The next chunk of this program reads carries that other threads have just stored.
        tl.debug_barrier()
    if not ALL_FP64:
        if TABLE_WIDTH:
            table_ptr += (n * (T + 48) + 24) * TABLE_WIDTH
            rows = EmissionRows(table_ptr, stride_t * 0 + TABLE_WIDTH, 1, (), ())
        exponent = tl.floor(tl.where(has_path, logz, 0.0)).to(tl.int32)
        for c in range(index, tl.where(has_path & (flags == 0), tl.minimum(index, last) + 1, 0)):
            scan_chunk(
                target, memory, c, rows, exponent, lane, BLOCK_T, False, TABLE_WIDTH, GROUPS, WIDTH
            )


ctc_posterior_scan_gluon_kernel = gluon.jit(ctc_posterior_scan_kernel.fn, do_not_specialize=SIZES)
POSTERIOR_SCAN = LaneKernel(ctc_posterior_scan_kernel, ctc_posterior_scan_gluon_kernel)
