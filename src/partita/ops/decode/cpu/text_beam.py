"""Beam search from CTC to text on the CPU, in Numba, with sequences in parallel.

The texts that hypotheses have, or could have after a step, are nodes of a trie of symbols. A node
holds the states of the lexicon, the language model and the phrases after its text, so that each is
looked up once for a text. A hypothesis is a node with the log-probabilities of its alignments, one
for those that end in a blank and one for each label in which they can end. The most probable
alignments are chains of events, one for each label that they emit.

A search goes on from a state of arrays, so it may stop after any step. What no hypothesis can reach
any more is dropped when the memory is full and after each chunk of a stream, and the events that
all hypotheses share are written out. Neither changes a score.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ....primitives.cpu.batch import INF, as_integers, as_steps, contiguous_row, run_over_sequences
from ....primitives.cpu.jit import MINUS_ONE, ONE, ZERO, jit, jit_in_place
from ....primitives.cpu.logits import (
    Logits,
    centered_row,
    fill_row,
    logsumexp_row,
    row_buffers,
)
from ....runtime.sizes import next_power_of_2
from ..phrase_boost import Arcs
from ..text_tables import (
    BOUNDARY,
    COMMIT_EVERY,
    LN10,
    Found,
    Lexicon,
    Options,
    PhraseTables,
    Vocabulary,
    Words,
)
from .beam import log_add

# The integers of a node: the node without its last symbol, that symbol, the node of the lexicon and
# the symbols of its unfinished word, the states of the language model and of both automata, and its
# place among the hypotheses of a step or -1.
PARENT, SYMBOL, LEX, LENGTH, LM, HOT, BOOST, PLACE = range(8)
# Its numbers: the score of what is finished, and that of all of its text.
TOTAL, BONUS = range(2)
# The numbers of a hypothesis: the log-probability of its alignments that end in a blank, and of the
# best of them. The same two follow for each label in which it ends.
BLANK, BEST = range(2)
# Its integers: its node, the row of its children, the number of labels in which it ends, and for
# the blank the last event and the step after it. Label, event and step follow for each label.
NODE, ROW, ENDINGS, EVENT, END = range(5)
# The integers of an event: the one before, its label and step, and the step after the one before.
PREVIOUS, LABEL, STEP, PREVIOUS_END = range(4)
# The integers of a search.
NODES, EVENTS, SIZE, STEPS, VALID, WRITTEN = range(6)
FIRST_NODES, FIRST_EVENTS = 2**14, 2**12
FIRST_SYMBOL: Any = np.int64(BOUNDARY)  # as an argument; see `jit`


class Search(NamedTuple):
    """The state of a search over one sequence.

    Fields:
        counts: `[6]` int64, the numbers of nodes, events, hypotheses and steps, whether all steps
            were valid, and the number of events that are written out.
        nodes, node_scores: `[capacity, 8]` int64, `[capacity, 2]`.
        table: `[power of 2]` int64, open-addressed: a node, or 0 for none.
        events: `[capacity, 4]` int64.
        integers, numbers: `[width, 5 + 3 K]` int64, `[width, 2 + 2 K]`, the hypotheses by rank.
        children: `[width, C]` int32, the node after each label for the hypothesis of a row, or -1.
        written: `[capacity, 3]` int64, label, step and the step after the last of final events.
    """

    counts: Any
    nodes: Any
    node_scores: Any
    table: Any
    events: Any
    integers: Any
    numbers: Any
    children: Any
    written: Any


class Spelling(NamedTuple):
    """The symbols of all labels, flat, and where those of each start.

    Fields:
        symbols: `[S]` int64.
        starts: `[C + 1]` int64.
        labels: `[S]` int64, the label that is a symbol alone, or -1.
        longest: the most symbols of a label.
        by_token: whether each label is a word.
    """

    symbols: Any
    starts: Any
    labels: Any
    longest: int
    by_token: bool


class Model(NamedTuple):
    """The language model; see `language_model.Trie`.

    Fields:
        pairs, log_probs, states, backoffs, suffixes: its tables.
        places: `[5]` int64, the number of words, `<unk>`, `</s>`, the state at the start, and how
            often it can back off. The first one is 0 without a model.
    """

    pairs: Any
    log_probs: Any
    states: Any
    backoffs: Any
    suffixes: Any
    places: Any


class Tables(NamedTuple):
    """All that a search looks up.

    Fields:
        spelling: the labels.
        lexicon: the words; see `text_tables.Lexicon`.
        only: whether a text has words of the lexicon only.
        model: the language model.
        hotwords, boost: automata; see `phrase_boost.Arcs`.
        gains: `[C]`, the most that each label can add to the score of a text but its alignments;
            inf where labels have more symbols than one.
    """

    spelling: Any
    lexicon: Any
    only: bool
    model: Any
    hotwords: Any
    boost: Any
    gains: Any


@jit_in_place
def find(numbers: Any, low: int, high: int, number: int) -> int:
    """Return the place of a number among sorted ones from `low` to `high`, or -1."""
    end = high
    while low < high:
        middle = (low + high) >> 1
        if numbers[middle] < number:
            low = middle + 1
        else:
            high = middle
    return low if low < end and numbers[low] == number else -1


@jit_in_place
def log_prob_of(model: Any, context: int, word: int) -> tuple[float, int]:
    """Return the log-probability of a word after a state, and the state that follows."""
    words, backoff = model.places[0], 0.0
    while context:
        place = find(model.pairs, ZERO, len(model.pairs), context * words + word)
        if place >= 0:
            node = place + words + 1
            return backoff + model.log_probs[node], model.states[node]
        backoff += model.backoffs[context]
        context = model.suffixes[context]
    return backoff + model.log_probs[word + 1], model.states[word + 1]


@jit_in_place
def follow(arcs: Any, state: int, symbol: int) -> tuple[float, int]:
    """Return what a symbol adds after a state of an automaton, and the state that follows."""
    if len(arcs.credits) == 1:  # no phrases
        return 0.0, 0
    place = find(arcs.pairs, ZERO, len(arcs.pairs), state * len(arcs.start_targets) + symbol)
    if place >= 0:
        return arcs.scores[place] - arcs.credits[state], arcs.targets[place]
    return arcs.start_scores[symbol] - arcs.credits[state], arcs.start_targets[symbol]


@jit_in_place
def slot_of(search: Any, parent: int, symbol: int) -> int:
    """Return where the table has the node after a symbol, or where it would enter it."""
    table, nodes = search.table, search.nodes
    mask = len(table) - 1
    i = (parent * 0x9E3779B1 + symbol * 0x85EBCA77) & 0xFFFFFFFF
    i = (i ^ (i >> 15)) & mask
    while table[i]:
        if nodes[table[i], PARENT] == parent and nodes[table[i], SYMBOL] == symbol:
            return i
        i = (i + 1) & mask
    return i


@jit_in_place
def node_after(search: Any, tables: Any, options: Any, parent: int, symbol: int) -> int:
    """Return the node of a text with one more symbol, which is entered if there is none yet."""
    slot = slot_of(search, parent, symbol)
    if search.table[slot]:
        return search.table[slot]
    lexicon, model, by_token = tables.lexicon, tables.model, tables.spelling.by_token
    node, before, total = search.counts[NODES], search.nodes[parent], search.node_scores[parent, 0]
    state, penalty, at, length = before[LM], 0.0, before[LEX], before[LENGTH]
    added, hot = follow(tables.hotwords, before[HOT], symbol)
    total += added
    added, boost = follow(tables.boost, before[BOOST], symbol)
    total += added
    if by_token or symbol == BOUNDARY:
        if by_token:
            word, known = lexicon.words[symbol], lexicon.known[symbol]
        else:
            word = lexicon.words[at] if at >= 0 else -1
            known = at >= 0 and lexicon.known[at]
            total = -INF if tables.only and word < 0 else total
            at, length = 0, 0
        if model.places[0]:
            log_prob, state = log_prob_of(model, state, word if word >= 0 else model.places[1])
            lowered = 0.0 if known else LN10 * options.unknown
            total += options.alpha * (log_prob + lowered) + options.beta
    else:
        length += 1
        if at >= 0:
            at = find(lexicon.symbols, lexicon.first[at], lexicon.first[at + 1], symbol)
        if hot == 0 and not (at >= 0 and lexicon.starts[at]):
            penalty = options.unknown * max(1.0, length / 6) if model.places[0] else 0.0
        total = -INF if tables.only and at < 0 else total
    fields = search.nodes[node]
    fields[PARENT], fields[SYMBOL], fields[LEX], fields[LENGTH] = parent, symbol, at, length
    fields[LM], fields[HOT], fields[BOOST], fields[PLACE] = state, hot, boost, -1
    search.node_scores[node, TOTAL], search.node_scores[node, BONUS] = total, total + penalty
    search.table[slot] = node
    search.counts[NODES] += 1
    return node


@jit_in_place
def node_after_label(search: Any, tables: Any, options: Any, node: int, label: int) -> int:
    """Return the node of a text with one more label."""
    spelling = tables.spelling
    for i in range(spelling.starts[label], spelling.starts[label + 1]):
        symbol = spelling.symbols[i]
        is_at_boundary = search.nodes[node, LENGTH] == 0
        if spelling.by_token or symbol != BOUNDARY or not is_at_boundary:
            node = node_after(search, tables, options, node, symbol)
    return node


@jit_in_place
def start(search: Any, tables: Any) -> None:
    """Set a search to the start of a sequence."""
    fill_row(search.counts, ZERO)
    search.counts[NODES] = search.counts[SIZE] = search.counts[VALID] = 1
    fill_row(search.table, ZERO)
    root, hot, boost, total = search.nodes[0], 0, 0, 0.0
    if not tables.spelling.by_token:  # a text follows a boundary
        total, hot = follow(tables.hotwords, ZERO, FIRST_SYMBOL)
        added, boost = follow(tables.boost, ZERO, FIRST_SYMBOL)
        total += added
    root[PARENT], root[SYMBOL], root[LEX], root[LENGTH] = -1, -1, 0, 0
    root[LM], root[HOT], root[BOOST], root[PLACE] = tables.model.places[3], hot, boost, -1
    fill_row(search.node_scores[0], total)
    fill_row(search.numbers[0, :2], 0.0)
    fill_row(search.integers[0, : END + 1], ZERO)
    search.integers[0, EVENT] = -1
    fill_row(search.children[0], MINUS_ONE)


@jit_in_place
def select_labels(row: Any, lse: float, options: Any, labels: Any, best: Any) -> int:
    """Write the labels that may extend a hypothesis, by class, and return their number."""
    highest = row[0]
    for c in range(1, len(row)):
        highest = row[c] if row[c] > highest else highest
    enough, found = min(options.min_logp, highest - lse), 0
    if options.labels < len(row) - 1:
        # The least of the best labels decides, of equal ones the lower classes.
        size = 0
        for c in range(len(row)):
            value = row[c]
            if c == options.blank or (size == options.labels and not value > best[size - 1]):
                continue
            i = size - 1 if size == options.labels else size
            while i > 0 and value > best[i - 1]:
                best[i], labels[i] = best[i - 1], labels[i - 1]
                i -= 1
            best[i], labels[i] = value, c
            size = min(size + 1, options.labels)
        for i in range(1, size):  # by class
            label, k = labels[i], i
            while k > 0 and labels[k - 1] > label:
                labels[k] = labels[k - 1]
                k -= 1
            labels[k] = label
    else:
        size = 0
        for c in range(len(row)):
            if c != options.blank:
                labels[size] = c
                size += 1
    for i in range(size):
        value = row[labels[i]] - lse
        if value > -INF and value >= enough:
            labels[found] = labels[i]
            found += 1
    return found


@jit_in_place
def add_ending(x: Any, y: Any, label: int, score: float, best: float, event: int, end: int) -> None:
    """Add alignments that end in a label to a hypothesis."""
    count = y[ENDINGS]
    k = 0
    while k < count and y[5 + 3 * k] != label:
        k += 1
    at, place = 2 + 2 * k, 5 + 3 * k
    if k == count:
        y[ENDINGS] = count + 1
        x[at], x[at + 1], y[place], y[place + 1], y[place + 2] = score, best, label, event, end
        return
    x[at] = log_add(x[at], score)
    if best > x[at + 1]:
        x[at + 1], y[place + 1], y[place + 2] = best, event, end


@jit_in_place
def total_of(x: Any, endings: int, left_out: int) -> float:
    """Return the log-probability of all alignments but those that end in one of the labels."""
    total = x[BLANK]
    for k in range(endings):
        if k != left_out:
            total = log_add(total, x[2 + 2 * k])
    return total


@jit_in_place
def best_of(x: Any, y: Any, endings: int, left_out: int) -> tuple[float, int, int]:
    """Return the log-probability of the best of these, its last event and the step after it."""
    best, event, end = x[BEST], y[EVENT], y[END]
    for k in range(endings):
        if k != left_out and x[3 + 2 * k] > best:
            best, event, end = x[3 + 2 * k], y[6 + 3 * k], y[7 + 3 * k]
    return best, event, end


@jit_in_place
def stay(search: Any, row: Any, lse: float, blank: int, skips: bool, new: Any) -> None:
    """Write the hypotheses after a step that adds no label to them."""
    t = search.counts[STEPS]
    for i in range(search.counts[SIZE]):
        x, y, x2, y2 = search.numbers[i], search.integers[i], new.numbers[i], new.integers[i]
        count, log_blank = y[ENDINGS], row[blank] - lse
        search.nodes[y[NODE], PLACE] = i
        best, event, end = best_of(x, y, count, MINUS_ONE)
        x2[BLANK], x2[BEST] = total_of(x, count, MINUS_ONE) + log_blank, best + log_blank
        y2[NODE], y2[ROW], y2[ENDINGS], y2[EVENT], y2[END] = y[NODE], y[ROW], count, event, end
        for k in range(count):
            emitted = -INF if skips else row[y[5 + 3 * k]] - lse
            x2[2 + 2 * k], x2[3 + 2 * k] = x[2 + 2 * k] + emitted, x[3 + 2 * k] + emitted
            y2[5 + 3 * k], y2[6 + 3 * k], y2[7 + 3 * k] = y[5 + 3 * k], y[6 + 3 * k], t + 1


@jit_in_place
def link(search: Any, spelling: Any) -> None:
    """Enter the children that are in the beam, where each label is one symbol."""
    nodes, children, y = search.nodes, search.children, search.integers
    for i in range(search.counts[SIZE]):
        fields = nodes[y[i, NODE]]
        parent, symbol = fields[PARENT], fields[SYMBOL]
        place = nodes[parent, PLACE] if parent >= 0 else -1
        if place >= 0:
            children[y[place, ROW], spelling.labels[symbol]] = y[i, NODE]
        boundary = spelling.labels[BOUNDARY]
        if fields[LENGTH] == 0 and not spelling.by_token and boundary >= 0:
            children[y[i, ROW], boundary] = y[i, NODE]


@jit_in_place
def least_rank(search: Any, new: Any, width: int) -> float:
    """Return a rank that all of a full beam's hypotheses have after the step; -inf if not full."""
    if search.counts[SIZE] < width:
        return -INF
    least = INF
    for i in range(width):
        rank = total_of(new.numbers[i], new.integers[i, ENDINGS], MINUS_ONE)
        least = min(least, rank + search.node_scores[new.integers[i, NODE], BONUS])
    return least


