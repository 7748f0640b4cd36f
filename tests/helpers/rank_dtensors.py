"""Checks of vocabulary-parallel losses of DTensors and under DDP and FSDP2."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.errors import raises
from helpers.rank_data import (
    CLASSES,
    HIDDEN,
    TOKENS,
    assert_close,
    labels,
    local_shard,
    normal,
    shard_sizes,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import partita
from partita import parallel


def check_dtensor(device: torch.device) -> None:
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    full = 3 * normal(TOKENS, CLASSES, device=device)
    target = labels(device)
    exact = full.double().requires_grad_()
    for reduction in ("mean", "none"):
        logits = distribute_tensor(full, mesh, [Shard(1)]).requires_grad_()
        loss = parallel.cross_entropy(logits, target, reduction=reduction, label_smoothing=0.1)
        truth = F.cross_entropy(exact, target, reduction=reduction, label_smoothing=0.1)
        assert isinstance(loss, DTensor) and loss.placements == (Replicate(),)
        assert_close(loss.full_tensor(), truth)
        (found,) = torch.autograd.grad(loss.sum(), logits)
        (grad,) = torch.autograd.grad(truth.sum(), exact)
        # PyTorch 2.11 would replicate an uneven gradient when it stores it in .grad.
        assert found.placements == (Shard(1),)
        assert_close(found.full_tensor(), grad)
    stats = parallel.token_stats(logits.detach(), target)
    plain_stats = partita.token_stats(full.double(), target)
    for a, b in zip(stats[:3], plain_stats[:3], strict=True):
        assert_close(a.full_tensor(), b)
    tokens = TOKENS - TOKENS % world
    compare_head(mesh, [Shard(0)], [Shard(0)], target[:tokens], target[:tokens])
    if world == 4:
        mesh = dist.init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
        rows, target = full[:22], target[:22]
        logits = distribute_tensor(rows, mesh, [Shard(0), Shard(1)]).requires_grad_()
        row_labels = distribute_tensor(target, mesh, [Shard(0), Replicate()])
        loss = parallel.cross_entropy(logits, row_labels, z_loss=1e-2)
        exact = rows.double().requires_grad_()
        with partita.backend("reference"):
            truth = partita.cross_entropy(exact, target, z_loss=1e-2)
        assert_close(loss.full_tensor(), truth)
        loss.backward()
        assert_close(logits.grad.full_tensor(), torch.autograd.grad(truth, exact)[0])
        of_states, of_matrix = [Shard(0), Replicate()], [Replicate(), Shard(0)]
        compare_head(mesh, of_states, of_matrix, row_labels, target, z_loss=1e-2)


def compare_head(
    mesh: DeviceMesh,
    of_states: list[Placement],
    of_matrix: list[Placement],
    labels: Tensor,
    whole_labels: Tensor,
    **options: float,
) -> None:
    """Compare the loss of hidden states and a matrix with these placements, and its gradients."""
    hidden = normal(TOKENS, HIDDEN, device=whole_labels.device)[: len(whole_labels)]
    matrix = normal(CLASSES, HIDDEN, device=whole_labels.device)
    leaves = [
        distribute_tensor(whole, mesh, placements).requires_grad_()
        for whole, placements in ((hidden, of_states), (matrix, of_matrix))
    ]
    loss = parallel.linear_cross_entropy(*leaves, labels, **options)
    loss.backward()
    exact = [whole.double().requires_grad_() for whole in (hidden, matrix)]
    with partita.backend("reference"):
        truth = partita.cross_entropy(exact[0] @ exact[1].T, whole_labels, **options)
    assert_close(loss.full_tensor(), truth)
    for leaf, grad in zip(leaves, torch.autograd.grad(truth, exact), strict=True):
        assert_close(leaf.grad.full_tensor(), grad)


def check_arguments_with_a_dtensor(device: torch.device) -> None:
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(device.type, (world,))
    logits = distribute_tensor(normal(4, 6, device=device), mesh, [Shard(1)])
    target = torch.zeros(4, dtype=torch.int64, device=device)
    matrix = distribute_tensor(normal(6, 3, device=device), mesh, [Shard(0)])
    for call in (
        lambda: parallel.cross_entropy(logits, target, classes=6),
        lambda: parallel.token_stats(logits, target, group=dist.group.WORLD),
        lambda: parallel.linear_cross_entropy(
            normal(4, 3, device=device), matrix, target, sequence_parallel=True
        ),
    ):
        with raises("ValueError: .* expected None with a DTensor"):
            call()


def check_uneven_batch(device: torch.device) -> None:
    """Check rows that the mesh does not divide evenly: results know how many rows there are."""
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(device.type, (world, 1))
    rows = 2 * world + 1
    x, target = normal(rows, 6, device=device), torch.arange(rows, device=device) % 6
    logits = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
    row_labels = distribute_tensor(target, mesh, [Shard(0), Replicate()])
    plain = x.double().requires_grad_()
    losses = F.cross_entropy(plain, target, reduction="none")
    found = parallel.cross_entropy(logits, row_labels, reduction="none")
    assert found.shape == (rows,)
    assert_close(found.full_tensor(), losses)
    stats = parallel.token_stats(logits.detach(), row_labels)
    assert_close(stats.logprob.full_tensor(), -losses)
    loss = parallel.cross_entropy(logits, row_labels)
    assert_close(loss.full_tensor(), losses.mean())
    (grad,) = torch.autograd.grad(loss, logits)
    assert_close(grad.full_tensor(), torch.autograd.grad(losses.mean(), plain)[0])


def check_wrappers(device: torch.device) -> None:
    """Check a body under DDP and under FSDP2, followed by a sharded matrix."""
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(device.type, (world,))
    x = normal(TOKENS, HIDDEN, device=device)
    target = labels(device)
    matrix = normal(CLASSES, HIDDEN, device=device)
    sizes, found = shard_sizes(world)[0], []
    for wrap in (
        lambda body: body,
        DistributedDataParallel,
        lambda body: fully_shard(body, mesh=mesh),
    ):
        torch.manual_seed(0)
        body = torch.nn.Linear(HIDDEN, HIDDEN).to(device)
        rows = local_shard(matrix, sizes, 0).clone().requires_grad_()
        wrapped = wrap(body)
        loss = parallel.linear_cross_entropy(wrapped(x), rows, target, classes=CLASSES)
        loss.backward()
        grad = body.weight.grad
        found.append(
            (loss.detach(), grad.full_tensor() if isinstance(grad, DTensor) else grad, rows.grad)
        )
    exact = [
        t.detach().double().requires_grad_()
        for t in (body.weight.full_tensor(), body.bias.full_tensor(), matrix)
    ]
    truth = F.cross_entropy(F.linear(x.double(), *exact[:2]) @ exact[2].T, target)
    expected = torch.autograd.grad(truth, (exact[0], exact[2]))
    for loss, grad, d_rows in found:
        assert_close(loss, truth)
        assert_close(grad, expected[0])
        assert_close(d_rows, local_shard(expected[1], sizes, 0))
