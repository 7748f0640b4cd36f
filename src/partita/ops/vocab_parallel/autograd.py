"""Rows whose classes lie on several ranks: each rank's statistics, one gather of them, and the same merged result everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import is_double_backward, plain_eager
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.autograd import scale_gradient
from ..linear_heads import autograd as _linear
from ..linear_heads.common import RowStatistics
from ..linear_heads.plan import padded_width
from . import peers as _peers
from .backends import BACKENDS, one_pass_functions
from .reference import wide_product

# Their names from torch 2.13 on, and before.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = (
    getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
)


Classes = int | Sequence[int] | None


class Shard(NamedTuple):
    """Which classes a rank has.

    RowStatistics:
        group: the name of the process group.
        sizes: classes of each rank, in rank order.
        rank: in the group.
    """

    group: Any
    sizes: tuple[int, ...]
    rank: int

    @property
    def first(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def classes(self) -> int:
        return sum(self.sizes)

    def part(self, class_weight: Tensor | None) -> Tensor | None:
        """Of the weights of all classes, those of this rank."""
        return (
            None
            if class_weight is None
            else class_weight[self.first : self.first + self.sizes[self.rank]].contiguous()
        )


def shard_of(
    name: str, tensor: Tensor, dim: int, group: dist.ProcessGroup | None, classes: Classes
) -> Shard:
    """This rank's classes, which lie in a dimension of the tensor, among all."""
    local = tensor.shape[dim]
    if not dist.is_initialized():
        raise RuntimeError(
            "group: expected a process group, but torch.distributed is not initialised: call init_process_group, or use torchrun"
        )
    group = dist.group.WORLD if group is None else group
    if group is None or (rank := dist.get_rank(group)) < 0:
        raise ValueError("group: expected a process group that this rank belongs to")
    if tensor.is_cuda and not torch.compiler.is_compiling() and dist.get_backend(group) == "gloo":
        # It would end the process: https://github.com/pytorch/pytorch/issues/152645
        raise RuntimeError(
            f"group: expected NCCL for tensors on {tensor.device}, got Gloo, which cannot gather them"
        )
    world = dist.get_world_size(group)
    for size in classes if isinstance(classes, Sequence) else () if classes is None else (classes,):
        checks.python_int("classes", size)
    if isinstance(classes, int):
        each = -(-classes // world)
        sizes = tuple(max(0, min(each, classes - i * each)) for i in range(world))
    else:
        sizes = (local,) * world if classes is None else tuple(classes)
    if len(sizes) != world or sizes[rank] != local:
        expected = sizes[rank] if len(sizes) == world else f"a size for each of {world} ranks"
        raise ValueError(
            f"{name}: expected {expected} classes on rank {rank} (from classes={classes!r}), got {local}"
        )
    if sum(sizes) == 0:
        raise ValueError(f"{name}: expected at least one class")
    return Shard(group.group_name, sizes, rank)


def gathered(tensor: Tensor, group: Any) -> Tensor:
    """Of all ranks, along a new first dimension."""
    return functional.wait_tensor(_all_gather(tensor.contiguous()[None], 0, group))


def _sum(tensor: Tensor, group: Any) -> Tensor:
    """Over the ranks, to be waited for; what was given is overwritten where it can be."""
    if plain_eager():
        return torch.ops._c10d_functional.all_reduce_(tensor, "sum", group)
    return functional.all_reduce(tensor, "sum", group)


def _scattered_sum(tensor: Tensor, group: Any) -> Tensor:
    return _reduce_scatter(tensor, "sum", 0, group)


def _beside(a: Tensor, b: Tensor) -> Tensor:
    """a b, while ranks exchange something. In two parts: a product occupies the whole device, and NCCL's kernel, which comes behind it, starts when
    the first part leaves."""
    first = len(a) // 4 // 128 * 128
    result = torch.empty((len(a), b.shape[1]), dtype=a.dtype, device=a.device)
    for part in (slice(0, first), slice(first, None)) if first else (slice(None),):
        torch.mm(a[part], b, out=result[part])
    return result


class Numbers(NamedTuple):
    temperature: float
    softcap: float
    ignore_index: int
    spread: bool
    entropy: bool


def _words(like: Tensor, spread: bool, entropy: bool) -> Tensor:
    return like.new_empty(
        (4 + 3 * spread + 2 * entropy, like.shape[0]), dtype=acc_dtype(like.dtype)
    )


def _fields_fake(found: Tensor, *args: Any) -> tuple[Tensor, ...]:
    spread, entropy = args[-2:]
    rows = found.shape[2]
    sizes = (
        rows,
        rows,
        rows if spread else 0,
        rows if entropy else 0,
        rows if entropy else 0,
        rows,
        rows,
    )
    return tuple(
        found.new_empty(size, dtype=torch.int64 if i == 4 else found.dtype)
        for i, size in enumerate(sizes)
    )


def _coefficients_fake(
    target: Tensor,
    nll: Any,
    logsumexp: Any,
    spread: Any,
    entropy: Any,
    class_weight: Any,
    entropies: Tensor,
    spreads: bool,
    *_: Any,
) -> tuple[Tensor, ...]:
    like = next(grad for grad in (nll, logsumexp, spread, entropy) if grad is not None)
    rows = target.shape[0]
    wanted = (
        True,
        True,
        entropy is not None and entropies.numel() > 0,
        spread is not None and spreads,
    )
    return tuple(like.new_empty(rows if wants else 0) for wants in wanted)


_STATE = "Tensor target, Tensor? class_weight, int first, float temperature, float softcap, bool spread, bool entropy"
_OF_ROWS = "Tensor target, Tensor? class_weight, Tensor maximum, Tensor sumexp, float temperature, float softcap"
_COEFFICIENTS = "Tensor pull, Tensor at_label, Tensor? log_pull, Tensor? by_class"
of_logits = register.define(
    f"parallel_logits(Tensor logits, {_STATE}, str backend) -> Tensor",
    lambda logits, target, class_weight, first, temperature, softcap, spread, entropy: _words(
        logits, spread, entropy
    ),
    backends=BACKENDS,
)
of_hidden = register.define(
    f"parallel_linear(Tensor input, Tensor weight, Tensor? bias, {_STATE}, int chunk, bool keep, str backend) -> (Tensor, Tensor)",
    lambda input, weight, bias, target, class_weight, first, temperature, softcap, spread, entropy, chunk, keep: (
        _words(input, spread, entropy),
        input.new_empty(input.shape[0] * padded_width(weight.shape[0]) if keep else 0),
    ),
    backends=BACKENDS,
)
fields_of = register.define(
    "parallel_fields(Tensor found, Tensor target, int classes, int first, int rank, float temperature, int ignore_index, bool spread, bool entropy,"
    " str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fields_fake,
    backends=BACKENDS,
)
coefficients = register.define(
    "parallel_coefficients(Tensor target, Tensor? nll, Tensor? logsumexp, Tensor? spread, Tensor? entropy, Tensor? class_weight, Tensor entropies,"
    " bool spreads, int classes, float temperature, int ignore_index, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _coefficients_fake,
    backends=BACKENDS,
)
gradient = register.define(
    f"parallel_gradient({_COEFFICIENTS}, Tensor logits, {_OF_ROWS}, str backend) -> Tensor",
    lambda *args: torch.empty(args[4].shape, dtype=args[4].dtype, device=args[4].device),
    backends=BACKENDS,
)
gradient_ = register.define(
    f"parallel_gradient_(Tensor(a!) logits, {_COEFFICIENTS}, {_OF_ROWS}, str backend) -> ()",
    lambda *_: None,
    backends=BACKENDS,
)


def _merged(
    words: Tensor, target: Tensor, shard: Shard, numbers: Numbers, backend: str
) -> tuple[Tensor, ...]:
    """The fields, the same bits on every rank."""
    found = gathered(words, shard.group)
    return fields_of(
        found,
        target,
        shard.classes,
        shard.first,
        shard.rank,
        numbers.temperature,
        numbers.ignore_index,
        *numbers[3:],
        backend,
    )


def _coefficients(
    grads: tuple[Tensor | None, ...],
    target: Tensor,
    class_weight: Tensor | None,
    fields: RowStatistics,
    shard: Shard,
    numbers: Numbers,
    backend: str,
) -> tuple[Any, ...]:
    options = (
        fields.entropy,
        numbers.spread,
        shard.classes,
        numbers.temperature,
        numbers.ignore_index,
        backend,
    )
    found = coefficients(target, *grads[:4], class_weight, *options)
    return *found[:2], *(tensor if tensor.numel() else None for tensor in found[2:])


class Logits(torch.autograd.Function):
    """The differentiable fields of rows of logits, of which this rank has some classes."""

    @staticmethod
    def forward(
        logits: Tensor,
        target: Tensor,
        class_weight: Tensor | None,
        shard: Shard,
        numbers: Numbers,
        backend: str,
    ) -> tuple[Tensor, ...]:
        temperature, softcap, _, spread, entropy = numbers
        place, of_class = target - shard.first, shard.part(class_weight)
        words = of_logits(
            logits, place, of_class, shard.first, temperature, softcap, spread, entropy, backend
        )
        return _merged(words, target, shard, numbers, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.shard, ctx.numbers, ctx.backend = inputs
        ctx.mark_non_differentiable(*output[4:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        logits, target, class_weight, *outputs = ctx.saved_tensors
        if is_double_backward():
            raise RuntimeError(
                "partita.parallel: no second derivative; gather the logits and use the op of one device"
            )
        if all(grad is None for grad in grads[:4]):
            return (None,) * 6
        numbers, shard, fields = ctx.numbers, ctx.shard, RowStatistics(*outputs)
        c = _coefficients(grads, target, class_weight, fields, shard, numbers, ctx.backend)
        statistics = (fields.maximum, fields.sumexp, numbers.temperature, numbers.softcap)
        result = gradient(
            *c, logits, target - shard.first, shard.part(class_weight), *statistics, ctx.backend
        )
        return result, None, None, None, None, None


def one_pass(
    logits: Tensor,
    target: Tensor,
    shard: Shard,
    ignore_index: int,
    softcap: float,
    z_loss: float,
    mean: bool,
) -> tuple[Tensor, Tensor] | None:
    """The mean or the sum of the losses, and the gradient of this rank's logits; None where the ranks' kernels cannot reach one another."""
    words_of, run = one_pass_functions()
    group = dist.distributed_c10d._resolve_process_group(shard.group)  # type: ignore[attr-defined]
    boxes = _peers.boxes_for(
        group, logits.device, words_of(len(logits), shard.sizes, logits.element_size())
    )
    if boxes is None:
        return None
    loss, grad = run(
        logits,
        target.contiguous(),
        *boxes,
        shard.sizes,
        shard.rank,
        ignore_index,
        softcap,
        z_loss,
        mean,
    )
    return loss, grad


class OnePass(torch.autograd.Function):
    """The reduced loss of rows of logits, of which this rank has some classes, with the gradient formed beside it."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        found: tuple[Tensor, Tensor],
        options: tuple[Any, ...],
        backend: str,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        loss, ctx.gradient = found
        ctx.options, ctx.backend = options, backend
        ctx.save_for_backward(logits, target)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if is_double_backward():
            raise RuntimeError(
                "partita.parallel: no second derivative; gather the logits and use the op of one device"
            )
        if grads[0] is None:
            return (None,) * 5
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:  # a second backward pass
            found = one_pass(*ctx.saved_tensors, *ctx.options)
            assert found is not None
            gradient = found[1]
        scale_gradient.eager(gradient, grads[0], ctx.backend)
        return gradient, None, None, None, None


class Hidden(torch.autograd.Function):
    """The differentiable fields of rows of hidden states, of whose matrix this rank has some classes. The gradient of the hidden states is complete;
    where the ranks had each some of their tokens (`scattered`), it is that of these."""

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        shard: Shard,
        numbers: Numbers,
        chunk: int,
        keep: bool,
        scattered: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        temperature, softcap, _, spread, entropy = numbers
        if scattered:
            input = gathered(input, shard.group).flatten(0, 1)
        place, of_class = target - shard.first, shard.part(class_weight)
        options = (
            place,
            of_class,
            shard.first,
            temperature,
            softcap,
            spread,
            entropy,
            chunk,
            keep,
            backend,
        )
        words, kept = of_hidden(input, weight, bias, *options)
        return *_merged(words, target, shard, numbers, backend), kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.shard, ctx.numbers, ctx.chunk, keep, ctx.scattered, ctx.backend = inputs
        ctx.mark_non_differentiable(*output[4:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[:-1])
        ctx.kept = output[-1] if keep else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        input, weight, bias, target, class_weight, *outputs = ctx.saved_tensors
        if is_double_backward():
            raise RuntimeError(
                "partita.parallel: no second derivative; gather the matrix and use the op of one device"
            )
        if all(grad is None for grad in grads[:4]):  # on all ranks alike
            return (None,) * 11
        numbers, shard, fields = ctx.numbers, ctx.shard, RowStatistics(*outputs)
        to_input, to_weight, to_bias = ctx.needs_input_grad[:3]
        c = _coefficients(grads, target, class_weight, fields, shard, numbers, ctx.backend)
        place, of_class, wide = target - shard.first, shard.part(class_weight), fields.nll.dtype
        if ctx.scattered:
            input = gathered(input, shard.group).flatten(0, 1)
        reduce = _scattered_sum if ctx.scattered else _sum
        options = (fields.maximum, fields.sumexp, numbers.temperature, numbers.softcap)
        kept, ctx.kept = ctx.kept, None
        d_input = d_weight = d_bias = input.new_empty(0)
        if kept is None:
            args = (
                *c,
                input,
                weight,
                bias,
                place,
                of_class,
                *options[:2],
                d_input,
                *options[2:],
                ctx.chunk,
                to_input,
                to_weight,
                to_bias,
            )
            d_input, d_weight, d_bias = _linear.rows_backward(*args, ctx.backend)
            if to_input:
                d_input = reduce(d_input.to(wide), shard.group)
        else:
            logits = kept.view(len(input), padded_width(len(weight)))[:, : len(weight)]
            gradient_.eager(logits, *c, place, of_class, *options, ctx.backend)
            if to_input:
                d_input = reduce(wide_product(logits, weight), shard.group)
            if to_weight:
                d_weight = _beside(logits.T, input) if to_input else torch.mm(logits.T, input)
            if to_bias and bias is not None:
                d_bias = logits.sum(0, dtype=wide).to(bias.dtype)
        if to_input:
            d_input = functional.wait_tensor(d_input).to(input.dtype)
        found = ((d_input, to_input), (d_weight, to_weight), (d_bias, to_bias))
        return *(grad if wants else None for grad, wants in found), *(None,) * 8
