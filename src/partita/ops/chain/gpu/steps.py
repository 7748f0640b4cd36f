"""The steps of a scan over a chain, for a block of states: what enters them, what leaves them, and the marginals of the edges."""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, log1p_pair, log_exact


@triton.jit
def log_add(maximum, rest, term):
    """The greatest term (fp64) and the sum of the exponentials of the others less it (WIDE), with one more term; -inf adds nothing.

    Were the greatest's own 1 in that sum, rounding would lose in each step what the others add to it.
    """
    difference = tl.where(term == -float("inf"), -float("inf"), term - maximum).to(rest.dtype)
    e = exp(-tl.abs(difference))
    return tl.maximum(maximum, term), tl.where(difference > 0.0, (1.0 + rest) * e, rest + e)


@triton.jit
def log_sum(maximum, rest):
    """The log-sum-exp of such terms, fp64."""
    high, low = log1p_pair(rest)
    return maximum + (high.to(tl.float64) + low.to(tl.float64))


@triton.jit
def log_total(maximum, total):
    return maximum + log_exact(total).to(tl.float64)


@triton.jit
def edge_score(score_ptr, state, slot, held, stride_c, stride_k):
    """Score of an edge into a state, fp64; -inf where there is none."""
    return tl.load(
        score_ptr + state.to(tl.int64) * stride_c + slot * tl.cast(stride_k, tl.int64),
        mask=held,
        other=-float("inf"),
    ).to(tl.float64)


@triton.jit
def leaving(source_ptr, c, k, states, slots):
    """The state that the k-th edge into c leaves, and whether there is one."""
    left = tl.load(source_ptr + c * slots + k, mask=c < states, other=-1)
    return left, left >= 0


@triton.jit
def alpha_after(
    alpha_ptr,
    score_ptr,
    source_ptr,
    c,
    states,
    slots,
    stride_c,
    stride_k,
    SLOTS: tl.constexpr,
    WIDE: tl.constexpr,
    BEST: tl.constexpr = False,
):
    """α of states c, [BLOCK_C], after a step; the barrier stands where the α before it is first needed."""
    maximum, rest = tl.full(c.shape, -float("inf"), tl.float64), tl.zeros(c.shape, WIDE)
    if SLOTS > 0:
        from_states, scores = (), ()
        for k in tl.static_range(SLOTS):
            left, held = leaving(source_ptr, c, k, states, slots)
            from_states = from_states + (tl.where(held, left, -1),)
            scores = scores + (edge_score(score_ptr, c, k, held, stride_c, stride_k),)
        tl.debug_barrier()
        for k in tl.static_range(SLOTS):
            a = tl.load(alpha_ptr + from_states[k], mask=from_states[k] >= 0, other=-float("inf"))
            maximum, rest = log_add(maximum, rest, a + scores[k])
    else:
        tl.debug_barrier()
        for k in range(slots):
            left, held = leaving(source_ptr, c, k, states, slots)
            a = tl.load(alpha_ptr + left, mask=held, other=-float("inf"))
            maximum, rest = log_add(
                maximum, rest, a + edge_score(score_ptr, c, k, held, stride_c, stride_k)
            )
    return maximum if BEST else log_sum(maximum, rest)


