"""Prefix beam search of CTC-CRF over k-mers on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....runtime.launch import launch
from .crf_beam import HASHES, INTEGERS, NUMBERS
from .crf_search import ctc_crf_beam_search_kernel, ctc_crf_beam_trace_kernel
from .plan import kmer_beam_plan

HASH_MASK = -1  # all bits of a hash are compared
BLOCK_STAYS = 32  # steps of a stay that are written together


class BeamBuffers(NamedTuple):
    """The memory of a search, with the beam in a block of W prefixes.

    Fields:
        numbers, hashes, integers: `[N, ..., W]`, the two beams and the candidates of each sequence;
            see `KmerMemory`.
        children: `[N, W, bases]` int32.
        events: `[N, T, W]` int64.
        parents: `[N, T, W]` int32.
        states: `[T + 1, N]` int64, the result.
        edges: `[T, N]` int64, the result.
    """

    numbers: Tensor
    hashes: Tensor
    integers: Tensor
    children: Tensor
    events: Tensor
    parents: Tensor
    states: Tensor
    edges: Tensor

    @classmethod
    def empty(cls, scores: Tensor, beam_width: int) -> BeamBuffers:
        """Allocate for scores `[T, N, C, A]`."""
        T, N, _, A = scores.shape
        block = kmer_beam_plan(A - 1, beam_width).block_w

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=scores.device)

        return cls(
            empty(torch.float64, N, NUMBERS.value, block),
            empty(torch.int64, N, HASHES.value, block),
            empty(torch.int32, N, INTEGERS.value, block),
            empty(torch.int32, N, block, A - 1),
            empty(torch.int64, N, T, block),
            empty(torch.int32, N, T, block),
            empty(torch.int64, T + 1, N),
            empty(torch.int64, T, N),
        )


def ctc_crf_beam_search(
    scores: Tensor, later: Tensor, input_lengths: Tensor, beam_width: int
) -> tuple[Tensor, Tensor]:
    """Return the best path of the best prefix: states `[T + 1, N]` and edges `[T, N]`."""
    buffers = BeamBuffers.empty(scores, beam_width)
    launch_beam_search(scores, later.contiguous(), input_lengths.contiguous(), beam_width, buffers)
    return buffers.states, buffers.edges


def launch_beam_search(
    scores: Tensor, later: Tensor, lengths: Tensor, beam_width: int, buffers: BeamBuffers
) -> None:
    """Fill in the path of the best prefix of each sequence."""
    T, N, C, A = scores.shape
    plan = kmer_beam_plan(A - 1, beam_width)
    *memory, states, edges = buffers
    launch(
        ctc_crf_beam_search_kernel,
        N,
        scores,
        later,
        lengths,
        *memory,
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
        buffers.integers,
        buffers.events,
        lengths,
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
