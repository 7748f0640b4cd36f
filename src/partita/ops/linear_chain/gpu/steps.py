"""Alpha and beta of dense linear chains of many states on NVIDIA GPUs.

A step loads the emissions of a block of sequences and of the states that it enters, and stores both
alpha and beta. Alpha is stored with the emission of its token and beta without it, and the next
step reads both from a workspace where they have it. See `scan.py` for the recursion.

For up to 512 states one launch takes all steps. The programs of a group share the states of 16
sequences in one direction. Each holds the weights of the states that it enters in registers, and
the products are on the fp64 tensor cores. At each step it stores its states and waits for those of
the others. No flag says that they have arrived: states are not negative, so their sign bit holds
the parity of every second step, which a reader compares with the one that it expects. Two
workspaces alternate. A program overwrites a state only when it has the next one from all others, so
all others have read it.

Programs take their index from an atomic counter, so all programs before a waiting one have started,
and those of a group are few enough to be resident together.

With more states, or on small GPUs, each step has a launch, without a pass through shared memory. A
thread sums over every 32nd state for a few sequences and a few states that it enters, and its
operands come straight from memory, where the weights [other state, summed state] have the summed
states side by side.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ....primitives.gpu.math import finite_shift
from .arguments import Batch
from .resident import linear_range, load_range
from .scores import exp_split, exponent_of, power_of_2, scan_steps, state_offset


class Step(NamedTuple):
    """A step of alpha or beta for a block of sequences and of the states that it enters.

    Fields:
        i: the number of the step.
        direction: 0 for alpha, 1 for beta.
        t: `[BLOCK_N]`, the tokens that it enters.
        n: `[BLOCK_N]`, the sequences.
        tokens: `[BLOCK_N]`, their lengths.
        c: `[BLOCK_C]`, the states.
    """

    i: tl.tensor
    direction: tl.tensor
    t: tl.tensor
    n: tl.tensor
    tokens: tl.tensor
    c: tl.tensor


@triton.jit
def load_tokens_of(lengths_ptr, n, N, T):
    """Return the number of tokens of the sequences n, at least 1."""
    if lengths_ptr is None:
        return n * 0 + T
    else:
        tokens = tl.load(lengths_ptr + n, mask=n < N, other=1).to(tl.int64)
        return tl.where((tokens >= 1) & (tokens <= T), tokens, 1)


@triton.jit
def load_scores(batch, maxima_ptr, step):
    """Load emissions, start and end scores `[BLOCK_N, BLOCK_C]`, and maxima if there are some.

    Nothing is computed with them yet, so a kernel need not wait for them here.
    """
    N, emissions, start, end = batch.N, batch.emissions, batch.start, batch.end
    t, n, tokens, c = step.t, step.n, step.tokens, step.c
    mask, c = (n < N)[:, None] & (c < batch.C)[None, :], c.to(tl.int64)[None, :]
    at = (t * emissions.t + n * emissions.n)[:, None] + c * emissions.c
    score = tl.load(emissions.ptr + at, mask=mask, other=-float("inf"))
    at_start, at_end = score, score
    if start.ptr is not None:
        at, first = (n * start.n)[:, None] + c * start.c, mask & (t == 0)[:, None]
        at_start = tl.load(start.ptr + at, mask=first, other=0.0)
    if end.ptr is not None:
        at, last = (n * end.n)[:, None] + c * end.c, mask & (t == tokens - 1)[:, None]
        at_end = tl.load(end.ptr + at, mask=last, other=0.0)
    maximum = t
    if maxima_ptr is not None:
        maximum = tl.load(maxima_ptr + t * N + n, mask=n < N, other=0.0)
    return score, at_start, at_end, maximum


@triton.jit
def summed_scores(batch, scores):
    """Return the sums of emissions, start and end scores of `load_scores`."""
    score = scores[0].to(tl.float64)
    if batch.start.ptr is not None:
        score += scores[1].to(tl.float64)
    if batch.end.ptr is not None:
        score += scores[2].to(tl.float64)
    return score


@triton.jit
def relative_scores(batch, scores, EXACT: tl.constexpr):
    """Return exp of the summed scores relative to the maxima."""
    return exp_split(summed_scores(batch, scores) - finite_shift(scores[3])[:, None], EXACT)


@triton.jit
def save_states(
    saved,  # Saved: states and scales are written
    batch,  # Batch
    step,  # Step
    x,  # [BLOCK_N, BLOCK_C], the states with emissions
    y,  # [BLOCK_N, BLOCK_C], the same without
    scale,  # [BLOCK_N]
    SAVE: tl.constexpr,
):
    """Store alpha with the emissions of its tokens or beta without, and the scales.

    The scale of a step is stored at the later one of its tokens.
    """
    T, N, C, t, n, c = batch.T, batch.N, batch.C, step.t, step.n, step.c
    is_alpha = step.direction == 0
    active = (n < N) & (step.i <= scan_steps(step.tokens, is_alpha, SAVE))
    at, _ = state_offset(step.direction, t, n, T, N, C, SAVE)
    mask = active[:, None] & (c < C)[None, :]
    tl.store(saved.states + at[:, None] + c[None, :], tl.where(is_alpha, x, y), mask=mask)
    is_first = tl.sum((c == 0).to(tl.int32), axis=0) > 0
    active = active & is_first & (step.i > 0) & (is_alpha | (not SAVE))
    tl.store(saved.scales + (t + step.direction) * N + n, scale, mask=active)


SIGN = gl.constexpr(0x8000000000000000)


@gluon.jit
def arrived_states(state_ptr, sign, n0, N, C, WIDTH: gl.constexpr, MMA: gl.constexpr):
    """Wait for all states `[warps, 16, WIDTH]` of a step, and return each sequence's greatest."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 1)
    BY_WARP: gl.constexpr = gl.SliceLayout(1, OPERAND)
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, BY_WARP))
    k = gl.arange(0, WIDTH, gl.SliceLayout(0, BY_WARP))
    k = gl.expand_dims(gl.expand_dims(warp * WIDTH, 1) + gl.expand_dims(k, 0), 1)
    n = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, OPERAND)))
    n = n0 + gl.expand_dims(gl.expand_dims(n, 0), 2).to(gl.int64)
    at, mask = state_ptr + n * C + k, (n < N) & (k < C)
    words = gl.load(at, mask=mask, other=0, volatile=True) ^ gl.where(mask, sign, 0)
    greatest = gl.max(gl.max(words, axis=2), axis=0)
    # A state that has not arrived has the other sign, which makes its word the greatest.
    while gl.max(greatest, axis=0) >= SIGN:
        words = gl.load(at, mask=mask, other=0, volatile=True) ^ gl.where(mask, sign, 0)
        greatest = gl.max(gl.max(words, axis=2), axis=0)
    return words.to(gl.float64, bitcast=True), greatest.to(gl.float64, bitcast=True)


