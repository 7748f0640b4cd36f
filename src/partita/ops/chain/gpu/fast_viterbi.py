"""The best paths of sparse linear chains over small tables: Max runs up and down at the same time and leaves pointers, which are then followed
from the middle to both ends, in segments of steps at once.

A step of the path costs the latency of a load. So each segment's pointers are first put together to a map from the state at its inner end to
that at its outer one, for all states; a few maps are followed one after another; then all segments are filled in at the same time. Meeting in the middle
knows nothing of the order that ties are promised to have: a chain whose path has an equal on its way is marked, and runs once more, LONE: upwards all
the way, where the first of equal edges is the promised one.

A pointer holds the place of the state at the other end of the best edge, which of the direction's edges it is, and whether it has an equal.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .fast_steps import edges_of, offsets_of, parted, rows_ahead, scores_of
from .steps import length_of

PLACE = tl.constexpr(1023)  # of a pointer
SLOT = tl.constexpr(10)  # bits from which on the edge stands
TIE = tl.constexpr(1 << 14)


@gluon.jit
def best_of(
    value,
    scores,
    others,
    u: gl.constexpr,
    BLOCK: gl.constexpr,
    PARTS: gl.constexpr,
    WIDTH: gl.constexpr,
    WHOLE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """States after a step under Max, fp64, and the pointers to those before it."""
    found, places = (
        parted(gl.gather(value, gl.maximum(others, 0), 0), BLOCK, PARTS, LAYOUT),
        parted(others, BLOCK, PARTS, LAYOUT),
    )
    values, pointers = (), ()
    for k in gl.static_range(WIDTH):
        term = found[k] + scores[u * PARTS + k].to(gl.float64)
        values = values + (term if WHOLE else gl.where(places[k] >= 0, term, -float("inf")),)
        pointers = pointers + (places[k] | (k << SLOT),)
    return highest(values, pointers, WIDTH)


@gluon.jit
def highest(values, pointers, COUNT: gl.constexpr):
    """The first of the greatest values and its pointer, with a mark where there are several."""
    if COUNT == 1:
        return values[0], pointers[0]
    else:
        half: gl.constexpr = COUNT // 2
        a, first = highest(values[:half], pointers[:half], half)
        b, second = highest(values[half:], pointers[half:], COUNT - half)
        return gl.where(b > a, b, a), gl.where(b > a, second, gl.where(a == b, first | TIE, first))


@triton.jit
def steps_of(length, direction, LONE: tl.constexpr):
    """How many steps a direction takes: up to the middle step, or down to behind it."""
    middle = tl.maximum(length - 1, 0) // 2
    if LONE:
        return length
    else:
        return tl.where(direction == 0, middle, tl.maximum(length - 1 - middle, 0))


@gluon.jit
def ends_value(ends_ptr, c, stride_c, wrong):
    """Initial or final scores as they start a scan."""
    return gl.load(ends_ptr + c * stride_c, mask=c >= 0, other=-float("inf")).to(gl.float64) + wrong


@gluon.jit
def chain_fast_best_kernel(
    scores_ptr,  # [steps, chains, states, slots]
    order_ptr,  # [BLOCK_C] int32
    others_ptr,  # [2, WIDTH, BLOCK_C] int32
    edges_ptr,  # [2, WIDTH, BLOCK_C] int32
    initial_ptr,  # [chains, states]
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    marked_ptr,  # [chains] int32: where LONE, which chains run
    middle_ptr,  # [2, chains, BLOCK_C] fp64
    pointers_ptr,  # [steps, chains, BLOCK_C] int16
    steps,
    chains,
    states,
    slots,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    initial_n,
    initial_c,
    final_n,
    final_c,
    TRACE: gl.constexpr,
    LONE: gl.constexpr,
    WIDTH: gl.constexpr,
    PARTS: gl.constexpr,
    WHOLE: gl.constexpr,
    PLAIN: gl.constexpr,
    VEC: gl.constexpr,
    AHEAD: gl.constexpr,
    BLOCK_C: gl.constexpr,
    BLOCK_E: gl.constexpr,
):
    """α up to the middle step, or β down to behind it, under Max, with pointers; LONE, α up to the end."""
    STATE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ROW: gl.constexpr = gl.BlockedLayout([VEC], [32], [gl.num_warps()], [0])
    n = (gl.program_id(0) if LONE else gl.program_id(0) // 2).to(gl.int64)
    direction = gl.program_id(0) * 0 if LONE else gl.program_id(0) % 2
    length, bad = length_of(lengths_ptr, n, steps)
    count = steps_of(length, direction, LONE)
    if LONE:
        count = gl.where(gl.load(marked_ptr + n) != 0, count, 0)
    step = (1 - 2 * direction).to(gl.int64)
    p = gl.where(direction == 0, 0, length).to(gl.int64)
    jump, row = step * stride_t, step * chains * BLOCK_C
    scores_ptr += n * stride_n + (p - direction) * stride_t
    pointers_ptr += ((p - direction) * chains + n) * BLOCK_C
    q, e = gl.arange(0, BLOCK_C, STATE), gl.arange(0, BLOCK_E, ROW)
    c = gl.load(order_ptr + q)
    others, edges = edges_of(
        others_ptr, edges_ptr, direction, AHEAD, BLOCK_C, BLOCK_E, PARTS, WIDTH, STATE
    )
    offsets, held = offsets_of(e, slots, stride_c, stride_k, PLAIN), e < states * slots
    value = ends_value(initial_ptr + n * initial_n, c, initial_c, bad)
    if not LONE:
        if direction == 1:
            value = ends_value(final_ptr + n * final_n, c, final_c, 0.0)
    ahead = rows_ahead(scores_ptr, offsets, held, jump, count, AHEAD)
    for i in range(0, count, AHEAD):
        scores = scores_of(ahead, edges, AHEAD, PARTS, BLOCK_C, BLOCK_E, STATE, ROW)
        scores_ptr += AHEAD * jump
        ahead = rows_ahead(scores_ptr, offsets, held, jump, count - i - AHEAD, AHEAD)
        for u in gl.static_range(AHEAD):
            after, pointer = best_of(value, scores, others, u, BLOCK_C, PARTS, WIDTH, WHOLE, STATE)
            value = gl.where(i + u < count, after, value)
            if TRACE:
                gl.store(pointers_ptr + q, pointer.to(gl.int16), mask=(c >= 0) & (i + u < count))
                pointers_ptr += row
    gl.store(middle_ptr + (direction * chains + n) * BLOCK_C + q, value)


@triton.jit
def segment_of(lengths_ptr, n, steps, direction, i, SEGMENT: tl.constexpr, LONE: tl.constexpr):
    """The first step of the i-th segment from the middle (LONE: the end) outwards, its number of steps, and which way they go."""
    length, _ = length_of(lengths_ptr, n, steps)
    up = steps_of(length, 0, LONE)
    first = tl.where(direction == 0, up - 1 - i * SEGMENT, up + 1 + i * SEGMENT)
    count = steps_of(length, direction, LONE) - i * SEGMENT
    return first.to(tl.int64), tl.minimum(count, SEGMENT), (2 * direction - 1).to(tl.int64)


@triton.jit
def turn(chains, LONE: tl.constexpr):
    """Which chain, segment and direction a program has."""
    turns = tl.program_id(0) // chains
    if LONE:
        return (tl.program_id(0) % chains).to(tl.int64), turns, turns * 0
    else:
        return (tl.program_id(0) % chains).to(tl.int64), turns // 2, turns % 2


@triton.jit
def chain_fast_maps_kernel(
    pointers_ptr,  # [steps, chains, BLOCK_C] int16
    lengths_ptr,  # [chains] or None
    marked_ptr,  # [chains] int32: where LONE, which chains run
    maps_ptr,  # [directions, segments, chains, BLOCK_C] int16
    steps,
    chains,
    segments,
    LONE: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """From the states at the inner end of a segment to those at its outer end; a segment that is not whole is the last and needs no map."""
    n, i, direction = turn(chains, LONE)
    first, count, step = segment_of(lengths_ptr, n, steps, direction, i, SEGMENT, LONE)
    if LONE:
        count = tl.where(tl.load(marked_ptr + n) != 0, count, 0)
    place = tl.arange(0, BLOCK_C)
    if count == SEGMENT:
        pointers_ptr += (first * chains + n) * BLOCK_C
        for _ in range(SEGMENT):
            place = tl.load(pointers_ptr + place).to(tl.int32) & (
                BLOCK_C - 1
            )  # within the block, whatever stands where no path is
            pointers_ptr += step * chains * BLOCK_C
        tl.store(
            maps_ptr + ((direction * segments + i) * chains + n) * BLOCK_C + tl.arange(0, BLOCK_C),
            place.to(tl.int16),
        )


@triton.jit
def middle_edge(
    scores_ptr,
    others_ptr,
    edges_ptr,
    alpha_ptr,
    beta_ptr,
    slots,
    stride_c,
    stride_k,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The best edge of the middle step: its score with what comes before and behind, where it stands, and whether it has an equal."""
    place, most = tl.arange(0, BLOCK_C), tl.full([BLOCK_C], -float("inf"), tl.float64)
    best, equal, behind = place, tl.zeros([BLOCK_C], tl.int32), tl.load(beta_ptr + place)
    for k in tl.static_range(WIDTH):
        other, edge = (
            tl.load(others_ptr + k * BLOCK_C + place),
            tl.load(edges_ptr + k * BLOCK_C + place),
        )
        score = tl.load(
            scores_ptr + edge // slots * stride_c + edge % slots * stride_k,
            mask=other >= 0,
            other=-float("inf"),
        ).to(tl.float64)
        term = tl.load(alpha_ptr + other, mask=other >= 0, other=-float("inf")) + score + behind
        equal = tl.where(term > most, 0, equal | (term == most).to(tl.int32))
        best = tl.where(term > most, k * BLOCK_C + place, best)
        most = tl.maximum(most, term)
    highest = tl.max(most, axis=0)
    chosen = tl.min(tl.where(most == highest, best, WIDTH * BLOCK_C), axis=0)
    ties = tl.sum(tl.where(most == highest, 1 + equal, 0), axis=0)
    return highest, tl.minimum(chosen, WIDTH * BLOCK_C - 1), ties > 1


