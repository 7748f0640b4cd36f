"""Log Z of sparse linear chains over small tables, and its gradient, with register-resident states.

These kernels serve tables of at most 1,024 states with few edges into and out of each state, on
NVIDIA GPUs. The algorithm is that of `logz.py`: one program scans alpha up to the middle step,
another scans beta down to the state after it, and `chain_resident_logz_kernel` joins both. The two
directions run the same code, with the edge table of the direction and the sign of the time step.

Each thread keeps one state, as a compensated pair in registers. States reach their neighbors
through shared memory, by Gluon's gather (see `resident_steps.py`). The scores of a step are
loaded in memory order, PREFETCH steps before their use, and a gather puts them in the order of
the direction's edges.

For the gradient, alpha and beta continue from the meeting point, along the saved states of the
opposite direction. For an edge e into a lane,

    marginal(e) = exp(term(e) - maximum) / (1 + rest) * exp(alpha + beta - log Z)

The exponentials and 1 / (1 + rest) come from the step of the scan itself. Alpha and beta are
those of the lane after the step. The inverse gather, through shared memory, returns marginals to
memory order. Every eighth step the logarithm of the sum of the posteriors is added to log Z, so
that rounding errors of alpha and beta do not accumulate.

The posteriors of states need no marginals of edges. A chain given its sequence is a Markov chain.
Its transition probabilities follow from the saved states of one direction alone, so one saved half
gives the posteriors of its times:

    p(t, s) = sum over edges s -> c of p(t + 1, c) * exp(alpha(t, s) + score - alpha(t + 1, c))
    p(t + 1, c) = sum over edges s -> c of p(t, s) * exp(score + beta(t + 1, c) - beta(t, s))

Both programs of a chain begin at the meeting point, where alpha and beta are known. Direction 0
follows the saved beta to the end, and direction 1 the saved alpha to the start. A step has one
exponential for each edge and no maximum, so it costs less than a step of alpha. Posteriors are
probabilities in fp32, and they are divided by their sum from time to time.

Where only sums over states are asked for, each sum of four lanes is stored instead of four numbers,
which takes a fifth less memory of a decoding. Such lanes are in one warp, so the sum costs two
shuffles and no barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.math import LOG2E, log_exact
from ....primitives.gpu.memory import load_length
from ....primitives.gpu.sync import unpack_pair
from .resident_steps import (
    StepRows,
    concat_blocks,
    gather_neighbors,
    gather_scores,
    load_boundary_pair,
    load_edge_table,
    load_lanes,
    load_logz_pair,
    load_rows,
    log_step,
    pack_compensated,
    rows_from,
    split_blocks,
    state_posterior,
    store_row,
    tile_index,
    tree_sum,
    two_sum,
    without_prefetch,
    zero_if_infinite,
)


@gluon.jit
def store_states(rows, state, mask, FP64: gl.constexpr):
    """Store packed states, or with FP64 their values, and return the rows that follow."""
    if FP64:
        high, low = unpack_pair(state)
        state = high.to(gl.float64) + low.to(gl.float64)
    return store_row(rows, state, mask)


@gluon.jit
def chain_resident_halves_kernel(
    chains,  # Chains with ResidentEdges
    saved_ptr,  # [T + 1, N, C] int64, or [2, N, C], or with BETA [T + 1, N, C] fp64
    SAVE: gl.constexpr,
    BETA: gl.constexpr,
    shape: gl.constexpr,  # ResidentShape
):
    """Scan alpha up to the meeting point, or beta down to the state after it.

    With BETA, scan beta to the first step and store it at all times; after the length it is the
    final scores.
    """
    scores, table, initial, final, lengths_ptr, T, N = chains
    PREFETCH: gl.constexpr = shape.PREFETCH
    C, n, direction = table.C, (gl.program_id(0) // 2).to(gl.int64), gl.program_id(0) % 2
    if BETA:
        n, direction = gl.program_id(0).to(gl.int64), gl.program_id(0) * 0 + 1
    length, invalid = load_length(lengths_ptr, n, T)
    middle = gl.maximum(length - 1, 0) // 2
    sign = (1 - 2 * direction).to(gl.int64)
    start = gl.where(direction == 0, 0, length).to(gl.int64)
    num_steps = gl.where(direction == 0, middle, gl.maximum(length - 1 - middle, 0))
    if BETA:
        num_steps = length
    c, rows = load_lanes(scores, table, n, shape)
    rows = rows_from(rows, start - direction, sign)
    neighbors, edges = load_edge_table(table, direction, shape)
    state = load_boundary_pair(initial.ptr + n * initial.n, c, initial.c, invalid)
    if direction == 1:
        state = load_boundary_pair(final.ptr + n * final.n, c, final.c, invalid if BETA else 0.0)
    saved = StepRows(saved_ptr + (start * N + n) * C, sign * N * C, c, c >= 0)
    if BETA:
        saved = rows_from(saved, sign * (T - length))  # from the last time
        for _ in range(0, T - length + 1):
            saved = store_states(saved, state, True, True)
    elif SAVE:
        saved = store_states(saved, state, (direction == 0) | (length > 0), False)
    prefetched = load_rows(rows, num_steps, PREFETCH)
    for i in range(0, num_steps, PREFETCH):
        edge_scores = gather_scores(prefetched, edges, shape)
        rows = rows_from(rows, PREFETCH)
        prefetched = load_rows(rows, num_steps - i - PREFETCH, PREFETCH)
        for u in gl.static_range(PREFETCH):
            next_state = log_step(state, edge_scores[u], neighbors, shape)[0]
            state = gl.where(i + u < num_steps, next_state, state)
            if SAVE:
                saved = store_states(saved, state, i + u < num_steps, BETA)
    if not SAVE:
        gl.store(saved_ptr + (direction * N + n) * C + c, state, mask=c >= 0)


@gluon.jit
def load_middle_states(
    rows, table, initial, final, n, N, c, saved_ptr, saved_n, length, invalid, shape
):
    """Return packed alpha and beta of a chain after its middle step.

    Args:
        rows: the scores of the chain from the first step on, `StepRows`.
        c: the state of each lane.
        saved_ptr: the states of the first chain at time 0.
        saved_n: N if all states are saved, or 0 if `saved_ptr` has alpha and then beta.
    """
    C = table.C
    ONE_STEP: gl.constexpr = without_prefetch(shape)
    initial_ptr, final_ptr = initial.ptr + n * initial.n, final.ptr + n * final.n
    saved_ptr += n * C
    middle = (gl.maximum(length - 1, 0) // 2).to(gl.int64)
    alpha = load_boundary_pair(initial_ptr, c, initial.c, invalid)
    beta = load_boundary_pair(final_ptr, c, final.c, 0.0)
    if length > 0:
        neighbors, edges = load_edge_table(table, 0, ONE_STEP)
        row = load_rows(rows_from(rows, middle), 1, 1)
        edge_scores = gather_scores(row, edges, ONE_STEP)
        saved_ptr += middle * saved_n * C
        middle_alpha = gl.load(saved_ptr + c, mask=c >= 0, other=0)
        alpha, _, _ = log_step(middle_alpha, edge_scores[0], neighbors, shape)
        beta = gl.load(saved_ptr + (middle * 0 + N) * C + c, mask=c >= 0, other=0)
    return alpha, beta


@gluon.jit
def chain_resident_logz_kernel(
    chains,  # Chains with ResidentEdges
    saved_ptr,  # [T + 1, N, C] int64, or [2, N, C]
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results, or None
    SAVE: gl.constexpr,
    shape: gl.constexpr,  # ResidentShape
):
    """Compute log Z of a chain from alpha before its middle step and beta after it.

    Log Z is stored in fp64 and, if asked for, rounded.
    """
    scores, table, initial, final, lengths_ptr, T, N = chains
    n = gl.program_id(0).to(gl.int64)
    length, invalid = load_length(lengths_ptr, n, T)
    c, rows = load_lanes(scores, table, n, shape)
    alpha, beta = load_middle_states(
        rows, table, initial, final, n, N, c, saved_ptr, N * SAVE, length, invalid, shape
    )
    alpha_high, alpha_low = unpack_pair(alpha)
    beta_high, beta_low = unpack_pair(beta)
    value = (alpha_high.to(gl.float64) + alpha_low.to(gl.float64)) + (
        beta_high.to(gl.float64) + beta_low.to(gl.float64)
    )
    value = gl.where(c >= 0, value, -float("inf"))
    greatest = gl.max(value, axis=0)
    shift = gl.where(greatest == -float("inf"), 0.0, greatest)
    total = gl.sum(gl.exp2((value - shift).to(gl.float32) * LOG2E), axis=0)
    logz = shift + log_exact(total).to(gl.float64) + invalid
    gl.store(logz_ptr + n, logz)
    if rounded_ptr is not None:
        gl.store(rounded_ptr + n, logz.to(rounded_ptr.dtype.element_ty))


@gluon.jit
def chain_resident_gradient_kernel(
    grad,  # StridedChains [N]
    chains,  # Chains with ResidentEdges
    logz_ptr,  # [N] fp64
    saved_ptr,  # [T + 1, N, C] int64
    gradients,  # ChainGradients
    shape: gl.constexpr,  # ResidentShape
):
    """Continue alpha to the end or beta to the start, and store the marginals."""
    scores, table, initial, final, lengths_ptr, T, N = chains
    PREFETCH: gl.constexpr = shape.PREFETCH
    C, width = table.C, table.C * table.K
    n, direction = (gl.program_id(0) // 2).to(gl.int64), gl.program_id(0) % 2
    length, invalid = load_length(lengths_ptr, n, T)
    middle = gl.maximum(length - 1, 0) // 2
    sign, start = (1 - 2 * direction).to(gl.int64), (middle + direction).to(gl.int64)
    num_steps = gl.where(length == 0, 0, gl.where(direction == 0, length - middle, middle + 1))
    step, state_stride, e = start - direction, sign * N * C, gl.arange(0, shape.BLOCK_E, shape.ROW)
    c, first_scores = load_lanes(scores, table, n, shape)
    first_scores = rows_from(first_scores, step, sign)
    neighbors, edges = load_edge_table(table, direction, shape)
    # Where each score of PREFETCH steps has its marginal among those of the lanes' edges.
    PADDED_DEGREE: gl.constexpr = shape.PADDED_DEGREE
    BLOCK_C: gl.constexpr = shape.BLOCK_C
    BLOCK_E: gl.constexpr = shape.BLOCK_E
    LANE_EDGES: gl.constexpr = PADDED_DEGREE * BLOCK_C
    positions = gl.load(table.edge_positions_ptr + direction * BLOCK_E + e)
    tiles = tile_index(gl.maximum(positions, 0), LANE_EDGES, PREFETCH, BLOCK_E, shape.ROW)
    has_edge = positions >= 0
    # The states of the opposite direction after each step.
    first_saved = StepRows(saved_ptr + (start * N + n) * C, state_stride, c, c >= 0)
    d_scores_ptr = gradients.edges_ptr + (step * N + n) * width
    first_marginals = StepRows(d_scores_ptr, state_stride * table.K, e, e < width)
    grad_logz = gl.load(grad.ptr + n * grad.n).to(gl.float32)
    logz = load_logz_pair(logz_ptr + n)
    first_state = load_boundary_pair(initial.ptr + n * initial.n, c, initial.c, invalid)
    last_state = load_boundary_pair(final.ptr + n * final.n, c, final.c, 0.0)
    state = gl.where(direction == 0, first_state, last_state)
    if length > 0:
        state = gl.load(first_saved.ptr + c, mask=c >= 0, other=0)
    rows, saved, marginals = first_scores, rows_from(first_saved, 1), first_marginals
    logz_high, logz_low = logz
    prefetched = load_rows(rows, num_steps, PREFETCH)
    prefetched_opposite = load_rows(saved, num_steps, PREFETCH)
    for i in range(0, num_steps, PREFETCH):
        edge_scores, opposite = gather_scores(prefetched, edges, shape), prefetched_opposite
        rows, saved = rows_from(rows, PREFETCH), rows_from(saved, PREFETCH)
        prefetched = load_rows(rows, num_steps - i - PREFETCH, PREFETCH)
        prefetched_opposite = load_rows(saved, num_steps - i - PREFETCH, PREFETCH)
        lane_marginals = ()
        for u in gl.static_range(PREFETCH):
            next_state, exponentials, inverse = log_step(state, edge_scores[u], neighbors, shape)
            state = gl.where(i + u < num_steps, next_state, state)
            posterior = state_posterior(next_state, opposite[u], logz_high, logz_low)
            coefficient = posterior * inverse * grad_logz
            for k in gl.static_range(PADDED_DEGREE):
                factor = exponentials[k] if k < shape.DEGREE else coefficient
                lane_marginals = lane_marginals + (factor * coefficient,)
        # Return the marginals to memory order.
        in_lanes = concat_blocks(lane_marginals, BLOCK_C, PREFETCH * PADDED_DEGREE, shape.STATE)
        in_rows = split_blocks(gl.gather(in_lanes, tiles, 0), BLOCK_E, PREFETCH, shape.ROW)
        for u in gl.static_range(PREFETCH):
            # The middle step belongs to alpha.
            in_range = (i + u < num_steps) & ((direction == 0) | (i + u > 0))
            row = in_rows[u] if shape.REGULAR else gl.where(has_edge, in_rows[u], 0.0)
            marginals = store_row(marginals, row, in_range)
        if (i % 8 == 8 - PREFETCH) & (i + PREFETCH <= num_steps):
            # Log Z takes the rounding errors of alpha and beta, so that they do not accumulate.
            total = gl.sum(posterior, axis=0)
            logz_high, error = two_sum(logz_high, gl.where(total > 0.0, log_exact(total), 0.0))
            logz_low += zero_if_infinite(error, logz_high)
    boundary = gl.where(direction == 0, last_state, first_state)
    d_boundary = state_posterior(state, boundary, logz_high, logz_low) * grad_logz
    if direction == 0:
        d_final_ptr = gradients.final_ptr + n * C + c
        gl.store(d_final_ptr, d_boundary.to(d_final_ptr.dtype.element_ty), mask=c >= 0)
        # After the length the gradient is 0, or NaN for an invalid length.
        rest, fill = rows_from(first_marginals, num_steps), e.to(gl.float32) * 0.0 + invalid
        for _ in range(T - length):
            rest = store_row(rest, fill, True)
    else:
        rounded = d_boundary.to(gradients.initial_ptr.dtype.element_ty)
        gl.store(gradients.initial_ptr + n * C + c, rounded, mask=c >= 0)


@gluon.jit
def exp_of_low(low):
    """Return exp of the low part of a pair, by a polynomial that is 1 at 0 without an error."""
    x = gl.minimum(gl.maximum(low, -1.0), 1.0)
    return 1.0 + x * (1.0 + x * (0.5 + x * (1.0 / 6.0)))


@gluon.jit
def posterior_step(posterior, state, next_state, scores, neighbors, shape):
    """Return the posteriors after a step of the direction that leads away from the middle.

    `scores` are those of each lane's edges.
    `state` and `next_state` are packed: alpha or beta, whichever was saved, before and after it.
    The exponential has the high parts only, and factors have the low parts. So a transition of
    probability 1 has the factor 1, however many such steps follow each other.
    """
    high, low = unpack_pair(state)
    # A state without a posterior gives nothing, even if its alpha or beta is -inf.
    high = gl.where(posterior == 0.0, float("inf"), high)
    sent = pack_compensated(high, posterior * exp_of_low(-low))
    neighbor_states, neighbor_lanes = gather_neighbors(sent, neighbors, shape)
    next_high, next_low = unpack_pair(next_state)
    terms = ()
    for k in gl.static_range(shape.DEGREE):
        high, share = unpack_pair(neighbor_states[k])
        score = scores[k].to(gl.float32)
        term = share * gl.exp2(((next_high - high) + score) * LOG2E)
        if not shape.REGULAR:
            term = gl.where(neighbor_lanes[k] >= 0, term, 0.0)
        terms = terms + (term,)
    return tree_sum(terms, shape.DEGREE) * exp_of_low(next_low)


@gluon.jit
def store_results(rows, posterior, mask, shape, SUM: gl.constexpr):
    """Store the posteriors of a time, or their sums, and return the rows that follow."""
    if SUM:
        posterior = gl.sum(gl.reshape(posterior, [shape.BLOCK_C // 16, 4, 4]), axis=1)
    return store_row(rows, posterior, mask)


@gluon.jit
def chain_resident_posteriors_kernel(
    chains,  # Chains with ResidentEdges
    logz_ptr,  # [N] fp64
    saved_ptr,  # [T + 1, N, C] int64
    posteriors_ptr,  # [T + 1, N, C] fp32, or [T + 1, N, BLOCK_C / 4]; not written past the length
    first_ptr,  # [N, C] fp32
    SUM: gl.constexpr,
    shape: gl.constexpr,  # ResidentShape
):
    """Store the posterior of each state at each time, from the meeting point to one end.

    With SUM, which needs a state in every lane, each 16 lanes have four sums of four states, which
    equal the column of the sum modulo 4. The posteriors at time 0 are also stored one by one.
    """
    scores, table, initial, final, lengths_ptr, T, N = chains
    PREFETCH: gl.constexpr = shape.PREFETCH
    C = table.C
    n, direction = (gl.program_id(0) // 2).to(gl.int64), gl.program_id(0) % 2
    length, invalid = load_length(lengths_ptr, n, T)
    c, first_rows = load_lanes(scores, table, n, shape)
    alpha, beta = load_middle_states(
        first_rows, table, initial, final, n, N, c, saved_ptr, N, length, invalid, shape
    )
    logz_high, logz_low = load_logz_pair(logz_ptr + n)
    posterior = gl.where(c >= 0, state_posterior(alpha, beta, logz_high, logz_low), 0.0)
    # The time of these states is after the middle step, or 0 in a chain without steps.
    time = gl.where(length > 0, (length - 1) // 2 + 1, 0)
    num_steps = gl.where(direction == 0, length - time, time)
    sign, start = (1 - 2 * direction).to(gl.int64), time.to(gl.int64)
    row, column = start * N + n, c
    if SUM:
        column = gl.arange(0, shape.BLOCK_C, shape.STATE) // 16 * 4 + c % 4
        # Those of the four lanes of a sum are equal.
        column = gl.max(gl.reshape(column, [shape.BLOCK_C // 16, 4, 4]), axis=1)
    size = shape.BLOCK_C // 4 if SUM else C
    results = StepRows(posteriors_ptr + row * size, sign * N * size, column, column >= 0)
    results = store_results(results, posterior, direction == 0, shape, SUM)
    neighbors, edges = load_edge_table(table, direction, shape)
    saved = rows_from(StepRows(saved_ptr + row * C, sign * N * C, c, c >= 0), 1)
    state = gl.where(direction == 0, beta, alpha)
    rows = rows_from(first_rows, start - direction, sign)
    prefetched = load_rows(rows, num_steps, PREFETCH)
    prefetched_states = load_rows(saved, num_steps, PREFETCH)
    for i in range(0, num_steps, PREFETCH):
        edge_scores, states = gather_scores(prefetched, edges, shape), prefetched_states
        rows, saved = rows_from(rows, PREFETCH), rows_from(saved, PREFETCH)
        prefetched = load_rows(rows, num_steps - i - PREFETCH, PREFETCH)
        prefetched_states = load_rows(saved, num_steps - i - PREFETCH, PREFETCH)
        if i % 8 == 0:
            total = gl.sum(posterior, axis=0)
            posterior = posterior * (1.0 / gl.where(total == 0.0, 1.0, total))
        for u in gl.static_range(PREFETCH):
            next_posterior = posterior_step(
                posterior, state, states[u], edge_scores[u], neighbors, shape
            )
            posterior = gl.where(i + u < num_steps, next_posterior, posterior)
            state = states[u]
            results = store_results(results, posterior, i + u < num_steps, shape, SUM)
    gl.store(first_ptr + n * C + c, posterior, mask=(c >= 0) & (direction == 1))
