"""Decoding of CTC-CRF on a GPU: the path, the posteriors for qualities, and the bases of a path."""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime.launch import cdiv, launch, launch_alongside, next_power_of_2
from ...chain.common import ChainPotentials
from ...chain.gpu.arguments import StridedEdges
from ...chain.gpu.launch import chain_gradient, chain_logz, chain_scan
from ...chain.gpu.launch_paths import (
    PosteriorBuffers,
    chain_viterbi,
    launch_backward_scores,
    launch_posteriors,
    posterior_buffers,
)
from ...ctc_crf.common import zero_ends
from .. import common
from ..basecalls import Basecalls, empty_basecalls
from ..common import empty_path, empty_posteriors
from .crf_beam import (
    HASHES,
    INTEGERS,
    NUMBERS,
    KmerMemory,
    ctc_crf_beam_search_kernel,
    ctc_crf_beam_trace_kernel,
)
from .crf_calls import (
    ctc_crf_base_posteriors_kernel,
    ctc_crf_base_sums_kernel,
    ctc_crf_calls_kernel,
    ctc_crf_first_posteriors_kernel,
)
from .plan import kmer_beam_options

HASH_MASK = -1  # all bits of a hash are compared
BLOCK_STAYS = 32  # steps of a stay that are written together
BLOCK_STEPS, BLOCK_STATES = 1024, 256
MAX_BLOCK_BASES = 1024  # posteriors of a step that are summed together
SUMMED_ROWS, BLOCK_SUMS = 4, 256  # steps of a warp, and posteriors of each that are loaded together


