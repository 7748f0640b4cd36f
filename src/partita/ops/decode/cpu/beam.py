"""Greedy and prefix beam search of CTC on the CPU, in Numba, with sequences in parallel.

Prefixes are nodes of a trie, which a table finds by the node of the parent and the last label. So a
prefix that leaves the beam and comes back is the same node, and its extensions in the beam find it.
An alignment's steps are a chain of events, one for each label that it emits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ....primitives.cpu.batch import (
    INF,
    as_integers,
    as_steps,
    contiguous_row,
    run_over_sequences,
)
from ....primitives.cpu.jit import MINUS_ONE, ONE, ZERO, jit
from ....primitives.cpu.logits import (
    Logits,
    centered_row,
    fill_row,
    logsumexp_row,
    row_buffers,
)
from ....primitives.cpu.math import exp, log
from ....runtime.sizes import next_power_of_2
from ..common import Hypotheses, empty_hypotheses

# The numbers of a prefix: log-probabilities of the alignments that end in a blank and in a label,
# of the best of each, and of all.
BLANK, LABEL, BEST_BLANK, BEST_LABEL, TOTAL = range(5)
# Its integers: the last events of the best alignments, its node and its parent's, its last label,
# and the slot of its parent in the beam, or -1.
EVENT_BLANK, EVENT_LABEL, NODE, PARENT_NODE, LAST, PARENT = range(6)
# A tie is broken by label, then old before new, then slot, which are packed into one integer.
LABEL_SHIFT, NEW = 16, 1 << 15
BLOCK = 64  # classes that are compared together


def run_search(
    kernel: Callable[..., None],
    logits: Tensor,
    input_lengths: Tensor,
    from_logits: bool,
    nbest: int,
    work: int,
    *args: Any,
) -> Hypotheses:
    """Run `kernel(share, lengths, logits, found, *args)` for all sequences; return what it found.

    The kernel writes to `Hypotheses` of arrays, and a step is as much work as `work` edges.
    """
    found, lengths = empty_hypotheses(logits, nbest), as_integers(input_lengths)
    arrays = Hypotheses._make(x.numpy() for x in found)
    inputs = Logits(as_steps(logits), logits.shape[0], logits.shape[2], from_logits)
    run_over_sequences(kernel, lengths, work, lengths, inputs, arrays, *args)
    return found


@jit(nogil=True)
def greedy_scan(share: Any, lengths: Any, logits: Any, found: Any, blank: int) -> None:
    """Decode each sequence."""
    steps, buffers = logits.steps, row_buffers(logits.steps, logits.C)
    for n in share:
        valid = 0 <= lengths[n] <= logits.T
        previous, S, total = blank, 0, 0.0
        for t in range(lengths[n] if valid else 0):
            row = contiguous_row(steps, t, n, buffers.row)
            best = 0
            for c in range(logits.C):
                valid = valid and row[c] < INF
                best = c if row[c] > row[best] else best
            lse = logsumexp_row(row, buffers) if logits.from_logits else 0.0
            row, lse = centered_row(row, lse, buffers)
            valid = valid and lse == lse
            total += row[best] - lse
            if best not in (blank, previous):
                found.tokens[n, 0, S], found.steps[n, 0, S] = best, t
                S += 1
            previous = best
        S, found.scores[n, 0] = (S, total) if valid else (0, np.nan)
        found.lengths[n, 0] = S
        fill_row(found.tokens[n, 0, S:], MINUS_ONE)
        fill_row(found.steps[n, 0, S:], MINUS_ONE)


def ctc_greedy_search(
    logits: Tensor, input_lengths: Tensor, blank: int, from_logits: bool
) -> Hypotheses:
    """Decode each sequence by the most probable class of each step."""
    work = logits.shape[2]
    return run_search(greedy_scan, logits, input_lengths, from_logits, 1, work, blank)


class Options(NamedTuple):
    """The options of a beam search.

    Fields:
        blank: the class of the blank.
        width: the number of prefixes in the beam.
        labels: the number of labels that may extend a prefix at a step.
        skipped: the log-probability of the blank above which a step is taken as a blank.
    """

    blank: int
    width: int
    labels: int
    skipped: float


class Trie(NamedTuple):
    """The prefixes of a sequence that have been in the beam.

    Fields:
        table: `[power of 2]` int32, open-addressed: a node, or 0 for none.
        parents, labels: `[nodes]` int32, the parent and the last label of each node; node 0 is the
            empty prefix.
        previous, event_labels: `[T * width]` int32, the event before each event, or -1, and the
            label that it emits.
    """

    table: Any
    parents: Any
    labels: Any
    previous: Any
    event_labels: Any


@jit(forceinline=True)
def log_add(a: float, b: float) -> float:
    """Return log(exp(a) + exp(b))."""
    high, low = (a, b) if a > b else (b, a)
    return high if low == -INF else high + log(1.0 + exp(low - high))


@jit
def insert(scores: Any, ties: Any, found: int, score: float, tie: int) -> int:
    """Insert a candidate into the sorted best ones, and return their number."""
    width = len(scores)
    i = found
    if found == width:
        i = width - 1
        if score < scores[i] or (score == scores[i] and tie > ties[i]):
            return found
    while i > 0 and (score > scores[i - 1] or (score == scores[i - 1] and tie < ties[i - 1])):
        scores[i], ties[i] = scores[i - 1], ties[i - 1]
        i -= 1
    scores[i], ties[i] = score, tie
    return min(found + 1, width)


@jit
def select_labels(
    row: Any, lse: float, blank: int, base: float, least: float, classes: Any, values: Any
) -> tuple[int, bool]:
    """Find the most probable labels in order, of equal ones the lowest first.

    Those that cannot lift a prefix of score `base` to `least` are left out.

    Returns:
        Their number, and whether all classes are valid.
    """
    found, valid, limit = 0, True, least - base + lse
    limit -= 1e-9 * (abs(least) + abs(base) + abs(lse) + 1.0) if limit > -INF else 0.0
    for first in range(0, len(row), BLOCK):
        # Most blocks have no such label, and this sum of integers becomes vector code.
        block, candidates = row[first : first + BLOCK], 0
        for i in range(len(block)):
            candidates += not block[i] < limit
        if not candidates:
            continue
        for c in range(first, first + len(block)):
            value = row[c] - lse
            valid = valid & (value < INF)
            if (base + value >= least) & (c != blank) & (value > -INF):
                i = found
                if found == len(classes):
                    i -= 1
                    if value <= values[i]:
                        continue
                while i > 0 and value > values[i - 1]:
                    classes[i], values[i] = classes[i - 1], values[i - 1]
                    i -= 1
                classes[i], values[i] = c, value
                found = min(found + 1, len(classes))
        if found == len(classes):
            limit = max(limit, values[found - 1] + lse - 1e-9 * (abs(values[found - 1]) + abs(lse)))
    return found, valid


@jit
def node_of(trie: Any, nodes: int, parent: int, label: int) -> int:
    """Return the node of a prefix; it is `nodes`, and is entered, if there is none yet."""
    mask = len(trie.table) - 1
    i = (parent * 0x9E3779B1 + label * 0x85EBCA77) & 0xFFFFFFFF
    i = (i ^ (i >> 15)) & mask
    while trie.table[i]:
        node = trie.table[i]
        if trie.parents[node] == parent and trie.labels[node] == label:
            return node
        i = (i + 1) & mask
    trie.table[i], trie.parents[nodes], trie.labels[nodes] = nodes, parent, label
    return nodes


@jit
def stay(
    x: Any, y: Any, size: int, row: Any, lse: float, log_blank: float, is_skipped: bool, stays: Any
) -> None:
    """Compute the prefixes after a step that adds no label, merged with their parents' extensions.

    Args:
        x, y: the numbers and integers of the beam, `[5, width]` and `[6, width]`.
        stays: numbers `[5, width]` and events `[2, width]`; an event that the step adds is coded as
            -3 minus the event before it.
    """
    numbers, events = stays
    for i in range(size):
        from_label = x[BEST_LABEL, i] > x[BEST_BLANK, i]
        numbers[BLANK, i] = x[TOTAL, i] + log_blank
        best = x[BEST_LABEL, i] if from_label else x[BEST_BLANK, i]
        numbers[BEST_BLANK, i] = best + log_blank
        events[EVENT_BLANK, i] = y[EVENT_LABEL, i] if from_label else y[EVENT_BLANK, i]
        last, p = y[LAST, i], y[PARENT, i]
        emitted = -INF if is_skipped or last < 0 else row[last] - lse
        label, best, event = x[LABEL, i] + emitted, x[BEST_LABEL, i] + emitted, y[EVENT_LABEL, i]
        if p >= 0:
            repeats = y[LAST, p] == last
            label = log_add(label, x[BLANK if repeats else TOTAL, p] + emitted)
            through_label = not repeats and x[BEST_LABEL, p] > x[BEST_BLANK, p]
            inflow = (x[BEST_LABEL, p] if through_label else x[BEST_BLANK, p]) + emitted
            if inflow > best:
                best = inflow
                event = -3 - (y[EVENT_LABEL, p] if through_label else y[EVENT_BLANK, p])
        numbers[LABEL, i], numbers[BEST_LABEL, i], events[EVENT_LABEL, i] = label, best, event
        numbers[TOTAL, i] = log_add(numbers[BLANK, i], label)


@jit
def extend(
    x: Any, y: Any, size: int, labels: int, classes: Any, values: Any, chosen: Any, found: int
) -> int:
    """Insert the extensions of all prefixes that are not in the beam; return how many are best."""
    scores, ties, child, sibling = chosen
    for i in range(size):
        child[i] = -1
    for i in range(size):
        if y[PARENT, i] >= 0:
            sibling[i] = child[y[PARENT, i]]
            child[y[PARENT, i]] = i
    width = len(scores)
    for i in range(size):
        for k in range(labels):
            score, c = x[TOTAL, i] + values[k], classes[k]
            if found == width and score < scores[width - 1]:
                break
            if c == y[LAST, i]:
                score = x[BLANK, i] + values[k]
            other = child[i]
            while other >= 0 and y[LAST, other] != c:
                other = sibling[other]
            if other < 0 and score > -INF:
                found = insert(scores, ties, found, score, (c + 1) << LABEL_SHIFT | NEW | i)
    return found


@jit
def enter(
    trie: Any,
    nodes: int,
    t: int,
    before: Any,
    stays: Any,
    after: Any,
    chosen: Any,
    found: int,
    slots: Any,
) -> int:
    """Make the next beam of the chosen candidates, and return the number of nodes."""
    x, y = before
    x2, y2 = after
    scores, ties, first_event = chosen[0], chosen[1], t * len(chosen[0])
    fill_row(slots, MINUS_ONE)
    for w in range(found):
        if not ties[w] & NEW:
            slots[ties[w] & (NEW - 1)] = w
    returned = False
    for w in range(found):
        i, new = ties[w] & (NEW - 1), ties[w] & NEW
        event = 0
        if new:
            last = (ties[w] >> LABEL_SHIFT) - 1
            repeats = last == y[LAST, i]
            through_label = not repeats and x[BEST_LABEL, i] > x[BEST_BLANK, i]
            emitted = scores[w] - x[BLANK if repeats else TOTAL, i]
            best = x[BEST_LABEL, i] if through_label else x[BEST_BLANK, i]
            x2[BLANK, w], x2[BEST_BLANK, w] = -INF, -INF
            x2[LABEL, w], x2[TOTAL, w], x2[BEST_LABEL, w] = scores[w], scores[w], best + emitted
            event = -3 - (y[EVENT_LABEL, i] if through_label else y[EVENT_BLANK, i])
            node = node_of(trie, nodes, y[NODE, i], last)
            returned = returned or node < nodes
            nodes = max(nodes, node + 1)
            y2[EVENT_BLANK, w], y2[NODE, w] = -1, node
            y2[PARENT_NODE, w], y2[LAST, w], y2[PARENT, w] = y[NODE, i], last, slots[i]
        else:
            for field in range(5):
                x2[field, w] = stays[0][field, i]
            event = stays[1][EVENT_LABEL, i]
            y2[EVENT_BLANK, w], p = stays[1][EVENT_BLANK, i], y[PARENT, i]
            for field in range(NODE, PARENT):
                y2[field, w] = y[field, i]
            y2[PARENT, w] = slots[p] if p >= 0 else -1
        if event <= -2:
            trie.previous[first_event + w] = -3 - event
            trie.event_labels[first_event + w] = y2[LAST, w]
            event = first_event + w
        y2[EVENT_LABEL, w] = event
    if returned:  # a node that was in the beam before may have extensions there
        for w in range(found):
            for i in range(found):
                if y2[PARENT_NODE, i] == y2[NODE, w]:
                    y2[PARENT, i] = w
    return nodes


@jit
def trace(trie: Any, event: int, width: int, tokens: Any, emitted: Any) -> int:
    """Write the labels and the steps of a chain of events, and return their number."""
    S, i = 0, event
    while i >= 0:
        S, i = S + 1, trie.previous[i]
    for k in range(S - 1, -1, -1):
        tokens[k], emitted[k] = trie.event_labels[event], event // width
        event = trie.previous[event]
    return S


@jit
def empty_trie(table_size: int, nodes: int, events: int) -> Trie:
    """Return memory of a trie, whose table its user clears."""
    parents, labels = np.empty(nodes, np.int32), np.empty(nodes, np.int32)
    previous, event_labels = np.empty(events, np.int32), np.empty(events, np.int32)
    return Trie(np.empty(table_size, np.int32), parents, labels, previous, event_labels)


@jit(nogil=True)
def beam_scan(
    share: Any, lengths: Any, logits: Any, found: Any, options: Any, table_size: int
) -> None:
    """Decode each sequence."""
    width, steps, buffers = options.width, logits.steps, row_buffers(logits.steps, logits.C)
    x, y = np.empty((2, 5, width)), np.empty((2, 6, width), np.int64)
    stays = np.empty((5, width)), np.empty((2, width), np.int64)
    slots, child = np.empty(width, np.int64), np.empty(width, np.int64)
    chosen = np.empty(width), np.empty(width, np.int64), child, np.empty(width, np.int64)
    classes, values = np.empty(options.labels, np.int64), np.empty(options.labels)
    trie = empty_trie(table_size, logits.T * width + 1, logits.T * width)
    for n in share:
        valid, nodes, size, b = 0 <= lengths[n] <= logits.T, ONE, ONE, 0
        fill_row(trie.table, ZERO)
        for i in range(x.shape[1]):
            x[0, i, 0] = -INF
        for i in range(y.shape[1]):
            y[0, i, 0] = -1
        x[0, BLANK, 0] = x[0, BEST_BLANK, 0] = x[0, TOTAL, 0] = 0.0
        y[0, NODE, 0], y[0, PARENT_NODE, 0] = 0, -2
        for t in range(lengths[n] if valid else 0):
            row = contiguous_row(steps, t, n, buffers.row)
            lse = logsumexp_row(row, buffers) if logits.from_logits else 0.0
            row, lse = centered_row(row, lse, buffers)
            log_blank = row[options.blank] - lse
            skips = log_blank > options.skipped
            stay(x[b], y[b], size, row, lse, log_blank, skips, stays)
            number = ZERO
            for i in range(size):
                if stays[0][TOTAL, i] > -INF:
                    tie = (y[b, LAST, i] + 1) << LABEL_SHIFT | i
                    number = insert(chosen[0], chosen[1], number, stays[0][TOTAL, i], tie)
            least = chosen[0][width - 1] if number == width else -INF
            base = x[b, TOTAL, 0] if size else 0.0
            labels, row_valid = select_labels(row, lse, options.blank, base, least, classes, values)
            valid = valid and row_valid
            labels = 0 if skips else labels
            number = extend(x[b], y[b], size, labels, classes, values, chosen, number)
            before, after = (x[b], y[b]), (x[1 - b], y[1 - b])
            nodes = enter(trie, nodes, t, before, stays, after, chosen, number, slots)
            size, b = number, 1 - b
        for i in range(found.lengths.shape[1]):
            S, found.scores[n, i] = 0, -INF if valid else np.nan
            if valid and i < size:
                by_label = x[b, BEST_LABEL, i] >= x[b, BEST_BLANK, i]
                event = y[b, EVENT_LABEL if by_label else EVENT_BLANK, i]
                S = trace(trie, event, width, found.tokens[n, i], found.steps[n, i])
                found.scores[n, i] = x[b, TOTAL, i]
            found.lengths[n, i] = S
            fill_row(found.tokens[n, i, S:], MINUS_ONE)
            fill_row(found.steps[n, i, S:], MINUS_ONE)


def ctc_beam_search(
    logits: Tensor,
    input_lengths: Tensor,
    blank: int,
    beam_width: int,
    nbest: int,
    cutoff_top_n: int,
    blank_skip_threshold: float,
    from_logits: bool,
) -> Hypotheses:
    """Return the best prefixes of each sequence."""
    T, _, C = logits.shape
    skipped = float(np.log(blank_skip_threshold)) if blank_skip_threshold else INF
    options = Options(blank, beam_width, cutoff_top_n, skipped)
    search = beam_scan, logits, input_lengths, from_logits, nbest, C + 8 * beam_width
    return run_search(*search, options, next_power_of_2(2 * T * beam_width + 2))
