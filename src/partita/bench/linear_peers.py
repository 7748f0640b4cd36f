"""Cross-entropy from hidden states by others, its bare matrix products, and Partita's budgets."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.linear_heads.plan import linear_cross_entropy_plan
from ..runtime.caches import register_cache

ALL_LOGITS = 2**62  # bytes, which hold any logits


class LinearInputs(NamedTuple):
    hidden: Tensor  # [tokens, hidden]
    matrix: Tensor  # [vocabulary, hidden]
    target: Tensor  # [tokens]


def composed_loss(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    """Compute all logits and then their loss with PyTorch's ops."""
    return F.cross_entropy(F.linear(hidden, matrix), target)


def torch_linear() -> Callable[..., Tensor]:
    """Return PyTorch's own op, which computes some tokens at a time."""
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda *inputs: F.linear_cross_entropy(*inputs, options=options)


def cut_cross_entropy(*, exact: bool = False) -> Callable[..., Tensor]:
    """Return the loss of cut-cross-entropy, which leaves out small gradients unless it is `exact`.

    Older versions have no name for the exact implementation.
    """
    library: Any = importlib.import_module("cut_cross_entropy")
    named = hasattr(library.LinearCrossEntropyImpl, "CCE_EXACT")
    options: dict[str, Any] = (
        {} if not exact else {"impl": "cce_exact"} if named else {"filter_eps": None}
    )
    return lambda *inputs: library.linear_cross_entropy(*inputs, **options)


def beyond_cut_cross_entropy(inputs: LinearInputs) -> str | None:
    if inputs.hidden.device.type != "cuda":
        return "needs a GPU"
    return None if inputs.hidden.dtype.itemsize == 2 else "takes fp16 and bf16 only"


def liger_cute() -> Callable[..., Tensor]:
    """Return Liger's loss with kernels in CuTe for one architecture."""
    module = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    return module.liger_fused_linear_cross_entropy_sm90


def beyond_liger_cute(inputs: LinearInputs) -> str | None:
    """Return why Liger's kernels in CuTe cannot take these inputs, or None."""
    device = inputs.hidden.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a GPU of compute capability 9.0"
    if inputs.hidden.dtype != torch.bfloat16:
        return "takes bf16 only"
    if len(inputs.target) % 128 or len(inputs.matrix) % 256:
        return "takes multiples of 128 tokens and of 256 classes"
    return None


def quack() -> Callable[..., Tensor]:
    """Return QuACK's loss.

    Version 0.6.5 refuses values for its cache of kernels that come with newer versions of
    nvidia-cutlass-dsl. They get a key by their type here.
    """
    identity: Any = importlib.import_module("quack.gemm_runtime.identity")
    strict = identity.semantic_value_key
    if not hasattr(strict, "__wrapped__"):

        @functools.wraps(strict)
        def by_type(value: Any, seen: Any) -> Any:
            try:
                return strict(value, seen)
            except TypeError:
                return "type", type(value).__module__, type(value).__qualname__

        identity.semantic_value_key = by_type
    return importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy


def beyond_quack(inputs: Any) -> str | None:
    """Return why QuACK cannot take these inputs, or None."""
    if isinstance(inputs, LinearInputs) and inputs.hidden.dtype.itemsize != 2:
        return "takes fp16 and bf16 only"
    return None


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, logits: Tensor) -> Tensor:
        torch.mm(hidden, matrix.T, out=logits)
        ctx.save_for_backward(hidden, matrix)
        ctx.logits = logits
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, matrix = ctx.saved_tensors
        return torch.mm(ctx.logits, matrix), torch.mm(ctx.logits.T, hidden), None


def products() -> Callable[..., Tensor]:
    """Return the bare products without a loss.

    The forward pass computes the logits into existing memory. The backward pass computes both
    gradients as if the logits were their own gradient.
    """
    buffer: list[Tensor] = []

    def function(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
        if not buffer:
            buffer.append(hidden.new_empty(len(hidden), len(matrix)))
        return _Products.apply(hidden, matrix, buffer[0])

    return function


def partita_linear(budget: Callable[..., int]) -> Callable[..., Tensor]:
    """Return Partita's loss with the workspace that `budget` computes from the inputs."""
    linear_cross_entropy = importlib.import_module("partita").linear_cross_entropy
    return lambda *inputs: linear_cross_entropy(*inputs, memory_budget=budget(*inputs))


LEAN = 7 * 2**26  # bytes


def fast_budget(*inputs: Tensor) -> int:
    return ALL_LOGITS


def lean_budget(hidden: Tensor, matrix: Tensor, target: Tensor) -> int:
    return _lean_budget(*hidden.shape, len(matrix), hidden.dtype)


@functools.lru_cache(maxsize=256)
def _lean_budget(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Return a budget in bytes, which is halved until the plan is lean or no plan fits."""
    plan = functools.partial(linear_cross_entropy_plan, tokens, hidden, vocabulary, dtype)
    budget = LEAN
    try:
        while plan(memory_budget=budget).name != "lean":
            budget //= 2
            plan(memory_budget=budget, input_grad=False, weight_grad=False)
    except ValueError:
        budget *= 2
    return budget


register_cache("bench.linear_peers.lean_budgets", _lean_budget.cache_clear)
