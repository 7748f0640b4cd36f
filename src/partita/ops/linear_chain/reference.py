"""The specification of dense linear chains in plain PyTorch.

A path y of L tokens has the score

    start[y_0] + sum over t < L: emissions[t, y_t]
               + sum over t < L - 1: transitions[y_t, y_{t+1}] + end[y_{L-1}].

With ⊕ of a semiring, the scan over time computes

    alpha[0] = start + emissions[0]
    alpha[t, j] = (⊕ over i: alpha[t - 1, i] + transitions[i, j]) + emissions[t, j]
    Z = ⊕ over j: alpha[L - 1, j] + end[j].

All scans run in fp64 in the log domain, and autograd can differentiate them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.semiring import Log, Max, Semiring, log_dsum
from ...runtime.dtypes import acc_dtype
from .inputs import LinearChainTensors
from .paths import best_paths


class LinearChainInputs(NamedTuple):
    """A batch of dense linear chains that is ready to be scanned.

    Fields:
        emissions: `[T, N, C]` fp64; 0 past a length.
        transitions: `[T - 1, 1 or N, C, C]` fp64, a view with a stride of 0 if they are constant.
        start: `[N, C]` fp64; NaN for an invalid length.
        end: `[N, C]` fp64.
        active: `[T, N]`; True for a token before the length.
        unused: `[N]` fp64: the gradient past a length, 0, or NaN for an invalid length.
    """

    emissions: Tensor
    transitions: Tensor
    start: Tensor
    end: Tensor
    active: Tensor
    unused: Tensor

    def step(self, t: int) -> Tensor:
        """Return the transitions from token t - 1 to token t, `[N, C, C]`; 0 past a length."""
        return torch.where(self.active[t, :, None, None], self.transitions[t - 1], 0.0)


def as_steps(transitions: Tensor, T: int) -> Tensor:
    """Return transitions, or values of them, as `[T - 1, 1 or N, C, C]` fp64."""
    transitions = transitions.double()
    if transitions.ndim == 4:
        return transitions
    if transitions.ndim == 3:
        return transitions.unsqueeze(1)
    return transitions.expand(T - 1, 1, -1, -1)


def linear_chain_inputs(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
) -> LinearChainInputs:
    """Return the inputs of a scan."""
    T, N, C = emissions.shape
    if lengths is None:
        lengths = torch.full((N,), T, device=emissions.device)
    lengths = lengths.long()
    zeros = torch.zeros(N, C, dtype=torch.float64, device=emissions.device)
    invalid = (lengths < 1) | (lengths > T)
    active = torch.arange(T, device=emissions.device)[:, None] < lengths
    return LinearChainInputs(
        torch.where(active[..., None], emissions.double(), 0.0),
        as_steps(transitions, T),
        (zeros if start is None else start.double()).masked_fill(invalid[:, None], torch.nan),
        zeros if end is None else end.double(),
        active,
        torch.where(invalid, torch.nan, 0.0).double(),
    )


def forward_scores(x: LinearChainInputs, semiring: Semiring) -> list[Tensor]:
    """Return alpha of each token, `[N, C]` each; past a length it does not change."""
    alpha = [x.start + x.emissions[0]]
    for t in range(1, len(x.emissions)):
        entered = semiring.sum(alpha[-1][:, :, None] + x.step(t), 1) + x.emissions[t]
        alpha.append(torch.where(x.active[t, :, None], entered, alpha[-1]))
    return alpha


def log_partition(x: LinearChainInputs, semiring: Semiring = Log) -> Tensor:
    """Return the ⊕ over all paths, `[N]` fp64; a chain without a path has the gradient 0."""
    logz = semiring.sum(forward_scores(x, semiring)[-1] + x.end, -1)
    return torch.where(logz == -torch.inf, logz.detach(), logz)


def generic_partition(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    semiring: Semiring,
) -> Tensor:
    """Return the sum over all paths under any semiring, `[N]` fp64."""
    T, N, _ = emissions.shape
    lengths = torch.full((N,), T, device=emissions.device) if lengths is None else lengths.long()
    steps, mul = as_steps(transitions, T), semiring.mul
    alpha = emissions[0].double() if start is None else mul(start.double(), emissions[0].double())
    for t in range(1, T):
        entered = mul(semiring.sum(mul(alpha[:, :, None], steps[t - 1]), 1), emissions[t].double())
        alpha = torch.where((t < lengths)[:, None], entered, alpha)
    result = semiring.sum(alpha if end is None else mul(alpha, end.double()), -1)
    return result.masked_fill((lengths < 1) | (lengths > T), torch.nan)


def linear_chain_logz(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and an empty tensor: nothing is saved."""
    logz = log_partition(linear_chain_inputs(emissions, transitions, start, end, lengths))
    rounded = logz.to(acc_dtype(emissions.dtype), copy=True)
    return logz, rounded, emissions.new_empty(0, dtype=torch.float64)


