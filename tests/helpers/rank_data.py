"""Inputs and comparisons of the checks that every rank runs."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The interpreter runs the programs of a kernel one after another.
TOKENS = 13 if os.environ.get("TRITON_INTERPRET") == "1" else 23
HIDDEN, CLASSES = 12, 37
OPTIONS: list[dict[str, Any]] = [{}, {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-2}]


def shard_sizes(world: int) -> list[tuple[int, ...]]:
    """Return the sizes that DTensors have, and uneven sizes with an empty shard."""
    each = -(-CLASSES // world)
    even = tuple(max(0, min(each, CLASSES - i * each)) for i in range(world))
    odd = (0, *(3,) * (world - 2), CLASSES - 3 * (world - 2))
    return [even, odd]


def normal(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    """Return standard normal numbers, the same on all ranks."""
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
        .to(dtype)
        .to(device)
    )


def labels(device: torch.device) -> Tensor:
    """Return labels of all tokens; every sixth is ignored."""
    target = torch.arange(TOKENS, device=device) * 7 % CLASSES
    target[::6] = -100
    return target


def assert_same_on_all_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Check that the tensor has the same bits on all ranks; NaN equals NaN."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor.contiguous(), group)
    for other in found:
        assert torch.equal(other.nan_to_num(7.0), found[0].nan_to_num(7.0))


def assert_close(
    found: Tensor,
    expected: Tensor,
    dtype: torch.dtype = torch.float32,
    whole: Tensor | None = None,
) -> None:
    """Compare a result in `dtype` with one in fp64, which may be a part of a whole."""
    tolerances = {"rtol": 2e-5, "atol": 2e-6}
    if dtype == torch.bfloat16:  # 5 units in the last place of the greatest element
        whole = expected if whole is None else whole
        greatest = float(whole.double().nan_to_num().abs().max()) if whole.numel() else 0.0
        tolerances = {"rtol": 0.0, "atol": 0.02 * greatest}
    torch.testing.assert_close(found.double(), expected.double(), equal_nan=True, **tolerances)


def local_shard(tensor: Tensor, sizes: tuple[int, ...], dim: int) -> Tensor:
    """Return this rank's part of a tensor whose shards have `sizes`."""
    return tensor.split(sizes, dim)[dist.get_rank()]