@gluon.jit
def linear_chain_exchange_kernel(
    batch,  # Batch
    weights_ptr,  # [2, C, C] fp64: by [state entered, state left] second
    saved,  # Saved: states and scales are written
    words_ptr,  # [2 * 2 * N * C + 1] int64: two states of alpha and of beta, and a counter
    SAVE: gl.constexpr,
    EXACT: gl.constexpr,
    STATES: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_PARTS: gl.constexpr,
):
    """Take all steps of alpha, or of beta, for 16 sequences and `STATES` states."""
    batch = Batch(*batch)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, 8])
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 1)
    BY_WARP: gl.constexpr = gl.SliceLayout(2, OPERAND)
    # A thread adds up the products of all warps for one state.
    LANES: gl.constexpr = [1, 32 // STATES, STATES]
    PRODUCTS: gl.constexpr = gl.BlockedLayout(
        [gl.num_warps(), 1, 1], LANES, [1, gl.num_warps(), 1], [2, 1, 0]
    )
    SUMS: gl.constexpr = gl.SliceLayout(0, PRODUCTS)
    T, N, C = batch.T, batch.N, batch.C
    row = gl.to_tensor(N).to(gl.int64) * C
    words_ptr = words_ptr.to(gl.pointer_type(gl.uint64), bitcast=True)
    # The lower half of the word starts with its sign bit alone.
    index = gl.atomic_add(words_ptr + 4 * row, 1, sem="relaxed").to(gl.int32) & 0x7FFFFFFF
    blocks_c = gl.cdiv(C, STATES)
    group = index // blocks_c
    direction, n0 = group % 2, group // 2 * 16
    recent_ptr, c0 = words_ptr + direction * 2 * row, index % blocks_c * STATES
    is_alpha = direction == 0
    n = n0 + gl.arange(0, 16, gl.SliceLayout(1, SUMS)).to(gl.int64)
    c = c0 + gl.arange(0, STATES, gl.SliceLayout(0, SUMS))
    tokens = load_tokens_of(batch.lengths, n, N, T)
    steps = T if SAVE else T // 2 + 1
    steps = gl.where(linear_range(*load_range(saved.span, 0, BLOCK_PARTS))[0], steps, 0)
    side_ptr = weights_ptr + (1 - direction) * gl.to_tensor(C).to(gl.int64) * C
    # The weights from each warp's states to those of the program, `[warps, WIDTH, STATES]`.
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, BY_WARP))
    k = gl.arange(0, WIDTH, gl.SliceLayout(0, BY_WARP))
    k = gl.expand_dims(gl.expand_dims(warp * WIDTH, 1) + gl.expand_dims(k, 0), 2)
    o = gl.arange(0, STATES, gl.SliceLayout(0, gl.SliceLayout(1, OPERAND)))
    o = c0 + gl.expand_dims(gl.expand_dims(o, 0), 1)
    weights = gl.load(side_ptr + o.to(gl.int64) * C + k, mask=(k < C) & (o < C), other=0.0)
    y = gl.full([16, STATES], 1.0, gl.float64, SUMS)
    scale = gl.zeros([16], gl.float64, gl.SliceLayout(1, SUMS))
    sign = gl.to_tensor(0).to(gl.uint64)
    sign_before = sign ^ SIGN
    t = gl.where(is_alpha, 0, tokens - 1)
    scores = load_scores(batch, saved.maxima, Step(0, direction, t, n, tokens, c))
    emission = relative_scores(batch, scores, EXACT)
    for i in range(0, steps):
        # What these loads bring is used in the next step, while it waits for the other programs.
        t_after = gl.minimum(gl.maximum(gl.where(is_alpha, i + 1, tokens - 2 - i), 0), T - 1)
        after = Step(i + 1, direction, t_after, n, tokens, c)
        next_scores = load_scores(batch, saved.maxima, after)
        before_ptr, after_ptr = recent_ptr + (i + 1) % 2 * row, recent_ptr + i % 2 * row
        if i > 0:
            states, maximum = arrived_states(before_ptr, sign_before, n0, N, C, WIDTH, MMA)
            zeros = gl.zeros([gl.num_warps(), 16, STATES], gl.float64, MMA)
            products = mma_v2(states, weights, zeros)
            y = gl.sum(gl.convert_layout(products, PRODUCTS), axis=0)
            exponent = exponent_of(gl.convert_layout(maximum, gl.SliceLayout(1, SUMS)))
            y *= gl.expand_dims(power_of_2(-exponent), 1)
            scale = exponent.to(gl.float64)
        x = y * emission
        # The states get the sign of the step. Past its last step, what a sequence has is not used.
        at = gl.expand_dims(n, 1) * C + gl.expand_dims(c, 0)
        mask = gl.expand_dims(n < N, 1) & gl.expand_dims(c < C, 0)
        words = x.to(gl.uint64, bitcast=True) & (SIGN - 1) ^ sign
        gl.atomic_xchg(after_ptr + at, words, mask=mask, sem="relaxed")
        save_states(saved, batch, Step(i, direction, t, n, tokens, c), x, y, scale, SAVE)
        emission, t = relative_scores(batch, next_scores, EXACT), t_after
        sign_before, sign = sign, gl.where(i % 2 == 1, sign ^ SIGN, sign)


