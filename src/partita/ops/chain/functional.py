"""Quantities of chains in fp64, computed by the registered ops.

All results but the marginals stay in fp64, so that differences of them are formed before they are
rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.semiring import Log, Max, Semiring, differentiable
from ...runtime.autograd import apply, refuse_forward_mode
from ...runtime.backend import current_backend
from ...runtime.constants import scalar
from ...runtime.dtypes import acc_dtype
from . import autograd, reference
from .autograd import calls_op, chain_needs_gradient, needs_gradient, scan_inputs
from .inputs import ChainTensors, full_lengths


def log_partitions(chain: ChainTensors) -> tuple[Tensor, ...]:
    """Return log Z in fp64, of which differences may be formed, and in the dtype of results."""
    save, backend = chain_needs_gradient(chain), current_backend()
    if calls_op(save, chain.scores, chain.initial, chain.final):
        return autograd.logz(*chain, save, backend)[:2]
    return apply(autograd.LogZ, *chain, save, backend)[:2]


def partition(chain: ChainTensors, semiring: Semiring) -> Tensor:
    """Return the sum over all paths under a semiring in the dtype of results, `[N]`."""
    if semiring == Log:
        return log_partitions(chain)[1]
    if semiring == Max:
        trace, backend = chain_needs_gradient(chain), current_backend()
        if calls_op(trace, chain.scores, chain.initial, chain.final):
            return autograd.viterbi(*chain, trace, backend)[0]
        return apply(autograd.BestScore, *chain, trace, backend)[0]
    inputs = scan_inputs(chain, semiring, "this semiring")
    result = reference.log_partition(inputs, differentiable(semiring))
    return result.to(acc_dtype(chain.scores.dtype))


def marginals(chain: ChainTensors) -> Tensor:
    """Return the posterior of each edge, `[T, N, C, K]`, in the dtype of results."""
    scores, source, initial, final, lengths = chain
    backend, dtype = current_backend(), acc_dtype(scores.dtype)
    ones = scalar(1.0, torch.float64, scores.device).expand(scores.shape[1])
    logz, _, saved = autograd.logz(*chain, True, backend)
    tensors = (scores, initial, final, source, lengths, logz, saved)
    return autograd.logz_gradient(ones, *tensors, dtype, backend)[0]


def state_scores(chain: ChainTensors, semiring: Semiring, *, reverse: bool) -> Tensor:
    """Return alpha, or beta if `reverse`, `[T + 1, N, C]`.

    Kernels serve Log and Max without a gradient; a scan in PyTorch serves the rest.
    """
    has_kernel = semiring in (Log, Max)
    if has_kernel and not chain_needs_gradient(chain):
        refuse_forward_mode(chain.scores, chain.initial, chain.final)
        return autograd.scan(*chain, semiring == Max, reverse, current_backend())
    name = "a derivative of the scores of states" if has_kernel else "this semiring"
    inputs = scan_inputs(chain, semiring, name)
    scan = reference.backward_scores if reverse else reference.forward_scores
    return torch.stack(scan(inputs, differentiable(semiring)))


def expectation(
    chain: ChainTensors, values: Tensor, first_values: Tensor, last_values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the mean of the values along a path and log Z, `[N]`; log Z has no gradient."""
    numbers = (values, first_values, last_values)
    save = chain_needs_gradient(chain) or needs_gradient(*numbers)
    backend = current_backend()
    if calls_op(save, chain.scores, chain.initial, chain.final, *numbers):
        return autograd.expectation(*chain, *numbers, save, backend)[:2]
    return apply(autograd.Expectation, *chain, *numbers, save, backend)[:2]


def entropy(chain: ChainTensors) -> Tensor:
    """Return the entropy of the paths in nats, `[N]`: log Z minus the mean score."""
    # Each value is a view of its own, because Dynamo refuses a tensor that is two arguments.
    scores, initial, final = (t.expand(t.shape) for t in (chain.scores, chain.initial, chain.final))
    mean, logz = expectation(chain, scores, initial, final)
    if chain_needs_gradient(chain):
        logz = log_partitions(chain)[0]
    return torch.where(logz == -torch.inf, 0.0, logz - mean)


def kl(chain: ChainTensors, other: ChainTensors) -> Tensor:
    """Return KL(chain ‖ other) of the paths in nats, `[N]`; NaN where edges or lengths differ."""
    mean, logz = expectation(
        chain,
        chain.scores.double() - other.scores.double(),
        chain.initial.double() - other.initial.double(),
        chain.final.double() - other.final.double(),
    )
    if chain_needs_gradient(chain):
        logz = log_partitions(chain)[0]
    divergence = mean - logz + log_partitions(other)[0]
    divergence = torch.where(mean == torch.inf, torch.inf, divergence)
    divergence = torch.where(logz == -torch.inf, 0.0, divergence)
    same_source = other.source is chain.source or (chain.source == other.source).all()
    same = (full_lengths(chain) == full_lengths(other)) & same_source
    return torch.where(same, divergence, torch.nan)


def log_prob(chain: ChainTensors, edges: Tensor, first_state: Tensor | None) -> Tensor:
    """Return the log-probability of paths in nats, `[..., N]`.

    Args:
        chain: the chains.
        edges: `[..., T, N]`.
        first_state: `[..., N]`, or None. Without it the path of a chain of no steps is unknown,
            and its log-probability is 0 if the chain has a path.
    """
    score = reference.path_score(*chain, edges, first_state)
    logz = log_partitions(chain)[0]
    # A path that is given is not a path of a chain that has none.
    result = torch.where(logz == -torch.inf, -torch.inf, score - logz)
    if first_state is not None:
        return result
    return torch.where((full_lengths(chain) == 0) & (logz > -torch.inf), 0.0, result)


def nbest(chain: ChainTensors, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores, states and edges of the k best paths, as in `reference.best_paths`."""
    backend = current_backend()
    if chain.scores.device.type == "cpu" and backend != "triton":
        return autograd.best_paths(*chain, k, backend)
    return reference.best_paths(scan_inputs(chain, Max, "nbest"), k)
