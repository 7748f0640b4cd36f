"""Memory in which the GPUs of one host leave words for one another while their kernels run, over PyTorch's symmetric memory."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._autograd import capturing, plain_eager

FEWEST_WORDS = 2**17
SPINS_A_SECOND = 2 * 10**6  # of a program that waits: some more on an H200
PATIENCE = 600.0  # seconds, where the group has no time-out


class Boxes(NamedTuple):
    """Of a group, on this rank: two sets of words, one in use and one that is zeroed for the next call.

    Fields:
        words: int64, as many in each.
        peers: `[world]` int64 each, where the ranks have them.
        failed: `[1]` int32 on the host, which the device writes: a rank did not come.
        handles: what keeps the memory.
    """

    words: tuple[Tensor, Tensor]
    peers: tuple[Tensor, Tensor]
    failed: Tensor
    handles: Any


class _State:
    """What a group has, and whose turn it is."""

    def __init__(self, group: dist.ProcessGroup, boxes: Boxes | None) -> None:
        self.group, self.boxes, self.calls = weakref.ref(group), boxes, 0
        self.stream: torch.cuda.Stream | None = None


_states: dict[tuple[str, torch.device], _State] = {}


def wanted(tensor: Tensor) -> bool:
    """Whether kernels of several ranks may wait for one another here: in eager code, on GPUs of NVIDIA, unless `PARTITA_PEERS=0`."""
    setting = os.environ.get("PARTITA_PEERS", "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"PARTITA_PEERS: expected 0, 1 or nothing, got {setting!r}")
    return setting != "0" and tensor.is_cuda and torch.version.hip is None and plain_eager() and not capturing(tensor)


def _agreed(good: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether it is so on all ranks."""
    found = torch.tensor([int(good)], device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN, group)
    return bool(found.item())


def _made(group: dist.ProcessGroup, device: torch.device, words: int) -> Boxes | None:
    """New memory on all ranks, or None on all of them where they do not share a host, or PyTorch cannot share its memory."""
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group)
    if len(set(hosts)) > 1:
        return None
    boxes = None
    with contextlib.suppress(ImportError, AttributeError, RuntimeError, TypeError), torch.inference_mode(False):
        import torch.distributed._symmetric_memory as symmetric

        memory = symmetric.empty(2 * words, dtype=torch.int64, device=device).zero_()
        handle = symmetric.rendezvous(memory, group)
        starts = [handle.get_buffer(rank, [2 * words], torch.int64).data_ptr() for rank in range(len(hosts))]
        if memory.data_ptr() not in starts:
            raise RuntimeError("the handle is of other memory than was asked for")
        peers = torch.tensor([starts, [start + 8 * words for start in starts]]).to(device)
        failed = torch.zeros(1, dtype=torch.int32).pin_memory()
        boxes = Boxes((memory[:words], memory[words:]), (peers[0], peers[1].clone()), failed, handle)
    return boxes if _agreed(boxes is not None, group, device) else None


def patience(group: dist.ProcessGroup, device: torch.device) -> int:
    """How often a program looks for what others leave before it gives up: for as long as the group waits."""
    seconds = PATIENCE
    with contextlib.suppress(AttributeError, RuntimeError):
        seconds = group._get_backend(device).options._timeout.total_seconds()
    return int(seconds * SPINS_A_SECOND)


def boxes_for(group: dist.ProcessGroup, device: torch.device, words: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Zeroed words, where each rank has them, and the flag of failure, for one call of all ranks; None where there can be none."""
    key = (group.group_name, device)
    state = _states.get(key)
    if state is None or state.group() is not group or (state.boxes is not None and state.boxes.words[0].shape[0] < words):
        _states[key] = state = _State(group, _made(group, device, max(FEWEST_WORDS, 1 << (words - 1).bit_length())))
    if state.boxes is None:
        return None
    check(state.boxes.failed)
    stream = torch.cuda.current_stream(device)
    if state.stream is not None and state.stream != stream:
        stream.wait_stream(state.stream)
    state.stream = stream
    turn, state.calls = state.calls % 2, state.calls + 1
    state.boxes.words[1 - turn].zero_()  # the call before used them, and none of its programs is left anywhere
    return state.boxes.words[turn], state.boxes.peers[turn], state.boxes.failed


def check(failed: Tensor) -> None:
    if failed.item():
        raise RuntimeError("partita.parallel: a rank did not come to the loss within the time-out of its group, so the loss of the others is NaN")
