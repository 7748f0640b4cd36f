"""The specification of dense linear chains in plain PyTorch.

A path y of L tokens has the score

    start[y_0] + sum over t < L: emissions[t, y_t]
               + sum over t < L - 1: transitions[y_t, y_{t+1}] + end[y_{L-1}].

That is a sparse chain of L - 1 steps in which every state has an edge from every state,

    initial = start + emissions[0]                             final = end
    scores[t, j, i] = transitions[t, i, j] + emissions[t + 1, j]    source[j, i] = i

whose reference computes everything here. The scores of a step are formed when it is scanned, so
they take memory of `[N, C, C]`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...paths.inputs import full_lengths
from ...primitives.semiring import Log, Max, Semiring
from ...runtime.dtypes import acc_dtype
from ..chain import reference as sparse
from .common import LinearChainPotentials, LinearChainValues, is_constant


def _edges(
    emissions: Tensor, transitions: Tensor, per_step: bool, semiring: Semiring = Log
) -> Callable[[Any], Tensor]:
    """Return the function from a step to the scores or values of its edges, `[N, to, from]`.

    It takes some steps `[S]` at once, too.
    """
    if per_step and transitions.ndim == 3:
        transitions = transitions[:, None]

    def edges(t: Any) -> Tensor:
        step = transitions[t] if per_step else transitions
        return semiring.mul(step.mT.double(), emissions[t + 1, :, :, None].double())

    return edges


def linear_chain_inputs(chain: LinearChainPotentials, semiring: Semiring) -> sparse.ChainInputs:
    """Return the inputs of a scan."""
    emissions, transitions, start, end, lengths = chain
    T, _, C = emissions.shape
    lengths = full_lengths(emissions, lengths)
    invalid = (lengths < 1) | (lengths > T)
    active = torch.arange(1, T, device=emissions.device)[:, None] < lengths
    constant = is_constant(transitions, T)
    steps = transitions[0] if constant and transitions.ndim == 4 else transitions  # [N, C, C]
    edges = _edges(emissions, steps, not constant, semiring)
    initial = emissions[0].double()
    if start is not None:
        initial = semiring.mul(start.double(), initial)
    final = torch.full_like(initial, semiring.one) if end is None else end.double()
    initial, final = (x.masked_fill(invalid[:, None], torch.nan) for x in (initial, final))
    return sparse.ChainInputs(
        lambda t: torch.where(active[t, :, None, None], edges(t), semiring.one),
        torch.arange(C, device=emissions.device).expand(C, C),
        torch.zeros(C, C, dtype=torch.bool, device=emissions.device),
        initial,
        final,
        active,
        torch.where(invalid, torch.nan, 0.0).double(),
    )


def linear_chain_logz(chain: LinearChainPotentials, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and an empty tensor: nothing is saved."""
    logz = sparse.log_partition(linear_chain_inputs(chain, Log), Log)
    rounded = logz.to(acc_dtype(chain.emissions.dtype), copy=True)
    return logz, rounded, logz.new_empty(0)


def _sum_edges(gradients: Iterator[Tensor], T: int, transitions: Tensor) -> list[Tensor]:
    """Return the gradients in emissions, transitions, start and end in fp64.

    Those in transitions `[C, C]` are `[N, C, C]`.

    Args:
        gradients: those in the last states, in the edges `[N, to, from]` from the last step to the
            first, and in the first states.
        T: the number of tokens.
        transitions: as in the op.
    """
    last = next(gradients)
    # Without a step the sum is empty, which is NaN for an invalid sequence.
    total = 0.0 * last[:, :, None].expand(*last.shape, last.shape[1])
    tokens: list[Tensor] = []
    steps: list[Tensor] = []
    for edge in itertools.islice(gradients, T - 1):
        tokens.insert(0, edge.sum(2))
        if is_constant(transitions, T):
            total = total + edge.mT
        else:
            steps.insert(0, edge.mT.sum(0) if transitions.ndim == 3 else edge.mT)
    if is_constant(transitions, T):
        total = total[None] if transitions.ndim == 4 else total
    else:
        total = torch.stack(steps) if steps else torch.zeros_like(transitions).double()
    first = next(gradients)
    return [torch.stack([first, *tokens]), total, first, last]