@gluon.jit(do_not_specialize=["i"])
def linear_chain_strided_step_kernel(
    batch,  # Batch
    weights_ptr,  # [2, C, C] fp64
    saved,  # Saved: states and scales are written
    recent_ptr,  # [2, 2, N, C] fp64: the last two states of alpha and beta, with emissions
    i,
    SAVE: gl.constexpr,
    EXACT: gl.constexpr,
    UNROLL: gl.constexpr,
    BLOCK_PARTS: gl.constexpr,
):
    """Take step i of alpha or beta for 16 sequences and 8 states."""
    batch = Batch(*batch)
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 4, 1], [1, 1, 32], [4, 2, 1], [2, 1, 0])
    SUMS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    STATES: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    WEIGHTS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    T, N, C = batch.T, batch.N, batch.C
    blocks_c = gl.cdiv(C, 8)
    c0, rest = gl.program_id(0) % blocks_c * 8, gl.program_id(0) // blocks_c
    direction, n0 = rest % 2, rest // 2 * 16
    is_alpha = direction == 0
    row = gl.to_tensor(N).to(gl.int64) * C
    before_ptr = recent_ptr + (direction * 2 + (i + 1) % 2) * row
    after_ptr = recent_ptr + (direction * 2 + i % 2) * row
    n = n0 + gl.arange(0, 16, gl.SliceLayout(1, SUMS)).to(gl.int64)
    c = c0 + gl.arange(0, 8, gl.SliceLayout(0, SUMS))
    tokens = load_tokens_of(batch.lengths, n, N, T)
    t = gl.minimum(gl.maximum(gl.where(is_alpha, i, tokens - 1 - i), 0), T - 1)
    # What these loads bring is used after the sums, which need not wait for them. A branch on the
    # range would wait, so the sums are taken in any case, and elsewhere no sequence is stored.
    scores = load_scores(batch, saved.maxima, Step(i, direction, t, n, tokens, c))
    greatest, least = load_range(saved.span, 0, BLOCK_PARTS)
    y = gl.full([16, 8], 1.0, gl.float64, SUMS)
    scale = gl.zeros([16], gl.float64, gl.SliceLayout(1, SUMS))
    if i > 0:
        side_ptr = weights_ptr + (1 - direction) * gl.to_tensor(C).to(gl.int64) * C
        row_n = n0 + gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, STATES)), 1).to(gl.int64)
        row_c = c0 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, WEIGHTS)), 1).to(gl.int64)
        k = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, STATES)), 0)
        j = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, WEIGHTS)), 0)
        total = gl.zeros([16, 8, 32], gl.float64, LAYOUT)
        maxima = gl.zeros([16, 32], gl.float64, STATES)
        state_ptr = before_ptr + row_n * C + k
        side_ptr = side_ptr + row_c * C + j
        for k0 in range(0, C, 32 * UNROLL):
            states, weights = (), ()
            for u in gl.static_range(UNROLL):
                first = k0 + 32 * u
                mask = (row_n < N) & (first + k < C)
                states += (gl.load(state_ptr + first, mask=mask, other=0.0),)
                mask = (row_c < C) & (first + j < C)
                weights += (gl.load(side_ptr + first, mask=mask, other=0.0),)
            for u in gl.static_range(UNROLL):
                maxima = gl.maximum(maxima, states[u])
                total += gl.expand_dims(states[u], 1) * gl.expand_dims(weights[u], 0)
        y, maximum = gl.sum(total, axis=2), gl.max(maxima, axis=1)
        exponent = exponent_of(gl.convert_layout(maximum, gl.SliceLayout(1, SUMS)))
        y *= gl.expand_dims(power_of_2(-exponent), 1)
        scale = exponent.to(gl.float64)
    emission = relative_scores(batch, scores, EXACT)
    x = y * emission
    n = gl.where(linear_range(greatest, least)[0], n, N)
    save_states(saved, batch, Step(i, direction, t, n, tokens, c), x, y, scale, SAVE)
    at = gl.expand_dims(n, 1) * C + gl.expand_dims(c, 0)
    gl.store(after_ptr + at, x, mask=gl.expand_dims(n < N, 1) & gl.expand_dims(c < C, 0))
