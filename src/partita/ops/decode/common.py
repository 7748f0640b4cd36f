"""What the decoders return, and the decoding of CTC-CRF by functions of chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype
from ..chain.common import ChainPotentials
from ..ctc_crf.common import zero_ends

MAX_BEAM_WIDTH = 256


class Hypotheses(NamedTuple):
    """The decoded sequences of a batch, the best first.

    Fields:
        tokens: `[N, nbest, T]` int64, the classes without blanks and repeats; -1 past the length.
        lengths: `[N, nbest]` int64, the number of tokens.
        scores: `[N, nbest]`, the log-probability in nats, summed over alignments;
            -inf where there are fewer hypotheses, NaN for an invalid sequence.
        steps: `[N, nbest, T]` int64, the step at which each token is emitted first, in the most
            probable of these alignments; -1 past the length.
    """

    tokens: Tensor
    lengths: Tensor
    scores: Tensor
    steps: Tensor


def empty_hypotheses(logits: Tensor, nbest: int = 1) -> Hypotheses:
    """Return uninitialized hypotheses for logits `[T, N, C]`."""
    T, N, _ = logits.shape
    return Hypotheses(
        tokens=logits.new_empty((N, nbest, T), dtype=torch.int64),
        lengths=logits.new_empty((N, nbest), dtype=torch.int64),
        scores=logits.new_empty((N, nbest), dtype=acc_dtype(logits.dtype)),
        steps=logits.new_empty((N, nbest, T), dtype=torch.int64),
    )


def empty_path(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized states `[T + 1, N]` and edges `[T, N]` for scores `[T, N, C, A]`."""
    T, N = scores.shape[:2]
    return (
        scores.new_empty((T + 1, N), dtype=torch.int64),
        scores.new_empty((T, N), dtype=torch.int64),
    )


def empty_posteriors(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized posteriors `[T, N, bases]` and `[N, C]` for scores `[T, N, C, A]`."""
    T, N, C, A = scores.shape
    return (
        scores.new_empty((T, N, A - 1), dtype=torch.float64),
        scores.new_empty((N, C), dtype=torch.float64),
    )


class PathFunctions(NamedTuple):
    """The functions of one backend for chains, for the beam search and for the posteriors."""

    viterbi: Callable[..., tuple[Tensor, Tensor, Tensor]]
    scan: Callable[..., Tensor]
    logz: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[..., tuple[Tensor, Tensor, Tensor]]
    beam_search: Callable[..., tuple[Tensor, Tensor]]
    base_posteriors: Callable[..., tuple[Tensor, Tensor]]


def ctc_crf_path(
    functions: PathFunctions,
    scores: Tensor,
    source: Tensor,
    input_lengths: Tensor,
    beam_width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a path, and the posteriors for the qualities of its bases.

    The source of each edge, `[C, A]`, is that of `kmer_source`. The width is that of a prefix beam
    search, or 0 for the best path. The results are states `[T + 1, N]` and edges `[T, N]` as those
    of `Chain.viterbi`, and what `ctc_crf_base_posteriors` returns.
    """
    ends = zero_ends(scores)
    potentials = ChainPotentials(scores, source, ends, ends, input_lengths)
    if beam_width:
        # In fp64, because rounded scores of long chains would decide between prefixes.
        later = functions.scan(potentials, False, True)
        states, edges = functions.beam_search(scores, later, input_lengths, beam_width)
    else:
        _, states, edges = functions.viterbi(potentials, True)
    logz, _, saved = functions.logz(potentials, True)
    ones, dtype = torch.ones_like(logz), acc_dtype(scores.dtype)
    marginals = functions.gradient(ones, potentials, logz, saved, dtype)[0]
    return states, edges, *functions.base_posteriors(marginals, input_lengths)
