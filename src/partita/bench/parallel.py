"""Time vocabulary-parallel losses on several GPUs against PyTorch's `loss_parallel` and Megatron.

    torchrun --nproc-per-node 4 -m partita.bench.parallel --csv parallel.csv

One run measures groups of 1, 2, 4 and 8 ranks, up to the number that torchrun starts. The ranks
outside of a group wait for it.
"""

from __future__ import annotations

import argparse
import csv
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from .. import cross_entropy, linear_cross_entropy, linear_cross_entropy_plan, parallel
from .measure import peak_extra_memory, time_call

TOKENS, VOCABULARY = 8192, 131_072
LINEAR = (8192, 4096, 128_256)


class Measurement(NamedTuple):
    """A row of the table."""

    op: str
    gpus: int
    provider: str
    median_ms: float  # of a repetition, forward and backward, on the slowest rank
    extra_gib: float  # peak memory above the inputs


class Megatron(torch.autograd.Function):
    """The method of Megatron-LM: three reductions, and the softmax in fp32 saved for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: dist.ProcessGroup) -> Tensor:
        x, first = logits.float(), dist.get_rank(group) * logits.shape[1]
        maximum = x.amax(1)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
        x -= maximum[:, None]
        is_local = (target >= first) & (target < first + logits.shape[1])
        label = torch.where(is_local, target - first, 0)
        label_logit = torch.where(is_local, x.gather(1, label[:, None])[:, 0], 0.0)
        dist.all_reduce(label_logit, group=group)
        e = x.exp_()
        sumexp = e.sum(1)
        dist.all_reduce(sumexp, group=group)
        e /= sumexp[:, None]
        ctx.save_for_backward(e, is_local, label)
        ctx.dtype = logits.dtype
        return sumexp.log() - label_logit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        e, is_local, label = ctx.saved_tensors
        e.scatter_add_(1, label[:, None], -is_local.float()[:, None])
        return (e * grads[0][:, None]).to(ctx.dtype), None, None


def gradients(loss: Callable[[], Tensor], *leaves: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(loss(), leaves)


def cross_entropies(
    group: dist.ProcessGroup, world: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Check the loss of some tokens against fp64, then yield the steps to time with their names."""
    torch.manual_seed(dist.get_rank(group))
    local = torch.randn(
        TOKENS, VOCABULARY // world, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    torch.manual_seed(1)
    target = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    labels, mesh = target % local.shape[1], DeviceMesh("cuda", list(range(world)))

    def loss_parallel_gradient() -> object:
        logits = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
        with loss_parallel():
            return torch.autograd.grad(F.cross_entropy(logits, target), local)

    with torch.no_grad():
        parts = [torch.empty_like(local) for _ in range(world)]
        dist.all_gather(parts, local, group)
        logits = torch.cat([part[:64] for part in parts], 1).double()
        truth = F.cross_entropy(logits, target[:64], reduction="none")
        loss = parallel.cross_entropy(local, target, group=group, reduction="none")[:64]
        is_accurate = (loss - truth).abs().max() < 1e-5 * truth.abs().max()
        assert is_accurate, "the loss of partita is wrong"
        del parts, logits
    yield "partita", gradients(lambda: parallel.cross_entropy(local, target, group=group), local)
    yield "loss_parallel", loss_parallel_gradient
    yield "megatron", gradients(lambda: Megatron.apply(local, target, group).mean(), local)
    yield "one shard", gradients(lambda: cross_entropy(local, labels), local)


def linear(group: dist.ProcessGroup, world: int) -> Callable[[], object]:
    """Return the step of `linear_cross_entropy`, under a budget for which it saves all logits."""
    tokens, hidden, vocabulary = LINEAR
    torch.manual_seed(1)
    states = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocabulary, (tokens,), device="cuda")
    torch.manual_seed(2 + dist.get_rank(group))
    matrix = torch.randn(vocabulary // world, hidden, device="cuda") * hidden**-0.5
    matrix = matrix.bfloat16().requires_grad_()
    budget = linear_cross_entropy_plan(*LINEAR, torch.bfloat16, memory_budget=2**40).workspace_bytes
    function: Any = linear_cross_entropy
    if world > 1:
        function = functools.partial(parallel.linear_cross_entropy, group=group)
    loss = functools.partial(function, states, matrix, target, memory_budget=budget)
    return gradients(loss, states, matrix)


def measure(world: int, group: dist.ProcessGroup, repetitions: int) -> Iterator[Measurement]:
    """Time all losses on a group of `world` ranks, with the time and memory of the slowest rank."""
    device = torch.device("cuda", torch.cuda.current_device())

    def timed(op: str, name: str, step: Callable[[], object]) -> Measurement:
        milliseconds = time_call(step, device, repetitions).median
        extra = peak_extra_memory([("step", step)], device) or 0
        result = torch.tensor([milliseconds, extra / 2**30], device=device)
        dist.all_reduce(result, dist.ReduceOp.MAX, group)
        return Measurement(op, world, name, *result.tolist())

    for name, step in cross_entropies(group, world) if world > 1 else ():
        yield timed("cross_entropy", name, step)
    torch.cuda.empty_cache()
    yield timed("linear_cross_entropy", "partita", linear(group, world))
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, help="write every measurement")
    parser.add_argument("--repetitions", type=int, default=20)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, results = dist.get_rank(), []
    for world in (size for size in (1, 2, 4, 8) if size <= dist.get_world_size()):
        group = dist.new_group(list(range(world)))
        if rank < world:
            assert group is not None
            measured = list(measure(world, group, args.repetitions))
            results += measured
            for op, gpus, name, ms, gib in measured if rank == 0 else ():
                print(f"{op:22} {gpus} GPUs {name:14} {ms:9.3f} ms {gib:7.2f} GiB", flush=True)
        dist.barrier()
    if rank == 0 and args.csv:
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([Measurement._fields, *results])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
