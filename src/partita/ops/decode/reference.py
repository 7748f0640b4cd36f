"""The decoders in plain PyTorch and Python, in fp64."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..chain.reference import chain_gradient, chain_logz, chain_scan, chain_viterbi
from . import common
from .basecalls import Basecalls
from .common import Hypotheses, empty_hypotheses

INF = math.inf


class Prefix(NamedTuple):
    """A prefix in the beam, with its alignments up to a step.

    Fields:
        tokens: its labels.
        blank, label: the log-probabilities of its alignments that end in a blank, and in its last
            label.
        best_blank, best_label: the log-probability of the most probable of each of them.
        steps_blank, steps_label: the steps at which that alignment emits the labels.
    """

    tokens: tuple[int, ...] = ()
    blank: float = 0.0
    label: float = -INF
    best_blank: float = 0.0
    best_label: float = -INF
    steps_blank: tuple[int, ...] = ()
    steps_label: tuple[int, ...] = ()

    @property
    def score(self) -> float:
        """Return the log-probability of all its alignments."""
        return log_add(self.blank, self.label)

    @property
    def last(self) -> int:
        """Return its last label, -1 for the empty prefix."""
        return self.tokens[-1] if self.tokens else -1


def log_add(a: float, b: float) -> float:
    """Return log(exp(a) + exp(b))."""
    high, low = max(a, b), min(a, b)
    return high if high == -INF else high + math.log1p(math.exp(low - high))


def as_rows(
    logits: Tensor, input_lengths: Tensor, from_logits: bool
) -> list[list[list[float]] | None]:
    """Return the log-probabilities of the steps of each sequence; None where they are invalid."""
    log_probs = logits.double()
    log_probs = (log_probs.log_softmax(-1) if from_logits else log_probs).transpose(0, 1)
    rows = []
    for sequence, length in zip(log_probs, input_lengths.tolist(), strict=True):
        valid = 0 <= length <= len(logits)
        steps = sequence[: length if valid else 0]
        # A comparison with NaN is false.
        rows.append(steps.tolist() if valid and bool((steps < INF).all()) else None)
    return rows


def add_inflow(prefix: Prefix, last: int, row: list[float], t: int) -> Prefix:
    """Return what one more label adds to a prefix: its extension, as a prefix of its own."""
    repeats = prefix.last == last
    score = prefix.blank if repeats else prefix.score
    # Of equals, the alignment with the blank comes first.
    through_label = not repeats and prefix.best_label > prefix.best_blank
    best = prefix.best_label if through_label else prefix.best_blank
    steps = prefix.steps_label if through_label else prefix.steps_blank
    return Prefix(
        (*prefix.tokens, last), -INF, score + row[last], -INF, best + row[last], (), (*steps, t)
    )


def stay(prefix: Prefix, parent: Prefix | None, row: list[float], blank: int, t: int) -> Prefix:
    """Return the prefix after a step that adds no label to it, merged with its parent's extension.

    Of equally probable alignments, it keeps the one that stays in its state.
    """
    emitted = row[prefix.last] if prefix.tokens else -INF
    label, best, steps = prefix.label + emitted, prefix.best_label + emitted, prefix.steps_label
    if parent is not None:
        inflow = add_inflow(parent, prefix.last, row, t)
        label = log_add(label, inflow.label)
        if inflow.best_label > best:
            best, steps = inflow.best_label, inflow.steps_label
    from_label = prefix.best_label > prefix.best_blank
    return Prefix(
        prefix.tokens,
        prefix.score + row[blank],
        label,
        (prefix.best_label if from_label else prefix.best_blank) + row[blank],
        best,
        prefix.steps_label if from_label else prefix.steps_blank,
        steps,
    )


def next_beam(
    beam: list[Prefix], row: list[float], blank: int, width: int, cutoff: int, t: int
) -> list[Prefix]:
    """Return the best prefixes after a step.

    They are ordered by score, then by the last label, then by age: prefixes of the beam come before
    new ones, and each kind is in the order of the beam.
    """
    labels = sorted((c for c in range(len(row)) if c != blank), key=lambda c: (-row[c], c))
    known = {prefix.tokens: prefix for prefix in beam}
    found = []
    for i, prefix in enumerate(beam):
        parent = known.get(prefix.tokens[:-1]) if prefix.tokens else None
        found.append((stay(prefix, parent, row, blank, t), False, i))
        for c in labels[:cutoff]:
            if (*prefix.tokens, c) not in known:
                found.append((add_inflow(prefix, c, row, t), True, i))
    found.sort(key=lambda each: (-each[0].score, each[0].last, *each[1:]))
    return [prefix for prefix, *_ in found[:width] if prefix.score > -INF]


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
    """Return the best prefixes of each sequence by prefix beam search.

    At a step `cutoff_top_n` labels may extend a prefix. Where the blank is more probable than the
    threshold, if that is not 0, the step is taken as a blank.
    """
    result = empty_hypotheses(logits, nbest)
    result.tokens.fill_(-1), result.steps.fill_(-1), result.lengths.zero_()
    result.scores.fill_(-INF)
    skipped = math.log(blank_skip_threshold) if blank_skip_threshold else INF
    for n, rows in enumerate(as_rows(logits, input_lengths, from_logits)):
        if rows is None:
            result.scores[n] = torch.nan
            continue
        beam = [Prefix()]
        for t, row in enumerate(rows):
            if row[blank] > skipped:
                row = [p if c == blank else -INF for c, p in enumerate(row)]
            beam = next_beam(beam, row, blank, beam_width, cutoff_top_n, t)
        for i, prefix in enumerate(beam[:nbest]):
            by_label = prefix.best_label >= prefix.best_blank
            S, steps = len(prefix.tokens), prefix.steps_label if by_label else prefix.steps_blank
            result.tokens[n, i, :S] = torch.tensor(prefix.tokens, dtype=torch.int64)
            result.steps[n, i, :S] = torch.tensor(steps, dtype=torch.int64)
            result.lengths[n, i], result.scores[n, i] = S, prefix.score
    return result


def ctc_greedy_search(
    logits: Tensor, input_lengths: Tensor, blank: int, from_logits: bool
) -> Hypotheses:
    """Return the labels of the most probable class of each step."""
    result = empty_hypotheses(logits)
    result.tokens.fill_(-1), result.steps.fill_(-1), result.lengths.zero_()
    for n, rows in enumerate(as_rows(logits, input_lengths, from_logits)):
        if rows is None:
            result.scores[n] = torch.nan
            continue
        path = [row.index(max(row)) for row in rows]  # the lowest class of equal ones
        emitted = [t for t, c in enumerate(path) if c != blank and (t == 0 or path[t - 1] != c)]
        result.tokens[n, 0, : len(emitted)] = torch.tensor([path[t] for t in emitted]).long()
        result.steps[n, 0, : len(emitted)] = torch.tensor(emitted).long()
        result.lengths[n, 0] = len(emitted)
        result.scores[n, 0] = math.fsum(row[c] for row, c in zip(rows, path, strict=True))
    return result


class KmerPrefix(NamedTuple):
    """A prefix of bases in the beam of CTC-CRF, which ends in a k-mer.

    Fields:
        tokens: the number of its first k-mer, then its other bases.
        state: the number of its last k-mer.
        score: the log of the sum over its paths.
        best: the score of the best of them.
        states, edges: that path.
    """

    tokens: tuple[int, ...]
    state: int
    score: float
    best: float
    states: tuple[int, ...]
    edges: tuple[int, ...]

    def moved(self, state: int, edge: int, score: float) -> KmerPrefix:
        """Return the prefix that adds the last base of a k-mer, entered by an edge."""
        return KmerPrefix(
            (*self.tokens, state),
            state,
            self.score + score,
            self.best + score,
            (*self.states, state),
            (*self.edges, edge),
        )


def next_kmer_beam(
    beam: list[KmerPrefix], step: list[list[float]], later: list[float], width: int
) -> list[KmerPrefix]:
    """Return the best prefixes after a step, ranked by their scores and the scores that follow."""
    C, A = len(step), len(step[0])
    bases = A - 1
    known = {prefix.tokens: prefix for prefix in beam}
    found = []
    for i, prefix in enumerate(beam):
        c = prefix.state
        stays = prefix._replace(
            score=prefix.score + step[c][0],
            best=prefix.best + step[c][0],
            states=(*prefix.states, c),
            edges=(*prefix.edges, c * A),
        )
        parent = known.get(prefix.tokens[:-1])
        if parent is not None:
            k = 1 + parent.state // (C // bases)
            entered = parent.moved(c, c * A + k, step[c][k])
            score = log_add(stays.score, entered.score)
            stays = (entered if entered.best > stays.best else stays)._replace(score=score)
        found.append((stays, False, i))
        k = 1 + c // (C // bases)
        for state in range(c * bases % C, c * bases % C + bases):
            if (*prefix.tokens, state) not in known:
                found.append((prefix.moved(state, state * A + k, step[state][k]), True, i))
    found.sort(
        key=lambda each: (
            -each[0].score - later[each[0].state],
            each[0].state % bases,
            *each[1:],
        )
    )
    return [each for each, *_ in found[:width] if each.score + later[each.state] > -INF]


def ctc_crf_beam_search(
    scores: Tensor, later: Tensor, input_lengths: Tensor, beam_width: int
) -> tuple[Tensor, Tensor]:
    """Return the best path of the best prefix by prefix beam search over k-mers.

    `later` is the log of the sum over all paths from each state on, `[T + 1, N, C]`. The path is
    states `[T + 1, N]` and edges `[T, N]` as those of `Chain.viterbi`.
    """
    T, N, C, _ = scores.shape
    states = torch.full((T + 1, N), -1, dtype=torch.int64, device=scores.device)
    edges = states[1:].clone()
    for n, length in enumerate(input_lengths.tolist()):
        if not 0 <= length <= T:
            continue
        steps, follows = scores[:length, n].double().tolist(), later[:, n].double().tolist()
        order = sorted(range(C), key=[-score for score in follows[0]].__getitem__)
        beam = [
            KmerPrefix((c,), c, 0.0, 0.0, (c,), ())
            for c in order[:beam_width]
            if follows[0][c] > -INF
        ]
        for t, step in enumerate(steps):
            beam = next_kmer_beam(beam, step, follows[t + 1], beam_width)
        if beam:
            states[: length + 1, n] = torch.tensor(beam[0].states)
            edges[:length, n] = torch.tensor(beam[0].edges).long()
    return states, edges


def ctc_crf_base_posteriors(marginals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the posteriors of bases and of first states, given those of edges `[T, N, C, A]`.

    Returns:
        by_base: `[T, N, bases]` fp64, the posterior that the state after each step ends in each
            base; 0 past the length.
        first: `[N, C]` fp64, the posterior of each state before the first step. A sequence without
            steps may start in any state.
    """
    T, N, C, A = marginals.shape
    bases, valid = A - 1, (lengths >= 0) & (lengths <= T)
    length = torch.where(valid, lengths, 0)
    by_base = marginals.double().sum(3).reshape(T, N, C // bases, bases).sum(2)
    steps = torch.arange(T, device=lengths.device)
    by_base = torch.where((steps[:, None] < length)[..., None], by_base, 0.0)
    first = marginals.new_full((N, C), 1.0 / C, dtype=torch.float64)
    if T:
        edges = marginals[0].double()
        # The k-mer j x moves to the k-mers x e through their column 1 + j.
        leaving = edges[:, :, 1:].reshape(N, C // bases, bases, bases).sum(2).transpose(1, 2)
        leaving = edges[:, :, 0] + leaving.reshape(N, C)
        first = torch.where(length[:, None] > 0, leaving, first)
    return by_base, first


FUNCTIONS = common.PathFunctions(
    *(chain_viterbi, chain_scan, chain_logz, chain_gradient),
    *(ctc_crf_beam_search, ctc_crf_base_posteriors),
)
ctc_crf_path = functools.partial(common.ctc_crf_path, FUNCTIONS)


def ctc_crf_calls(
    by_base: Tensor,
    first: Tensor,
    states: Tensor,
    edges: Tensor,
    lengths: Tensor,
    state_len: int,
    dtype: torch.dtype,
) -> Basecalls:
    """Return the bases of paths: states `[T + 1, N]` and edges `[T, N]`, -1 where there is none.

    `by_base` and `first` are the results of `ctc_crf_base_posteriors`, and `dtype` is that of the
    qualities.
    """
    T, N, bases = by_base.shape
    A, S = bases + 1, T + state_len
    has_path, edges = states[0] >= 0, edges.T
    moves = (edges >= 0) & (edges % A > 0)
    position = state_len - 1 + moves.cumsum(1)
    index = torch.where(moves, position, S)  # other steps go to a column that is dropped
    last = (states[1:].T % bases).clamp(min=0)
    step = torch.arange(T, device=edges.device).expand(N, -1)
    labels = edges.new_zeros(N, S + 1).scatter_(1, index, last + 1)[:, :S]
    steps = edges.new_full((N, S + 1), -1).scatter_(1, index, step)[:, :S]
    power = bases ** torch.arange(state_len - 1, -1, -1, device=edges.device)
    digits = states[0][:, None].clamp(min=0) // power % bases  # [N, k]
    labels[:, :state_len] = digits + 1
    number = torch.where(has_path, state_len + moves.sum(1), 0)
    valid = torch.arange(S, device=edges.device) < number[:, None]
    means = mean_posteriors(by_base, last, steps[:, state_len:], lengths)
    probability = torch.cat([first_base_posteriors(first, digits, bases), means], 1)
    log_probs = torch.where(valid, probability.log().clamp(max=0.0), 0.0)
    return Basecalls(
        labels * valid, number, log_probs.to(dtype), torch.where(valid, steps, -1), moves
    )


def mean_posteriors(by_base: Tensor, last: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean posterior of each base after its move, `[N, T]` fp64, given the moves' steps.

    `last` is the base in which the path's k-mer ends after each step, `[N, T]`.
    """
    T = len(by_base)
    posterior = by_base.transpose(0, 1).gather(2, last[..., None]).squeeze(2)
    total = torch.nn.functional.pad(posterior.cumsum(1), (1, 0))
    length = lengths.clamp(0, T)[:, None]
    start = torch.where(steps >= 0, steps, length)
    # A base ends where the next one starts, and the last one with the sequence.
    end = torch.cat([start[:, 1:], length], 1)
    return (total.gather(1, end) - total.gather(1, start)) / (end - start).clamp(min=1)


def first_base_posteriors(first: Tensor, digits: Tensor, bases: int) -> Tensor:
    """Return the posterior of each base of the first k-mer, `[N, k]` fp64, given its digits."""
    found = []
    for i in range(digits.shape[1]):
        shape = (len(first), bases**i, bases, first.shape[1] // bases ** (i + 1))
        by_base = first.reshape(shape).sum((1, 3))
        found.append(by_base.gather(1, digits[:, i : i + 1]))
    return torch.cat(found, 1)
