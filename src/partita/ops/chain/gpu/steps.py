"""The steps of a scan over a chain, for one block of states.

A chain has T steps. At each step, the edge (c, k) leads from the state source[c, k] to the state c.
Under the Log semiring,

    alpha[0]        = initial
    alpha[t + 1, c] = log sum over k of exp(alpha[t, source[c, k]] + scores[t, c, k])
    beta[length]    = final
    beta[t, s]      = log sum over (c, k) with source[c, k] = s
                      of exp(scores[t, c, k] + beta[t + 1, c])
    log Z           = log sum over c of exp(alpha[t, c] + beta[t, c]), for any t
    marginal of (c, k) at step t
                    = exp(alpha[t, source[c, k]] + scores[t, c, k] + beta[t + 1, c] - log Z)

Under the Max semiring, a maximum replaces each log-sum-exp.

Alpha and beta are fp64: over a long chain the states that matter may lie thousands below the
greatest, where fp32 has no digits left. Only exponentials and logarithms of differences are in
ACC_DTYPE. Alpha and beta pass through global memory, so each step has a barrier of the program
before it reads them.

A slot of a state is one of the edges that a direction of a scan takes into it: for alpha an edge
that enters the state, for beta one that leaves it. It is a tuple of three blocks: the state at the
other end of the edge, or -1 for no edge; the state c that the edge enters; and the number k of the
edge among those that enter it.

Source: Rabiner, A tutorial on hidden Markov models, 1989 (forward-backward algorithm).
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, log1p_pair, log_exact
from .arguments import StridedEdges


@triton.jit
def from_step(array, t):
    """Return an array of edges from step t on; t is an int64."""
    return StridedEdges(array.ptr + t * array.t, array.t, array.n, array.c, array.k)


@triton.jit
def lse_add(maximum, rest, term):
    """Add one term to a log-sum-exp; a term of -inf adds nothing.

    The log-sum-exp is maximum + log(1 + rest): `maximum` is the greatest term (fp64), `rest` is the
    sum of exp(term - maximum) over the other terms (ACC_DTYPE). If `rest` included the 1 of the
    greatest term, rounding would lose at each step what the other terms add.
    """
    difference = tl.where(term == -float("inf"), -float("inf"), term - maximum).to(rest.dtype)
    e = exp(-tl.abs(difference))
    return tl.maximum(maximum, term), tl.where(difference > 0.0, (1.0 + rest) * e, rest + e)


@triton.jit
def max_add(maximum, term):
    """Add one term to a maximum. NaN is greater than all numbers, so that it reaches the result."""
    return tl.where((term > maximum) | (term != term), term, maximum)


@triton.jit
def lse_value(maximum, rest):
    """Return the value of a log-sum-exp of `lse_add`, fp64."""
    high, low = log1p_pair(rest)
    return maximum + (high.to(tl.float64) + low.to(tl.float64))


@triton.jit
def shifted_log(shift, total):
    """Return shift + log(total), fp64."""
    return shift + log_exact(total).to(tl.float64)


@triton.jit
def edge_score(scores, c, k, valid, other=-float("inf")):
    """Load the first step's number of the k-th edge into c, fp64; `other` where invalid."""
    ptrs = scores.ptr + c.to(tl.int64) * scores.c + k * tl.cast(scores.k, tl.int64)
    return tl.load(ptrs, mask=valid, other=other).to(tl.float64)


@triton.jit
def load_source(edges, c, k):
    """Return the state that the k-th edge into c leaves, and whether there is such an edge."""
    source = tl.load(edges.source_ptr + c * edges.K + k, mask=c < edges.C, other=-1)
    return source, source >= 0


@triton.jit
def out_degree(edges, s):
    """Return where the edges that leave the states s start in `out_edges_ptr`, and their number."""
    start = tl.load(edges.out_offsets_ptr + s, mask=s < edges.C, other=0)
    return start, tl.load(edges.out_offsets_ptr + s + 1, mask=s < edges.C, other=0) - start


