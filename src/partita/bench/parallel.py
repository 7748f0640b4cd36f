"""Vocabulary-parallel losses on several GPUs, against PyTorch's `loss_parallel` and Megatron's way of doing it: run it under torchrun.

    torchrun --nproc-per-node 4 -m partita.bench.parallel --csv parallel.csv

Every group of 1, 2, 4, ... ranks that there is is measured in the same run, the others waiting.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

import partita
from partita.ops.linear_heads.plan import linear_cross_entropy_plan

TOKENS, VOCABULARY = 8192, 131_072
LINEAR = (8192, 4096, 128_256)
HEAD_START_CYCLES = 2 * 10**8


class Megatron(torch.autograd.Function):
    """Three reductions, and the softmax in fp32 kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: dist.ProcessGroup) -> Tensor:
        x, first = logits.float(), dist.get_rank(group) * logits.shape[1]
        maximum = x.amax(1)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
        x -= maximum[:, None]
        here = (target >= first) & (target < first + logits.shape[1])
        place = torch.where(here, target - first, 0)
        mine = torch.where(here, x.gather(1, place[:, None])[:, 0], 0.0)
        dist.all_reduce(mine, group=group)
        e = x.exp_()
        total = e.sum(1)
        dist.all_reduce(total, group=group)
        e /= total[:, None]
        ctx.save_for_backward(e, here, place)
        ctx.dtype = logits.dtype
        return total.log() - mine

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        e, here, place = ctx.saved_tensors
        e.scatter_add_(1, place[:, None], -here.float()[:, None])
        return (e * grads[0][:, None]).to(ctx.dtype), None, None


def timed(
    step: Callable[[], object], repetitions: int, group: dist.ProcessGroup | None
) -> tuple[float, float]:
    """Milliseconds, of the slowest rank of a group in the median repetition, and peak GiB beside what is there."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    marks = []
    torch.cuda._sleep(HEAD_START_CYCLES)  # as in training, the host is ahead
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    found = torch.tensor(
        [
            statistics.median(a.elapsed_time(b) for a, b in marks),
            (torch.cuda.max_memory_allocated() - before) / 2**30,
        ],
        device="cuda",
    )
    if group is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return float(found[0]), float(found[1])


def cross_entropies(
    group: dist.ProcessGroup, mesh: DeviceMesh, world: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """By name, what is timed; each is held to the loss in fp64 of some tokens first."""
    torch.manual_seed(dist.get_rank(group))
    local = torch.randn(
        TOKENS, VOCABULARY // world, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    torch.manual_seed(1)
    target = torch.randint(VOCABULARY, (TOKENS,), device="cuda")

    def ours() -> Tensor:
        return partita.parallel.cross_entropy(local, target, group=group)

    def theirs() -> Tensor:
        with loss_parallel():
            return torch.autograd.grad(
                F.cross_entropy(
                    DTensor.from_local(local, mesh, [Shard(1)], run_check=False), target
                ),
                local,
            )[0]

    def megatron() -> Tensor:
        return Megatron.apply(local, target, group).mean()

    with torch.no_grad():
        whole = [torch.empty_like(local) for _ in range(world)]
        dist.all_gather(whole, local, group)
        few = torch.cat([part[:64] for part in whole], 1).double()
        truth = F.cross_entropy(few, target[:64], reduction="none")
        found = partita.parallel.cross_entropy(local, target, group=group, reduction="none")[:64]
        assert (found - truth).abs().max() < 1e-5 * truth.abs().max(), (
            "the loss of partita is wrong"
        )
        del whole, few
    yield "partita", lambda: torch.autograd.grad(ours(), local)
    yield "loss_parallel", theirs
    yield "megatron", lambda: torch.autograd.grad(megatron(), local)
    labels = target % local.shape[1]
    yield "one shard", lambda: torch.autograd.grad(partita.cross_entropy(local, labels), local)


def linear(group: dist.ProcessGroup, world: int) -> Callable[[], object]:
    tokens, hidden, vocabulary = LINEAR
    torch.manual_seed(1)
    states = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocabulary, (tokens,), device="cuda")
    torch.manual_seed(2 + dist.get_rank(group))
    matrix = (
        (torch.randn(vocabulary // world, hidden, device="cuda") * hidden**-0.5)
        .bfloat16()
        .requires_grad_()
    )
    budget = linear_cross_entropy_plan(*LINEAR, torch.bfloat16, memory_budget=2**40).workspace_bytes
    if world == 1:
        return lambda: torch.autograd.grad(
            partita.linear_cross_entropy(states, matrix, target, memory_budget=budget),
            (states, matrix),
        )
    return lambda: torch.autograd.grad(
        partita.parallel.linear_cross_entropy(
            states, matrix, target, group=group, memory_budget=budget
        ),
        (states, matrix),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, help="write every measurement")
    parser.add_argument("--repetitions", type=int, default=20)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    worlds = [size for size in (1, 2, 4, 8) if size <= dist.get_world_size()]
    rows: list[tuple[str, int, str, float, float]] = []
    for world in worlds:
        group, rank = dist.new_group(list(range(world))), dist.get_rank()
        mesh = DeviceMesh("cuda", list(range(world)))
        if rank < world:
            assert group is not None
            for name, step in cross_entropies(group, mesh, world) if world > 1 else ():
                rows.append(("cross_entropy", world, name, *timed(step, args.repetitions, group)))
            torch.cuda.empty_cache()
            rows.append(
                (
                    "linear_cross_entropy",
                    world,
                    "partita",
                    *timed(linear(group, world), args.repetitions, group),
                )
            )
            torch.cuda.empty_cache()
            if rank == 0:
                for op, ranks, name, ms, memory in rows[-5:] if world > 1 else rows[-1:]:
                    print(
                        f"{op:22} {ranks} GPUs {name:14} {ms:9.3f} ms {memory:7.2f} GiB", flush=True
                    )
        dist.barrier()
    if dist.get_rank() == 0 and args.csv:
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows(
                [("op", "gpus", "provider", "median_ms", "extra_gib"), *rows]
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
