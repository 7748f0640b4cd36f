"""Decoding of CTC-CRF on a GPU: prefix beam search over k-mers, and the bases of a path."""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime.launch import launch, next_power_of_2
from ..basecalls import Basecalls, empty_basecalls
from .crf_beam import HASHES, INTEGERS, NUMBERS
from .crf_calls import ctc_crf_calls_kernel, ctc_crf_posterior_kernel
from .crf_search import ctc_crf_beam_search_kernel, ctc_crf_beam_trace_kernel
from .plan import kmer_beam_plan

HASH_MASK = -1  # all bits of a hash are compared
BLOCK_STAYS = 32  # steps of a stay that are written together
BLOCK_EDGES, BLOCK_STEPS, BLOCK_STATES = 512, 1024, 256


def ctc_crf_beam_search(
    scores: Tensor, later: Tensor, input_lengths: Tensor, beam_width: int
) -> tuple[Tensor, Tensor]:
    """Return the best path of the best prefix: states `[T + 1, N]` and edges `[T, N]`."""
    T, N, C, A = scores.shape
    plan = kmer_beam_plan(A - 1, beam_width)
    later, input_lengths = later.contiguous(), input_lengths.contiguous()

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=scores.device)

    numbers = empty(torch.float64, N, NUMBERS.value, plan.block_w)
    hashes = empty(torch.int64, N, HASHES.value, plan.block_w)
    integers = empty(torch.int32, N, INTEGERS.value, plan.block_w)
    children = empty(torch.int32, N, plan.block_w, A - 1)
    events = empty(torch.int64, N, T, plan.block_w)
    parents = empty(torch.int32, N, T, plan.block_w)
    states, edges = empty(torch.int64, T + 1, N), empty(torch.int64, T, N)
    launch(
        ctc_crf_beam_search_kernel,
        N,
        scores,
        later,
        input_lengths,
        numbers,
        hashes,
        integers,
        children,
        events,
        parents,
        T,
        C,
        A - 1,
        beam_width,
        HASH_MASK,
        *scores.stride(),
        later.stride(0),
        BLOCK_W=plan.block_w,
        BLOCK_P=plan.block_p,
        BLOCK_J=plan.block_j,
        num_warps=plan.num_warps,
    )
    launch(
        ctc_crf_beam_trace_kernel,
        N,
        integers,
        events,
        input_lengths,
        states,
        edges,
        T,
        N,
        C,
        A - 1,
        BLOCK_W=plan.block_w,
        BLOCK=BLOCK_STAYS,
        num_warps=1,
    )
    return states, edges


def ctc_crf_calls(
    marginals: Tensor, states: Tensor, edges: Tensor, lengths: Tensor, state_len: int
) -> Basecalls:
    """Return the bases of paths: states `[T + 1, N]` and edges `[T, N]`, -1 where there is none."""
    T, N, C, A = marginals.shape
    calls = empty_basecalls(marginals, state_len)
    states, edges, lengths = states.contiguous(), edges.contiguous(), lengths.contiguous()
    sums = torch.empty((2, N, T + 1), dtype=torch.float64, device=marginals.device)
    posterior, totals = sums[0], sums[1]
    launch(
        ctc_crf_posterior_kernel,
        T * N,
        marginals,
        states,
        lengths,
        posterior,
        T,
        N,
        C,
        A - 1,
        *marginals.stride(),
        BLOCK=min(next_power_of_2(C // (A - 1) * A), BLOCK_EDGES),
        num_warps=1,
    )
    launch(
        ctc_crf_calls_kernel,
        N,
        marginals,
        states,
        edges,
        lengths,
        posterior,
        totals,
        *calls,
        T,
        N,
        C,
        A - 1,
        state_len,
        *marginals.stride()[1:],
        BLOCK=BLOCK_STEPS,
        BLOCK_C=BLOCK_STATES,
        BLOCK_K=next_power_of_2(state_len),
        num_warps=4,
    )
    return calls
