"""The bits of rows whose classes lie on several ranks, which depend on no other row of a batch."""

import torch
import torch.distributed as dist
from helpers.invariance import differences
from helpers.rank_catalogue import shard
from helpers.rank_data import assert_close, local_shard, normal
from helpers.rows import INTERPRETING
from helpers.shard_calls import SHARDS
from torch import Tensor

import partita
from partita import parallel
from partita.testing.samples import Draw

BATCHES = (1, 7) if INTERPRETING else (1, 2, 7, 33)
# A block of 1,024 tokens takes the interpreter long, and heads have the same kernels.
HEADS = [name for name in SHARDS if "linear" in name and not INTERPRETING]
ROWS = [name for name in SHARDS if "linear" not in name]


def check_invariance(device: torch.device) -> None:
    """Compare the rows of batches with rows alone: of heads in the mode, of logits in any case."""
    world = dist.get_world_size()
    for name in (*HEADS, *ROWS):
        # Rows of logits start on 16 bytes; those of heads do so in any case.
        classes = 300 if name in HEADS else 384
        sizes = {"rows": 3, "classes": classes, "hidden": 20}
        for option in ("", *SHARDS[name].options)[: 1 if INTERPRETING else None]:
            for dtype in (torch.float32, torch.bfloat16)[: 1 if option else 2]:
                sample = SHARDS[name].sample(Draw(dtype, device=device), option, sizes)
                if "memory_budget" in sample.inputs:  # in chunks of classes too
                    sample.inputs["memory_budget"] = 2**21
                local, _ = shard(sample, (classes // world,) * world)
                with partita.batch_invariant(name in HEADS):
                    wrong, results = list(differences(local, BATCHES, ("",))), local.run()
                    gradients = local.gradients(results)
                assert not wrong, f"{local} {dtype}: {wrong}"
                usual = local.run()
                pairs = [*zip(results, usual, strict=True)]
                pairs += zip(gradients.values(), local.gradients(usual).values(), strict=True)
                for found, expected in pairs:
                    assert_close(found, expected, dtype)


def check_invariance_of_plans(device: torch.device) -> None:
    """Compare tokens of several blocks, in other plans, and with scattered hidden states."""
    if INTERPRETING:
        return
    world, rank = dist.get_world_size(), dist.get_rank()
    tokens, hidden, classes = 3000 // world * world, 20, 300
    sizes = (classes // world,) * world
    target = torch.arange(tokens, device=device) * 7 % classes
    for dtype in (torch.float32, torch.bfloat16):
        states, matrix = (normal(n, hidden, device=device, dtype=dtype) for n in (tokens, classes))
        upstream = torch.linspace(0.5, 1.5, tokens, device=device)

        def found(
            some: slice,
            scattered: bool = False,
            budget: int | None = None,
            wide: bool = False,
            states: Tensor = states,
            matrix: Tensor = matrix,
            upstream: Tensor = upstream,
        ) -> tuple[Tensor, Tensor]:
            own = states[some].chunk(world)[rank] if scattered else states[some]
            leaf = own.clone().requires_grad_()
            losses = parallel.linear_cross_entropy(
                leaf,
                local_shard(matrix, sizes, 0).clone().requires_grad_(),
                target[some],
                reduction="none",
                sequence_parallel=scattered,
                memory_budget=budget,
                logits_dtype=torch.float32 if wide else None,
            )
            return losses.detach(), torch.autograd.grad(losses, leaf, upstream[some])[0]

        for wide in (False, True)[: 1 + (dtype == torch.bfloat16)]:
            # Enough for the logits of 1,024 tokens, and not for those of all.
            budget = 2**22 * dtype.itemsize // 4 * (1 + wide)
            with partita.batch_invariant():
                assert found(slice(0))[1].shape == (0, hidden)
                losses, gradient = found(slice(tokens), wide=wide)
                for some in (slice(0, world), slice(1000, 1000 + 9 * world), slice(tokens)):
                    own = gradient[some].chunk(world)[rank]
                    for scattered in (False, True):
                        for bytes_ in (None, budget):
                            part = found(some, scattered, bytes_, wide)
                            assert torch.equal(part[0], losses[some])
                            assert torch.equal(part[1], own if scattered else gradient[some])
