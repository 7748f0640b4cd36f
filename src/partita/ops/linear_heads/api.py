"""Cross-entropy and token statistics from hidden states and the matrix of the vocabulary.

The full logits are in memory for small calls only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import apply, autocast_dtype, plain_eager
from ...runtime.backend import current_backend
from ...runtime.checks import FLOATING, REDUCTIONS
from ...runtime.dtypes import acc_dtype
from ...runtime.register import PLAIN
from ..cross_entropy.api import TokenStats, cross_entropy, token_stats
from . import autograd
from .common import cast_to_autocast, checked_options, chunk_and_save, loss_terms, reduce_losses
from .composed import composed_cross_entropy, is_plain
from .plan import MemoryPlan, check_budget, is_small, linear_cross_entropy_plan

FEW_LABELS = 128  # that many labels are read in Python in less time than one tensor operation takes


class _HeadInputs(NamedTuple):
    """The tensors as the ops take them.

    Fields:
        input: hidden states, `[M, H]`.
        weight: matrix of the vocabulary, `[C, H]`.
        bias: its bias, `[C]`, or None.
        target: labels, `[M]` int64.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor

    @property
    def wanted(self) -> tuple[bool, bool, bool]:
        """Return whether hidden states, matrix and bias need a gradient."""
        if not torch.is_grad_enabled():
            return False, False, False
        bias_grad = self.bias is not None and self.bias.requires_grad
        return self.input.requires_grad, self.weight.requires_grad, bias_grad

    def plan(self, memory_budget: int | None, reduced: bool) -> MemoryPlan:
        input_grad, weight_grad, bias_grad = self.wanted
        tokens, hidden = self.input.shape
        return linear_cross_entropy_plan(
            tokens,
            hidden,
            len(self.weight),
            self.input.dtype,
            memory_budget=memory_budget,
            input_grad=input_grad,
            weight_grad=weight_grad or bias_grad,
            reduced=reduced,
        )