@jit_in_place
def extend(
    search: Any,
    tables: Any,
    options: Any,
    row: Any,
    lse: float,
    labels: Any,
    new: Any,
    has_one_way: bool,
) -> int:
    """Write the hypotheses that a label extends, and return the number of all.

    Where a text that is not in the beam is reached in one way only, its rank is known with the
    first label that reaches it, and one below those of a full beam is left out.
    """
    size = found = search.counts[SIZE]
    least = -INF
    if has_one_way:
        link(search, tables.spelling)
        least = least_rank(search, new, options.width)
    # Each use of a field of a tuple would count a reference.
    children, nodes, node_scores, gains = (
        search.children,
        search.nodes,
        search.node_scores,
        tables.gains,
    )
    for i in range(size):
        x, y = search.numbers[i], search.integers[i]
        count, total, start, row_of = (
            y[ENDINGS],
            total_of(x, y[ENDINGS], MINUS_ONE),
            y[NODE],
            y[ROW],
        )
        whole_best, whole_event, whole_end = best_of(x, y, count, MINUS_ONE)
        base = node_scores[start, TOTAL] - lse
        for label in labels:
            score, best, event, end = total, whole_best, whole_event, whole_end
            for k in range(count):
                if y[5 + 3 * k] == label:  # a repeated label needs a blank between
                    score = total_of(x, count, k)
                    best, event, end = best_of(x, y, count, k)
            node = children[row_of, label]
            if node < 0 and score + row[label] + gains[label] + base <= least:
                continue
            emitted = row[label] - lse
            score, best = score + emitted, best + emitted
            if score == -INF:
                continue
            if node < 0:
                node = node_after_label(search, tables, options, start, label)
                children[row_of, label] = node
            bonus, place = node_scores[node, BONUS], nodes[node, PLACE]
            if bonus == -INF:
                continue
            if place < 0:
                if has_one_way and score + bonus <= least:
                    continue
                place, found = found, found + 1
                nodes[node, PLACE] = place
                new.numbers[place, BLANK] = new.numbers[place, BEST] = -INF
                fields = new.integers[place]
                fields[NODE], fields[ROW], fields[ENDINGS] = node, -1, 0
                fields[EVENT], fields[END] = -1, 0
            # An event that the step adds is coded as -3 minus the event before it.
            add_ending(new.numbers[place], new.integers[place], label, score, best, -3 - event, end)
    return found


