"""The classes of each rank, and the collectives that losses over a sharded vocabulary use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...runtime import checks, private_names
from ...runtime.autograd import is_double_backward, plain_eager


def collectives() -> Any:
    """Return the collectives that compilers trace, or those that serve eager mode without them."""
    found = private_names.functional_collectives()
    return PlainCollectives if found is None else found


class PlainCollectives:
    """The same collectives by the functions of `torch.distributed`, which finish at once."""

    @staticmethod
    def all_gather_into_tensor(tensor: Tensor, world: int, name: Any) -> Tensor:
        result = tensor.new_empty(world * len(tensor), *tensor.shape[1:])
        dist.all_gather_into_tensor(result, tensor, private_names.resolve_process_group(name))
        return result

    @staticmethod
    def all_reduce_(tensor: Tensor, operation: str, name: Any) -> Tensor:
        assert operation == "sum"
        dist.all_reduce(tensor, group=private_names.resolve_process_group(name))
        return tensor

    @staticmethod
    def all_reduce(tensor: Tensor, operation: str, name: Any) -> Tensor:
        return PlainCollectives.all_reduce_(tensor.clone(), operation, name)

    @staticmethod
    def reduce_scatter_tensor(tensor: Tensor, operation: str, world: int, name: Any) -> Tensor:
        assert operation == "sum"
        result = tensor.new_empty(len(tensor) // world, *tensor.shape[1:])
        group = private_names.resolve_process_group(name)
        dist.reduce_scatter_tensor(result, tensor, group=group)
        return result

    @staticmethod
    def all_to_all_single(
        tensor: Tensor, received: list[int], sent: list[int], name: Any
    ) -> Tensor:
        result = tensor.new_empty(sum(received), *tensor.shape[1:])
        group = private_names.resolve_process_group(name)
        dist.all_to_all_single(result, tensor, received, sent, group=group)
        return result

    @staticmethod
    def wait_tensor(tensor: Tensor) -> Tensor:
        return tensor


_collectives = collectives()

Classes = int | Sequence[int] | None  # the `classes` argument of the public functions


class VocabShard(NamedTuple):
    """The classes that this rank has, among those of all ranks."""

    group: Any  # the name of the process group
    sizes: tuple[int, ...]  # the number of classes of each rank, in rank order
    rank: int  # the index of this rank in the group

    @property
    def first_class(self) -> int:
        """The index of this rank's first class among all classes."""
        return sum(self.sizes[: self.rank])

    @property
    def classes(self) -> int:
        """The number of classes of all ranks."""
        return sum(self.sizes)

    def local(self, target: Tensor, class_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return labels and class weights, `[C]`, relative to this rank's classes."""
        if class_weight is not None:
            end = self.first_class + self.sizes[self.rank]
            class_weight = class_weight[self.first_class : end].contiguous()
        return target - self.first_class, class_weight


def vocab_shard(
    name: str, tensor: Tensor, dim: int, group: dist.ProcessGroup | None, classes: Classes
) -> VocabShard:
    """Check `group` and `classes`, and return the shard of a tensor with its classes in `dim`."""
    local = tensor.shape[dim]
    if not dist.is_initialized():
        raise RuntimeError(
            "group: expected a process group, but torch.distributed is not initialised: call"
            " init_process_group, or use torchrun"
        )
    group = dist.group.WORLD if group is None else group
    if group is None or (rank := dist.get_rank(group)) < 0:
        raise ValueError("group: expected a process group that this rank belongs to")
    if tensor.is_cuda and not torch.compiler.is_compiling() and dist.get_backend(group) == "gloo":
        # The gather would end the process: https://github.com/pytorch/pytorch/issues/152645
        raise RuntimeError(
            f"group: expected NCCL for tensors on {tensor.device}, got Gloo, which cannot gather"
            " them"
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
            f"{name}: expected {expected} classes on rank {rank} (from classes={classes!r}),"
            f" got {local}"
        )
    if sum(sizes) == 0:
        raise ValueError(f"{name}: expected at least one class")
    return VocabShard(group.group_name, sizes, rank)


def gather_ranks(tensor: Tensor, shard: VocabShard) -> Tensor:
    """Return the tensors of all ranks, stacked along a new first dimension."""
    gathered = _collectives.all_gather_into_tensor(
        tensor.contiguous()[None], len(shard.sizes), shard.group
    )
    return wait_for(gathered)


def sum_over_ranks(tensor: Tensor, shard: VocabShard) -> Tensor:
    """Start the sum over the ranks, and return a tensor to wait for.

    The sum overwrites the input in plain eager code.
    """
    if plain_eager():
        return _collectives.all_reduce_(tensor, "sum", shard.group)
    return _collectives.all_reduce(tensor, "sum", shard.group)


def sum_of_rows(
    rows: Tensor, shard: VocabShard, dtype: torch.dtype, invariant: bool, scattered: bool = False
) -> Callable[[], Tensor]:
    """Start the sum of rows over the ranks; return a function that waits for it and rounds it.

    The sum has all rows, or this rank's share of them if `scattered`, and may overwrite the rows. A
    collective adds up three ranks and more in an order that depends on the size of the tensor and
    on an element's place. In the batch-invariant mode each rank gets its share of all ranks' rows
    instead, and adds them in rank order, for which the ranks send as many bytes.
    """
    world = len(shard.sizes)
    if not invariant or world < 3:
        if scattered:
            unfinished = _collectives.reduce_scatter_tensor(rows, "sum", world, shard.group)
        else:
            unfinished = sum_over_ranks(rows, shard)
        return lambda: wait_for(unfinished).to(dtype)
    number, missing = len(rows), -len(rows) % world
    filled = F.pad(rows, (0, 0, 0, missing)) if missing else rows
    shares = [len(filled) // world] * world
    received = _collectives.all_to_all_single(filled, shares, shares, shard.group)

    def finish() -> Tensor:
        own = sum_in_rank_order(wait_for(received).unflatten(0, (world, shares[0]))).to(dtype)
        return own if scattered else gather_ranks(own, shard).flatten(0, 1)[:number]

    return finish


def sum_in_rank_order(of_ranks: Tensor) -> Tensor:
    """Return the sum over the first dimension. The order of PyTorch's own follows the shape."""
    return functools.reduce(torch.add, of_ranks.unbind(0))


def wait_for(tensor: Tensor) -> Tensor:
    """Return the result of a collective, which later work on the current stream may read."""
    return _collectives.wait_tensor(tensor)


def refuse_second_derivative(gathered: str = "logits") -> None:
    """Raise where the derivative that is computed now would be differentiated again."""
    if is_double_backward():
        raise RuntimeError(
            f"partita.parallel: no second derivative; gather the {gathered} and use the op of one"
            " device"
        )
