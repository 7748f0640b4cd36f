"""Operators of segments for few states, with one lane for each state before a segment.

The steps of a segment are one operator on states, see `segments.py`. Row k of it is the state that
the steps make of a first state that is 1 at k and 0 elsewhere, so the rows need nothing of each
other. A lane takes one row through the steps, with all its states in registers, and reads the
transitions from a table that all lanes share.

Linear operators have a power of two for each row. In max-plus arithmetic a sum is a maximum, a
product is a sum, and no number is scaled, so scores that are integers stay exact.

When the states at the boundaries of segments are known, a lane takes the state before its segment
through the steps, or for beta the state after it.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from ....primitives.gpu.memory import load_length
from .arguments import Batch
from .scores import exp_split, power_of_2, transition_range

MAX_STATES_OF_TABLE = tl.constexpr(5)  # whose transitions stay in the registers of a lane


@triton.jit
def lane_scores(score_ptr, emissions, t, dt, remaining, C: tl.constexpr, NUMBER: tl.constexpr):
    """Load the emissions of NUMBER tokens from token t in the direction dt, before they are used.

    Each state of each token is a vector over lanes, whose sequences have their addresses. A lane
    reads its remaining tokens alone.
    """
    scores = ()
    for j in tl.static_range(NUMBER):
        for c in tl.static_range(C):
            at = (t + j * dt) * emissions.t + tl.full([], c, tl.int64) * emissions.c
            scores += (tl.load(score_ptr + at, mask=j < remaining, other=0.0),)
    return scores


@triton.jit
def lane_maximum(emissions, C: tl.constexpr):
    """Return the greatest emission of each lane, as `linear_chain_prepare_kernel` does."""
    maximum = emissions[0]
    for c in tl.static_range(1, C):
        maximum = tl.maximum(maximum, emissions[c])
    return maximum


@triton.jit
def lane_emissions(end, end_at, tokens, scores, first: tl.constexpr, t, C: tl.constexpr):
    """Return emissions in fp64 from number `first` on, with the end scores of the last token."""
    emissions = ()
    for c in tl.static_range(C):
        score = scores[first + c].to(tl.float64)
        if end.ptr is not None:
            at = end_at + tl.full([], c, tl.int64) * end.c
            score += tl.load(end.ptr + at, mask=t == tokens - 1, other=0.0).to(tl.float64)
        emissions += (score,)
    return emissions


@triton.jit
def load_lane(ptr, NUMBER: tl.constexpr, stride=1, mask=None):
    """Load numbers for all lanes or from an address of each; 0 where a mask excludes a lane."""
    x = ()
    for c in tl.static_range(NUMBER):
        at = ptr + tl.full([], c, tl.int64) * stride
        x += (tl.load(at, mask=mask, other=None if mask is None else 0.0),)
    return x


@triton.jit
def lane_product(x, matrix, ptr, C: tl.constexpr, MAX_PLUS: tl.constexpr):
    """Return states times a matrix of few states, or of more in memory."""
    y = ()
    for c in tl.static_range(C):
        total = x[0]
        for k in tl.static_range(C):
            if C > MAX_STATES_OF_TABLE:
                weight = tl.load(ptr + k * C + c)
            else:
                weight = matrix[k * C + c]
            if MAX_PLUS:
                term = x[k] + weight
                total = tl.where(term > total, term, total) if k > 0 else term
            else:
                total = total + x[k] * weight if k > 0 else x[k] * weight
        y += (total,)
    return y


@triton.jit
def lane_exponent(x, C: tl.constexpr):
    """Return the exponent of each lane's greatest state, in -1000 to 1000; 0 for 0 and NaN."""
    # The order of numbers of one sign is that of their bits.
    high = (x[0].to(tl.int64, bitcast=True) >> 32).to(tl.int32)
    for c in tl.static_range(1, C):
        high = tl.maximum(high, (x[c].to(tl.int64, bitcast=True) >> 32).to(tl.int32))
    exponent = (high >> 20) - 1023
    return tl.where((exponent < -1000) | (exponent > 1000), 0, exponent)


@triton.jit
def lane_unit(row, C: tl.constexpr, MAX_PLUS: tl.constexpr):
    """Return row `row` of the operator of no step."""
    x = ()
    for c in tl.static_range(C):
        if MAX_PLUS:
            x += (tl.where(row == c, 0.0, -float("inf")).to(tl.float64),)
        else:
            x += (tl.where(row == c, 1.0, 0.0).to(tl.float64),)
    return x


