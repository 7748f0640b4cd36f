"""Semi-Markov chains on the CPU, in Numba, with the sequences of a batch in parallel.

All scans run in fp64 in the log domain. The scores of open segments lie in a ring of D rows. A
segment that starts at step t has row t mod D as long as it can grow, so that a step adds its
emissions to all rows and moves none.

The gradient's beta runs backwards over a ring of the segments that end at each of the next D steps.
The terms of its sums give the posteriors, so no exponential is computed for those alone. The
posterior of a state is a sum of those of the segments that cover its step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...primitives.cpu.batch import (
    INF,
    LOWEST,
    as_array,
    empty_batch,
    fill_nan,
    run_over_sequences,
)
from ...primitives.cpu.jit import MINUS_ONE, ONE, jit
from ...primitives.cpu.logits import fill_row
from ...primitives.cpu.math import exp, log
from ...runtime.dtypes import acc_dtype
from ..chain.cpu.paths import cumulative_exp, draw_index, insert, max_over_edges
from ..chain.cpu.steps import lengths_of, logz_at_end
from .common import SemiMarkovPotentials


class SemiMarkovArrays(NamedTuple):
    """A batch of semi-Markov chains as contiguous fp64 arrays.

    Fields:
        lengths: `[N]` int64, in range even where a length is invalid.
        emissions: `[N, T, C]`.
        transitions: `[2, C, C]`: from and to, then to and from.
        durations: `[D, C]`.
        start, end: `[N, C]`.
    """

    lengths: Any
    emissions: Any
    transitions: Any
    durations: Any
    start: Any
    end: Any


class ScanBuffers(NamedTuple):
    """The results of one step of a scan, for the next one or for posteriors.

    Fields:
        ring: the scores of the open segments, `[D, C]`.
        by_state: the terms exp(score - maximum) of the last sums over transitions, `[C, C]`, with
            the state that is summed over first.
        by_duration: those of the last sums over segments, `[D, C]`, by their steps minus 1.
        maxima: the maxima of the last sums, `[C]`.
    """

    ring: Any
    by_state: Any
    by_duration: Any
    maxima: Any


def semi_markov_arrays(
    chain: SemiMarkovPotentials,
) -> tuple[SemiMarkovArrays, Tensor]:
    """Return the arrays of a batch and the mask of sequences with an invalid length, `[N]`."""
    T, N, _ = chain.emissions.shape
    tokens, invalid = lengths_of(chain.lengths, 1, T, N)
    matrix = chain.transitions.detach()
    # One dtype and one layout compile once. The copy takes little beside D times as many steps.
    arrays = SemiMarkovArrays(
        tokens.numpy(),
        as_array(chain.emissions.transpose(0, 1)),
        as_array(torch.stack([matrix, matrix.T])),
        as_array(chain.durations),
        as_array(chain.start),
        as_array(chain.end),
    )
    return arrays, invalid


def run(kernel: Callable[..., Any], chain: SemiMarkovArrays, *args: Any) -> None:
    """Run `kernel(sequences, chain, *args)` for all sequences, as `run_over_sequences` does."""
    D, C = chain.durations.shape
    run_over_sequences(kernel, chain.lengths, C * (C + D), chain, *args)


@jit
def scan_buffers(chain: Any) -> Any:
    """Return uninitialized buffers."""
    D, C = chain.durations.shape
    return ScanBuffers(np.empty((D, C)), np.empty((C, C)), np.empty((D, C)), np.empty(C))


@jit
def add_transitions(buffers: Any, state: Any, transitions: Any, sums: Any) -> None:
    """Write the log-sum-exp of each column of state + transitions into `sums` `[C]`."""
    C, maxima = len(state), buffers.maxima
    for j in range(C):
        maxima[j], sums[j] = LOWEST, 0.0
    for i in range(C):
        a, row = state[i], transitions[i]
        for j in range(C):
            maxima[j] = a + row[j] if a + row[j] > maxima[j] else maxima[j]
    for i in range(C):
        a, row, weight = state[i], transitions[i], buffers.by_state[i]
        for j in range(C):
            weight[j] = exp(a + row[j] - maxima[j])
        for j in range(C):
            sums[j] += weight[j]
    log_of_sums(maxima, sums)


@jit
def add_durations(buffers: Any, chain: Any, n: int, t: int, by: int, rows: int, sums: Any) -> None:
    """Add the emissions of step t to the open segments, and write their log-sum-exp into `sums`.

    There are `rows` of them. The newest started at step t, and the others at t + by and so on.
    """
    ring, maxima, emission = buffers.ring, buffers.maxima, chain.emissions[n, t]
    D, C = ring.shape
    for c in range(C):
        maxima[c], sums[c] = LOWEST, 0.0
    for d in range(rows):
        row, duration = ring[(t + d * by) % D], chain.durations[d]
        weight = buffers.by_duration[d]
        for c in range(C):
            row[c] += emission[c]
        for c in range(C):
            weight[c] = row[c] + duration[c]
        for c in range(C):
            maxima[c] = weight[c] if weight[c] > maxima[c] else maxima[c]
    for d in range(rows):
        weight = buffers.by_duration[d]
        for c in range(C):
            weight[c] = exp(weight[c] - maxima[c])
        for c in range(C):
            sums[c] += weight[c]
    log_of_sums(maxima, sums)


@jit
def log_of_sums(maxima: Any, sums: Any) -> None:
    """Turn sums of exp(terms - maxima) into log-sum-exps; -inf where there is no term."""
    for c in range(len(sums)):
        total = sums[c]
        sums[c] = -INF if total == 0.0 else maxima[c] + log(total)


@jit
def scan_forward(chain: Any, n: int, buffers: Any, begin: Any, alpha: Any) -> float:
    """Scan a sequence forwards, and return log Z.

    Write the scores of starting and of ending a segment at each step into `begin` and `alpha`,
    `[R, C]`, where step t has row t mod R, with R at least 2.
    """
    D, C = chain.durations.shape
    length, size = chain.lengths[n], len(begin)
    for t in range(length):
        entered, newest = begin[t % size], buffers.ring[t % D]
        if t == 0:
            for c in range(C):
                entered[c] = chain.start[n, c]
        else:
            add_transitions(buffers, alpha[(t - 1) % size], chain.transitions[0], entered)
        for c in range(C):
            newest[c] = entered[c]
        add_durations(buffers, chain, n, t, MINUS_ONE, min(t + 1, D), alpha[t % size])
    return logz_at_end(alpha[(length - 1) % size], chain.end[n])


@jit(nogil=True)
def logz_kernel(sequences: Any, chain: Any, saved: Any, logz: Any) -> None:
    """Compute log Z of each sequence, and write begin and alpha to `[2, R, N, C]`.

    R is the number of steps, or 2 if nothing is saved.
    """
    buffers = scan_buffers(chain)
    for n in sequences:
        logz[n] = scan_forward(chain, n, buffers, saved[0, :, n], saved[1, :, n])


def semi_markov_logz(
    chain: SemiMarkovPotentials,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and with `save` begin and alpha."""
    arrays, invalid = semi_markov_arrays(chain)
    T, N, C = chain.emissions.shape
    saved, logz = empty_batch((2, T if save else 2, N, C)), np.empty(N)
    run(logz_kernel, arrays, saved.numpy(), logz)
    result = torch.from_numpy(logz).masked_fill_(invalid, torch.nan)
    rounded = result.to(acc_dtype(chain.emissions.dtype), copy=True)
    return result, rounded, saved if save else saved.new_empty(0)


