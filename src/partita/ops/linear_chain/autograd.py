"""The registered ops of dense linear chains and their autograd functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...paths.autograd import (
    best_paths_of,
    gradients,
    log_partitions_of,
    off_path,
    on_path,
    ones,
    refuse_kernels,
    save_log_partition,
)
from ...paths.inputs import full_lengths
from ...primitives.semiring import Max, Semiring, differentiable
from ...runtime import checks, register
from ...runtime.autograd import (
    call,
    double_backward,
    for_gradients,
    is_double_backward,
    needed_gradients,
    one_by_one,
    refuse_forward_mode,
    saved_tensors,
    skip_unused_gradients,
    sum_of_gradients,
    takes,
)
from ...runtime.backend import current_backend, resolve
from ...runtime.constants import scalar
from ...runtime.dtypes import acc_dtype
from ..chain import reference as sparse
from . import common, reference
from .common import LinearChainPotentials


def check_values(emissions: Tensor, lengths: Tensor | None) -> None:
    """Raise for a length that is out of range, where values are checked."""
    if lengths is not None:
        checks.within("lengths", lengths, 1, emissions.shape[0], "tokens")


def _cpu() -> ModuleType:
    from .cpu import dense

    return dense


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch if common.HAS_KERNELS else reference


def _gpu_paths() -> ModuleType:
    from .gpu import launch_paths

    return launch_paths if common.HAS_KERNELS else reference


_define = partial(register.define, cpu=_cpu, vmap=one_by_one)
_checked = partial(_define, check=check_values, reference_if_empty=True)
logz = _checked(reference.linear_chain_logz, common.fake_logz, gpu=_gpu)
logz_gradient = _define(reference.linear_chain_gradient, common.fake_gradient, gpu=_gpu)
viterbi = _checked(reference.linear_chain_viterbi, common.fake_viterbi, gpu=_gpu_paths)
# On a GPU the reference finds the k best paths.
best_paths = _checked(reference.linear_chain_nbest, common.fake_nbest, gpu=lambda: reference)
sample = _checked(reference.linear_chain_sample, common.fake_sample, gpu=_gpu_paths)
tangent = _define(reference.linear_chain_tangent, common.fake_tangent, gpu=_gpu)


class LogZ(torch.autograd.Function):
    """Log Z of each sequence, `[N]`, in fp64 and in the dtype of results."""

    generate_vmap_rule = True
    setup_context = staticmethod(save_log_partition)

    @staticmethod
    @takes(logz)
    def forward(*args: Any) -> Any:
        return logz(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output = sum_of_gradients(*grads[:2])
        if grad_output is None:
            return (None,) * 7
        tensors = saved_tensors(ctx)
        needed = needed_gradients(ctx, *tensors[:4])
        args = (grad_output, *tensors, needed[1], False, ctx.backend)

        def log_partition(*scores: Any) -> Tensor:
            chain = LinearChainPotentials._make([*scores, tensors[4]])
            return reference.linear_chain_logz(chain, False)[0]

        results = gradients(logz_gradient, Marginals, log_partition, tensors[:4], *args)
        pairs = zip(results, needed, strict=True)
        return *(grad if need else None for grad, need in pairs), None, None, None


class Marginals(torch.autograd.Function):
    """The gradient of log Z, which can be differentiated again.

    Its product with values is their posterior mean, so its gradient is the gradient of that mean.
    """

    generate_vmap_rule = True

    @staticmethod
    @takes(logz_gradient)
    def forward(*args: Any) -> Any:
        return logz_gradient(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _, _, ctx.need_transitions, ctx.per_sequence, ctx.backend = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *values: Tensor) -> tuple[Any, ...]:
        grad_output, *chain = saved_tensors(ctx)
        *scores, lengths = chain
        _, transitions, start, end = scores
        emission_values, transition_values, start_values, end_values = values
        zero = scalar(0.0, transitions.dtype, transitions.device)
        directions = (
            emission_values,
            transition_values if ctx.need_transitions else zero.expand(transitions.shape),
            None if start is None else start_values,
            None if end is None else end_values,
        )
        variables = (grad_output, *scores)
        if is_double_backward(*variables, *values):
            present = (True, ctx.need_transitions, start is not None, end is not None)

            def specification(*variables: Any) -> list[Tensor]:
                grad_output, *scores = variables
                chain = LinearChainPotentials._make([*scores, lengths])
                unread = (grad_output, grad_output)  # log Z and what was saved
                options = (ctx.need_transitions, ctx.per_sequence)
                found = reference.linear_chain_gradient(grad_output, chain, *unread, *options)
                return list(itertools.compress(found, present))

            upstream = list(itertools.compress(values, present))
            needed = ctx.needs_input_grad[:5]
            return *double_backward(specification, variables, needed, upstream), *(None,) * 6
        op = for_gradients(tangent, *values)
        mean, *results = op(grad_output, *chain, *directions, ctx.backend)
        pairs = zip(results, scores, strict=True)
        d_scores = (None if score is None else x.to(score.dtype) for x, score in pairs)
        return mean.to(grad_output.dtype), *d_scores, *(None,) * 6


class BestScore(torch.autograd.Function):
    """The best score of each sequence, `[N]`; its gradient is the indicator of the best path."""

    generate_vmap_rule = True

    @staticmethod
    @takes(viterbi)
    def forward(*args: Any) -> Any:
        return viterbi(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        emissions, transitions, start, end, lengths, _ = inputs
        score, states = output
        ctx.mark_non_differentiable(states)
        skip_unused_gradients(ctx)
        ctx.likes = [
            None if t is None else (t.shape, t.dtype) for t in (emissions, transitions, start, end)
        ]
        ctx.save_for_backward(score, states, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output = grads[0]
        if grad_output is None:
            return (None,) * 6
        score, states, lengths = saved_tensors(ctx)
        emissions, transitions, start, end = ctx.likes
        T, _, C = emissions[0]
        unused = off_path(score, full_lengths(states, lengths), T, first=1).double()
        d_path = on_path(grad_output.double(), states, unused, C, torch.float64)
        follows = torch.cat([states[1:], torch.full_like(states[:1], -1)]) >= 0
        d_end = d_path.masked_fill(follows[..., None], 0.0).sum(0)
        after = on_path(torch.ones_like(score).double(), states, unused, C, torch.float64)[1:]
        before = torch.where((states >= 0)[:-1, :, None], d_path[:-1], 0.0)
        if len(transitions[0]) == 2:
            # PyTorch's scatter would add in an order that varies on a GPU; a product does not.
            d_transitions = before.reshape(-1, C).T @ after.reshape(-1, C)
        elif len(transitions[0]) == 3:
            d_transitions = before.transpose(1, 2) @ after
        else:
            d_transitions = before[..., None] * after[:, :, None]
        return (
            d_path.to(emissions[1]),
            d_transitions.to(transitions[1]),
            None if start is None else d_path[0].to(start[1]),
            None if end is None else d_end.to(end[1]),
            None,
            None,
        )


log_partitions = partial(log_partitions_of, logz, LogZ)


def best_path(chain: LinearChainPotentials) -> tuple[Tensor, ...]:
    """Return the best score and the states of each sequence."""
    return viterbi(*chain, current_backend())


def draw(
    chain: LinearChainPotentials, k: int, uniform: Callable[..., Tensor]
) -> tuple[Tensor, ...]:
    """Return the states of k paths, drawn by the numbers of `uniform(*shape)`."""
    T, N, _ = chain.emissions.shape
    return (sample(*chain, uniform(T, k, N), current_backend()),)


def partition(chain: LinearChainPotentials, semiring: Semiring) -> Tensor:
    """Return the sum over all paths under a semiring but Log in the dtype of results, `[N]`."""
    if semiring == Max:
        args = (*chain, current_backend())
        return call(viterbi, BestScore, chain.variables, *args)[0]
    refuse_kernels("this semiring")
    semiring = differentiable(semiring)
    result = sparse.log_partition(reference.linear_chain_inputs(chain, semiring), semiring)
    return result.to(acc_dtype(chain.emissions.dtype))


def marginals(
    chain: LinearChainPotentials, need_transitions: bool, per_sequence: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of log Z of each sequence, which are differentiable.

    They are those in emissions, transitions (if needed), start and end. With `per_sequence` those
    in constant transitions are `[N, C, C]`.
    """
    backend = current_backend()
    with torch.no_grad():
        fp64, _, saved = logz(*chain, True, backend)
    args = (ones(chain.emissions), *chain, fp64, saved, need_transitions, per_sequence, backend)
    return call(logz_gradient, Marginals, chain.variables, *args)


