"""What each rank runs in the tests of vocabulary-parallel losses: started by `test_parallel`, one process a rank."""

import datetime
import os
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed._symmetric_memory as symmetric
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import partita
from partita import parallel
from partita.ops.vocab_parallel import peers as _peers

TOKENS, HIDDEN, CLASSES = 23, 12, 37
OPTIONS: list[dict[str, Any]] = [{}, {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-2}]


def sizes_for(world: int) -> list[tuple[int, ...]]:
    """Even but for the last, as DTensors are; and any, of which one is empty."""
    each = -(-CLASSES // world)
    even = tuple(max(0, min(each, CLASSES - i * each)) for i in range(world))
    odd = (0, *(3,) * (world - 2), CLASSES - 3 * (world - 2))
    return [even, odd]


def numbers(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    """The same on all ranks."""
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
        .to(dtype)
        .to(device)
    )


def labels(device: torch.device) -> Tensor:
    target = torch.arange(TOKENS, device=device) * 7 % CLASSES
    target[::6] = -100
    return target


def same_everywhere(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor.contiguous(), group)
    for other in found:
        assert torch.equal(other.nan_to_num(7.0), found[0].nan_to_num(7.0))


def close(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    half = {
        "rtol": 0.0,
        "atol": 0.02 * float(expected.nan_to_num().abs().max()) if expected.numel() else 0.0,
    }  # of the greatest: 5 units in the last place
    bounds = half if dtype == torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(found.double(), expected.double(), equal_nan=True, **bounds)


def upstream(loss: Tensor) -> Tensor:
    return (
        torch.linspace(0.5, 2.0, loss.numel(), device=loss.device)
        .reshape(loss.shape)
        .to(loss.dtype)
    )


def part_of(tensor: Tensor, sizes: tuple[int, ...], dim: int) -> Tensor:
    return tensor.split(sizes, dim)[dist.get_rank()]


def check_cross_entropy(device: torch.device) -> None:
    full, target, weight = (
        3 * numbers(TOKENS, CLASSES, device=device),
        labels(device),
        numbers(CLASSES, device=device).abs(),
    )
    for i, sizes in enumerate(sizes_for(dist.get_world_size())):
        for options in OPTIONS:
            for reduction in ("none", "mean", "sum"):
                for of_class in (None, weight):
                    exact = full.double().requires_grad_()
                    truth = partita.cross_entropy(
                        exact,
                        target,
                        None if of_class is None else of_class.double(),
                        reduction=reduction,
                        **options,
                    )
                    (grad,) = torch.autograd.grad(truth, exact, upstream(truth))
                    local = part_of(full, sizes, 1).clone().requires_grad_()
                    loss = parallel.cross_entropy(
                        local,
                        target,
                        of_class,
                        classes=CLASSES if i == 0 else sizes,
                        reduction=reduction,
                        **options,
                    )
                    close(loss, truth)
                    same_everywhere(loss.detach())
                    close(
                        torch.autograd.grad(loss, local, upstream(loss))[0], part_of(grad, sizes, 1)
                    )
    stacked = full[:12].reshape(2, 6, CLASSES).movedim(-1, 1)
    loss = parallel.cross_entropy(
        part_of(stacked, sizes, 1), target[:12].reshape(2, 6), classes=sizes, reduction="none"
    )
    close(loss, F.cross_entropy(stacked, target[:12].reshape(2, 6), reduction="none"))
    nothing = torch.full_like(target, -100)
    local = part_of(full, sizes, 1).clone().requires_grad_()
    loss = parallel.cross_entropy(local, nothing, classes=sizes)
    assert loss.isnan() and not torch.autograd.grad(loss, local)[0].any()
    half = part_of(full.bfloat16(), sizes, 1).clone().requires_grad_()
    loss = parallel.cross_entropy(half, target, classes=sizes)
    assert loss.dtype == torch.float32
    close(loss, F.cross_entropy(full.bfloat16().float(), target))


def check_linear(device: torch.device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    tokens = TOKENS - TOKENS % world
    target = labels(device)[:tokens]
    for dtype in (torch.float32, torch.bfloat16):
        hidden, bias = (
            numbers(tokens, HIDDEN, device=device, dtype=dtype),
            numbers(CLASSES, device=device, dtype=dtype),
        )
        matrix = numbers(CLASSES, HIDDEN, device=device, dtype=dtype)
        for i, sizes in enumerate(sizes_for(world)):
            for options in OPTIONS:
                for reduction, budget, scattered in (
                    ("none", None, False),
                    ("mean", 128 * 4 * tokens + 2000 + 160 * tokens, False),
                    ("mean", None, True),
                ):
                    exact = [t.double().requires_grad_() for t in (hidden, matrix, bias)]
                    truth = partita.cross_entropy(
                        F.linear(*exact), target, reduction=reduction, **options
                    )
                    expected = torch.autograd.grad(truth, exact, upstream(truth))
                    mine = hidden.chunk(world)[rank] if scattered else hidden
                    parts = [
                        t.clone().requires_grad_()
                        for t in (mine, part_of(matrix, sizes, 0), part_of(bias, sizes, 0))
                    ]
                    loss = parallel.linear_cross_entropy(
                        *parts[:2],
                        target,
                        linear_bias=parts[2],
                        classes=CLASSES if i == 0 else sizes,
                        sequence_parallel=scattered,
                        reduction=reduction,
                        memory_budget=budget,
                        **options,
                    )
                    close(loss, truth, dtype)
                    same_everywhere(loss.detach())
                    found = torch.autograd.grad(loss, parts, upstream(loss))
                    close(
                        found[0],
                        expected[0].chunk(world)[rank] if scattered else expected[0],
                        dtype,
                    )
                    if not scattered:
                        same_everywhere(found[0])
                    for a, b in zip(found[1:], expected[1:], strict=True):
                        close(a, part_of(b, sizes, 0), dtype)


def check_corners(device: torch.device) -> None:
    """An empty shard in the lean plan and in a second backward pass, no tokens, and labels of a narrow type."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = (300, *(0,) * (world - 1))
    hidden, matrix = numbers(20, HIDDEN, device=device), numbers(300, HIDDEN, device=device)
    target = torch.arange(20, device=device, dtype=torch.uint8)
    exact = hidden.double().requires_grad_()
    truth = F.cross_entropy(exact @ matrix.double().T, target.long())
    (expected,) = torch.autograd.grad(truth, exact)
    for budget in (None, 20 * 128 * 4 + 24 * 4 * 20):
        leaf, rows = (
            hidden.clone().requires_grad_(),
            part_of(matrix, sizes, 0).clone().requires_grad_(),
        )
        loss = parallel.linear_cross_entropy(
            leaf, rows, target, classes=sizes, memory_budget=budget
        )
        close(loss, truth)
        for _ in range(2):
            with partita.testing.poisoned_memory():
                close(torch.autograd.grad(loss, leaf, retain_graph=True)[0], expected)
    nothing = torch.zeros(0, HIDDEN, device=device, requires_grad=True)
    rows = part_of(matrix, sizes, 0)
    loss = parallel.linear_cross_entropy(nothing, rows, target[:0], classes=sizes, reduction="sum")
    assert loss == 0 and torch.autograd.grad(loss, nothing)[0].shape == nothing.shape
    logits = part_of(hidden @ matrix.T, (300 - 150, *(0,) * (world - 2), 150), 1)
    close(parallel.cross_entropy(logits, target, classes=(150, *(0,) * (world - 2), 150)), truth)
    assert rank < world


def check_token_stats(device: torch.device) -> None:
    full, target = 3 * numbers(TOKENS, CLASSES, device=device), labels(device)
    for sizes in sizes_for(dist.get_world_size()):
        exact, local = (
            full.double().requires_grad_(),
            part_of(full, sizes, 1).clone().requires_grad_(),
        )
        truth = partita.token_stats(exact, target, temperature=0.7)
        stats = parallel.token_stats(local, target, classes=sizes, temperature=0.7)
        assert torch.equal(stats.argmax, truth.argmax)
        for a, b in zip(stats[:3], truth[:3], strict=True):
            close(a, b)
            same_everywhere(a.detach())
        (grad,), (expected,) = (
            torch.autograd.grad(sum(f.sum() for f in s[:3]), x)
            for s, x in ((stats, local), (truth, exact))
        )
        close(grad, part_of(expected, sizes, 1))


def check_bad_arguments(device: torch.device) -> None:
    world = dist.get_world_size()
    local, target = (
        torch.zeros(4, 5, device=device),
        torch.tensor([0, 1, 5 * world, 2], device=device),
    )
    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "1"}):
        for call in (parallel.cross_entropy, parallel.token_stats):
            try:
                call(local, target)
            except IndexError as error:
                assert f"expected labels from 0 to {5 * world - 1}" in str(error)
            else:
                raise AssertionError("a label out of range went through")
    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}):
        loss = parallel.cross_entropy(local, target, reduction="none")
    assert loss.isnan().tolist() == [False, False, True, False]
    uneven = torch.zeros(4, 5 + dist.get_rank(), device=device)
    assert parallel.cross_entropy(uneven, target.clamp(max=2)).isnan()  # as nobody was told
    try:
        parallel.cross_entropy(uneven, target.clamp(max=2), classes=50 * world)
    except ValueError as error:
        assert "classes on rank" in str(error)
    else:
        raise AssertionError("shards of another size went through")


def check_dtensor(device: torch.device) -> None:
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    full, target, hidden = (
        3 * numbers(TOKENS, CLASSES, device=device),
        labels(device),
        numbers(TOKENS, HIDDEN, device=device),
    )
    exact = full.double().requires_grad_()
    for reduction in ("mean", "none"):
        logits = distribute_tensor(full, mesh, [Shard(1)]).requires_grad_()
        loss = parallel.cross_entropy(logits, target, reduction=reduction, label_smoothing=0.1)
        truth = F.cross_entropy(exact, target, reduction=reduction, label_smoothing=0.1)
        assert isinstance(loss, DTensor) and loss.placements == (Replicate(),)
        close(loss.full_tensor(), truth)
        (found,), (grad,) = (
            torch.autograd.grad(loss.sum(), logits),
            torch.autograd.grad(truth.sum(), exact),
        )
        assert found.placements == (
            Shard(1),
        )  # PyTorch 2.11 would replicate an uneven one as it stores it in .grad
        close(found.full_tensor(), grad)
    stats, plain_stats = (
        parallel.token_stats(logits.detach(), target),
        partita.token_stats(full.double(), target),
    )
    for a, b in zip(stats[:3], plain_stats[:3], strict=True):
        close(a.full_tensor(), b)
    matrix = distribute_tensor(
        numbers(CLASSES, HIDDEN, device=device), mesh, [Shard(0)]
    ).requires_grad_()
    states = distribute_tensor(hidden[: TOKENS - TOKENS % world], mesh, [Shard(0)]).requires_grad_()
    few = target[: TOKENS - TOKENS % world]
    loss = parallel.linear_cross_entropy(states, matrix, few)
    loss.backward()
    plain = [t.full_tensor().detach().double().requires_grad_() for t in (states, matrix)]
    truth = F.cross_entropy(plain[0] @ plain[1].T, few)
    truth.backward()
    close(loss.full_tensor(), truth)
    for a, b in zip((states, matrix), plain, strict=True):
        close(a.grad.full_tensor(), b.grad)
    if world == 4:
        mesh = dist.init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
        rows, where = full[:22], target[:22]
        logits = distribute_tensor(rows, mesh, [Shard(0), Shard(1)]).requires_grad_()
        shared = distribute_tensor(where, mesh, [Shard(0), Replicate()])
        loss = parallel.cross_entropy(logits, shared, z_loss=1e-2)
        exact = rows.double().requires_grad_()
        truth = partita.cross_entropy(exact, where, z_loss=1e-2)
        close(loss.full_tensor(), truth)
        loss.backward()
        close(logits.grad.full_tensor(), torch.autograd.grad(truth, exact)[0])
        states = distribute_tensor(hidden[:22], mesh, [Shard(0), Replicate()]).requires_grad_()
        matrix = distribute_tensor(
            numbers(CLASSES, HIDDEN, device=device), mesh, [Replicate(), Shard(0)]
        ).requires_grad_()
        loss = parallel.linear_cross_entropy(states, matrix, shared, z_loss=1e-2)
        loss.backward()
        plain = [t.full_tensor().detach().double().requires_grad_() for t in (states, matrix)]
        truth = partita.cross_entropy(plain[0] @ plain[1].T, where, z_loss=1e-2)
        close(loss.full_tensor(), truth)
        for a, b in zip((states, matrix), torch.autograd.grad(truth, plain), strict=True):
            close(a.grad.full_tensor(), b)


def check_what_a_dtensor_brings(device: torch.device) -> None:
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(device.type, (world,))
    logits, target = (
        distribute_tensor(numbers(4, 6, device=device), mesh, [Shard(1)]),
        torch.zeros(4, dtype=torch.int64, device=device),
    )
    matrix = distribute_tensor(numbers(6, 3, device=device), mesh, [Shard(0)])
    for call in (
        lambda: parallel.cross_entropy(logits, target, classes=6),
        lambda: parallel.token_stats(logits, target, group=dist.group.WORLD),
        lambda: parallel.linear_cross_entropy(
            numbers(4, 3, device=device), matrix, target, sequence_parallel=True
        ),
    ):
        try:
            call()
        except ValueError as error:
            assert "expected none beside a DTensor" in str(error)
        else:
            raise AssertionError("an argument was dropped without a word")


def check_uneven_batch(device: torch.device) -> None:
    """Rows that the mesh does not share evenly: what comes back knows how many there are."""
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(device.type, (world, 1))
    rows = 2 * world + 1
    x, target = numbers(rows, 6, device=device), torch.arange(rows, device=device) % 6
    logits = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
    where = distribute_tensor(target, mesh, [Shard(0), Replicate()])
    plain = x.double().requires_grad_()
    losses = F.cross_entropy(plain, target, reduction="none")
    found = parallel.cross_entropy(logits, where, reduction="none")
    assert found.shape == (rows,)
    close(found.full_tensor(), losses)
    stats = parallel.token_stats(logits.detach(), where)
    close(stats.logprob.full_tensor(), -losses)
    loss = parallel.cross_entropy(logits, where)
    close(loss.full_tensor(), losses.mean())
    (grad,) = torch.autograd.grad(loss, logits)
    close(grad.full_tensor(), torch.autograd.grad(losses.mean(), plain)[0])


def check_what_is_on_its_way(device: torch.device) -> None:
    """Logits that a collective has not finished, as a tensor-parallel layer hands them on; and fp64, which autocast leaves alone."""
    part, target = (
        numbers(TOKENS, 3, device=device, seed=dist.get_rank()),
        torch.arange(TOKENS, device=device) % 3,
    )
    coming = functional.all_gather_tensor_autograd(part.requires_grad_(), 0, dist.group.WORLD)
    assert isinstance(coming, functional.AsyncCollectiveTensor)
    labels_of_all = target.repeat(dist.get_world_size())
    loss = partita.cross_entropy(coming, labels_of_all)
    loss.backward()
    whole = coming.detach().double().requires_grad_()
    truth = F.cross_entropy(whole, labels_of_all)
    close(loss, truth)
    rows = slice(dist.get_rank() * TOKENS, (dist.get_rank() + 1) * TOKENS)
    close(part.grad, torch.autograd.grad(truth, whole)[0][rows] * dist.get_world_size())
    states, matrix = (
        numbers(size, HIDDEN, device=device, dtype=torch.float64) for size in (TOKENS, 3)
    )
    with torch.autocast(device.type):
        found = parallel.linear_cross_entropy(states, matrix, target)
    assert found.dtype == torch.float64
    close(found, F.cross_entropy((states @ matrix.T).repeat(1, dist.get_world_size()), target))


def check_compile(device: torch.device) -> None:
    world = dist.get_world_size()
    local, target = (
        numbers(TOKENS, 5, device=device, seed=dist.get_rank()),
        torch.arange(TOKENS, device=device) % (5 * world),
    )
    f = lambda x: parallel.cross_entropy(x, target, label_smoothing=0.1)  # noqa: E731
    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}):
        found = []
        for function in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
            x = local.clone().requires_grad_()
            loss = function(x)
            found.append((loss.detach(), *torch.autograd.grad(loss, x)))
    for a, b in zip(*found, strict=True):
        close(a, b)


def check_kernels_that_wait(device: torch.device) -> None:
    """Where GPUs reach one another's memory, against the way by a gather: again and again, in memory that grows, and a second time from one graph.
    Ranks have met in other groups before, each in others."""
    world, found, sizes_of_ranks, on_gpu = (
        dist.get_world_size(),
        {},
        sizes_for(dist.get_world_size()),
        device.type == "cuda",
    )
    if on_gpu:
        sizes_of_ranks += [(2000,) * world, (*(1001,) * (world - 1), 3)]
        first = dist.new_group([0])
        if dist.get_rank() == 0:
            symmetric.rendezvous(symmetric.empty(8, device=device), first)
        without_last = dist.new_group(list(range(world - 1)))
        if dist.get_rank() < world - 1:
            logits = numbers(TOKENS, CLASSES, device=device).requires_grad_()
            same_everywhere(
                parallel.cross_entropy(logits, labels(device), group=without_last).detach(),
                without_last,
            )
    for rows in (TOKENS, 9000)[: 1 + on_gpu]:
        for sizes in sizes_of_ranks:
            for dtype in (torch.float32, torch.bfloat16)[: 1 + on_gpu]:
                target = torch.arange(rows, device=device) * 7 % sum(sizes)
                target[::6] = -100
                logits = part_of(
                    3 * numbers(rows, sum(sizes), device=device, dtype=dtype), sizes, 1
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
                    same_everywhere(loss.detach())
                    assert torch.equal(*grads)
                    found.setdefault(peers, []).append((loss.detach(), grads[0]))
                close(found["1"][-1][0], found["0"][-1][0])
                close(found["1"][-1][1], found["0"][-1][1], dtype)
                assert all(map(torch.equal, *found["1"][-2:]))
    mesh = dist.init_device_mesh(device.type, (world,))
    exact = numbers(TOKENS, CLASSES, device=device).double().requires_grad_()
    sharded = distribute_tensor(exact.detach().float(), mesh, [Shard(1)]).requires_grad_()
    whole, truth = (
        parallel.cross_entropy(sharded, labels(device)),
        F.cross_entropy(exact, labels(device)),
    )
    assert isinstance(whole, DTensor) and whole.placements == (Replicate(),)
    close(whole.full_tensor(), truth)
    (grad,) = torch.autograd.grad(whole, sharded)
    assert grad.placements == (Shard(1),)
    close(grad.full_tensor(), torch.autograd.grad(truth, exact)[0])
    apart = torch.zeros(4, 5 + dist.get_rank(), device=device, requires_grad=True)
    loss = parallel.cross_entropy(apart, target[:4].clamp(max=2))  # nobody told the others
    assert loss.isnan()
    reached = [state for state in _peers._states.values() if state.boxes is not None]
    assert bool(reached) == on_gpu, "kernels did not wait for one another"


def check_wrappers(device: torch.device) -> None:
    """A body under DDP and under FSDP2, and the matrix sharded behind it."""
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(device.type, (world,))
    x, target, matrix = (
        numbers(TOKENS, HIDDEN, device=device),
        labels(device),
        numbers(CLASSES, HIDDEN, device=device),
    )
    sizes, found = sizes_for(world)[0], []
    for wrap in (
        lambda body: body,
        DistributedDataParallel,
        lambda body: fully_shard(body, mesh=mesh),
    ):
        torch.manual_seed(0)
        body = torch.nn.Linear(HIDDEN, HIDDEN).to(device)
        rows = part_of(matrix, sizes, 0).clone().requires_grad_()
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
        close(loss, truth)
        close(grad, expected[0])
        close(d_rows, part_of(expected[1], sizes, 0))


CHECKS = (
    check_cross_entropy,
    check_linear,
    check_corners,
    check_token_stats,
    check_bad_arguments,
    check_dtensor,
    check_what_a_dtensor_brings,
    check_wrappers,
    check_uneven_batch,
    check_what_is_on_its_way,
    check_compile,
    check_kernels_that_wait,
)


def fail_alone(device: torch.device) -> None:
    """The last rank raises before it takes part; the others hear of it within the time-out."""
    logits, target = (
        torch.zeros(2, 3, device=device, requires_grad=True),
        torch.zeros(2, dtype=torch.int64, device=device),
    )
    assert parallel.cross_entropy(logits, target).isfinite()
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("this rank has had enough")
    assert parallel.cross_entropy(
        logits, target
    ).isnan()  # of kernels that waited; by a gather it raises
    parallel.cross_entropy(logits, target)


def main(rank: int, world: int, store: str, kind: str, what: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=6 if what == "fail" else 120)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    for check in (fail_alone,) if what == "fail" else CHECKS:
        check(device)
        print(f"rank {rank}: {check.__name__} passed", flush=True)
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