@triton.jit
def load_slot(edges, c, j, REVERSE: tl.constexpr):
    """Load the j-th slot of the states c: an edge into them, or with REVERSE out of them."""
    if REVERSE:
        start, degree = out_degree(edges, c)
        edge = tl.load(edges.out_edges_ptr + start + j, mask=j < degree, other=0)
        return tl.where(j < degree, edge // edges.K, -1), edge // edges.K, edge % edges.K
    else:
        source, valid = load_source(edges, c, j)
        return tl.where(valid, source, -1), c, c * 0 + j


@triton.jit
def load_slots(edges, c, DEGREE: tl.constexpr, REVERSE: tl.constexpr):
    """Load DEGREE slots; none if DEGREE is 0."""
    slots = ()
    for j in tl.static_range(DEGREE):
        slots = slots + (load_slot(edges, c, j, REVERSE),)
    return slots


@triton.jit
def slot_count(edges, c, REVERSE: tl.constexpr):
    """Return how many slots the states c have at most."""
    if REVERSE:
        return tl.max(out_degree(edges, c)[1])
    else:
        return edges.K


@triton.jit
def load_state(state_ptr, slot):
    """Load alpha or beta of the state at the other end of a slot; -inf for no edge."""
    return tl.load(state_ptr + slot[0], mask=slot[0] >= 0, other=-float("inf"))


@triton.jit
def add_term(maximum, rest, term, IS_MAX: tl.constexpr):
    """Add one term to a log-sum-exp, or to a maximum."""
    if IS_MAX:
        return max_add(maximum, term), rest
    else:
        return lse_add(maximum, rest, term)


@triton.jit
def state_step(
    state_ptr,
    scores,
    edges,
    c,
    DEGREE: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    IS_MAX: tl.constexpr = False,
    REVERSE: tl.constexpr = False,
):
    """Compute alpha of the states c after a step or, with REVERSE, beta before it, [BLOCK_C].

    The scores of DEGREE slots are loaded before the barrier, which stands where the previous states
    are first read. Slots are loaded one after the other if DEGREE is 0.
    """
    maximum, rest = tl.full(c.shape, -float("inf"), tl.float64), tl.zeros(c.shape, ACC_DTYPE)
    if DEGREE > 0:
        slots, edge_scores = load_slots(edges, c, DEGREE, REVERSE), ()
        for j in tl.static_range(DEGREE):
            neighbor, target, k = slots[j]
            edge_scores = edge_scores + (edge_score(scores, target, k, neighbor >= 0),)
        tl.debug_barrier()
        for j in tl.static_range(DEGREE):
            term = load_state(state_ptr, slots[j]) + edge_scores[j]
            maximum, rest = add_term(maximum, rest, term, IS_MAX)
    else:
        tl.debug_barrier()
        for j in range(slot_count(edges, c, REVERSE)):
            slot = load_slot(edges, c, j, REVERSE)
            term = load_state(state_ptr, slot) + edge_score(scores, slot[1], slot[2], slot[0] >= 0)
            maximum, rest = add_term(maximum, rest, term, IS_MAX)
    return maximum if IS_MAX else lse_value(maximum, rest)


@triton.jit
def store_step(
    next_ptr,
    state_ptr,
    scores,
    edges,
    DEGREE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    IS_MAX: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Store alpha of all states after a step or, with REVERSE, beta before it."""
    for c0 in range(0, edges.C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        value = state_step(state_ptr, scores, edges, c, DEGREE, ACC_DTYPE, IS_MAX, REVERSE)
        tl.store(next_ptr + c, value, mask=c < edges.C)


@triton.jit
def state_row(t, REVERSE: tl.constexpr, SAVE: tl.constexpr):
    """Return the row of the buffer of states that holds the states at time t.

    With SAVE, each time has a row. Without, each direction alternates between two rows.
    """
    if SAVE:
        return tl.full([], t, tl.int64)
    else:
        return tl.full([], 2 * REVERSE + t % 2, tl.int64)


@triton.jit
def store_boundary_scores(state_ptr, boundary_ptr, C, stride_c, invalid, BLOCK_C: tl.constexpr):
    """Store initial or final scores plus `invalid` as the first states of a scan."""
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        value = tl.load(boundary_ptr + c * stride_c, mask=c < C, other=0.0).to(tl.float64) + invalid
        tl.store(state_ptr + c, value, mask=c < C)


@triton.jit
def copy_states(result_ptr, state_ptr, C, BLOCK_C: tl.constexpr):
    """Copy the states of one time."""
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        tl.store(result_ptr + c, tl.load(state_ptr + c, mask=c < C), mask=c < C)


@triton.jit
def is_renormalization_step(i):
    """Return whether log Z is computed again before the i-th step.

    This happens at every eighth step only, because it waits for all states.
    """
    return (i > 0) & (i % 8 == 0)


@triton.jit
def log_normalizer(alpha_ptr, beta_ptr, C, shift, BLOCK_C: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Compute log sum exp(alpha + beta) over all states, given its approximate value as `shift`.

    This renews log Z in the marginals, so that rounding errors of alpha and beta do not accumulate.
    """
    total = tl.zeros([BLOCK_C], ACC_DTYPE)
    tl.debug_barrier()
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        log_weight = tl.load(alpha_ptr + c, mask=c < C, other=-float("inf")) + tl.load(
            beta_ptr + c, mask=c < C, other=0.0
        )
        total += exp((log_weight - shift).to(ACC_DTYPE))
    sum_exp = tl.sum(total, axis=0)
    return tl.where(sum_exp > 0.0, shifted_log(shift, sum_exp), shift)


@triton.jit
def store_slot_marginal(d_scores_ptr, alpha_ptr, scores, edges, c, k, log_weight, grad):
    """Store marginal * grad of the k-th edges into the states c, given beta - log Z."""
    slot = load_slot(edges, c, k, False)
    term = load_state(alpha_ptr, slot) + edge_score(scores, c, k, slot[0] >= 0)
    store_marginal(d_scores_ptr + c * edges.K + k, term + log_weight, grad, c < edges.C)


@triton.jit
def store_marginal(ptr, log_p, grad, mask):
    """Store exp(log_p) * grad, rounded to the dtype of the memory."""
    tl.store(ptr, (exp(log_p.to(grad.dtype)) * grad).to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_boundary_marginals(
    result_ptr,
    boundary_ptr,
    boundary_c,
    opposite_ptr,
    C,
    logz,
    grad,
    BLOCK_C: tl.constexpr,
):
    """Store the gradient of the initial or final scores.

    The marginal of a boundary state is exp(its score + its alpha or beta - log Z), with the
    direction that ends at this boundary.
    """
    tl.debug_barrier()
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        log_weight = tl.load(boundary_ptr + c * boundary_c, mask=c < C, other=-float("inf")).to(
            tl.float64
        )
        log_weight += tl.load(opposite_ptr + c, mask=c < C, other=0.0)
        store_marginal(result_ptr + c, log_weight - logz, grad, c < C)


@triton.jit
def final_terms(alpha_ptr, final_ptr, c, C, final_c):
    """Return alpha + final of the states c at the length, -inf for lanes without a state."""
    value = tl.load(alpha_ptr + c, mask=c < C, other=-float("inf"))
    value += tl.load(final_ptr + c * final_c, mask=c < C, other=0.0).to(tl.float64)
    return tl.where(c < C, value, -float("inf"))
