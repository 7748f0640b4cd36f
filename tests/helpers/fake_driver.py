"""A driver of host memory: the C module's launches run Python functions on tensors of the CPU."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._C._dynamo import guards
from torch.utils._python_dispatch import _disable_current_modes

from partita.runtime import launcher

CPU = 1  # DLPack's number
INVALID_CONTEXT, INVALID_HANDLE = 201, 400  # the driver's
_integer, _pointer = ctypes.c_int, ctypes.c_void_p
_SIGNATURES = {
    "cuLaunchKernel": (_pointer, *[ctypes.c_uint] * 7, *[_pointer] * 3),
    "cuMemsetD32Async": (ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, _pointer),
    "cuEventRecord": (_pointer, _pointer),
    "cuStreamWaitEvent": (_pointer, _pointer, ctypes.c_uint),
    "cuCtxGetDevice": (ctypes.POINTER(_integer),),
    "cuDevicePrimaryCtxRetain": (_pointer, _integer),
    "cuCtxSetCurrent": (_pointer,),
    "cuGetErrorString": (_integer, ctypes.POINTER(ctypes.c_char_p)),
}


class FakeDriver:
    """Stands in for the driver of a GPU.

    Kernels are functions of (programs, cells), where cells are the parameters as 64-bit integers.
    `log` has the name of each call of the driver, `allocated` the size of each tensor that replays
    make, and `status` is what launches return. The allocation of the number `failing`, from 0 on,
    is out of memory.

    `device` is the driver's current device, None in a new thread, and `current` is PyTorch's. They
    differ after PyTorch went back to a device that has no context yet. All tensors, kernels and
    streams belong to device 0, and an allocation makes PyTorch's device the driver's.
    """

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.allocated: list[tuple[int, ...]] = []
        self.kernels: list[tuple[Callable[..., None], int]] = []
        self.status = 0
        self.failing: int | None = None
        self.device: int | None = 0
        self.current = 0
        chain = SimpleNamespace
        self.knobs = SimpleNamespace(
            launch_enter_hook=chain(calls=[]), launch_exit_hook=chain(calls=[])
        )
        self._callbacks = {
            name: ctypes.CFUNCTYPE(_integer, *types)(getattr(self, name))
            for name, types in _SIGNATURES.items()
        }
        self.addresses = {
            name: ctypes.cast(callback, _pointer).value or 0
            for name, callback in self._callbacks.items()
        }
        self.connect()

    def connect(self, exchange: Any = None, **addresses: int) -> None:
        """Build the C module and connect it, with another table or other addresses if given."""
        from triton.runtime import build

        compile_source = build.compile_module_from_src

        def compile_for_cpu(source: str, *args: Any, **options: Any) -> Any:
            # The CPU's allocator aligns to 64 bytes, that of a GPU to 512.
            source = source.replace("#define ALIGNMENT 127", "#define ALIGNMENT 63")
            return compile_source(source, *args, **options)

        with mock.patch.object(build, "compile_module_from_src", compile_for_cpu):
            self.module = launcher.build(
                torch.Tensor.__dlpack_c_exchange_api__ if exchange is None else exchange,
                *(self.knobs, {**self.addresses, **addresses}, self.allocate),
                *(lambda: self.current, CPU),
            )

    def allocate(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of host memory for a replay."""
        if len(self.allocated) == self.failing:
            raise torch.OutOfMemoryError("out of memory")
        self.allocated.append(size)
        self.device = self.current
        return guards._empty_strided_cpu(size, stride, dtype)

    def kernel(self, function: Callable[..., None], *parameters: tuple[int, str]) -> Any:
        """Return a bound kernel of the C module that runs a function of Python."""
        self.kernels.append((function, len(parameters)))
        return self.module.Kernel(len(self.kernels), 128, 16, parameters, function)

    def cuLaunchKernel(self, function: int, programs: int, *rest: Any) -> int:
        kernel, num_parameters = self.kernels[function - 1]
        threads, shared, stream, params = rest[2], rest[5], rest[6], rest[7]
        self.log.append(("launch", kernel.__name__, programs, threads, shared, stream))
        if self.device != 0:
            return INVALID_HANDLE
        if not self.status:
            cells = ctypes.cast(params, ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)))
            values = [cells[i][0] for i in range(num_parameters + 2)]
            assert values[num_parameters:] == [0, 0]  # no scratch memory
            with _disable_current_modes():  # a recorder sees the launch, not its arithmetic
                kernel(programs, *values[:num_parameters])
        return self.status

    def cuMemsetD32Async(self, address: int, pattern: int, words: int, stream: Any) -> int:
        self.log.append(("fill", pattern, words))
        (ctypes.c_uint32 * words).from_address(address)[:] = [pattern] * words
        return 0

    def cuEventRecord(self, event: int, stream: Any) -> int:
        self.log.append(("record", event, stream))
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: int, flags: int) -> int:
        self.log.append(("wait", event, stream))
        return 0

    def cuCtxGetDevice(self, device: Any) -> int:
        if self.device is None:
            return INVALID_CONTEXT
        device[0] = self.device
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        self.log.append(("retain", device))
        ctypes.cast(context, ctypes.POINTER(_pointer))[0] = device + 1
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.log.append(("set context",))
        self.device = context - 1
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text[0] = b"out of resources"
        return 0


def floats(address: int, size: int) -> torch.Tensor:
    """Return the fp32 tensor that lies at an address."""
    return torch.frombuffer((ctypes.c_float * size).from_address(address), dtype=torch.float32)
