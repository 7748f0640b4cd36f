"""The most probable classes from hidden states, one chunk of tokens after another."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...primitives.rows import chunks
from ..logprobs.common import TopKRows, topk_fake
from .chunked import logits_buffer, product
from .plan import padded_width


def linear_topk_logprobs(
    topk_of_rows: Callable[..., None],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    temperature: float,
    softcap: float,
    tokens: int,
    save_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the `TopKRows` of `input @ weight.T + bias`, and its logits if they are saved.

    The logits of `tokens` tokens exist at once, or of all if they are saved. The last result is
    empty otherwise. `topk_of_rows` writes the results of a chunk, whose rows are padded.
    """
    M, C = len(input), len(weight)
    found = topk_fake(input, k)
    buffer = logits_buffer(input, M if save_logits else min(tokens, M), C)
    for rows in chunks(M, tokens):
        memory = buffer[rows.start * padded_width(C) :] if save_logits else buffer
        logits = product(input[rows], weight, bias, memory)
        part = TopKRows(*(field[rows] for field in found))
        topk_of_rows(logits, k, temperature, softcap, part, True)
    return *found, buffer if save_logits else buffer.new_empty(0)
