"""The memory that GPUs of one host share, and when their kernels may use it."""

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from helpers.catalogue import one_rank

from partita.ops.vocab_parallel import symmetric_memory
from partita.ops.vocab_parallel.autograd import matmul_during_collective


def test_rendezvous_of_ranks_with_other_histories() -> None:
    """The keys of symmetric memory are numbered by the exchanges of one rendezvous, in C++ too."""
    shared = dist.HashStore()
    stores = [symmetric_memory.RenumberedStore(shared) for _ in range(2)]
    ranks = [dist.PrefixStore("group", store) for store in stores]
    previous_exchanges = (7, 0)  # of each process, in other groups
    for exchange in range(2):
        for rank, first in enumerate(previous_exchanges):
            ranks[rank].set(f"CUDA/{first + exchange}/{rank}", f"{rank} in {exchange}")
        for rank, first in enumerate(previous_exchanges):
            key, value = f"CUDA/{first + exchange}/{1 - rank}", f"{1 - rank} in {exchange}".encode()
            ranks[rank].wait([key])
            ranks[rank].wait([key], datetime.timedelta(seconds=1))
            assert ranks[rank].get(key) == value
            assert ranks[rank].multi_get([key, key]) == 2 * [value]
    if hasattr(dist.Store, "barrier"):

        def barrier(rank: int, number: int) -> None:
            stores[rank].barrier(f"CUDA/{number}", 2, datetime.timedelta(seconds=20))

        with ThreadPoolExecutor(2) as pool:  # C++ calls `add` here
            list(pool.map(barrier, (0, 1), (9, 2)))
    ranks[0].set("else", "anything")
    assert ranks[1].get("else") == b"anything"
    with pytest.raises(dist.DistStoreError):
        ranks[0].wait(["CUDA/9/1"], datetime.timedelta(milliseconds=10))


def test_a_group_for_one_rendezvous() -> None:
    with one_rank("cpu"):
        for _ in range(2):
            with symmetric_memory._rendezvous_group(dist.group.WORLD, "token") as name:
                group = dist.distributed_c10d._resolve_process_group(name)
                store = group.get_group_store()
                store.set("CUDA/3/0", "value")
                assert (group.rank(), group.size(), store.get("CUDA/3/0")) == (0, 1, b"value")
            with pytest.raises(RuntimeError):
                dist.distributed_c10d._resolve_process_group(name)
        with pytest.warns(
            UserWarning, match="the GPUs do not share memory, so their statistics are gathered"
        ):
            assert symmetric_memory.allocate(dist.group.WORLD, torch.device("cpu"), 8) is None


@pytest.mark.parametrize("classes", [0, 511, 512, 600])
def test_a_product_in_two_parts(classes: int) -> None:
    a, b = torch.randn(7, classes + 40)[:, :classes], torch.randn(7, 5)
    torch.testing.assert_close(matmul_during_collective(a.T, b), a.T @ b)


def test_where_kernels_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not symmetric_memory.may_share_memory(torch.zeros(2))
    monkeypatch.setenv("PARTITA_PEERS", "yes")
    with pytest.raises(ValueError, match="PARTITA_PEERS: expected 0, 1 or nothing, got 'yes'"):
        symmetric_memory.may_share_memory(torch.zeros(2))
