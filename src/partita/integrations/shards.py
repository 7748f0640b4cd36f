"""The loss of a head whose matrix is a DTensor, as tensor parallelism shards it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.cross_entropy.common import LossOptions
from ..ops.linear_heads.low_rank import LowRank

# A tp_plan gives layers a forward of this module, which makes DTensors of hidden states and logits.
PLAN = "transformers.distributed.tensor_parallel"


def is_sharded(tensor: Any) -> bool:
    """Return whether this is a DTensor, without an import of its module."""
    return hasattr(tensor, "device_mesh")


def replicated(hidden_states: Tensor, lm_head_weight: Any) -> Tensor:
    """Return hidden states that all ranks have, as a DTensor on the mesh of the matrix."""
    from torch.distributed.tensor import DTensor, Replicate

    if is_sharded(hidden_states):
        return hidden_states
    mesh = lm_head_weight.device_mesh
    return DTensor.from_local(hidden_states, mesh, [Replicate()] * mesh.ndim, run_check=False)


def check_shards(hidden_states: Any, lm_head_weight: Any, linear_bias: Any) -> None:
    """Raise unless the classes of the matrix and of its bias are sharded alike.

    Plain hidden states are refused, as `F.linear` refuses them: a matrix that FSDP2 has not
    gathered is sharded over its rows too, but each rank then has other tokens.
    """
    from torch.distributed.tensor import Replicate, Shard

    if not is_sharded(lm_head_weight):
        raise TypeError("lm_head_weight: expected a DTensor beside a bias or hidden states of one")
    placements = tuple(lm_head_weight.placements)
    shards = [placement for placement in placements if not isinstance(placement, Replicate)]
    if shards != [Shard(0)]:
        raise ValueError(
            "lm_head_weight: expected a DTensor with Shard(0) in one dimension of the mesh and"
            f" Replicate in others, as ColwiseParallel makes it, got {placements}"
        )
    if linear_bias is not None:
        found = tuple(linear_bias.placements) if is_sharded(linear_bias) else "a plain Tensor"
        if found != placements or linear_bias.device_mesh != lm_head_weight.device_mesh:
            raise ValueError(
                f"linear_bias: expected the mesh and the placements of lm_head_weight,"
                f" {placements}, got {found}"
            )
    if getattr(hidden_states, "device_mesh", None) != lm_head_weight.device_mesh:
        raise TypeError(
            "hidden_states: expected a DTensor on the mesh of lm_head_weight, a DTensor with"
            f" {placements}, got a plain Tensor or another mesh; call the module, whose hooks"
            " distribute the hidden states (ColwiseParallel) or gather the matrix (FSDP2)"
        )


def sharded_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    memory_budget: int | None,
    denominator: float | Tensor | None = None,
    *,
    low_rank: LowRank | None = None,
) -> Tensor:
    """Compute `linear_loss` over the ranks that have the classes. All get the same loss.

    The gradients are computed in the backward pass, from that of the quotient, so that they are
    divided before they are rounded.
    """
    from torch.distributed.tensor import DTensor

    from ..ops.vocab_parallel.api import linear_cross_entropy

    loss = linear_cross_entropy(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        low_rank=low_rank,
        memory_budget=memory_budget,
        **options.keywords(),
    )
    assert isinstance(loss, DTensor)
    local = loss.to_local()
    return local if denominator is None else local / denominator
