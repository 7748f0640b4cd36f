"""Memory in which the kernels of the GPUs of one host exchange numbers while they run.

The memory is PyTorch's symmetric memory: every GPU of the group can write to that of every other.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store

from ...runtime import checks, private_names
from ...runtime.autograd import is_capturing, plain_eager
from .gpu.plan import RankMemory

MIN_SLOTS = 2**17
POLLS_PER_SECOND = 2 * 10**6  # a lower bound for a program that waits on an H200
DEFAULT_TIMEOUT_S = 600.0  # where the group has no timeout


@dataclass
class SharedSlots:
    """The slots of a group on this rank: a set in use, and one cleared for the next call."""

    slots: tuple[Tensor, Tensor]  # [slots] int64 each
    peers: tuple[Tensor, Tensor]  # [world] int64 each, the addresses of a set on every rank
    timed_out: Tensor  # [1] int64. It stays set, because slots may be written late after a timeout.
    failed: Tensor  # [1] int32 on the host; the device writes it when a program times out
    max_polls: int  # how often a program reads its slots before it times out
    handle: Any  # the object that owns the shared memory
    calls: int = 0  # the number of calls that have used the slots
    stream: torch.cuda.Stream | None = None  # the stream of the latest call

    def memory_of_next_call(self, device: torch.device) -> RankMemory:
        """Return the memory of the next call, which all ranks make.

        Raises:
            RuntimeError: an earlier call of this rank timed out.
        """
        raise_if_failed(self.failed)
        stream = torch.cuda.current_stream(device)
        if self.stream is not None and self.stream != stream:
            stream.wait_stream(self.stream)
        self.stream = stream
        index = self.calls % 2
        self.calls += 1
        # The previous call used the other set. Its kernel waited for all that the ranks store
        # there, so nothing reads or writes that set before the next call.
        self.slots[1 - index].zero_()
        return RankMemory(self.slots[index], self.peers[index], self.timed_out, self.failed)


class RenumberedStore(Store):
    """A store that numbers the keys `name/number/rank` by the exchanges of one rendezvous.

    Symmetric memory numbers its keys by all exchanges that a process has made in any group, so
    ranks with other histories would wait for each other forever
    (https://github.com/pytorch/pytorch/issues/196082).
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.numbers = dict[str, dict[str, int]]()

    def _key(self, key: str) -> str:
        if key.count("/") < 2:
            return key
        name, number, rank = key.rsplit("/", 2)
        numbers = self.numbers.setdefault(name, {})
        return f"{name}/{numbers.setdefault(number, len(numbers))}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self.store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self.store.get(self._key(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self.store.multi_get([self._key(key) for key in keys])

    def add(self, key: str, value: int) -> int:
        return self.store.add(self._key(key), value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.store.wait([self._key(key) for key in keys], *(() if timeout is None else (timeout,)))


# The ranks of a group make this state together, so it is no cache that one rank may empty. It is
# None for a group whose ranks share no memory.
_group_slots: dict[
    tuple[str, torch.device], tuple[weakref.ref[ProcessGroup], SharedSlots | None]
] = {}


def may_share_memory(tensor: Tensor) -> bool:
    """Return whether kernels of several ranks may wait for each other in this call.

    They may in eager code on NVIDIA GPUs, unless `PARTITA_PEERS=0`.
    """
    return (
        checks.variable("PARTITA_PEERS") is not False
        and private_names.CAN_SHARE_MEMORY
        and tensor.is_cuda
        and torch.version.hip is None
        and plain_eager()
        and not is_capturing(tensor)
    )


@contextlib.contextmanager
def _rendezvous_group(group: ProcessGroup, token: str) -> Iterator[Any]:
    """Register a group of the same ranks with a store of its own, and yield its name."""
    store = private_names.process_group_store(group)
    store = RenumberedStore(PrefixStore(f"partita-{token}", store))
    name: Any = f"partita-{token}"
    # PyTorch holds no reference to the group or its store, so this frame has to.
    temporary = ProcessGroup(store, dist.get_rank(group), dist.get_world_size(group))
    private_names.register_process_group(name, temporary)
    try:
        yield name
    finally:
        private_names.unregister_process_group(name)


def _rendezvous(group: ProcessGroup, device: torch.device, slots: int, token: str) -> SharedSlots:
    """Allocate two sets of slots, and exchange their addresses with the other ranks."""
    symmetric = private_names.symmetric_memory()
    memory = symmetric.empty(2 * slots, dtype=torch.int64, device=device).zero_()
    with _rendezvous_group(group, token) as name:
        handle = symmetric.rendezvous(memory, name)
    addresses = [
        handle.get_buffer(rank, [2 * slots], torch.int64).data_ptr()
        for rank in range(dist.get_world_size(group))
    ]
    if memory.data_ptr() not in addresses:
        raise RuntimeError("the handle refers to other memory than was allocated")
    second_addresses = [address + 8 * slots for address in addresses]
    peers = torch.tensor([addresses, second_addresses]).to(device)
    seconds = private_names.timeout_of(group, device) or DEFAULT_TIMEOUT_S
    return SharedSlots(
        slots=(memory[:slots], memory[slots:]),
        peers=(peers[0], peers[1].clone()),
        timed_out=torch.zeros(1, dtype=torch.int64, device=device),
        failed=torch.zeros(1, dtype=torch.int32).pin_memory(),
        max_polls=int(seconds * POLLS_PER_SECOND),
        handle=handle,
    )


def allocate(group: ProcessGroup, device: torch.device, slots: int) -> SharedSlots | None:
    """Allocate slots on all ranks.

    Returns None on all ranks if they do not share a host or PyTorch cannot share their memory.
    """
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, (socket.gethostname(), uuid.uuid4().hex), group)
    if len({host for host, _ in hosts}) > 1:
        return None
    shared = failure = None
    try:
        with torch.inference_mode(False):
            shared = _rendezvous(group, device, slots, token=hosts[0][1])
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        failure = error
    agreed = torch.tensor([int(shared is not None)], device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group)
    if failure is not None:
        warnings.warn(
            "partita.parallel: the GPUs do not share memory, so their statistics are gathered:"
            f" {failure}",
            stacklevel=2,
        )
    return shared if agreed.item() else None


def shared_slots(group: ProcessGroup, device: torch.device, slots: int) -> SharedSlots | None:
    """Return the slots of a group on this rank, or None on all ranks if they share no memory."""
    key = (group.group_name, device)
    known, shared = _group_slots.get(key, (None, None))
    is_known = known is not None and known() is group
    if not is_known or (shared is not None and shared.slots[0].shape[0] < slots):
        shared = allocate(group, device, max(MIN_SLOTS, 1 << (slots - 1).bit_length()))
        _group_slots[key] = weakref.ref(group), shared
    return shared


def raise_if_failed(failed: Tensor) -> None:
    """Raise if a program of this rank has timed out in an earlier call."""
    if failed.item():
        raise RuntimeError(
            "partita.parallel: a rank did not reach the loss within the timeout of its group, or"
            " called it with other rows or classes, so the loss of the others is NaN"
        )