class Posteriors(NamedTuple):
    """The posteriors of each sequence, which start at 0.

    Fields:
        states: `[N, T, C]`.
        pairs: those of transitions, `[N, C, C]`, from and to.
        counts: those of durations, `[N, D, C]`.
        ends: those of the first and last states, `[2, N, C]`.
        segments: `[T, D, N, C]`, without elements if they are not wanted.
    """

    states: Any
    pairs: Any
    counts: Any
    ends: Any
    segments: Any


@jit
def add_segments(
    begin: Any, logz: float, maxima: Any, weights: Any, factor: Any, states: Any, counts: Any
) -> None:
    """Add the posteriors of the segments that start at a step.

    Args:
        begin: the scores of starting a segment at this step, `[C]`.
        maxima, weights: the terms exp(score - maximum) of all that follows, `[C]` and `[rows, C]`.
        factor: `[C]`, gets what makes posteriors of weights, and then the posterior of a start.
        states: the posteriors of states from this step on, `[rows, C]`.
        counts: the posteriors by number of steps minus 1, `[D, C]`.
    """
    rows, C = weights.shape
    for c in range(C):
        factor[c] = exp(maxima[c] + begin[c] - logz)
    for d in range(rows - 1, -1, -1):
        weight, by_size = weights[d], counts[d]
        for c in range(C):
            weight[c] *= factor[c]
        for c in range(C):
            by_size[c] += weight[c]
    for c in range(C):
        factor[c] = 0.0
    for d in range(rows - 1, -1, -1):
        # Segments of more than d steps cover step d.
        weight, state = weights[d], states[d]
        for c in range(C):
            factor[c] += weight[c]
        for c in range(C):
            state[c] += factor[c]