@jit_in_place
def insert(ranks: Any, order: Any, size: int, rank: float, place: int) -> int:
    """Insert a place into the best ones, behind those of equal rank, and return their number."""
    if rank == -INF:
        return size
    i = size
    if size == len(ranks):
        i = size - 1
        if rank <= ranks[i]:
            return size
    while i > 0 and rank > ranks[i - 1]:
        ranks[i], order[i] = ranks[i - 1], order[i - 1]
        i -= 1
    ranks[i], order[i] = rank, place
    return min(size + 1, len(ranks))


class Candidates(NamedTuple):
    """The hypotheses that a step makes, and the choice among them.

    Fields:
        numbers, integers: as those of a search, for `width` (labels + 1) hypotheses.
        ranks, order: `[width]`, the best ranks and their places.
        free: `[width]` int64, scratch for rows of children.
    """

    numbers: Any
    integers: Any
    ranks: Any
    order: Any
    free: Any


@jit_in_place
def copy_hypothesis(x: Any, y: Any, x2: Any, y2: Any) -> None:
    """Copy the numbers and integers of a hypothesis."""
    for i in range(len(x)):
        x2[i] = x[i]
    for i in range(len(y)):
        y2[i] = y[i]


@jit_in_place
def enter(search: Any, new: Any, found: int, size: int) -> None:
    """Make the best candidates the hypotheses of the search, and enter their events."""
    t, width = search.counts[STEPS], len(new.free)
    fill_row(new.free, ONE)
    for place in range(found):
        search.nodes[new.integers[place, NODE], PLACE] = -1
    for w in range(size):
        row = new.integers[new.order[w], ROW]
        if row >= 0:
            new.free[row] = 0
    free = 0
    for w in range(size):
        x, y, place = search.numbers[w], search.integers[w], new.order[w]
        copy_hypothesis(new.numbers[place], new.integers[place], x, y)
        if y[ROW] < 0:
            while free < width and not new.free[free]:
                free += 1
            y[ROW], free = free, free + 1
            fill_row(search.children[y[ROW]], MINUS_ONE)
        for k in range(y[ENDINGS]):
            if y[6 + 3 * k] <= -2:
                event = search.counts[EVENTS]
                fields = search.events[event]
                fields[PREVIOUS], fields[LABEL] = -3 - y[6 + 3 * k], y[5 + 3 * k]
                fields[STEP], fields[PREVIOUS_END] = t, y[7 + 3 * k]
                search.counts[EVENTS] += 1
                y[6 + 3 * k], y[7 + 3 * k] = event, t + 1
    search.counts[SIZE] = size


