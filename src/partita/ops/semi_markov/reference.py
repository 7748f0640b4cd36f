"""The specification of semi-Markov chains in plain PyTorch.

A path of L steps is a sequence of segments, each of one state and 1 to D steps. Its score is

    start[first state] + end[last state] + sum over steps: emissions[t, c]
    + sum over segments: durations[d - 1, c] + sum over neighbours: transitions[c, c'].

With ⊕ of a semiring, the scan over time computes

    begin[0] = start,   begin[t, c] = ⊕ over c': alpha[t - 1, c'] + transitions[c', c]
    opened[t, d, c] = begin[t, c] if d = 1 else opened[t - 1, d - 1, c],   + emissions[t, c]
    alpha[t, c] = ⊕ over d: opened[t, d, c] + durations[d - 1, c]
    Z = ⊕ over c: alpha[L - 1, c] + end[c].

`opened` has the scores of the segments that are d steps old. No score is a difference of sums over
long prefixes, which would cancel. All scans run in fp64 in the log domain, and autograd can
differentiate them and the posteriors that they give.

Source: Sarawagi and Cohen, Semi-Markov conditional random fields for information extraction, 2004.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...paths.inputs import full_lengths
from ...primitives.semiring import Log, Max, Semiring, draw
from ...runtime.dtypes import acc_dtype
from .common import SemiMarkovPotentials

# It takes terms [k, N, choices], a step t, and whether they are those of states or of durations,
# and returns an index [k, N].
Choose = Callable[[Tensor, int, int], Tensor]
STATE, DURATION = 0, 1


class SemiMarkovInputs(NamedTuple):
    """A batch of semi-Markov chains that is ready to be scanned.

    Fields:
        emissions: `[T, N, C]` fp64; 0 past a length.
        transitions: `[C, C]` fp64.
        durations: `[D, 1, C]` fp64.
        start, end: `[N, C]` fp64.
        last: the last step of each sequence, `[N]`, in range even where a length is invalid.
        unused: `[N]` fp64: the gradient past a length, 0, or NaN for an invalid length.
    """

    emissions: Tensor
    transitions: Tensor
    durations: Tensor
    start: Tensor
    end: Tensor
    last: Tensor
    unused: Tensor

    def step(self, t: int) -> Tensor:
        """Return the transitions from step t - 1 to step t, `[N, C, C]`; 0 past a length."""
        return torch.where((t <= self.last)[:, None, None], self.transitions, 0.0)

    def closed(self, opened: Tensor, possible: Tensor) -> Tensor:
        """Return the scores of segments by age with their durations, `[D, N, C]`.

        They are -inf where a segment is not possible, `[D, N]`, whatever its duration's score is.
        """
        return torch.where(possible[..., None], opened + self.durations, -torch.inf)

    def ages(self) -> Tensor:
        """Return the ages of segments minus 1, `[D, 1]`."""
        return torch.arange(self.durations.shape[0], device=self.last.device)[:, None]


class ForwardScores(NamedTuple):
    """The scores of what comes up to each step.

    Fields:
        opened: for each t, the scores of the segments that reach step t by their age, `[D, N, C]`.
        alpha: for each t, the scores of ending a segment with step t, `[N, C]`.
    """

    opened: list[Tensor]
    alpha: list[Tensor]


class Posteriors(NamedTuple):
    """The posterior probabilities of a batch, which are the derivatives of log Z.

    Fields:
        states: `[T, N, C]`.
        segments: by last step and number of steps minus 1, `[T, D, N, C]`.
        transitions: the expected numbers of transitions, `[N, C, C]`.
        first, last: the posteriors of the first and of the last state, `[N, C]`.
    """

    states: Tensor
    segments: Tensor
    transitions: Tensor
    first: Tensor
    last: Tensor


def semi_markov_inputs(chain: SemiMarkovPotentials) -> SemiMarkovInputs:
    """Return the inputs of a scan."""
    T, lengths = len(chain.emissions), full_lengths(chain.emissions, chain.lengths)
    invalid = (lengths < 1) | (lengths > T)
    active = torch.arange(T, device=lengths.device)[:, None] < lengths
    return SemiMarkovInputs(
        torch.where(active[..., None], chain.emissions.double(), 0.0),
        chain.transitions.double(),
        chain.durations.double()[:, None],
        chain.start.double(),
        chain.end.double(),
        lengths.clamp(1, T) - 1,
        torch.where(invalid, torch.nan, 0.0).double(),
    )


def _age(newest: Tensor, others: Tensor) -> Tensor:
    """Return scores by age `[D, N, C]` one step later: the newest has the age 1."""
    return torch.cat([newest[None], others[:-1]])


def forward_scores(x: SemiMarkovInputs, semiring: Semiring) -> ForwardScores:
    """Return the scores of what comes up to each step."""
    result = ForwardScores([], [])
    begin = x.start
    opened = begin.new_full((len(x.durations), *begin.shape), -torch.inf)
    for t, emission in enumerate(x.emissions):
        if t:
            begin = semiring.sum(result.alpha[-1][:, :, None] + x.step(t), 1)
        opened = _age(begin, opened) + emission
        possible = (x.ages() <= t) & (t <= x.last)
        result.opened.append(opened)
        result.alpha.append(semiring.sum(x.closed(opened, possible), 0))
    return result


def backward_scores(x: SemiMarkovInputs, semiring: Semiring) -> tuple[list[Tensor], list[Tensor]]:
    """Return the scores of what comes from each step on, `[N, C]` each; -inf past a length.

    They are those from a segment on that starts at step t, and those of what follows a segment that
    ends with step t, which are beta.
    """
    begins: list[Tensor] = []
    betas: list[Tensor] = []
    follows = torch.full_like(x.end, -torch.inf)
    closing = follows.new_full((len(x.durations), *follows.shape), -torch.inf)
    for t in reversed(range(len(x.emissions))):
        beta = torch.where((x.last == t)[:, None], x.end, follows)
        closing = _age(beta, closing) + x.emissions[t]
        begin = semiring.sum(x.closed(closing, t + x.ages() <= x.last), 0)
        follows = semiring.sum(x.step(t) + begin[:, None], 2)
        begins.insert(0, begin)
        betas.insert(0, beta)
    return begins, betas


def at_last_step(x: SemiMarkovInputs, steps: Tensor) -> Tensor:
    """Return the entries `[N, C]` of `[T, N, C]` at the last step of each sequence."""
    return steps[x.last, torch.arange(x.last.shape[0], device=steps.device)]


def log_partition(x: SemiMarkovInputs, alpha: list[Tensor], semiring: Semiring = Log) -> Tensor:
    """Return the ⊕ over all paths, `[N]` fp64; a sequence without a path has the gradient 0."""
    logz = semiring.sum(at_last_step(x, torch.stack(alpha)) + x.end, -1) + x.unused
    return torch.where(logz == -torch.inf, logz.detach(), logz)


def posteriors(x: SemiMarkovInputs) -> Posteriors:
    """Return the posterior probabilities; 0 past the lengths and for a sequence without a path."""
    forward, (begins, betas) = forward_scores(x, Log), backward_scores(x, Log)
    logz = log_partition(x, forward.alpha)
    total = logz.masked_fill(logz == -torch.inf, torch.inf)[:, None]
    covering = torch.zeros_like(forward.opened[0])
    states: list[Tensor] = []
    segments: list[Tensor] = []
    for t in reversed(range(len(x.emissions))):
        score = forward.opened[t] + (betas[t] - total)
        segments.insert(0, x.closed(score, (x.ages() <= t) & (t <= x.last)).exp())
        # A segment that covers step t + 1 at the age d + 1 covers step t at the age d.
        covering = segments[0] + torch.cat([covering[1:], torch.zeros_like(covering[:1])])
        states.insert(0, covering.sum(0))
    unused = x.unused[:, None]
    transitions = unused[..., None].expand(-1, *x.transitions.shape)
    for t in range(1, len(states)):
        step = forward.alpha[t - 1][:, :, None] + x.step(t) + begins[t][:, None]
        step = (step - total[:, :, None]).exp()
        transitions = transitions + torch.where((t <= x.last)[:, None, None], step, 0.0)
    stacked = torch.stack(segments) + unused
    last = at_last_step(x, stacked.sum(1))
    first = covering[0] + unused
    return Posteriors(torch.stack(states) + unused, stacked, transitions, first, last)


def semi_markov_logz(
    chain: SemiMarkovPotentials,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and an empty tensor: nothing is saved."""
    x = semi_markov_inputs(chain)
    logz = log_partition(x, forward_scores(x, Log).alpha)
    rounded = logz.to(acc_dtype(chain.emissions.dtype), copy=True)
    return logz, rounded, logz.new_empty(0)