@torch.no_grad()
def expectation_step(chain: LinearChainPotentials) -> tuple[Tensor, ...]:
    """Return log Z `[N]` in fp64 and its gradients, for which autograd records nothing.

    They are those of Σ log Z in emissions, transitions, start and end.
    """
    backend = current_backend()
    fp64, _, saved = logz(*chain, True, backend)
    args = (ones(chain.emissions), *chain, fp64, saved, True, False, backend)
    return fp64, *logz_gradient(*args)


@torch.no_grad()
def expectation_of_symbols(
    table: Tensor, symbols: Tensor, transitions: Tensor, start: Tensor, lengths: Tensor | None
) -> tuple[Tensor, ...] | None:
    """Return log Z `[N]` and the gradients of its sum where emissions are rows of a table.

    Args:
        table: the emissions of each symbol, `[K, C]` fp64.
        symbols: those of the tokens, `[N, T]` int64, in range past the lengths too.
        transitions, start, lengths: as in `LinearChainPotentials`, in fp64.

    Returns:
        Log Z, and the gradients in table, transitions and start; None where no kernel serves them.
    """
    if resolve(current_backend(), table.device, has_cpu=True) != "cpu":
        return None
    found: tuple[Tensor, ...] | None = _cpu().expectation_of_symbols(
        table, symbols, transitions, start, lengths
    )
    return found


def mean_of_values(chain: LinearChainPotentials, *values: Tensor | None) -> Tensor:
    """Return the posterior mean of the sum of values along a path, `[N]` fp64.

    The values are those of emissions, transitions, start and end; 0 times ±inf is 0.
    """
    refuse_forward_mode(*chain.variables, *values)
    scores = (None if x is None else x.double() for x in chain.variables)
    chain = LinearChainPotentials._make([*scores, chain.lengths]).with_ends()
    constant = chain.transitions.ndim == 2
    chain = chain if constant else chain.of_sequences()
    means = []
    for i, posterior in enumerate(marginals(chain, need_transitions=True, per_sequence=True)):
        value = values[i]
        if value is not None:
            value = value.unsqueeze(1) if i == 1 and value.ndim == 3 else value  # of each token
            terms = posterior * torch.where(posterior == 0, 0.0, value)
            terms = terms.transpose(0, 1) if i == 0 or (i == 1 and not constant) else terms
            means.append(terms.flatten(1).sum(1))
    return torch.stack(means).sum(0)


def mean_and_log_partition(
    chain: LinearChainPotentials, values: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor]:
    """Return what `mean_of_values` returns, and log Z in fp64."""
    return mean_of_values(chain, *values), log_partitions(chain)[0]


nbest = partial(best_paths_of, best_paths, reference.linear_chain_nbest, check_values)
