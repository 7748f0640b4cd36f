"""What the decoders return."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype

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
