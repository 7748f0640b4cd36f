"""Cross-entropy and token statistics straight from hidden states and the vocabulary's matrix: the logits are never all in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import apply, plain_eager
from ...runtime.backend import current_backend
from ...runtime.checks import REDUCTIONS
from ...runtime.dtypes import acc_dtype
from ...runtime.register import PLAIN
from ..cross_entropy.api import TokenStats, cross_entropy
from . import autograd as _linear
from .common import cast_to_autocast, checked_options, chunk_and_save, loss_terms, reduce_losses
from .plan import MemoryPlan, _check_budget, linear_cross_entropy_plan


class _Rows(NamedTuple):
    """Arguments as the ops take them.

    Fields:
        input: `[M, H]`, target: `[M]`, shape: of the losses of the tokens.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    shape: torch.Size

    @property
    def wanted(self) -> tuple[bool, bool, bool]:
        """Which of hidden states, matrix and bias want a gradient."""
        grads = (
            tensor is not None and tensor.requires_grad
            for tensor in (self.input, self.weight, self.bias)
        )
        a, b, c = (torch.is_grad_enabled() and grad for grad in grads)
        return a, b, c

    def plan(self, memory_budget: int | None, reduced: bool) -> MemoryPlan:
        to_input, to_weight, to_bias = self.wanted
        tokens, hidden = self.input.shape
        return linear_cross_entropy_plan(
            tokens,
            hidden,
            len(self.weight),
            self.input.dtype,
            memory_budget=memory_budget,
            input_grad=to_input,
            weight_grad=to_weight or to_bias,
            reduced=reduced,
        )


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> None:
    for name, tensor in (("input", input), ("linear_weight", weight), ("linear_bias", bias)):
        if tensor is not None:
            checks.floating(name, tensor)
            checks.device(name, tensor, input, "input")
            if tensor.dtype != input.dtype:
                raise TypeError(
                    f"{name}: expected the dtype of input, {input.dtype}, got {tensor.dtype}"
                )
    checks.tensor("target", target)
    checks.device("target", target, input, "input")
    if weight.ndim < 2 or len(weight) == 0:
        raise ValueError(
            f"linear_weight: expected shape [C, H] or [C, d1, ..., H] with at least one class, got {list(weight.shape)}"
        )
    if input.ndim == 0 or input.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"input: expected shape [..., H] with H = {weight.shape[-1]}, got {list(input.shape)}"
        )
    if weight.ndim > 2 and input.ndim != 2:
        raise ValueError(
            f"input: expected shape [N, H] with a matrix of {weight.ndim} dimensions, got {list(input.shape)}"
        )
    if bias is not None:
        checks.shape("linear_bias", bias, weight.shape[:-1], "linear_weight without H")


