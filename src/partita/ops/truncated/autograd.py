"""The registered ops of statistics over the classes that a sampler keeps."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import by_rows
from ...runtime import register
from ...runtime.autograd import DifferentiableOp, all_at_once
from . import reference
from .common import Rules, TruncatedRows, check_values, sums_of_results, truncated_fake


def _check(logits: Tensor, target: Tensor | None, rules: Rules, ignore_index: int) -> None:
    check_values(logits.shape[-1], target, rules, ignore_index)


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


define_op = functools.partial(register.define, gpu=_gpu, vmap=all_at_once)
truncated_stats_op = define_op(by_rows(reference.truncated_stats), truncated_fake, check=_check)
truncated_stats_backward_op = define_op(
    by_rows(reference.truncated_stats_gradient, logits=1),
    lambda logits: torch.empty_like(logits),
    name="truncated_stats_backward",
)


def _saved(args: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Any, Any]:
    logits, temperature, options = args[0], args[5], args[7:-1]
    return (logits, *sums_of_results(TruncatedRows(*output), temperature)), options


truncated_stats = DifferentiableOp(
    truncated_stats_op,
    truncated_stats_backward_op,
    reference.differentiable_gradient,
    _saved,
    results=4,
)
