"""Checks of vocabulary-parallel losses of plain tensors, which every rank runs."""

import os
from itertools import product
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed._symmetric_memory as symmetric
import torch.nn.functional as F
from helpers.distillation import WEIGHTS
from helpers.errors import raises
from helpers.rank_data import (
    CLASSES,
    HIDDEN,
    OPTIONS,
    TOKENS,
    assert_close,
    assert_same_on_all_ranks,
    labels,
    local_shard,
    normal,
    shard_sizes,
)
from helpers.rows import upstream
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import partita
from partita import parallel
from partita.ops.vocab_parallel import symmetric_memory
from partita.ops.vocab_parallel.shard import PlainCollectives
from partita.runtime import private_names


def check_forms(device: torch.device) -> None:
    """Check pixels, a batch without labels that count, the dtype of the loss, and no ids."""
    full = 3 * normal(TOKENS, CLASSES, device=device)
    target = labels(device)
    sizes = shard_sizes(dist.get_world_size())[1]
    stacked = full[:12].reshape(2, 6, CLASSES).movedim(-1, 1)
    loss = parallel.cross_entropy(
        local_shard(stacked, sizes, 1), target[:12].reshape(2, 6), classes=sizes, reduction="none"
    )
    assert_close(loss, F.cross_entropy(stacked, target[:12].reshape(2, 6), reduction="none"))
    all_ignored = torch.full_like(target, -100)
    local = local_shard(full, sizes, 1).clone().requires_grad_()
    loss = parallel.cross_entropy(local, all_ignored, classes=sizes)
    assert loss.isnan() and not torch.autograd.grad(loss, local)[0].any()
    half = local_shard(full.bfloat16(), sizes, 1).clone().requires_grad_()
    loss = parallel.cross_entropy(half, target, classes=sizes)
    assert loss.dtype == torch.float32
    assert_close(loss, F.cross_entropy(full.bfloat16().float(), target))
    ids = target[:, None].expand(-1, 0)
    assert parallel.logprobs(local.detach(), ids, classes=sizes).shape == (TOKENS, 0)


def check_sequence_parallel(device: torch.device) -> None:
    """Check hidden states of which each rank has some, and gets the gradient of those."""
    world, rank = dist.get_world_size(), dist.get_rank()
    tokens = TOKENS - TOKENS % world
    target, sizes = labels(device)[:tokens], shard_sizes(world)[1]
    for dtype in (torch.float32, torch.bfloat16):
        hidden = normal(tokens, HIDDEN, device=device, dtype=dtype)
        matrix = normal(CLASSES, HIDDEN, device=device, dtype=dtype)
        bias = normal(CLASSES, device=device, dtype=dtype)
        factors = [normal(n, 3, device=device, dtype=dtype) for n in (tokens, CLASSES)]
        for options, wide, low in product(OPTIONS, (None, torch.float32), ([], factors)):
            of_tokens, of_classes = (hidden, *low[:1]), (matrix, bias, *low[1:])
            exact = [t.double().requires_grad_() for t in (*of_tokens, *of_classes)]
            logits = F.linear(exact[0], *exact[-len(of_classes) :][:2])
            if low:
                logits = logits + exact[1] @ exact[-1].T
            with partita.backend("reference"):
                truth = partita.cross_entropy(logits, target, **options)
            expected = torch.autograd.grad(truth, exact)
            shards = [t.chunk(world)[rank] for t in of_tokens]
            shards += [local_shard(t, sizes, 0) for t in of_classes]
            leaves = [t.clone().requires_grad_() for t in shards]
            (states, *low_states), (rows, row_bias, *low_rows) = (
                leaves[: len(of_tokens)],
                leaves[len(of_tokens) :],
            )
            loss = parallel.linear_cross_entropy(
                states,
                rows,
                target,
                linear_bias=row_bias,
                low_rank=(*low_states, *low_rows) if low else None,
                classes=sizes,
                sequence_parallel=True,
                logits_dtype=wide,
                **options,
            )
            assert_close(loss, truth, wide or dtype)
            assert_same_on_all_ranks(loss.detach())
            found = torch.autograd.grad(loss, leaves)
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                is_of_tokens = i < len(of_tokens)
                part = b.chunk(world)[rank] if is_of_tokens else local_shard(b, sizes, 0)
                assert_close(a, part, dtype)


