"""Calls of plain eager mode that the C module serves on the CPU, with a driver of host memory."""

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.fake_driver import FakeDriver
from torch import Tensor

from partita.ops.ctc_crf import api as ctc_crf_api
from partita.runtime import caches, launcher, private_names
from partita.runtime.register import Op


def disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what connected the C module with ops, for the present test."""
    modules = [module for name, module in sys.modules.items() if name.startswith("partita.ops.")]
    for op in {id(x): x for module in modules for x in vars(module).values()}.values():
        if isinstance(op, Op):
            monkeypatch.setattr(op, "_replay", None)


def as_bytes(tensor: Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def maker(like: Tensor) -> Callable[[int], Tensor]:
    """Return a function of an address that returns the tensor there, which lies as another does."""
    size, stride, dtype, nbytes = like.shape, like.stride(), like.dtype, as_bytes(like)

    def make(address: int) -> Tensor:
        if not nbytes:
            return torch.empty(size, dtype=dtype)
        memory = (ctypes.c_char * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(size, stride)

    return make


def aligned(result: Tensor) -> Tensor:
    """Return a copy in memory of PyTorch's, which has the alignment of a replay's results."""
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype).copy_(result)


class Served:
    """Lets the C module serve ops on the CPU.

    The program of a call is one launch of the function that serves the op on the CPU, which reads
    the arguments and writes the results where the program says. `recorded` has the name of the op
    of each call that Python served, and `replayed` that of each program that ran.
    """

    def __init__(self, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = driver
        self.recorded: list[str] = []
        self.replayed: list[str] = []
        disconnect(monkeypatch)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.Tensor, "is_cpu", False)
        monkeypatch.setattr(private_names, "current_device", lambda: None)
        monkeypatch.setattr(private_names, "current_raw_stream", lambda index: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        tables = functools.cache(lambda make, *args, device: make(*args, device=device))
        monkeypatch.setattr(ctc_crf_api, "constant", tables)  # as on a GPU
        monkeypatch.setattr(launcher, "module", lambda: driver.module)
        monkeypatch.setattr(Op, "_record", lambda op, *call: self.record(op, *call))
        caches.clear_caches()

    def record(self, op: Op, key: bytes, args: tuple[Any, ...]) -> Any:
        """Run an op, and store a program for calls with this key."""
        name = op.dispatched.name().removeprefix("partita::")
        self.recorded.append(name)
        found = op.run(*args)
        given = (found,) if isinstance(found, Tensor) else found or ()
        results = tuple(map(aligned, given))
        tensors = {i: maker(arg) for i, arg in enumerate(args) if isinstance(arg, Tensor)}
        outputs = [maker(result) for result in results]

        def kernel(programs: int, *addresses: int) -> None:
            self.replayed.append(name)
            given = list(args)
            for (i, make), address in zip(tensors.items(), addresses, strict=False):
                given[i] = make(address)
            found = op.run(*given)
            new = (found,) if isinstance(found, Tensor) else found or ()
            for make, address, result in zip(outputs, addresses[len(tensors) :], new, strict=True):
                make(address).copy_(result)

        constants = {i: None if i in tensors else arg for i, arg in enumerate(args)}
        args = tuple(constants.values())  # the program holds no tensor
        parameters = tuple((i, "p") for i in range(len(tensors) + len(outputs)))
        bound = self.driver.kernel(kernel, *parameters)
        function, threads, shared, _ = bound.description
        slots = (*tensors, *range(len(args), len(args) + len(outputs)))
        cells = tuple((slot, 0) for slot in slots)
        specs = tuple((tuple(result.shape), result.stride(), result.dtype) for result in results)
        several = None if found is None else list(range(len(outputs)))
        entries = 0 if isinstance(found, Tensor) else several
        steps = ((0, function, 1, threads, shared, 0, cells),)
        program = self.driver.module.Program(len(args), specs, entries, steps, bound)
        op.programs.store(key, program)
        if found is None:
            return None
        return results[0] if isinstance(found, Tensor) else results
