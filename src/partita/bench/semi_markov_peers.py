"""Semi-Markov chains by others: a loop over the steps, torch-struct and flash-semicrf.

All functions take emissions `[T, N, C]`, transitions `[C, C]`, durations `[D, C]`, start and end
`[C]`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import linear_chain_peers

MAX_CHART = (
    2**31
)  # numbers in the chart of torch-struct, which has matrices of (D C)² for each step


class SemiMarkovInputs(NamedTuple):
    emissions: Tensor
    transitions: Tensor
    durations: Tensor
    start: Tensor
    end: Tensor


Function = Callable[..., Tensor]


def loop_logz(
    emissions: Tensor, transitions: Tensor, durations: Tensor, start: Tensor, end: Tensor
) -> Tensor:
    """Compute log Z, `[N]`, by two log-sum-exps for each step, over `[D, N, C]` and `[N, C, C]`."""
    emissions = emissions.to(transitions.dtype)
    opened, ages = start.expand(emissions.shape[1:]), emissions[:0]
    for emission in emissions:
        ages = torch.cat([opened[None], ages[: len(durations) - 1]]) + emission
        closed = (ages + durations[: len(ages), None]).logsumexp(0)
        opened = (closed[:, :, None] + transitions).logsumexp(1)
    return (closed + end).logsumexp(-1)


def _potentials(
    emissions: Tensor, transitions: Tensor, durations: Tensor, start: Tensor, end: Tensor
) -> Tensor:
    """Return the log-potentials of torch-struct, `[N, T, D + 1, C, C]` (new, old)."""
    T, _, C = emissions.shape
    D = len(durations)
    padded = torch.nn.functional.pad(emissions.to(transitions.dtype), (0, 0, 0, 0, 0, D))
    # Entry [t, d - 1] is the sum of the emissions of d steps from step t on.
    sums = torch.stack([padded[d : T + d] for d in range(D)]).cumsum(0).transpose(0, 1)
    length = torch.arange(1, D + 1, device=emissions.device)
    last = torch.arange(T, device=emissions.device)[:, None] + length
    scores = sums + durations[:, None] + torch.where((last == T)[..., None, None], end, 0.0)
    scores = torch.where((last <= T)[..., None, None], scores, -torch.inf)
    # The first segment comes from state 0 alone.
    first = torch.full_like(transitions, -torch.inf)
    first = torch.cat([start[:, None], first[:, 1:]], 1)
    entered = torch.cat([first[None], transitions.T.expand(T - 1, C, C)])
    edges = scores[..., None] + entered[:, None, None]  # [T, D, N, C, C]
    edges = edges.permute(2, 0, 1, 3, 4)
    return torch.cat([torch.full_like(edges[:, :, :1], -torch.inf), edges], 2)


def torch_struct_logz() -> Function:
    chain: Any = importlib.import_module("torch_struct").SemiMarkovCRF
    return lambda *inputs: chain(_potentials(*inputs)).partition


def flash_semicrf_logz() -> Function:
    """Return log Z of flash-semicrf, from prefix sums of the emissions in fp64.

    It enters the first segment by a transition from any state, whose sum is taken off here.
    """
    library: Any = importlib.import_module("flash_semicrf")

    def function(
        emissions: Tensor, transitions: Tensor, durations: Tensor, start: Tensor, end: Tensor
    ) -> Tensor:
        T, N, C = emissions.shape
        sums = torch.nn.functional.pad(emissions.double().cumsum(0), (0, 0, 0, 0, 1, 0))
        zeros = emissions.new_zeros(T - 1, C, dtype=transitions.dtype)
        first = torch.cat([(start - transitions.logsumexp(0))[None], zeros])
        last = torch.cat([zeros, end[None]])
        lengths = torch.full((N,), T, device=emissions.device)
        logz = library.semi_crf_streaming_forward(
            sums.transpose(0, 1).contiguous(),
            transitions,
            durations,
            lengths,
            len(durations),
            proj_start=first.expand(N, T, C).contiguous(),
            proj_end=last.expand(N, T, C).contiguous(),
        )
        return logz.to(transitions.dtype)

    return function


def beyond_flash_semicrf(inputs: SemiMarkovInputs) -> str | None:
    """Return why flash-semicrf is not timed: its CPU path is a loop over steps and durations."""
    return None if inputs.emissions.is_cuda else "needs a GPU"


def beyond_torch_struct(inputs: Any) -> str | None:
    """Return why torch-struct cannot take these inputs, or None."""
    if not isinstance(inputs, SemiMarkovInputs):
        return linear_chain_peers.beyond_torch_struct(inputs)
    T, N, C = inputs.emissions.shape
    if T * N * (len(inputs.durations) * C) ** 2 > MAX_CHART:
        return "would hold (D C)² numbers for each step"
    return None
