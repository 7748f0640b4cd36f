"""Cross-entropy and token statistics from hidden states and the matrix of the vocabulary.

The full logits are in memory for small calls only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import apply
from ...runtime.backend import current_backend
from ..cross_entropy.api import TokenStats, token_stats
from ..cross_entropy.common import checked_options
from . import autograd
from .common import Head, RowOptions, RowStatistics, chunk_and_save
from .inputs import cast_and_check, flat_labels, is_usual, takes_all_logits
from .loss import linear_loss
from .low_rank import LowRank
from .plan import check_budget


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """Compute cross-entropy from hidden states and the vocabulary's matrix, without the logits.

    The loss is `cross_entropy(input @ linear_weight.T + linear_bias, target, ...)`. The products
    are PyTorch's own, and no gradient is left out, however small. With `mean` and `sum` the
    forward pass computes the gradients and the backward pass scales them. See
    `linear_cross_entropy_plan` for the chunks of a batch. An eager call whose logits take at most
    16 MiB in fp32 computes them with `torch.nn.functional.linear`, which takes the host less time,
    and PyTorch keeps what it needs of them for the backward pass. Target probabilities and
    matrices of more than two dimensions are accepted too; their logits are in memory.

    Args:
        input: hidden states `[..., H]`, floating dtype; `[N, H]` or `[H]` with target
            probabilities, `[N, H]` with matrices of more dimensions.
        linear_weight: `[C, H]` or `[C, d1, ..., dK, H]` in the same dtype; or in fp32 beside a half
            type. The products then take a rounded copy, and its gradient is not rounded.
        target: labels `[...]` (`[N, d1, ..., dK]`), any integer dtype; or probabilities
            `[..., C]` (`[N, C, d1, ..., dK]`).
        linear_bias: `[C]` or `[C, d1, ..., dK]` in the dtype of the matrix.
        weight: `[C]`, one factor for each class.
        reduction: `none` (the shape of the labels), `mean` (over the class weights of the tokens
            that are not ignored) or `sum`.
        ignore_index: tokens with this label have loss and gradient zero, and the mean does not
            count them; None is -100. With `PARTITA_PACK_ROWS=1` the products on a GPU leave them
            out where they can.
        label_smoothing, softcap, z_loss: as in `cross_entropy`.
        memory_budget: bytes of workspace in addition to inputs and results; None for what
            `linear_cross_entropy_plan` finds sensible for these sizes.
        logits_dtype: `torch.float32` for logits that are not rounded to a half type: they are what
            the product adds up in fp32. Their gradient is still rounded to the dtype of `input`.
            None for logits in the dtype of `input`.
        low_rank: `(H, B)` adds `H @ B.T` to the logits, with H `[..., r]` and B `[C, r]`, and
            `LoRA(A, B, scale)` adds `scale * input @ A.T @ B.T`, in any floating dtypes. The
            products take copies in the dtype of `input`. All of them are differentiable.

    Returns:
        The loss in nats, a number or `[...]`, fp32 for half types.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape, device or value; the message
            says what was expected.
        IndexError: a label is out of range. A GPU checks this with `PARTITA_CHECK=1` only;
            otherwise the loss of that token is NaN, and so are the gradients that depend on it.

    Source: `torch.nn.functional.linear_cross_entropy`, whose `options` are `memory_budget` here;
    the rest as in `cross_entropy`.

    Example:
        >>> import torch, partita
        >>> hidden = torch.eye(2, requires_grad=True)
        >>> matrix = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
        >>> loss = partita.linear_cross_entropy(hidden, matrix, torch.tensor([0, 0]))
        >>> loss.backward()
        >>> loss, hidden.grad
        (tensor(1.2395, grad_fn=<...>), tensor([[-0.2130,  0.1065],
                [-0.8935,  0.7870]]))
    """
    ignore_index = -100 if ignore_index is None else ignore_index
    options = checked_options(ignore_index, label_smoothing, softcap, z_loss, reduction)
    numbers = (options, memory_budget, None, logits_dtype, low_rank)
    return linear_loss(input, linear_weight, target, linear_bias, weight, *numbers)


def linear_token_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
) -> TokenStats:
    """Compute token statistics from hidden states, without the logits in memory.

    They are `token_stats(input @ linear_weight.T + linear_bias, target, ...)`, and a small call
    computes just that; see `linear_cross_entropy`.

    Args:
        input: hidden states `[..., H]`, floating dtype.
        linear_weight: `[C, H]` in the same dtype, or in fp32; see `linear_cross_entropy`.
        linear_bias: `[C]` in the dtype of the matrix.
        target: labels `[...]`, any integer dtype; None for the arg-max, as in `token_stats`.
        temperature, softcap, ignore_index: as in `token_stats`.
        memory_budget: bytes of workspace in addition to inputs and results; None for 2 GiB.
        logits_dtype, low_rank: as in `linear_cross_entropy`.

    Returns:
        `TokenStats(logprob, logsumexp, entropy, argmax)`, fields `[...]`, fp32 (fp64 for fp64) in
        nats. The first three are differentiable in hidden states, matrix, bias and `low_rank`.

    Raises:
        TypeError, ValueError, IndexError: as in `token_stats` and `linear_cross_entropy`.

    Source: as `token_stats`, merged over chunks of the classes.

    Example:
        >>> import torch, partita
        >>> partita.linear_token_stats(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([2]))
        TokenStats(logprob=tensor([-1.3863]), logsumexp=tensor([1.3863]),
                   entropy=tensor([1.3863]), argmax=tensor([0]))
    """
    head = Head(input, linear_weight, linear_bias)
    if target is None or low_rank is not None or not is_usual(*head[:3], target):
        head = cast_and_check(*head[:3], target, low_rank=low_rank)
    check_budget(memory_budget)
    head = head.of_call(logits_dtype)
    if takes_all_logits([head], target, memory_budget):
        return token_stats(
            autograd.rows_linear(head),
            target,
            temperature=temperature,
            softcap=softcap,
            ignore_index=ignore_index,
        )
    numbers, labels = checks.temperature_and_softcap(temperature, softcap), None
    checks.python_int("ignore_index", ignore_index)
    if target is None:
        ignore_index = -100  # The label of each row is its arg-max, which may be any class.
    else:
        labels = head.in_blocks(flat_labels(input, target), ignore_index)
    head = head.flat.aligned
    options = RowOptions(*numbers, ignore_index, needs_smoothing=False, needs_entropy=True)
    chunk, save_logits = chunk_and_save(head.plan(memory_budget, False), len(head.weight))
    call = (*head, labels, None, *options, chunk, save_logits, current_backend())
    found = RowStatistics(*apply(autograd.LinearRows, *call)[:-1])
    fields = (-found.nll, found.logsumexp, found.entropy, found.argmax)
    return TokenStats(*(head.of_tokens(each, input.shape[:-1]) for each in fields))