@triton.jit
def chain_fast_middle_kernel(
    scores_ptr,  # [steps, chains, states, slots]
    order_ptr,  # [BLOCK_C] int32
    others_ptr,  # [2, WIDTH, BLOCK_C] int32
    edges_ptr,  # [2, WIDTH, BLOCK_C] int32
    lengths_ptr,  # [chains] or None
    middle_ptr,  # [2, chains, BLOCK_C] fp64
    maps_ptr,  # [2, segments, chains, BLOCK_C] int16
    marked_ptr,  # [chains] int32
    starts_ptr,  # [2, segments, chains] int32
    score_ptr,  # [chains] fp64
    path_ptr,  # [steps + 1, chains] int64
    taken_ptr,  # [steps, chains] int64
    segments,
    steps,
    chains,
    slots,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    TRACE: tl.constexpr,
    SEGMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The best score of a chain, the states on both sides of its middle step, and those between segments; -1 where there is no path."""
    n = tl.program_id(0).to(tl.int64)
    length, bad = length_of(lengths_ptr, n, steps)
    middle = (tl.maximum(length - 1, 0) // 2).to(tl.int64)
    lane, half = tl.arange(0, BLOCK_C), tl.full([], chains, tl.int64) * BLOCK_C
    middle_ptr += n * BLOCK_C
    both = tl.load(middle_ptr + lane) + tl.load(middle_ptr + half + lane)
    score = tl.max(both, axis=0)
    state = tl.min(tl.where(both == score, tl.load(order_ptr + lane), BLOCK_C), axis=0)
    at, tie = tl.full([], 0, tl.int32), score != score
    if length > 0:
        step_ptr = scores_ptr + n * stride_n + middle * stride_t
        score, at, tie = middle_edge(
            step_ptr,
            others_ptr,
            edges_ptr,
            middle_ptr,
            middle_ptr + half,
            slots,
            stride_c,
            stride_k,
            WIDTH,
            BLOCK_C,
        )
    score += bad
    tl.store(score_ptr + n, score)
    if TRACE:
        possible = score > -float("inf")
        tl.store(marked_ptr + n, (possible & tie).to(tl.int32))
        before = tl.where(possible, length, -1)
        for t0 in range(0, steps + 1, BLOCK_C):
            t = (t0 + lane).to(tl.int64)
            tl.store(
                path_ptr + t * chains + n,
                tl.full([BLOCK_C], -1, tl.int64),
                mask=(t > before) & (t <= steps),
            )
            tl.store(
                taken_ptr + t * chains + n,
                tl.full([BLOCK_C], -1, tl.int64),
                mask=(t >= before) & (t < steps),
            )
        if possible & (length == 0):
            tl.store(path_ptr + n, state.to(tl.int64))
        if length > 0:
            other = tl.load(others_ptr + at)
            if possible:
                tl.store(path_ptr + middle * chains + n, tl.load(order_ptr + other).to(tl.int64))
                tl.store(
                    path_ptr + (middle + 1) * chains + n,
                    tl.load(order_ptr + at % BLOCK_C).to(tl.int64),
                )
                tl.store(taken_ptr + middle * chains + n, tl.load(edges_ptr + at).to(tl.int64))
            direction = tl.arange(0, 2)  # both at once
            place = tl.where(possible, tl.where(direction == 0, other, at % BLOCK_C), -1)
            for i in range(segments):
                tl.store(starts_ptr + (direction * segments + i) * chains + n, place)
                map_ptr = (
                    maps_ptr + ((direction * segments + i).to(tl.int64) * chains + n) * BLOCK_C
                )
                _, count, _ = segment_of(lengths_ptr, n, steps, direction, i, SEGMENT, False)
                place = tl.load(
                    map_ptr + place, mask=(place >= 0) & (count == SEGMENT), other=-1
                ).to(tl.int32)


@triton.jit
def chain_fast_last_kernel(
    order_ptr,  # [BLOCK_C] int32
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    marked_ptr,  # [chains] int32
    alpha_ptr,  # [chains, BLOCK_C] fp64
    maps_ptr,  # [segments, chains, BLOCK_C] int16
    starts_ptr,  # [segments, chains] int32
    score_ptr,  # [chains] fp64
    path_ptr,  # [steps + 1, chains] int64
    segments,
    steps,
    chains,
    final_n,
    final_c,
    SEGMENT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Of marked chains, the lowest of the best last states, and those between segments."""
    n = tl.program_id(0).to(tl.int64)
    if tl.load(marked_ptr + n) != 0:
        length, _ = length_of(lengths_ptr, n, steps)
        state = tl.load(order_ptr + tl.arange(0, BLOCK_C))
        value = tl.load(alpha_ptr + n * BLOCK_C + tl.arange(0, BLOCK_C))
        value += tl.load(
            final_ptr + n * final_n + state * final_c, mask=state >= 0, other=-float("inf")
        ).to(tl.float64)
        score = tl.max(value, axis=0)
        best = tl.min(tl.where(value == score, state, BLOCK_C), axis=0)
        tl.store(score_ptr + n, score)
        tl.store(path_ptr + length.to(tl.int64) * chains + n, best.to(tl.int64))
        place = tl.max(tl.where(state == best, tl.arange(0, BLOCK_C), 0), axis=0)
        for i in range(segments):
            tl.store(starts_ptr + i * chains + n, place)
            count = segment_of(lengths_ptr, n, steps, 0 * place, i, SEGMENT, True)[1]
            map_ptr = maps_ptr + (tl.full([], i, tl.int64) * chains + n) * BLOCK_C
            place = tl.load(map_ptr + place, mask=(place >= 0) & (count == SEGMENT), other=-1).to(
                tl.int32
            )


@triton.jit
def chain_fast_trace_kernel(
    pointers_ptr,  # [steps, chains, BLOCK_C] int16
    order_ptr,  # [BLOCK_C] int32
    edges_ptr,  # [2, WIDTH, BLOCK_C] int32
    lengths_ptr,  # [chains] or None
    starts_ptr,  # [2, segments, chains] int32
    marked_ptr,  # [chains] int32
    path_ptr,  # [steps + 1, chains] int64
    taken_ptr,  # [steps, chains] int64
    steps,
    chains,
    segments,
    LONE: tl.constexpr,
    SEGMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """States and edges of the steps of a segment; a mark where the path has an equal."""
    n, i, direction = turn(chains, LONE)
    first, count, step = segment_of(lengths_ptr, n, steps, direction, i, SEGMENT, LONE)
    if LONE:
        count = tl.where(tl.load(marked_ptr + n) != 0, count, 0)
    place = tl.load(starts_ptr + (direction * segments + i) * chains + n, mask=count > 0, other=-1)
    if place >= 0:
        lane = tl.arange(0, SEGMENT)
        places, pointers = tl.zeros([SEGMENT], tl.int32), tl.zeros([SEGMENT], tl.int32)
        for j in range(count):  # nothing here waits but for the next pointer
            pointer = tl.load(
                pointers_ptr + ((first + j * step) * chains + n) * BLOCK_C + place
            ).to(tl.int32)
            places, pointers = (
                tl.where(lane == j, place, places),
                tl.where(lane == j, pointer, pointers),
            )
            place = pointer & PLACE
        t, held = first + lane * step, lane < count
        edge = tl.load(
            edges_ptr + (direction * WIDTH + ((pointers >> SLOT) & 15)) * BLOCK_C + places,
            mask=held,
        )
        tl.store(taken_ptr + t * chains + n, edge.to(tl.int64), mask=held)
        tl.store(
            path_ptr + (t + direction) * chains + n,
            tl.load(order_ptr + (pointers & PLACE), mask=held).to(tl.int64),
            mask=held,
        )
        if not LONE:
            if tl.sum(pointers & TIE, axis=0) != 0:
                tl.store(marked_ptr + n, 1)
