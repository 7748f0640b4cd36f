"""The posteriors of states over small tables, without the marginals of edges.

A chain given its sequence is a Markov chain. Its transition probabilities follow from the saved
states of one direction alone, so one saved half gives the posteriors of its times:

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

from ....primitives.gpu.math import LOG2E
from ....primitives.gpu.sync import unpack_pair
from .resident_logz import load_middle_states
from .resident_steps import (
    StepRows,
    gather_neighbors,
    gather_scores,
    load_edge_table,
    load_lanes,
    load_logz_pair,
    load_rows,
    pack_compensated,
    rows_from,
    state_posterior,
    store_row,
    tree_sum,
)
from .steps import load_length


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