def linear_chain_gradient(
    grad_output: Tensor,
    chain: LinearChainPotentials,
    logz: Tensor,
    saved: Tensor,
    need_transitions: bool,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of sum(grad_output * log Z) in the dtypes of the arguments.

    With `per_sequence` that in constant transitions is `[N, C, C]` in the dtype of results. It is
    empty if it is not needed.
    """
    emissions, transitions, start, end, _ = chain
    gradients = sparse.posteriors(linear_chain_inputs(chain, Log), grad_output)
    d_emissions, d_transitions, d_start, d_end = _sum_edges(gradients, len(emissions), transitions)
    dtype = transitions.dtype
    if transitions.ndim == 2 and per_sequence:
        dtype = acc_dtype(dtype)
    elif transitions.ndim == 2:
        d_transitions = d_transitions.sum(0)
    return (
        d_emissions.to(emissions.dtype),
        d_transitions.to(dtype) if need_transitions else transitions.new_empty(0),
        _gradient_of(start, d_start, emissions),
        _gradient_of(end, d_end, emissions),
    )


def _gradient_of(end: Tensor | None, gradient: Tensor, emissions: Tensor) -> Tensor:
    """Return the gradient of an end as a tensor of its own, which is empty if there is no end."""
    return emissions.new_empty(0) if end is None else gradient.to(end.dtype, copy=True)


def linear_chain_viterbi(chain: LinearChainPotentials) -> tuple[Tensor, Tensor]:
    """Return the best score `[N]` and the states of the best path `[T, N]`.

    States are -1 past the length and for a chain without a path. Ties go to the lowest state before
    each state, then to the lowest last state.
    """
    score, states, _ = sparse.best_path(linear_chain_inputs(chain, Max))
    return score.to(acc_dtype(chain.emissions.dtype)), states


def linear_chain_nbest(chain: LinearChainPotentials, k: int) -> tuple[Tensor, Tensor]:
    """Return the scores and states of the k best paths, as in `best_paths` of sparse chains."""
    return sparse.best_paths(linear_chain_inputs(chain, Max), k)[:2]


def linear_chain_sample(chain: LinearChainPotentials, uniforms: Tensor) -> Tensor:
    """Return the states `[k, T, N]` of k paths from the posterior.

    The last state is drawn first, then the state before each state. The state of token t is drawn
    by the uniform number of token t, `[T, k, N]`.
    """
    x = linear_chain_inputs(chain, Log)
    last = x.active.sum(0).expand(1, *uniforms.shape[1:])
    return sparse.sample_paths(x, uniforms, uniforms.gather(0, last)[0])[0]


def linear_chain_tangent(
    grad_output: Tensor, chain: LinearChainPotentials, values: LinearChainValues
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the mean of the values `[N]`, and its gradients weighted by grad_output, in fp64.

    A path has the sum of its values. The derivative of log Z in the direction of the values is
    their posterior mean.
    """
    emissions, transitions, start, end, _ = chain
    x = linear_chain_inputs(chain, Log)
    first = values.emission_values[0].double()
    if values.start_values is not None:
        first = first + values.start_values.double()
    last = torch.zeros_like(first) if values.end_values is None else values.end_values.double()
    edges = _edges(values.emission_values, values.transition_values, transitions.ndim > 2)
    of_edges = sparse.Values(edges, first, last)
    gradients = sparse.covariances(x, of_edges, grad_output)
    d_emissions, d_transitions, d_start, d_end = _sum_edges(gradients, len(emissions), transitions)
    return (
        sparse.mean_value(x, of_edges),
        d_emissions,
        d_transitions.sum(0) if transitions.ndim == 2 else d_transitions,
        d_start.new_empty(0) if start is None else d_start.clone(),
        d_end.new_empty(0) if end is None else d_end.clone(),
    )


def path_score(chain: LinearChainPotentials, states: Tensor) -> Tensor:
    """Return the score of paths with the states `[..., T, N]`, `[..., N]` fp64.

    States past a length are ignored. The score is -inf for a state that is out of range, and NaN
    for an invalid length.
    """
    emissions, transitions, start, end, lengths = chain
    T, N, C = emissions.shape
    lengths = full_lengths(emissions, lengths)
    invalid = (lengths < 1) | (lengths > T)
    sequence = torch.arange(N, device=states.device)
    token = torch.arange(T, device=states.device)[:, None]
    active = token < lengths
    if not C:
        return emissions.new_full((*states.shape[:-2], N), -torch.inf, dtype=torch.float64)
    index = states.clamp(0, C - 1)
    possible = ((index == states) | ~active).all(-2)
    total = torch.where(active, emissions[token, sequence, index].double(), 0.0).sum(-2)
    before, after = index[..., :-1, :], index[..., 1:, :]
    # The gradient of a shared number is a sum over many steps, so it is formed in fp64.
    if transitions.ndim == 2:
        steps = transitions.double()[before, after]
    elif transitions.ndim == 3:
        steps = transitions.double()[token[:-1], before, after]
    else:
        steps = transitions[token[:-1], sequence, before, after]
    total = total + torch.where(active[1:], steps.double(), 0.0).sum(-2)
    if start is not None:
        total = total + start[sequence, index[..., 0, :]].double()
    if end is not None:
        last = (lengths - 1).clamp(0, T - 1).expand(*index.shape[:-2], 1, N)
        total = total + end[sequence, index.gather(-2, last).squeeze(-2)].double()
    return torch.where(possible, total, -torch.inf).masked_fill(invalid, torch.nan)
