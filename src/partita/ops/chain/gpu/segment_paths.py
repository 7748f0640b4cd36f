"""The best path of few long chains of few states, parallel in time.

Alpha under Max is known before each segment, see `segments.py`. Each row of a program takes one
segment and stores backpointers as `paths.py` does. It also follows them forwards: the map of a
segment has, for each state after it, the state before it on the best path to that state. The maps
of a group of segments are composed. Then the path is traced from its last state through the groups,
through the segments of all groups at the same time, and through the steps of all segments.

Scores are sums in fp64. Integers of at most 53 bits stay exact, so ties are broken as in the scan
of one step after the other. Other scores are added in another order than there, and may choose
another path among those whose scores differ by rounding.

Source: Forney, The Viterbi algorithm, 1973.
"""

import triton
import triton.language as tl

from .arguments import StridedEdges
from .segments import program_rows, slot_score, slot_value
from .steps import from_step, load_length, load_slot, load_slots


@triton.jit
def greater_term(best, x, scores, slot, active, j):
    """Return the greatest term of each state up to slot j, its slot, and the state it comes from.

    An equal term changes nothing, so the lowest slot wins.
    """
    maximum, backpointer, origin = best
    term = slot_value(x, slot) + slot_score(scores, slot, active)
    is_greater = term > maximum
    return (
        tl.where(is_greater, term, maximum),
        tl.where(is_greater, j, backpointer),
        tl.where(is_greater, slot[0], origin),
    )


@triton.jit
def chain_segment_pointers_kernel(
    chains,  # Chains
    boundaries_ptr,  # [N, segments + 1, C] fp64, alpha under Max
    backpointers_ptr,  # [T, N, C] integers
    maps_ptr,  # [N, segments, C] int32
    segments,
    steps,  # in a segment
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DEGREE: tl.constexpr,
):
    """Store the backpointers of the steps of segments, and the maps of the segments."""
    scores, edges = chains[:2]
    lengths_ptr, T, N = chains[4:]
    C = edges.C
    row, exists = program_rows(tl.full([], N, tl.int64) * segments, ROWS)
    n, segment, c = row // segments, row % segments, tl.arange(0, BLOCK_C)[None, :]
    mask = exists & (c < C)
    length, _ = load_length(lengths_ptr, n, T)
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    known_ptr = boundaries_ptr + (n * (segments + 1) + segment) * C + c
    x = tl.load(known_ptr, mask=c < C, other=-float("inf"))
    slots = load_slots(edges, c, DEGREE, False)
    start = tl.zeros(x.shape, tl.int32) + c
    for i in range(0, steps):
        t = segment * steps + i
        active = t < length
        step_scores, none = from_step(scores, t), tl.zeros(x.shape, tl.int32)
        best = (tl.full(x.shape, -float("inf"), tl.float64), none, none)
        if DEGREE > 0:
            for j in tl.static_range(DEGREE):
                best = greater_term(best, x, step_scores, slots[j], active, j)
        else:
            for j in range(edges.K):
                slot = load_slot(edges, c, j, False)
                best = greater_term(best, x, step_scores, slot, active, j)
        y, backpointer, origin = best
        pointers = backpointers_ptr + (t * N + n) * C + c
        tl.store(pointers, backpointer.to(backpointers_ptr.dtype.element_ty), mask=mask & active)
        start = tl.where(active, tl.gather(start, origin, 1), start)
        x = tl.where(active, y, x)
    tl.store(maps_ptr + row * C + c, start, mask=mask)


@triton.jit
def chain_group_maps_kernel(
    maps_ptr,  # [N, segments, C] int32
    group_maps_ptr,  # [N, groups, C] int32
    C,
    groups,  # SegmentGroups
    BLOCK_C: tl.constexpr,
):
    """Compose the maps of the segments of a group."""
    n, group = (tl.program_id(0) // groups.number).to(tl.int64), tl.program_id(0) % groups.number
    c, state = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_C)
    first = group * groups.size
    last = tl.minimum((group + 1) * groups.size, groups.segments)
    maps_ptr += n * groups.segments * C + c
    for i in range(0, last - first):
        segment_map = tl.load(maps_ptr + (last - 1 - i) * C, mask=c < C, other=0)
        state = tl.gather(segment_map, state, 0)
    tl.store(group_maps_ptr + (n * groups.number + group) * C + c, state, mask=c < C)


@triton.jit
def chain_trace_maps_kernel(
    maps_ptr,  # [N, segments, C] int32
    known_ptr,  # [N, groups] int32, the state after each group; -1 for no path
    states_ptr,  # [N, segments] int32, the state after each segment
    N,
    C,
    groups,  # SegmentGroups
    LANES: tl.constexpr,
):
    """Trace the best path through one group in each lane."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    exists = lane < tl.full([], N, tl.int64) * groups.number
    n, first = lane // groups.number, lane % groups.number * groups.size
    state = tl.load(known_ptr + lane, mask=exists, other=-1)
    for i in range(0, groups.size):
        at = first + groups.size - 1 - i
        inside = exists & (at < groups.segments)
        row = n * groups.segments + at
        tl.store(states_ptr + row, state, mask=inside)
        before = tl.load(maps_ptr + row * C + state, mask=inside & (state >= 0), other=-1)
        state = tl.where(inside, before, state)


@triton.jit
def chain_trace_steps_kernel(
    chains,  # Chains
    backpointers_ptr,  # [T, N, C] integers
    known_ptr,  # [N, segments] int32, the state after each segment; -1 for no path
    paths,  # ChainPaths
    segments,
    steps,  # in a segment
    LANES: tl.constexpr,
):
    """Trace the best path through the steps of one segment in each lane."""
    edges = chains.edges
    lengths_ptr, T, N = chains[4:]
    C, K = edges.C, edges.K
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    exists = lane < tl.full([], N, tl.int64) * segments
    n, segment = lane // segments, lane % segments
    if lengths_ptr is None:
        length = tl.zeros([LANES], tl.int64) + T
    else:
        length = tl.load(lengths_ptr + n, mask=exists, other=0).to(tl.int64)
    state = tl.load(known_ptr + lane, mask=exists, other=-1)
    for i in range(0, steps):
        t = segment * steps + steps - 1 - i
        row, inside = t * N + n, exists & (t < T)
        on_path = inside & (t < length) & (state >= 0)
        slot = tl.load(backpointers_ptr + row * C + state, mask=on_path, other=0).to(tl.int32)
        edge = state * K + slot
        tl.store(paths.edges_ptr + row, tl.where(on_path, edge, -1).to(tl.int64), mask=inside)
        after = tl.where(on_path, state, -1).to(tl.int64)
        tl.store(paths.states_ptr + row + N, after, mask=inside)
        state = tl.where(on_path, tl.load(edges.source_ptr + edge, mask=on_path, other=0), state)
    tl.store(paths.states_ptr + n, state.to(tl.int64), mask=exists & (segment == 0))
