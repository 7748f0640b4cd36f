"""CTC's second scan: α and β each continue through the other's half and give posteriors.

α starts from its states at the middle and goes on to the last step; β goes on to the first. The
other direction went through this half in the first scan, and its states are recomputed block by
block (see `recompute.py`). Each block is recomputed while the previous block is in use: the two
chains of dependent operations interleave, and neither waits for the other. Chunks of 32 positions
exchange carries as in the first scan.

Sequences whose logits need it are scanned in fp64, all chunks one after another, by a launch that
comes first. It also clears the words of the other launch and sorts the labels for the gradient, so
that no further launch has to.

A label's posterior is the product of what enters the label in one direction and its state in the
other. The products of a step carry a common factor, which the gradient divides out. They are stored
by label, `[32]` for each step and chunk, or summed by class if there are few classes.
"""

import triton
import triton.language as tl
from triton.experimental import gluon

from .label_index import store_label_order
from .lanes import LaneKernel, lane_index, sort_by_class
from .lattice import (
    NEEDS_FP64,
    SIZES,
    TargetScan,
    load_chunk,
    load_lengths,
    load_states,
    program_chunk,
    store_carry,
)
from .posterior_memory import sequence_memory
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
    advance,
    await_carries,
    carry_links,
    chunk_source,
    first_scan_half,
    prefetch_carries,
)


@triton.jit
def floor_to_int(x):
    """Return the greatest int32 that is at most x.

    Triton's floor is a function of a library, which would take time to link.
    """
    truncated = x.to(tl.int32)
    return truncated - (truncated.to(x.dtype) > x).to(tl.int32)


@triton.jit
def scan_step(
    state,
    other_state,
    other_states,
    label,
    next_label,
    index,
    block,
    BLOCK_T: tl.constexpr,
    FORWARD: tl.constexpr,
    FP64: tl.constexpr,
):
    """Take the step `index` of this scan, and one of the other direction.

    The index is a tensor `[32]`, and the values of the step are arguments, so that Triton
    translates this function once, not for each unrolled step. `other_states` are the states of the
    other direction after the step. Returns the states after both steps, and the posteriors of
    labels and blanks.
    """
    sent_ptr, is_sent, can_skip, carries, other_carries, blanks, next_blanks, exponent, lane = block
    store_carry(sent_ptr + index, state, can_skip, is_sent, FORWARD, FP64)
    incoming, state = advance(state, carries, blanks, label, index, can_skip, lane, FORWARD, FP64)
    other_state = advance(
        other_state,
        other_carries,
        next_blanks,
        next_label,
        BLOCK_T - 1 - index,
        can_skip,
        lane,
        not FORWARD,
        FP64,
    )[1]
    blank, label = other_states
    label = posterior_of(incoming.label, label, exponent, FP64)
    return state, other_state, label, posterior_of(incoming.blank, blank, exponent, FP64)


