"""Sparse linear chains under Log, for tables of up to 1,024 states with few edges into and out of each: one state a thread.

α and β run by one and the same code, one up and one down. A state is a pair of fp32 numbers, high and low: about 48 bits, at a fraction of the
cost of fp64. States stay in registers, and reach their neighbours through shared memory, by Gluon's gather; the scores of a step are read as they
lie in memory, some steps ahead, and put in the order of the direction's edges in the same way; marginals take the same way back.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.math import LOG2E, log_exact
from ....primitives.gpu.sync import unpack_pair
from .fast_steps import (
    advanced,
    edges_of,
    ends_word,
    finite,
    joined,
    offsets_of,
    pair_of,
    parted,
    posterior_of,
    rows_ahead,
    scores_of,
    together,
    two_sum,
)
from .steps import length_of


@gluon.jit
def chain_fast_halves_kernel(
    scores_ptr,  # [steps, chains, states, slots]
    order_ptr,  # [BLOCK_C] int32
    others_ptr,  # [2, WIDTH, BLOCK_C] int32
    edges_ptr,  # [2, WIDTH, BLOCK_C] int32
    initial_ptr,  # [chains, states]
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    kept_ptr,  # [steps + 1, chains, states] int64, or [2, chains, states]
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
    KEEP: gl.constexpr,
    WIDTH: gl.constexpr,
    PARTS: gl.constexpr,
    WHOLE: gl.constexpr,
    PLAIN: gl.constexpr,
    VEC: gl.constexpr,
    AHEAD: gl.constexpr,
    BLOCK_C: gl.constexpr,
    BLOCK_E: gl.constexpr,
):
    """α up to the middle, or β down to behind it: what stands before the middle step, and behind it."""
    STATE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ROW: gl.constexpr = gl.BlockedLayout([VEC], [32], [gl.num_warps()], [0])
    n = (gl.program_id(0) // 2).to(gl.int64)
    direction = gl.program_id(0) % 2
    length, bad = length_of(lengths_ptr, n, steps)
    middle = gl.maximum(length - 1, 0) // 2
    step = (1 - 2 * direction).to(gl.int64)
    p = gl.where(direction == 0, 0, length).to(gl.int64)
    count = gl.where(direction == 0, middle, gl.maximum(length - 1 - middle, 0))
    jump, row = step * stride_t, step * chains * states
    scores_ptr += n * stride_n + (p - direction) * stride_t
    c, e = gl.load(order_ptr + gl.arange(0, BLOCK_C, STATE)), gl.arange(0, BLOCK_E, ROW)
    others, edges = edges_of(
        others_ptr, edges_ptr, direction, AHEAD, BLOCK_C, BLOCK_E, PARTS, WIDTH, STATE
    )
    offsets, held = offsets_of(e, slots, stride_c, stride_k, PLAIN), e < states * slots
    word = ends_word(initial_ptr + n * initial_n, c, initial_c, bad)
    if direction == 1:
        word = ends_word(final_ptr + n * final_n, c, final_c, 0.0)
    if KEEP:
        kept_ptr += (p * chains + n) * states
        gl.store(kept_ptr + c, word, mask=(c >= 0) & ((direction == 0) | (length > 0)))
    ahead = rows_ahead(scores_ptr, offsets, held, jump, count, AHEAD)
    for i in range(0, count, AHEAD):
        scores = scores_of(ahead, edges, AHEAD, PARTS, BLOCK_C, BLOCK_E, STATE, ROW)
        scores_ptr += AHEAD * jump
        ahead = rows_ahead(scores_ptr, offsets, held, jump, count - i - AHEAD, AHEAD)
        for u in gl.static_range(AHEAD):
            after, _, _ = advanced(word, scores, others, u, BLOCK_C, PARTS, WIDTH, WHOLE, STATE)
            word = gl.where(i + u < count, after, word)
            if KEEP:
                kept_ptr += row
                gl.store(kept_ptr + c, word, mask=(c >= 0) & (i + u < count))
    if not KEEP:
        gl.store(kept_ptr + (direction * chains + n) * states + c, word, mask=c >= 0)


@gluon.jit
def chain_fast_logz_kernel(
    scores_ptr,  # [steps, chains, states, slots]
    order_ptr,  # [BLOCK_C] int32
    others_ptr,  # [2, WIDTH, BLOCK_C] int32
    edges_ptr,  # [2, WIDTH, BLOCK_C] int32
    initial_ptr,  # [chains, states]
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    kept_ptr,  # [steps + 1, chains, states] int64, or [2, chains, states]
    logz_ptr,  # [chains] fp64
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
    KEEP: gl.constexpr,
    WIDTH: gl.constexpr,
    PARTS: gl.constexpr,
    WHOLE: gl.constexpr,
    PLAIN: gl.constexpr,
    VEC: gl.constexpr,
    BLOCK_C: gl.constexpr,
    BLOCK_E: gl.constexpr,
):
    """log Z of a chain from α before its middle step and β behind it."""
    STATE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ROW: gl.constexpr = gl.BlockedLayout([VEC], [32], [gl.num_warps()], [0])
    n = gl.program_id(0).to(gl.int64)
    length, bad = length_of(lengths_ptr, n, steps)
    middle = (gl.maximum(length - 1, 0) // 2).to(gl.int64)
    c, e = gl.load(order_ptr + gl.arange(0, BLOCK_C, STATE)), gl.arange(0, BLOCK_E, ROW)
    first, last = (
        ends_word(initial_ptr + n * initial_n, c, initial_c, bad),
        ends_word(final_ptr + n * final_n, c, final_c, 0.0),
    )
    if length > 0:
        others, edges = edges_of(others_ptr, edges_ptr, 0, 1, BLOCK_C, BLOCK_E, PARTS, WIDTH, STATE)
        step_ptr = scores_ptr + n * stride_n + middle * stride_t
        row = gl.load(
            step_ptr + offsets_of(e, slots, stride_c, stride_k, PLAIN),
            mask=e < states * slots,
            other=0.0,
        )
        scores = scores_of((row,), edges, 1, PARTS, BLOCK_C, BLOCK_E, STATE, ROW)
        kept_ptr += (middle * chains * KEEP + n) * states
        before = gl.load(kept_ptr + c, mask=c >= 0, other=0)
        first, _, _ = advanced(before, scores, others, 0, BLOCK_C, PARTS, WIDTH, WHOLE, STATE)
        last = gl.load(kept_ptr + (n * 0 + chains) * states + c, mask=c >= 0, other=0)
    high, low = unpack_pair(first)
    other_high, other_low = unpack_pair(last)
    value = (high.to(gl.float64) + low.to(gl.float64)) + (
        other_high.to(gl.float64) + other_low.to(gl.float64)
    )
    value = gl.where(c >= 0, value, -float("inf"))
    most = gl.max(value, axis=0)
    shift = gl.where(most == -float("inf"), 0.0, most)
    total = gl.sum(gl.exp2((value - shift).to(gl.float32) * LOG2E), axis=0)
    gl.store(logz_ptr + n, shift + log_exact(total).to(gl.float64) + bad)


@gluon.jit
def chain_fast_gradient_kernel(
    grad_ptr,  # [chains] fp64
    scores_ptr,  # [steps, chains, states, slots]
    order_ptr,  # [BLOCK_C] int32
    others_ptr,  # [2, WIDTH, BLOCK_C] int32
    edges_ptr,  # [2, WIDTH, BLOCK_C] int32
    places_ptr,  # [2, BLOCK_E] int32
    initial_ptr,  # [chains, states]
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    logz_ptr,  # [chains] fp64
    kept_ptr,  # [steps + 1, chains, states] int64
    d_scores_ptr,  # [steps, chains, states, slots]
    d_initial_ptr,  # [chains, states]
    d_final_ptr,  # [chains, states]
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
    WIDTH: gl.constexpr,
    PARTS: gl.constexpr,
    WHOLE: gl.constexpr,
    PLAIN: gl.constexpr,
    VEC: gl.constexpr,
    AHEAD: gl.constexpr,
    BLOCK_C: gl.constexpr,
    BLOCK_E: gl.constexpr,
):
    """α and β go on through each other's half and leave the marginals behind them."""
    STATE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ROW: gl.constexpr = gl.BlockedLayout([VEC], [32], [gl.num_warps()], [0])
    n = (gl.program_id(0) // 2).to(gl.int64)
    direction = gl.program_id(0) % 2
    length, bad = length_of(lengths_ptr, n, steps)
    middle = gl.maximum(length - 1, 0) // 2
    step = (1 - 2 * direction).to(gl.int64)
    p = (middle + direction).to(gl.int64)
    count = gl.where(length == 0, 0, gl.where(direction == 0, length - middle, middle + 1))
    jump, row = step * stride_t, step * chains * states
    scores_ptr += n * stride_n + (p - direction) * stride_t
    kept_ptr += (p * chains + n) * states
    d_scores_ptr += ((p - direction) * chains + n) * states * slots
    c, e = gl.load(order_ptr + gl.arange(0, BLOCK_C, STATE)), gl.arange(0, BLOCK_E, ROW)
    others, edges = edges_of(
        others_ptr, edges_ptr, direction, AHEAD, BLOCK_C, BLOCK_E, PARTS, WIDTH, STATE
    )
    places = gl.load(places_ptr + direction * BLOCK_E + e)
    there, places = (
        places >= 0,
        together(gl.maximum(places, 0), PARTS * BLOCK_C, AHEAD, BLOCK_E, ROW),
    )
    offsets, held = offsets_of(e, slots, stride_c, stride_k, PLAIN), e < states * slots
    grad = gl.load(grad_ptr + n).to(gl.float32)
    logz = gl.load(logz_ptr + n)
    high, low = pair_of(
        gl.where(logz == -float("inf"), float("inf"), logz)
    )  # a chain without a path has no marginals
    first, last = (
        ends_word(initial_ptr + n * initial_n, c, initial_c, bad),
        ends_word(final_ptr + n * final_n, c, final_c, 0.0),
    )
    word = gl.where(direction == 0, first, last)
    if length > 0:
        word = gl.load(kept_ptr + c, mask=c >= 0, other=0)
    kept_ptr += row
    ahead = rows_ahead(scores_ptr, offsets, held, jump, count, AHEAD)
    partners = rows_ahead(kept_ptr, c, c >= 0, row, count, AHEAD)
    for i in range(0, count, AHEAD):
        scores = scores_of(ahead, edges, AHEAD, PARTS, BLOCK_C, BLOCK_E, STATE, ROW)
        behind = partners
        scores_ptr += AHEAD * jump
        kept_ptr += AHEAD * row
        ahead = rows_ahead(scores_ptr, offsets, held, jump, count - i - AHEAD, AHEAD)
        partners = rows_ahead(kept_ptr, c, c >= 0, row, count - i - AHEAD, AHEAD)
        values = ()
        for u in gl.static_range(AHEAD):
            after, exponentials, inverse = advanced(
                word, scores, others, u, BLOCK_C, PARTS, WIDTH, WHOLE, STATE
            )
            word = gl.where(i + u < count, after, word)
            posterior = posterior_of(after, behind[u], high, low)
            share = posterior * inverse * grad
            for k in gl.static_range(PARTS):
                values = values + ((exponentials[k] if k < WIDTH else share) * share,)
        found = parted(
            gl.gather(joined(values, BLOCK_C, AHEAD * PARTS, STATE), places, 0), BLOCK_E, AHEAD, ROW
        )
        for u in gl.static_range(AHEAD):
            counts = (i + u < count) & ((direction == 0) | (i + u > 0))  # the middle step is α's
            marginals = found[u] if WHOLE else gl.where(there, found[u], 0.0)
            gl.store(
                d_scores_ptr + e, marginals.to(d_scores_ptr.dtype.element_ty), mask=held & counts
            )
            d_scores_ptr += row * slots
        if (i % 8 == 8 - AHEAD) & (i + AHEAD <= count):
            summed = gl.sum(
                posterior, axis=0
            )  # what α and β lost does not add up: it goes into log Z
            high, lost = two_sum(high, gl.where(summed > 0.0, log_exact(summed), 0.0))
            low += finite(lost, high)
    reached = posterior_of(word, gl.where(direction == 0, last, first), high, low) * grad
    if direction == 0:
        gl.store(
            d_final_ptr + n * states + c, reached.to(d_final_ptr.dtype.element_ty), mask=c >= 0
        )
        # The steps that were masked above moved the pointer on.
        d_scores_ptr -= (count + AHEAD - 1) // AHEAD * AHEAD * (row * slots) - count * (row * slots)
        for _ in range(length, steps):
            gl.store(
                d_scores_ptr + e,
                (gl.full([BLOCK_E], 0.0, gl.float32, ROW) + bad).to(d_scores_ptr.dtype.element_ty),
                mask=held,
            )
            d_scores_ptr += row * slots
    else:
        gl.store(
            d_initial_ptr + n * states + c, reached.to(d_initial_ptr.dtype.element_ty), mask=c >= 0
        )
