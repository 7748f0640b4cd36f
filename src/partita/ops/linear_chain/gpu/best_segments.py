"""The best path of few long sequences, parallel in time.

In max-plus arithmetic a segment is an operator too, see `segments.py`. Once the best scores of the
states before each segment are known, a lane takes them through the segment. For each token it
stores the best state at it given each state at the next one, in 4 bits of a word, see `trace.py`.

Scores are sums in fp64. Integers of at most 53 bits stay exact, so ties are those of a scan of one
step after the other. Other scores are added in another order than there, and may choose another
path among those whose scores differ by rounding.

Source: Särkkä and García-Fernández, Temporal parallelization of Bayesian smoothers, 2021.
"""

import triton
import triton.language as tl

from .arguments import Batch
from .lanes import (
    MAX_STATES_OF_TABLE,
    lane_emissions,
    lane_index,
    lane_scores,
    lane_select,
    load_lane,
)
from .scores import load_tokens

ALL_STATES = tl.constexpr(0x1111111111111111)  # times a state is the map of all states to it


@triton.jit
def best_product(x, table, table_ptr, C: tl.constexpr):
    """Return the best scores that enter each state, and the lowest states before in one word."""
    y, word = (), tl.zeros(x[0].shape, tl.int64)
    for c in tl.static_range(C):
        best, index = x[0], tl.zeros(x[0].shape, tl.int32)
        for k in tl.static_range(C):
            if C > MAX_STATES_OF_TABLE:
                weight = tl.load(table_ptr + k * C + c)
            else:
                weight = table[k * C + c]
            term = x[k] + weight
            if k > 0:
                index = tl.where(term > best, k, index)
            best = tl.where(term > best, term, best) if k > 0 else term
        y += (best,)
        word = word | (index.to(tl.int64) << (4 * c))
    return y, word


@triton.jit
def linear_chain_best_words_kernel(
    batch,  # Batch, without start
    table_ptr,  # [C, C] fp64
    boundaries_ptr,  # [N, segments + 1, C] fp64
    last_ptr,  # [N] int32
    words_ptr,  # [N, T] int64
    segments,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store the states at each token given those at the next, for one segment in each lane."""
    batch = Batch(*batch)
    TABLE: tl.constexpr = C * C if C <= MAX_STATES_OF_TABLE else 0
    AHEAD: tl.constexpr = 4 if C <= MAX_STATES_OF_TABLE else 1
    T, end = batch.T, batch.end
    lane = lane_index(tl.program_id(0), tl.full([], batch.N, tl.int64) * segments, LANES)
    n, segment = lane // segments, lane % segments
    tokens, _ = load_tokens(batch.lengths, n, T)
    low = segment * STEPS
    inputs = (batch.emissions.ptr + n * batch.emissions.n, batch.emissions)
    end_at = n * end.n
    x = load_lane(boundaries_ptr + (n * (segments + 1) + segment) * C, C)
    # From the last token on, each state has the last one before it.
    last = tl.maximum(tl.load(last_ptr + n), 0).to(tl.int64) * ALL_STATES
    table = load_lane(table_ptr, TABLE)
    scores = lane_scores(*inputs, low + 1, 1, tokens - 1 - low, C, AHEAD)
    for i in range(0, STEPS, AHEAD):
        left = tokens - 1 - low - i - AHEAD
        next_scores = lane_scores(*inputs, low + 1 + i + AHEAD, 1, left, C, AHEAD)
        for j in tl.static_range(AHEAD):
            t = low + 1 + i + j
            emissions = lane_emissions(end, end_at, tokens, scores, j * C, t, C)
            y, word = best_product(x, table, table_ptr, C)
            after = ()
            for c in tl.static_range(C):
                after += (y[c] + emissions[c],)
            x = lane_select(t < tokens, after, x, C)
            word = tl.where(t < tokens, word, last)
            tl.store(words_ptr + n * T + t - 1, word, mask=t <= T)
        scores = next_scores