@jit_in_place
def last_before(search: Any, event: int, horizon: int) -> int:
    """Return the last event of a chain before a step, or -1."""
    while event >= 0 and search.events[event, STEP] >= horizon:
        event = search.events[event, PREVIOUS]
    return event


@jit_in_place
def commit(search: Any, horizon: int) -> None:
    """Keep the alignments that agree with the best one of the best hypothesis before a step."""
    x, y = search.numbers, search.integers
    decided = last_before(search, best_of(x[0], y[0], y[0, ENDINGS], MINUS_ONE)[1], horizon)
    kept = 0
    for i in range(search.counts[SIZE]):
        if last_before(search, y[i, EVENT], horizon) != decided:
            fill_row(x[i, :2], -INF)
        for k in range(y[i, ENDINGS]):
            if last_before(search, y[i, 6 + 3 * k], horizon) != decided:
                fill_row(x[i, 2 + 2 * k : 4 + 2 * k], -INF)
        if total_of(x[i], y[i, ENDINGS], MINUS_ONE) > -INF:
            copy_hypothesis(x[i], y[i], x[kept], y[kept])
            kept += 1
    search.counts[SIZE] = kept


@jit(nogil=True)
def search_steps(
    search: Any, tables: Any, options: Any, logits: Any, n: int, first: int, length: int
) -> int:
    """Search over the steps of sequence n from the first on, and return the step where it stops.

    It stops where the memory does not suffice for another step.
    """
    steps, buffers, C = logits.steps, row_buffers(logits.steps, logits.C), logits.C
    counts, width, K = search.counts, options.width, (search.numbers.shape[1] - 2) // 2
    most = min(options.labels, C - 1)
    labels, best = np.empty(C, np.int64), np.empty(most)
    places = width * (most + 1)
    numbers, integers = np.empty((places, 2 + 2 * K)), np.empty((places, 5 + 3 * K), np.int64)
    order, free = np.empty(width, np.int64), np.empty(width, np.int64)
    new = Candidates(numbers, integers, np.empty(width), order, free)
    has_one_way = K == 1 and tables.spelling.longest == 1
    for t in range(first, length if counts[VALID] else first):
        has_room = len(search.nodes) - counts[NODES] >= width * most * tables.spelling.longest
        if not has_room or len(search.events) - counts[EVENTS] < width * K:
            return t
        row = contiguous_row(steps, t, n, buffers.row)
        is_valid = True
        for c in range(C):
            is_valid = is_valid and row[c] < INF
        lse = logsumexp_row(row, buffers) if options.from_logits else 0.0
        row, lse = centered_row(row, lse, buffers)
        if not is_valid or lse != lse:
            counts[VALID] = 0
            return length
        skips = row[options.blank] - lse > options.skipped
        stay(search, row, lse, options.blank, skips, new)
        chosen = 0 if skips else select_labels(row, lse, options, labels, best)
        found = extend(search, tables, options, row, lse, labels[:chosen], new, has_one_way)
        size = 0
        for place in range(found):
            rank = total_of(new.numbers[place], new.integers[place, ENDINGS], MINUS_ONE)
            rank += search.node_scores[new.integers[place, NODE], BONUS]
            size = insert(new.ranks, new.order, size, rank, place)
        enter(search, new, found, size)
        counts[STEPS] += 1
        horizon = counts[STEPS] - options.max_open_steps
        if size and horizon > 0 and counts[STEPS] % COMMIT_EVERY == 0:
            commit(search, horizon)
    return length