def _flat(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> _Rows:
    shape = input.shape[:-1]
    checks.integer("target", target)
    checks.shape("target", target, shape, "input without H")
    labels = target.reshape(-1).long().contiguous()  # a narrow type would wrap the bounds
    return _Rows(input[None].flatten(0, -2), weight, bias, labels, shape)


def _logits(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """All of them, classes in dimension 1 (last, where there is but one more)."""
    logits = torch.nn.functional.linear(
        input, weight.flatten(0, -2), None if bias is None else bias.flatten()
    )
    return logits if weight.ndim == 2 else logits.unflatten(1, weight.shape[:-1])


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
) -> Tensor:
    """Cross-entropy straight from hidden states and the vocabulary's matrix, without its logits in memory.

    The loss is `cross_entropy(input @ linear_weight.T + linear_bias, target, ...)`. The products are PyTorch's own, exact to the last small gradient.
    With `mean` and `sum` the gradients come with the loss and the backward pass scales them; see `linear_cross_entropy_plan` for how the batch is
    cut. Target probabilities and matrices of more than two dimensions are taken as well, with the logits in memory.

    Args:
        input: hidden states `[..., H]`, floating dtype; `[N, H]` or `[H]` with target probabilities, `[N, H]` with more-dimensional matrices.
        linear_weight: `[C, H]` in the same dtype, or `[C, d1, ..., dK, H]`.
        target: labels `[...]` (`[N, d1, ..., dK]`), any integer dtype; or probabilities `[..., C]` (`[N, C, d1, ..., dK]`).
        linear_bias: `[C]` or `[C, d1, ..., dK]`.
        weight: `[C]`, one factor for each class.
        reduction: `none` (the shape of the labels), `mean` (over the class weights of the tokens that count) or `sum`.
        ignore_index: tokens with this label have loss and gradient zero and are not counted; None is -100.
        label_smoothing, softcap, z_loss: as in `cross_entropy`.
        memory_budget: bytes of workspace beside inputs and results; None for 2 GiB.

    Returns:
        The loss in nats, a number or `[...]`, fp32 for half types.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device, number or budget, named with what was expected.
        IndexError: a label out of range; on a GPU only with `PARTITA_CHECK=1`, otherwise that token's loss is NaN and with it the gradients it has
            a part in.

    Source: `torch.nn.functional.linear_cross_entropy`, whose `options` are `memory_budget` here; the rest as in `cross_entropy`.

    Example:
        >>> import torch, partita
        >>> hidden, matrix = torch.eye(2, requires_grad=True), torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
        >>> loss = partita.linear_cross_entropy(hidden, matrix, torch.tensor([0, 0]))
        >>> loss.backward()
        >>> loss, hidden.grad
        (tensor(1.2395, grad_fn=<...>), tensor([[-0.2130,  0.1065],
                [-0.8935,  0.7870]]))
    """
    checks.tensor("input", input)
    checks.tensor("linear_weight", linear_weight)
    input, linear_weight, linear_bias = cast_to_autocast(input, linear_weight, linear_bias)  # type: ignore[assignment]
    _check(input, linear_weight, linear_bias, target)
    checks.choice("reduction", reduction, REDUCTIONS)
    _check_budget(memory_budget)
    ignore_index = -100 if ignore_index is None else ignore_index
    numbers: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "softcap": softcap,
        "z_loss": z_loss,
    }
    wide = acc_dtype(input.dtype)
    transformed = (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is not None
    )
    if (
        linear_weight.ndim > 2
        or target.is_floating_point()
        or transformed
        or (weight is not None and weight.requires_grad)
    ):
        logits = _logits(input, linear_weight, linear_bias).to(wide)
        if linear_weight.ndim == 2 and input.ndim > 2:
            logits = logits.movedim(-1, 1)
            target = target.movedim(-1, 1) if target.is_floating_point() else target
        return cross_entropy(logits, target, weight, reduction=reduction, **numbers).to(
            wide
        )  # under autocast it may be another
    rows = _flat(input, linear_weight, linear_bias, target)
    if weight is not None:
        checks.floating("weight", weight)
        checks.device("weight", weight, input, "input")
        checks.shape("weight", weight, [len(linear_weight)], "[C]")
        weight = weight.contiguous()
    options = checked_options(ignore_index, label_smoothing, softcap, z_loss)
    if input.device.type == "cpu" and plain_eager() and type(rows.input) in PLAIN:
        checks.labels("target", rows.target, len(linear_weight), ignore_index)
        return _without_ignored(rows, weight, reduction, options, memory_budget)
    return _loss(rows, weight, reduction, options, memory_budget).reshape(
        rows.shape if reduction == "none" else ()
    )


def _without_ignored(
    rows: _Rows,
    weight: Tensor | None,
    reduction: str,
    options: tuple[Any, ...],
    memory_budget: int | None,
) -> Tensor:
    """On a CPU, where it takes no waiting to know their number, ignored tokens are left out."""
    counts = (rows.target != options[0]).nonzero()[:, 0]
    if len(counts) == len(rows.target):
        return _loss(rows, weight, reduction, options, memory_budget).reshape(
            rows.shape if reduction == "none" else ()
        )
    few = rows._replace(input=rows.input[counts], target=rows.target[counts])
    loss = _loss(few, weight, reduction, options, memory_budget)
    return (
        loss.new_zeros(len(rows.target)).index_put((counts,), loss).reshape(rows.shape)
        if reduction == "none"
        else loss
    )


