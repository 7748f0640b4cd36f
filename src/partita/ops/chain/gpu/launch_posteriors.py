"""Launch the kernels for the posteriors of states and for beta, without posteriors of edges."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....primitives.gpu.target import target_of
from ....runtime.launch import launch
from ..common import ChainPotentials
from .arguments import resident_arguments
from .edge_table import edge_table
from .plan import resident_options
from .resident_posteriors import (
    chain_resident_backward_kernel,
    chain_resident_posteriors_kernel,
)
from .resident_scan import chain_resident_halves_kernel, chain_resident_logz_kernel

SUMMED_STATES = 4  # of which one kernel stores the sum


class PosteriorBuffers(NamedTuple):
    """The memory for posteriors of states.

    Fields:
        saved: `[T + 1, N, C]` int64, alpha up to the meeting point and beta after it.
        logz: `[N]` fp64.
        posteriors: `[T + 1, N, C]` fp32, or `[T + 1, N, C / 4]` if each is a sum over four states,
            which equal its column modulo 4. Not written past the length.
        first: `[N, C]` fp32, the posteriors of the states at time 0.
    """

    saved: Tensor
    logz: Tensor
    posteriors: Tensor
    first: Tensor


def posterior_buffers(scores: Tensor, source: Tensor, modulus: int) -> PosteriorBuffers | None:
    """Allocate for `launch_posteriors`, or return None where its kernels do not serve the call.

    Args:
        modulus: the caller adds the posteriors of the states that are equal modulo this number.
            Where they can, the kernels add four of them at a time.
    """
    T, N, C, _ = scores.shape
    table = edge_table(source)
    resident = resident_options(scores, table.max_out_degree, target_of(scores.device))
    if table.has_invalid or resident is None:
        return None
    can_sum = SUMMED_STATES % modulus == 0 and C == resident["BLOCK_C"]
    columns = C // SUMMED_STATES if can_sum else C
    return PosteriorBuffers(
        torch.empty((T + 1, N, C), dtype=torch.int64, device=scores.device),
        torch.empty(N, dtype=torch.float64, device=scores.device),
        torch.empty((T + 1, N, columns), dtype=torch.float32, device=scores.device),
        torch.empty((N, C), dtype=torch.float32, device=scores.device),
    )


def launch_posteriors(
    chain: ChainPotentials, buffers: PosteriorBuffers, *, are_saved: bool
) -> None:
    """Fill in the posteriors of the states at each time.

    Args:
        are_saved: whether `buffers.saved` is filled in, as `chain_viterbi` does.
    """
    scores, table = chain.scores, edge_table(chain.source)
    N = scores.shape[1]
    resident = resident_arguments(chain, table)
    assert resident is not None
    options = {**resident, "saved_ptr": buffers.saved}
    if not are_saved:
        launch(chain_resident_halves_kernel, 2 * N, SAVE=True, **options)
    options["logz_ptr"] = buffers.logz
    unlimited = options | {"maxnreg": None}
    launch(chain_resident_logz_kernel, N, rounded_ptr=None, SAVE=True, **unlimited)
    launch(
        chain_resident_posteriors_kernel,
        2 * N,
        posteriors_ptr=buffers.posteriors,
        first_ptr=buffers.first,
        SUM=buffers.posteriors.shape[2] < scores.shape[2],
        **options,
    )


def launch_backward_scores(chain: ChainPotentials, result: Tensor) -> None:
    """Fill in beta at each time, `[T + 1, N, C]` fp64, of which about 48 bits are right."""
    table = edge_table(chain.source)
    resident = resident_arguments(chain, table)
    assert resident is not None
    launch(
        chain_resident_backward_kernel,
        chain.scores.shape[1],
        result_ptr=result,
        **resident,
    )
