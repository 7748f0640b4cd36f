"""The check of the kernels of several GPUs that wait for each other."""

import os
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import torch.nn.functional as F
from helpers.rank_data import (
    CLASSES,
    TOKENS,
    assert_close,
    assert_same_on_all_ranks,
    labels,
    local_shard,
    normal,
    shard_sizes,
    upstream,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from partita import parallel
from partita.ops.vocab_parallel import symmetric_memory


def check_symmetric_memory(device: torch.device) -> None:
    """Compare the kernels that wait for each other with the gather of the statistics.

    The calls are repeated, need more and more memory, and have a second backward pass. Before them
    the ranks have made exchanges in other groups, each rank in different ones.
    """
    world = dist.get_world_size()
    found = {}
    sizes_of_ranks = shard_sizes(dist.get_world_size())
    on_gpu = device.type == "cuda"
    if on_gpu:
        sizes_of_ranks += [(2000,) * world, (*(1001,) * (world - 1), 3)]
        first = dist.new_group([0])
        if dist.get_rank() == 0:
            symmetric.rendezvous(symmetric.empty(8, device=device), first)
        without_last = dist.new_group(list(range(world - 1)))
        if dist.get_rank() < world - 1:
            logits = normal(TOKENS, CLASSES, device=device).requires_grad_()
            assert_same_on_all_ranks(
                parallel.cross_entropy(logits, labels(device), group=without_last).detach(),
                without_last,
            )
    for rows in (TOKENS, 9000)[: 1 + on_gpu]:
        for sizes in sizes_of_ranks:
            for dtype in (torch.float32, torch.bfloat16)[: 1 + on_gpu]:
                target = torch.arange(rows, device=device) * 7 % sum(sizes)
                target[::6] = -100
                logits = local_shard(
                    3 * normal(rows, sum(sizes), device=device, dtype=dtype), sizes, 1
                )
                for peers in ("1", "0", "1"):
                    with mock.patch.dict(os.environ, {"PARTITA_PEERS": peers}):
                        local = logits.clone().requires_grad_()
                        loss = parallel.cross_entropy(
                            local, target, classes=sizes, softcap=9.0, z_loss=1e-3
                        )
                        grads = [
                            torch.autograd.grad(loss, local, upstream(loss), retain_graph=True)[0]
                            for _ in range(2)
                        ]
                    assert_same_on_all_ranks(loss.detach())
                    assert torch.equal(*grads)
                    found.setdefault(peers, []).append((loss.detach(), grads[0]))
                assert_close(found["1"][-1][0], found["0"][-1][0])
                assert_close(found["1"][-1][1], found["0"][-1][1], dtype)
                assert all(map(torch.equal, *found["1"][-2:]))
    mesh = dist.init_device_mesh(device.type, (world,))
    exact = normal(TOKENS, CLASSES, device=device).double().requires_grad_()
    sharded = distribute_tensor(exact.detach().float(), mesh, [Shard(1)]).requires_grad_()
    whole = parallel.cross_entropy(sharded, labels(device))
    truth = F.cross_entropy(exact, labels(device))
    assert isinstance(whole, DTensor) and whole.placements == (Replicate(),)
    assert_close(whole.full_tensor(), truth)
    (grad,) = torch.autograd.grad(whole, sharded)
    assert grad.placements == (Shard(1),)
    assert_close(grad.full_tensor(), torch.autograd.grad(truth, exact)[0])
    # Each rank expects the others to have as many classes as it has.
    uneven = torch.zeros(4, 5 + dist.get_rank(), device=device, requires_grad=True)
    loss = parallel.cross_entropy(uneven, target[:4].clamp(max=2))
    assert loss.isnan()
    shared = [slots for _, slots in symmetric_memory._group_slots.values() if slots is not None]
    assert bool(shared) == on_gpu, "the GPUs do not share memory"
