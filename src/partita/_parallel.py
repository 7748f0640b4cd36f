"""Rows whose classes lie on several ranks: each rank's statistics, one gather of them, and the same merged result everywhere."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor

from . import _linear
from ._autograd import plain_eager, twice
from .reference import linear_cross_entropy as reference
from .reference.linear_cross_entropy import Fields, State
from .reference.parallel import wide_product


class Shard(NamedTuple):
    """Which classes a rank has.

    Fields:
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
        return None if class_weight is None else class_weight[self.first : self.first + self.sizes[self.rank]].contiguous()


def gathered(tensor: Tensor, group: Any) -> Tensor:
    """Of all ranks, along a new first dimension."""
    return functional.wait_tensor(functional.all_gather_tensor(tensor.contiguous()[None], 0, group))


def merged(state: State, shard: Shard, class_weight: Tensor | None, temperature: float) -> State:
    """The state after the classes of all ranks, in rank order: the same bits on each of them. NaN where a rank has other classes than is thought."""
    wide, size = state.maximum.dtype, torch.full_like(state.maximum, shard.sizes[shard.rank])
    rows = [state.maximum, state.sumexp, state.label, size]
    if state.origin is not None and state.spread is not None:
        weight = shard.part(class_weight)
        rows += [state.origin, state.spread, size if weight is None else weight.sum(dtype=wide).expand_as(size)]
    if state.surprise is not None and state.argmax is not None:
        bits = torch.int32 if wide == torch.float32 else torch.int64
        rows += [state.surprise, (state.argmax + shard.first).to(bits).view(wide)]
    found = gathered(torch.stack(rows), shard.group)
    maxima, sums, labels, sizes = found[:, :4].unbind(1)
    maximum = maxima.amax(0)
    shift = reference.finite(maximum)
    scale = ((maxima - shift) / temperature).exp()
    expected = torch.tensor(shard.sizes, dtype=wide).to(sizes.device, non_blocking=True) if not sizes.is_cuda else _sizes_on(shard, sizes)
    spoilt = torch.where(sizes == expected[:, None], 0.0, torch.nan).to(wide).sum(0)
    origin = spread = surprise = argmax = None
    if state.origin is not None:
        origins, spreads, weights = found[:, 4:7].unbind(1)
        origin = origins[0]
        spread = (spreads + weights * (origin - origins)).sum(0)
    if state.surprise is not None:
        surprises, places = found[:, -2:].unbind(1)
        surprise = (scale * (surprises - sums * (shift - torch.where(maxima == -torch.inf, 0.0, maxima)) / temperature)).sum(0)
        places = places.contiguous().view(torch.int32 if wide == torch.float32 else torch.int64).long()
        argmax = torch.where(maxima == maximum, places, shard.classes).amin(0)
    return State(maximum, (sums * scale).sum(0) + spoilt, labels.amax(0), origin, spread, surprise, argmax)


def _sizes_on(shard: Shard, like: Tensor) -> Tensor:
    """Made on the device, so that nothing waits and graphs can hold it."""
    return torch.stack([torch.full((), size, dtype=like.dtype, device=like.device) for size in shard.sizes])


class Numbers(NamedTuple):
    temperature: float
    softcap: float
    ignore_index: int
    spread: bool
    entropy: bool


