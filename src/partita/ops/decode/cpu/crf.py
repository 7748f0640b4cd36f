"""A path of CTC-CRF on the CPU, its bases and their posteriors, in Numba, sequences in parallel.

The path is the best one, or that of a prefix beam search. The trie of the search is that of
`beam.py`, except that its first C nodes are the prefixes of one k-mer. An event is a move, whose
label is the k-mer that it enters. The event before the first one is -1 - c, where c is the first
k-mer.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import (
    INF,
    as_array,
    as_integers,
    as_steps,
    row_at,
    run_over_sequences,
    start_of,
)
from ....primitives.cpu.half import number_at
from ....primitives.cpu.jit import MINUS_ONE, ZERO, jit
from ....primitives.cpu.logits import fill_row
from ....runtime.sizes import next_power_of_2
from ...chain.cpu.logz import chain_gradient, chain_logz
from ...chain.cpu.paths import chain_scan, chain_viterbi
from .. import common
from ..basecalls import Basecalls, empty_basecalls
from ..common import empty_posteriors
from .beam import LABEL_SHIFT, NEW, empty_trie, insert, log_add, node_of

# The numbers of a prefix: the log of the sum over its paths, and the score of the best of them.
SCORE, BEST = range(2)
# Its integers: the last event of that path, its node and its parent's, its last k-mer, and the slot
# of its parent in the beam, or -1.
EVENT, NODE, PARENT_NODE, STATE, PARENT = range(5)


@jit
def start(later: Any, x: Any, y: Any, chosen: Any) -> int:
    """Put the best k-mers into the beam, and return their number."""
    scores, ties = chosen[0], chosen[1]
    found = ZERO
    for c in range(len(later)):
        if later[c] > -INF:
            found = insert(scores, ties, found, later[c], c)
    for i in range(found):
        c = ties[i]
        x[SCORE, i], x[BEST, i] = 0.0, 0.0
        y[EVENT, i], y[NODE, i], y[PARENT_NODE, i] = -1 - c, c, -1
        y[STATE, i], y[PARENT, i] = c, -1
    return found


@jit
def candidates(
    x: Any, y: Any, size: int, step: Any, strides: Any, later: Any, stays: Any, chosen: Any, A: int
) -> int:
    """Compute the prefixes that stay and insert them and all extensions; return how many are best.

    Args:
        step: the scores, and the index in memory of the first of the step.
        stays: the numbers `[2, width]` of the prefixes that stay, and whether their best path
            comes from the parent, `[width]`.
    """
    (scores, first_score), (ranks, ties, child) = step, chosen
    numbers, enters = stays
    bases, top = A - 1, len(later) // (A - 1)
    fill_row(
        child, ZERO
    )  # a bit for each base by which a prefix of the beam is extended in the beam
    found = ZERO
    for i in range(size):
        c, p = y[STATE, i], y[PARENT, i]
        stay = number_at(scores, first_score + c * strides[2])
        score, best = x[SCORE, i] + stay, x[BEST, i] + stay
        enters[i] = False
        if p >= 0:
            k = 1 + y[STATE, p] // top
            move = number_at(scores, first_score + c * strides[2] + k * strides[3])
            score = log_add(score, x[SCORE, p] + move)
            enters[i] = x[BEST, p] + move > best
            best = x[BEST, p] + move if enters[i] else best
            child[p] |= 1 << (c % bases)
        numbers[SCORE, i], numbers[BEST, i] = score, best
        if score + later[c] > -INF:
            tie = (c % bases + 1) << LABEL_SHIFT | i
            found = insert(ranks, ties, found, score + later[c], tie)
    for i in range(size):
        k, first = 1 + y[STATE, i] // top, y[STATE, i] * bases % len(later)
        for base in range(bases):
            if child[i] >> base & 1:
                continue
            c = first + base
            move = number_at(scores, first_score + c * strides[2] + k * strides[3])
            rank = x[SCORE, i] + move + later[c]
            if rank > -INF:
                tie = (base + 1) << LABEL_SHIFT | NEW | i
                found = insert(ranks, ties, found, rank, tie)
    return found


@jit
def enter(
    trie: Any,
    nodes: int,
    t: int,
    before: Any,
    step: Any,
    strides: Any,
    states: int,
    stays: Any,
    after: Any,
    chosen: Any,
    found: int,
    slots: Any,
) -> int:
    """Make the next beam of the chosen candidates, and return the number of nodes."""
    (x, y), (x2, y2), (numbers, enters) = before, after, stays
    ties, width = chosen[1], len(chosen[0])
    fill_row(slots, MINUS_ONE)
    for w in range(found):
        if not ties[w] & NEW:
            slots[ties[w] & (NEW - 1)] = w
    returned, bases = False, strides[4]
    for w in range(found):
        i, new = ties[w] & (NEW - 1), ties[w] & NEW
        p = i if new else y[PARENT, i]
        if new:
            base = (ties[w] >> LABEL_SHIFT) - 1
            c = y[STATE, i] * bases % states + base
            k = 1 + y[STATE, i] // (states // bases)
            move = number_at(step[0], step[1] + c * strides[2] + k * strides[3])
            x2[SCORE, w], x2[BEST, w] = x[SCORE, i] + move, x[BEST, i] + move
            node = node_of(trie, nodes, y[NODE, i], base)
            returned = returned or node < nodes
            nodes = max(nodes, node + 1)
            y2[NODE, w], y2[PARENT_NODE, w], y2[STATE, w] = node, y[NODE, i], c
        else:
            x2[SCORE, w], x2[BEST, w] = numbers[SCORE, i], numbers[BEST, i]
            y2[NODE, w], y2[PARENT_NODE, w] = y[NODE, i], y[PARENT_NODE, i]
            y2[STATE, w] = y[STATE, i]
        y2[PARENT, w] = slots[p] if p >= 0 else -1
        if new or enters[i]:
            trie.previous[t * width + w] = y[EVENT, p]
            trie.event_labels[t * width + w] = y2[STATE, w]
            y2[EVENT, w] = t * width + w
        else:
            y2[EVENT, w] = y[EVENT, i]
    if returned:  # a node that was in the beam before may have extensions there
        for w in range(found):
            for i in range(found):
                if y2[PARENT_NODE, i] == y2[NODE, w]:
                    y2[PARENT, i] = w
    return nodes


@jit
def trace(
    trie: Any, event: int, width: int, sizes: Any, length: int, states: Any, edges: Any
) -> None:
    """Write the path of an event, `[length + 1]` states and `[length]` edges; `sizes` is (C, A)."""
    C, A = sizes
    t = length
    while event >= 0:
        first, c = event // width + 1, trie.event_labels[event]
        while t > first:
            states[t], edges[t - 1] = c, c * A
            t -= 1
        event = trie.previous[event]
        source = trie.event_labels[event] if event >= 0 else -1 - event
        states[t], edges[t - 1] = c, c * A + 1 + source // (C // (A - 1))
        t -= 1
    c = -1 - event
    while t > 0:
        states[t], edges[t - 1] = c, c * A
        t -= 1
    states[0] = c


@jit(nogil=True)
def crf_beam_scan(
    share: Any, lengths: Any, scores: Any, later: Any, sizes: Any, states: Any, edges: Any
) -> None:
    """Find the best path of the best prefix of each sequence; `sizes` is (width, table, A)."""
    width, table_size, A = sizes
    T, C = later.shape[0] - 1, later.shape[2]
    strides = np.empty(5, np.int64)
    strides[:4], strides[4] = scores.strides, A - 1
    x, y = np.empty((2, 2, width)), np.empty((2, 5, width), np.int64)
    stays, slots = (np.empty((2, width)), np.empty(width, np.bool_)), np.empty(width, np.int64)
    chosen = np.empty(width), np.empty(width, np.int64), np.empty(width, np.int64)
    trie = empty_trie(table_size, T * width + C + 1, T * width + 1)
    for n in share:
        fill_row(states[n], MINUS_ONE)
        fill_row(edges[n], MINUS_ONE)
        if not 0 <= lengths[n] <= T:
            continue
        fill_row(trie.table, ZERO)
        nodes, b = C, 0
        size = start(later[0, n], x[0], y[0], chosen)
        for t in range(lengths[n]):
            step = scores, start_of(scores, t, n)
            before, after = (x[b], y[b]), (x[1 - b], y[1 - b])
            found = candidates(x[b], y[b], size, step, strides, later[t + 1, n], stays, chosen, A)
            nodes = enter(
                trie, nodes, t, before, step, strides, C, stays, after, chosen, found, slots
            )
            size, b = found, 1 - b
        if size:
            trace(trie, y[b, EVENT, 0], width, (C, A), lengths[n], states[n], edges[n])


def ctc_crf_beam_search(
    scores: Tensor, later: Tensor, input_lengths: Tensor, beam_width: int
) -> tuple[Tensor, Tensor]:
    """Return the best path of the best prefix: states `[T + 1, N]` and edges `[T, N]`."""
    T, N, _, A = scores.shape
    states, edges = np.empty((N, T + 1), np.int64), np.empty((N, T), np.int64)
    lengths = as_integers(input_lengths)
    sizes = beam_width, next_power_of_2(2 * T * beam_width + 2), A
    inputs = (lengths, as_steps(scores), as_array(later), sizes, states, edges)
    run_over_sequences(crf_beam_scan, lengths, 8 * beam_width * A, *inputs)
    return torch.from_numpy(states).T.contiguous(), torch.from_numpy(edges).T.contiguous()


@jit(nogil=True)
def crf_posteriors_scan(share: Any, lengths: Any, marginals: Any, by_base: Any, first: Any) -> None:
    """Sum the posteriors of edges by the base that each step ends in, and by the first k-mer."""
    T, _, bases = by_base.shape
    C, strides = first.shape[1], marginals.strides
    for n in share:
        length = lengths[n] if 0 <= lengths[n] <= T else 0
        for t in range(T):
            fill_row(by_base[t, n], 0.0)
        for t in range(length):
            row = row_at(marginals, t, n)
            for c in range(C):
                total = 0.0
                for a in range(bases + 1):
                    total += row[c * strides[2] + a * strides[3]]
                by_base[t, n, c % bases] += total
        fill_row(first[n], 1.0 / C)
        row = row_at(marginals, ZERO, n)
        for c in range(C if length else 0):
            first[n, c] = row[c * strides[2]]
            for target in range(c * bases % C, c * bases % C + bases):
                # The k-mer j x moves to the k-mers x e through their column 1 + j.
                first[n, c] += row[target * strides[2] + (1 + c // (C // bases)) * strides[3]]


def ctc_crf_base_posteriors(marginals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the posteriors for qualities, given those of edges; see the reference."""
    C, A = marginals.shape[2:]
    found, steps = empty_posteriors(marginals), as_integers(lengths)
    arrays = [x.numpy() for x in found]
    run_over_sequences(crf_posteriors_scan, steps, C * A, steps, as_steps(marginals), *arrays)
    return found