class StepSum:
    """The sum over the steps of a gradient `[N, C, C]` in the shape of the transitions, in fp64.

    Constant transitions get one sum for each sequence. Steps are added from the last to the first.
    """

    def __init__(self, transitions: Tensor, d_state: Tensor) -> None:
        self.transitions = transitions
        self.steps: list[Tensor] = []
        # Without a step the sum is empty, which is NaN for an invalid sequence.
        self.total = 0.0 * d_state[:, :, None].expand(*d_state.shape, d_state.shape[1])

    def add(self, step: Tensor) -> None:
        """Add the gradient of one step."""
        if self.transitions.ndim == 2:
            self.total = self.total + step
        else:
            self.steps.insert(0, step.sum(0) if self.transitions.ndim == 3 else step)

    def result(self, per_sequence: bool) -> Tensor:
        """Return the sum, of each sequence if transitions are constant and `per_sequence`."""
        if self.transitions.ndim == 2:
            return self.total if per_sequence else self.total.sum(0)
        if self.steps:
            return torch.stack(self.steps)
        return torch.zeros_like(self.transitions, dtype=torch.float64)


def linear_chain_gradient(
    grad_output: Tensor,
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    logz: Tensor,
    saved: Tensor,
    need_transitions: bool,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of sum(grad_output * log Z) in the dtypes of the arguments.

    The posterior of a transition is the posterior of the state that it enters, times its share in
    the sum that entered that state.
    """
    x = linear_chain_inputs(emissions, transitions, start, end, lengths)
    alpha = forward_scores(x, Log)
    # d_state is grad_output times the posterior of each state, [N, C].
    d_state = d_end = grad_output.double()[:, None] * log_dsum(alpha[-1] + x.end, -1)
    d_emissions: list[Tensor] = []
    d_steps, unused = StepSum(transitions, d_state), x.unused[:, None]
    for t in reversed(range(1, len(x.emissions))):
        active = x.active[t, :, None]
        d_emissions.insert(0, torch.where(active, d_state, unused))
        d_step = d_state[:, None] * log_dsum(alpha[t - 1][:, :, None] + x.step(t), 1)
        d_steps.add(torch.where(active[..., None], d_step, unused[..., None]))
        d_state = torch.where(active, d_step.sum(2), d_state)
    stacked = torch.stack([d_state, *d_emissions])
    d_transitions = transitions.new_empty(0)
    if need_transitions:
        of_sequences = per_sequence and transitions.ndim == 2
        dtype = acc_dtype(transitions.dtype) if of_sequences else transitions.dtype
        d_transitions = d_steps.result(of_sequences).to(dtype)
    return (
        stacked.to(emissions.dtype),
        d_transitions,
        *end_gradients(emissions, start, end, d_state, d_end),
    )


def end_gradients(
    emissions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    d_start: Tensor,
    d_end: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the ends in their dtypes, or in `dtype`; empty for None."""
    # An op may not return one tensor as two results.
    return (
        emissions.new_empty(0, dtype=dtype)
        if start is None
        else d_start.to(dtype or start.dtype, copy=True),
        emissions.new_empty(0, dtype=dtype)
        if end is None
        else d_end.to(dtype or end.dtype, copy=True),
    )


def linear_chain_viterbi(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the best score `[N]` and the states of the best path `[T, N]`.

    States are -1 past the length and for a chain without a path. Ties go to the lowest state before
    each state, then to the lowest last state.
    """
    x = linear_chain_inputs(emissions, transitions, start, end, lengths)
    alpha = forward_scores(x, Max)
    ends = alpha[-1] + x.end
    best = Max.sum(ends, -1)
    score = best.to(acc_dtype(emissions.dtype))
    if not ends.shape[1]:
        return score, torch.full(emissions.shape[:2], -1, device=emissions.device)

    def previous(t: int, state: Tensor) -> Tensor:
        return _terms_into(x, alpha, t, state).argmax(-1)

    return score, _trace_back(x, previous, ends.argmax(-1)[None], best > -torch.inf)[0]


def linear_chain_nbest(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    k: int,
) -> tuple[Tensor, Tensor]:
    """Return the results of `best_paths`."""
    return best_paths(LinearChainTensors(emissions, transitions, start, end, lengths), k)


def _terms_into(x: LinearChainInputs, alpha: list[Tensor], t: int, state: Tensor) -> Tensor:
    """Return the terms of the sums that enter the states `[k, N]` at token t, `[k, N, C]`."""
    sequence = torch.arange(state.shape[1], device=state.device)
    return alpha[t - 1] + x.step(t).transpose(1, 2)[sequence, state]


def _draw(terms: Tensor, uniform: Tensor) -> Tensor:
    """Draw an index into each row of `[k, N, C]` with probabilities proportional to exp(terms)."""
    weights = log_dsum(terms, -1)
    cumulative = weights.cumsum(-1)
    index = (cumulative <= uniform[..., None] * cumulative[..., -1:]).sum(-1)
    # A product that rounds up to the total would pass the last index with a positive weight.
    possible = (weights > 0) * torch.arange(weights.shape[-1], device=weights.device)
    return torch.minimum(index, possible.amax(-1))


def _trace_back(x: LinearChainInputs, previous: object, state: Tensor, has_path: Tensor) -> Tensor:
    """Return the states `[k, T, N]` of paths that end in `state` `[k, N]`.

    Args:
        previous: takes a token t and the states `[k, N]` at it, and returns the states before it.
        has_path: `[N]`; False for a sequence whose states are all -1.
    """
    assert callable(previous)
    states = [state]
    for t in reversed(range(1, len(x.emissions))):
        state = torch.where(x.active[t], previous(t, state), state)
        states.insert(0, state)
    return torch.stack(states, 1).masked_fill(~(x.active & has_path), -1)


def linear_chain_sample(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> Tensor:
    """Return the states `[k, T, N]` of k paths from the posterior.

    The last state is drawn first, then the state before each state. The state of token t is drawn
    by the uniform number of token t, `[T, k, N]`.
    """
    x = linear_chain_inputs(emissions, transitions, start, end, lengths)
    T, N, C = emissions.shape
    k = uniforms.shape[1]
    if not C:
        return torch.full((k, T, N), -1, device=emissions.device)
    alpha = forward_scores(x, Log)
    ends = alpha[-1] + x.end
    last = (x.active.sum(0) - 1).clamp(min=0)
    last_uniform = uniforms.gather(0, last.expand(1, k, N))[0]

    def previous(t: int, state: Tensor) -> Tensor:
        return _draw(_terms_into(x, alpha, t, state), uniforms[t - 1])

    last_state = _draw(ends.expand(k, N, C), last_uniform)
    return _trace_back(x, previous, last_state, Log.sum(ends, -1) > -torch.inf)