def semi_markov_gradient(
    grad_output: Tensor,
    chain: SemiMarkovPotentials,
    logz: Tensor,
    saved: Tensor,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of sum(grad_output * log Z) in the dtypes of the arguments.

    With `per_sequence` those in transitions are `[N, C, C]` and those in durations `[N, D, C]`, in
    the dtype of results. The gradients are differentiable.
    """
    x = semi_markov_inputs(chain)
    p, scale = posteriors(x), grad_output.double()[:, None]
    d_transitions = scale[:, :, None] * p.transitions
    d_durations = scale[:, :, None] * p.segments.sum(0).transpose(0, 1)
    if per_sequence:
        dtype = acc_dtype(chain.emissions.dtype)
        d_transitions, d_durations = d_transitions.to(dtype), d_durations.to(dtype)
    else:
        d_transitions = d_transitions.sum(0).to(chain.transitions.dtype)
        d_durations = d_durations.sum(0).to(chain.durations.dtype)
    return (
        (scale * p.states).to(chain.emissions.dtype),
        d_transitions,
        d_durations,
        (scale * p.first).to(chain.start.dtype),
        (scale * p.last).to(chain.end.dtype),
    )


def semi_markov_segments(
    chain: SemiMarkovPotentials,
    logz: Tensor,
    saved: Tensor,
) -> Tensor:
    """Return the posterior probabilities of segments, `[T, D, N, C]` in the dtype of results.

    The last step and the number of steps minus 1 are the first two indices. The result is
    differentiable.
    """
    x = semi_markov_inputs(chain)
    return posteriors(x).segments.to(acc_dtype(chain.emissions.dtype))


def trace_back(
    x: SemiMarkovInputs, scores: ForwardScores, logz: Tensor, k: int, choose: Choose
) -> tuple[Tensor, Tensor]:
    """Return states and starts `[k, T, N]` of paths that are traced from the last step.

    At the last step of a segment its state is chosen, then its number of steps. States are -1 past
    the length and for a sequence without a path.
    """
    T, N, C = x.emissions.shape
    sequence, last = torch.arange(N, device=logz.device), x.last.expand(k, N)
    shape = (k, T, N)
    states = torch.full(shape, -1, device=logz.device)
    starts = torch.zeros(shape, dtype=torch.bool, device=logz.device)
    if not C:
        return states, starts
    ends, state, first = last, torch.zeros_like(last), torch.zeros_like(last)
    for t in reversed(range(T)):
        entered = torch.where((last == t)[..., None], x.end, x.transitions.T[state])
        is_end = ends == t
        state = torch.where(is_end, choose(scores.alpha[t] + entered, t, STATE), state)
        terms = x.closed(scores.opened[t], (x.ages() <= t) & (t <= x.last))
        terms = terms[:, sequence, state].movedim(0, -1)
        first = torch.where(is_end, t - choose(terms, t, DURATION), first)
        states[:, t] = torch.where(t <= last, state, -1)
        starts[:, t] = (t <= last) & (t == first)
        ends = torch.where(first == t, t - 1, ends)
    has_path = logz > -torch.inf  # False for NaN
    return states.masked_fill(~has_path, -1), starts & has_path


def semi_markov_viterbi(
    chain: SemiMarkovPotentials,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best score `[N]`, and the states and starts of the best path `[T, N]`.

    Ties go to the lowest last state, then to the shortest last segment, then to the lowest state
    before it, and so on.
    """
    x = semi_markov_inputs(chain)
    scores = forward_scores(x, Max)
    best = log_partition(x, scores.alpha, Max)
    states, starts = trace_back(x, scores, best, 1, lambda terms, t, kind: terms.argmax(-1))
    return best.to(acc_dtype(chain.emissions.dtype)), states[0], starts[0]


def _sorted(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k greatest of the first two dimensions as one, and their indices; ties in order.

    The index of `scores[i, j]` is i k + j.
    """
    best, index = scores.flatten(0, 1).sort(dim=0, descending=True, stable=True)
    return best[:k], index[:k]


def semi_markov_nbest(chain: SemiMarkovPotentials, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores `[k, N]` fp64 of the k best paths, their states and starts `[k, T, N]`.

    States are -1 past the length and for a path that does not exist, whose score is -inf. Of equal
    paths that of `semi_markov_viterbi` comes first. Each state of a step keeps its k best paths,
    so a step sorts k D ways of closing a segment of a state and k C ways of opening one.
    """
    x = semi_markov_inputs(chain)
    (T, N, C), D = x.emissions.shape, len(x.durations)
    states = x.last.new_full((k, T, N), -1)
    starts = torch.zeros_like(states, dtype=torch.bool)
    if not C:
        return x.start.new_full((k, N), -torch.inf) + x.unused, states, starts
    # Scores by rank; of open segments by age and rank.
    begin = torch.cat([x.start[None], x.start.new_full((k - 1, N, C), -torch.inf)])
    opened = begin.new_full((D, k, N, C), -torch.inf)
    alpha: list[Tensor] = []
    opening, closing = [torch.zeros_like(begin, dtype=torch.int64)], []
    for t, emission in enumerate(x.emissions):
        if t:
            before = alpha[-1].movedim(2, 0)[..., None]  # [C, k, N, 1]
            step = x.step(t).transpose(0, 1)[:, None]  # [C, 1, N, C]
            begin, way = _sorted(before + step, k)
            opening.append(way)
        opened = torch.cat([begin[None], opened[:-1]]) + emission
        possible = (x.ages() <= t) & (t <= x.last)
        closed = x.closed(opened.transpose(0, 1), possible).transpose(0, 1)
        best, way = _sorted(closed, k)
        alpha.append(best)
        closing.append(way)
    sequence = torch.arange(N, device=x.last.device)
    ends = torch.stack(alpha)[x.last, :, sequence] + x.end[:, None]  # [N, k, C]
    score, slot = _sorted(ends.permute(2, 1, 0), k)
    score = score + x.unused
    last, first = x.last.expand(k, N), torch.zeros_like(slot)
    end, state, rank = last, slot // k, slot % k
    for t in reversed(range(T)):
        way = closing[t][rank, sequence, state]
        first = torch.where(end == t, t - way // k, first)
        rank = torch.where(end == t, way % k, rank)
        states[:, t] = torch.where(t <= last, state, -1)
        starts[:, t] = (t <= last) & (t == first)
        way = opening[t][rank, sequence, state]
        end = torch.where(first == t, t - 1, end)
        state = torch.where(first == t, way // k, state)
        rank = torch.where(first == t, way % k, rank)
    has_path = (score > -torch.inf)[:, None]  # False for NaN
    return score, states.masked_fill(~has_path, -1), starts & has_path


def semi_markov_sample(
    chain: SemiMarkovPotentials,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the states and starts `[k, T, N]` of k paths from the posterior.

    A path is drawn from its end. The state and the duration of a segment are drawn by the uniform
    numbers of its last step, `[T, 2, k, N]`.
    """
    x = semi_markov_inputs(chain)
    scores = forward_scores(x, Log)
    logz = log_partition(x, scores.alpha)
    k = uniforms.shape[2]
    return trace_back(
        x, scores, logz, k, lambda terms, t, kind: draw(terms.expand(k, -1, -1), uniforms[t, kind])
    )


def path_score(chain: SemiMarkovPotentials, states: Tensor, starts: Tensor) -> Tensor:
    """Return the score of paths with states and starts `[..., T, N]`, `[..., N]` fp64.

    Steps past a length are ignored. The score is -inf for what is no path: a state that is out of
    range or changes inside a segment, a segment of more than D steps, a first step that starts no
    segment. It is NaN for an invalid length.
    """
    emissions, transitions, durations, start, end, _ = chain
    (T, N, C), D = emissions.shape, len(durations)
    lengths = full_lengths(emissions, chain.lengths)
    invalid = (lengths < 1) | (lengths > T)
    if not C:
        score = emissions.new_full((*states.shape[:-2], N), -torch.inf, dtype=torch.float64)
        return score.masked_fill(invalid, torch.nan)
    sequence = torch.arange(N, device=states.device)
    step = torch.arange(T, device=states.device)[:, None]
    active = step < lengths
    state = states.clamp(0, C - 1)
    first = torch.where(starts, step, -1).cummax(-2).values  # the first step of each segment
    age = (step - first).clamp(0, D - 1)  # minus 1
    possible = (state == states) & (first >= 0) & (step - first < D)
    follows = torch.zeros_like(starts)
    follows[..., 1:, :] = starts[..., 1:, :]  # a segment that follows another starts here
    before = state.roll(1, -2)
    possible[..., 1:, :] &= (starts | (before == state))[..., 1:, :]
    is_last = active & (starts.roll(-1, -2) | (step == lengths - 1))
    # The gradient of a shared number is a sum over many steps, so it is formed in fp64.
    terms = emissions[step, sequence, state].double()
    terms = terms + torch.where(follows, transitions.double()[before, state], 0.0)
    terms = terms + torch.where(is_last, durations.double()[age, state], 0.0)
    total = torch.where(active, terms, 0.0).sum(-2)
    last = (lengths - 1).clamp(0, T - 1).expand(*state.shape[:-2], 1, N)
    total = total + start[sequence, state[..., 0, :]].double()
    total = total + end[sequence, state.gather(-2, last).squeeze(-2)].double()
    possible = (possible | ~active).all(-2)
    return torch.where(possible, total, -torch.inf).masked_fill(invalid, torch.nan)
