"""Memory in which the GPUs of one host leave words for one another while their kernels run, over PyTorch's symmetric memory."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
import warnings
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    Store,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed.distributed_c10d import _get_process_group_store

from ...runtime.autograd import is_capturing, plain_eager

FEWEST_WORDS = 2**17
SPINS_A_SECOND = 2 * 10**6  # of a program that waits: some more on an H200
PATIENCE = 600.0  # seconds, where the group has no time-out


class Boxes(NamedTuple):
    """Of a group, on this rank: two sets of words, one in use and one that is zeroed for the next call.

    Fields:
        words: int64, as many in each.
        peers: `[world]` int64 each, where the ranks have them.
        given_up: `[1]` int64, not 0 for good once a program of this rank has given up: words may come late from then on.
        failed: `[1]` int32 on the host, which the device writes then.
        limit: how often a program looks for what others leave before it gives up.
        handles: what keeps the memory.
    """

    words: tuple[Tensor, Tensor]
    peers: tuple[Tensor, Tensor]
    given_up: Tensor
    failed: Tensor
    limit: int
    handles: Any


class Numbered(Store):
    """A store in whose keys, `name/number/rank`, the numbers count those of one meeting. Symmetric memory numbers by all that a process has met in any
    group, so ranks with other histories would wait for ever (https://github.com/pytorch/pytorch/issues/196082)."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store, self.numbers = store, dict[str, dict[str, int]]()

    def _key(self, key: str) -> str:
        if key.count("/") < 2:
            return key
        name, number, rank = key.rsplit("/", 2)
        seen = self.numbers.setdefault(name, {})
        return f"{name}/{seen.setdefault(number, len(seen))}/{rank}"

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


class _State:
    """What a group has, and whose turn it is."""

    def __init__(self, group: ProcessGroup, boxes: Boxes | None) -> None:
        self.group, self.boxes, self.calls = weakref.ref(group), boxes, 0
        self.stream: torch.cuda.Stream | None = None


_states: dict[tuple[str, torch.device], _State] = {}


def wanted(tensor: Tensor) -> bool:
    """Whether kernels of several ranks may wait for one another here: in eager code, on GPUs of NVIDIA, unless `PARTITA_PEERS=0`."""
    setting = os.environ.get("PARTITA_PEERS", "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"PARTITA_PEERS: expected 0, 1 or nothing, got {setting!r}")
    return (
        setting != "0"
        and tensor.is_cuda
        and torch.version.hip is None
        and plain_eager()
        and not is_capturing(tensor)
    )


def _agreed(good: bool, group: ProcessGroup, device: torch.device) -> bool:
    """Whether it is so on all ranks."""
    found = torch.tensor([int(good)], device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN, group)
    return bool(found.item())


@contextlib.contextmanager
def _alias(group: ProcessGroup, token: str) -> Iterator[Any]:
    """The name of a group of the same ranks for one meeting, with a store of its own."""
    store = Numbered(PrefixStore(f"partita-{token}", _get_process_group_store(group)))
    name: Any = f"partita-{token}"
    alias = ProcessGroup(
        store, dist.get_rank(group), dist.get_world_size(group)
    )  # of which, as of its store, PyTorch keeps no reference
    _register_process_group(name, alias)
    try:
        yield name
    finally:
        _unregister_process_group(name)


def _shared(group: ProcessGroup, device: torch.device, words: int, token: str) -> Boxes:
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(2 * words, dtype=torch.int64, device=device).zero_()
    with _alias(group, token) as name:
        handle = symmetric.rendezvous(memory, name)
    starts = [
        handle.get_buffer(rank, [2 * words], torch.int64).data_ptr()
        for rank in range(dist.get_world_size(group))
    ]
    if memory.data_ptr() not in starts:
        raise RuntimeError("the handle is of other memory than was asked for")
    peers = torch.tensor([starts, [start + 8 * words for start in starts]]).to(device)
    given_up, failed = (
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int32).pin_memory(),
    )
    return Boxes(
        (memory[:words], memory[words:]),
        (peers[0], peers[1].clone()),
        given_up,
        failed,
        patience(group, device),
        handle,
    )


def _made(group: ProcessGroup, device: torch.device, words: int) -> Boxes | None:
    """New memory on all ranks, or None on all of them where they do not share a host, or PyTorch cannot share its memory."""
    met: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(met, (socket.gethostname(), uuid.uuid4().hex), group)
    if len({host for host, _ in met}) > 1:
        return None
    boxes = why = None
    try:
        with torch.inference_mode(False):
            boxes = _shared(group, device, words, met[0][1])
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        why = error
    agreed = _agreed(boxes is not None, group, device)
    if why is not None:
        warnings.warn(
            f"partita.parallel: the GPUs do not share memory, so their statistics are gathered: {why}",
            stacklevel=2,
        )
    return boxes if agreed else None


def patience(group: ProcessGroup, device: torch.device) -> int:
    """How often a program looks for what others leave before it gives up: for as long as the group waits."""
    seconds = PATIENCE
    with contextlib.suppress(AttributeError, RuntimeError):
        seconds = group._get_backend(device).options._timeout.total_seconds()
    return int(seconds * SPINS_A_SECOND)


def boxes_for(
    group: ProcessGroup, device: torch.device, words: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, int] | None:
    """Zeroed words, where each rank has them, the two flags, and the patience, for one call of all ranks; None where there can be none."""
    key = (group.group_name, device)
    state = _states.get(key)
    if (
        state is None
        or state.group() is not group
        or (state.boxes is not None and state.boxes.words[0].shape[0] < words)
    ):
        _states[key] = state = _State(
            group, _made(group, device, max(FEWEST_WORDS, 1 << (words - 1).bit_length()))
        )
    if (boxes := state.boxes) is None:
        return None
    check(boxes.failed)
    stream = torch.cuda.current_stream(device)
    if state.stream is not None and state.stream != stream:
        stream.wait_stream(state.stream)
    state.stream = stream
    turn, state.calls = state.calls % 2, state.calls + 1
    boxes.words[
        1 - turn
    ].zero_()  # the call before used them, and none of its programs is left anywhere
    return boxes.words[turn], boxes.peers[turn], boxes.given_up, boxes.failed, boxes.limit


def check(failed: Tensor) -> None:
    if failed.item():
        raise RuntimeError(
            "partita.parallel: a rank did not come to the loss within the time-out of its group, or came with other rows or classes, "
            "so the loss of the others is NaN"
        )
