"""The divergence of two heads by others, its bare matrix products, and Partita's budgets."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .linear_peers import ALL_LOGITS

CHUNK_TOKENS = 1024  # tokens of a chunk of the recomputed loop


class DivergenceInputs(NamedTuple):
    hidden: Tensor  # [tokens, hidden]
    matrix: Tensor  # [vocabulary, hidden]
    teacher_hidden: Tensor  # [tokens, hidden]
    teacher_matrix: Tensor  # [vocabulary, hidden]
    beta: float


def rows_of_logits(logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
    """Compute the divergence of each row with PyTorch's ops, in fp32 at least."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logp, logq = logits.log_softmax(-1, dtype=dtype), teacher_logits.log_softmax(-1, dtype=dtype)
    if beta in (0.0, 1.0):
        first, second = (logq, logp) if beta == 0 else (logp, logq)
        return F.kl_div(second, first, reduction="none", log_target=True).sum(-1)
    weights = logp.new_tensor([beta, 1 - beta]).log()
    mixture = torch.logaddexp(logq + weights[0], logp + weights[1])
    teacher, student = (
        F.kl_div(mixture, each, reduction="none", log_target=True).sum(-1) for each in (logq, logp)
    )
    return beta * teacher + (1 - beta) * student


def mean_of_logits(logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
    """Compute the mean divergence of rows of logits with PyTorch's ops."""
    return rows_of_logits(logits, teacher_logits, beta).mean()


def composed_divergence(*inputs: Any) -> Tensor:
    """Compute all logits and then their mean divergence with PyTorch's ops."""
    hidden, matrix, teacher_hidden, teacher_matrix, beta = inputs
    logits, teacher_logits = F.linear(hidden, matrix), F.linear(teacher_hidden, teacher_matrix)
    return mean_of_logits(logits, teacher_logits, beta)


def chunked_divergence(*inputs: Any) -> Tensor:
    """Compute the mean over chunks of tokens, whose logits are computed again for the gradient."""
    hidden, matrix, teacher_hidden, teacher_matrix, beta = inputs

    def chunk_sum(x: Tensor, t: Tensor) -> Tensor:
        return rows_of_logits(F.linear(x, matrix), F.linear(t, teacher_matrix), beta).sum()

    chunks = zip(hidden.split(CHUNK_TOKENS), teacher_hidden.split(CHUNK_TOKENS), strict=True)
    sums = [checkpoint(chunk_sum, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum() / len(hidden)


def liger_divergence() -> Callable[..., Tensor]:
    """Return the mean of Liger's fused linear Jensen-Shannon divergence."""
    module: Any = importlib.import_module("liger_kernel.ops.fused_linear_jsd")

    def function(*inputs: Any) -> Tensor:
        *heads, beta = inputs
        loss: Tensor = module.LigerFusedLinearJSDFunction.apply(*heads, None, beta)
        return loss

    return function


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        hidden, matrix, teacher_hidden, teacher_matrix, logits = args
        torch.mm(teacher_hidden, teacher_matrix.T, out=logits)
        torch.mm(hidden, matrix.T, out=logits)
        ctx.save_for_backward(hidden, matrix)
        ctx.logits = logits
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, matrix = ctx.saved_tensors
        return torch.mm(ctx.logits, matrix), torch.mm(ctx.logits.T, hidden), None, None, None


def products() -> Callable[..., Tensor]:
    """Return the four bare products without a loss."""
    buffer: list[Tensor] = []

    def function(*inputs: Any) -> Tensor:
        hidden, matrix = inputs[:2]
        if not buffer:
            buffer.append(hidden.new_empty(len(hidden), len(matrix)))
        return _Products.apply(*inputs[:4], buffer[0])

    return function


def partita_rows() -> Callable[..., Tensor]:
    """Return Partita's mean divergence of rows of logits."""
    divergence = importlib.import_module("partita").divergence

    def function(logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
        loss: Tensor = divergence(logits, teacher_logits, beta=beta)
        return loss

    return function


def partita_divergence(budget: Callable[..., int]) -> Callable[..., Tensor]:
    """Return Partita's divergence with the workspace that `budget` computes from the inputs."""
    linear_divergence = importlib.import_module("partita").linear_divergence

    def function(*inputs: Any) -> Tensor:
        *heads, beta = inputs
        loss: Tensor = linear_divergence(*heads, beta=beta, memory_budget=budget(*inputs))
        return loss

    return function


def fast_budget(*inputs: Any) -> int:
    return ALL_LOGITS


def lean_budget(*inputs: Any) -> int:
    """Return two fifths of the bytes of the logits of both heads."""
    hidden, matrix, *_ = inputs
    logits_bytes = 2 * len(hidden) * len(matrix) * hidden.element_size()
    return max(logits_bytes * 2 // 5, 2**20)
