"""Beam search from CTC to text, with a language model, a lexicon and boosted phrases.

Three kernels run one after the other. The first takes the log-softmax of all steps and lists the
labels that may extend a text. In the second, one program goes through the steps of a sequence. The
third writes the best whole texts.

Each label is one character, or one word, so a text is one sequence of labels but for repeated
boundaries. The beam is in memory, ordered by rank. A step has three phases with a barrier between
them: the texts that stay, the choice of the best among these and the extensions by labels, and the
next beam. A text is identified by a hash of its labels of 64 bits.

With a text the beam has the states of the lexicon, the language model and the phrases after it, and
its score and states after one more boundary. So a word is looked up once, when its text enters the
beam.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.memory import checked_length
from .beam import NEG_INF, log_add
from .select import ranks_in_order, select_in_order

# The numbers of a text, fp64: log-probabilities of the alignments that end in a blank and in a
# label, of the best of each, and of all; the score of its finished words and phrases, that score
# after one more boundary, and that of all of the text.
BLANK, LABEL, BEST_BLANK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BEST_LABEL, TOTAL, TEXT = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
AFTER, BONUS, NUMBERS = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
# Its integers, int64: the last events of the best alignments and the steps after them, its hash and
# that of the text without its last label, and that label; the node of the lexicon and the length of
# its unfinished word; the states of the language model and of both automata, and the same after one
# more boundary.
EVENT_BLANK, EVENT_LABEL, END_BLANK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
END_LABEL, HASH, PARENT, LAST = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
LEX, LENGTH, LM, AFTER_LM = tl.constexpr(7), tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)
HOT, AFTER_HOT, BOOST = tl.constexpr(11), tl.constexpr(12), tl.constexpr(13)
AFTER_BOOST, INTEGERS = tl.constexpr(14), tl.constexpr(16)  # the last one is not used
NUMBERS_OF_BEAM, INTEGERS_OF_BEAM = NUMBERS.value, INTEGERS.value
ROOT_HASH = tl.constexpr(1)
BOUNDARY = tl.constexpr(0)  # see `text_tables`


class Steps(NamedTuple):
    """The labels that may extend a text at each of R steps, by class, and what its row is.

    Fields:
        counts: `[R]` int32, how many they are, or -1 for an invalid step.
        labels: `[R, K]` int32.
        log_probs: `[R, K]` fp64.
        norms: `[R, 2]` fp64, which are subtracted from a score one after the other.
    """

    counts: Any
    labels: Any
    log_probs: Any
    norms: Any


class Model(NamedTuple):
    """A language model.

    Fields:
        trie: see `language_model.Trie`; states and suffixes are int32.
        first: `[S + 1]` int32, where the pairs of each state start.
        words, unknown, final, start: the number of words, `<unk>`, `</s>`, and the first state.
    """

    trie: Any
    first: Any
    words: Any
    unknown: Any
    final: Any
    start: Any


class Automata(NamedTuple):
    """The automata of all sequences; see `phrase_boost.Arcs`.

    Fields:
        pairs: those of all different automata, one after the other.
        targets, scores: those of the pairs, then those of the arcs of each state 0.
        credits: those of all states, with one more after each automaton.
        first: for each credit, where the pairs of its state start.
        places: `[N, 2]` int64, where the arcs of state 0 and the credits of a sequence's automaton
            start.
        symbols: the number of symbols.
    """

    pairs: Any
    targets: Any
    scores: Any
    credits: Any
    first: Any
    places: Any
    symbols: Any


class Tables(NamedTuple):
    """All that a search looks up.

    Fields:
        symbols: `[C]` int32, the symbol of each label.
        lexicon: see `text_tables.Lexicon`; its integers are int32 and its flags int8.
        model, hotwords, boost: the language model and the automata.
        C, blank: the number of classes, and the blank.
        boundary: the label that is a boundary, or -1.
        only: whether a text has words of the lexicon only, 0 or 1.
        by_token: 1 where each label is a word.

    What a search does not have is None, and so is the lexicon that it does not look at.
    """

    symbols: Any
    lexicon: Any
    model: Any
    hotwords: Any
    boost: Any
    C: Any
    blank: Any
    boundary: Any
    only: Any
    by_token: Any


class Weights(NamedTuple):
    """The real numbers of a search, which a tensor of the host has in fp64.

    Fields:
        alpha, beta: the weight of the language model, and what each word adds.
        unknown, unfinished: what is added to the log-probability of an unknown word, and to the
            score of an unfinished one that begins no known word.
        least: the log-probability below which a label extends no text, unless no class is above it.
        skipped: the log-probability of the blank above which a step is taken as a blank.
    """

    alpha: Any
    beta: Any
    unknown: Any
    unfinished: Any
    least: Any
    skipped: Any


@triton.jit
def load_weights(weights_ptr):
    """Load the weights of a search."""
    first, second = tl.load(weights_ptr), tl.load(weights_ptr + 1)
    third, fourth = tl.load(weights_ptr + 2), tl.load(weights_ptr + 3)
    return Weights(first, second, third, fourth, tl.load(weights_ptr + 4), tl.load(weights_ptr + 5))


class Beams(NamedTuple):
    """The memory of one sequence; the host's has N of each.

    Fields:
        numbers: `[3 · 8, width]` fp64: the beam of even and of odd steps, and texts that stay.
        integers: `[3 · 16, width]` int64, likewise.
        ranks: `[2, BLOCK_W]` fp64, of the texts that stay, and of the best candidates.
        chosen: `[BLOCK_W]` int32, the best candidates in the order of their ties.
        taken: `[width, C]` int32, the step after which an extension was in the beam.
        events: `[T, width]` int64, the event before each event and its label.
        ends: `[T, width]` int32, the step after the event before.
        last: the buffer of the last beam, or -1 for an invalid sequence.
        width: the number of texts in the beam.
    """

    numbers: Any
    integers: Any
    ranks: Any
    chosen: Any
    taken: Any
    events: Any
    ends: Any
    last: Any
    width: Any


class Search(NamedTuple):
    """The search of one sequence: its memory and index, what it looks up, and its weights."""

    beams: Any
    n: Any
    tables: Any
    weights: Any


class Step(NamedTuple):
    """One step of a sequence.

    Fields:
        t, buffer: its index, and the buffer of the beam before it.
        row_ptr, class_stride: the scores of all classes.
        norms_ptr, labels_ptr, log_probs_ptr: see `Steps`.
        count: the number of labels that may extend a text.
    """

    t: Any
    buffer: Any
    row_ptr: Any
    class_stride: Any
    norms_ptr: Any
    labels_ptr: Any
    log_probs_ptr: Any
    count: Any


@triton.jit(do_not_specialize=["N", "C", "blank", "stride_t", "stride_n"])
def ctc_text_steps_kernel(
    logits_ptr,  # [T, N, C]
    steps,  # Steps
    N,
    C,
    blank,
    most_labels,
    weights_ptr,  # [6] fp64, Weights
    stride_t,
    stride_n,
    stride_c,
    FROM_LOGITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """List the labels that may extend a text at one step of one sequence."""
    weights = load_weights(weights_ptr)
    row = tl.program_id(0).to(tl.int64)
    t, n, c = row // N, row % N, tl.arange(0, BLOCK_C)
    pointer = logits_ptr + t * stride_t + n * stride_n + c.to(tl.int64) * stride_c
    scores = tl.load(pointer, mask=c < C, other=NEG_INF).to(tl.float64)
    valid = tl.min((scores < float("inf")).to(tl.int32), axis=0) > 0  # NaN is not
    highest = tl.max(tl.where(scores < float("inf"), scores, NEG_INF), axis=0)
    shift, log_sum = highest * 0.0, highest * 0.0
    if FROM_LOGITS:
        valid = valid & (highest > NEG_INF)
        shift = tl.where(valid, highest, 0.0)
        log_sum = tl.log(tl.sum(tl.exp(scores - shift), axis=0))
    log_probs = scores - shift - log_sum
    log_blank = tl.max(tl.where(c == blank, log_probs, NEG_INF), axis=0)
    log_probs = tl.where(c == blank, NEG_INF, log_probs)
    # The least of the best labels decides, of equal ones the lower classes.
    best, _, _ = select_in_order(log_probs, most_labels)
    enough = tl.minimum(highest - shift - log_sum, weights.least)
    enough = tl.where(log_blank > weights.skipped, float("inf"), enough)
    best = best & (log_probs >= enough)
    position = row * most_labels + tl.cumsum(best.to(tl.int32), axis=0) - 1
    tl.store(steps.labels + position, c, mask=best)
    tl.store(steps.log_probs + position, log_probs, mask=best)
    tl.store(steps.counts + row, tl.where(valid, tl.sum(best.to(tl.int32), axis=0), -1))
    tl.store(steps.norms + 2 * row, shift)
    tl.store(steps.norms + 2 * row + 1, log_sum)


@triton.jit
def number(beams, buffer, field, i, mask):
    """Load a number of texts in one of the three buffers."""
    pointer = beams.numbers + (buffer * NUMBERS + field) * beams.width + i
    return tl.load(pointer, mask=mask, other=NEG_INF)


@triton.jit
def integer(beams, buffer, field, i, mask):
    """Load an integer of texts in one of the three buffers."""
    pointer = beams.integers + (buffer * INTEGERS + field) * beams.width + i
    return tl.load(pointer, mask=mask, other=-1)


@triton.jit
def store_texts(beams, buffer, i, numbers, integers):
    """Store the first numbers and integers of texts in one of the three buffers."""
    mask = i < beams.width
    for field in tl.static_range(len(numbers)):
        pointer = beams.numbers + (buffer * NUMBERS + field) * beams.width + i
        tl.store(pointer, numbers[field], mask=mask)
    for field in tl.static_range(len(integers)):
        pointer = beams.integers + (buffer * INTEGERS + field) * beams.width + i
        tl.store(pointer, integers[field], mask=mask)


@triton.jit
def find(numbers_ptr, low, high, number, mask):
    """Return the places of numbers among sorted ones from `low` to `high`, or -1."""
    place, low = low * 0 - 1, tl.where(mask, low, high)
    while tl.max((low < high).to(tl.int32), axis=0) > 0:
        searching, middle = low < high, (low + high) >> 1
        found = tl.load(numbers_ptr + middle, mask=searching, other=0)
        place = tl.where(searching & (found == number), middle, place)
        low = tl.where(searching & (found < number), middle + 1, low)
        high = tl.where(searching & (found >= number), middle, high)
    return place


@triton.jit
def log_prob_of(model, context, word, mask):
    """Return the log-probabilities of words after states, and the states that follow."""
    node, backoff = word + 1, tl.zeros(word.shape, tl.float64)
    pending = mask & (context > 0)
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        low = tl.load(model.first + context, mask=pending, other=0)
        high = tl.load(model.first + context + 1, mask=pending, other=0)
        place = find(model.trie.pairs, low, high, context * model.words + word, pending)
        node = tl.where(place >= 0, place + model.words + 1, node)
        pending = pending & (place < 0)
        backoff += tl.load(model.trie.backoffs + context, mask=pending, other=0.0)
        context = tl.load(model.trie.suffixes + context, mask=pending, other=0).to(tl.int64)
        pending = pending & (context > 0)
    log_prob = backoff + tl.load(model.trie.log_probs + node, mask=mask, other=0.0)
    return log_prob, tl.load(model.trie.states + node, mask=mask, other=0).to(tl.int64)


class Alignments(NamedTuple):
    """The best alignments of texts that end in a blank, and in a label.

    Fields:
        blank, label: their log-probabilities.
        event_blank, event_label, end_blank, end_label: their last events, and the steps after them.
    """

    blank: Any
    label: Any
    event_blank: Any
    event_label: Any
    end_blank: Any
    end_label: Any


@triton.jit
def load_alignments(beams, buffer, i, mask):
    """Load the best alignments of texts."""
    return Alignments(
        number(beams, buffer, BEST_BLANK, i, mask),
        number(beams, buffer, BEST_LABEL, i, mask),
        integer(beams, buffer, EVENT_BLANK, i, mask),
        integer(beams, buffer, EVENT_LABEL, i, mask),
        integer(beams, buffer, END_BLANK, i, mask),
        integer(beams, buffer, END_LABEL, i, mask),
    )


@triton.jit
def best_of(alignments, repeats):
    """Return the log-probabilities of the best alignments, their last events, and their ends.

    Before a label that repeats the last one only alignments that end in a blank count.
    """
    by_label = (repeats == 0) & (alignments.label > alignments.blank)
    best = tl.where(by_label, alignments.label, alignments.blank)
    event = tl.where(by_label, alignments.event_label, alignments.event_blank)
    return best, event, tl.where(by_label, alignments.end_label, alignments.end_blank)


@triton.jit
def add_inflow(ending, score, best, event, end, emitted):
    """Add the extensions by a label to what ends in that label: a score, and the best alignment.

    An event that the step adds is coded as -3 minus the event before it.
    """
    total, best_label, event_label, end_label = ending
    is_better = best + emitted > best_label
    return (
        log_add(total, score + emitted),
        tl.where(is_better, best + emitted, best_label),
        tl.where(is_better, -3 - event, event_label),
        tl.where(is_better, end, end_label),
    )


@triton.jit
def follow(automata, n, state, symbol, mask):
    """Return what symbols add after states of an automaton, and the states that follow."""
    start, state_place = tl.load(automata.places + 2 * n), tl.load(automata.places + 2 * n + 1)
    low = tl.load(automata.first + state_place + state, mask=mask, other=0)
    high = tl.load(automata.first + state_place + state + 1, mask=mask, other=0)
    place = find(automata.pairs, low, high, state * automata.symbols + symbol, mask)
    place = tl.where(place >= 0, place, start + symbol)
    score = tl.load(automata.scores + place, mask=mask, other=0.0)
    score -= tl.load(automata.credits + state_place + state, mask=mask, other=0.0)
    return score, tl.load(automata.targets + place, mask=mask, other=0)


@triton.jit
def load_state(search, buffer, field: tl.constexpr, i, mask):
    """Load states of the language model, which are 0 without one."""
    state = tl.zeros(i.shape, tl.int64)
    if search.tables.model is not None:
        state = integer(search.beams, buffer, field, i, mask)
    return state


@triton.jit
def load_phrases(search, buffer, hot: tl.constexpr, boost: tl.constexpr, i, mask):
    """Load the states of both automata, which are 0 for those that a search does not have."""
    zero = tl.zeros(i.shape, tl.int64)
    hot_state, boost_state = zero, zero
    if search.tables.hotwords is not None:
        hot_state = integer(search.beams, buffer, hot, i, mask)
    if search.tables.boost is not None:
        boost_state = integer(search.beams, buffer, boost, i, mask)
    return hot_state, boost_state


@triton.jit
def add_phrases(search, text, hot, boost, symbol, mask):
    """Return the scores of texts and the states of the phrases after one more symbol."""
    if search.tables.hotwords is not None:
        added, hot = follow(search.tables.hotwords, search.n, hot, symbol, mask)
        text += added
    if search.tables.boost is not None:
        added, boost = follow(search.tables.boost, search.n, boost, symbol, mask)
        text += added
    return text, hot, boost


@triton.jit
def grow_words(search, text, hot, node, length, symbol, mask):
    """Return the scores of all of texts whose words have grown by a symbol, and their nodes.

    The nodes that are given are those before the symbol.
    """
    lexicon = search.tables.lexicon
    if lexicon is not None:
        exists = mask & (node >= 0)
        low = tl.load(lexicon.first + node, mask=exists, other=0)
        high = tl.load(lexicon.first + node + 1, mask=exists, other=0)
        node = find(lexicon.symbols, low, high, symbol, exists).to(tl.int64)
        if search.tables.model is not None:
            starts = tl.load(lexicon.starts + node, mask=node >= 0, other=0) != 0
            penalty = search.weights.unfinished * tl.maximum(length.to(tl.float64) / 6.0, 1.0)
            text = tl.where(starts | (hot > 0), text, text + penalty)
        text = tl.where((node < 0) & (search.tables.only > 0), NEG_INF, text)
    return text, node


@triton.jit
def add_words(search, text, word, known, state, mask):
    """Return the scores of texts with one more word, and the states of the model."""
    model, weights = search.tables.model, search.weights
    word = tl.where(word >= 0, word, model.unknown)
    log_prob, state = log_prob_of(model, state, word, mask)
    log_prob += tl.where(known, 0.0, weights.unknown)
    return text + (weights.alpha * log_prob + weights.beta), state


@triton.jit
def end_words(search, text, node, state, mask):
    """Return the scores of texts after the end of their words, and the states of the model."""
    lexicon = search.tables.lexicon
    if lexicon is not None:
        exists = mask & (node >= 0)
        word = tl.load(lexicon.words + node, mask=exists, other=-1).to(tl.int64)
        text = tl.where((word < 0) & (search.tables.only > 0), NEG_INF, text)
        if search.tables.model is not None:
            known = tl.load(lexicon.known + node, mask=exists, other=0) != 0
            text, state = add_words(search, text, word, known, state, mask)
    return text, state


@triton.jit
def add_tokens(search, text, label, state, mask):
    """Return the scores of texts with one more label, which is a word, and the states."""
    lexicon = search.tables.lexicon
    if lexicon is not None:
        word = tl.load(lexicon.words + label, mask=mask, other=0).to(tl.int64)
        known = tl.load(lexicon.known + label, mask=mask, other=0) != 0
        text, state = add_words(search, text, word, known, state, mask)
    return text, state


@triton.jit
def start(search, BLOCK_W: tl.constexpr):
    """Store the beam that has the empty text alone, which follows a boundary if there is any."""
    beams, tables, n = search.beams, search.tables, search.n
    score, state = search.weights.alpha * 0.0, n * 0
    hot, boost = state, state
    if tables.model is not None:
        state += tables.model.start
    if tables.by_token is None and tables.hotwords is not None:
        place = tl.load(tables.hotwords.places + 2 * n) + BOUNDARY
        score += tl.load(tables.hotwords.scores + place)
        hot = tl.load(tables.hotwords.targets + place)
    if tables.by_token is None and tables.boost is not None:
        place = tl.load(tables.boost.places + 2 * n) + BOUNDARY
        score += tl.load(tables.boost.scores + place)
        boost = tl.load(tables.boost.targets + place)
    # All numbers of a beam, and all of its integers, are stored together.
    lane = tl.arange(0, NUMBERS * BLOCK_W)
    field, i = lane // BLOCK_W, lane % BLOCK_W
    one = (i == 0) & ((field == BLANK) | (field == BEST_BLANK) | (field == TOTAL))
    numbers = tl.where((i == 0) & (field >= TEXT), score, tl.where(one, 0.0, NEG_INF))
    tl.store(beams.numbers + field * beams.width + i, numbers, mask=i < beams.width)
    lane = tl.arange(0, INTEGERS * BLOCK_W)
    field, i = lane // BLOCK_W, lane % BLOCK_W
    integers = tl.where(field <= EVENT_LABEL, n * 0 - 1, n * 0)
    integers = tl.where(field == HASH, ROOT_HASH, integers)
    integers = tl.where(field == LAST, tables.boundary, integers)
    integers = tl.where((field == LM) | (field == AFTER_LM), state, integers)
    integers = tl.where(field == HOT, hot, integers)
    integers = tl.where(field == BOOST, boost, integers)
    tl.store(beams.integers + field * beams.width + i, integers, mask=i < beams.width)


@triton.jit
def stay(search, step, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr):
    """Compute the texts that get no character, merged with the extensions that lead to them."""
    beams, buffer, tables = search.beams, step.buffer, search.tables
    i, k = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_K)
    mask = i < beams.width
    total = number(beams, buffer, TOTAL, i, mask)
    alive = mask & (total > NEG_INF)
    blank, label = number(beams, buffer, BLANK, i, alive), number(beams, buffer, LABEL, i, alive)
    own, last = load_alignments(beams, buffer, i, alive), integer(beams, buffer, LAST, i, alive)
    shift, log_sum = tl.load(step.norms_ptr), tl.load(step.norms_ptr + 1)
    blank_ptr = step.row_ptr + (search.n * 0 + tables.blank) * step.class_stride
    log_blank = tl.load(blank_ptr).to(tl.float64) - shift - log_sum
    has_label = alive & (last >= 0)
    emitted = tl.load(step.row_ptr + last * step.class_stride, mask=has_label, other=0.0)
    emitted = tl.where(has_label, emitted.to(tl.float64) - shift - log_sum, NEG_INF)
    # Whether the label may extend a text at this step, and where the text without it is.
    labels = tl.load(step.labels_ptr + k, mask=k < step.count, other=-1).to(tl.int64)
    extends = has_label & (tl.max((labels[None, :] == last[:, None]).to(tl.int32), axis=1) > 0)
    hashes = tl.where(alive, integer(beams, buffer, HASH, i, alive), 0)
    parents = integer(beams, buffer, PARENT, i, alive)
    match = (hashes[None, :] == parents[:, None]) & (hashes != 0)[None, :]
    parent = tl.max(tl.where(match, i[None, :], -1), axis=1)
    has_parent = extends & (parent >= 0)
    tl.store(beams.taken + parent * tables.C + last, step.t + 1, mask=has_parent)
    repeats = integer(beams, buffer, LAST, parent, has_parent) == last
    theirs = load_alignments(beams, buffer, parent, has_parent)
    score = number(beams, buffer, TOTAL, parent, has_parent)
    score = tl.where(repeats, number(beams, buffer, BLANK, parent, has_parent), score)
    best, event, end = best_of(theirs, repeats)
    # A boundary after a boundary leads to the text itself. Of two sources the older comes first.
    is_source = extends & (last == tables.boundary)
    is_source = is_source & (integer(beams, buffer, LENGTH, i, alive) == 0)
    own_score, own_best = (
        tl.where(is_source, blank, NEG_INF),
        tl.where(is_source, own.blank, NEG_INF),
    )
    swaps = parent > i
    own_emitted = tl.where(log_blank > search.weights.skipped, NEG_INF, emitted)
    own_end = tl.zeros([BLOCK_W], tl.int64) + (step.t + 1)
    ending = (label + own_emitted, own.label + own_emitted, own.event_label, own_end)
    ending = add_inflow(
        ending,
        tl.where(swaps, own_score, score),
        tl.where(swaps, own_best, best),
        tl.where(swaps, own.event_blank, event),
        tl.where(swaps, own.end_blank, end),
        emitted,
    )
    label, best_label, event_label, end_label = add_inflow(
        ending,
        tl.where(swaps, score, own_score),
        tl.where(swaps, best, own_best),
        tl.where(swaps, event, own.event_blank),
        tl.where(swaps, end, own.end_blank),
        emitted,
    )
    best, event, end = best_of(own, i < 0)
    blank = total + log_blank
    total = log_add(blank, label)
    numbers = (blank, label, best + log_blank, best_label, total)
    store_texts(beams, 2, i, numbers, (event, event_label, end, end_label))
    tl.store(beams.ranks + i, total + number(beams, buffer, BONUS, i, alive), mask=mask)


@triton.jit
def choose(search, step, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr):
    """Choose the best of the texts that stay and of the extensions, and return their number."""
    beams, buffer, tables = search.beams, step.buffer, search.tables
    lane = tl.arange(0, BLOCK_P)
    pair, count = lane - beams.width, step.count
    mask = (pair >= 0) & (pair < beams.width * count)
    i, k = pair // tl.maximum(count, 1), pair % tl.maximum(count, 1)
    label = tl.load(step.labels_ptr + k, mask=mask, other=0)
    taken = tl.load(beams.taken + i * tables.C + label, mask=mask, other=0)
    length = integer(beams, buffer, LENGTH, i, mask)
    ends_word = label == tables.boundary
    mask = mask & (taken != step.t + 1) & ((ends_word == 0) | (length > 0))
    repeats = integer(beams, buffer, LAST, i, mask) == label
    total = number(beams, buffer, TOTAL, i, mask)
    score = tl.where(repeats, number(beams, buffer, BLANK, i, mask), total)
    mask = mask & (score > NEG_INF)
    score += tl.load(step.log_probs_ptr + k, mask=mask, other=0.0)
    grows = mask & (ends_word == 0)
    symbol = tl.load(tables.symbols + label, mask=mask, other=0)
    text, node = number(beams, buffer, TEXT, i, grows), integer(beams, buffer, LEX, i, grows)
    hot, boost = load_phrases(search, buffer, HOT, BOOST, i, grows)
    text, hot, _ = add_phrases(search, text, hot, boost, symbol, grows)
    if tables.by_token is None:
        text, _ = grow_words(search, text, hot, node, length + 1, symbol, grows)
    else:
        state = load_state(search, buffer, LM, i, grows)
        text, _ = add_tokens(search, text, label, state, grows)
    after = number(beams, buffer, AFTER, i, mask & ends_word)
    rank = tl.where(mask, score + tl.where(ends_word, after, text), NEG_INF)
    stays = lane < beams.width
    rank = tl.where(stays, tl.load(beams.ranks + lane, mask=stays, other=NEG_INF), rank)
    passes, position, size = select_in_order(rank, beams.width)
    tl.store(beams.chosen + position, lane, mask=passes)
    tl.store(beams.ranks + BLOCK_W + position, rank, mask=passes)
    return size


@triton.jit
def hash_after(parent, label):
    """Return the hash of a text with one more label."""
    mixed = (parent ^ (label + 1)) * -7046029254386353131  # odd, so that no two results are equal
    return (mixed ^ (mixed >> 29)) * -4658895280553007687


@triton.jit
def enter(search, step, size, BLOCK_W: tl.constexpr):
    """Make the next beam of the chosen candidates."""
    beams, buffer, tables = search.beams, step.buffer, search.tables
    lane = tl.arange(0, BLOCK_W)
    alive = lane < size
    chosen = tl.load(beams.chosen + lane, mask=alive, other=-1)
    place = ranks_in_order(beams.ranks + BLOCK_W, size, BLOCK_W, BLOCK_W)
    place = tl.where(alive, place, lane)
    is_new = alive & (chosen >= beams.width)
    pair, count = chosen - beams.width, tl.maximum(step.count, 1)
    i, k = tl.where(is_new, pair // count, chosen), tl.where(is_new, pair % count, 0)
    label = tl.load(step.labels_ptr + k, mask=is_new, other=-1).to(tl.int64)
    log_prob = tl.load(step.log_probs_ptr + k, mask=is_new, other=0.0)
    # The alignments: of a new text those of the text that a label extends, else those that stay.
    source = tl.where(is_new, buffer, 2)
    own, total = load_alignments(beams, source, i, alive), number(beams, source, TOTAL, i, alive)
    blank, last = number(beams, source, BLANK, i, alive), integer(beams, buffer, LAST, i, alive)
    best, event, end = best_of(own, last == label)
    event = tl.where(is_new, -3 - event, own.event_label)
    end = tl.where(is_new, end, own.end_label)
    last_label = tl.where(is_new, label, last)
    adds, row = alive & (event <= -2), step.t.to(tl.int64) * beams.width + place
    tl.store(beams.events + row, ((-3 - event) << 32) | last_label, mask=adds)
    tl.store(beams.ends + row, end, mask=adds)
    extended = tl.where(last == label, blank, total) + log_prob
    numbers = (
        tl.where(is_new, NEG_INF, blank),
        tl.where(is_new, extended, number(beams, 2, LABEL, i, alive & (is_new == 0))),
        tl.where(is_new, NEG_INF, own.blank),
        tl.where(is_new, best + log_prob, own.label),
        tl.where(is_new, extended, total),
    )
    hashed = integer(beams, buffer, HASH, i, alive)
    integers = (
        tl.where(is_new, -1, own.event_blank),
        tl.where(adds, row, event),
        tl.where(is_new, 0, own.end_blank),
        tl.where(adds, step.t + 1, end),
        tl.where(is_new, hash_after(hashed, label), hashed),
        tl.where(is_new, hashed, integer(beams, buffer, PARENT, i, alive)),
        last_label,
    )
    # The words and phrases of the texts.
    ends_word = is_new & (label == tables.boundary)
    grows = is_new & (ends_word == 0)
    symbol = tl.load(tables.symbols + label, mask=grows, other=0)
    text, after = number(beams, buffer, TEXT, i, alive), number(beams, buffer, AFTER, i, alive)
    bonus = number(beams, buffer, BONUS, i, alive)
    node, length = integer(beams, buffer, LEX, i, alive), integer(beams, buffer, LENGTH, i, alive)
    hot, boost = load_phrases(search, buffer, HOT, BOOST, i, alive)
    after_hot, after_boost = load_phrases(search, buffer, AFTER_HOT, AFTER_BOOST, i, alive)
    grown, new_hot, new_boost = add_phrases(search, text, hot, boost, symbol, grows)
    text = tl.where(ends_word, after, tl.where(grows, grown, text))
    hot = tl.where(ends_word, after_hot, tl.where(grows, new_hot, hot))
    boost = tl.where(ends_word, after_boost, tl.where(grows, new_boost, boost))
    after_state = load_state(search, buffer, AFTER_LM, i, alive)
    state = tl.where(ends_word, after_state, load_state(search, buffer, LM, i, alive))
    ended, ended_hot, ended_boost, ended_state = after, hot, boost, state
    if tables.by_token is None:
        length = tl.where(grows, length + 1, tl.where(ends_word, 0, length))
        new_bonus, new_node = grow_words(search, text, hot, node, length, symbol, grows)
        bonus = tl.where(grows, new_bonus, tl.where(ends_word, text, bonus))
        node = tl.where(grows, new_node, tl.where(ends_word, 0, node))
        # And what a boundary would make of them.
        symbol = symbol * 0 + BOUNDARY
        ended, ended_hot, ended_boost = add_phrases(search, text, hot, boost, symbol, grows)
        ended, ended_state = end_words(search, ended, node, state, grows)
    else:
        added, ended_state = add_tokens(search, text, label, state, grows)
        text, state = tl.where(grows, added, text), tl.where(grows, ended_state, state)
        bonus = tl.where(grows, text, bonus)
    numbers = numbers + (text, tl.where(grows, ended, after), bonus)
    integers = integers + (node, length)
    if tables.model is not None or tables.hotwords is not None or tables.boost is not None:
        integers = integers + (state, tl.where(grows, ended_state, after_state))
    if tables.hotwords is not None or tables.boost is not None:
        integers = integers + (
            hot,
            tl.where(grows, ended_hot, after_hot),
            boost,
            tl.where(grows, ended_boost, after_boost),
        )
    store_texts(beams, 1 - buffer, place, numbers, integers)


@triton.jit
def beams_of(batch, n, T, C, BLOCK_W: tl.constexpr):
    """Return the memory of a sequence."""
    width = batch.width
    return Beams(
        batch.numbers + n * (3 * NUMBERS) * width,
        batch.integers + n * (3 * INTEGERS) * width,
        batch.ranks + n * (2 * BLOCK_W),
        batch.chosen + n * BLOCK_W,
        batch.taken + n * width * C,
        batch.events + n * T * width,
        batch.ends + n * T * width,
        batch.last + n,
        width,
    )


@triton.jit(do_not_specialize=["T", "N", "stride_t", "stride_n"])
def ctc_text_search_kernel(
    logits_ptr,  # [T, N, C]
    input_lengths_ptr,  # [N]
    steps,  # Steps, of T N rows
    tables,  # Tables
    weights_ptr,  # [6] fp64, Weights
    batch,  # Beams of all sequences
    T,
    N,
    most_labels,
    stride_t,
    stride_n,
    stride_c,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Search the texts of one sequence."""
    n = tl.program_id(0).to(tl.int64)
    length, invalid = checked_length(input_lengths_ptr, n, T, 0, 0)
    beams = beams_of(batch, n, T, tables.C, BLOCK_W)
    search = Search(beams, n, tables, load_weights(weights_ptr))
    start(search, BLOCK_W)
    tl.debug_barrier()
    t, buffer, valid = length * 0, length * 0, ~invalid
    while t < length:
        row = t.to(tl.int64) * N + n
        count = tl.load(steps.counts + row)
        step = Step(
            t,
            buffer,
            logits_ptr + t.to(tl.int64) * stride_t + n * stride_n,
            stride_c,
            steps.norms + 2 * row,
            steps.labels + row * most_labels,
            steps.log_probs + row * most_labels,
            tl.maximum(count, 0),
        )
        stay(search, step, BLOCK_W, BLOCK_K)
        tl.debug_barrier()
        size = choose(search, step, BLOCK_W, BLOCK_P)
        tl.debug_barrier()
        enter(search, step, size, BLOCK_W)
        tl.debug_barrier()
        valid = valid & (count >= 0)
        t, buffer = tl.where(count >= 0, t + 1, length), 1 - buffer
    tl.store(beams.last, tl.where(valid, buffer, -1))