def _is_usual(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> bool:
    """Return whether these are plain tensors `[M, H]`, `[C, H]`, `[C]` and `[M]`, in eager mode.

    Their dtypes and devices fit each other too, so that no other check of them is needed. This is
    one expression, since a small call takes little longer than its checks.
    """
    return (
        type(input) in PLAIN
        and type(weight) in PLAIN
        and type(target) is Tensor
        and input.layout is weight.layout is torch.strided
        and not (input.is_nested or weight.is_nested)
        and len(shape := input.shape) == 2
        and len(matrix_shape := weight.shape) == 2
        and matrix_shape[0] != 0
        and shape[1] == matrix_shape[1]
        and target.shape == shape[:1]
        and target.dtype is torch.int64
        and target.is_contiguous()
        and (dtype := input.dtype) in FLOATING
        and weight.dtype is dtype
        and weight.device == (device := input.device)
        and target.device == device
        and (
            bias is None
            or (
                type(bias) in PLAIN
                and bias.dtype is dtype
                and bias.device == device
                and bias.shape == matrix_shape[:1]
            )
        )
        and autocast_dtype(device) is None
        and plain_eager()
    )


def _cast_and_check(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, matrix and bias in the dtype of autocast; raise unless they fit."""
    checks.tensor("input", input)
    checks.tensor("linear_weight", weight)
    if bias is not None:
        checks.tensor("linear_bias", bias)
    input, weight, bias = cast_to_autocast(input, weight, bias)  # type: ignore[assignment]
    _check(input, weight, bias, target)
    return input, weight, bias


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | None) -> None:
    for name, tensor in (("input", input), ("linear_weight", weight), ("linear_bias", bias)):
        if tensor is not None:
            checks.floating(name, tensor)
            checks.device(name, tensor, input, "input")
            if tensor.dtype != input.dtype:
                raise TypeError(
                    f"{name}: expected the dtype of input, {input.dtype}, got {tensor.dtype}"
                )
    if target is not None:
        checks.tensor("target", target)
        checks.device("target", target, input, "input")
    if weight.ndim < 2 or len(weight) == 0:
        raise ValueError(
            "linear_weight: expected shape [C, H] or [C, d1, ..., H] with at least one class,"
            f" got {list(weight.shape)}"
        )
    if input.ndim == 0 or input.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"input: expected shape [..., H] with H = {weight.shape[-1]}, got {list(input.shape)}"
        )
    if weight.ndim > 2 and input.ndim != 2:
        raise ValueError(
            f"input: expected shape [N, H] with a matrix of {weight.ndim} dimensions,"
            f" got {list(input.shape)}"
        )
    if bias is not None:
        checks.shape("linear_bias", bias, weight.shape[:-1], "linear_weight without H")


def _flat(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> _HeadInputs:
    checks.integer("target", target)
    checks.shape("target", target, input.shape[:-1], "input without H")
    labels = target.reshape(-1).long().contiguous()  # a narrow type would wrap the bounds
    return _HeadInputs(input[None].flatten(0, -2), weight, bias, labels)


def _logits(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute all logits.

    The classes are in the last dimension for a matrix `[C, H]`, in dimension 1 for one with more
    dimensions.
    """
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
        linear_weight: `[C, H]` in the same dtype, or `[C, d1, ..., dK, H]`.
        target: labels `[...]` (`[N, d1, ..., dK]`), any integer dtype; or probabilities
            `[..., C]` (`[N, C, d1, ..., dK]`).
        linear_bias: `[C]` or `[C, d1, ..., dK]`.
        weight: `[C]`, one factor for each class.
        reduction: `none` (the shape of the labels), `mean` (over the class weights of the tokens
            that are not ignored) or `sum`.
        ignore_index: tokens with this label have loss and gradient zero, and the mean does not
            count them; None is -100.
        label_smoothing, softcap, z_loss: as in `cross_entropy`.
        memory_budget: bytes of workspace in addition to inputs and results; None for 2 GiB.

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
    usual = _is_usual(input, linear_weight, linear_bias, target)
    if not usual:
        checked = _cast_and_check(input, linear_weight, linear_bias, target)
        input, linear_weight, linear_bias = checked
    if reduction not in REDUCTIONS:
        checks.choice("reduction", reduction, REDUCTIONS)
    if memory_budget is not None:
        check_budget(memory_budget)
    ignore_index = -100 if ignore_index is None else ignore_index
    weight_grad = weight is not None and weight.requires_grad
    if weight_grad or (not usual and _needs_logits(linear_weight, target)):
        dtype = acc_dtype(input.dtype)
        logits = _logits(input, linear_weight, linear_bias).to(dtype)
        if linear_weight.ndim == 2 and input.ndim > 2:
            logits = logits.movedim(-1, 1)
            target = target.movedim(-1, 1) if target.is_floating_point() else target
        loss = cross_entropy(
            logits,
            target,
            weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=softcap,
            z_loss=z_loss,
        )
        return loss.to(dtype)  # autocast may have changed the dtype
    if usual:
        inputs = _HeadInputs(input, linear_weight, linear_bias, target)
    else:
        inputs = _flat(input, linear_weight, linear_bias, target)
    if weight is not None:
        checks.floating("weight", weight)
        checks.device("weight", weight, input, "input")
        checks.shape("weight", weight, [len(linear_weight)], "[C]")
        weight = weight.contiguous()
    options = checked_options(ignore_index, label_smoothing, softcap, z_loss)
    if not usual and not is_plain(input, linear_weight, linear_bias, target):
        loss = _planned_loss(inputs, weight, reduction, options, memory_budget)
    elif input.is_cpu:
        loss = _loss_without_ignored(inputs, weight, reduction, options, memory_budget)
    else:
        loss = _loss(inputs, weight, reduction, options, memory_budget)
    return loss if usual or reduction != "none" else loss.reshape(target.shape)


def _needs_logits(linear_weight: Tensor, target: Tensor | None) -> bool:
    """Return whether the loss has to be computed from all logits at once."""
    transformed = (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is not None
    )
    has_probabilities = target is not None and target.is_floating_point()
    return linear_weight.ndim > 2 or has_probabilities or transformed


def _loss_without_ignored(
    inputs: _HeadInputs,
    weight: Tensor | None,
    reduction: str,
    options: tuple[int, float, float, float],
    memory_budget: int | None,
) -> Tensor:
    """Compute the loss of the tokens that are not ignored.

    A CPU knows their number without waiting, so that the products can leave the others out.
    """
    labels, ignore_index = inputs.target, options[0]
    if labels.shape[0] <= FEW_LABELS:
        has_ignored = ignore_index in labels.tolist()
    else:
        has_ignored = bool((labels == ignore_index).any())
    if not has_ignored:
        return _loss(inputs, weight, reduction, options, memory_budget)
    valid = (labels != ignore_index).nonzero()[:, 0]
    valid_inputs = inputs._replace(
        input=inputs.input.index_select(0, valid), target=labels.index_select(0, valid)
    )
    try:
        loss = _loss(valid_inputs, weight, reduction, options, memory_budget)
    except IndexError:  # This check finds the place of the label among all tokens.
        checks.labels("target", labels, len(inputs.weight), ignore_index)
        raise
    if reduction != "none":
        return loss
    return loss.new_zeros(len(labels)).index_put((valid,), loss)


def _loss(
    inputs: _HeadInputs,
    weight: Tensor | None,
    reduction: str,
    options: tuple[int, float, float, float],
    memory_budget: int | None,
) -> Tensor:
    """Compute the loss of a plain eager call."""
    input, matrix, *_ = inputs
    if is_small(input.shape[0], matrix.shape[0], input.dtype, memory_budget):
        return composed_cross_entropy(*inputs, weight, *options, reduction)
    return _planned_loss(inputs, weight, reduction, options, memory_budget)


def _planned_loss(
    inputs: _HeadInputs,
    weight: Tensor | None,
    reduction: str,
    options: tuple[int, float, float, float],
    memory_budget: int | None,
) -> Tensor:
    """Compute the loss in the chunks of the plan."""
    plan = inputs.plan(memory_budget, reduction != "none")
    backend, wanted = current_backend(), inputs.wanted
    head = (inputs.input, inputs.weight, inputs.bias, inputs.target, weight)
    if plan.name == "fast" and reduction != "none" and inputs.input.dtype != torch.float16:
        loss_options = (*options, reduction == "mean")
        if plain_eager():
            return apply(autograd.LinearOnePass, wanted, backend, loss_options, plan.chunk, *head)
        if torch.compiler.is_compiling():
            traced = (*head, *loss_options, plan.chunk, *wanted, backend)
            return apply(autograd.LinearOnePassTraced, *traced)[0]
    ignore_index, label_smoothing, softcap, _ = options
    classes = len(inputs.weight)
    chunk, save_logits = chunk_and_save(plan, classes)
    needs_smoothing, needs_entropy = label_smoothing > 0, False
    numbers = (1.0, softcap, ignore_index, needs_smoothing, needs_entropy, chunk, save_logits)
    nll, logsumexp, smoothing_loss, *_ = apply(autograd.LinearRows, *head, *numbers, backend)
    loss, z = loss_terms(nll, logsumexp, smoothing_loss, inputs.target, weight, classes, options)
    return reduce_losses(loss, z, inputs.target, weight, classes, ignore_index, reduction)


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
) -> TokenStats:
    """Compute token statistics from hidden states, without the logits in memory.

    They are `token_stats(input @ linear_weight.T + linear_bias, target, ...)`, and a small call
    computes just that; see `linear_cross_entropy`.

    Args:
        input: hidden states `[..., H]`, floating dtype.
        linear_weight: `[C, H]` in the same dtype.
        linear_bias: `[C]` in the same dtype.
        target: labels `[...]`, any integer dtype; None for the arg-max, as in `token_stats`.
        temperature, softcap, ignore_index: as in `token_stats`.
        memory_budget: bytes of workspace in addition to inputs and results; None for 2 GiB.

    Returns:
        `TokenStats(logprob, logsumexp, entropy, argmax)`, fields `[...]`, fp32 (fp64 for fp64) in
        nats. The first three are differentiable in hidden states, matrix and bias.

    Raises:
        TypeError, ValueError, IndexError: as in `token_stats` and `linear_cross_entropy`.

    Source: as `token_stats`, merged over chunks of the classes.

    Example:
        >>> import torch, partita
        >>> partita.linear_token_stats(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([2]))
        TokenStats(logprob=tensor([-1.3863]), logsumexp=tensor([1.3863]),
                   entropy=tensor([1.3863]), argmax=tensor([0]))
    """
    usual = target is not None and _is_usual(input, linear_weight, linear_bias, target)
    if not usual:
        checked = _cast_and_check(input, linear_weight, linear_bias, target)
        input, linear_weight, linear_bias = checked
        if linear_weight.ndim != 2:
            shape = list(linear_weight.shape)
            raise ValueError(f"linear_weight: expected shape [C, H], got {shape}")
    if memory_budget is not None:
        check_budget(memory_budget)
    is_composed = not usual and _needs_logits(linear_weight, target)
    if is_composed or (
        (usual or is_plain(input, linear_weight, linear_bias, target))
        and is_small(input.shape[:-1].numel(), len(linear_weight), input.dtype, memory_budget)
    ):
        return token_stats(
            torch.nn.functional.linear(input, linear_weight, linear_bias),
            target,
            temperature=temperature,
            softcap=softcap,
            ignore_index=ignore_index,
        )
    checks.number("temperature", temperature, low=0.0, open_low=True)
    if softcap is not None:
        checks.number("softcap", softcap, low=0.0, open_low=True)
    checks.python_int("ignore_index", ignore_index)
    labels = target
    if labels is None:
        labels, ignore_index = input.new_zeros(input.shape[:-1], dtype=torch.int64), -100
    inputs = _flat(input, linear_weight, linear_bias, labels)
    plan = inputs.plan(memory_budget, False)
    chunk, save_logits = chunk_and_save(plan, len(linear_weight))
    needs_smoothing, needs_entropy = False, True
    nll, logsumexp, _, entropy, argmax, *_ = apply(
        autograd.LinearRows,
        *inputs[:3],
        None if target is None else inputs.target,
        None,
        float(temperature),
        float(softcap or 0.0),
        ignore_index,
        needs_smoothing,
        needs_entropy,
        chunk,
        save_logits,
        current_backend(),
    )
    fields = (-nll, logsumexp, entropy, argmax)
    if input.ndim == 2:
        return TokenStats(*fields)
    return TokenStats(*(field.reshape(input.shape[:-1]) for field in fields))
