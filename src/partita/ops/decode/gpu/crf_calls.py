"""The bases of a path over k-mers, with the posterior of each.

A kernel goes through the steps of a sequence, writes a base for each move, and takes the mean over
the steps of a base as a difference of sums over all steps up to its ends.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .greedy import load_length


class CallsPath(NamedTuple):
    """The path of one sequence.

    Fields:
        states: `[T + 1]` with a stride of N, -1 where there is none.
        edges: `[T]` with a stride of N.
        N: the stride of the steps.
        length: the number of steps.
        bases: bases.
        state_len: k.
    """

    states: Any
    edges: Any
    N: Any
    length: Any
    bases: Any
    state_len: Any


class CallsMemory(NamedTuple):
    """The results of one sequence; see `Basecalls`. S = T + k.

    Fields:
        labels: `[S]` int64.
        log_probs: `[S]`.
        steps: `[S]` int64.
        moves: `[T]` bool.
        totals: `[T + 1]` fp64, the sums of the posteriors before each step.
    """

    labels: Any
    log_probs: Any
    steps: Any
    moves: Any
    totals: Any


@triton.jit
def first_base_posteriors(
    first_ptr, first, C, bases, k, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return the bases of the first k-mer and the sums of the posteriors of the k-mers with them.

    Both are [BLOCK_K]. `first_ptr` has the posteriors of the k-mers before the first step, [C].
    """
    i = tl.arange(0, BLOCK_K)
    power = tl.full([BLOCK_K], 1, tl.int32)
    for j in range(1, k):
        power = tl.where(i < k - j, power * bases, power)
    digit = (tl.maximum(first, 0).to(tl.int32) // power) % bases
    posterior = tl.zeros([BLOCK_K], tl.float64)
    for block in range(0, C, BLOCK):
        c = block + tl.arange(0, BLOCK)
        of_state = tl.load(first_ptr + c, mask=c < C, other=0.0)
        same = (c[:, None] // power[None, :]) % bases == digit[None, :]  # [BLOCK, BLOCK_K]
        posterior += tl.sum(tl.where(same, of_state[:, None], 0.0), axis=0)
    return digit, posterior


@triton.jit
def clear_calls(memory, T, S, BLOCK: tl.constexpr):
    """Write that there are no bases."""
    for first in range(0, S, BLOCK):
        i = (first + tl.arange(0, BLOCK)).to(tl.int64)
        zero = tl.zeros([BLOCK], tl.int64)
        tl.store(memory.labels + i, zero, mask=i < S)
        tl.store(memory.steps + i, zero - 1, mask=i < S)
        tl.store(memory.log_probs + i, zero.to(memory.log_probs.dtype.element_ty), mask=i < S)
        tl.store(memory.moves + i, zero != 0, mask=i < T)


@triton.jit
def write_moves(memory, path, by_base_ptr, BLOCK: tl.constexpr):
    """Write the label and the step of each move and the sums of posteriors; return all moves.

    `by_base_ptr` has the posteriors of the last base after each step, `[T, bases]` with a stride of
    N * bases over the steps.
    """
    bases, moves = path.bases, tl.full([], 0, tl.int32)
    total = tl.full([], 0.0, tl.float64)
    tl.store(memory.totals, total)
    for first in range(0, path.length, BLOCK):
        t = (first + tl.arange(0, BLOCK)).to(tl.int64)
        mask = t < path.length
        edge = tl.load(path.edges + t * path.N, mask=mask, other=-1)
        state = tl.load(path.states + (t + 1) * path.N, mask=mask, other=0)
        base = state.to(tl.int32) % bases
        is_move = (edge >= 0) & (edge.to(tl.int32) % (bases + 1) > 0)
        index = path.state_len - 1 + moves + tl.cumsum(is_move.to(tl.int32), axis=0)
        tl.store(memory.moves + t, is_move, mask=mask)
        tl.store(memory.labels + index, (base + 1).to(tl.int64), mask=is_move)
        tl.store(memory.steps + index, t, mask=is_move)
        offset = t * path.N * bases + tl.maximum(base, 0)
        posterior = tl.load(by_base_ptr + offset, mask=mask, other=0.0)
        tl.store(memory.totals + t + 1, total + tl.cumsum(posterior, axis=0), mask=mask)
        moves += tl.sum(is_move.to(tl.int32), axis=0)
        total += tl.sum(posterior, axis=0)
    return moves


@triton.jit
def write_log_probs(memory, path, calls, BLOCK: tl.constexpr):
    """Write the log-probabilities of the bases after the first k-mer."""
    for first in range(path.state_len, calls, BLOCK):
        i = (first + tl.arange(0, BLOCK)).to(tl.int64)
        mask = i < calls
        start = tl.load(memory.steps + i, mask=mask, other=0)
        # A base ends where the next one starts, and the last one with the sequence.
        end = tl.load(memory.steps + i + 1, mask=i + 1 < calls, other=0)
        end = tl.where(i + 1 < calls, end, path.length)
        total = tl.load(memory.totals + end, mask=mask, other=1.0)
        total -= tl.load(memory.totals + start, mask=mask, other=0.0)
        log_prob = tl.minimum(tl.log(total / tl.maximum(end - start, 1).to(tl.float64)), 0.0)
        tl.store(memory.log_probs + i, log_prob.to(memory.log_probs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "N", "C", "bases", "state_len"])
def ctc_crf_calls_kernel(
    by_base_ptr,  # [T, N, bases] fp64
    first_posteriors_ptr,  # [N, C] fp64
    states_ptr,  # [T + 1, N] int64
    edges_ptr,  # [T, N] int64
    lengths_ptr,  # [N]
    totals_ptr,  # [N, T + 1] fp64
    labels_ptr,  # [N, S] int64
    calls_ptr,  # [N] int64
    log_probs_ptr,  # [N, S]
    steps_ptr,  # [N, S] int64
    moves_ptr,  # [N, T] bool
    T,
    N,
    C,
    bases,
    state_len,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the bases of one sequence."""
    n, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    S = T + state_len
    length, valid = load_length(lengths_ptr, n, T)
    first = tl.load(states_ptr + n)
    valid = valid & (first >= 0)
    length = tl.where(valid, length, 0)
    path = CallsPath(states_ptr + n, edges_ptr + n, N, length, bases, state_len)
    memory = CallsMemory(
        labels_ptr + n * S,
        log_probs_ptr + n * S,
        steps_ptr + n * S,
        moves_ptr + n * T,
        totals_ptr + n * (T + 1),
    )
    clear_calls(memory, T, S, BLOCK)
    digit, posterior = first_base_posteriors(
        first_posteriors_ptr + n * C, first, C, bases, state_len, BLOCK_C, BLOCK_K
    )
    tl.debug_barrier()
    moves = write_moves(memory, path, by_base_ptr + n * bases, BLOCK)
    calls = tl.where(valid, state_len + moves, 0)
    tl.store(calls_ptr + n, calls.to(tl.int64))
    log_prob = tl.minimum(tl.log(posterior), 0.0).to(log_probs_ptr.dtype.element_ty)
    tl.store(memory.labels + i, (digit + 1).to(tl.int64), mask=(i < state_len) & valid)
    tl.store(memory.log_probs + i, log_prob, mask=(i < state_len) & valid)
    tl.debug_barrier()
    write_log_probs(memory, path, calls, BLOCK)
