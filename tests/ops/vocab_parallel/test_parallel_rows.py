"""The kernel in which ranks wait for each other, with all ranks on one device.

The memory of the ranks is that of the device. They run one after another, or on streams of their
own.
"""

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers.rows import KERNEL_DEVICES, kernel_devices

from partita.ops.cross_entropy.common import LossOptions
from partita.ops.vocab_parallel.gpu.plan import RankMemory, slot_count
from partita.ops.vocab_parallel.symmetric_memory import raise_if_failed
from partita.testing import poisoned_memory

kernels = pytest.importorskip("partita.ops.vocab_parallel.gpu.launch")

IGNORED = -100
MAX_POLLS = 10**7  # how often a program reads its slots before a test fails


class Memory(NamedTuple):
    """The memory of all ranks.

    Fields:
        slots: the slots of each rank, int64.
        peers: the addresses of these slots, `[world]` int64.
        timed_out: the flag of each rank that a program has timed out, `[1]` int64.
        failed: the flag on the host, `[1]` int32.
    """

    slots: list[torch.Tensor]
    peers: torch.Tensor
    timed_out: list[torch.Tensor]
    failed: torch.Tensor

    def clear_flags(self) -> None:
        self.failed.zero_()
        for flag in self.timed_out:
            flag.zero_()