@triton.jit
def credit_of(automata, n, state, mask):
    """Return what states of an automaton have earned and a whole text gives back."""
    credits_ptr = automata.credits + tl.load(automata.places + 2 * n + 1)
    return tl.load(credits_ptr + state, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["T", "nbest"])
def ctc_text_finish_kernel(
    tables,  # Tables
    weights_ptr,  # [6] fp64, Weights
    batch,  # Beams of all sequences
    results,  # text_tables.TextBatch
    T,
    nbest,
    SCORE_BOUNDARY: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the best whole texts of the last beam of one sequence."""
    n = tl.program_id(0).to(tl.int64)
    beams = beams_of(batch, n, T, tables.C, BLOCK_W)
    search = Search(beams, n, tables, load_weights(weights_ptr))
    last, i = tl.load(beams.last), tl.arange(0, BLOCK_W)
    buffer = tl.maximum(last, 0)
    total = number(beams, buffer, TOTAL, i, i < tl.where(last >= 0, beams.width, 0))
    alive = total > NEG_INF
    # A text with an unfinished word and the same one with a boundary are one, led by the older.
    hashed = integer(beams, buffer, HASH, i, alive)
    unfinished = alive & (integer(beams, buffer, LENGTH, i, alive) > 0)
    whole = tl.where(unfinished, hash_after(hashed, tables.boundary), hashed)
    match = (whole[None, :] == whole[:, None]) & alive[None, :] & alive[:, None]
    leads = alive & (tl.min(tl.where(match, i[None, :], BLOCK_W), axis=1) == i)
    other = tl.max(tl.where(match, i[None, :], -1), axis=1)
    has_other = leads & (other > i)
    best, event, end = best_of(load_alignments(beams, buffer, i, leads), i < 0)
    theirs = load_alignments(beams, buffer, other, has_other)
    other_best, other_event, other_end = best_of(theirs, i < 0)
    total = log_add(total, number(beams, buffer, TOTAL, other, has_other))
    event = tl.where(other_best > best, other_event, event)
    end = tl.where(other_best > best, other_end, end)
    # The words and phrases of the whole text add this.
    text = number(beams, buffer, TEXT, i, leads)
    text = tl.where(unfinished, number(beams, buffer, AFTER, i, leads), text)
    hot, boost = load_phrases(search, buffer, HOT, BOOST, i, leads)
    after_hot, after_boost = load_phrases(search, buffer, AFTER_HOT, AFTER_BOOST, i, leads)
    credit = text * 0.0
    if tables.hotwords is not None:
        credit += credit_of(tables.hotwords, n, tl.where(unfinished, after_hot, hot), leads)
    if tables.boost is not None:
        credit += credit_of(tables.boost, n, tl.where(unfinished, after_boost, boost), leads)
    text = tl.where(leads, text - credit, 0.0)
    if SCORE_BOUNDARY and tables.model is not None:
        state = integer(beams, buffer, LM, i, leads)
        state = tl.where(unfinished, integer(beams, buffer, AFTER_LM, i, leads), state)
        word = tl.zeros([BLOCK_W], tl.int64) + tables.model.final
        log_prob, _ = log_prob_of(tables.model, state, word, leads)
        text += search.weights.alpha * log_prob
    rank = tl.where(leads, total + text, NEG_INF)
    precedes = (rank[None, :] == rank[:, None]) & (i[None, :] < i[:, None])
    precedes |= rank[None, :] > rank[:, None]
    place = tl.sum(precedes.to(tl.int32), axis=1)
    kept = (rank > NEG_INF) & (place < nbest)
    row = n * nbest + place
    tl.store(results.scores + row, total, mask=kept)
    tl.store(results.lm_scores + row, text, mask=kept)
    invalid, nan = i < tl.where(last >= 0, 0, nbest), total * 0.0 + float("nan")
    tl.store(results.scores + n * nbest + i, nan, mask=invalid)
    tl.store(results.lm_scores + n * nbest + i, nan, mask=invalid)
    # Count the labels of the best alignments, then write them from the last to the first.
    length, walk = i * 0, tl.where(kept, event, -1)
    while tl.max(walk, axis=0) >= 0:
        length += (walk >= 0).to(tl.int32)
        walk = tl.load(beams.events + walk, mask=walk >= 0, other=-1) >> 32
    tl.store(results.lengths + row, length.to(tl.int64), mask=kept)
    walk, place = tl.where(kept, event, -1), row * T + length - 1
    while tl.max(walk, axis=0) >= 0:
        mask = walk >= 0
        word = tl.load(beams.events + walk, mask=mask, other=-1)
        tl.store(results.tokens + place, word & 0xFFFFFFFF, mask=mask)
        tl.store(results.steps + place, walk // beams.width, mask=mask)
        tl.store(results.ends + place, end, mask=mask)
        end = tl.load(beams.ends + walk, mask=mask, other=0).to(tl.int64)
        walk, place = word >> 32, place - 1
