"""The kernel in which ranks wait for one another, on one device: its memory is that of all, and the ranks run one after another, or on streams of their own."""

import datetime
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.rows import KERNEL_DEVICES, kernel_devices

from partita.ops.vocab_parallel import autograd as _parallel
from partita.ops.vocab_parallel import peers as _peers
from partita.testing import poisoned_memory

kernels = pytest.importorskip("partita.ops.vocab_parallel.gpu.one_pass")

IGNORED = -100
PATIENCE = 10**7  # looks for what others leave, before a test fails


class Memory(NamedTuple):
    """Of all ranks: the words of each, where these are, and the flags of each."""

    boxes: list[torch.Tensor]
    peers: torch.Tensor
    given_up: list[torch.Tensor]
    failed: torch.Tensor

    def forgive(self) -> None:
        self.failed.zero_()
        for flag in self.given_up:
            flag.zero_()


def memory_for(rows: int, sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> Memory:
    words = kernels.words_of(rows, sizes, dtype.itemsize)
    boxes = [torch.zeros(words, dtype=torch.int64, device=device) for _ in sizes]
    failed = torch.zeros(1, dtype=torch.int32)
    peers, given_up = (
        torch.tensor([box.data_ptr() for box in boxes], device=device),
        [torch.zeros(1, dtype=torch.int64, device=device) for _ in sizes],
    )
    return Memory(boxes, peers, given_up, failed.pin_memory() if device == "cuda" else failed)


class Batch(NamedTuple):
    logits: torch.Tensor
    target: torch.Tensor
    sizes: tuple[int, ...]
    softcap: float
    z_loss: float
    mean: bool

    @property
    def parts(self) -> list[torch.Tensor]:
        return list(self.logits.split(self.sizes, 1))


def rank_of(
    x: Batch, rank: int, memory: Memory, patience: int, sizes: tuple[int, ...] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    options = (
        memory.given_up[rank],
        memory.failed,
        patience,
        sizes or x.sizes,
        rank,
        IGNORED,
        x.softcap,
        x.z_loss,
        x.mean,
    )
    with poisoned_memory():
        return kernels.parallel_one_pass(
            x.parts[rank], x.target, memory.boxes[rank], memory.peers, *options
        )


def in_turn(x: Batch, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each leaves its words and gives up; then all is there for everyone."""
    memory = memory_for(len(x.logits), x.sizes, x.logits.dtype, device)
    for rank in range(len(x.sizes)):
        rank_of(x, rank, memory, 0)
    memory.forgive()
    return [rank_of(x, rank, memory, 1) for rank in range(len(x.sizes))]


def at_once(x: Batch, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    memory, found = memory_for(len(x.logits), x.sizes, x.logits.dtype, device), []
    for rank in range(len(x.sizes)):
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(rank_of(x, rank, memory, PATIENCE))
    torch.cuda.synchronize()
    assert not memory.failed.item()
    return found


def batch_of(
    rows: int,
    sizes: tuple[int, ...],
    device: str,
    dtype: torch.dtype = torch.float32,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    mean: bool = True,
) -> Batch:
    """Rows that start anywhere; the first is ignored, one of the others is -inf but for its label's class."""
    g = torch.Generator().manual_seed(rows + sum(sizes))
    logits, target = (
        (3 * torch.randn(rows, sum(sizes), generator=g)).to(dtype),
        torch.randint(sum(sizes), (rows,), generator=g),
    )
    if not softcap:
        logits[1] = logits[1].where(torch.arange(sum(sizes)) == target[1], -torch.inf)
    target[0] = IGNORED
    return Batch(logits.to(device), target.to(device), sizes, softcap, z_loss, mean)


def assert_right(x: Batch, found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Against fp64; the same loss on all ranks."""
    leaf = x.logits.double().requires_grad_()
    capped = x.softcap * torch.tanh(leaf / x.softcap) if x.softcap else leaf
    losses = F.cross_entropy(capped, x.target, reduction="none", ignore_index=IGNORED)
    if x.z_loss:
        losses = losses + x.z_loss * capped.logsumexp(1).square() * (x.target != IGNORED)
    truth = losses.sum() / ((x.target != IGNORED).sum() if x.mean else 1)
    (expected,) = torch.autograd.grad(truth, leaf)
    assert all(torch.equal(loss, found[0][0]) for loss, _ in found)
    torch.testing.assert_close(found[0][0].double(), truth, rtol=2e-6, atol=1e-6)
    epsilon = torch.finfo(x.logits.dtype).eps
    torch.testing.assert_close(
        torch.cat([grad for _, grad in found], 1).double(),
        expected,
        rtol=max(2e-5, epsilon),
        atol=max(1e-7, epsilon / 100),
    )


CASES = [
    (3, (40, 25), {}),
    (2, (2003, 1500, 7), {"mean": False}),
    (2, (9000, 8193), {"softcap": 5.0}),
    (2, (1000, 0), {"z_loss": 0.1}),
    (2, (600, 1100), {}),
]


@kernel_devices
@pytest.mark.parametrize(("rows", "sizes", "options"), CASES, ids=str)
def test_in_turn(rows: int, sizes: tuple[int, ...], options: dict[str, float], device: str) -> None:
    for dtype in (
        (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16)
    ):  # the interpreter truncates what it stores in bf16
        x = batch_of(rows, sizes, device, dtype, **options)
        assert_right(x, in_turn(x, device))
        plain = x._replace(logits=x.logits.contiguous())
        assert_right(plain, in_turn(plain, device))


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(8, (65_536, 65_536)), (16, (25_129, 25_128)), (7, (131_072, 3)), (20, (16_384,) * 4)],
    ids=str,
)
def test_at_once(rows: int, sizes: tuple[int, ...], device: str) -> None:
    """Few enough programs that those of all ranks are on the device together. Twice: the same bits. In turn first: loading a kernel would wait for one
    that waits."""
    for dtype in (torch.float32, torch.bfloat16):
        x = batch_of(rows, sizes, device, dtype)
        assert_right(x, in_turn(x, device))
        found, again = at_once(x, device), at_once(x, device)
        assert_right(x, found)
        assert all(
            torch.equal(a, b)
            for one, other in zip(found, again, strict=True)
            for a, b in zip(one, other, strict=True)
        )


@kernel_devices
def test_a_label_of_nobody_spoils_its_row_alone(device: str) -> None:
    x = batch_of(4, (30, 20), device, mean=False)
    x.target[2], x.target[3] = 50, -3
    found = in_turn(x, device)
    assert all(loss.isnan() for loss, _ in found)
    assert all(grad[2:].isnan().all() and grad[:2].isfinite().all() for _, grad in found)


@kernel_devices
def test_a_rank_that_does_not_come(device: str) -> None:
    """The others' loss is NaN, and who asks is told; a call that was on its way already waits for nothing, and its loss is NaN, whoever comes."""
    x = batch_of(3, (30, 20), device)
    memory = memory_for(3, x.sizes, x.logits.dtype, device)
    loss, _ = rank_of(x, 0, memory, 3)
    assert loss.isnan() and memory.failed.item() == 1
    rank_of(x, 1, memory, 0)
    loss, _ = rank_of(x, 0, memory, 10**9)
    assert loss.isnan()
    with pytest.raises(RuntimeError, match="a rank did not come to the loss within the time-out"):
        _peers.check(memory.failed)


@kernel_devices
def test_ranks_that_do_not_agree(device: str) -> None:
    """On how many classes there are: nobody waits for long, and the loss is NaN on both."""
    x = batch_of(3, (30, 20), device)
    memory = memory_for(3, x.sizes, x.logits.dtype, device)
    wrong = ((30, 30), (20, 20))
    for patience in (0, 1):
        memory.forgive()
        found = [rank_of(x, rank, memory, patience, wrong[rank])[0] for rank in range(2)]
    assert all(math.isnan(loss) for loss in found)


@kernel_devices
def test_ranks_that_bring_other_rows(device: str) -> None:
    """Who finds it out leaves at once, however patient."""
    many, few = batch_of(3, (30, 20), device), batch_of(2, (30, 20), device)
    memory = memory_for(3, many.sizes, many.logits.dtype, device)
    rank_of(many, 0, memory, 0)
    for x, rank in ((few, 1), (many, 0)):
        memory.forgive()
        loss, _ = rank_of(x, rank, memory, 10**9)
        assert loss.isnan() and memory.failed.item() == 1
    with pytest.raises(RuntimeError, match="or came with other rows or classes"):
        _peers.check(memory.failed)


def test_meetings_of_ranks_with_other_histories() -> None:
    """What PyTorch's symmetric memory writes into the store of a group is numbered by this group's meetings, also where C++ asks."""
    shared = dist.HashStore()
    stores = [_peers.Numbered(shared) for _ in range(2)]
    ranks = [dist.PrefixStore("group", store) for store in stores]
    for meeting in range(2):
        for rank, first in enumerate((7, 0)):  # how many exchanges this process has seen before
            ranks[rank].set(f"CUDA/{first + meeting}/{rank}", f"{rank} in {meeting}")
        for rank, first in enumerate((7, 0)):
            theirs = f"CUDA/{first + meeting}/{1 - rank}"
            ranks[rank].wait([theirs])
            ranks[rank].wait([theirs], datetime.timedelta(seconds=1))
            assert ranks[rank].get(theirs) == f"{1 - rank} in {meeting}".encode()
            assert ranks[rank].multi_get([theirs, theirs]) == 2 * [
                f"{1 - rank} in {meeting}".encode()
            ]
    if hasattr(dist.Store, "barrier"):
        with ThreadPoolExecutor(2) as pool:  # C++ counts by `add`
            list(
                pool.map(
                    lambda rank, number: stores[rank].barrier(
                        f"CUDA/{number}", 2, datetime.timedelta(seconds=20)
                    ),
                    (0, 1),
                    (9, 2),
                )
            )
    ranks[0].set("else", "anything")
    assert ranks[1].get("else") == b"anything"
    with pytest.raises(dist.DistStoreError):
        ranks[0].wait(["CUDA/9/1"], datetime.timedelta(milliseconds=10))


def test_a_group_for_one_meeting(tmp_path: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        for _ in range(2):
            with _peers._alias(dist.group.WORLD, "token") as name:
                found = dist.distributed_c10d._resolve_process_group(name)
                found.get_group_store().set("CUDA/3/0", "here")
                assert (found.rank(), found.size(), found.get_group_store().get("CUDA/3/0")) == (
                    0,
                    1,
                    b"here",
                )
            with pytest.raises(RuntimeError):
                dist.distributed_c10d._resolve_process_group(name)
        with pytest.warns(
            UserWarning, match="the GPUs do not share memory, so their statistics are gathered"
        ):
            assert _peers._made(dist.group.WORLD, torch.device("cpu"), 8) is None
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("classes", [0, 511, 512, 600])
def test_a_product_in_two_parts(classes: int) -> None:
    a, b = torch.randn(7, classes + 40)[:, :classes], torch.randn(7, 5)
    torch.testing.assert_close(_parallel._beside(a.T, b), a.T @ b)


def test_where_kernels_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _peers.wanted(torch.zeros(2))
    monkeypatch.setenv("PARTITA_PEERS", "yes")
    with pytest.raises(ValueError, match="PARTITA_PEERS: expected 0, 1 or nothing, got 'yes'"):
        _peers.wanted(torch.zeros(2))