@jit
def shared_ancestor(parents: Any, marks: Any, heads: int) -> int:
    """Mark the ancestors of marked nodes down to the last one that all share, and return that.

    A parent has a lower number. Without a shared ancestor it is -1.
    """
    for node in range(len(marks) - 1, -1, -1):
        if marks[node]:
            if heads == 1:
                return node
            parent = parents[node]
            if parent >= 0:
                heads -= marks[parent]
                marks[parent] = 1
    return -1


@jit
def collect_nodes(search: Any) -> None:
    """Drop the nodes that no hypothesis can reach, and enter the others into the table."""
    counts, nodes = search.counts, search.nodes
    marks, heads = np.zeros(counts[NODES], np.int64), counts[SIZE]
    for i in range(counts[SIZE]):
        marks[search.integers[i, NODE]] = 1
    root = shared_ancestor(nodes[:, PARENT], marks, heads)
    fill_row(search.table, ZERO)
    kept = 0
    for node in range(max(root, 0), counts[NODES]):
        if marks[node]:
            marks[node] = kept
            nodes[kept], search.node_scores[kept] = nodes[node], search.node_scores[node]
            nodes[kept, PARENT] = marks[nodes[kept, PARENT]] if node > root else -1
            if kept:
                slot = slot_of(search, nodes[kept, PARENT], nodes[kept, SYMBOL])
                search.table[slot] = kept
            kept += 1
    for i in range(counts[SIZE]):
        search.integers[i, NODE] = marks[search.integers[i, NODE]]
    for row in search.children:
        fill_row(row, MINUS_ONE)
    counts[NODES] = kept