@triton.jit
def lane_select(mask, x, y, C: tl.constexpr):
    """Return the states x of the lanes of the mask, and y of the others."""
    z = ()
    for c in tl.static_range(C):
        z += (tl.where(mask, x[c], y[c]),)
    return z


@triton.jit
def enter_lane_tokens(y, emissions, maximum, scale, C, EXACT: tl.constexpr, MAX_PLUS: tl.constexpr):
    """Return states with emissions relative to the maximum, scaled by a power of two."""
    x = ()
    for c in tl.static_range(C):
        if MAX_PLUS:
            x += (y[c] + emissions[c],)
        else:
            x += (y[c] * (exp_split(emissions[c] - finite_shift(maximum), EXACT) * scale),)
    return x


@triton.jit
def store_row(operators, at, row, x, exponents, offset, C: tl.constexpr):
    """Store row `row` of each lane's operator, and the offset, which is the same in all rows."""
    for c in tl.static_range(C):
        tl.store(operators.matrices + (at * C + row) * C + c, x[c])
    if operators.exponents is not None:
        tl.store(operators.exponents + at * C + row, exponents)
    tl.store(operators.offsets + at, offset)


@triton.jit
def lane_index(program, number, LANES: tl.constexpr):
    """Return the lanes of a program. Lanes past the last of all repeat it, and store the same."""
    lane = program.to(tl.int64) * LANES + tl.arange(0, LANES)
    return tl.minimum(lane, number - 1)


@triton.jit
def lanes_of_set(program, sets, number, LANES: tl.constexpr):
    """Return the set of transitions of a program, and its lanes.

    Each set has programs of its own for so many lanes.
    """
    blocks = tl.cdiv(number, LANES)
    which = program // blocks % sets
    return which, lane_index(program - which * blocks, number, LANES)