FUNCTIONS = common.PathFunctions(
    *(chain_viterbi, chain_scan, chain_logz, chain_gradient),
    *(ctc_crf_beam_search, ctc_crf_base_posteriors),
)
ctc_crf_path = functools.partial(common.ctc_crf_path, FUNCTIONS)


@jit(nogil=True)
def crf_calls_scan(
    share: Any,
    lengths: Any,
    by_base: Any,
    of_first: Any,
    states: Any,
    edges: Any,
    state_len: int,
    calls: Any,
) -> None:
    """Write the bases of each sequence."""
    labels, numbers, log_probs, steps, moves = calls
    T, bases = len(edges), by_base.shape[2]
    posteriors = np.empty(state_len + T)
    for n in share:
        fill_row(labels[n], ZERO)
        fill_row(steps[n], MINUS_ONE)
        fill_row(log_probs[n], 0.0)
        fill_row(moves[n], ZERO)
        first, length, found = states[0, n], lengths[n], 0
        if first >= 0 and 0 <= length <= T:
            found, power = state_len, of_first.shape[1]
            for i in range(state_len):
                power //= bases
                base, posteriors[i] = first // power % bases, 0.0
                labels[n, i] = 1 + base
                for c in range(of_first.shape[1]):
                    if c // power % bases == base:
                        posteriors[i] += of_first[n, c]
            total, start = 0.0, -1
            for t in range(length):
                if edges[t, n] >= 0 and edges[t, n] % (bases + 1) > 0:
                    if start >= 0:
                        posteriors[found - 1] = total / (t - start)
                    labels[n, found] = 1 + states[t + 1, n] % bases
                    steps[n, found], moves[n, t] = t, True
                    total, start, found = 0.0, t, found + 1
                if start >= 0:
                    total += by_base[t, n, states[t + 1, n] % bases]
            if start >= 0:
                posteriors[found - 1] = total / (length - start)
            for i in range(found):
                log_probs[n, i] = min(np.log(posteriors[i]), 0.0)
        numbers[n] = found


def ctc_crf_calls(
    by_base: Tensor,
    first: Tensor,
    states: Tensor,
    edges: Tensor,
    lengths: Tensor,
    state_len: int,
    dtype: torch.dtype,
) -> Basecalls:
    """Return the bases of paths: states `[T + 1, N]` and edges `[T, N]`, -1 where there is none."""
    calls = empty_basecalls(by_base, state_len, torch.float64)
    steps, inputs = as_integers(lengths), (by_base, first, states, edges)
    arrays = [x.contiguous().numpy() for x in inputs]
    found = Basecalls._make(x.numpy() for x in calls)
    run_over_sequences(crf_calls_scan, steps, 1, steps, *arrays, state_len, found)
    return calls._replace(log_probs=calls.log_probs.to(dtype))