@jit
def collect_events(search: Any) -> None:
    """Drop the events of no alignment, and write out those that all alignments share."""
    counts, events = search.counts, search.events
    marks, heads, has_root = np.zeros(counts[EVENTS], np.int64), 0, False
    for i in range(counts[SIZE]):
        x, y = search.numbers[i], search.integers[i]
        for k in range(-1, y[ENDINGS]):
            place = EVENT if k < 0 else 6 + 3 * k
            if x[2 + 2 * k] == -INF:  # no alignment, nor will its event matter again
                y[place] = -1
            elif y[place] < 0:
                has_root = True
            elif not marks[y[place]]:
                marks[y[place]], heads = 1, heads + 1
    # Where an alignment without events is left, nothing is shared.
    root = shared_ancestor(events[:, PREVIOUS], marks, heads + has_root)
    number, event = 0, events[root, PREVIOUS] if root >= 0 else -1
    while event >= 0:
        number, event = number + 1, events[event, PREVIOUS]
    event, counts[WRITTEN] = root, counts[WRITTEN] + number
    for i in range(number):
        end, event = events[event, PREVIOUS_END], events[event, PREVIOUS]
        fields = search.written[counts[WRITTEN] - 1 - i]
        fields[0], fields[1], fields[2] = events[event, LABEL], events[event, STEP], end
    kept = 0
    for event in range(max(root, 0), counts[EVENTS]):
        if marks[event]:
            marks[event] = kept
            events[kept] = events[event]
            previous = events[kept, PREVIOUS]
            events[kept, PREVIOUS] = marks[previous] if event != root and previous >= 0 else -1
            kept += 1
    for i in range(counts[SIZE]):
        y = search.integers[i]
        for k in range(-1, y[ENDINGS]):
            place = EVENT if k < 0 else 6 + 3 * k
            if y[place] >= 0:
                y[place] = marks[y[place]]
    counts[EVENTS] = kept


@jit(nogil=True)
def collect(search: Any) -> None:
    """Drop what no hypothesis can reach, and write out what all share."""
    collect_nodes(search)
    collect_events(search)


@jit(nogil=True)
def finish(search: Any, tables: Any, options: Any, found: Any) -> int:
    """Write the best whole texts to the scores, text scores and last events and steps in `found`.

    The search can go on.
    """
    log_probs, text_scores, last_events = found
    size, counts = 0, search.counts
    totals, nodes = np.empty(counts[SIZE]), np.empty(counts[SIZE], np.int64)
    best, last = np.empty(counts[SIZE]), np.empty((counts[SIZE], 2), np.int64)
    for i in range(counts[SIZE]):
        x, y = search.numbers[i], search.integers[i]
        node, total = y[NODE], total_of(x, y[ENDINGS], MINUS_ONE)
        if search.nodes[node, LENGTH]:
            node = node_after(search, tables, options, node, FIRST_SYMBOL)
        value, event, end = best_of(x, y, y[ENDINGS], MINUS_ONE)
        place = search.nodes[node, PLACE]
        if place < 0:
            search.nodes[node, PLACE] = size
            totals[size], nodes[size], best[size] = total, node, value
            last[size, 0], last[size, 1] = event, end
            size += 1
        else:
            totals[place] = log_add(totals[place], total)
            if value > best[place]:
                best[place], last[place, 0], last[place, 1] = value, event, end
    ranks, order = np.empty(options.nbest), np.empty(options.nbest, np.int64)
    number = 0
    for place in range(size):
        fields, model = search.nodes[nodes[place]], tables.model
        score = search.node_scores[nodes[place], TOTAL]
        score -= tables.hotwords.credits[fields[HOT]] + tables.boost.credits[fields[BOOST]]
        if model.places[0] and options.score_boundary:
            score += options.alpha * log_prob_of(model, fields[LM], model.places[2])[0]
        fields[PLACE] = -1
        best[place] = score
        number = insert(ranks, order, number, totals[place] + score, place)
    for i in range(number):
        log_probs[i], text_scores[i] = totals[order[i]], best[order[i]]
        last_events[i] = last[order[i]]
    return number


