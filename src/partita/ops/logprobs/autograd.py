"""The registered ops of log-probabilities and their derivatives."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import by_rows
from ...runtime import checks, register
from ...runtime.autograd import DifferentiableOp, all_at_once
from ...runtime.backend import current_backend
from . import reference
from .common import TopK, TopKRows, logprobs_fake, topk_fake


def _check_ids(logits: Tensor, ids: Tensor, ignore_index: int) -> None:
    checks.labels("ids", ids, logits.shape[-1], ignore_index)


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


define_op = functools.partial(register.define, gpu=_gpu, vmap=all_at_once)
logprobs_op = define_op(by_rows(reference.logprobs), logprobs_fake, check=_check_ids)
logprobs_backward_op = define_op(
    by_rows(reference.logprobs_backward, logits=1), lambda logits: torch.empty_like(logits)
)
topk_op = define_op(by_rows(reference.topk_logprobs), topk_fake)


_logprobs = DifferentiableOp(
    logprobs_op,
    logprobs_backward_op,
    reference.logprobs_gradient,
    lambda args, output: ((*args[:2], *output[1:]), args[2:5]),
)


def _topk_saves(args: tuple[Any, ...], output: TopKRows) -> tuple[Any, Any]:
    rows, (logits, _, temperature, softcap, _) = TopKRows(*output), args
    no_rest = rows.entries[..., :0]
    tensors = (logits, rows.indices, rows.entries, rows.maximum, rows.sumexp, no_rest)
    return tensors, (temperature, softcap, checks.NOTHING_IGNORED)


_topk = DifferentiableOp(topk_op, logprobs_backward_op, reference.logprobs_gradient, _topk_saves)


def topk_of(logits: Tensor, k: int, temperature: float, softcap: float) -> TopK:
    """Return the `TopK` of checked inputs."""
    return TopK(*_topk(logits, k, temperature, softcap, current_backend())[:3])


def logprobs_of(
    logits: Tensor,
    ids: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
    needs_rest: bool = False,
) -> Tensor:
    """Return the log-probabilities of checked inputs, `[..., K]`, or `[..., K + 1]` with a rest."""
    numbers = (temperature, softcap, ignore_index, needs_rest)
    found: Tensor = _logprobs(logits, ids, *numbers, current_backend())[0]
    return found
