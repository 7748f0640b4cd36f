"""Quantities of dense linear chains, computed by the registered ops.

Log Z and means stay in fp64, so that differences of them are formed before they are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.semiring import Log, Max, Semiring, differentiable
from ...runtime.autograd import (
    apply,
    needs_no_derivative,
    refuse_forward_mode,
    requires_grad,
)
from ...runtime.backend import current_backend
from ...runtime.constants import scalar
from ...runtime.dtypes import acc_dtype
from . import autograd, reference
from .inputs import LinearChainTensors, full_lengths
from .paths import best_paths, path_score


def _needs_no_derivative(chain: LinearChainTensors) -> bool:
    return needs_no_derivative(chain.emissions, chain.transitions, chain.start, chain.end)


def _needs_gradient(chain: LinearChainTensors) -> bool:
    return torch.is_grad_enabled() and any(map(requires_grad, chain[:4]))


def _refuse_kernels(name: str) -> None:
    """Raise where a backend was chosen by name that has no kernel for a quantity."""
    backend = current_backend()
    if backend in ("triton", "numba"):
        raise RuntimeError(
            f"backend {backend!r}: {name} has no kernel;"
            " it runs in PyTorch (backend 'auto' or 'reference')"
        )


def _log_partition(chain: LinearChainTensors, is_exact: bool) -> Tensor:
    """Return log Z, `[N]`, in fp64 if it is exact and else in the dtype of results."""
    backend = current_backend()
    if _needs_no_derivative(chain):
        return autograd.logz(*chain, False, backend)[0 if is_exact else 1]
    return apply(autograd.LogZ, *chain, _needs_gradient(chain), backend)[0 if is_exact else 1]


def log_partition(chain: LinearChainTensors) -> Tensor:
    """Return log Z, `[N]` fp64, of which differences may be formed."""
    return _log_partition(chain, is_exact=True)


def partition(chain: LinearChainTensors, semiring: Semiring) -> Tensor:
    """Return the sum over all paths under a semiring in the dtype of results, `[N]`."""
    if semiring == Log:
        return _log_partition(chain, is_exact=False)
    backend = current_backend()
    if semiring == Max:
        if _needs_no_derivative(chain):
            return autograd.viterbi(*chain, backend)[0]
        return apply(autograd.BestScore, *chain, backend)[0]
    _refuse_kernels("this semiring")
    result = reference.generic_partition(*chain, differentiable(semiring))
    return result.to(acc_dtype(chain.emissions.dtype))


def marginals(
    chain: LinearChainTensors, need_transitions: bool, per_sequence: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of log Z of each sequence, which are differentiable.

    They are those in emissions, transitions (if needed), start and end. With `per_sequence` those
    in constant transitions are `[N, C, C]`.
    """
    emissions, backend = chain.emissions, current_backend()
    ones = scalar(1.0, torch.float64, emissions.device).expand(emissions.shape[1])
    with torch.no_grad():
        fp64, _, saved = autograd.logz(*chain, True, backend)
    args = (ones, *chain, fp64, saved, need_transitions, per_sequence, backend)
    if _needs_no_derivative(chain):
        return autograd.logz_gradient(*args)
    return apply(autograd.Marginals, *args)


def transitions_of_sequences(chain: LinearChainTensors) -> LinearChainTensors:
    """Return the chain with transitions `[T - 1, N, C, C]`, a view without memory of that size."""
    T, N, C = chain.emissions.shape
    transitions = chain.transitions
    if transitions.ndim == 3:
        transitions = transitions.unsqueeze(1)
    return chain._replace(transitions=transitions.expand(T - 1, N, C, C))


def with_ends(chain: LinearChainTensors) -> LinearChainTensors:
    """Return the chain with zeros for ends that are None."""
    shape = chain.emissions.shape[1:]
    dtype = acc_dtype(chain.emissions.dtype)
    # Each end is a tensor of its own: compilers refuse one tensor for two arguments.
    zero = scalar(0.0, dtype, chain.emissions.device)
    start, end = (zero.expand(shape) if x is None else x for x in (chain.start, chain.end))
    return chain._replace(start=start, end=end)


def expectation(
    chain: LinearChainTensors,
    emission_values: Tensor,
    transition_values: Tensor,
    start_values: Tensor | None,
    end_values: Tensor | None,
) -> Tensor:
    """Return the posterior mean of the sum of values along a path, `[N]` fp64."""
    values = (emission_values, transition_values, start_values, end_values)
    refuse_forward_mode(*chain[:4], *values)
    return apply(autograd.Expectation, *chain, *values, current_backend())


def entropy(chain: LinearChainTensors) -> Tensor:
    """Return the entropy of the paths in nats, `[N]` fp64: log Z minus the mean score."""
    # Each value is a view of its own, because Dynamo refuses a tensor that is two arguments.
    values = [None if t is None else t.expand(t.shape) for t in chain[:4]]
    assert values[0] is not None and values[1] is not None
    mean, logz = expectation(chain, values[0], values[1], *values[2:]), log_partition(chain)
    return torch.where(logz == -torch.inf, 0.0, logz - mean)


def _difference(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else -b.double()
    return a.double() - b.double()


def kl(chain: LinearChainTensors, other: LinearChainTensors) -> Tensor:
    """Return KL(chain ‖ other) of the paths in nats, `[N]` fp64; NaN where lengths differ."""
    same = full_lengths(chain) == full_lengths(other)
    if other.transitions.ndim != chain.transitions.ndim:
        chain, other = transitions_of_sequences(chain), transitions_of_sequences(other)
    mean = expectation(
        chain,
        chain.emissions.double() - other.emissions.double(),
        chain.transitions.double() - other.transitions.double(),
        _difference(chain.start, other.start),
        _difference(chain.end, other.end),
    )
    logz = log_partition(chain)
    divergence = mean - logz + log_partition(other)
    divergence = torch.where(mean == torch.inf, torch.inf, divergence)
    divergence = torch.where(logz == -torch.inf, 0.0, divergence)
    return torch.where(same, divergence, torch.nan)


def log_prob(chain: LinearChainTensors, states: Tensor) -> Tensor:
    """Return the log-probability of the paths with the states `[..., T, N]`, `[..., N]` fp64."""
    logz = log_partition(chain)
    # A path that is given is not a path of a chain that has none.
    return torch.where(logz == -torch.inf, -torch.inf, path_score(chain, states) - logz)


def nbest(chain: LinearChainTensors, k: int) -> tuple[Tensor, Tensor]:
    """Return the scores and states of the k best paths, as in `best_paths`."""
    backend = current_backend()
    if chain.emissions.device.type == "cpu" and backend != "triton":
        return autograd.best_paths(*chain, k, backend)
    _refuse_kernels("nbest")
    autograd.check_values(chain.emissions, chain.lengths)
    return best_paths(chain, k)
