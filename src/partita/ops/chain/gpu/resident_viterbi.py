"""The best paths over small tables, with register-resident states and backpointers.

Under Max, alpha runs up and beta runs down at the same time. Both store backpointers that lead
outward from the meeting point, which are then followed to both ends. One step along a path costs
the latency of a load. So the steps are divided into segments, which run in parallel:

1. `chain_resident_segment_maps_kernel` composes the backpointers of each whole segment to a map
   from each state at its inner end, near the meeting point, to the state at its outer end.
2. `chain_resident_middle_kernel` picks the best edge of the middle step and follows the maps
   outward, which gives the state in which the path enters each segment. The last segment of a
   direction needs no map, so a short path, with one segment per direction, has none.
3. `chain_resident_trace_kernel` fills in the states and edges of all segments at once.

Ties have a promised order: the lowest best final state, then the lowest edge into each state on
the way back. Beta breaks ties in another order. So a backpointer also says whether its edge has
an equal. A chain whose best path has a tie in step 2 or 3 is marked and runs again FORWARD_ONLY:
alpha takes all steps, and the first of equal edges is the promised one. Then segments are numbered
from the last step, and `chain_resident_final_state_kernel` replaces step 2.

A backpointer is an int16: the lane of the state at the other end of the best edge (bits 0 to 9),
the index of the edge among the edges of its lane (bits 10 to 13), and the tie flag (bit 14).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.memory import load_length
from .arguments import StridedEdges
from .resident_steps import (
    StepRows,
    gather_neighbors,
    gather_scores,
    load_boundary,
    load_edge_table,
    load_lanes,
    load_rows,
    log_step,
    pack_compensated,
    rows_from,
    split_blocks,
    split_fp64,
    store_row,
)
from .steps import from_step

LANE_MASK = tl.constexpr(1023)
EDGE_SHIFT = tl.constexpr(10)
TIE_FLAG = tl.constexpr(1 << 14)


@gluon.jit
def max_step(value, scores, neighbors, shape):
    """Compute the states after a step under Max, fp64, and their backpointers."""
    DEGREE: gl.constexpr = shape.DEGREE
    neighbor_values, neighbor_lanes = gather_neighbors(value, neighbors, shape)
    values, pointers = (), ()
    for k in gl.static_range(DEGREE):
        term = neighbor_values[k] + scores[k].to(gl.float64)
        values = values + (
            term if shape.REGULAR else gl.where(neighbor_lanes[k] >= 0, term, -float("inf")),
        )
        pointers = pointers + (neighbor_lanes[k] | (k << EDGE_SHIFT),)
    return first_argmax(values, pointers, DEGREE)


@gluon.jit
def first_argmax(values, pointers, TERMS: gl.constexpr):
    """Return the first of the greatest values and its backpointer.

    The backpointer has the tie flag if several values are the greatest.
    """
    if TERMS == 1:
        return values[0], pointers[0]
    else:
        half: gl.constexpr = TERMS // 2
        a, first = first_argmax(values[:half], pointers[:half], half)
        b, second = first_argmax(values[half:], pointers[half:], TERMS - half)
        return gl.where(b > a, b, a), gl.where(
            b > a, second, gl.where(a == b, first | TIE_FLAG, first)
        )


@triton.jit
def num_direction_steps(length, direction, FORWARD_ONLY: tl.constexpr):
    """Return how many steps a direction takes up to, or down to, the meeting point.

    With FORWARD_ONLY, alpha takes all steps.
    """
    middle = tl.maximum(length - 1, 0) // 2
    if FORWARD_ONLY:
        return length
    else:
        return tl.where(direction == 0, middle, tl.maximum(length - 1 - middle, 0))


@gluon.jit
def chain_resident_viterbi_kernel(
    chains,  # Chains with ResidentEdges
    has_tie_ptr,  # [N] int32: with FORWARD_ONLY, the chains that run
    middle_ptr,  # [2, N, BLOCK_C] fp64
    backpointers_ptr,  # [T, N, BLOCK_C] int16
    saved_ptr,  # [T + 1, N, C] int64 for alpha and beta under Log too, or None
    TRACE: gl.constexpr,
    FORWARD_ONLY: gl.constexpr,
    shape: gl.constexpr,  # ResidentShape
):
    """Scan alpha or beta to the meeting point under Max and store backpointers.

    With FORWARD_ONLY, scan alpha to the end, in marked chains. With `saved_ptr`, the same steps
    also do the work of `chain_resident_halves_kernel`, which would read the scores once more.
    """
    scores, table, initial, final, lengths_ptr, T, N = chains
    PREFETCH: gl.constexpr = shape.PREFETCH
    BLOCK_C: gl.constexpr = shape.BLOCK_C
    C = table.C
    if FORWARD_ONLY:
        n, direction = gl.program_id(0).to(gl.int64), gl.program_id(0) * 0
    else:
        n, direction = (gl.program_id(0) // 2).to(gl.int64), gl.program_id(0) % 2
    length, invalid = load_length(lengths_ptr, n, T)
    num_steps = num_direction_steps(length, direction, FORWARD_ONLY)
    if FORWARD_ONLY:
        num_steps = gl.where(gl.load(has_tie_ptr + n) != 0, num_steps, 0)
    sign, start = (1 - 2 * direction).to(gl.int64), gl.where(direction == 0, 0, length).to(gl.int64)
    backpointers_ptr += ((start - direction) * N + n) * BLOCK_C
    lane = gl.arange(0, BLOCK_C, shape.STATE)
    c, rows = load_lanes(scores, table, n, shape)
    rows = rows_from(rows, start - direction, sign)
    neighbors, edges = load_edge_table(table, direction, shape)
    value = load_boundary(initial.ptr + n * initial.n, c, initial.c, invalid)
    if not FORWARD_ONLY:
        if direction == 1:
            value = load_boundary(final.ptr + n * final.n, c, final.c, 0.0)
    backpointers = StepRows(backpointers_ptr, sign * N * BLOCK_C, lane, c >= 0)
    LOG: gl.constexpr = saved_ptr is not None
    state, saved = value, rows
    if LOG:
        saved = StepRows(saved_ptr + (start * N + n) * C, sign * N * C, c, c >= 0)
        state = pack_compensated(*split_fp64(value))
        saved = store_row(saved, state, (direction == 0) | (length > 0))
    prefetched, has_nan = load_rows(rows, num_steps, PREFETCH), (value != value).to(gl.int32)
    for i in range(0, num_steps, PREFETCH):
        edge_scores = gather_scores(prefetched, edges, shape)
        rows = rows_from(rows, PREFETCH)
        prefetched = load_rows(rows, num_steps - i - PREFETCH, PREFETCH)
        for u in gl.static_range(PREFETCH):
            # Maxima skip NaN, and this test takes no part in the chain of dependent steps.
            lanes = split_blocks(neighbors, BLOCK_C, shape.PADDED_DEGREE, shape.STATE)
            for k in gl.static_range(shape.DEGREE):
                score = edge_scores[u][k].to(gl.float32)
                is_nan = score != score
                if not shape.REGULAR:
                    is_nan = is_nan & (lanes[k] >= 0)
                has_nan = has_nan | is_nan.to(gl.int32)
            next_value, backpointer = max_step(value, edge_scores[u], neighbors, shape)
            value = gl.where(i + u < num_steps, next_value, value)
            if TRACE:
                backpointers = store_row(backpointers, backpointer, i + u < num_steps)
            if LOG:
                next_state = log_step(state, edge_scores[u], neighbors, shape)[0]
                state = gl.where(i + u < num_steps, next_state, state)
                saved = store_row(saved, state, i + u < num_steps)
    value = gl.where(has_nan > 0, float("nan"), value)
    gl.store(middle_ptr + (direction * N + n) * BLOCK_C + lane, value)


class SegmentMaps(NamedTuple):
    """The maps of the segments of all chains, and where the path enters each segment.

    Fields:
        ptr: `[directions, segments, N, BLOCK_C]` int16, the outer lane of a segment for each inner
            lane; empty if there is one segment, whose outer lane has no use.
        starts_ptr: `[directions, segments, N]` int32, the lane in which the path enters.
        segments: the number of segments of a direction.
    """

    ptr: tl.tensor
    starts_ptr: tl.tensor
    segments: tl.tensor


@triton.jit
def segment_range(
    lengths_ptr, n, T, direction, i, SEGMENT: tl.constexpr, FORWARD_ONLY: tl.constexpr
):
    """Return the first step of the i-th segment, its number of steps, and the sign of time.

    Segments are numbered outward from the meeting point; with FORWARD_ONLY, back from the end.
    """
    length, _ = load_length(lengths_ptr, n, T)
    middle = num_direction_steps(length, 0, FORWARD_ONLY)
    first = tl.where(direction == 0, middle - 1 - i * SEGMENT, middle + 1 + i * SEGMENT)
    num_steps = num_direction_steps(length, direction, FORWARD_ONLY) - i * SEGMENT
    return first.to(tl.int64), tl.minimum(num_steps, SEGMENT), (2 * direction - 1).to(tl.int64)


@triton.jit
def program_segment(N, FORWARD_ONLY: tl.constexpr):
    """Return the chain, the segment and the direction of a program."""
    index = tl.program_id(0) // N
    if FORWARD_ONLY:
        return (tl.program_id(0) % N).to(tl.int64), index, index * 0
    else:
        return (tl.program_id(0) % N).to(tl.int64), index // 2, index % 2


@triton.jit
def chain_resident_segment_maps_kernel(
    chains,  # Chains with ResidentEdges
    backpointers_ptr,  # [T, N, BLOCK_C] int16
    has_tie_ptr,  # [N] int32: with FORWARD_ONLY, the chains that run
    maps,  # SegmentMaps
    FORWARD_ONLY: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compose the backpointers of a segment to a map from its inner lanes to its outer lanes.

    A partial segment is the last one of its direction and needs no map.
    """
    lengths_ptr, T, N = chains[4:]
    n, i, direction = program_segment(N, FORWARD_ONLY)
    first, num_steps, sign = segment_range(lengths_ptr, n, T, direction, i, SEGMENT, FORWARD_ONLY)
    if FORWARD_ONLY:
        num_steps = tl.where(tl.load(has_tie_ptr + n) != 0, num_steps, 0)
    lane = tl.arange(0, BLOCK_C)
    if num_steps == SEGMENT:
        backpointers_ptr += (first * N + n) * BLOCK_C
        for _ in range(SEGMENT):
            # Lanes without a path have arbitrary backpointers: the mask keeps them in the block.
            lane = tl.load(backpointers_ptr + lane).to(tl.int32) & (BLOCK_C - 1)
            backpointers_ptr += sign * N * BLOCK_C
        map_ptr = maps.ptr + ((direction * maps.segments + i) * N + n) * BLOCK_C
        tl.store(map_ptr + tl.arange(0, BLOCK_C), lane.to(tl.int16))


