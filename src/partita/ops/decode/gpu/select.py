"""The best candidates of a step of beam search: an optional threshold, then ranks by comparison.

A candidate is a score and an integer that breaks ties, the lower first. No two candidates have the
same integer. A candidate's rank is the number of candidates that come before it.

Where the candidates stand in the order of their ties, the positions break ties. Then
`select_in_order` finds exactly the best ones, and `ranks_in_order` sorts them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

UNROLL = tl.constexpr(8)  # candidates that are loaded together


class Candidates(NamedTuple):
    """The candidates of a step, padded to `[BLOCK_P]`.

    Fields:
        scores: fp64, -inf for what is none.
        ties: int64, the lower comes first.
        order: int32, the index that each had before a threshold moved it to the front.
    """

    scores: Any
    ties: Any
    order: Any


@triton.jit
def ordered_bits(score):
    """Return int64 numbers in the order of fp64 numbers without NaN; -0 comes right before 0."""
    bits = (score + 0.0).to(tl.int64, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)


@triton.jit
def score_threshold(keys, finite, width):
    """Return a key that at least `width` finite keys reach, if there are so many.

    A search by quarters ends at the greatest such key, or at one that exactly `width` keys reach.
    The three numbers of keys that reach the limits of the quarters are parts of one word.
    """
    low = tl.min(tl.where(finite, keys, 0x7FFFFFFFFFFFFFFF), axis=0)
    high = tl.max(tl.where(finite, keys, -0x7FFFFFFFFFFFFFFF), axis=0) + 1
    candidates = tl.sum(finite.to(tl.int32), axis=0)
    while (candidates > width) & (low + 1 < high):
        # Without a sign, the difference cannot overflow.
        quarter = ((high - low).to(tl.uint64, bitcast=True) >> 2).to(tl.int64, bitcast=True)
        quarter = tl.maximum(quarter, 1)
        first, second, third = low + quarter, low + 2 * quarter, low + 3 * quarter
        reached = (finite & (keys >= first)).to(tl.int64)
        reached |= (finite & (keys >= second)).to(tl.int64) << 20
        reached |= (finite & (keys >= third)).to(tl.int64) << 40
        total = tl.sum(reached, axis=0)
        by_first, by_second = (total & 0xFFFFF).to(tl.int32), ((total >> 20) & 0xFFFFF).to(tl.int32)
        by_third = (total >> 40).to(tl.int32)
        least = tl.where(by_third >= width, third, tl.where(by_second >= width, second, first))
        number = tl.where(by_second >= width, by_second, by_first)
        number = tl.where(by_third >= width, by_third, number)
        candidates = tl.where(by_first >= width, number, candidates)
        low = tl.where(by_first >= width, least, low)
        limit = tl.where(by_second < width, second, tl.where(by_third < width, third, high))
        high = tl.minimum(high, tl.where(by_first < width, first, limit))
    return low


@triton.jit
def rank_candidates(
    among,
    chosen_ptr,
    candidates,
    width,
    FILTER: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the indices of the `width` best candidates in their order to `chosen_ptr`, all -1."""
    scores_ptr, ties_ptr, order_ptr = among
    if FILTER:  # move the candidates that can be among the best to the front
        lane = tl.arange(0, BLOCK_P)
        all_scores, all_ties = tl.load(scores_ptr + lane), tl.load(ties_ptr + lane)
        finite = all_scores > -float("inf")
        keys = ordered_bits(all_scores)
        passes = finite & (keys >= score_threshold(keys, finite, width))
        position = tl.cumsum(passes.to(tl.int32), axis=0) - 1
        candidates = tl.sum(passes.to(tl.int32), axis=0)
        tl.debug_barrier()  # all candidates are in registers
        tl.store(scores_ptr + lane, tl.full([BLOCK_P], -float("inf"), tl.float64))
        tl.debug_barrier()
        tl.store(scores_ptr + position, all_scores, mask=passes)
        tl.store(ties_ptr + position, all_ties, mask=passes)
        tl.store(order_ptr + position, lane, mask=passes)
        tl.debug_barrier()
    for first in range(0, candidates, BLOCK):
        i = first + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + i, mask=i < candidates, other=-float("inf"))
        tie = tl.load(ties_ptr + i, mask=i < candidates, other=0)
        rank = tl.zeros([BLOCK], tl.int32)
        for other in range(0, candidates, UNROLL):
            for u in tl.static_range(UNROLL):
                other_score = tl.load(scores_ptr + other + u)
                precedes = (other_score == score) & (tl.load(ties_ptr + other + u) < tie)
                rank += ((other_score > score) | precedes).to(tl.int32)
        index = i
        if FILTER:
            index = tl.load(order_ptr + i, mask=i < candidates, other=0)
        mask = (i < candidates) & (score > -float("inf")) & (rank < width)
        tl.store(chosen_ptr + rank, index, mask=mask)


@triton.jit
def select_in_order(score, width):
    """Return which candidates are the `width` best, their positions among these, and their number.

    The order of the candidates breaks ties, and the positions have the same order. Scores of -inf
    and NaN are no candidates.
    """
    finite, keys = score > -float("inf"), ordered_bits(score)
    threshold = score_threshold(keys, finite, width)
    greater, equal = finite & (keys > threshold), finite & (keys == threshold)
    room = width - tl.sum(greater.to(tl.int32), axis=0)
    # Both numbers are below 2^16, so one sum counts them in two halves of a word.
    sums = tl.cumsum(greater.to(tl.int32) | (equal.to(tl.int32) << 16), axis=0)
    equal_rank = sums >> 16
    passes = greater | (equal & (equal_rank <= room))
    position = (sums & 0xFFFF) + tl.minimum(equal_rank, room) - 1
    return passes, position, tl.sum(passes.to(tl.int32), axis=0)


@triton.jit
def ranks_in_order(scores_ptr, candidates, BLOCK: tl.constexpr, BLOCK_OTHER: tl.constexpr):
    """Return the rank of each of up to BLOCK candidates, which stand in the order of their ties."""
    i = tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + i, mask=i < candidates, other=-float("inf"))
    rank = tl.zeros([BLOCK], tl.int32)
    for first in range(0, candidates, BLOCK_OTHER):
        j = first + tl.arange(0, BLOCK_OTHER)
        other = tl.load(scores_ptr + j, mask=j < candidates, other=-float("inf"))
        # [BLOCK, BLOCK_OTHER]
        precedes = (other[None, :] == score[:, None]) & (j[None, :] < i[:, None])
        precedes |= other[None, :] > score[:, None]
        rank += tl.sum(precedes.to(tl.int32), axis=1)
    return rank