class Logits(torch.autograd.Function):
    """The differentiable fields of rows of logits, of which this rank has some classes."""

    @staticmethod
    def forward(logits: Tensor, target: Tensor, class_weight: Tensor | None, shard: Shard, numbers: Numbers, backend: str) -> tuple[Tensor, ...]:
        temperature, softcap, ignore_index, spread, entropy = numbers
        found = _linear.logits_state(logits, target - shard.first, shard.part(class_weight), temperature, softcap, spread, entropy, backend)
        state = merged(reference.state_of(found, spread, entropy), shard, class_weight, temperature)
        return tuple(reference.fields_of(state, target, class_weight, shard.classes, temperature, ignore_index))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.shard, ctx.numbers, ctx.backend = inputs
        ctx.mark_non_differentiable(*output[4:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        logits, target, class_weight, *outputs = ctx.saved_tensors
        if twice():
            raise RuntimeError("partita.parallel: no second derivative; gather the logits and use the op of one device")
        numbers, shard, fields = ctx.numbers, ctx.shard, Fields(*outputs)
        nll, logsumexp, spread, entropy = grads[:4]
        rest = (target, class_weight, fields, shard.classes, numbers.temperature, numbers.ignore_index)
        c = reference.coefficients(nll, logsumexp, spread, entropy, *rest)
        statistics = (fields.maximum, fields.sumexp, numbers.temperature, numbers.softcap)
        result = _linear.logits_gradient(*c, logits, target - shard.first, shard.part(class_weight), *statistics, ctx.backend)
        return result, None, None, None, None, None


class Hidden(torch.autograd.Function):
    """The differentiable fields of rows of hidden states, of whose matrix this rank has some classes. The gradient of the hidden states is complete;
    where the ranks had each some of their tokens (`scattered`), it is that of these."""

    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, shard: Shard, numbers: Numbers, chunk: int,
        keep: bool, scattered: bool, backend: str,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        temperature, softcap, ignore_index, spread, entropy = numbers
        if scattered:
            input = gathered(input, shard.group).flatten(0, 1)
        place, of_class = target - shard.first, shard.part(class_weight)
        *found, kept = _linear.state(input, weight, bias, place, of_class, temperature, softcap, spread, entropy, chunk, keep, backend)
        state = merged(reference.state_of(found, spread, entropy), shard, class_weight, temperature)
        return *reference.fields_of(state, target, class_weight, shard.classes, temperature, ignore_index), kept

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
        if twice():
            raise RuntimeError("partita.parallel: no second derivative; gather the matrix and use the op of one device")
        numbers, shard, fields = ctx.numbers, ctx.shard, Fields(*outputs)
        to_input, to_weight, to_bias = ctx.needs_input_grad[:3]
        nll, logsumexp, spread, entropy = grads[:4]
        rest = (target, class_weight, fields, shard.classes, numbers.temperature, numbers.ignore_index)
        c = reference.coefficients(nll, logsumexp, spread, entropy, *rest)
        place, of_class, wide = target - shard.first, shard.part(class_weight), fields.nll.dtype
        if ctx.scattered:
            input = gathered(input, shard.group).flatten(0, 1)
        reduce = functional.reduce_scatter_tensor if ctx.scattered else lambda t, op, _, group: functional.all_reduce(t, op, group)
        options = (fields.maximum, fields.sumexp, numbers.temperature, numbers.softcap)
        kept, ctx.kept = ctx.kept, None
        d_input = d_weight = d_bias = input.new_empty(0)
        if kept is None:
            args = (*c, input, weight, bias, place, of_class, *options[:2], d_input, *options[2:], ctx.chunk, to_input, to_weight, to_bias)
            run = _linear.rows_backward.eager if plain_eager() else _linear.rows_backward
            d_input, d_weight, d_bias = run(*args, ctx.backend)
            if to_input:
                d_input = reduce(d_input.to(wide), "sum", 0, shard.group)
        else:
            logits = kept.view(len(input), -1)[:, : len(weight)]
            _linear.descend.eager(logits, *c, place, of_class, *options, ctx.backend)
            if to_input:  # on its way while the other product runs
                d_input = reduce(wide_product(logits, weight), "sum", 0, shard.group)
            if to_weight:
                d_weight = torch.mm(logits.T, input)
            if to_bias and bias is not None:
                d_bias = logits.sum(0, dtype=wide).to(bias.dtype)
        if to_input:
            d_input = functional.wait_tensor(d_input).to(input.dtype)
        found = ((d_input, to_input), (d_weight, to_weight), (d_bias, to_bias))
        return *(grad if wants else None for grad, wants in found), *(None,) * 8
