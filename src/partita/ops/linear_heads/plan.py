"""How losses from hidden states use memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

BUDGET = 2**31  # bytes of workspace where none are told
LEAN_CHUNK = 5 * 2**26  # of which a chunk of the lean plan takes no more than it is faster for
LOSS_CHUNK = 15 * 2**24  # and that of a loss without a gradient
WIDEST, NARROWEST = 2**15, 128  # classes in a chunk of the lean plan
WAVE = 66 * 128  # so many make as many tiles of a product as 132 processors share evenly
FEWEST = 2048  # tokens in a chunk of the fast plan: with fewer, adding up the matrix's gradient takes as long as a product
ROW_WORDS = 24  # numbers of 4 bytes that a token's row has beside its logits, at most


class MemoryPlan(NamedTuple):
    """What `linear_cross_entropy` does with a batch.

    Fields:
        name: `fast`, with chunks of tokens: logits, then their gradient in their place, then the gradients of hidden states and matrix; `lean`, with
            chunks of classes: the logits are computed once for the loss and again for the gradients; `loss`, that without any gradient.
        chunk: tokens (`fast`) or classes (`lean`, `loss`) at a time.
        workspace_bytes: the most bytes of memory in use at once, beside inputs, results and what the matrix library keeps for itself.
        flops: floating-point operations of the matrix products, forward and backward.
    """

    name: str
    chunk: int
    workspace_bytes: int
    flops: int


def linear_cross_entropy_plan(
    tokens: int,
    hidden: int,
    vocabulary: int,
    dtype: torch.dtype,
    *,
    memory_budget: int | None = None,
    input_grad: bool = True,
    weight_grad: bool = True,
    reduced: bool = True,
    parallel: bool = False,
) -> MemoryPlan:
    """What `linear_cross_entropy` will do: how it cuts the batch, the workspace it takes, and its operations.

    `fast` is taken where the workspace allows: all logits at once, or chunks of at least 2,048 tokens; else `lean`, whose chunks are of classes.

    Args:
        tokens, hidden, vocabulary: sizes of `input` `[tokens, hidden]` and `linear_weight` `[vocabulary, hidden]`.
        dtype: of both.
        memory_budget: bytes of workspace; None for 2 GiB, of which a loss without gradient takes 240 MiB.
        input_grad, weight_grad: whether hidden states and matrix want a gradient.
        reduced: whether the loss is a mean or a sum; the losses of single tokens need their logits again when their gradients have come.
        parallel: of a rank of `partita.parallel`, whose classes these are: never reduced, and ranks exchange the gradient of hidden states in fp32.

    Returns:
        `MemoryPlan(name, chunk, workspace_bytes, flops)`.

    Raises:
        TypeError: a dtype that is none, or not floating.
        ValueError: a size below 0, or a budget that is too small for a chunk of 128 classes.

    Source: Wijmans et al., Cut your losses in large-vocabulary language models, 2024, for the problem; the plans are our own.

    Example:
        >>> import torch, partita
        >>> partita.linear_cross_entropy_plan(8192, 4096, 128256, torch.bfloat16)
        MemoryMemoryPlan(name='fast', chunk=8192, workspace_bytes=2104180736, flops=25821343383552)
        >>> partita.linear_cross_entropy_plan(8192, 4096, 128256, torch.bfloat16, memory_budget=2**29).name
        'lean'
    """
    for name, value in (("tokens", tokens), ("hidden", hidden), ("vocabulary", vocabulary)):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < 0:
            raise ValueError(f"{name}: expected an int of at least 0, got {value!r}")
    _check_budget(memory_budget)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype: expected a floating torch.dtype, got {dtype!r}")
    half, item = dtype.itemsize == 2, dtype.itemsize
    product, row = 2 * tokens * hidden * vocabulary, max(padded_width(vocabulary) * item, 1)
    beside = (
        ROW_WORDS * 4 + vocabulary // 512
    ) * tokens  # the second is what programs that share a row exchange
    budget = BUDGET if memory_budget is None else memory_budget
    if input_grad or weight_grad:
        flops, exchanged = (
            product * (1 + input_grad + weight_grad),
            8 * tokens * hidden * (parallel and input_grad),
        )  # what is sent, and what comes
        if tokens * row + beside + exchanged <= budget:
            return MemoryPlan("fast", max(tokens, 1), tokens * row + beside + exchanged, flops)
        added = hidden * vocabulary * 4 if weight_grad and half else 0
        fits = (budget - added - beside) // row // 256 * 256
        if reduced and not parallel and dtype != torch.float16 and fits >= FEWEST:
            return MemoryPlan("fast", fits, fits * row + added + beside, flops)
        flops += product
        beside += tokens * hidden * 4 if input_grad and half else 0
    else:
        flops = product
    name, together = (
        ("lean", tokens) if input_grad or weight_grad else ("loss", min(tokens, TOKENS))
    )
    least = together * min(padded_width(NARROWEST), padded_width(vocabulary)) * item + beside
    if memory_budget is not None and memory_budget < least:
        raise ValueError(
            f"memory_budget: expected at least {least:,} bytes for {tokens:,} tokens, or None, got {memory_budget:,}"
        )
    room = (
        (LEAN_CHUNK if name == "lean" else LOSS_CHUNK)
        if memory_budget is None
        else memory_budget - beside
    )
    fits = max(NARROWEST, min(room // max(together * item, 1), WIDEST) // NARROWEST * NARROWEST)
    if fits >= WAVE:
        chunk = min(fits // WAVE * WAVE, vocabulary)
    else:
        parts = -(-vocabulary // fits)
        chunk = max(
            1, min(-(-vocabulary // max(parts * NARROWEST, 1)) * NARROWEST, vocabulary)
        )  # all of one width
    return MemoryPlan(name, chunk, together * padded_width(chunk) * item + beside, flops)


def _check_budget(memory_budget: int | None) -> None:
    if memory_budget is not None and (
        isinstance(memory_budget, bool) or not isinstance(memory_budget, int) or memory_budget < 0
    ):
        raise ValueError(
            f"memory_budget: expected a number of bytes or None, got {memory_budget!r}"
        )


TOKENS = 8192  # whose statistics are computed at a time: more would not make the products faster
CPU_TOKENS = (
    512  # in a chunk there, if the matrix's gradient needs no other memory to be added up in
)
ALIGNED = 16  # columns of a buffer come in so many: matrix products and kernels want rows that start on 16 bytes


def padded_width(classes: int) -> int:
    """Columns of a buffer for so many classes."""
    return -(-classes // ALIGNED) * ALIGNED
