"""The collectives of groups that have a name, as functions of tensors."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...runtime import private_names


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
    def wait_tensor(tensor: Tensor) -> Tensor:
        return tensor