def memory_for(rows: int, sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> Memory:
    slots_needed = slot_count(rows, sizes, dtype.itemsize)
    slots = [torch.zeros(slots_needed, dtype=torch.int64, device=device) for _ in sizes]
    peers = torch.tensor([tensor.data_ptr() for tensor in slots], device=device)
    timed_out = [torch.zeros(1, dtype=torch.int64, device=device) for _ in sizes]
    failed = torch.zeros(1, dtype=torch.int32)
    return Memory(slots, peers, timed_out, failed.pin_memory() if device == "cuda" else failed)


class Batch(NamedTuple):
    """A batch of all ranks: logits `[N, C]`, labels `[N]`, and the options of the loss."""

    logits: torch.Tensor
    target: torch.Tensor
    sizes: tuple[int, ...]
    softcap: float
    z_loss: float
    mean: bool

    @property
    def parts(self) -> list[torch.Tensor]:
        return list(self.logits.split(self.sizes, 1))


def run_rank(
    x: Batch, rank: int, memory: Memory, max_polls: int, sizes: tuple[int, ...] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the gradient of one rank."""
    options = LossOptions(IGNORED, 0.0, x.softcap, x.z_loss, "mean" if x.mean else "sum")
    tensors = (memory.slots[rank], memory.peers, memory.timed_out[rank], memory.failed)
    rest = (RankMemory(*tensors), max_polls, sizes or x.sizes, rank, options)
    with poisoned_memory():
        return kernels.parallel_one_pass(x.parts[rank], x.target, *rest)


def one_after_another(x: Batch, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Let each rank store its numbers and time out, then run all ranks with all slots filled."""
    memory = memory_for(len(x.logits), x.sizes, x.logits.dtype, device)
    for rank in range(len(x.sizes)):
        run_rank(x, rank, memory, 0)
    memory.clear_flags()
    return [run_rank(x, rank, memory, 1) for rank in range(len(x.sizes))]


def concurrently(x: Batch, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run each rank on a stream of its own."""
    memory, results = memory_for(len(x.logits), x.sizes, x.logits.dtype, device), []
    for rank in range(len(x.sizes)):
        with torch.cuda.stream(torch.cuda.Stream()):
            results.append(run_rank(x, rank, memory, MAX_POLLS))
    torch.cuda.synchronize()
    assert not memory.failed.item()
    return results


def random_batch(
    rows: int,
    sizes: tuple[int, ...],
    device: str,
    dtype: torch.dtype = torch.float32,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    mean: bool = True,
) -> Batch:
    """Return rows that start at any address.

    The first row is ignored. The second is -inf but for its label's class, unless there is a
    soft-cap.
    """
    g = torch.Generator().manual_seed(rows + sum(sizes))
    logits = (3 * torch.randn(rows, sum(sizes), generator=g)).to(dtype)
    target = torch.randint(sum(sizes), (rows,), generator=g)
    if not softcap:
        logits[1] = logits[1].where(torch.arange(sum(sizes)) == target[1], -torch.inf)
    target[0] = IGNORED
    return Batch(logits.to(device), target.to(device), sizes, softcap, z_loss, mean)


def assert_correct(x: Batch, results: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Compare the results of all ranks with fp64; the loss has the same bits on all ranks."""
    leaf = x.logits.double().requires_grad_()
    capped = x.softcap * torch.tanh(leaf / x.softcap) if x.softcap else leaf
    losses = F.cross_entropy(capped, x.target, reduction="none", ignore_index=IGNORED)
    if x.z_loss:
        losses = losses + x.z_loss * capped.logsumexp(1).square() * (x.target != IGNORED)
    truth = losses.sum() / ((x.target != IGNORED).sum() if x.mean else 1)
    (expected,) = torch.autograd.grad(truth, leaf)
    assert all(torch.equal(loss, results[0][0]) for loss, _ in results)
    torch.testing.assert_close(results[0][0].double(), truth, rtol=2e-6, atol=1e-6)
    epsilon = torch.finfo(x.logits.dtype).eps
    torch.testing.assert_close(
        torch.cat([grad for _, grad in results], 1).double(),
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
def test_one_after_another(
    rows: int, sizes: tuple[int, ...], options: dict[str, float], device: str
) -> None:
    # The interpreter truncates what it stores in bf16.
    dtypes = (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        x = random_batch(rows, sizes, device, dtype, **options)
        assert_correct(x, one_after_another(x, device))
        plain = x._replace(logits=x.logits.contiguous())
        assert_correct(plain, one_after_another(plain, device))


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(8, (65_536, 65_536)), (16, (25_129, 25_128)), (7, (131_072, 3)), (20, (16_384,) * 4)],
    ids=str,
)
def test_concurrently(rows: int, sizes: tuple[int, ...], device: str) -> None:
    """The sizes are such that the programs of all ranks fit on the device together.

    A second run gives the same bits. The ranks run one after another first, because loading a
    kernel would wait for a kernel that waits.
    """
    for dtype in (torch.float32, torch.bfloat16):
        x = random_batch(rows, sizes, device, dtype)
        assert_correct(x, one_after_another(x, device))
        first, second = concurrently(x, device), concurrently(x, device)
        assert_correct(x, first)
        assert all(
            torch.equal(a, b)
            for one, other in zip(first, second, strict=True)
            for a, b in zip(one, other, strict=True)
        )


@kernel_devices
def test_a_label_of_no_rank_makes_only_its_row_nan(device: str) -> None:
    x = random_batch(4, (30, 20), device, mean=False)
    x.target[2], x.target[3] = 50, -3
    results = one_after_another(x, device)
    assert all(loss.isnan() for loss, _ in results)
    assert all(grad[2:].isnan().all() and grad[:2].isfinite().all() for _, grad in results)


@kernel_devices
def test_a_missing_rank(device: str) -> None:
    """The loss of the other ranks is NaN, and their next call raises.

    A call that is queued already does not wait, and its loss is NaN even if the rank comes later.
    """
    x = random_batch(3, (30, 20), device)
    memory = memory_for(3, x.sizes, x.logits.dtype, device)
    loss, _ = run_rank(x, 0, memory, 3)
    assert loss.isnan() and memory.failed.item() == 1
    run_rank(x, 1, memory, 0)
    loss, _ = run_rank(x, 0, memory, 10**9)
    assert loss.isnan()
    with pytest.raises(RuntimeError, match="a rank did not reach the loss within the timeout"):
        raise_if_failed(memory.failed)


@kernel_devices
def test_ranks_that_disagree_on_the_number_of_classes(device: str) -> None:
    """The ranks do not wait for long, and the loss is NaN on both."""
    x = random_batch(3, (30, 20), device)
    memory = memory_for(3, x.sizes, x.logits.dtype, device)
    sizes = ((30, 30), (20, 20))
    for max_polls in (0, 1):
        memory.clear_flags()
        losses = [run_rank(x, rank, memory, max_polls, sizes[rank])[0] for rank in range(2)]
    assert all(math.isnan(loss) for loss in losses)


@kernel_devices
def test_ranks_with_other_rows(device: str) -> None:
    """A rank that notices other rows stops waiting at once."""
    three, two = random_batch(3, (30, 20), device), random_batch(2, (30, 20), device)
    memory = memory_for(3, three.sizes, three.logits.dtype, device)
    run_rank(three, 0, memory, 0)
    for x, rank in ((two, 1), (three, 0)):
        memory.clear_flags()
        loss, _ = run_rank(x, rank, memory, 10**9)
        assert loss.isnan() and memory.failed.item() == 1
    with pytest.raises(RuntimeError, match="or called it with other rows or classes"):
        raise_if_failed(memory.failed)