@triton.jit
def linear_chain_lane_operators_kernel(
    batch,  # Batch, without start
    table_ptr,  # [C, C] fp64, or [sets, 2, C, C] fp64, whose first of two is read
    span,  # Span, which counts without MAX_PLUS
    operators,  # Operators, written
    segments,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    EXACT: tl.constexpr,
    MAX_PLUS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Form one row of the operator of a segment in each lane."""
    batch = Batch(*batch)
    TABLE: tl.constexpr = C * C if C <= MAX_STATES_OF_TABLE else 0
    # The steps of a segment are a multiple of the tokens that are loaded at once.
    AHEAD: tl.constexpr = 4 if MAX_PLUS and C <= MAX_STATES_OF_TABLE else 1
    sequences = tl.full([], batch.N, tl.int64) // span.sets
    which, lane = lanes_of_set(tl.program_id(0), span.sets, sequences * segments * C, LANES)
    serves, shift = transition_range(span, which, BLOCK_PARTS, MAX_PLUS)
    if serves:
        table_ptr += which * 2 * C * C
        row, segment = lane % C, lane // C % segments
        n = which * sequences + lane // C // segments
        tokens, _ = load_length(batch.lengths, n, batch.T, 1, 1)
        low = tl.minimum(segment * STEPS, tokens - 1)
        num_steps = tl.minimum(STEPS, tokens - 1 - low)
        inputs = (batch.emissions.ptr + n * batch.emissions.n, batch.emissions)
        end_at = n * batch.end.n
        x = lane_unit(row, C, MAX_PLUS)
        exponents = tl.zeros([LANES], tl.float64)
        offset = exponents if MAX_PLUS else shift * num_steps
        table = load_lane(table_ptr, TABLE)
        scores = lane_scores(*inputs, low + 1, 1, num_steps, C, AHEAD)
        for i in range(0, tl.max(num_steps, axis=0).to(tl.int32), AHEAD):
            left = num_steps - i - AHEAD
            next_scores = lane_scores(*inputs, low + 1 + i + AHEAD, 1, left, C, AHEAD)
            for j in tl.static_range(AHEAD):
                t, active, maximum, scale = low + 1 + i + j, i + j < num_steps, offset, offset
                emissions = lane_emissions(batch.end, end_at, tokens, scores, j * C, t, C)
                if MAX_PLUS:
                    is_nan = emissions[0] != emissions[0]
                    for c in tl.static_range(1, C):
                        is_nan = is_nan | (emissions[c] != emissions[c])
                    offset = tl.where(active & is_nan, float("nan"), offset)
                else:
                    maximum = lane_maximum(emissions, C)
                    exponent = lane_exponent(x, C)
                    exponents += tl.where(active, exponent, 0).to(tl.float64)
                    offset += maximum
                    scale = power_of_2(-exponent)
                if C > MAX_STATES_OF_TABLE:
                    # Without it the compiler would load the whole table before the loop, and spill.
                    tl.debug_barrier()
                y = lane_product(x, table, table_ptr, C, MAX_PLUS)
                y = enter_lane_tokens(y, emissions, maximum, scale, C, EXACT, MAX_PLUS)
                x = lane_select(active, y, x, C)
            scores = next_scores
        store_row(operators, n * segments + segment, row, x, exponents, offset, C)


@triton.jit
def linear_chain_lane_groups_kernel(
    operators,  # Operators of segments
    span,  # Span, which counts without MAX_PLUS
    group_operators,  # Operators of groups, written
    N,
    segments,
    groups,
    C: tl.constexpr,
    SIZE: tl.constexpr,  # segments in a group
    MAX_PLUS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Form one row of the product of the operators of a group in each lane."""
    TABLE: tl.constexpr = C * C if C <= MAX_STATES_OF_TABLE else 0
    sequences = tl.full([], N, tl.int64) // span.sets
    which, lane = lanes_of_set(tl.program_id(0), span.sets, sequences * groups * C, LANES)
    if transition_range(span, which, BLOCK_PARTS, MAX_PLUS)[0]:
        row, group = lane % C, lane // C % groups
        n = which * sequences + lane // C // groups
        x, exponents = lane_unit(row, C, MAX_PLUS), tl.zeros([LANES], tl.float64)
        offset = tl.zeros([LANES], tl.float64)
        at, last = n * segments + group * SIZE, n * segments + segments - 1
        matrix = load_lane(operators.matrices + at * C * C, TABLE)
        exponents_ptr = operators.exponents if MAX_PLUS else operators.exponents + at * C
        powers = load_lane(exponents_ptr, 0 if MAX_PLUS else C)
        for i in range(0, SIZE):
            active, following = group * SIZE + i < segments, tl.minimum(at + 1, last)
            # The next operator is loaded while this one is used.
            next_matrix = load_lane(operators.matrices + following * C * C, TABLE)
            before = x
            if not MAX_PLUS:
                next_powers = load_lane(operators.exponents + following * C, C)
                greatest = powers[0]
                for k in tl.static_range(1, C):
                    greatest = tl.maximum(greatest, powers[k])
                exponent = lane_exponent(x, C)
                scaled = ()
                for k in tl.static_range(C):
                    power = tl.maximum(powers[k] - greatest - exponent, -1022.0)
                    scaled += (x[k] * power_of_2(tl.minimum(power, 1000.0).to(tl.int32)),)
                before, powers = scaled, next_powers
                exponents += tl.where(active, exponent + greatest, 0.0)
            offset += tl.where(active, tl.load(operators.offsets + at), 0.0)
            y = lane_product(before, matrix, operators.matrices + at * C * C, C, MAX_PLUS)
            x, matrix, at = lane_select(active, y, x, C), next_matrix, following
        store_row(group_operators, n * groups + group, row, x, exponents, offset, C)


@triton.jit
def store_lane(ptr, x, mask, C: tl.constexpr, WIDTH: tl.constexpr):
    """Store the states of the lanes of the mask at their addresses, WIDTH states at once.

    C is a multiple of the width. The states of a token start on 16 bytes if it is even.
    """
    lane = tl.max_contiguous(ptr[:, None] + tl.arange(0, WIDTH)[None, :], [1, WIDTH])
    for c in tl.static_range(0, C, WIDTH):
        if WIDTH == 1:
            tl.store(ptr + c, x[c], mask=mask)
        else:
            states = tl.join(x[c], x[c + 1])
            if WIDTH == 4:
                pairs = tl.join(tl.join(x[c], x[c + 2]), tl.join(x[c + 1], x[c + 3]))
                states = tl.reshape(pairs, [ptr.shape[0], 4])
            tl.store(tl.multiple_of(lane + c, [1, 16]), states, mask=mask[:, None])


@triton.jit
def linear_chain_lane_states_kernel(
    batch,  # Batch, without start
    table_ptr,  # [sets, 2, C, C] fp64, exp of the transitions, and the same transposed
    boundaries_ptr,  # [2, N, segments + 1, C] fp64
    saved,  # Saved, without maxima: states and scales are written
    segments,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    STORED: tl.constexpr,
    EXACT: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Store alpha of a segment in each lane, or in the second half of the programs beta.

    A state x includes the emission of its token, and y does not, see `scan.py`.
    """
    batch = Batch(*batch)
    TABLE: tl.constexpr = C * C if C <= MAX_STATES_OF_TABLE else 0
    T, N, end = batch.T, batch.N, batch.end
    half, sets, sequences = tl.num_programs(0) // 2, saved.span.sets, tl.full([], N, tl.int64)
    lanes = sequences * segments
    which, lane = lanes_of_set(tl.program_id(0) % half, sets, lanes // sets, LANES)
    if transition_range(saved.span, which, BLOCK_PARTS)[0]:
        is_alpha = tl.program_id(0) < half
        n, segment = which * (sequences // sets) + lane // segments, lane % segments
        tokens, _ = load_length(batch.lengths, n, T, 1, 1)
        low = tl.minimum(segment * STEPS, tokens - 1)
        num_steps = tl.minimum(STEPS, tokens - 1 - low)
        t, dt = tl.where(is_alpha, low, low + num_steps), tl.where(is_alpha, 1, -1).to(tl.int64)
        inputs = (batch.emissions.ptr + n * batch.emissions.n, batch.emissions)
        end_at = n * end.n
        matrix_ptr = table_ptr + which * 2 * C * C + tl.where(is_alpha, 0, C * C)
        table = load_lane(matrix_ptr, TABLE)
        # Beta follows alpha in the states, and so it does in the boundaries.
        known_ptr = boundaries_ptr + (n * (segments + 1) + segment) * C
        known_ptr += tl.where(is_alpha, 0, (lanes + N + 1) * C)
        alpha_ptr = saved.states + n * C + tl.where(is_alpha, 0, tl.full([], T, tl.int64) * N * C)
        given, exponent = load_lane(known_ptr, C), tl.zeros([LANES], tl.int32)
        at, is_end = t * N, tl.where(is_alpha, segment == 0, t == tokens - 1)
        store_lane(alpha_ptr + at * C, given, is_end, C, STORED)
        loaded = lane_scores(*inputs, t, dt, num_steps, C, 1)
        first = lane_emissions(end, end_at, tokens, loaded, 0, t, C)
        x = enter_lane_tokens(given, first, lane_maximum(first, C), 1.0, C, EXACT, False)
        x = lane_select(is_alpha, given, x, C)
        scores = lane_scores(*inputs, t + dt, dt, num_steps, C, 1)
        for i in range(1, tl.max(num_steps, axis=0).to(tl.int32) + 1):
            at, active = t + i * dt, i <= num_steps
            next_scores = lane_scores(*inputs, at + dt, dt, num_steps - i, C, 1)
            emissions = lane_emissions(end, end_at, tokens, scores, 0, at, C)
            removed, y = lane_exponent(x, C), lane_product(x, table, matrix_ptr, C, False)
            maximum, scale = lane_maximum(emissions, C), power_of_2(-removed)
            after = enter_lane_tokens(y, emissions, maximum, scale, C, EXACT, False)
            stored = lane_select(is_alpha, after, y, C)
            store_lane(alpha_ptr + at * N * C, stored, active, C, STORED)
            x = lane_select(active, after, x, C)
            exponent = tl.where(active, removed, exponent)
            tl.store(saved.scales + n + at * N, exponent.to(tl.float64), mask=active & is_alpha)
            scores = next_scores
        if is_alpha:
            at, known = (low + num_steps) * N, load_lane(known_ptr + C, C)
            # The next segment starts from the known state, whose power of two may be another.
            store_lane(alpha_ptr + at * C, known, num_steps > 0, C, STORED)
            total, known_total = x[0], known[0]
            for c in tl.static_range(1, C):
                total += x[c]
                known_total += known[c]
            power = exponent.to(tl.float64) + tl.log2(total / known_total)
            tl.store(saved.scales + n + at, power, mask=num_steps > 0)
