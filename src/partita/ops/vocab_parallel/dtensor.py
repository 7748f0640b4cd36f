"""Losses and token statistics of DTensors; their results are DTensors on the same mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..cross_entropy.api import TokenStats
from ..cross_entropy.common import mean_denominators
from .local_losses import (
    ParallelLossArguments,
    RowLosses,
    hidden_losses,
    local_token_stats,
    logits_losses,
    one_pass_loss,
)


class MeshRows(NamedTuple):
    """Rows that are sharded over some dimensions of a mesh."""

    mesh: DeviceMesh
    dims: list[int]  # the dimensions of the mesh over which they are sharded
    shape: torch.Size  # the shape of all rows

    def placements(self, placement: Placement) -> list[Placement]:
        """Return the placement in the dimensions of the rows, and Replicate in the others."""
        return [placement if i in self.dims else Replicate() for i in range(self.mesh.ndim)]

    def local(self, target: Tensor) -> Tensor:
        """Return the labels of this rank's rows. A plain tensor has only those already."""
        if not isinstance(target, DTensor):
            return target
        return target.redistribute(self.mesh, self.placements(Shard(0))).to_local()

    def of_local(self, local: Tensor) -> DTensor:
        """Return a DTensor of rows. Ranks may have unequal numbers of them; the shape is given."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements(Shard(0)),
            run_check=False,
            shape=self.shape,
            stride=torch.empty(self.shape, device="meta").stride(),
        )

    def total(self, local: Tensor) -> DTensor:
        """Return the sum of each rank's number over the ranks of the rows."""
        partial = self.placements(Partial("sum"))
        found = DTensor.from_local(local, self.mesh, partial, run_check=False)
        return found.redistribute(self.mesh, [Replicate()] * self.mesh.ndim)

    def reduced(
        self, losses: RowLosses, target: Tensor, arguments: ParallelLossArguments
    ) -> Tensor:
        """Return the losses of all rows, or their sum or mean over all ranks."""
        (loss, z, classes), options = losses, arguments.options
        if options.reduction == "none":
            return self.of_local(loss if z is None else loss + z)
        if options.reduction == "sum":
            return self.total(loss.sum() if z is None else (loss + z).sum())
        count, rows = mean_denominators(target, arguments.weight, classes, options.ignore_index)
        mean = self.total(loss.sum()) / self.total(count.to(loss.dtype))
        if z is None:
            return mean
        return mean + self.total(z.sum()) / self.total(rows.to(loss.dtype))


def cross_entropy(input: DTensor, target: Tensor, arguments: ParallelLossArguments) -> Tensor:
    """Return the cross-entropy of logits `[N, C, ...]`."""
    _refuse_arguments(group=arguments.group, classes=arguments.classes)
    local, group, classes, row_dims = _local_classes(input, 1)
    shape = torch.Size([input.shape[0], *input.shape[2:]])
    mesh, rows = input.device_mesh, MeshRows(input.device_mesh, row_dims, shape)
    arguments = arguments._replace(group=group, classes=classes)
    target = rows.local(target)
    if not row_dims:
        loss = one_pass_loss(local, target, arguments)
        if loss is not None:
            return DTensor.from_local(loss, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return rows.reduced(logits_losses(local, target, arguments), target, arguments)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: DTensor,
    target: Tensor,
    linear_bias: Tensor | None,
    arguments: ParallelLossArguments,
    sequence_parallel: bool,
    memory_budget: int | None,
    logits_dtype: torch.dtype | None,
) -> Tensor:
    """Return the cross-entropy of hidden states times a matrix `[C, H]`."""
    _refuse_arguments(
        group=arguments.group, classes=arguments.classes, sequence_parallel=sequence_parallel
    )
    _, group, classes, _ = _local_classes(linear_weight, 0)
    row_dims = _token_dims(input, linear_weight)
    rows = MeshRows(linear_weight.device_mesh, row_dims, input.shape[:-1])
    if isinstance(linear_bias, DTensor):
        linear_bias = _local_parameter(linear_bias, row_dims)
    hidden = input
    if isinstance(input, DTensor):
        placements = rows.placements(Shard(0))
        hidden = input.redistribute(rows.mesh, placements).to_local(grad_placements=placements)
    target = rows.local(target)
    losses = hidden_losses(
        hidden,
        _local_parameter(linear_weight, row_dims),
        target,
        linear_bias,
        arguments._replace(group=group, classes=classes),
        False,
        memory_budget,
        logits_dtype,
    )
    return rows.reduced(losses, target, arguments)


def token_stats(
    logits: DTensor,
    target: Tensor,
    group: dist.ProcessGroup | None,
    classes: Any,
    temperature: float,
    ignore_index: int,
) -> TokenStats:
    """Return the token statistics of logits `[..., C]`."""
    _refuse_arguments(group=group, classes=classes)
    local, group, classes, row_dims = _local_classes(logits, logits.ndim - 1)
    rows = MeshRows(logits.device_mesh, row_dims, logits.shape[:-1])
    options = (group, classes, temperature, ignore_index)
    stats = local_token_stats(local, rows.local(target), *options)
    return TokenStats(*(rows.of_local(field) for field in stats))


def _refuse_arguments(**values: Any) -> None:
    """Raise for arguments that a DTensor defines itself."""
    for name, value in values.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected None with a DTensor, which defines it itself")


def _local_classes(tensor: DTensor, dim: int) -> tuple[Tensor, dist.ProcessGroup, int, list[int]]:
    """Return this rank's part of a DTensor with its classes in `dim`.

    With it come the group over which they are sharded, the number of classes of all ranks, and the
    dimensions of the mesh over which the rows are sharded.
    """
    class_dims, row_dims, others = [], [], []
    for i, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard) and placement.dim % tensor.ndim == dim:
            class_dims.append(i)
        elif isinstance(placement, Shard) and placement.dim == 0:
            row_dims.append(i)
        else:
            others.append(placement)
    if len(class_dims) != 1 or not all(isinstance(placement, Replicate) for placement in others):
        raise ValueError(
            f"DTensor: expected Shard({dim}) in one dimension of the mesh, Shard(0) or Replicate in"
            f" others, got {tensor.placements}"
        )
    group = tensor.device_mesh.get_group(class_dims[0])
    return tensor.to_local(), group, tensor.shape[dim], row_dims


def _local_parameter(parameter: DTensor, row_dims: list[int]) -> Tensor:
    """Return this rank's part of a parameter, whose gradient is summed over `row_dims`."""
    placements = [
        Partial("sum") if i in row_dims else placement
        for i, placement in enumerate(parameter.placements)
    ]
    return parameter.to_local(grad_placements=placements)


def _token_dims(input: Tensor, linear_weight: DTensor) -> list[int]:
    """Return the mesh dimensions over which the tokens are sharded and the matrix is not."""
    if not isinstance(input, DTensor):
        return []
    return [
        i
        for i, placement in enumerate(input.placements)
        if isinstance(placement, Shard)
        and placement.dim == 0
        and isinstance(linear_weight.placements[i], Replicate)
    ]
