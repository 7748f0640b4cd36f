"""Ops that the C module records and replays with a driver of host memory."""

import struct
from collections.abc import Callable
from typing import Any

import torch
from helpers.fake_driver import FakeDriver, floats
from torch import Tensor

from partita.runtime import recording
from partita.runtime.recording import Recorder


def scale_kernel(programs: int, source: int, result: int, size: int, factor: int) -> None:
    """Add factor times the source to the result."""
    value = struct.unpack("<f", struct.pack("<I", factor))[0]
    floats(result, size).add_(value * floats(source, size))


class Ops:
    """Ops in terms of one kernel, recorded and replayed as `register.Op` does it."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        parameters = ((0, "p"), (1, "p"), (2, "i"), (3, "f"))
        self.scale = self.driver.kernel(scale_kernel, *parameters)
        self.programs: dict[bytes, Any] = {}
        self.replay = self.driver.module.Replay(self.programs, 0)

    def launch(self, *args: Any) -> None:
        found = self.driver.module.launch(self.kernels, scale_kernel, 3, args, {})
        if isinstance(found, bytes):
            self.kernels[found] = self.scale
            found = self.driver.module.launch(self.kernels, scale_kernel, 3, args, {})
        assert found is self.scale
        if (active := recording.thread.recorder) is not None:
            active.launch(found, 3, args)

    kernels: dict[bytes, Any]

    def record(self, op: Callable[..., Any], *args: Any) -> Recorder:
        """Run the op under a recorder, and store its program if there is one."""
        self.kernels = {}
        key = self.replay(*args)
        assert isinstance(key, bytes)
        with Recorder(args) as recorder:
            result = op(*args)
        program = recorder.program(self.driver.module, result, lambda: None)
        if program is not None:
            self.programs[key] = program
        return recorder


def aligned(*shape: int) -> Tensor:
    """Return random numbers at an address with an alignment of 128 bytes."""
    memory = torch.randn(32 + torch.Size(shape).numel())
    start = -memory.data_ptr() // 4 % 32
    return memory[start:][: torch.Size(shape).numel()].view(shape)