@triton.jit
def store_segment_starts(
    maps,
    lengths_ptr,
    start_lane,
    direction,
    n,
    T,
    N,
    SEGMENT: tl.constexpr,
    FORWARD_ONLY: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Follow the maps outward from `start_lane`, and store the first lane of each segment."""
    segments = maps.segments
    for i in range(segments):
        tl.store(maps.starts_ptr + (direction * segments + i) * N + n, start_lane)
        map_ptr = maps.ptr + ((direction * segments + i).to(tl.int64) * N + n) * BLOCK_C
        num_steps = segment_range(lengths_ptr, n, T, direction, i, SEGMENT, FORWARD_ONLY)[1]
        has_map = (num_steps == SEGMENT) & (i + 1 < segments)
        mask = (start_lane >= 0) & has_map
        start_lane = tl.load(map_ptr + start_lane, mask=mask, other=-1).to(tl.int32)


@triton.jit
def chain_resident_middle_kernel(
    chains,  # Chains with ResidentEdges
    middle_ptr,  # [2, N, BLOCK_C] fp64
    maps,  # SegmentMaps
    has_tie_ptr,  # [N] int32
    paths,  # ChainPaths
    TRACE: tl.constexpr,
    SEGMENT: tl.constexpr,
    DEGREE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the best score, the middle edge of the path, and the first lane of each segment.

    The states and edges of a chain without a path are -1. A score is NaN if a path has one.
    """
    scores, table = chains[:2]
    lengths_ptr, T, N = chains[4:]
    n = tl.program_id(0).to(tl.int64)
    length, invalid = load_length(lengths_ptr, n, T)
    middle = (tl.maximum(length - 1, 0) // 2).to(tl.int64)
    middle_ptr, direction_stride = middle_ptr + n * BLOCK_C, tl.full([], N, tl.int64) * BLOCK_C
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    lane = tl.arange(0, BLOCK_C)
    # The lowest best state of a chain without steps.
    log_weight = tl.load(middle_ptr + lane) + tl.load(middle_ptr + direction_stride + lane)
    best, state = tl.max(log_weight, axis=0), tl.load(table.state_of_lane_ptr + lane)
    is_nan = tl.max((log_weight != log_weight).to(tl.int32), axis=0) > 0
    state = tl.min(tl.where(log_weight == best, state, BLOCK_C), axis=0)
    score = tl.where(is_nan, float("nan"), best)
    position, has_tie = tl.full([], 0, tl.int32), score != score
    if length > 0:
        # The best edge of the middle step, by its position in the table [DEGREE, BLOCK_C].
        step, beta_ptr = from_step(scores, middle), middle_ptr + direction_stride
        has_nan = tl.zeros([BLOCK_C], tl.int32)
        maximum = tl.full([BLOCK_C], -float("inf"), tl.float64)
        positions, has_equal = lane, tl.zeros([BLOCK_C], tl.int32)
        beta = tl.load(beta_ptr + lane)
        for k in tl.static_range(DEGREE):
            neighbor = tl.load(table.neighbors_ptr + k * BLOCK_C + lane)
            edge = tl.load(table.edges_ptr + k * BLOCK_C + lane)
            edge_score = tl.load(
                step.ptr + edge // table.K * step.c + edge % table.K * step.k,
                mask=neighbor >= 0,
                other=-float("inf"),
            ).to(tl.float64)
            alpha = tl.load(middle_ptr + neighbor, mask=neighbor >= 0, other=-float("inf"))
            term = alpha + edge_score + beta
            has_equal = tl.where(term > maximum, 0, has_equal | (term == maximum).to(tl.int32))
            positions = tl.where(term > maximum, k * BLOCK_C + lane, positions)
            has_nan = has_nan | (term != term).to(tl.int32)
            maximum = tl.maximum(maximum, term)
        best = tl.max(maximum, axis=0)
        position = tl.min(tl.where(maximum == best, positions, DEGREE * BLOCK_C), axis=0)
        num_best = tl.sum(tl.where(maximum == best, 1 + has_equal, 0), axis=0)
        score = tl.where(tl.max(has_nan, axis=0) > 0, float("nan"), best)
        position, has_tie = tl.minimum(position, DEGREE * BLOCK_C - 1), num_best > 1
    score += invalid
    tl.store(paths.score_ptr + n, score.to(paths.score_ptr.dtype.element_ty))
    if TRACE:
        possible = score > -float("inf")
        tl.store(has_tie_ptr + n, (possible & has_tie).to(tl.int32))
        path_states_ptr, path_edges_ptr = paths.states_ptr + n, paths.edges_ptr + n
        last_time = tl.where(possible, length, -1)
        for t0 in range(0, T + 1, BLOCK_C):
            t = (t0 + tl.arange(0, BLOCK_C)).to(tl.int64)
            none = tl.full([BLOCK_C], -1, tl.int64)
            tl.store(path_states_ptr + t * N, none, mask=(t > last_time) & (t <= T))
            tl.store(path_edges_ptr + t * N, none, mask=(t >= last_time) & (t < T))
        if possible & (length == 0):
            tl.store(path_states_ptr, state.to(tl.int64))
        if length > 0:
            before, after = tl.load(table.neighbors_ptr + position), position % BLOCK_C
            if possible:
                state_before = tl.load(table.state_of_lane_ptr + before).to(tl.int64)
                tl.store(path_states_ptr + middle * N, state_before)
                state_after = tl.load(table.state_of_lane_ptr + after).to(tl.int64)
                tl.store(path_states_ptr + (middle + 1) * N, state_after)
                edge = tl.load(table.edges_ptr + position).to(tl.int64)
                tl.store(path_edges_ptr + middle * N, edge)
            # Both directions run at once.
            direction = tl.arange(0, 2)
            start_lane = tl.where(possible, tl.where(direction == 0, before, after), -1)
            store_segment_starts(
                maps, lengths_ptr, start_lane, direction, n, T, N, SEGMENT, False, BLOCK_C
            )


@triton.jit
def chain_resident_final_state_kernel(
    chains,  # Chains with ResidentEdges
    has_tie_ptr,  # [N] int32
    alpha_ptr,  # [N, BLOCK_C] fp64
    maps,  # SegmentMaps
    paths,  # ChainPaths
    SEGMENT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Find the lowest best final state of a marked chain, and the first lane of each segment."""
    table = chains.edges
    final, lengths_ptr, T, N = chains[3:]
    n = tl.program_id(0).to(tl.int64)
    if tl.load(has_tie_ptr + n) != 0:
        length, _ = load_length(lengths_ptr, n, T)
        lane = tl.arange(0, BLOCK_C)
        state = tl.load(table.state_of_lane_ptr + lane)
        value = tl.load(alpha_ptr + n * BLOCK_C + lane)
        value += tl.load(
            final.ptr + n * final.n + state * final.c, mask=state >= 0, other=-float("inf")
        ).to(tl.float64)
        score = tl.max(value, axis=0)
        best_state = tl.min(tl.where(value == score, state, BLOCK_C), axis=0)
        tl.store(paths.score_ptr + n, score.to(paths.score_ptr.dtype.element_ty))
        last_ptr = paths.states_ptr + length.to(tl.int64) * N + n
        tl.store(last_ptr, best_state.to(tl.int64))
        start_lane = tl.max(tl.where(state == best_state, lane, 0), axis=0)
        direction = 0 * start_lane
        store_segment_starts(
            maps, lengths_ptr, start_lane, direction, n, T, N, SEGMENT, True, BLOCK_C
        )


@triton.jit
def chain_resident_trace_kernel(
    chains,  # Chains with ResidentEdges
    backpointers_ptr,  # [T, N, BLOCK_C] int16
    maps,  # SegmentMaps
    has_tie_ptr,  # [N] int32
    paths,  # ChainPaths
    FORWARD_ONLY: tl.constexpr,
    SEGMENT: tl.constexpr,
    DEGREE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Store the states and edges of a segment, and mark the chain if its path has a tie."""
    table = chains.edges
    lengths_ptr, T, N = chains[4:]
    n, i, direction = program_segment(N, FORWARD_ONLY)
    first, num_steps, sign = segment_range(lengths_ptr, n, T, direction, i, SEGMENT, FORWARD_ONLY)
    if FORWARD_ONLY:
        num_steps = tl.where(tl.load(has_tie_ptr + n) != 0, num_steps, 0)
    lane = tl.load(
        maps.starts_ptr + (direction * maps.segments + i) * N + n, mask=num_steps > 0, other=-1
    )
    if lane >= 0:
        step_index = tl.arange(0, SEGMENT)
        lanes, backpointers = tl.zeros([SEGMENT], tl.int32), tl.zeros([SEGMENT], tl.int32)
        # The only latency in this loop is the load of the next backpointer.
        for j in range(num_steps):
            pointer_ptr = backpointers_ptr + ((first + j * sign) * N + n) * BLOCK_C + lane
            backpointer = tl.load(pointer_ptr).to(tl.int32)
            lanes = tl.where(step_index == j, lane, lanes)
            backpointers = tl.where(step_index == j, backpointer, backpointers)
            lane = backpointer & LANE_MASK
        t, valid = first + step_index * sign, step_index < num_steps
        edge_row = direction * DEGREE + ((backpointers >> EDGE_SHIFT) & 15)
        edge = tl.load(table.edges_ptr + edge_row * BLOCK_C + lanes, mask=valid)
        tl.store(paths.edges_ptr + t * N + n, edge.to(tl.int64), mask=valid)
        path_state_ptr = paths.states_ptr + (t + direction) * N + n
        state = tl.load(table.state_of_lane_ptr + (backpointers & LANE_MASK), mask=valid)
        tl.store(path_state_ptr, state.to(tl.int64), mask=valid)
        if not FORWARD_ONLY:
            if tl.sum(backpointers & TIE_FLAG, axis=0) != 0:
                tl.store(has_tie_ptr + n, 1)
