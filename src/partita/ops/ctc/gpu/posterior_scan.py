"""CTC's second scan: α and β each continue through the other's half and give posteriors.

α starts from its states at the middle and goes on to the last step; β goes on to the first. The
other direction went through this half in the first scan, and its states are recomputed block by
block, from the emissions, from the states that were saved before each eighth step, and from the
carries that the chunks exchanged then. Each block is recomputed while the previous block is in use:
the two chains of dependent operations interleave, and neither waits for the other. Chunks of 32
positions exchange carries as in the first scan.

Sequences whose logits need it are scanned in fp64, all chunks one after another, by a launch that
comes first. It also clears the words of the other launch and sorts the labels for the gradient, so
that no further launch has to.

A label's posterior is the product of what enters the label in one direction and its state in the
other. The products of a step carry a common factor, which the gradient divides out. They are stored
by label, `[32]` for each step and chunk.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon

from .lanes import LaneKernel, lane_index, sort_by_class, sum_over_lanes
from .lattice import (
    NEEDS_FP64,
    SIZES,
    LaneStates,
    TargetScan,
    load_chunk,
    load_lengths,
    program_chunk,
    store_carry,
)
from .scores import sequence_rows
from .state import posterior_of, unpack_state
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


class ChunkMemory(NamedTuple):
    """The memory of a chunk: what the other direction saved in the first scan, and its carries.

    Fields:
        states_ptr: the states before the first step, words `[2, 32]`.
        block_stride: offset from them to those of the next block of eight steps.
        carries_ptr: the carries that the chunk received in the first scan, one for each step.
        has_carries: whether there was a neighbor that sent them.
        sent_ptr: the carries that the chunk sends in this scan.
        chunk_stride: offset from them to those of the next chunk.
        label_ptr: its posteriors of labels, `[T, 32]`.
        blank_ptr: its posteriors of the blank, `[T]`.
    """

    states_ptr: tl.tensor
    block_stride: tl.tensor
    carries_ptr: tl.tensor
    has_carries: tl.tensor
    sent_ptr: tl.tensor
    chunk_stride: tl.tensor
    label_ptr: tl.tensor
    blank_ptr: tl.tensor


class LoadedBlock(NamedTuple):
    """The loaded values from which the states of a block are recomputed.

    Fields:
        rows: the values from which the emissions are computed; see `Emissions`.
        states: the words of blanks and of labels before the block, `[32]` each.
        carries: the words that the chunk received, `[32]` with a step in each lane.
    """

    rows: tuple[tl.tensor, ...]
    states: tuple[tl.tensor, ...]
    carries: tl.tensor


@triton.jit
def prefetch_block(
    source,
    half,
    memory,
    p,
    lane,
    FORWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """Load what the block of steps at p is recomputed from; nothing is loaded for p < 0."""
    rows = prefetch_emissions(source, half, p, lane, FORWARD, BLOCK_T, TABLE_WIDTH)
    ptr = memory.states_ptr + tl.maximum(p, 0) // 8 * memory.block_stride + lane
    states = (
        tl.load(ptr, mask=(lane >= 0) & (p >= 0), other=0),
        tl.load(ptr + 32, mask=(lane >= 0) & (p >= 0), other=0),
    )
    has_carries = memory.has_carries & (p >= 0)
    words = prefetch_carries(memory.carries_ptr, p, has_carries, lane, BLOCK_T, FP64)
    return LoadedBlock(rows, states, words)


@triton.jit
def decode_block(
    loaded,
    source,
    half,
    memory,
    p,
    lane,
    FORWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """Return a block's emissions and the states before it."""
    emissions = decode_emissions(
        loaded.rows, source, p, half.padding, lane, BLOCK_T, FP64, TABLE_WIDTH
    )[0]
    state = LaneStates(unpack_state(loaded.states[0], FP64), unpack_state(loaded.states[1], FP64))
    if FP64:
        # Advance to step p. The steps are a loop, because unrolled they would take long to compile.
        p = tl.maximum(p, 0)
        for q in range(p // 8 * 8, p):
            rows = prefetch_emissions(source, half, q, lane, FORWARD, 1, 0)
            step = decode_emissions(rows, source, q, 0, lane, 1, True, 0)[0]
            words = prefetch_carries(memory.carries_ptr, q, memory.has_carries, lane, 1, True)
            inputs = (words, step.blank, step.label[0], lane * 0, source.lattice.can_skip, lane)
            state = advance(state, *inputs, FORWARD, True)[1]
    return emissions, state


@triton.jit
def scan_other_half(
    target,
    memory,
    source,
    state,
    logz,
    c,
    lane,
    FORWARD: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """Scan the half of the other direction for one chunk, and store the posteriors of its steps.

    The chunk is the c-th of the scan. The half is in the order of the other direction, so this scan
    visits the blocks from last to first, and the steps of each block in reverse. Each block
    recomputes the states of the other direction for the next one.
    """
    BLOCK_T: tl.constexpr = 1 if FP64 else 8
    BACK: tl.constexpr = not FORWARD
    SIGN: tl.constexpr = 1 if BACK else -1  # the direction of the half's steps
    half = first_scan_half(target.length, source.stride_t, BACK, BLOCK_T)
    sent_ptr, chunk_stride, label_ptr, blank_ptr = memory[4:]
    other = (source, half, memory)  # the states of this half are recomputed in its own order
    last = target.target_len // 32
    received_ptr = sent_ptr - chunk_stride if FORWARD else sent_ptr + chunk_stride
    links = CarryLinks(sent_ptr, received_ptr, c < last, c > 0)
    if FORWARD:
        last_step = tl.maximum(target.length - 1, 0)
        label_ptr += last_step.to(tl.int64) * 32
        blank_ptr += last_step
    steps, padding, can_skip = half.steps, half.padding, source.lattice.can_skip
    is_sent = (lane == (31 if FORWARD else 0)) & links.has_next
    last_block, has_carries = steps + padding - BLOCK_T, links.has_previous & (steps > 0)
    words = prefetch_carries(links.received_ptr, last_block, has_carries, lane, BLOCK_T, FP64)
    loaded = prefetch_block(*other, last_block, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH)
    emissions, before = decode_block(
        loaded, *other, last_block, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH
    )
    other_states = ()
    for u in tl.static_range(BLOCK_T):
        blanks, label = emissions.blank, emissions.label[u]
        before = advance(
            before, loaded.carries, blanks, label, lane * 0 + u, can_skip, lane, BACK, FP64
        )[1]
        other_states = other_states + (before,)
    loaded = prefetch_block(*other, last_block - BLOCK_T, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH)
    for p in range(last_block, -1, -BLOCK_T):
        if not FP64:
            words = await_carries(words, links, p, lane, BLOCK_T, FP64)
        carries, other_carries = words, loaded.carries
        next_emissions, other_state = decode_block(
            loaded, *other, p - BLOCK_T, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH
        )
        has_more = links.has_previous & (p > 0)
        words = prefetch_carries(links.received_ptr, p - BLOCK_T, has_more, lane, BLOCK_T, FP64)
        loaded = prefetch_block(*other, p - 2 * BLOCK_T, lane, BACK, BLOCK_T, FP64, TABLE_WIDTH)
        next_states, label_posteriors, blank_posteriors = (), (), ()
        index = lane * 0 + (BLOCK_T - 1)
        for v in tl.static_range(BLOCK_T - 1, -1, -1):
            store_carry(links.sent_ptr + p + index, state, can_skip, is_sent, FORWARD, FP64)
            inputs = (carries, emissions.blank, emissions.label[v], index, can_skip, lane)
            incoming, state = advance(state, *inputs, FORWARD, FP64)
            blanks, label = next_emissions.blank, next_emissions.label[BLOCK_T - 1 - v]
            inputs = (other_carries, blanks, label, BLOCK_T - 1 - index, can_skip, lane)
            other_state = advance(other_state, *inputs, BACK, FP64)[1]
            through_label = posterior_of(incoming.label, other_states[v][1], logz, FP64)
            through_blank = posterior_of(incoming.blank, other_states[v][0], logz, FP64)
            label_posteriors = (through_label,) + label_posteriors
            blank_posteriors = (through_blank,) + blank_posteriors
            next_states, index = next_states + (other_state,), index - 1
        # The sums of the blanks have one step in every 32 / BLOCK_T lanes.
        step = p - padding + lane * BLOCK_T // 32
        value = sum_over_lanes(blank_posteriors, lane).to(blank_ptr.dtype.element_ty)
        has_step = (lane % (32 // BLOCK_T) == 0) & (step >= 0)
        tl.store(blank_ptr + step * SIGN, value, mask=has_step)
        row_ptr = label_ptr + (p - padding).to(tl.int64) * (SIGN * 32) + lane
        for u in tl.static_range(BLOCK_T):
            value = label_posteriors[u].to(label_ptr.dtype.element_ty)
            tl.store(row_ptr + u * SIGN * 32, value, mask=p + u >= padding)
        emissions, other_states = next_emissions, next_states


@triton.jit(do_not_specialize=SIZES)
def ctc_posterior_scan_kernel(
    scores,  # ScoreTensors; the normalizers are those of a star
    targets,  # TargetTensors
    saved,  # SavedScan
    memory,  # ScanMemory
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
    FP64: tl.constexpr,  # whether this run has states in fp64
    ALL_FP64: tl.constexpr,  # whether all sequences have; otherwise those flagged NEEDS_FP64
    TABLE_WIDTH: tl.constexpr,  # row length of the table, 0 for logits
    GROUPS: tl.constexpr,  # groups of 32 classes that the order has, or 0
    LAYOUT: tl.constexpr,
):
    """Scan α and β through each other's half, and store the posteriors of labels and blanks.

    The posteriors of a step are correct up to a common factor. A run in fp64 prepares the
    other one: it clears the counter and the carries, and stores the order of the labels.
    """
    index, n, direction = program_chunk(None if FP64 else memory.counter, N)
    flags, logz = tl.load(saved.flags + n), tl.load(saved.logz + n)
    length, target_len, offset = load_lengths(targets, n, T, max_target_len, M)[:3]
    lane, last, has_path = lane_index(LAYOUT), target_len // 32, logz > -float("inf")
    first_chunk, carry_start = n * num_chunks, n * carry_steps
    N64 = N.to(tl.int64)
    saved_carries_ptr, carries_ptr = saved.carries + carry_start, memory.carries + carry_start
    chunk_stride, states_ptr = N64 * carry_steps, saved.states + first_chunk * 64
    block_stride = (N64 * num_chunks) * 64
    labels_ptr = memory.labels + first_chunk * T * 32
    blanks_ptr = memory.blanks + first_chunk * T
    target = TargetScan(targets.labels + offset, length, target_len, C, blank, scores.limit, star)
    rows = sequence_rows(scores, stride_t, stride_n, stride_c, prior_scale, n, N)
    if FP64:
        zero = lane.to(tl.int64) * 0
        if memory.counter is not None:
            tl.store(memory.counter + lane * 0, zero, mask=n + index + lane == 0)
            ptrs = carries_ptr + (direction * num_chunks + index) * chunk_stride + lane
            # The carries of a sequence in fp64 are in use, and the next run waits for none of them.
            for p in range(0, tl.where(flags == NEEDS_FP64, 0, carry_steps), 32):
                tl.store(ptrs + p, zero, mask=p + lane < carry_steps)
        if memory.order is not None:
            if direction == 0:
                row, stride = n * num_chunks + index, (1 + 2 * GROUPS) * 32
                lattice = load_chunk(target, index, lane)[0]
                label = lattice.label.to(tl.int32)
                order, bounds = sort_by_class(label, lattice.has_label, lane, GROUPS)
                order_ptr = memory.order + (row * stride + lane)
                tl.store(order_ptr, order)
                for g in tl.static_range(GROUPS):
                    tl.store(order_ptr + (1 + 2 * g) * 32, bounds[g][0])
                    tl.store(order_ptr + (2 + 2 * g) * 32, bounds[g][1])
        is_scanned = has_path & (index == 0) & (ALL_FP64 | (flags == NEEDS_FP64))
        begin, end = 0, tl.where(is_scanned, target_len // 32 + 1, 0)
    else:
        # Triton's floor is a function of a library, which would take time to link.
        logz = tl.where(has_path, logz, 0.0)
        truncated = logz.to(tl.int32)
        logz = truncated - (truncated.to(logz.dtype) > logz).to(tl.int32)
        begin, end = index, tl.where(has_path & (flags == 0), tl.minimum(index, last) + 1, 0)
    for c in range(begin, end):
        chunk = tl.where(direction == 0, c, target_len // 32 - c)
        sent_ptr = carries_ptr + (direction * num_chunks + chunk) * chunk_stride
        lattice = load_chunk(target, chunk, lane)[0]
        source = chunk_source(rows, lattice, target, FP64, TABLE_WIDTH)
        row = chunk.to(tl.int64) * T
        middle = num_blocks + direction * (num_blocks + 1)
        chunk_states_ptr = states_ptr + chunk * 64
        middle_ptr = chunk_states_ptr + middle * block_stride
        state = LaneStates(
            unpack_state(tl.load(middle_ptr + lane), FP64),
            unpack_state(tl.load(middle_ptr + 32 + lane), FP64),
        )
        # In the first scan, a chunk of α received the carries of the chunk before it, and one of β
        # those of the next one.
        own = ChunkMemory(
            chunk_states_ptr + (1 - direction) * (num_blocks + 1) * block_stride,
            block_stride,
            saved_carries_ptr
            + tl.where(direction == 0, num_chunks + chunk + 1, chunk - 1) * chunk_stride,
            tl.where(direction == 0, chunk < last, chunk > 0),
            sent_ptr,
            chunk_stride,
            labels_ptr + row * 32,
            blanks_ptr + row,
        )
        inputs = (target, own, source, state, logz, c, lane)
        if direction == 0:
            scan_other_half(*inputs, True, FP64, TABLE_WIDTH)
        else:
            scan_other_half(*inputs, False, FP64, TABLE_WIDTH)
        if FP64:
            # The next chunk of this program reads carries that other threads have just stored.
            tl.debug_barrier()


ctc_posterior_scan_gluon_kernel = gluon.jit(ctc_posterior_scan_kernel.fn, do_not_specialize=SIZES)
POSTERIOR_SCAN = LaneKernel(ctc_posterior_scan_kernel, ctc_posterior_scan_gluon_kernel)
