"""Losses over a vocabulary that lies on several ranks: tensors and a process group, or DTensors.

Each rank has the logits, or the rows of the matrix, of some classes, in rank order. The ranks exchange what they know of each token once, and every rank
gets the same loss, to the bit. The upstream gradient is taken as equal on all ranks. GPUs of one host exchange it inside of one kernel where they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor import Shard as Sharded

from ...runtime import checks
from ...runtime.backend import current_backend, resolve
from ...runtime.checks import REDUCTIONS
from ...runtime.register import PLAIN
from ..cross_entropy.api import TokenStats
from ..linear_heads.common import (
    cast_to_autocast,
    checked_options,
    chunk_and_save,
    loss_denominators,
    loss_terms,
    reduce_losses,
)
from ..linear_heads.plan import linear_cross_entropy_plan
from . import peers as _peers
from .autograd import Classes, Hidden, Logits, Numbers, OnePass, Shard, one_pass, shard_of

__all__ = ["balanced", "cross_entropy", "linear_cross_entropy", "token_stats"]


def balanced(work: Tensor | Sequence[float], ranks: int) -> list[list[int]]:
    """Which sequences of a ragged batch each rank takes, so that all have as many and about as much to do.

    Args:
        work: of each sequence `[N]`, in any unit: for CTC input length times target length, for a chain its length. A tensor on a GPU is waited for.
        ranks: how many.

    Returns:
        For each rank the indices of its sequences, in their order; their numbers differ by one at most.

    Raises:
        ValueError: `ranks` below 1, or work that is negative or not a number.

    Source: Graham, Bounds on multiprocessing timing anomalies, 1969: the longest first, each to the rank with the least to do.

    Example:
        >>> import partita
        >>> partita.parallel.balanced([9, 1, 1, 1, 8, 2], 2)
        [[0, 1, 2], [3, 4, 5]]
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks: expected at least 1, got {ranks!r}")
    sizes = work.tolist() if isinstance(work, Tensor) else list(work)
    if not all(size >= 0 for size in sizes):
        raise ValueError("work: expected numbers of at least 0")
    room = [len(sizes) // ranks + (rank < len(sizes) % ranks) for rank in range(ranks)]
    loads, found = [0.0] * ranks, [list[int]() for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(
            (r for r in range(ranks) if len(found[r]) < room[r]), key=lambda r: (loads[r], r)
        )
        loads[rank] += sizes[index]
        found[rank].append(index)
    return [sorted(own) for own in found]


def _check(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    shard: Shard,
    ignore_index: int,
    options: dict[str, Any],
) -> tuple[Any, ...]:
    """The numbers, as the loss takes them."""
    checks.integer("target", target)
    for name, given in (("target", target), ("weight", weight)):
        if isinstance(given, DTensor):
            raise TypeError(f"{name}: expected a plain Tensor here, got a DTensor")
    checks.device("target", target, input, "input")
    checks.labels("target", target, shard.classes, ignore_index)
    if weight is not None:
        checks.floating("weight", weight)
        checks.device("weight", weight, input, "input")
        checks.shape("weight", weight, [shard.classes], "[C], of all ranks' classes")
        if weight.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("weight: not differentiable; detach it")
    return checked_options(ignore_index, **options)


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] <= 1 else logits.contiguous()


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy of logits whose classes lie on several ranks: `partita.cross_entropy` of all of them, on each.

    Args:
        input: this rank's logits `[N, C_local, ...]`; or a DTensor `[N, C, ...]`, sharded over its classes in one dimension of the mesh, and over N
            in others.
        target: labels among all classes `[N, ...]`, the same on all ranks; beside a DTensor, a DTensor, or those of this rank's rows.
        weight: `[C]`, of all classes.
        group: the process group, all ranks if None; DTensors bring theirs.
        classes: how many there are in all, in shards as PyTorch makes them (the last smaller, or empty), or the number of each rank; None where all have
            as many. If that is not true on another rank the loss is NaN.
        ignore_index, reduction, label_smoothing, softcap, z_loss: as in `partita.cross_entropy`; smoothing is over all classes.

    Returns:
        The loss in nats, a number or `[N, ...]`, fp32 for half types, the same bits on every rank; a DTensor for a DTensor.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.cross_entropy`.
        RuntimeError: torch.distributed is not initialised; Gloo for tensors on a GPU; a second derivative; a rank missed an earlier call or had other rows.

    On GPUs of one host loss and gradient come from one read and one write of the logits, by kernels that wait for one another (`PARTITA_PEERS=0` forbids
    that): in eager code, for bf16 and fp32, `mean` and `sum`, without smoothing and class weights.

    Source: Shoeybi et al., Megatron-LM, 2019, for the split; one gather of (maximum, sum, ...) in place of three reductions.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> partita.parallel.cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor(1.3863)
        >>> dist.destroy_process_group()
    """
    checks.choice("reduction", reduction, REDUCTIONS)
    options = {"label_smoothing": label_smoothing, "softcap": softcap, "z_loss": z_loss}
    if isinstance(input, DTensor):
        _brought(group=group, classes=classes)
        local, group, classes, batch = _local(input, 1)
        target = _local_rows(target, input, batch)
        if not batch and reduction != "none":
            early = _one_pass(
                local, target, weight, group, classes, ignore_index, options, reduction == "mean"
            )
            if early is not None:
                return DTensor.from_local(
                    early,
                    input.device_mesh,
                    [Replicate()] * input.device_mesh.ndim,
                    run_check=False,
                )
        rows = _losses(local, target, weight, group, classes, ignore_index, options)
        return _assembled(
            rows,
            target,
            weight,
            reduction,
            input,
            batch,
            ignore_index,
            torch.Size([input.shape[0], *input.shape[2:]]),
        )
    if (
        reduction != "none"
        and (
            early := _one_pass(
                input, target, weight, group, classes, ignore_index, options, reduction == "mean"
            )
        )
        is not None
    ):
        return early
    loss, z, shard, numbers = _losses(input, target, weight, group, classes, ignore_index, options)
    return reduce_losses(loss, z, target.long(), weight, shard.classes, numbers[0], reduction)


def _one_pass(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    group: dist.ProcessGroup | None,
    classes: Classes,
    ignore_index: int,
    options: dict[str, Any],
    mean: bool,
) -> Tensor | None:
    """The loss with its gradient beside it, where the ranks' kernels wait for one another; what decides that is the same on all ranks."""
    plain = (
        type(input) in PLAIN
        and type(target) in PLAIN
        and weight is None
        and not options["label_smoothing"]
    )
    if not (
        plain
        and torch.is_grad_enabled()
        and input.requires_grad
        and input.dtype in (torch.bfloat16, torch.float32)
    ):
        return None
    if (
        input.ndim < 2
        or not _peers.wanted(input)
        or resolve(current_backend(), input.device, has_cpu=False) != "gpu"
    ):
        return None
    shard, numbers, logits, labels = _prepared(
        input, target, weight, group, classes, ignore_index, options
    )
    if len(shard.sizes) == 1 or not len(logits):
        return None
    chosen = (shard, ignore_index, *numbers[2:4], mean)
    found = one_pass(logits.detach(), labels, *chosen)
    return (
        None if found is None else OnePass.apply(logits, labels, found, chosen, current_backend())
    )


def _prepared(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    group: dist.ProcessGroup | None,
    classes: Classes,
    ignore_index: int,
    options: dict[str, Any],
) -> tuple[Shard, tuple[Any, ...], Tensor, Tensor]:
    """This rank's classes, the numbers, and rows of logits with their labels."""
    checks.floating("input", input)
    if input.ndim < 2:
        raise ValueError(f"input: expected shape [N, C_local, ...], got {list(input.shape)}")
    shard = shard_of("input", input, 1, group, classes)
    numbers = _check(input, target, weight, shard, ignore_index, options)
    checks.shape("target", target, [input.shape[0], *input.shape[2:]], "input without its classes")
    return shard, numbers, _rows(input.movedim(1, -1).flatten(0, -2)), target.reshape(-1).long()


def _losses(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    group: dist.ProcessGroup | None,
    classes: Classes,
    ignore_index: int,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None, Shard, tuple[Any, ...]]:
    """The loss and the z-loss of each row."""
    shard, numbers, logits, labels = _prepared(
        input, target, weight, group, classes, ignore_index, options
    )
    of_rows = Numbers(1.0, numbers[2], ignore_index, numbers[1] > 0, False)
    nll, logsumexp, spread, *_ = Logits.apply(
        logits, labels, weight, shard, of_rows, current_backend()
    )
    loss, z = loss_terms(nll, logsumexp, spread, labels, weight, shard.classes, numbers)
    return (
        loss.reshape(target.shape),
        None if z is None else z.reshape(target.shape),
        shard,
        numbers,
    )


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    sequence_parallel: bool = False,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    memory_budget: int | None = None,
) -> Tensor:
    """Cross-entropy from hidden states and a matrix whose classes lie on several ranks, on each.

    Args:
        input: hidden states `[..., H]`, the same on all ranks; with `sequence_parallel` this rank's `[M, H]` of all tokens, in rank order. A DTensor is
            redistributed as needed.
        linear_weight: this rank's rows of the matrix `[C_local, H]`; or a DTensor, sharded in dimension 0.
        linear_bias: `[C_local]`; or a DTensor, likewise.
        target: labels of all tokens `[...]`.
        weight, group, classes: as in `partita.parallel.cross_entropy`.
        sequence_parallel: gather the hidden states inside, and reduce and scatter their gradient.
        reduction, ignore_index, label_smoothing, softcap, z_loss, memory_budget: as in `partita.linear_cross_entropy`; the budget is the bytes of each rank.

    Returns:
        The loss in nats, a number or `[...]`, fp32 for half types, the same bits on every rank. The gradient of the hidden states is complete on every rank.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as in `partita.parallel.cross_entropy`.

    Source: as `partita.linear_cross_entropy` and `partita.parallel.cross_entropy`.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> partita.parallel.linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 3]))
        tensor(1.3863)
        >>> dist.destroy_process_group()
    """
    checks.choice("reduction", reduction, REDUCTIONS)
    options = {"label_smoothing": label_smoothing, "softcap": softcap, "z_loss": z_loss}
    if isinstance(input, DTensor) and not isinstance(linear_weight, DTensor):
        raise TypeError("linear_weight: expected a DTensor beside input, which is one")
    if isinstance(linear_weight, DTensor):
        _brought(group=group, classes=classes, sequence_parallel=sequence_parallel)
        mesh, (rows, group, classes, _) = linear_weight.device_mesh, _local(linear_weight, 0)
        batch = _batch(input, linear_weight)
        rows = linear_weight.to_local(
            grad_placements=[
                Partial("sum") if i in batch else p for i, p in enumerate(linear_weight.placements)
            ]
        )
        bias = linear_bias
        if isinstance(bias, DTensor):
            bias = bias.to_local(
                grad_placements=[
                    Partial("sum") if i in batch else p for i, p in enumerate(bias.placements)
                ]
            )
        placements = _placements(mesh, batch)
        hidden = (
            input.redistribute(mesh, placements).to_local(grad_placements=placements)
            if isinstance(input, DTensor)
            else input
        )
        target = _local_rows(target, linear_weight, batch)
        found = _linear_losses(
            hidden,
            rows,
            target,
            bias,
            weight,
            group,
            classes,
            False,
            ignore_index,
            options,
            memory_budget,
        )
        return _assembled(
            found, target, weight, reduction, linear_weight, batch, ignore_index, input.shape[:-1]
        )
    losses = (
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        group,
        classes,
        sequence_parallel,
        ignore_index,
        options,
        memory_budget,
    )
    loss, z, shard, numbers = _linear_losses(*losses)
    return reduce_losses(loss, z, target.long(), weight, shard.classes, numbers[0], reduction)


def _linear_losses(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    group: dist.ProcessGroup | None,
    classes: Classes,
    sequence_parallel: bool,
    ignore_index: int,
    options: dict[str, Any],
    memory_budget: int | None,
) -> tuple[Tensor, Tensor | None, Shard, tuple[Any, ...]]:
    """The loss and the z-loss of each token."""
    checks.floating("input", input)
    checks.floating("linear_weight", linear_weight)
    input, linear_weight, linear_bias = cast_to_autocast(input, linear_weight, linear_bias)  # type: ignore[assignment]
    if linear_weight.ndim != 2 or input.ndim == 0 or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            f"input: expected shape [..., H] for linear_weight [C_local, H] = {list(linear_weight.shape)}, got {list(input.shape)}"
        )
    if linear_weight.dtype != input.dtype:
        raise TypeError(
            f"linear_weight: expected the dtype of input, {input.dtype}, got {linear_weight.dtype}"
        )
    shard = shard_of("linear_weight", linear_weight, 0, group, classes)
    numbers = _check(input, target, weight, shard, ignore_index, options)
    tokens = input.shape[:-1].numel() * (len(shard.sizes) if sequence_parallel else 1)
    checks.shape(
        "target",
        target,
        [tokens] if sequence_parallel else input.shape[:-1],
        "all tokens" if sequence_parallel else "input without H",
    )
    checks.device("linear_weight", linear_weight, input, "input")
    if linear_bias is not None:
        checks.tensor("linear_bias", linear_bias)
        checks.device("linear_bias", linear_bias, input, "input")
        checks.shape("linear_bias", linear_bias, [len(linear_weight)], "[C_local]")
        if linear_bias.dtype != input.dtype:
            raise TypeError(
                f"linear_bias: expected the dtype of input, {input.dtype}, got {linear_bias.dtype}"
            )
    hidden, labels = input[None].flatten(0, -2), target.reshape(-1).long()
    grads = torch.is_grad_enabled()
    to_matrix = linear_weight.requires_grad or (
        linear_bias is not None and linear_bias.requires_grad
    )
    wanted = {"input_grad": grads and input.requires_grad, "weight_grad": grads and to_matrix}
    plan = linear_cross_entropy_plan(
        tokens,
        input.shape[-1],
        max(shard.sizes),
        input.dtype,
        memory_budget=memory_budget,
        parallel=True,
        **wanted,
    )
    chunk, keep = chunk_and_save(plan, max(len(linear_weight), 1))
    of_rows = Numbers(1.0, numbers[2], ignore_index, numbers[1] > 0, False)
    tensors = (hidden, linear_weight, linear_bias, labels, weight)
    nll, logsumexp, spread, *_ = Hidden.apply(
        *tensors, shard, of_rows, chunk, keep, sequence_parallel, current_backend()
    )
    loss, z = loss_terms(nll, logsumexp, spread, labels, weight, shard.classes, numbers)
    return (
        loss.reshape(target.shape),
        None if z is None else z.reshape(target.shape),
        shard,
        numbers,
    )


def token_stats(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    classes: Classes = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> TokenStats:
    """Token statistics of logits whose classes lie on several ranks: `partita.token_stats` of all of them, on each.

    Args:
        logits: this rank's `[..., C_local]`; or a DTensor `[..., C]`, sharded over its classes in one dimension of the mesh, and over its first in others.
        target: labels among all classes `[...]`, the same on all ranks.
        group, classes: as in `partita.parallel.cross_entropy`.
        temperature, ignore_index: as in `partita.token_stats`.

    Returns:
        `TokenStats(logprob, logsumexp, entropy, argmax)`, fields `[...]`, in nats, the same bits on every rank; the first three differentiable.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as in `partita.parallel.cross_entropy`.

    Source: as `partita.token_stats`, merged over ranks.

    Example:
        >>> import torch, partita, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> partita.parallel.token_stats(torch.zeros(1, 4), torch.tensor([2])).entropy
        tensor([1.3863])
        >>> dist.destroy_process_group()
    """
    if isinstance(logits, DTensor):
        _brought(group=group, classes=classes)
        local, group, classes, batch = _local(logits, logits.ndim - 1)
        found = token_stats(
            local,
            _local_rows(target, logits, batch),
            group=group,
            classes=classes,
            temperature=temperature,
            ignore_index=ignore_index,
        )
        return TokenStats(
            *(_of_rows(field, logits.device_mesh, batch, logits.shape[:-1]) for field in found)
        )
    checks.floating("logits", logits)
    if logits.ndim == 0:
        raise ValueError("logits: expected shape [..., C_local], got []")
    checks.number("temperature", temperature, low=0.0, open_low=True)
    shard = shard_of("logits", logits, -1, group, classes)
    _check(
        logits,
        target,
        None,
        shard,
        ignore_index,
        {"label_smoothing": 0.0, "softcap": None, "z_loss": 0.0},
    )
    checks.shape("target", target, logits.shape[:-1], "logits without its classes")
    rows, labels = _rows(logits[None].flatten(0, -2)), target.reshape(-1).long()
    numbers = Numbers(float(temperature), 0.0, ignore_index, False, True)
    nll, logsumexp, _, entropy, argmax, *_ = Logits.apply(
        rows, labels, None, shard, numbers, current_backend()
    )
    return TokenStats(
        *(field.reshape(target.shape) for field in (-nll, logsumexp, entropy, argmax))
    )


def _brought(**given: Any) -> None:
    """What a DTensor says itself is not to be given beside it."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected none beside a DTensor, which brings its own")


def _local(tensor: DTensor, dim: int) -> tuple[Tensor, dist.ProcessGroup, int, list[int]]:
    """This rank's part of a DTensor that is sharded in this dimension, the group of it, all its classes, and the mesh dimensions over which rows are."""
    at = [
        i
        for i, placement in enumerate(tensor.placements)
        if isinstance(placement, Sharded) and placement.dim % tensor.ndim == dim
    ]
    batch = [
        i
        for i, placement in enumerate(tensor.placements)
        if isinstance(placement, Sharded) and placement.dim == 0 and dim != 0
    ]
    rest = [placement for i, placement in enumerate(tensor.placements) if i not in (*at, *batch)]
    if len(at) != 1 or not all(isinstance(placement, Replicate) for placement in rest):
        raise ValueError(
            f"DTensor: expected Shard({dim}) in one dimension of the mesh, Shard(0) or Replicate in others, got {tensor.placements}"
        )
    return tensor.to_local(), tensor.device_mesh.get_group(at[0]), tensor.shape[dim], batch


def _placements(
    mesh: DeviceMesh, batch: list[int], along: Placement | None = None
) -> list[Placement]:
    """Rows are cut along these dimensions of the mesh, or are so `along` them, and are the same in others."""
    return [along or Sharded(0) if i in batch else Replicate() for i in range(mesh.ndim)]


def _of_rows(local: Tensor, mesh: DeviceMesh, batch: list[int], shape: torch.Size) -> DTensor:
    """A DTensor of rows, of which ranks may have unlike numbers: so it is told how many there are in all."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, _placements(mesh, batch), run_check=False, shape=shape, stride=stride
    )


def _local_rows(target: Tensor, like: DTensor, batch: list[int]) -> Tensor:
    """The labels of this rank's rows."""
    if not isinstance(target, DTensor):
        return target
    return target.redistribute(like.device_mesh, _placements(like.device_mesh, batch)).to_local()


def _batch(input: Tensor, matrix: DTensor) -> list[int]:
    """Mesh dimensions over which tokens are, and the matrix is not."""
    if not isinstance(input, DTensor):
        return []
    sharded = [
        i
        for i, placement in enumerate(input.placements)
        if isinstance(placement, Sharded) and placement.dim == 0
    ]
    return [i for i in sharded if isinstance(matrix.placements[i], Replicate)]


def _assembled(
    rows: tuple[Tensor, Tensor | None, Shard, tuple[Any, ...]],
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    like: DTensor,
    batch: list[int],
    ignore_index: int,
    shape: torch.Size,
) -> Tensor:
    """A DTensor of the losses, or of their sum or mean over all rows of the mesh."""
    loss, z, shard, _ = rows
    mesh = like.device_mesh
    if reduction == "none":
        return _of_rows(loss if z is None else loss + z, mesh, batch, shape)

    def whole(part: Tensor) -> DTensor:
        return DTensor.from_local(
            part, mesh, _placements(mesh, batch, Partial("sum")), run_check=False
        ).redistribute(mesh, [Replicate()] * mesh.ndim)

    if reduction == "sum":
        return whole(loss.sum() if z is None else (loss + z).sum())
    total, count = loss_denominators(target.long(), weight, shard.classes, ignore_index)
    mean = whole(loss.sum()) / whole(total.to(loss.dtype))
    return mean if z is None else mean + whole(z.sum()) / whole(count.to(loss.dtype))