@jit(nogil=True)
def gradient_kernel(sequences: Any, chain: Any, logz: Any, saved: Any, found: Any) -> None:
    """Add up the posteriors of each sequence, given log Z `[N]`, begin and alpha `[2, T, N, C]`."""
    D, C = chain.durations.shape
    buffers, entered, starting = scan_buffers(chain), np.empty(C), np.empty(C)
    ring, maxima = buffers.ring, buffers.maxima
    for n in sequences:
        length, total = chain.lengths[n], logz[n]
        if total == -INF:
            continue
        for t in range(length - 1, -1, -1):
            begin, alpha, newest = saved[0, t, n], saved[1, t, n], ring[t % D]
            if t == length - 1:
                for c in range(C):
                    newest[c] = chain.end[n, c]
                    found.ends[1, n, c] = exp(alpha[c] + newest[c] - total)
            else:
                add_transitions(buffers, entered, chain.transitions[1], newest)
                for i in range(C):
                    factor, row = exp(maxima[i] + alpha[i] - total), found.pairs[n, i]
                    for j in range(C):
                        row[j] += factor * buffers.by_state[j, i]
            rows = min(length - t, D)
            add_durations(buffers, chain, n, t, ONE, rows, entered)
            by_duration, states = buffers.by_duration[:rows], found.states[n, t : t + rows]
            add_segments(begin, total, maxima, by_duration, starting, states, found.counts[n])
            for d in range(rows if len(found.segments) else 0):
                for c in range(C):
                    found.segments[t + d, d, n, c] = by_duration[d, c]
        for c in range(C):
            found.ends[0, n, c] = starting[c]
        for t in range(length):
            # The sum is 1 but for the rounding errors of scores, which grow with log Z.
            row, total = found.states[n, t], 0.0
            for c in range(C):
                total += row[c]
            for c in range(C if total > 0.0 else 0):
                row[c] /= total


def _posteriors(
    chain: SemiMarkovPotentials, logz: Tensor, saved: Tensor, wants_segments: bool
) -> Posteriors:
    arrays, invalid = semi_markov_arrays(chain)
    (T, N, C), D = chain.emissions.shape, len(chain.durations)
    shapes = ((N, T, C), (N, C, C), (N, D, C), (2, N, C), (T if wants_segments else 0, D, N, C))
    found = Posteriors(*(empty_batch(shape).zero_() for shape in shapes))
    written = Posteriors(*(each.numpy() for each in found))
    run(gradient_kernel, arrays, as_array(logz), saved.reshape(2, T, N, C).numpy(), written)
    for result in (*found[:3], *found.ends):
        fill_nan(result[None], invalid)
    fill_nan(found.segments.transpose(1, 2), invalid)
    return found