@jit(nogil=True)
def path_of(search: Any, first: int, event: int, end: int) -> Any:
    """Return label, first step and the step after the last of each event up to this one.

    The first ones, which have to be written out, are left out.
    """
    number, last = 0, event
    while last >= 0:
        number, last = number + 1, search.events[last, PREVIOUS]
    written = search.counts[WRITTEN] - first if event >= 0 else 0
    path = np.empty((written + number, 3), np.int64)
    for i in range(written):
        for k in range(3):
            path[i, k] = search.written[first + i, k]
    for i in range(written + number - 1, written - 1, -1):
        fields = search.events[event]
        path[i, 0], path[i, 1], path[i, 2] = fields[LABEL], fields[STEP], end
        end, event = fields[PREVIOUS_END], fields[PREVIOUS]
    return path


def as_table(tensor: Tensor) -> Any:
    """Return a tensor as an array, which shares its memory."""
    return tensor.numpy()


def tables_of(
    vocabulary: Vocabulary, words: Words, lexicon: Lexicon, only: bool, score_boundary: bool
) -> Tables:
    """Return the tables of a decoder as arrays, without phrases."""
    lengths, labels = list(map(len, vocabulary.spelling)), np.full(vocabulary.symbols, -1)
    for label, symbols in enumerate(vocabulary.spelling):
        if len(symbols) == 1:
            labels[symbols[0]] = label
    spelling = Spelling(
        np.array([s for each in vocabulary.spelling for s in each], np.int64),
        np.cumsum([0, *lengths]),
        labels,
        max(lengths),
        vocabulary.by_token,
    )
    if words.model is None:
        nothing, zero = np.zeros(0, np.int64), np.zeros(1, np.int64)
        model = Model(nothing, np.zeros(1), zero, np.zeros(1), zero, np.zeros(5, np.int64))
    else:
        start = int(words.model.start(1, bos=score_boundary))
        numbers = len(words.places), words.unknown, words.places.get("</s>", 0), start
        numbers = *numbers, words.model.order - 1
        arrays = {name: as_table(x) for name, x in words.model._trie._asdict().items()}
        model = Model(**arrays, places=np.array(numbers))
    return Tables(spelling, Lexicon(*map(as_table, lexicon)), only, model, None, None, None)


def gains_of(tables: Tables, options: Options) -> Any:
    """Return the most that each label can add to the score of a text but its alignments."""
    spelling, model, gain = tables.spelling, tables.model, 1e-9  # more than roundings add
    if spelling.longest > 1:
        return np.full(len(spelling.starts) - 1, INF)
    for arcs in (tables.hotwords, tables.boost):
        most = max(arcs.scores.max(), arcs.start_scores.max())
        gain += max(0.0, most - arcs.credits.min())
    gains = np.full(len(spelling.starts) - 1, gain)
    if model.places[0]:
        raised = max(0.0, options.unknown)
        log_prob = model.places[4] * max(0.0, model.backoffs.max()) + LN10 * raised
        ends_word = np.full(len(gains), spelling.by_token)
        for label in range(len(gains)):
            symbols = spelling.symbols[spelling.starts[label] : spelling.starts[label + 1]]
            ends_word[label] |= BOUNDARY in symbols
        word = options.alpha * log_prob + options.beta if options.alpha >= 0 else INF
        gains += np.where(ends_word, max(0.0, word), INF if raised else 0.0)
    return gains


