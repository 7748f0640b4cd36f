"""Quantities of chains in fp64, computed by the registered ops.

All results but the marginals stay in fp64, so that differences of them are formed before they are
rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...paths.autograd import call, needs_gradient, ones, refuse_kernels
from ...primitives.semiring import Log, Max, Semiring, differentiable
from ...runtime.autograd import refuse_forward_mode
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from . import autograd, reference
from .inputs import ChainPotentials


def partition(chain: ChainPotentials, semiring: Semiring) -> Tensor:
    """Return the sum over all paths under a semiring but Log in the dtype of results, `[N]`."""
    if semiring == Max:
        args = (*chain, needs_gradient(*chain.variables), current_backend())
        return call(autograd.viterbi, autograd.BestScore, chain.variables, *args)[0]
    inputs = scan_inputs(chain, semiring, "this semiring")
    result = reference.log_partition(inputs, differentiable(semiring))
    return result.to(acc_dtype(chain.scores.dtype))


def marginals(chain: ChainPotentials) -> Tensor:
    """Return the posterior of each edge, `[T, N, C, K]`, in the dtype of results."""
    scores, source, initial, final, lengths = chain
    backend, dtype = current_backend(), acc_dtype(scores.dtype)
    logz, _, saved = autograd.logz(*chain, True, backend)
    tensors = (scores, initial, final, source, lengths, logz, saved)
    return autograd.logz_gradient(ones(scores), *tensors, dtype, backend)[0]


def state_scores(chain: ChainPotentials, semiring: Semiring, *, reverse: bool) -> Tensor:
    """Return alpha, or beta if `reverse`, `[T + 1, N, C]`.

    Kernels serve Log and Max without a gradient; a scan in PyTorch serves the rest.
    """
    has_kernel = semiring in (Log, Max)
    if has_kernel and not needs_gradient(*chain.variables):
        refuse_forward_mode(*chain.variables)
        return autograd.scan(*chain, semiring == Max, reverse, current_backend())
    name = "a derivative of the scores of states" if has_kernel else "this semiring"
    inputs = scan_inputs(chain, semiring, name)
    scan = reference.backward_scores if reverse else reference.forward_scores
    return torch.stack(scan(inputs, differentiable(semiring)))


def expectation(chain: ChainPotentials, *values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the values along a path and log Z, `[N]`; log Z has no gradient.

    The values are those of the edges `[T, N, C, K]`, and of the first and the last states `[N, C]`.
    """
    variables = (*chain.variables, *values)
    args = (*chain, *values, needs_gradient(*variables), current_backend())
    return call(autograd.expectation, autograd.Expectation, variables, *args)[:2]


def nbest(chain: ChainPotentials, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores, states and edges of the k best paths, as in `reference.best_paths`."""
    return reference.best_paths(scan_inputs(chain, Max, "nbest"), k)


def scan_inputs(chain: ChainPotentials, semiring: Semiring, name: str) -> reference.ChainInputs:
    """Return the inputs of a scan in PyTorch, which serves what no backend has a kernel for.

    Args:
        chain: the chains.
        semiring: the semiring of the scan.
        name: the name of the quantity in the error of a backend that was chosen by name.
    """
    refuse_kernels(name)
    autograd.check_values(chain.scores, chain.source, chain.lengths)
    return reference.chain_inputs(*chain, semiring)
