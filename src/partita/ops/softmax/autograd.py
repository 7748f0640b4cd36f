"""The registered ops of softmax and log-sum-exp, and their derivatives."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import by_rows
from ...runtime import register
from ...runtime.autograd import DifferentiableOp, all_at_once, batch_first
from ...runtime.dtypes import acc_dtype
from . import reference


def _softmax_vmap(op: register.Op, info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    """Serve a batch by one call with the batch dimension first, so `dim` moves by one."""
    *tensors, dim, log, dtype, backend = args
    tensors = [
        batch_first(tensor, in_dim, info.batch_size)
        for tensor, in_dim in zip(tensors, in_dims, strict=False)
    ]
    return op(*tensors, dim + 1, log, dtype, backend), 0


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


define_op = functools.partial(register.define, gpu=_gpu)
softmax_op = define_op(
    reference.over_any_dim(by_rows(reference.softmax)),
    lambda input, dtype: torch.empty_like(input, dtype=dtype),
    vmap=_softmax_vmap,
)
softmax_backward_op = define_op(
    reference.over_any_dim(by_rows(reference.softmax_gradient, logits=1)),
    lambda output, dtype: torch.empty_like(output, dtype=dtype),
    name="softmax_backward",
    vmap=_softmax_vmap,
)


def _logsumexp_fake(input: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    maximum = input.new_empty(input.shape[:-1], dtype=acc_dtype(input.dtype))
    return input.new_empty(input.shape[:-1], dtype=dtype), maximum, torch.empty_like(maximum)


logsumexp_op = define_op(by_rows(reference.logsumexp), _logsumexp_fake, vmap=all_at_once)
logsumexp_backward_op = define_op(
    by_rows(reference.logsumexp_backward, logits=1),
    lambda input: torch.empty_like(input),
    vmap=all_at_once,
)


softmax = DifferentiableOp(
    softmax_op,
    softmax_backward_op,
    reference.softmax_gradient,
    lambda args, output: ((output,), (args[1], args[2], args[0].dtype)),
)
logsumexp = DifferentiableOp(
    logsumexp_op,
    logsumexp_backward_op,
    reference.logsumexp_gradient,
    lambda args, output: ((args[0], *output[1:]), ()),
)