def ctc_crf_path(
    scores: Tensor, source: Tensor, input_lengths: Tensor, beam_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a path and the posteriors for its qualities, as the reference does.

    Small tables have kernels for the posteriors of states, which never form those of edges.
    """
    T, N, C, A = scores.shape
    buffers = posterior_buffers(scores, source, A - 1)
    if buffers is None:
        return common.ctc_crf_path(FUNCTIONS, scores, source, input_lengths, beam_width)
    lengths, ends = input_lengths.contiguous(), zero_ends(scores)
    by_base, first = empty_posteriors(scores)
    chain_inputs = ChainPotentials(scores, source, ends, ends, lengths)
    if beam_width:
        # The search has few programs, so it runs next to the scans for the posteriors. All memory
        # belongs to the current stream.
        later = torch.empty((T + 1, N, C), dtype=torch.float64, device=scores.device)
        memory, states, edges = beam_buffers(scores, beam_width)

        def search() -> None:
            launch_backward_scores(chain_inputs, later)
            launch_beam_search(scores, later, lengths, beam_width, memory, states, edges)

        def compute_posteriors() -> None:
            launch_posteriors(chain_inputs, buffers, are_saved=False)
            sum_state_posteriors(buffers, lengths, by_base, first)

        launch_alongside(scores, search, compute_posteriors)
        return states, edges, by_base, first
    _, states, edges = chain_viterbi(chain_inputs, True, buffers.saved)
    launch_posteriors(chain_inputs, buffers, are_saved=True)
    sum_state_posteriors(buffers, lengths, by_base, first)
    return states, edges, by_base, first


def beam_buffers(scores: Tensor, beam_width: int) -> tuple[KmerMemory, Tensor, Tensor]:
    """Allocate the memory of N searches, the states `[T + 1, N]` and the edges `[T, N]`."""
    T, N, _, A = scores.shape
    block = kmer_beam_options(A - 1, beam_width)["BLOCK_W"]

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=scores.device)

    memory = KmerMemory(
        numbers=empty(torch.float64, N, NUMBERS.value, block),
        hashes=empty(torch.int64, N, HASHES.value, block),
        integers=empty(torch.int32, N, INTEGERS.value, block),
        children=empty(torch.int32, N, block, A - 1),
        events=empty(torch.int64, N, T, block),
        parents=empty(torch.int32, N, T, block),
    )
    return memory, *empty_path(scores)


def ctc_crf_beam_search(
    scores: Tensor, later: Tensor, input_lengths: Tensor, beam_width: int
) -> tuple[Tensor, Tensor]:
    """Return the best path of the best prefix: states `[T + 1, N]` and edges `[T, N]`."""
    memory, states, edges = beam_buffers(scores, beam_width)
    inputs = (scores, later.contiguous(), input_lengths.contiguous(), beam_width)
    launch_beam_search(*inputs, memory, states, edges)
    return states, edges


def launch_beam_search(
    scores: Tensor,
    later: Tensor,
    lengths: Tensor,
    beam_width: int,
    memory: KmerMemory,
    states: Tensor,
    edges: Tensor,
) -> None:
    """Fill in the path of the best prefix of each sequence."""
    T, N, C, A = scores.shape
    options = kmer_beam_options(A - 1, beam_width)
    launch(
        ctc_crf_beam_search_kernel,
        N,
        scores=StridedEdges(scores, *scores.stride()),
        later_ptr=later,
        input_lengths_ptr=lengths,
        batch=memory,
        T=T,
        C=C,
        bases=A - 1,
        width=beam_width,
        hash_mask=HASH_MASK,
        later_t=later.stride(0),
        **options,
    )
    launch(
        ctc_crf_beam_trace_kernel,
        N,
        integers_ptr=memory.integers,
        events_ptr=memory.events,
        input_lengths_ptr=lengths,
        states_ptr=states,
        edges_ptr=edges,
        T=T,
        N=N,
        C=C,
        bases=A - 1,
        BLOCK_W=options["BLOCK_W"],
        BLOCK=BLOCK_STAYS,
        num_warps=1,
    )


def sum_state_posteriors(
    buffers: PosteriorBuffers, lengths: Tensor, by_base: Tensor, first: Tensor
) -> None:
    """Fill in the posteriors for qualities from those of states."""
    T, N, bases = by_base.shape
    columns, block_b = buffers.posteriors.shape[2], next_power_of_2(bases)
    launch(
        ctc_crf_base_sums_kernel,
        cdiv(T * N, SUMMED_ROWS),
        posteriors_ptr=buffers.posteriors[1:],
        lengths_ptr=lengths,
        by_base_ptr=by_base,
        T=T,
        N=N,
        P=columns,
        BASES=bases,
        ROWS=SUMMED_ROWS,
        BLOCK_R=min(next_power_of_2(columns // bases), BLOCK_SUMS // block_b),
        BLOCK_B=block_b,
        num_warps=1,
    )
    states = StridedEdges(buffers.first, 0, buffers.first.shape[1], 1, 0)
    launch_first(states, lengths, first, T, bases, True)


def ctc_crf_base_posteriors(marginals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the posteriors for qualities, given those of edges; see the reference."""
    T, N, C, A = marginals.shape
    by_base, first = empty_posteriors(marginals)
    lengths, edges = lengths.contiguous(), StridedEdges(marginals, *marginals.stride())
    block_b = next_power_of_2(A - 1)
    launch(
        ctc_crf_base_posteriors_kernel,
        T * N,
        marginals=edges,
        lengths_ptr=lengths,
        by_base_ptr=by_base,
        T=T,
        N=N,
        C=C,
        A=A,
        bases=A - 1,
        BLOCK_R=min(next_power_of_2(C // (A - 1)), max(MAX_BLOCK_BASES // block_b, 1)),
        BLOCK_B=block_b,
        num_warps=1,
    )
    launch_first(edges, lengths, first, T, A - 1, False)
    return by_base, first


FUNCTIONS = common.PathFunctions(
    *(chain_viterbi, chain_scan, chain_logz, chain_gradient),
    *(ctc_crf_beam_search, ctc_crf_base_posteriors),
)


def launch_first(
    posteriors: StridedEdges, lengths: Tensor, first: Tensor, T: int, bases: int, are_states: bool
) -> None:
    """Fill in the posteriors of the first k-mers from those of states, or of the first edges."""
    launch(
        ctc_crf_first_posteriors_kernel,
        len(first),
        marginals=posteriors,
        lengths_ptr=lengths,
        first_ptr=first,
        T=T,
        C=first.shape[1],
        bases=bases,
        FROM_STATES=are_states,
        BLOCK=BLOCK_STATES,
        num_warps=4,
    )


def ctc_crf_calls(
    by_base: Tensor,
    first: Tensor,
    states: Tensor,
    edges: Tensor,
    lengths: Tensor,
    state_len: int,
    dtype: torch.dtype,
) -> Basecalls:
    """Return the bases of paths: states `[T + 1, N]` and edges `[T, N]`, -1 where there is none."""
    T, N, bases = by_base.shape
    calls = empty_basecalls(by_base, state_len, dtype)
    totals = torch.empty((N, T + 1), dtype=torch.float64, device=by_base.device)
    launch(
        ctc_crf_calls_kernel,
        N,
        by_base_ptr=by_base.contiguous(),
        first_posteriors_ptr=first.contiguous(),
        states_ptr=states.contiguous(),
        edges_ptr=edges.contiguous(),
        lengths_ptr=lengths.contiguous(),
        totals_ptr=totals,
        calls=calls,
        T=T,
        N=N,
        C=first.shape[1],
        bases=bases,
        state_len=state_len,
        BLOCK=BLOCK_STEPS,
        BLOCK_C=BLOCK_STATES,
        BLOCK_K=next_power_of_2(state_len),
        num_warps=4,
    )
    return calls
