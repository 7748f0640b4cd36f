"""Small calls on a GPU that a function of PyTorch serves.

Where the host's time decides, a function of PyTorch with the same contract beats any autograd
function of ours, and our checks in Python take longer than its kernel. The C module makes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import launcher

CALLS_BEFORE_LOADING = 16
_calls = itertools.count(1)


def serve(function: Callable[..., Tensor], limit: int, input: Any, dim: Any) -> Tensor | None:
    """Return `function(input, dim, False)`, or None where the op has to decide.

    Args:
        function: a function of PyTorch with the contract of the op.
        limit: the number of elements of the largest input that it serves.
        input: dense tensors in fp32 and fp64 on a GPU are served, in plain eager mode.
        dim: a dimension.
    """
    if torch.compiler.is_compiling():
        return None
    module = launcher.loaded()
    return None if module is None else module.serve(function, limit, input, dim)


def note_call() -> None:
    """Note a call that Python has served, and load the C module after many.

    Other ops load it at their first call, because they launch kernels. The import of Triton, which
    comes first, takes as long as hundreds of thousands of these calls lose, so a few do without.
    """
    if next(_calls) == CALLS_BEFORE_LOADING:
        launcher.module()
