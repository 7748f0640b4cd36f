"""Prefix beam search of CTC-CRF, and the trace of its best path.

One program goes through the steps of a sequence.

The beam is in memory, ordered by rank. A step has four phases with a barrier between them: the
prefixes that stay, the choice of the best candidates, their order (`select.py`), and the next beam.

A candidate is a lane. The lanes are ordered by the last base, then old before new, then the slot of
the prefix, so that they break ties by their order.

A prefix has a hash of its k-mers, which finds its parent in the beam. Where hashes are equal, the
prefixes are compared. A prefix has a node, which is the event at which it entered the beam, and a
node has its parent's node. A prefix that leaves the beam and comes back has another node, so
prefixes with different nodes are compared k-mer by k-mer, up to a node that they share.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.memory import checked_length
from .beam import log_add
from .select import ranks_in_order, select_in_order

# Rows of numbers, fp64: for each of two buffers the log of the sum over the paths of a prefix, and
# the score of the best of them; those of the prefixes that stay, with their rank; and the ranks of
# the selected candidates.
SCORE, BEST, BUFFER_NUMBERS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
STAY_SCORE, STAY_BEST, STAY_RANK = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
SELECTED, NUMBERS = tl.constexpr(7), tl.constexpr(8)
# Rows of integers: for each of two buffers the k-mer in which a prefix ends and that of its parent,
# both nodes, and the last event of the best path; the parent's event if it comes before the best
# path of a prefix that stays; the last base of each prefix; the lanes of the selected candidates,
# unordered and ordered; and the node that the parent of a prefix that stays has now.
STATE, PARENT_STATE, NODE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
PARENT_NODE, EVENT, BUFFER_INTEGERS = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
ENTERS, BASE, LANE = tl.constexpr(10), tl.constexpr(11), tl.constexpr(12)
CHOSEN, STAY_PARENT_NODE, INTEGERS = tl.constexpr(13), tl.constexpr(14), tl.constexpr(15)
# Rows of hashes, int64, for each of two buffers.
HASH, PARENT_HASH, BUFFER_HASHES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
HASHES = tl.constexpr(4)
NONE = tl.constexpr(-(2**31))  # no node and no event; the first k-mers are -1 - c


class KmerSizes(NamedTuple):
    """The sizes of a search.

    Fields:
        C: k-mers.
        bases: bases.
        top: k-mers that start with the same base.
        width: prefixes in the beam.
        hash_mask: the bits of a hash that are compared.
    """

    C: Any
    bases: Any
    top: Any
    width: Any
    hash_mask: Any


class KmerMemory(NamedTuple):
    """The memory of one sequence; the host's has N of each.

    Fields:
        numbers: `[8, BLOCK_W]` fp64.
        hashes: `[4, BLOCK_W]` int64.
        integers: `[15, BLOCK_W]` int32.
        children: `[BLOCK_W, bases]` int32, 1 plus the last step before which the beam had the
            extension of a slot by a base.
        events: `[T, BLOCK_W]` int64, the event before each event and the k-mer that it enters.
        parents: `[T, BLOCK_W]` int32, the parent's node of each node.
    """

    numbers: Any
    hashes: Any
    integers: Any
    children: Any
    events: Any
    parents: Any


class KmerStep(NamedTuple):
    """The scores of one step.

    Fields:
        t: the step.
        row_ptr, stride_c, stride_a: the scores of the edges, `[C, A]`.
        later_ptr: the scores of all that can follow each k-mer after the step, `[C]`.
    """

    t: Any
    row_ptr: Any
    stride_c: Any
    stride_a: Any
    later_ptr: Any


@triton.jit
def extended_hash(hash, state):
    """Return the hash of a prefix after one more k-mer."""
    mixed = (hash ^ (state.to(tl.int64) + 1)) * -7046029254386353131
    return mixed ^ (mixed >> 29)


@triton.jit
def edge_scores(step, state, column, mask):
    """Load the scores of edges, fp64."""
    offset = state.to(tl.int64) * step.stride_c + column.to(tl.int64) * step.stride_a
    return tl.load(step.row_ptr + offset, mask=mask, other=-float("inf")).to(tl.float64)


@triton.jit
def slots_by_hash(hashes_ptr, hash, limit, mask, BLOCK_W: tl.constexpr, BLOCK_J: tl.constexpr):
    """Return the greatest slot below `limit` whose prefix has the given hash, or -1."""
    found = tl.full([BLOCK_W], -1, tl.int32)
    for first in range(0, BLOCK_W, BLOCK_J):
        j = first + tl.arange(0, BLOCK_J)
        other = tl.load(hashes_ptr + j)
        matches = (hash[:, None] == other[None, :]) & (j[None, :] < limit[:, None])
        found = tl.maximum(found, tl.max(tl.where(matches, j[None, :], -1), axis=1))
    return tl.where(mask, found, -1)


@triton.jit
def same_prefixes(memory, a, b, wanted):
    """Return whether pairs of nodes are the same prefix, by their k-mers from the last one on."""
    equal = wanted & (a == b)
    pending = wanted & (a != b) & (a >= 0) & (b >= 0)
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        state = tl.load(memory.events + a, mask=pending, other=0) & 0xFFFFFFFF
        other = tl.load(memory.events + b, mask=pending, other=0) & 0xFFFFFFFF
        pending = pending & (state == other)
        a = tl.load(memory.parents + a, mask=pending, other=0)
        b = tl.load(memory.parents + b, mask=pending, other=0)
        equal = equal | (pending & (a == b))
        pending = pending & (a != b) & (a >= 0) & (b >= 0)
    return equal


@triton.jit
def stay(memory, size, step, buffer, BLOCK_W: tl.constexpr, BLOCK_J: tl.constexpr):
    """Compute the prefixes that do not move, merged with the extensions of their parents."""
    lane = tl.arange(0, BLOCK_W)
    numbers_ptr = memory.numbers + buffer * BUFFER_NUMBERS * BLOCK_W
    integers_ptr = memory.integers + buffer * BUFFER_INTEGERS * BLOCK_W
    state = tl.load(integers_ptr + STATE * BLOCK_W + lane)
    parent_state = tl.load(integers_ptr + PARENT_STATE * BLOCK_W + lane)
    alive = state >= 0
    stays = edge_scores(step, state, lane * 0, alive)
    move = edge_scores(step, state, 1 + parent_state // size.top, alive & (parent_state >= 0))
    later = tl.load(step.later_ptr + state, mask=alive, other=-float("inf"))
    # The slot of each parent, or -1, and the node that the parent has now, so that the nodes are
    # equal from then on. It must not be stored over the one before, which slower warps may not have
    # read yet.
    hashes_ptr = memory.hashes + buffer * BUFFER_HASHES * BLOCK_W
    hash = tl.load(hashes_ptr + PARENT_HASH * BLOCK_W + lane)
    node = tl.load(integers_ptr + PARENT_NODE * BLOCK_W + lane)
    parent = slots_by_hash(hashes_ptr, hash, lane * 0 + BLOCK_W, alive, BLOCK_W, BLOCK_J)
    found = parent >= 0
    other = tl.load(integers_ptr + NODE * BLOCK_W + parent, mask=found, other=NONE)
    pending = found & (other != node)
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        equal = same_prefixes(memory, node, other, pending)
        node = tl.where(equal, other, node)
        collides = pending & (equal == 0)
        next_slot = slots_by_hash(hashes_ptr, hash, parent, collides, BLOCK_W, BLOCK_J)
        parent = tl.where(collides, next_slot, parent)
        found = collides & (parent >= 0)
        other = tl.load(integers_ptr + NODE * BLOCK_W + parent, mask=found, other=NONE)
        pending = found & (other != node)
    merges = parent >= 0
    score = tl.load(numbers_ptr + SCORE * BLOCK_W + lane) + stays
    best = tl.load(numbers_ptr + BEST * BLOCK_W + lane) + stays
    inflow = tl.load(numbers_ptr + SCORE * BLOCK_W + parent, mask=merges, other=-float("inf"))
    best_inflow = tl.load(numbers_ptr + BEST * BLOCK_W + parent, mask=merges, other=-float("inf"))
    event = tl.load(integers_ptr + EVENT * BLOCK_W + parent, mask=merges, other=NONE)
    enters = merges & (best_inflow + move > best)
    score = tl.where(merges, log_add(score, inflow + move), score)
    best = tl.where(enters, best_inflow + move, best)
    base = state % size.bases
    child = memory.children + parent * size.bases + base
    tl.store(child, lane * 0 + step.t + 1, mask=merges)
    tl.store(memory.numbers + STAY_SCORE * BLOCK_W + lane, score)
    tl.store(memory.numbers + STAY_BEST * BLOCK_W + lane, best)
    rank = tl.where(alive, score + later, -float("inf"))
    tl.store(memory.numbers + STAY_RANK * BLOCK_W + lane, rank)
    tl.store(memory.integers + ENTERS * BLOCK_W + lane, tl.where(enters, event, NONE))
    tl.store(memory.integers + BASE * BLOCK_W + lane, tl.where(alive, base, -1))
    tl.store(memory.integers + STAY_PARENT_NODE * BLOCK_W + lane, node)


@triton.jit
def store_best(memory, size, ranks, index, BLOCK_W: tl.constexpr):
    """Store the ranks and indices of the best candidates, unordered, and return their number."""
    lane = tl.arange(0, BLOCK_W)
    passes, position, candidates = select_in_order(ranks, size.width)
    tl.store(memory.numbers + SELECTED * BLOCK_W + position, ranks, mask=passes)
    tl.store(memory.integers + LANE * BLOCK_W + position, index, mask=passes)
    tl.store(memory.integers + CHOSEN * BLOCK_W + lane, lane * 0 - 1)
    return candidates


@triton.jit
def order_best(memory, candidates, BLOCK_W: tl.constexpr, BLOCK_J: tl.constexpr):
    """Store the indices of the best candidates from the best one on; all are -1 before."""
    lane = tl.arange(0, BLOCK_W)
    ranks_ptr = memory.numbers + SELECTED * BLOCK_W
    rank = ranks_in_order(ranks_ptr, candidates, BLOCK_W, BLOCK_J)
    mask = lane < candidates
    index = tl.load(memory.integers + LANE * BLOCK_W + lane, mask=mask, other=-1)
    tl.store(memory.integers + CHOSEN * BLOCK_W + rank, index, mask=mask)


@triton.jit
def store_beam(memory, buffer, numbers, integers, hashes, BLOCK_W: tl.constexpr):
    """Store the prefixes of the beam in one of the two buffers."""
    lane = tl.arange(0, BLOCK_W)
    for field in tl.static_range(len(numbers)):
        row = buffer * BUFFER_NUMBERS + field
        tl.store(memory.numbers + row * BLOCK_W + lane, numbers[field])
    for field in tl.static_range(len(integers)):
        row = buffer * BUFFER_INTEGERS + field
        tl.store(memory.integers + row * BLOCK_W + lane, integers[field])
    for field in tl.static_range(len(hashes)):
        row = buffer * BUFFER_HASHES + field
        tl.store(memory.hashes + row * BLOCK_W + lane, hashes[field])


@triton.jit
def enter(memory, size, step, buffer, BLOCK_W: tl.constexpr):
    """Make the next beam of the chosen candidates."""
    lane = tl.arange(0, BLOCK_W)
    chosen = tl.load(memory.integers + CHOSEN * BLOCK_W + lane)
    alive, slot = chosen >= 0, tl.maximum(chosen, 0) % BLOCK_W
    base, is_new = chosen // (2 * BLOCK_W), alive & ((chosen // BLOCK_W) % 2 == 1)
    stays = alive & (is_new == 0)
    numbers_ptr = memory.numbers + buffer * BUFFER_NUMBERS * BLOCK_W + slot
    integers_ptr = memory.integers + buffer * BUFFER_INTEGERS * BLOCK_W + slot
    hashes_ptr = memory.hashes + buffer * BUFFER_HASHES * BLOCK_W + slot
    state = tl.load(integers_ptr + STATE * BLOCK_W, mask=alive, other=-1)
    node = tl.load(integers_ptr + NODE * BLOCK_W, mask=alive, other=NONE)
    event = tl.load(integers_ptr + EVENT * BLOCK_W, mask=alive, other=NONE)
    hash = tl.load(hashes_ptr + HASH * BLOCK_W, mask=alive, other=0)
    dropped = state // size.top
    moved = (state - dropped * size.top) * size.bases + base
    target = tl.where(is_new, moved, state)
    move = edge_scores(step, target, 1 + dropped, is_new)
    score = tl.load(numbers_ptr + SCORE * BLOCK_W, mask=is_new, other=-float("inf")) + move
    best = tl.load(numbers_ptr + BEST * BLOCK_W, mask=is_new, other=-float("inf")) + move
    stay_score = tl.load(memory.numbers + STAY_SCORE * BLOCK_W + slot, mask=stays, other=0.0)
    stay_best = tl.load(memory.numbers + STAY_BEST * BLOCK_W + slot, mask=stays, other=0.0)
    enters = tl.load(memory.integers + ENTERS * BLOCK_W + slot, mask=stays, other=NONE)
    parent_state = tl.load(integers_ptr + PARENT_STATE * BLOCK_W, mask=stays, other=-1)
    stay_node_ptr = memory.integers + STAY_PARENT_NODE * BLOCK_W + slot
    parent_node = tl.load(stay_node_ptr, mask=stays, other=NONE)
    parent_hash = tl.load(hashes_ptr + PARENT_HASH * BLOCK_W, mask=stays, other=0)
    own_event = step.t * BLOCK_W + lane
    before = tl.where(is_new, event, enters)
    adds = alive & (before != NONE)
    offset = step.t.to(tl.int64) * BLOCK_W + lane
    word = (before.to(tl.int64) << 32) | target.to(tl.int64)
    tl.store(memory.events + offset, word, mask=adds)
    tl.store(memory.parents + offset, node, mask=is_new)
    numbers = (tl.where(is_new, score, stay_score), tl.where(is_new, best, stay_best))
    integers = (
        target,
        tl.where(is_new, state, parent_state),
        tl.where(is_new, own_event, node),
        tl.where(is_new, node, parent_node),
        tl.where(adds, own_event, event),
    )
    new_hash = extended_hash(hash, target) & size.hash_mask
    hashes = (tl.where(is_new, new_hash, hash), tl.where(is_new, hash, parent_hash))
    store_beam(memory, 1 - buffer, numbers, integers, hashes, BLOCK_W)


@triton.jit
def start(
    memory, size, later_ptr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_J: tl.constexpr
):
    """Put the best k-mers into the beam. Each block of them is compared with the best before it."""
    lane, w = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_W)
    tl.store(memory.children + lane, lane * 0, mask=lane < BLOCK_W * size.bases)
    ranks_ptr = memory.numbers + SELECTED * BLOCK_W
    index_ptr = memory.integers + LANE * BLOCK_W
    candidates = tl.full([], 0, tl.int32)
    for first in range(0, size.C, BLOCK_P - BLOCK_W):
        c = first + lane - BLOCK_W
        is_next = (lane >= BLOCK_W) & (c < size.C)
        ranks = tl.load(ranks_ptr + lane, mask=lane < candidates, other=-float("inf"))
        index = tl.load(index_ptr + lane, mask=lane < candidates, other=0)
        next_ranks = tl.load(later_ptr + c, mask=is_next, other=-float("inf"))
        tl.debug_barrier()  # all candidates are in registers
        ranks, index = tl.where(is_next, next_ranks, ranks), tl.where(is_next, c, index)
        candidates = store_best(memory, size, ranks, index, BLOCK_W)
        tl.debug_barrier()
    order_best(memory, candidates, BLOCK_W, BLOCK_J)
    tl.debug_barrier()
    state = tl.load(memory.integers + CHOSEN * BLOCK_W + w)
    zero, none = tl.zeros([BLOCK_W], tl.float64), tl.full([BLOCK_W], NONE, tl.int32)
    node = tl.where(state >= 0, -1 - state, none)
    hash = extended_hash(tl.zeros([BLOCK_W], tl.int64), state) & size.hash_mask
    integers = (state, w * 0 - 1, node, none, node)
    store_beam(memory, 0, (zero, zero), integers, (hash, hash * 0), BLOCK_W)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["T", "later_t", "hash_mask"])
def ctc_crf_beam_search_kernel(
    scores,  # StridedEdges [T, N, C, A]
    later_ptr,  # [T + 1, N, C] fp64
    input_lengths_ptr,  # [N]
    batch,  # KmerMemory of all sequences
    T,
    C,
    bases,
    width,
    hash_mask: tl.int64,
    later_t,
    BLOCK_W: tl.constexpr,  # lanes of the beam
    BLOCK_P: tl.constexpr,  # candidates: an old and a new prefix for each base and lane
    BLOCK_J: tl.constexpr,  # lanes of the beam with which all others are compared at a time
):
    """Search the prefixes of one sequence. The buffer of the last beam is the length modulo 2."""
    n = tl.program_id(0).to(tl.int64)
    length, _ = checked_length(input_lengths_ptr, n, T, 0, 0)
    size = KmerSizes(C, bases, C // bases, width, hash_mask)
    memory = KmerMemory(
        batch.numbers + n * NUMBERS * BLOCK_W,
        batch.hashes + n * HASHES * BLOCK_W,
        batch.integers + n * INTEGERS * BLOCK_W,
        batch.children + n * BLOCK_W * bases,
        batch.events + n * T * BLOCK_W,
        batch.parents + n * T * BLOCK_W,
    )
    scores_ptr = scores.ptr + n * scores.n
    later_ptr += n * C
    start(memory, size, later_ptr, BLOCK_W, BLOCK_P, BLOCK_J)
    for t in range(0, length):
        t64, buffer = tl.full([], t, tl.int64), t % 2
        row_ptr, row_later_ptr = scores_ptr + t64 * scores.t, later_ptr + (t64 + 1) * later_t
        step = KmerStep(tl.full([], t, tl.int32), row_ptr, scores.c, scores.k, row_later_ptr)
        # The ranks of the extensions.
        lane = tl.arange(0, BLOCK_P)
        slot, base, is_new = lane % BLOCK_W, lane // (2 * BLOCK_W), (lane // BLOCK_W) % 2 == 1
        beam_states_ptr = memory.integers + (buffer * BUFFER_INTEGERS + STATE) * BLOCK_W
        beam_scores_ptr = memory.numbers + (buffer * BUFFER_NUMBERS + SCORE) * BLOCK_W
        state = tl.load(beam_states_ptr + slot)
        mask = is_new & (base < bases) & (state >= 0)
        dropped = state // size.top
        target = (state - dropped * size.top) * bases + base
        move = edge_scores(step, target, 1 + dropped, mask)
        later = tl.load(step.later_ptr + target, mask=mask, other=-float("inf"))
        score = tl.load(beam_scores_ptr + slot, mask=mask, other=-float("inf"))
        ranks = tl.where(mask, score + move + later, -float("inf"))
        stay(memory, size, step, buffer, BLOCK_W, BLOCK_J)
        tl.debug_barrier()
        # Extensions that the beam has are part of the prefixes that stay.
        child = memory.children + slot * bases + base
        in_beam = tl.load(child, mask=is_new & (base < bases), other=0) == step.t + 1
        stays = (is_new == 0) & (tl.load(memory.integers + BASE * BLOCK_W + slot) == base)
        stay_ranks = memory.numbers + STAY_RANK * BLOCK_W + slot
        stay_ranks = tl.load(stay_ranks, mask=stays, other=-float("inf"))
        ranks = tl.where(is_new, tl.where(in_beam, -float("inf"), ranks), stay_ranks)
        candidates = store_best(memory, size, ranks, lane, BLOCK_W)
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
    length, invalid = checked_length(input_lengths_ptr, n, T, 0, 0)
    integers_ptr += n * INTEGERS * BLOCK_W
    beam_ptr = integers_ptr + (length % 2) * BUFFER_INTEGERS * BLOCK_W
    state = tl.load(beam_ptr + STATE * BLOCK_W).to(tl.int64)
    event = tl.load(beam_ptr + EVENT * BLOCK_W)
    valid = ~invalid & (state >= 0)
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
