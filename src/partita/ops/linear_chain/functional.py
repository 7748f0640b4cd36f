"""Quantities of dense linear chains, computed by the registered ops.

Log Z and means stay in fp64, so that differences of them are formed before they are rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...paths.autograd import call, ones, refuse_kernels
from ...primitives.semiring import Max, Semiring, differentiable
from ...runtime.autograd import apply, refuse_forward_mode
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ..chain import reference as sparse
from . import autograd, reference
from .inputs import LinearChainPotentials


def partition(chain: LinearChainPotentials, semiring: Semiring) -> Tensor:
    """Return the sum over all paths under a semiring but Log in the dtype of results, `[N]`."""
    if semiring == Max:
        args = (*chain, current_backend())
        return call(autograd.viterbi, autograd.BestScore, chain.variables, *args)[0]
    refuse_kernels("this semiring")
    semiring = differentiable(semiring)
    result = sparse.log_partition(reference.linear_chain_inputs(*chain, semiring), semiring)
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
        fp64, _, saved = autograd.logz(*chain, True, backend)
    args = (ones(chain.emissions), *chain, fp64, saved, need_transitions, per_sequence, backend)
    return call(autograd.logz_gradient, autograd.Marginals, chain.variables, *args)


def expectation(chain: LinearChainPotentials, *values: Any) -> Tensor:
    """Return the posterior mean of the sum of values along a path, `[N]` fp64.

    The values are those of emissions, transitions, start and end.
    """
    refuse_forward_mode(*chain.variables, *values)
    return apply(autograd.Expectation, *chain, *values, current_backend())


def nbest(chain: LinearChainPotentials, k: int) -> tuple[Tensor, Tensor]:
    """Return the scores and states of the k best paths, as in `best_paths` of sparse chains."""
    refuse_kernels("nbest")
    autograd.check_values(chain.emissions, chain.lengths)
    score, states, _ = sparse.best_paths(reference.linear_chain_inputs(*chain, Max), k)
    return score, states