@triton.jit
def scan_block(
    p,
    state,
    words,
    loaded,
    emissions,
    other_states,
    other,
    links,
    rows,
    exponent,
    is_boundary_lane,
    lane,
    FORWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Take the steps of the block at padded step p in reverse, and store their posteriors.

    `words` are the loaded carries of the block, `emissions` its emissions and `other_states` its
    recomputed states; `loaded` is the next block. Returns the states after the block, and these
    four for the next block. This is a function because Triton translates the body of a loop two
    times.
    """
    BACK: tl.constexpr = not FORWARD
    if not FP64:
        words = await_carries(words, links, p, lane, BLOCK_T, FP64)
    carries, other_carries = words, loaded.carries
    next_emissions, other_state = decode_block(
        loaded, other, p - BLOCK_T, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH
    )
    has_carries = links.has_previous & (p > 0)
    words = prefetch_carries(links.received_ptr, p - BLOCK_T, has_carries, lane, BLOCK_T, FP64)
    loaded = prefetch_block(other, p - 2 * BLOCK_T, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH)
    next_states, labels, blanks, index = (), (), (), lane * 0 + (BLOCK_T - 1)
    block = (
        links.sent_ptr + p,
        is_boundary_lane,
        other.can_skip,
        carries,
        other_carries,
        emissions.blank,
        next_emissions.blank,
        exponent,
        lane,
    )
    for v in tl.static_range(BLOCK_T - 1, -1, -1):
        state, other_state, label, blank = scan_step(
            state,
            other_state,
            other_states[v],
            emissions.label[v],
            next_emissions.label[BLOCK_T - 1 - v],
            index,
            block,
            BLOCK_T,
            FORWARD,
            FP64,
        )
        labels, blanks, index = (label,) + labels, (blank,) + blanks, index - 1
        next_states = next_states + (other_state,)
    padding = other.half.padding
    store_posteriors(rows, labels, blanks, p, padding, lane, BACK, BLOCK_T, GROUPS, WIDTH)
    return state, words, loaded, next_emissions, next_states


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
    steps, padding = other.half.steps, other.half.padding
    is_boundary_lane = (lane == (31 if FORWARD else 0)) & links.has_next
    last_block, has_carries = steps + padding - BLOCK_T, links.has_previous & (steps > 0)
    words = prefetch_carries(links.received_ptr, last_block, has_carries, lane, BLOCK_T, FP64)
    loaded = prefetch_block(other, last_block, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH)
    emissions, other_states = recompute_block(
        loaded, other, last_block, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH
    )
    loaded = prefetch_block(other, last_block - BLOCK_T, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH)
    for p in range(last_block, -1, -BLOCK_T):
        state, words, loaded, emissions, other_states = scan_block(
            p,
            state,
            words,
            loaded,
            emissions,
            other_states,
            other,
            links,
            rows,
            exponent,
            is_boundary_lane,
            lane,
            FORWARD,
            BLOCK_T,
            FP64,
            TABLE_WIDTH,
            GROUPS,
            WIDTH,
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


@triton.jit
def scan_sequence(
    target, memory, is_scanned, rows, logz, lane, GROUPS: tl.constexpr, WIDTH: tl.constexpr
):
    """Scan the chunks of a target one after another in fp64, if `is_scanned`."""
    for c in range(0, tl.where(is_scanned, target.target_len // 32 + 1, 0)):
        scan_chunk(target, memory, c, rows, logz, lane, 1, True, 0, GROUPS, WIDTH)
        # The next chunk of this program reads carries that other threads have just stored.
        tl.debug_barrier()


@triton.jit
def prepare_chunk(
    target,
    carries,
    n,
    chunk,
    flags,
    tile_counter_ptr,
    order_ptr,
    lane,
    ORDER_GROUPS: tl.constexpr,
):
    """Clear the counter and a chunk's carries for the next scan, and sort labels for the gradient.

    The carries of a sequence in fp64 are in use here, and the next scan waits for none of them.
    """
    zero = lane.to(tl.int64) * 0
    if tile_counter_ptr is not None:
        tl.store(tile_counter_ptr + lane * 0, zero, mask=n + chunk + lane == 0)
        row = target.direction * carries.num_chunks + chunk
        ptrs = carries.ptr + row * carries.chunk_stride + lane
        for p in range(0, tl.where(flags == NEEDS_FP64, 0, carries.carry_steps), 32):
            tl.store(ptrs + p, zero, mask=p + lane < carries.carry_steps)
    if order_ptr is not None:
        if target.direction == 0:
            order_row = n * carries.num_chunks + chunk
            store_label_order(order_ptr, order_row, target, chunk, lane, ORDER_GROUPS)


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
    carries_ptr,  # [2, num_chunks, N, carry_steps] int64
    flags_ptr,  # [N] int64
    logz_ptr,  # [N] fp64
    posteriors_ptr,  # [N, num_chunks, T, WIDTH], by label, or with GROUPS by class
    blanks_ptr,  # [N, num_chunks, T]
    order_ptr,  # [N, num_chunks, 1 + 2 * ORDER_GROUPS, 32] int32, or None
    tile_counter_ptr,  # [1] int64, or None if no program waits for another
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
    BLOCK_T: tl.constexpr,  # steps that are loaded together
    FP64: tl.constexpr,  # whether this launch keeps its states in fp64
    ALL_FP64: tl.constexpr,  # whether it does so for all sequences, or for those that need it
    TABLE_WIDTH: tl.constexpr,  # row length of the table, 0 for logits
    GROUPS: tl.constexpr,  # groups of 32 classes by which posteriors are summed, or 0
    ORDER_GROUPS: tl.constexpr,  # groups of 32 classes whose labels are sorted, or 0
    WIDTH: tl.constexpr,  # row length of the posteriors
    LAYOUT: tl.constexpr,
):
    """Scan α and β through each other's half, and store the posteriors of labels and blanks.

    The posteriors of a step are correct up to a common factor. A run in fp64 prepares the other.
    """
    index, n, direction = program_chunk(None if FP64 else tile_counter_ptr, N)
    flags, logz = tl.load(flags_ptr + n), tl.load(logz_ptr + n)
    length, target_len, offset = load_lengths(
        n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, T, max_target_len, M
    )[:3]
    lane, last, has_path = lane_index(LAYOUT), target_len // 32, logz > -float("inf")
    carries, posteriors = (saved_carries_ptr, carries_ptr), (posteriors_ptr, blanks_ptr)
    sizes = (n, N, T, num_chunks, num_blocks, carry_steps)
    memory = sequence_memory(saved_ptr, carries, posteriors, sizes, WIDTH)
    labels_ptr, star = labels_ptr + offset, optional(star)
    target = TargetScan(labels_ptr, direction, length, target_len, C, blank, limit, star)
    priors, normalizers = row_scores(priors_ptr, prior_scale, maxima_ptr, sums_ptr, n, N)
    rows = EmissionRows(logits_ptr + n * stride_n, stride_t, stride_c, priors, normalizers)
    if FP64:
        prepare_chunk(
            target, memory.carries, n, index, flags, tile_counter_ptr, order_ptr, lane, ORDER_GROUPS
        )
        is_scanned = has_path & (index == 0) & (ALL_FP64 | (flags == NEEDS_FP64))
        scan_sequence(target, memory, is_scanned, rows, logz, lane, GROUPS, WIDTH)
    else:
        if TABLE_WIDTH:
            table_ptr += (n * (T + 48) + 24) * TABLE_WIDTH
            rows = EmissionRows(table_ptr, stride_t * 0 + TABLE_WIDTH, 1, (), ())
        exponent = floor_to_int(tl.where(has_path, logz, 0.0))
        for c in range(index, tl.where(has_path & (flags == 0), tl.minimum(index, last) + 1, 0)):
            scan_chunk(
                target, memory, c, rows, exponent, lane, BLOCK_T, False, TABLE_WIDTH, GROUPS, WIDTH
            )


ctc_posterior_scan_gluon_kernel = gluon.jit(ctc_posterior_scan_kernel.fn, do_not_specialize=SIZES)
POSTERIOR_SCAN = LaneKernel(ctc_posterior_scan_kernel, ctc_posterior_scan_gluon_kernel)