class TextSearch:
    """Searches over the sequences of a batch, which go on with each part of their steps.

    Args:
        tables: what all of them look up.
        phrases: the automata of each.
        options: the numbers of the searches.
        endings: the most labels in which the alignments of one text can end.
    """

    def __init__(
        self, tables: Tables, phrases: list[PhraseTables], options: Options, endings: int
    ) -> None:
        self.options, self.phrases, self.tables = (
            options,
            phrases,
            self._with_phrases(tables, phrases, options),
        )
        C, width = len(tables.spelling.starts) - 1, options.width
        most = max(1, min(options.labels, C - 1) * tables.spelling.longest)
        # A step needs this much room, and so do the boundaries after the last words.
        self.least_room = width * (most + 1), width * endings
        self.searches = [self._empty(C, width, endings) for _ in phrases]
        for n in range(len(phrases)):
            self.reset(n)

    @staticmethod
    def _with_phrases(
        tables: Tables, phrases: list[PhraseTables], options: Options
    ) -> list[Tables]:
        """Return the tables of each sequence."""
        automata = {id(x): Arcs(*map(as_table, x)) for each in phrases for x in each}
        found = {}
        for hotwords, boost in phrases:
            if id(boost) not in found:
                each = tables._replace(hotwords=automata[id(hotwords)], boost=automata[id(boost)])
                found[id(boost)] = each._replace(gains=gains_of(each, options))
        return [found[id(boost)] for _, boost in phrases]

    def __getstate__(self) -> dict[str, Any]:
        """Return the used part of the state, without the tables of the decoder."""
        used = []
        for n in range(len(self.searches)):
            self._collect(n)
            search = self.searches[n]
            nodes, events = search.counts[:2].tolist()
            parts = {"nodes": search.nodes[:nodes], "node_scores": search.node_scores[:nodes]}
            parts |= {"table": search.table[:0], "events": search.events[:events]}
            parts["written"] = search.written[: search.counts[WRITTEN]]
            used.append(search._replace(**parts))
        return {**vars(self), "tables": [], "searches": used}

    def attach(self, decoder: Any) -> None:
        """Go on after pickling, with the tables of the decoder."""
        self.tables = self._with_phrases(decoder._cpu_tables(), self.phrases, self.options)
        for n in range(len(self.searches)):
            self._make_room(n)

    def _empty(self, C: int, width: int, endings: int) -> Search:
        nodes, events = (
            next_power_of_2(max(first, 2 * room))
            for first, room in zip((FIRST_NODES, FIRST_EVENTS), self.least_room, strict=True)
        )
        return Search(
            counts=np.zeros(6, np.int64),
            nodes=np.empty((nodes, 8), np.int64),
            node_scores=np.empty((nodes, 2)),
            table=np.empty(2 * nodes, np.int64),
            events=np.empty((events, 4), np.int64),
            integers=np.zeros((width, 5 + 3 * endings), np.int64),
            numbers=np.empty((width, 2 + 2 * endings)),
            children=np.empty((width, C), np.int32),
            written=np.empty((0, 3), np.int64),
        )

    def reset(self, n: int) -> None:
        """Let sequence n start anew."""
        start(self.searches[n], self.tables[n])

    def advance(self, logits: Tensor, lengths: Tensor, collects: bool) -> None:
        """Search over the next steps `[T, N, C]`, of which each sequence has `lengths` `[N]`."""
        T, _, C = logits.shape
        inputs, steps = (
            Logits(as_steps(logits), T, C, self.options.from_logits),
            as_integers(lengths),
        )

        def work(share: Any) -> None:
            for n in share:
                if not 0 <= steps[n] <= T:
                    self.searches[n].counts[VALID] = 0
                t = 0
                while True:
                    args = self.tables[n], self.options, inputs, n, t, steps[n]
                    t = search_steps(self.searches[n], *args)
                    if t >= steps[n]:
                        break
                    self._collect(n)
                if collects:
                    self._collect(n)

        run_over_sequences(work, steps.clip(0), C * self.options.width)

    def results(self) -> list[list[Found] | None]:
        """Return the best texts of each sequence; None where it is invalid."""
        return [self._result(n) for n in range(len(self.searches))]

    def best_paths(self, firsts: list[int]) -> list[tuple[Any, int]]:
        """Return the labels of each best hypothesis, and how many of them cannot change.

        The labels are those from the first one on that each sequence has in `firsts`.
        """
        found = []
        for search, first in zip(self.searches, firsts, strict=True):
            if not (search.counts[SIZE] and search.counts[VALID]):
                found.append((np.empty((0, 3), np.int64), first))
                continue
            x, y = search.numbers[0], search.integers[0]
            _, event, end = best_of(x, y, y[ENDINGS], MINUS_ONE)
            found.append((path_of(search, first, event, end), int(search.counts[WRITTEN])))
        return found

    def _result(self, n: int) -> list[Found] | None:
        if not self.searches[n].counts[VALID]:
            return None
        if len(self.searches[n].nodes) - self.searches[n].counts[NODES] < self.options.width:
            self._collect(n)
        search, nbest = self.searches[n], self.options.nbest
        log_probs, scores, last = np.empty(nbest), np.empty(nbest), np.empty((nbest, 2), np.int64)
        number = finish(search, self.tables[n], self.options, (log_probs, scores, last))
        return [
            Found(path_of(search, 0, *last[i]), float(log_probs[i]), float(scores[i]))
            for i in range(number)
        ]

    def _collect(self, n: int) -> None:
        """Drop what sequence n does not need, and take more memory if little becomes free."""
        search = self.searches[n]
        written, events = int(search.counts[WRITTEN]), int(search.counts[EVENTS])
        if len(search.written) < written + events:
            search = search._replace(written=_grown(search.written, 2 * written + events))
        collect(search)
        self.searches[n] = search
        self._make_room(n)

    def _make_room(self, n: int) -> None:
        """Take more memory if less than half is free, or too little for a step."""
        search = self.searches[n]
        used, room = search.counts[:2].tolist(), self.least_room
        nodes, events = (max(2 * x, x + y) for x, y in zip(used, room, strict=True))
        if len(search.events) < events:
            size = next_power_of_2(max(events, FIRST_EVENTS))
            search = search._replace(events=_grown(search.events, size))
        if len(search.nodes) < nodes:
            size = next_power_of_2(max(nodes, FIRST_NODES))
            scores = _grown(search.node_scores, size)
            search = search._replace(nodes=_grown(search.nodes, size), node_scores=scores)
            search = search._replace(table=np.empty(2 * size, np.int64))
            collect_nodes(search)
        self.searches[n] = search


def _grown(array: Any, rows: int) -> Any:
    """Return an array with more rows, of which the first are those that it has."""
    grown = np.empty((rows, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
