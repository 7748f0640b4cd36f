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

from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.semiring import Log, Semiring
from ...runtime.dtypes import acc_dtype


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
        begin: for each t, the scores of starting a segment at step t, `[N, C]`.
        opened: for each t, the scores of the segments that reach step t by their age, `[D, N, C]`.
        alpha: for each t, the scores of ending a segment with step t, `[N, C]`.
    """

    begin: list[Tensor]
    opened: list[Tensor]
    alpha: list[Tensor]


class Posteriors(NamedTuple):
    """The posterior probabilities of a batch, which are the derivatives of log Z.

    Fields:
        logz: `[N]`.
        states: `[T, N, C]`.
        segments: by last step and number of steps minus 1, `[T, D, N, C]`.
        transitions: the expected numbers of transitions, `[N, C, C]`.
        first, last: the posteriors of the first and of the last state, `[N, C]`.
    """

    logz: Tensor
    states: Tensor
    segments: Tensor
    transitions: Tensor
    first: Tensor
    last: Tensor


def semi_markov_inputs(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
) -> SemiMarkovInputs:
    """Return the inputs of a scan."""
    T, N, _ = emissions.shape
    if lengths is None:
        lengths = torch.full((N,), T, device=emissions.device)
    lengths = lengths.long()
    invalid = (lengths < 1) | (lengths > T)
    active = torch.arange(T, device=emissions.device)[:, None] < lengths
    return SemiMarkovInputs(
        torch.where(active[..., None], emissions.double(), 0.0),
        transitions.double(),
        durations.double()[:, None],
        start.double(),
        end.double(),
        lengths.clamp(1, T) - 1,
        torch.where(invalid, torch.nan, 0.0).double(),
    )


def _age(newest: Tensor, others: Tensor) -> Tensor:
    """Return scores by age `[D, N, C]` one step later: the newest has the age 1."""
    return torch.cat([newest[None], others[:-1]])


def forward_scores(x: SemiMarkovInputs, semiring: Semiring) -> ForwardScores:
    """Return the scores of what comes up to each step."""
    result = ForwardScores([], [], [])
    begin = x.start
    opened = begin.new_full((len(x.durations), *begin.shape), -torch.inf)
    for t, emission in enumerate(x.emissions):
        if t:
            begin = semiring.sum(result.alpha[-1][:, :, None] + x.step(t), 1)
        opened = _age(begin, opened) + emission
        possible = (x.ages() <= t) & (t <= x.last)
        result.begin.append(begin)
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
    return Posteriors(
        logz, torch.stack(states) + unused, stacked, transitions, covering[0] + unused, last
    )


def semi_markov_logz(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and an empty tensor: nothing is saved."""
    x = semi_markov_inputs(emissions, transitions, durations, start, end, lengths)
    logz = log_partition(x, forward_scores(x, Log).alpha)
    rounded = logz.to(acc_dtype(emissions.dtype), copy=True)
    return logz, rounded, emissions.new_empty(0, dtype=torch.float64)


def semi_markov_gradient(
    grad_output: Tensor,
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    logz: Tensor,
    saved: Tensor,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of sum(grad_output * log Z) in the dtypes of the arguments.

    With `per_sequence` those in transitions are `[N, C, C]` and those in durations `[N, D, C]`, in
    the dtype of results. The gradients are differentiable.
    """
    x = semi_markov_inputs(emissions, transitions, durations, start, end, lengths)
    p, scale = posteriors(x), grad_output.double()[:, None]
    d_transitions = scale[:, :, None] * p.transitions
    d_durations = scale[:, :, None] * p.segments.sum(0).transpose(0, 1)
    if per_sequence:
        dtype = acc_dtype(emissions.dtype)
        d_transitions, d_durations = d_transitions.to(dtype), d_durations.to(dtype)
    else:
        d_transitions = d_transitions.sum(0).to(transitions.dtype)
        d_durations = d_durations.sum(0).to(durations.dtype)
    return (
        (scale * p.states).to(emissions.dtype),
        d_transitions,
        d_durations,
        (scale * p.first).to(start.dtype),
        (scale * p.last).to(end.dtype),
    )


def semi_markov_segments(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    logz: Tensor,
    saved: Tensor,
) -> Tensor:
    """Return the posterior probabilities of segments, `[T, D, N, C]` in the dtype of results.

    The last step and the number of steps minus 1 are the first two indices. The result is
    differentiable.
    """
    x = semi_markov_inputs(emissions, transitions, durations, start, end, lengths)
    return posteriors(x).segments.to(acc_dtype(emissions.dtype))