def _loss(
    rows: _Rows,
    weight: Tensor | None,
    reduction: str,
    options: tuple[Any, ...],
    memory_budget: int | None,
) -> Tensor:
    plan, backend, wanted = (
        rows.plan(memory_budget, reduction != "none"),
        current_backend(),
        rows.wanted,
    )
    tensors = (rows.input, rows.weight, rows.bias, rows.target, weight)
    numbers = (*options, reduction == "mean")
    if plan.name == "fast" and reduction != "none" and rows.input.dtype != torch.float16:
        if plain_eager():
            return apply(_linear.OnePass, wanted, backend, numbers, plan.chunk, *tensors)
        if torch.compiler.is_compiling():
            return _linear.OnePassTraced.apply(*tensors, *numbers, plan.chunk, *wanted, backend)[0]
    ignore_index, smoothing, softcap, _ = options
    classes = len(rows.weight)
    chunk, keep = chunk_and_save(plan, classes)
    nll, logsumexp, spread, *_ = _linear.Rows.apply(
        *tensors, 1.0, softcap, ignore_index, smoothing > 0, False, chunk, keep, backend
    )
    loss, z = loss_terms(nll, logsumexp, spread, rows.target, weight, classes, options)
    return reduce_losses(loss, z, rows.target, weight, classes, ignore_index, reduction)


def linear_token_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    memory_budget: int | None = None,
) -> TokenStats:
    """Token statistics straight from hidden states: `token_stats(input @ linear_weight.T + linear_bias, target, ...)`.

    Args:
        input: hidden states `[..., H]`, floating dtype.
        linear_weight: `[C, H]` in the same dtype.
        linear_bias: `[C]`, likewise.
        target: labels `[...]`, any integer dtype.
        temperature, ignore_index: as in `token_stats`.
        memory_budget: bytes of workspace beside inputs and results; None for 2 GiB.

    Returns:
        `TokenStats(logprob, logsumexp, entropy, argmax)`, fields `[...]`, fp32 (fp64 for fp64) in nats; the first three differentiable in hidden
        states, matrix and bias.

    Raises:
        TypeError, ValueError, IndexError: as in `token_stats` and `linear_cross_entropy`.

    Source: as `token_stats`, merged over chunks of the classes.

    Example:
        >>> import torch, partita
        >>> partita.linear_token_stats(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([2]))
        TokenStats(logprob=tensor([-1.3863]), logsumexp=tensor([1.3863]), entropy=tensor([1.3863]), argmax=tensor([0]))
    """
    checks.tensor("input", input)
    checks.tensor("linear_weight", linear_weight)
    input, linear_weight, linear_bias = cast_to_autocast(input, linear_weight, linear_bias)  # type: ignore[assignment]
    _check(input, linear_weight, linear_bias, target)
    if linear_weight.ndim != 2:
        raise ValueError(f"linear_weight: expected shape [C, H], got {list(linear_weight.shape)}")
    checks.number("temperature", temperature, low=0.0, open_low=True)
    checks.python_int("ignore_index", ignore_index)
    rows = _flat(input, linear_weight, linear_bias, target)
    plan = rows.plan(memory_budget, False)
    chunk, keep = chunk_and_save(plan, len(linear_weight))
    tensors = (rows.input, rows.weight, rows.bias, rows.target, None)
    numbers = (float(temperature), 0.0, ignore_index, False, True, chunk, keep, current_backend())
    nll, logsumexp, _, entropy, argmax, *_ = _linear.Rows.apply(*tensors, *numbers)
    return TokenStats(*(field.reshape(rows.shape) for field in (-nll, logsumexp, entropy, argmax)))