@triton.jit
def beta_before(
    beta_ptr,
    score_ptr,
    first_ptr,
    edges_ptr,
    s,
    states,
    slots,
    stride_c,
    stride_k,
    MOST: tl.constexpr,
    WIDE: tl.constexpr,
    BEST: tl.constexpr = False,
):
    """β of states s, [BLOCK_C], before a step, over the edges that leave them; the barrier likewise."""
    maximum, rest = tl.full(s.shape, -float("inf"), tl.float64), tl.zeros(s.shape, WIDE)
    start = tl.load(first_ptr + s, mask=s < states, other=0)
    degree = tl.load(first_ptr + s + 1, mask=s < states, other=0) - start
    if MOST > 0:
        to_states, scores = (), ()
        for j in tl.static_range(MOST):
            edge = tl.load(edges_ptr + start + j, mask=j < degree, other=0)
            to_states = to_states + (tl.where(j < degree, edge // slots, -1),)
            scores = scores + (
                edge_score(score_ptr, edge // slots, edge % slots, j < degree, stride_c, stride_k),
            )
        tl.debug_barrier()
        for j in tl.static_range(MOST):
            b = tl.load(beta_ptr + to_states[j], mask=to_states[j] >= 0, other=-float("inf"))
            maximum, rest = log_add(maximum, rest, b + scores[j])
    else:
        tl.debug_barrier()
        for j in range(tl.max(degree, axis=0)):
            edge = tl.load(edges_ptr + start + j, mask=j < degree, other=0)
            b = tl.load(beta_ptr + edge // slots, mask=j < degree, other=-float("inf"))
            score = edge_score(
                score_ptr, edge // slots, edge % slots, j < degree, stride_c, stride_k
            )
            maximum, rest = log_add(maximum, rest, b + score)
    return maximum if BEST else log_sum(maximum, rest)


@triton.jit
def length_of(lengths_ptr, n, steps):
    """Steps that count, 0 where that is out of range, and NaN there."""
    if lengths_ptr is None:
        return steps, 0.0
    else:
        length = tl.load(lengths_ptr + n).to(tl.int64)
        wrong = (length < 0) | (length > steps)
        return tl.where(wrong, 0, length).to(tl.int32), tl.where(wrong, float("nan"), 0.0)


@triton.jit
def slot_of(t, direction, KEEP: tl.constexpr):
    """Where the state at t stands: in its own place, or in one of the two that its direction has."""
    if KEEP:
        return tl.full([], t, tl.int64)
    else:
        return tl.full([], 2 * direction + t % 2, tl.int64)


@triton.jit
def put_ends(state_ptr, ends_ptr, states, stride_c, wrong, BLOCK_C: tl.constexpr):
    """Initial or final scores as the first state of a scan."""
    for c0 in range(0, states, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        value = tl.load(ends_ptr + c * stride_c, mask=c < states, other=0.0).to(tl.float64) + wrong
        tl.store(state_ptr + c, value, mask=c < states)


@triton.jit
def renewed(i):
    """Whether the sum by which marginals are divided is formed anew before the i-th step: every eighth, for it waits for all states."""
    return (i > 0) & (i % 8 == 0)


@triton.jit
def state_total(alpha_ptr, beta_ptr, states, shift, BLOCK_C: tl.constexpr, WIDE: tl.constexpr):
    """log of the sum of exp(α + β), given about what it is; by it marginals are divided, so that what α and β lost does not add up."""
    total = tl.zeros([BLOCK_C], WIDE)
    tl.debug_barrier()
    for c0 in range(0, states, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        both = tl.load(alpha_ptr + c, mask=c < states, other=-float("inf")) + tl.load(
            beta_ptr + c, mask=c < states, other=0.0
        )
        total += exp((both - shift).to(WIDE))
    summed = tl.sum(total, axis=0)
    return tl.where(summed > 0.0, log_total(shift, summed), shift)


@triton.jit
def put_marginals(
    d_scores_ptr,
    alpha_ptr,
    score_ptr,
    source_ptr,
    c,
    beta,
    total,
    grad,
    states,
    slots,
    stride_c,
    stride_k,
    SLOTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The marginals of the edges into states c, [BLOCK_C], times grad; and α behind the step. The barrier stands where α is first needed."""
    maximum, rest = tl.full(c.shape, -float("inf"), tl.float64), tl.zeros(c.shape, WIDE)
    if SLOTS > 0:
        from_states, scores, terms = (), (), ()
        for k in tl.static_range(SLOTS):
            left, held = leaving(source_ptr, c, k, states, slots)
            from_states = from_states + (tl.where(held, left, -1),)
            scores = scores + (edge_score(score_ptr, c, k, held, stride_c, stride_k),)
        tl.debug_barrier()
        for k in tl.static_range(SLOTS):
            terms = terms + (
                tl.load(alpha_ptr + from_states[k], mask=from_states[k] >= 0, other=-float("inf"))
                + scores[k],
            )
        for k in tl.static_range(SLOTS):
            maximum, rest = log_add(maximum, rest, terms[k])
        for k in tl.static_range(SLOTS):
            put_marginal(d_scores_ptr + c * slots + k, terms[k] + (beta - total), grad, c < states)
    else:
        tl.debug_barrier()
        for k in range(slots):
            left, held = leaving(source_ptr, c, k, states, slots)
            term = tl.load(alpha_ptr + left, mask=held, other=-float("inf")) + edge_score(
                score_ptr, c, k, held, stride_c, stride_k
            )
            maximum, rest = log_add(maximum, rest, term)
            put_marginal(d_scores_ptr + c * slots + k, term + (beta - total), grad, c < states)
    return log_sum(maximum, rest)


@triton.jit
def put_marginal(ptr, log_p, grad, mask):
    """exp(log p) times grad, rounded to the dtype of the memory."""
    tl.store(ptr, (exp(log_p.to(grad.dtype)) * grad).to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def put_end_marginals(
    result_ptr, ends_ptr, ends_c, other_ptr, other_c, states, total, grad, BLOCK_C: tl.constexpr
):
    """Gradient of the initial or final scores, from what the other direction brings there."""
    tl.debug_barrier()
    for c0 in range(0, states, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        both = tl.load(ends_ptr + c * ends_c, mask=c < states, other=-float("inf")).to(tl.float64)
        both += tl.load(other_ptr + c * other_c, mask=c < states, other=0.0).to(tl.float64)
        put_marginal(result_ptr + c, both - total, grad, c < states)


@triton.jit
def clear_past(d_scores_ptr, length, steps, step, width, value, BLOCK_C: tl.constexpr):
    """The gradient past a length: 0, or NaN where the length is wrong."""
    for t in range(length, steps):
        for e0 in range(0, width, BLOCK_C):
            e = e0 + tl.arange(0, BLOCK_C)
            values = tl.full([BLOCK_C], value, tl.float64).to(d_scores_ptr.dtype.element_ty)
            tl.store(d_scores_ptr + tl.full([], t, tl.int64) * step + e, values, mask=e < width)