def check_corners(device: torch.device) -> None:
    """Check empty shards in both plans and a second backward pass, no tokens, and uint8 labels."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = (300, *(0,) * (world - 1))
    hidden, matrix = normal(20, HIDDEN, device=device), normal(300, HIDDEN, device=device)
    target = torch.arange(20, device=device, dtype=torch.uint8)
    exact = hidden.double().requires_grad_()
    truth = F.cross_entropy(exact @ matrix.double().T, target.long())
    (expected,) = torch.autograd.grad(truth, exact)
    for budget in (None, 20 * 128 * 4 + 48 * 4 * 20):
        leaf = hidden.clone().requires_grad_()
        rows = local_shard(matrix, sizes, 0).clone().requires_grad_()
        loss = parallel.linear_cross_entropy(
            leaf, rows, target, classes=sizes, memory_budget=budget
        )
        assert_close(loss, truth)
        for _ in range(2):
            with partita.testing.poisoned_memory():
                assert_close(torch.autograd.grad(loss, leaf, retain_graph=True)[0], expected)
    no_tokens = torch.zeros(0, HIDDEN, device=device, requires_grad=True)
    rows = local_shard(matrix, sizes, 0)
    loss = parallel.linear_cross_entropy(
        no_tokens, rows, target[:0], classes=sizes, reduction="sum"
    )
    assert loss == 0 and torch.autograd.grad(loss, no_tokens)[0].shape == no_tokens.shape
    logits = local_shard(hidden @ matrix.T, (300 - 150, *(0,) * (world - 2), 150), 1)
    assert_close(
        parallel.cross_entropy(logits, target, classes=(150, *(0,) * (world - 2), 150)), truth
    )
    assert rank < world


def check_bad_arguments(device: torch.device) -> None:
    world = dist.get_world_size()
    local = torch.zeros(4, 5, device=device)
    target = torch.tensor([0, 1, 5 * world, 2], device=device)
    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "1"}):
        for call in (parallel.cross_entropy, parallel.token_stats):
            with raises(f"IndexError: target: expected labels from 0 to {5 * world - 1} "):
                call(local, target)
    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}):
        loss = parallel.cross_entropy(local, target, reduction="none")
    assert loss.isnan().tolist() == [False, False, True, False]
    uneven = torch.zeros(4, 5 + dist.get_rank(), device=device)
    # Each rank expects the others to have as many classes as it has.
    assert parallel.cross_entropy(uneven, target.clamp(max=2)).isnan()
    with raises("ValueError: .* classes on rank"):
        parallel.cross_entropy(uneven, target.clamp(max=2), classes=50 * world)


def check_unfinished_collective(device: torch.device) -> None:
    """Check the result of an unfinished collective, as tensor-parallel layers return, as logits.

    Check fp64 under autocast too, which leaves that dtype alone.
    """
    part = normal(TOKENS, 3, device=device, seed=dist.get_rank())
    target = torch.arange(TOKENS, device=device) % 3
    unfinished = functional.all_gather_tensor_autograd(part.requires_grad_(), 0, dist.group.WORLD)
    assert isinstance(unfinished, functional.AsyncCollectiveTensor)
    labels_of_all = target.repeat(dist.get_world_size())
    loss = partita.cross_entropy(unfinished, labels_of_all)
    loss.backward()
    whole = unfinished.detach().double().requires_grad_()
    truth = F.cross_entropy(whole, labels_of_all)
    assert_close(loss, truth)
    rows = slice(dist.get_rank() * TOKENS, (dist.get_rank() + 1) * TOKENS)
    assert_close(part.grad, torch.autograd.grad(truth, whole)[0][rows] * dist.get_world_size())
    states, matrix = (
        normal(size, HIDDEN, device=device, dtype=torch.float64) for size in (TOKENS, 3)
    )
    with torch.autocast(device.type):
        found = parallel.linear_cross_entropy(states, matrix, target)
    assert found.dtype == torch.float64
    assert_close(
        found, F.cross_entropy((states @ matrix.T).repeat(1, dist.get_world_size()), target)
    )


def check_compile(device: torch.device) -> None:
    world = dist.get_world_size()
    local = normal(TOKENS, 5, device=device, seed=dist.get_rank())
    target = torch.arange(TOKENS, device=device) % (5 * world)

    def cross_entropy(x: Tensor) -> Tensor:
        return parallel.cross_entropy(x, target, label_smoothing=0.1)

    def distillation(x: Tensor) -> Tensor:
        return parallel.distillation_loss(x, local.flip(1), target, weights=WEIGHTS).loss

    for f in (cross_entropy, distillation):
        with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}):
            found = []
            for function in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
                x = local.clone().requires_grad_()
                loss = function(x)
                found.append((loss.detach(), *torch.autograd.grad(loss, x)))
        for a, b in zip(*found, strict=True):
            assert_close(a, b)


def check_plain_collectives(device: torch.device) -> None:
    """Compare the collectives that serve where PyTorch has none that compilers trace."""
    traced, plain = private_names.functional_collectives(), PlainCollectives
    world, name = dist.get_world_size(), dist.group.WORLD.group_name
    local = normal(2 * world, 3, device=device) + dist.get_rank()
    for call in (
        lambda each: each.all_gather_into_tensor(local, world, name),
        lambda each: each.all_reduce(local, "sum", name),
        lambda each: each.all_reduce_(local.clone(), "sum", name),
        lambda each: each.reduce_scatter_tensor(local, "sum", world, name),
        lambda each: each.all_to_all_single(local, [2] * world, [2] * world, name),
    ):
        found, expected = (each.wait_tensor(call(each)) for each in (plain, traced))
        assert torch.equal(found, expected)


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