def semi_markov_gradient(
    grad_output: Tensor,
    chain: SemiMarkovPotentials,
    logz: Tensor,
    saved: Tensor,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of sum(grad_output * log Z) in the dtypes of the arguments."""
    found, scale = _posteriors(chain, logz, saved, False), grad_output.double()[:, None]

    def shared(posteriors: Tensor, dtype: torch.dtype) -> Tensor:
        sums = scale[:, :, None] * posteriors
        return sums.to(acc_dtype(chain.emissions.dtype)) if per_sequence else sums.sum(0).to(dtype)

    return (
        (found.states.transpose(0, 1) * scale).to(chain.emissions.dtype).contiguous(),
        shared(found.pairs, chain.transitions.dtype),
        shared(found.counts, chain.durations.dtype),
        (scale * found.ends[0]).to(chain.start.dtype),
        (scale * found.ends[1]).to(chain.end.dtype),
    )


def semi_markov_segments(
    chain: SemiMarkovPotentials,
    logz: Tensor,
    saved: Tensor,
) -> Tensor:
    """Return the posteriors of segments, `[T, D, N, C]` in the dtype of results."""
    return _posteriors(chain, logz, saved, True).segments.to(acc_dtype(chain.emissions.dtype))


@jit
def best_scores(chain: Any, n: int, previous: Any, sizes: Any, alpha: Any) -> None:
    """Scan the best scores of a sequence; `alpha` `[C]` gets those of ending with its last step.

    Write the state before a segment that starts at each step, and the number of steps minus 1 of
    one that ends there, `[T, C]` each.
    """
    D, C = chain.durations.shape
    ring, scores, zeros = np.empty((D, C)), np.empty(D * C), np.zeros(D)
    transitions = chain.transitions[0].ravel()
    for t in range(chain.lengths[n]):
        emission, newest, rows = chain.emissions[n, t], ring[t % D], min(t + 1, D)
        if t == 0:
            for c in range(C):
                newest[c], previous[t, c] = chain.start[n, c], 0
        else:
            max_over_edges(transitions, alpha, newest, previous[t])
        for d in range(rows):
            row, duration = ring[(t - d) % D], chain.durations[d]
            score = scores[d * C : (d + 1) * C]
            for c in range(C):
                row[c] += emission[c]
            for c in range(C):
                score[c] = row[c] + duration[c]
        max_over_edges(scores, zeros[:rows], alpha, sizes[t])


@jit(nogil=True)
def viterbi_kernel(sequences: Any, chain: Any, score: Any, states: Any, starts: Any) -> None:
    """Find the best path of each sequence.

    Entries of `states` and `starts` `[T, N]` that are on no path are not written.
    """
    C = chain.durations.shape[1]
    T = chain.emissions.shape[1]
    previous, sizes = np.empty((T, C), np.int32), np.empty((T, C), np.int32)
    alpha = np.empty(C)
    for n in sequences:
        best_scores(chain, n, previous, sizes, alpha)
        best, state = -INF, 0
        for c in range(C):
            total = alpha[c] + chain.end[n, c]
            if total > best or total != total:
                best, state = total, c
        score[n] = best
        t = chain.lengths[n] - 1
        while t >= 0 and best > -INF:
            first = t - sizes[t, state]
            for s in range(first, t + 1):
                states[s, n], starts[s, n] = state, s == first
            t, state = first - 1, previous[first, state]


@jit
def insert_paths(
    paths: Any, state: int, score: float, way: int, R: int, best: Any, ways: Any, into: int
) -> None:
    """Insert the R descending paths of a state plus a score into those of another state.

    Their ways are `way`, `way` + 1, ....
    """
    first, last = into * R, (into + 1) * R
    for r in range(R):
        term = paths[state * R + r] + score
        if not (term > best[last - 1] or term != term):
            break  # The others are no better.
        insert(term, way + r, best, ways, first, last)


@jit(nogil=True)
def nbest_kernel(sequences: Any, chain: Any, scores: Any, states: Any, starts: Any) -> None:
    """Find the R best paths of each sequence; scores are `[R, N]`.

    A list of the R best paths of each state, `[C * R]`, stands where the scan of the best path has
    its score. A way is the state before a new segment, or the number of steps minus 1 of a closed
    one, times R plus the rank of the path before. Entries of `states` and `starts` `[R, T, N]` that
    are on no path are not written.
    """
    (D, C), R, T = chain.durations.shape, len(scores), chain.emissions.shape[1]
    opening, closing = np.zeros((T, C * R), np.int32), np.zeros((T, C * R), np.int32)
    ring, alpha = np.empty((D, C * R)), np.empty(C * R)
    last, slots = np.empty(R), np.zeros(R, np.int32)
    for n in sequences:
        for t in range(chain.lengths[n]):
            emission, newest, ways = chain.emissions[n, t], ring[t % D], closing[t]
            fill_row(newest, -INF)
            for c in range(C):
                if t == 0:
                    newest[c * R] = chain.start[n, c]
                for i in range(C if t else 0):
                    step = chain.transitions[0, i, c]
                    insert_paths(alpha, i, step, i * R, R, newest, opening[t], c)
            fill_row(alpha, -INF)
            for d in range(min(t + 1, D)):
                row, duration = ring[(t - d) % D], chain.durations[d]
                for c in range(C):
                    for r in range(c * R, (c + 1) * R):
                        row[r] += emission[c]
                    if not (row[c * R] + duration[c] <= alpha[(c + 1) * R - 1]):  # seldom
                        insert_paths(row, c, duration[c], d * R, R, alpha, ways, c)
        fill_row(last, -INF)
        for c in range(C):
            insert_paths(alpha, c, chain.end[n, c], c * R, R, last, slots, 0)
        for r in range(R):
            scores[r, n] = last[r]
            state, rank, t = slots[r] // R, slots[r] % R, chain.lengths[n] - 1
            while t >= 0 and last[r] > -INF:
                way = closing[t, state * R + rank]
                first, rank = t - way // R, way % R
                for s in range(first, t + 1):
                    states[r, s, n], starts[r, s, n] = state, s == first
                way = opening[first, state * R + rank]
                state, rank, t = way // R, way % R, first - 1


@jit(nogil=True)
def sample_kernel(sequences: Any, chain: Any, uniforms: Any, states: Any, starts: Any) -> None:
    """Draw k paths of each sequence, `[k, T, N]`, with uniform numbers `[T, 2, k, N]`.

    Entries of `states` and `starts` that are on no path are not written.
    """
    D, C = chain.durations.shape
    T, buffers = max(chain.emissions.shape[1], 2), scan_buffers(chain)
    begin, alpha, terms = np.empty((T, C)), np.empty((T, C)), np.empty(max(D, C))
    for n in sequences:
        logz = scan_forward(chain, n, buffers, begin, alpha)
        for k in range(len(states) if logz > -INF else 0):
            t, state = chain.lengths[n] - 1, -1
            while t >= 0:
                for c in range(C):
                    follows = chain.end[n, c] if state < 0 else chain.transitions[0, c, state]
                    terms[c] = alpha[t, c] + follows
                cumulative_exp(terms[:C])
                state = draw_index(terms[:C], uniforms[t, 0, k, n])
                rows, emitted = min(t + 1, D), 0.0
                for d in range(rows):
                    emitted += chain.emissions[n, t - d, state]
                    terms[d] = begin[t - d, state] + emitted + chain.durations[d, state]
                cumulative_exp(terms[:rows])
                first = t - draw_index(terms[:rows], uniforms[t, 1, k, n])
                for s in range(first, t + 1):
                    states[k, s, n], starts[k, s, n] = state, s == first
                t = first - 1


def _no_paths(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.full(shape, -1, device="cpu"), torch.zeros(shape, dtype=torch.bool, device="cpu")


def semi_markov_viterbi(
    chain: SemiMarkovPotentials,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best score `[N]`, and the states and starts of the best path `[T, N]`."""
    arrays, invalid = semi_markov_arrays(chain)
    T, N, _ = chain.emissions.shape
    score, (states, starts) = np.empty(N), _no_paths(T, N)
    run(viterbi_kernel, arrays, score, states.numpy(), starts.numpy())
    states[:, invalid], starts[:, invalid] = -1, False
    found = torch.from_numpy(score).masked_fill_(invalid, torch.nan)
    return found.to(acc_dtype(chain.emissions.dtype)), states, starts


def semi_markov_nbest(chain: SemiMarkovPotentials, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores `[k, N]` fp64 of the k best paths, their states and starts `[k, T, N]`."""
    arrays, invalid = semi_markov_arrays(chain)
    T, N, _ = chain.emissions.shape
    score, (states, starts) = np.empty((k, N)), _no_paths(k, T, N)
    run(nbest_kernel, arrays, score, states.numpy(), starts.numpy())
    states[:, :, invalid], starts[:, :, invalid] = -1, False
    return torch.from_numpy(score).masked_fill_(invalid, torch.nan), states, starts


def semi_markov_sample(
    chain: SemiMarkovPotentials,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the states and starts `[k, T, N]` of k paths from the posterior."""
    arrays, invalid = semi_markov_arrays(chain)
    states, starts = _no_paths(uniforms.shape[2], *chain.emissions.shape[:2])
    run(sample_kernel, arrays, uniforms.contiguous().numpy(), states.numpy(), starts.numpy())
    states[:, :, invalid], starts[:, :, invalid] = -1, False
    return states, starts
